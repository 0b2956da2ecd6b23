"""How fast could speculative decoding be? The ladder of bounds of "Speculative Decoding: Performance or Illusion?" (Liu,
Yu, Park, Stoica, Cheung, arXiv 2601.11580), from two inputs that are files: accept traces and a cost table (traces.py).

Everything here is a *plan* for one request, a list of `Round`, and one function, `price`, that says what a plan costs.
A rung of the ladder is the price of its plan; speed-up is the price of `autoregressive` divided by it:

    L0 observed         wall clock, handed in             L5 optimum, one drafter     the exact bound
    L1 modelled         price(observed_rounds(steps))     L6 optimum, all drafters    each at its own price
    L2 best fixed k     for all requests together         L7 L6 with free drafters
    L3 best fixed k     for each request                  L8 optimum(perfect(..))     every draft accepted, same price
    L4 greedy           the paper's oracle, NOT a bound   L9 one_pass                 the ceiling of the cost model
    L10 analytic_curve  i.i.d. acceptance, its best k     L11 best_tree               L12 amdahl: one phase free at a time

Glossary, code <-> paper: rows B, requests in a batch; prompt_len P_r; n_out N; position p_r = i, output tokens that exist
when a round starts; kv C, tokens in the cache, of all rows; queries Q, tokens in a forward, of all rows; proposed j, drafts
of a round; accept[i] = a(i), accepted drafts + 1; emitted, tokens a round gains, bonus included; their mean is tau; verify
T_verify = c_kv C + c_q Q + c_0; draft T_draft; overhead T_ovh; alpha, chance that a draft is accepted; k gamma.

What differs from the paper, and why:
- The paper's oracle proposes at every position what is accepted there. That is greedy: a shorter round can land where the
  next one is longer. `optimum` is a dynamic program, the true least time over all lengths (and drafters).
- Its simulator reads accept[i - 1] at position i, charges a drafter that proposes nothing, and prices the winner of
  several drafters as an n-gram lookup. Here accept[i], no charge for not drafting, each drafter its own price;
  `as_published` plays their rules for comparison.
- Costs may be a measured grid: the linear model is pessimistic where a forward is bound by memory.
- Its batch is B copies of one request, and so is `rows` here. With linear costs, 1/rows of that time, summed over
  requests, also bounds from below what a batch of at most `rows` different requests needs.

All times are seconds. numpy only, no torch.
"""
import heapq
import math
from typing import NamedTuple

import numpy as np

from minispec.data.traces import Trace

# -- plans: who proposes how much, where --------------------------------------------------------------------------------

class Round(NamedTuple):
    """When `position` output tokens exist, drafter `name` (None: nobody) proposes `proposed`, and `emitted` are gained."""
    position: int
    name: str | None
    proposed: int
    emitted: int


class Price(NamedTuple):
    """A priced plan. phases: seconds of prefill, draft, verify (of emitted tokens), rejected (verifying the others),
    overhead; they sum to `time`. rounds, proposed, wasted (query tokens that gave nothing) are per row."""
    time: float
    phases: dict
    rounds: int
    proposed: int
    wasted: int


def price(plan, trace, cost, rows=1):
    """What a plan costs `rows` copies of the request in lock-step (paper: T_step summed over steps). Price, in seconds."""
    position, proposed, emitted = (np.array([r[i] for r in plan], int) for i in (0, 2, 3))
    names = np.array([r.name for r in plan], object)
    kv = rows * (trace.prompt_len + position)
    verify = cost.verify(kv, rows * (1 + proposed), rows)
    useful = cost.verify(kv, rows * np.minimum(emitted, 1 + proposed), rows)
    drafted = [name for name in names if name is not None]
    draft = cost.switch * sum(a != b for a, b in zip(drafted, drafted[1:]))
    for name in dict.fromkeys(drafted):
        draft += float(np.sum(cost.draft(name, kv[names == name], proposed[names == name], rows)))
    phases = {"prefill": float(cost.prefill(trace.prompt_len, rows)), "draft": draft, "verify": float(np.sum(useful)),
              "rejected": float(np.sum(verify - useful)), "overhead": float(cost.overhead(rows)) * len(plan)}
    return Price(sum(phases.values()), phases, len(plan), int(proposed.sum()), int((1 + proposed - emitted).sum()))


def autoregressive(trace):
    """Nobody drafts: the baseline."""
    return [Round(i, None, 0, 1) for i in range(1, trace.n_out)]


def observed_rounds(steps, baseline="target"):
    """L1: the plan that an engine followed, from its step records (position, proposed, committed, proposer)."""
    return [Round(s.position, None if s.proposer == baseline else s.proposer, s.proposed, s.committed) for s in steps]


def fixed(trace, name, k):
    """L2, L3: k drafts every round, or as many as the drafter has and the output has room for (one is left to the bonus)."""
    accept, i, plan = trace.accept[name], 1, []
    offered = trace.offered.get(name)
    while i < trace.n_out:
        room = min(k, trace.n_out - i - 1)
        proposed = room if offered is None else min(room, int(offered[i]))
        emitted = min(int(accept[i]), proposed + 1)
        plan.append(Round(i, name if room else None, proposed, emitted))
        i += emitted
    return plan


def greedy(trace, names, k_max=None):
    """L4: at every position the drafter with the longest accept (the first of equals) proposes exactly what will be
    accepted, k_max tokens at most. As in the paper it is charged even where it proposes nothing. NOT a bound: see the
    module's docstring."""
    i, plan = 1, []
    while i < trace.n_out:
        name = max(names, key=lambda m: trace.accept[m][i])
        emitted = int(trace.accept[name][i]) if k_max is None else min(int(trace.accept[name][i]), k_max + 1)
        plan.append(Round(i, name, emitted - 1, emitted))
        i += emitted
    return plan


def optimum(trace, cost, names, rows=1, k_max=None):
    """L5 (one name), L6 (several), L7 (cost.free()): the plan of least price, by dynamic programming from the end.

    Every round may draft nothing, at no draft cost, or let any drafter propose 1 .. k_max tokens (default: the longest
    accept - 1), also more than will be accepted: with a measured table that can be cheaper. State: the position, and who
    drafted last, for cost.switch. Exact if what is accepted does not depend on where earlier rounds began.
    """
    names, n = list(names), trace.n_out
    k_max = deepest([trace], names) if k_max is None else k_max
    kv = rows * (trace.prompt_len + np.arange(n))[:, None]                      # (N, 1)
    drafts = np.arange(k_max + 1)                                               # (K + 1,)
    step = cost.step(kv, rows * (1 + drafts), rows) + np.zeros((n, k_max + 1))
    charged = [step + cost.draft(m, kv, drafts, rows) for m in names]           # each (N, K + 1)
    change = cost.switch * ~np.eye(len(names), len(names) + 1, dtype=bool)      # (M, M + 1): to m, from each or nobody
    change[:, -1] = 0
    value = np.zeros((n + 1, len(names) + 1))                                   # least time from here, by who drafted last
    who, length = np.zeros((n, len(names) + 1), int), np.zeros((n, len(names)), int)
    for i in range(n - 1, 0, -1):
        options, room = [step[i, 0] + value[i + 1]], min(k_max, n - i - 1)
        for m, name in enumerate(names if room else []):
            landing = i + np.minimum(drafts[1:room + 1] + 1, trace.accept[name][i])
            times = charged[m][i, 1:room + 1] + value[landing, m]
            length[i, m] = 1 + times.argmin()
            options.append(times.min() + change[m])
        options = np.stack(options)
        who[i], value[i] = options.argmin(0), options.min(0)
    return _follow(trace, names, who, length)


def _follow(trace, names, who, length):
    i, last, plan = 1, len(names), []
    while i < trace.n_out:
        if who[i, last] == 0:
            plan.append(Round(i, None, 0, 1))
        else:
            last = who[i, last] - 1
            proposed = int(length[i, last])
            plan.append(Round(i, names[last], proposed, min(proposed + 1, int(trace.accept[names[last]][i]))))
        i += plan[-1].emitted
    return plan


def deepest(traces, names):
    """The most drafts that were ever accepted, at least 1."""
    return max([1] + [int(t.accept[m][1:].max()) - 1 for t in traces for m in names if t.n_out > 1])


def perfect(trace, name, k_max):
    """L8: the trace of a drafter called `name` whose first k_max drafts are always accepted."""
    accept = np.minimum(k_max + 1, trace.n_out - np.arange(trace.n_out))
    return Trace(trace.id, trace.prompt_len, trace.n_out, {name: accept})


def one_pass(trace):
    """L9: the whole output known in advance and verified in one forward."""
    return [Round(1, None, trace.n_out - 2, trace.n_out - 1)] if trace.n_out > 1 else []


def as_published(trace, names, k=None, matched=1.0, rng=None):
    """The paper's simulator, defects included: it reads accept[i - 1], charges every round of a neural drafter, and in
    combined mode (several names) prices all rounds as drafter "ngram".

    k None: its oracle; else fixed k, clipped nowhere. With drafter "ngram" alone, rounds of one token are not charged,
    and with fixed k a round that gains nothing is, with chance 1 - matched, one in which no match was found (rng:
    random.Random). Give the price to `mean_rate_speedup`, which averages as the paper does.
    """
    i, plan, lookup = 1, [], list(names) == ["ngram"]
    while i < trace.n_out:
        accept = max(int(trace.accept[m][i - 1]) for m in names) if i > 1 else 1      # theirs has a dummy 1 in entry 0
        length = accept if k is None else k + 1                  # query tokens of the round
        if lookup and k is not None and accept == 1 and rng and rng.random() >= matched:
            length = 1
        charged = "ngram" if len(names) > 1 else None if lookup and length == 1 else names[0]
        plan.append(Round(i, charged, length - 1, min(accept, length)))
        i += plan[-1].emitted
    return plan


def mean_rate_speedup(traces, base, times):
    """The paper's average: mean tokens/s of one method over mean tokens/s of the other. Fast requests dominate it."""
    n = np.array([t.n_out for t in traces], float)
    return float((n / np.array(times)).mean() / (n / np.array(base)).mean())


def replay(plans, traces, cost, batch):
    """Seconds that an engine needs for different requests that share forwards, {phase: seconds}: up to `batch` requests at
    once, the next one enters when one is done, and every iteration is one round of each that is there. plans[i] is the plan
    of traces[i]. For equal requests that all fit in, the same as `price` with rows = batch."""
    waiting, active, steps, drafts = list(zip(plans, traces)), [], [], {}
    while waiting or active:
        while waiting and len(active) < batch:
            plan, trace = waiting.pop(0)
            if plan:
                active.append((iter(plan), trace, len(plan)))
        now = [(next(rounds), t) for rounds, t, _ in active]
        active = [(rounds, t, left - 1) for rounds, t, left in active if left > 1]
        if now:
            kv = [t.prompt_len + r.position for r, t in now]
            steps.append((sum(kv), len(now) + sum(r.proposed for r, _ in now), len(now)))
        for name in {r.name for r, _ in now} - {None}:
            mine = [(c, r.proposed) for (r, _), c in zip(now, kv) if r.name == name]
            drafts.setdefault(name, []).append((sum(c for c, _ in mine), max(j for _, j in mine), len(mine)))
    out = {"prefill": sum(float(cost.prefill(t.prompt_len, 1)) for t in traces), "draft": 0.0, "verify": 0.0, "overhead": 0.0}
    if steps:
        kv, queries, rows = np.array(steps, float).T
        out["verify"] = float(np.sum(cost.verify(kv, queries, rows)))
        out["overhead"] = float(np.sum(cost.overhead(rows) + np.zeros(len(rows))))
    for name, some in drafts.items():
        kv, proposed, rows = np.array(some, float).T
        out["draft"] += float(np.sum(cost.draft(name, kv, proposed, rows)))
    return out


# -- the ladder -----------------------------------------------------------------------------------------------------------

RUNGS = {"L0": "observed", "L1": "modelled", "L2": "best fixed k", "L3": "best fixed k per request", "L4": "greedy oracle (not a bound)",
         "L5": "optimum, one drafter", "L6": "optimum, all drafters", "L7": "optimum, free drafters", "L8": "perfect drafter",
         "L9": "one verification of everything", "L10": "i.i.d. acceptance, its best k", "L11": "best static tree",
         "L12": "without one phase of the best fixed k"}


def ladder(traces, cost, rows=1, k_max=None, observed=None, child_rates=None):
    """All RUNGS for a set of requests (one workload, one batch size), as a dict that JSON can hold, at full precision.

    Speed-ups are total autoregressive time over total time, prefill included in both. "seconds" is the modelled
    autoregressive time of all requests, each as 1/rows of a lock-step batch of copies: seconds / speed-up is the time of
    any rung, and for L5 to L9 with linear costs a lower bound for batches of different requests too.
    observed: {method: {"ar_seconds", "seconds", "plans": {trace id: plan}}} gives L0 and L1; child_rates: {drafter: chance
    that child 1, 2, .. of an accepted node is accepted} gives L11. k_max: most drafts in a round, for every rung
    (default: the most ever accepted in a trace or proposed in an observed plan). Compared are the drafters that both
    the traces and the cost table have; ValueError if there is none.
    """
    names = [m for m in traces[0].accept if m in cost.drafters]
    if not names:
        there = ", ".join(cost.drafters) or "it has none"
        raise ValueError(f"the traces' drafters {', '.join(traces[0].accept)} are not in the cost table: {there}")
    if k_max is None:
        plans = [plan for o in (observed or {}).values() for plan in o["plans"].values()]
        k_max = max([deepest(traces, names)] + [r.proposed for plan in plans for r in plan])
    total = lambda plan_of, table=cost, some=traces: sum(price(plan_of(t), t, table, rows).time for t in some)
    ar = total(autoregressive)
    out = {"rows": rows, "requests": len(traces), "k_max": k_max, "seconds": ar / rows}
    if observed:
        by_id = {t.id: t for t in traces}
        run = {m: [by_id[i] for i in o["plans"]] for m, o in observed.items()}
        out["L0"] = {m: o["ar_seconds"] / o["seconds"] for m, o in observed.items()}
        out["L1"] = {m: _ratio(total(autoregressive, some=run[m]), total(lambda t: o["plans"][t.id], some=run[m]))
                     for m, o in observed.items()}
    of_fixed = lambda t, m, k: price(fixed(t, m, k), t, cost, rows)
    by_k = {m: np.array([[of_fixed(t, m, k).time for k in range(1, k_max + 1)] for t in traces]) for m in names}   # (R, K)
    best_k = {m: int(by_k[m].sum(0).argmin()) + 1 for m in names}
    out["L2"] = {m: {"k": best_k[m], "speedup": _ratio(ar, by_k[m].sum(0).min())} for m in names}
    out["L3"] = {m: _ratio(ar, by_k[m].min(1).sum()) for m in names}
    groups = {m: [m] for m in names} | {"all": names}
    out["L4"] = {label: _ratio(ar, total(lambda t: greedy(t, some, k_max))) for label, some in groups.items()}
    out["L5"] = {m: _ratio(ar, total(lambda t: optimum(t, cost, [m], rows, k_max))) for m in names}
    out["L6"] = _ratio(ar, total(lambda t: optimum(t, cost, names, rows, k_max)))
    free = cost.free()
    out["L7"] = _ratio(ar, total(lambda t: optimum(t, free, names, rows, k_max), free))
    out["L8"] = {m: _ratio(ar, total(lambda t: optimum(perfect(t, m, k_max), cost, [m], rows, k_max))) for m in names}
    out["L9"] = _ratio(ar, total(one_pass))
    context = float(np.mean([t.prompt_len + t.n_out / 2 for t in traces]))
    out["L10"] = {m: _iid_rung(traces, cost, m, best_k[m], context, rows, k_max) for m in names}
    out["L11"] = {m: best_tree(rates, cost, m, context, rows, 2 * k_max, k_max) for m, rates in (child_rates or {}).items()}
    out["L12"] = {m: amdahl(ar, [of_fixed(t, m, best_k[m]).phases for t in traces]) for m in names}
    return out


def _ratio(a, b):
    return float(a / b) if b else 1.0            # nothing to do at all, for nobody


def _iid_rung(traces, cost, name, k, context, rows, k_max):
    gained = [r.emitted for t in traces for r in fixed(t, name, k)]
    alpha = fit_alpha(float(np.mean(gained)), k) if gained else 0.0
    curve = analytic_curve(alpha, cost, name, context, rows, k_max)
    return {"alpha": alpha, "k": int(curve.argmax()), "speedup": float(curve.max())}


def amdahl(base, phases):
    """L12: speed-up over `base` seconds if one phase cost nothing, for each that speculative decoding adds or could
    remove, alone and ("all") together. phases: a list of dicts of seconds (modelled or measured), summed."""
    spent = {name: sum(p.get(name, 0.0) for p in phases) for p in phases for name in p}
    total = sum(spent.values())
    removable = [name for name in ("rejected", "draft", "sample", "overhead") if name in spent]
    without = {name: [name] for name in removable} | {"all": removable}
    return {label: _ratio(base, total - sum(spent[name] for name in some)) for label, some in without.items()}


def spread(values):
    """Mean, median, standard deviation and 5th and 95th percentile of accept lengths: of accept[1:] it is weighted by
    position, of a plan's `emitted` by round. The first is larger where long matches are counted at each of their tokens."""
    v = np.asarray(values, float)
    return {"mean": float(v.mean()), "median": float(np.median(v)), "std": float(v.std()),
            "p5": float(np.percentile(v, 5)), "p95": float(np.percentile(v, 95))}


def accepted_by_position(plan):
    """P_j: share of rounds whose j-th draft was accepted, array (most drafts accepted,); tau = 1 + its sum."""
    emitted = np.array([r.emitted for r in plan])
    return np.array([(emitted > j).mean() for j in range(1, emitted.max())])


# -- analytic results -----------------------------------------------------------------------------------------------------

def expected_tokens(alpha, k):
    """E[tokens of a round of k drafts] = 1 + sum of products of acceptances (Leviathan et al. 2211.17192, eq. 1).
    alpha: one chance for all drafts (then (1 - alpha^(k+1)) / (1 - alpha)), or a list, one for each given the ones before."""
    chain = np.full(k, alpha, float) if np.ndim(alpha) == 0 else np.asarray(alpha, float)[:k]
    return float(1 + np.cumprod(chain).sum())


def leviathan_speedup(alpha, k, c):
    """Theorem 3.8 there: E / (k c + 1), c the time of a draft step in target steps, verification as long as one step."""
    return expected_tokens(alpha, k) / (k * c + 1)


def operations_factor(alpha, k, c_hat):
    """Theorem 3.11 there: operations per token against plain decoding, c_hat the same ratio as c for operations."""
    return (k * c_hat + k + 1) / expected_tokens(alpha, k)


def best_gamma(alpha, c):
    """The k that maximises `leviathan_speedup`: one more draft pays while its tokens per cost exceed the average so far.
    0: drafting does not pay, which is so exactly if alpha <= c. ValueError unless 0 <= alpha < 1 and c > 0."""
    if not (0 <= alpha < 1 and c > 0):
        raise ValueError(f"alpha {alpha} and c {c} have no best k; allowed are 0 <= alpha < 1 and c > 0")
    k = 0
    while alpha ** (k + 1) * (1 + k * c) > c * expected_tokens(alpha, k):
        k += 1
    return k


def best_gamma_lambert(alpha, c):
    """The same in closed form: z = -A - W_{-1}(-e^{-A}), the larger root of e^z = A + z, gives the real-valued optimum
    z / L - 1, and one of its two neighbours is the integer one. 0 < alpha < 1, c > 0."""
    log = -math.log(alpha)
    a = 1 + log * (1 / c - 1)
    if a <= 1:                                   # c >= 1: a draft costs as much as what it may save
        return 0
    z = 1 + math.log(1 + a)                      # right of the root; Newton on a convex function stays there
    for _ in range(100):
        z -= (math.exp(z) - z - a) / math.expm1(z)
    k = max(0, math.floor(z / log - 1))
    return max((k, k + 1), key=lambda k: (leviathan_speedup(alpha, k, c), -k))


def fit_alpha(tau, k):
    """The alpha for which `expected_tokens` is tau, by bisection. The acceptance rate (tau - 1) / k is smaller.
    ValueError unless 1 <= tau <= k + 1."""
    if not 1 <= tau <= k + 1:
        raise ValueError(f"tau {tau} is out of range; allowed is 1 to {k + 1} with {k} drafts a round")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < tau else (low, middle)
    return high


def step_speedup(tokens, cost, name, k, context, rows=1):
    """E T(B, 1) / (T_draft(k) + T(B, k + 1)) for rounds that gain `tokens` on average: the general form of Leviathan's
    formula and of MagicDec's condition. context: cached tokens per row."""
    kv = rows * context
    spent = cost.step(kv, rows * (1 + k), rows) + (cost.draft(name, kv, k, rows) if k else 0.0)
    return float(tokens * cost.step(kv, rows, rows) / spent)


def break_even(cost, name, k, context, rows=1):
    """Tokens per round that k drafts must gain on average to be as fast as plain decoding."""
    return 1 / step_speedup(1.0, cost, name, k, context, rows)


def analytic_curve(alpha, cost, name, context, rows=1, k_max=20):
    """L10: speed-up for k = 0 .. k_max drafts a round at acceptance alpha (as in `expected_tokens`), array (k_max + 1,)."""
    return np.array([step_speedup(expected_tokens(alpha, k), cost, name, k, context, rows) for k in range(k_max + 1)])


def critical_context(tau, k, s0, draft_ratio):
    """Context beyond which k drafts gain at any batch size (MagicDec, 2408.11049): s0 (k / (tau - 1 - draft_ratio) - 1),
    s0 = c_q / c_kv in tokens, draft_ratio = T_draft / T_target. Infinite if even free verification would not pay."""
    margin = tau - 1 - draft_ratio
    return max(0.0, s0 * (k / margin - 1)) if margin > 0 else math.inf


def goodput_choice(acceptance, cost, context, rows=1, k_max=8):
    """Who should draft, and how much, to gain most tokens per second (SmartSpec, 2406.14066): (name or None, k, tokens/s).
    acceptance: {drafter: alpha, or a list of conditional acceptances by draft position}, e.g. running estimates."""
    kv = rows * context
    best = (None, 0, rows / float(cost.step(kv, rows, rows)))
    for name, alpha in acceptance.items():
        for k in range(1, (k_max if np.ndim(alpha) == 0 else min(k_max, len(alpha))) + 1):
            spent = cost.step(kv, rows * (1 + k), rows) + cost.draft(name, kv, k, rows)
            goodput = rows * expected_tokens(alpha, k) / float(spent)
            if goodput > best[2]:
                best = (name, k, goodput)
    return best


def tree_tokens(children, n_max):
    """G(1..n_max): most tokens that a static tree of n nodes (the root, which is verified for its bonus token, included)
    gains on average if the b-th child of an accepted node is accepted with chance children[b - 1] (Sequoia, 2402.12374).

    The paper's dynamic program: T[n][b], a root with b children, T[n][b] = max_m T[n - m][b - 1] + children[b] * best[m].
    """
    most = np.full((n_max + 1, len(children) + 1), -np.inf)
    most[1, 0] = 1.0
    for n in range(2, n_max + 1):
        for b in range(1, len(children) + 1):
            m = np.arange(1, n)
            most[n, b] = (most[n - m, b - 1] + children[b - 1] * most[m].max(1)).max()
    return most.max(1)[1:]


def tree_scores(children, n_max, depth):
    """Chances that the n_max best nodes, no deeper than `depth`, are accepted, in decreasing order, array (<= n_max,).
    With children in decreasing order, node by node is optimal: its cumulative sum equals `tree_tokens`."""
    heap, scores = [(-1.0, 0, 0.0, 0)], []                       # (-chance, depth, chance of the parent, rank)
    while heap and len(scores) < n_max:
        chance, deep, parent, rank = heapq.heappop(heap)
        scores.append(-chance)
        if deep < depth and children:
            heapq.heappush(heap, (chance * children[0], deep + 1, -chance, 0))
        if deep and rank + 1 < len(children):
            heapq.heappush(heap, (-parent * children[rank + 1], deep, parent, rank + 1))
    return np.array(scores)


def best_tree(children, cost, name, context, rows=1, n_max=64, depth_max=8):
    """L11: size and depth of the static tree with the largest speed-up G(n, d) T(B, 1) / (T(B, n) + T_draft(d)).
    n counts the root. children must not increase. Returns {"nodes", "depth", "speedup"}."""
    kv, best = rows * context, {"nodes": 1, "depth": 0, "speedup": 1.0}
    plain = float(cost.step(kv, rows, rows))
    for depth in range(1, depth_max + 1):
        gained = np.cumsum(tree_scores(list(children), n_max, depth))
        spent = cost.step(kv, rows * np.arange(1, len(gained) + 1), rows) + cost.draft(name, kv, depth, rows)
        n = int((gained / spent).argmax())
        if gained[n] * plain / spent[n] > best["speedup"]:
            best = {"nodes": n + 1, "depth": depth, "speedup": float(gained[n] * plain / spent[n])}
    return best
