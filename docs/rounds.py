"""Records one run for each paper, and writes docs/rounds.html and its pictures: python docs/rounds.py

Times on the page are of this machine; everything else is the same each time. The pictures need Chromium."""
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile

DOCS = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(DOCS))

import decode  # noqa: E402
from minispec.data import prompts  # noqa: E402
from minispec.tools.files import write_text  # noqa: E402
from minispec.tools.recorder import write_page  # noqa: E402

RUNS = {
    "PRISM": "--method prism --task story --size 6 --tree 10",
    "SpecDiff-2": "--method specdiff --task story --size 6 --k-drafts 3 --temperature 1",
    "SpecGen": "--method specgen --model smollm2 --prompts chapters.jsonl --batch 3 --max-new-tokens 64",
    "CDLM": "--method cdlm --task trace --threshold 0.9",
    "Performance or Illusion?": "--method adaptive --task revise --size 8",
}
QUESTION = "\n\nTell me in your own words what happens in this part of the story."
PICTURE = "3/2/9"                # run, request and round of the picture


def parts():
    """The story in three parts, with a question each, as a file of prompts."""
    text = prompts.story()
    third = len(text) // 3
    texts = [text[i * third:(i + 1) * third] + QUESTION for i in range(3)]
    return "".join(json.dumps({"prompt": text}) + "\n" for text in texts)


def main():
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        page, chapters = f"{folder}/run.html", f"{folder}/chapters.jsonl"
        write_text(chapters, parts())
        for title, options in RUNS.items():
            print(f"--- {title}")
            decode.main([*shlex.split(options.replace("chapters.jsonl", chapters)), "--html", page])
            with open(page, encoding="utf-8") as f:
                run, = json.loads(f.read().split('id="data">')[1].split("</script>")[0])
            runs.append(run | {"title": title, "command": f"python decode.py {options} --html run.html"})
        write_page(f"{DOCS}/rounds.html", runs)
        if chromium := shutil.which("chromium"):
            draw(chromium, folder)


def draw(chromium, folder):
    """The pictures of README.md, for light and dark pages; the browser keeps its files in `folder`."""
    for name, scheme in (("rounds", 1), ("rounds_dark", 0)):
        subprocess.run([
            chromium, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1200,880",
            f"--user-data-dir={folder}/browser", f"--blink-settings=preferredColorScheme={scheme}",
            f"--screenshot={DOCS}/figures/{name}.png", f"file://{DOCS}/rounds.html#{PICTURE}",
        ], check=True)


if __name__ == "__main__":
    main()
