"""Real prompts: one loader that knows the fields of the public formats, and a checker for each kind of
answer.

    format                 its fields                                checked by
    GSM8K                  question, answer (ends in "#### 18")      the last number of the text
    MATH-500, MATH         problem, answer or solution               the last \\boxed{}, after `normal`
    AIME                   prompt or problem, answer                 the same
    HumanEval              prompt, test, entry_point                 nothing: the tests would have to be run
    MBPP, sanitized MBPP   text or prompt, test_list                 nothing
    MT-bench, Spec-Bench   turns, category, reference                the last number, if the reference has one

A file holds JSON lines or one JSON array of objects; it may be gzipped (.gz) and begin with a byte-order
mark. Any other object with a prompt, question or instruction will do; its `answer` is compared like that of
MATH. Of several turns the first is asked.

The papers use HumanEval and MBPP to measure speed. Running what a model wrote needs a real sandbox, so it is
not done. """
import gzip
import json
import os
import re
import zlib
from fractions import Fraction

from minispec.data.tasks import Problem

PROMPT_FILES = {    # name: (path under the data folder, public source)
    "gsm8k": ("gsm8k/test.jsonl", "github.com/openai/grade-school-math, grade_school_math/data"),
    "math500": ("math500/test.jsonl", "huggingface.co/datasets/HuggingFaceH4/MATH-500"),
    "aime": ("aime/qwq_aime24.jsonl", "github.com/QwenLM/QwQ, eval/data (aime24.jsonl)"),
    "humaneval": ("humaneval/HumanEval.jsonl",
                  "github.com/openai/human-eval, data (unpack HumanEval.jsonl.gz)"),
    "mbpp": ("mbpp/mbpp.jsonl", "github.com/google-research/google-research, mbpp"),
    "mt_bench": ("mt_bench/question.jsonl", "github.com/lm-sys/FastChat, fastchat/llm_judge/data/mt_bench"),
    "spec_bench": ("spec_bench/question.jsonl", "github.com/hemingkx/Spec-Bench, data/spec_bench"),
}
# The categories of MT-bench are one block of Spec-Bench.
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
FIELDS = ("prompt", "question", "problem", "text", "turns", "instruction")       # where the prompt may be
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


# -- loading -------------------------------------------------------------------------------------------------

def load_named(name, data=None):
    """The prompts of a known public file under the data folder. ValueError says where to get the file."""
    path, source = PROMPT_FILES[name]
    if not data:
        raise ValueError(f"'{name}' is read from a data folder: give --data DIR or set MINISPEC_DATA, "
                         f"with {path} in it from {source}")
    file = os.path.join(data, path)
    if not os.path.exists(file):
        raise ValueError(f"{file} is not there; get it from {source}")
    return load_prompts(file)


def load_prompts(file):
    """Problems from a file in any of the formats above. ValueError names the file and the line or object."""
    problems = [_problem(row, where) for where, row in read_rows(file)]
    if not problems:
        raise ValueError(f"{file} holds no prompts")
    return problems


def read_rows(file):
    """[(where it is, for messages; the object)] of a file of JSON lines, or of one JSON array. ValueError
    names the file and the line or object that is wrong."""
    text = _read_text(file)
    if text.lstrip().startswith("["):
        rows = [(f"{file}, object {i}", row) for i, row in enumerate(_parse(text, file), 1)]
    else:
        lines = [(f"{file}:{i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        rows = [(where, _parse(line, where)) for where, line in lines]
    for where, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a JSON object is needed, this is a {type(row).__name__}")
    return rows


def _read_text(file):
    opener = gzip.open if str(file).endswith(".gz") else open
    try:
        with opener(file, "rt", encoding="utf-8-sig") as f:
            return f.read()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as e:
        raise ValueError(f"cannot read {file}: {getattr(e, 'strerror', None) or e}") from None


def _parse(text, where):
    """What a JSON text holds. NaN, Infinity and repeated keys, which Python's reader accepts, are refused."""
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{where}: not JSON ({e})") from None


def _no_constant(name):
    raise ValueError(f"{name} is no number of JSON")


def _once(pairs):
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"a key appears twice among {', '.join(key for key, _ in pairs)}")
    return row


def _problem(row, where):
    """The Problem of one object; facts["check"] says how an answer is checked."""
    row = {name.lower(): value for name, value in row.items()}
    prompt, answer = _prompt(row, where).rstrip("\n"), row.get("answer")
    family, think, check = "prompt", "", "math"
    # 1. Which format is it?
    if isinstance(row.get("test"), str) and isinstance(row.get("entry_point"), str):
        family, answer = "humaneval", None
    elif row.get("test_list") is not None:
        family, answer = "mbpp", None
        prompt += "\nYour code should pass these tests:\n" + "\n".join(_tests(row["test_list"], where))
    elif "turns" in row:
        family, answer = _category(row), _reference(row)
    elif isinstance(row.get("problem"), str):
        family = "math"
        if answer is None and isinstance(row.get("solution"), str):
            answer = boxed(row["solution"])
        if "\\boxed" not in prompt:
            prompt += "\n" + BOXED
    # 2. What is its answer?
    if isinstance(answer, str) and "\n#### " in answer:
        think, answer = split_gsm8k(answer)
        check = "number"
        if "turns" not in row:
            family = "gsm8k"
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float, type(None))):
        raise ValueError(f"{where}: 'answer' must be a text or a number")
    answer = "" if answer is None else str(answer)
    return Problem(family, prompt + "\n", think, answer, {"check": check})


def _prompt(row, where):
    """The first turn of those under the first of FIELDS."""
    turns = next((row[name] for name in FIELDS if row.get(name)), None)
    if not isinstance(turns, list):
        turns = [turns]
    if not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError(f"{where}: no text under " + ", ".join(f"'{name}'" for name in FIELDS))
    return turns[0]


def _tests(tests, where):
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise ValueError(f"{where}: 'test_list' must be a list of tests, at least one")
    return tests


def _category(row):
    category = row.get("category")
    return "mt_bench" if category in MT_BENCH else str(category or "turns").replace("/", "-")


def _reference(row):
    """The first reference answer, if it ends like those of GSM8K; other references cannot be compared
    with."""
    references = row.get("reference")
    first = references[0] if isinstance(references, list) and references else None
    return first if isinstance(first, str) and "\n#### " in first else None


def split_gsm8k(answer):
    """GSM8K's answer field into (chain of thought, final answer); its <<calculator>> marks are dropped."""
    think, _, final = re.sub(r"<<.*?>>", "", answer).rpartition("\n#### ")
    return think + "\n", final.strip().replace(",", "")


# -- checking ------------------------------------------------------------------------------------------------

def check(problem, text):
    """Whether a text solves a problem from a file; None if the file has no answer to compare with."""
    if not problem.answer:
        return None
    if problem.facts["check"] == "number":
        return last_number(text) is not None and last_number(text) == last_number(problem.answer)
    return normal(boxed(text) or text) == normal(problem.answer)


def last_number(text):
    """The last number of a text, with or without thousands' commas, as a Fraction; None if there is none."""
    numbers = re.findall(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?", text)
    if not numbers or len(numbers[-1]) >= 1000:
        return None
    return Fraction(numbers[-1].replace(",", ""))


def boxed(text):
    """What the last \\boxed{..} or \\fbox{..} of a text holds; None if there is none."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start)
    depth = 0
    for mark in re.finditer(r"\\.|[{}]", text[start:]):          # \{ and \} do not count
        if mark[0] == "{":
            depth += 1
        elif mark[0] == "}":
            depth -= 1
        if depth == 0:
            return text[start + 1:start + mark.start()]
    return None


def normal(answer):
    """An answer of MATH without what changes only its looks: spaces, \\left, \\right, \\!, \\,, \\;, $,
    \\text, the d or t of \\dfrac and \\tfrac, braces around one character, leading zeros. Texts are compared,
    numbers are not computed: 0.5 is not \\frac{1}{2} here, and the worst that this does is to miss a right
    answer."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", answer)
    text = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text)
    # A row break \\ of a matrix is matched first, so that it is kept whole.
    looks = r"\\\\|\\(?:left|right)(?![a-zA-Z])|\\[!,;]|\\?\$|\s"
    text = re.sub(looks, lambda mark: mark[0] if mark[0] == "\\\\" else "", text)
    text = re.sub(r"(?<!\\)\{(\w)\}", r"\1", text)
    return re.sub(r"^0+(?=\d)", "", text)
