"""The lessons' figures, drawn from results/. matplotlib is optional: without it nothing is drawn and nothing
is lost, because every figure has its numbers in results/."""
import os

import numpy as np

from minispec.data.traces import read_traces
from minispec.studies.plots import PLOTS
from minispec.tools.files import blame, read_json

STYLE = {
    "svg.hashsalt": "minispec",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(results, folder):
    """Draw every figure whose measurements are in the folder `results`, as SVG files into `folder`."""
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib, so no figures (pip install matplotlib)")
        return
    matplotlib.use("svg")
    matplotlib.rcParams.update(STYLE)
    from matplotlib import pyplot
    os.makedirs(folder, exist_ok=True)
    for study, figures in FIGURES.items():
        file = os.path.join(results, source(study))
        if not os.path.exists(file):
            continue
        result = load(file)
        for name, figure in figures.items():
            canvas, axes = pyplot.subplots(figsize=(7, 3))
            with blame(file):
                figure(axes, result)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False)
            canvas.savefig(os.path.join(folder, name + ".svg"), bbox_inches="tight", metadata={"Date": None})
            pyplot.close(canvas)


def source(study):
    """The file in results/ that the figures of a study are drawn from."""
    return "traces.jsonl" if study == "traces" else study + ".json"


def load(file):
    if file.endswith(".jsonl"):
        return read_traces(file)
    with blame(file):
        return read_json(file)["result"]


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
    return _top({m: s for m, s in c.get("L0", {}).items() if m in c["L5"]})


def _best_fixed(c):
    return max(x["speedup"] for x in c["L2"].values())


def speedup_by_batch(axes, r):
    """Observed, best fixed k, greedy and the two optima against the batch size."""
    which, cells = _mixed(r["cells"])
    batch = [c["batch"] for c in cells]
    greedy = [{m: s for m, s in c["L4"].items() if m != "all"} for c in cells]
    lines = {
        "L6 all drafters": ("k-", [c["L6"] for c in cells]),
        "L5 best single": ("b-", [_top(c["L5"]) for c in cells]),
        "L4 greedy, best single": ("b:", [_top(some) for some in greedy]),
        "L2 best fixed k": ("g--", [_best_fixed(c) for c in cells]),
        "observed, best single": ("go", [_best_single(c) for c in cells]),
        "observed, adaptive": ("r*", [c.get("L0", {}).get("adaptive", np.nan) for c in cells]),
    }
    for label, (style, values) in lines.items():
        axes.plot(batch, values, style, label=label, linewidth=1.2)
    axes.set(xlabel=f"batch ({which})", ylabel="speed-up", xscale="log", xticks=batch, xticklabels=batch)


def waterfall(axes, r):
    """From what is observed to what is possible, at batch 1."""
    _, cells = _mixed(r["cells"])
    c = cells[0]
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

def _padded(columns):
    """Columns by position as an array (requests, positions), NaN behind the end of an output; entry 0 is not
    used."""
    out = np.full((len(columns), max(map(len, columns)) - 1), np.nan)
    for row, column in zip(out, columns):
        row[:len(column) - 1] = column[1:]
    return out


def accept_map(axes, traces):
    """Accept length by request and position, of the first drafter."""
    name = next(iter(traces[0].accept))
    values = _padded([t.accept[name] for t in traces])
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis")
    axes.figure.colorbar(image, label=f"tokens a round of {name} gains")
    axes.set(xlabel="position in the output", ylabel="request")


def accept_difference(axes, traces):
    """The first drafter's accept length minus the last one's."""
    names = list(traces[0].accept)
    first, last = names[0], names[-1]
    values = _padded([t.accept[first] - t.accept[last] for t in traces])
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="RdBu", vmin=-8, vmax=8)
    axes.figure.colorbar(image, label=f"{first} minus {last}")
    axes.set(xlabel="position in the output", ylabel="request")


def accept_by_position(axes, traces):
    """Mean accept length along the output, with the band of half of the requests."""
    for m in traces[0].accept:
        values = _padded([t.accept[m] for t in traces])
        x = np.arange(1, values.shape[1] + 1)
        axes.plot(x, np.nanmean(values, 0), label=m, linewidth=1.2)
        axes.fill_between(x, *np.nanpercentile(values, (25, 75), axis=0), alpha=0.2)
    axes.set(xlabel="position in the output", ylabel="tokens a round gains")


FIGURES = {
    "scheduler": {"specgen_schedule": schedule},
    **PLOTS,
    "bounds": {
        "bounds_batch": speedup_by_batch,
        "bounds_waterfall": waterfall,
    },
    "traces": {
        "accept_map": accept_map,
        "accept_difference": accept_difference,
        "accept_position": accept_by_position,
    },
}
