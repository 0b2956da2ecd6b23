"""The lessons' figures, drawn from results/: functions of (axes, result of a study). matplotlib is optional:
without it nothing is drawn and nothing is lost, because every figure has its numbers in results/."""
import re
from collections import defaultdict
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np

from minispec.bounds import AVERAGES
from minispec.data.traces import read_traces
from minispec.studies.tables import of_kinds
from minispec.tools.files import blame, read_json, replaced
from minispec.tools.script import visible

WINDOW = 10                             # positions of an output that are averaged
LINES, COLUMNS = 3, 96                  # of text that is shown of an answer
BLANK = "\N{NO-BREAK SPACE}"
COLOURS = {"draft": "#1a7f37", "correction": "#cf222e", "bonus": "#0969da", "plain": "#24292f"}
SELECTIONS = ("oracle", "ahead", "pillar", "window")
STYLE = {
    "svg.hashsalt": "minispec",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def stored(folder):
    """{file: what it holds} of the measurements in a folder of results that have figures."""
    found = {}
    for file in FIGURES:
        path = Path(folder, file)
        if path.exists():
            with blame(path):
                found[file] = read_traces(path) if path.suffix == ".jsonl" else read_json(path)["result"]
    if files := list(Path(folder).glob("answers/*.json")):
        run = read_json(Path(folder, "run.json"))["result"]["rows"]
        found["picture"] = run, [read_json(file) for file in files]
    return found


def draw(found, prefix):
    """Draw every figure of {file: what it holds}, as SVG files whose names begin with `prefix`; where there
    is no matplotlib, a line says so."""
    if not find_spec("matplotlib"):
        print("no matplotlib, so no figures (pip install matplotlib)")
        return
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams.update(STYLE)
    from matplotlib import pyplot
    for file, result in found.items():
        for name, figure in FIGURES[file].items():
            canvas, axes = pyplot.subplots(figsize=(7, 3))
            figure(axes, result)
            if axes.has_data():                          # measured for this model
                axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
                with replaced(f"{prefix}{name}.svg") as path:
                    canvas.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None})
            pyplot.close(canvas)


def lines(axes, rows, x, y, style=".-"):
    """Rows (name of a line, x, y), a line for each name. x, y: what the axes are called."""
    points = defaultdict(list)
    for name, *point in rows:
        points[name].append(point)
    for name, some in points.items():
        axes.plot(*zip(*some), style, label=name)
    axes.set(xlabel=x, ylabel=y)


# -- the picture of README.md -----------------------------------------------------------------------

def answers(axes, r):
    """One answer by several methods, the slowest first, coloured by who proposed what. Each is what
    `decode.py --method NAME --task story --size 10 --json results/answers/NAME.json` wrote; tokens/s
    are those of the study `run` on problems of this kind, because there all methods take turns."""
    from minispec.data.tokenizer import Tokenizer        # here, because it needs torch
    run, some = r
    rates = {x["method"]: x["tokens_per_second"] for x in run if (x["workload"], x["batch"]) == ("story", 1)}
    tokenizer = Tokenizer.load(some[0]["model"])
    y = 0
    for a in sorted(some, key=lambda a: rates[a["method"]]):
        about = f"{len(a['steps'])} rounds, tau {a['tau']:.1f}, {rates[a['method']]:.0f} tokens/s"
        axes.text(0, y, f"{a['method']}: {about}", weight="bold")
        pieces = [tokenizer.decode([token]).replace("\n", "/") for token in a["token_ids"]]
        lines = re.finditer(rf"\S.{{,{COLUMNS}}}(?!\S)", "".join(pieces))
        places = [slice(*line.span()) for line in islice(lines, LINES)]
        # The text in each colour, with blanks, which SVG keeps, where another one is.
        for who, colour in COLOURS.items():
            own = "".join(piece if who == x else BLANK * len(piece) for piece, x in zip(pieces, a["who"]))
            for i, place in enumerate(places, 1):
                axes.text(0, y + i, own[place].rstrip(BLANK), color=colour, family="monospace", size=11)
        y += LINES + 1.5
    for who, colour in COLOURS.items():
        axes.plot([], color=colour, label=who)
    axes.set(xlim=(0, 1), ylim=(y, 0))
    axes.set_axis_off()
    axes.figure.set_size_inches(12, 5)


# -- the papers ------------------------------------------------------------------------------------

def by_context(axes, r):
    """Accepted drafts of the usual setting at the first temperature against the context: means of the kinds
    of text, with their 95 % intervals."""
    contexts = next(iter(r["kinds"].values()))[0]
    for select in SELECTIONS:
        setting = (select, r["k"], r["sparsity"])
        found = np.array([of_kinds(r["kinds"], context, setting, 0) for context in contexts])
        axes.errorbar([int(c) for c in contexts], found[:, 0], found[:, 1], fmt=".-", capsize=3, label=select)
    axes.set(xlabel="tokens of the context", ylabel=f"accepted of {r['k']} drafts")


def schedule(axes, r):
    """Rows of each forward under the lock-step and the unified schedule."""
    for name, rows in r.get("evenness", {}).items():
        axes.plot(rows[:60], label=name)
    axes.set(xlabel="iteration", ylabel="rows in the forward", ylim=(0, None))


def by_place(axes, r, arms, place):
    """How often a draft is accepted, by its place in the chain or window, where all before it were."""
    arms = [arm for arm in arms if arm in r["arms"]] or list(r["arms"])
    rows = [(arm.split(",")[0], i, share)
            for arm in arms for i, share in enumerate(r["arms"][arm]["at_0"]["by_depth"], 1)]
    lines(axes, rows, place, "accepted if all before were")


def by_steps(axes, r):
    """What is solved against the steps of an answer."""
    rows = [("teacher, cut" if x.get("steps_a_block") else x["decoder"], x["steps"], x["solved"])
            for x in r["rows"] if x.get("steps_a_block") or x.get("order") != "surest"]
    lines(axes, rows, "steps", "solved")
    axes.set(xscale="log")


# -- performance or illusion -----------------------------------------------------------------------

def speedup_by_batch(axes, r):
    """What was observed and the best of every rung, by total time, against the batch size: of the last
    workload, which is all of them mixed where they were run."""
    rows = []
    shown = r["cells"][-1]["workload"]
    for cell in (c for c in r["cells"] if c["workload"] == shown):
        c = cell[AVERAGES[0]]
        observed = c.get("L0", {})
        rungs = {
            "observed, adaptive": observed.get("adaptive"),
            "observed, best single": max((observed[m] for m in c["L5"] if m in observed), default=None),
            "L2 best fixed k": max(x["speedup"] for x in c["L2"].values()),
            "L5 best single": max(c["L5"].values()),
            "L6 all drafters": c["L6"],
            "L7 free drafters": c["L7"],
        }
        rows += [(name, cell["batch"], x) for name, x in rungs.items() if x]
    lines(axes, rows, "batch", "speed-up")


def modelled(axes, r):
    """What the prices say of every method and cell against what the clock said."""
    rows = [(method, c[AVERAGES[0]]["L0"][method], x)
            for c in r["cells"] for method, x in c.get("L1", {}).items() if method != "ar"]
    lines(axes, rows, "observed speed-up", "modelled speed-up", ".")
    if rows:
        axes.axline((1, 1), slope=1, color="gray", linewidth=0.5)


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
    "scheduler.json": {"specgen_schedule": schedule},
    "acceptance.json": {"specgen_accepted": by_context},
    "prism_arms.json": {"prism_steps": partial(by_place, place="draft step", arms=[
        f"{arm}, 1000 prompts" for arm in ("eagle2", "ttt1", "prism2", "stack2")])},
    "specdiff_objectives.json": {"specdiff_slots": partial(
        by_place, place="slot of the window", arms=("start", "mdlm", "streak", "ships"))},
    "cdlm_curves.json": {"cdlm_steps": by_steps},
    "picture": {"answers": answers},
    "bounds.json": {"bounds_batch": speedup_by_batch, "bounds_modelled": modelled},
    "traces.jsonl": {"bounds_winners": winners},
}
