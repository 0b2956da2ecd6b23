"""Acceptance rules: are they lossless, and how many drafts do they accept?

    lossless    answers of every method that equal those of plain decoding, in fp32 and in bf16
    rules       accepted drafts and tau of every drafter by rule, chain or tree, and temperature
"""
from dataclasses import replace
from functools import cache, partial
from itertools import product

import numpy as np
import torch

from minispec.core.verify import Sampling
from minispec.studies.results import counts_of, each_kept, engine_of, per_round, problems_of, suitable
from minispec.tools import checkpoints, methods
from minispec.tools.answers import requests_of, tie_gap
from minispec.tools.intervals import with_range
from minispec.tools.markdown import table, texts

# -- losslessness ----------------------------------------------------------------------------------

# Options that change which rows share a forward, or which drafts are verified.
VARIANTS = [
    "specgen --delayed",
    "specgen --schedule lockstep",
    "specgen --select pillar",
    "specgen --select window",
    "specgen --admission preempt --cache-tokens 2000",
    "specgen --admission offload --cache-tokens 2000",
    "eagle --tree 8",
    "prism --tree 8",
    "specdiff --k-drafts 3",
    # Batches of ten requests share the rows.
    *(f"{name} --prompt-lookup 80" for name in methods.TRAINED),
]
# Sampling settings, and the batch size.
DRAWN = {
    "greedy": (Sampling(), 10),
    "t065": (Sampling(0.65), 17),
    "t1": (Sampling(1.0), 8),
    "top": (Sampling(1.0, 50, 0.9), 1),
}
LONGEST = 400           # tokens of a real model's prompts, because prefill takes longer than decoding
LOSSLESS = {
    "method": "{method}",
    "dtype": "{dtype}",
    "identical to autoregressive": "{greedy:d} of {prompts}",
    "T = 0.65": "{t065:d} of {prompts}",
    "T = 1": "{t1:d} of {prompts}",
    "top-p 0.9, top-k 50": "{top:d} of {prompts}",
    "largest top-2 gap at a difference": "{largest_tie_gap:.3g}",
}


def lossless(args, model, tokenizer):
    """Greedy and sampled answers of every method next to plain decoding's. In fp32 they must be identical. In
    bf16, without the methods' options, the number of rows changes rounding, so a first difference must be at
    a near-tie."""
    new, some = (160, 10) if tokenizer.is_puzzle_model else (48, 4)
    problems = short_prompts(tokenizer, 2 if args.quick else some, args.data)
    names = suitable(args, model, VARIANTS)

    @cache
    def target(dtype):
        return checkpoints.load(args.model, args.device, getattr(torch, dtype))

    def answers(name, dtype, drawn):
        sampling, batch = DRAWN[drawn]
        some = problems if dtype == "float32" else problems[::2]
        requests = requests_of(some, tokenizer, target(dtype), new, sampling)
        return engine_of(name, target(dtype), args, batch).generate(requests)

    plain = cache(partial(answers, "ar"))

    def measured(dtype, name):
        row, gaps = {"method": name, "dtype": dtype}, []
        for drawn, (sampling, _) in DRAWN.items():
            pairs = list(zip(plain(dtype, drawn), answers(name, dtype, drawn)))
            row[drawn] = sum(a.token_ids == b.token_ids for a, b in pairs)
            row["prompts"] = len(pairs)
            gaps += [tie_gap(target(dtype), a.prompt_ids, a.token_ids, b.token_ids, replace(sampling, seed=i))
                     for i, (a, b) in enumerate(pairs)]
        return {**row, "largest_tie_gap": max(gaps)}

    cells = [("float32", name) for name in names]
    cells += [("bfloat16", name) for name in names if name in methods.METHODS]
    rows = each_kept("lossless", args, model, cells, measured)
    return {"rows": rows, "about": {"dtype": "float32 and bfloat16"}, "table": table(rows, LOSSLESS)}


def short_prompts(tokenizer, n, data, first=0):
    """n problems of each workload from number `first` on; of a real model's, those with at most LONGEST
    tokens."""
    workloads = problems_of(tokenizer, n, data, first)
    return [p for p in sum(workloads.values(), [])
            if tokenizer.is_puzzle_model or len(tokenizer.prompt_ids(p.prompt)) <= LONGEST]


# -- acceptance ------------------------------------------------------------------------------------

FIRST = 30              # first problem of a workload; a short workload gives its last problems
NEW = 96                # tokens of an answer at most
BATCH = 16
RULES = ("rejection", "coupled", "point-mass")
TEMPERATURES = (0.65, 1.0)
# Chains of 5 drafts, and trees of 8.
DRAFTS = (
    "ngram --k 5",
    "prism --k 5",
    "prism --tree 8",
    "eagle --k 5",
    "eagle --tree 8",
    "specdiff --k 5",
    "specdiff --k 4 --k-drafts 2",
    "specgen --k 5",
)


def rules(args, model, tokenizer):
    """Accepted drafts per round and tau, each with a 95 % interval over prompts, of every drafter with chains
    of 5 and trees of 8, by acceptance rule and temperature, on the same prompts. Drafters do not end a chain
    early. The drafts of PRISM's and EAGLE's trees are not sampled, so under rejection the walk verifies them;
    SpecDiff's chains are verified in turn."""
    some = 8 if tokenizer.is_puzzle_model else 3
    problems = short_prompts(tokenizer, 1 if args.quick else some, args.data, FIRST)
    fitting = suitable(args, model)
    cells = [cell for cell in product(DRAFTS, TEMPERATURES, RULES) if cell[0].split()[0] in fitting]

    def measured(name, temperature, rule):
        requests = requests_of(problems, tokenizer, model, NEW, Sampling(temperature, rule=rule))
        counts = counts_of(engine_of(name, model, args, BATCH), requests)
        found = {"method": name, "temperature": temperature, "rule": rule, "prompts": len(problems),
                 "counts": counts}
        for i, figure in enumerate(("accepted", "tau")):
            found |= with_range(figure, per_round, np.array(counts)[:, [i, 2]])
        return found

    rows = each_kept("rules", args, model, cells, measured)
    return {"rows": rows, "table": texts(rules_table(rows))}


def rules_table(rows):
    """A line {head: text} for each method and temperature, with two columns for each rule."""
    lines = {}
    for x in rows:
        about = {"drafter": x["method"], "T": f"{x['temperature']:g}"}
        line = lines.setdefault(tuple(about.values()), about)
        for figure in ("accepted", "tau"):
            low, high = x[f"{figure}_range"]
            line[f"{figure}, {x['rule']}"] = f"{x[figure]:.2f} ({low:.2f}-{high:.2f})"
    return list(lines.values())
