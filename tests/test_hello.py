"""hello.py, the loop on one screen, against the engine: the greedy answer is the same whoever drafts."""
import random
import re
import runpy

import pytest
from conftest import toy_model

from minispec.core import hello
from minispec.core.engine import Engine
from minispec.core.requests import Request
from minispec.core.scheduler import SyncScheduler

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9], list(range(40))]


def nothing(tokens, k):
    return []


def noise(tokens, k):
    rng = random.Random(len(tokens))
    return [rng.randrange(64) for _ in range(k)]


def text_of(*args, **more):
    return [token for accepted, own in hello.generate(*args, **more) for token in accepted + own]


@pytest.mark.parametrize("draft", [nothing, noise, hello.prompt_lookup])
def test_any_drafter_leaves_the_text_alone(draft):
    model = toy_model()
    for prompt in PROMPTS:
        plain = Engine(model, SyncScheduler, 1).generate([Request(prompt, 60)])[0].token_ids
        assert text_of(model, prompt, draft, max_new_tokens=60) == plain
        stop = plain[30]
        short = text_of(model, prompt, draft, max_new_tokens=60, stop_ids=[stop])
        assert short == plain[:plain.index(stop) + 1]


def test_a_drafter_that_knows_the_answer_needs_a_ninth_of_the_forwards():
    model = toy_model()
    prompt = PROMPTS[0]
    answer = text_of(model, prompt, nothing, max_new_tokens=90)
    oracle = lambda tokens, k: answer[len(tokens) - len(prompt):][:k]
    rounds = list(hello.generate(model, prompt, oracle, k=8, max_new_tokens=90))
    assert [token for pair in rounds for token in sum(pair, [])] == answer
    assert len(rounds) == 10


def test_the_demo_ends_its_answer(capsys):
    """python -m minispec, with checkpoints found from anywhere; a forward commits more than one token."""
    runpy.run_module("minispec", run_name="__main__")
    *text, last = capsys.readouterr().out.splitlines()
    tokens, forwards = map(int, re.findall(r"\d+", last)[:2])
    assert "<|answer|>" in "".join(text)
    assert forwards < tokens
