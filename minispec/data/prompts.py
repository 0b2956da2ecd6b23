"""Real prompts: one loader for the public formats, and a checker for each kind of answer.

    format                 fields                                    checked by
    GSM8K                  question, answer (ends in "#### 18")      the last number of the text
    MATH-500, MATH         problem, answer or solution               the last \\boxed{}, after `normal`
    AIME                   prompt or problem, answer                 the same
    HumanEval              prompt, test, entry_point                 nothing: the tests would have to be run
    MBPP, sanitized MBPP   text or prompt, test_list                 nothing
    MT-bench, Spec-Bench   turns, category, reference                the last number, if it has "####"
    Alpaca, Dolly          instruction, input or context             nothing

A file is JSON lines or one JSON array of objects; it may be gzipped (.gz) and begin with a byte-order mark.
Any other object with a prompt, question or instruction is read too; its `answer` is compared like MATH's. The
first of several turns is asked.

PROMPT_FILES has the sources of the files with a name. The others are at huggingface.co/datasets/
HuggingFaceH4/MATH-500, github.com/google-research/google-research (mbpp) and github.com/lm-sys/FastChat
(fastchat/llm_judge/data/mt_bench).

The papers use HumanEval and MBPP to measure speed. Code of a model is not run: that needs a real sandbox.
"""
import re
from pathlib import Path

from minispec import ROOT
from minispec.data.tasks import Problem
from minispec.tools.files import naming, read_rows

PROMPT_FILES = {    # name: (path under the data folder, public source)
    "gsm8k": ("gsm8k/test.jsonl", "github.com/openai/grade-school-math, grade_school_math/data"),
    "aime": ("aime/qwq_aime24.jsonl", "github.com/QwenLM/QwQ, eval/data (aime24.jsonl)"),
    "humaneval": ("humaneval/HumanEval.jsonl",
                  "github.com/openai/human-eval, data (unpack HumanEval.jsonl.gz)"),
    "spec_bench": ("spec_bench/question.jsonl", "github.com/hemingkx/Spec-Bench, data/spec_bench"),
}
# The categories of MT-bench are one block of Spec-Bench.
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
# Fields of a prompt, in order: `text` of Alpaca's rows holds the answer, too.
FIELDS = ("prompt", "question", "problem", "instruction", "text", "turns")
# The shipped text: three chapters of The Princess and the Goblin (George MacDonald, 1872), 4,400 tokens.
STORY = f"{ROOT}minispec/data/goblin.txt"
QUESTIONS = (
    "Why is the sky blue, and why are sunsets red?",
    "What should I look at when I buy a used bicycle?",
    "Explain to a child how a vaccine works.",
    "Write a short letter to a landlord about a broken heater.",
    "Name five uses of a brick and say what each one needs.",
    "What is the difference between weather and climate?",
    "Write a Python function that counts the vowels of a text.",
    "Plan a day in the mountains with two small children.",
)
STORY_QUESTIONS = (
    "Who is the princess in this story, and where does she live?",
    "What do the goblins look like, and where do they live?",
    "Describe the old lady in two sentences.",
    "What does the princess find at the top of the stairs?",
    "What does the house of the princess look like?",
    "What does the nurse say when the princess tells her about the old lady?",
    "What do you think happens next in this story?",
    "What could this story teach a child?",
)
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


# -- loading -------------------------------------------------------------------------------------------------

def story():
    """The three chapters."""
    return Path(STORY).read_text("utf-8")


def load_named(name, data):
    """The prompts of a public file, by name, under the data folder. ValueError says where to get the file."""
    path, source = PROMPT_FILES[name]
    file = f"{data or '.'}/{path}"
    if not Path(file).exists():
        raise ValueError(f"there is no {file}; get it from {source}, and give --data DIR or set "
                         "MINISPEC_DATA to the folder with it")
    return load_prompts(file)


def load_prompts(file):
    """Problems from a file in any of the formats above. ValueError names the file and the line or object."""
    problems = []
    for where, row in read_rows(file):
        with naming(where):
            problems.append(problem_of(row))
    if not problems:
        raise ValueError(f"{file} holds no prompts")
    return problems


def problem_of(row):
    """The Problem of one object; facts["check"] is the kind of check, facts["id"] the object's id."""
    row = {name.lower(): value for name, value in row.items() if value is not None}
    # The prompt is in the first of FIELDS that is there; the first one of several turns.
    turns = next((row[name] for name in FIELDS if row.get(name)), None)
    prompt = turns[0] if isinstance(turns, list) else turns
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("no text under " + ", ".join(f"'{name}'" for name in FIELDS))
    prompt, answer = prompt.rstrip("\n"), row.get("answer", "")
    family, think, check = "prompt", "", "math"
    # 1. The format.
    if "entry_point" in row:
        family = "humaneval"
    elif "test_list" in row:
        family = "mbpp"
        if not isinstance(row["test_list"], list):
            raise ValueError("'test_list' must be a list of tests")
        prompt += "\n".join(["\nYour code should pass these tests:", *row["test_list"]])
    elif "turns" in row:
        family = row.get("category", "turns").replace("/", "-")
        family = "mt_bench" if family in MT_BENCH else family
        # Only references with GSM8K's mark can be compared.
        answer = (row.get("reference") or [""])[0]
        answer = answer if "\n#### " in str(answer) else ""
    elif "problem" in row:
        family = "math"
        answer = row["answer"] if "answer" in row else boxed(row.get("solution", "")) or ""
        think = f"{row['solution']}\n" if row.get("solution") else ""
        if "\\boxed" not in prompt:
            prompt += f"\n{BOXED}"
    elif about := row.get("input") or row.get("context"):
        prompt += "\n\n" + about
    # 2. The answer.
    if isinstance(answer, (bool, list, dict)):
        raise ValueError("'answer' must be a text or a number")
    answer = str(answer)
    if "\n#### " in answer:
        # GSM8K: a chain of thought, with <<calculator>> marks that are removed, and the final answer.
        think, _, answer = re.sub(r"<<.*?>>", "", answer).rpartition("\n#### ")
        think += "\n"
        answer = answer.strip().replace(",", "")
        check = "number" if last_number(answer) is not None else check
        if "turns" not in row:
            family = "gsm8k"
    # id, task_id, question_id or unique_id.
    facts = {"check": check, "id": next((row[name] for name in row if name.endswith("id")), "")}
    return Problem(family, prompt.rstrip("\n") + "\n", think, answer, facts)


# -- checking ------------------------------------------------------------------------------------------------

def check(problem, text):
    """Whether a text solves a problem from a file; None if the file has no answer to compare with."""
    if not problem.answer:
        return None
    if problem.facts["check"] == "number":
        return last_number(text) == last_number(problem.answer)
    return normal(boxed(text) or text) == normal(problem.answer)


def last_number(text):
    """The last number of a text, with or without thousands' commas, also those of LaTeX, or None."""
    text = re.sub(r"(?<=\d)(?:,\\!|\{,\}|\\,)(?=\d{3})", ",", text)
    numbers = re.findall(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?", text)
    return float(numbers[-1].replace(",", "")) if numbers else None


# A text with closed braces, nested at most four deep; \{ and \} do not count.
CLOSED = r"(?:\\.|[^{}\\])*"
for _ in range(4):
    CLOSED = r"(?:\\.|[^{}\\]|\{%s\})*" % CLOSED


def boxed(text):
    """The content of the last \\boxed{..} or \\fbox{..} of a text, or None."""
    found = re.findall(r"\\(?:boxed|fbox)\{(%s)\}" % CLOSED, text)
    return found[-1] if found else None


# Marks that change only the look; group 1 is the text of \text, group 2 a character in braces. A row break \\
# of a matrix is kept.
LOOKS = (r"\\text\{([^{}]*)\}|(?<!\\)\{(\w)\}|(?<=\\)[dt](?=frac)|\\(?:left|right)(?![a-zA-Z])"
         r"|(?<!\\)\\[!,;]|\\?\$|^0+(?=\d)")


def normal(answer):
    """An answer of MATH without marks that change only its look: spaces, \\left, \\right, \\!, \\,, \\;, $,
    \\text, the d or t of \\dfrac and \\tfrac, braces around one character, leading zeros. Answers are
    compared as text: 0.5 is not \\frac{1}{2}, so a right answer can be missed, but no wrong one accepted."""
    return re.sub(LOOKS, r"\1\2", "".join(answer.split()))
