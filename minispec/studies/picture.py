"""The picture of README.md: one answer by several methods, its tokens coloured by who proposed them. Each
answer is what decode.py wrote; tokens/s are those of the study `run` on problems of this kind, where all
methods take turns.

    python decode.py --method prism --task story --size 10 --json results/answers/prism.json
    python bench.py report                         # all of results/answers/ into docs/figures/answers.svg
"""
import glob
import itertools
import os
from html import escape

from minispec.data.tokenizer import Tokenizer
from minispec.studies import results
from minispec.tools.files import read_json, write_text

WORKLOAD = "story"
FIGURE = os.path.join(results.ROOT, "docs", "figures", "answers.svg")
COLOURS = {"draft": "#1a7f37", "correction": "#cf222e", "bonus": "#0969da", "plain": "#24292f"}
COLUMNS, LINES = 100, 3                  # of text that is shown of an answer
WIDTH, LEFT, LINE = 930, 90, 18          # of the picture, of the names, and of a line, in pixels


def picture():
    """The SVG text: the slowest method comes first. None if there are no answers, or no rates."""
    answers = [read_json(file) for file in glob.glob(results.path("answers/*.json"))]
    run = results.read("run")
    if not answers or not run:
        return None
    rates = {x["method"]: x["tokens_per_second"] for x in run["rows"]
             if x["workload"] == WORKLOAD and x["batch"] == 1}
    answers.sort(key=lambda a: rates[a["method"]])
    parts, y = [], 30
    for a in answers:
        parts.append(text(12, y, a["method"], "font-weight='bold'"))
        speed = f"{len(a['steps'])} rounds, tau {a['tau']:.1f}, {rates[a['method']]:.0f} tokens/s"
        parts.append(text(WIDTH - 12, y, speed, "text-anchor='end' font-weight='bold'"))
        y += LINE
        for line in lines_of(a):
            parts.append(text(LEFT, y, line))
            y += LINE
        y += LINE // 2
    legend = [(who, f"{name}   ") for who, name in NAMES.items()]
    parts.append(text(LEFT, y, legend))
    frame = f"<rect width='{WIDTH}' height='{y + 20}' rx='6' fill='#f6f8fa'/>"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {y + 20}' "
                      "font-family='ui-monospace, Menlo, Consolas, monospace' font-size='13'>",
                      frame, *parts, "</svg>\n"])


NAMES = {
    "draft": "a guess that was right",
    "correction": "the model's own in place of a wrong one",
    "bonus": "its own after right guesses alone",
}


def lines_of(answer):
    """The first lines of an answer, each a list of (who, text), broken before tokens that begin a word."""
    tokenizer = Tokenizer.load(os.path.join(results.ROOT, answer["model"]))
    words = []
    for token, who in zip(answer["token_ids"], answer["who"]):
        piece = tokenizer.decode([token]).replace("\n", "/")
        if not words or piece[:1] in (" ", "/"):
            words.append([])
        words[-1].append((who, piece))

    lines, room = [], 0
    for word in words:
        length = sum(len(piece) for _, piece in word)
        if length > room:
            lines.append([])
            room = COLUMNS
            word = [(who, piece.lstrip(" ")) for who, piece in word]
        lines[-1] += word
        room -= length
    return lines[:LINES]


def text(x, y, content, more=""):
    """A <text> element: of one string, or of a list of (who, text)."""
    if isinstance(content, list):
        spans = []
        for who, pieces in itertools.groupby(content, lambda pair: pair[0]):
            part = escape("".join(piece for _, piece in pieces))
            spans.append(f"<tspan fill='{COLOURS[who]}'>{part}</tspan>")
        content = "".join(spans)
    return f"<text x='{x}' y='{y}' xml:space='preserve' {more}>{content}</text>"


def draw():
    """Write the picture, if its answers are there."""
    if drawn := picture():
        write_text(FIGURE, drawn)
