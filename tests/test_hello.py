"""hello.py, the loop on one screen, against the engine: the greedy answer is the same whoever drafts."""
import random
import re
import runpy

import pytest
from conftest import toy_model

from minispec.core import hello
from minispec.core.engine import Engine, Lockstep
from minispec.core.requests import Request
from minispec.tools import methods

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9], list(range(40))]


def nothing(tokens, k):
    return []


def noise(tokens, k):
    rng = random.Random(len(tokens))
    return [rng.randrange(64) for _ in range(k)]


def text_of(rounds):
    return [token for accepted, own in rounds for token in accepted + own]


@pytest.mark.parametrize("draft", [nothing, noise, hello.prompt_lookup])
def test_any_drafter_leaves_the_text_alone(draft):
    model = toy_model()
    for prompt in PROMPTS:
        plain = Engine(model, Lockstep, 1).generate([Request(prompt, 60)])[0].token_ids
        assert text_of(hello.generate(model, prompt, draft, max_new_tokens=60)) == plain
        stop = plain[30]
        short = text_of(hello.generate(model, prompt, draft, max_new_tokens=60, stop_ids=[stop]))
        assert short == plain[:plain.index(stop) + 1]


def test_a_drafter_that_knows_the_answer_needs_a_ninth_of_the_forwards():
    model = toy_model()
    answer = text_of(hello.generate(model, PROMPTS[0], nothing, max_new_tokens=90))

    def oracle(tokens, k):
        return answer[len(tokens) - len(PROMPTS[0]):][:k]

    rounds = list(hello.generate(model, PROMPTS[0], oracle, k=8, max_new_tokens=90))
    assert text_of(rounds) == answer and len(rounds) == 10


def test_the_engine_says_the_same_for_every_method(shipped):
    model, tokenizer = shipped
    prompt = tokenizer.prompt_ids("make lamp 3\n")
    ours = text_of(hello.generate(model, prompt, hello.prompt_lookup, max_new_tokens=40))
    for method in ("ngram", "draft", "prism", "eagle", "specdiff", "specgen", "adaptive"):
        engine = methods.make_engine(method, model, methods.settings(), 1)
        assert engine.generate([Request(prompt, 40)])[0].token_ids == ours, method


def test_the_demo_ends_its_answer(capsys):
    """python -m minispec, with checkpoints found from anywhere; more than one token comes of a forward."""
    runpy.run_module("minispec", run_name="__main__")
    *text, last = capsys.readouterr().out.splitlines()
    tokens, forwards = map(int, re.findall(r"\d+", last)[:2])
    assert "<|answer|>" in "".join(text) and forwards < tokens
