"""bench.py and python -m minispec.bounds: studies that fit together, bounds from files alone, pages, and one
clear line for bad files."""
import gc
import importlib.util
import json
import os
import re
import sys
import weakref
import xml.dom.minidom
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (ROOT, TARGET, outcome, python, refusal, refused, table, toy_model, toy_target, values,
                      words)
from test_bounds import grid
from test_studies import quick_settings, whole

import bench
import fuzz
import gpu_suite as gpu
import references
from minispec import bounds, traces
from minispec.bounds import AVERAGES
from minispec.core.drafters import NGram, SmallLM
from minispec.core.requests import Request
from minispec.data import mixture, tasks
from minispec.studies import measure, results, run
from minispec.tools import methods
from minispec.tools.files import read_json, write_json
from minispec.tools.intervals import interval
from minispec.costs import CostTable

COSTS = json.loads(fuzz.COSTS)
ABOUT = {"command": "c", "device": "d", "torch": "t", "date": "x", "seconds": 60}


# -- bounds of own files -----------------------------------------------------------------------------

@pytest.fixture
def files(tmp_path):
    (tmp_path / "t.jsonl").write_text(fuzz.TRACES)
    (tmp_path / "c.json").write_text(json.dumps(COSTS))
    return tmp_path


def printed(files, more=""):
    r = outcome(bounds, f"--traces {files}/t.jsonl --cost {files}/c.json {more}")
    assert r.returncode == 0, r.stderr
    return r.stdout


def test_bounds_from_two_files_print_the_ladder_and_write_nothing(files):
    text = printed(files)
    for said in ("3 requests, 18 positions", "c.json", "rounds  of at most 3 drafts", "| a | 16 | all |",
                 "best fixed k | greedy (not a bound) | optimum of one | optimum of all | free drafters",
                 "| b | 1 | ngram |", "All speed-ups are total time / mean rate (95 % interval"):
        assert said in text
    assert "observed" not in text
    assert sorted(os.listdir(files)) == ["c.json", "t.jsonl"]


def test_batches_and_k_max_are_those_asked_for(files):
    printed(files, f"--batches 2 9 --k-max 2 --json {files}/o.json")
    cells = read_json(files / "o.json")["cells"]
    assert {(c["batch"], c["k_max"]) for c in cells} == {(2, 2), (9, 2)}
    assert set(AVERAGES) <= set(cells[0])


# Arguments, a file, its new content, part of the line.
WRONG = """
--batches 1 0 | | | batches
--batches two | | | batches
--batches 1000000000000000000000000000000 | | | batches
--k-max 1001 | | | k-max
--k-max 0 | | | k-max
--json FOLDER/t.jsonl | | | cannot write
| t.jsonl | gone | cannot read .*t.jsonl
| c.json | gone | cannot read .*c.json
| c.json | {"verify": {"kind": "linear", "base": "fast"}} | c.json: verify.base must be numbers
| t.jsonl | | no trace in this file
| t.jsonl | {"id": "a", "prompt_len": 4, "n_out": 3, "accept": {"ngram": [0, [1], 1]}} | t.jsonl:1: accept.ngram
| t.jsonl | {"id": "a", "prompt_len": 4, "n_out": 2, "accept": {"ngram": [0, 9]}} | t.jsonl:1: accept.ngram.1. m
| c.json | {"verify": {"kind": "linear", "base": 1}} | are not in the cost table
"""


@pytest.mark.parametrize("args, file, content, message", table(WRONG))
def test_wrong_settings_and_bad_files_are_one_line(files, args, file, content, message):
    if content == "gone":
        os.remove(files / file)
    elif file:
        (files / file).write_text(content)
    args = args.replace("FOLDER", str(files))
    assert re.search(message, refusal(bounds, f"--traces {files}/t.jsonl --cost {files}/c.json {args}"))


def drawings(found, some):
    """What docs/plots.py draws of own files, next to the first; nothing without matplotlib."""
    if not importlib.util.find_spec("matplotlib"):
        return []
    done = python("docs/plots.py", found, some)
    drawn = sorted(found.parent.glob("*_bounds_*.svg"))
    assert done.returncode == 0 and drawn, done.stderr
    return drawn


EVIL = "a|b\x1b[2J\r$\n{x_$} | c"


def test_names_from_files_are_shown_not_obeyed(files, monkeypatch, capsys):
    """Of workloads, drafters with and without a price, and devices: none breaks a table, draws a formula or
    reaches a terminal as it is."""
    evil = json.dumps(EVIL)
    (files / "t.jsonl").write_text(fuzz.TRACES.replace('"a/', evil[:-1] + "/").replace('"ngram"', evil))
    for drafters in (COSTS["draft"], {"draft": COSTS["draft"]["draft"]}):
        costs = json.dumps({**COSTS, "draft": drafters, "about": {EVIL: EVIL}})
        (files / "c.json").write_text(costs.replace('"ngram"', evil))
        shown = printed(files, f"--json {files}/o.json")
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
        assert "a\\|b\\x1b[2J\\x0d$ {x_$} \\| c" in shown
        tables = [part.splitlines() for part in shown.split("\n\n") if part.startswith("|")]
        assert len(tables) == 2 and min(map(len, tables)) > 5
        for rows in tables:
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in rows}) == 1
    for drawing in drawings(files / "o.json", files / "t.jsonl"):
        text = xml.dom.minidom.parse(str(drawing)).documentElement.toxml()
        assert "winners" not in drawing.name or "{x_$} | c" in text
    # bench.py prints its tables the same way.
    made = bounds.table(json.loads((files / "o.json").read_text()))
    monkeypatch.setattr(bench, "STUDIES", {"bounds": lambda *_: {"table": made}})
    bench.measure(["bounds"], methods.settings(quick=True, force=True))
    out = capsys.readouterr().out
    assert "\x1b" not in out and "a\\|b" in out


def test_bounds_of_own_files_need_no_torch(files):
    """The command where importing torch fails loads nothing but numpy and tqdm; an error is one line there,
    too."""
    code = """if True:
        import runpy, sys
        sys.modules["torch"] = None
        before = set(sys.modules)
        try:
            runpy.run_module("minispec.bounds", run_name="__main__", alter_sys=True)
        finally:
            names = {m.split(".")[0] for m in set(sys.modules) - before} - sys.stdlib_module_names
            print(*sorted(name for name in names if "cython" not in name))      # which is numpy's own
        """
    for name, rc, said in (("t.jsonl", 0, ""), ("missing", 2, "bounds.py: cannot read")):
        r = python("-c", code, "--traces", files / name, "--cost", files / "c.json")
        assert r.returncode == rc and r.stderr.startswith(said) and r.stderr.count("\n") < 2, r.stderr
        if rc == 0:
            assert "optimum of all" in r.stdout
            assert r.stdout.splitlines()[-1] == "__mp_main__ minispec numpy tqdm"


def test_the_recipe_makes_traces_of_an_engines_logs(tmp_path):
    """Two logs of vLLM's acceptance branch, as docs/own-traces.md assumes them; the recipe is run as it is
    printed there."""
    # Lengths and ids of three answers; the length at every token of a fourth one.
    for name, lengths, ids, most in values("""
        "n.jsonl" | [[1, 21, 3, 9], [1, 1], [1, 2]] | [[5, 6, 7, 8], [5, 6], [5, 6]] | 21
        "e.jsonl" | [[1, 2, 1, 1], [1, 2], [1, 1]]  | [[5, 6, 7, 8], [5, 9], [5, 6]] | 1
    """):
        answers = [*zip(lengths, ids), ([most] * 30, [*range(30)])]
        rows = [{"id": f"cmpl-{i}", "prompt_token_ids": [1] * 30, "generated_token_ids": own,
                 "acc": {"acc_len": some}} for i, (some, own) in enumerate(answers)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    with open(f"{ROOT}/docs/own-traces.md", encoding="utf-8") as f:
        recipe = re.search(r"```python\n(import json.*?)```", f.read(), re.S)[1]
    r = python("-c", recipe, "ngram=n.jsonl", "eagle3=e.jsonl", cwd=tmp_path)
    assert r.returncode == 0 and "cmpl-1" in r.stderr, r.stderr
    (tmp_path / "t.jsonl").write_text(r.stdout)
    # The outputs of cmpl-1 differ.
    first, other, third = traces.read_traces(tmp_path / "t.jsonl")
    assert (first.id, first.prompt_len, other.id) == ("cmpl-0", 30, "cmpl-2")
    assert first.accept["ngram"].tolist() == [0, 3, 2, 1]
    # The end of an answer is no limit of the log.
    assert not first.censored["ngram"].any()
    assert third.censored["ngram"].tolist() == [0 < i <= 9 for i in range(30)]


# -- the studies -------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The studies of run.py on a toy target with one family of problems and short answers."""
    folder = tmp_path_factory.mktemp("results")
    patch = pytest.MonkeyPatch()
    model, tokenizer = toy_target(block_size=1024, n_layer=1)
    args = quick_settings(cost=str(folder / "costs.json"))
    patch.setattr(results, "FOLDER", str(folder))
    patch.setattr(measure, "LARGE", 1 << 16)
    patch.setattr(measure, "BATCHES", {"small": [100]})
    patch.setattr(run, "SMALL", replace(run.SMALL, new=12, traced=4, batches={1: 2, 4: 4},
                                        mixed={1: 2, 4: 4}, sampled={1: 2}))
    patch.setattr(tasks, "FAMILIES", ("revise",))
    patch.setattr(methods, "ready", lambda settings: ["ngram"])
    out = {"profile": run.profile(args, model, tokenizer)}
    write_json(args.cost, out["profile"]["costs"])
    patch.setattr(methods, "ready", lambda settings: ["ngram", "adaptive", "cdlm"])
    args.quick = False                                        # writes the traces
    for name in ("trace", "run", "bounds"):
        out[name] = bench.STUDIES[name](args, model, tokenizer)
        results.write(name, out[name], 1.0, dtype=results.dtype_name(model))
    args.quick = True
    out["speed"] = run.speed(args, model, tokenizer)
    patch.undo()
    return folder, out


def test_the_studies_fit_together(measured):
    folder, out = measured
    cells, rows = out["bounds"]["cells"], out["run"]["rows"]
    assert [(c["workload"], c["batch"]) for c in cells] == [
        (w, b) for w in ("revise", "mixed") for b in (1, 4)]
    names = {"ar", "ngram", "adaptive"}
    for c in cells:
        assert all(set(c[by]["observed"]) == names and all(c[by]["observed"].values()) for by in AVERAGES)
        assert set(c["modelled"]) == set(c["error"]) == names
    for r in rows:
        assert r["identical"] == r["prompts"] and r["method"] in names
        assert sum(r["phases"].values()) == pytest.approx(r["seconds"])
        assert len(r["ids"]) == len(r["rates"]) == r["prompts"]
    sampled = [(r["workload"], r["batch"], r["method"]) for r in rows if r["temperature"]]
    assert sampled.count(("mixed, T = 0.7", 1, "ngram")) == 1
    assert len(traces.read_traces(folder / "traces.jsonl")) == 4
    alone = [[r["method"], r["workload"]] for r in out["speed"]["rows"] if r["batch"] == 1]
    assert alone == table("""
        ar       | revise
        ngram    | revise
        adaptive | revise
    """)


def test_every_study_leaves_its_tables_and_figures(measured, monkeypatch):
    folder, out = measured
    for name, kind in table("""
        profile | table
        trace   | table
        run     | table
        run     | methods
        bounds  | table
        bounds  | short
        bounds  | drafts
        speed   | table
        speed   | short
    """):
        text = json.loads(json.dumps(out[name]))[kind]
        assert text.startswith("| ") and text.count("\n") > 1 and "nan" not in text
    assert "time over the bound's" in out["bounds"]["table"]
    # The machine of bounds is its cost table's.
    about, stored = out["profile"]["costs"]["about"], read_json(folder / "bounds.json")
    assert {key: stored[key] for key in ("device", "dtype", "torch")}.items() <= about.items()
    assert "GB/s" in out["profile"]["table"]
    # Prices of another machine say nothing about a run.
    write_json(f"{folder}/other.json", {"about": about | {"device": "another"}, **COSTS})
    monkeypatch.setattr(results, "FOLDER", str(folder))
    with refused("run.json: device must be another as"):
        run.bounds(methods.settings(cost=f"{folder}/other.json"), None, None)
    drawn = [f.name for f in drawings(folder / "bounds.json", folder / "traces.jsonl")]
    assert drawn in (["bounds_bounds_batch.svg", "bounds_bounds_gains.svg", "bounds_bounds_winners.svg"], [])
    if drawn:
        missing = python("docs/plots.py", folder)
        assert missing.returncode == 2 and "give two files" in missing.stderr


EVERY = " ".join([*bench.STUDIES][:-2])


@pytest.mark.parametrize("studies, quick, want", table(f"""
    | | profile trace run bounds
    | quick | profile trace run
    speed profile | quick | profile speed
    bounds | quick | bounds
    arms | | arms
    all | | {EVERY}
    all | quick | {EVERY.replace("bounds ", "")}
    all bounds | quick | {EVERY}
"""))
def test_studies_are_chosen(studies, quick, want):
    assert bench.chosen(SimpleNamespace(studies=studies.split(), quick=quick)) == want.split()


def test_speedups_are_of_decoding_repeat_by_repeat():
    answers = [SimpleNamespace(token_ids=[1] * 6)]
    some, plain = ([results.Run(answers, {"prefill": 1.0, "verify": x}, [1], None) for x in seconds]
                   for seconds in ((1, 2, 6), (2, 6, 12)))
    assert results.speedups(some, plain) == {"tokens_per_second": 3, "speedup": 2, "speedup_range": [2, 3]}


def profiled(monkeypatch, target, drafters, costs):
    """The cost table of `profile` if the measured one is `costs`."""
    monkeypatch.setattr(methods, "chain_drafters", lambda *_: drafters)
    monkeypatch.setattr(measure, "cost_table", lambda *_, **__: dict(costs))
    monkeypatch.setattr(measure, "attention_reads", lambda model: [{}])
    return run.profile(quick_settings(), *target)["costs"]


def test_profile_says_how_often_drafters_are_right(measured, monkeypatch):
    """The target itself is always right, and this prompt lookup, of answers that do not repeat, never."""
    monkeypatch.setattr(run, "QUICK", replace(run.QUICK, new=12))
    model, tokenizer = toy_target(block_size=1024)
    drafters = {"ngram": NGram(), "draft": SmallLM(model, model)}
    costs = profiled(monkeypatch, (model, tokenizer), drafters, measured[1]["profile"]["costs"])
    assert CostTable(costs).accept == costs["accept"] == {"ngram": 0.0, "draft": 1.0}


def test_every_batch_size_has_its_best_number_of_drafts(monkeypatch):
    """A draft costs nothing to verify for one request, and a whole step for nine. Prices between are
    interpolated, so the best number of drafts falls from batch to batch."""
    left = np.minimum(np.random.default_rng(0).geometric(0.2, 400), np.arange(400, 0, -1))
    some = [traces.Trace("a/0", 9, 400, {"ngram": left})]
    costs = {"verify": grid([1, 9], [1, 17], [0], [[[1], [1]], [[1], [17]]]),
             "draft": {"ngram": grid([1, 9], [1], [0], [[[0]], [[0]]])}}
    monkeypatch.setattr(measure, "acceptance", lambda *_: 0.8)
    monkeypatch.setattr(run, "traces_of", lambda *_, **__: (["ngram"], some))
    found = profiled(monkeypatch, toy_target(), ["ngram"], costs)["about"]["best_k"]
    drafts = [found[str(batch)]["ngram"] for batch in range(1, 10)]
    assert drafts[0] > drafts[2] > drafts[4] > drafts[8] == 1 and drafts == sorted(drafts, reverse=True)


@pytest.mark.parametrize("line, message", table("""
    --drafter x | --drafter is for arms and cdlm_ablations
    run --drafter x | --drafter is for arms and cdlm_ablations
    arms tau --drafter x | --drafter is for arms and cdlm_ablations
    tau --tree 8 | --tree is for decode.py
    tau --prompt-lookup 8 | --prompt-lookup is for decode.py
    tau --admission preempt | --admission is for decode.py
"""))
def test_a_drafter_is_for_two_studies_and_what_studies_vary_is_for_decode(line, message):
    assert message in refusal(bench, line)


@pytest.fixture
def own_results(tmp_path, monkeypatch):
    """Results are written to tmp_path, and no page shows them."""
    monkeypatch.setattr(results, "FOLDER", str(tmp_path))
    monkeypatch.setattr(bench, "pages", lambda: [])


def test_results_are_kept_but_those_of_the_users_own_drafters(own_results, monkeypatch):
    measured = []
    monkeypatch.setitem(bench.STUDIES, "arms", lambda *_: measured.append("arms") or {"table": ""})
    for line, n in (("arms", 1), ("arms", 1), ("arms --force", 2), (f"arms --drafter {TARGET}", 3)):
        outcome(bench, line)
        assert len(measured) == n


def test_all_leaves_out_studies_that_the_model_has_nothing_for(own_results, monkeypatch):
    def tau(*_):
        raise results.LeftOut("tau needs trained drafters")

    monkeypatch.setattr(bench, "STUDIES", {"tau": tau, "rules": lambda *_: {"table": "the rules"}})
    said = outcome(bench, "all").stdout
    assert said.splitlines()[-2:] == ["tau is left out: tau needs trained drafters", "the rules"]
    assert "tau needs trained drafters" in refusal(bench, "tau")


def test_problems_of_a_workload_are_chosen_and_mixtures_grow_with_them():
    how = run.size(SimpleNamespace(quick=False, problems=10), run.REAL)
    assert (how.traced, how.batches, how.mixed) == (10, {1: 10}, {1: 45, 4: 45, 16: 90})
    assert run.size(SimpleNamespace(quick=True, problems=10), run.REAL) is run.QUICK
    assert run.size(SimpleNamespace(quick=False, problems=None), run.ANSWERS) is run.ANSWERS
    # No other study has the problem behind them, which fits the prices.
    assert "--problems must be at most 16, got 17" in refusal(bench, "run --problems 17")
    for line in ("tau --problems 3", "run --quick --problems 3"):
        assert "--problems is for trace, run and speed, without --quick" in refusal(bench, line)


def test_methods_are_compared_in_one_table_of_one_request_at_a_time():
    rows = [{"workload": workload, "method": method, "speedup": float(speedup), "batch": int(batch),
             "tau": 2.0, "tokens_per_second": 100 * float(speedup), "temperature": 0,
             "decoding": float(speedup), "prompts": 4, "identical": 3,
             "rates": [90 * float(speedup), 110 * float(speedup)]}
            for workload, method, speedup, batch in table("""
                trace | ar | 1.0 | 1
                trace | ngram | 1.2 | 1
                arith | ar | 1.0 | 1
                arith | ngram | 1.6 | 1
                arith | ngram | 9.0 | 4
                mixed | ngram | 5.0 | 4
                gsm8k | ar | 1.0 | 1
                gsm8k | ngram | 3.0 | 1
            """)]
    plain, lookup = ([f"{key}: {text}" for key, text in row.items()] for row in run.methods_table(rows))
    assert plain == """\
method: ar
mean (95 %): 1.00 (1.00-1.00)
mean, decoding: 1.00
trace: 1, 100 tokens/s
arith: 1, 100 tokens/s
gsm8k: 1, 100 tokens/s
identical to ar: 9 of 12""".split("\n")
    assert sorted(lookup) == sorted("""\
method: ngram
mean (95 %): 1.40 (1.20-1.60)
mean, decoding: 1.40
trace: 1.20, tau 2.0
arith: 1.60, tau 2.0
gsm8k: 3.00, tau 2.0
mixed, batch 4: 5.00
identical to ar: 9 of 12""".split("\n"))


def test_a_requests_rate_counts_from_its_entry():
    """Of three requests, two at once, that end after 1, 2 and 5 seconds: the third one enters when the first
    one leaves, after one second; it has six tokens in four seconds."""
    engine = SimpleNamespace(batch_size=2, seconds={})

    def stream(requests):
        for i, engine.seconds["verify"] in ((1, 1.0), (0, 2.0), (2, 5.0)):
            requests[i].generation.token_ids += [1] * 6
            yield requests[i], [1] * 6

    engine.stream = stream
    answers = results.answer(engine, [Request([1], 6) for _ in range(3)])
    assert [rate for _, rate in answers] == pytest.approx([6 / 2, 6 / 1, 6 / 4])


def test_intervals_hold_the_true_value_as_often_as_they_say():
    def tau(prompts):
        total = prompts.sum(-2)
        return total[..., 0] / total[..., 1]

    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        rounds = rng.integers(20, 40, 60).astype(float)
        committed = rng.binomial(5, 0.5, 60) / 5 * rounds + rounds             # a true tau of 1.5
        low, high = interval(tau, np.stack([committed, rounds], 1), draws=300)
        hits += low <= 1.5 <= high
    assert 270 <= hits <= 297                                                  # 95 % of 300, and not all
    prompts = np.stack([committed, rounds], 1)
    more = np.stack([1.02 * committed, rounds], 1)
    low, high = interval(lambda a, b: tau(a) / tau(b), more, prompts)
    assert low == pytest.approx(1.02) == high                                  # paired: no noise is left


def test_an_interrupted_study_goes_on_cell_by_cell(tmp_path, own_results, monkeypatch):
    calls, clock = [], [0.0]
    monkeypatch.setattr(results.time, "perf_counter", lambda: clock[0])
    model = toy_model()

    def measure(name):
        calls.append(name)
        clock[0] += 10
        if len(calls) == 3:
            raise KeyboardInterrupt
        return name.upper()

    drafter = tmp_path / "drafter"
    drafter.mkdir()

    def study(k, cells="abc"):
        args = methods.settings(quick=False, drafter=str(drafter))
        return results.each_kept("run", args, model, list(zip(cells)), measure, k=k)

    with pytest.raises(KeyboardInterrupt):
        study(k=1)
    assert study(k=1) == ["A", "B", "C"]
    assert calls == ["a", "b", "c", "c"] and sorted(os.listdir(tmp_path)) == ["drafter", "run.part"]
    # The time of all runs, without the cell that was interrupted.
    assert read_json(tmp_path / "run.part")["seconds"] == 30
    # With other settings, other cells or another drafter, nothing is taken over.
    for cells, weights in (("abc", 0), ("abd", 0), ("abd", 1)):
        (drafter / f"{weights}.safetensors").touch()
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            study(2, cells)
        assert calls == list(cells)
    results.write("run", {}, 1.0)
    assert sorted(os.listdir(tmp_path)) == ["drafter", "run.json"]
    assert read_json(tmp_path / "run.json")["seconds"] == 20


# File of a data folder, and a row of it.
DATA = r"""
spec_bench/question.jsonl | {"question_id": 0, "category": "writing", "turns": ["writing 0"]}
spec_bench/question.jsonl | {"question_id": 0, "category": "qa", "turns": ["qa 0"]}
spec_bench/question.jsonl | {"question_id": 1, "category": "writing", "turns": ["writing 1"]}
spec_bench/question.jsonl | {"question_id": 1, "category": "qa", "turns": ["qa 1"]}
spec_bench/question.jsonl | {"question_id": 2, "category": "writing", "turns": ["writing 2"]}
spec_bench/question.jsonl | {"question_id": 2, "category": "qa", "turns": ["qa 2"]}
gsm8k/test.jsonl | {"question": "q0", "answer": "1\n#### 1"}
gsm8k/test.jsonl | {"question": "q1", "answer": "1\n#### 1"}
humaneval/HumanEval.jsonl | {"prompt": "def f0():", "test": "", "entry_point": "f"}
humaneval/HumanEval.jsonl | {"prompt": "def f1():", "test": "", "entry_point": "f"}
humaneval/HumanEval.jsonl | {"prompt": "def f2():", "test": "", "entry_point": "f"}
instruct/instruction-data.json | {"instruction": "Rewrite it in the passive.", "input": "It ate."}
instruct/instruction-data.json | {"instruction": "Rewrite it in the passive.", "input": "She ate."}
instruct/instruction-data.json | {"instruction": "Rewrite it.", "input": ""}
instruct/instruction-data.json | {"instruction": "Name a bird.", "input": "now"}
"""


def test_a_real_model_gets_real_prompts(tmp_path):
    """Spec-Bench's blocks, HumanEval and rewriting tasks of a data folder; without one, the texts that ship.
    Workloads in turn, no problem twice."""
    for name, row in table(DATA):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with open(tmp_path / name, "a") as f:
            f.write(row + "\n")
    real = SimpleNamespace(is_puzzle_model=False)
    some, later = (results.problems_of(real, n, str(tmp_path), first) for n, first in ((2, 0), (1, 2)))
    assert {w: len(own) for w, own in some.items()} == {
        "mt_bench": 2, "qa": 2, "gsm8k": 2, "humaneval": 2, "edit": 1}
    assert not {p.prompt for p in some["qa"]} & {p.prompt for p in later["qa"]}
    assert later["edit"] == some["edit"]
    # The drafters' training may have read the other one.
    edits = "instruct/instruction-data.json"
    assert some["edit"][0].prompt == "Rewrite it in the passive.\nIt ate.\n"
    assert some["edit"][0].prompt in [p + "\n" for p, _ in mixture.rows_of(tmp_path, edits)]
    in_turn = run.numbered(real, 2, str(tmp_path))
    assert list(in_turn) == [f"{w}/{i}" for i in range(2) for w in some if i < len(some[w])]
    shipped, later = results.problems_of(real, 2), results.problems_of(real, 2, first=2)
    assert list(shipped) == ["questions", "story", "edit"]
    assert len({p.prompt for own in (*shipped.values(), *later.values()) for p in own}) == 12


@pytest.mark.parametrize("packaged, line, model, folder", table(f"""
    | | {methods.SHIPPED} | results
    yes | run | {methods.SHIPPED} | results
    yes | | smollm2 | results/smollm2
    yes | --cost results/costs.json | smollm2 | results/smollm2
    yes | run --model models/mine.gguf | models/mine.gguf | results/mine.gguf
    yes | run --model models/Llama-3.2-1B/ | models/Llama-3.2-1B/ | results/Llama-3.2-1B
    yes | run --model . | . | results/{os.path.basename(os.getcwd())}
"""))
def test_results_of_another_target_have_their_own_folder(packaged, line, model, folder, monkeypatch):
    """If no study is named, a real model that is installed is the target."""
    monkeypatch.setattr(sys, "argv", ["bench.py", *words(line)])
    monkeypatch.setattr(results, "FOLDER", "results")
    monkeypatch.setattr(bench.gguf_file, "packaged", lambda: packaged)
    args = bench.parse_args()
    bench.choose_target(args)
    cost = "results/costs.json" if "--cost" in line else f"{folder}/costs.json"
    assert (args.model, results.FOLDER, args.cost) == (model, folder, cost)


# -- pages -------------------------------------------------------------------------------------------

def test_tables_are_put_between_their_markers_and_nothing_else_is_touched(tmp_path, own_results):
    """Also next to a table that is missing. A table may be one of several of a study, or of another target;
    a study that is gone is said to be."""
    (tmp_path / "smollm2").mkdir()
    gone = {**ABOUT, "command": "python bench.py old"}
    write_json(tmp_path / "old.json", {**gone, "result": {"table": "| a |\n| --- |\n| 1 |"}})
    write_json(tmp_path / "smollm2" / "run.json", {**ABOUT, "result": {"short": "| b |\n| --- |\n| 2 |"}})
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table old -->\n<!-- end -->\nbetween\n"
                    "<!-- table missing -->\n<!-- end -->\nmore\n"
                    "<!-- table smollm2/run short -->\nold\n<!-- end -->\nafter\n")
    for _ in range(2):                                   # the second time over what the first one wrote
        bench.report(page)
        assert page.read_text() == (
            "before\n<!-- table old -->\n| a |\n| --- |\n| 1 |\n\n"
            "`python bench.py old` on d, torch t, x, 60 seconds. This study is no longer part of bench.py.\n"
            "<!-- end -->\nbetween\n<!-- table missing -->\n<!-- end -->\n"
            "more\n<!-- table smollm2/run short -->\n| b |\n| --- |\n| 2 |\n\n"
            "`c` on d, torch t, x, 60 seconds.\n<!-- end -->\nafter\n")


# -- the study of a GPU, tests/gpu_suite.py ----------------------------------------------------------

def test_lists_of_the_gpu_suite_are_what_they_are_called():
    """A drafting request reads 5 % of its context and the newest, a verifying one all of it."""
    for kind, entries in (("full", 8192), ("draft", 440), ("verify", 8192), ("mixed", 4096 + 220)):
        requests = gpu.batch_of(kind, 4096, 2)
        assert gpu.list_bytes(requests, 8, 128, 2) == 8 * entries * (2 * 128 * 2 + 4)
        small = gpu.batch_of(kind, 64, 2)
        q, k, v, slots, selected, plan = gpu.inputs(gpu.TINY, small, 2, "cpu", torch.float32)
        assert len(q) == plan.requests[:, 1].sum()
        assert sorted(slots.flatten().tolist()) == list(range(128))
        assert (selected < 48).all()
        assert (selected.diff() > 0).all()


def test_the_study_of_a_gpu_runs_anywhere(monkeypatch):
    """The kernels' references take their places here."""
    monkeypatch.setattr(gpu, "available", lambda x: True)
    monkeypatch.setattr(gpu.packed, "attention", references.attention)
    monkeypatch.setattr(gpu.scores, "scores", references.scores)
    out = gpu.gpu(methods.settings(quick=True), toy_model())
    tables = gpu.tables(out).split("\n\n")
    assert len(tables) == 3
    assert all(map(whole, tables))
    assert [x["kernel"] for x in out["kernels"]] == 2 * list(gpu.KINDS)
    with refused("need --device cuda"):
        gpu.gpu(methods.settings(quick=False), toy_model())


def test_the_suite_of_a_gpu_times_methods(shipped, monkeypatch, usual_blocks):
    """Those with drafters on short texts, SpecGen on long ones, next to the plain loop."""
    monkeypatch.setattr(gpu.results, "suitable", lambda *_: ["ngram", "specgen"])
    out = gpu.gpu(quick_settings(), *shipped)
    for section, name in (("speed", "ngram"), ("serving", "specgen")):
        plain, row = out[section]
        assert (plain["method"], plain["speedup"], plain["tau"], row["method"]) == ("ar", 1, 1, name)
        assert row["identical"] == row["requests"] and row["tau"] > 1
        assert row["tokens"] == plain["tokens"] and row["iterations"] > 1
        assert row["tokens_per_second"] == row["tokens"] / sum(row["seconds"].values())
    assert gpu.tables(out).count("identical to ar") == 2


def test_a_cell_that_does_not_fit_is_noted_and_the_next_one_begins(monkeypatch):
    """Its remains are collected first: an engine and its scheduler hold each other, so nothing goes by
    itself."""
    left = []

    def too_large(*_):
        node = type("Node", (), {})()
        node.itself = node
        left.append(weakref.ref(node))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def next_one(*_):
        gc.disable()                                     # what is gone now was collected between the cells
        return {"gone": left[-1]() is None}

    monkeypatch.setattr(gpu, "available", lambda x: True)
    monkeypatch.setattr(gpu, "SECTIONS", {"floors": too_large, "kernels": too_large, "decode": next_one})
    try:
        out = gpu.gpu(methods.settings(quick=True), toy_model())
    finally:
        gc.enable()
    missing = out["out_of_memory"]
    assert out["decode"] == [{"gone": True}]
    assert missing[:2] == ["floors", "kernels full 64 2 2"] and len(missing) == 11
    text = gpu.tables({"floors": [{"what": "bytes copied", "rate": 1e12}], "out_of_memory": missing[:1]})
    assert text.endswith("Out of memory: floors.") and "| bytes copied | 1e+12 |" in text
