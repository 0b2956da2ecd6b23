"""Hard knocks: full disks, damaged and hostile files, prompts and caches of odd sizes, memory that runs out.
The answer is one clear line and exit code 2; nothing is half-written or lost. fuzz.py, of which a few run
here, and kill.py have thousands more."""
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import ROOT, log_of, python, refusal, refused, run_script, toy_model, words
from tqdm import tqdm

import decode
import fuzz
import train_gpt
from minispec import prism
from minispec.core.engine import Engine
from minispec.core.requests import Request
from minispec.specgen import SpecGen
from minispec.tools import checkpoints, drafter_files, files, script, training


# -- disks -----------------------------------------------------------------------------------------------

@pytest.fixture
def full_disk():
    """full_disk(n): files grow to n bytes at most, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda n: resource.setrlimit(resource.RLIMIT_FSIZE, (n, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def write_drafter(folder, n):
    target = toy_model(d_model=n // 25, vocab=9)
    drafter_files.save_drafter(prism.for_target(target), folder, target)


WRITERS = {     # file: a writer of something small or large
    "a.json": lambda folder, n: files.write_json(f"{folder}/a.json", [1] * n),
    "model.safetensors": lambda folder, n: checkpoints.save(toy_model(vocab=n // 10), folder),
    "./model.safetensors": write_drafter,
}


@pytest.mark.parametrize("file", WRITERS)
def test_a_full_disk_keeps_the_old_file(file, tmp_path, full_disk):
    (tmp_path / file).write_text("the old one")
    full_disk(20_000)
    with pytest.raises(ValueError, match=f"cannot write .*{file[-17:]}: .*[Ff]ile too large"):
        WRITERS[file](tmp_path, 20_000)
    assert (tmp_path / file).read_text() == "the old one" and not list(tmp_path.glob("*.tmp"))
    WRITERS["a.json"](tmp_path, 10)
    assert files.read_json(tmp_path / "a.json") == [1] * 10
    full_disk(-1)                                        # pytest -v writes before the fixture ends


def test_devices_pipes_and_links_are_not_replaced(tmp_path):
    """A file renamed over /dev/null would replace it; a link stays, and the file behind it is written."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        for write in (lambda: files.write_json(path, 1), lambda: script.check_writable(path)):
            with refused(f"cannot write {path}: it is not a regular file"):
                write()
    (tmp_path / "real").write_text("old")
    os.symlink("real", tmp_path / "link")
    files.write_json(tmp_path / "link", 1)
    assert (tmp_path / "link").is_symlink() and files.read_json(tmp_path / "real") == 1
    # Standard output may be a file that others write, too.
    with open(tmp_path / "log", "w") as log, refused("it is not a regular file"):
        files.write_json(f"/dev/fd/{log.fileno()}", 1)


def test_interrupted_writing_keeps_the_old_file(tmp_path):
    files.write_json(tmp_path / "a.json", "old")
    with pytest.raises(KeyboardInterrupt), files.replaced(tmp_path / "a.json") as temporary:
        open(temporary, "w").write("half")
        raise KeyboardInterrupt
    assert files.read_json(tmp_path / "a.json") == "old" and os.listdir(tmp_path) == ["a.json"]


def test_training_on_a_full_disk_stops_in_a_line_and_goes_on(tmp_path, full_disk, monkeypatch):
    """The disk has no room for the optimiser's state; later it has."""
    args = f"--out {tmp_path}/out --size tiny --tokens 8e3 --max-length 256 --save-every 2"
    monkeypatch.setattr(train_gpt, "evaluate", lambda *_: {})
    full_disk(400_000)
    with refused("cannot write", "resume.pt: File too large"):
        run_script(train_gpt, args)
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not list((tmp_path / "out").glob("*.tmp"))
    full_disk(-1)
    run_script(train_gpt, args)
    assert [record["step"] for record in log_of(tmp_path / "out")] == [2, 4]


def test_a_full_disk_behind_stdout():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "exercises"]
        r = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert r.returncode == 2
    assert r.stderr == "__main__.py: No space left on device: the output\n"


# -- memory ----------------------------------------------------------------------------------------------

TOO_LARGE = "out of memory; try a smaller --batch, --max-new-tokens or --cache-tokens"


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory")])
def test_out_of_memory_says_what_to_make_smaller(error):
    main = mock.Mock(__name__="x", side_effect=error)
    assert refusal(SimpleNamespace(main=main, __name__="decode")) == TOO_LARGE


def test_bugs_are_still_shown():
    def main():
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        script.run_main(main)
    assert script.fault(KeyError("x"), "") is None
    full = OSError(errno.ENOSPC, "No space left on device", "f")
    assert script.fault(full, "") == "No space left on device: f"


@pytest.mark.parametrize("n, message", [
    (10 ** 12, TOO_LARGE), (10 ** 25, "a cache of 10000000000000000000000000 tokens is out of range")])
def test_a_cache_larger_than_all_memory(n, message, toy):
    assert message in refusal(decode, f"--model {toy} --prompt x --max-new-tokens 4 --cache-tokens {n}")


# -- files -----------------------------------------------------------------------------------------------

def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1:]


ONE_BY_ONE = SimpleNamespace(save_every=1)
BROKEN = {"truncated": lambda data: data[:len(data) // 2], "empty": lambda data: b"", "flipped": flipped}


def train(folder):
    """The training of a toy, from its beginning or from its resume.pt."""
    model = toy_model()
    run = training.Run(ONE_BY_ONE, str(folder), model, 2, 1e-3)
    for step in run.steps():
        ids = torch.tensor([[1, 2, 3]])
        loss = model(ids, torch.arange(3)[None], lambda layer, q, k, v: q).square().mean()
        loss.backward()
        run.update(0.0, loss=loss)
        if run.checkpoint_due():
            run.checkpoint()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder with the resume.pt of a toy."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder)
    return folder


@pytest.mark.parametrize("how", [*BROKEN, "pickled", "another shape", "of nothing"])
def test_a_damaged_checkpoint_is_named_and_left_alone(how, trained, tmp_path):
    class Evil:
        """Unpickled, it would leave a file behind."""

        def __reduce__(self):
            return open, (f"{tmp_path}/pwned", "w")

    shutil.copytree(trained, tmp_path / "run")
    file = tmp_path / "run" / "resume.pt"
    saved = torch.load(file, weights_only=True)
    if how in BROKEN:
        file.write_bytes(BROKEN[how](file.read_bytes()))
    else:
        torch.save({"pickled": {"step": Evil(), "model": {}}, "of nothing": {},
                    "another shape": {**saved, "model": toy_model(vocab=65).state_dict()}}[how], file)
    before = file.read_bytes()
    with pytest.raises(ValueError, match="resume.pt is damaged or of another run; remove it to start") as e:
        train(tmp_path / "run")
    assert not (tmp_path / "pwned").exists()
    assert file.read_bytes() == before and len(str(e.value)) < 1000


def test_a_resumed_run_has_the_minutes_that_are_left(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(training.time, "time", lambda: 1e9)
    shutil.copytree(trained, tmp_path / "run")
    file = tmp_path / "run" / "resume.pt"
    torch.save({**torch.load(file, weights_only=True), "seconds": 90.0, "finished": False}, file)
    run = training.Run(ONE_BY_ONE, str(file.parent), toy_model(), 2, 1e-3, minutes=3)
    assert run.progress(0) == 0.5


def test_the_learning_rate_rises_and_falls(tmp_path):
    run, rates = training.Run(ONE_BY_ONE, str(tmp_path), toy_model(), 9, 1.0), []
    run.bar, run.optimizer.step = mock.Mock(), rates.append
    for done in (0.01, 0.5, 1.0):
        run.update(done)
    assert rates == pytest.approx([0.5, 0.525, 0.05])


def test_weights_that_are_no_numbers_are_not_kept(tmp_path):
    """A loss that explodes ends training before the last good checkpoint is written over."""
    model = toy_model()
    run = training.Run(ONE_BY_ONE, str(tmp_path), model, 2, 1.0)
    with refused("after 1 steps the weights are not finite numbers any more; try a"):
        for step in run.steps():
            (model.embed.weight.sum() * float("nan")).backward()
            run.update(0.0)
            run.checkpoint_due()
    assert os.listdir(tmp_path) == []


# -- prompts and caches ----------------------------------------------------------------------------------

def test_no_tokens_and_ids_out_of_range():
    with refused("an empty prompt"):
        Request([])
    for ids in ([64], [-1], [3, 10 ** 12]):
        with refused("the vocabulary of this model is 0 to 63"):
            Engine(toy_model(), SpecGen).generate([Request(ids, 3)])


@pytest.mark.parametrize("text", ["", "x", "🙂🏳️‍🌈" * 5, "\udcff\udcfe", "\0", "<|eos|><|answer|>",
                                  "é" * 50, "e\u0301\u200b\ufeff"])
def test_prompts_of_any_text(text, toy, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": text or " \n.", "answer": text}))
    for source in (["--prompt", text], ["--prompts", tmp_path / "p.jsonl"]):
        run_script(decode, f"--model {toy} --max-new-tokens 5 --json {tmp_path}/o.json", *source)
        assert len(files.read_json(tmp_path / "o.json")["token_ids"]) <= 5


def test_a_pool_too_small_for_one_request():
    engine = Engine(toy_model(), SpecGen, 4, cache_tokens=30)
    with refused("a cache of 30 tokens cannot hold a request of"):
        engine.generate([Request([1, 2, 3], 5), Request([1] * 30, 5)])


# -- thousands, a few of them ----------------------------------------------------------------------------

def test_a_killed_fork_keeps_no_lock_of_the_progress_bars(tmp_path):
    def main():
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    bars, _ = tqdm.get_lock().locks                      # of all processes, and of threads
    os.waitpid(fuzz.forked(tmp_path, "x", [], main, tmp_path / "said"), 0)
    assert bars.acquire(timeout=5)
    bars.release()


def test_some_fuzzing():
    r = python(*words("tests/fuzz.py --lines 2 --files 2 --seed 5"))
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-1000:]
    out = json.loads(r.stdout.splitlines()[-1])
    assert [out[part]["cases"] for part in ("lines", "files")] == [2, 2]
