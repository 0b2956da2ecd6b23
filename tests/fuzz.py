"""Thousands of wrong command lines and damaged files for all scripts: no traceback, no hang, exit code 0 or
2, nothing half-written.

    python tests/fuzz.py               # 2,000 of each, 20 minutes on one core; writes results/knocks.json
    python tests/fuzz.py --lines 30 --files 30 --seed 5            # fewer: nothing is written
    python tests/fuzz.py --only files:17                   # one case again, with its output

A case is a folder with a copy of the scripts and toy models, a script with arguments, and perhaps one
damaged file. It runs in a fork of this process, which has imported everything. Numbers that ask for long work
("--steps 1000000") are no errors and are left out; absurd ones ("--tokens 1e300") are not. No case names a
writable place outside its folder.
"""
import collections
import contextlib
import copy
import json
import os
import platform
import random
import resource
import runpy
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
from unittest import mock

from conftest import ROOT, save_toy_target, table  # before torch: one thread, because a fork has no others
import torch
from tqdm import tqdm

import bench
import decode
import shown
import train_cdlm
import train_gpt
import train_prism
import train_specdiff
from minispec import bounds, prism, specdiff, traces
from minispec.studies import results
from minispec.tools import checkpoints, drafter_files, files, script

MODULES = (decode, bench, train_gpt, train_prism, train_specdiff, train_cdlm, bounds)
SCRIPTS = {module.__name__.split(".")[-1]: module for module in MODULES}
# limits of a case: processor seconds, waiting, bytes
SECONDS = 60
WAIT = 600
MEMORY = 6 << 30
GSM8K = "\n".join(json.dumps({"question": f"What is {i} and {i}?", "answer": f"<<{i}+{i}>>\n#### {2 * i}"})
                  for i in range(30))
PROMPTS = r"""
{"question": "What is 3 and 3?", "answer": "It is <<3+3=6>>6\n#### 6"}
{"problem": "Half?", "solution": "\\boxed{2}", "answer": "2"}
{"prompt": "n \\boxed{}", "answer": 7}
{"text": "Do.", "code": "x", "test_list": ["assert True"]}
{"prompt": "def f():\n", "test": "def check(f):\n    assert f() == 1", "entry_point": "f"}
{"turns": ["one", "two"], "category": "writing"}
{"turns": ["three"], "category": "math_reasoning", "reference": ["4\n#### 5"]}
""".strip()
ACCEPT = '{"ngram": [0, 4, 1, 1, 3, 1, 1], "draft": [0, 2, 3, 1, 2, 2, 1]}'
TRACES = "\n".join('{"id": "%s", "prompt_len": 40, "n_out": 7, "accept": %s}' % (name, ACCEPT)
                   for name in ("a/0", "a/1", "b/0"))
COSTS = """
{"verify": {"kind": "linear", "base": 5e-3, "token": 2e-5, "kv": 4e-8},
 "overhead": {"kind": "linear", "base": 1e-3},
 "draft": {"ngram": {"kind": "linear", "base": 3e-5},
           "draft": {"kind": "linear", "base": 1e-3, "step": 7e-4}}}
"""
PRISM = "--out out --prompts 3 --heldout 1 --max-new-tokens 6 --tokens 300"
# Arguments that keep a valid case short; valid values of options, of others NUMBERS.
SMALL = {name: line.split() for name, line in table(f"""
    decode | --model checkpoints/target --max-new-tokens 6
    bench | bounds --quick
    train_gpt | --out out --size tiny --tokens 4e3 --max-length 256
    train_prism | {PRISM}
    train_specdiff | {PRISM}
    train_cdlm | --out cdlm --steps 2 --batch 2 --prompts 2
    bounds | --traces traces.jsonl --cost costs.json
""")}
GOOD = {option: values.split() for option, values in table(f"""
    --prompts | prompts.jsonl 2
    --prompt-file | many.jsonl
    --model | checkpoints/target
    --teacher | checkpoints/target
    --target | checkpoints/target
    --drafter | checkpoints/draft checkpoints/prism checkpoints/specdiff checkpoints/cdlm/student
    --cost | costs.json results/costs.json
    --traces | traces.jsonl
    --data | data
    --json | out.json
    --html | out.html
    --size | tiny 3
    --init | checkpoints/prism checkpoints/draft
    --out | out runs/gpt
    --device | cpu
    --responses | responses
    --name | student
    --prompt | one {'🙂' * 50} {'a' * 100_000}
""")}
NUMBERS = "1 2 3 0.5 0.9 8".split()
NASTY = ["", "\n", *"""-1 0 nan inf -inf 1e300 99999999999999999999 1.5 é 🙂 /proc/version . /proc -- - None []
{} 1_0 %s nowhere checkpoints/target prompts.jsonl checkpoints/target/config.json loop \x1b[31m""".split(),
         "\udcff\udcfe", "a" * 5000]
# Options whose large values are long work.
LONG = "--n --steps --prompts --heldout --batch --batch-tokens --windows --unroll".split()


def template(folder, runs=True):
    """A folder in which every script works, in a few seconds: toys in place of checkpoints/, and files of
    every kind that scripts read. runs: also trainings that can be resumed."""
    def path(name):
        return f"{folder}/{name}"

    copied = [*(f"{name}.py" for name in SCRIPTS if name != "bounds"), "minispec", "kernels", "docs",
              "README.md", "results"]
    for name in copied:
        source = f"{ROOT}/{name}"
        (shutil.copytree if os.path.isdir(source) else shutil.copy)(source, path(name))
    # A part of the results: `bounds` would take a quarter of a minute with all of them.
    whole = files.read_json(path("results/run.json"))
    rows = [r for r in whole["result"]["rows"] if r["workload"] == "arith" and r["batch"] == 1]
    whole["result"]["rows"] = rows
    files.write_json(path("results/run.json"), whole)
    some = traces.read_traces(path("results/traces.jsonl"))
    traces.write_traces(path("results/traces.jsonl"), [t for t in some if t.id in rows[0]["ids"]])
    # Toy models and drafters, and a model in shards.
    target = save_toy_target(path("checkpoints"), gain=1.0, block_size=2048)
    for name in ("checkpoints/draft", "checkpoints/cdlm/student", "checkpoints/cdlm/teacher", "sharded"):
        shutil.copytree(target, path(name))
    model = checkpoints.load(target)
    drafters = {"prism": prism.for_target(model, (0, 1)), "eagle": prism.for_target(model, (0,)),
                "specdiff": specdiff.for_target(model)}
    for name, drafter in drafters.items():
        drafter_files.save_drafter(drafter, path(f"checkpoints/{name}"), model)
    os.rename(path("sharded/model.safetensors"), path("sharded/model-1.safetensors"))
    names = [name for _, parts, _ in checkpoints.weight_names(model.config) for name in parts]
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    files.write_json(path("sharded/model.safetensors.index.json"), index)
    # Prompts, traces, prices, and a link to itself.
    os.makedirs(path("data/gsm8k"))
    for name, text in {"prompts.jsonl": PROMPTS, "many.jsonl": GSM8K, "traces.jsonl": TRACES,
                       "data/gsm8k/test.jsonl": GSM8K, "costs.json": COSTS}.items():
        files.write_text(path(name), text)
    os.symlink("loop", path("loop"))
    if not runs:
        return
    for name in ("train_gpt", "train_prism", "train_specdiff", "train_cdlm"):
        code, _, text = run(folder, name, [*SMALL[name], "--out", "runs/" + name.removeprefix("train_")])
        assert code == 0, text
    code, _, text = run(folder, "train_gpt", [*FIRST.split(), "--tokens", "2e3", "--save-every", "1"])
    assert code == 0, text


def scratch():
    """A temporary folder, in memory where there is one."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


def forked(folder, name, argv, main, output):
    """The process id of a fork that runs main() in `folder` as the script of this name. output: the file of
    its output."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        tqdm.set_lock(threading.RLock())                 # a killed fork would keep the one that all share
        os.chdir(folder)
        os.environ.pop("MINISPEC_DATA", None)
        sys.argv = [name + ".py", *argv]
        main()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run(folder, name, argv):
    """A script in a fork of this process: (exit code, "hang" or "killed", processor seconds, output)."""
    def main():
        os.setsid()
        signal.alarm(WAIT)
        mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        for limit, n in (("CPU", SECONDS), ("AS", mapped + MEMORY), ("CORE", 0)):
            resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (n, n))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        file = os.path.relpath(SCRIPTS[name].__file__, ROOT)
        runpy.run_path(f"{folder}/{file}", run_name="__main__")

    output = f"{folder}/.output"
    pid = forked(folder, name, argv, main, output)
    _, status, used = os.wait4(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(status)
    with open(output, encoding="utf-8", errors="replace") as f:
        text = f.read()
    os.remove(output)
    hang = -code in (signal.SIGALRM, signal.SIGXCPU, signal.SIGKILL)
    return "hang" if hang else "killed" if code < 0 else code, used.ru_utime + used.ru_stime, text


# -- command lines ---------------------------------------------------------------------------------------

def parser_of(module):
    """The parser of a script, which is asked for its help."""
    argv = mock.patch.object(sys, "argv", [module.__name__, "--help"])
    helped = mock.patch.object(script.Parser, "print_help", autospec=True)
    with argv, helped as shown, contextlib.suppress(SystemExit):
        module.main()
    return shown.call_args.args[0]


def options():
    """{script: [(option, its good values, values that it takes)]}, asked of the scripts' own parsers."""
    def known(a):
        option = a.option_strings[0]
        values = [] if a.nargs == 0 else list(map(str, a.choices or GOOD.get(option, NUMBERS)))
        return option, values, a.nargs if isinstance(a.nargs, int) else 1

    return {name: [known(a) for a in parser_of(module)._actions if a.option_strings and a.dest != "help"]
            for name, module in SCRIPTS.items()}


def command_line(rng, known):
    """(script, arguments): short work, a few options with good and bad values, perhaps one more mistake."""
    name = rng.choices(list(SCRIPTS), (10, 2, 2, 2, 2, 2, 2))[0]
    argv = list(SMALL[name])
    if name == "bench":
        argv = rng.choice(["bounds --quick", "--pages", "nonsense"]).split()
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        option, values, n = rng.choice(known[name])
        nasty = [v for v in NASTY if option not in LONG or v not in ("1e300", "99999999999999999999")]
        argv.append(option)
        argv += [rng.choice(values if rng.random() < 0.5 else nasty) for _ in values and range(n)]
    if rng.random() < 0.15:
        # Not in place of bench.py's study: all of them run for minutes.
        at = max(rng.randrange(len(argv) + 1), name == "bench")
        argv[at:at + rng.choice((0, 1))] = rng.choice(([], [rng.choice(NASTY)], [rng.choice(argv)]))
    return name, argv


# -- files -----------------------------------------------------------------------------------------------

TARGET = "--model checkpoints/target --max-new-tokens 4"
DECODE = f"{TARGET} --prompt one"
CDLM = "--steps 2 --batch 2 --prompts 2 --out runs/cdlm"
FIRST = "--size tiny --tokens 4e3 --max-length 256 --out runs/first"
# How often, a file, a script that reads it, its arguments.
FILES = table(f"""
    10 | prompts.jsonl | decode | {TARGET} --prompts prompts.jsonl --batch 4
    6 | many.jsonl | train_prism | --prompt-file many.jsonl {PRISM}
    8 | traces.jsonl | bounds | --traces traces.jsonl --cost costs.json
    8 | costs.json | bounds | --traces traces.jsonl --cost costs.json
    4 | costs.json | decode | --method adaptive --cost costs.json {DECODE}
    8 | checkpoints/target/config.json | decode | {DECODE}
    6 | checkpoints/target/model.safetensors | decode | --method specgen {DECODE}
    8 | checkpoints/target/tokenizer.json | decode | --method ngram {DECODE}
    4 | sharded/model-1.safetensors | decode | {DECODE} --model sharded
    5 | checkpoints/prism/config.json | decode | --method prism {DECODE}
    3 | checkpoints/prism/model.safetensors | decode | --method prism {DECODE}
    5 | checkpoints/specdiff/config.json | decode | --method specdiff {DECODE}
    3 | checkpoints/specdiff/model.safetensors | decode | --method specdiff {DECODE}
    3 | checkpoints/cdlm/student/config.json | decode | --method cdlm --prompt x --max-new-tokens 32
    2 | results/lossless.json | bench | --pages
    2 | results/scheduler.json | bench | --pages
    2 | results/bounds.json | bench | --pages
    2 | results/run.json | bench | --pages
    2 | results/checkpoints.json | bench | --pages
    3 | results/run.json | bench | bounds --quick
    3 | results/trace.json | bench | bounds --quick
    8 | runs/first/resume.pt | train_gpt | {FIRST}
    4 | runs/first/log.jsonl | train_gpt | {FIRST}
    4 | data/gsm8k/test.jsonl | decode | {TARGET} --prompts data/gsm8k/test.jsonl --n 3
    4 | runs/prism/resume.pt | train_prism | {PRISM} --out runs/prism
    6 | runs/prism/responses/train-0-3.safetensors | train_prism | {PRISM} --out runs/prism
    4 | runs/specdiff/responses/settings.json | train_specdiff | {PRISM} --out runs/specdiff
    4 | runs/cdlm/trajectories/settings.json | train_cdlm | {CDLM}
    4 | runs/cdlm/trajectories/00000.safetensors | train_cdlm | {CDLM} --name other
""")
WRONG = [*json.loads("""[null, true, -1, 0, 1, 2, 3, 1e308, -1e-9, NaN, Infinity, 2147483648, 4194304,
 1000000000000000000000000000000, "", "x", "🙂", "\\ud800", [], {}, [[]], [null], {"a": 1}, [1, 2, 3],
 "nowhere", "float32"]"""), "9" * 5000]


def damage_json(data, rng):
    """One node of a JSON value made wrong, moved or left out."""
    path = []
    node = data
    while isinstance(node, (dict, list)) and node and (not path or rng.random() < 0.85):
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        path.append((node, key))
        node = node[key]
    if not path:
        return rng.choice(WRONG)
    parent, key = path[-1]
    kind = rng.random()
    if kind < 0.2:
        del parent[key]
    elif kind < 0.3:
        parent[key] = [node] if rng.random() < 0.5 else {"x": node}
    elif kind < 0.4 and isinstance(node, (int, float)):
        parent[key] = rng.choice([-node, node * 1000, node + 1, str(node), node / 2])
    elif kind < 0.5 and len(path) > 1:
        around = path[-2][0]
        parent[key] = copy.deepcopy(rng.choice(list(around.values()) if isinstance(around, dict) else around))
    else:
        parent[key] = rng.choice(WRONG)
    return data


def damage_bytes(data, rng):
    at = rng.randrange(max(len(data), 1))
    some = rng.randbytes(rng.choice((1, 2, 8)))
    other = [b"", b"\xff\xfe", b"[" * 100_000, b"{}", b"null", b"\n", rng.randbytes(100),
             b"\x80\x04\x95c" + data]
    before, after = data[:at], data[at:]
    return rng.choice([before, before + some + after[len(some):], before + some + after, data + before,
                       before + after[rng.randrange(100):], before + b"\0" * 64 + after[64:],
                       rng.choice(other)])


def damage_safetensors(data, rng):
    """A header that says other things, or numbers that are none."""
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + n])
    body = bytearray(data[8 + n:])
    if rng.random() < 0.3:
        at = rng.randrange(len(body) // 4) * 4
        body[at:at + 4] = struct.pack("<f", rng.choice([float("nan"), float("inf")]))
    else:
        header = damage_json(header, rng)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(body)


def damage_pt(file, rng):
    """A whole archive with other things in it, or a pickle that would run a program if it were believed."""
    saved = torch.load(file, weights_only=True)
    name = rng.choice(list(saved["model"]))
    state = saved["optimizers"][0]["state"]
    kind = rng.randrange(8)
    if kind == 0:
        saved["model"][name] = torch.zeros(3)
    elif kind == 1:
        saved["model"][name].fill_(float("nan"))
    elif kind == 2:
        del saved[rng.choice(list(saved))]
    elif kind == 3:
        saved[rng.choice(list(saved))] = rng.choice([*WRONG, torch.zeros(2)])
    elif kind == 4:
        saved["optimizers"].reverse()
    elif kind == 5:
        state[rng.choice(list(state))] = rng.choice([{}, {"momentum_buffer": torch.zeros(2)}, None])
    elif kind == 6:
        saved = rng.choice([[], None, {}, torch.zeros(2)])
    else:
        class Bad:
            def __reduce__(self):
                return os.system, ("touch PWNED",)
        saved["step"] = Bad()
    torch.save(saved, file)


def damaged_file(rng, folder):
    """Damages one file; (script, arguments that read it, file)."""
    some = [f for f in FILES if os.path.exists(f"{folder}/runs") or not f[1].startswith("runs")]
    _, file, name, line = rng.choices(some, [int(f[0]) for f in some])[0]
    chosen = name, line.split(), file
    path = f"{folder}/{file}"
    with open(path, "rb") as f:
        data = f.read()
    kind = rng.random()
    ending = path.rsplit(".", 1)[1]
    if 0.4 <= kind and ending == "pt":
        damage_pt(path, rng)
        return chosen
    os.remove(path)                                             # it may be a link
    if kind < 0.03:
        rng.choice([lambda: None, lambda: os.mkdir(path), lambda: os.symlink(os.path.basename(path), path)])()
        return chosen
    if kind < 0.4:
        data = damage_bytes(data, rng)
    elif ending == "json":
        data = json.dumps(damage_json(json.loads(data), rng)).encode()
    elif ending == "jsonl":
        rows = [json.loads(line) for line in data.decode().split("\n") if line]
        at = rng.randrange(len(rows))
        rows[at] = damage_json(rows[at], rng)
        data = "\n".join(map(json.dumps, rows)).encode()
    elif ending == "safetensors":
        data = damage_safetensors(data, rng)
    with open(path, "wb") as f:
        f.write(data)
    return chosen


# -- all together ----------------------------------------------------------------------------------------

def verdict(folder, name, code, text):
    """What is wrong with the outcome of a case, or None."""
    left = [f for _, _, some in os.walk(folder) for f in some if f.endswith(".tmp") or f == "PWNED"]
    last = text.rstrip("\n").rpartition("\n")[2].rpartition("\r")[2]
    wrong = {
        f"exit {code}": code not in (0, 2),
        "traceback": "Traceback" in text,
        "exit 2 without a line that says why": code == 2 and not last.startswith((f"{name}.py: ", "rollouts.py: ")),
        f"left {left}": left,
    }
    return next((what for what, true in wrong.items() if true), None)


def one(kind, seed, i, source, known):
    """Case i of a kind in a copy of `source`: (what is wrong or None, code, seconds, description, output)."""
    rng = random.Random(f"{seed}/{kind}/{i}")
    with tempfile.TemporaryDirectory(dir=os.path.dirname(source)) as folder:
        shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True)
        lines = kind == "lines"
        name, argv, file = (*command_line(rng, known), "") if lines else damaged_file(rng, folder)
        code, seconds, text = run(folder, name, argv)
        wrong = verdict(folder, name, code, text)
    return wrong, code, seconds, f"{kind}:{i} {file} {name}.py " + " ".join(map(repr, argv))[:300], text


def main():
    p = script.Parser(__doc__)
    add = p.add_argument
    add("--lines", type=int, default=2000, help="command lines")
    add("--files", type=int, default=2000, help="damaged files")
    add("--seed", type=int, default=1)
    add("--only", metavar="KIND:NUMBER", help="one case, with its output")
    args = p.parse_args()
    out = {}
    with scratch() as top:
        source = f"{top}/template"
        os.makedirs(f"{source}/checkpoints")
        template(source, runs=args.files > 100 or bool(args.only))
        known = options()
        if args.only:
            kind, i = args.only.split(":")
            wrong, code, seconds, what, text = one(kind, args.seed, int(i), source, known)
            return print(f"{text}\n{what}\nexit {code} after {seconds:.1f} s: {wrong or 'fine'}")
        for kind in ("files", "lines"):
            out[kind] = several(kind, getattr(args, kind), args.seed, source, known)
            if getattr(args, kind) == p.get_default(kind):
                note(kind, out[kind])
    print(json.dumps(out))
    return sum(x["failures"] for x in out.values()) > 0


def several(kind, n, seed, source, known):
    """The part of results/knocks.json of n cases of a kind."""
    codes = collections.Counter()
    slowest = 0.0, ""
    failures = 0
    started = time.monotonic()
    for i in tqdm(range(n)):
        wrong, code, seconds, what, text = one(kind, seed, i, source, known)
        codes[str(code)] += 1
        slowest = max(slowest, (seconds, what))
        if wrong:
            failures += 1
            print(f"FAILED {wrong}: {what}\n{text[-1500:]}\n", flush=True)
    return {"seed": seed, "cases": n, "exits": dict(sorted(codes.items())), "failures": failures,
            "slowest_seconds": round(slowest[0], 1), "slowest": slowest[1][:120],
            "seconds": round(time.monotonic() - started, 1)}


def note(part, result):
    """Put one part of results/knocks.json there, beside the others: "lines", "files", "kill"."""
    file = f"{ROOT}/results/knocks.json"
    parts = files.read_json(file)["result"] if os.path.exists(file) else {}
    parts[part] = result
    if {"lines", "files", "kill"} <= set(parts):
        parts["table"] = shown.knocks(parts)
    files.write_json(file, {
        "command": "python tests/fuzz.py && python tests/kill.py", "device": results.device_name(),
        "python": platform.python_version(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
        "seconds": round(sum(parts[p]["seconds"] for p in parts if p != "table"), 1), "result": parts})


if __name__ == "__main__":
    sys.exit(main())
