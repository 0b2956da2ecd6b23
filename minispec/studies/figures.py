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
    """Share of solved problems against steps per answer: cut to steps, and with thresholds."""
    rows = []
    for x in r["rows"]:
        if "steps_a_block" in x:
            rows.append(("teacher, cut", x["steps"], x["solved"]))
        elif "threshold" in x and "block_size" not in x:
            rows.append((x["decoder"], x["steps"], x["solved"]))
    lines(axes, rows, "steps", "solved")
    axes.set(xscale="log")


FIGURES = {
    "cdlm_curves.json": {"cdlm_steps": by_steps},
    **bounds.FIGURES,
}
