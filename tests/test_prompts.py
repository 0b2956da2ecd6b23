"""Prompts of the public formats: loading, checking, asking again. Real files where MINISPEC_DATA has them."""
import collections
import gzip
import itertools
import json
import os
import types
from unittest import mock

import pytest
from conftest import ROOT, outcome, refusal, refused, table, values

import decode
from minispec.data import prompts
from minispec.studies import run
from minispec.tools import checkpoints, methods
from compare_checkpoints import CHATS
from minispec.data.tokenizer import Tokenizer

DATA = os.environ.get("MINISPEC_DATA", "")
EVAL = {"task_id": "HumanEval/0", "prompt": "from math import pi\n\n\ndef inc(x: int) -> int:\n",
        "canonical_solution": "    return x + 1\n", "entry_point": "inc",
        "test": "def check(candidate):\n    assert candidate(1) == 2\n"}
MBPP = {"task_id": 2, "text": "Double a number.", "code": "def double(x):\n    return 2 * x",
        "test_list": ["assert double(4) == 8"], "test_setup_code": ""}
GSM8K = {"question": "2+2?", "answer": "<<2+2=4>>4 it is\n#### 1,004"}
MATH_500 = {"problem": "Half?", "solution": "It is \\boxed{\\frac{1}{2}}.", "answer": "\\frac{1}{2}"}
MATH = {"problem": "Set?", "level": "Level 1", "solution": "so \\boxed{\\left\\{1, \\sqrt2\\right\\}}"}
TRANSLATION = {"category": "translation", "turns": ["Translate"], "reference": ["Nicht"]}
REASONING = {"category": "math_reasoning", "turns": ["6?"], "reference": ["6\n#### 576"]}
STEPS = "\nPlease reason"
ROWS = [    # row, family, beginning of the prompt, answer, right texts, wrong texts
    (GSM8K, "gsm8k", "2+2?\n", "1004", ["so 7 and then $1,004.00.", "= 1004"],
     ["1004 or 5", "", "none", "100.4", "-1004", "9" * 10_000]),
    ({"question": "Is it?", "answer": "So\n#### yes"}, "gsm8k", "Is it?\n", "yes", ["yes"], ["no", "", "1"]),
    (MATH_500, "math", "Half?" + STEPS, "\\frac{1}{2}",
     ["\\boxed{3} no, $\\boxed{\\dfrac{1}{2}}$", "\\frac12", "\\boxed{\\tfrac 1 2}",
      "\\boxed{3} or \\fbox{\\frac{1}{2}}"],
     ["\\boxed{\\frac{1}{3}}", "\\boxed{2}", "half", "\\boxed{0.5}", "\\boxed{1/2}", "\\boxed{1e99999999}"]),
    (MATH, "math", "Set?" + STEPS, "\\left\\{1, \\sqrt2\\right\\}", ["\\boxed{\\{1,\\sqrt{2}\\}}"],
     ["\\boxed{\\{1\\}}", "\\boxed{"]),
    ({"prompt": "How many? \\boxed{}", "answer": 33}, "prompt", "How many? \\boxed{}\n", "33",
     ["\\boxed{033}", "33"], ["\\boxed{3}", "the 33", "\\boxed{33.0}"]),
    ({"ID": "2024-I-1", "Problem": "How?", "Solution": "..", "Answer": "025"}, "math", "How?" + STEPS, "025",
     ["\\boxed{25}"], ["\\boxed{26}"]),
    (EVAL, "humaneval", "from math import pi\n", "", [], []),
    (MBPP, "mbpp", "Double a number.\nYour code should pass these tests:\nassert double(4) == 8\n", "",
     [], []),
    ({"prompt": "Double.", "test_list": ["assert double(4) == 8"]}, "mbpp", "Double.\nYour", "", [], []),
    ({"category": "writing", "turns": ["Write.", "Again."]}, "mt_bench", "Write.\n", "", [], []),
    (REASONING, "math_reasoning", "6?\n", "576", ["it is 576."], ["57"]),
    (TRANSLATION, "translation", "Translate\n", "", [], []),
    ({"instruction": "Do.\n", "input": "Guten Tag"}, "prompt", "Do.\n\nGuten Tag\n", "", [], []),
    ({"instruction": "Name a bird.", "input": "", "output": "Owl"}, "prompt", "Name a bird.\n", "", [], []),
    ({"instruction": "Name a bird.", "text": "Name a bird. Owl"}, "prompt", "Name a bird.\n", "", [], []),
    ({"instruction": "When?", "context": "In 1872.\n"}, "prompt", "When?\n\nIn 1872.\n", "", [], []),
]


def load(tmp_path, *rows):
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return prompts.load_prompts(file)


@pytest.mark.parametrize("row, family, begins, answer, right, wrong", ROWS)
def test_formats(row, family, begins, answer, right, wrong, tmp_path):
    p, = load(tmp_path, row)
    assert (p.family, p.answer) == (family, answer)
    assert "<<" not in p.think and (row is not MATH or p.think == MATH["solution"] + "\n")
    assert p.prompt.startswith(begins)
    assert p.prompt.endswith("\n") and not p.prompt.endswith("\n\n")
    for text in right:
        assert prompts.check(p, text) is True, text
    for text in wrong:
        assert prompts.check(p, text) is False, text
    if not right:
        assert prompts.check(p, "anything") is None


def test_code_is_never_run(toy, tmp_path):
    """HumanEval and MBPP measure speed: no code of a model is executed, and there is no verdict."""
    left = tmp_path / "left"
    code = f"```python\ndef inc(x):\n    return x + 1\nopen({str(left)!r}, 'w')\nimport os\nos._exit(97)\n```"
    for problem in load(tmp_path, EVAL, MBPP):
        assert prompts.check(problem, code) is None
    out = tmp_path / "o.json"
    outcome(decode, f"--model {toy} --prompts {tmp_path}/p.jsonl --max-new-tokens 5 --json {out}")
    assert [x["correct"] for x in json.loads(out.read_text())["requests"]] == [None, None]
    assert not left.exists()


def test_numbers_may_have_the_thousands_commas_of_latex():
    for text in ("10080", "10,080", r"10,\!080", "10{,}080", r"10\,080"):
        assert prompts.last_number(rf"It is \boxed{{{text}}}.") == 10080
    assert prompts.last_number("2, 345") == 345


# Two answers, and whether they are the same.
ANSWERS = r"""
x^{2} | x^2 | yes
\text{Evelyn} | Evelyn | yes
\$18.90 | $18.90 | yes
\left( 3, \frac{\pi}{2} \right) | (3,\dfrac{\pi}{2}) | yes
10,\!080 | 10,080 | yes
6 - 5i | 6-5i | yes
p - q\; | p-q | yes
(1, 234) | (1234) | no
\frac{1}{23} | \frac{12}{3} | no
\leftarrow | arrow | no
1e99999999 | 1 | no
1,234 | 1234 | no
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix} | yes
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 12 \end{pmatrix} | no
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 1 \2 \end{pmatrix} | no
"""


@pytest.mark.parametrize("a, b, same", [*table(ANSWERS), ("9" * 10_000, "9", "no")])
def test_answers_of_math_are_compared_as_text(a, b, same):
    """The break between the rows of a matrix stays."""
    assert (prompts.normal(a) == prompts.normal(b)) is (same == "yes")


@pytest.mark.parametrize("text, content", table(r"""
    \boxed{1} then \boxed{\frac{1}{2}}. | \frac{1}{2}
    \boxed{1} then \fbox{2} | 2
    \boxed{\{x : x > 1 \}} | \{x : x > 1 \}
    \boxed{1 |
    none |
    \boxed{\left\{ 1 \right.} so { | \left\{ 1 \right.
"""))
def test_the_last_box_counts_with_the_braces_in_it(text, content):
    assert prompts.boxed(text) == (content or None)


# What a file holds, part of the line.
MALFORMED = """
5 | :1: a row must be a JSON object
[1] | , object 1: a row must be a JSON object
{"prompt": 5} | :1: no text under
{"x": 1} | :1: no text under
 | holds no prompts
[] | holds no prompts
{"turns": [3, "a"]} | :1: no text under
{"turns": []} | :1: no text
{"prompt": "a", "answer": [1]} | :1: 'answer' must be a text or a number
{"prompt": "a", "answer": true} | :1: 'answer' must be a text or a number
[{"prompt": "a"}, {"prompt": "b" | a.jsonl: not JSON (Expecting ',' delimiter
{"text": "a", "test_list": [1]} | :1 is damaged: TypeError: sequence item 1: expected str
{"text": "a", "test_list": "b"} | :1: 'test_list' must be a list of tests
{"turns": ["a"], "category": 1} | :1 is damaged: AttributeError
[{"text": "a"}, {"text": 3}] | , object 2: no text under
"""


@pytest.mark.parametrize("text, message", [
    *table(MALFORMED),
    ('{"prompt": "a"}\n{"prompt": ', ":2: not JSON"),
    ("[" * 100000, "a.jsonl: not JSON"), ('{"a": ' * 100000, ":1: not JSON"),
    ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", ":1: not JSON"),
    ('{"prompt": "\xff\xfe"}', "byte 0xff in position 12"),
], ids=range(20))
def test_malformed_files_are_named(text, message, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(text, "latin-1")
    with refused(message, file):
        prompts.load_prompts(file)
    with refused("Is a directory", tmp_path):
        prompts.load_prompts(tmp_path)


def test_arrays_byte_order_marks_and_gzip_are_read(tmp_path):
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "bä"}]
    want = load(tmp_path, *rows)
    for text in ("\n".join(map(json.dumps, rows)), "\n" + json.dumps(rows, indent=2) + "\n"):
        for name, encoding in itertools.product(("b.json", "b.json.gz", "b.json.GZ"), ("utf-8", "utf-8-sig")):
            whole = text.encode(encoding)
            (tmp_path / name).write_bytes(whole if name == "b.json" else gzip.compress(whole))
            assert prompts.load_prompts(tmp_path / name) == want
    whole = (tmp_path / "b.json.gz").read_bytes()
    for damaged in (b"no gzip at all", whole[:-12], whole[:20] + b"\xff" * 20 + whole[40:]):
        (tmp_path / "c.gz").write_bytes(damaged)
        with refused(f"cannot read {tmp_path}/c.gz: "):
            prompts.load_prompts(tmp_path / "c.gz")


OPTIONAL = set("""answer solution reference category entry_point test_list input context turns id
                  task_id""".split())


@pytest.mark.parametrize("row", [case[0] for case in ROWS])
def test_null_in_an_optional_field_is_absent(row, tmp_path):
    given = {key.lower(): key for key in row}
    nulls = dict.fromkeys(OPTIONAL - set(given))
    assert load(tmp_path, {**nulls, **row}) == load(tmp_path, row)
    for name in OPTIONAL & set(given) - {"turns"}:
        rest = {key: value for key, value in row.items() if key != given[name]}
        assert load(tmp_path, {**rest, given[name]: None}) == load(tmp_path, rest)


@pytest.mark.parametrize("key, id, shown", values(r"""
    "task_id" | "HumanEval/7" | " HumanEval/7"
    "question_id" | 81 | " 81"
    "ID" | "a\u001b[2J" | " a\\x1b[2J"
    "other" | 1 | ""
"""))
def test_a_prompt_that_does_not_fit_is_named_by_its_number_and_id(key, id, shown, toy, tmp_path):
    load(tmp_path, {"prompt": "short"}, {"prompt": "word " * 600, key: id}, {"prompt": "word " * 700, key: 9})
    line = refusal(decode, f"--model {toy} --prompts {tmp_path}/p.jsonl --max-new-tokens 2")
    assert line.startswith(f"prompt 2{shown}: prompt of 6") and line.endswith(" exceed the context of 512")
    load(tmp_path, {"prompt": "short"}, {"prompt": f"a{' ' * 100_001}b", key: id})
    line = refusal(decode, f"--model {toy} --prompts {tmp_path}/p.jsonl --max-new-tokens 2")
    assert line.startswith(f"prompt 2{shown}: a text with more than 100,000 spaces")


def test_missing_data_names_the_public_source(tmp_path):
    for name, source in prompts.PROMPT_FILES.items():
        for data in (None, tmp_path):
            with refused("--data DIR or set MINISPEC_DATA", *source):
                prompts.load_named(name, data)


# -- turns -----------------------------------------------------------------------------------------------

LLAMA = """\
<|begin_of_text|><|start_header_id|>user<|end_header_id|>

2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

Four.<|eot_id|><|start_header_id|>user<|end_header_id|>

Sure?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

"""
QWEN = """\
<|im_start|>user
2+2?<|im_end|>
<|im_start|>assistant
Four.<|im_end|>
<|im_start|>user
Sure?<|im_end|>
<|im_start|>assistant
"""
OURS = "<|bos|><|prompt|>2+2?\n<|think|>so<|answer|>4<|eos|><|prompt|>Sure?\n<|think|>"


@pytest.mark.parametrize("family, names, answer, want", [
    ("ours", "<|bos|> <|eos|> <|pad|> <|mask|> <|prompt|> <|think|> <|answer|>", "so<|answer|>4<|eos|>",
     OURS),
    ("Qwen3", "<|im_start|> <|im_end|> <think> </think>", "<think>\nhm\n</think>\n\nFour.<|im_end|>", QWEN),
    ("Llama-3", "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>", "Four.<|eot_id|>",
     LLAMA),
    ("no template", "", "Four.", "2+2?\nFour.Sure?\n"),
])
def test_the_next_prompt_of_every_family(family, names, answer, want, tokenizer):
    """A conversation in the family's template, without chains of thought of earlier answers."""
    template = {**CHATS, "ours": tokenizer.chat_template}.get(family)
    added = [{"content": name, "id": 2041 + i, "special": True} for i, name in enumerate(names.split())]
    t = Tokenizer(tokenizer.encoding._mergeable_ranks, added, tokenizer.encoding._pat_str,
                  chat_template=template, bos="<|begin_of_text|>")
    said = {"role": "assistant", "content": t.special_ids(answer)}
    assert t.chat_ids([t.asked("2+2?\n"), said, t.asked("Sure?\n")]) == t.special_ids(want)
    if family == "Qwen3":
        assert t.answer_text(t.special_ids(answer)).strip() == "Four."
        assert t.answer_text(t.special_ids("<think>\n2+2 is 4, so")) == ""


def test_special_tokens_of_a_prompt_stay_text(tokenizer):
    """Also if template and text together spell a name, or if names overlap."""
    said = {"role": "assistant", "content": tokenizer.encode("x\ue000<|eos|>")}
    shown = tokenizer.decode(tokenizer.chat_ids([tokenizer.asked("a"), said]))
    assert shown == "<|bos|><|prompt|>a<|think|>x\ue000<|eos|><|eos|>"
    for text in ("<|eos|>", "a<|eos|><|think|>b", "<|<|eos|>eos|>", "\ue000<|eos|>"):
        ids = tokenizer.prompt_ids(text)
        assert tokenizer.decode(ids) == f"<|bos|><|prompt|>{text}<|think|>"
        assert [ids.count(tokenizer.special[name]) for name in ("<|eos|>", "<|think|>")] == [0, 1]


@pytest.mark.parametrize("settings", [[], ["--sparsity", "2"]])
def test_the_short_texts_of_a_real_model_are_not_for_specgen(settings, toy, monkeypatch):
    """Also where its settings leave it out before. A quick run tries whatever is ready."""
    observe = mock.Mock(side_effect=InterruptedError)
    args = methods.settings(*settings, model=toy, cost="none", drafter=f"{ROOT}/checkpoints/prism")
    monkeypatch.setattr(run, "observe", observe)
    args.problems = None
    for args.quick, ready in ((False, ["ngram"]), (True, ["ngram"] if settings else ["ngram", "specgen"])):
        with pytest.raises(InterruptedError):
            run.run(args, checkpoints.load(toy), types.SimpleNamespace(is_puzzle_model=False))
        *_, names = observe.call_args.args
        assert names == ready


def test_bench_leaves_out_drafters_of_another_target(toy, capsys):
    args = methods.settings(model=toy, cost="none", drafter=f"{ROOT}/checkpoints/prism")
    assert run.suitable(args, checkpoints.load(toy)) == ["ngram", "specgen"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" is left out: ")[0] for line in lines] == ["draft", "prism", "eagle", "specdiff"]
    assert all("d_model of the drafter must be" in line for line in lines[1:3])


# -- real files ------------------------------------------------------------------------------------------

def real(name):
    file = f"{DATA}/{prompts.PROMPT_FILES[name][0]}"
    if not DATA or not os.path.exists(file):
        pytest.skip(f"no {name} under MINISPEC_DATA")
    return prompts.load_named(name, DATA)


@pytest.mark.parametrize("name, n", [("gsm8k", 1319), ("aime", 30), ("spec_bench", 480), ("humaneval", 164)])
def test_every_answer_of_a_public_file_is_right_and_another_wrong(name, n):
    """Code and free answers are not judged. Spec-Bench has six blocks."""
    problems = real(name)
    blocks = collections.Counter(p.family for p in problems)
    assert len(problems) == n and (name != "spec_bench" or set(blocks.values()) == {80} and len(blocks) == 6)
    for p in problems:
        verdict = True if p.answer else None
        for text in (f"{p.think} {p.answer}".strip(), f"It is \\boxed{{{p.answer}}}."):
            assert prompts.check(p, text) is verdict
        assert not prompts.check(p, f"\\boxed{{{p.answer}1}}")
