"""Training data and the training script, at toy size."""
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import torch
from conftest import ROOT, TARGET, outcome, toy_model
from safetensors.torch import load_file

import train_gpt
from minispec.data import corpus, tasks
from minispec.core.attention import dense_attend
from minispec.data.tokenizer import Tokenizer

ARGS = ["--size", "tiny", "--tokens", "16e3", "--max-length", "256", "--warmup", "5", "--tokenizer", TARGET, "--seed", "7", "--device", "cpu"]


def train(out, *args):
    """A training in this process, and how it ended."""
    return outcome(train_gpt, "--out", out, *ARGS, *args, MINISPEC_DATA="")


def test_sequences_are_seeded_and_begin_with_the_one_bos():
    tokenizer = Tokenizer.load(TARGET)
    stream = corpus.Stream(tokenizer, corpus.real_documents(None), 0.3, seed=1)
    bos, same = tokenizer.special["<|bos|>"], corpus.Stream(tokenizer, corpus.real_documents(None), 0.3, seed=1)
    for n in range(8):
        tokens, positions, learn = stream.sequence(n, 1024, 10240)
        assert len(tokens) == len(positions) == len(learn) == 1025
        assert tokens[0] == bos and (tokens == bos).sum() == 1 and positions[0] == 0
        assert (np.diff(positions) >= 1).all() and positions[-1] < 10240
        assert all(np.array_equal(a, b) for a, b in zip((tokens, positions, learn), same.sequence(n, 1024, 10240)))
    assert not np.array_equal(stream.sequence(0, 1024)[0], stream.sequence(1, 1024)[0])


def test_loss_is_taken_on_responses():
    tokenizer = Tokenizer.load(TARGET)
    p = tasks.make("arith", 0)
    ids, learn = corpus.encode(tokenizer, (p.prompt, p.think, p.answer))
    think = ids.index(tokenizer.special["<|think|>"])
    assert not any(learn[:think + 1]) and all(learn[think + 1:])
    assert tokenizer.answer_text(ids) == p.answer and ids[-1] == tokenizer.special["<|eos|>"]


def test_long_sequences_hold_long_programs():
    tokenizer = Tokenizer.load(TARGET)
    stream, marks = corpus.Stream(tokenizer, {}, 0, seed=3), []
    for n in range(12):
        tokens, _, _ = stream.sequence(n, 4096)
        marks.append((tokens == tokenizer.special["<|prompt|>"]).sum())
    assert min(marks) <= 2 < max(marks)


def test_curriculum_keeps_its_shares():
    plan = train_gpt.schedule(0, 20e6, 10240)
    assert plan[-1][1] >= 20e6 and plan[0][0] == 256 and all(length <= 1024 for length, used in plan if used < 0.5 * 20e6)
    late = [length for length, used in plan if used > train_gpt.CURRICULUM[-2][0] * 20e6]
    tokens = sum(train_gpt.BATCH_TOKENS[length] for length in late)
    share = sum(train_gpt.BATCH_TOKENS[length] for length in late if length == 10240) / tokens
    assert abs(share - train_gpt.CURRICULUM[-1][1][10240]) < 0.08
    assert max(length for length, _ in train_gpt.schedule(0, 1e6, 1024)) == 1024


def test_attention_logits_are_clipped_head_by_head():
    model = toy_model(gain=8.0)
    x, positions = torch.randint(0, 64, (1, 50)), torch.arange(50)[None]
    before = model.blocks[0].qkv.weight.clone()
    assert train_gpt.clip_attention(model, x, positions, 1e9) > 3 and torch.equal(before, model.blocks[0].qkv.weight)
    train_gpt.clip_attention(model, x, positions, 2.0)
    train_gpt.clip_attention(model, x, positions, 2.0)          # what later layers see has changed
    assert train_gpt.clip_attention(model, x, positions, 1e9) < 2.2
    values = slice((4 + 2) * 8, None)
    assert torch.equal(before[values], model.blocks[0].qkv.weight[values])


def test_entropy_of_uniform_attention():
    entropies, rows = [], torch.tensor([0, 9, 49])
    toy_model(gain=0.0)(torch.randint(0, 64, (1, 50)), torch.arange(50)[None], train_gpt.entropy_attend(rows, entropies, dense_attend()))
    want = torch.log(rows + 1.0).mean()
    assert len(entropies) == 2 and all(abs(e - want) < 1e-4 for e in entropies)


def log(folder):
    with open(folder / "log.jsonl") as f:
        return [json.loads(line) for line in f]


def test_killed_training_resumes_to_the_same_weights_and_shares_its_folder_with_no_other(tmp_path):
    whole, parts, settings = tmp_path / "whole", tmp_path / "parts", ("--save-every", "3", "--sharpen", "0.01")
    p = subprocess.Popen([sys.executable, os.path.join(ROOT, "train_gpt.py"), "--out", parts, *ARGS, *settings],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "MINISPEC_DATA": ""})

    def hold():
        while not (parts / "resume.pt").exists() and p.poll() is None:
            time.sleep(0.01)
        p.send_signal(signal.SIGSTOP)

    holding = threading.Thread(target=hold)
    holding.start()
    done = train(whole, *settings)
    assert done.returncode == 0, done.stderr
    holding.join()
    second = train(parts, *settings)                    # it asks for a folder whose owner holds still
    assert second.returncode == 2
    assert second.stderr == (f"train_gpt.py: {parts} is in use by another training, process {p.pid}; "
                             "wait until it ends or use another --out\n")
    p.send_signal(signal.SIGKILL)                       # the lock file stays, and stops nobody
    p.communicate()
    assert (parts / "lock").read_text() == f"{p.pid}\n" and len(log(parts)) < len(log(whole))
    done = train(parts, *settings)
    assert done.returncode == 0 and "resuming at step" in done.stdout, done.stderr
    a, b = load_file(whole / "model.safetensors"), load_file(parts / "model.safetensors")
    assert all(torch.allclose(a[n], b[n], atol=1e-5) for n in a)
    assert [(r["step"], r["trace"]) for r in log(whole)] == [(r["step"], r["trace"]) for r in log(parts)]
    first, last = (log(whole)[i]["trace"]["loss"] for i in (0, -1))
    assert last < first and "train_gpt.py --out" in (parts / "command.txt").read_text()

    # And a run that starts from this one is at once where this one ended.
    done = train(tmp_path / "more", "--init", whole, "--save-every", "1", "--tokens", "4e3", "--lr", "1e-4")
    assert done.returncode == 0, done.stderr
    assert abs(log(tmp_path / "more")[0]["trace"]["loss"] - last) < 0.1 < first - last
    done = train(tmp_path / "other", "--init", whole, "--size", "micro")
    assert done.returncode == 2 and "has another shape than --size micro" in done.stderr


def test_distillation_needs_its_teacher(tmp_path):
    p = train(tmp_path / "x", "--teacher", "nowhere")
    assert p.returncode == 2 and p.stderr == "train_gpt.py: no model folder nowhere\n" and not (tmp_path / "x").exists()


def test_real_text_is_read_where_it_is(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    rows = [{"question": f"What is {i}?", "answer": f"It is <<{i}={i}>>{i}\n#### {i}"} for i in range(40)]
    (tmp_path / "gsm8k" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train_ = corpus.real_documents(str(tmp_path))
    held = [row["question"] for row in rows if tasks.is_heldout(row["question"])]
    read = [prompt.strip() for prompt, _, _ in train_["gsm8k"]]
    assert held and sorted(read + held) == sorted(row["question"] for row in rows)
    assert train_["gsm8k"][0][1].startswith("It is ") and "<<" not in train_["gsm8k"][0][1]
    assert "code" in train_ and "books" not in corpus.real_documents(None)
