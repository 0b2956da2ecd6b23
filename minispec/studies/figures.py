"""The lessons' figures, drawn from results/: functions of (axes, result of a study). tools/plots.py draws
them."""
from functools import partial
from pathlib import Path

import numpy as np

from minispec import bounds
from minispec.studies.tables import of_kinds
from minispec.tools.files import blame, read_json
from minispec.tools.plots import lines
from minispec.traces import read_traces

SELECTIONS = ("oracle", "ahead", "pillar", "window")


def stored(folder):
    """{file: what it holds} of the measurements in a folder of results that have figures."""
    found = {}
    for file in FIGURES:
        path = Path(folder, file)
        if path.exists():
            with blame(path):
                found[file] = read_traces(path) if path.suffix == ".jsonl" else read_json(path)["result"]
    return found


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


def modelled(axes, r):
    """What the prices say of every method and cell against what the clock said."""
    rows = [(method, c[bounds.AVERAGES[0]]["L0"][method], x)
            for c in r["cells"] for method, x in c.get("L1", {}).items() if method != "ar"]
    lines(axes, rows, "observed speed-up", "modelled speed-up", ".")
    if rows:
        axes.axline((1, 1), slope=1, color="gray", linewidth=0.5)


FIGURES = {
    "scheduler.json": {"specgen_schedule": schedule},
    "acceptance.json": {"specgen_accepted": by_context},
    "prism_arms.json": {"prism_steps": partial(by_place, place="draft step", arms=[
        f"{arm}, 1000 prompts" for arm in ("eagle2", "ttt1", "prism2", "stack2")])},
    "specdiff_objectives.json": {"specdiff_slots": partial(
        by_place, place="slot of the window", arms=("start", "mdlm", "streak", "ships"))},
    "cdlm_curves.json": {"cdlm_steps": by_steps},
    "bounds.json": {**bounds.FIGURES["bounds.json"], "bounds_modelled": modelled},
    "traces.jsonl": bounds.FIGURES["traces.jsonl"],
}
