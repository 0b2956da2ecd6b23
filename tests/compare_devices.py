"""The tokens of every method on a GPU, next to those on the CPU, in fp32:

    python tests/compare_devices.py                      # the puzzle model
    python tests/compare_devices.py --model smollm2

A line for each method, batch and temperature; exit code 1 if an answer differs. Two devices round
differently, so a near-tie of two logits may part two answers late.
"""
import sys

import root  # noqa: F401  before torch
import torch

from minispec.core.verify import Sampling
from minispec.data import tasks
from minispec.data.prompts import QUESTIONS
from minispec.data.tokenizer import Tokenizer
from minispec.tools import checkpoints, methods
from minispec.tools.answers import requests_of
from minispec.tools.script import Parser, check_device, run_main

NEW = 40                    # tokens of an answer
# method and options, as decode.py takes them
CASES = [
    "ar", "ngram", "draft", "prism", "prism --tree 15 --k 6", "eagle",
    "eagle --tree 15 --prompt-lookup 24", "specdiff", "specdiff --k-drafts 4", "specgen",
    "specgen --delayed", "specgen --select pillar",
    "specgen --select window", "specgen --admission offload --cache-tokens 1024",
    "specgen --admission preempt --delayed --cache-tokens 1024", "adaptive", "cdlm", "dlm",
]
RUNS = ((1, 0.0), (6, 0.0), (6, 0.8))       # requests, temperature


def answers(case, device, args, batch, temperature):
    name, *options = case.split()
    settings = methods.settings(*options, "--device", device, "--model", args.model, "--min-budget", "16")
    # adaptive must choose by the same prices on both devices.
    settings.cost = methods.costs_of(methods.settings("--device", "cpu", "--model", args.model))
    folder = methods.folder_of(name, settings) if name in methods.DIFFUSION else args.model
    model = checkpoints.load(folder, device, torch.float32)
    tokenizer = Tokenizer.load(folder)
    problems = [tasks.Problem("prompt", text) for text in QUESTIONS[:batch]]
    if tokenizer.is_puzzle_model:
        problems = [tasks.make(family, 5, "heldout", 5) for family in (*tasks.FAMILIES, "story")[:batch]]
    new = 64 if name in methods.DIFFUSION else NEW
    engine = methods.make_engine(name, model, settings, batch)
    requests = requests_of(problems, tokenizer, model, new, Sampling(temperature, seed=3))
    return [g.token_ids for g in engine.generate(requests)]


def main():
    p = Parser(__doc__)
    p.add_argument("--model", default=methods.SHIPPED, help="target (default %(default)s)")
    args = p.parse_args()
    check_device("cuda")
    differ = 0
    for case in CASES:
        name = case.split()[0]
        settings = methods.settings("--device", "cpu", "--model", args.model)
        if name != "ar" and name not in methods.ready(settings):
            print(f"{case}: this model has nothing for it")
            continue
        for batch, temperature in RUNS:
            want, got = (answers(case, device, args, batch, temperature) for device in ("cpu", "cuda"))
            same = sum(a == b for a, b in zip(want, got))
            differ += batch - same
            print(f"{case}, batch {batch}, T {temperature:g}: {same} of {batch} answers are the same",
                  flush=True)
    sys.exit(bool(differ))


if __name__ == "__main__":
    run_main(main)
