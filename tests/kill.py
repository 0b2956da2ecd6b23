"""kill -9 at random moments: every script is killed until it has died 50 times, resumed every time, and must end as if nothing had been.

    python tests/kill.py                                     # 50 kills a script, about 10 minutes; adds to results/knocks.json
    python tests/kill.py --kills 3 --only train_gpt --no-results

Each script works on a toy with a checkpoint every step or two. A run is forked from this process, which has imported everything,
and killed a random time after its start, early or late. Whatever it left must be whole: JSON and safetensors that can be read, and
results that were there stay as they were. In the end weights and logs equal those of a run that nobody disturbed.
"""
import argparse
import dataclasses
import functools
import glob
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time

import fuzz  # before torch: it tunes the allocator
import torch
from safetensors.torch import load_file

import bench
from minispec.data import tasks
from minispec.studies import measure, results, run
from minispec.tools import files, methods, script

SMALL = fuzz.SMALL
CASES = {
    "train_gpt": ["--out", "out", *SMALL["train_gpt"][2:], "--tokens", "4e4", "--save-every", "4"],
    "train_prism": [*SMALL["train_prism"], "--prompts", "150", "--heldout", "20", "--tokens", "1e4", "--batch-tokens", "512", "--save-every", "2"],
    "train_specdiff": [*SMALL["train_specdiff"], "--prompts", "150", "--heldout", "20", "--tokens", "1e4", "--batch-tokens", "512", "--save-every", "2"],
    "train_cdlm": ["--out", "out", *SMALL["train_cdlm"][2:], "--steps", "9", "--batch", "4", "--prompts", "20", "--save-every", "3"],
    "bench": ["profile", "trace", "run", "bounds"]}


def start(folder, name):
    """A fork that runs the script in `folder`; returns its process id."""
    def main():
        sys.modules["matplotlib"] = None
        if name == "bench":                              # its studies, but a few prompts, methods and short answers
            bench.ROOT, results.FOLDER = folder + "/", os.path.join(folder, "results")
            run.SMALL, tasks.FAMILIES = dataclasses.replace(run.SMALL, new=8), ("revise", "arith")
            measure.cost_table = functools.partial(measure.cost_table, rows=(1, 4), contexts=(64,), drafts=(0, 1, 4))
            methods.ready = lambda settings: ["ngram", "specgen"]
        script.run_main(fuzz.SCRIPTS[name].main)

    return fuzz.forked(folder, name, CASES[name], main, os.path.join(folder, ".output"))


def finished(folder, name):
    """Run to the end; seconds."""
    began = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(start(folder, name), 0)[1])
    if code != 0:
        with open(os.path.join(folder, ".output"), errors="replace") as f:
            raise AssertionError(f"{name} ended with {code}: {f.read()[-2000:]}")
    return time.monotonic() - began


def written(folder, name):
    """The files that the script writes; temporary names do not count, nobody reads them."""
    under = "results" if name == "bench" else "out"
    some = [os.path.join(at, f) for at, _, some in os.walk(os.path.join(folder, under)) for f in some]
    return sorted(f for f in some if not f.endswith(".tmp"))


def check_whole(paths):
    """Every file can be read to its end."""
    for path in paths:
        if path.endswith((".json", ".part")):
            files.read_json(path)
        elif path.endswith(".jsonl"):
            with open(path) as f:
                text = f.read()
            assert text.endswith("\n"), path
            [json.loads(line) for line in text.splitlines()]
        elif path.endswith(".safetensors"):
            load_file(path)
        elif path.endswith(".pt"):
            torch.load(path, weights_only=True)
        elif path.endswith("command.txt"):
            with open(path) as f:
                assert f.read().endswith("\n"), path


def essence(folder, name):
    """What must not depend on kills: {file: its content without times}. Weights are returned as tensors."""
    out = {}
    for path in written(folder, name):
        key = os.path.relpath(path, folder)
        if path.endswith(".safetensors"):
            out[key] = load_file(path)
        elif path.endswith("log.jsonl"):
            with open(path) as f:
                out[key] = [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in f]
        elif name == "bench" and os.path.basename(path) == "run.json":
            rows = files.read_json(path)["result"]["rows"]
            out[key] = [[r[k] for k in ("workload", "batch", "ids", "method", "tokens", "identical", "prompts")] for r in rows]
        elif os.path.basename(path) == "traces.jsonl" or os.path.basename(path).startswith("settings"):
            with open(path) as f:
                out[key] = f.read()
        else:
            out[key] = None                                      # it is there; times are all it says, or what was compared already
    return out


def same(a, b):
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for key in a:
        if key.endswith(".safetensors"):
            assert all(torch.allclose(a[key][n], b[key][n], atol=1e-5) for n in a[key]) and a[key].keys() == b[key].keys(), key
        else:
            assert a[key] == b[key], f"{key}: {str(a[key])[:300]} is not {str(b[key])[:300]}"


def clean(folder, name):
    shutil.rmtree(os.path.join(folder, "out"), ignore_errors=True)
    for study in CASES["bench"]:
        for f in glob.glob(os.path.join(folder, "results", study + ".*")):
            os.remove(f)


def torture(folder, name, kills, rng):
    """Kill, check, go on; when it gets to the end, compare and begin anew; until it has been killed so often and is at the end."""
    clean(folder, name)
    whole, reference = finished(folder, name), essence(folder, name)
    clean(folder, name)
    dead, ends, killed = 0, 0, False
    while dead < kills or killed:
        before, pid = written(folder, name), start(folder, name)
        if dead < kills:
            time.sleep(rng.uniform(0, whole / 3))
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        killed = code == -signal.SIGKILL
        after = written(folder, name)
        lost = set(before) - set(after) - {os.path.join(folder, "results", "run.part")}          # run.json stands in its place
        assert not lost, f"{name} lost {lost}"
        check_whole(after)
        dead += killed
        if killed:
            continue
        if code == 0:
            same(essence(folder, name), reference)
            ends += 1
            clean(folder, name)
        else:
            finished(folder, name)                               # says what it printed, if it does so again
            raise AssertionError(f"{name} ended with {code} once")
    return {"kills": dead, "runs_that_reached_the_end": ends, "seconds_undisturbed": round(whole, 1)}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kills", type=int, default=50, help="of each script")
    p.add_argument("--only", choices=CASES, help="one script")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--no-results", action="store_true", help="write no results/knocks.json")
    args = p.parse_args()
    torch.set_num_threads(1)                                     # a fork has no threads but its own
    out, began = {}, time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        os.makedirs(os.path.join(folder, "checkpoints"))
        fuzz.template(folder, runs=False)
        for name in [args.only] if args.only else CASES:
            out[name] = torture(folder, name, args.kills, random.Random(f"{args.seed}/{name}"))
            print(name, out[name], f"{time.monotonic() - began:.0f} s", flush=True)
    if not args.no_results:
        fuzz.note("kill", {"seed": args.seed, "scripts": out}, time.monotonic() - began)


if __name__ == "__main__":
    main()
