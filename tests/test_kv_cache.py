import random

import pytest
import torch
from conftest import cached_kv, toy_model

from minispec.core import kv_cache
from minispec.core.kv_cache import KVCache


def write(cache, blocks, start, n):
    """Fill positions start .. n - 1 with numbers of their own; returns what was written."""
    content = torch.rand(*cache.kv.shape[:3], n - start, cache.kv.shape[4])
    cache.kv[:, :, :, cache.slots_of(blocks, range(start, n))] = content
    return content


def check(cache, held):
    """No block is shared, the books agree, and every request holds what was written."""
    tables = [block for blocks in held for block in blocks.table]
    assert len(set(tables)) == len(tables) and not set(tables) & set(cache.free_blocks)
    assert len(tables) + len(cache.free_blocks) == cache.n_blocks and cache.used == len(tables) * cache.block
    for blocks, content in held.items():
        n = cache.size(blocks)
        assert torch.equal(cached_kv(cache, blocks, n), content[:, :, :, :n])


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_requests_open_grow_shrink_leave_and_come_back(seed, block, monkeypatch):
    monkeypatch.setattr(kv_cache, "BLOCK", block)
    cache, rng, held = KVCache(toy_model().config, 120), random.Random(seed), {}
    room = cache.n_slots
    assert 120 <= room < 120 + block
    for _ in range(300):
        act = rng.choice(["open", "grow", "grow", "shrink", "close", "leave", "more"])
        blocks = rng.choice(list(held)) if held else None
        if act == "open" or blocks is None:
            n = rng.randint(1, 40)
            new = cache.open(n)
            assert (new is None) == (-(-n // block) > len(cache.free_blocks) + (0 if new is None else len(new.table)))     # no gap is in the way
            if new:
                held[new] = write(cache, new, 0, cache.size(new))
        elif act == "grow":
            old = cache.size(blocks)
            if cache.resize(blocks, old + rng.randint(1, 30)):
                held[blocks] = torch.cat([held[blocks][:, :, :, :old], write(cache, blocks, old, cache.size(blocks))], 3)
            else:
                assert cache.size(blocks) == old
        elif act == "shrink":
            cache.resize(blocks, rng.randint(1, cache.size(blocks)))
        elif act == "leave":                                                   # in chunks of any size
            before, size = held.pop(blocks), cache.size(blocks)
            while blocks.table:
                cache.offload(blocks, rng.randint(1, 17))
            check(cache, held)
            assert blocks.on_host == size
            while blocks.host:
                assert cache.restore(blocks)
            held[blocks] = before
        elif act == "more" and cache.n_slots < 200:
            old, n = cache.size(blocks), cache.size(blocks) + rng.randint(1, 50)
            cache.extend(blocks, n)                                            # never without room
            held[blocks] = torch.cat([held[blocks][:, :, :, :old], write(cache, blocks, old, cache.size(blocks))], 3)
            assert cache.size(blocks) >= n
        else:
            cache.close(blocks)
            del held[blocks]
        check(cache, held)
    for blocks in list(held):
        cache.close(blocks)
    assert cache.used == 0 and cache.free == cache.n_slots >= room


def test_charged_slots_are_not_given_out():
    cache = KVCache(toy_model().config, 100)
    cache.charged = 32
    assert cache.open(69) is None and cache.size(cache.open(68)) == 68 and cache.free == 0


def test_blocks_that_are_used_again_lie_in_order():
    """Of a text that has left, the end goes first; a new one has its blocks in the order of the pool all the same."""
    cache = KVCache(toy_model().config, 40)
    blocks = cache.open(40)
    cache.remember(blocks, list(range(40)))
    cache.close(blocks)
    first = cache.open(20)
    assert first.table == [5, 6, 7, 8, 9] and cache.lies_together(first, 20)
    again = cache.open(0)
    assert cache.share(again, list(range(40))) == 20 and again.table == [0, 1, 2, 3, 4]


def test_the_path_of_a_tree_moves_together():
    cache = KVCache(toy_model().config, 40)
    cache.open(6)
    blocks = cache.open(20)
    content = write(cache, blocks, 0, 20)
    cache.keep(blocks, 5, [0, 2, 3, 9])
    want = torch.cat([content[:, :, :, :6], content[:, :, :, [7, 8, 14]]], 3)
    assert torch.equal(cached_kv(cache, blocks, 9), want)
