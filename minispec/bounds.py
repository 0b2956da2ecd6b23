"""How fast could speculative decoding be? The ladder of bounds of "Speculative Decoding: Performance or
Illusion?" (Liu, Yu, Park, Stoica, Cheung, arXiv 2601.11580), from two files: accept traces and a cost table
(minispec/data/traces.py).

The file reads from the price of one round to the cells of a report:

    CostTable    seconds of a round, by rows, tokens and context
    plans        who drafts how much, at every round of a request: a list of `Round`
    price        what a plan costs; `replay` is the same for a batch of different requests
    optima       the plan of least price, by dynamic programming
    ladder       all rungs for a set of requests; `cells` for every workload and batch size of a trace file

A rung is a speed-up: the price of `autoregressive` divided by the price of the rung's plan.

    L0 observed        wall clock (studies/ladder.py)          L5 optimum, one drafter   a bound
    L1 modelled        the recorded rounds, at these prices    L6 optimum, all drafters  each at its own price
    L2 best fixed k    one k for all requests                  L7 L6 with free drafters
    L4 greedy          the paper's oracle, NOT a bound         L9 one pass               the model's ceiling

Glossary, code <-> paper: rows B, requests in a batch; prompt_len P_r; n_out N; position p_r, output tokens
that exist when a round starts; left N - p_r, tokens that are still missing then; kv C, tokens in the cache,
of all rows; queries Q, tokens in a forward, of all rows; proposed j, drafts of a round; accept[i] = a(i),
accepted drafts + 1; emitted, tokens a round gains, bonus included, their mean is tau; verify T_verify; draft
T_draft; overhead T_ovh; alpha, chance that a draft is accepted; k gamma.

What differs from the paper, and why:
- The paper's oracle proposes at every position what is accepted there. That is greedy: a shorter round can
  land where the next one is longer. `optima` is a dynamic program, the true least time over all lengths (and
  drafters).
- Its simulator reads accept[i - 1] at position i, charges a drafter that proposes nothing, prices the winner
  of several drafters as an n-gram lookup, and averages rates. `as_published` plays these rules, for
  comparison.
- Costs may be a measured grid: the linear model is pessimistic where a forward is bound by memory.
- Its batch is B copies of one request, and so is `rows` here. With linear costs, 1/rows of that time, summed
  over requests, also bounds from below what a batch of at most `rows` different requests needs.

L5 to L7 are bounds for rounds of at most k_max drafts. Where a trace is *censored*, all drafts that were
asked for were accepted, so longer rounds might gain more. Every cell reports this share of positions.

All times are seconds. numpy only, no torch.
"""
import itertools
from collections import Counter
from typing import NamedTuple

import numpy as np

from minispec.data.traces import LINEAR, check_costs, read_costs

BATCHES = (1, 4, 16)
CHUNK = 2_000_000                # entries of one table of `charges`: bounds the memory for long traces


# -- the cost model --------------------------------------------------------------------------------

class CostTable:
    """Seconds of each part of a round. Arguments are totals over the rows, numbers or arrays that broadcast;
    `drafts` is per row. ValueError if the table is not valid or has no such drafter."""

    def __init__(self, table):
        self.table = check_costs(table)
        self.drafters = tuple(table.get("draft", {}))
        self.switch = table.get("switch", 0.0)
        self.accept = table.get("accept", {})

    @classmethod
    def load(cls, path):
        """From a JSON file; see `read_costs` for its errors."""
        return cls(read_costs(path))

    def verify(self, kv, queries, rows=1):
        """T_verify: one target forward of `queries` tokens over `kv` cached ones."""
        return seconds(self.table["verify"], rows, queries / rows, kv)

    def overhead(self, rows=1):
        """T_ovh: all that a round needs besides the two models, sampling included."""
        return seconds(self.table["overhead"], rows, 1, 0) if "overhead" in self.table else 0.0

    def step(self, kv, queries, rows=1):
        """Verification and overhead: what every round pays."""
        return self.verify(kv, queries, rows) + self.overhead(rows)

    def draft(self, name, kv, drafts, rows=1):
        """T_draft: drafter `name` proposes `drafts` tokens for each row."""
        if name not in self.drafters:
            there = ", ".join(self.drafters) or "none"
            raise ValueError(f"no drafter '{name}' in the cost table; it has {there}")
        entry = self.table["draft"][name]
        if entry["kind"] == "share":
            return entry["of_verify"] * self.verify(kv, rows * (1 + drafts), rows)
        return seconds(entry, rows, drafts, kv)

    def read(self, name, tokens, rows=1):
        """What drafter `name` takes to read `tokens` tokens of each row that it has not seen; 0 if not in the
        table."""
        entry = self.table.get("read", {}).get(name)
        return seconds(entry, rows, tokens, 0) if entry else 0.0

    def prefill(self, prompt_len, rows=1):
        """The forward over the prompts, which gives the first token; a step of so many tokens if not in the
        table."""
        if "prefill" in self.table:
            return seconds(self.table["prefill"], rows, prompt_len, 0)
        return self.step(0, rows * prompt_len, rows)


def seconds(entry, rows, tokens, kv):
    """A TIME entry of the cost table at `rows` rows with `tokens` tokens each and `kv` cached tokens in
    all."""
    if entry["kind"] == "grid":
        return _interpolate(entry, rows, tokens, kv / rows)
    base, row, token, step, per_kv, kv_step = (entry.get(name, 0.0) for name in LINEAR)
    return base + row * rows + (token * rows + step) * tokens + (per_kv + kv_step * tokens) * kv


def _interpolate(grid, rows, tokens, kv):
    """Linear in each of the three axes; below the first point as at it, beyond the last one along the last
    segment."""
    values = np.array(grid["seconds"], float)
    corners = []
    for axis, x in zip((grid["rows"], grid["tokens"], grid["kv"]), (rows, tokens, kv)):
        if len(axis) == 1:
            corners.append([(0, 1.0)])           # measured at one value only: constant
            continue
        axis = np.array(axis, float)
        x = np.maximum(x, axis[0])
        i = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
        weight = (x - axis[i]) / (axis[i + 1] - axis[i])
        corners.append([(i, 1 - weight), (i + 1, weight)])
    out = sum(values[i, j, l] * (u * v * w) for (i, u), (j, v), (l, w) in itertools.product(*corners))
    out = np.maximum(out, values.min())  # noise must not lead an extrapolation below what was ever measured

    # Constant in some axis or not, it is a price for each of the points that were asked for.
    return np.broadcast_to(out, np.broadcast_shapes(np.shape(rows), np.shape(tokens), np.shape(kv)))


# -- plans: who drafts how much, and where ---------------------------------------------------------

class Round(NamedTuple):
    """When `position` output tokens exist, drafter `name` (None: no drafter) proposes `proposed`; `emitted`
    are gained."""
    position: int
    name: str | None
    proposed: int
    emitted: int


def autoregressive(trace):
    """No drafts at all: the baseline."""
    return [Round(i, None, 0, 1) for i in range(1, trace.n_out)]


def fixed(trace, name, k):
    """L2: k drafts every round, or as many as the drafter has and the output has room for (one is left to the
    bonus)."""
    accept, offered = trace.accept[name], trace.offered.get(name)
    i, plan = 1, []
    while i < trace.n_out:
        room = min(k, trace.n_out - i - 1)
        proposed = room if offered is None else min(room, int(offered[i]))
        emitted = min(int(accept[i]), proposed + 1)
        plan.append(Round(i, name if room else None, proposed, emitted))
        i += emitted
    return plan


def greedy(trace, names, k_max):
    """L4: at every position the drafter with the longest accept (the first of equals) proposes exactly what
    will be accepted, k_max tokens at most. As in the paper it is charged even where it proposes nothing. NOT
    a bound: see the module's docstring."""
    i, plan = 1, []
    while i < trace.n_out:
        name = max(names, key=lambda m: trace.accept[m][i])
        emitted = min(int(trace.accept[name][i]), k_max + 1)
        plan.append(Round(i, name, emitted - 1, emitted))
        i += emitted
    return plan


def one_pass(trace):
    """L9: the whole output known in advance and verified in one forward."""
    return [Round(1, None, trace.n_out - 2, trace.n_out - 1)] if trace.n_out > 1 else []


def as_published(trace, names):
    """The oracle of the paper's simulator, defects included: it reads accept[i - 1], charges every round of a
    neural drafter, and with several names prices all rounds as drafter "ngram"."""
    i, plan = 1, []
    while i < trace.n_out:
        accept = 1                               # theirs has a dummy 1 in entry 0
        if i > 1:
            accept = max(int(trace.accept[m][i - 1]) for m in names)
        if len(names) > 1:
            charged = "ngram"
        elif names == ["ngram"] and accept == 1:
            charged = None                       # a lookup that found nothing is free
        else:
            charged = names[0]
        plan.append(Round(i, charged, accept - 1, accept))
        i += accept
    return plan


# -- what a plan costs -----------------------------------------------------------------------------

def price(plan, trace, cost, rows=1):
    """What a plan costs `rows` copies of the request in lock-step (paper: T_step summed over steps), {phase:
    seconds}."""
    position = np.array([r.position for r in plan], int)
    proposed = np.array([r.proposed for r in plan], int)
    names = np.array([r.name for r in plan], object)
    kv = rows * (trace.prompt_len + position)

    # A drafter is charged for its own rounds, and for taking over from another one.
    drafted = [name for name in names if name is not None]
    draft = cost.switch * sum(a != b for a, b in zip(drafted, drafted[1:]))
    for name in dict.fromkeys(drafted):
        own = names == name
        draft += float(np.sum(cost.draft(name, kv[own], proposed[own], rows)))
    return {
        "prefill": float(cost.prefill(trace.prompt_len, rows)),
        "draft": draft,
        "verify": float(np.sum(cost.verify(kv, rows * (1 + proposed), rows))),
        "overhead": float(cost.overhead(rows)) * len(plan),
    }


def time_of(plan, trace, cost, rows=1):
    """The seconds of all phases of `price`."""
    return sum(price(plan, trace, cost, rows).values())


def replay(plans, traces, cost, batch):
    """Seconds that an engine needs for different requests that share forwards, {phase: seconds}: up to
    `batch` requests at once, the next one enters when one is done, and every iteration is one round of each
    that is there. plans[i] is the plan of traces[i]. For equal requests that all fit in, the same as `price`
    with rows = batch, prefill apart."""
    waiting = [i for i, plan in enumerate(plans) if plan]
    active = []
    done = [0] * len(plans)                      # rounds of each request so far
    last = [None] * len(plans)                   # who drafted last for it
    steps, drafts, switches = [], {}, 0
    while waiting or active:
        while waiting and len(active) < batch:
            active.append(waiting.pop(0))
        now = {i: plans[i][done[i]] for i in active}
        kv = {i: traces[i].prompt_len + r.position for i, r in now.items()}

        # One forward of the target for all ..
        steps.append((sum(kv.values()), len(now) + sum(r.proposed for r in now.values()), len(now)))

        # .. and one call of every drafter that somebody asks, as deep as the deepest of its rows.
        for name in dict.fromkeys(r.name for r in now.values() if r.name is not None):
            own = [i for i in now if now[i].name == name]
            deepest_row = max(now[i].proposed for i in own)
            drafts.setdefault(name, []).append((sum(kv[i] for i in own), deepest_row, len(own)))
            switches += any(last[i] not in (None, name) for i in own)
            for i in own:
                last[i] = name
        for i in active:
            done[i] += 1
        active = [i for i in active if done[i] < len(plans[i])]

    kv, queries, rows = np.array(steps, float).reshape(-1, 3).T
    draft = cost.switch * switches
    for name, calls in drafts.items():
        tokens, proposed, asked = np.array(calls, float).T
        draft += float(np.sum(cost.draft(name, tokens, proposed, asked)))
    return {
        "prefill": sum(float(cost.prefill(t.prompt_len, 1)) for t in traces),
        "draft": draft,
        "verify": float(np.sum(cost.verify(kv, queries, rows))),
        "overhead": float(np.sum(cost.overhead(rows) + 0 * rows)),
    }


# -- the least price -------------------------------------------------------------------------------

def charges(traces, cost, names, rows, k_max):
    """What every possible round costs: (step, {name: step and drafting}), arrays (R requests, longest N,
    k_max + 1) of seconds by tokens left and drafts. Requests are aligned at their ends, so the same number of
    drafts has room in all."""
    longest = max(t.n_out for t in traces)
    ends = np.array([t.prompt_len + t.n_out for t in traces])
    kv = rows * np.maximum(ends[:, None, None] - np.arange(longest)[:, None], 0)         # (R, N, 1)
    drafts = np.arange(k_max + 1)                                                        # (K + 1,)
    step = cost.step(kv, rows * (1 + drafts), rows) + np.zeros((len(traces), longest, k_max + 1))
    step[:, 0] = 0  # nothing is left to do
    return step, {m: step + cost.draft(m, kv, drafts, rows) for m in names}


def by_left(traces, columns, fill):
    """Columns of traces by tokens left, (R, longest N); `fill` in front of a request's first round, 0 at its
    end."""
    out = np.full((len(traces), max(t.n_out for t in traces)), fill)
    out[:, 0] = 0
    for row, trace, column in zip(out, traces, columns):
        row[1:trace.n_out] = column[:0:-1]
    return out


def fixed_seconds(traces, name, step, charged):
    """L2: what `fixed` costs with 1 .. k_max drafts, prefill apart, array (R, k_max). All are walked through
    at once."""
    accept = by_left(traces, [t.accept[name] for t in traces], 1)
    unlimited = [np.full(t.n_out, t.n_out) for t in traces]
    offered = by_left(traces, [t.offered.get(name, u) for t, u in zip(traces, unlimited)], 0)

    r = np.arange(len(traces))[:, None]
    k = np.arange(1, step.shape[2])
    left = np.array([[t.n_out - 1] for t in traces]) + 0 * k                             # (R, K)
    total = np.zeros(left.shape)
    while left.any():
        room = np.maximum(np.minimum(k, left - 1), 0)
        proposed = np.minimum(room, offered[r, left])
        total += np.where(room > 0, charged[r, left, proposed], step[r, left, 0])
        left = left - np.minimum(accept[r, left], proposed + 1)
    return total


def optima(traces, step, charged, switch=0.0):
    """L5 (one drafter), L6 (several), L7 (drafters that cost no more than `step`): the plans of least price,
    by dynamic programming from the end. step, charged: as `charges` returns them. Returns (seconds without
    prefill (R,), plans).

    Every round may draft nothing, at no draft cost, or let any drafter propose 1 .. k_max tokens, also more
    than will be accepted: with a measured table that can be cheaper. State: how many tokens are left, and who
    drafted last, because of `switch`. Exact if what is accepted does not depend on where earlier rounds
    began.

        V[left] = min( step(0) + V[left - 1],
                       min over m, j of  step(j) + draft_m(j) + V[left - min(j + 1, accept_m)] )
    """
    names, nobody = list(charged), len(charged)
    n_requests, longest, width = step.shape
    r = np.arange(n_requests)[:, None]
    accept = {m: by_left(traces, [t.accept[m] for t in traces], 1) for m in names}
    change = switch * ~np.eye(nobody, nobody + 1, dtype=bool)  # to m, from each or nobody
    change[:, nobody] = 0

    value = np.zeros((n_requests, longest, nobody + 1))          # least time from here, by who drafted last
    who = np.zeros((n_requests, longest, nobody + 1), int)       # 0: no drafts; m + 1: drafter m
    length = np.zeros((n_requests, longest, nobody), int)        # how many, if m drafts
    for left in range(1, longest):
        options = [step[:, left, :1] + value[:, left - 1]]
        drafts = np.arange(1, min(width, left))                  # one token is left to the bonus
        for m, name in enumerate(names if len(drafts) else []):
            landing = left - np.minimum(drafts + 1, accept[name][:, left, None])
            times = charged[name][:, left, drafts] + value[r, landing, m]
            length[:, left, m] = drafts[times.argmin(1)]
            options.append(times.min(1)[:, None] + change[m])
        options = np.stack(options)                              # (choices, R, M + 1)
        who[:, left] = options.argmin(0)
        value[:, left] = options.min(0)

    plans = [_follow(t, names, who[i], length[i]) for i, t in enumerate(traces)]
    return np.array([value[i, t.n_out - 1, nobody] for i, t in enumerate(traces)]), plans


def _follow(trace, names, who, length):
    """The plan of one request, read off the choices: who (longest N, M + 1) and length (longest N, M)."""
    i, last, plan = 1, len(names), []
    while i < trace.n_out:
        left = trace.n_out - i
        if who[left, last] == 0:
            plan.append(Round(i, None, 0, 1))
        else:
            last = who[left, last] - 1
            proposed = int(length[left, last])
            plan.append(Round(i, names[last], proposed, min(proposed + 1, int(trace.accept[names[last]][i]))))
        i += plan[-1].emitted
    return plan


# -- the ladder ------------------------------------------------------------------------------------

def ladder(traces, cost, rows=1, k_max=None, published=False):
    """The rungs L2 to L9 for a set of requests (one workload, one batch size), as a dict that JSON can hold.

    Speed-ups are total autoregressive time over total time, prefill included in both. Next to them are
    "seconds", the modelled autoregressive time of all requests, each as 1/rows of a lock-step batch of
    copies: seconds / speed-up is the time of any rung, and for L5 to L9 with linear costs a lower bound for
    batches of different requests; "censored", {drafter, or "all": share of positions where all drafts that
    were asked for were accepted}; above a few percent L5 to L7 only bound rounds of at most k_max drafts; and
    "choices", what the optimum of L6 does.

    k_max: most drafts in a round, for every rung (default: the most ever accepted in a trace). Compared are
    the drafters that both the traces and the cost table have; ValueError if there is none. published: also
    the paper's simulator.
    """
    names = compared(traces, cost)
    traces = sorted(traces, key=lambda t: t.n_out)               # equals together, so that little is padded
    if k_max is None:
        k_max = deepest(traces, names)
    groups = {m: [m] for m in names} | {"all": names}
    prefill = np.array([float(cost.prefill(t.prompt_len, rows)) for t in traces])

    def times(plan_of):
        return np.array([time_of(plan_of(t), t, cost, rows) for t in traces])

    plain = times(autoregressive)

    def speedup(total):
        return float(plain.sum() / total) if total else 1.0      # no seconds at all: nothing to gain

    by_k = {m: np.full(k_max, prefill.sum()) for m in names}
    least = {label: [] for label in (*groups, "free")}
    who, lengths = Counter(), Counter()
    for some in chunks(traces, k_max):
        step, charged = charges(some, cost, names, rows, k_max)
        for m in names:
            by_k[m] += fixed_seconds(some, m, step, charged[m]).sum(0)
        for label, group in groups.items():
            spent, plans = optima(some, step, {m: charged[m] for m in group}, cost.switch)
            least[label].extend(spent)
        for r in itertools.chain.from_iterable(plans):           # of the last group, which is all drafters
            who[r.name or "nobody"] += 1
            lengths[r.proposed] += 1
        least["free"].extend(optima(some, step, {m: step for m in names})[0])
    least = {label: prefill + np.array(spent) for label, spent in least.items()}

    out = {
        "rows": rows,
        "requests": len(traces),
        "k_max": k_max,
        "seconds": float(plain.sum()) / rows,
        "censored": {label: censored_share(traces, group) for label, group in groups.items()},
        "L2": {m: {"k": int(by_k[m].argmin()) + 1, "speedup": speedup(by_k[m].min())} for m in names},
        "L4": {m: speedup(times(lambda t: greedy(t, some, k_max)).sum()) for m, some in groups.items()},
        "L5": {m: speedup(least[m].sum()) for m in names},
        "L6": speedup(least["all"].sum()),
        "L7": speedup(least["free"].sum()),
        "L9": speedup(times(one_pass).sum()),
        "choices": {"who": dict(who), "lengths": {str(k): lengths[k] for k in sorted(lengths)}},
    }
    if published:
        # Combined rounds are priced as "ngram" there, so without one there is no such figure.
        out["published"] = {}
        for label, group in groups.items():
            if len(group) == 1 or "ngram" in group:
                theirs = times(lambda t: as_published(t, group))
                out["published"][label] = {
                    "simulator": averages(traces, plain, theirs),
                    "optimum": averages(traces, plain, least[label]),
                }
    return out


def compared(traces, cost):
    """The drafters that both the traces and the cost table have; ValueError if there is none."""
    names = [m for m in traces[0].accept if m in cost.drafters]
    if not names:
        there = ", ".join(cost.drafters) or "it has none"
        have = ", ".join(traces[0].accept)
        raise ValueError(f"the traces' drafters {have} are not in the cost table: {there}")
    return names


def deepest(traces, names):
    """The most drafts that were ever accepted, at least 1."""
    return max([1] + [int(t.accept[m][1:].max()) - 1 for t in traces for m in names if t.n_out > 1])


def censored_share(traces, names):
    """The share of positions at which some of these drafters might have got more accepted than it was asked
    for."""
    hit = 0
    for t in traces:
        columns = [t.censored[m][1:] for m in names if m in t.censored]
        hit += int(np.any(columns, axis=0).sum()) if columns else 0
    return hit / max(1, sum(t.n_out - 1 for t in traces))


def averages(traces, base, times):
    """Speed-up by two averages: of "total" time, and the paper's, of "rates": mean tokens/s over mean
    tokens/s, which fast requests dominate. base, times: seconds of each request."""
    n = np.array([t.n_out for t in traces], float)
    return {"total": float(base.sum() / times.sum()), "rates": float((n / times).mean() / (n / base).mean())}


def chunks(traces, k_max):
    """The traces in parts, so that the tables of `charges` stay small. traces: in order of length."""
    part = []
    for t in traces:
        if part and (len(part) + 1) * t.n_out * (k_max + 1) > CHUNK:
            yield part
            part = []
        part.append(t)
    yield part


# -- from files to cells ---------------------------------------------------------------------------

def by_workload(traces):
    """{workload: traces}, by what is in front of "/" in the id; ids without one are all of the workload
    "requests"."""
    out = {}
    for t in traces:
        workload = t.id.split("/")[0] if "/" in t.id else "requests"
        out.setdefault(workload, []).append(t)
    return out


def cells(traces, cost, batches=BATCHES, published=False):
    """The ladder of every workload at every batch size, a dict each, for batches of copies as in the
    paper."""
    out = []
    for workload, some in by_workload(traces).items():
        for rows in batches:
            about = {"workload": workload, "batch": rows, "kind": "copies"}
            out.append(about | ladder(some, cost, rows, published=published))
    return out
