"""The lessons' figures, drawn from results/: functions of (axes, result of a study). tools/plots.py draws
them."""
import re
from itertools import islice
from pathlib import Path

from minispec import bounds
from minispec.tools.files import blame, read_json
from minispec.tools.plots import lines
from minispec.traces import read_traces

LINES, COLUMNS = 3, 96                  # of text that is shown of an answer
BLANK = "\N{NO-BREAK SPACE}"
COLOURS = {"draft": "#1a7f37", "correction": "#cf222e", "bonus": "#0969da", "plain": "#24292f"}


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

def by_steps(axes, r):
    """Solved problems against the steps of an answer."""
    rows = [("teacher, cut" if x.get("steps_a_block") else x["decoder"], x["steps"], x["solved"])
            for x in r["rows"] if x.get("steps_a_block") or x.get("order") != "surest"]
    lines(axes, rows, "steps", "solved")
    axes.set(xscale="log")


FIGURES = {
    "cdlm_curves.json": {"cdlm_steps": by_steps},
    "picture": {"answers": answers},
    **bounds.FIGURES,
}
