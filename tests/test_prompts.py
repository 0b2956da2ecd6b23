"""Prompts of the public formats: loading, checking, asking again. Real files where MINISPEC_DATA has them."""
import gzip
import json
import os
import types

import pytest
from conftest import ROOT, TARGET, outcome

import bench
import decode
from minispec.tools import checkpoints
from minispec.data import prompts
from minispec.tools import methods
from minispec.studies import run
from compare_checkpoints import CHATS
from minispec.data.tokenizer import Tokenizer
from minispec.tools.answers import requests_of
from minispec.tools.files import read_rows

DATA = os.environ.get("MINISPEC_DATA", "")
EVAL = {"task_id": "HumanEval/0", "prompt": 'from math import pi\n\n\ndef inc(x: int) -> int:\n    """One more."""\n', "entry_point": "inc",
        "canonical_solution": "    return x + 1\n", "test": "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(-1) == 0\n"}
MBPP = {"task_id": 2, "text": "Write a function to double a number.", "code": "def double(x):\n    return 2 * x", "test_list": ["assert double(4) == 8"], "test_setup_code": ""}
ROWS = {  # format: (row, family, prompt begins, answer, texts that are right, texts that are wrong)
    "GSM8K": ({"question": "2+2?", "answer": "<<2+2=4>>4 it is\n#### 1,004"}, "gsm8k", "2+2?\n", "1004",
              ["so 7 and then $1,004.00.", "= 1004"], ["1004 or 5", "", "none", "100.4", "-1004"]),
    "MATH-500": ({"problem": "Half?", "solution": "It is \\boxed{\\frac{1}{2}}.", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 1},
                 "math", "Half?\nPlease reason", "\\frac{1}{2}",
                 ["\\boxed{3} no, $\\boxed{\\dfrac{1}{2}}$", "\\frac12", "\\boxed{\\tfrac 1 2}", "\\boxed{3} or \\fbox{\\frac{1}{2}}"],
                 ["\\boxed{\\frac{1}{3}}", "\\boxed{2}", "half", "\\boxed{0.5}", "\\boxed{1/2}", "\\boxed{1e99999999}"]),
    "MATH": ({"problem": "Set?", "level": "Level 1", "type": "Algebra", "solution": "so \\boxed{\\left\\{1, \\sqrt2\\right\\}}"},
             "math", "Set?\nPlease reason", "\\left\\{1, \\sqrt2\\right\\}", ["\\boxed{\\{1,\\sqrt{2}\\}}"], ["\\boxed{\\{1\\}}", "\\boxed{"]),
    "AIME": ({"prompt": "How many? \\boxed{}", "answer": 33}, "prompt", "How many? \\boxed{}\n", "33",
             ["\\boxed{033}", "33"], ["\\boxed{3}", "the 33", "\\boxed{33.0}"]),
    "AIME 2024": ({"ID": "2024-I-1", "Problem": "How?", "Solution": "..", "Answer": "025"}, "math", "How?\nPlease reason", "025",
                  ["\\boxed{25}"], ["\\boxed{26}"]),
    "HumanEval": (EVAL, "humaneval", "from math import pi\n", "", [], []),
    "MBPP": (MBPP, "mbpp", "Write a function to double a number.\nYour code should pass these tests:\nassert double(4) == 8\n", "", [], []),
    "MBPP, sanitized": ({"prompt": "Double.", "code": "", "test_imports": ["import math"], "test_list": ["assert math.floor(double(4)) == 8"]},
                        "mbpp", "Double.\nYour", "", [], []),
    "MT-bench": ({"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}, "mt_bench", "Write.\n", "", [], []),
    "Spec-Bench": ({"question_id": 480, "category": "math_reasoning", "turns": ["6?"], "reference": ["6\n#### 576"]},
                   "math_reasoning", "6?\n", "576", ["it is 576."], ["57"]),
    "Spec-Bench, translation": ({"category": "translation", "turns": ["Translate"], "reference": ["Nicht"]}, "translation", "Translate\n", "", [], []),
    "Alpaca": ({"instruction": "Translate this.\n", "input": "Guten Tag", "output": "Hello"}, "prompt", "Translate this.\n\nGuten Tag\n", "", [], []),
    "Alpaca, no input": ({"instruction": "Name a bird.", "input": "", "output": "Owl"}, "prompt", "Name a bird.\n", "", [], []),
    "Dolly": ({"instruction": "When?", "context": "It was in 1872.", "response": "1872"}, "prompt", "When?\n\nIt was in 1872.\n", "", [], []),
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
        assert prompts.check(p, text) is True, text
    for text in wrong:
        assert prompts.check(p, text) is False, text
    if not right:
        assert prompts.check(p, "anything") is None


def test_code_is_never_run(tmp_path):
    """HumanEval and MBPP are for measuring speed: nothing of what a model wrote is executed, and there is no verdict."""
    left = tmp_path / "left"
    code = f"```python\ndef inc(x):\n    return x + 1\nopen({str(left)!r}, 'w')\nimport os\nos._exit(97)\n```"
    for row in (EVAL, MBPP):
        assert prompts.check(load(tmp_path, row)[0], code) is None
    assert not left.exists()
    with pytest.raises(SystemExit):
        decode.parse_args(["--run-code"])


@pytest.mark.parametrize("a, b, same", [
    ("x^{2}", "x^2", True), ("\\text{Evelyn}", "Evelyn", True), ("\\$18.90", "$18.90", True), ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\dfrac{\\pi}{2})", True),
    ("10,\\!080", "10,080", True), ("6 - 5i", "6-5i", True), ("p - q\\;", "p-q", True),
    ("(1, 234)", "(1234)", False), ("1,234", "1234", False), ("\\frac{1}{23}", "\\frac{12}{3}", False), ("\\leftarrow", "arrow", False), ("1e99999999", "1", False),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", True),          # the row break stays
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 12 \\end{pmatrix}", False),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\2 \\end{pmatrix}", False)])
def test_answers_of_math_are_compared_as_text(a, b, same):
    assert (prompts.normal(a) == prompts.normal(b)) is same and prompts.normal(a) == prompts.normal(a)


def test_the_last_box_counts_with_the_braces_in_it():
    assert prompts.boxed("\\boxed{1} then \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}" and prompts.boxed("\\boxed{1} then \\fbox{2}") == "2"
    assert prompts.boxed("\\boxed{\\{x : x > 1 \\}}") == "\\{x : x > 1 \\}" and prompts.boxed("\\boxed{\\left\\{ 1 \\right.} so {") == "\\left\\{ 1 \\right."
    assert prompts.boxed("\\boxed{1") is None and prompts.boxed("none") is None


def test_endless_numbers_are_no_answer(tmp_path):
    p, = load(tmp_path, ROWS["GSM8K"][0])
    assert prompts.check(p, "9" * 10000) is False and prompts.normal("9" * 10000) == "9" * 10000


@pytest.mark.parametrize("text, message", [
    ('{"prompt": "a"}\n{"prompt": ', ":2: not JSON"), ('5', ":1: a row must be a JSON object"), ('[1]', ", object 1: a row must be a JSON object"), ('{"prompt": 5}', ":1: no text under"),
    ('{"x": 1}', ":1: no text under"), ("", "holds no prompts"), ("[]", "holds no prompts"), ('{"turns": [3, "a"]}', ":1: no text under"), ('{"turns": []}', ":1: no text"),
    ('{"prompt": "a", "answer": [1]}', ":1: 'answer' must be a text or a number"), ('{"prompt": "a", "answer": true}', ":1: 'answer' must be a text or a number"),
    ("[" * 100000, "a.jsonl: not JSON"), ('[{"prompt": "a"}, {"prompt": "b"', "a.jsonl: not JSON (Expecting ',' delimiter"), ('{"a": ' * 100000, ":1: not JSON"),
    ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", ":1: not JSON"),
    ('{"text": "a", "test_list": [1]}', ":1 is damaged: TypeError: sequence item 1: expected str"),
    ('{"text": "a", "test_list": "b"}', ":1: 'test_list' must be a list of tests"),
    ('{"turns": ["a"], "category": 1}', ":1 is damaged: AttributeError"),
    ('[{"text": "a"}, {"text": 3}]', ", object 2: no text under")])
def test_malformed_lines_are_named(tmp_path, text, message):
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError) as e:
        prompts.load_prompts(str(file))
    assert message in str(e.value) and str(file) in str(e.value) and "\n" not in str(e.value)


def test_arrays_byte_order_marks_and_gzip_are_read(tmp_path):
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "bä"}]
    lines, array = "\n".join(map(json.dumps, rows)), "\n" + json.dumps(rows, indent=2) + "\n"
    want = [(p.prompt, p.answer) for p in load(tmp_path, *rows)]
    for text in (lines, array):
        for name in ("b.json.GZ", "b.json.gz"):
            with gzip.open(tmp_path / name, "wt") as f:
                f.write(text)
            assert [(p.prompt, p.answer) for p in prompts.load_prompts(tmp_path / name)] == want
        for encoding in ("utf-8", "utf-8-sig"):
            (tmp_path / "b.json").write_text(text, encoding=encoding)
            with gzip.open(tmp_path / "b.json.gz", "wt", encoding=encoding) as f:
                f.write(text)
            for name in ("b.json", "b.json.gz"):
                assert [(p.prompt, p.answer) for p in prompts.load_prompts(str(tmp_path / name))] == want
    whole = (tmp_path / "b.json.gz").read_bytes()
    for damaged in (b"no gzip at all", whole[:-12], whole[:20] + b"\xff" * 20 + whole[40:]):
        (tmp_path / "c.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match="cannot read .*c.gz: "):
            prompts.load_prompts(str(tmp_path / "c.gz"))


OPTIONAL = ("answer", "solution", "reference", "category", "entry_point", "test_list", "input", "context", "turns", "id", "task_id")


def test_null_in_an_optional_field_is_absent(tmp_path):
    for name, (row, *_) in ROWS.items():
        nulls = {field: None for field in OPTIONAL if field not in {key.lower() for key in row}}
        assert load(tmp_path, {**nulls, **row}) == load(tmp_path, row), name
        given = [key for key in row if key.lower() in OPTIONAL and key != "turns"]
        for key in given:
            assert load(tmp_path, {**row, key: None}) == load(tmp_path, {k: v for k, v in row.items() if k != key}), (name, key)


def test_a_prompt_that_does_not_fit_is_named_by_its_number_and_id(toy, tmp_path):
    model, tokenizer = checkpoints.load(toy), Tokenizer.load(toy)
    for key, id, shown in (("task_id", "HumanEval/7", "HumanEval/7"), ("question_id", 81, "81"), ("ID", "a\x1b[2J", "a\x1b[2J"), ("other", 1, "")):
        some = load(tmp_path, {"prompt": "short"}, {"prompt": "word " * 600, key: id}, {"prompt": "word " * 700, key: 9})
        with pytest.raises(ValueError) as e:
            requests_of(some, tokenizer, model)
        assert str(e.value).startswith(f"prompt 2 {shown}".strip() + ": prompt of 6")
    file = tmp_path / "p.jsonl"
    r = outcome(decode, "--model", toy, "--prompts", file, "--max-new-tokens", 2)
    assert r.returncode == 2 and r.stderr.startswith("decode.py: prompt 2: ") and r.stderr.endswith(" exceed the context of 512\n")


def test_files_that_are_no_text_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff\xfe"}')
    with pytest.raises(ValueError, match="a.jsonl: .*byte 0xff in position 12"):
        prompts.load_prompts(str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match="cannot read .*none.jsonl: No such file"):
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

@pytest.mark.parametrize("family, names, answer, want", [
    ("ours", None, "so<|answer|>4<|eos|>", "<|bos|><|prompt|>2+2?\n<|think|>so<|answer|>4<|eos|><|prompt|>Sure?\n<|think|>"),
    ("Qwen3", ["<|im_start|>", "<|im_end|>", "<think>", "</think>"], "<think>\nhm\n</think>\n\nFour.<|im_end|>",
     "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"),
    ("Llama-3", ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "Four.<|eot_id|>",
     "<|begin_of_text|>" + "".join(f"<|start_header_id|>{who}<|end_header_id|>\n\n{text}" for who, text in (
         ("user", "2+2?<|eot_id|>"), ("assistant", "Four.<|eot_id|>"), ("user", "Sure?<|eot_id|>"), ("assistant", "")))),
    ("no template", [], "Four.", "2+2?\nFour.Sure?\n"),
])
def test_the_next_prompt_of_every_family(family, names, answer, want):
    """The ids of a conversation are those of its text in the family's template, without chains of thought that are past."""
    ours = Tokenizer.load(TARGET)
    added = [{"content": name, "id": 2041 + i, "special": True} for i, name in enumerate(ours.special if names is None else names)]
    t = Tokenizer(ours.encoding._mergeable_ranks, added, ours.encoding._pat_str, chat_template=CHATS.get(family) if names is not None else ours.chat_template, bos="<|begin_of_text|>")
    messages = [t.asked("2+2?\n"), {"role": "assistant", "content": t.special_ids(answer)}, t.asked("Sure?\n")]
    assert t.chat_ids(messages) == t.special_ids(want)
    if family == "Qwen3":
        assert t.answer_text(t.special_ids(answer)).strip() == "Four."


def test_special_tokens_of_a_prompt_stay_text():
    """Also where they are put together from the template and the text, or overlap."""
    t = Tokenizer.load(TARGET)
    said = {"role": "assistant", "content": t.encode("x\ue000<|eos|>")}
    assert t.decode(t.chat_ids([t.asked("a"), said])) == "<|bos|><|prompt|>a<|think|>x\ue000<|eos|><|eos|>"
    for text in ("<|eos|>", "a<|eos|><|think|>b", "<|<|eos|>eos|>", "\ue000<|eos|>"):
        ids = t.prompt_ids(text)
        assert t.decode(ids) == f"<|bos|><|prompt|>{text}<|think|>" and t.special["<|eos|>"] not in ids and ids.count(t.special["<|think|>"]) == 1


def test_code_has_no_verdict(tmp_path, toy):
    (tmp_path / "p.jsonl").write_text(json.dumps(EVAL) + "\n" + json.dumps(MBPP))
    decode.main(["--model", toy, "--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "5", "--json", str(tmp_path / "o.json")])
    with open(tmp_path / "o.json") as f:
        assert [x["correct"] for x in json.load(f)["requests"]] == [None, None]


@pytest.mark.parametrize("settings", [[], ["--sparsity", "2"]])
def test_the_short_texts_of_a_real_model_are_not_for_specgen(settings, toy, monkeypatch, capsys):
    """Also where its settings leave it out before. A quick run tries whatever is ready."""
    args = methods.settings(*settings, model=toy, cost="none", drafter=os.path.join(ROOT, "checkpoints", "prism"))
    monkeypatch.setattr(run, "observe", lambda study, args, model, tokenizer, how, names: names)
    for args.quick, ready in ((False, ["ngram"]), (True, ["ngram"] if settings else ["ngram", "specgen"])):
        assert run.run(args, checkpoints.load(toy), types.SimpleNamespace(ours=False)) == ready
        assert (run.LONGER in capsys.readouterr().out) != args.quick


def test_bench_leaves_out_drafters_of_another_target(toy, capsys):
    args = methods.settings(model=toy, cost="none", drafter=os.path.join(ROOT, "checkpoints", "prism"))
    assert run.suitable(args, checkpoints.load(toy)) == ["ngram", "specgen"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["draft", "prism", "eagle", "specdiff", "cdlm", "dlm"]
    assert all("is left out: " in line and "d_model of the drafter must be" in line for line in lines[1:3])
    assert all(f"{name} is left out: " in line for name, line in zip(("draft", "specdiff"), (lines[0], lines[3])))


# -- real files --------------------------------------------------------------------------------------------------------

def real(name):
    if not DATA or not os.path.exists(os.path.join(DATA, prompts.PROMPT_FILES[name][0])):
        pytest.skip(f"no {name} under MINISPEC_DATA")
    file = os.path.join(DATA, prompts.PROMPT_FILES[name][0])
    return prompts.load_named(name, DATA), [row for _, row in read_rows(file)]


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
    assert all(prompts.check(p, p.think + p.answer) is True and prompts.check(p, "1234567") is False for p in blocks["math_reasoning"])
    assert all(prompts.check(p, "x") is None for f, some in blocks.items() if f != "math_reasoning" for p in some)


def test_humaneval_is_read_and_not_judged():
    problems, rows = real("humaneval")
    assert len(problems) == 164 and all(prompts.check(p, row["canonical_solution"]) is None for p, row in zip(problems, rows))
