"""Distributions, noise and draws; the acceptance rules have chi-square tests in test_specdiff.py, the engine
in test_engine.py.

Correct noise fails a chi-square test of this file with probability 1e-6. Seeds are fixed, so it never does by
chance.
"""

from functools import cache

import pytest
import torch
from conftest import chi_square, refused, seeded

from minispec.core import verify
from minispec.core.noise import stream
from minispec.core.verify import LEAST_TEMPERATURE, Sampling, draw, rejection, scores, warp

V = 6


@pytest.mark.parametrize(
    "sampling, weights",
    [
        (Sampling(1.0), [50, 25, 15, 10]),
        (Sampling(0.5), [2500, 625, 225, 100]),
        (Sampling(2.0), [weight**0.5 for weight in (50, 25, 15, 10)]),
        (Sampling(1.0, top_k=2), [2, 1, 0, 0]),
        (Sampling(1.0, top_p=0.75), [2, 1, 0, 0]),  # 0.5 + 0.25 reaches 0.75
        (Sampling(1.0, top_p=0.76), [50, 25, 15, 0]),
        (Sampling(1.0, top_p=0.01), [1, 0, 0, 0]),  # at least one token stays
        (Sampling(1.0, top_p=1e-50), [1, 0, 0, 0]),
        (Sampling(0.0), [50, 25, 15, 10]),
    ],
    ids=str,
)
def test_warp_by_hand(sampling, weights):
    want = torch.tensor(weights) / sum(weights)
    got = warp(torch.tensor([0.5, 0.25, 0.15, 0.1]).log(), sampling)
    assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(
    "bad",
    [
        *(dict(temperature=t) for t in (-1, float("nan"), 1e-38, 1e-40)),
        dict(top_k=-2),
        dict(top_p=0),
        dict(top_p=1.5),
        dict(seed=-1),
        dict(seed=1 << 63),
    ],
)
def test_sampling_ranges(bad):
    with refused("out of range; allowed is"):
        Sampling(**bad)


def test_rules_are_named():
    with refused("one of coupled, rejection, point-mass, selection, walk, got fair"):
        Sampling(rule="fair")
    assert Sampling(1.0, rule="point-mass").drafting.temperature == 0 < Sampling(1.0).drafting.temperature


def test_the_least_temperature_is_a_distribution():
    """Logits as large as any model's, divided by it, are still numbers."""
    probs = warp(torch.tensor([1e4, 1e4 - 1e-2, -1e4]), Sampling(LEAST_TEMPERATURE))
    assert probs.isfinite().all()
    assert probs.argmax() == 0
    assert probs.sum().item() == pytest.approx(1)


def test_draw_never_picks_a_token_without_weight():
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0])
    coins = torch.tensor([0.0, 0.32, 0.34, 0.999999, 1.0])
    assert draw(weights.expand(5, 5), coins).tolist() == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("sampling", [Sampling(LEAST_TEMPERATURE), Sampling(1.0, 1)], ids=str)
def test_noise_never_picks_a_token_without_weight(sampling):
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.9]] * 4000)
    assert (scores(logits, sampling, [stream(1)] * 4000, range(4000)).argmax(-1) == 1).all()


# -- the law: a Markov chain as target, another one as drafter -----------------------------------------------


def test_identical_distributions_accept_everything():
    g = seeded()
    for p in torch.rand(50, 4, V, generator=g).softmax(-1):
        draft = draw(p[:3], torch.rand(3, generator=g)).tolist()
        assert rejection([([1, 2, 3], p[:3])], draft, p, torch.rand(4, generator=g))[0] == [1, 2, 3]


ROUNDS = 40_000


@cache
def streams():
    return [stream(seed) for seed in range(ROUNDS)]


def choose(p, position):
    """Choices from p (V,), or p (ROUNDS, V), at a position, with the noise of many seeds."""
    rows = p.log().expand(ROUNDS, V)
    return scores(rows, Sampling(1.0), streams(), [position] * ROUNDS).argmax(-1)


@pytest.mark.parametrize("sampling", [Sampling(t, 0, top_p) for t in (0.7, 1.0) for top_p in (1.0, 0.8)])
def test_noise_draws_from_p_and_couples_drafts(sampling):
    """Two tokens of the target, a Markov chain whose first row is p[V]; a first token of the drafter."""
    g = seeded()
    p = torch.randn(V + 1, V, generator=g) * 1.2
    q = p + torch.randn(V + 1, V, generator=g)  # a drafter that has learned something
    p, q = warp(p, sampling), warp(q, sampling)
    first = choose(p[V], 9)
    law = (p[V][:, None] * p[:V]).flatten()
    fits = lambda second: chi_square(torch.bincount(first * V + second, minlength=V * V), law) > 1e-6
    assert fits(choose(p[first], 10))
    # The control has the same noise at both positions.
    assert not fits(choose(p[first], 9))
    # The bounds of the coupling (Daliri, Musco, Suresh).
    hits = (choose(q[V], 9) == first).float().mean()
    alpha = torch.minimum(p[V], q[V]).sum()
    assert alpha / (2 - alpha) - 0.01 < hits < alpha + 0.01


def test_large_sums_of_halves_are_numbers():
    verify.check_numbers(torch.full((2, 50_000), -2.0).half())
    with refused("must be numbers"):
        verify.check_numbers(torch.tensor([1.0, float("nan")]).half())
