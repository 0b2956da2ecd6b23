"""The lessons' figures: functions of (axes, result of a study), which tools/plots.py draws from results/."""
from pathlib import Path

from minispec import bounds
from minispec.tools.files import naming, read_json
from minispec.tools.plots import lines
from minispec.traces import read_traces


def stored(folder):
    """{file: content} of the measurements in a folder of results that have figures."""
    found = {}
    for file in FIGURES:
        path = Path(folder, file)
        if path.exists():
            with naming(path):
                found[file] = read_traces(path) if path.suffix == ".jsonl" else read_json(path)["result"]
    return found


# -- the papers ------------------------------------------------------------------------------------

def by_steps(axes, r):
    """Share of solved problems against steps per answer."""
    rows = [("teacher, cut" if x.get("steps_a_block") else x["decoder"], x["steps"], x["solved"])
            for x in r["rows"] if x.get("steps_a_block") or x.get("order") != "surest"]
    lines(axes, rows, "steps", "solved")
    axes.set(xscale="log")


FIGURES = {
    "cdlm_curves.json": {"cdlm_steps": by_steps},
    **bounds.FIGURES,
}
