"""The cache manager: whatever the policy and however small the pool, every request gets its own tokens."""

import functools
import os
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import ids_of, toy_model

from minispec.core import admission
from minispec.core.engine import Engine
from minispec.core.kv_cache import Allocation, whole_blocks
from minispec.core.prefix_cache import PrefixCache
from minispec.core.requests import Request
from minispec.core.scheduler import SyncScheduler
from minispec.specgen import SpecGen

MODEL = toy_model()
SCHEDULERS = {
    "ar": SyncScheduler,
    "specgen": lambda e: SpecGen(e, 4, 0.1, 4),
    "delayed": lambda e: SpecGen(e, 4, 0.1, 4, delayed=True),
}


def prompts(n, longest=60):
    rng = random.Random(0)
    return [[rng.randrange(64) for _ in range(rng.randint(2, longest))] for _ in range(n)]


def answer(engine, some, n=40):
    """Tokens of n-token answers; and the rows of prompts that were fed for them."""
    engine.iterations.clear()
    tokens = ids_of(engine.generate([Request(p, n) for p in some]))
    return tokens, sum(i["prefill"] for i in engine.iterations)


@functools.cache
def told(some, n, model):
    return answer(Engine(model, SyncScheduler), some, n)[0]


def plain(some, n=40, model=MODEL):
    """What the autoregressive loop answers."""
    return told(tuple(map(tuple, some)), n, model)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(admission, "CHUNK", 16)


@pytest.mark.parametrize("policy", admission.POLICIES)
@pytest.mark.parametrize("name", ["specgen", "delayed"])
def test_half_of_the_demand_is_enough(policy, name):
    some = prompts(10)
    engine = Engine(MODEL, SCHEDULERS[name], 6, None, 16, policy)
    requests = [Request(p, 40) for p in some]
    demand = sorted(r.longest + engine.scheduler.extra_slots(r) for r in requests)
    engine.cache_tokens = sum(demand[-6:]) // 2
    got, fed = answer(engine, some)
    assert got == plain(some) and engine.cache.used == engine.cache.charged == 0
    assert not any(engine.scheduler.pool.taken)
    assert (engine.cache.offloaded > 0) == (policy == "offload")
    assert (engine.admission.dropped > 0) == (policy == "preempt") == (fed > sum(map(len, some)))


def test_aggressive_admission_decodes_more_at_once():
    together = {}
    for policy in admission.POLICIES:
        engine = Engine(MODEL, SyncScheduler, 8, 300, 16, policy)
        # Most stop early.
        engine.generate([Request(p, 60, stop_ids=range(0, 64, 3)) for p in prompts(10)])
        together[policy] = sum(i["active"] for i in engine.iterations) / len(engine.iterations)
    assert together["offload"] > together["reserve"] < together["preempt"]


def test_the_oldest_is_never_pushed_out():
    engine = Engine(MODEL, SCHEDULERS["specgen"], 8, 330, 16, "offload")
    requests = [Request(p, 60) for p in prompts(8)]
    for _ in engine.stream(requests):
        living = [r for r in requests if r.blocks and not r.finished]
        assert not living or living[0] in engine.active
        paused = engine.admission.paused
        assert paused == sorted(paused, key=requests.index, reverse=True)
    assert engine.cache.offloaded > 0


FUZZ_MODEL = toy_model(n_layer=1, n_head=2, n_kv_head=1)


RUNS = 500 if os.environ.get("MINISPEC_FULL") else 25


def check_books(engine):
    """Every block is free, or belongs to its users."""
    cache = engine.cache
    requests = [*engine.active, *engine.admission.paused]
    held = [block for r in requests for block in r.blocks.table]
    free = [*cache.free_blocks, *cache.idle]
    assert sorted({*free, *held}) == list(range(cache.n_blocks))
    assert len(set(free)) == len(free) and not set(free) & set(held)
    assert all(cache.users[block] == held.count(block) for block in range(cache.n_blocks))


@pytest.mark.parametrize("part", range(2))
def test_fuzz(part):
    """50 runs in all (MINISPEC_FULL=1: 1,000): random arrivals, lengths, pools, settings and cancellations;
    many prompts begin alike."""
    shared = 0
    for seed in range(part * RUNS, (part + 1) * RUNS):
        rng = random.Random(seed)
        asked = []
        for _ in range(rng.randint(1, 6)):
            own = rng.choices(range(64), k=rng.choice([1, 3, 8, 20]))
            common = range(rng.choice([0, 0, 6, 13, 20]))
            asked.append(((*common, *own), rng.choice([1, 2, 9, 20])))
        scheduler = functools.partial(
            SpecGen,
            k=rng.choice([1, 3, 8]),
            sparsity=0.2,
            min_budget=3,
            delayed=rng.random() < 0.5,
            schedule=rng.choice(["unified", "lockstep"]),
        )
        engine = Engine(
            FUZZ_MODEL,
            scheduler,
            rng.randint(1, 5),
            prefill_chunk=rng.choice([1, 4, 64]),
            admission=rng.choice(admission.POLICIES),
        )
        requests = [Request(*one) for one in asked]
        largest = max(whole_blocks(r.longest) + engine.scheduler.extra_slots(r) for r in requests)
        engine.cache_tokens = rng.randint(largest, 3 * largest)
        at_once = rng.randint(1, len(requests))
        later = requests[at_once:]
        for _ in engine.stream(requests[:at_once]):
            if later and rng.random() < 0.3:
                engine.waiting.append(later.pop())  # arrives while others are decoded
            if rng.random() < 0.03:
                rng.choice(requests).cancel()
            check_books(engine)
            assert len(engine.active) <= engine.batch_size
        engine.generate(later)
        for g, one in zip((r.generation for r in requests), asked):
            n = len(g.token_ids) if g.finish == "cancelled" else one[1]
            assert g.token_ids == plain(one[:1], one[1], FUZZ_MODEL)[0][:n], seed
        assert engine.cache.used == engine.cache.charged == 0
        assert not engine.active and not engine.admission.paused
        shared += engine.admission.shared
    assert shared > 200


# -- texts that begin alike ----------------------------------------------------------------------------------

BEGINNING = [(7 * i) % 60 for i in range(41)]


@pytest.mark.parametrize("policy", admission.POLICIES)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_common_beginning_is_read_once(name, policy):
    """Questions about one text, at once and one after the other: only the first request reads the text."""
    some = [BEGINNING + tail for tail in prompts(6, longest=9)]
    want = plain(some, 30)
    engine = Engine(MODEL, SCHEDULERS[name], 4, None, 16, policy)
    for turn in range(2):
        got, read = answer(engine, some, 30)
        last = max(engine.scheduler.record_prompt, 1)  # rows that are read in any case
        unshared = sum(len(p) - min(len(p) - last, len(BEGINNING)) for p in some[1 - turn :])
        unshared += (1 - turn) * len(some[0])
        assert got == want and read <= unshared < 0.5 * sum(map(len, some))
    assert engine.cache.used == 0 and engine.admission.shared > 400


def test_requests_wait_for_the_shared_blocks_alone():
    """Not for the rest of the prompt of the request that reads them, and not for one another."""
    engine = Engine(MODEL, SyncScheduler, prefill_chunk=16)
    some = [BEGINNING + [i] * 60 for i in range(4)]
    assert answer(engine, some, 5)[0] == plain(some, 5)
    assert [i["active"] for i in engine.iterations[:5]] == [1, 1, 1, 4, 4]
    assert engine.admission.shared == 3 * len(BEGINNING)


def test_shared_blocks_are_never_written():
    """While others decode after the same beginning, its keys and values stay as they are, to the bit."""
    engine = Engine(MODEL, SCHEDULERS["specgen"], 4)
    engine.generate([Request(BEGINNING, 5)])
    blocks = torch.tensor(list(engine.cache.idle))
    slots = (blocks[:, None] * 4 + torch.arange(4)).flatten()
    before = engine.cache.kv[:, :, :, slots].clone()
    engine.cache.enlarge(1000)  # keeps what the smaller pool held
    for _ in engine.stream([Request(BEGINNING + p, 40) for p in prompts(4)]):
        assert torch.equal(engine.cache.kv[:, :, :, slots], before)
    assert engine.admission.shared >= 4 * 4 * (len(blocks) - 1)


def test_blocks_of_nobody_go_when_the_room_is_needed():
    """In a pool for one request each new text takes the blocks of the oldest, and all answers stay right."""
    some = [[i] + BEGINNING for i in range(5)]
    want = plain(some, 30)
    engine = Engine(MODEL, SyncScheduler, 1, cache_tokens=100)
    for order, hit in ((range(5), False), ((4, 4, 0, 4), True)):
        for i in order:
            shared = engine.admission.shared
            assert answer(engine, [some[i]], 30)[0] == [want[i]]
            cache = engine.cache
            assert len(cache.idle) <= cache.n_blocks
            assert len(cache.names) == len(cache.named) <= cache.n_blocks
        assert (engine.admission.shared > shared) == hit


def test_requests_one_after_another_have_neighbouring_blocks():
    """Attention reads those as one matrix."""
    engine = Engine(MODEL, SyncScheduler, 1)
    for i, n in enumerate((40, 3, 25, 60, 12)):
        for r, _ in engine.stream([Request(BEGINNING[:2] + [i] * n, 30)]):
            assert not r.blocks or engine.cache.lies_together(r.blocks, engine.cache.size(r.blocks))


def test_a_conversation_reads_the_new_line_alone():
    """Ten turns: each reads the last answer's last token and the new line, also when the pool has to grow."""
    engine = Engine(MODEL, SCHEDULERS["specgen"], 1)
    text = []
    for turn in range(10):
        text += [turn, 5, 9, 11, 3, 2]
        (got,), read = answer(engine, [text], 12)
        assert [got] == plain([text], 12)
        assert read == 6 + (turn > 0)
        text += got


def test_a_request_leaves_the_cache_after_its_verdict():
    """Delayed verification in a pool where growing takes the last slots: the youngest leaves while its
    verdict is due, unless it is settled first."""
    model = toy_model(vocab=16, seed=321, d_model=16, n_head=2, n_kv_head=1, d_ff=32, rope_theta=100.0)
    with torch.no_grad():  # sharp attention: missing keys change the output
        for block in model.blocks:
            block.qkv.weight.mul_(8)
            block.out.weight.mul_(8)
        model.head.weight.normal_(0, 0.45)
    rng = random.Random(5)
    some = [[rng.randrange(16)] for _ in range(5)]
    want = plain(some, 100, model)
    dropped = 0
    for slots in (160, 170, 180):
        engine = Engine(
            model, lambda e: SpecGen(e, 1, 0.02, 1, delayed=True), 5, slots, admission="preempt"
        )
        assert answer(engine, some, 100)[0] == want, slots
        dropped += engine.admission.dropped
    assert dropped > 0
    large = Request([1] * 999, 9)
    large.blocks = Allocation()
    engine.active, engine.pending = [large], [SimpleNamespace(request=large)]
    with pytest.raises(AssertionError, match="leaves before its verdict"):
        engine.admission._make_room(large)


def test_an_interrupt_while_a_request_enters_loses_no_blocks(monkeypatch):
    some = prompts(3)
    engine = Engine(MODEL, SCHEDULERS["specgen"], 3)
    answer(engine, some)                                 # leaves blocks to share
    for owner, name in ((PrefixCache, "share"), (PrefixCache, "resize"), (admission.Admission, "_enter")):
        requests = [Request(p, 40) for p in some]
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

            def stopped(*args, real=getattr(owner, name)):
                real(*args)
                patch.undo()
                raise KeyboardInterrupt

            patch.setattr(owner, name, stopped)
            engine.generate(requests)
        assert engine.cache.used == engine.cache.charged == 0
        assert ids_of(engine.generate(requests)) == plain(some)


@pytest.mark.parametrize("policy, name", [
    ("preempt", "remember"), ("preempt", "close"), ("offload", "offload"), ("offload", "restore"),
])
def test_an_interrupt_while_a_request_leaves_loses_no_blocks(policy, name, monkeypatch):
    some = prompts(10)
    engine = Engine(MODEL, SyncScheduler, 6, 300, 16, policy)
    requests = [Request(p, 40) for p in some]

    def stopped(self, blocks, *args, real=getattr(PrefixCache, name)):
        if engine.admission.dropped or policy == "offload":       # not while a request ends
            monkeypatch.undo()
            raise KeyboardInterrupt
        return real(self, blocks, *args)

    monkeypatch.setattr(PrefixCache, name, stopped)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests)
    assert engine.cache.used == engine.cache.charged == 0
    assert ids_of(engine.generate(requests)) == plain(some)
