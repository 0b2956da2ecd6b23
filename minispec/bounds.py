"""How fast could speculative decoding be? The ladder of bounds of "Speculative Decoding: Performance or
Illusion?" (Liu, Yu, Park, Stoica, Cheung, arXiv 2601.11580), from two files: accept traces and a cost table
(minispec/data/traces.py).

The file reads from the price of one round to the cells of a report:

    CostTable    seconds of a round, by rows, tokens and context
    plans        who drafts how much, at every round of a request: a list of `Round`
    time_of      what a plan costs; `replay` is the same for a batch of different requests
    optimum      the plan of least time, by dynamic programming
    ladder       all rungs for a set of requests; `cells` for every workload and batch size of a trace file

A rung is a speed-up: the time of `autoregressive` divided by the time of the rung's plan.

    L0 observed        wall clock (studies/ladder.py)          L5 optimum, one drafter   a bound
    L1 modelled        the recorded rounds, at these prices    L6 optimum, all drafters  each at its own price
    L2 best fixed k    one k for all requests                  L7 L6 with free drafters
    L4 greedy          the paper's oracle, NOT a bound         L9 one pass               the model's ceiling

Glossary, code <-> paper: rows B, requests in a batch; prompt_len P_r; n_out N; position p_r, output tokens
that exist when a round starts; kv C, tokens in the cache, of all rows; queries Q, tokens in a forward, of all
rows; proposed j, drafts of a round; accept[i] = a(i), accepted drafts + 1; emitted, tokens a round gains,
bonus included, their mean is tau; verify T_verify; draft T_draft; overhead T_ovh; k gamma.

What differs from the paper, and why:
- The paper's oracle proposes at every position what is accepted there. That is greedy: a shorter round can
  land where the next one is longer. `optimum` is a dynamic program, the true least time over all lengths (and
  drafters).
- Its simulator reads accept[i - 1] at position i, charges a drafter that proposes nothing, prices the winner
  of several drafters as an n-gram lookup, and averages rates (test_bounds.py plays these rules). Here
  `greedy` keeps only the second of them, and all averages are of time.
- Costs may be a measured grid. The paper's are linear, with constants fitted at one k.
- Its batch is B copies of one request, and so is `rows` here. With linear costs, 1/rows of that time, summed
  over requests, also bounds from below what a batch of at most `rows` different requests needs.

L5 to L7 are bounds for rounds of at most k_max drafts. Where a trace is *censored*, all drafts that were
asked for were accepted, so longer rounds might gain more. Every cell reports this share of positions.

All times are seconds. numpy only, no torch.
"""
import itertools
from typing import NamedTuple

import numpy as np

from minispec.data.traces import LINEAR, check_costs, read_costs

BATCHES = (1, 4, 16)


# -- the cost model --------------------------------------------------------------------------------

class CostTable:
    """Seconds of each part of a round. Arguments are totals over the rows, numbers or arrays that broadcast;
    `drafts` is per row. ValueError if the table is not valid."""

    def __init__(self, table):
        self.table = check_costs(table)
        self.drafters = tuple(table.get("draft", {}))
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
    offered = trace.offered.get(name)
    plan = []
    i = 1
    while i < trace.n_out:
        room = min(k, trace.n_out - i - 1)
        proposed = room if offered is None else min(room, int(offered[i]))
        emitted = min(int(trace.accept[name][i]), proposed + 1)
        plan.append(Round(i, name if room else None, proposed, emitted))
        i += emitted
    return plan


def greedy(trace, names, k_max):
    """L4: at every position the drafter with the longest accept (the first of equals) proposes exactly what
    will be accepted, k_max tokens at most. As in the paper it is charged even where it proposes nothing. NOT
    a bound: see the module's docstring."""
    plan = []
    i = 1
    while i < trace.n_out:
        name = max(names, key=lambda m: trace.accept[m][i])
        emitted = min(int(trace.accept[name][i]), k_max + 1)
        plan.append(Round(i, name, emitted - 1, emitted))
        i += emitted
    return plan


def one_pass(trace):
    """L9: the whole output known in advance and verified in one forward."""
    return [Round(1, None, trace.n_out - 2, trace.n_out - 1)] if trace.n_out > 1 else []


# -- what a plan costs -----------------------------------------------------------------------------

def time_of(plan, trace, cost, rows=1):
    """Seconds that a plan costs `rows` copies of the request in lock-step, prefill included (paper: T_step
    summed over steps)."""
    position = np.array([r.position for r in plan], int)
    proposed = np.array([r.proposed for r in plan], int)
    names = np.array([r.name for r in plan], object)
    kv = rows * (trace.prompt_len + position)

    # Every round is one forward of the target ..
    total = cost.prefill(trace.prompt_len, rows) + np.sum(cost.step(kv, rows * (1 + proposed), rows))

    # .. and a drafter is charged for its own rounds.
    for name in sorted(set(names) - {None}):
        own = names == name
        total += np.sum(cost.draft(name, kv[own], proposed[own], rows))
    return float(total)


def replay(plans, traces, cost, batch):
    """Seconds that an engine needs for different requests that share forwards: up to `batch` requests at
    once, the next one enters when one is done, and every iteration is one round of each that is there.
    plans[i] is the plan of traces[i]. For equal requests that all fit in, the same as `time_of` with rows =
    batch, prefill apart."""
    waiting = [i for i, plan in enumerate(plans) if plan]
    active = []
    done = [0] * len(plans)                      # rounds of each request so far
    steps = []
    drafts = {}
    while waiting or active:
        while waiting and len(active) < batch:
            active.append(waiting.pop(0))
        now = {i: plans[i][done[i]] for i in active}
        kv = {i: traces[i].prompt_len + r.position for i, r in now.items()}

        # One forward of the target for all ..
        steps.append((sum(kv.values()), len(now) + sum(r.proposed for r in now.values()), len(now)))

        # .. and one call of every drafter that somebody asks, as deep as the deepest of its rows.
        for name in sorted({r.name for r in now.values()} - {None}):
            own = [i for i in now if now[i].name == name]
            deepest_row = max(now[i].proposed for i in own)
            drafts.setdefault(name, []).append((sum(kv[i] for i in own), deepest_row, len(own)))
        for i in active:
            done[i] += 1
        active = [i for i in active if done[i] < len(plans[i])]

    # Price what was collected.
    total = sum(float(cost.prefill(t.prompt_len)) for t in traces)
    kv, queries, rows = np.array(steps, float).reshape(-1, 3).T
    total += np.sum(cost.step(kv, queries, rows))
    for name, calls in drafts.items():
        kv, proposed, rows = np.array(calls, float).T
        total += np.sum(cost.draft(name, kv, proposed, rows))
    return float(total)


# -- the least time --------------------------------------------------------------------------------

def charges(trace, cost, names, rows, k_max):
    """What every possible round costs: (step, {name: step and drafting}), arrays (N, k_max + 1) of seconds
    by position and number of drafts."""
    kv = rows * (trace.prompt_len + np.arange(trace.n_out)[:, None])                     # (N, 1)
    drafts = np.arange(k_max + 1)                                                        # (K + 1,)
    step = cost.step(kv, rows * (1 + drafts), rows) + np.zeros((trace.n_out, k_max + 1))
    return step, {m: step + cost.draft(m, kv, drafts, rows) for m in names}


def optimum(trace, step, charged):
    """L5 (one drafter), L6 (several), L7 (drafters that cost no more than `step`): the plan of least time, by
    dynamic programming from the end. step, charged: as `charges` returns them. Returns (seconds without
    prefill, plan).

    Every round may draft nothing, at no draft cost, or let any drafter propose 1 .. k_max tokens, also more
    than will be accepted: with a measured table that can be cheaper. Exact if what is accepted does not
    depend on where earlier rounds began.

        V[i] = min( step(0) + V[i + 1],
                    min over m, j of  step(j) + draft_m(j) + V[i + min(j + 1, accept_m[i])] )
    """
    n, names = trace.n_out, list(charged)
    drafts = np.arange(step.shape[1])
    accept = np.stack([trace.accept[m] for m in names], 1)                               # (N, M)

    # 1. Where every round would land, and what it costs: (N, M, K + 1).
    position = np.arange(n)[:, None, None]
    landing = position + np.minimum(drafts + 1, accept[..., None])
    times = np.stack(list(charged.values()), 1)
    times[..., 0] = step[:, :1]                          # no drafts, nobody is asked
    # A round of j drafts has room for j + 1 tokens, one of them the bonus.
    times = np.where((drafts > 0) & (position + drafts + 1 > n), np.inf, times)

    # 2. From the end, the best round at every position.
    value = np.zeros(n + 1)                              # least time from here on
    choice = np.zeros(n, int)
    for i in range(n - 1, 0, -1):
        options = (times[i] + value[landing[i]]).ravel()
        choice[i] = options.argmin()
        value[i] = options[choice[i]]

    # 3. From the first token on, follow the choices.
    plan = []
    i = 1
    while i < n:
        m, proposed = divmod(int(choice[i]), len(drafts))
        emitted = int(landing[i, m, proposed]) - i
        plan.append(Round(i, names[m] if proposed else None, proposed, emitted))
        i += emitted
    return value[1], plan


# -- the ladder ------------------------------------------------------------------------------------

def ladder(traces, cost, rows=1, k_max=None):
    """The rungs L2 to L9 for a set of requests (one workload, one batch size), as a dict that JSON can hold.

    Speed-ups are total autoregressive time over total time, prefill included in both. Next to them are
    "seconds", the modelled autoregressive time of all requests, each as 1/rows of a lock-step batch of
    copies: seconds / speed-up is the time of any rung, and for L5 to L9 with linear costs a lower bound for
    batches of different requests; "censored", {drafter, or "all": share of positions where all drafts that
    were asked for were accepted}; above a few percent L5 to L7 only bound rounds of at most k_max drafts.

    k_max: most drafts in a round, for every rung (default: the most ever accepted in a trace). Compared are
    the drafters that both the traces and the cost table have; ValueError if there is none.
    """
    names = compared(traces, cost)
    if k_max is None:
        k_max = deepest(traces, names)
    groups = {m: [m] for m in names} | {"all": names}

    def total(plan_of):
        return sum(time_of(plan_of(t), t, cost, rows) for t in traces)

    # The optima: of each drafter, of all together, and of all at no cost. And every fixed k, whose rounds are
    # looked up in the same tables.
    prefill = sum(float(cost.prefill(t.prompt_len, rows)) for t in traces)
    least = dict.fromkeys([*groups, "free"], prefill)
    by_k = {m: np.full(k_max, prefill) for m in names}
    for t in traces:
        step, charged = charges(t, cost, names, rows, k_max)
        for label, group in groups.items():
            least[label] += optimum(t, step, {m: charged[m] for m in group})[0]
        least["free"] += optimum(t, step, {m: step for m in names})[0]
        for m in names:
            for k in range(1, k_max + 1):
                for r in fixed(t, m, k):
                    by_k[m][k - 1] += (charged[m] if r.name else step)[r.position, r.proposed]

    plain = total(autoregressive)

    def speedup(seconds):
        return float(plain / seconds) if seconds else 1.0        # no seconds at all: nothing to gain

    return {
        "rows": rows,
        "requests": len(traces),
        "k_max": k_max,
        "seconds": plain / rows,
        "censored": {label: censored_share(traces, group) for label, group in groups.items()},
        "L2": {m: {"k": int(some.argmin()) + 1, "speedup": speedup(min(some))}
               for m, some in by_k.items()},
        "L4": {m: speedup(total(lambda t: greedy(t, group, k_max))) for m, group in groups.items()},
        "L5": {m: speedup(least[m]) for m in names},
        "L6": speedup(least["all"]),
        "L7": speedup(least["free"]),
        "L9": speedup(total(one_pass)),
    }


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


# -- from files to cells ---------------------------------------------------------------------------

def by_workload(traces):
    """{workload: traces}, by what is in front of "/" in the id; ids without one are all of the workload
    "requests"."""
    out = {}
    for t in traces:
        workload = t.id.split("/")[0] if "/" in t.id else "requests"
        out.setdefault(workload, []).append(t)
    return out


def cells(traces, cost):
    """The ladder of every workload at every batch size, a dict each, for batches of copies as in the
    paper."""
    out = []
    for workload, some in by_workload(traces).items():
        for rows in BATCHES:
            about = {"workload": workload, "batch": rows, "kind": "copies"}
            out.append(about | ladder(some, cost, rows))
    return out
