"""Why two timings of one loop may differ several times over: the plain loop with one thread and with two,
alone and next to a process that keeps one core busy.

    python tests/busy_core.py           # writes results/baseline.json

Greedy decoding of four problems with the shipped target, one after the other, fp32; the median and the range
of REPEATS runs, all settings in turn. On a machine with other guests "alone" is what it says only if they
sleep.
"""
import contextlib
import subprocess
import sys
import time

import root  # noqa: F401  before torch
import torch

from minispec.data import tasks
from minispec.data.tokenizer import Tokenizer
from minispec.studies import results
from minispec.tools import checkpoints, methods
from minispec.tools.answers import requests_of
from shown import lines, spread

REPEATS = 2
SETTINGS = {"2 threads, alone": (2, False), "2 threads, another process on one core": (2, True),
            "1 thread, another process on one core": (1, True), "1 thread, alone": (1, False)}
BUSY = "import os; os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})\nwhile True: pass"


@contextlib.contextmanager
def another_process():
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main():
    started = time.perf_counter()
    model, tokenizer = checkpoints.load(methods.SHIPPED, "cpu"), Tokenizer.load(methods.SHIPPED)
    problems = [tasks.make("trace", 800 + i, "heldout") for i in range(4)]
    rates = {name: ([], []) for name in SETTINGS}
    for name, (threads, other) in [*SETTINGS.items()] * REPEATS:
        torch.set_num_threads(threads)
        engine = methods.make_engine("ar", model, methods.settings(), 1)
        with another_process() if other else contextlib.nullcontext():
            answers = engine.generate(requests_of(problems, tokenizer, model, 160))
        tokens, seconds = sum(len(g.token_ids) for g in answers), sum(engine.seconds.values())
        for some, spent in zip(rates[name], (seconds, seconds - engine.seconds["prefill"])):
            some.append(tokens / spent)
    rows = [f"{name} | {spread(whole)} | {spread(decoding)}" for name, (whole, decoding) in rates.items()]
    head = "plain loop | tokens/s, median (range) | without reading prompts"
    result = {"rates": rates, "table": lines(head, rows)}
    print(result["table"])
    results.write("baseline", result, time.perf_counter() - started)


if __name__ == "__main__":
    main()
