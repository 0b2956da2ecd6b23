"""How fast could speculative decoding be? The ladder of bounds of "Speculative Decoding: Performance or
Illusion?" (Liu, Yu, Park, Stoica, Cheung, arXiv 2601.11580), from two files: accept traces (traces.py) and a
cost table (costs.py).

    python -m minispec.bounds --traces T.jsonl --cost C.json

docs/own-traces.md has a converter for the logs of an engine. The file reads from one request to the table of
a study:

    rung_seconds     the seconds of a request on every rung; `least` is the dynamic program
    ladder           the rungs of a set of requests, as speed-ups
    replay           seconds of known rounds of different requests that share forwards
    analyse          the ladder of every workload and batch size, next to the observed speed-ups
    best_drafts      the best number of drafts by batch and context, or that none pays

A rung is a speed-up: plain decoding's time divided by the time of the rung's rounds:

    observed        by the clock                            optimum of one   a bound for each drafter
    modelled        the recorded rounds, at these prices    optimum of all   a bound for all drafters
    best fixed k    one k for all requests                  free drafters    the same if drafts cost nothing
    greedy          the paper's oracle, not a bound         one pass         the output in one forward

Speed-ups of several requests are averaged in two ways (AVERAGES), and both are reported everywhere. By *total
time*: plain decoding's seconds for all requests over the rung's. By *mean rate*, as in the paper: the mean of
the requests' tokens/s over plain decoding's tokens/s, in which short and fast requests weigh more.

Glossary, code <-> paper: batch B; prompt_len P_r; n_out N; position p_r, output tokens that exist when a
round starts; kv C, cached tokens of the whole batch; queries Q, tokens in a forward; proposed j, drafts of a
round; accept[i] = a(i), accepted drafts + 1; verify T_verify; draft T_draft; overhead T_ovh.

What differs from the paper, and why:
- The paper's oracle proposes exactly the drafts that will be accepted. That is greedy: a shorter round can
  land where the next one is longer. The optimum is a dynamic program, the true least time over all lengths
  (and drafters).
- Its simulator reads accept[i - 1] at position i, charges a drafter that proposes nothing, and prices the
  winner of several drafters as an n-gram lookup (test_bounds.py follows these rules). The greedy rung here
  keeps only the second of them.
- Its batch is B copies of one request, and so is `batch` here. With linear costs (without `kv_step`), 1/B of
  that time, summed over requests, also bounds from below the time of a batch of at most B different requests.
  Observed batches hold different requests: their recorded rounds are priced as they were, their bounds are
  1/B of the bounds of a batch of copies.

The optimum and the free drafters are bounds for rounds of at most k_max drafts. At a *censored* position all
drafts that the trace asked for were accepted, so longer rounds might gain more. Every cell reports the share
of such positions.

All times are seconds. No torch.
"""
from itertools import product

import numpy as np
from tqdm import tqdm

from minispec.costs import CostTable, read_costs
from minispec.tools.files import write_json
from minispec.tools.intervals import interval
from minispec.tools.markdown import cell, texts
from minispec.tools.script import Parser, check_writable, positive, run_main, visible
from minispec.traces import read_traces

AVERAGES = ("total time", "mean rate")
BOTH = " / ".join(AVERAGES)
BATCHES = (1, 4, 16)
CONTEXTS = (64, 512)             # tokens before a round
COMBINED = "adaptive"            # the method that may use all drafters
# Bounds for rounds of at most k_max drafts.
CENSORED = ("optimum of one", "optimum of all", "free drafters")
FEW = 0.05                       # the censored share of positions above which they are marked
LARGEST = 1000                   # a batch, or drafts in a round


# -- the rungs -------------------------------------------------------------------------------------

def rung_seconds(trace, cost, names, batch, k_max):
    """{rung: seconds of one request}, in a batch of copies, prefill included. The rungs are "plain",
    ("fixed", drafter, k), ("greedy", group), ("optimum", group), "free drafters", "one pass"; a group is a
    drafter or "all".

    A round may draft nothing, at no draft cost, or let a drafter propose 1 .. k_max tokens, also more than
    will be accepted: with a measured table that can be faster."""
    # 1. Every possible round, by drafter, position and number of drafts (M, N, k_max + 1): its price, and the
    #    tokens that it gains. The last token of the output cannot be a draft, because a round ends with one
    #    of the target's.
    position = np.arange(trace.n_out)
    room = trace.n_out - position - 1
    drafts = np.arange(k_max + 1)
    kv = batch * (trace.prompt_len + position)[:, None]
    step = cost.step(kv, batch * (1 + drafts), batch)
    plain = step[:, 0]
    step = np.where(drafts <= room[:, None], step, np.inf)
    price = np.stack([step + cost.draft(m, kv, drafts, batch) for m in names])
    accept = np.stack([trace.accept[m] for m in names])
    gain = np.minimum(drafts + 1, accept[..., None])

    # 2. Plain decoding; every drafter with every k, or fewer drafts if it has fewer or there is less room.
    out = {"plain": plain[1:].sum()}
    for (i, m), k in product(enumerate(names), range(1, k_max + 1)):
        proposed = np.minimum(np.minimum(k, room), trace.offered.get(m, k))
        paid = np.where(proposed > 0, price[i, position, proposed], plain)
        out["fixed", m, k] = follow(paid, gain[i, position, proposed])

    # 3. The greedy oracle proposes the drafts that will be accepted, by the drafter with most of them (of
    #    equals the first), and pays for drafting even if there are none. The optimum chooses among all
    #    rounds.
    groups = {m: [i] for i, m in enumerate(names)} | {"all": list(range(len(names)))}
    for group, own in groups.items():
        who = np.array(own)[accept[own].argmax(0)]
        proposed = np.clip(accept[own].max(0) - 1, 0, k_max)
        out["greedy", group] = follow(price[who, position, proposed], proposed + 1)
        out["optimum", group] = least(plain, price[own], gain[own])
    out["free drafters"] = least(plain, step[None], gain)

    # 4. The whole output in one forward. The prompt comes on top of every rung.
    kv = batch * (trace.prompt_len + 1)
    out["one pass"] = cost.step(kv, batch * (trace.n_out - 1), batch) * (trace.n_out > 1)
    prefill = cost.prefill(trace.prompt_len, batch)
    return {rung: max(float(seconds + prefill), 1e-30) for rung, seconds in out.items()}


def follow(price, gain):
    """Seconds of an output whose round at each position is given: price and gain (N,)."""
    total, position = 0.0, 1
    while position < len(price):
        total += price[position]
        position += gain[position]
    return total


def least(plain, price, gain):
    """The least seconds of an output over all choices of rounds. plain (N,): the price of a round without
    drafts; price and gain (M, N, k_max + 1): of the other rounds. left[i] is the time that is left when i
    tokens exist:

        left[i] = min( plain[i] + left[i + 1],  min over m, j of  price[m, i, j] + left[i + gain[m, i, j]] )

    Exact if the accepted drafts of a round do not depend on where earlier rounds began, and a round of j
    drafts has the first j of a longer round."""
    left = np.zeros(len(plain) + 1)
    for i in range(len(plain) - 1, 0, -1):
        left[i] = min(plain[i] + left[i + 1], (price[:, i] + left[i + gain[:, i]]).min())
    return left[1]


def speedup(by, tokens, plain, seconds):
    """Speed-up of requests by one of AVERAGES. tokens, plain, seconds: arrays (R,)."""
    if by == "total time":
        return float(plain.sum() / seconds.sum())
    return float(mean_rate(tokens / seconds, tokens / plain))


def mean_rate(rates, plain):
    """Speed-up by mean rate, from tokens/s of the same requests (.., R)."""
    return rates.mean(-1) / plain.mean(-1)


def ladder(traces, cost, batch=1, k_max=None):
    """The rungs of a set of requests (one workload, one batch size), as a dict that JSON can hold: {average:
    {rung: speed-up}}, and next to the averages

    "seconds": plain decoding's modelled time for all requests, each as 1/batch of a batch of copies. Divided
        by a rung's speed-up by total time, it is the rung's time. For a bound with linear costs, no batch of
        different requests takes less.
    "range": like an average, but a value is [low, high], the 95 % interval of the speed-up by mean rate, over
        requests.
    "censored": {drafter, or "all": share of positions where all drafts that were asked for were accepted}.
        Above a few percent the bounds only hold for rounds of at most k_max drafts.

    k_max: most drafts in a round, for every rung (default: the most ever accepted in a trace). Compared are
    the drafters that both the traces and the cost table have; ValueError if there is none.
    """
    names = compared(traces, cost)
    k_max = k_max or deepest(traces, names)
    found = [rung_seconds(t, cost, names, batch, k_max) for t in tqdm(traces, delay=1, leave=False)]
    times = {rung: np.array([one[rung] for one in found]) for rung in found[0]}
    tokens = np.array([t.n_out for t in traces])
    out = {
        "k_max": k_max,
        "seconds": float(times["plain"].sum() / batch),
        "censored": {m: censored_share(traces, [m]) for m in names} | {"all": censored_share(traces, names)},
    }
    for by in AVERAGES:
        s = {rung: speedup(by, tokens, times["plain"], own) for rung, own in times.items()}
        best = {m: max(range(1, k_max + 1), key=lambda k: s["fixed", m, k]) for m in names}
        out[by] = by_key(s.get, best)
    # The last average is the mean rate.
    rates = {rung: tokens / own for rung, own in times.items()}
    out["range"] = by_key(lambda rung: interval(mean_rate, rates[rung], rates["plain"]), best)
    return out


def by_key(value, best):
    """{name of a rung in tables and files: value(rung)}. best: {drafter: the best fixed k}."""
    return {
        "best fixed k": {m: {"k": k, "speedup": value(("fixed", m, k))} for m, k in best.items()},
        "greedy (not a bound)": {m: value(("greedy", m)) for m in (*best, "all")},
        "optimum of one": {m: value(("optimum", m)) for m in best},
        "optimum of all": value(("optimum", "all")),
        "free drafters": value("free drafters"),
        "one pass": value("one pass"),
    }


def compared(traces, cost):
    """The drafters that both the traces and the cost table have; ValueError if there is none, or one is
    named all."""
    names = [m for m in traces[0].accept if m in cost.drafters]
    if "all" in names:
        raise ValueError("a drafter may not be named all, which stands for all drafters together")
    if not names:
        raise ValueError(f"the traces' drafters {', '.join(traces[0].accept)} are not in the cost table: "
                         f"{', '.join(cost.drafters) or 'it has none'}")
    return names


def deepest(traces, names):
    """The most drafts that were ever accepted, at least 1."""
    return max(1, *(int(t.accept[m].max()) - 1 for t in traces for m in names))


def censored_share(traces, names):
    """The share of positions that are censored for one of these drafters or more."""
    hit = [np.any([t.censored.get(m, [False] * t.n_out) for m in names], 0)[1:] for t in traces]
    hit = np.concatenate(hit)
    return float(hit.sum() / max(1, len(hit)))


def by_workload(traces):
    """{workload: traces}. The workload is the part of the id before the last "/", or "requests"."""
    out = {}
    for t in traces:
        workload = t.id.rpartition("/")[0] or "requests"
        out.setdefault(workload, []).append(t)
    return out


# -- known rounds: the time of a batch of different requests ---------------------------------------

def replay(plans, prompts, cost, batch):
    """Seconds that an engine needs for different requests that share forwards: up to `batch` requests at
    once, the next one enters when one is done, and every iteration is one round of each active request.
    plans[i] are the rounds (core/requests.Round) of request i, prompts[i] the number of its prompt tokens. A
    round without drafts of a drafter pays for no drafting."""
    total = sum(cost.prefill(tokens) for tokens in prompts)

    # Before its first draft for a request, a drafter reads the text so far. The bounds leave this out.
    for plan, tokens in zip(plans, prompts):
        first = {r.proposer: tokens + r.position for r in reversed(plan) if r.drafted}
        total += sum(cost.read(name, text) for name, text in first.items())

    # One forward of the target for all, and one call of each drafter in use, with the longest of its drafts.
    left = [(tokens, list(plan)) for plan, tokens in zip(plans, prompts) if plan]
    while left:
        now = [(tokens + plan[0].position, plan.pop(0)) for tokens, plan in left[:batch]]
        proposed = sum(r.drafted + r.lookup for _, r in now)
        total += cost.step(sum(kv for kv, _ in now), len(now) + proposed, len(now))
        for name in {r.proposer for _, r in now if r.drafted}:
            own = [(kv, r.drafted) for kv, r in now if r.drafted and r.proposer == name]
            kv, drafts = zip(*own)
            total += cost.draft(name, sum(kv), max(drafts), len(own))
        left = [request for request in left if request[1]]
    return float(total)


# -- the observed speed-ups of an engine -----------------------------------------------------------

def analyse(traces, prices, runs=None, batches=BATCHES, k_max=None):
    """The ladders of all cells, as a dict that JSON can hold. A cell is one workload at one batch size.

    prices: a checked cost table; runs: the rows of bench.py's study `run`. With them there is one cell for
    each workload and batch size of the study (`observed`); without them one for each workload of the traces
    at each of `batches`, as batches of copies, as in the paper."""
    cost = CostTable(prices)
    if runs:
        cells = observed_cells(traces, cost, runs)
    else:
        cells = [{"workload": workload, "batch": batch, **ladder(some, cost, batch, k_max)}
                 for workload, some in by_workload(traces).items() for batch in batches]
    return {
        "about": prices.get("about", {}),
        "left_out": [m for m in traces[0].accept if m not in cost.drafters],
        "cells": cells,
        "best_drafts": best_drafts(traces, cost, {c["batch"]: c for c in cells}, k_max),
        "model_error": summary(cells, "error"),
        "speedup_error": summary(cells, "speedup_error"),
    }


def summary(cells, name):
    """Median and largest of an error over all methods of all cells; None if nothing was observed."""
    errors = [abs(e) for c in cells for e in c.get(name, {}).values()]
    return {"median": float(np.median(errors)), "max": max(errors)} if errors else None


def observed_cells(traces, cost, runs):
    """A cell for each workload and batch that was run: its ladder with the observed speed-ups, and by total
    time and with reading the prompts

    modelled: speed-up of every method with both times modelled, its recorded rounds replayed through the cost
        table
    error: modelled seconds / observed seconds - 1, also of plain decoding. It includes how the machine's
        speed changed between pricing and running; "speedup_error", modelled / observed speed-up - 1, does not
    above: observed seconds / the least seconds of the optimum (of all drafters for the combined method). 1.5:
        the engine took 50 % longer than the best rounds would; below 1 the model or the bound is wrong"""
    # Traces are greedy.
    runs = [r for r in runs if not r.get("temperature")]
    by_id = {t.id: t for t in traces}
    cells = []
    for plain in (r for r in runs if r["method"] == "ar"):
        if missing := [i for i in plain["ids"] if i not in by_id]:
            raise ValueError(f"the run has a request '{missing[0]}' that has no trace; measure both again")
        some = [by_id[i] for i in plain["ids"]]
        c = {key: plain[key] for key in ("workload", "batch")}
        own = {r["method"]: r for r in runs if c.items() <= r.items()}
        c |= ladder(some, cost, plain["batch"])
        # What the model says of the recorded rounds.
        modelled = {m: r["modelled"] for m, r in own.items() if r.get("modelled")}
        rates = {m: own[m]["tokens"] / seconds for m, seconds in modelled.items()}
        c["modelled"] = {m: rate / rates["ar"] for m, rate in rates.items()}
        c["error"] = {m: s / own[m]["seconds"] - 1 for m, s in modelled.items()}
        c["speedup_error"] = {m: x / own[m]["speedup"] - 1 for m, x in c["modelled"].items() if m != "ar"}
        # Seconds of a token: in bf16 answers may part from the traces at near-ties.
        token = c["seconds"] / sum(t.n_out for t in some)
        total = c["total time"]
        optimum = {**total["optimum of one"], COMBINED: total["optimum of all"], "ar": 1.0}
        c["above"] = {m: r["seconds"] / r["tokens"] * optimum[m] / token
                      for m, r in own.items() if m in optimum}
        for by, field in zip(AVERAGES, ("speedup", "rate_speedup")):
            c[by]["observed"] = {m: r[field] for m, r in own.items()}
        c["range"]["observed"] = {m: interval(mean_rate, r["rates"], plain["rates"]) for m, r in own.items()}
        cells.append(c)
    return cells


# -- when to draft at all ----------------------------------------------------------------------------------

def best_drafts(traces, cost, cells, k_max=None):
    """For each batch size and context, the number of drafts k of every drafter with the least seconds, and
    its speed-up over plain decoding; k is 0 where drafting never pays. The rounds are those in which the
    drafter writes the traces' outputs with k drafts, or fewer if it finds fewer; they are priced as if the
    context were always the same. cells: {batch: a cell}, whose fastest drafter by the clock is shown at the
    context nearest to the mean of all traces."""
    names = compared(traces, cost)
    drafts = np.arange((k_max or deepest(traces, names)) + 1)
    rounds = {name: rounds_by_drafts(traces, name, drafts[-1]) for name in names}
    usual = np.mean([t.prompt_len + t.n_out / 2 for t in traces])
    rows = []
    for batch, context in product(cells, CONTEXTS):
        kv = batch * context
        row = {"batch": batch, "context": context, "drafters": {}}
        for name in names:
            seconds = rounds[name] @ cost.round(name, kv, drafts, batch)
            seconds = np.maximum(seconds, 1e-30)         # there may be no rounds
            gain = seconds[0] / seconds                  # k = 0 is plain decoding
            k = int(gain.argmax())
            row["drafters"][name] = {"k": k, "speedup": float(gain[k])}
        clock = {m: x for m, x in cells[batch]["total time"].get("observed", {}).items() if m in names}
        if clock and context == min(CONTEXTS, key=lambda c: abs(c - usual)):
            row["clock"] = max(clock.items(), key=lambda one: one[1])
        rows.append(row)
    return rows


def rounds_by_drafts(traces, name, k_max):
    """How many rounds (k_max + 1, k_max + 1) have j drafts (second axis) if k are asked for (first axis)."""
    counts = np.zeros((k_max + 1, k_max + 1))
    for t, k in product(traces, range(k_max + 1)):
        position = 1
        while position < t.n_out:
            room = t.n_out - 1 - position
            proposed = min(k, room, t.offered[name][position] if name in t.offered else k)
            counts[k, proposed] += 1
            position += min(t.accept[name][position], proposed + 1)
    return counts


def drafts_table(rows):
    """The Markdown table of `best_drafts`."""
    lines = []
    for row in rows:
        found = row["drafters"]
        best = max(found, key=lambda name: found[name]["speedup"])
        line = {"batch": row["batch"], "context": row["context"]}
        line["best"] = best if found[best]["k"] else "none"
        line |= {name: f"{x['speedup']:.2f}, k {x['k']}" if x["k"] else "none" for name, x in found.items()}
        if "clock" in row:
            line["fastest by the clock"] = "{}, {:.2f}".format(*row["clock"])
        lines.append(line)
    return texts(lines)


# -- the table -------------------------------------------------------------------------------------

def table(r):
    """The Markdown table of a result of `analyse`, and notes on it."""
    parts = [texts([row_of(c, m) for c in r["cells"] for m in c["censored"]]),
             f"All speed-ups are {BOTH} (95 % interval of the mean rate, over requests)."]
    if any(share > FEW for c in r["cells"] for share in c["censored"].values()):
        parts.append(
            f"*: at more than {100 * FEW:.0f} % of the positions all drafts of the trace were accepted, so "
            "longer rounds might gain more; the figure only bounds rounds of at most as many drafts.")
    if r["left_out"]:
        parts.append(f"Left out, because the cost table has no price for it: {', '.join(r['left_out'])}.")
    for name, e in (("seconds", r["model_error"]), ("speed-ups", r["speedup_error"])):
        if e:
            parts.append(f"Error of the cost model, modelled over observed {name}: "
                         f"median {100 * e['median']:.0f} %, at most {100 * e['max']:.0f} %.")
    return "\n\n".join(parts)


def row_of(c, m):
    """{head: text} of a cell's drafter, or of "all": the bounds of all, beside those of the best single
    one."""
    total = c[AVERAGES[0]]
    row = {"workload": c["workload"], "batch": c["batch"], "drafter": m}
    alone = total["optimum of one"]
    who = one = fixed = m
    if m == "all":
        who = COMBINED
        one = max(alone, key=alone.get)
        fixed = max(total["best fixed k"].items(), key=lambda best: best[1]["speedup"])[0]
    if "observed" in total:
        row["observed"] = figures(c, "observed", who)
        row["modelled"] = cell("{x:.2f}", {"x": c["modelled"].get(who)})
        row["time over the bound's"] = cell("{x:.2f}", {"x": c["above"].get(who)})
    ks = dict.fromkeys(str(c[by]["best fixed k"][fixed]["k"]) for by in AVERAGES)
    best = f"{figures(c, 'best fixed k', fixed)}, k {' / '.join(ks)}"
    row["best fixed k"] = best + f" {fixed}" * (m == "all")
    row["greedy (not a bound)"] = figures(c, "greedy (not a bound)", m)
    row["optimum of one"] = figures(c, "optimum of one", one) + f" {one}" * (m == "all")
    if m == "all":
        for rung in ("optimum of all", "free drafters", "one pass"):
            row[rung] = figures(c, rung)
    row["censored"] = f"{100 * c['censored'][m]:.0f} %"
    return row


def figures(c, rung, drafter=None):
    """A rung of a cell, of a drafter if it has one for each: speed-ups by the averages and their interval,
    marked if it is a bound for which the traces are too short."""
    values = [c[by][rung] for by in (*AVERAGES, "range")]
    if drafter:
        values = [x.get(drafter) for x in values]
    if rung == "best fixed k":
        values = [x["speedup"] for x in values]
    mark = "*" * (rung in CENSORED and c["censored"][drafter or "all"] > FEW)
    return cell("{x:.2f}{mark} / {y:.2f}{mark} ({span[0]:.2f}-{span[1]:.2f})",
                dict(zip(("x", "y", "span"), values), mark=mark))


# -- the command -----------------------------------------------------------------------------------

def parse_args(argv=None):
    p = Parser(__doc__)
    add = p.add_argument
    add("--traces", required=True, metavar="FILE", help="accept traces, JSON lines (minispec/traces.py)")
    add("--cost", required=True, metavar="FILE",
        help="cost table (minispec/costs.py); the paper's is results/costs_h100.json")
    add("--batches", type=positive, nargs="+", default=BATCHES, metavar="N",
        help="batch sizes, like 1 8 64 (default %(default)s)")
    add("--k-max", type=positive, metavar="K",
        help="most drafts in a round (default: the most that were accepted in a trace)")
    add("--json", metavar="OUT", help="file for all figures as JSON; docs/plots.py draws them")
    args = p.parse_args(argv)
    largest = max(*args.batches, args.k_max or 1)
    if largest > LARGEST:
        raise ValueError(f"--batches and --k-max must be at most {LARGEST}, got {largest}")
    if args.json:
        check_writable(args.json, [args.traces, args.cost])
    return args


def main():
    args = parse_args()
    traces, prices = read_traces(args.traces), read_costs(args.cost)
    positions = sum(t.n_out - 1 for t in traces)
    result = analyse(traces, prices, batches=args.batches, k_max=args.k_max)
    longest = max(c["k_max"] for c in result["cells"])
    about = " ".join(f"{name}: {x};" for name, x in result["about"].items() if isinstance(x, str))
    if args.json:
        write_json(args.json, result)
    print(visible(f"traces  {args.traces}: {len(traces):,} requests, {positions:,} positions\n"
                  f"prices  {args.cost} {about}\n"
                  f"rounds  of at most {longest} drafts\n\n{table(result)}\n\n"
                  f"Speed-up of the best number of drafts k:\n\n{drafts_table(result['best_drafts'])}"))


if __name__ == "__main__":
    run_main(main, smaller="--batches or --k-max")
