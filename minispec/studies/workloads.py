"""What the study `run` asks: {"workload/i": problem}, the first problem of every workload, then the second.

The small model gets held-out problems of the families that it was trained on, and GSM8K where a data folder
is given. A real one gets Spec-Bench's blocks, GSM8K, HumanEval and rewriting tasks, each in random order;
without a data folder questions, and two tasks about pages of a story that ships.
"""
import os
import random

from minispec.data import prompts, tasks
from minispec.tools.files import blame, read_rows

FIRST = 800             # seed of the first held-out problem used here
PAGE = 1200             # characters of the story in a prompt
SUMMARISE = "\n\nTell me in three sentences what happens on this page."
REWRITE = "Rewrite this page in the present tense and change nothing else.\n\n"
EDITS = ("Rewrite", "Edit", "Correct", "Change", "Convert the", "Improve")       # how such tasks begin


def problems_of(tokenizer, n, data=None, first=0):
    """{workload: n problems, from the first-th on, or the last ones where there are not so many}."""
    if tokenizer.ours:
        seeds = range(FIRST, FIRST + first + n)
        some = [tasks.make(family, seed, "heldout") for family in tasks.FAMILIES for seed in seeds]
        if data:
            some += prompts.load_named("gsm8k", data)
    elif data:
        some = [p for name in ("spec_bench", "gsm8k", "humaneval") for p in prompts.load_named(name, data)]
        some += edits(os.path.join(data, "instruct", "instruction-data.json"))
    else:
        story = prompts.story()
        pages = [story[i:i + PAGE] for i in range(0, len(story) - PAGE, PAGE)]
        some = [tasks.Problem("questions", q + "\n") for q in prompts.QUESTIONS]
        some += [tasks.Problem("story", page + SUMMARISE + "\n") for page in pages]
        some += [tasks.Problem("edit", REWRITE + page + "\n") for page in pages]
    out = {}
    for p in some:
        out.setdefault(p.family, []).append(p)
    for own in out.values():
        if data and not tokenizer.ours:
            random.Random(0).shuffle(own)                # a block of Spec-Bench begins with one kind
    return {family: own[first:first + n] or own[-n:] for family, own in out.items()}


def edits(file):
    """The rewriting tasks of an instruction file: an instruction, and the text that it is about."""
    out = []
    for where, row in read_rows(file):
        with blame(where):
            if row.get("input") and row.get("instruction", "").startswith(EDITS):
                out.append(tasks.Problem("edit", prompts.problem_of(row).prompt))
    return out


def numbered(tokenizer, n, data=None, first=0):
    """{"workload/i": problem} of n problems of each workload, from the first-th on."""
    problems = problems_of(tokenizer, n, data, first)
    return {f"{w}/{i}": own[i] for i in range(n) for w, own in problems.items() if i < len(own)}
