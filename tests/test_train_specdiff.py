"""train_specdiff.py as a user meets it, on a toy target: every objective trains, a killed run resumes to the same weights, one drafter
goes on from another, and bad input of training and decoding is one clear line. Letters and numbers are those of our checklist."""
import functools
import json
import math

import pytest
import torch
from conftest import TARGET as SHIPPED
from conftest import dense_logits, run_script, train_toy
from safetensors.torch import load_file
from test_specdiff import toy_drafter

import decode
import train_specdiff
from minispec import prism, specdiff
from minispec.tools import checkpoints
from minispec.tools.training import fast_dtype
from minispec.data import recorded, rollouts
from minispec.tools.checkpoints import load_drafter, save_drafter


script = functools.partial(run_script, train_specdiff)


def train(folder, out, *args, responses="responses", temperature="1"):
    return train_toy(train_specdiff, folder, out, "--responses", folder / responses, "--temperature", temperature, "--prompts", 16, "--windows", 8, *args)


def test_training_learns_and_a_killed_run_resumes_to_the_same_weights(folder, monkeypatch, capsys):
    """D2 and D5: the target stays as it is; the same seed gives the same curve, interrupted or not."""
    before = (folder / "target" / "model.safetensors").read_bytes()
    log = train(folder, "whole", "--gamma", 4, "--lr", "1e-2", temperature="0", responses="greedy")
    assert log[-1]["loss"] < 0.9 * log[0]["loss"]
    assert 1 <= log[0]["heldout_tau"]["greedy"] < log[-1]["heldout_tau"]["greedy"] <= 5

    calls, loss = [], specdiff.training_loss
    def killed(*args):
        calls.append(1)
        if len(calls) == 9:                                        # some steps behind the first checkpoint
            raise KeyboardInterrupt
        return loss(*args)
    monkeypatch.setattr(specdiff, "training_loss", killed)
    with pytest.raises(KeyboardInterrupt):
        train(folder, "parts", "--gamma", 4, "--lr", "1e-2", temperature="0", responses="greedy")
    monkeypatch.undo()
    capsys.readouterr()
    again = train(folder, "parts", "--gamma", 4, "--lr", "1e-2", temperature="0", responses="greedy")
    assert "resuming at step 6" in capsys.readouterr().out
    a, b = (load_file(folder / out / "model.safetensors") for out in ("whole", "parts"))
    assert all(torch.equal(a[n], b[n]) for n in a) and not any(n.startswith("words") for n in a)
    drop = lambda rows: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    assert drop(log) == drop(again)
    assert before == (folder / "target" / "model.safetensors").read_bytes()
    assert "train_specdiff.py --target" in (folder / "whole" / "command.txt").read_text()


@pytest.mark.parametrize("name", specdiff.OBJECTIVES)
def test_every_objective_trains_and_decodes(name, folder, capsys, tmp_path):
    shape = {"mdlm": ["--blind"], "ce": ["--draft-vocab", 500]}.get(name, [])
    log = train(folder, name, "--objective", name, *shape, "--gamma", 4, "--tokens", "2000")
    assert all(math.isfinite(x) for x in (log[-1]["loss"], *log[-1]["heldout_tau"].values()))
    made = load_drafter(folder / name, checkpoints.load(folder / "target"), specdiff.SpecDiffConfig)
    assert made.config.reads == (name != "mdlm")
    assert made.config.draft_vocab == (500 if name == "ce" else 0)
    rule = {"mdlm": ["--rule", "walk"], "ce": ["--gamma", 6, "--rule", "selection", "--k-drafts", 4],
            "streak-rs": ["--k-drafts", 3, "--draft-temperature", 0.7]}.get(name, [])
    decode.main([str(x) for x in ("--model", folder / "target", "--method", "specdiff", "--drafter", folder / name, "--prompt", "one two", "--max-new-tokens", 20,
                                  "--compare", "--json", tmp_path / "o.json", *rule)])
    d = json.loads((tmp_path / "o.json").read_text())
    assert d["identical"] and d["new_tokens"] == 20 and "output: identical to autoregressive" in capsys.readouterr().out


def test_stored_answers_are_ids_with_their_probabilities(folder):
    """D1: what is stored is what was sampled, with its end of text, under the probabilities that it was sampled with."""
    train(folder, "ids", "--tokens", "100")
    target = checkpoints.load(folder / "target", dtype=fast_dtype("cpu"))   # the one that wrote the answers
    shard = load_file(folder / "responses" / "train-0-16.safetensors")
    assert {name.split(".")[0] for name in shard} == set(map(str, range(16)))
    for i in range(4):
        kept = {name: shard[f"{i}.{name}"] for name in recorded.Batch._fields}
        prompt, answer = kept["ids"][~kept["learn"]].tolist(), kept["ids"][kept["learn"]].tolist()
        n = len(prompt)
        want = dense_logits(target, prompt + answer).float()
        assert kept["ids"].tolist() == prompt + answer and (len(answer) == 24 or answer[-1] == target.config.eos_id)
        assert (kept["log_p"][n:] - want[n - 1:-1].log_softmax(-1)[torch.arange(len(answer)), answer]).abs().max() < 0.02
        # The states are those of the forwards that decoded, which round otherwise than one forward over the text.
        best = want[torch.arange(n - 1, len(want) - 1), kept["best"][n - 1:-1]]
        assert not kept["log_p"][:n].any() and (want[n - 1:-1].amax(-1) - best).max() < 0.05
        got = target.logits(kept["hidden"].to(target.dtype)).float()
        assert kept["hidden"].dtype == torch.bfloat16 and (got - want)[:-1].abs().max() < 0.05 * want.abs().max()
    assert not rollouts.read(target, prompt, answer, 0)["log_p"].any()             # greedy: a point mass
    eos = target.config.eos_id                                     # an end of text is a token like any other, and nothing follows it
    rows = [([5, 6], [7, eos], 1), ([5], [7, 8, 9, 4], 1)]
    seen = [rollouts.read(target, *row) for row in rows]
    seen[1] = {name: x[:4] for name, x in seen[1].items()}         # a text that was cut
    batch = recorded.padded(seen)
    assert batch.ids[:, :4].tolist() == [[5, 6, 7, eos], [5, 7, 8, 9]] and not batch.ids[:, 4:].any() and not batch.learn[:, 4:].any()
    assert batch.learn[:, :4].tolist() == [[False, False, True, True], [False, True, True, True]]
    assert batch.log_p[0, :2].tolist() == [0, 0] and (batch.log_p[0, 2:4] < 0).all() and batch.hidden.shape == (2, 16, 32)


def test_a_drafter_can_go_on_from_another(folder):
    train(folder, "one", "--objective", "ce", "--gamma", 4, "--tokens", "2000")
    train(folder, "two", "--objective", "streak", "--init", folder / "one", "--lr", "0", "--gamma", 4, "--tokens", "1")
    one, two = (load_file(folder / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[n], two[n]) for n in one)
    train(folder, "longer", "--objective", "streak", "--init", folder / "one", "--lr", "0", "--gamma", 6, "--tokens", "1")
    assert [load_drafter(folder / name, checkpoints.load(folder / "target"), specdiff.SpecDiffConfig).config.gamma for name in ("one", "two", "longer")] == [4, 4, 6]


def test_a_drafter_can_start_as_an_eagle_head(folder):
    target = checkpoints.load(folder / "target")
    save_drafter(prism.for_target(target, (0,)), folder / "head", target)
    save_drafter(specdiff.for_target(target, gamma=4, reads=True), folder / "trained", target)
    train(folder, "from-head", "--init", folder / "head", "--lr", "0", "--gamma", 4, "--tokens", "1")
    made, head = load_drafter(folder / "from-head", target, specdiff.SpecDiffConfig), load_drafter(folder / "head", target, prism.PrismConfig)
    assert made.config.n_layer == 2 and made.config.reads and made.config.gamma == 4
    assert torch.equal(made.join.weight, head.bank[0].join.weight) and torch.equal(made.blocks[0].qkv.weight, head.bank[0].blocks[0].qkv.weight)
    assert not made.blocks[1].out.weight.any() and not made.blocks[1].down.weight.any()
    for init in ("head", "trained"):
        with pytest.raises(ValueError, match="reads the target's states; --blind cannot change"):
            train(folder, "refused", "--init", folder / init, "--blind")


BAD = {"objective": (["--objective", "best"], "invalid choice"), "target": (["--target", "nowhere"], "cannot read nowhere/config.json"),
       "gamma": (["--gamma", "1"], "gamma 1 is out of range; allowed is 2 to 32"), 
       "windows": (["--windows", "0"], "windows 0 is out of range; allowed is 1 or more"), "init": (["--init", "nowhere"], "cannot read nowhere/config.json"),
       "temperature": (["--temperature", "-1"], "temperature -1 is out of range")}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_of_training_is_named_before_anything_is_written(name, folder, tmp_path, capsys):
    args, message = BAD[name]
    with pytest.raises((ValueError, SystemExit)) as e:
        script("--target", folder / "target", "--out", tmp_path / "x", *args)
    said = str(e.value) if isinstance(e.value, ValueError) else capsys.readouterr().err
    assert message in said and said.rstrip().count("\n") == 0 and not (tmp_path / "x").exists()


@pytest.mark.parametrize("args, message", [
    (["--gamma", "0"], "gamma 0 is out of range; allowed is 1 to 32"), (["--k-drafts", "0"], "k-drafts 0 is out of range; allowed is 1 to 64"),
    (["--gamma", "16", "--k-drafts", "17"], "k-drafts 17 is out of range; allowed is 1 to 16"),
    (["--draft-temperature", "-1"], "draft-temperature -1.0 is out of range"), (["--model", SHIPPED], "made for a target with"),
    (["--drafter", SHIPPED], "this is not a drafter made by train_specdiff.py")])
def test_bad_input_of_decoding_is_one_line(args, message, folder):
    target = checkpoints.load(folder / "target")
    save_drafter(toy_drafter(target), folder / "random", target)
    with pytest.raises(ValueError) as e:
        decode.main(["--model", str(folder / "target"), "--method", "specdiff", "--drafter", str(folder / "random"), "--prompt", "x", *args])
    assert message in str(e.value) and "\n" not in str(e.value)
