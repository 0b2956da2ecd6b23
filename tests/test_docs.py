"""The pages are true: links, commands, files, line counts, figures that are computed by hand, and where their
numbers come from."""

import glob
import importlib
import os
import re
import shlex
import statistics
from unittest import mock

import pytest
import torch
from conftest import ROOT, refused, seeded, table, values
from test_imports import FILES
from test_viewer import PAGE, ROUNDS, rounds_of, runs_of

import bench
import decode
from minispec import bounds, cdlm
from minispec.core.noise import noise, stream
from minispec.core.verify import draw, rejection, verify_tree
from minispec.tools import report
from minispec.tools.files import read_json

PAGES = [os.path.relpath(page, ROOT) for page in bench.pages()]
every_page = pytest.mark.parametrize("page", PAGES)
LESSONS = ("00-start", "specgen", "prism", "specdiff", "cdlm", "bounds")
RECORDED = runs_of(PAGE)
RENDERED = re.compile(r"<!-- (?:table |computed by|output of).*?\n<!-- end -->", re.S)


def read(page):
    with open(f"{ROOT}/{page}", encoding="utf-8") as f:
        return f.read()


def lines_of(file):
    return read(file).count("\n")


def result(study):
    return read_json(f"{ROOT}/results/{study}.json")["result"]


def round_of(address):
    """The recorded round of an address #run/request/round; all count from 1."""
    run, request, number = map(int, address.split("/"))
    assert min(run, request, number) > 0
    return rounds_of(RECORDED[run - 1]["requests"][request - 1])[number - 1]


# -- form ------------------------------------------------------------------------------------------------


def test_readme_fits_two_screens():
    assert lines_of("README.md") <= 110


@pytest.mark.parametrize("page", [p for p in PAGES if "appendix" not in p])
def test_pages_stay_small(page):
    assert len(read(page).encode()) <= 16 * 1024


@pytest.mark.parametrize("lesson", LESSONS[1:])
def test_lessons_have_few_tables_and_figures(lesson):
    text = read(f"docs/{lesson}.md")
    tables = re.findall(r"^\| -.*\n((?:\|.*\n)+)", text, re.M)
    assert len(tables) <= 2 and all(t.count("\n") <= 8 for t in tables)
    assert text.count("![") <= 2 + (lesson == "bounds")


@every_page
def test_links_resolve(page):
    """To a file, and to what is named behind a #: a heading, spelled as GitHub does, or a recorded round."""
    for target in re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", read(page)):
        target, _, heading = "".join(target).partition("#")
        if target.startswith("http"):
            continue
        file = os.path.join(os.path.dirname(page), target) if target else page
        assert os.path.exists(f"{ROOT}/{file}"), target
        if file.endswith(".html"):
            if heading:
                round_of(heading)
        elif heading:
            headings = re.findall(r"^#+ (.*)", read(file), re.M)
            assert heading in [
                re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings
            ], heading


@every_page
def test_numbers_in_tables_are_rendered(page):
    """Or computed by a test, which knows the page."""
    text = read(page)
    for line in RENDERED.sub("", text).splitlines():
        if line.lstrip().startswith("|"):
            bare = re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)", "", line)
            assert not re.search(r"(?<![\w.])\d", bare), line
    for where, name, key in re.findall(bench.MARKS, text, re.S):
        stored = result(where + name)[key or "table"]
        assert stored.count("\n") > 1
        known = *bench.STUDIES, "knocks", "checkpoints", "gpu"
        assert "appendix" in page or name in known, f"{name} is gone"
    for test in re.findall(r"<!-- computed by (\S+) -->", text):
        assert os.path.basename(page) in read(test)


# -- commands and files ----------------------------------------------------------------------------------


def commands(page):
    """What a page asks the reader to run: in code blocks, and between backticks; not in tables of results."""
    text = RENDERED.sub("", read(page))
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S))
    found = re.split(r"\n|&&", blocks)
    found += re.findall(r"`(python [^`]+)`", text)
    for command in found:
        words = shlex.split(command.replace("\n", " "), comments=True)
        if words and os.path.basename(words[0]) == "python":
            yield words[1:]


@every_page
def test_commands_parse(page):
    """By the script's own parser, which would exit. Files that a command names need not be there."""
    for script, *args in commands(page):
        if script == "-m":
            assert importlib.util.find_spec(args[0]), args
            if args[0] == "minispec.bounds":
                bounds.parse_args(args[1:])
            continue
        assert os.path.exists(f"{ROOT}/{script}"), script
        if script == "decode.py":
            decode.parse_args(args)
        elif not script.startswith(("tests/", "docs/")):
            with mock.patch("sys.argv", [script, *args]):
                try:
                    importlib.import_module(script.removesuffix(".py")).parse_args()
                except ValueError as e:
                    assert "no " in str(e).lower(), e


@every_page
def test_files_exist(page):
    for name in re.findall(r"`([\w/]+\.(?:py|md|txt|json))`", RENDERED.sub("", read(page))):
        if "/" in name or name.endswith(".py"):
            assert glob.glob(f"{ROOT}/**/{name}", recursive=True), name


def test_line_counts():
    """To the nearest ten of a file, within a tenth, and to the nearest hundred of all."""
    text = read("README.md")
    named = re.findall(r"`([\w/]+\.py)`\]?[^`\n]*?, (\d+) lines", text)
    assert len(named) >= 6
    for name, said in named:
        own = lines_of(name)
        assert abs(own - int(said)) <= max(10, own / 10), (name, own)
    (said,) = re.findall(r"([\d,]+) lines of Python", text)
    assert abs(sum(map(lines_of, FILES)) - int(said.replace(",", ""))) <= 500


# -- what is shown is what was measured ------------------------------------------------------------------


def test_output_in_the_readme_is_real():
    outputs = r"<!-- output of (\S+) -->\n```text\n(.*?)```\n<!-- end -->"
    for name, shown in re.findall(outputs, read("README.md"), re.S):
        assert shown == report.table(read_json(f"{ROOT}/{name}")) + "\n"


def test_the_puzzle_models_column_in_the_readme_is_its_own_result():
    """It is pasted when the real model is measured, so a later `speed` of the puzzle model would leave it
    old."""
    shown = re.search(r"<!-- table smollm2/speed short -->\n(.*?)\n\n", read("README.md"), re.S)[1]
    head, _, *rows = table(shown)
    column = head.index("puzzle model")
    assert {own[1]: own[column] for own in rows} == result("speed")["means"]


def greedy_rows(study):
    """{(workload, batch): {method: row}} of SmolLM2's greedy answers that end where they repeat themselves."""
    cells = {}
    for x in result(f"smollm2/{study}")["rows"]:
        if not x["temperature"] and "whole" not in x["workload"]:
            cells.setdefault((x["workload"], x["batch"]), {})[x["method"]] = x
    return cells


def test_pages_say_where_a_single_drafter_is_faster_than_adaptive():
    """On as many kinds of text, and in the batches, that the measured rows show."""
    alone, batches, faster = {}, {}, {}
    for study in ("run", "speed"):
        lead = {cell: rows[bounds.COMBINED]["speedup"]
                / max(rows[m]["speedup"] for m in ("ngram", "prism", "eagle", "specdiff"))
                for cell, rows in greedy_rows(study).items()}
        alone[study] = [x for (name, batch), x in lead.items() if batch == 1 and name != "mixed"]
        batches[study] = {batch for (_, batch), x in lead.items() if batch > 1 and x < 0.97}
        faster[study] = sum(x > 1 for x in alone[study])
    assert [len(x) for x in alone.values()] == [9, 9]
    assert faster == {"run": 7, "speed": 6} and batches == {"run": {4}, "speed": {4, 16}}
    assert sum(x >= 0.97 for x in alone["speed"]) == 6
    readme = " ".join(read("README.md").split())
    page = " ".join(read("docs/bounds.md").replace("\n> ", " ").split())
    assert "in six of nine kinds of text it is faster" in readme
    assert "in batches of 4 and 16 a single drafter is faster" in readme
    assert "on seven of nine workloads with answers of 64 tokens" in page and "on six with up to [256]" in page
    assert "none of it in a batch of 4" in page


def test_the_readme_says_how_much_longer_a_verification_takes():
    def forward(row):
        return row["phases"]["verify"] / row["tokens"] * row["tau"]

    prices = [forward(rows["eagle"]) / forward(rows["ar"])
              for (_, batch), rows in greedy_rows("speed").items() if batch == 1]
    assert 1.1 < statistics.median(prices) < 1.15
    assert "about an eighth longer than a plain step" in read("README.md")


def test_the_readme_says_which_means_are_the_highest():
    means = {m: float(x.split()[0]) for m, x in result("smollm2/speed")["means"].items()}
    assert "has the highest mean" in read("README.md")
    highest = means.pop(bounds.COMBINED)
    assert highest > max(means.values()) == means["prism --prompt-lookup 8"] > 0.97 * highest


def test_the_recorder_takes_no_other_arguments():
    with mock.patch("sys.argv", ["rounds.py", "--help"]), refused("--stored or nothing"):
        ROUNDS["main"]()


def test_minutes_in_the_readme_are_the_lessons():
    rows = re.findall(r"`(minispec/\w+\.py)` \| \[(\d+ minutes)\]\((docs/\w+\.md)\)", read("README.md"))
    assert len(rows) == 5
    for file, minutes, lesson in rows:
        assert f"> {minutes}." in read(lesson) and f"`{file}`" in read(lesson)


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_lesson_links_to_a_recorded_round(lesson):
    assert re.search(r"\(rounds\.html#\d+/\d+/\d+\)", read(f"docs/{lesson}.md"))


def test_linked_rounds_show_what_the_lessons_say():
    word = lambda run, token: RECORDED[run - 1]["words"][str(token)]
    children = lambda a, row: [t for t, parent in zip(a["tokens"], a["parents"]) if parent == row]
    # 00-start: like the round by hand, then a bonus.
    a = round_of("3/2/11")
    assert len(a["path"]) == 2 and len(a["rows"]) == 9 and not a["coins"]
    a = round_of("3/2/10")
    assert len(a["path"]) == len(a["tokens"]) - 1
    # 00-start and SpecDiff-2: three chains with other first tokens.
    a = round_of("2/1/15")
    assert len(set(children(a, 0))) == 3 and len(a["path"]) == 4
    assert word(2, a["tokens"][4]) == "8" and word(2, a["tokens"][-1]) == "7"
    # PRISM: two children, both wrong.
    a = round_of("1/1/17")
    assert len(a["path"]) == 3 and [word(1, t) for t in children(a, a["path"][-1])] == ["9", "8", "7"]
    rounds = RECORDED[0]["requests"][0]["heard"]
    chains = [b for b in rounds if b["parents"][:-1] == list(range(len(b["rows"]) - 1))]
    assert len(chains) > 0.8 * len(rounds)
    # README: every draft is accepted once the text repeats itself.
    looping = RECORDED[2]["requests"][2]["heard"][6:]
    assert len(looping) == 5 and all(len(b["path"]) == len(b["tokens"]) - 1 for b in looping)
    assert looping[0]["path"] == round_of("3/3/7")["path"]
    # CDLM: no slot above the threshold, so the first one is revealed.
    a = round_of("4/1/13")
    assert a["picked"] == [0] and max(sure for *_, sure in a["slots"]) < RECORDED[3]["threshold"]
    # Adaptive.
    before, after = round_of("5/1/7"), round_of("5/1/8")
    for b in (before, after):
        assert b["proposer"] == "ngram" == max(b["promises"], key=lambda name: b["promises"][name][2])
    assert (before["committed"], after["committed"]) == (3, 17)
    assert after["promises"]["ngram"][1] < before["promises"]["ngram"][1]


def test_pillars_last():
    run, request = ROUNDS["PILLARS"]
    request = RECORDED[run]["requests"][request]
    share = ROUNDS["read_share"](request)
    prompt = share[:, : share.shape[1] * len(request["prompt_ids"]) // request["longest"]]
    order = prompt.sort(descending=True, stable=True).indices        # there are ties
    top = [set(row) for row in order[:, :24].tolist()]
    same = [len(a & b) / 24 for a, b in zip(top, top[1:])]
    assert f"{100 * sum(same) / len(same):.0f} % of the 24 parts" in read("docs/specgen.md")
    assert share[:, 0].min() > 0.7


def test_the_picture_of_pillars_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    run, request = ROUNDS["PILLARS"]
    run = RECORDED[run]
    ROUNDS["draw_pillars"](run, run["requests"][request], tmp_path / "pillars.png")
    assert (tmp_path / "pillars.png").read_bytes().startswith(b"\x89PNG")


# -- docs/00-start.md ------------------------------------------------------------------------------------

WORDS = ("the", "cat", "sat", "down")
Q = torch.tensor(values("""
    0.10 | 0.40 | 0.40 | 0.10
    0.10 | 0.10 | 0.60 | 0.20
    0.50 | 0.10 | 0.10 | 0.30
"""))
P = torch.tensor(values("""
    0.10 | 0.50 | 0.30 | 0.10
    0.05 | 0.05 | 0.45 | 0.45
    0.15 | 0.15 | 0.10 | 0.60
    0.05 | 0.80 | 0.05 | 0.10
"""))
DRAFT = [1, 2, 0]
COINS = torch.tensor([0.91, 0.40, 0.62, 0.55])
ALPHA = torch.minimum(P[:3], Q).sum(-1)


def two(numbers, gap="   "):
    return gap.join(f"{x:.2f}" for x in numbers)


def committed(coins):
    path, token = rejection([([1, 2, 3], Q)], DRAFT, P, coins)
    return " ".join(WORDS[t] for t in [*DRAFT[: len(path)], token])


def test_the_round_by_hand():
    page = read("docs/00-start.md")
    # The table, and the verdicts.
    for q in Q:
        assert f"q   {two(q)}" in page
    for p in P:
        assert f"p   {two(p)}" in page
    for i, d in enumerate(DRAFT):
        verdict = "accepted" if COINS[i] * Q[i, d] < P[i, d] else "rejected"
        line = f"{P[i, d]:.2f}       {Q[i, d]:.2f}     {P[i, d] / Q[i, d]:.2f}    {COINS[i]:.2f}    {verdict}"
        assert f"    {WORDS[d]}       {line}" in page
    assert committed(COINS) == "cat sat down" and "The round commits `cat sat down`" in page
    bonus = COINS.clone()
    bonus[2] = 0.2
    assert committed(bonus) == "cat sat the cat" and "commits `cat sat the cat`" in page

    # The residual, and the law.
    p, q = P[2], Q[2]
    rest = (p - q).clamp(min=0)
    total = rest.sum()
    assert f"max(p - q, 0)      {two(rest)}    {total:.2f}" in page
    assert f"residual           {two(rest / total)}    1.00" in page
    assert f"p - q             {two(p - q)}" in page
    both = torch.minimum(p, q)
    assert f"min({p[3]:.2f}, {q[3]:.2f})                  = {both[3]:.2f}" in page
    assert f"1 - ({two(both, ' + ')})         = {1 - both.sum():.2f}" in page
    assert f"{rest[3]:.2f} / {total:.2f}                             = {rest[3] / total:.2f}" in page
    assert torch.allclose(both + (1 - both.sum()) * rest / total, p)
    assert f"{both[3]:.2f} + {total:.2f} * {rest[3] / total:.2f}" in page
    assert f"= {p[3]:.2f}\n" in page

    # alpha, tau, and the speed-up.
    tau = 1 + ALPHA.cumprod(0).sum()
    assert "{:.2f}, {:.2f} and {:.2f} in the three rows".format(*ALPHA) in page
    assert f"= {tau:.2f}\n" in page
    assert f"a speed-up of {tau:.2f} / 1.30 = {tau / 1.3:.2f}" in page


def test_the_round_with_shared_noise_by_hand():
    page = read("docs/00-start.md")
    e = noise(torch.full((3,), stream(2339)), torch.arange(1, 4), 4)
    e = torch.tensor(
        [[float(f"{x:.2f}") for x in row] for row in e.tolist()]
    )  # as the page shows it
    drafts, choices = (Q / e).argmax(1).tolist(), (P[:3] / e).argmax(1).tolist()
    for row, draft, choice, p, q in zip(e, drafts, choices, P, Q):
        verdict = "accepted" if draft == choice else "rejected"
        assert (
            f"noise e           {two(row)}\n"
            f"         q / e             {two(q / row)}     {WORDS[draft]}\n"
            f"         p / e             {two(p / row)}     {WORDS[choice]:<4}      {verdict}\n"
        ) in page
    path, token = verify_tree(drafts, range(3), [*choices, 1])
    assert " ".join(WORDS[t] for t in [*(drafts[i - 1] for i in path), token]) == "cat sat down"
    # How often both are first: with noise, and the sum over tokens in closed form.
    many = noise(torch.full((60_000,), stream(0)), torch.arange(60_000), 4)
    same = []
    for p, q in zip(P, Q):
        same.append((1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(1)).sum().item())
        alpha = torch.minimum(p, q).sum()
        assert abs(((p / many).argmax(1) == (q / many).argmax(1)).float().mean() - same[-1]) < 0.01
        assert alpha / (2 - alpha) <= same[-1] <= alpha
    assert "with probability {:.2f}, {:.2f} and {:.2f} in the three rows".format(*same) in page


def test_point_masses_by_hand():
    page = read("docs/00-start.md")
    left = P[2].clone()
    left[0] = 0
    assert f"residual           {two(left / left.sum())}\n" in page
    # The rule with q = None draws from this very residual.
    coins = torch.rand(4000, 2, generator=seeded())
    found = [rejection([([1], None)], [0], P[2:], own) for own in coins]
    rejected = torch.tensor([not path for path, _ in found])
    assert abs(rejected.float().mean() - 1 + P[2, 0]) < 0.02
    tokens = torch.tensor([token for _, token in found])[rejected]
    assert torch.equal(tokens, draw(left.expand(len(tokens), 4), coins[rejected, 1]))
    # The mistake: p / q for a drafter that always drafts `the`.
    assert f"with probability {P[2, 0] / Q[2, 0]:.2f}, twice as often" in page


# -- the papers' lessons ---------------------------------------------------------------------------------


def test_the_streaks_gain_is_in_the_results():
    """Appendix, lesson and README name it: drafts accepted of a window at the tokens where both logs have a
    line."""
    arms = result("smollm2/specdiff_objectives")["arms"]
    drafts = {}
    for name in ("mdlm", "streak"):
        (line,) = (x for x in arms[name]["curve"] if x["tokens"] == 1293459)
        drafts[name] = line["heldout_tau"]["point_mass"] - 1
    gain = f"{100 * (drafts['streak'] / drafts['mdlm'] - 1):.0f} %"
    figures = "{streak:.3f} drafts a window against {mdlm:.3f}, ".format(**drafts)
    assert figures + gain in read("docs/appendix/specdiff.md")
    assert f"{gain} more accepted" in read("README.md")
    assert f"{gain} more drafts accepted" in read("docs/specdiff.md")


def test_masks_of_cdlm_by_drawing():
    """Two prompt tokens, four slots in blocks of two, and the noisy copy of the slots."""
    _, blocks = cdlm.layout(torch.tensor([[1, 1]]), 4, 2)
    causal = torch.ones(6, 6).tril()[None, None] > 0

    def drawn(names, *masks):
        """The masks side by side."""
        lines = [[f"    {' '.join(names)}"] * len(masks)]
        for name, *rows in zip(names, *(mask[0, 0].tolist() for mask in masks)):
            lines.append([f"{name}   " + " ".join(".x"[seen] for seen in row) for row in rows])
        return "\n".join("    " + (" " * 11).join(line) for line in lines)

    page = read("docs/cdlm.md")
    assert drawn("PPabcd", causal, cdlm.bidirectional(blocks), cdlm.block_causal(blocks)) in page
    assert drawn("PPabcdABCD", cdlm.two_copies(blocks, 4)) in page


def test_formulas_with_numbers_put_in():
    page = read("docs/specgen.md")
    for r in (0.8, 0.2):
        assert f"7 / (9 * {1 - r:.1f} + 1.4 * {r}) = {7 / (9 * (1 - r) + 1.4 * r):.2f}" in page
    page = read("docs/prism.md")
    assert f"= {sum(0.8 ** i for i in range(6)):.2f} tokens" in page
    assert f"= {1 + 0.8 * sum(0.9 ** i for i in range(5)):.2f} tokens" in page
    page = read("docs/bounds.md")
    for alpha in (0.8, 0.2):
        tau = sum(alpha**i for i in range(4))
        assert f"= {tau:.2f} tokens    {tau:.2f} / 1.4 = {tau / 1.4:.2f}" in page
    # One answer as jumps, and V from its end.
    left = [0.0]
    for gain in (1, 1, 3, 1, 1, 4):
        left.insert(0, 1 + min(left[:gain]))
    assert left == [2, 3, 2, 1, 2, 1, 0] and "V[4] = 1, V[3] = 2 and V[2] = 3" in page
    page = read("docs/specdiff.md")
    c = torch.tensor([0.9, 0.5, 0.1]).cumprod(0)
    for k, said in re.findall(r"A_(\d) = ([\d.]+)", page):
        assert (1 - (1 - c) ** int(k)).sum().item() == pytest.approx(float(said), abs=0.0051)
    assert f"counts {c.sum() / c[2]:.0f} times as much" in page


# -- docs/answers.md -------------------------------------------------------------------------------------


def test_every_exercise_has_an_answer():
    answers = read("docs/answers.md")
    for lesson in LESSONS:
        own = read(f"docs/{lesson}.md").split("## Exercises")[1]
        exercises = re.findall(r"^(\d+)\. \((?:easy|medium|hard)\)", own, re.M)
        (section,) = re.findall(rf"^## \[{lesson}\]\(.*?\)\n(.*?)(?=^## |\Z)", answers, re.M | re.S)
        assert exercises and re.findall(r"^\*\*(\d+)\.\*\*", section, re.M) == exercises, lesson


def test_answers_by_hand():
    page = " ".join(read("docs/answers.md").split())
    second = COINS.clone()
    second[1] = 0.8
    assert f"commits `{committed(second)}`" in page
    tau = torch.cat([torch.ones(1), 1 + ALPHA.cumprod(0).cumsum(0)])
    for price in (0.1, 0.02, 0.4):
        speed = tau / (1 + price * torch.arange(4))
        assert f"{price:.2f}: {two(speed, ', ')}" in page
    first = (P[2] - Q[2]).clamp(min=0)
    two_drafts = ALPHA[2] + (1 - ALPHA[2]) * torch.minimum(first / first.sum(), Q[2]).sum()
    assert f"from {ALPHA[2]:.2f} to {two_drafts:.2f}" in page

    # SpecGen 1: the cost model at three shares of attention.
    for r in (0.5, 0.8, 0.9):
        speeds = [
            (a + 1) / ((k + 1) * (1 - r) + (0.05 * k + 1) * r)
            for k, a in ((4, 3.3), (8, 5.4), (16, 9.1))
        ]
        assert f"{r} {two(speeds, ' ')}" in page
        if r == 0.8:
            assert "at 0.8 ({:.3f} and {:.3f})".format(*speeds) in page

    # PRISM 1: the best depth at 0.8 a step.
    depth = torch.arange(1, 33)
    for price in (0.1, 0.02):
        speed = (1 - 0.8 ** (depth + 1)) / 0.2 / (1 + price * depth)
        assert f"at {price:g}: depth {speed.argmax() + 1}, speed-up {speed.max():.2f}" in page

    # SpecDiff-2 1: both rules for one q.
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.6, 0.3, 0.1])
    assert f"{torch.minimum(p, q).sum():.2f} by rejection and {(p * q).sum():.2f} by point mass" in page

    # CDLM 1: the largest n with (n + 1) e < 1.
    assert max(n for n in range(2000) if (n + 1) / 1000 < 1 - 1e-9) == 998 and "998 tokens" in page


def test_measured_answers_are_the_stored_ones():
    page, found = read("docs/answers.md"), read_json(f"{ROOT}/results/answers.json")
    for name, x in found["modules"].items():
        first, second = x["accepted"][:2]
        assert f"    {name} ..    {x['tau']:.2f}             {first:.3f}     {second:.3f}" in page
    page = " ".join(page.split())
    plain, stale, *others = found["decoders"].values()
    assert f"solves {100 * plain['solved']:.0f} %, and {100 * stale['solved']:.0f} % with stale keys" in page
    assert f"{stale['steps']:.1f} an answer instead of {plain['steps']:.1f}" in page
    assert all(f"{100 * x['solved']:.0f} % in {x['steps']:.1f}" in page for x in (plain, *others))


def test_the_glossarys_words_are_the_codes():
    code = "\n".join(map(read, FILES)).replace("_", " ").lower()
    for word in re.findall(r"\*\*([^*]+)\*\*", read("docs/glossary.md")):
        assert re.search(rf"\b{word.lower()}", code), word
    assert not re.search(r"\b(lockstep\(|planner|unjudged|with copies)", code)
