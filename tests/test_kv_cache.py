import random

import pytest
import torch
from conftest import toy_model

from minispec.core.kv_cache import KVCache


def write(cache, run, n, start=0):
    """Fill positions start .. n of a run with numbers of their own; returns what was written."""
    content = torch.rand(2, *cache.k[:, :, :n - start].shape)
    at = slice(run.first + start, run.first + n)
    cache.k[:, :, at], cache.v[:, :, at] = content
    return content


def check(cache, held):
    """No slot is shared, the books agree, and every run holds what was written."""
    runs = sorted((run for run in held if run.size), key=lambda run: run.first)
    assert cache.used == sum(run.size for run in runs) and cache.runs == runs
    assert all(a.end <= b.first for a, b in zip(runs, runs[1:])) and all(0 <= r.first and r.end <= cache.n_slots for r in runs)
    for run in runs:
        for x, content in zip((cache.k, cache.v), held[run]):
            assert torch.equal(x[:, :, run.first:run.first + run.size], content[:, :, :run.size])


@pytest.mark.parametrize("seed", range(5))
def test_runs_open_grow_shrink_move_leave_and_come_back(seed):
    cache, rng, held = KVCache(toy_model().config, 120), random.Random(seed), {}
    for _ in range(400):
        act = rng.choice(["open", "grow", "grow", "shrink", "close", "leave"])
        run = rng.choice(list(held)) if held else None
        if act == "open" or run is None:
            n = rng.randint(1, 40)
            new = cache.open(n)
            assert (new is None) == (n > 120 - sum(r.size for r in held))      # room is never lost to gaps
            if new:
                held[new] = write(cache, new, n)
        elif act == "grow":
            old, n = run.size, run.size + rng.randint(1, 30)
            if cache.resize(run, n):
                held[run] = torch.cat([held[run], write(cache, run, n, old)], 3)
            else:
                assert run.size == old and n - old > cache.free
        elif act == "shrink":
            cache.resize(run, rng.randint(1, run.size))
            held[run] = held[run][:, :, :, :run.size]
        elif act == "leave":                                                   # in chunks of any size, others move meanwhile
            before, size = held.pop(run), run.size
            while run.size:
                cache.offload(run, rng.randint(1, 17))
            check(cache, {**held, run: before})
            assert run.on_host == size
            while run.host:
                assert cache.restore(run)
            held[run] = before
        else:
            cache.close(run)
            del held[run]
        check(cache, held)
    for run in list(held):
        cache.close(run)
    assert cache.runs == [] and cache.free == 120 and cache.moved > 0


def test_charged_slots_are_not_given_out():
    cache = KVCache(toy_model().config, 100)
    cache.charged = 30
    assert cache.open(71) is None and cache.open(70).size == 70 and cache.free == 0
