import pytest
import torch
from conftest import dense_logits, toy_model

from minispec.core import attention
from minispec.core.attention import FullKeys, dense_attend, group_rows, packed_attend, ungroup_rows
from minispec.core.kv_cache import KVCache


def cached_logits(model, cache, base, ids, chunks, record=False):
    """Feed ids in chunks through the cache; logits (T, V), and the keys objects."""
    out, start, used = [], 0, []
    for n in chunks:
        keys = FullKeys(cache, base, start, n, record)
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
    base = cache.open(40).first
    ids = torch.randint(0, 64, (30,)).tolist()
    got, _ = cached_logits(model, cache, base, ids, [1, 7, 1, 12, 9], record)
    assert (got - dense_logits(model, ids)).abs().max() < 1e-4
    assert cache.k[:, :, :base].abs().max() == 0 and cache.k[:, :, base + 30:].abs().max() == 0    # nobody else's slots


def test_packed_requests_do_not_see_each_other():
    model = toy_model()
    cache, sequences = KVCache(model.config, 200), [torch.randint(0, 64, (n,)).tolist() for n in (1, 13, 6, 30)]
    bases, segments, n = [cache.open(40).first for _ in sequences], [], 0
    for base, ids in zip(bases, sequences):
        segments.append((n, n + len(ids), FullKeys(cache, base, 0, len(ids))))
        n += len(ids)
    with torch.inference_mode():
        hidden = model(torch.tensor(sum(sequences, [])), torch.cat([torch.arange(len(s)) for s in sequences]), packed_attend(segments))
        logits = model.logits(hidden)
    for (a, b, _), ids in zip(segments, sequences):
        assert (logits[a:b] - dense_logits(model, ids)).abs().max() < 1e-4


def in_lanes(monkeypatch):
    """Whether each call of Lanes.attend served its requests."""
    served, attend = [], attention.Lanes.attend
    monkeypatch.setattr(attention.Lanes, "attend", lambda lanes, some: served.append(attend(lanes, some)) or served[-1])
    return served


def decode_together(model, cache, runs, rows, steps=3):
    """Feed each run's ids (from cached positions on) in steps of rows[i], all runs in one forward. Logits of every run (T, V)."""
    out, start = [[] for _ in runs], [len(ids) - rows[i] * steps for i, (_, ids) in enumerate(runs)]
    for i, (base, ids) in enumerate(runs):
        if start[i]:
            out[i].append(cached_logits(model, cache, base, ids[:start[i]], [start[i]])[0])
    for _ in range(steps):
        segments, n = [], 0
        for i, (base, _) in enumerate(runs):
            segments.append((n, n + rows[i], FullKeys(cache, base, start[i], rows[i])))
            n += rows[i]
        tokens = torch.tensor([ids[start[i] + j] for i, (_, ids) in enumerate(runs) for j in range(rows[i])])
        positions = torch.tensor([start[i] + j for i in range(len(runs)) for j in range(rows[i])])
        with torch.inference_mode():
            logits = model.logits(model(tokens, positions, packed_attend(segments)))
        for i, (a, b, _) in enumerate(segments):
            out[i].append(logits[a:b])
            start[i] += rows[i]
    return [torch.cat(x) for x in out]


@pytest.mark.parametrize("rows", [(1, 1, 1), (5, 5, 5), (1, 1, 4)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (5, 1)])
@pytest.mark.parametrize("lanes", [(0, 1, 2), (2, 0, 1), (3, 1, 0)])      # in order, in another one, and with a lane of nobody
def test_requests_at_equal_distances_are_served_in_one_call(rows, heads, lanes, monkeypatch):
    monkeypatch.setattr(attention, "FILL", 9)
    model = toy_model(n_head=heads[0], n_kv_head=heads[1])
    cache, served = KVCache(model.config, 4 * 40), in_lanes(monkeypatch)
    cache.k.normal_(), cache.v.normal_()                            # what others left there
    runs = [(lane * 40, torch.randint(0, 64, (n,)).tolist()) for lane, n in zip(lanes, (21, 40, 30))]
    together = decode_together(model, cache, runs, rows)
    assert sum(x is not None for x in served) == 3       # a call a step; a request with more rows has one of its own
    for (_, ids), logits in zip(runs, together):
        assert (logits - dense_logits(model, ids)).abs().max() < 1e-4


@pytest.mark.parametrize("bases, lengths", [((0, 50, 97), (30, 30, 30)), ((0, 50, 100), (30, 3, 3)), ((0, 50, 100), (45, 38, 38))])
def test_requests_of_irregular_runs_or_lengths_are_served_one_by_one(bases, lengths, monkeypatch):
    model = toy_model()
    cache, served = KVCache(model.config, 140), in_lanes(monkeypatch)
    runs = [(base, torch.randint(0, 64, (n,)).tolist()) for base, n in zip(bases, lengths)]
    for (_, ids), logits in zip(runs, decode_together(model, cache, runs, (1, 1, 1), 2)):
        assert (logits - dense_logits(model, ids)).abs().max() < 1e-4
    assert served and not any(served)


@pytest.mark.parametrize("n", [1, 5])
def test_prompts_and_long_contexts_in_bf16_are_read_by_products(n, monkeypatch):
    monkeypatch.setattr(attention, "FEW", 16)
    monkeypatch.setattr(attention, "LONG", 26)
    monkeypatch.setattr(attention, "PACKED_TYPES", {torch.float32, torch.bfloat16})
    model = toy_model().bfloat16()
    ids = torch.randint(0, 64, (40,)).tolist()
    want = dense_logits(model.float(), ids)
    got, used = cached_logits(model.bfloat16(), KVCache(model.config, 40, torch.bfloat16), 0, ids, [20, 5, *[n] * (15 // n)])
    assert [keys.in_steps for keys in used] == [True, False, *[True] * (15 // n)] and used[-1].scores is None
    assert (got.float() - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1), (5, 1)])
def test_scores_are_mean_probabilities_over_every_row_and_grouped_head(heads):
    model = toy_model(n_head=heads[0], n_kv_head=heads[1])
    cache, ids, n = KVCache(model.config, 64), torch.randint(0, 64, (40,)).tolist(), 17
    probs = {}

    def reference(layer, q, k, v):                                  # explicit softmax over a dense causal matrix
        g = q.shape[2] // k.shape[2]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(g, 2)) / q.shape[-1] ** 0.5
        probs[layer] = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), float("-inf")).softmax(-1)[0]
        return dense_attend()(layer, q, k, v)

    with torch.inference_mode():
        model(torch.tensor([ids]), torch.arange(40)[None], reference)
    _, used = cached_logits(model, cache, cache.open(64).first, ids, [40 - n, n], True)
    for layer in range(2):
        want = probs[layer][:, -n:].unflatten(0, (heads[1], -1)).mean((1, 2))     # (H, n, T) -> (G, T)
        assert (used[1].scores[layer] - want).abs().max() < 1e-5
    assert (used[1].scores.sum(-1) - 1).abs().max() < 1e-4          # a mean of distributions is one


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
        keys = FullKeys(cache, 3, 40, n, record=record)
        out = keys.attend(1, q.to(dtype), k.to(dtype), v.to(dtype))
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
    from minispec.core.attention import FullKeys, tree_mask
    from minispec.core.gpt import GPTConfig
    from minispec.core.kv_cache import KVCache
    g = torch.Generator().manual_seed(0)
    c = GPTConfig(vocab_size=8, n_layer=1, n_head=4, n_kv_head=2, d_model=64, head_dim=16, d_ff=8, block_size=2048)
    sees = tree_mask([0, 1, 0, 3])
    q, k, v = torch.randn(5, 4, 16, generator=g), torch.randn(5, 2, 16, generator=g), torch.randn(5, 2, 16, generator=g)
    old = torch.randn(2, 1, 2, start, 16, generator=g)
    out = []
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVCache(c, 2048, dtype, "cpu")
        cache.k[:, :, :start], cache.v[:, :, :start] = old.to(dtype)
        out.append(FullKeys(cache, 0, start, 5, tail=sees).attend(0, q.to(dtype), k.to(dtype), v.to(dtype)).float())
    keys, values = (torch.cat([x[0, :, :], y.transpose(0, 1)], 1).repeat_interleave(2, 0) for x, y in ((old[0], k), (old[1], v)))
    hidden = torch.cat([torch.zeros(5, start), torch.where(sees, 0.0, float("-inf"))], 1)
    want = ((q.transpose(0, 1) @ keys.mT / 4 + hidden).softmax(-1) @ values).transpose(0, 1)
    assert torch.allclose(out[0], want, atol=1e-5) and torch.allclose(out[1], want, atol=0.05)
    blind = ((q.transpose(0, 1) @ keys.mT / 4).softmax(-1) @ values).transpose(0, 1)
    assert start > 5 or not torch.allclose(out[1], blind, atol=0.05)
