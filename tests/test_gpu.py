"""What a GPU needs of the engine and its scripts, seen on a CPU."""
from functools import partial

import pytest
import torch
from conftest import toy_model

from minispec.core import engine as engine_module
from minispec.core.engine import Engine, Lockstep
from minispec.core.requests import Request
from minispec.specgen import SpecGen
from minispec.tools.script import check_device

TARGET = toy_model(vocab=32, head_dim=16)
PROMPTS = [[(7 * i + 11 * j) % 31 for i in range(n)] for j, n in enumerate((9, 40, 1, 17, 30, 2, 25, 12))]
PLANNERS = {
    "ar": Lockstep,
    "specgen": partial(SpecGen, k=3, min_budget=6),
    "specgen delayed": partial(SpecGen, k=3, min_budget=6, delayed=True),
}


def answers(planner):
    engine = Engine(TARGET, planner, 8, prefill_chunk=16)
    return [g.token_ids for g in engine.generate([Request(p, 10) for p in PROMPTS])], engine


@pytest.mark.parametrize("name", PLANNERS)
def test_the_rows_of_all_prompts_have_a_bound(name, monkeypatch):
    """The oldest read first, and everybody's tokens stay what they are."""
    want, before = answers(PLANNERS[name])
    monkeypatch.setattr(engine_module, "PROMPT_ROWS", 20)
    got, engine = answers(PLANNERS[name])
    assert got == want
    assert max(i["prefill"] for i in before.iterations) > 60
    assert max(i["prefill"] for i in engine.iterations) in range(17, 21)
    if name != "specgen delayed":
        assert not any(i["stalled"] for i in engine.iterations)    # who waits for room does not wait for a verdict


def test_the_device_of_a_script_is_the_current_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    check_device("cuda:1")
    assert chosen == [1]
