"""The noise is uniform, independent between tokens, positions, seeds and lanes, and reproducible. Seeds are
fixed, so no test fails by chance; with other seeds a good generator would with probability 1e-6 a test.
"""

import functools

import numpy as np
import pytest
import torch
from conftest import chi_square, seeded

from minispec.core import noise as module
from minispec.core.noise import COINS, OWN, TARGET, mix, noise, stream, uniform

N = 256
V = 4096


def asked(seeds=[7] * N, positions=range(N), lane=TARGET, v=V, chain=0):
    streams = torch.tensor([stream(seed, lane) for seed in seeds])
    if chain:                                            # see SpecDiffDrafter.chains
        streams = mix(streams + chain)
    return uniform(streams, torch.as_tensor(positions), v)


@functools.cache
def neighbours():
    """{what differs between them: two tables (N, V)}"""
    one, own = asked(), asked(lane=OWN)
    return {
        "tokens": (one[:, ::2], one[:, 1::2]),
        "positions": (one[:-1], one[1:]),
        "positions half a context away": (one[: N // 2], one[N // 2 :]),
        "seeds": (one, asked([8] * N)),
        "seeds and positions": (one, asked([8] * N, torch.arange(N) - 1)),
        "seeds at one position": (asked(range(N), [50] * N), asked(range(1, N + 1), [50] * N)),
        "large seeds": (asked([2**63 - 1] * N), asked([2**63 - 2] * N)),
        "lanes": (one, own),
        "coins": (one, asked(lane=COINS)),
        "chains": (own, asked(lane=OWN, chain=1)),
        "rounds": (own, asked(lane=OWN, positions=torch.arange(N) + (20 << 32))),       # see apart
    }


def even(cell, cells):
    """p-value of a uniform distribution of the numbers `cell` over as many cells."""
    return chi_square(torch.bincount(cell.flatten(), minlength=cells), torch.full((cells,), 1 / cells))


def pairs(a, b, cells=16):
    """p-value of independence: both numbers of a pair in one of `cells` x `cells`."""
    return even((a.double() * cells).long() * cells + (b.double() * cells).long(), cells**2)


@pytest.mark.parametrize("what", neighbours())
def test_neighbours_are_uniform_and_independent(what):
    a, b = neighbours()[what]
    for x in (a, b):
        assert even((x.double() * 1000).long(), 1000) > 1e-6
    assert pairs(a, b) > 1e-6
    # Small numbers decide a race: how many pairs are small in both?
    both = ((a < 0.02) & (b < 0.02)).sum().item()
    want = 0.02**2 * a.numel()
    assert abs(both - want) < 5 * want**0.5
    # A control: the test sees that a pair shares a quarter of its numbers.
    mixed = torch.where(torch.rand(a.shape, generator=seeded()) < 0.25, a, b)
    assert pairs(a, mixed) < 1e-6


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_small_numbers_are_fine_and_never_zero(seed):
    """A token of probability 1e-7 must win with that probability: 24 bits would not do, and no token may be
    the hash's fixed point."""
    x = asked([seed] * 256, range(256), v=49152)
    for least in (1e-4, 1e-5, 1e-6):
        want = least * x.numel()
        assert abs((x < least).sum().item() - want) < 5 * want**0.5
    assert 0 < x.min() < 1e-6 and 1 - 1e-6 < x.max().double() < 1
    e = noise(torch.full((256,), stream(seed)), torch.arange(256), 49152)
    assert e.isfinite().all() and (e > 0).all()
    assert e.mean(dtype=torch.double).item() == pytest.approx(1, abs=1e-3)
    # The smallest and the largest number that there can be.
    least, most = torch.tensor([1, module.LOW], dtype=torch.int32).mul(2.0**-31 * (1 - 2.0**-23))
    assert 0 < least and most < 1


def test_three_numbers_of_a_row_and_the_order_of_a_row_are_independent_of_other_rows():
    x = asked([3] * 20_000, range(20_000), v=6)
    place = ((x.double() * 8).long()[:, :3] * torch.tensor([64, 8, 1])).sum(1)
    assert even(place, 512) > 1e-6
    # The first token at a position, and at the next one.
    first = x.argmin(1)
    assert even(first[:-1] * 6 + first[1:], 36) > 1e-6


def test_the_same_numbers_alone_together_and_for_some_tokens():
    streams = torch.tensor([stream(s) for s in (1, 1, 2)])
    positions = torch.tensor([5, 6, 5])
    together = noise(streams, positions, 1000)
    ids = torch.tensor([999, 3, 500])
    for i in range(3):
        assert torch.equal(noise(streams[i : i + 1], positions[i : i + 1], 1000)[0], together[i])
    assert torch.equal(noise(streams, positions, 1000, ids), together[:, ids])
    assert torch.equal(noise(streams, positions, 600), together[:, :600])  # in any vocabulary
    assert torch.equal(noise(streams.numpy(), positions.numpy(), 1000), together)


def test_no_two_tokens_have_the_same_noise():
    """Nor keys that differ in the two highest bits alone. Smaller vocabularies have the first keys."""
    assert len((module.token_keys(262144, "cpu") & module.LOW >> 2).unique()) == 262144
    # In Qwen's vocabulary these two had one key.
    pair = torch.tensor([11252, 56363])
    drawn = noise(np.repeat(stream(0), 4000), np.arange(4000), 151936, pair).argmin(-1)
    assert 1800 < drawn.sum() < 2200


def test_the_numbers_are_these():
    """In every process, on every machine, to the last bit: a seed that was noted keeps its text."""
    x = uniform(torch.tensor([stream(0)]), torch.tensor([10]), 4)[0].tolist()
    want = [0.9456652402877808, 0.6617534756660461, 0.30424267053604126, 0.5483523011207581]
    assert x == want
