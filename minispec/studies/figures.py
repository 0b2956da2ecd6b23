"""The lessons' figures, drawn from results/: functions of (axes, result of a study). matplotlib is optional:
without it nothing is drawn and nothing is lost, because every figure has its numbers in results/."""
import os
from functools import partial

import numpy as np

from minispec.bounds import AVERAGES
from minispec.data.traces import read_traces
from minispec.tools.files import blame, read_json

TOTAL = AVERAGES[0]
WINDOW = 10                             # positions of an output that are averaged
STYLE = {
    "svg.hashsalt": "minispec",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.2,
    "legend.frameon": False,
}


def draw(results, prefix):
    """Draw every figure whose measurements are in the folder `results`, as SVG files whose names begin with
    `prefix`."""
    for file, figures in FIGURES.items():
        path = os.path.join(results, file)
        if os.path.exists(path):
            with blame(path):
                found = read_traces(path) if file.endswith(".jsonl") else read_json(path)["result"]
                draw_some(figures, found, prefix)


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
            axes.legend()
        canvas.savefig(f"{prefix}{name}.svg", bbox_inches="tight", metadata={"Date": None})
        pyplot.close(canvas)


def line(axes, rows, x, y, style, label, **more):
    """Column y of rows, dicts, against their column x."""
    axes.plot([row[x] for row in rows], [row[y] for row in rows], style, label=label, **more)


# -- SpecGen ---------------------------------------------------------------------------------------

def schedule(axes, r):
    """Rows of each forward under the lock-step and the unified schedule."""
    for name in ("lockstep", "unified"):
        axes.plot(r["evenness"][name][:60], "-", label=name)
    axes.set(xlabel="iteration", ylabel="rows in the forward", ylim=(0, None))


# -- PRISM and SpecDiff-2 --------------------------------------------------------------------------

def by_place(axes, r, arms, place):
    """How often a draft is accepted, by its place in the chain or window, where all before it were."""
    for name in arms:
        shares = r["arms"][name]["at_0"]["by_depth"]
        axes.plot(range(1, len(shares) + 1), shares, ".-", label=name.split(",")[0])
    axes.set(xlabel=place, ylabel="accepted if all before were", ylim=(0, 1.02))


def by_depth(axes, r):
    """Speed-up of chains and of trees against the depth."""
    for method, color in (("eagle", "tab:blue"), ("prism", "tab:green")):
        for width, style, shape in ((1, "o-", "chains"), (2, "s--", "trees of width 2")):
            best = {}                                    # of a depth, the fastest row
            for x in sorted(r["rows"], key=lambda x: x["speedup"]):
                if x["method"] == method and x["width"] == width:
                    best[x["depth"]] = x
            rows = [best[depth] for depth in sorted(best)]
            line(axes, rows, "depth", "speedup", style, f"{method}, {shape}", color=color)
    axes.set(xlabel="depth", ylabel="speed-up", ylim=(1, None))


def by_chains(axes, r):
    """tau and speed-up of K chains, judged by the walk."""
    for temperature in (0.0, 1.0):
        some = [x for x in r["rows"] if x["temperature"] == temperature
                and (x["chains"] == 1 and x["rule"] == "rejection"
                     or x["rule"] == "walk" and x["draft_temperature"] == 1)]
        line(axes, some, "chains", "tau", "o-", f"tau, temperature {temperature:g}")
        line(axes, some, "chains", "speedup", "s--", f"speed-up, temperature {temperature:g}")
    axes.set(xlabel="chains K", xticks=[x["chains"] for x in some], ylim=(0, None))


# -- CDLM ------------------------------------------------------------------------------------------

def by_steps(axes, r):
    """What is solved against the steps of an answer."""
    for decoder in ("teacher", "dual", "student"):
        some = [x for x in r["rows"] if x["decoder"] == decoder and x["threshold"] and x["order"] != "surest"]
        line(axes, some, "steps", "solved", ".-", decoder)
    line(axes, [x for x in r["rows"] if x["steps_a_block"]], "steps", "solved", "k.:", "teacher, cut")
    axes.set(xlabel="steps an answer", ylabel="solved", xscale="log", ylim=(0, 1))


def by_batch(axes, r):
    """tokens/s against the batch: where the plain loop wins back."""
    for decoder in ("ar", "teacher", "student", "student, threshold 0.999"):
        some = [x for x in r["rows"] if x["decoder"] == decoder]
        line(axes, some, "batch", "tokens_per_second", "o-", decoder)
    batch = [x["batch"] for x in some]
    axes.set(xlabel="batch", ylabel="tokens/s", xscale="log", yscale="log", xticks=batch, xticklabels=batch)


# -- performance or illusion -----------------------------------------------------------------------

def mixed(r):
    """The cells of the mixed workload if it was run, else of the first one; copies left out where there are
    others."""
    workloads = [c["workload"] for c in r["cells"]]
    which = "mixed" if "mixed" in workloads else workloads[0]
    some = [c for c in r["cells"] if c["workload"] == which]
    return [c for c in some if c["kind"] == "different"] or some


def best(cell):
    """The best of every rung of a cell, by total time."""
    c = cell[TOTAL]
    observed = c.get("L0", {})
    return {
        "observed, best single": max((observed[m] for m in observed if m in c["L5"]), default=np.nan),
        "observed, adaptive": observed.get("adaptive", np.nan),
        "L2 best fixed k": max(x["speedup"] for x in c["L2"].values()),
        "L4 greedy, best single": max(c["L4"][m] for m in c["L5"]),
        "L5 best single": max(c["L5"].values()),
        "L6 all drafters": c["L6"],
        "L7 free drafters": c["L7"],
    }


def speedup_by_batch(axes, r):
    """Observed, best fixed k, greedy and the two optima against the batch size."""
    cells = mixed(r)
    rows = [{"batch": c["batch"], **best(c)} for c in cells]
    styles = {"L6 all drafters": "k-", "L5 best single": "b-", "L4 greedy, best single": "b:",
              "L2 best fixed k": "g--", "observed, best single": "go", "observed, adaptive": "r*"}
    for label, style in styles.items():
        line(axes, rows, "batch", label, style, label)
    batch = [row["batch"] for row in rows]
    axes.set(xlabel=f"batch ({cells[0]['workload']})", ylabel="speed-up", xscale="log", xticks=batch,
             xticklabels=batch)


def waterfall(axes, r):
    """From what is observed to what is possible, in the smallest batch."""
    steps = best(mixed(r)[0])
    for label in ("observed, adaptive", "L4 greedy, best single"):
        del steps[label]
    steps = {label: x for label, x in steps.items() if not np.isnan(x)}

    # Every bar goes from the rung below to its own.
    values = np.array(list(steps.values()))
    below = np.append(0, values[:-1])
    colors = ["0.5", *np.where(np.diff(values) > 0, "tab:green", "tab:red")]
    axes.bar(range(len(steps)), abs(values - below), bottom=np.minimum(values, below), color=colors)
    axes.set(xticks=range(len(steps)), ylabel="speed-up")
    axes.set_xticklabels(steps, rotation=20, ha="right")


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
        share, error = [], []
        for start in starts:
            some = [w[i, start:start + WINDOW].mean() for w in wins if w.shape[1] >= start + WINDOW]
            share.append(np.mean(some))
            error.append(2 * np.std(some) / len(some) ** 0.5)
        axes.plot(starts, share, label=name)
        axes.fill_between(starts, np.subtract(share, error), np.add(share, error), alpha=0.2)
    axes.set(xlabel="position in the output", ylabel="share of positions where it gains most")


FIGURES = {
    "scheduler.json": {"specgen_schedule": schedule},
    "prism_arms.json": {"prism_steps": partial(by_place, place="draft step", arms=[
        f"{arm}, 1000 prompts" for arm in ("eagle2", "ttt1", "prism2", "stack2")])},
    "prism_trees.json": {"prism_depth": by_depth},
    "specdiff_objectives.json": {"specdiff_slots": partial(
        by_place, place="slot of the window", arms=("start", "mdlm", "streak", "ships"))},
    "specdiff_chains.json": {"specdiff_chains": by_chains},
    "cdlm_curves.json": {"cdlm_steps": by_steps},
    "cdlm_speed.json": {"cdlm_batch": by_batch},
    "bounds.json": {"bounds_batch": speedup_by_batch, "bounds_waterfall": waterfall},
    "traces.jsonl": {"bounds_winners": winners},
}
