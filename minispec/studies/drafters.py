"""What bench.py measures of trained drafters: arms of the PRISM family, objectives of SpecDiff-2, what
several chains are worth. Studies as in run.py.

Accepted length is tau: tokens that a round commits, its own token included, summed over all rounds and
divided by their number. Intervals are bootstraps over prompts; differences between drafters are paired by
prompt.
"""
import glob
import itertools
import os
import re
import statistics
from collections import defaultdict
from functools import partial

import numpy as np
from tqdm import tqdm

from minispec.core.verify import Sampling
from minispec.studies import workloads
from minispec.studies.timing import engine_of, identical, race, ratio
from minispec.tools import checkpoints
from minispec.tools.answers import requests_of
from minispec.tools.files import read_rows

FIRST = 30              # of the problems of a workload: those before are used elsewhere
NEW = 192               # most tokens of an answer
WAYS = ["--depth 8 --tree 60", "--prompt-lookup 8"]            # of a drafter, besides chains of 5
REFERENCE = {"prism": "ttt1", "specdiff": "mdlm"}       # the arm that others are held against


# -- accepted lengths ------------------------------------------------------------------------------

def whole_rounds(way, model, args, batch, **changes):
    """The engine of a method whose chains and trees do not end early: chains have 5 drafts."""
    engine = engine_of(way, model, args, batch, depth=5, **changes)
    engine.planner.drafter.stop = 0.0
    return engine


def tau(prompts):
    """Committed tokens a round, of prompts (.., n, 2): how much was committed in how many rounds."""
    total = prompts.sum(-2)
    return total[..., 0] / total[..., 1]


def interval(prompts, other=None, draws=2000):
    """(low, high), 95 % of bootstrap resamples of the prompts, of tau; or, given another drafter's on the
    same prompts, of the ratio of both taus."""
    some = np.random.default_rng(0).integers(len(prompts), size=(draws, len(prompts)))
    values = tau(prompts[some])
    if other is not None:
        values = values / tau(other[some])
    return [float(x) for x in np.percentile(values, (2.5, 97.5))]


def accepted_lengths(engine, problems, tokenizer, temperature):
    """Decode the problems: (prompts (n, 2) as `tau` takes them, how often draft 1, 2, .. is
    accepted where those before it are)."""
    sampling = Sampling(temperature, rule="rejection")       # some losses are made for it
    requests = requests_of(problems, tokenizer, engine.model, NEW, sampling)
    answers = [g.steps for g in engine.generate(requests)]
    prompts = np.array([[sum(s.committed for s in steps), len(steps)] for steps in answers], float)

    steps = sum(answers, [])
    by_depth = []
    for depth in range(1, max(s.proposed for s in steps) + 1):
        tried = [s for s in steps if s.accepted >= depth - 1 and s.proposed >= depth]
        by_depth.append(sum(s.accepted >= depth for s in tried) / max(len(tried), 1))
    return prompts, by_depth


# -- arms ------------------------------------------------------------------------------------------

def prism_arms(args, model, tokenizer):
    """Accepted lengths of the trained arms of the PRISM family: of chains of 5, of trees as large as the
    papers', and with copies next to the chains."""
    return compare("prism", args, model, tokenizer, (0.0,), WAYS)


def specdiff_objectives(args, model, tokenizer):
    """Tokens a verification by training objective, one chain, at temperature 0 and 1."""
    return compare("specdiff", args, model, tokenizer, (0.0, 1.0))


def arm_of(folder):
    """(arm, number of prompts or 0) of a folder called ARM or ARM-PROMPTS; -sSEED at the end is one of
    several trainings."""
    name, n = re.fullmatch(r"(.+?)(?:-(\d+))?(?:-s\d+)?", folder).groups()
    return name, int(n or 0)


def compare(kind, args, model, tokenizer, temperatures, ways=()):
    """Every drafter of this kind in a folder of --arms, on the same held-out problems, at some temperatures;
    and on half of them, greedy and one request at a time, in some ways, which are options.

    Seeds of an arm are one: their tokens and rounds are added up prompt by prompt. An arm is held against
    the reference arm with as many training prompts.
    """
    there = sorted(glob.glob(os.path.join(glob.escape(args.arms or ""), "*")))
    folders = [folder for folder in there if checkpoints.kind_of(folder) == kind]
    if not folders:
        raise ValueError("this study compares trained drafters: --arms must be a folder with one folder each "
                         f"(train_{kind}.py), got {args.arms}")
    workload = workloads.problems_of(tokenizer, 4 if args.quick else 20, args.data, FIRST)
    problems = sum(workload.values(), [])

    # What is measured: name -> (options, temperature, requests at a time, problems).
    settings = {f"at_{t:g}": ("", t, 16, problems) for t in temperatures}
    settings |= {way: (way, 0.0, 1, problems[::2]) for way in ways}
    # Of each (arm, training prompts): what it is, and {setting: accepted lengths of each seed}.
    about, trained = {}, defaultdict(lambda: defaultdict(list))
    for folder in tqdm(folders, desc=kind):
        arm = arm_of(os.path.basename(folder))
        for setting, (way, temperature, batch, asked) in settings.items():
            engine = whole_rounds(f"{kind} {way}", model, args, batch, drafter=folder, tree=0, lookup=0)
            trained[arm][setting].append(accepted_lengths(engine, asked, tokenizer, temperature))
        drafter = engine.planner.drafter
        module = drafter.prism if kind == "prism" else drafter.drafter
        log = [row for _, row in read_rows(os.path.join(folder, "log.jsonl"))]
        about.setdefault(arm, {"parameters": module.n_params(), "log": log[-1], "curve": log})

    names = [name for name, _ in trained]
    reference = REFERENCE[kind] if REFERENCE[kind] in names else names[0]
    out = {}
    for name, n_prompts in sorted(about, key=lambda arm: (-arm[1], arm[0])):
        seeds, others = trained[name, n_prompts], trained[reference, n_prompts]
        record = {**about[name, n_prompts], "seeds": len(seeds["at_0"])}
        for setting, (*_, asked) in settings.items():
            record[setting] = join_seeds(seeds[setting], others[setting], [p.family for p in asked])
        out[f"{name}, {n_prompts} prompts" if n_prompts else name] = record
    return {"prompts": len(problems), "reference": reference, "ways": list(ways), "arms": out}


def join_seeds(seeds, others, families):
    """One record of the accepted lengths of all seeds of an arm; others: those of the reference arm, [] if
    there is none. families: the workload of every prompt."""
    prompts = sum(prompts for prompts, _ in seeds)
    by_depth = zip(*(shares for _, shares in seeds))                     # as far as all of them go
    out = {
        "tau": tau(prompts),
        "interval": interval(prompts),
        "by_workload": {w: tau(prompts[[f == w for f in families]]) for w in dict.fromkeys(families)},
        "by_depth": [statistics.mean(some) for some in by_depth],
    }
    if others:
        other = sum(prompts for prompts, _ in others)
        out["ratio"] = tau(prompts) / tau(other)
        out["ratio_interval"] = interval(prompts, other)
    return out


# -- chains ----------------------------------------------------------------------------------------

def specdiff_chains(args, model, tokenizer):
    """K chains of the shipped diffusion drafter by rule and draft temperature, target greedy and at
    temperature 1: tau, and speed-up over greedy plain decoding, one request at a time."""
    n = 1 if args.quick else 2
    problems = sum(workloads.problems_of(tokenizer, n, args.data, FIRST).values(), [])

    def build(way, temperature=0.0, rule="coupled"):
        requests = requests_of(problems, tokenizer, model, NEW, Sampling(temperature, rule=rule))
        return engine_of(way, model, args, 1), requests

    names = ("chains", "rule", "draft_temperature", "temperature")
    cells = list(itertools.product((1, 2, 4, 8), ("rejection", "selection", "walk"), (0.7, 1.0), (0.0, 1.0)))
    builders = {"ar": partial(build, "ar")}
    for cell in cells[:3] if args.quick else cells:
        chains, rule, draft_temperature, temperature = cell
        way = f"specdiff --k-drafts {chains} --draft-temperature {draft_temperature}"
        builders[cell] = partial(build, way, temperature, rule)
    runs = race(builders, n, "chains")
    plain = runs.pop("ar")
    return {"rows": [{
        **dict(zip(names, cell)),
        **ratio(timed, plain),
        "tau": timed[-1].tau,
        "identical": None if cell[-1] else identical(plain[-1], timed[-1]),
        "prompts": len(problems),
    } for cell, timed in runs.items()]}
