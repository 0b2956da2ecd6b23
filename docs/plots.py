"""Draws the lessons' figures, docs/figures/*.svg, from results/. (prism_steps and *_slots are of removed
studies.)

    python docs/plots.py
    python docs/plots.py OUT.json T.jsonl       # your traces; OUT.json: of minispec.bounds --json
                                                # drawings are written next to it

A figure is a function of (axes, result of a study). Every figure has its numbers in a file. Needs matplotlib."""
import os
import sys
from collections import defaultdict

DOCS = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(DOCS))

try:
    import matplotlib  # noqa: E402
except ImportError:
    print("plots.py needs matplotlib: pip install matplotlib", file=sys.stderr)
    sys.exit(2)
import numpy as np  # noqa: E402
matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

from minispec import bounds  # noqa: E402
from minispec.tools.files import naming, read_json, replaced  # noqa: E402
from minispec.tools.script import run_main, visible  # noqa: E402
from minispec.traces import read_traces  # noqa: E402

STYLE = {
    "svg.hashsalt": "minispec",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
WINDOW = 10                      # positions of an output that are averaged


def plain(name):
    """A name from a file as text: nothing in it is mathematics."""
    return visible(name).replace("$", r"\$")


def lines(axes, rows, x, y):
    """Rows (name of a line, x, y), a line for each name. x, y: the labels of the axes."""
    points = defaultdict(list)
    for name, *point in rows:
        points[name].append(point)
    for name, some in points.items():
        axes.plot(*zip(*some), ".-", label=name)
    axes.set(xlabel=x, ylabel=y)


def by_steps(axes, r):
    """Share of solved problems against steps per answer: cut to steps, and with thresholds."""
    rows = []
    for x in r["rows"]:
        if "steps_a_block" in x:
            rows.append(("teacher, cut", x["steps"], x["solved"]))
        elif "threshold" in x and "block_size" not in x:
            rows.append((x["decoder"], x["steps"], x["solved"]))
    lines(axes, rows, "steps", "solved")
    axes.set(xscale="log")


def speedup_by_batch(axes, r):
    """Observed speed-ups and the best of every rung, by total time, against the batch size: of the last
    workload, which is all of them mixed if they were run."""
    rows = []
    for c in r["cells"]:
        if c["workload"] != r["cells"][-1]["workload"]:
            continue
        total = c[bounds.AVERAGES[0]]
        seen, alone = total.get("observed", {}), total["optimum of one"]
        rungs = {
            "observed, adaptive": seen.get(bounds.COMBINED),
            "observed, best single": max((seen[m] for m in alone if m in seen), default=None),
            "best fixed k": max(x["speedup"] for x in total["best fixed k"].values()),
            "optimum of one": max(alone.values()),
            "optimum of all": total["optimum of all"],
            "free drafters": total["free drafters"],
        }
        rows += [(name, c["batch"], x) for name, x in rungs.items() if x]
    lines(axes, rows, "batch", "speed-up")
    axes.set_title(plain(r["cells"][-1]["workload"]))


def winners(axes, traces):
    """By output position, the share of requests in which a round of one drafter would gain more than a round
    of any other."""
    def wins(trace, name):
        others = [accept for m, accept in trace.accept.items() if m != name]
        return trace.accept[name] > np.max([*others, np.ones(trace.n_out)], 0)
    along(axes, traces, wins, "share of positions where it gains most")


def gains(axes, traces):
    """By output position, the tokens that a round of each drafter would gain: the accepted length."""
    along(axes, traces, lambda trace, name: trace.accept[name], "tokens that a round gains")


def along(axes, traces, values, label):
    """By output position, the mean of values(trace, drafter) (n_out,) for each drafter; the band is twice the
    standard error over requests."""
    starts = range(1, max(t.n_out for t in traces) - WINDOW + 1, WINDOW)
    for name in traces[0].accept:
        own = [values(t, name) for t in traces]
        some = [np.array([x[start:start + WINDOW].mean() for x in own if len(x) >= start + WINDOW])
                for start in starts]
        mean = np.array([x.mean() for x in some])
        error = np.array([2 * x.std(ddof=1) / len(x) ** 0.5 if len(x) > 1 else np.nan for x in some])
        axes.plot(starts, mean, label=plain(name))
        axes.fill_between(starts, mean - error, mean + error, alpha=0.2)
    axes.set(xlabel="position in the output", ylabel=label)


FIGURES = {                      # file of results/: (name, function) of its figures
    "bounds.json": [("bounds_batch", speedup_by_batch)],
    "traces.jsonl": [("bounds_winners", winners), ("bounds_gains", gains)],
    "cdlm_curves.json": [("cdlm_steps", by_steps)],
}


def draw(kind, path, prefix):
    """Draw the figures of a kind of file, a key of FIGURES, as SVG files whose names begin with `prefix`."""
    matplotlib.rcParams.update(STYLE)
    for name, figure in FIGURES[kind]:
        canvas, axes = pyplot.subplots(figsize=(7, 3))
        with naming(path):
            if kind.endswith(".jsonl"):
                figure(axes, read_traces(path))
            else:
                found = read_json(path)
                figure(axes, found.get("result", found))     # results/ also say where they are from
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        with replaced(f"{prefix}{name}.svg") as file:
            canvas.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
        pyplot.close(canvas)


def main():
    if len(sys.argv) not in (1, 3):
        raise ValueError("give two files, OUT.json and T.jsonl, or none for the figures of docs/")
    if len(sys.argv) == 3:
        for kind, path in zip(FIGURES, sys.argv[1:]):
            draw(kind, path, os.path.splitext(sys.argv[1])[0] + "_")
        return
    for folder, prefix in (("", ""), ("smollm2/", "smollm2_")):
        for kind in FIGURES:
            path = f"{DOCS}/../results/{folder}{kind}"
            if os.path.exists(path):
                draw(kind, path, f"{DOCS}/figures/{prefix}")


if __name__ == "__main__":
    run_main(main)
