import random

import torch
from conftest import toy_model

from minispec.kv_cache import KVCache


def test_runs_never_overlap_and_come_back():
    cache, rng, held = KVCache(toy_model().config, 100), random.Random(0), {}
    for _ in range(2000):
        if held and rng.random() < 0.5:
            base = rng.choice(list(held))
            cache.close(base)
            del held[base]
        n = rng.randint(1, 40)
        base = cache.open(n)
        if base is None:
            gaps, end = [], 0
            for first, size in sorted(held.items()) + [(100, 0)]:
                gaps.append(first - end)
                end = first + size
            assert max(gaps) < n                       # None only where nothing fits
        else:
            assert 0 <= base and base + n <= 100
            assert all(base + n <= first or first + size <= base for first, size in held.items())
            held[base] = n
    for base in list(held):
        cache.close(base)
    assert cache.open(100) == 0


def test_keep_moves_the_kept_rows_together():
    cache = KVCache(toy_model().config, 20)
    base = cache.open(3) + cache.open(12)
    cache.k[:] = torch.arange(20.0)[:, None]
    cache.v.copy_(-cache.k)
    before = cache.k.clone()
    cache.keep(base, 2, [0, 1, 2])
    assert torch.equal(cache.k, before)                # a prefix: nothing moves
    cache.keep(base, 2, [0, 2, 5])
    assert cache.k[0, 0, base + 2:base + 5, 0].tolist() == [base + 2, base + 4, base + 7]
    assert torch.equal(cache.v, -cache.k)
    assert torch.equal(cache.k[:, :, :base + 2], before[:, :, :base + 2]) and torch.equal(cache.k[:, :, base + 5:], before[:, :, base + 5:])
