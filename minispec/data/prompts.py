"""Real prompts: one loader that knows the fields of the public formats, and a checker for each kind of answer.

| format | its fields | checked by |
|---|---|---|
| GSM8K | question, answer (ends in "#### 18") | the last number of the text |
| MATH-500, MATH | problem, answer or a solution with \\boxed{} | the last \\boxed{}, after `normal` |
| AIME | prompt or problem, answer | the same |
| HumanEval | prompt, test, entry_point | running its tests |
| MBPP, sanitized MBPP | text or prompt, test_list | running its tests |
| MT-bench, Spec-Bench | turns, category, reference | the last number, where the reference has one (math_reasoning); else nobody |

Any other JSON line with a prompt, question or instruction will do; `answer` is compared like that of MATH. Of several turns, the
next is asked after the model's own answer to the one before (answers.converse).

Running tests runs what a model wrote. `passes` gives it a process, a folder, ten seconds and a limit of memory, file size and
processes; that stops accidents, not malice. So it is done only where the user asks for it (`decode.py --run-code`).
"""
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from fractions import Fraction

from minispec.data.tasks import Problem

PROMPT_FILES = {    # name: (path under the data folder, public source)
    "gsm8k": ("gsm8k/test.jsonl", "github.com/openai/grade-school-math, grade_school_math/data"),
    "math500": ("math500/test.jsonl", "huggingface.co/datasets/HuggingFaceH4/MATH-500"),
    "aime": ("aime/qwq_aime24.jsonl", "github.com/QwenLM/QwQ, eval/data (aime24.jsonl)"),
    "humaneval": ("humaneval/HumanEval.jsonl", "github.com/openai/human-eval, data (unpack HumanEval.jsonl.gz)"),
    "mbpp": ("mbpp/mbpp.jsonl", "github.com/google-research/google-research, mbpp"),
    "mt_bench": ("mt_bench/question.jsonl", "github.com/lm-sys/FastChat, fastchat/llm_judge/data/mt_bench"),
    "spec_bench": ("spec_bench/question.jsonl", "github.com/hemingkx/Spec-Bench, data/spec_bench"),
}
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")      # one block of Spec-Bench
FIELDS = ("prompt", "question", "problem", "text", "turns", "instruction")       # where the prompt may stand
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


# -- loading -----------------------------------------------------------------------------------------------------------

def load_named(name, data=None):
    """The prompts of a known public file under the data folder. ValueError says where to get the file."""
    path, source = PROMPT_FILES[name]
    if not data:
        raise ValueError(f"'{name}' is read from a data folder: give --data DIR or set MINISPEC_DATA, with {path} in it from {source}")
    file = os.path.join(data, path)
    if not os.path.exists(file):
        raise ValueError(f"{file} is not there; get it from {source}")
    return load_prompts(file)


def load_prompts(file):
    """Problems from JSON lines in any of the formats above. ValueError names file and line."""
    problems = [_problem(row, f"{file}:{number}", number) for number, row in read_rows(file)]
    if not problems:
        raise ValueError(f"{file} holds no prompts")
    return problems


def read_rows(file):
    """[(line number, the object in it)] of a file of JSON lines. ValueError names file and line."""
    rows = []
    try:
        with open(file, encoding="utf-8") as f:
            lines = f.read().split("\n")
    except FileNotFoundError:
        raise ValueError(f"no prompt file {file}") from None
    except OSError as e:
        raise ValueError(f"cannot read {file}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ValueError(f"cannot read {file}: not UTF-8 text ({e.reason} at byte {e.start})") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append((number, json.loads(line)))
            except json.JSONDecodeError as e:
                raise ValueError(f"{file}:{number}: not a JSON line ({e.msg} at column {e.colno})") from None
            except (ValueError, RecursionError):         # a number of thousands of digits; brackets without end
                raise ValueError(f"{file}:{number}: not JSON that can be read") from None
            if not isinstance(rows[-1][1], dict):
                raise ValueError(f"{file}:{number}: a JSON object is needed, this is a {type(rows[-1][1]).__name__}")
    return rows


def _problem(row, where, number):
    """The Problem of one line: the first turn as its prompt, `check` and what the checker needs as its facts."""
    row = {name.lower(): value for name, value in row.items()}
    turns = next((row[name] for name in FIELDS if row.get(name)), None)
    turns = turns if isinstance(turns, list) else [turns]
    if not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError(f"{where}: no text under " + ", ".join(f"'{name}'" for name in FIELDS))
    prompt, think, answer, answer_field = turns[0].rstrip("\n"), "", row.get("answer"), row.get("answer")
    strings = lambda *names: all(isinstance(row.get(name), str) for name in names)
    family, facts = "prompt", {"check": "math"}
    if strings("test", "entry_point"):
        family, facts = "humaneval", {"check": "code", "before": turns[0], "entry": row["entry_point"], "after": f"{row['test']}\ncheck({row['entry_point']})"}
    elif isinstance(row.get("test_list"), list):
        tests, setup = row["test_list"], [*(row.get("test_imports") or []), row.get("test_setup_code") or ""]
        if not all(isinstance(t, str) for t in tests + setup):
            raise ValueError(f"{where}: tests must be texts")
        family, facts = "mbpp", {"check": "code", "before": "\n".join(setup), "entry": None, "after": "\n".join(tests)}
        prompt += "\nYour code should pass these tests:\n" + "\n".join(tests)
    elif "turns" in row:
        reference = row.get("reference")
        family = "mt_bench" if row.get("category") in MT_BENCH else str(row.get("category") or "turns").replace("/", "-")
        answer_field = reference[0] if isinstance(reference, list) and reference and isinstance(reference[0], str) and "\n#### " in reference[0] else None
    elif strings("problem"):
        family, answer_field = "math", boxed(row["solution"]) if answer is None and strings("solution") else answer
    if isinstance(answer_field, str) and "\n#### " in answer_field:
        think, answer_field = split_gsm8k(answer_field)
        family, facts = family if "turns" in row else "gsm8k", {"check": "number"}
    if family == "math" and "\\boxed" not in prompt:
        prompt += "\n" + BOXED
    if not isinstance(answer_field, (str, int, float, type(None))):
        raise ValueError(f"{where}: 'answer' must be a text or a number")
    known = "tests" if facts["check"] == "code" else "" if answer_field is None else str(answer_field)
    return Problem(family, prompt + "\n", think, known, seed=number, facts=facts, turns=turns[1:])


def split_gsm8k(answer):
    """GSM8K's answer field into (chain of thought, final answer); its <<calculator>> marks are dropped."""
    think, _, final = re.sub(r"<<.*?>>", "", answer).rpartition("\n#### ")
    return think + "\n", final.strip().replace(",", "")


# -- checking ----------------------------------------------------------------------------------------------------------

def check(problem, text, run_code=False):
    """Whether a text solves a problem from a file; None where nobody knows, or where code would have to run and may not."""
    kind = problem.facts["check"]
    if not problem.answer or kind == "code" and not run_code:
        return None
    if kind == "code":
        return passes(program(problem.facts, text))
    if kind == "number":
        return last_number(text) is not None and last_number(text) == last_number(problem.answer)
    return normal(boxed(text) or text) == normal(problem.answer)


def last_number(text):
    """The last number of a text, with or without thousands' commas, as a Fraction; None for none."""
    numbers = re.findall(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?", text)
    return Fraction(numbers[-1].replace(",", "")) if numbers and len(numbers[-1]) < 1000 else None


def boxed(text):
    """What stands in the last \\boxed{..} of a text; None for none."""
    start, depth = text.rfind("\\boxed{"), 0
    for i in range(start + 6, len(text) if start >= 0 else 0):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + 7:i]
    return None


def normal(answer):
    """An answer of MATH in a form in which equal ones are mostly written alike: a Fraction where it is a number, else its LaTeX without
    spaces, units, sizes of brackets and the like."""
    text = re.sub(r"\\(?:left|right)(?![a-z])|\\[!,;: ]|\^\{?\\circ\}?|\\?[%$]", "", answer)
    text = re.sub(r"\\(?:text|textbf|mbox|mathrm)\s*\{([^{}]*)\}", r"\1", re.sub(r"\\[dt]frac", r"\\frac", text))
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text))
    text = re.sub(r"^[a-zA-Z]=", "", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", re.sub(r"\s+", "", text))).rstrip(".")
    number = re.sub(r"^(-?)\\frac\{(-?\d+)\}\{(\d+)\}$", r"\1\2/\3", text)
    try:
        return Fraction(number)
    except (ValueError, ZeroDivisionError):
        return text


def program(facts, text):
    """The code to run: a fenced block or the text itself; whole functions, or what continues the prompt; then the tests."""
    fenced = re.search(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", text, re.S)
    code, entry = fenced[1] if fenced else text, facts["entry"]
    if entry and not re.search(rf"^def {re.escape(entry)}\b", code, re.M):
        code = facts["before"] + re.split(r"\n(?=\S)", code, maxsplit=1)[0]      # a continuation ends where its indent does
    else:
        code = facts["before"] + "\n" + code
    return f"{code}\n{facts['after']}\n"


SECONDS, PASSED = 10, 97
LIMITS = {"CPU": SECONDS, "AS": 2 << 30, "FSIZE": 1 << 20, "NPROC": 0, "CORE": 0}      # of time, memory, a file, processes (root's are not counted)
RUNNER = f"""import os, resource, runpy, sys
for name, most in {LIMITS}.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
runpy.run_path(sys.argv[1], run_name="solution")
os._exit({PASSED})"""


def passes(source):
    """Whether a program runs to its end: in a Python process of its own, with an empty environment, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "solution.py"), "w", encoding="utf-8", errors="replace") as f:
            f.write(source)
        p = subprocess.Popen([sys.executable, "-I", "-c", RUNNER, "solution.py"], cwd=folder, env={}, stdin=subprocess.DEVNULL,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            return p.wait(SECONDS) == PASSED
        except subprocess.TimeoutExpired:
            return False
        finally:
            try:
                os.killpg(p.pid, signal.SIGKILL)                 # and whatever it started
            except ProcessLookupError:
                pass
            p.wait()
