"""decode.py --html and --explain: recording changes no token and agrees with the run; a browser shows the page."""
import base64
import copy
import functools
import json
import re
import runpy
import shutil
import subprocess
from collections import Counter
from unittest import mock

import pytest
from conftest import ROOT, TARGET, decoded, table, values, words

import decode
from minispec.core.verify import verify_tree
from minispec.tools import checkpoints
from minispec.tools.recorder import TEMPLATE, write_page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(not BROWSER, reason="needs Chromium")
PAGE = f"{ROOT}/docs/rounds.html"
ROUNDS = runpy.run_path(f"{ROOT}/docs/rounds.py")
runs_of = ROUNDS["runs_of"]
RUNS = dict(table("""
    ar |
    ngram | --batch 3 --n 3
    draft | --temperature 1 --rule rejection
    draft, copies | --temperature 1 --prompt-lookup 4
    prism | --temperature 1 --tree 8
    specdiff | --temperature 1 --k-drafts 3 --rule rejection
    specgen | --batch 3 --n 3 --delayed --min-budget 20
    specgen, alone | --min-budget 20
    specgen, all recent | --min-budget 8
    adaptive |
    cdlm |
"""))


def rounds_of(request):
    return [a | step for a, step in zip(request["heard"], request["rounds"], strict=True)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """{name of a run: (its recording, its JSON, the JSON of the same run without a recorder)}."""
    folder = tmp_path_factory.mktemp("viewer")
    out, load = {}, functools.cache(checkpoints.load)
    for name, more in RUNS.items():
        method = name.split(",")[0]
        line = f"--model {TARGET} --task revise --method {method} --max-new-tokens 40 {more}"
        results = []
        for how in (f"--html {folder}/run.html", ""):
            with mock.patch.object(checkpoints, "load", load):
                result, _ = decoded(folder, f"{line} {how}")
            results.append(result.get("requests", [result]))
        out[name] = *runs_of(folder / "run.html"), *results
    return out


def chosen(row):
    """The target's choice of a recorded row."""
    return int(max(row, key=lambda token: row[token][0]))


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_is_the_run(name, recorded):
    run, result, without = recorded[name]
    assert [r["token_ids"] for r in result] == [r["token_ids"] for r in without]
    for request, r in zip(run["requests"], result, strict=True):
        assert all(request[key] == r[key] for key in ("prompt_ids", "token_ids", "who"))
        assert set(map(str, [*r["prompt_ids"], *r["token_ids"]])) <= set(run["words"])
        assert request["rounds"] == r["rounds"]
        assert len(request["heard"]) == len(r["rounds"])


@pytest.mark.parametrize("name", [name for name in RUNS if name != "cdlm"])
def test_verdicts_follow_from_what_is_recorded(name, recorded):
    run, _, _ = recorded[name]
    for request in run["requests"]:
        for a in rounds_of(request):
            *drafts, token = a["tokens"]
            gained = [*(drafts[row - 1] for row in a["path"]), token][:a["committed"]]
            assert request["token_ids"][a["position"]:a["position"] + a["committed"]] == gained
            assert len(a["rows"]) == len(a["tokens"])
            for row, key, numbers in zip(a["parents"], map(str, a["tokens"]), a["numbers"], strict=True):
                assert a["rows"][row].get(key, numbers) == numbers
            if not a["coins"]:
                choices = [chosen(row) for row in a["rows"]]
                assert verify_tree(drafts, a["parents"], choices) == (a["path"], token)
                assert a["parents"][-1] == [0, *a["path"]][-1]
            elif a["parents"][:-1] == list(range(len(drafts))):
                for row in range(min(len(a["path"]) + 1, len(drafts))):
                    _, p, q = a["numbers"][row]
                    coin = a["coins"][row]
                    assert abs(coin * q - p) < 0.001 or (coin * q < p) == (row < len(a["path"]))


# Run, the least share of drafts whose q is recorded.
@pytest.mark.parametrize("name, known", values("""
    "draft" | 1.0
    "draft, copies" | 0.2
    "prism" | 0.05
    "specdiff" | 0.2
    "specgen" | 1.0
    "specgen, alone" | 1.0
    "ngram" | 0.0
"""))
def test_q_is_what_the_draft_was_drawn_from(name, known, recorded):
    """A chain has q at all of its drafts, a tree at the first ones."""
    steps = [a for request in recorded[name][0]["requests"] for a in request["heard"]]
    drafts = [(a, i) for a in steps for i in range(len(a["tokens"]) - 1)]
    q = [a["numbers"][i][2] for a, i in drafts]
    assert all(x == -1 or 0 <= x <= 1 for x in q)
    assert sum(x >= 0 for x in q) >= known * len(q)
    assert known or max(q) < 0
    for a, i in drafts if "specgen" in name else []:     # greedy: the draft is the argmax of q
        row = a["rows"][a["parents"][i]]
        assert a["numbers"][i][2] == max(q for _, _, q in row.values())


def test_specgen_records_its_selection_and_its_schedule(recorded):
    for request in recorded["specgen"][0]["requests"]:
        kinds = [kind for _, kind, _ in request["fed"]]
        assert kinds.count("verify") == len(request["rounds"])
        assert kinds.count("draft") == sum(len(a["tokens"]) - 1 for a in request["heard"])
        selecting = [a for a in request["heard"] if "selected" in a]
        assert selecting
        for a in selecting:
            assert len(a["selected"]) == 240
            assert sum(a["selected"]) == a["heads"] * (20 - a["recent"])


def test_a_round_of_specgen_without_drafts_has_read_everything(tmp_path):
    """After the prompt's token one is left, so the only round drafts nothing."""
    decoded(tmp_path, f"--model {TARGET} --task revise --method specgen --min-budget 20 "
            f"--max-new-tokens 2 --html {tmp_path}/run.html")
    (run,) = runs_of(tmp_path / "run.html")
    (a,) = run["requests"][0]["heard"]
    assert not a["tokens"][1:] and "selected" not in a


def test_adaptive_records_what_each_drafter_promised(recorded):
    rounds = rounds_of(recorded["adaptive"][0]["requests"][0])
    assert any(a["proposer"] != "target" for a in rounds)
    for a in rounds:
        assert {"target", "ngram", "draft", "prism", "eagle", "specdiff"} == set(a["promises"])
        best = max(a["promises"], key=lambda name: a["promises"][name][2])
        assert a["proposer"] in (best, "target")


def test_steps_of_a_diffusion_model_fill_its_answer(recorded):
    run, result, _ = recorded["cdlm"]
    request, = run["requests"]
    first = len(request["prompt_ids"])
    slots = {}
    for a in request["heard"]:
        revealed = [a["slots"][i] for i in a["picked"]]
        assert revealed
        assert not any(position in slots for position, _, _ in a["slots"])
        assert all(c > run["threshold"] for _, _, c in revealed) or len(revealed) == 1
        slots |= {position: token for position, token, _ in revealed}
    assert [slots[first + i] for i in range(len(request["token_ids"]))] == request["token_ids"]


@pytest.mark.parametrize("method", ("ngram", "draft", "prism"))
def test_explain_is_the_recording_as_text(method, tmp_path):
    page = tmp_path / "run.html"
    line = f"--model {TARGET} --task revise --method {method} {RUNS[method]} --max-new-tokens 24"
    _, text = decoded(tmp_path, f"{line} --batch 1 --n 1 --explain 2 --html {page}")
    rounds = text.split("\nat ")[1:]
    run, = runs_of(page)
    steps = [a for a in run["requests"][0]["heard"] if len(a["tokens"]) > 1]
    assert len(rounds) == 2
    for shown, a in zip(rounds, steps):
        drafts = re.findall(r"^ +(\d+) after (\d+) .* (coin|target's choice)(.*)$", shown, re.M)
        assert [int(parent) for _, parent, *_ in drafts] == a["parents"][:-1]
        accepted = [int(row) for row, _, _, rest in drafts if rest.endswith("accepted")]
        assert accepted == a["path"]
        assert all((kind == "coin") == bool(a["coins"]) for _, _, kind, _ in drafts)
        for _, parent, kind, rest in drafts:
            choice = run["words"][str(chosen(a["rows"][int(parent)]))].encode("latin-1").decode("utf-8", "replace")
            assert kind == "coin" or rest.removesuffix("accepted").strip() == repr(choice)
        end = "correction" if [0, *accepted][-1] in a["parents"][:-1] else "bonus"
        rows = f"the cache keeps {len(accepted) + 1} of {len(drafts) + 1} rows"
        assert re.search(f"^ +{end} .*; {rows}$", shown, re.M)


# -- the page --------------------------------------------------------------------------------------------

def test_the_template_is_small_and_needs_no_network():
    text = TEMPLATE.read_text("utf-8")
    assert text.count("\n") <= 400
    assert text.count("{{runs}}") == 1
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "src=" not in text


def test_the_shipped_page_is_what_its_script_makes(tmp_path):
    """The template and the commands are today's."""
    shipped = runs_of(PAGE)
    own = ROUNDS["RUNS"]
    write_page(tmp_path / "again.html", shipped)
    again = (tmp_path / "again.html").read_bytes()
    with open(PAGE, "rb") as f:
        assert f.read() == again
    assert len(again) < 1_500_000
    assert [run["title"] for run in shipped] == list(own)
    for run in shipped:
        args = decode.parse_args(run["command"].split()[2:])
        assert args.method == run["method"]
        assert run["command"].startswith(f"python decode.py {own[run['title']]}")


HARM = "</script><script>document.title = 'harm'</script>"
BAD = HARM + "\x00\x1b[31m\u202e\u2028\ud800<img src=x onerror=alert(1)>"
CHECK = """
<script>
document.body.style.width = "WIDTHpx";
const report = runs.map((run, i) => run.requests.map((_, r) => {
  openRun(i, r, 0);
  const out = {title: document.title, rounds: Number($("#slider").max), who: {}, now: []};
  out.text = document.querySelectorAll("#answer .text")[1].textContent;
  for (const t of document.querySelectorAll("#answer [data-i]")) {
    const who = t.className.split(" ")[1];
    out.who[who] = (out.who[who] ?? 0) + 1;
  }
  for (let at = 1; at <= out.rounds; at++) {
    $("#slider").value = at;
    $("#slider").dispatchEvent(new Event("input"));
    const count = what => document.querySelectorAll(what).length;
    const now = count(rounds[at - 1].slots ? ".slot.new" : "#answer .now");
    const beyond = document.body.scrollWidth - document.body.clientWidth;
    out.now.push([$("#where").textContent, now, count(".node"), count(".rows .kept"), beyond]);
  }
  document.dispatchEvent(new KeyboardEvent("keydown", {key: "Home"}));
  document.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
  out.key = $("#where").textContent;
  return out;
}));
const ascii = btoa(unescape(encodeURIComponent(JSON.stringify(report))));
document.body.append(el("pre", {id: "report"}, ascii));
</script>
"""


def opened(page, folder, width=360):
    """What CHECK reports of a page, which must load without a line in the console."""
    with open(page, encoding="utf-8") as f:
        text = f.read().replace("</html>", CHECK.replace("WIDTH", str(width)) + "</html>")
    (folder / "checked.html").write_text(text, "utf-8")
    command = words(
        f"{BROWSER} --headless --no-sandbox --disable-gpu --enable-logging=stderr --dump-dom "
        f"--user-data-dir={folder}/browser --window-size={width},900 --virtual-time-budget=5000 "
        f"file://{folder}/checked.html")
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    report, = re.findall(r'<pre id="report">(.*?)</pre>', done.stdout)
    return json.loads(base64.b64decode(report))


def check(runs, report):
    """The page counts as the recording does."""
    for run, shown in zip(runs, report, strict=True):
        for request, r in zip(run["requests"], shown, strict=True):
            steps = rounds_of(request)
            diffusion = "slots" in steps[0]
            assert r["rounds"] == len(steps)
            assert r["key"] == f"{'step' if diffusion else 'round'} {min(2, len(steps))} of {len(steps)}"
            assert diffusion or r["who"] == Counter(request["who"])
            for i, (a, (where, now, nodes, kept, beyond)) in enumerate(zip(steps, r["now"], strict=True), 1):
                assert where.endswith(f" {i} of {len(steps)}")
                assert beyond <= 0
                assert now == (len(a["picked"]) if diffusion else a["committed"])
                cut = not diffusion and a["committed"] <= len(a["path"])
                assert diffusion or (nodes, kept) == (len(a["tokens"]) + 1 - cut, len(a["path"]) + 1)


@needs_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_the_shipped_page_in_a_browser(width, tmp_path):
    check(runs_of(PAGE), opened(PAGE, tmp_path, width))


@needs_browser
def test_any_run_in_a_browser_and_nothing_of_the_model_is_code(recorded, tmp_path):
    runs = [copy.deepcopy(run) for run, _, _ in recorded.values()]
    bad = runs[0]
    bad["words"] = dict.fromkeys(bad["words"], BAD.encode("utf-8", "surrogatepass").decode("latin-1"))
    bad["command"] = bad["model"] = bad["title"] = BAD
    write_page(tmp_path / "page.html", runs)
    report = opened(tmp_path / "page.html", tmp_path)
    check(runs, report)
    shown = report[0][0]
    assert shown["title"].startswith("minispec")
    assert not re.search("[\x00-\x09\x0b-\x1f\u2028\u202e]", shown["text"])
    assert HARM + "␀␛[31m\\u202e\\u2028" in shown["text"]
