import random

import pytest
import torch
from conftest import cached_kv, toy_model

from minispec.core import kv_cache
from minispec.core.kv_cache import Allocation, KVCache
from minispec.core.prefix_cache import PrefixCache


def write(cache, blocks, start=0):
    """Fill the positions of blocks from start on with random numbers; returns the contents of all of them."""
    slots = cache.slots_of(blocks, range(start, cache.size(blocks)))
    cache.kv[:, :, :, slots] = torch.rand(*cache.kv.shape[:3], len(slots), cache.kv.shape[4])
    return cached_kv(cache, blocks, cache.size(blocks))


def check(cache, held):
    """No block is shared, the books agree, and every request holds its contents."""
    tables = [block for blocks in held for block in blocks.table]
    assert len(set(tables)) == len(tables) and not set(tables) & set(cache.free_blocks)
    assert len(tables) + len(cache.free_blocks) == cache.n_blocks
    assert cache.used == len(tables) * cache.block
    for blocks, content in held.items():
        n = cache.size(blocks)
        assert torch.equal(cached_kv(cache, blocks, n), content[:, :, :, :n])


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_requests_open_grow_shrink_leave_and_come_back(seed, block, monkeypatch):
    monkeypatch.setattr(kv_cache, "BLOCK", block)
    cache = KVCache(toy_model().config, 120)
    room = cache.n_slots
    assert 120 <= room < 120 + block
    rng = random.Random(seed)
    held = {}
    for _ in range(300):
        act = rng.choice(["open", "grow", "grow", "shrink", "close", "leave", "more"])
        blocks = rng.choice(list(held)) if held and act != "open" else None
        old = cache.size(blocks) if blocks else 0
        if blocks is None:
            n = rng.randint(1, 40)
            fits = cache.blocks_for(n) <= len(cache.free_blocks)     # gaps do not matter
            blocks = cache.open(n)
            assert (blocks is not None) == fits
            if fits:
                held[blocks] = write(cache, blocks)
        elif act == "grow":
            if cache.resize(blocks, old + rng.randint(1, 30)):
                held[blocks] = write(cache, blocks, old)
            else:
                assert cache.size(blocks) == old
        elif act == "shrink":
            cache.resize(blocks, rng.randint(1, old))
        elif act == "leave":                                         # in chunks of any size
            before = held.pop(blocks)
            while blocks.table:
                cache.offload(blocks, rng.randint(1, 17))
            check(cache, held)
            assert sum(chunk.shape[3] for chunk in blocks.host) == old
            while blocks.host:
                cache.restore(blocks)
            held[blocks] = before
        elif act == "more" and cache.n_slots < 200:                  # never without room
            cache.extend(blocks, old + rng.randint(1, 50))
            held[blocks] = write(cache, blocks, old)
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
    assert cache.open(69) is None
    assert cache.size(cache.open(68)) == 68 and cache.free == 0


def test_blocks_that_are_used_again_lie_in_order():
    """The last blocks of a text that has left are taken first, and a new text has them in order."""
    cache = PrefixCache(toy_model().config, 40)
    blocks = cache.open(40)
    cache.remember(blocks, list(range(40)))
    cache.close(blocks)
    first = cache.open(20)
    assert first.table == [5, 6, 7, 8, 9] and cache.lies_together(first, 20)
    again = cache.open(0)
    assert cache.share(again, list(range(40))) == 20 and again.table == [0, 1, 2, 3, 4]


def test_a_text_that_is_alone_lies_together():
    """As it grows, after others that began alike; and without the blocks of a text that has left, where
    free ones are enough."""
    def grow(cache, tokens):
        blocks = Allocation(most=cache.blocks_for(len(tokens)))
        cache.share(blocks, tokens[:2])
        for size in range(3, len(tokens) + 1):
            cache.resize(blocks, size)
            assert cache.lies_together(blocks, size)
        cache.remember(blocks, tokens)
        cache.close(blocks)

    cache = PrefixCache(toy_model().config, 40)              # ten blocks of four tokens
    for last, n in enumerate((40, 30, 22, 40, 7, 33)):
        grow(cache, [1, 2, *[last] * (n - 2)])
    cache = PrefixCache(toy_model().config, 80)
    grow(cache, [5] * 12)
    kept = dict(cache.names)
    grow(cache, [6] * 60)
    assert kept.items() <= cache.names.items()


def test_texts_beside_others_have_the_lowest_free_blocks():
    """Few gaps are left, because attention of a batch reads neighbours at once, whosever they are."""
    cache = PrefixCache(toy_model().config, 80)
    blocks = [cache.open(4) for _ in range(3)]
    cache.close(blocks[1])
    more = Allocation(most=8)
    assert cache.resize(more, 8) and more.table == [1, 3]


@pytest.mark.parametrize("in_use", [True, False])
def test_a_block_in_which_texts_part_is_copied(in_use):
    """Of a text that goes on, or one that has left; and what its owner, or the other text, writes behind the
    common tokens does not change them."""
    cache = PrefixCache(toy_model().config, 40)
    old = cache.open(12)
    content = write(cache, old)
    cache.remember(old, list(range(10)))
    if not in_use:
        cache.close(old)
    for tokens, known in ((list(range(20)), 10), ([*range(9), 0, 0], 9), ([0, 1, 2, 0], 3), ([1, 2], 0)):
        new = cache.open(0)
        assert cache.share(new, tokens) == known
        assert torch.equal(cached_kv(cache, new, known), content[:, :, :, :known])
        assert not in_use or not set(new.table[known // 4:]) & set(old.table)
        cache.resize(new, len(tokens))
        write(cache, new, known)
        assert torch.equal(cached_kv(cache, new, known), content[:, :, :, :known])
        cache.remember(new, tokens)
        cache.close(new)
        assert not in_use or torch.equal(cached_kv(cache, old, 12), content)


def test_the_path_of_a_tree_moves_together():
    """Those of all requests at once."""
    cache = KVCache(toy_model().config, 60)
    cache.open(6)
    own, other = cache.open(20), cache.open(20)
    content, others = write(cache, own), write(cache, other)
    cache.keep([(own, 5, [0, 2, 3, 9]), (other, 4, [0, 1, 2]), (other, 7, [0, 4])])
    assert torch.equal(cached_kv(cache, own, 9), content[:, :, :, [*range(6), 7, 8, 14]])
    assert torch.equal(cached_kv(cache, other, 9), others[:, :, :, [*range(8), 11]])
