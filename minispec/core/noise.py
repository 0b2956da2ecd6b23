"""Stateless noise: the same numbers for the same (seed, position, token), in any order, at any time.

To draw from p, give every token x an independent exponential number e(x), and take the token with the largest
p(x) / e(x). This draws x with probability p(x): e(x) / p(x) is the time at which a clock of rate p(x) rings,
and x is the first to ring with probability p(x). (In logarithms: the largest of log p(x) + g(x), where
g = -log e has Gumbel's distribution.)

If e depends on nothing but the seed, the position in the text and the token, then the token that the target
draws is a function of the text before it, as an argmax is: a seed determines the text, whichever method
drafts. A drafter that divides its own q by the same e guesses the token that the target will draw (Daliri,
Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2408.07978).

A generator with a state cannot do that; this one hashes its arguments. A number of 64 bits for the seed and
the position is mixed as in SplitMix64 (Steele, Lea, Flood 2014). With it, a few operations on 32-bit integers
scramble the numbers of all tokens, on a GPU as on a CPU. (The logarithm may differ in its last bit.)
"""
from functools import cache, lru_cache

import numpy as np
import torch

# The streams of a seed: for the target's choices, for the coins of rejection sampling, and for drafters whose
# draws must not depend on the target's.
TARGET, COINS, OWN = 0, 1, 2
LOW = (1 << 31) - 1
APART = 0x5DEECE66D1234567                               # mix(0) is 0, and seed 0 must not be like token 0


def mix(x):
    """int64 -> int64: a bijection that makes neighbours unlike each other, of numpy arrays or tensors."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)


@lru_cache(4096)
def stream(seed, lane=TARGET):
    """The first number of a stream; its position i has the i-th number after it."""
    return mix(mix(np.array([seed]) + APART) + lane).item()


def apart(request, lane):
    """Added to the positions of a round's drafts. The number of drafts that a round verifies, and SpecGen's
    q, may depend on rejected drafts. So drafts that rejection verifies have new noise in every round."""
    return 0 if lane == TARGET else request.n_cached << 32


@cache
def token_keys(vocab_size, device):
    numbers = mix(np.arange(vocab_size) - APART)
    keys = numbers & LOW
    # Tokens with equal keys would have equal noise in every row: the less likely one would never be drawn.
    # If only the two highest bits differ, their noise is not independent. The later token gets other bits.
    _, first = np.unique(keys & LOW >> 2, return_index=True)
    again = np.setdiff1d(np.arange(vocab_size), first)
    keys[again] = numbers[again] >> 33 & LOW
    return torch.as_tensor(keys, dtype=torch.int32, device=device)


def uniform(streams, positions, vocab_size, ids=None, device="cpu"):
    """Numbers (n, V) in (0, 1), on a device, of streams (n,) at positions (n,), for all tokens or for ids
    (N,).

    streams and positions are numpy arrays, which are hashed on the host, or tensors of the device."""
    key = mix(streams + positions)
    key, factor = (torch.as_tensor(x, dtype=torch.int32, device=device)[:, None]
                   for x in (key & LOW, key >> 32 | 1))
    tokens = token_keys(vocab_size, key.device)
    if ids is not None:
        tokens = tokens[ids]
    # Each row has its own odd factor.
    x = (tokens ^ key).mul_(factor).bitwise_and_(LOW)
    x ^= x >> 15
    x = x.mul_(739982445).bitwise_and_(LOW)
    x ^= x >> 16
    # Never 0 or 1, also after rounding to 24 bits.
    return x.bitwise_or_(1).mul(2.0 ** -31 * (1 - 2.0 ** -23))


def noise(*args, **kwargs):
    """Exponential numbers (n, V); arguments as of `uniform`. The smallest numbers decide which token is
    drawn, so they must be exact: log(1 - u) keeps 31 bits of a small u, and log(u) only 24 bits of a u near
    1."""
    return uniform(*args, **kwargs).neg_().log1p_().neg_()
