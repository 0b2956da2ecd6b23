"""Training data and the training script, at toy size."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TARGET, log_of, outcome, refusal, seeded, table, toy_model, weights, words

import train_gpt
from minispec.core import losses
from minispec.core.gpt import dense_attend
from minispec.data import corpus, tasks
from minispec.tools import training

ARGS = "--size tiny --tokens 10e3 --max-length 256 --seed 7 --device cpu"


def train(out, *args):
    """A training in this process, and how it ended."""
    return outcome(train_gpt, f"--out {out} {ARGS}", *words(*args))


def test_sequences_are_seeded_and_begin_with_the_one_bos(tokenizer):
    texts = set()
    for n in range(8):
        tokens, learn = corpus.sequence(tokenizer, 1, n, 1024)
        assert len(tokens) == len(learn) == 1025
        assert (tokens == tokenizer.special["<|bos|>"]).nonzero().tolist() == [[0]]
        for a, b in zip(corpus.sequence(tokenizer, 1, n, 1024), (tokens, learn)):
            assert torch.equal(a, b)
        texts.add(tuple(tokens.tolist()))
    assert len(texts) == 8


def test_loss_is_taken_on_responses(tokenizer):
    p = tasks.make("arith", 0)
    ids, learn = corpus.encode(tokenizer, p)
    think = ids.index(tokenizer.special["<|think|>"]) + 1
    assert not any(learn[:think]) and all(learn[think:])
    assert tokenizer.answer_text(ids) == p.answer and ids[-1] == tokenizer.special["<|eos|>"]


def test_long_sequences_hold_long_programs(tokenizer):
    marks = []
    for n in range(12):
        tokens, _ = corpus.sequence(tokenizer, 3, n, 4096)
        marks.append((tokens == tokenizer.special["<|prompt|>"]).sum())
    assert min(marks) <= 2 < max(marks)


def test_curriculum_keeps_its_shares():
    plan = train_gpt.schedule(0, 20e6, 10240)
    assert plan[-1][1] >= 20e6 and plan[0][0] == 256
    assert all(length <= 1024 for length, used in plan if used < 0.5 * 20e6)
    # A shorter limit changes the lengths, and not the shares.
    for longest, share in ((10240, 0.2), (2048, 0.6)):
        plan = train_gpt.schedule(0, 20e6, longest)
        last = [length for length, used in plan if used > train_gpt.CURRICULUM[-2][0] * 20e6]
        tokens = sum(length * train_gpt.rows_of(length) for length in last)
        assert abs(last.count(longest) * longest / tokens - share) < 0.08
    for longest in (1024, 700, 100):
        plan = train_gpt.schedule(0, 1e6, longest)
        assert max(plan)[0] == longest
        assert plan[-1][1] == sum(train_gpt.rows_of(length) * length for length, _ in plan)


def test_attention_logits_are_clipped_head_by_head():
    model = toy_model(gain=8.0)
    x = torch.randint(0, 64, (1, 50))
    before = model.blocks[0].qkv.weight.clone()

    def largest():
        logits = []

        def attend(layer, q, k, v):
            scores = torch.einsum("qhd,khd->hqk", q[0], k[0].repeat_interleave(2, 1)) / 8**0.5
            logits.append(scores.tril().max())
            return dense_attend()(layer, q, k, v)

        with torch.no_grad():
            model(x, torch.arange(50)[None], attend)
        return max(logits)

    train_gpt.clip_attention(model, x, 1e9)
    assert largest() > 3
    assert torch.equal(before, model.blocks[0].qkv.weight)
    train_gpt.clip_attention(model, x, 2.0)
    train_gpt.clip_attention(model, x, 2.0)  # what later layers see has changed
    assert largest() < 2.2
    values = slice((4 + 2) * 8, None)
    assert torch.equal(before[values], model.blocks[0].qkv.weight[values])


# A training that stops itself after its first checkpoint.
HELD = """if True:
    import os, signal, train_gpt
    from minispec.tools import training

    def checkpoint(run, real=training.Run.checkpoint, **results):
        real(run, **results)
        os.kill(os.getpid(), signal.SIGSTOP)

    training.Run.checkpoint = checkpoint
    train_gpt.main()"""


def test_killed_training_resumes_to_the_same_weights_and_shares_its_folder_with_no_other(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = "--save-every 2"
    # Not a fork: stopped while it shows its progress, it would keep the lock of this process's progress bars.
    command = [sys.executable, "-c", HELD, *words(f"--out {parts} {ARGS} {settings}")]
    p = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        done = train(whole, settings)
        assert done.returncode == 0, done.stderr
        _, status = os.waitpid(p.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        # It asks for a folder whose owner holds still.
        assert refusal(train_gpt, f"--out {parts} {ARGS} {settings}") == (
            f"{parts} is in use by another training; wait until it ends or use another --out")
    finally:
        p.kill()  # the lock file stays, and stops nobody
        p.communicate()
    assert (parts / "lock").exists()
    assert len(log_of(parts)) < len(log_of(whole))
    done = train(parts, settings)
    assert done.returncode == 0 and "resuming at step" in done.stdout, done.stderr
    a, b = weights(whole), weights(parts)
    assert all(torch.allclose(a[n], b[n], atol=1e-5) for n in a)
    one, two = ([(r["step"], r["heldout"]) for r in log_of(folder)] for folder in (whole, parts))
    assert one == two and one[-1][1]["trace"] < one[0][1]["trace"]


def test_a_run_that_is_killed_at_its_last_file_has_the_others(tmp_path, monkeypatch):
    """Only resume.pt says that it is complete, and the same command then writes no file."""
    def killed(*args):
        raise KeyboardInterrupt
    monkeypatch.setattr(training.torch, "save", killed)
    assert train(tmp_path, "--tokens 2048").returncode == 130
    assert not (tmp_path / "resume.pt").exists()
    assert "train_gpt.py --out" in (tmp_path / "command.txt").read_text()


# Arguments, the line.
BAD = """
--max-length 2000000 | block_size must be a number above 0 and at most 1048576, got 2000000
--max-length 63 | max-length must be 64 or more, got 63
--teacher {toy} | {toy} has a context of 512; it must have 2048 or more
--teacher nowhere | cannot read nowhere/config.json: No such file or directory
"""


def test_bad_input_is_one_line_and_leaves_nothing(toy, tmp_path):
    for args, line in table(BAD.format(toy=toy)):
        assert refusal(train_gpt, f"--out {tmp_path}/x {ARGS} {args}") == line
    assert not (tmp_path / "x").exists()


def test_distillation_learns_the_teachers_distributions(tmp_path, monkeypatch):
    goals = []

    def kl(goal, q, real=train_gpt.kl):
        goals.append(goal.shape)
        return real(goal, q)

    monkeypatch.setattr(train_gpt, "kl", kl)
    done = train(tmp_path / "x", f"--tokens 3e3 --teacher {TARGET}")
    assert done.returncode == 0, done.stderr
    steps = log_of(tmp_path / "x")[-1]["step"]
    assert len(goals) == steps and all(shape[1] == 2048 for shape in goals)


def test_muon_multiplies_in_the_fast_dtype(monkeypatch):
    """torch's multiplies in bf16 everywhere. The other dtype gives nearly the same weights, bf16 the same."""
    trained = {}
    for dtype in (torch.bfloat16, torch.float32, None):
        monkeypatch.setattr(training, "fast_dtype", lambda device: dtype)
        model = toy_model(n_layer=1, gain=1.0)
        optimizer = training.Optimizer(model)
        g = seeded()
        for _ in range(5):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=g)
            if dtype:
                optimizer.step(1e-2)
            else:  # torch's own
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                muon = optimizer.parts[1]
                muon.param_groups[0]["lr"] = 1e-2
                muon.step()
        trained[dtype] = model.blocks[0].qkv.weight
    assert torch.equal(trained[None], trained[torch.bfloat16])
    apart = (trained[None] - trained[torch.float32]).abs().max()
    assert 0 < apart < 2e-3 and torch.Tensor.bfloat16(torch.ones(1)).dtype == torch.bfloat16


def test_without_file_locks_a_training_runs(tmp_path, monkeypatch):
    """As on Windows. (That everything imports there: test_cli.py.)"""
    monkeypatch.setitem(sys.modules, "fcntl", None)  # an import of it fails
    with training.locked(tmp_path):
        assert os.listdir(tmp_path) == ["lock"]
    with pytest.raises(KeyboardInterrupt), training.locked(tmp_path):
        raise KeyboardInterrupt
    with training.locked(tmp_path):
        pass


def test_divergence_is_in_fp32_also_where_products_are_not():
    """Under autocast, of a model that is nearly the target: small, and never below 0."""
    target, noise = torch.randn(2, 64, 500, generator=seeded()) * 3
    logits = (target + 0.03 * noise).requires_grad_()
    p, q = (x.double().softmax(-1) for x in (target, logits))
    with torch.autocast("cpu", torch.bfloat16):
        got = losses.kl(losses.goal_of(target), logits)
    assert torch.allclose(got.double(), (p * (p / q).log()).sum(-1), atol=1e-5)
    assert (got > 0).all()
    got.sum().backward()
    assert torch.allclose(logits.grad.double(), q - p, atol=1e-5)
