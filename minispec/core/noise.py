"""Noise that is looked up, not drawn: the same numbers for the same (seed, position, token), in any order, at
any time.

To draw from p, give every token x an independent exponential number e(x), and take the token with the largest
p(x) / e(x). This draws x with probability p(x): think of e(x) / p(x) as the time at which a clock rings that
rings at rate p(x); x is the first to ring with probability p(x). (In logarithms: the largest of log p(x) +
g(x), where g = -log e has Gumbel's distribution.)

If e depends on nothing but the seed, the position in the text and the token, then the token that the target
draws is a function of the text before it, as an argmax is. A seed is a text, whoever drafts it. And a drafter
that divides its own q by the same e guesses what the target will draw (Daliri, Musco, Suresh, "Coupling
without communication and drafter-invariant speculative decoding", 2408.07978).

A generator with a state cannot do that. This one has none: it hashes its arguments. A number of 64 bits for
the seed and the position is mixed as in SplitMix64 (Steele, Lea, Flood 2014). With it, a few operations on
32-bit integers scramble the numbers of all tokens, on a GPU as on a CPU. (The logarithm may differ in its
last bit.)
"""
from functools import cache, lru_cache

import torch

# A seed has several streams of numbers: for the target's choices, for the coins of rejection sampling, and
# for drafters whose draws must not depend on the target's; the last one and those after it are of K chains.
TARGET, COINS, OWN = 0, 1, 2
LOW = (1 << 31) - 1
APART = 0x5DEECE66D1234567                               # mix(0) is 0, and seed 0 must not be like token 0


def mix(x):
    """int64 -> int64: a bijection that makes neighbours unlike each other."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)


@lru_cache(4096)
def stream(seed, lane=TARGET):
    """The first number of a stream; its position i has the i-th number after it."""
    return mix(mix(torch.tensor(seed) + APART) + lane).item()


@cache
def token_keys(vocab_size, device):
    return (mix(torch.arange(vocab_size, device=device) - APART) & LOW).int()


def uniform(streams, positions, vocab_size, ids=None):
    """Numbers (n, V) in (0, 1) of streams (n,) at positions (n,), for all tokens or for ids (N,)."""
    key = mix(streams + positions)
    tokens = token_keys(vocab_size, key.device)
    if ids is not None:
        tokens = tokens[ids]
    x = tokens ^ (key & LOW).int()[:, None]
    # Each row has its own odd factor.
    for factor, shift in (((key >> 32 | 1).int()[:, None], 15), (739982445, 16)):
        x = x.mul_(factor).bitwise_and_(LOW)
        x ^= x >> shift
    # Never 0 or 1, also after rounding to 24 bits.
    return x.bitwise_or_(1).mul(2.0 ** -31 * (1 - 2.0 ** -23))


def noise(streams, positions, vocab_size, ids=None):
    """Exponential numbers (n, V). The small ones decide, so they are exact to 31 bits: log(1 - u), where
    log(u) would know 24 bits of a u near 1."""
    return uniform(streams, positions, vocab_size, ids).neg_().log1p_().neg_()
