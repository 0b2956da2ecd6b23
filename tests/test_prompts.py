"""Prompts of the public formats: loading, checking, asking again. Real files where MINISPEC_DATA has them."""
import json
import os
import time

import pytest
from conftest import ROOT, TARGET

import bench
import decode
from minispec.tools import checkpoints
from minispec.data import corpus, prompts
from minispec.tools import answers, methods
from minispec.core.engine import Generation
from minispec.data.tokenizer import NO_THINKING, Tokenizer

DATA = os.environ.get("MINISPEC_DATA", "")
EVAL = {"task_id": "HumanEval/0", "prompt": 'from math import pi\n\n\ndef inc(x: int) -> int:\n    """One more."""\n', "entry_point": "inc",
        "canonical_solution": "    return x + 1\n", "test": "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(-1) == 0\n"}
MBPP = {"task_id": 2, "text": "Write a function to double a number.", "code": "def double(x):\n    return 2 * x", "test_list": ["assert double(4) == 8"], "test_setup_code": ""}
ROWS = {  # format: (row, family, prompt begins, answer, texts that are right, texts that are wrong)
    "GSM8K": ({"question": "2+2?", "answer": "<<2+2=4>>4 it is\n#### 1,004"}, "gsm8k", "2+2?\n", "1004",
              ["so 7 and then $1,004.00.", "= 1004"], ["1004 or 5", "", "none", "100.4", "-1004"]),
    "MATH-500": ({"problem": "Half?", "solution": "It is \\boxed{\\frac{1}{2}}.", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 1}, "math", "Half?\nPlease reason",
                 "\\frac{1}{2}", ["\\boxed{3} no, $\\boxed{\\dfrac{1}{2}}$", "\\boxed{0.5}", "\\frac12", "\\boxed{ 1/2 }"], ["\\boxed{\\frac{1}{3}}", "\\boxed{2}", "half"]),
    "MATH": ({"problem": "Set?", "level": "Level 1", "type": "Algebra", "solution": "so \\boxed{\\left\\{1, \\sqrt2\\right\\}}"}, "math", "Set?\nPlease reason",
             "\\left\\{1, \\sqrt2\\right\\}", ["\\boxed{\\{1,\\sqrt{2}\\}}"], ["\\boxed{\\{1\\}}", "\\boxed{"]),
    "AIME": ({"prompt": "How many? \\boxed{}", "answer": 33}, "prompt", "How many? \\boxed{}\n", "33", ["\\boxed{033}", "33", "\\boxed{33^\\circ}"], ["\\boxed{3}", "the 33"]),
    "AIME 2024": ({"ID": "2024-I-1", "Problem": "How?", "Solution": "..", "Answer": "025"}, "math", "How?\nPlease reason", "025", ["\\boxed{25}"], ["\\boxed{26}"]),
    "HumanEval": (EVAL, "humaneval", "from math import pi\n", "tests", ["    return x + 1\n", "Sure.\n```python\ndef inc(x):\n    return x + 1\n```\nDone.", "    return 1 + x\n\ndef more():\n  broken("],
                  ["    return x\n", "", "    raise SystemExit(0)\n", "```\ndef inc(x):\n    return 2\n```", "    syntax error"]),
    "MBPP": (MBPP, "mbpp", "Write a function to double a number.\nYour code should pass these tests:\nassert double(4) == 8\n", "tests", [MBPP["code"], f"```python\n{MBPP['code']}\n```"],
             ["def double(x):\n    return x", "import os\nos._exit(0)"]),
    "MBPP, sanitized": ({"prompt": "Double.", "code": "", "test_imports": ["import math"], "test_list": ["assert math.floor(double(4)) == 8"]}, "mbpp", "Double.\nYour", "tests", [MBPP["code"]], ["x"]),
    "MT-bench": ({"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}, "mt_bench", "Write.\n", "", [], []),
    "Spec-Bench": ({"question_id": 480, "category": "math_reasoning", "turns": ["6?"], "reference": ["6\n#### 576"]}, "math_reasoning", "6?\n", "576", ["it is 576."], ["57"]),
    "Spec-Bench, translation": ({"category": "translation", "turns": ["Translate"], "reference": ["Nicht"]}, "translation", "Translate\n", "", [], []),
    "other": ({"instruction": "do"}, "prompt", "do\n", "", [], []),
}


def load(tmp_path, *rows):
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return prompts.load_prompts(str(file))


@pytest.mark.parametrize("name", ROWS)
def test_formats(name, tmp_path):
    row, family, begins, answer, right, wrong = ROWS[name]
    p, = load(tmp_path, row)
    assert (p.family, p.answer) == (family, answer) and p.prompt.startswith(begins) and p.prompt.endswith("\n") and "<<" not in p.think
    for text in right:
        assert prompts.check(p, text, run_code=True) is True, text
    for text in wrong:
        assert prompts.check(p, text, run_code=True) is False, text
    if not right or answer == "tests":
        assert prompts.check(p, "anything") is None


def test_code_runs_within_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "SECONDS", 1)
    started = time.monotonic()
    assert prompts.passes("x = 1") and not prompts.passes("while True: pass")
    assert time.monotonic() - started < 5
    assert not prompts.passes("x = bytearray(4 << 30)") and prompts.passes("x = bytearray(1 << 20)")
    assert not prompts.passes("open('f', 'wb').write(bytes(2 << 20))")
    assert not prompts.passes("import os\nassert 'PATH' in os.environ") and prompts.passes("import os\nassert os.listdir() == ['solution.py']")
    left = tmp_path / "left"                                       # what it started dies with it
    source = "import os, time\ntry:\n    child = os.fork()\nexcept OSError:\n    child = 1\nif child == 0:\n    time.sleep(0.3)\n    open({!r}, 'w')\n    os._exit(0)"
    assert prompts.passes(source.format(str(left)))
    time.sleep(0.5)
    assert not left.exists()


def test_endless_numbers_are_no_answer(tmp_path):
    p, = load(tmp_path, ROWS["GSM8K"][0])
    assert prompts.check(p, "9" * 10000) is False and prompts.normal("9" * 10000) == "9" * 10000


@pytest.mark.parametrize("text, message", [('{"prompt": "a"}\n{"prompt": ', ":2: not a JSON line"), ('[1]', ":1: a JSON object is needed"), ('{"prompt": 5}', ":1: no text under"),
                                           ('{"x": 1}', ":1: no text under"), ("", "holds no prompts"), ('{"turns": ["a", 3]}', ":1: no text under"), ('{"turns": []}', ":1: no text"),
                                           ('{"prompt": "a", "answer": [1]}', ":1: 'answer' must be"), ("[" * 100000, ":1: not JSON that can be read"), ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", ":1: not JSON"),
                                           ('{"text": "a", "test_list": [1]}', ":1: tests must be texts")])
def test_malformed_lines_are_named(tmp_path, text, message):
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError) as e:
        prompts.load_prompts(str(file))
    assert message in str(e.value) and str(file) in str(e.value) and "\n" not in str(e.value)


def test_files_that_are_no_text_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff\xfe"}')
    with pytest.raises(ValueError, match="cannot read .*a.jsonl: not UTF-8 text .invalid start byte at byte 12"):
        prompts.load_prompts(str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match="no prompt file"):
        prompts.load_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="cannot read .*: Is a directory"):
        prompts.load_prompts(str(tmp_path))


def test_missing_data_names_the_public_source(tmp_path):
    for name, (path, source) in prompts.PROMPT_FILES.items():
        with pytest.raises(ValueError, match="--data DIR or set MINISPEC_DATA"):
            prompts.load_named(name, None)
        with pytest.raises(ValueError) as e:
            prompts.load_named(name, str(tmp_path))
        assert path in str(e.value) and source in str(e.value)


# -- turns -------------------------------------------------------------------------------------------------------------

QWEN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def test_the_next_prompt_of_every_family():
    """The ids of a conversation are those of its text in the family's template, without chains of thought that are past."""
    ours = Tokenizer.load(TARGET)
    ranks, special = ours.encoding._mergeable_ranks, lambda *names: {name: 2040 + i for i, name in enumerate(names)}
    spell = lambda t, text: t.template_ids(text)
    for names, first, answer, said, again in [
            (list(ours.special), "<|bos|><|prompt|>{}\n<|think|>", "so<|answer|>4<|eos|>", "so<|answer|>4", "<|eos|><|prompt|>{}\n<|think|>"),
            (["<|im_start|>", "<|im_end|>", "<think>", "</think>"], QWEN, "<think>\nhm\n</think>\n\nFour.<|im_end|>", "Four.", "<|im_end|>\n" + QWEN),
            (["<|im_start|>", "<|im_end|>"], "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + QWEN, "Four.", "Four.", "<|im_end|>\n" + QWEN),
            (["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
             "Four.<|eot_id|>", "Four.", "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
            ([], "{}\n", "Four.", "Four.", "\n{}\n")]:
        t = Tokenizer(ranks, special(*names))
        asked = t.prompt_ids("2+2?\n")
        assert asked == spell(t, first.format("2+2?"))
        want = spell(t, first.format("2+2?")) + spell(t, said) + spell(t, again.format("Sure?"))
        assert t.next_prompt_ids(asked, spell(t, answer), "Sure?\n") == want
        if "</think>" in names:
            t.template += NO_THINKING
            assert t.next_prompt_ids(t.prompt_ids("2+2?"), spell(t, "Four.<|im_end|>"), "Sure?\n") == want + spell(t, NO_THINKING)
            assert t.answer_text(spell(t, answer)).strip() == "Four."


def test_turns_are_asked_after_the_own_answer(tmp_path, toy):
    """decode.py: two turns, several at once, greedy and compared; the second prompt holds the first and its answer."""
    rows = [{"turns": ["one", "two", "three"], "category": "writing"}, {"prompt": "alone", "answer": 1}, {"turns": ["four", "five"], "category": "qa"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = Tokenizer.load(toy)
    for extra in ((), ("--method", "ngram", "--batch", "2", "--compare")):
        decode.main(["--model", toy, "--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "9", "--quiet", "--json", str(tmp_path / "o.json"), *extra])
        with open(tmp_path / "o.json") as f:
            each = json.load(f)["requests"]
        assert [x["turn"] for x in each] == [1, 2, 3, 1, 1, 2] and [x["correct"] for x in each] == [None] * 3 + [False] + [None] * 2
        assert each[0]["prompt_token_ids"] == tokenizer.prompt_ids("one\n")
        for a, b, text in [(each[0], each[1], "two\n"), (each[1], each[2], "three\n"), (each[4], each[5], "five\n")]:
            assert b["prompt_token_ids"] == tokenizer.next_prompt_ids(a["prompt_token_ids"], a["token_ids"], text)
            assert b["prompt_token_ids"][:len(a["prompt_token_ids"])] == a["prompt_token_ids"]
        assert not extra or all(x["identical"] for x in each)


def test_code_is_run_with_the_flag_alone(tmp_path, toy):
    (tmp_path / "p.jsonl").write_text(json.dumps(EVAL))
    for flags, correct in (((), None), (("--run-code",), False)):
        decode.main(["--model", toy, "--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "5", "--quiet", "--json", str(tmp_path / "o.json"), *flags])
        with open(tmp_path / "o.json") as f:
            assert json.load(f)["correct"] is correct


def test_turns_share_out_the_context(tmp_path, toy):
    """What would not fit in a later turn fails before the first."""
    problem, = load(tmp_path, {"turns": ["one", "two"]})
    model, tokenizer = checkpoints.load(toy), Tokenizer.load(toy)
    most = (512 - len(tokenizer.prompt_ids("one\n")) - len(tokenizer.next_prompt_ids([], [], "two"))) // 2
    with pytest.raises(ValueError, match="for each of 2 answers; the context of this model is 512"):
        answers.requests_of([problem], tokenizer, model, most + 1)
    full = lambda some: [Generation(r.tokens, [7] * r.max_new_tokens) for r in answers.requests_of(some, tokenizer, model, most)]
    rows = answers.converse([problem], full)
    assert [len(g.token_ids) for _, g, _ in rows] == [most, most] and len(rows[1][1].prompt_ids) + most <= 512


def test_bench_measures_a_workload(tmp_path, toy, capsys):
    """Blocks by family, second turns after the target's own first answer, solved of those that can be checked."""
    rows = [{"turns": ["one", "two"], "category": "writing"}, {"turns": ["three"], "category": "qa"}, ROWS["Spec-Bench"][0]]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model, tokenizer = checkpoints.load(toy), Tokenizer.load(toy)
    args = methods.settings(model=toy, quick=True, data=None, workload=str(tmp_path / "p.jsonl"), max_new_tokens=8, draft_model="none", cost="none", drafter="none", diffusion_model="none")
    requests, problems = bench.workload_requests(args, model, tokenizer)
    assert list(requests) == ["mt_bench/0", "mt_bench/0/2", "qa/0", "math_reasoning/0"]
    first = methods.make_engine("ar", model, args, 1).generate([answers.requests_of([problems["mt_bench/0"]], tokenizer, model, 8)[0]])[0]
    assert requests["mt_bench/0/2"].tokens == tokenizer.next_prompt_ids(first.prompt_ids, first.token_ids, "two\n")
    result = bench.run(args, model, tokenizer)
    rows = {(x["workload"], x["method"]): x for x in result["rows"]}
    assert {w for w, _ in rows} == {"mt_bench", "qa", "math_reasoning", "mixed"} and rows["math_reasoning", "ar"]["solved"] == [0, 1] and rows["qa", "ar"]["solved"] == [0, 0]
    assert all(x["identical"] == x["prompts"] for x in result["rows"]) and "| solved |" in bench.render("run", result)
    args.drafter, args.draft_model = os.path.join(ROOT, "checkpoints", "prism"), toy             # a drafter of another target
    assert bench.suitable(args, model) == ["ngram", "draft", "specgen"] and "prism is left out: the drafter was made for" in capsys.readouterr().out


# -- real files --------------------------------------------------------------------------------------------------------

def real(name):
    if not DATA or not os.path.exists(os.path.join(DATA, prompts.PROMPT_FILES[name][0])):
        pytest.skip(f"no {name} under MINISPEC_DATA")
    file = os.path.join(DATA, prompts.PROMPT_FILES[name][0])
    return prompts.load_named(name, DATA), [row for _, row in prompts.read_rows(file)]


def test_every_answer_of_gsm8k_is_right_and_another_wrong():
    problems, rows = real("gsm8k")
    assert len(problems) == 1319 and all(p.family == "gsm8k" and p.think for p in problems)
    for p, row in zip(problems, rows):
        assert prompts.check(p, row["answer"]) is True and prompts.check(p, f"The answer is ${p.answer}.") is True and prompts.check(p, row["answer"] + "1") is False


def test_every_answer_of_aime_is_right_and_another_wrong():
    problems, rows = real("aime")
    assert len(problems) == 30
    for p, row in zip(problems, rows):
        assert prompts.check(p, f"so \\boxed{{{row['answer']}}}.") is True and prompts.check(p, f"{row['answer']}") is True and prompts.check(p, f"\\boxed{{{row['answer'] + 1}}}") is False


def test_spec_bench_has_six_blocks():
    problems, _ = real("spec_bench")
    blocks = {f: [p for p in problems if p.family == f] for f in dict.fromkeys(p.family for p in problems)}
    assert {f: len(some) for f, some in blocks.items()} == dict.fromkeys(("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"), 80)
    assert all(len(p.turns) == 1 for p in blocks["mt_bench"]) and not any(p.turns for f, some in blocks.items() if f != "mt_bench" for p in some)
    assert all(prompts.check(p, p.think + p.answer) is True and prompts.check(p, "1234567") is False for p in blocks["math_reasoning"])
    assert all(prompts.check(p, "x") is None for f, some in blocks.items() if f != "math_reasoning" for p in some)


def test_humaneval_takes_its_own_solutions():
    """All 164 with MINISPEC_FULL=1, else every eighth."""
    problems, rows = real("humaneval")
    assert len(problems) == 164
    for p, row in list(zip(problems, rows))[::1 if os.environ.get("MINISPEC_FULL") else 8]:
        assert prompts.check(p, row["canonical_solution"]) is None, "code runs only where the user asks"
        assert prompts.check(p, row["canonical_solution"], True) is True, row["task_id"]
        assert prompts.check(p, f"```python\n{row['prompt']}{row['canonical_solution']}```", True) is True, row["task_id"]
        assert prompts.check(p, "    return None\n", True) is False, row["task_id"]


def test_damaged_training_text_is_named(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    for text in ('{"question": "a"}', '{"question": 5, "answer": "b"}', "{"):
        (tmp_path / "gsm8k" / "train.jsonl").write_text(text)
        with pytest.raises(ValueError, match="train.jsonl"):
            corpus.real_documents(str(tmp_path))
