"""Shared parts of all studies: prompts, engines that are timed in turn, and files in results/.

A study is a function (settings, target, tokenizer) -> a dict that JSON can hold. It has the study's figures
and, under "table", the Markdown table of them for the pages; some studies have a second table, such as
"short". `--quick` is a tenth of the work. NAME.json holds the result of study NAME, and NAME.part the
finished cells of an interrupted study.
"""
import gc
import json
import os
import platform
import random
import re
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from minispec import ROOT
from minispec.core import cpu
from minispec.data import loops, mixture, prompts, tasks
from minispec.tools import checkpoints, methods
from minispec.tools.files import naming, read_json, write_json

FOLDER = f"{ROOT}results"
FIRST = 800             # seed of the first held-out problem
PAGE = 1200             # characters of the story in a prompt
SUMMARISE = "\n\nTell me in three sentences what happens on this page."
REWRITE = "Rewrite this page in the present tense and change nothing else.\n\n"
EDITS = ("Rewrite", "Edit", "Correct", "Change", "Convert the", "Improve")       # first words of such tasks
SAME = "{identical:d} of {prompts}"


# -- prompts ---------------------------------------------------------------------------------------

class LeftOut(ValueError):
    """A study for which this model has nothing."""


def problems_of(tokenizer, n, data=None, first=0):
    """{workload: n problems, starting with number `first`, or the last n if there are fewer}.

    The puzzle model gets held-out problems of the families that it was trained on, and GSM8K if there is a
    data folder. A real model gets Spec-Bench's blocks, GSM8K, HumanEval and rewriting tasks, each in random
    order; without a data folder it gets questions, and two tasks about pages of the story in minispec/data.
    """
    if tokenizer.is_puzzle_model:
        seeds = range(FIRST, FIRST + first + n)
        some = [tasks.make(family, seed, "heldout") for family in tasks.FAMILIES for seed in seeds]
        if data:
            some += prompts.load_named("gsm8k", data)
    elif data:
        some = [p for name in ("spec_bench", "gsm8k", "humaneval") for p in prompts.load_named(name, data)]
        some += edits(data)
    else:
        story = prompts.story()
        pages = [story[i:i + PAGE] for i in range(0, len(story) - PAGE, PAGE)]
        some = [tasks.Problem("questions", f"{q}\n") for q in prompts.QUESTIONS]
        some += [tasks.Problem("story", f"{page}{SUMMARISE}\n") for page in pages]
        some += [tasks.Problem("edit", f"{REWRITE}{page}\n") for page in pages]
    out = {}
    for p in some:
        out.setdefault(p.family, []).append(p)
    for own in out.values():
        if data and not tokenizer.is_puzzle_model:
            random.Random(0).shuffle(own)                # a block of Spec-Bench is sorted by kind
    return {family: own[first:first + n] or own[-n:] for family, own in out.items()}


def edits(data):
    """The rewriting tasks of the instruction file, those with an instruction and a text to rewrite. The
    drafters' training reads the same file, so these are the ones that it holds out."""
    file = "instruct/instruction-data.json"
    with naming(f"{data}/{file}"):
        rows = mixture.rows_of(Path(data), file)
        some = [f"{prompt}\n" for prompt, _ in rows if "\n" in prompt and prompt.startswith(EDITS)]
    return [tasks.Problem("edit", prompt) for prompt in some if tasks.is_heldout(prompt)]


# -- engines, timed in turn ------------------------------------------------------------------------

def engine_of(name, model, args, batch, **changes):
    """The engine of a method whose name may have options, like "prism --tree 8". args: the other settings,
    which `changes` override."""
    method, *options = shlex.split(name)
    settings = methods.settings(*options, **{**vars(args), **changes})
    return methods.make_engine(method, model, settings, batch)


def suitable(args, model, more=()):
    """The methods that run with this target and these settings, without diffusion models, then those of
    `more` (methods with options) whose method does. Prints one line for each method left out, with the
    reason."""
    fitting = []
    for name in methods.ready(args):
        if name in methods.DIFFUSION:
            continue
        try:
            methods.make_engine(name, model, args, 1)
            fitting.append(name)
        except ValueError as e:
            print(f"{name} is left out: {e}")
    return fitting + [name for name in more if name.split()[0] in fitting]


@dataclass
class Run:
    """One timed run: the results of an engine, without its cache and its graphs."""
    generations: list
    phases: dict            # seconds, with prompts, without capturing a GPU's graphs
    rates: list             # tokens/s of each request
    seen: object            # the result of `see`, see time_interleaved

    @property
    def tokens(self):
        return sum(len(g.token_ids) for g in self.generations)

    @property
    def seconds(self):
        return sum(self.phases.values())

    @property
    def decoding_rate(self):
        """Tokens/s without the time in which the target reads the prompts. A trained drafter's reading of
        them counts."""
        return self.tokens / (self.seconds - self.phases["prefill"])


def time_interleaved(names, build, repeats, desc, warm_up=True, see=None):
    """Run build(name), which returns (engine, new requests), for each of `names`, `repeats` times after one
    warm-up. The engines take turns: at batch 1 after every request, else after all of them. So a slow minute
    of the machine affects all of them. Returns {name: [Run of every repeat]}. see: a function of the engine
    whose result is kept in Run.seen."""
    runs = {name: [] for name in names}
    for repeat in tqdm(range(-warm_up, repeats), desc=desc, leave=False):
        waiting = {name: build(name) for name in names}                # an engine makes its cache later
        answers = {name: [] for name in names}                         # (generation, tokens/s)
        while waiting:
            for name in list(waiting):
                engine, requests = waiting[name]
                n = 1 if engine.batch_size == 1 else len(requests)
                answers[name] += answer(engine, requests[:n])
                del requests[:n]
                if requests:
                    continue
                generations, rates = map(list, zip(*answers[name]))
                if repeat >= 0:
                    runs[name].append(Run(generations, dict(engine.seconds), rates, see and see(engine)))
                del engine, waiting[name]
                gc.collect()                             # an engine and its scheduler hold each other
    return runs


def answer(engine, requests):
    """[(generation, tokens/s)] of each request, by the engine's clock. The time of a request starts when it
    enters the batch, which is when another request leaves it."""
    def clock():
        return sum(engine.seconds.values())

    entered = [clock()] * engine.batch_size
    left = {}
    for request, _ in engine.stream(requests):
        left[request] = clock()
    entered += sorted(left.values())
    return [(r.generation, len(r.generation.token_ids) / (left[r] - t)) for r, t in zip(requests, entered)]


# -- figures of runs -------------------------------------------------------------------------------

def speedups(runs, plain):
    """Median tokens/s of decoding, and median and range of the speed-ups, each repeat over the same repeat of
    the plain loop."""
    rates = [run.decoding_rate for run in runs]
    ratios = [rate / other.decoding_rate for rate, other in zip(rates, plain)]
    return {
        "tokens_per_second": statistics.median(rates),
        "speedup": statistics.median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
    }


def identical(a, b):
    """Number of answers of two runs with the same tokens."""
    return sum(x.token_ids == y.token_ids for x, y in zip(a.generations, b.generations))


def counts_of(engine, requests):
    """[[accepted drafts, committed tokens, rounds]] of each request. No chain ends early. A greedy answer
    ends where it begins to repeat itself; an answer of one token has no round."""
    engine.scheduler.drafter.min_confidence = 0.0
    answers = loops.generate(engine, requests)
    return [[sum(s.accepted for s in g.rounds), sum(s.committed for s in g.rounds), len(g.rounds)]
            for g in answers]


def per_round(counts):
    """The last but one column of counts (.., n, columns) per round, over all n requests."""
    total = counts.sum(-2)
    return total[..., -2] / np.maximum(total[..., -1], 1)


# -- files -----------------------------------------------------------------------------------------

def path(file):
    """The path of a file of results/."""
    return f"{FOLDER}/{file}"


def device_name(device="cpu"):
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if model := re.search(r"model name\s*: (.*)", cpu.DESCRIPTION):
        name = model[1]
    # The price of bf16 depends on this, and the processor's name does not always show it.
    products = " with bf16 products" if torch.bfloat16 in cpu.PACKED_TYPES else ""
    return f"{name}{products}, {torch.get_num_threads()} threads"


def dtype_name(model):
    return str(model.dtype).removeprefix("torch.")


def write(name, result, seconds, device="cpu", dtype=""):
    """Write NAME.json, with the command, machine and date of the measurement, and remove NAME.part."""
    part = path(f"{name}.part")
    # Of all runs, if the study was interrupted.
    seconds = max(seconds, read_json(part, {"seconds": 0})["seconds"])
    measured = {"device": device_name(device), "dtype": dtype, "torch": torch.__version__}
    # The inputs of `bounds` may have been measured elsewhere.
    measured |= {key: x for key, x in result.get("about", {}).items() if key in measured}
    write_json(path(f"{name}.json"), {
        "command": "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        **measured,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
        "result": result,
    })
    Path(part).unlink(missing_ok=True)


def each_kept(name, args, model, cells, measure, **more):
    """[measure(*cell) for every cell] of a long study. Each finished cell is written to NAME.part. A later
    run takes it from there if cells, settings, trained weights, target, dtype, machine and `more` are the
    same. With --quick no cells are kept."""
    settings = {k: v for k, v in vars(args).items() if k not in ("studies", "force", "pages")}
    # A training may have gone on meanwhile.
    trained = Path(args.drafter or methods.kept(f"{ROOT}checkpoints", args.model))
    weights = {str(file): file.stat().st_mtime for file in sorted(trained.rglob("*.safetensors"))}
    about = {
        **more,
        "all_cells": json.loads(json.dumps(cells)),
        "settings": settings,
        "weights": weights,
        "target": [checkpoints.fingerprint(model), dtype_name(model)],
        "machine": [device_name(args.device), torch.__version__],
    }
    part, done, spent = path(f"{name}.part"), [], 0
    if os.path.exists(part) and not args.quick:
        saved = read_json(part)
        with naming(part):
            if saved["about"] == about:
                done, spent = saved["cells"], saved["seconds"]

    started = time.perf_counter() - spent
    for cell in tqdm(cells[len(done):], desc=name):
        done.append(measure(*cell))
        if not args.quick:
            write_json(part, {"about": about, "cells": done, "seconds": time.perf_counter() - started})
    return done
