"""The cache manager: whatever the policy and however small the pool, every request gets its own tokens."""
import functools
import os
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import toy_model

from minispec.core import admission
from minispec.core.kv_cache import whole_blocks
from minispec.core.engine import Engine, Lockstep
from minispec.core.requests import Request
from minispec.specgen import SpecGen

MODEL = toy_model()
PLANNERS = {"ar": Lockstep, "specgen": lambda e: SpecGen(e, 4, 0.1, 4), "lookup": lambda e: SpecGen(e, 6, 0.1, 4, lookup=99),
            "delayed": lambda e: SpecGen(e, 4, 0.1, 4, delayed=True)}


def prompts(n, seed=0, longest=60):
    rng = random.Random(seed)
    return [[rng.randrange(64) for _ in range(rng.randint(2, longest))] for _ in range(n)]


@functools.cache
def reference(n, seed=0):
    """What the autoregressive loop answers to prompts(n, seed)."""
    requests = [Request(p, 40) for p in prompts(n, seed)]
    return [g.token_ids for g in Engine(MODEL, Lockstep, 8).generate(requests)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(admission, "CHUNK", 16)


@pytest.mark.parametrize("policy", admission.POLICIES)
@pytest.mark.parametrize("planner", PLANNERS)
def test_half_of_the_demand_is_enough(policy, planner):
    some = prompts(10)
    requests = [Request(p, 40) for p in some]
    extra = PLANNERS[planner](Engine(MODEL, Lockstep)).extra_slots(requests[0])
    peak = sum(sorted(r.longest + extra for r in requests)[-6:])
    engine = Engine(MODEL, PLANNERS[planner], 6, cache_tokens=peak // 2, prefill_chunk=16, admission=policy)
    got = engine.generate(requests)
    assert [g.token_ids for g in got] == reference(10)
    assert engine.cache.used == engine.cache.charged == 0
    fed = sum(i["prefill"] for i in engine.iterations)
    if policy == "offload":
        assert engine.cache.offloaded > 0
    if policy == "preempt":
        assert engine.admission.recomputed > 0 and fed > sum(map(len, some))
    else:
        assert fed <= sum(map(len, some))                                      # no prompt token is computed twice


@pytest.mark.parametrize("k, sparsity", [(1, 0.02), (4, 0.05), (8, 1.0)])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("policy", ["reserve", "offload"])
def test_identical_to_autoregressive_in_every_combination(k, sparsity, delayed, policy):
    """One request alone, and six together in a pool of half their demand, with drafts from next to nothing (min_budget 2)."""
    some, planner = prompts(6, seed=3), lambda e: SpecGen(e, k, sparsity, 2, delayed=delayed)
    want = reference(6, 3)
    alone = Engine(MODEL, planner, 1, prefill_chunk=16, admission=policy).generate([Request(some[0], 40)])
    requests = [Request(p, 40) for p in some]
    demand = sum(r.longest + planner(Engine(MODEL, Lockstep)).extra_slots(r) for r in requests)
    engine = Engine(MODEL, planner, 6, cache_tokens=demand // 2, prefill_chunk=16, admission=policy)
    together = engine.generate(requests)
    assert [alone[0].token_ids] == want[:1] and [g.token_ids for g in together] == want
    assert sum(i["prefill"] for i in engine.iterations) <= sum(map(len, some))       # nothing is computed again
    if sparsity == 1.0:
        assert all(s.accepted == s.proposed for g in together for s in g.steps)
    assert (engine.cache.offloaded > 0) == (policy == "offload")


def test_aggressive_admission_decodes_more_at_once():
    some, together = prompts(10), {}
    for policy in admission.POLICIES:
        engine = Engine(MODEL, Lockstep, 8, cache_tokens=300, prefill_chunk=16, admission=policy)
        engine.generate([Request(p, 60, stop_ids=range(0, 64, 3)) for p in some])      # most answers are short
        together[policy] = sum(i["active"] for i in engine.iterations) / len(engine.iterations)
    assert together["offload"] > together["reserve"] and together["preempt"] > together["reserve"]


def test_the_oldest_is_never_pushed_out():
    some = prompts(8)
    engine = Engine(MODEL, PLANNERS["specgen"], 8, cache_tokens=330, prefill_chunk=16, admission="offload")
    requests = [Request(p, 60) for p in some]
    for _ in engine.stream(requests):
        living = [r for r in requests if r.blocks and not r.finished]
        if living:
            assert living[0] in engine.active
        assert engine.admission.paused == sorted(engine.admission.paused, key=requests.index, reverse=True)
    assert engine.cache.offloaded > 0


def test_the_host_takes_all_that_leave():
    """Those that stay grow into the room of those that left, so more than the cache may be on the host."""
    for n, slots in ((8, 220), (16, 300)):
        some = [[i + 1] * 8 for i in range(n)]
        engine = Engine(FUZZ_MODEL, Lockstep, n, cache_tokens=slots, admission="offload")
        got = engine.generate([Request(p, 200) for p in some])
        want = Engine(FUZZ_MODEL, Lockstep, 1).generate([Request(p, 200) for p in some])
        assert [g.token_ids for g in got] == [g.token_ids for g in want] and engine.cache.offloaded > slots


FUZZ_MODEL = toy_model(n_layer=1, n_head=2, n_kv_head=1)


RUNS = 500 if os.environ.get("MINISPEC_FULL") else 50


@pytest.mark.parametrize("part", range(2))
def test_fuzz(part):
    """100 runs in all (MINISPEC_FULL=1: 1,000): arrivals, lengths, pools, settings and cancellations at random; many prompts begin
    alike. No block is leaked or freed twice, and every request that was not cancelled gets the tokens it gets alone."""
    alone, shared = {}, 0
    for seed in range(part * RUNS, (part + 1) * RUNS):
        rng = random.Random(seed)
        some = [tuple(rng.randrange(64) for _ in range(rng.choice([1, 3, 8, 20]))) for _ in range(rng.randint(1, 6))]
        some = [tuple(range(20))[:rng.choice([0, 0, 6, 13, 20])] + p for p in some]
        news = [rng.choice([1, 2, 9, 20]) for _ in some]
        for p, n in zip(some, news):
            if (p, n) not in alone:
                alone[p, n] = Engine(FUZZ_MODEL, Lockstep, 1).generate([Request(p, n)])[0].token_ids
        k, delayed, schedule = rng.choice([1, 3, 8]), rng.random() < 0.5, rng.choice(["unified", "lockstep"])
        engine = Engine(FUZZ_MODEL, lambda e: SpecGen(e, k, 0.2, 3, schedule=schedule, delayed=delayed), rng.randint(1, 5),
                        prefill_chunk=rng.choice([1, 4, 64]), admission=rng.choice(admission.POLICIES))
        requests = [Request(p, n) for p, n in zip(some, news)]
        largest = max(whole_blocks(r.longest) + engine.planner.extra_slots(r) for r in requests)
        engine.cache_tokens = rng.randint(largest, 3 * largest)
        at_once = rng.randint(1, len(requests))
        stream, later = engine.stream(requests[:at_once]), requests[at_once:]
        for _ in stream:
            if later and rng.random() < 0.3:
                engine.waiting.append(later.pop())                             # arrives while others are decoded
            if rng.random() < 0.03:
                rng.choice(requests).cancel()
            held = [block for r in [*engine.active, *engine.admission.paused] for block in r.blocks.table]
            free = [*engine.cache.free_blocks, *engine.cache.idle]
            assert len(set(free)) == len(free) and set(free) | set(held) == set(range(engine.cache.n_blocks)) and not set(free) & set(held)
            assert all(engine.cache.users[block] == held.count(block) for block in range(engine.cache.n_blocks))
        engine.generate(later)
        for r, p, n in zip(requests, some, news):
            want = alone[p, n]
            assert r.generation.token_ids == (want[:len(r.generation.token_ids)] if r.generation.finish == "cancelled" else want), seed
        assert engine.cache.used == engine.cache.charged == 0
        assert not engine.active and not engine.admission.paused
        shared += engine.admission.shared
    assert shared > 200


BEGINNING = [(7 * i) % 60 for i in range(41)]


@pytest.mark.parametrize("policy", admission.POLICIES)
@pytest.mark.parametrize("planner", PLANNERS)
def test_a_common_beginning_is_read_once(planner, policy):
    """Questions about one text, at once and one after the other: the text is read by the first one alone."""
    some = [BEGINNING + tail for tail in prompts(6, longest=9)]
    want = [Engine(MODEL, Lockstep, 1).generate([Request(p, 30)])[0].token_ids for p in some]
    engine = Engine(MODEL, PLANNERS[planner], 4, prefill_chunk=16, admission=policy)
    for turn in range(2):
        engine.iterations.clear()
        got = engine.generate([Request(p, 30) for p in some])
        assert [g.token_ids for g in got] == want
        read, blocks = sum(i["prefill"] for i in engine.iterations), engine.cache.block
        last = max(engine.planner.record_prompt, 1)                # rows that are read in any case
        unshared = sum(len(p) - (min(len(p) - last, 40) if turn or i else 0) // blocks * blocks for i, p in enumerate(some))
        assert read <= unshared < 0.5 * sum(map(len, some))
    assert engine.cache.used == 0 and engine.admission.shared > 400


def test_what_is_shared_is_never_written(monkeypatch):
    """While others decode behind the same beginning, its keys and values stay as they are, to the bit."""
    engine = Engine(MODEL, PLANNERS["specgen"], 4)
    engine.generate([Request(BEGINNING, 5)])
    blocks = list(engine.cache.idle)
    slots = torch.cat([torch.arange(b * 4, b * 4 + 4) for b in blocks])
    before = engine.cache.kv[:, :, :, slots].clone()
    engine.cache.enlarge(1000)                                     # a larger pool holds what the smaller one held
    for _ in engine.stream([Request(BEGINNING + p, 40) for p in prompts(4)]):
        assert torch.equal(engine.cache.kv[:, :, :, slots], before)
    assert engine.admission.shared >= 4 * 4 * (len(blocks) - 1)


def test_what_nobody_uses_goes_when_the_room_is_needed():
    """A pool for one request: each new text takes the blocks of the oldest, and all answers stay right."""
    some = [[i] + BEGINNING for i in range(5)]
    engine = Engine(MODEL, Lockstep, 1, cache_tokens=100)
    want = [Engine(MODEL, Lockstep, 1).generate([Request(p, 30)])[0].token_ids for p in some]
    for order in (range(5), (4, 4, 0, 4)):
        for i in order:
            shared = engine.admission.shared
            assert engine.generate([Request(some[i], 30)])[0].token_ids == want[i]
            hit = engine.admission.shared > shared
            assert len(engine.cache.idle) <= engine.cache.n_blocks and len(engine.cache.names) == len(engine.cache.named) <= engine.cache.n_blocks
        assert hit == (order != range(5))


def test_a_conversation_reads_the_new_line_alone():
    """Ten turns: each reads what is new, the rest of its last block, and nothing else; also when the pool has to grow."""
    engine, text = Engine(MODEL, PLANNERS["specgen"], 1), []
    for turn in range(10):
        text = text + [turn, 5, 9, 11, 3, 2]
        engine.iterations.clear()
        got, = engine.generate([Request(text, 12)])
        assert got.token_ids == Engine(MODEL, Lockstep, 1).generate([Request(text, 12)])[0].token_ids
        assert sum(i["prefill"] for i in engine.iterations) <= 6 + 1 + 4 + 4 + 5         # line, last answer token, block, recorded rows
        text = text + got.token_ids


def test_drafters_that_read_states_read_the_beginning_themselves():
    """The target's states of shared tokens are gone, so nothing is shared."""
    from minispec import prism
    drafter = prism.PrismDrafter(prism.for_target(MODEL, (0,)).eval(), MODEL, 3)
    engine = Engine(MODEL, lambda e: Lockstep(e, drafter, 3), 2)
    some = [BEGINNING + p for p in prompts(3)]
    got = engine.generate([Request(p, 20) for p in some])
    assert [g.token_ids for g in got] == [Engine(MODEL, Lockstep, 1).generate([Request(p, 20)])[0].token_ids for p in some]
    assert engine.admission.shared == 0


def test_nobody_leaves_the_cache_before_being_judged():
    """Delayed verification in a pool where growing takes the last slots: the youngest is pushed out while it waits for
    its verdict, unless it is judged first."""
    model = toy_model(vocab=16, seed=321, d_model=16, n_head=2, n_kv_head=1, head_dim=8, d_ff=32, n_layer=2, rope_theta=100.0, qk_norm=False)
    with torch.no_grad():                                  # sharp attention, so that missing keys change the output
        for block in model.blocks:
            block.qkv.weight.mul_(8)
            block.out.weight.mul_(8)
        model.head.weight.normal_(0, 0.45)
    rng, planner = random.Random(5), lambda e: SpecGen(e, 1, 0.02, 1, delayed=True)
    some, recomputed = [[rng.randrange(16)] for _ in range(5)], 0
    want = [g.token_ids for g in Engine(model, Lockstep, 5).generate([Request(p, 100) for p in some])]
    for slots in (160, 170, 180):
        engine = Engine(model, planner, 5, cache_tokens=slots, admission="preempt")
        got = engine.generate([Request(p, 100) for p in some])
        assert [g.token_ids for g in got] == want, slots
        recomputed += engine.admission.recomputed
    assert recomputed > 0
    engine.unjudged = [SimpleNamespace(request=some)]
    with pytest.raises(AssertionError, match="leaves before its verdict"):
        engine.admission._push_out(some)
