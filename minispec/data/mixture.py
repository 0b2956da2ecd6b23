"""The texts that SmolLM2's drafters are trained on, out of public data sets: one command.

    python -m minispec.data.mixture --data DATA --out mix

writes two files of JSON lines, each in one random order, so that any first N lines are a mixture:

    prompts.jsonl    prompts for the target to answer                   --prompt-file
    given.jsonl      prompts with answers by people or other models     --given

The options are those of train_prism.py, train_specdiff.py and minispec.data.rollouts.

DATA holds the sets by these names; a set that is not there is left out, and the command says so:

    gsm8k/train.jsonl                     github.com/openai/grade-school-math, grade_school_math/data
    reasoning_gym_traces/traces_correct.jsonl       github.com/open-thought/reasoning-gym-eval
    instruct/instruction-data.json        github.com/rasbt/LLMs-from-scratch, ch07
    marco_o1/CoT_demo.json                github.com/AIDC-AI/Marco-o1, data
    prompts/gpteacher.jsonl               github.com/teknium1/GPTeacher, Codegen and Roleplay; prompts only
    prompts/math_word_problems.jsonl      github.com/AGI-Edgerunners/LLM-Adapters, ft-training_set
    prompts/cot.jsonl                     github.com/google-research/FLAN, flan/v2/cot_data
    prompts/persona_chat.jsonl            github.com/google-research-datasets/Synthetic-Persona-Chat
    prompts/scitldr.jsonl                 github.com/allenai/scitldr, SciTLDR-A/train
    prompts/tldr.jsonl                    github.com/tldr-pages/tldr, pages
    standardebooks/*.txt                  github.com/standardebooks, a book each

Functions of Python's standard library and passages of the books become tasks of their own.
"""
import ast
import json
import random
import sysconfig
from pathlib import Path

from minispec.tools.files import naming, read_rows, write_text
from minispec.tools.script import Parser, run_main

ASKS = ("Summarize: {}", "Summarize the following text in a few sentences.\n\n{}",
        "{}\n\nWhat happens in this passage?", "Rewrite this text in simple words:\n{}",
        "Read the text and answer: who is it about, and what do they do?\n\n{}",
        "Passage: {}\n\nQuestion: what is the main point of the passage?\nAnswer:")
BOOKS = "standardebooks"
HELD_OUT = "princess-and-the-goblin"         # the book that benchmarks use
# set: (the most lines used, fields of the prompt, field of the answer)
SETS = {
    "gsm8k/train.jsonl": (9000, "question", "answer"),
    "reasoning_gym_traces/traces_correct.jsonl": (9000, "question", "response"),
    "instruct/instruction-data.json": (9000, "instruction input", "output"),
    "marco_o1/CoT_demo.json": (9000, "instruction", "response"),
    "prompts/gpteacher.jsonl": (9000, "prompt", None),
    "prompts/math_word_problems.jsonl": (9000, "prompt", "answer"),
    "prompts/cot.jsonl": (6000, "prompt", "answer"),
    "prompts/persona_chat.jsonl": (1000, "prompt", "answer"),        # long prompts, short answers
    "prompts/scitldr.jsonl": (9000, "prompt", "answer"),
    "prompts/tldr.jsonl": (9000, "prompt", "answer"),
}
LEAVE_OUT = "arithmetic/gsm_symbolic"        # a task of reasoning-gym made of GSM8K's test questions
MOST = 3000                 # functions used, and passages
LONGEST = 2_000             # characters of a prompt; a training text is cut at 1,536 tokens


def rows_of(data, name):
    """(prompt, answer or "") of a set. A set whose lines have no answer has prompts alone."""
    most, fields, answer = SETS[name]
    rows = [row for _, row in read_rows(data / name) if row.get("task") != LEAVE_OUT]
    for row in rows[:most]:
        prompt = "\n".join(row[field] for field in fields.split() if row.get(field))
        yield prompt, row.get(answer) or ""


def functions():
    """(signature and docstring, the whole function) of the standard library's functions."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(stdlib.rglob("*.py")):
        if {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(path.relative_to(stdlib).parts):
            continue
        text = path.read_text("utf-8", "replace")
        for f in ast.walk(ast.parse(text)):
            doc = isinstance(f, ast.FunctionDef) and ast.get_docstring(f)
            if doc and 40 <= len(doc) <= 900:
                code = ast.get_source_segment(text, f)
                head = f"def {f.name}({ast.unparse(f.args)}):\n    \"\"\"{doc}\"\"\""
                if len(code) <= 1800:
                    yield f"Write this Python function.\n\n{head}", code


def passages(folder, rng):
    """(a task on a passage, "") of the books in a folder; every fourth asks for what comes next, and has the
    book's own words as its answer."""
    for path in sorted(folder.glob("*.txt")):
        if HELD_OUT in path.name:
            continue
        with naming(path):
            text = path.read_text("utf-8")
        paragraphs = [p for p in text.split("\n\n") if len(p) > 80]
        while paragraphs:
            size, text = rng.randint(500, 1600), ""
            while paragraphs and len(text) + len(paragraphs[0]) < size:
                text += paragraphs.pop(0) + "\n\n"
            following = "\n\n".join(paragraphs[:2])
            del paragraphs[:rng.randint(4, 12)]
            if len(text) > 300:
                if rng.random() < 0.25 and following:
                    yield f"Continue this story.\n\n{text.strip()}", following[:1200]
                else:
                    yield rng.choice(ASKS).format(text.strip()), ""


def write(path, rows, rng):
    """JSON lines of rows (prompt, answer), each prompt once, in random order. Long prompts are left out."""
    rows = list({row[0]: row for row in rows if len(row[0]) <= LONGEST}.values())
    rng.shuffle(rows)
    lines = [json.dumps({"prompt": prompt, **({"answer": answer} if answer else {})}) + "\n"
             for prompt, answer in rows]
    write_text(path, "".join(lines))
    print(f"{path}: {len(rows):,} lines")


def main():
    p = Parser(__doc__)
    p.add_argument("--data", required=True, help="folder of the data sets")
    p.add_argument("--out", required=True, help="folder to write to")
    args = p.parse_args()
    data, out = Path(args.data), Path(args.out)
    if not data.is_dir():
        raise ValueError(f"there is no folder {data}")
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    rows = []
    for name in (*SETS, BOOKS):
        if not (data / name).exists():
            print(f"{data / name} is not there and left out")
        elif name != BOOKS:
            with naming(data / name):
                rows += rows_of(data, name)
    for some in (list(functions()), list(passages(data / BOOKS, rng))):
        rows += rng.sample(some, min(MOST, len(some)))
    write(out / "prompts.jsonl", [(prompt, "") for prompt, _ in rows], rng)
    write(out / "given.jsonl", [row for row in rows if row[1]], rng)


if __name__ == "__main__":
    run_main(main)
