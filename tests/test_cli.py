"""decode.py as a user meets it: what it prints, what it writes, and one clear line for every bad input."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import DRAFT, ROOT, TARGET, on_a_terminal, toy_model

from minispec.tools import checkpoints
from minispec.data import tasks
from minispec.data.tokenizer import Tokenizer

COMMAND = [sys.executable, os.path.join(ROOT, "decode.py")]


def decode(*args, cwd=ROOT, **env):
    return subprocess.run([*COMMAND, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=120, env={**os.environ, **env})


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A random model with the shipped tokenizer: fast, and wrong."""
    folder = tmp_path_factory.mktemp("toy")
    tokenizer = Tokenizer.load(TARGET)
    model = toy_model(vocab=tokenizer.vocab_size, bos_id=tokenizer.special["<|bos|>"], eos_id=tokenizer.special["<|eos|>"])
    with open(os.path.join(TARGET, "tokenizer.json"), encoding="utf-8") as f:
        checkpoints.save(model, folder, json.load(f))
    return folder


BAD = {     # what is wrong: (arguments, what the line must say)
    "method": (["--method", "magic"], "unknown method 'magic'; choose from ar, ngram, draft, prism, eagle, specdiff, specgen"),
    "family": (["--task", "chess"], "unknown task family 'chess'; choose from trace"),
    "model folder": (["--model", "nowhere"], "no model folder nowhere"),
    "draft folder": (["--method", "draft", "--draft-model", "nowhere"], "no model folder nowhere"),
    "drafter folder": (["--method", "prism", "--drafter", "nowhere"], "no drafter folder nowhere"),
    "drafter of another kind": (["--method", "eagle", "--drafter", DRAFT], "this is not a drafter made by train_prism.py"),
    "k": (["--method", "specgen", "--k", 0], "k 0 is out of range; allowed is 1 to 32"),
    "k too large": (["--method", "ngram", "--k", 1000], "k 1000 is out of range"),
    "k is a word": (["--k", "many"], "argument --k: invalid int value: 'many'"),
    "temperature": (["--temperature", -1], "temperature -1.0 is out of range; allowed is 0"),
    "top-p": (["--top-p", 0], "top-p 0.0 is out of range"),
    "top-k": (["--top-k", -1], "top-k -1 is out of range"),
    "sparsity": (["--method", "specgen", "--sparsity", 2], "sparsity 2.0 is out of range"),
    "selection": (["--method", "specgen", "--select", "best"], "unknown selection 'best'"),
    "batch": (["--batch", 0], "batch 0 is out of range"),
    "n": (["--task", "trace", "--n", 0], "n 0 is out of range"),
    "size": (["--task", "trace", "--size", 5000], "size 5000 is out of range for 'trace'; allowed is 1 to 210"),
    "no tokens": (["--max-new-tokens", 0], "max-new-tokens 0 is out of range"),
    "long prompt": (["--prompt", "word " * 600], "the context of this model is 512"),
    "many tokens": (["--prompt", "hi", "--max-new-tokens", 600], "the context of this model is 512"),
    "no prompt file": (["--prompts", "none.jsonl"], "no prompt file none.jsonl"),
    "no data": (["--task", "gsm8k"], "from github.com/openai/grade-school-math"),
    "device": (["--device", "cuda"], "no CUDA device"),
    "argument": (["--speed", "fast"], "unrecognized arguments: --speed fast"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line_and_leaves_nothing(name, toy, tmp_path):
    if name == "device":
        import torch
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    args, message = BAD[name]
    args = args if "--model" in args else ["--model", toy, *args]
    r = decode(*args, "--json", tmp_path / "out.json", cwd=tmp_path, MINISPEC_DATA="")
    assert r.returncode == 2 and message in r.stderr
    assert r.stderr.startswith("decode.py: ") and r.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_malformed_prompt_line_is_named(toy, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt" "b"}\n')
    r = decode("--model", toy, "--prompts", file)
    assert r.returncode == 2 and f"{file}:2: not a JSON line" in r.stderr and r.stderr.count("\n") == 1


@pytest.mark.parametrize("damage", ["truncated", "mismatched"])
def test_damaged_model_is_named(damage, toy, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(toy, folder)
    if damage == "truncated":
        with open(folder / "model.safetensors", "r+b") as f:
            f.truncate(5000)
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    r = decode("--model", folder, "--json", tmp_path / "o.json")
    assert r.returncode == 2 and r.stderr.count("\n") == 1 and ("damaged" in r.stderr or "has shape" in r.stderr)
    assert os.listdir(tmp_path) == ["model"]


def test_output_path_is_checked_before_the_work(toy, tmp_path):
    for path in (tmp_path / "no" / "such" / "folder.json", tmp_path, "/proc/version"):
        r = decode("--model", toy, "--json", path)
        assert r.returncode == 2 and f"cannot write {path}" in r.stderr and r.stderr.count("\n") == 1 and not r.stdout
    assert os.listdir(tmp_path) == []


FIELDS = {"method", "device", "dtype", "new_tokens", "seconds", "tokens_per_second", "tau", "acceptance_by_position", "phase_seconds", "correct",
          "ar_tokens_per_second", "speedup", "identical", "tie_gap"}


@pytest.mark.parametrize("method", ["ngram", "draft", "specgen"])
def test_json_of_one_prompt(method, toy, tmp_path):
    out = tmp_path / "o.json"
    r = decode("--model", toy, "--draft-model", toy, "--method", method, "--prompt", "one two", "--max-new-tokens", 40, "--compare", "--json", out)
    assert r.returncode == 0, r.stderr
    d = json.loads(out.read_text())
    assert FIELDS | {"prompt_token_ids", "token_ids", "text"} <= set(d)
    assert d["identical"] is True and d["tie_gap"] == 0 and d["correct"] is None and d["new_tokens"] == len(d["token_ids"]) <= 40
    assert {"draft", "verify", "other"} <= set(d["phase_seconds"]) and abs(sum(d["phase_seconds"].values()) - d["seconds"]) < 1e-6
    assert "\033" not in r.stdout and "tau" in r.stdout


def test_json_of_several_prompts_has_totals_and_each(toy, tmp_path):
    out = tmp_path / "o.json"
    r = decode("--model", toy, "--method", "ngram", "--task", "arith", "--n", 3, "--batch", 2, "--max-new-tokens", 30, "--compare", "--json", out)
    assert r.returncode == 0, r.stderr
    d = json.loads(out.read_text())
    assert FIELDS <= set(d) and len(d["requests"]) == 3 and d["new_tokens"] == sum(len(x["token_ids"]) for x in d["requests"])
    assert d["correct"] == sum(x["correct"] for x in d["requests"]) and all(x["identical"] for x in d["requests"])


def test_streams_and_is_seeded(toy):
    args = ["--model", toy, "--prompt", "x", "--max-new-tokens", 30, "--temperature", 1, "--seed", 3]
    a, b = decode(*args), decode(*args)
    text = lambda r: r.stdout.split("tokens/s")[0].rsplit("\n", 1)[0]
    assert a.returncode == 0 and text(a) == text(b) and len(text(a)) > 20
    assert text(a) != text(decode(*args[:-1], 4))
    assert decode(*args, "--quiet").stdout.startswith("ar on cpu")


def test_colours_on_a_terminal_only(toy):
    shown = on_a_terminal([*COMMAND, "--model", str(toy), "--method", "specgen", "--prompt", "hi", "--max-new-tokens", "30"])
    assert b"legend:" in shown and b"\033[32m" in shown


def test_interrupt_keeps_the_text_and_exits_130(tmp_path):
    out = tmp_path / "o.json"
    p = subprocess.Popen([*COMMAND, "--task", "trace", "--size", "190", "--json", str(out)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    prompt = tasks.make("trace", 0, "heldout", 190).prompt.encode()
    seen = b""
    while len(seen) < len(prompt) + 100:                       # the answer has begun
        seen += os.read(p.stdout.fileno(), 4096)
    p.send_signal(signal.SIGINT)
    rest, err = p.communicate(timeout=30)
    assert p.returncode == 130 and b"interrupted" in err and b"Traceback" not in err
    assert seen.startswith(prompt) and os.listdir(tmp_path) == []


def test_main_job_solves_its_problem():
    prompt, started = tasks.make("trace", 2, "heldout", 40).prompt.encode(), time.perf_counter()
    p = subprocess.Popen([*COMMAND, "--method", "specgen"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    seen = b""
    while len(seen) <= len(prompt) + 1:
        chunk = os.read(p.stdout.fileno(), 4096)
        assert chunk, p.stderr.read()
        seen += chunk
    first = time.perf_counter() - started
    rest, err = p.communicate(timeout=300)
    assert p.returncode == 0 and b"answer: correct" in rest, (rest[-500:], err)
    print(f"main job: first token after {first:.1f} s, all after {time.perf_counter() - started:.1f} s")


def test_importing_the_package_keeps_more_kernels_unless_told_otherwise():
    capacity = lambda **env: subprocess.run([sys.executable, "-c", "import minispec, os; print(os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'])"], cwd=ROOT,
                                            capture_output=True, text=True, env={**{k: v for k, v in os.environ.items() if not k.startswith("ONEDNN")}, **env}).stdout.strip()
    assert capacity() == "8192" and capacity(ONEDNN_PRIMITIVE_CACHE_CAPACITY="5") == "5"
