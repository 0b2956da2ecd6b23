import pytest
import torch
from conftest import attend_alone, dense_logits, only_keys, toy_model

from minispec.core import attention
from minispec.core.attention import FewRows, FullKeys, OneRequest, group_rows, packed_attend, ungroup_rows
from minispec.core.gpt import dense_attend
from minispec.core.kv_cache import Allocation, KVCache


def cached_logits(model, cache, blocks, ids, chunks, record=False):
    """Feed ids in chunks through the cache; logits (T, V), and the keys objects."""
    out, start, used = [], 0, []
    for n in chunks:
        keys = FullKeys(cache, blocks, start, n, record)
        with torch.inference_mode():
            hidden = model(torch.tensor(ids[start:start + n]), torch.arange(start, start + n), packed_attend([(0, n, keys)]))
            out.append(model.logits(hidden))
        used.append(keys)
        start += n
    return torch.cat(out), used


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (5, 1)])
@pytest.mark.parametrize("record", [False, True])
def test_cached_equals_dense(heads, record):
    model = toy_model(n_head=heads[0], n_kv_head=heads[1])
    cache = KVCache(model.config, 80)
    cache.open(5)
    blocks = cache.open(40)
    ids = torch.randint(0, 64, (30,)).tolist()
    got, _ = cached_logits(model, cache, blocks, ids, [1, 7, 1, 12, 9], record)
    assert (got - dense_logits(model, ids)).abs().max() < 1e-4
    own = set(cache.slots_of(blocks, range(30)).tolist())
    assert not cache.kv[:, :, :, [slot for slot in range(cache.n_slots) if slot not in own]].any()      # nobody else's slots


def test_packed_requests_do_not_see_each_other():
    model = toy_model()
    cache, sequences = KVCache(model.config, 200), [torch.randint(0, 64, (n,)).tolist() for n in (1, 13, 6, 30)]
    places, segments, n = [cache.open(40) for _ in sequences], [], 0
    for blocks, ids in zip(places, sequences):
        segments.append((n, n + len(ids), FullKeys(cache, blocks, 0, len(ids))))
        n += len(ids)
    with torch.inference_mode():
        hidden = model(torch.tensor(sum(sequences, [])), torch.cat([torch.arange(len(s)) for s in sequences]), packed_attend(segments))
        logits = model.logits(hidden)
    for (a, b, _), ids in zip(segments, sequences):
        assert (logits[a:b] - dense_logits(model, ids)).abs().max() < 1e-4


def decode_together(model, cache, requests, rows, steps=3, record=False):
    """Feed each request's ids (from cached positions on) in steps of rows[i], all requests in one forward. Logits of every
    request (T, V), and its last keys."""
    out, start = [[] for _ in requests], [len(ids) - rows[i] * steps for i, (_, ids) in enumerate(requests)]
    for i, (blocks, ids) in enumerate(requests):
        if start[i]:
            out[i].append(cached_logits(model, cache, blocks, ids[:start[i]], [start[i]])[0])
    for _ in range(steps):
        segments, n = [], 0
        for i, (blocks, _) in enumerate(requests):
            segments.append((n, n + rows[i], FullKeys(cache, blocks, start[i], rows[i], record)))
            n += rows[i]
        tokens = torch.tensor([ids[start[i] + j] for i, (_, ids) in enumerate(requests) for j in range(rows[i])])
        positions = torch.tensor([start[i] + j for i in range(len(requests)) for j in range(rows[i])])
        with torch.inference_mode():
            logits = model.logits(model(tokens, positions, packed_attend(segments)))
        for i, (a, b, _) in enumerate(segments):
            out[i].append(logits[a:b])
            start[i] += rows[i]
    return [torch.cat(x) for x in out], [keys for *_, keys in segments]


def ways(monkeypatch):
    """Which ways to read blocks were taken."""
    taken = []
    for owner, name in ((FewRows, "_side_by_side"), (FewRows, "_block_by_block"), (OneRequest, "serve")):
        def count(*args, name=name, real=getattr(owner, name)):
            taken.append(name)
            return real(*args)
        monkeypatch.setattr(owner, name, count)
    return taken


def scattered(cache, sizes, order):
    """Allocations whose blocks lie in turn: "together" one behind the other, "apart" with blocks of nobody between them,
    "mixed" so that neighbours belong to different requests."""
    cache.kv.normal_()                                             # what others left there
    if order == "mixed":
        out = [cache.open(1) for _ in sizes]
        while any(cache.size(x) < n for x, n in zip(out, sizes)):
            for x, n in zip(out, sizes):
                cache.resize(x, min(n, cache.size(x) + cache.block))
        return out
    out = []
    for n in sizes:
        out.append(cache.open(n))
        if order == "apart":
            cache.open(9)
    return out


@pytest.mark.parametrize("rows", [(1, 1, 1), (5, 5, 5), (1, 1, 4), (3, 4, 3)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (5, 1)])
@pytest.mark.parametrize("order", ["together", "apart", "mixed"])
def test_requests_are_served_together_wherever_their_blocks_lie(rows, heads, order, monkeypatch):
    model = toy_model(n_head=heads[0], n_kv_head=heads[1])
    cache, taken = KVCache(model.config, 4 * 60), ways(monkeypatch)
    sizes = (21, 40, 30)
    requests = [(blocks, torch.randint(0, 64, (n,)).tolist()) for blocks, n in zip(scattered(cache, sizes, order), sizes)]
    together, _ = decode_together(model, cache, requests, rows)
    for (_, ids), logits in zip(requests, together):
        assert (logits - dense_logits(model, ids)).abs().max() < 1e-4
    groups = len(set(rows))
    assert taken[-3 * groups:].count("_block_by_block") == 3 * groups or groups > 1


@pytest.mark.parametrize("few", [0, 100])
@pytest.mark.parametrize("n, rows, want", [(1, 1, "_side_by_side"), (1, 5, "_side_by_side"), (3, 1, "_side_by_side"), (3, 2, "_side_by_side")])
def test_requests_of_equal_length_are_a_batch_of_torchs_attention_while_they_are_short(n, rows, want, few, monkeypatch):
    monkeypatch.setattr(attention, "FEW_BLOCKS", few)
    model = toy_model()
    cache, taken = KVCache(model.config, 200), ways(monkeypatch)
    requests = [(blocks, torch.randint(0, 64, (30,)).tolist()) for blocks in scattered(cache, [30] * n, "together")]
    together, _ = decode_together(model, cache, requests, [rows] * n)
    for (_, ids), logits in zip(requests, together):
        assert (logits - dense_logits(model, ids)).abs().max() < 1e-4
    assert taken[-1] == ("serve" if n == 1 else want if few else "_block_by_block")


@pytest.mark.parametrize("rows", [1, 5])
def test_prompts_and_long_contexts_in_bf16_are_read_by_products(rows, monkeypatch):
    monkeypatch.setattr(attention, "FEW", 16)
    monkeypatch.setattr(attention, "FEW_BLOCKS", 6)
    monkeypatch.setattr(attention, "PACKED_TYPES", {torch.float32, torch.bfloat16})
    model, taken = toy_model().bfloat16(), ways(monkeypatch)
    ids = torch.randint(0, 64, (40,)).tolist()
    want = dense_logits(model.float(), ids)
    cache = KVCache(model.config, 40, torch.bfloat16)
    got, used = cached_logits(model.bfloat16(), cache, cache.open(40), ids, [20, 4, *[rows] * (15 // rows)])
    assert taken == ["serve"] * (2 + 15 // rows) and used[-1].scores is None
    assert (got.float() - want[:39]).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize("table", [[0, 3, 2], [3, 4, 5], [5, 4, 3], [9, 0, 2]])
def test_rows_go_to_their_own_slots_alone(table):
    """Nine rows over three blocks, whose first and last slot may be as far apart as those of neighbours."""
    model = toy_model()
    cache = KVCache(model.config, 60)
    slots = cache.slots_of(Allocation(table), range(9))
    with torch.inference_mode():
        cache.kv.normal_()
        before = cache.kv.clone()
        model(torch.arange(9), torch.arange(9), packed_attend([(0, 9, FullKeys(cache, Allocation(table), 0, 9))]))
    changed = (cache.kv != before).any(4).any(2).any(1).any(0).nonzero()[:, 0]
    assert changed.tolist() == sorted(slots.tolist())


@pytest.mark.parametrize("few", [0, 100])
def test_segments_of_one_request_read_the_same_blocks(few, monkeypatch):
    """A request feeds its newest tokens in two segments, and next to it two others do: of equal and of unequal lengths."""
    monkeypatch.setattr(attention, "FEW_BLOCKS", few)
    model = toy_model()
    for sizes in ((24, 24), (9, 13, 17)):
        cache, segments, n, want = KVCache(model.config, 120), [], 0, []
        tokens, positions = [], []
        for blocks, size in zip(scattered(cache, sizes, "together"), sizes):
            ids = torch.randint(0, 64, (size,)).tolist()
            cached_logits(model, cache, blocks, ids[:-4], [size - 4])
            for start in (size - 4, size - 2):
                segments.append((n, n + 2, FullKeys(cache, blocks, start, 2)))
                tokens += ids[start:start + 2]
                positions += [start, start + 1]
                n += 2
            want.append(dense_logits(model, ids)[-4:])
        with torch.inference_mode():
            logits = model.logits(model(torch.tensor(tokens), torch.tensor(positions), packed_attend(segments)))
        assert (logits - torch.cat(want)).abs().max() < 1e-4


def mean_probabilities(model, ids, n):
    """(L, G, T): the softmax probability of every position, mean over the last n rows and the heads of a group."""
    probs = {}

    def reference(layer, q, k, v):                                  # explicit softmax over a dense causal matrix
        g = q.shape[2] // k.shape[2]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(g, 2)) / q.shape[-1] ** 0.5
        probs[layer] = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), float("-inf")).softmax(-1)[0]
        return dense_attend()(layer, q, k, v)

    with torch.inference_mode():
        model(torch.tensor([ids]), torch.arange(len(ids))[None], reference)
    groups = model.config.n_kv_head
    return torch.stack([probs[layer][:, -n:].unflatten(0, (groups, -1)).mean((1, 2)) for layer in sorted(probs)])


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1), (5, 1)])
def test_scores_are_mean_probabilities_over_every_row_and_grouped_head(heads):
    model = toy_model(n_head=heads[0], n_kv_head=heads[1])
    cache, ids, n = KVCache(model.config, 64), torch.randint(0, 64, (40,)).tolist(), 17
    _, used = cached_logits(model, cache, cache.open(64), ids, [40 - n, n], True)
    assert (used[1].scores - mean_probabilities(model, ids, n)).abs().max() < 1e-5
    assert (used[1].scores.sum(-1) - 1).abs().max() < 1e-4          # a mean of distributions is one


@pytest.mark.parametrize("order", ["together", "apart", "mixed"])
def test_scores_of_a_batch_are_those_of_each_request(order):
    model = toy_model()
    cache, sizes, rows = KVCache(model.config, 240), (21, 40, 30), (4, 3, 4)
    requests = [(blocks, torch.randint(0, 64, (n,)).tolist()) for blocks, n in zip(scattered(cache, sizes, order), sizes)]
    _, keys = decode_together(model, cache, requests, rows, 2, True)
    for (_, ids), one, n in zip(requests, keys, rows):
        assert (one.scores - mean_probabilities(model, ids, n)).abs().max() < 1e-5


def test_group_rows_round_trip():
    q = torch.randn(7, 6, 4)
    assert torch.equal(ungroup_rows(group_rows(q, 2), 7), q)
    assert torch.equal(group_rows(q, 2)[1, 7 * 2 + 3], q[3, 5])    # group 1, third head of it, row 3


@pytest.mark.parametrize("n", [1, 5])
def test_recorded_attention_in_bf16_is_nearly_as_exact_as_unrecorded(n):
    """Its logits are rounded to bf16 once more. That doubles the error of one call, 1.8 times here, and leaves the model's
    logits as they are; scores, which steer the selection alone, are within the rounding of bf16."""
    torch.manual_seed(0)
    config, errors = toy_model().config, []
    shapes = [(n, heads, config.head_dim) for heads in (config.n_head, config.n_kv_head, config.n_kv_head)]
    q, k, v = (torch.randn(shape).bfloat16() for shape in shapes)
    past = torch.randn(2, config.n_layer, config.n_kv_head, 60, config.head_dim).bfloat16()

    def attended(dtype, record):
        cache = KVCache(config, 60, dtype)
        cache.k.copy_(past[0]), cache.v.copy_(past[1])
        keys = only_keys(cache, 40, n, record=record)
        out = attend_alone(keys)(1, q.to(dtype), k.to(dtype), v.to(dtype))
        assert out.dtype == dtype
        return out.float(), keys.scores

    exact, scores = attended(torch.float32, True)
    for record in (True, False):
        out, rounded = attended(torch.bfloat16, record)
        errors.append((out - exact).abs().mean())
        assert not record or torch.allclose(rounded[1], scores[1], rtol=0.03)
    assert errors[0] < 2.5 * errors[1]


@pytest.mark.parametrize("head_dim, fuses", [(8, False), (48, False), (80, False), (96, False), (512, False), (16, True), (64, True),
                                             (128, True), (256, False)])
def test_kernels_are_used_for_the_head_sizes_they_take_alone(head_dim, fuses, monkeypatch):
    """With head sizes of no power of two, as the shipped drafter's 48, decoding falls back to torch's operators."""
    monkeypatch.setattr("kernels.available", lambda x: True)            # as on a GPU with triton
    model = toy_model(head_dim=head_dim)
    assert attention.can_fuse(model) == fuses
    assert attention.can_fuse(model.bfloat16()) == (fuses or head_dim == 256)       # fp32 does not fit


def test_cudnn_never_plans_attention():
    """cuDNN's attention plans again for every new length, and in decoding every forward has one."""
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("start", [5, 1100])
def test_rows_of_a_tree_see_their_paths_behind_few_and_many_keys_in_bf16(start):
    """Behind many keys a processor that multiplies bf16 takes single products for a tree, too."""
    from minispec.core.attention import tree_mask
    from minispec.core.gpt import GPTConfig
    from minispec.core.kv_cache import Allocation, KVCache
    g = torch.Generator().manual_seed(0)
    c = GPTConfig(vocab_size=8, n_layer=1, n_head=4, n_kv_head=2, d_model=64, head_dim=16, d_ff=8, block_size=2048)
    sees = tree_mask([0, 1, 0, 3])
    q, k, v = torch.randn(5, 4, 16, generator=g), torch.randn(5, 2, 16, generator=g), torch.randn(5, 2, 16, generator=g)
    old = torch.randn(2, 1, 2, start, 16, generator=g)
    out = []
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVCache(c, 2048, dtype, "cpu")
        cache.k[:, :, :start], cache.v[:, :, :start] = old.to(dtype)
        out.append(attend_alone(only_keys(cache, start, 5, tail=sees))(0, q.to(dtype), k.to(dtype), v.to(dtype)).float())
    keys, values = (torch.cat([x[0, :, :], y.transpose(0, 1)], 1).repeat_interleave(2, 0) for x, y in ((old[0], k), (old[1], v)))
    hidden = torch.cat([torch.zeros(5, start), torch.where(sees, 0.0, float("-inf"))], 1)
    want = ((q.transpose(0, 1) @ keys.mT / 4 + hidden).softmax(-1) @ values).transpose(0, 1)
    assert torch.allclose(out[0], want, atol=1e-5) and torch.allclose(out[1], want, atol=0.05)
    blind = ((q.transpose(0, 1) @ keys.mT / 4).softmax(-1) @ values).transpose(0, 1)
    assert start > 5 or not torch.allclose(out[1], blind, atol=0.05)
