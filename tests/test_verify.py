"""The acceptance rules, each with a chi-square test over all outputs of length two and a control that must fail it.

False alarms: a correct rule fails a test of this file with probability 1e-6 a chi-square; seeds are fixed, so never.
"""
import pytest
import torch
from conftest import chi_square

from minispec.core.verify import LEAST_TEMPERATURE, Sampling, draw, greedy_tree, rejection_chain, warp

V, ROUNDS = 6, 120_000


def test_warp_by_hand():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    close = lambda a, b: torch.allclose(a, torch.tensor(b, dtype=torch.float), atol=1e-6)
    assert close(warp(logits, Sampling(1.0)), [0.5, 0.25, 0.15, 0.1])
    assert close(warp(logits, Sampling(0.5)), [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345])
    assert close(warp(logits, Sampling(1.0, top_k=2)), [2 / 3, 1 / 3, 0, 0])
    assert close(warp(logits, Sampling(1.0, top_p=0.75)), [2 / 3, 1 / 3, 0, 0])       # 0.5 + 0.25 reaches 0.75
    assert close(warp(logits, Sampling(1.0, top_p=0.76)), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0])
    assert close(warp(logits, Sampling(1.0, top_p=0.01)), [1, 0, 0, 0])               # at least one token stays
    assert close(warp(logits, Sampling(0.0)), [1, 0, 0, 0])


@pytest.mark.parametrize("bad", [dict(temperature=-1), dict(temperature=float("nan")), dict(temperature=1e-38), dict(temperature=1e-40),
                                 dict(top_k=-2), dict(top_p=0), dict(top_p=1.5)])
def test_sampling_ranges(bad):
    with pytest.raises(ValueError, match="out of range; allowed is"):
        Sampling(**bad)


def test_the_least_temperature_is_a_distribution():
    """Logits as large as any model's, divided by it, are still numbers."""
    probs = warp(torch.tensor([1e4, 1e4 - 1e-2, -1e4]), Sampling(LEAST_TEMPERATURE))
    assert probs.isfinite().all() and probs.sum().item() == pytest.approx(1) and probs.argmax() == 0


def test_draw_never_picks_a_token_without_weight():
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0])
    coins = torch.tensor([0.0, 0.32, 0.34, 0.999999, 1.0])
    assert draw(weights.expand(5, 5), coins).tolist() == [1, 1, 3, 3, 3]


def test_greedy_on_a_chain():
    assert greedy_tree([], [], [5]) == ([], 5)
    assert greedy_tree([1, 2, 3], [0, 1, 2], [1, 2, 3, 4]) == ([1, 2, 3], 4)
    assert greedy_tree([1, 9, 3], [0, 1, 2], [1, 2, 3, 4]) == ([1], 2)


def tables(sampling, seed=0):
    """Target and drafter as Markov chains: (p0 (V,), p1 (V, V)) and the same for q, warped alike."""
    g = torch.Generator().manual_seed(seed)
    p = torch.randn(V + 1, V, generator=g) * 1.2
    q = p + torch.randn(V + 1, V, generator=g)                     # a drafter that has learned something
    p, q = warp(p, sampling), warp(q, sampling)
    return (p[V], p[:V]), (q[V], q[:V])


def simulate(sampling, drafter, coins=None, k=2):
    """ROUNDS rounds of k drafts each; returns the counts (V * V) of the first two committed tokens. Rounds that commit
    one token get their second one from the target itself, as the next round would give it."""
    (p0, p1), (q0, q1) = tables(sampling)
    g = torch.Generator().manual_seed(1)
    uniform = lambda *shape: torch.rand(*shape, generator=g)
    pick = lambda probs: probs.argmax(-1) if drafter != "sampled" else draw(probs, uniform(ROUNDS))
    rows = [q0.expand(ROUNDS, V)]
    draft = [pick(rows[0])]
    for _ in range(k - 1):
        rows.append(q1[draft[-1]])
        draft.append(pick(rows[-1]))
    draft = torch.stack(draft, 1)
    q = None if drafter == "point mass" else torch.stack(rows, 1)
    p = torch.stack([p0.expand(ROUNDS, V)] + [p1[draft[:, i]] for i in range(k)], 1)
    c = uniform(ROUNDS, k + 1) if coins is None else coins(uniform, k)
    accepted, token = rejection_chain(draft, q, p, c)
    first = torch.where(accepted > 0, draft[:, 0], token)
    second = torch.where(accepted > 1, draft[:, 1], torch.where(accepted == 1, token, draw(p1[first], uniform(ROUNDS))))
    want = p0[:, None] * p1
    return torch.bincount(first * V + second, minlength=V * V), want.flatten(), accepted


SAMPLINGS = [Sampling(t, 0, top_p) for t in (0.7, 1.0) for top_p in (1.0, 0.8)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", ["sampled", "point mass"])
def test_rejection_is_lossless(sampling, drafter):
    counts, want, accepted = simulate(sampling, drafter)
    assert chi_square(counts, want) > 1e-6
    assert 0 < accepted.float().mean() < 2             # both branches are used


def test_control_one_coin_for_all_drafts_is_rejected():
    reused = lambda uniform, k: uniform(ROUNDS, 1).expand(ROUNDS, k + 1)
    counts, want, _ = simulate(Sampling(1.0), "sampled", reused)
    assert chi_square(counts, want) < 1e-6


def test_control_softmax_ratio_on_argmax_drafts_is_rejected():
    """Drafts are the argmax of q, but judged as if they were drawn from q."""
    counts, want, _ = simulate(Sampling(1.0), "argmax")
    assert chi_square(counts, want) < 1e-6


def test_identical_distributions_accept_everything():
    p = torch.rand(50, 4, V).softmax(-1)
    draft = draw(p[:, :3], torch.rand(50, 3))
    accepted, _ = rejection_chain(draft, p[:, :3], p, torch.rand(50, 4))
    assert (accepted == 3).all()


def test_acceptance_rate_is_one_minus_total_variation():
    (p0, p1), (q0, q1) = tables(Sampling(1.0))
    _, _, accepted = simulate(Sampling(1.0), "sampled")
    assert abs((accepted > 0).float().mean() - torch.minimum(p0, q0).sum()) < 0.01
