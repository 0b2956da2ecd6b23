"""What an engine was observed to do, next to the rungs of bounds.py: the study `bounds` of bench.py.

A *cell* is one workload at one batch size. Without observations there is one for each family of trace ids
("arith/17" is of the workload "arith") at each of bounds.BATCHES; with them, one for each that was run. Every
cell has the rungs of bounds.ladder, and where there are observations

    L0      speed-up by the wall clock, {method: speed-up}; like all rungs by both averages of bounds.py, and
            with reading the prompts. All else here is of the total time
    L1      the same with both times modelled: the recorded rounds, replayed through the cost table, and what
            drafters had to read
    error   modelled seconds / observed seconds - 1, of every method, autoregressive included. What the
            machine's speed did between pricing and running is in it; "speedup_error", L1 / L0 - 1, of all but
            the autoregressive loop, is free of that
    above   observed seconds / the least the optimum may take (L5; L6 where drafters are combined). Under 1
            the model is wrong by that much, or the bound is; 1.5 says that 50 % more time was spent than any
            choice of lengths needs.
    gap     share of the way from the best single method to L6 that the combined method goes by the clock, and
            "gap_modelled", all three by the same prices: what its choices are worth, whatever the machine did
            between pricing and running

The paper clones a request to make a batch. What is observed here is of batches of different requests, for
which the rungs are those of 1/rows of a batch of copies, a bound for linear costs (see bounds.py), and L1 is
exact. numpy only, no torch.
"""
import numpy as np

from minispec import bounds

COMBINED = "adaptive"                                  # the method that may use all drafters


def analyse(traces, table, runs=None, batches=bounds.BATCHES, k_max=None):
    """All cells, as a dict that JSON can hold. table: a checked cost table; runs: the rows of bench.py's
    study `run`. Where there are none, the cells are batches of copies, as in the paper."""
    cost = bounds.CostTable(table)
    names = bounds.compared(traces, cost)
    if runs:
        cells = observed_cells(traces, cost, runs)
    else:
        cells = []
        for workload, some in bounds.by_workload(traces).items():
            for rows in batches:
                about = {"workload": workload, "batch": rows}
                cells.append(about | bounds.ladder(some, cost, rows, k_max))
    return {
        "about": table.get("about", {}),
        "observed": bool(runs),
        "left_out": [m for m in traces[0].accept if m not in names],
        "cells": cells,
        "model_error": summary(cells, "error"),
        "speedup_error": summary(cells, "speedup_error"),
    }


def summary(cells, name):
    """Median and largest of an error over all methods of all cells; None if nothing was observed."""
    errors = [abs(e) for c in cells for e in c.get(name, {}).values()]
    return {"median": float(np.median(errors)), "max": max(errors)} if errors else None


# -- observed --------------------------------------------------------------------------------------

def observed_cells(traces, cost, runs):
    """A cell for each workload and batch that was run."""
    runs = [r for r in runs if r["identical"] is not None]  # the diffusion models' answers are their own
    by_id = {t.id: t for t in traces}
    cells = []
    for plain in runs:
        if plain["method"] != "ar":
            continue
        missing = [i for i in plain["ids"] if i not in by_id]
        if missing:
            raise ValueError(f"the run has a request '{missing[0]}' that has no trace; measure both again")
        some = [by_id[i] for i in plain["ids"]]
        about = {key: plain[key] for key in ("workload", "batch")}
        cell = about | bounds.ladder(some, cost, plain["batch"])
        rows = [r for r in runs if about.items() <= r.items()]
        cell |= observed(rows, some, cost, cell)
        for by, field in zip(bounds.AVERAGES, ("speedup", "rate_speedup")):
            cell[by]["L0"] = {r["method"]: r.get(field) for r in rows}
        cells.append(cell)
    return cells


def observed(rows, traces, cost, cell):
    """L1, error, above and gap of one cell (see the module). rows: what was run, one row for each method."""
    clock = {r["method"]: r["seconds"] for r in rows}

    # Replay what was recorded through the cost table.
    modelled = {}
    for r in rows:
        plans = plans_of(r, traces)
        if plans is not None and {x.name for plan in plans for x in plan if x.name} <= set(cost.drafters):
            replayed = bounds.replay(plans, traces, cost, r["batch"])
            modelled[r["method"]] = replayed + reading(plans, traces, cost)

    by_clock = {m: clock["ar"] / s for m, s in clock.items()}
    by_model = {m: modelled["ar"] / s for m, s in modelled.items()}
    alone, together = (cell["total time"][rung] for rung in ("L5", "L6"))
    optimum = {**alone, COMBINED: together, "ar": 1.0}
    plain = cell["seconds"]
    out = {
        "L1": by_model,
        "error": {m: s / clock[m] - 1 for m, s in modelled.items()},
        "speedup_error": {m: s / by_clock[m] - 1 for m, s in by_model.items() if m != "ar"},
        "above": {m: s * optimum[m] / plain for m, s in clock.items() if m in optimum},
    }
    for gained, name in ((by_clock, "gap"), (by_model, "gap_modelled")):
        single = max((s for m, s in gained.items() if m in ("ar", *alone)), default=1.0)
        if COMBINED in gained and together > single:
            out[name] = (gained[COMBINED] - single) / (together - single)
    return out


def reading(plans, traces, cost):
    """Seconds that drafters take to read the text in front of their first draft for a request, each alone.
    The bounds leave this out."""
    total = 0.0
    for plan, trace in zip(plans, traces):
        first = {r.name: trace.prompt_len + r.position for r in reversed(plan) if r.name}
        total += sum(float(cost.read(name, tokens)) for name, tokens in first.items())
    return total


def plans_of(run, traces):
    """The plans that a row of bench.py's `run` followed. A drafter that always proposes k needs no record:
    they follow from the traces (test_measure.py says so). None for a method that has neither."""
    name = run["method"]
    if run["plans"] is not None:
        return [unpack(run["plans"][t.id]) for t in traces]
    if name == "ar":
        return [bounds.fixed(t, list(t.accept)[0], 0) for t in traces]
    if name in traces[0].accept:
        return [bounds.fixed(t, name, run["k"]) for t in traces]
    return None


def pack(steps):
    """The recorded rounds of a request as a short text: "ngram:8:3 target:0:1", who : proposed : gained."""
    return " ".join(f"{s.proposer}:{s.proposed}:{s.committed}" for s in steps)


def unpack(text):
    """The plan in a text that `pack` made."""
    plan, position = [], 1
    for word in text.split():
        who, proposed, emitted = word.split(":")
        name = who if int(proposed) else None
        plan.append(bounds.Round(position, name, int(proposed), int(emitted)))
        position += int(emitted)
    return plan


# -- what the traces alone say ---------------------------------------------------------------------

def statistics(traces, names, k=8):
    """{drafter: mean tokens that a round would gain, by position and by round of k drafts, and the censored
    share}. By position a long match is counted at each of its tokens, by round once."""
    out = {}
    for m in names:
        positions = np.concatenate([t.accept[m][1:] for t in traces])
        if len(positions):
            out[m] = {
                "positions": len(positions),
                "by_position": float(positions.mean()),
                "by_round": float(np.mean([r.emitted for t in traces for r in bounds.fixed(t, m, k)])),
                "censored": bounds.censored_share(traces, [m]),
            }
    return out
