"""What a GPU needs of the engine and its scripts, seen on a CPU."""
import contextlib
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ids_of, toy_model

from kernels import SEEN, can_run
from kernels.graphs import Graphs
from minispec.core import engine as engine_module
from minispec.core.drafters import Drafter
from minispec.core.engine import Engine
from minispec.core.gpt import GPT
from minispec.core.kv_cache import KVCache
from minispec.core.requests import Request, Segment
from minispec.core.scheduler import SyncScheduler
from minispec.core.verify import Sampling, verify
from minispec.specgen import SpecGen
from minispec.tools.script import check_device

TARGET = toy_model(vocab=32, head_dim=16)
PROMPTS = [[(7 * i + 11 * j) % 31 for i in range(n)] for j, n in enumerate((9, 40, 1, 17, 30, 2, 25, 12))]
SCHEDULERS = {
    "ar": SyncScheduler,
    "specgen": partial(SpecGen, k=3, min_budget=6),
    "specgen delayed": partial(SpecGen, k=3, min_budget=6, delayed=True),
}


def engine_of(name):
    return Engine(TARGET, SCHEDULERS[name], prefill_chunk=16)


def answers(engine):
    return ids_of(engine.generate([Request(p, 10) for p in PROMPTS]))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_rows_of_all_prompts_have_a_bound(name, monkeypatch):
    """The oldest read first, and everybody's tokens stay what they are."""
    before, engine = engine_of(name), engine_of(name)
    want = answers(before)
    monkeypatch.setattr(engine_module, "PROMPT_ROWS", 20)
    assert answers(engine) == want
    assert max(i["prefill"] for i in before.iterations) > 60
    assert max(i["prefill"] for i in engine.iterations) in range(17, 21)
    if name != "specgen delayed":
        assert not any(i["stalled"] for i in engine.iterations)    # waiting for room is no stall


def test_the_device_of_a_script_is_the_current_one(monkeypatch):
    chosen = []
    probe = SimpleNamespace(item=lambda: 0.0, is_cuda=True, device=torch.device("cuda:1"))
    monkeypatch.setattr(torch, "zeros", lambda n, device: {"cuda:1": probe}[device])
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    check_device("cuda:1")
    assert chosen == [torch.device("cuda:1")]


def test_the_thread_of_delayed_verification_uses_the_models_device(monkeypatch):
    chosen, device = [], torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "set_device", lambda x: chosen.append((x, threading.get_ident())))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: (device, priority))
    monkeypatch.setattr(GPT, "device", device)
    engine = engine_of("specgen delayed")
    worker = engine.thread.submit(threading.get_ident).result()
    assert chosen == [(device, worker)] and worker != threading.get_ident()
    assert engine.side == (device, -1)                   # no stream of this kind captures graphs


def stream_of(log):
    """A stream that writes down when it waits for another."""
    return SimpleNamespace(wait_stream=lambda other: log.append("waits"))


@pytest.fixture
def log(monkeypatch):
    """What happens on a stream of its own: "waits" for the current one, "begin", .., "end"."""
    log = []

    @contextlib.contextmanager
    def stream(side):
        log.append("begin")
        yield
        log.append("end")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream_of([]))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return log


def test_delayed_verdicts_are_found_on_a_stream_of_their_own(log, monkeypatch):
    """After the forward that made the logits, beside the one that runs now, before their tokens are used."""
    engine = engine_of("specgen delayed")
    engine.side, read, alive = stream_of(log), [], []

    def commit(real=engine.commit):
        states = [s.request.state for s in engine.pending]
        some = [s.keys.scores for s in engine.pending] + [state and state.memory for state in states]
        read[:] = [weakref.ref(x) for x in some if x is not None]
        return real()

    def done():
        log.append("is done")
        alive.append(all(x() is not None for x in read))

    engine.side.synchronize = done
    monkeypatch.setattr(engine, "commit", commit)
    for name in ("commit", "_prefilled"):
        def logged(*args, name=name, real=getattr(engine, name)):
            log.append(name)
            return real(*args)

        monkeypatch.setattr(engine, name, logged)
    assert answers(engine) == answers(engine_of("ar"))
    assert log == ["waits", "begin", "commit", "end", "is done", "_prefilled"] * len(engine.iterations)
    assert len(alive) == len(engine.iterations) and all(alive)           # tensors that the stream may still read


def test_what_leaves_for_the_host_takes_a_stream_of_its_own_to_pinned_memory(log, monkeypatch):
    pinned = []

    def empty(*args, pin_memory=False, real=torch.empty, **kw):
        pinned.append(pin_memory)
        return real(*args, **kw)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: log.append("kept for it"))
    monkeypatch.setattr("minispec.core.kv_cache.BLOCK", 10)
    cache = KVCache(TARGET.config, 40)
    cache.side = stream_of(log)
    cache.k.normal_()
    blocks = cache.open(30)
    before = cache.k[:, :, :30].clone()
    cache.offload(blocks, 10)
    assert pinned == [True] and log == ["waits", "begin", "end", "kept for it"]
    cache.k[:, :, 20:] = 0                                                 # the slots are free at once
    cache.restore(blocks)
    assert torch.equal(cache.k[:, :, :30], before)


def test_the_targets_distributions_stay_on_its_device(monkeypatch):
    """Judging a tree asks for a few numbers of each row, never for a row of the vocabulary."""
    asked, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: (asked.append(x.numel()), tolist(x))[1])
    for rule in ("coupled", "selection"):
        for seed in range(5):
            r = Request([3, 4], 30, Sampling(1.0, seed=seed, rule=rule))
            drafts = [1, 2, 3, 4, 5, 6]
            s = Segment(r, [4, *drafts], 1, None, "verify", 7, drafts, parents=[0, 0, 1, 1, 2, 3])
            verify([s], torch.randn(7, 5000))
    assert len(asked) >= 10 and max(asked) <= 3 * 7


def test_trees_run_on_the_kernels_where_a_word_of_bits_shows_who_sees_whom(monkeypatch):
    tree = Drafter()
    tree.width = 4
    monkeypatch.setattr("kernels.available", lambda x: True)
    rows = [SyncScheduler(None, tree, k).rows for k in (15, SEEN - 1, SEEN)]
    assert [can_run(TARGET, n) for n in rows] == [True, True, False]
    assert can_run(TARGET, SyncScheduler(None, Drafter(), 32).rows)


def test_a_draft_row_follows_its_request_to_other_blocks():
    """On a GPU draft rows are written to the cache itself, so they must follow a move within a round."""
    engine = Engine(TARGET, SCHEDULERS["specgen"], 2)
    request = Request(PROMPTS[0], 10)
    stream = engine.stream([request])
    next(stream)  # the prompt
    first = engine.scheduler.schedule([request])
    engine.scheduler.take_drafts(first, engine.forward(first))
    run = Graphs(None, None, engine.cache, 2, request.longest, engine.scheduler.budget(request.longest),
                 scored=True)
    cache, start = engine.cache, request.n_cached + len(request.state.drafts)
    for _ in range(2):
        plan = engine.scheduler.schedule([request])
        new = run.fill(1, plan, run.places(plan)).new
        assert plan[0].kind == "draft" and new.tolist() == cache.slot_list(request.blocks, [start])
        request.blocks.table.reverse()
    stream.close()
