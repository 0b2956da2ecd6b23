"""bench.py: the bounds from files alone, one clear line for bad files, and every table and figure from what is stored."""
import contextlib
import gc
import glob
import io
import json
import os
import re
import subprocess
import sys
import weakref
import xml.dom.minidom
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, outcome, run_script, save_toy_target, toy_model

import bench
import gpu_suite as gpu
import references
from minispec import bounds, traces
from minispec.bounds import AVERAGES
from minispec.tools import checkpoints
from minispec.data import tasks
from minispec.studies import figures, measure, results, run, specgen, timing, workloads
from minispec.tools import methods, plots
from minispec.traces import CostTable
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


def command(files, *more):
    return outcome(bounds, "--traces", files / "t.jsonl", "--cost", files / "c.json", *more)


def test_bounds_from_two_files_prints_the_ladder(files):
    before = sorted(os.listdir(results.FOLDER))
    r = command(files)
    assert r.returncode == 0, r.stderr
    for rung in ("best fixed k", "greedy (not a bound)", "optimum of one", "optimum of all", "free drafters", "one pass", "censored"):
        assert rung in r.stdout
    assert "observed" not in r.stdout and "| arith | 16 | all |" in r.stdout and "| story | 1 | ngram |" in r.stdout
    assert sorted(os.listdir(results.FOLDER)) == before


def test_a_bad_file_is_one_line_with_file_and_line(files):
    with open(files / "t.jsonl", "a") as f:
        f.write('\n{"id": "x", "prompt_len": 1, "n_out": 2, "accept": {"ngram": [0, 9], "draft": [0, 1]}}')
    r = command(files)
    assert r.returncode == 2 and r.stdout == "" and r.stderr.count("\n") == 1
    assert "t.jsonl:5: accept.ngram[1]" in r.stderr


EVIL = "a|b\x1b[2J\r$\n{x_$} | c"


def test_names_from_files_are_shown_not_obeyed(files, monkeypatch):
    """Of workloads, drafters with and without a price, and devices: none breaks a table, draws a formula or reaches a terminal as it is."""
    text = (files / "t.jsonl").read_text().replace('"arith/', json.dumps(EVIL)[:-1] + "/").replace('"ngram"', json.dumps(EVIL))
    (files / "t.jsonl").write_text(text)
    costs = json.loads((files / "c.json").read_text().replace('"ngram"', json.dumps(EVIL)))
    costs["about"] = {EVIL: EVIL}
    for drafters in (costs["draft"], {"draft": costs["draft"]["draft"]}):
        (files / "c.json").write_text(json.dumps({**costs, "draft": drafters}))
        r = command(files, "--json", files / "o.json")
        assert r.returncode == 0, r.stderr
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", r.stdout) and "a\\|b\\x1b[2J\\x0d$ {x_$} \\| c" in r.stdout
        rows = [line for line in r.stdout.splitlines() if line.startswith("|")]
        assert len(rows) > 5 and len({len(re.findall(r"(?<!\\)\|", line)) for line in rows}) == 1
    for drawing in files.glob("*.svg"):
        xml.dom.minidom.parse(str(drawing))
    # A study of bench.py shows them by the same table.
    monkeypatch.setattr(bench, "STUDIES", {"bounds": lambda *_: json.loads((files / "o.json").read_text())})
    with contextlib.redirect_stdout(io.StringIO()) as out:
        bench.measure(["bounds"], methods.settings(quick=True, force=True))
    assert "\x1b" not in out.getvalue() and "a\\|b" in out.getvalue()


def analysed(files):
    return bounds.main(["--traces", str(files / "t.jsonl"), "--cost", str(files / "c.json")])


def test_what_was_asked_is_said_first_and_all_of_it_is_in_the_json(files):
    """Prices, k_max and requests, and under the table the averages; batches and k_max as asked for; figures or a line on how to get them."""
    r = command(files, "--batches", "2,9", "--k-max", "2", "--json", files / "o.json")
    assert r.returncode == 0, r.stderr
    head = r.stdout.split("\n\n")[0]
    for said in ("4 requests, 24 positions", "c.json", "rounds  of at most 2 drafts"):
        assert said in head
    assert "All speed-ups are total time / mean rate." in r.stdout and "| censored |" in r.stdout
    out = json.loads((files / "o.json").read_text())
    assert {(c["batch"], c["k_max"]) for c in out["cells"]} == {(2, 2), (9, 2)} and set(AVERAGES) <= set(out["cells"][0])
    drawn = sorted(f for f in os.listdir(files) if f.endswith(".svg"))
    assert drawn == ["o_bounds_batch.svg", "o_bounds_winners.svg"] or "pip install matplotlib" in r.stdout


@pytest.mark.parametrize("flag, value", [("--batches", "1,0"), ("--batches", "two"), ("--batches", "1" + "0" * 30), ("--k-max", "1001"), ("--k-max", "0"), ("--json", "t.jsonl")])
def test_settings_out_of_range_are_one_line(files, flag, value):
    r = command(files, flag, files / value if flag == "--json" else value)
    assert r.returncode == 2 and r.stderr.count("\n") == 1 and flag[2:] in r.stderr.replace("cannot write", "json")


def test_bounds_of_own_files_need_no_torch(files):
    """The command where importing torch fails; an error is one line there, too."""
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('minispec.bounds', run_name='__main__', alter_sys=True)"
    for name, rc in (("t.jsonl", 0), ("missing", 2)):
        r = subprocess.run([sys.executable, "-c", code, "--traces", files / name, "--cost", files / "c.json"],
                           cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert r.returncode == rc, r.stderr
        assert "optimum of all" in r.stdout if rc == 0 else r.stderr.startswith("bounds.py: cannot read") and r.stderr.count("\n") == 1


def test_the_recipe_makes_traces_of_an_engines_logs(tmp_path):
    """Two logs of vLLM's acceptance branch, as docs/own-traces.md assumes them; the recipe is run as it is printed there."""
    def log(name, lengths, ids):
        rows = [{"id": f"cmpl-{i}", "acc": {"acc_len": a, "acc_prob": [], "acc_entropy": []}, "prompt_token_ids": [1] * 30, "generated_token_ids": ids[i]}
                for i, a in enumerate(lengths)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)) + "\n")

    log("n.jsonl", [[1, 21, 3, 9], [1, 1], [1, 2]], [[5, 6, 7, 8], [5, 6], [5, 6]])
    log("e.jsonl", [[1, 2, 1, 1], [1, 2], [1, 1]], [[5, 6, 7, 8], [5, 9], [5, 6]])
    with open(os.path.join(ROOT, "docs", "own-traces.md"), encoding="utf-8") as f:
        recipe = re.search(r"```python\n(import json.*?)```", f.read(), re.S)[1]
    assert recipe.count("\n") <= 20
    r = subprocess.run([sys.executable, "-c", recipe, "ngram=n.jsonl", "eagle3=e.jsonl"], cwd=tmp_path, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    (tmp_path / "t.jsonl").write_text(r.stdout)
    some = traces.read_traces(tmp_path / "t.jsonl")
    assert [t.id for t in some] == ["cmpl-0", "cmpl-2"] and "cmpl-1" in r.stderr          # its two outputs differ
    assert some[0].prompt_len == 30 and some[0].accept["ngram"].tolist() == [0, 3, 2, 1] and some[0].censored["ngram"].tolist() == [False, True, False, False]
    assert bounds.main(["--traces", str(tmp_path / "t.jsonl"), "--cost", results.path("costs_h100.json")]) is None


BAD = {"no traces": (lambda d: os.remove(d / "t.jsonl"), "cannot read .*t.jsonl"), "no costs": (lambda d: os.remove(d / "c.json"), "cannot read .*c.json"),
       "a word": (lambda d: (d / "c.json").write_text('{"verify":\n{"kind": "linear", "base": "fast"}}'), r"c.json: verify.base must be numbers"),
       "empty": (lambda d: (d / "t.jsonl").write_text(""), "no trace in this file"),
       "another drafter": (lambda d: (d / "c.json").write_text('{"verify": {"kind": "linear", "base": 1}}'), "are not in the cost table")}


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_named(what, files):
    ruin, message = BAD[what]
    ruin(files)
    with pytest.raises(ValueError, match=message) as e:
        analysed(files)
    assert "\n" not in str(e.value)


NOT_TABLES = ("costs", "costs_h100", "kernels", "exercises", "first_run")         # cost tables, and what pages compute by themselves


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
    model = toy_model(vocab=tokenizer.vocab_size, n_layer=1, bos_id=tokenizer.special["<|bos|>"], eos_id=tokenizer.special["<|eos|>"], block_size=1024)
    args = methods.settings(quick=True, cost=str(folder / "costs.json"), data=None)
    patch.setattr(results, "FOLDER", str(folder))
    patch.setattr(run, "SMALL", replace(run.SMALL, new=12, traced=4, repeats=1))
    patch.setattr(tasks, "FAMILIES", ("revise",))
    patch.setattr(results, "tqdm", lambda items, **_: items)
    patch.setattr(methods, "ready", lambda settings: ["ngram"] + ["adaptive"] * os.path.exists(settings.cost) + ["cdlm", "dlm"])
    checkpoints.save(model, folder / "diffusion", TARGET)
    patch.setattr(methods, "folder_of", lambda name, settings: str(folder / "diffusion"))
    out = {"profile": run.profile(args, model, tokenizer)}
    write_json(args.cost, out["profile"]["table"])
    args.quick = False                                        # writes the traces
    out["trace"] = run.trace(args, model, tokenizer)
    out["run"] = run.run(args, model, tokenizer)
    args.quick = True
    out["speed"] = run.speed(args, model, tokenizer)
    for name in ("trace", "run"):
        results.write(name, out[name], 1.0)
    out["bounds"] = bench.bounds(args, None, None)
    results.write("bounds", out["bounds"], 1.0)
    patch.undo()
    return folder, out


def test_the_studies_fit_together(measured):
    folder, out = measured
    cells = out["bounds"]["cells"]
    assert [(c["workload"], c["batch"]) for c in cells] == [(w, b) for w in ("revise", "mixed") for b in (1, 4, 16)]
    for c in cells:
        assert all(set(c[by]["L0"]) == {"ar", "ngram", "adaptive"} for by in AVERAGES) and all(c["mean rate"]["L0"].values()) and set(c["L1"]) == set(c["error"]) == {"ar", "ngram", "adaptive"}
    rows = out["run"]["rows"]
    assert all(r["identical"] == (r["prompts"] if r["method"] in methods.METHODS else None) for r in rows)
    assert [(r["workload"], r["batch"]) for r in rows if r["temperature"] == 1 and r["method"] == "ngram"] == [("mixed, T = 1", 1)]
    assert [(r["workload"], r["batch"], r["prompts"]) for r in rows if r["method"] == "dlm"] == [("revise", 1, 1)] and sum(r["method"] == "cdlm" for r in rows) == 7
    for r in out["run"]["rows"]:                              # the phases are all of the time
        assert sum(r["phases"].values()) == pytest.approx(r["seconds"])
    assert len(traces.read_traces(folder / "traces.jsonl")) == 4
    alone = [(r["method"], r["workload"]) for r in out["speed"]["rows"] if r["batch"] == 1]
    assert alone == [(m, "revise") for m in ("ar", "ngram", "adaptive")] and out["speed"]["new_tokens"] == 32


def test_new_tables_and_figures_come_from_files(measured, tmp_path):
    folder, out = measured
    for name, result in out.items():
        text = bench.render(name, json.loads(json.dumps(result)))
        assert text.startswith("| ") and "nan" not in text
    assert "time over the bound's" in bench.render("bounds", out["bounds"])
    pytest.importorskip("matplotlib")
    plots.draw(figures.FIGURES, figures.stored(str(folder)), f"{tmp_path}/")
    drawn = [os.path.basename(f) for f in glob.glob(str(tmp_path / "*.svg"))]
    assert set(drawn) == {f + ".svg" for file in ("traces.jsonl", "bounds.json") for f in figures.FIGURES[file]}


def test_figures_of_what_is_stored(tmp_path):
    """Of both models: some figures have numbers for one of them alone."""
    pytest.importorskip("matplotlib")
    for folder in ("", "smollm2"):
        plots.draw(figures.FIGURES, figures.stored(results.path(folder)), f"{tmp_path}/")
    assert sorted(os.listdir(tmp_path)) == sorted(f + ".svg" for some in figures.FIGURES.values() for f in some)


def test_profile_says_what_was_accepted_of_drafters_that_are_asked(measured, monkeypatch):
    """The target itself is always right; what is said of it goes the way from the model to the file's format."""
    tokenizer = Tokenizer.load(TARGET)
    model = toy_model(vocab=tokenizer.vocab_size, bos_id=tokenizer.special["<|bos|>"], eos_id=tokenizer.special["<|eos|>"], block_size=1024)
    monkeypatch.setattr(run, "SMALL", replace(run.SMALL, new=12))
    monkeypatch.setattr(methods, "chain_drafters", lambda *_: {"ngram": NGram(), "draft": SmallLM(model, model)})
    monkeypatch.setattr(measure, "cost_table", lambda *_, **__: dict(measured[1]["profile"]["table"]))
    table = run.profile(methods.settings(quick=True, data=None), model, tokenizer)["table"]
    assert table["accept"] == {"draft": 1.0} and CostTable(table).accept == {"draft": 1.0}


def test_the_middle_run_is_reported():
    a, b, c = (timing.Run([], {"verify": seconds}, 1.0, 1.0, None) for seconds in (1.0, 2.0, 3.0))
    assert run.middle([c, a, b]) is b and run.middle([b, a]) is a



def test_an_interrupted_study_goes_on_cell_by_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", str(tmp_path))
    calls, cells = [], [("a", 1), ("b", 2), ("c", 3)]
    model = toy_model()
    study = lambda k: results.each_kept("run", methods.settings(quick=False), model, cells, measure, k=k)

    def measure(name, n):
        calls.append(name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return [n]

    with pytest.raises(KeyboardInterrupt):
        study(k=1)
    assert study(k=1) == [[1], [2], [3]] and calls == ["a", "b", "c", "c"]
    assert os.listdir(tmp_path) == ["run.part"]
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        study(k=2)                       # other settings: nothing is taken over
    assert calls == ["a", "b", "c"]
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    results.write("run", {}, 1.0)
    assert os.listdir(tmp_path) == ["run.json"]


def test_tables_are_put_between_their_markers_and_nothing_else_is_touched(tmp_path, monkeypatch):
    """Also where a table is still missing: then its end follows at once, and the next end is another table's."""
    about = {"command": "c", "device": "d", "torch": "t", "date": "x", "seconds": 60}
    (tmp_path / "cdlm_teachers.json").write_text(json.dumps({**about, "result": {"table": "| head | figure |\n| --- | --- |\n| a | 1.000 |"}}))
    monkeypatch.setattr(results, "FOLDER", str(tmp_path))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results:cdlm_teachers -->\n<!-- end -->\nbetween\n<!-- results:cdlm_curves -->\n<!-- end -->\nafter\n")
    for _ in range(2):                                   # the second time over what the first one wrote
        bench.report(str(page))
        before, table, rest = page.read_text().replace("<!-- end -->", "<!-- results:cdlm_teachers -->", 1).split("<!-- results:cdlm_teachers -->")
        assert before == "before\n" and "| a | 1.000 |" in table and "`c` on d" in table
        assert rest == "\nbetween\n<!-- results:cdlm_curves -->\n<!-- end -->\nafter\n"



def test_lists_of_the_gpu_suite_are_what_they_are_called():
    """A drafting request reads 5 % of its context and the newest, a verifying one all of it; the bytes follow."""
    for kind, entries in (("full", 2 * 4096), ("draft", 2 * (204 + 16)), ("verify", 2 * 4096), ("mixed", 4096 + 220)):
        requests = gpu.batch_of(kind, 4096, 2)
        assert gpu.list_bytes(requests, 8, 128, 2) == 8 * entries * (2 * 128 * 2 + 4)
        q, k, v, slots, selected, plan = gpu.inputs(gpu.TINY, gpu.batch_of(kind, 64, 2), 2, "cpu", torch.float32)
        assert len(q) == plan.requests[:, 1].sum() and sorted(slots.flatten().tolist()) == list(range(128))
        assert (selected < 48).all() and (selected.diff() > 0).all()




def quick(model):
    return methods.settings(quick=True), model


def test_the_study_of_a_gpu_runs_anywhere(monkeypatch):
    """The kernels' references take their places here."""
    monkeypatch.setattr(gpu, "available", lambda x: True)
    monkeypatch.setattr(gpu.packed, "attention", references.attention)
    monkeypatch.setattr(gpu.scores, "scores", references.scores)
    out = gpu.gpu(*quick(toy_model()))
    tables = gpu.tables(out).split("\n\n")
    assert len(tables) == 3 and all(len({line.count("|") for line in t.split("\n")}) == 1 and "nan" not in t for t in tables)
    assert [x["kernel"] for x in out["kernels"]] == 2 * list(gpu.KINDS)
    with pytest.raises(ValueError, match="need --device cuda"):
        gpu.gpu(methods.settings(quick=False), toy_model())


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
        return {"gone": left[-1]() is None}

    monkeypatch.setattr(gpu, "available", lambda x: True)
    monkeypatch.setattr(gpu, "SECTIONS", {"floors": too_large, "kernels": too_large, "decode": next_one})
    try:
        out = gpu.gpu(*quick(toy_model()))
    finally:
        gc.enable()
    assert out["decode"] == [{"gone": True}] and out["out_of_memory"][:2] == ["floors", "kernels full 64 2 2"] and len(out["out_of_memory"]) == 11


def test_cells_without_memory_are_named_under_the_tables():
    floors = [{"what": "bytes copied", "rate": 1e12}]
    text = gpu.tables({"floors": floors, "out_of_memory": ["decode Qwen3-8B"]})
    assert text.endswith("Out of memory: decode Qwen3-8B.") and "| bytes copied | 1e+12 |" in text


def test_bounds_of_own_files_write_nothing(files, tmp_path, monkeypatch):
    """Neither a result nor a page nor a figure, also without --quick."""
    monkeypatch.setattr(results, "FOLDER", str(tmp_path / "results"))
    for writer in (bench.results, "write"), (bench, "report"), (bench, "draw"):
        monkeypatch.setattr(*writer, lambda *_: pytest.fail("written"))
    analysed(files)
    assert sorted(os.listdir(files)) == ["c.json", "t.jsonl"]


def test_methods_are_compared_in_one_table_of_one_request_at_a_time():
    """The table `methods` of the study `run`: one plain loop, ranges where something was timed more than once."""
    def row(workload, method, speedup, batch=1, **more):
        return {"workload": workload, "batch": batch, "method": method, "tokens_per_second": 100 * speedup, "speedup": speedup, "tau": 2.0, "identical": 3, "prompts": 4,
                "tokens": 100 * speedup, "seconds": 2, "phases": {"prefill": 1}, **more}

    rows = [row("trace", "ar", 1.0), row("trace", "ngram", 1.2, seconds=1.5), row("arith", "ar", 1.0), row("arith", "ngram", 1.6), row("arith", "ngram", 9.0, 4), row("mixed", "ngram", 5.0, 4),
            row("gsm8k", "ar", 1.0), row("gsm8k", "ngram", 3.0), row("trace", "dlm", 0.2, identical=None)]
    assert bench.render("methods", {"rows": rows}).split("\n") == [
        "| method | mean | in decoding | trace | arith | gsm8k | mixed, batch 4 | identical to ar |", "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| ar | 1.00 | 1.00 | 1, 100 tokens/s | 1, 100 tokens/s | 1, 100 tokens/s |  | 9 of 12 |",
        "| ngram | 1.40 | 2.00 | 1.20, tau 2.0 | 1.60, tau 2.0 | 3.00, tau 2.0 | 5.00 | 9 of 12 |"]


class Slow:
    """An engine of two at once whose requests end after 1, 2 and 5 seconds of its own clock."""
    batch_size = 2

    def __init__(self):
        self.seconds = {"verify": 0.0, "other": 0.0}

    def stream(self, requests):
        for r, at in zip([requests[1], requests[0], requests[2]], (1.0, 2.0, 5.0)):
            self.seconds["verify"] = at
            r.generation.token_ids += [1] * 6
            yield r, [1] * 6


def test_a_requests_rate_counts_from_its_entry():
    """The third one enters when the first one leaves, after one second; it has six tokens in four seconds."""
    generations, rate = timing.answer(Slow(), [Request([1], 6) for _ in range(3)])
    assert rate == pytest.approx((6 / 2 + 6 / 1 + 6 / 4) / 3) and len(generations) == 3


def test_a_real_model_gets_real_prompts(tmp_path):
    """Spec-Bench's blocks, HumanEval and rewriting tasks of a data folder; without one, what ships. Workloads in turn, no problem twice."""
    def put(name, rows):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(rows))

    put("spec_bench/question.jsonl", [{"question_id": i, "category": c, "turns": [f"{c} {i}"]} for i in range(3) for c in ("writing", "qa")])
    put("gsm8k/test.jsonl", [{"question": f"q{i}", "answer": "one\n#### 1"} for i in range(2)])
    put("humaneval/HumanEval.jsonl", [{"prompt": f"def f{i}():", "test": "", "entry_point": "f"} for i in range(3)])
    put("instruct/instruction-data.json", [{"instruction": "Rewrite it in the passive.", "input": "He ate.", "output": "x"}, {"instruction": "Rewrite it.", "input": "", "output": "x"},
                                           {"instruction": "Name a bird.", "input": "now", "output": "x"}])
    real = SimpleNamespace(ours=False)
    some = workloads.problems_of(real, 2, str(tmp_path))
    assert {w: len(own) for w, own in some.items()} == {"mt_bench": 2, "qa": 2, "gsm8k": 2, "humaneval": 2, "edit": 1}
    later = workloads.problems_of(real, 1, str(tmp_path), first=2)
    assert not {p.prompt for p in some["qa"]} & {p.prompt for p in later["qa"]} and later["edit"] == some["edit"]        # there is only one
    assert some["edit"][0].prompt == "Rewrite it in the passive.\n\nHe ate.\n"
    in_turn = workloads.numbered(real, 2, str(tmp_path))
    assert list(in_turn) == [f"{w}/{i}" for i in range(2) for w in some if i < len(some[w])]
    shipped, later = workloads.problems_of(real, 2), workloads.problems_of(real, 2, first=2)
    assert list(shipped) == ["questions", "story", "edit"] and all(len(own) == 2 for own in shipped.values())
    prompts_ = [p.prompt for own in (*shipped.values(), *later.values()) for p in own]
    assert len(set(prompts_)) == 12


def test_a_dollar_in_the_name_of_a_drafter_is_no_mathematics_and_the_ticks_of_other_drawings_stay_mathematics():
    labels = []
    axes = SimpleNamespace(plot=lambda *_, label: labels.append(label), fill_between=lambda *_, **__: None, set=lambda **_: None)
    bounds.winners(axes, [SimpleNamespace(accept={"$x_{$": np.ones(30), "b\x1b": np.zeros(30)}, n_out=30)])
    assert labels == [r"\$x_{\$", r"b\x1b"] and "text.parse_math" not in plots.STYLE


def test_results_of_another_target_have_their_own_folder(monkeypatch, tmp_path):
    """Where no study is named, a real model that is installed is the target; its tables are marked with its name on a page."""
    def chosen(*argv, packaged=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["bench.py", *argv])
            patch.setattr(results, "FOLDER", "results")
            patch.setattr(bench.gguf_file, "packaged", lambda: packaged)
            args = bench.parse_args()
            bench.choose_target(args)
            return args.model, results.FOLDER, args.cost

    assert chosen() == ("smollm2", "results/smollm2", "results/smollm2/costs.json")
    assert chosen("--cost", "c.json") == ("smollm2", "results/smollm2", "c.json")
    assert chosen("run") == chosen(packaged=False) == (methods.SHIPPED, "results", "results/costs.json")
    assert chosen("run", "--model", "models/mine.gguf")[:2] == ("models/mine.gguf", "results/mine.gguf")
    assert chosen("run", "--model", "models/Llama-3.2-1B/")[1:] == ("results/Llama-3.2-1B", "results/Llama-3.2-1B/costs.json")
    assert chosen("run", "--model", ".")[1] == f"results/{os.path.basename(os.getcwd())}"
    monkeypatch.setattr(results, "FOLDER", str(tmp_path))
    (tmp_path / "smollm2").mkdir()
    about = {"device": "d", "torch": "t", "date": "x", "seconds": 60, "command": "c"}
    (tmp_path / "smollm2" / "cdlm_teachers.json").write_text(json.dumps({**about, "result": {"table": "| a |\n| --- |\n| 1 |"}}))
    (tmp_path / "page.md").write_text("<!-- results:smollm2/cdlm_teachers -->\n<!-- end -->\n")
    bench.report(str(tmp_path / "page.md"))
    assert "| 1 |" in (tmp_path / "page.md").read_text()


def test_a_table_of_a_study_that_is_gone_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", str(tmp_path))
    about = {"device": "d", "torch": "t", "date": "x", "seconds": 60}
    (tmp_path / "cdlm_teachers.json").write_text(json.dumps({**about, "command": "python bench.py cdlm_teachers", "result": {"table": "| budget |\n| --- |\n| 64 |"}}))
    text = bench.study_table("cdlm_teachers")
    assert text.startswith("| budget |") and text.endswith("1 minutes. This study is no longer part of bench.py.") and bench.study_table("cdlm_curves") is None
