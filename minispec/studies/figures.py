"""The lessons' figures, drawn from results/. matplotlib is optional: without it nothing is drawn and nothing
is lost, because every figure has its numbers in results/."""
import os

import numpy as np

from minispec.bounds import AVERAGES
from minispec.data.traces import read_traces
from minispec.studies.plots import PLOTS
from minispec.tools.files import blame, read_json

TOTAL = AVERAGES[0]
STYLE = {
    "svg.hashsalt": "minispec",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(results, prefix):
    """Draw every figure whose measurements are in the folder `results`, as SVG files whose names begin with
    `prefix`."""
    for study, figures in FIGURES.items():
        file = os.path.join(results, source(study))
        if os.path.exists(file):
            with blame(file):
                draw_some(figures, load(file), prefix)


def draw_some(figures, result, prefix):
    """Draw {name: figure(axes, result)}; a line says so where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib, so no figures (pip install matplotlib)")
        return
    matplotlib.use("svg")
    matplotlib.rcParams.update(STYLE)
    from matplotlib import pyplot
    os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    for name, figure in figures.items():
        canvas, axes = pyplot.subplots(figsize=(7, 3))
        figure(axes, result)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
        canvas.savefig(f"{prefix}{name}.svg", bbox_inches="tight", metadata={"Date": None})
        pyplot.close(canvas)


def source(study):
    """The file in a folder of results that the figures of a study are drawn from."""
    return "traces.jsonl" if study == "traces" else study + ".json"


def load(file):
    return read_traces(file) if file.endswith(".jsonl") else read_json(file)["result"]


# -- SpecGen ---------------------------------------------------------------------------------------

def schedule(axes, r):
    """Rows of each forward under the lock-step and the unified schedule."""
    for name in ("lockstep", "unified"):
        axes.plot(r["evenness"][name]["rows"][:60], "-", label=name, linewidth=1.2)
    axes.set(xlabel="iteration", ylabel="rows in the forward", ylim=(0, None))


# -- performance or illusion: the ladder -----------------------------------------------------------

def _mixed(cells):
    """The cells of the mixed workload if it was run, else of the first one; copies left out where there are
    others."""
    which = "mixed" if any(c["workload"] == "mixed" for c in cells) else cells[0]["workload"]
    some = [c for c in cells if c["workload"] == which]
    return which, [c for c in some if c["kind"] == "different"] or some


def _top(some):
    return max(some.values(), default=np.nan)


def _best_single(c):
    """The highest observed speed-up of a single drafter."""
    return _top({m: x for m, x in c.get("L0", {}).items() if m in c["L5"]})


def _best_fixed(c):
    return max(x["speedup"] for x in c["L2"].values())


def speedup_by_batch(axes, r):
    """Observed, best fixed k, greedy and the two optima against the batch size, by total time."""
    which, cells = _mixed(r["cells"])
    batch = [c["batch"] for c in cells]
    rungs = [c[TOTAL] for c in cells]
    greedy = [{m: s for m, s in c["L4"].items() if m != "all"} for c in rungs]
    lines = {
        "L6 all drafters": ("k-", [c["L6"] for c in rungs]),
        "L5 best single": ("b-", [_top(c["L5"]) for c in rungs]),
        "L4 greedy, best single": ("b:", [_top(some) for some in greedy]),
        "L2 best fixed k": ("g--", [_best_fixed(c) for c in rungs]),
        "observed, best single": ("go", [_best_single(c) for c in rungs]),
        "observed, adaptive": ("r*", [c.get("L0", {}).get("adaptive", np.nan) for c in rungs]),
    }
    for label, (style, values) in lines.items():
        axes.plot(batch, values, style, label=label, linewidth=1.2)
    axes.set(xlabel=f"batch ({which})", ylabel="speed-up", xscale="log", xticks=batch, xticklabels=batch)


def waterfall(axes, r):
    """From what is observed to what is possible, in the smallest batch, by total time."""
    _, cells = _mixed(r["cells"])
    c = cells[0][TOTAL]
    steps = {"L0 best single": _best_single(c)} if "L0" in c else {}
    steps["L2 fixed k"] = _best_fixed(c)
    steps["L5 one drafter"] = _top(c["L5"])
    steps["L6 all drafters"] = c["L6"]
    steps["L7 free drafters"] = c["L7"]

    # Every bar goes from the rung below to its own.
    values = np.nan_to_num(list(steps.values()), nan=1.0)
    change = np.diff(values)
    low = [0, *np.minimum(values[:-1], values[1:])]
    colors = ["0.5"] + ["tab:green" if d > 0 else "tab:red" for d in change]
    axes.bar(range(len(values)), [values[0], *np.abs(change)], bottom=low, color=colors)
    axes.set(xticks=range(len(values)), ylabel="speed-up")
    axes.set_xticklabels(steps, rotation=20, ha="right")


# -- performance or illusion: the traces -----------------------------------------------------------

WINDOW = 10


def winners(axes, traces):
    """Along the output, the share of positions at which a drafter's round would gain more than any other
    one's; the band is twice the standard error over requests."""
    starts = range(1, max(t.n_out for t in traces) - WINDOW + 1, WINDOW)
    for m in traces[0].accept:
        share, error = [], []
        for start in starts:
            long_enough = [t for t in traces if t.n_out >= start + WINDOW]
            wins = [np.mean(_lead(t, m)[start:start + WINDOW] > 0) for t in long_enough]
            share.append(np.mean(wins))
            error.append(2 * np.std(wins) / len(wins) ** 0.5)
        axes.plot(starts, share, label=m, linewidth=1.2)
        axes.fill_between(starts, np.subtract(share, error), np.add(share, error), alpha=0.2)
    axes.set(xlabel="position in the output", ylabel="share of positions where it gains most")


def _lead(trace, m):
    """How many tokens more than the next best drafter this one gains, by position (alone, than none)."""
    others = [trace.accept[other] for other in trace.accept if other != m]
    return trace.accept[m] - np.max([*others, np.ones(trace.n_out, int)], axis=0)


FIGURES = {
    "scheduler": {"specgen_schedule": schedule},
    **PLOTS,
    "bounds": {
        "bounds_batch": speedup_by_batch,
        "bounds_waterfall": waterfall,
    },
    "traces": {"bounds_winners": winners},
}
