"""kill -9 at random moments: every script is killed 50 times and resumed every time, and must end like a
script that was never killed.

    python tests/kill.py                       # 50 kills a script, 10 minutes; adds to results/knocks.json
    python tests/kill.py --kills 3 --only train_gpt --no-results

Each script works on a toy with a checkpoint every step or two. A run is a fork of this process, which has
imported everything, and is killed a random time after its start. Files that it left must be whole: JSON and
safetensors that can be read, and results that were there before. In the end weights and logs are equal to
those of an undisturbed run.
"""
import dataclasses
import functools
import glob
import os
import random
import shutil
import signal
import time

import fuzz  # before torch: it tunes the allocator
import torch
from conftest import table
from safetensors.torch import load_file

import bench
from minispec.data import tasks
from minispec.studies import measure, results, run
from minispec.tools import files, methods, script

DRAFTER = "--prompts 150 --heldout 20 --tokens 1e4 --batch-tokens 512 --save-every 2"
LONGER = table(f"""
    train_gpt | --tokens 4e4 --save-every 4
    train_prism | {DRAFTER}
    train_specdiff | {DRAFTER}
    train_cdlm | --out out --steps 9 --batch 4 --prompts 20 --save-every 3
""")
CASES = {name: [*fuzz.SMALL[name], *more.split()] for name, more in LONGER}
CASES["bench"] = ["profile", "trace", "run", "bounds"]


def start(folder, name):
    """A fork that runs the script in `folder`; returns its process id."""
    def main():
        if name == "bench":                              # its studies with few prompts, methods and tokens
            bench.ROOT, results.FOLDER = folder + "/", f"{folder}/results"
            run.SMALL, tasks.FAMILIES = dataclasses.replace(run.SMALL, new=8), ("revise", "arith")
            measure.cost_table = functools.partial(
                measure.cost_table, rows=(1, 4), contexts=(64,), drafts=(0, 1, 4))
            methods.ready = lambda settings: ["ngram", "specgen"]
        script.run_main(fuzz.SCRIPTS[name].main)

    return fuzz.forked(folder, name, CASES[name], main, f"{folder}/.output")


def finished(folder, name, pid):
    """Whether a run came to its end, and was not killed. An error of its own is raised, with its output."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in (0, -signal.SIGKILL):
        with open(f"{folder}/.output", errors="replace") as f:
            raise AssertionError(f"{name} ended with {code}: {f.read()[-2000:]}")
    return code == 0


def written(folder, name):
    """The files of the script, without temporary ones, which nobody reads."""
    under = os.path.join(folder, "results" if name == "bench" else "out")
    paths = [f"{at}/{file}" for at, _, some in os.walk(under) for file in some]
    return sorted(path for path in paths if not path.endswith(".tmp"))


def essence(folder, name):
    """{file: content that kills must not change}: without times, weights as tensors. Every file is read to
    its end."""
    out = {}
    for path in written(folder, name):
        key = os.path.relpath(path, folder)
        out[key] = None                                  # its existence: the rest are times
        if path.endswith(".safetensors"):
            out[key] = load_file(path)
        elif path.endswith(".pt"):
            torch.load(path, weights_only=True)
        elif path.endswith((".json", ".part")):
            data = files.read_json(path)
            if key == "results/run.json":
                kept = "workload batch ids method tokens identical prompts".split()
                out[key] = [[row[k] for k in kept] for row in data["result"]["rows"]]
            elif os.path.basename(path).startswith("settings"):
                out[key] = data
        elif path.endswith((".jsonl", "command.txt")):
            with open(path) as f:
                assert f.read().endswith("\n"), path
            if path.endswith(".jsonl"):
                rows = [row for _, row in files.read_rows(path)]
                out[key] = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    return out


def same(a, b):
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for key in a:
        if key.endswith(".safetensors"):
            torch.testing.assert_close(a[key], b[key], atol=1e-5, rtol=0)
        else:
            assert a[key] == b[key], f"{key}: {str(a[key])[:300]} is not {str(b[key])[:300]}"


def clean(folder, name):
    shutil.rmtree(f"{folder}/out", ignore_errors=True)
    for study in CASES["bench"]:
        for f in glob.glob(f"{folder}/results/{study}.*"):
            os.remove(f)


def torture(folder, name, kills, rng):
    """Kill, check and resume; at the end of a run compare and begin anew, until `kills` kills are done."""
    clean(folder, name)
    began = time.monotonic()
    assert finished(folder, name, start(folder, name))
    whole = time.monotonic() - began
    reference = essence(folder, name)
    clean(folder, name)
    dead = 0
    ends = 0
    ended = True
    while dead < kills or not ended:
        before = written(folder, name)
        pid = start(folder, name)
        if dead < kills:
            time.sleep(rng.uniform(0, whole / 3))
            os.kill(pid, signal.SIGKILL)
        ended = finished(folder, name, pid)
        replaced = f"{folder}/results/run.part"         # by run.json
        lost = set(before) - set(written(folder, name)) - {replaced}
        assert not lost, f"{name} lost {lost}"
        left = essence(folder, name)
        if ended:
            same(left, reference)
            ends += 1
            clean(folder, name)
        dead += not ended
    return {"kills": dead, "runs_that_reached_the_end": ends, "seconds_undisturbed": round(whole, 1)}


def main():
    p = script.Parser(__doc__)
    add = p.add_argument
    add("--kills", type=int, default=50, help="of each script")
    add("--only", choices=CASES, help="one script")
    add("--seed", type=int, default=1)
    add("--no-results", action="store_true", help="write no results/knocks.json")
    args = p.parse_args()
    out = {}
    began = time.monotonic()
    with fuzz.scratch() as folder:
        os.makedirs(f"{folder}/checkpoints")
        fuzz.template(folder, runs=False)
        for name in [args.only] if args.only else CASES:
            out[name] = torture(folder, name, args.kills, random.Random(f"{args.seed}/{name}"))
            print(name, out[name], f"{time.monotonic() - began:.0f} s", flush=True)
    if not (args.no_results or args.only):
        fuzz.note("kill", {"seed": args.seed, "scripts": out, "seconds": round(time.monotonic() - began, 1)})


if __name__ == "__main__":
    main()
