"""Records one run for each paper, and writes docs/rounds.html and its pictures:

    python docs/rounds.py
    python docs/rounds.py --stored          # record nothing; write page and pictures of the stored runs

Times on the page are of this machine; everything else is the same each time. The pictures of the page need
Chromium, the one of SpecGen's pillars needs matplotlib."""
import bisect
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile

DOCS = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(DOCS))

import torch  # noqa: E402

import decode  # noqa: E402
from minispec.data import prompts  # noqa: E402
from minispec.tools.files import replaced, write_text  # noqa: E402
from minispec.tools.recorder import BINS, write_page  # noqa: E402
from minispec.tools.script import run_main

PAGE = f"{DOCS}/rounds.html"

RUNS = {
    "PRISM": "--method prism --task story --size 6 --tree 10",
    "SpecDiff-2": "--method specdiff --task story --size 6 --k-drafts 3 --temperature 1",
    "SpecGen": "--method specgen --model smollm2 --prompts chapters.jsonl --batch 3 --max-new-tokens 64",
    "CDLM": "--method cdlm --task story --size 4",
    "Performance or Illusion?": "--method adaptive --task revise --size 8 --seed 1",
}
QUESTION = "\n\nTell me in your own words what happens in this part of the story."
PICTURE = "3/2/9"                # run, request and round of README's picture
PILLARS = (2, 0)                 # run and request of the pillars, from 0
MARKED = ("begins. And", "great old house", "very tired", "princess sitting in the nursery")


def parts():
    """The story in three parts, with a question each, as a file of prompts."""
    text = prompts.story()
    third = len(text) // 3
    texts = [text[i * third:(i + 1) * third] + QUESTION for i in range(3)]
    return "".join(json.dumps({"prompt": text}) + "\n" for text in texts)


def record():
    """The runs of the page."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        page, chapters = f"{folder}/run.html", f"{folder}/chapters.jsonl"
        write_text(chapters, parts())
        for title, options in RUNS.items():
            print(f"--- {title}")
            decode.main([*shlex.split(options.replace("chapters.jsonl", chapters)), "--html", page])
            run, = runs_of(page)
            runs.append(run | {"title": title, "command": f"python decode.py {options} --html run.html"})
    return runs


def runs_of(page):
    """The runs in a page."""
    with open(page, encoding="utf-8") as f:
        return json.loads(f.read().split('id="data">')[1].split("</script>")[0])


# -- pictures ----------------------------------------------------------------------------------------------

def read_share(request):
    """(rounds, parts): for each part of the context, the mean share of heads whose drafts read a position."""
    width = request["longest"] / BINS
    first = torch.arange(BINS) * width
    rows = []
    for a in request["heard"]:
        if "selected" in a:
            newest = a["cached"] - a["recent"]
            recent = (first + width).clamp(max=a["cached"]) - first.clamp(min=newest)
            read = torch.tensor(a["selected"]) / a["heads"] + recent.clamp(min=0)
            rows.append((read / width).clamp(max=1))
    return torch.stack(rows)


def positions(run, request):
    """{passage: position of its first token} of the marked passages of the prompt."""
    words = [run["words"][str(token)] for token in request["prompt_ids"]]
    ends = list(itertools.accumulate(map(len, words)))
    text = "".join(words)
    return {passage: bisect.bisect(ends, text.index(passage)) for passage in MARKED}


def draw_pillars(run, request, path):
    """The picture of docs/specgen.md: the whole context, and below it the end that has the marked passages."""
    from matplotlib import colors, pyplot
    share = read_share(request).numpy()
    marked = positions(run, request) | {"answer": len(request["prompt_ids"])}
    longest, n = request["longest"], len(share)
    canvas, (whole, end) = pyplot.subplots(2, figsize=(9, 5), layout="constrained", height_ratios=(1, 2))
    for axes in (whole, end):
        shown = axes.imshow(share, "Greens", norm=colors.PowerNorm(0.5, 0, 1), aspect="auto",
                            extent=(0, longest, n + 0.5, 0.5), interpolation="none")
        axes.axvline(marked["answer"], color="black", linestyle=":")
    canvas.colorbar(shown, ax=whole, label="share of heads", ticks=(0, 0.1, 0.5, 1))
    whole.set(ylabel="round", yticks=(1, n))
    labels = []
    for i, a in enumerate(request["rounds"][:n], 1):
        tokens = request["token_ids"][a["position"]:][:a["committed"]]
        labels.append(f"{i} " + "".join(run["words"][str(token)] for token in tokens).strip())
    end.set_yticks(range(1, n + 1), labels, fontsize=8)
    end.set(xlabel="position in the context", xlim=(min(marked.values()) - 50, longest))
    for i, (text, position) in enumerate(marked.items()):
        end.annotate(text, (position, 0.5), (0, 3 + 10 * (i % 2)), textcoords="offset points", fontsize=8)
    with replaced(path) as temporary:
        canvas.savefig(temporary, format="png", dpi=120)
    pyplot.close(canvas)


def draw_page(chromium):
    """The pictures of README.md, for light and dark pages."""
    for name, scheme in (("rounds", 1), ("rounds_dark", 0)):
        with tempfile.TemporaryDirectory() as browser:
            subprocess.run([
                chromium, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1200,880",
                f"--user-data-dir={browser}", f"--blink-settings=preferredColorScheme={scheme}",
                f"--screenshot={DOCS}/figures/{name}.png", f"file://{PAGE}#{PICTURE}",
            ], check=True)


def main():
    if sys.argv[1:] not in ([], ["--stored"]):
        raise ValueError(f"allowed is --stored or nothing, got {' '.join(sys.argv[1:])}")
    runs = runs_of(PAGE) if sys.argv[1:] else record()
    write_page(PAGE, runs)
    run = runs[PILLARS[0]]
    # The pictures need matplotlib and Chromium.
    if importlib.util.find_spec("matplotlib"):
        draw_pillars(run, run["requests"][PILLARS[1]], f"{DOCS}/figures/pillars.png")
    if chromium := shutil.which("chromium"):
        draw_page(chromium)


if __name__ == "__main__":
    run_main(main)
