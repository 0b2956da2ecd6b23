"""The studies of trained drafters: intervals are what they say, arms are compared on the same prompts, every table renders."""
import json
import os

import numpy as np
import pytest
import torch
from conftest import save_toy_target

import bench
from minispec import prism, specdiff
from minispec.data import tasks
from minispec.studies import drafters
from minispec.tools import checkpoints, methods
from minispec.data.tokenizer import Tokenizer


def test_intervals_hold_the_true_value_as_often_as_they_say():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(300):
        rounds = rng.integers(20, 40, 60).astype(float)
        committed = rng.binomial(5, 0.5, 60) / 5 * rounds + rounds             # a true tau of 1.5
        low, high = drafters.interval(np.stack([committed, rounds], 1), draws=300)
        hits += low <= 1.5 <= high
    assert 270 <= hits <= 297                                                  # 95 % of 300, and not everything
    prompts, more = np.stack([committed, rounds], 1), np.stack([1.02 * committed, rounds], 1)
    assert drafters.interval(prompts, prompts) == [1.0, 1.0]
    low, high = drafters.interval(more, prompts)
    assert low == pytest.approx(1.02) == high                                  # paired: what all prompts share is certain


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A random target, two PRISM arms of which one drafts as it does not, a diffusion drafter; and the settings of a quick study."""
    folder = tmp_path_factory.mktemp("studies")
    save_toy_target(folder, block_size=2048)
    target = checkpoints.load(folder / "target")
    arms = folder / "arms"
    for name, step_map in (("ttt1", (0,)), ("prism2", (0, 1))):
        checkpoints.save_drafter(prism.for_target(target, step_map), arms / name, target)
    checkpoints.save_drafter(specdiff.for_target(target, n_layer=1, gamma=3, reads=True), arms / "ce", target)
    for name in ("ttt1", "prism2", "ce"):
        (arms / name / "log.jsonl").write_text(json.dumps({"tokens": 1e6, "seconds": 60}) + "\n")
    (arms / "notes.txt").write_text("not a drafter")
    return target, Tokenizer.load(folder / "target"), methods.settings(quick=True, arms=str(arms), data=None, drafter=str(arms / "ce"))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(tasks, "FAMILIES", ("revise", "arith"))
    monkeypatch.setattr(drafters, "NEW", 10)


def test_arms_are_compared_on_the_same_prompts(toy, small):
    target, tokenizer, args = toy
    out = drafters.prism_arms(args, target, tokenizer)
    assert set(out["arms"]) == {"ttt1", "prism2"} and out["reference"] == "ttt1" and out["prompts"] == 8
    one = out["arms"]["ttt1"]["at_0"]
    assert one["ratio"] == 1 and one["ratio_interval"] == [1, 1]
    assert one["interval"][0] <= one["tau"] <= one["interval"][1] and len(one["by_depth"]) == 5
    assert 2 * out["arms"]["ttt1"]["parameters"] == out["arms"]["prism2"]["parameters"]
    assert bench.render("prism_arms", json.loads(json.dumps(out))).count("\n") == 7           # each alone, in trees, with copies
    out = drafters.specdiff_objectives(args, target, tokenizer)
    assert set(out["arms"]) == {"ce"} and {"at_0", "at_1"} <= set(out["arms"]["ce"])
    assert "temperature 1" in bench.render("specdiff_objectives", json.loads(json.dumps(out)))


def test_a_way_is_a_command_line_that_outweighs_the_settings(toy):
    target, _, args = toy
    args = methods.settings(**{**vars(args), "drafter": os.path.join(args.arms, "ttt1"), "lookup": 3})
    planner = drafters.whole_rounds("prism --depth 8 --tree 60", target, args, 1, tree=0, lookup=0).planner
    assert (planner.k, planner.lookup, planner.drafter.depth, planner.drafter.width, planner.drafter.stop) == (60, 0, 8, 8, 0)
    planner = drafters.whole_rounds("prism --prompt-lookup 8", target, args, 1, tree=0, lookup=0).planner
    assert (planner.k, planner.lookup, planner.drafter.width) == (5, 8, 1)


def test_seeds_of_an_arm_are_added_up_and_sizes_kept_apart(toy, small, tmp_path):
    """Names say which is which; an arm is held against the reference of its own size, and has no ratio where there is none."""
    assert [drafters.arm_of(x) for x in ("prism2", "ttt1-125", "ttt1-125-s3", "exp-ce-s1", "mdlm_more")] == [("prism2", 0), ("ttt1", 125), ("ttt1", 125), ("exp-ce", 0), ("mdlm_more", 0)]
    target, tokenizer, args = toy
    for i, name in enumerate(("ttt1-64-s1", "ttt1-64-s2", "prism2-64-s1", "prism2-128")):
        torch.manual_seed(i)
        checkpoints.save_drafter(prism.for_target(target, (0, 1) if "2-" in name[:7] else (0,)), tmp_path / name, target)
        (tmp_path / name / "log.jsonl").write_text(json.dumps({"tokens": 1e6, "seconds": 60}) + "\n")
    out = drafters.prism_arms(methods.settings(**{**vars(args), "arms": str(tmp_path)}), target, tokenizer)
    assert list(out["arms"]) == ["prism2, 128 prompts", "prism2, 64 prompts", "ttt1, 64 prompts"] and out["reference"] == "ttt1"
    two = out["arms"]["ttt1, 64 prompts"]
    assert two["seeds"] == 2 and two["at_0"]["ratio"] == 1
    assert "ratio" not in out["arms"]["prism2, 128 prompts"]["at_0"] and "ratio" in out["arms"]["prism2, 64 prompts"]["at_0"]
    assert "| prism2, 128 prompts | 1 |" in bench.render("prism_arms", json.loads(json.dumps(out)))


def test_chains_run_and_render(toy, small):
    target, tokenizer, args = toy
    out = drafters.specdiff_chains(args, target, tokenizer)
    text = bench.render("specdiff_chains", json.loads(json.dumps(out)))
    assert text.startswith("| ") and "nan" not in text
    assert all(r["identical"] == r["prompts"] for r in out["rows"] if r["temperature"] == 0)


@pytest.mark.parametrize("arms", [None, "/nowhere", "empty"])
def test_no_arms_is_one_clear_line(arms, toy, tmp_path):
    settings = methods.settings(**{**vars(toy[2]), "arms": str(tmp_path) if arms == "empty" else arms})
    with pytest.raises(ValueError, match="train_prism.py") as e:
        drafters.prism_arms(settings, toy[0], toy[1])
    assert "\n" not in str(e.value)
