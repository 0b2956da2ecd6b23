"""bench.py: the bounds from files alone, one clear line for bad files, and every table and figure from what is stored."""
import gc
import glob
import json
import os
import sys
import weakref

import pytest
import torch
from conftest import outcome, run_script, toy_model

import bench
from minispec import cdlm
from minispec.bounds import CostTable
from minispec.tools import checkpoints
from minispec.data import tasks, traces
from minispec.studies import figures, gpu, ladder, measure, results, run, specgen, tables_bounds
from minispec.tools import methods
from minispec.core.drafters import NGram, SmallLM
from minispec.core.requests import Request
from minispec.tools.files import write_json
from minispec.tools.script import run_main
from minispec.data.tokenizer import Tokenizer
from test_shipped import TARGET

COSTS = {"verify": {"kind": "linear", "base": 5e-3, "token": 2e-5, "kv": 4e-8}, "overhead": {"kind": "linear", "base": 1e-3},
         "draft": {"ngram": {"kind": "share", "of_verify": 0.006}, "draft": {"kind": "linear", "base": 1e-3, "step": 7e-4}}}
TRACES = [{"id": f"{w}/{i}", "prompt_len": 40, "n_out": 7, "accept": {"ngram": [0, 4, 1, 1, 3, 1, 1], "draft": [0, 2, 2 + i, 1, 2, 2, 1]}} for w in ("arith", "story") for i in (0, 1)]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, TRACES)))
    (tmp_path / "c.json").write_text(json.dumps(COSTS))
    return tmp_path


def command(files):
    return outcome(bench, "bounds", "--quick", "--traces", files / "t.jsonl", "--cost", files / "c.json")


def test_bounds_from_two_files_prints_the_ladder(files):
    before = sorted(os.listdir(results.FOLDER))
    r = command(files)
    assert r.returncode == 0, r.stderr
    for rung in ("L2 best fixed k", "L4 greedy (not a bound)", "L5 / L6 optimum", "L7 free drafters", "L9 one pass", "censored"):
        assert rung in r.stdout
    assert "observed" not in r.stdout and "| arith | 16 copies | all |" in r.stdout and "| story | 1 | ngram |" in r.stdout
    assert sorted(os.listdir(results.FOLDER)) == before


def test_a_bad_file_is_one_line_with_file_and_line(files):
    with open(files / "t.jsonl", "a") as f:
        f.write('\n{"id": "x", "prompt_len": 1, "n_out": 2, "accept": {"ngram": [0, 9], "draft": [0, 1]}}')
    r = command(files)
    assert r.returncode == 2 and r.stdout == "" and r.stderr.count("\n") == 1
    assert r.stderr.startswith("bench.py: ") and "t.jsonl:5: accept.ngram[1]" in r.stderr


def bounds(files):
    return bench.bounds(methods.settings(traces=str(files / "t.jsonl"), cost=str(files / "c.json")), None, None)


BAD = {"no traces": (lambda d: os.remove(d / "t.jsonl"), "cannot read .*t.jsonl"), "no costs": (lambda d: os.remove(d / "c.json"), "cannot read .*c.json"),
       "a word": (lambda d: (d / "c.json").write_text('{"verify":\n{"kind": "linear", "base": "fast"}}'), r"c.json: verify.base: expected a number"),
       "empty": (lambda d: (d / "t.jsonl").write_text(""), "no trace in this file"),
       "another drafter": (lambda d: (d / "c.json").write_text('{"verify": {"kind": "linear", "base": 1}}'), "are not in the cost table")}


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_named(what, files):
    ruin, message = BAD[what]
    ruin(files)
    with pytest.raises(ValueError, match=message) as e:
        bounds(files)
    assert "\n" not in str(e.value)


NOT_TABLES = ("costs", "kernels")         # a cost table, and what compiled kernels take


@pytest.mark.parametrize("name", [n for f in sorted(glob.glob(results.path("*.json"))) if (n := os.path.basename(f)[:-5]) not in NOT_TABLES])
def test_every_stored_result_renders(name):
    with open(os.path.join(results.FOLDER, name + ".json"), encoding="utf-8") as f:
        lines = bench.render(name, json.load(f)["result"]).split("\n")
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) > 2 and len({line.count("|") for line in tables}) <= 3         # a study has up to three tables


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The four studies on a toy target with one family of problems and short answers, as `bench.py` would store them."""
    folder, patch = tmp_path_factory.mktemp("results"), pytest.MonkeyPatch()
    tokenizer = Tokenizer.load(TARGET)
    model = toy_model(vocab=tokenizer.vocab_size, bos_id=tokenizer.special["<|bos|>"], eos_id=tokenizer.special["<|eos|>"], block_size=1024)
    args = methods.settings(quick=True, cost=str(folder / "costs.json"), traces=None, data=None, workload=None, max_new_tokens=None, draft_model=str(folder / "none"))
    patch.setattr(results, "FOLDER", str(folder))
    patch.setattr(run, "NEW", 12)
    patch.setattr(tasks, "FAMILIES", ("revise",))
    patch.setattr(results, "tqdm", lambda items, **_: items)
    patch.setattr(methods, "ready", lambda settings: ["ngram"] + ["adaptive"] * os.path.exists(settings.cost))
    with open(os.path.join(TARGET, "tokenizer.json"), encoding="utf-8") as f:
        checkpoints.save(model, folder / "diffusion", json.load(f))
    patch.setattr(cdlm, "METHODS", {"cdlm": ("student", str(folder / "diffusion")), "dlm": ("teacher", str(folder / "diffusion"))})
    out = {"profile": run.profile(args, model, tokenizer)}
    write_json(args.cost, out["profile"]["table"])
    args.quick = False                                        # writes the traces
    patch.setattr(run, "family_requests", lambda *_, full=run.family_requests: full(tokenizer, model, 4))
    out["trace"] = run.trace(args, model, tokenizer)
    out["run"] = run.run(args, model, tokenizer)
    args.quick = True
    for name in ("trace", "run"):
        results.write(name, out[name], 1.0)
    out["bounds"] = bench.bounds(args, None, None)
    results.write("bounds", out["bounds"], 1.0)
    patch.undo()
    return folder, out


def test_the_studies_fit_together(measured):
    folder, out = measured
    cells = out["bounds"]["cells"]
    assert [(c["workload"], c["batch"], c["kind"]) for c in cells] == [("revise", b, "different") for b in (1, 4, 16)] + [("revise", 16, "copies")] + [("mixed", b, "different") for b in (1, 4, 16)]
    for c in cells:
        assert set(c["L0"]) == {"ar", "ngram", "adaptive"} and set(c["L1"]) == set(c["error"]) == {"ar", "ngram", "adaptive"}
        assert all(recorded == replayed for replayed, recorded in c["rounds"].values())
    rows = out["run"]["rows"]
    assert all(r["identical"] == (r["prompts"] if r["method"] in methods.METHODS else None) for r in rows)
    assert [(r["workload"], r["batch"], r["prompts"]) for r in rows if r["method"] == "dlm"] == [("revise", 1, 1)] and sum(r["method"] == "cdlm" for r in rows) == 6
    for r in out["run"]["rows"]:                              # the phases are all of the time
        assert sum(r["phases"].values()) == pytest.approx(r["seconds"])
    assert len(traces.read_traces(folder / "traces.jsonl")) == 4


def test_new_tables_and_figures_come_from_files(measured, tmp_path):
    folder, out = measured
    for name, result in out.items():
        text = bench.render(name, json.loads(json.dumps(result)))
        assert text.startswith("| ") and "nan" not in text
    assert "share of the gap" in bench.render("bounds", out["bounds"])
    pytest.importorskip("matplotlib")
    figures.draw(str(folder), str(tmp_path))
    drawn = [os.path.basename(f) for f in glob.glob(str(tmp_path / "*.svg"))]
    assert set(drawn) == {f + ".svg" for study in ("traces", "bounds") for f in figures.FIGURES[study]}


def test_figures_of_what_is_stored(tmp_path):
    pytest.importorskip("matplotlib")
    figures.draw(results.FOLDER, str(tmp_path))
    want = [f for study, some in figures.FIGURES.items() if os.path.exists(os.path.join(results.FOLDER, figures.source(study))) for f in some]
    assert sorted(os.listdir(tmp_path)) == sorted(f + ".svg" for f in want)


def test_one_table_of_everything(measured):
    folder, out = measured
    lines = tables_bounds.whole_table(str(folder)).split("\n")
    assert len(lines) == 2 + len(out["run"]["rows"]) and len({line.count("|") for line in lines}) == 1
    cell = next(c for c in out["bounds"]["cells"] if c["workload"] == "mixed")
    assert f"| {cell['L1']['adaptive']:.2f} | {cell['L6']:.2f} | " in next(line for line in lines if line.startswith("| mixed") and "| adaptive |" in line)


def test_answers_of_diffusion_models_are_their_own_in_that_table(tmp_path):
    """Lossless methods solve what ar solves; a diffusion model what it solved at the threshold that `run` used, which comes first."""
    row = {"workload": "trace", "batch": 1, "kind": "different", "tokens_per_second": 1.0, "speedup": 1.0, "tau": 1.0, "acceptance": None, "identical": None, "prompts": 1}
    diffusion = [{"decoder": "ar", "by_family": {"trace": 1.0}}, {"decoder": "teacher", "by_family": {"trace": 0.5}},
                 {"decoder": "student", "by_family": {"trace": 0.25}}, {"decoder": "student", "by_family": {"trace": 0.0}}]
    for name, result in {"run": {"rows": [{**row, "method": m} for m in ("ar", "ngram", "dlm", "cdlm")]}, "accuracy": {"families": {"trace": {"accuracy": 0.9}}},
                         "cdlm_accuracy": {"rows": diffusion}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"result": result}))
    lines = tables_bounds.whole_table(str(tmp_path)).split("\n")[2:]
    assert [line.split(" | ")[-1] for line in lines] == ["90 % |", "90 % |", "50 % |", "25 % |"]


def test_profile_says_what_was_accepted_of_drafters_that_are_asked(measured, monkeypatch):
    """The target itself is always right; what is said of it goes the way from the model to the file's format."""
    tokenizer = Tokenizer.load(TARGET)
    model = toy_model(vocab=tokenizer.vocab_size, bos_id=tokenizer.special["<|bos|>"], eos_id=tokenizer.special["<|eos|>"], block_size=1024)
    monkeypatch.setattr(run, "NEW", 12)
    monkeypatch.setattr(methods, "chain_drafters", lambda *_: {"ngram": NGram(), "draft": SmallLM(model, model)})
    monkeypatch.setattr(measure, "cost_table", lambda *_, **__: (dict(measured[1]["profile"]["table"]), 0.0))
    table = run.profile(methods.settings(quick=True), model, tokenizer)["table"]
    assert table["accept"] == {"draft": 1.0} and CostTable(table).accept == {"draft": 1.0}


def test_the_middle_run_is_reported():
    a, b, c = (run.Timed(seconds, {}, [], None, 1.0) for seconds in (1.0, 2.0, 3.0))
    assert run.middle([c, a, b]) is b and run.middle([b, a]) is a


def test_a_window_shorter_than_the_other_drafts_has_its_column():
    grid = lambda tokens: {"kind": "grid", "rows": [1], "tokens": tokens, "kv": [64], "seconds": [[[0.001 * t] for t in tokens]]}
    table = {"verify": grid([1, 2, 3, 5]), "overhead": grid([1]), "draft": {"draft": grid([1, 2, 4]), "specdiff": grid([1, 2])}}
    text = bench.render("profile", {"table": table, "scatter": 0.0})
    assert "| draft drafts 4, ms | specdiff drafts 2, ms |" in text and "| 4.00 | 2.00 |" in text


def test_an_interrupted_study_goes_on_cell_by_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", str(tmp_path))
    calls, cells = [], [("a", 1), ("b", 2), ("c", 3)]

    def measure(name, n):
        calls.append(name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return [n]

    with pytest.raises(KeyboardInterrupt):
        results.resumable("run", {"k": 1}, cells, measure)
    assert results.resumable("run", {"k": 1}, cells, measure) == [[1], [2], [3]] and calls == ["a", "b", "c", "c"]
    assert os.listdir(tmp_path) == ["run.part"]
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        results.resumable("run", {"k": 2}, cells, measure)                       # other settings: nothing is taken over
    assert calls == ["a", "b", "c"]
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    results.write("run", {}, 1.0)
    assert os.listdir(tmp_path) == ["run.json"]


def test_gap_is_left_out_where_there_is_none():
    cell = {"seconds": 1.0, "L5": {"ngram": 1.0}, "L6": 1.0}
    rows = [{"method": m, "batch": 1, "kind": "different", "seconds": 1.0, "rounds": 6, "plans": {"a": ""} if m == "adaptive" else None, "k": 4} for m in ("ar", "ngram", "adaptive")]
    t = traces.Trace("a", 10, 2, {"ngram": [0, 1]})
    assert "gap" not in ladder.observed(rows, [t], CostTable(COSTS), cell)


def test_tables_are_put_between_their_markers_and_nothing_else_is_touched(tmp_path, monkeypatch):
    """Also where a table is still missing: then its end follows at once, and the next end is another table's."""
    about = {"command": "c", "device": "d", "torch": "t", "date": "x", "seconds": 60}
    (tmp_path / "cdlm_teachers.json").write_text(json.dumps({**about, "result": {"table": "| head |\n| --- |\n| a | 1.000 |"}}))
    monkeypatch.setattr(results, "FOLDER", str(tmp_path))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results:cdlm_teachers -->\n<!-- end -->\nbetween\n<!-- results:cdlm_speed -->\n<!-- end -->\nafter\n")
    for _ in range(2):                                   # the second time over what the first one wrote
        bench.report(str(page))
        before, table, rest = page.read_text().replace("<!-- end -->", "<!-- results:cdlm_teachers -->", 1).split("<!-- results:cdlm_teachers -->")
        assert before == "before\n" and "| a | 1.000 |" in table and "`c` on d" in table
        assert rest == "\nbetween\n<!-- results:cdlm_speed -->\n<!-- end -->\nafter\n"


def test_gpu_suite_runs_dry_anywhere(toy, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(results, "FOLDER", str(tmp_path))
    monkeypatch.setattr(methods, "ready", lambda settings: ["ngram"])
    run_script(bench, "--suite", "gpu", "--dry-run", "--model", toy)
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert len(tables) == 6 and all(len({line.count("|") for line in t.split("\n")}) == 1 and "nan" not in t for t in tables)
    kernels = [line.split(" | ")[0].strip("| ") for line in tables[1].split("\n")[2:]]
    assert kernels == 2 * [f"{kind}, torch reference" for kind in ("full", "draft", "verify", "mixed", "scores")]
    assert "| trace | 2 | ngram | " in tables[4] and not os.listdir(tmp_path)
    with pytest.raises(SystemExit) as e:
        run_main(lambda: run_script(bench, "--suite", "gpu", "--device", "cuda", "--model", toy), "")
    assert e.value.code == 2 and "--suite gpu needs --device cuda and a GPU" in capsys.readouterr().err


def test_lists_of_the_gpu_suite_are_what_they_are_called():
    """A drafting request reads 5 % of its context and the newest, a verifying one all of it; the bytes follow."""
    for kind, entries in (("full", 2 * 4096), ("draft", 2 * (204 + 16)), ("verify", 2 * 4096), ("mixed", 4096 + 220)):
        requests = gpu.batch_of(kind, 4096, 2)
        assert gpu.list_bytes(requests, 8, 128, 2) == 8 * entries * (2 * 128 * 2 + 4)
        q, k, v, slots, selected, plan = gpu.inputs(gpu.DRY, gpu.batch_of(kind, 64, 2), 2, "cpu")
        assert len(q) == plan.requests[:, 1].sum() and sorted(slots.flatten().tolist()) == list(range(128))
        if selected is not None:
            assert selected.max() < 48 and (selected.diff() > 0).all()


def test_a_suite_stops_when_its_time_is_up_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", str(tmp_path))
    seen, now = [], iter(range(100))
    monkeypatch.setattr(results.time, "monotonic", lambda: next(now))
    measure = lambda x: seen.append(x) or [x]
    assert results.resumable("s", {}, [(1,), (2,), (3,)], measure, until=1) == [[1], [2]]
    assert results.resumable("s", {}, [(1,), (2,), (3,)], measure, until=90) == [[1], [2], [3]] and seen == [1, 2, 3]


def everything(about, cells, measure):
    """Every cell, with time enough."""
    return [measure(*cell) for cell in cells]


def test_a_cell_that_does_not_fit_is_noted_and_the_next_one_begins(monkeypatch):
    """What it has left is collected first: an engine and its planner hold each other, so nothing goes by itself."""
    class Node:
        pass

    left = []

    def too_large(*_):
        node = Node()
        node.itself = node
        left.append(weakref.ref(node))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def next_one(*_):
        gc.disable()                                     # what is gone now was collected between the cells
        return [{"gone": left[0]() is None}]

    monkeypatch.setattr(gpu, "cells", lambda *_: [("decode", ("Qwen3-8B",)), ("floors", ())])
    monkeypatch.setattr(gpu, "decode", too_large)
    monkeypatch.setattr(gpu, "floors", next_one)
    try:
        out = gpu.run(methods.settings(dry_run=True), toy_model(), None, everything)
    finally:
        gc.enable()
    assert out == {"floors": [{"gone": True}], "out_of_memory": ["decode Qwen3-8B"]}


def test_cells_without_memory_are_named_under_the_tables():
    floors = [{"what": "copy", "bytes_per_second": 1e12}, {"what": "bf16 product", "flops": 1e14}]
    text = bench.render("gpu", {"floors": floors, "out_of_memory": ["decode Qwen3-8B", "serving 8000 256"]})
    assert text.endswith("Out of memory: decode Qwen3-8B; serving 8000 256.") and "| copy | 1.00 TB/s |" in text


def test_large_models_are_built_in_the_dtype_that_they_are_measured_in(monkeypatch):
    """In fp32 first, an 8B model takes 33 GB."""
    seen, build = [], gpu.GPT
    monkeypatch.setattr(gpu, "dtype_of", lambda device: torch.bfloat16, raising=False)
    monkeypatch.setattr(gpu, "GPT", lambda config: seen.append(torch.get_default_dtype()) or build(config))
    row, = gpu.decode(gpu.DRY, "cpu", "tiny")
    assert seen == [torch.bfloat16] and torch.get_default_dtype() == torch.float32 and row["tokens_per_second"] > 0


def test_nothing_is_predicted_where_the_prices_are_not_of_what_runs(monkeypatch):
    """measure_costs times single steps without the graphs that decoding runs in."""
    model = toy_model(block_size=512)
    engine = methods.make_engine("specgen", model, methods.settings(), 2)
    generations = engine.generate([Request([1, 2, 3], 40), Request([4, 5], 40)])
    run_, args = ([100.0], engine, generations), methods.settings()
    assert specgen.against_prediction(run_, run_, model, args, 16, 2, 40)["predicted"] > 0
    engine.graphs = object()
    monkeypatch.setattr(specgen, "measure_costs", None)
    out = specgen.against_prediction(run_, run_, model, args, 16, 2, 40)
    assert "predicted" not in out and out["own_speedup"] == 1 and out["identical"] == 2


def test_bounds_of_own_files_write_nothing(files, tmp_path, monkeypatch):
    """Neither a result nor a page nor a figure, also without --quick."""
    monkeypatch.setattr(results, "FOLDER", str(tmp_path / "results"))
    for writer in (bench.results, "write"), (bench, "report"), (bench.figures, "draw"):
        monkeypatch.setattr(*writer, lambda *_: pytest.fail("written"))
    run_script(bench, "bounds", "--traces", files / "t.jsonl", "--cost", files / "c.json")


def test_methods_are_compared_in_one_table_of_one_request_at_a_time():
    """The table `methods` of the study `run`: one plain loop, ranges where something was timed more than once."""
    def row(workload, method, speedup, batch=1, **more):
        return {"workload": workload, "batch": batch, "method": method, "tokens_per_second": 100 * speedup, "speedup": speedup, "tau": 2.0, "identical": 3, "prompts": 4, **more}

    rows = [row("trace", "ar", 1.0), row("trace", "ngram", 1.2, speedup_range=[1.1, 1.3]), row("arith", "ar", 1.0), row("arith", "ngram", 1.6), row("arith", "ngram", 9.0, 4),
            row("gsm8k", "ar", 1.0), row("gsm8k", "ngram", 3.0), row("trace", "dlm", 0.2, identical=None)]
    assert bench.render("methods", {"rows": rows}).split("\n")[2:] == [
        "| ar | 1.00 | 1, 100 tokens/s | 1, 100 tokens/s | 1, 100 tokens/s | 9 of 12 |",
        "| ngram | 1.40 | 1.20 (1.10-1.30), tau 2.0 | 1.60, tau 2.0 | 3.00, tau 2.0 | 9 of 12 |",
        "| dlm | 0.20 | 0.20, tau 2.0 |  |  | own answers |"]


def test_a_table_of_a_study_that_is_gone_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", str(tmp_path))
    about = {"device": "d", "torch": "t", "date": "x", "seconds": 60}
    (tmp_path / "specdiff_budgets.json").write_text(json.dumps({**about, "command": "python bench.py specdiff_budgets", "result": {"table": "| budget |\n| --- |\n| 64 |"}}))
    text = bench.study_table("specdiff_budgets")
    assert text.startswith("| budget |") and text.endswith("1 minutes. This study is no longer part of bench.py.") and bench.study_table("cdlm_speed") is None
