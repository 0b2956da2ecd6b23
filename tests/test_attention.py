from itertools import accumulate
from unittest import mock

import pytest
import torch
from conftest import attend_alone, dense_logits, only_keys, toy_model

import kernels
from minispec.core import attention, cpu
from minispec.core.attention import FewRows, FullKeys, OneRequest, tree_mask
from minispec.core.gpt import GPTConfig, dense_attend
from minispec.core.kv_cache import Allocation, KVCache
from minispec.core.requests import Segment, pack
from minispec.specgen import pillar_scores

HEADS = [(4, 4), (4, 2), (5, 1)]


def random_ids(n):
    return torch.randint(0, 64, (n,)).tolist()


@torch.inference_mode()
def feed(model, parts):
    """Logits (N, V) of one forward; parts: [(ids, keys)], ids at positions keys.start.. of their requests."""
    x = pack([Segment(None, ids, keys.start, keys) for ids, keys in parts], "cpu")
    return model.logits(model(x.tokens, x.positions, x.attend))


def cached_logits(model, cache, blocks, ids, chunks, record=None):
    """Feed ids in chunks through the cache; logits (T, V), and the last keys."""
    out = []
    for n in chunks:
        keys = FullKeys(cache, blocks, sum(map(len, out)), n, record)
        out.append(feed(model, [(ids[keys.start : keys.start + n], keys)]))
    return torch.cat(out), keys


@torch.inference_mode()
def assert_dense(model, ids, logits, scores=None):
    """These are the logits of the last rows of ids; and their scores (L, G, T): the softmax probability of
    every position, mean over these rows and the heads of a group, out of dense matrices."""
    probs, n = [], len(logits)

    def attend(layer, q, k, v):
        keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        products = torch.einsum("bqhd,bkhd->hqk", q, keys) / q.shape[-1] ** 0.5
        unseen = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
        probs.append(products.masked_fill(unseen, float("-inf")).softmax(-1))
        return dense_attend()(layer, q, k, v)

    want = model.logits(model(torch.tensor([ids]), attend=attend))[0, -n:]
    assert (logits - want).abs().max() < 1e-4
    if scores is not None:
        last = torch.stack(probs)[:, :, -n:].unflatten(1, (model.config.n_kv_head, -1))
        assert (scores - last.mean((2, 3))).abs().max() < 1e-5


@pytest.mark.parametrize("heads", [*HEADS, (8, 1)])
@pytest.mark.parametrize("record", [None, pillar_scores])
@pytest.mark.parametrize("table", [range(2, 10), (3, 4, 5, 0, 2, 9, 8, 1)])
def test_cached_equals_dense_and_rows_go_to_their_own_slots_alone(table, record, heads):
    """Scores are mean probabilities over every row and all heads of a group."""
    model = toy_model(n_head=heads[0], n_kv_head=heads[1])
    cache, blocks, ids = KVCache(model.config, 80), Allocation([*table]), random_ids(30)
    got, keys = cached_logits(model, cache, blocks, ids, [1, 7, 1, 4, 17], record)
    assert_dense(model, ids, got)
    others = {*range(cache.n_slots)} - {*cache.slot_list(blocks, range(30))}
    assert not cache.kv[:, :, :, [*others]].any()
    assert_dense(model, ids, got[-17:], keys.scores)


def scattered(cache, sizes, order):
    """Allocations that lie "together", "apart" with blocks of nobody between them, or "mixed", so that
    neighbouring blocks belong to different requests."""
    cache.kv.normal_()  # what others left there
    out = [cache.open(1 if order == "mixed" else n + 9 * (order == "apart")) for n in sizes]
    while order == "mixed" and any(cache.size(x) < n for x, n in zip(out, sizes)):
        for x, n in zip(out, sizes):
            cache.resize(x, min(n, cache.size(x) + cache.block))
    return out


@pytest.mark.parametrize("rows", [(1, 1, 1), (5, 5, 5), (1, 1, 4), (3, 4, 3)])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    "order, most", [("together", 10**6), ("apart", 10**6), ("mixed", 10**6), ("apart", 0)]
)
def test_requests_are_served_together_wherever_their_blocks_lie(rows, heads, order, most, monkeypatch):
    """Logits of every request, and its scores, are those that it has alone. most: padding, and blocks between
    that are read, too."""
    monkeypatch.setattr(attention, "MOST_PADDING", most)
    monkeypatch.setattr(attention, "MOST_UNREAD", most)
    model = toy_model(n_head=heads[0], n_kv_head=heads[1])
    cache = KVCache(model.config, 4 * 60)
    sizes = (21, 40, 30)
    requests = [
        (blocks, random_ids(size), n)
        for blocks, size, n in zip(scattered(cache, sizes, order), sizes, rows)
    ]
    for blocks, ids, n in requests:
        cached_logits(model, cache, blocks, ids, [len(ids) - 3 * n])
    for step in (2, 1, 0):
        parts = []
        for blocks, ids, n in requests:
            start = len(ids) - (step + 1) * n
            parts.append((ids[start : start + n], FullKeys(cache, blocks, start, n, pillar_scores)))
        logits = feed(model, parts).split(rows)
        for (_, ids, n), (_, keys), own in zip(requests, parts, logits):
            assert_dense(model, ids[: len(ids) - step * n], own, keys.scores)


def test_requests_with_other_numbers_of_rows_are_padded_until_that_costs_more_than_a_group(monkeypatch):
    monkeypatch.setattr(attention, "MOST_PADDING", 100)
    cache = KVCache(toy_model().config, 200)
    counts, lengths = (1, 3, 3, 2, 1), (20, 30, 40, 50, 30)
    spans = [
        (end - n, end, FullKeys(cache, cache.open(t), t - n, n))
        for n, t, end in zip(counts, lengths, accumulate(counts))
    ]
    # The request with two rows has 50 padded products, the two with one row 2 * (20 + 30).
    groups = attention.computed_together(spans)
    assert [[spans.index(span) for span in group] for _, group in groups] == [[1, 2, 3], [0, 4]]
    # Two segments of one request are not in one group, unless they have as many rows.
    blocks = spans[0][2].blocks
    two = [(0, 3, FullKeys(cache, blocks, 10, 3)), (3, 4, FullKeys(cache, blocks, 9, 1))]
    assert len(attention.computed_together(two)) == 2


def test_few_blocks_between_two_are_read_with_them(monkeypatch):
    """Rows count: what is read for one row is too much for two."""
    monkeypatch.setattr(attention, "MOST_UNREAD", 3)
    cache = KVCache(toy_model().config, 100)
    some = [
        FullKeys(cache, Allocation(table), cache.block * len(table) - 1, 1) for table in ([0, 5, 1], [9, 1])
    ]
    read = list(zip(*attention.blocks_in_order(some, cache, 1, unseen=3)))
    gaps = [(2, 0, 3), (3, 0, 3), (4, 0, 3)], [(6, 0, 3), (7, 0, 3), (8, 0, 3)]
    own = [(0, 0, 0), (1, 0, 2)], [(5, 0, 1)], [(9, 1, 0), (1, 1, 1)]         # the last one is shared
    assert read == [*own[0], *gaps[0], *own[1], *gaps[1], *own[2]]
    assert len(attention.neighbours([block for block, *_ in read], cache)) == 2
    few = list(zip(*attention.blocks_in_order(some, cache, 2, unseen=3)))
    assert few == [*own[0], *own[1], *own[2]]


def test_several_requests_are_read_block_by_block(monkeypatch):
    """A request alone is read as one matrix while its blocks are neighbours."""
    served = []
    monkeypatch.setattr(OneRequest, "plan", lambda self, members: served.append(members))
    cache = KVCache(toy_model().config, 100)
    keys = [FullKeys(cache, cache.open(12), 10, 1) for _ in range(2)]
    keys[0].blocks.table.reverse()
    for some in (keys, keys[:1], keys[1:]):
        FewRows(cache).plan(some)
    assert served == [keys[1:]]


@pytest.mark.parametrize("rows", [1, 5])
def test_prompts_and_long_contexts_in_bf16_are_read_by_products(rows, monkeypatch):
    if torch.bfloat16 not in cpu.PACKED_TYPES:
        pytest.skip("this processor has no bf16 products")
    monkeypatch.setattr(attention, "FEW", 16)
    monkeypatch.setattr(cpu, "MANY_KEYS", 24)
    monkeypatch.setattr(cpu, "INTEL", False)
    model = toy_model().bfloat16()
    ids = random_ids(40)
    want = dense_logits(model.float(), ids)
    cache = KVCache(model.config, 40, torch.bfloat16)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", None)
    chunks = [20, 5, *[rows] * (15 // rows)]
    got, _ = cached_logits(model.bfloat16(), cache, cache.open(40), ids, chunks)
    assert (got.float() - want).abs().max() < 0.05 * want.abs().max()
    for few, length, faster in ((True, 24, False), (True, 25, True), (False, 9, True)):
        assert cpu.products_are_faster(cache.k, few, length) == faster
        monkeypatch.setattr(cpu, "INTEL", True)
        assert not cpu.products_are_faster(cache.k, few, length)
        assert cpu.products_are_faster(mock.Mock(is_cuda=True), True, 25)
        monkeypatch.setattr(cpu, "INTEL", False)


@pytest.mark.parametrize("sizes", [(24,), (24, 24), (9, 13, 17)])
def test_segments_of_one_request_read_the_same_blocks(sizes):
    """Each request feeds its newest tokens in two segments."""
    model = toy_model()
    cache = KVCache(model.config, 120)
    parts, want = [], []
    for blocks, size in zip(scattered(cache, sizes, "together"), sizes):
        ids = random_ids(size)
        cached_logits(model, cache, blocks, ids, [size - 4])
        parts += [(ids[i:][:2], FullKeys(cache, blocks, i, 2)) for i in (size - 4, size - 2)]
        want.append(dense_logits(model, ids)[-4:])
    assert (feed(model, parts) - torch.cat(want)).abs().max() < 1e-4


@pytest.mark.parametrize("n", [1, 5])
def test_recorded_attention_in_bf16_is_nearly_as_exact_as_unrecorded(n):
    """Its logits are rounded to bf16 once more, which doubles the error of a call (1.8 times here, over fifty
    of them). Scores are within the rounding of bf16."""
    c = toy_model().config

    def attended(dtype, record):
        cache = KVCache(c, 60, dtype)
        cache.kv.copy_(past)
        keys = only_keys(cache, 40, n, record=record)
        out = attend_alone(keys)(1, *(x.to(dtype) for x in qkv))
        assert out.dtype == dtype
        return out.float(), keys.scores

    with_scores = without = 0
    for _ in range(50):
        qkv = [torch.randn(n, h, c.head_dim).bfloat16() for h in (c.n_head, c.n_kv_head, c.n_kv_head)]
        past = torch.randn(2, c.n_layer, c.n_kv_head, 60, c.head_dim).bfloat16()
        exact, scores = attended(torch.float32, pillar_scores)
        recorded, rounded = attended(torch.bfloat16, pillar_scores)
        unrecorded, _ = attended(torch.bfloat16, None)
        assert torch.allclose(rounded[1], scores[1], rtol=0.03)
        with_scores += (recorded - exact).abs().mean()
        without += (unrecorded - exact).abs().mean()
    assert with_scores < 2.2 * without


@pytest.mark.parametrize(
    "head_dim, fp32, bf16",
    [
        *((d, False, False) for d in (8, 48, 80, 96, 512)),  # the shipped drafter has 48
        *((d, True, True) for d in (16, 64, 128)),
        (256, False, True),
    ],
)
def test_kernels_are_used_only_for_the_head_sizes_they_support(head_dim, fp32, bf16, monkeypatch):
    monkeypatch.setattr("kernels.available", lambda x: True)  # as on a GPU with triton
    model = toy_model(head_dim=head_dim)
    assert kernels.can_run(model, 0) == fp32
    assert kernels.can_run(model.bfloat16(), 64) == bf16


def test_cudnn_never_plans_attention():
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("start", [5, 1100])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_rows_of_a_tree_see_their_paths_behind_few_and_many_keys(start, dtype, tolerance):
    c = GPTConfig(n_layer=1, n_head=4, n_kv_head=2, head_dim=16)
    sees = tree_mask([0, 1, 0, 3])
    by_hand = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]
    assert sees.int().tolist() == by_hand
    q, k, v = (torch.randn(5, heads, 16) for heads in (4, 2, 2))
    old = torch.randn(2, 1, 2, start, 16)
    cache = KVCache(c, 2048, dtype)
    cache.kv[:, :, :, :start] = old.to(dtype)
    out = attend_alone(only_keys(cache, start, 5, tail=sees))(0, q.to(dtype), k.to(dtype), v.to(dtype))

    both = torch.cat([old[:, 0], torch.stack([k, v]).transpose(1, 2)], 2)
    keys, values = both.repeat_interleave(2, 1)  # (H, T, D)
    logits = q.transpose(0, 1) @ keys.mT / 4
    logits[:, :, start:] -= torch.where(sees, 0.0, float("inf"))
    want = (logits.softmax(-1) @ values).transpose(0, 1)
    assert torch.allclose(out.float(), want, atol=tolerance)


def test_texts_of_one_block_each_lie_in_any_order():
    """Every request's rows are its own, wherever its block lies."""
    model, texts = toy_model(), [(random_ids(3), Allocation([block])) for block in (2, 0, 1)]
    cache = KVCache(model.config, 16)
    cache.kv.normal_()
    for ids, blocks in texts:
        cached_logits(model, cache, blocks, ids, [2])
    logits = feed(model, [(ids[2:], FullKeys(cache, blocks, 2, 1)) for ids, blocks in texts])
    for (ids, _), own in zip(texts, logits):
        assert_dense(model, ids, own[None])
