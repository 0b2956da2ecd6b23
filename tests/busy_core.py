"""Why two timings of one loop may differ several times over: the plain loop with one thread and with two, alone and next to a process that
keeps one core busy.

    python tests/busy_core.py           # writes results/baseline.json

Greedy decoding of four problems with the shipped target, one after the other, fp32; the median and the range of REPEATS
runs, all settings in turn. On a machine with other guests "alone" is what it says only if they sleep.
"""
import os
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import minispec  # noqa: E402, F401
import torch  # noqa: E402

from minispec.data import tasks  # noqa: E402
from minispec.data.tokenizer import Tokenizer  # noqa: E402
from minispec import ROOT  # noqa: E402
from minispec.studies import results  # noqa: E402
from shown import lines  # noqa: E402
from minispec.tools import checkpoints, methods  # noqa: E402
from minispec.tools.answers import requests_of  # noqa: E402

REPEATS = 2
SETTINGS = {"2 threads, alone": (2, False), "2 threads, another process on one core": (2, True),
            "1 thread, another process on one core": (1, True), "1 thread, alone": (1, False)}
BUSY = "import os; os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})\nwhile True: pass"


def main():
    os.chdir(ROOT or ".")
    started = time.perf_counter()
    tokenizer = Tokenizer.load(methods.SHIPPED)
    problems = [tasks.make("trace", 800 + i, "heldout") for i in range(4)]
    model = checkpoints.load(methods.SHIPPED, "cpu")
    rates = {}
    for _ in range(REPEATS):
        for name, (threads, other) in SETTINGS.items():
            torch.set_num_threads(threads)
            process = subprocess.Popen([sys.executable, "-c", BUSY]) if other else None
            try:
                engine = methods.make_engine("ar", model, methods.settings(), 1)
                tokens = sum(len(g.token_ids) for g in engine.generate(requests_of(problems, tokenizer, model, 160)))
            finally:
                if process:
                    process.kill()
                    process.wait()
            rates.setdefault(name, []).append((tokens / sum(engine.seconds.values()), tokens / (sum(engine.seconds.values()) - engine.seconds["prefill"])))
    torch.set_num_threads(2)
    rows = []
    for name, some in rates.items():
        whole, decoding = zip(*some)
        rows.append(f"{name} | {statistics.median(whole):.0f} ({min(whole):.0f}-{max(whole):.0f}) | {statistics.median(decoding):.0f}")
    result = {"rates": rates, "table": lines("plain loop | tokens/s, median (range) | without reading prompts", rows)}
    print(result["table"])
    results.write("baseline", result, time.perf_counter() - started)


if __name__ == "__main__":
    main()
