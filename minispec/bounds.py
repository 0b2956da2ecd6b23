"""How fast could speculative decoding be? The ladder of bounds of "Speculative Decoding: Performance or
Illusion?" (Liu, Yu, Park, Stoica, Cheung, arXiv 2601.11580), from two files: accept traces and a cost table
(traces.py describes both).

    python -m minispec.bounds --traces T.jsonl --cost C.json

docs/own-traces.md has a converter for the logs of an engine. The file reads from the rungs of one request to
the table of a study:

    rung_seconds     the time of every request on every rung, by dynamic programming from the last token
    ladder           the rungs of a set of requests
    replay           seconds of known rounds of different requests that share forwards
    analyse          the ladder of every workload and batch size, next to the observed speed-ups

A rung is a speed-up: plain decoding's time divided by the time that the rung's choices take.

    L0 observed        wall clock                              L5 optimum, one drafter   a bound
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
- Its batch is B copies of one request, and so is `rows` here. With linear costs, 1/rows of that time, summed
  over requests, also bounds from below what a batch of at most `rows` different requests needs. Observed
  batches hold different requests: their L1 is exact, their bounds are those of 1/rows of a batch of copies.

L5 to L7 are bounds for rounds of at most k_max drafts. Where a trace is *censored*, all drafts that were
asked for were accepted, so longer rounds might gain more. Every cell reports this share of positions.

All times are seconds. numpy only, no torch.
"""
import os
from itertools import product

import numpy as np
from tqdm import tqdm

from minispec import ROOT
from minispec.tools.files import write_json
from minispec.tools.markdown import cell, texts
from minispec.tools.plots import draw, lines
from minispec.tools.script import Parser, check_writable, positive, run_main, visible
from minispec.traces import CostTable, read_costs, read_traces

BATCHES = (1, 4, 16)
AVERAGES = ("total time", "mean rate")
BOTH = " / ".join(AVERAGES)
COMBINED = "adaptive"            # the method that may use all drafters
FEW = 0.05                       # the censored share of positions above which a bound is marked
WINDOW = 10                      # positions of an output that are averaged in a figure
LARGEST = 1000                   # a batch, or drafts in a round


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


# -- what an engine was observed to do ------------------------------------------------------------

def analyse(traces, prices, runs=None, batches=BATCHES, k_max=None):
    """The ladders of all cells, as a dict that JSON can hold. A cell is one workload at one batch size.

    prices: a checked cost table; runs: the rows of bench.py's study `run`. With them there is one cell for
    each workload and batch size that was run (`observed`); without them one for each workload of the traces
    at each of `batches`, as batches of copies, as in the paper."""
    cost = CostTable(prices)
    names = compared(traces, cost)
    if runs:
        cells = observed_cells(traces, cost, runs)
    else:
        cells = [{"workload": workload, "batch": rows, **ladder(some, cost, rows, k_max)}
                 for workload, some in by_workload(traces).items() for rows in batches]
    return {
        "about": prices.get("about", {}),
        "left_out": [m for m in traces[0].accept if m not in names],
        "cells": cells,
        "model_error": summary(cells, "error"),
        "speedup_error": summary(cells, "speedup_error"),
    }


def summary(cells, name):
    """Median and largest of an error over all methods of all cells; None if nothing was observed."""
    errors = [abs(e) for c in cells for e in c.get(name, {}).values()]
    return {"median": float(np.median(errors)), "max": max(errors)} if errors else None


def observed_cells(traces, cost, runs):
    """A cell for each workload and batch that was run."""
    # Answers of diffusion models are their own, and traces are greedy.
    runs = [r for r in runs if r["identical"] is not None and not r.get("temperature")]
    by_id = {t.id: t for t in traces}
    cells = []
    for plain in (r for r in runs if r["method"] == "ar"):
        missing = [i for i in plain["ids"] if i not in by_id]
        if missing:
            raise ValueError(f"the run has a request '{missing[0]}' that has no trace; measure both again")
        some = [by_id[i] for i in plain["ids"]]
        about = {key: plain[key] for key in ("workload", "batch")}
        one = about | ladder(some, cost, plain["batch"])
        rows = [r for r in runs if about.items() <= r.items()]
        one |= observed(rows, one, sum(t.n_out for t in some))
        for by, field in zip(AVERAGES, ("speedup", "rate_speedup")):
            one[by]["L0"] = {r["method"]: r.get(field) for r in rows}
        cells.append(one)
    return cells


def observed(rows, cell, traced):
    """The observed part of one cell, by total time and with reading the prompts:

    L1: speed-up of every method with both times modelled, its recorded rounds replayed through the cost table
    error: modelled seconds / observed seconds - 1, also of plain decoding. It includes how the machine's
        speed changed between pricing and running; "speedup_error", L1 / L0 - 1, does not
    above: observed seconds / the least seconds of the optimum (L5; L6 for the combined method). 1.5 says that
        50 % more time was spent than any choice of lengths needs; below 1 the model or the bound is wrong
    gap: share of the way from the best single method to L6 that the combined method goes by the clock;
        "gap_modelled", the same with all three at the same prices

    rows: one row of the study `run` for each method; traced: the tokens of the traces, because in bf16
    answers may part from them at near-ties."""
    by_clock = {r["method"]: r["speedup"] for r in rows}
    runs = {r["method"]: r for r in rows}
    modelled = {m: r["modelled"] for m, r in runs.items() if r.get("modelled")}
    by_model = {m: runs[m]["tokens"] / s * modelled["ar"] / runs["ar"]["tokens"] for m, s in modelled.items()}
    alone, together = (cell["total time"][rung] for rung in ("L5", "L6"))
    optimum = {**alone, COMBINED: together, "ar": 1.0}
    plain = cell["seconds"] / traced                     # of a token, by the model
    out = {
        "L1": by_model,
        "error": {m: s / runs[m]["seconds"] - 1 for m, s in modelled.items()},
        "speedup_error": {m: s / by_clock[m] - 1 for m, s in by_model.items() if m != "ar"},
        "above": {m: r["seconds"] / r["tokens"] * optimum[m] / plain
                  for m, r in runs.items() if m in optimum},
    }
    for gained, name in ((by_clock, "gap"), (by_model, "gap_modelled")):
        single = max((s for m, s in gained.items() if m in ("ar", *alone)), default=1.0)
        if COMBINED in gained and together > single:
            out[name] = (gained[COMBINED] - single) / (together - single)
    return out


# -- the table -------------------------------------------------------------------------------------

def table(r):
    """The Markdown table of what `analyse` returns, and notes on it."""
    rows = [row_of(c, m) for c in r["cells"] for m in c["censored"]]
    parts = [texts(rows), f"All speed-ups are {BOTH}."]
    if any(share > FEW for c in r["cells"] for share in c["censored"].values()):
        parts.append(
            f"*: at more than {100 * FEW:.0f} % of the positions all drafts of the trace were accepted, so "
            "longer rounds might gain more; the figure only bounds rounds of at most as many drafts.")
    if r["left_out"]:
        parts.append(f"Left out, because the cost table has no price for it: {', '.join(r['left_out'])}.")
    for what, e in (("seconds", r["model_error"]), ("speed-ups", r["speedup_error"])):
        if e:
            parts.append(f"Error of the cost model, modelled over observed {what}: "
                         f"median {100 * e['median']:.0f} %, at most {100 * e['max']:.0f} %.")
    return "\n\n".join(parts)


def row_of(c, m):
    """{head: text} of a cell's drafter, or of all together, for which L2 and L5 have the best one."""
    total = c[AVERAGES[0]]
    together = m == "all"
    fixed = best = m
    if together:
        fixed = max(total["L2"], key=lambda name: total["L2"][name]["speedup"])
        best = max(total["L5"], key=total["L5"].get)
    row = {"workload": c["workload"], "batch": c["batch"], "drafter": m}
    if "L0" in total:
        who = COMBINED if together else m
        row["L0 observed"] = both(c, "L0", who)
        row["L1 modelled"] = cell("{%s:.2f}" % who, c["L1"])
        row["time over the bound's"] = cell("{%s:.2f}" % who, c["above"])
        if together:
            row["share of the gap to L6"] = cell("{gap:.0%}", c)
            row["the same, modelled"] = cell("{gap_modelled:.0%}", c)
    k = " / ".join(dict.fromkeys(str(c[by]["L2"][fixed]["k"]) for by in AVERAGES))
    speedups = " / ".join(f"{c[by]['L2'][fixed]['speedup']:.2f}" for by in AVERAGES)
    row["L2 best fixed k"] = f"{speedups}, k {k}" + f" {fixed}" * together
    row["L4 greedy (not a bound)"] = both(c, "L4", m)
    row["L5 optimum of one"] = both(c, "L5", best, c["censored"][best]) + f" {best}" * together
    if together:
        row["L6 of all"] = both(c, "L6", mark=c["censored"]["all"])
        row["L7 free drafters"] = both(c, "L7", mark=c["censored"]["all"])
        row["L9 one pass"] = both(c, "L9")
    row["censored"] = f"{100 * c['censored'][m]:.0f} %"
    return row


def both(c, rung, m=None, mark=0.0):
    """A rung by both averages, marked where it is a bound that the traces are too short for."""
    values = [c[by].get(rung) for by in AVERAGES]
    if m is not None:
        values = [some.get(m) for some in values]
    return " / ".join(f"{x:.2f}" + "*" * (mark > FEW) for x in values if x is not None)


# -- the figures -----------------------------------------------------------------------------------

def speedup_by_batch(axes, r):
    """What was observed and the best of every rung, by total time, against the batch size: of the last
    workload, which is all of them mixed where they were run."""
    rows = []
    shown = r["cells"][-1]["workload"]
    for one in (c for c in r["cells"] if c["workload"] == shown):
        c = one[AVERAGES[0]]
        observed = c.get("L0", {})
        rungs = {
            "observed, adaptive": observed.get(COMBINED),
            "observed, best single": max((observed[m] for m in c["L5"] if m in observed), default=None),
            "L2 best fixed k": max(x["speedup"] for x in c["L2"].values()),
            "L5 best single": max(c["L5"].values()),
            "L6 all drafters": c["L6"],
            "L7 free drafters": c["L7"],
        }
        rows += [(name, one["batch"], x) for name, x in rungs.items() if x]
    lines(axes, rows, "batch", "speed-up")


def winners(axes, traces):
    """Along the output, the share of positions at which a drafter's round would gain more than any other
    one's; the band is twice the standard error over requests."""
    wins = []                                            # by request, (drafters, positions)
    for t in traces:
        gain = np.stack([*t.accept.values(), np.ones(t.n_out)])        # a lone drafter is held against none
        second, most = np.sort(gain, axis=0)[-2:]
        wins.append((gain[:-1] == most) & (most > second))
    starts = range(1, max(t.n_out for t in traces) - WINDOW + 1, WINDOW)
    for i, name in enumerate(traces[0].accept):
        some = [[w[i, start:start + WINDOW].mean() for w in wins if w.shape[1] >= start + WINDOW]
                for start in starts]
        share = np.array([np.mean(x) for x in some])
        error = np.array([2 * np.std(x) / len(x) ** 0.5 for x in some])
        axes.plot(starts, share, label=visible(name).replace("$", r"\$"))          # no mathematics
        axes.fill_between(starts, share - error, share + error, alpha=0.2)
    axes.set(xlabel="position in the output", ylabel="share of positions where it gains most")


FIGURES = {
    "bounds.json": {"bounds_batch": speedup_by_batch},
    "traces.jsonl": {"bounds_winners": winners},
}


# -- the command -----------------------------------------------------------------------------------

def sizes(text):
    """The type of an option that is a list of sizes."""
    return [positive(one) for one in text.split(",")]


def parse_args(argv=None):
    p = Parser(__doc__)
    add = p.add_argument
    add("--traces", required=True, metavar="FILE",
        help="accept traces, JSON lines (minispec/traces.py)")
    add("--cost", default=f"{ROOT}results/costs.json", metavar="FILE",
        help="cost table (minispec/traces.py; default %(default)s; the paper's is "
        "results/costs_h100.json)")
    add("--batches", type=sizes, default=BATCHES, metavar="N,N,..",
        help="batch sizes, like 1,8,64 (default %(default)s)")
    add("--k-max", type=positive, metavar="K",
        help="most drafts in a round (default: the most that a trace has accepted)")
    add("--json", metavar="OUT", help="file for all figures as JSON; drawings are written next to it")
    args = p.parse_args(argv)
    largest = max(*args.batches, args.k_max or 1)
    if largest > LARGEST:
        raise ValueError(f"--batches and --k-max must be at most {LARGEST}, got {largest}")
    if args.json:
        check_writable(args.json, [args.traces, args.cost])
    return args


def main(argv=None):
    args = parse_args(argv)
    traces, prices = read_traces(args.traces), read_costs(args.cost)
    positions = sum(t.n_out - 1 for t in traces)
    result = analyse(traces, prices, batches=args.batches, k_max=args.k_max)
    longest = max(c["k_max"] for c in result["cells"])
    about = " ".join(f"{name}: {value};" for name, value in result["about"].items())
    if args.json:
        write_json(args.json, result)
        draw(FIGURES, {"bounds.json": result, "traces.jsonl": traces}, os.path.splitext(args.json)[0] + "_")
    print(visible(f"traces  {args.traces}: {len(traces):,} requests, {positions:,} positions\n"
                  f"prices  {args.cost} {about}\n"
                  f"rounds  of at most {longest} drafts\n\n{table(result)}"))


if __name__ == "__main__":
    run_main(main)
