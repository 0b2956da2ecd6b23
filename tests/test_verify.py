"""The acceptance rules, each with a chi-square test over all outputs of length two and a control that must fail it.

False alarms: a correct rule fails a test of this file with probability 1e-6 a chi-square; seeds are fixed, so never.
"""
import pytest
import torch
from conftest import chi_square

from minispec.core.noise import stream
from minispec.core.verify import LEAST_TEMPERATURE, Sampling, draw, greedy_tree, rejection, scores, warp

V, ROUNDS = 6, 6_000


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
    with pytest.raises(ValueError, match="rule must be one of coupled, rejection, point-mass, selection, walk, got fair"):
        Sampling(rule="fair")


def test_the_least_temperature_is_a_distribution():
    """Logits as large as any model's, divided by it, are still numbers."""
    probs = warp(torch.tensor([1e4, 1e4 - 1e-2, -1e4]), Sampling(LEAST_TEMPERATURE))
    assert probs.isfinite().all() and probs.sum().item() == pytest.approx(1) and probs.argmax() == 0


def test_draw_never_picks_a_token_without_weight():
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0])
    coins = torch.tensor([0.0, 0.32, 0.34, 0.999999, 1.0])
    assert draw(weights.expand(5, 5), coins).tolist() == [1, 1, 3, 3, 3]
    for temperature, top_k in ((LEAST_TEMPERATURE, 0), (1.0, 1)):                     # nor does a race of clocks
        logits = torch.tensor([[0.0, 3.0, 1.0, 2.9]] * 4000)
        assert set(scores(logits, Sampling(temperature, top_k), [stream(1)] * 4000, range(4000)).argmax(-1).tolist()) == {1}


def test_greedy_on_a_chain():
    assert greedy_tree([], [], [5]) == ([], 5)
    assert greedy_tree([1, 2, 3], [0, 1, 2], [1, 2, 3, 4]) == ([1, 2, 3], 4)
    assert greedy_tree([1, 9, 3], [0, 1, 2], [1, 2, 3, 4]) == ([1], 2)


# -- the law: a Markov chain as target, another one as drafter -----------------------------------------------------------

def tables(sampling, seed=0):
    """Target and drafter as Markov chains: (p0 (V,), p1 (V, V)) and the same for q, warped alike."""
    g = torch.Generator().manual_seed(seed)
    p = torch.randn(V + 1, V, generator=g) * 1.2
    q = p + torch.randn(V + 1, V, generator=g)                     # a drafter that has learned something
    p, q = warp(p, sampling), warp(q, sampling)
    return (p[V], p[:V]), (q[V], q[:V])


def simulate(sampling, drafter, coins=lambda coins: coins, rounds=ROUNDS, k=2):
    """Rounds of k drafts each, judged by rejection; returns the counts (V * V) of the first two committed tokens, and what was
    accepted. Rounds that commit one token get their second one from the target itself, as the next round would give it."""
    (p0, p1), (q0, q1) = tables(sampling)
    g = torch.Generator().manual_seed(1)
    counts, lengths = torch.zeros(V * V, dtype=torch.long), []
    for i in range(rounds):
        rows, draft = [q0], []
        for coin in torch.rand(k, generator=g):
            draft.append(rows[-1].argmax().item() if drafter != "sampled" else draw(rows[-1], coin).item())
            rows.append(q1[draft[-1]])
        q = None if drafter == "point mass" else torch.stack(rows)
        path, token = rejection([([1, 2], q)], draft, torch.stack([p0, *p1[draft]]), coins(torch.rand(k + 1, generator=g)))
        out = [draft[row - 1] for row in path] + [token]
        if len(out) < 2:
            out.append(draw(p1[token], torch.rand((), generator=g)).item())
        counts[out[0] * V + out[1]] += 1
        lengths.append(len(path))
    return counts, (p0[:, None] * p1).flatten(), torch.tensor(lengths)


SAMPLINGS = [Sampling(t, 0, top_p) for t in (0.7, 1.0) for top_p in (1.0, 0.8)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", ["sampled", "point mass"])
def test_rejection_is_lossless(sampling, drafter):
    counts, want, accepted = simulate(sampling, drafter)
    assert chi_square(counts, want) > 1e-6
    assert 0 < accepted.float().mean() < 2             # both branches are used
    (p0, _), (q0, _) = tables(sampling)
    if drafter == "sampled":                           # alpha is one minus total variation
        assert abs((accepted > 0).float().mean() - torch.minimum(p0, q0).sum()) < 0.03


def test_control_one_coin_for_all_drafts_is_rejected():
    counts, want, _ = simulate(Sampling(1.0), "sampled", lambda coins: coins[:1].expand(3))
    assert chi_square(counts, want) < 1e-6


def test_control_softmax_ratio_on_argmax_drafts_is_rejected():
    """Drafts are the argmax of q, but judged as if they were drawn from q."""
    counts, want, _ = simulate(Sampling(1.0), "argmax")
    assert chi_square(counts, want) < 1e-6


def test_identical_distributions_accept_everything():
    p = torch.rand(50, 4, V).softmax(-1)
    for one in p:
        draft = draw(one[:3], torch.rand(3)).tolist()
        assert rejection([([1, 2, 3], one[:3])], draft, one, torch.rand(4))[0] == [1, 2, 3]


def coupled(sampling, move=1, rounds=40_000):
    """Counts (V * V) of two tokens that the target draws with the noise of as many seeds; move: how far apart their positions are.
    And how often the drafter's first token, of the same noise, is the target's."""
    (p0, p1), (q0, _) = tables(sampling)
    streams = [stream(seed) for seed in range(rounds)]
    choose = lambda p, position: scores(p.log(), Sampling(1.0), streams, [position] * rounds).argmax(-1)
    first = choose(p0.expand(rounds, V), 9)
    second = choose(p1[first], 9 + move)
    hits = (choose(q0.expand(rounds, V), 9) == first).float().mean()
    return torch.bincount(first * V + second, minlength=V * V), (p0[:, None] * p1).flatten(), hits


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_noise_draws_from_p_and_couples_drafts(sampling):
    counts, want, hits = coupled(sampling)
    assert chi_square(counts, want) > 1e-6
    # The bounds of the coupling (Daliri, Musco, Suresh).
    (p0, _), (q0, _) = tables(sampling)
    alpha = torch.minimum(p0, q0).sum()
    assert alpha / (2 - alpha) - 0.01 < hits < alpha + 0.01


def test_control_noise_at_two_positions_is_rejected():
    counts, want, _ = coupled(Sampling(1.0), move=0)
    assert chi_square(counts, want) < 1e-6
