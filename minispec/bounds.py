"""How fast could speculative decoding be? The ladder of bounds of "Speculative Decoding: Performance or
Illusion?" (Liu, Yu, Park, Stoica, Cheung, arXiv 2601.11580), from two files: accept traces and a cost table
(minispec/data/traces.py).

The file reads from the price of one round to the rungs of many requests:

    CostTable        seconds of a round, by rows, tokens and context
    rung_seconds     the time of every request on every rung, by dynamic programming from the last token
    ladder           the rungs of a set of requests
    replay           what a batch of different requests costs whose rounds are known

A rung is a speed-up: plain decoding's time divided by the time that the rung's choices take.

    L0 observed        wall clock (studies/ladder.py)          L5 optimum, one drafter   a bound
    L1 modelled        the recorded rounds, at these prices    L6 optimum, all drafters  each at its own price
    L2 best fixed k    one k for all requests                  L7 L6 with free drafters
    L4 greedy          the paper's oracle, NOT a bound         L9 one pass               the model's ceiling

Requests are averaged in two ways (AVERAGES), and both are reported everywhere. By *total time*: plain
decoding's seconds for all requests over the rung's. By *mean rate*, as in the paper: the mean of the
requests' tokens/s over that of plain decoding, in which short and fast requests weigh more.

Glossary, code <-> paper: rows B, requests in a batch; prompt_len P_r; n_out N; position p_r, output tokens
that exist when a round starts; kv C, tokens in the cache, of all rows; queries Q, tokens in a forward, of all
rows; proposed j, drafts of a round; accept[i] = a(i), accepted drafts + 1; emitted, tokens a round gains,
bonus included, their mean is tau; verify T_verify; draft T_draft; overhead T_ovh; k gamma.

What differs from the paper, and why:
- The paper's oracle proposes at every position what is accepted there. That is greedy: a shorter round can
  land where the next one is longer. The optimum is a dynamic program, the true least time over all lengths
  (and drafters).
- Its simulator reads accept[i - 1] at position i, charges a drafter that proposes nothing, and prices the
  winner of several drafters as an n-gram lookup (test_bounds.py plays these rules). Here L4 keeps only the
  second of them.
- Costs may be a measured grid. The paper's are linear, with constants fitted at one k.
- Its batch is B copies of one request, and so is `rows` here. With linear costs, 1/rows of that time, summed
  over requests, also bounds from below what a batch of at most `rows` different requests needs.

L5 to L7 are bounds for rounds of at most k_max drafts. Where a trace is *censored*, all drafts that were
asked for were accepted, so longer rounds might gain more. Every cell reports this share of positions.

All times are seconds. numpy only, no torch.
"""
from itertools import product

import numpy as np
from tqdm import tqdm

from minispec.data.traces import GRID, LINEAR, check_costs

BATCHES = (1, 4, 16)
AVERAGES = ("total time", "mean rate")
FREE = {"kind": "linear"}


# -- the cost model --------------------------------------------------------------------------------

class CostTable:
    """Seconds of each part of a round. Arguments are totals over the rows, numbers or arrays that broadcast;
    `drafts` is per row. ValueError if the table is not valid."""

    def __init__(self, table):
        self.table = {"draft": {}, "read": {}, "overhead": FREE, **check_costs(table)}
        self.drafters = tuple(self.table["draft"])
        self.accept = table.get("accept", {})

    def verify(self, kv, queries, rows=1):
        """T_verify: one target forward of `queries` tokens over `kv` cached ones."""
        return seconds(self.table["verify"], rows, queries / rows, kv)

    def step(self, kv, queries, rows=1):
        """What every round pays: verification and the overhead T_ovh, all that a round needs besides the two
        models, sampling included."""
        return self.verify(kv, queries, rows) + seconds(self.table["overhead"], rows, 1, 0)

    def draft(self, name, kv, drafts, rows=1):
        """T_draft: drafter `name` proposes `drafts` tokens for each row."""
        entry = self.table["draft"][name]
        if entry["kind"] == "share":
            return entry["of_verify"] * self.verify(kv, rows * (1 + drafts), rows)
        return seconds(entry, rows, drafts, kv)

    def read(self, name, tokens):
        """What drafter `name` takes to read `tokens` tokens of a request that it has not seen; 0 if not in
        the table."""
        return seconds(self.table["read"].get(name, FREE), 1, tokens, 0)

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
    least = values.min()
    # What was measured at one value only is constant: the next point is infinitely far away.
    values = np.pad(values, [(0, int(n == 1)) for n in values.shape], mode="edge")
    corners = []
    for name, x in zip(GRID, (rows, tokens, kv)):
        axis = np.array(grid[name], float)
        axis = np.append(axis, np.inf) if len(axis) == 1 else axis
        x = np.maximum(x, axis[0])
        i = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
        weight = (x - axis[i]) / (axis[i + 1] - axis[i])
        corners.append([(i, 1 - weight), (i + 1, weight)])
    out = sum(values[i, j, l] * (u * v * w) for (i, u), (j, v), (l, w) in product(*corners))
    return np.maximum(out, least)        # noise must not lead an extrapolation below what was ever measured


# -- the rungs -------------------------------------------------------------------------------------

def rung_seconds(traces, cost, names, rows, k_max):
    """{rung: seconds of every request (R,)}, each as `rows` copies in lock-step, prefill included. The rungs
    are "plain", ("L2", drafter, k), ("L4", group), ("L5", group), "L7", "L9"; a group is a drafter or "all".

    All go from the last token to the first, with V[i] the time that is left when i tokens exist. A round may
    draft nothing, at no draft cost, or let a drafter propose 1 .. k_max tokens, also more than will be
    accepted: with a measured table that can be cheaper. Exact if what is accepted does not depend on where
    earlier rounds began.

        V[i] = min( step(0) + V[i + 1],
                    min over m, j of  step(j) + draft_m(j) + V[i + min(j + 1, accept_m[i])] )

    L5 and L7 take this minimum; the other rungs are given one round for every position.
    """
    # 1. Requests as arrays. Behind the drafters comes nobody, who drafts nothing and gains one token.
    n_out = np.array([t.n_out for t in traces])
    prompts = np.array([t.prompt_len for t in traces])
    request = np.arange(len(traces))[:, None]
    accept = _columns(traces, [*names, None], "accept", 1)
    offered = _columns(traces, names, "offered", k_max)
    drafts = np.arange(k_max + 1)
    nobody = np.arange(len(names) + 1)[:, None] == len(names)

    # 2. The rungs that are given one round for every position, then those that may choose, and V of all. A
    #    round reaches k_max + 1 positions ahead, so that many are kept.
    groups = {m: [i] for i, m in enumerate(names)}
    groups["all"] = list(range(len(names)))
    given = ["plain", *product(["L2"], names, range(1, k_max + 1)), *product(["L4"], groups)]
    rungs = [*given, *product(["L5"], groups), "L7"]
    kept = k_max + 2
    left = np.zeros((kept, len(traces), len(rungs)))

    for i in tqdm(range(n_out.max() - 1, 0, -1), desc=f"{len(traces)} requests", delay=1, leave=False):
        # 3. What every round costs (requests, drafters, drafts), and where it lands.
        room = np.maximum(n_out - i - 1, 0)[:, None]                     # a bonus token is left out
        gain = accept[:, :, i]
        paid, unpaid = _prices(cost, names, rows, prompts[:, None] + i, drafts)
        landing = (i + np.minimum(drafts + 1, gain[..., None])) % kept
        now = left[i % kept]

        # 4. One round is given: who proposes how much.
        who, proposed = _given_rounds(gain, offered[:, :, i], room, k_max, groups.values())
        behind = left[landing[request, who, proposed], request, np.arange(len(given))]
        now[:, :len(given)] = paid[request, who, proposed] + behind

        # 5. Any round that there is room for may be chosen, also that of nobody, who comes last.
        possible = (drafts <= room)[:, None] & ((drafts == 0) == nobody)
        paid, unpaid = (np.where(possible, price, np.inf) for price in (paid, unpaid))
        choices = [(paid, own) for own in groups.values()] + [(unpaid, groups["all"])]
        for column, (price, own) in enumerate(choices, len(given)):
            who = [*own, -1]
            behind = left[landing[:, who], request[..., None], column]
            now[:, column] = (price[:, who] + behind).min((1, 2))
        now[n_out <= i] = 0.0                                            # these have no such position

    # 6. The prompts come on top. L9 verifies the whole output in one forward.
    seconds = dict(zip(rungs, left[1].T))
    one_pass = cost.step(rows * (prompts + 1), rows * np.maximum(n_out - 1, 1), rows)
    seconds["L9"] = np.where(n_out > 1, one_pass, 0.0)
    prefill = cost.prefill(prompts, rows)
    return {rung: np.maximum(s + prefill, 1e-30) for rung, s in seconds.items()}


def _prices(cost, names, rows, context, drafts):
    """Seconds of every round at a context (requests, 1): with the drafters' own, and of L7 without, each
    (requests, drafters, drafts); the last drafter is nobody."""
    step = cost.step(rows * context, rows * (1 + drafts), rows) + np.zeros((len(context), len(drafts)))
    drafting = [cost.draft(m, rows * context, drafts, rows) for m in names]
    return np.stack([*(step + own for own in drafting), step], 1), step[:, None]


def _given_rounds(gain, offered, room, k_max, groups):
    """The rounds of plain decoding, of every drafter with every k, and of the greedy oracle of every group:
    (who, proposed), each (requests, rungs)."""
    nobody = gain.shape[1] - 1
    plain = np.full_like(room, nobody), np.zeros_like(room)

    # A fixed k, or as many as the drafter has and there is room for; for the last token nobody is asked.
    k = np.tile(np.arange(1, k_max + 1), nobody)
    whose = np.repeat(np.arange(nobody), k_max)
    fixed = np.where(room > 0, whose, nobody), np.minimum(np.minimum(k, room), offered[:, whose])

    # The longest accept, the first of equals. As in the paper it is charged even where it proposes nothing.
    longest = np.stack([np.array(own)[gain[:, own].argmax(1)] for own in groups], 1)
    greedy = longest, np.minimum(np.take_along_axis(gain, longest, 1) - 1, k_max)
    return [np.concatenate(parts, 1) for parts in zip(plain, fixed, greedy)]


def _columns(traces, names, what, missing):
    """A field of all traces as an array (requests, drafters, longest output)."""
    out = np.full((len(traces), len(names), max(t.n_out for t in traces)), missing)
    for row, t in zip(out, traces):
        for own, name in zip(row, names):
            if name in getattr(t, what):
                own[:t.n_out] = getattr(t, what)[name]
    return out


def speedup(by, tokens, plain, seconds):
    """What requests gain by one of AVERAGES. tokens, plain, seconds: of each request, arrays."""
    if by == "total time":
        return float(plain.sum() / seconds.sum())
    return float((tokens / seconds).mean() / (tokens / plain).mean())


def ladder(traces, cost, rows=1, k_max=None):
    """The rungs L2 to L9 for a set of requests (one workload, one batch size), as a dict that JSON can hold:
    {average: {rung: speed-up}}, and next to the averages

    "seconds", plain decoding's time for all requests by the model, each as 1/rows of a lock-step batch of
    copies: by total time, seconds / speed-up is the time of any rung, and for L5 to L9 with linear costs a
    lower bound for batches of different requests; "censored", {drafter, or "all": share of positions where
    all drafts that were asked for were accepted}; above a few percent L5 to L7 only bound rounds of at most
    k_max drafts.

    k_max: most drafts in a round, for every rung (default: the most ever accepted in a trace). Compared are
    the drafters that both the traces and the cost table have; ValueError if there is none.
    """
    names = compared(traces, cost)
    k_max = k_max or deepest(traces, names)
    seconds = rung_seconds(traces, cost, names, rows, k_max)
    tokens = np.array([t.n_out for t in traces])
    censored = {m: censored_share(traces, [m]) for m in names} | {"all": censored_share(traces, names)}
    out = {
        "k_max": k_max,
        "seconds": float(seconds["plain"].sum() / rows),
        "censored": censored,
    }
    for by in AVERAGES:
        s = {rung: speedup(by, tokens, seconds["plain"], own) for rung, own in seconds.items()}
        best = {m: max(range(1, k_max + 1), key=lambda k: s["L2", m, k]) for m in names}
        out[by] = {
            "L2": {m: {"k": k, "speedup": s["L2", m, k]} for m, k in best.items()},
            "L4": {m: s["L4", m] for m in censored},
            "L5": {m: s["L5", m] for m in names},
            "L6": s["L5", "all"],
            "L7": s["L7"],
            "L9": s["L9"],
        }
    return out


def compared(traces, cost):
    """The drafters that both the traces and the cost table have; ValueError if there is none."""
    names = [m for m in traces[0].accept if m in cost.drafters]
    if not names:
        raise ValueError(f"the traces' drafters {', '.join(traces[0].accept)} are not in the cost table: "
                         f"{', '.join(cost.drafters) or 'it has none'}")
    return names


def deepest(traces, names):
    """The most drafts that were ever accepted, at least 1."""
    return max(1, int(_columns(traces, names, "accept", 1).max()) - 1)


def censored_share(traces, names):
    """The share of positions at which some of these drafters might have got more accepted than it was asked
    for."""
    hit = _columns(traces, names, "censored", False)[:, :, 1:].any(1).sum()
    return float(hit / max(1, sum(t.n_out - 1 for t in traces)))


def by_workload(traces):
    """{workload: traces}, by what is in front of the last "/" in the id; ids without one are all of workload
    "requests"."""
    out = {}
    for t in traces:
        workload = t.id.rpartition("/")[0] or "requests"
        out.setdefault(workload, []).append(t)
    return out


# -- rounds that are known: what a batch of different requests costs --------------------------------

def replay(plans, prompts, cost, batch):
    """Seconds that an engine needs for different requests that share forwards: up to `batch` requests at
    once, the next one enters when one is done, and every iteration is one round of each that is there.
    plans[i] are the rounds of a request (core/requests.Step), prompts[i] the tokens of its prompt. A round
    without drafts of the drafter's own asks none."""
    total = sum(float(cost.prefill(tokens)) for tokens in prompts)

    # A drafter reads the text in front of its first draft for a request. The bounds leave this out.
    for plan, tokens in zip(plans, prompts):
        first = {r.proposer: tokens + r.position for r in reversed(plan) if r.drafted}
        total += sum(float(cost.read(name, text)) for name, text in first.items())

    # One forward of the target for all, and one call of every drafter that somebody asks, as deep as the
    # deepest of its rows.
    left = [(tokens, list(plan)) for plan, tokens in zip(plans, prompts) if plan]
    while left:
        now = [(tokens + plan[0].position, plan.pop(0)) for tokens, plan in left[:batch]]
        proposed = sum(r.drafted + r.copies for _, r in now)
        total += float(cost.step(sum(kv for kv, _ in now), len(now) + proposed, len(now)))
        for name in {r.proposer for _, r in now if r.drafted}:
            own = [(kv, r.drafted) for kv, r in now if r.drafted and r.proposer == name]
            kv, drafts = zip(*own)
            total += float(cost.draft(name, sum(kv), max(drafts), len(own)))
        left = [request for request in left if request[1]]
    return total
