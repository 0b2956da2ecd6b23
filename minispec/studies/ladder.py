"""What an engine was observed to do, next to the rungs of bounds.py: the study `bounds` of bench.py.

A *cell* is one workload at one batch size. Without observations there is one for each family of trace ids
("arith/17" is of the workload "arith") at each of bounds.BATCHES; with them, one for each that was run. Every
cell has the rungs of bounds.ladder, and where there are observations

    L0      speed-up by the wall clock, {method: speed-up}; like all rungs by both averages of bounds.py, and
            with reading the prompts. All else here is of the total time
    L1      the same with both times modelled: the rounds as they were, replayed through the cost table
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
        cells = [{"workload": workload, "batch": rows, **bounds.ladder(some, cost, rows, k_max)}
                 for workload, some in bounds.by_workload(traces).items() for rows in batches]
    return {
        "about": table.get("about", {}),
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
        cell = about | bounds.ladder(some, cost, plain["batch"])
        rows = [r for r in runs if about.items() <= r.items()]
        cell |= observed(rows, cell, sum(t.n_out for t in some))
        for by, field in zip(bounds.AVERAGES, ("speedup", "rate_speedup")):
            cell[by]["L0"] = {r["method"]: r.get(field) for r in rows}
        cells.append(cell)
    return cells


def observed(rows, cell, traced):
    """L1, error, above and gap of one cell (see the module). rows: what was run, one row for each method;
    traced: the tokens of the traces, because in bf16 answers may part from them at near-ties."""
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


# -- what the traces alone say ---------------------------------------------------------------------

def statistics(traces, names, k):
    """{drafter: mean tokens that a round would gain, by position and by round of k drafts, and the censored
    share}. By position a long match is counted at each of its tokens, by round once."""
    out = {}
    for m in names:
        positions = np.concatenate([t.accept[m][1:] for t in traces])
        if len(positions):
            out[m] = {
                "positions": len(positions),
                "by_position": float(positions.mean()),
                "by_round": sum(t.n_out - 1 for t in traces) / sum(rounds(t, m, k) for t in traces),
                "censored": bounds.censored_share(traces, [m]),
            }
    return out


def rounds(trace, name, k):
    """How many rounds of up to k drafts an output takes."""
    n, position = 0, 1
    while position < trace.n_out:
        position += min(int(trace.accept[name][position]), k + 1)
        n += 1
    return n
