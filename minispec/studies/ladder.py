"""From files to the ladder of bounds.py: accept traces and a cost table, and what an engine was observed to do, if it was.

A *cell* is one workload at one batch size. Without observations there is one for each family of trace ids ("arith/17" is
of the workload "arith") at each of `batches`; with them, one for each that was run. Every cell has the rungs L2 to L12 of
bounds.ladder, and where there are observations

    L0        speed-up by the wall clock, {method: autoregressive seconds / seconds}; like all rungs it includes reading the prompts
    L1        the same with both times modelled: the recorded rounds, replayed through the cost table, and what drafters had to read
    error     modelled seconds / observed seconds - 1, of every method, autoregressive included. What the machine's speed did between
              pricing and running is in it; "speedup_error", L1 / L0 - 1, of all but the autoregressive loop, is free of that
    above     observed seconds / the least the optimum may take (L5; L6 where drafters are combined). Under 1 the model is
              wrong by that much, or the bound is; 1.5 says that 50 % more time was spent than any choice of lengths needs.
    gap       share of the way from the best single method to L6 that the combined method goes by the clock, and "gap_modelled", all
              three by the same prices: what its choices are worth, whatever the machine did between pricing and running

The paper clones a request to make a batch. Here a batch is of different requests unless it says "copies"; for different
ones the rungs are those of 1/rows of a batch of copies, a bound for linear costs (see bounds.py), and L1 is exact.

numpy only, no torch.
"""
from collections import Counter

import numpy as np

from minispec import bounds
from minispec.data.traces import CostTable

BATCHES = (1, 4, 16)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
COMBINED = "adaptive"                                  # the method that may use all drafters


def by_workload(traces):
    """{workload: traces}, by what stands before "/" in the id."""
    out = {}
    for t in traces:
        out.setdefault(t.id.split("/")[0], []).append(t)
    return out


def analyse(traces, table, runs=None, child_rates=None, published=False, batches=BATCHES):
    """All cells, as a dict that JSON can hold. table: a checked cost table; runs: the rows of bench.py's study `run`;
    child_rates: {drafter: chances} for L11; published: add the figure of the paper's own simulator, defects included."""
    cost = CostTable(table)
    plans = [{"workload": w, "batch": rows, "kind": "copies", "ids": [t.id for t in some]} for w, some in by_workload(traces).items() for rows in batches]
    if runs:
        runs = [r for r in runs if r["identical"] is not None]         # the diffusion models' answers are their own
        plans = [r for r in runs if r["method"] == "ar"]
    names = [m for m in traces[0].accept if m in cost.drafters]
    by_id, cells = {t.id: t for t in traces}, []
    for plan in plans:
        missing = [i for i in plan["ids"] if i not in by_id]
        if missing:
            raise ValueError(f"the run has a request '{missing[0]}' that has no trace; measure both again")
        some, rows = [by_id[i] for i in plan["ids"]], plan["batch"]
        cell = {k: plan[k] for k in ("workload", "batch", "kind")}
        cell |= bounds.ladder(some, cost, rows, child_rates={m: r for m, r in (child_rates or {}).items() if m in names})
        cell["choices"] = choices(some, cost, names, rows, cell["k_max"])
        if published:
            cell["published"] = as_published(some, cost, names, rows)
        if runs:
            same = lambda r: all(r[k] == plan[k] for k in ("workload", "batch", "kind"))
            cell |= observed([r for r in runs if same(r)], some, cost, cell)
        cells.append(cell)
    def summary(name):
        errors = [abs(e) for c in cells for e in c.get(name, {}).values()]
        return {"median": float(np.median(errors)), "max": max(errors)} if errors else None

    return {"about": table.get("about", {}), "observed": bool(runs), "cells": cells, "context": speedup_by_context(traces, cost, names),
            "model_error": summary("error"), "speedup_error": summary("speedup_error")}


def observed(rows, traces, cost, cell):
    """L0, L1, error, above and gap of one cell (see above). rows: what was run, one row a method."""
    copies = rows[0]["batch"] if rows[0]["kind"] == "copies" else 1
    modelled, seconds, rounds = {}, {r["method"]: r["seconds"] for r in rows}, {}
    for r in rows:
        plans = plans_of(r, traces)
        if plans is not None:
            modelled[r["method"]] = sum(bounds.replay(plans * copies, traces * copies, cost, r["batch"]).values()) + copies * reading(plans, traces, cost)
            rounds[r["method"]] = [sum(map(len, plans)) * copies, r["rounds"]]
    ar = cell["seconds"] * copies
    least = {m: ar / s for m, s in cell["L5"].items()} | {"ar": ar, COMBINED: ar / cell["L6"]}
    out = {"L0": {m: seconds["ar"] / s for m, s in seconds.items()}, "L1": {m: modelled["ar"] / s for m, s in modelled.items()},
           "error": {m: s / seconds[m] - 1 for m, s in modelled.items()}, "rounds": rounds,
           "above": {m: s / least[m] for m, s in seconds.items() if m in least}}
    out["speedup_error"] = {m: s / out["L0"][m] - 1 for m, s in out["L1"].items() if m != "ar"}
    for rung, name in (("L0", "gap"), ("L1", "gap_modelled")):
        single = max((s for m, s in out[rung].items() if m in ("ar", *cell["L5"])), default=1.0)
        if COMBINED in out[rung] and cell["L6"] > single:
            out[name] = (out[rung][COMBINED] - single) / (cell["L6"] - single)
    return out


def reading(plans, traces, cost):
    """Seconds that drafters take to read what stands before their first draft for a request, each alone; bounds leave this out."""
    first = {(r.name, t.id): t.prompt_len + r.position for plan, t in zip(plans, traces) for r in reversed(plan) if r.name}
    return sum(float(cost.read(name, tokens)) for (name, _), tokens in first.items())


def plans_of(run, traces):
    """The plans that a row of bench.py's `run` followed. A drafter that always proposes k needs no record: they follow
    from the traces (test_measure.py says so). None for a method that has neither."""
    if run["method"] == "ar":
        return [bounds.autoregressive(t) for t in traces]
    if run["plans"] is not None:
        return [unpack(run["plans"][t.id]) for t in traces]
    if run["method"] in traces[0].accept:
        return [bounds.fixed(t, run["method"], run["k"]) for t in traces]
    return None


def pack(steps):
    """The recorded rounds of a request as a short text: "ngram:8:3 target:0:1", who : proposed : gained."""
    return " ".join(f"{s.proposer}:{s.proposed}:{s.committed}" for s in steps)


def unpack(text):
    """The plan in a text that `pack` made."""
    plan, position = [], 1
    for who, proposed, emitted in (r.split(":") for r in text.split()):
        plan.append(bounds.Round(position, who if int(proposed) else None, int(proposed), int(emitted)))
        position += int(emitted)
    return plan


def choices(traces, cost, names, rows, k_max):
    """What the optimum over all drafters (L6) does: {who drafts: rounds} and {drafts a round: rounds}."""
    rounds = [r for t in traces for r in bounds.optimum(t, cost, names, rows, k_max)]
    who, lengths = Counter(r.name or "nobody" for r in rounds), Counter(r.proposed for r in rounds)
    return {"who": dict(who), "lengths": {str(k): lengths[k] for k in sorted(lengths)}}


def as_published(traces, cost, names, rows):
    """{drafter, or "all": speed-up by the paper's simulator}: its oracle, its index, its prices, its average. Combined
    rounds are priced as "ngram" there, so without one there is no such figure."""
    plain = [bounds.price(bounds.autoregressive(t), t, cost, rows).time for t in traces]
    groups = {m: [m] for m in names} | ({"all": names} if "ngram" in names and len(names) > 1 else {})
    return {label: bounds.mean_rate_speedup(traces, plain, [bounds.price(bounds.as_published(t, some), t, cost, rows).time for t in traces])
            for label, some in groups.items()}


def statistics(traces, names, k=8):
    """{drafter: accept lengths (tokens a round would gain) by position and by round of k drafts, and the censored share}."""
    out = {}
    for m in names:
        positions = np.concatenate([t.accept[m][1:] for t in traces])
        rounds = [r.emitted for t in traces for r in bounds.fixed(t, m, k)]
        censored = [t.censored[m][1:].sum() if m in t.censored else 0 for t in traces]
        if len(positions):
            out[m] = {"positions": len(positions), "by_position": bounds.spread(positions), "by_round": bounds.spread(rounds),
                      "censored": float(sum(censored) / len(positions))}
    return out


def speedup_by_context(traces, cost, names, k_max=16):
    """{rows: {drafter: [(context, speed-up with its best k)]}} at the acceptance that fits all traces: MagicDec's axis."""
    out = {}
    for rows in (BATCHES[0], BATCHES[-1]):
        for m in names:
            gained = [r.emitted for t in traces for r in bounds.fixed(t, m, 4)] or [1]
            alpha = bounds.fit_alpha(float(np.mean(gained)), 4)
            curve = [float(bounds.analytic_curve(alpha, cost, m, c, rows, k_max).max()) for c in CONTEXTS]
            out.setdefault(str(rows), {})[m] = list(zip(CONTEXTS, curve))
    return out
