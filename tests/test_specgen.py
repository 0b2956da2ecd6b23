"""PillarAttn: which positions are selected, which of them a draft row reads, and that no key or value of
sparse attention outlives a round; then the schedule."""
import time

import pytest
import torch
from conftest import (Arbitrary, attend_alone, cached_kv, dies_after, fresh_kv, ids_of, only_keys,
                      refused, seeded, toy_model)

from minispec.core.attention import FullKeys, packed_attend
from minispec.core.gpt import dense_attend
from minispec.core.engine import Engine
from minispec.core.kv_cache import KVCache
from minispec.core.requests import Request
from minispec.core.scheduler import SyncScheduler
from minispec.specgen import FADE, DraftPool, PillarKeys, SpecGenState, SpecGen, look_ahead

MODEL = toy_model()
PROMPT = torch.randint(0, 64, (90,), generator=seeded(5)).tolist()
AR = Engine(MODEL, SyncScheduler, 1).generate([Request(PROMPT, 60)])[0]


def read(cache, n):
    """Blocks of a new request with the keys and values of the first n tokens of PROMPT, and room."""
    blocks = cache.open(n + 20)
    with torch.inference_mode():
        attend = attend_alone(FullKeys(cache, blocks, 0, n))
        MODEL(torch.tensor(PROMPT[:n]), torch.arange(n), attend)
    return blocks


@pytest.fixture
def cache():
    cache = KVCache(MODEL.config, 300)
    cache.open(7)
    return cache


@torch.inference_mode()
def draft(step, tokens, keys):
    """Hidden states (n, C) of one forward with a draft row of each of several requests."""
    positions = torch.tensor([x.length + step for x in keys])
    attend = packed_attend([(i, i + 1, x) for i, x in enumerate(keys)])
    return MODEL(torch.tensor(tokens), positions, attend)


@torch.inference_mode()
def masked_reference(selected, recent, n, tokens):
    """The same draft rows by dense attention under a mask per layer and KV head."""
    ids = PROMPT[:n] + tokens
    t = len(ids)

    def attend(layer, q, k, v):
        seen = torch.ones(k.shape[2], t, t, dtype=torch.bool).tril()
        seen[:, n:, : n - recent] = False
        for group, positions in zip(seen, selected[layer]):
            group[n:, positions] = True
        return dense_attend(seen.repeat_interleave(q.shape[2] // k.shape[2], 0)[None])(layer, q, k, v)

    return MODEL(torch.tensor([ids]), attend=attend)[0, n:]


def test_draft_rows_see_the_selection_the_recent_window_and_themselves(cache):
    n, recent = 60, 6
    selected = torch.stack([torch.randperm(n - recent)[:9] for _ in range(4)]).view(2, 2, 9)
    blocks = read(cache, n)
    before = cache.kv.clone()
    keys = PillarKeys(DraftPool(cache, 3), blocks, n, selected, recent)
    got = torch.cat([draft(step, [token], [keys]) for step, token in enumerate([3, 1, 4])])
    assert (got - masked_reference(selected, recent, n, [3, 1, 4])).abs().max() < 1e-4
    assert keys.n == 9 + 6 + 3  # step j reads b + j entries
    assert torch.equal(cache.kv, before)  # draft steps leave the cache alone


def test_requests_that_draft_together_see_what_each_sees_alone(cache):
    """Two of three buffers of a pool draft; they differ in length, one of them holds everything."""
    lengths = 60, 37, 50
    blocks = [read(cache, n) for n in lengths]
    chosen = [(torch.arange(4).expand(2, 2, -1), 3), (None, 0), (torch.arange(14).expand(2, 2, -1), 3)]

    def lists(pool):
        return [PillarKeys(pool, own, n, *some) for own, n, some in zip(blocks, lengths, chosen)]

    pool = DraftPool(cache, 2)
    shared = lists(pool)
    alone = [lists(DraftPool(cache, 2))[i] for i in range(3)]
    draft(0, [7], shared[:1])  # takes the first buffer, then sits out
    for step, token in enumerate((3, 5)):
        want = torch.cat([draft(step, [token], [keys]) for keys in alone[1:]])
        assert (draft(step, [token, token], shared[1:]) - want).abs().max() < 1e-4
    assert pool.taken == shared
    pool.free(shared[1])
    assert pool.taken == [shared[0], None, shared[2]] and shared[1].buffer is None


@pytest.mark.parametrize("length, least, want", [(1000, 0, 50), (1001, 0, 51), (1000, 64, 64), (40, 64, 40)])
def test_budget_rule(length, least, want):
    assert SpecGen(None, sparsity=0.05, min_budget=least).budget(length) == want


def about_to_select(select):
    """(scheduler with a budget of 20 positions, request)."""
    scheduler = SpecGen(Engine(MODEL, SyncScheduler), sparsity=0.25, min_budget=4, select=select)
    scheduler.engine.cache = KVCache(MODEL.config, 8)
    request = Request(PROMPT)
    request.n_cached = 80
    return scheduler, request


@pytest.mark.parametrize("select", ["pillar", "ahead"])
@pytest.mark.parametrize("accepted", [0, 3, 8])
def test_selection_is_topk_of_the_scores_per_layer_and_head(accepted, select):
    scheduler, request = about_to_select(select)
    keys = only_keys(KVCache(MODEL.config, 90), 71, 9, record=scheduler.record)
    keys.scores.copy_(torch.rand(keys.scores.shape) ** 8)
    scores = keys.scores[:, :, :80]
    if select == "ahead":
        request.state = SpecGenState(None, 0, memory=torch.rand(2, 2, 75) ** 8)
        scores = look_ahead(scores, request.state.memory)
    state = scheduler._select(request, keys, accepted)
    assert state.recent == accepted + 2
    want = scores[:, :, : 78 - accepted].topk(18 - accepted).indices.sort().values
    assert torch.equal(state.selected.sort().values, want)
    assert not torch.equal(want[0, 0], want[1, 1])
    assert torch.equal(state.memory, scores)


def test_a_window_is_the_first_and_the_newest_positions():
    scheduler, request = about_to_select("window")
    state = scheduler._select(request, None, 3)
    assert state.recent == 16 and state.selected.tolist() == [[[0, 1, 2, 3]] * 2] * 2


def test_ahead_passes_scores_on_and_remembers():
    scores, memory = torch.zeros(1, 1, 20), torch.zeros(1, 1, 12)
    scores[..., 3], scores[..., 18] = 1.0, 0.5
    memory[..., 5], memory[..., 11] = 1.0, 4.0
    want = [FADE ** (i - 3) if 3 <= i <= 10 else 0.0 for i in range(20)]
    want[5], want[11], want[18], want[19] = max(want[5], 0.5), 2.0, 0.5, 0.3
    assert look_ahead(scores, memory)[0, 0].tolist() == pytest.approx(want)


class Spy(Arbitrary):
    """Keeps every selection with its arguments, and the cache before the blocks go back."""

    def _select(self, r, keys, accepted):
        state = super()._select(r, keys, accepted)
        self.__dict__.setdefault("made", []).append((state, keys, accepted, r.n_cached))
        return state

    def release(self, r):
        self.final = cached_kv(self.engine.cache, r.blocks, r.n_cached)
        super().release(r)


def generate(new=60, chunk=512, **settings):
    """(generation, scheduler) of one long request."""
    engine = Engine(MODEL, lambda e: Spy(e, **settings), 1, prefill_chunk=chunk)
    return engine.generate([Request(PROMPT, new)])[0], engine.scheduler


@torch.inference_mode()
@pytest.mark.parametrize("k, sparsity", [(1, 0.02), (8, 0.02), (4, 1.0)])
@pytest.mark.parametrize("select", Arbitrary.selections)
def test_output_never_depends_on_the_selection(k, sparsity, select):
    generation, scheduler = generate(k=k, sparsity=sparsity, min_budget=2, select=select)
    assert generation.token_ids == AR.token_ids
    assert len(scheduler.made) == len(generation.rounds) + 1  # by the prompt, then by each verification
    # At a sparsity of 1 drafts see everything.
    assert all(s.accepted == s.proposed for s in generation.rounds) == (sparsity == 1.0)
    # Keys and values of all committed positions come from full attention.
    ids = (PROMPT + generation.token_ids)[:-1]  # committed = cached + 1
    assert (scheduler.final - fresh_kv(MODEL, ids)).abs().max() < 1e-4


@pytest.mark.parametrize("chunk", [3, 64, 512])
def test_the_end_of_the_prompt_selects_for_the_first_round(chunk, cache):
    generation, scheduler = generate(20, chunk, k=8, sparsity=0.1, min_budget=2)
    assert generation.token_ids == AR.token_ids[:20]
    state, keys, accepted, n_cached = scheduler.made[0]
    assert n_cached == len(PROMPT) and accepted == keys.n - 1 and keys.n == min(chunk, 9)
    assert state.selected.shape[-1] + state.recent == scheduler.budget(len(PROMPT))
    # The same scores, when all of the prompt is recorded but its last rows alone are averaged.
    start = len(PROMPT) - keys.n
    want = FullKeys(cache, read(cache, start), start, keys.n, record=scheduler.record)
    with torch.inference_mode():
        MODEL(torch.tensor(PROMPT[start:]), torch.arange(start, len(PROMPT)), attend_alone(want))
    assert (keys.scores - want.scores).abs().max() < 1e-4


def test_a_prompt_reports_how_far_it_is_read():
    engine = Engine(MODEL, SyncScheduler, 1, prefill_chunk=32)
    seen = []
    engine.on_prefill = seen.append
    engine.generate([Request(PROMPT, 2)])
    assert seen == [32, 32, 26]
    # The first token is the prefill's, also where one row would be left.
    seen.clear()
    (generation,) = engine.generate([Request(PROMPT[:0:-1][:65], 5)])
    assert seen == [32, 33] and len(generation.rounds) == 4


# -- schedule ------------------------------------------------------------------------------------------------


def serve(n, new=50, **settings):
    """(generations, engine) of n requests of like length, which are those of plain decoding."""
    prompts = torch.randint(0, 64, (n, 40), generator=seeded(7)).tolist()
    engine = Engine(MODEL, lambda e: SpecGen(e, 4, 0.1, 4, **settings), n)
    plain = Engine(MODEL, SyncScheduler, n)
    got, want = (e.generate([Request(p, new) for p in prompts]) for e in (engine, plain))
    assert ids_of(got) == ids_of(want)
    return got, engine


def rows(engine):
    """Rows of every iteration in which all requests draft or verify."""
    whole = [i for i in engine.iterations if i["active"] == engine.batch_size and not i["prefill"]]
    return [i["draft"] + i["verify"] for i in whole][6:-6]


def test_unified_rows_are_even_and_lockstep_rows_are_not():
    _, even = serve(15)
    assert set(rows(even)) == {3 * (2 * 4 + 1)}  # 3 requests in each of k + 1 phases: m (2 k + 1)
    _, peaks = serve(15, schedule="lockstep")
    assert max(rows(peaks)) == (4 + 1) * min(rows(peaks))


def test_first_round_is_shorter_and_all_later_ones_are_whole():
    got, _ = serve(5, new=120)
    assert sorted(g.rounds[0].proposed for g in got) == [0, 1, 2, 3, 4]
    assert all(s.proposed == 4 for g in got for s in g.rounds[1:-2])


def test_a_delayed_verification_stalls_its_request_once():
    got, engine = serve(6, delayed=True)  # one request in each of k + 2 states
    assert sum(i["stalled"] for i in engine.iterations) >= sum(len(g.rounds) for g in got)
    for i in engine.iterations:
        assert i["draft"] + i["verify"] + i["prefill"] > 0 or i["stalled"]


def test_an_interrupt_waits_for_the_forward_before_blocks_are_free():
    engine = Engine(MODEL, lambda e: SpecGen(e, k=4, delayed=True), 1)
    forward, retire, order = engine.forward, engine.retire, []

    def slow(segments):
        time.sleep(0.2)
        order.append("forward")
        return forward(segments)

    def noted(everything=False):
        order.extend(["retire"] * everything)
        retire(everything)

    engine.forward, engine.retire = slow, noted
    with dies_after(0, engine, "commit"), pytest.raises(KeyboardInterrupt):
        engine.generate([Request(PROMPT, 8)])
    assert order == ["forward", "retire"]


# -- cost model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [dict(k=0), dict(k=99), dict(sparsity=0.0), dict(sparsity=1.5)])
def test_settings_out_of_range(bad):
    with refused("allowed is"):
        SpecGen(None, **bad)
