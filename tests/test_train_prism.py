"""train_prism.py as a user meets it, on a toy target: every arm trains, a killed run resumes to the same weights, one drafter starts
from another, and bad input of training and decoding is one clear line."""
import functools
import json
import os
import sys
from unittest import mock

import pytest
import torch
from conftest import TARGET as SHIPPED
from conftest import run_script, train_toy
from safetensors.torch import load_file
from test_prism import toy_drafter

import decode
import train_prism
from minispec import prism
from minispec.tools import checkpoints
from minispec.data import rollouts

script = functools.partial(run_script, train_prism)


def train(folder, out, *args):
    return train_toy(train_prism, folder, out, "--prompts", 24, "--unroll", 3, *args)


def test_training_learns_and_a_killed_run_resumes_to_the_same_weights(folder, monkeypatch, capsys):
    log = train(folder, "whole")
    assert log[-1]["loss"] < 0.8 * log[0]["loss"] and 1 <= log[0]["tau"] < log[-1]["tau"] <= 4 and len(log[-1]["heldout_acceptance"]) == 5
    made = {f: os.path.getmtime(folder / "responses" / f) for f in os.listdir(folder / "responses")}
    assert set(made) == {"settings.json", "train-00000.json", "heldout-00000.json"}

    calls, loss = [], prism.unrolled_loss
    def killed(*args):
        calls.append(1)
        if len(calls) == 17:                                       # some steps behind the first checkpoint
            raise KeyboardInterrupt
        return loss(*args)
    monkeypatch.setattr(prism, "unrolled_loss", killed)
    with pytest.raises(KeyboardInterrupt):
        train(folder, "parts")
    monkeypatch.undo()
    capsys.readouterr()
    again = train(folder, "parts")
    assert "resuming at step 10" in capsys.readouterr().out
    a, b = (load_file(folder / out / "model.safetensors") for out in ("whole", "parts"))
    assert all(torch.equal(a[n], b[n]) for n in a)
    drop = lambda rows: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    assert drop(log) == drop(again)
    assert made["train-00000.json"] == os.path.getmtime(folder / "responses" / "train-00000.json")                 # made once
    assert "train_prism.py --target" in (folder / "whole" / "command.txt").read_text()


@pytest.mark.parametrize("arm", train_prism.ARMS)
def test_every_arm_trains_and_decodes(arm, folder, capsys, tmp_path):
    train(folder, arm, "--arm", arm, "--tokens", "3000", *(["--taps", "three"] if arm == "prism3" else []))
    made = prism.load(folder / arm)
    assert made.config.n_modules == {"prism2": 2, "prism3": 3}.get(arm, 1) and made.config.n_layer == (2 if arm == "stack2" else 1)
    method = "prism" if arm.startswith("prism") else "eagle"
    for shape in ([], ["--tree", "12", "--width", "3"]):
        decode.main(["--model", str(folder / "target"), "--method", method, "--drafter", str(folder / arm), "--prompt", "one two", "--max-new-tokens", "30",
                     "--compare", "--quiet", "--json", str(tmp_path / "o.json"), *shape])
        d = json.loads((tmp_path / "o.json").read_text())
        assert d["identical"] and d["new_tokens"] == 30 and "output: identical to autoregressive" in capsys.readouterr().out


def test_a_drafter_can_start_from_one_with_fewer_modules(folder):
    train(folder, "one", "--arm", "ttt1", "--tokens", "3000")
    train(folder, "two", "--arm", "prism2", "--tokens", "1", "--init", str(folder / "one"), "--lr", "0", "--unroll", "2")
    one, two = load_file(folder / "one" / "model.safetensors"), load_file(folder / "two" / "model.safetensors")
    for name, x in two.items():
        assert torch.equal(x, one[name.replace("bank.1.", "bank.0.")])
    with pytest.raises(ValueError, match="this arm needs 2 and"):
        train(folder, "three", "--arm", "stack2", "--init", str(folder / "one"))


def test_data_prefixes_are_nested_and_answers_belong_to_their_target(folder):
    with mock.patch.object(sys, "argv", ["train_prism.py", "--out", "x", "--target", str(folder / "target")]):
        args = train_prism.parse_args()
    assert rollouts.prompts_of(args, "train", 7) == rollouts.prompts_of(args, "train", 30)[:7]
    assert not set(rollouts.prompts_of(args, "train", 30)) & set(rollouts.prompts_of(args, "heldout", 30))
    train(folder, "short", "--tokens", "100", "--prompts", "10", "--responses", str(folder / "r2"))
    train(folder, "longer", "--tokens", "100", "--prompts", "14", "--responses", str(folder / "r2"))
    rows = json.loads((folder / "r2" / "train-00000.json").read_text())
    assert len(rows) == 14 and rows == json.loads((folder / "responses" / "train-00000.json").read_text())[:14]
    with pytest.raises(ValueError, match="was begun with max_new_tokens 24, not 9; use another folder or the same settings"):
        train(folder, "short", "--max-new-tokens", "9")
    with pytest.raises(ValueError, match="are to other prompts"):
        train(folder, "short", "--tasks", "arith")


BAD = {"arm": (["--arm", "ttt9"], "invalid choice"), "target": (["--target", "nowhere"], "no model folder nowhere"),
       "family": (["--tasks", "chess"], "unknown task family 'chess'"), "steps": (["--unroll", "0"], "unroll 0 is out of range; allowed is 1 or more"),
       "file": (["--prompt-file", "none.jsonl"], "cannot read none.jsonl: No such file"), "init": (["--init", "nowhere"], "no drafter folder nowhere")}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_of_training_is_named_before_anything_is_written(name, folder, tmp_path, capsys):
    args, message = BAD[name]
    with pytest.raises((ValueError, SystemExit)) as e:
        script("--target", str(folder / "target"), "--out", str(tmp_path / "x"), *args)
    said = str(e.value) if isinstance(e.value, ValueError) else capsys.readouterr().err
    assert message in said and said.rstrip().count("\n") == 0 and not (tmp_path / "x").exists()


@pytest.mark.parametrize("args, message", [
    (["--method", "eagle"], "has 2 modules; --method prism takes it"), (["--tree", "1000"], "tree 1000 is out of range; allowed is 0 "),
    (["--tree", "8", "--width", "1"], "width 1 is out of range; a tree needs 2 or more"), (["--depth", "0"], "depth 0 is out of range; allowed is 1 to 32"),
    (["--model", SHIPPED], "made for a target with d_model 32, this one has 256")])
def test_bad_input_of_decoding_is_one_line(args, message, folder, capsys):
    prism.save(toy_drafter(checkpoints.load(folder / "target")), folder / "random")
    with pytest.raises(ValueError) as e:
        decode.main(["--model", str(folder / "target"), "--method", "prism", "--drafter", str(folder / "random"), "--prompt", "x", *args])
    assert message in str(e.value) and "\n" not in str(e.value)
