"""The studies of rules, of SpecGen and of diffusion models on toy models: all run, and their tables say
what the decoders did."""

import itertools
import json
import shutil
import types
import weakref

import numpy as np
import pytest
import torch
from conftest import ROOT, TARGET, refused, save_toy_target, seeded, spoil_ngram, table, toy_model, values

from minispec import prism, specdiff
from minispec.core.engine import Engine
from minispec.core.requests import Request
from minispec.core.scheduler import SyncScheduler
from minispec.data import tasks
from minispec.data.tokenizer import Tokenizer
from minispec.studies import cdlm as diffusion
from minispec.studies import drafters, results, rules, run, specgen
from minispec.tools import checkpoints, drafter_files, methods

pytestmark = pytest.mark.usefixtures("usual_blocks")


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """(settings of a quick study, random target, tokenizer), with a drafter of each kind; the target is also
    the teacher and the student."""
    monkeypatch.setattr(tasks, "FAMILIES", ("revise", "arith"))
    folder = save_toy_target(tmp_path, n_layer=1, gain=1.0, block_size=2048)
    target = checkpoints.load(folder)
    drafters = {
        "prism": prism.for_target(target, (0, 1)),
        "eagle": prism.for_target(target, (0,)),
        "specdiff": specdiff.for_target(target, n_layer=1, gamma=3, reads=True),
    }
    for name, drafter in drafters.items():
        drafter_files.save_drafter(drafter, tmp_path / name, target)
    folder_of = lambda name, settings: str(tmp_path / (name if name in drafters else "target"))
    monkeypatch.setattr(methods, "folder_of", folder_of)
    return quick_settings(model=folder), target, Tokenizer.load(folder)


def quick_settings(**more):
    """Settings of a quick study without a data folder."""
    return methods.settings(quick=True, data=None, problems=None, **more)


def whole(table):
    """The table has no gap and no missing number."""
    return len({line.count("|") for line in table.split("\n")}) == 1 and "nan" not in table


def test_rules_are_compared_on_the_same_prompts(toy, monkeypatch):
    monkeypatch.setattr(rules, "NEW", 10)
    found = json.loads(json.dumps(rules.rules(*toy)))
    rows = found["rows"]
    assert len(rows) == len(rules.DRAFTS) * len(rules.TEMPERATURES) * len(rules.RULES)
    assert found["table"].count("\n") == 1 + len(rows) / 3
    assert whole(found["table"])
    for x in rows:
        assert x["prompts"] == 2
        assert 1 <= x["tau"] == pytest.approx(1 + x["accepted"], abs=0.3)
        assert x["tau_range"][0] <= x["tau"] <= x["tau_range"][1]
    # The texts of coupled drafts and of their argmax are the same, so the numbers of tokens are, too.
    tokens = {
        x["rule"]: sum(n for _, n, _ in x["counts"]) for x in rows if x["method"] == "prism --k 5"
    }
    assert tokens["coupled"] == tokens["point-mass"]


def test_losslessness_is_counted(toy, monkeypatch):
    monkeypatch.setattr(rules, "VARIANTS", ["prism --tree 8"])
    monkeypatch.setattr(methods, "ready", lambda settings: ["ngram", "prism"])
    real = rules.requests_of
    monkeypatch.setattr(rules, "requests_of", lambda *args: real(*args[:3], 8, args[4]))

    spoil_ngram(monkeypatch, rules, "engine_of")
    found = rules.lossless(*toy)
    exact = [x for x in found["rows"] if x["dtype"] == "float32"]
    assert [x["method"] for x in exact] == ["ngram", "prism", "prism --tree 8"]
    assert whole(found["table"])
    wrong, *exact = exact
    assert wrong["greedy"] == 0 < wrong["largest_tie_gap"]
    for x in exact:
        assert x["greedy"] == x["t065"] == x["t1"] == x["top"] == x["prompts"] == 4
        assert x["largest_tie_gap"] == 0
    assert found["table"].count("| 4 of 4 | 4 of 4 | 4 of 4 | 4 of 4 | 0 |") == 2


# -- SpecGen -----------------------------------------------------------------------------------------

MODEL = toy_model()
TEXT = torch.randint(0, 64, (700,), generator=seeded(5)).tolist()


@pytest.fixture
def texts(monkeypatch):
    monkeypatch.setattr(specgen, "text", lambda number, length, *_: TEXT[number : number + length])
    monkeypatch.setattr(specgen, "NEW", 30)
    return quick_settings()


@pytest.mark.parametrize("temperature", [0.0, 0.65])
def test_serving_continues_prompts_that_were_read_once(texts, temperature, monkeypatch):
    names = ["ar", "ngram", specgen.WINDOW, specgen.PILLAR, "specgen"]
    rows = specgen.serving_rows(texts, MODEL, None, names, 60, 3, 0, temperature)
    assert [r["method"] for r in rows] == names
    assert [r.get("identical") for r in rows] == [None, *[3] * 4]
    assert {r["method"] for r in rows if r.get("predicted")} == {specgen.PILLAR, "specgen"}
    engine = specgen.resumed("ar", MODEL, texts, 1, specgen.read(MODEL, [TEXT[:60]]))
    plain = Engine(MODEL, SyncScheduler, 1)
    got, want = (e.generate([Request(TEXT[:60], 30)])[0].token_ids for e in (engine, plain))
    assert got == want and engine.iterations[0]["prefill"] == specgen.K + 1
    if temperature:
        monkeypatch.setattr(specgen, "suitable", lambda *args: names[1:])
        monkeypatch.setattr(specgen.results, "each_kept", lambda *args, **more: [rows])
        puzzles = types.SimpleNamespace(is_puzzle_model=True)
        found = specgen.serving(texts, toy_model(block_size=2048), puzzles)
        assert whole(found["table"]) and found["short"].count("\n") == 1 + 3


def test_eagle_reads_the_texts_before_it_is_timed(monkeypatch, shipped):
    monkeypatch.setattr(specgen, "NEW", 20)
    settings = quick_settings()
    _, eagle = specgen.serving_rows(settings, *shipped, ["ar", "eagle"], 300, 2, 0, 0.65)
    assert eagle["identical"] == 2
    seen = []
    monkeypatch.setattr(
        specgen, "time_interleaved", lambda names, build, *_: seen.append(build("eagle")) or {}
    )
    specgen.serving_rows(settings, *shipped, ["ar", "eagle"], 700, 2, 0, 0.65)
    engine, requests = seen[0]
    engine.generate(requests)
    reading = [bool(i["prefill"]) for i in engine.iterations]
    assert reading.count(True) > 1 and sorted(reading, reverse=True) == reading
    assert not any(i["prefill"] and i["verify"] for i in engine.iterations)


def test_stages_of_the_system_continue_texts_of_different_lengths(texts, monkeypatch):
    monkeypatch.setattr(specgen, "LENGTHS", (300, 600))  # a tenth of it is asked for
    monkeypatch.setattr(specgen, "MORE", 20)
    asked = []
    monkeypatch.setattr(specgen, "Request", lambda *args: asked.append(Request(*args)) or asked[-1])
    found = specgen.scheduler(texts, MODEL, None)
    # Greedy answers would loop. A text has its seed in every stage.
    drawn = [r.sampling for r in asked if r.sampling.temperature == specgen.TEMPERATURE]
    assert len(drawn) == 8 * len(specgen.STAGES) and {s.seed for s in drawn} == set(range(8))
    assert [r["stage"] for r in found["rows"]] == list(specgen.STAGES)
    assert whole(found["table"])
    assert found["cache_tokens"] == (sum(30 + i * 30 // 7 for i in range(8)) + 8 * 20) // 2
    assert all(
        r["identical"] == 8 and r["prefill_rows"] == 8 * (specgen.K + 1) for r in found["rows"]
    )


def test_texts_are_long_enough(tmp_path, tokenizer):
    first, second = (specgen.text(i, 300, tokenizer, None) for i in (0, 1))
    assert len(first) == len(second) == 300 and first != second
    other = types.SimpleNamespace(is_puzzle_model=False, encode=lambda text: list(text.encode()))
    assert (
        specgen.text(1, 100, other, None)
        == specgen.text(0, 200, other, None)[specgen.SHIFT :][:100]
    )
    file = tmp_path / specgen.THOUGHTS
    file.parent.mkdir()
    file.write_text(
        "\n".join(json.dumps({"question": f"q{i}", "response": "r" * 20}) for i in range(80))
    )
    first, second = (bytes(specgen.text(i, 50, other, str(tmp_path))) for i in (0, 1))
    assert first[:1] == second[:1] == b"q" and first != second
    # Drafters were trained on the other questions.
    heldout = {f"q{i}" for i in range(80) if specgen.tasks.is_heldout(f"q{i}\n")}
    length = sum(len(q) + 1 + 20 + 2 for q in heldout) - 2
    everything = bytes(specgen.text(0, length, other, str(tmp_path))).decode()
    assert set(everything.split()) == heldout | {"r" * 20} and 4 < len(heldout) < 40
    with refused(f"text 0 has {length} tokens; 9000 are needed"):
        specgen.text(0, 9000, other, str(tmp_path))


# -- diffusion models --------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(diffusion, "fast_dtype", lambda device: torch.float32)
    real = diffusion.requests_of  # random models never end

    def small(n):
        monkeypatch.setattr(diffusion, "requests_of", lambda *args: real(*args[:-1], n))

    return small


def test_diffusion_models_are_compared(toy, small):
    small(40)
    found = diffusion.cdlm_accuracy(*toy)
    rows = found["rows"]
    assert [r["decoder"] for r in rows] == ["teacher", "ar", *4 * ["student"]]
    assert [r.get("order") for r in rows] == 5 * [None] + ["surest"]
    assert rows[0]["steps"] == rows[0]["tokens"] == 40
    for r in rows:
        assert r["problems"] == 8 and set(r["by_family"]) == {"revise", "arith"}
        assert 0 <= r["solved_range"][0] <= r["solved"] <= r["solved_range"][1] <= 1
    assert whole(found["table"])
    curves = diffusion.cdlm_curves(*toy)
    rows = curves["rows"]
    assert [r["decoder"] for r in rows[::3]] == ["student", "dual", "student", "teacher"]
    assert rows[-1]["steps"] == 16  # a block of 32 slots, and one of 8
    assert all(r["tau"] == r["tokens"] / r["steps"] for r in rows)
    assert whole(curves["table"])


def test_diffusion_models_are_timed(toy, small, tmp_path, monkeypatch):
    monkeypatch.setattr(diffusion.results, "FOLDER", str(tmp_path))
    known = {"decoder": "student", "threshold": 0.9, "order": "surest", "solved": 0.25}
    known = [known, {**known, "order": None, "solved": 0.5}, {"decoder": "ar", "solved": 0.75}]
    (tmp_path / "cdlm_accuracy.json").write_text(json.dumps({"result": {"rows": known}}))
    monkeypatch.setattr(diffusion, "REPEATS", 1)         # rate and latency are medians, of different runs
    monkeypatch.setattr("time.perf_counter", itertools.count(0.0).__next__)
    small(12)
    found = diffusion.cdlm_speed(*toy)
    rows = found["rows"]
    assert [r["batch"] for r in rows] == 9 * [1] + 9 * [4]
    names = [r["decoder"] for r in rows[:9]]
    assert names == ["teacher", "ar", "prism", "teacher", "teacher", "dual", *3 * ["student"]]
    assert [r["solved"] for r in rows[:9]] == [None, 0.75, 0.75, *3 * [None], 0.5, None, None]
    assert rows[0]["ratio"] == rows[9]["ratio"] == 1
    for r in rows:
        assert r["ratio_range"][0] <= r["ratio"] <= r["ratio_range"][1]
        assert r["tokens_per_second"] == pytest.approx(r["batch"] * 12 / r["latency"], rel=0.5)
    assert whole(found["table"])
    assert whole(found["short"]) and found["short"].count("\n") == 1 + 8
    # Cells that a run kept before it was interrupted may have older shares.
    kept = [{**row, "solved": 0.1} for row in rows]
    monkeypatch.setattr(diffusion, "each_kept", lambda *_: [kept])
    assert diffusion.cdlm_speed(*toy)["rows"] == rows


def test_students_of_other_trainings_are_compared(toy, small, tmp_path, monkeypatch):
    small(12)
    args, target, _ = toy
    for name in ("long/all", "long/all-2", "long/other", "short/all"):
        checkpoints.save(target, tmp_path / "arms" / name, args.model)
        (tmp_path / "arms" / name / "log.jsonl").touch()
    args.drafter = str(tmp_path / "arms")
    found = diffusion.cdlm_ablations(*toy)
    rows = found["rows"]
    arms = [(r["group"], r["training"], r["seeds"]) for r in rows[::2]]
    assert arms == [("long", "all", 2), ("long", "other", 1), ("short", "all", 1)]
    assert [r["threshold"] for r in rows] == 3 * [0.9, 0.99]
    for r in rows:
        assert r["more"] == 0 and r["more_range"] == [0, 0]  # the same model three times
        assert 1 <= r["tau"] == pytest.approx(r["tokens"] / r["steps"])
    assert whole(found["table"])
    assert whole(found["short"]) and "| 0.9 |" not in found["short"]
    assert found["short"].count("\n") == 1 + 2  # the first "all", and "other"
    # Each is compared with the first of its group, at its threshold: shares of the eight problems in eighths.
    right = iter((0, 0, 2, 2, 4, 8, 7, 5))  # two seeds of long/all
    solve = lambda *_: ([i < n for n in [next(right)] for i in range(8)], [4] * 8, [40] * 8)
    monkeypatch.setattr(diffusion, "solve", solve)
    rows = diffusion.cdlm_ablations(*toy)["rows"]
    assert [r["more"] for r in rows] == [0, 0, 4 / 8, 6 / 8, 0, 0]
    for args.drafter in (str(tmp_path), None):
        with refused("cdlm_ablations needs --drafter DIR"):
            diffusion.cdlm_ablations(*toy)


def test_figures_of_seeds_are_means_and_their_interval_is_over_problems():
    first = [[True] * 50 + [False] * 50, [2] * 100, [30] * 100]
    second = [[True] * 100, [4] * 100, [30] * 100]
    found = diffusion.figures([first, second])
    low, high = found.pop("solved_range")
    assert found == {"solved": 0.75, "steps": 3, "tokens": 30, "tau": 10}
    assert 0.68 < low < 0.72 and 0.78 < high < 0.82  # 0.75 +- 2 * 0.25 / 10
    assert diffusion.figures([[[1] * 9] * 3])["solved_range"] == [1, 1]


# -- drafters --------------------------------------------------------------------------------------


def test_tau_is_tokens_per_round_next_to_eagles(monkeypatch, shipped):
    """All drafts in every round; the ratio compares the same prompts."""
    monkeypatch.setattr(drafters, "NEW", 24)
    monkeypatch.setattr(drafters, "TEMPERATURES", (0.0,))
    found = drafters.tau(quick_settings(), *shipped)
    rows = found["rows"]
    assert {r["method"] for r in rows} == {f"k = {k}: {name}" for name in methods.TRAINED for k in (5, 8)}
    for r in rows:
        low, high = r["tau_range"]
        assert 1 <= low <= r["tau"] <= high <= int(r["method"][4]) + 1
        assert "eagle" not in r["method"] or r["ratio"] == 1
    assert max(r["tau"] for r in rows if "8" in r["method"]) > 6         # more than five drafts allow
    assert "| next to the first of its group (95 %) |" in found["table"] and whole(found["table"])
    assert found["short"].count("\n") == 1 + 6
    own, base = np.array([[20, 10], [60, 10]]), np.array([[10, 10], [30, 10]])
    figures = drafters.figures(own, base)
    assert (figures["tau"], figures["ratio"], figures["ratio_range"]) == (4, 2, [2, 2])
    # An answer of one token has no round.
    none = np.array([[0, 0]])
    assert drafters.figures(np.append(own, none, 0), np.append(base, none, 0)) == figures
    assert drafters.figures(none, base[:1]) == {"prompts": 0}


def test_drafters_of_both_kinds_are_compared_on_the_same_prompts(toy, tmp_path, monkeypatch):
    """Each with the first one of its group: the same drafter twice, then one of another kind in a group of its
    own; other folders are not drafters."""
    monkeypatch.setattr(drafters, "NEW", 12)
    args = toy[0]
    for name, folder in table("""
        x/a | prism
        x/b | prism
        y/c | specdiff
        y/d | target
    """):
        shutil.copytree(tmp_path / folder, tmp_path / "arms" / name)
    args.drafter = str(tmp_path / "arms")
    monkeypatch.setattr(methods, "folder_of", lambda name, settings: settings.drafter)
    found = drafters.arms(*toy)
    rows = {(r["temperature"], r["method"]): r for r in found["rows"] if r["workload"] == "all"}
    assert list(rows) == [(t, name) for t in (0, 0.7) for name in ("x: a", "x: b", "y: c")]
    for t in (0, 0.7):
        assert rows[t, "x: a"] == {**rows[t, "x: b"], "method": "x: a"}
        assert rows[t, "x: b"]["ratio_range"] == [1, 1]
        assert rows[t, "y: c"]["ratio"] == 1
    for args.drafter in (str(tmp_path), None):
        with refused("arms needs trained drafters"):
            drafters.arms(*toy)


def test_more_chains_are_drafted_and_one_is_selected(toy, monkeypatch):
    monkeypatch.setattr(drafters, "NEW", 12)
    seen = set()                                         # (K, gamma, T_q)
    choose = specdiff.SpecDiffDrafter.select
    real = drafters.engine_of

    def watched(*args, **changes):
        engine = real(*args, **changes)
        drafter = engine.scheduler.drafter
        settings = drafter.width, drafter.gamma, drafter.temperature
        drafter.select = lambda *tree: seen.add(settings) or choose(*tree)
        return engine

    monkeypatch.setattr(drafters, "engine_of", watched)
    found = drafters.chains(*toy)
    assert seen == {(k, 5, t) for k in (1, 2, 4, 8) for t in (None, 0.7)} - {(1, 5, 0.7)} | {
        (1, gamma, None) for gamma in (4, 8, 16)}
    assert [r["method"] for r in found["rows"][:4]] == [f"K = {k}" for k in (1, 2, 4, 8)]
    assert whole(found["table"])
    # --k is the number of drafts of the others.
    toy[0].k = 3
    drafters.compare("arms", {"a": f"specdiff --drafter {toy[0].drafter}"}, 1, *toy, "selection")
    assert (1, 3, None) in seen


def test_a_real_models_greedy_answers_end_before_they_loop(monkeypatch, shipped):
    """The same token for ever is a loop as soon as eight of them occur for the third time."""
    model, tokenizer = shipped
    monkeypatch.setattr(run, "requests_of", lambda *_: [Request([1, 2], 30), Request([3], 6)])
    constant = toy_model(vocab=tokenizer.vocab_size)
    with torch.no_grad():
        constant.head.weight.zero_()
    args = quick_settings()
    lengths, note = run.before_loops({"a": 0, "b": 1}, tokenizer, constant, args, 30)
    assert lengths == {"a": 10, "b": 6}
    assert "1 of 2 greedy answers" in note and "after 10 tokens" in note
    # Traces and prices are of the same answers, decoded one at a time, too.
    monkeypatch.setattr(methods, "chain_drafters", lambda *_: {})
    monkeypatch.setattr(run, "engine_of", lambda *some: results.engine_of(*some) if some[-1] == 1 else None)
    _, some = run.traces_of(args, constant, tokenizer, run.Size(30, 1, {}, {}, {}, 4, {}), 1)
    assert [t.n_out for t in some] == [10, 6]


@pytest.mark.parametrize(
    "how, workloads",
    [(run.SMALL, 6), (run.SMALL, 5), (run.REAL, 9), (run.ANSWERS, 9), (run.ANSWERS, 6)],
)
def test_mixtures_have_as_many_problems_of_each_workload(how, workloads):
    ids = [f"{w}/{i}" for i in range(how.traced) for w in range(workloads)]
    mixed = [own for name, _, own, _ in run.cells_of(ids, how, {}) if name.startswith("mixed")]
    assert len(mixed) == len(how.mixed) + len(how.sampled)
    few = run.cells_of(ids[:6], how, {})
    assert "mixed" in {name for name, *_ in few} and all(len(own) >= batch for _, batch, own, _ in few)
    assert how.traced <= run.PRICED  # no problem has fitted the prices
    for own in mixed:
        assert len({sum(i.startswith(f"{w}/") for i in own) for w in range(workloads)}) == 1


@pytest.mark.parametrize("batch, turns", [(1, "abab"), (2, "ab")])
def test_cells_take_turns_and_leave_no_cache_behind(batch, turns, monkeypatch):
    """At batch 1 after every request. In a batch only the engine that answers has a cache."""
    engines = weakref.WeakSet()
    order, caches = [], []

    def build(name):
        engine = Engine(MODEL, SyncScheduler, batch)
        engine.name = name
        engines.add(engine)
        return engine, [Request([1, 2, 3], 4), Request([5, 6], 3)]

    def watched(engine, requests, real=results.answer):
        out = real(engine, requests)
        order.append(engine.name)
        caches.append(sum(e.cache is not None for e in engines))
        return out

    monkeypatch.setattr(results, "answer", watched)
    runs = results.time_interleaved("ab", build, 2, "", warm_up=False)
    assert "".join(order) == turns * 2 and (batch == 1 or set(caches) == {1})
    for run_of in runs["a"] + runs["b"]:
        assert [len(g.token_ids) for g in run_of.generations] == [4, 3] and len(run_of.rates) == 2


def test_adaptive_and_the_price_table_draft_whole_windows(shipped, capsys):
    """Chains may be longer than in training, a window may not."""
    found = methods.chain_drafters(shipped[0], methods.settings(), 32)
    assert (
        found["prism"].gamma == 32
        and found["specdiff"].gamma == found["specdiff"].config.gamma < 32
    )
    # One that cannot be used is named.
    one = methods.settings(drafter=f"{ROOT}/checkpoints/prism")
    assert list(methods.chain_drafters(shipped[0], one, 32)) == ["ngram", "prism", "eagle"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" is left out: ")[0] for line in lines] == ["draft", "specdiff"]


def test_a_methods_drafts_are_those_of_its_batch_in_the_price_table(shipped, monkeypatch):
    trained = dict.fromkeys(methods.TRAINED, 3)
    best_k = {"1": {"ngram": 7, **trained}, "8": {"ngram": 5, **trained}}
    asked = []

    def build_all(names, build, *_):
        for name in names:
            engine, _ = build(name)
            asked.append((name, engine.batch_size, engine.scheduler.k))

    monkeypatch.setattr(run, "read_costs", lambda path: {"about": {"best_k": best_k}})
    monkeypatch.setattr(run, "time_interleaved", build_all)
    monkeypatch.setattr(run, "rows_of", lambda *_: [])
    how = run.Size(8, 2, {1: 1}, {8: 12}, {}, 4, {})
    run.observe("run", quick_settings(cost=TARGET), *shipped, how, ["ngram", *methods.TRAINED])
    in_batch = {name: k for name, batch, k in asked if batch == 8}
    assert in_batch == {"ar": 0, "ngram": 5, **trained}
    # One request alone has the drafter's own number.
    assert ("ngram", 1, 7) in asked and not {(name, 1, 3) for name in trained} & set(asked)


def test_the_short_table_has_both_models_and_marks_the_best_of_the_papers(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    means = {"result": {"means": {"prism": "2.50 (2-3)"}}}
    (tmp_path / "results" / "speed.json").write_text(json.dumps(means))
    monkeypatch.setattr(run, "ROOT", f"{tmp_path}/")
    # Method, mean, mean in the table, mean of the puzzle model.
    rows = table("""
        eagle          | 1.90 (1-2) | 1.90 (1-2)     |
        prism          | 1.50 (1-2) | 1.50 (1-2)     | 2.50 (2-3)
        prism --tree 8 | 1.70 (1-2) | **1.70 (1-2)** |
        ngram          | 1.40 (1-2) | 1.40 (1-2)     |
    """)
    lines = [{"method": name, run.MEAN: mean} for name, mean, *_ in rows]
    found = run.short(lines, methods.settings(device="cpu"))
    assert [[x[run.MEAN], x[run.SMALL_MODEL]] for x in found] == [want for _, _, *want in rows]
    assert not any(x[run.SMALL_MODEL] for x in run.short(lines, methods.settings(device="cuda")))


def test_studies_that_a_model_has_nothing_for_say_so(shipped, monkeypatch):
    monkeypatch.setattr(methods, "folder_of", lambda name, settings: "nowhere")
    args = methods.settings(quick=False, data=None)
    left_out = lambda message: pytest.raises(results.LeftOut, match=message)
    with left_out("no diffusion model in nowhere"):
        diffusion.cdlm_curves(args, *shipped)
    with left_out("no puzzle model"):
        diffusion.held_out(types.SimpleNamespace(is_puzzle_model=False), 1)
    for args.quick in (False, True):
        with left_out("serving needs a context of"):
            specgen.serving(args, toy_model(), shipped[1])
    with left_out("chains needs a SpecDiff drafter"):
        drafters.chains(args, *shipped)


def test_loops_are_compared_on_the_same_prompts():
    rows = [
        {"workload": workload, "method": method, "ids": ids, "rates": rates, "tau": 3.0}
        for workload, method, ids, rates in values(f"""
            "a" | "ar" | ["a/0", "a/1"] | [10, 10]
            "a" | "ngram" | ["a/0", "a/1"] | [12, 99]
            "b" | "ar" | ["b/0"] | [20]
            "b" | "ngram" | ["b/0"] | [32]
            "{run.WHOLE}" | "ar" | ["a/0", "b/0"] | [10, 20]
            "{run.WHOLE}" | "ngram" | ["a/0", "b/0"] | [30, 40]
        """)
    ]
    _, line = run.loops_table(rows)
    assert line == {
        "method": "ngram",
        "prompts": 2,
        "answers that end at the loop": "1.40",
        "whole answers": "2.50",
        "tau of whole answers": "3.0",
    }
