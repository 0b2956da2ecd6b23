"""CUDA graphs without a GPU: the engine on the kernels through graphs, in Triton's interpreter (a child
process, as in test_kernels.py), where a stand-in replays a graph; captures and sizes as plain tests."""

import contextlib
import json
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

from conftest import ids_of, steps_of, toy_model  # before torch
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kernels import attention as att
from kernels import graphs
from minispec import prism, specdiff
from minispec.core import kv_cache
from minispec.core.attention import FullKeys
from minispec.core.cpu import Linear
from minispec.core.drafters import ChainDrafter, NGram, SmallLM
from minispec.core.engine import Engine
from minispec.core.requests import Request, Segment
from minispec.core.gpt import GPTConfig, RMSNorm
from minispec.core.kv_cache import Allocation, KVCache
from minispec.core.prefix_cache import PrefixCache
from minispec.core.scheduler import SyncScheduler
from minispec.core.verify import Sampling
from minispec.specgen import PillarKeys, SpecGen
from minispec.studies import measure

import references
import test_kernels
from test_trained import toy_specdiff

graphs.capture = references.capture  # there is no GPU to capture on


@contextlib.contextmanager
def scattered(block=8):
    """Small blocks, handed out from all over the pool: a position that is not looked up in its request's
    table belongs to another request."""

    real = {kind: kind._take for kind in (KVCache, PrefixCache)}

    def take(cache, n, blocks):
        if n > len(cache.free_blocks):
            return real[type(cache)](cache, n, blocks)
        taken = [cache.free_blocks.pop(len(cache.free_blocks) * 5 // 8) for _ in range(n)]
        for block in taken if type(cache) is PrefixCache else []:
            cache.users[block] = 1
            cache.begun.pop(block, None)
        return taken

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(kv_cache, "BLOCK", block))
        for kind in real:
            stack.enter_context(mock.patch.object(kind, "_take", take))
        yield


def on_kernels(model, scheduler, batch, fused=True, **kw):
    """An engine that takes the path of a GPU, or not."""
    engine = Engine(model, scheduler, batch, **kw)
    engine.fused = fused
    return engine


small_model = partial(toy_model, n_head=2, n_kv_head=1, head_dim=16, n_layer=1)


def check_engine():
    """The whole engine on the kernels and their graphs: every method's greedy output is the one it has on
    torch operators. SpecGen's scores and selections are the same, too, so it accepts as many drafts."""
    prompts = [[(7 * i + n) % 61 for i in range(n)] for n in (9, 3)]
    few, other = small_model(3), small_model(3, seed=1)  # a vocabulary so small that copies are found
    for scheduler, model, some in (
        (lambda e: SyncScheduler(e, NGram(3, 1), 3), small_model(), prompts),
        (lambda e: SpecGen(e, 2, 0.1, 2, delayed=True), small_model(), prompts),
        (lambda e: SyncScheduler(e, SmallLM(other, few), 2, lookup=99), few, [[0, 1] * 5, [1, 0, 0]]),
    ):
        runs = []
        for fused in (False, True):
            engine = on_kernels(model, scheduler, 2, fused, prefill_chunk=4)
            with scattered():
                answers = engine.generate([Request(p, 8) for p in some])
            runs.append([(g.token_ids, [s.accepted for s in g.rounds]) for g in answers])
            assert not fused or len(engine.graphs.graphs) > 2
            assert model is not few or any(s.lookup for s in steps_of(answers))
        assert runs[0] == runs[1], runs


def plan_of(cache, tables, shapes):
    """An engine's plan out of (rows, tokens cached, selected positions or None for all, recent ones, whether
    scores are wanted). Some requests have more blocks than any graph reads, others none after their last
    row."""
    plan = []
    for i, (blocks, (n, start, selected, recent, record)) in enumerate(zip(tables, shapes)):
        if i % 2:
            blocks = Allocation(blocks.table[: cache.blocks_for(start + n)])
        keys = FullKeys(cache, blocks, start, n, record=record)
        if selected is not None:
            lists = torch.stack([torch.randperm(start - recent)[:selected] for _ in range(2)])[None]
            keys = PillarKeys(None, blocks, start, lists, recent)
        plan.append(Segment(None, torch.randint(0, 64, (n,)).tolist(), start, keys, "", n))
    return plan


VERIFY = (3, 33, None, 0, True)
DRAFT = (1, 30, 5, 4, False)
PROMPT = (3, 0, None, 0, False)
FIRST = (1, 50, None, 0, False)
STEPS = [
    (PROMPT, VERIFY, DRAFT, FIRST),
    (DRAFT, VERIFY, DRAFT),
    (DRAFT,),
    ((1, 7, 2, 1, False), VERIFY, (1, 40, 12, 8, False)),
    ((2, 50, None, 0, True), DRAFT),
]


def replayed(steps, spoilt=lambda graphs: contextlib.nullcontext()):
    """Every mix of phases through graphs and without: (captures, sizes of graphs, names of different
    results). From the second one on the graphs are `spoilt`. Lists are split at 32 entries, so that there are
    partial results to merge."""
    torch.manual_seed(0)
    model = toy_model(head_dim=16, n_layer=1)
    sizes = set()
    wrong = set()
    with scattered():
        cache = KVCache(model.config, 320, spare=1)
        held = [cache.open(80) for _ in range(4)]
    cache.kv.normal_()

    def forward(x):
        return [model(x.tokens, x.positions, x.attend)]

    with contextlib.ExitStack() as stack:
        capture = stack.enter_context(
            mock.patch.object(graphs, "capture", mock.Mock(wraps=graphs.capture))
        )
        stack.enter_context(mock.patch.object(graphs, "CHUNK", 32))
        stack.enter_context(mock.patch.object(att.make_plan, "__defaults__", (32, None)))
        run, eager = (
            graphs.Graphs(SimpleNamespace(warm_up=0.0), forward, cache, 4, 60, 20, scored=True) for _ in range(2)
        )
        for i, shapes in enumerate(steps):
            plan = plan_of(cache, held, shapes)
            before = cache.kv.clone()
            # 1. Without graphs, and with slots that are looked up one by one.
            places = eager.places(plan)
            x = eager.fill(sum(len(s.tokens) for s in plan), plan, places)
            assert 0 <= x.table.min() and x.table.max() <= cache.n_blocks  # also of absent requests
            at = torch.zeros(4, 64, dtype=torch.int32)
            new = []
            for place, s in zip(places, plan):
                end = s.start + len(s.tokens)
                at[place, :end] = cache.slots_of(s.keys.blocks, range(end))
                new += at[place, s.start : end].tolist()
            (want,) = forward(replace(x, slots=at, new=torch.tensor(new)))
            after = cache.kv.clone()
            # 2. Through graphs.
            cache.kv.copy_(before)
            (got,) = run(plan)
            pairs = [
                ("hidden states", got, want),
                ("cache", cache.kv[:, :, :, :320], after[:, :, :, :320]),
            ]
            pairs += [
                ("scores", s.keys.scores, eager.scores[:, place, :, : s.keys.length])
                for place, s in zip(places, plan)
                if s.keys.scores is not None
            ]
            wrong |= {
                name for name, a, b in pairs if a.shape != b.shape or not (a - b).abs().max() <= 1e-5
            }
            sizes.add(min(size for size in graphs.SIZES if size >= len(want)))
            if i == 0:
                stack.enter_context(spoilt(run))
        return capture.call_count, len(sizes), wrong


class Forbidding(TorchDispatchMode):
    """Inside, reading a number from the device and copying a tensor from the host raise, as in a capture."""

    NAMES = tuple("""item is_nonzero nonzero lift_fresh to.device to.dtype_layout repeat_interleave
                     masked_select""".split())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = str(func).startswith("aten.index")
        by_mask = by_mask and any(x is not None and x.dtype == torch.bool for x in args[1])
        if by_mask or str(func).removeprefix("aten.").startswith(self.NAMES):
            raise AssertionError(f"{func} inside a graph")
        return func(*args, **(kwargs or {}))


def check_graphs():
    """One graph a size. Whatever mix it replays, and whatever a larger forward left in its tables, the
    results are those without it; and on a GPU it could be captured."""

    def replay(graph, real=references.Recorded.replay):
        with Forbidding():
            real(graph)

    x = torch.rand(5)
    forbidden = [
        lambda: x * x.max().item(),
        lambda: x[x > 0],
        lambda: x[[0, 1, 2, 3, 4]],
        lambda: x + torch.ones(5).cpu(),
        lambda: x if x.sum() > 0 else -x,
    ]
    with torch.inference_mode(), mock.patch.object(references.Recorded, "replay", replay):
        for function in forbidden:
            graph = references.Recorded(lambda: [function()])
            with pytest.raises(AssertionError, match="inside a graph"):
                graph.replay()
        assert (got := replayed(STEPS)) == (3, 3, set()), got


def check_graphs_that_are_not_cleared():
    """Pad rows that write to a slot of a request are noticed."""
    with torch.inference_mode():
        assert "cache" in replayed(STEPS[:2], lambda run: mock.patch.dict(run.padding, new=0))[2]


CHECKS = {
    "engine": check_engine,
    "graphs": check_graphs,
    "graphs that are not cleared": check_graphs_that_are_not_cleared,
}


@test_kernels.needs_triton
@pytest.mark.parametrize("name", CHECKS)
def test_in_the_interpreter(name, verdicts):
    assert verdicts[name] == "", verdicts[name]


def graphs_of(n_slots, batch, longest, group, function=None):
    cache = KVCache(GPTConfig(n_layer=1, n_head=2 * group, n_kv_head=2, head_dim=2), n_slots, spare=1)
    return graphs.Graphs(SimpleNamespace(warm_up=0.0), function, cache, batch, longest, 8, scored=True)


def test_graphs_have_room_for_every_mix_of_requests():
    """The plans of random batches fit into the room of their padded rows, which one request can fill."""
    n_slots, batch, longest = 6000, 6, 3100
    rng = random.Random(0)
    for group in (1, 4):
        run = graphs_of(n_slots, batch, longest, group)
        for _ in range(100):
            shapes = []
            left, free = n_slots, graphs.SIZES[-1]
            while left and free and len(shapes) < batch:
                length = rng.randint(1, min(longest, left))
                n = min(length, rng.choice([1, 1, 9, 100]), free)
                tail = rng.choice([0, rng.randint(0, length - n)])
                shapes.append((n, length, rng.randint(0, min(tail, 8)), tail))
                left, free = left - length, free - n
            rows = min(size for size in graphs.SIZES if size >= graphs.SIZES[-1] - free)
            plan = att.make_plan(shapes, group)
            needed = len(plan.items), len(plan.merges), plan.n_part_rows
            assert all(n <= most for n, most in zip(needed, run.room(rows)))
        one = att.make_plan([(1, longest, 0, 0)], group)
        assert (len(one.items), len(one.merges), one.n_part_rows) == run.room(1) == (7, 1, 7 * group)


def test_a_forward_larger_than_the_largest_graph_is_eager_and_others_share_their_sizes():
    run = graphs_of(2000, 3, 1000, 1, lambda x: [x.tokens + 1])
    blocks = run.cache.open(1000)

    def forward(n, first=0):
        tokens = list(range(first, first + n))
        before = run.engine.warm_up
        (out,) = run([Segment(None, tokens, 0, FullKeys(run.cache, blocks, 0, n), "", n)])
        assert out.tolist() == [token + 1 for token in tokens]
        return out, run.engine.warm_up > before

    largest = graphs.SIZES[-1]
    for warm in (False, True):  # the first one compiles, which is told apart
        assert forward(largest + 1)[1] != warm
        assert run.graphs == {}
    for n in (3, 1, 4, 3, largest, 2, 513):
        captures = len(run.graphs)
        held, captured = forward(n)
        assert captured == (len(run.graphs) > captures)
    assert [rows for rows, _ in run.graphs] == [4, 1, largest, 2, 576]
    forward(514, 7)
    assert held.tolist() == list(range(1, 514))  # earlier results are not overwritten


def test_graphs_last_as_long_as_their_cache_and_their_longest_request():
    for name, selected, scores in (("ar", 0, 0), ("specgen", 16, 2 * 2 * 2 * 160)):
        engine = on_kernels(toy_model(), METHODS[name], 2)
        made = []
        for requests, n in ((2, 17), (1, 10), (1, 19), (1, 140), (2, 140)):
            engine._prepare([Request([1] * n, 20) for _ in range(requests)])
            made.append(engine.graphs)
        # Two tokens more fit into the same block; then a longer request, and then a larger cache.
        assert made[0] is made[1] is made[2] is not made[3] is not made[4]
        assert made[3].longest == 160
        assert engine.cache.n_slots == engine.cache.k.shape[2] - engine.cache.block
        assert (made[3].selected.shape[3], made[3].scores.numel()) == (selected, scores)


class Counting(TorchDispatchMode):
    """Counts operators that a GPU would launch: all but views and allocations. A reference is one."""

    FREE = tuple("""
        view _unsafe_view _reshape_alias slice select expand unsqueeze squeeze transpose t. permute split
        unbind detach alias as_strided empty new_empty resolve_ lift_fresh numpy_T""".split())
    launches = 0
    muted = False

    def counted(self, function, launches=1):
        """The function as so many launches, whatever it does."""

        def call(*args, **kw):
            muted, self.muted = self.muted, True
            self.launches += 0 if muted else launches
            with _disable_current_modes():
                out = function(*args, **kw)
            self.muted = muted
            return out

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.launches += not (self.muted or str(func).removeprefix("aten.").startswith(self.FREE))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def counting(monkeypatch):
    """The kernels' references take their places, so that a GPU's path runs here, too."""
    mode = Counting()
    monkeypatch.setattr("kernels.available", lambda x: True)
    product = mode.counted(lambda m, x: F.linear(x, m.weight, m.bias))
    monkeypatch.setattr(Linear, "forward", product)
    monkeypatch.setattr(graphs, "attention", mode.counted(references.attention))
    monkeypatch.setattr(graphs, "scores", mode.counted(references.scores))
    norm = mode.counted(lambda m, x: F.rms_norm(x, m.weight.shape, m.weight, m.eps))
    monkeypatch.setattr(RMSNorm, "forward", norm)          # one kernel on a GPU
    return mode


def test_a_layer_is_few_kernels(counting):
    """On a GPU a launch takes the host several microseconds, as long as a small model's whole product."""

    def launches(n_layer):
        engine = on_kernels(toy_model(head_dim=16, n_layer=n_layer), SyncScheduler, 1)
        engine.generate([Request([3, 1, 4], 4)])
        graph, _ = engine.graphs.graphs[1, ()]
        counting.launches = 0
        with counting, torch.inference_mode():
            graph.function()
        return counting.launches

    # The parts of a long list are merged by one more.
    assert launches(1) > 5
    assert (launches(3) - launches(1)) / 2 <= 19


TARGET, SMALL = (toy_model(vocab=32, head_dim=16, seed=seed) for seed in (0, 1))
PRISM = prism.for_target(TARGET, (0, 1)).eval()
SPECDIFF = specdiff.for_target(TARGET, gamma=3).eval()
MARKOV = toy_specdiff(TARGET, gamma=3, rank=4)
DRAFTERS = {
    "draft": (partial(SmallLM, SMALL, TARGET), 3),
    "prism": (partial(prism.PrismDrafter, PRISM, TARGET, 4), 4),
    "prism tree": (partial(prism.PrismTreeDrafter, PRISM, TARGET, 3, 3), 7),
    "specdiff": (partial(specdiff.SpecDiffDrafter, SPECDIFF, TARGET), 3),
    "specdiff K=3": (partial(specdiff.SpecDiffDrafter, SPECDIFF, TARGET, k_drafts=3), 9),
    "markov": (partial(specdiff.SpecDiffDrafter, MARKOV, TARGET), 3),
    "markov K=3": (partial(specdiff.SpecDiffDrafter, MARKOV, TARGET, k_drafts=3), 9),
}
METHODS = {
    "ar": SyncScheduler,
    "ngram": lambda e: SyncScheduler(e, NGram(3, 1), 4),
    "specgen": lambda e: SpecGen(e, 3, 0.1, 4),
    **{
        name: lambda e, make=make, k=k: SyncScheduler(e, make(), k)
        for name, (make, k) in DRAFTERS.items()
    },
}
AT_0 = [(name, 0.0) for name in METHODS]
SAMPLED = [(name, 0.8) for name in ("specgen", "prism", "prism tree", "specdiff")]


def without_attention(monkeypatch):
    """Quick, where any number will do."""
    monkeypatch.setattr(graphs, "attention", lambda q, *rest: (q, q[..., 0]))
    monkeypatch.setattr(graphs, "scores", lambda *args: None)


@pytest.mark.parametrize("name, temperature", [*AT_0, *SAMPLED])
def test_few_launches_and_waits_outside_graphs(name, temperature, counting, monkeypatch):
    """At batch 1. Tables of the host that do not go in one copy count, too. (A GPU also waits for the
    forward: three waits in all.)"""
    waits = []
    without_attention(monkeypatch)
    monkeypatch.setattr(graphs, "capture", counting.counted(graphs.capture, 0))
    for owner, method in ((references.Recorded, "replay"), (graphs.Graphs, "fill")):
        monkeypatch.setattr(owner, method, counting.counted(getattr(owner, method)))
    for wait in ("tolist", "item", "__bool__"):

        def waiting(x, real=getattr(torch.Tensor, wait)):
            waits.extend([x] * (not counting.muted))
            return real(x)

        monkeypatch.setattr(torch.Tensor, wait, waiting)
    engine = on_kernels(TARGET, METHODS[name], 1)
    for mode in (contextlib.nullcontext(), counting):  # the first time captures
        engine.iterations.clear(), waits.clear()
        counting.launches = 0
        with mode:
            engine.generate([Request([3, 1, 4, 1, 5, 3, 1], 16, Sampling(temperature, seed=1))])
    n = len(engine.iterations)
    assert 3 * n < counting.launches <= 45 * n, counting.launches / n
    assert 0 < len(waits) <= 2 * n, len(waits) / n


@pytest.mark.parametrize("temperature, most", [(0.0, 40), (0.8, 42)])
def test_a_later_step_of_a_chain_has_few_operators(temperature, most, counting):
    """In a graph they take the device's time. The noise, and what no draft changes, are made for all steps at
    once."""

    def launches(steps):
        engine = on_kernels(TARGET, lambda e: SyncScheduler(e, prism.PrismDrafter(PRISM, TARGET), steps), 1)
        counts = []

        def round(x, real=engine.scheduler.drafter.round):
            counting.launches = 0
            with counting:
                out = real(x)
            counts.append(counting.launches)
            return out

        engine.scheduler.drafter.round = round
        engine.generate([Request([3, 1, 4, 1, 5], 16, Sampling(temperature, seed=1))])
        return max(counts)

    one = (launches(6) - launches(4)) / 2
    assert 20 < one <= most, one


def test_a_forwards_tables_go_in_one_copy(monkeypatch):
    """To a GPU each copy is a launch. (The guard above counts all of `fill` as one.)"""
    sent = []

    def copy(x, y, non_blocking=False, real=torch.Tensor.copy_):
        sent.append(non_blocking)
        return real(x, y)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    run = graphs_of(200, 3, 100, 1, lambda x: [x.tokens])
    run.fill(4, [Segment(None, [1] * 3, 0, FullKeys(run.cache, run.cache.open(3), 0, 3), "", 3)], [0])
    assert sent == [True]


def test_a_list_of_selected_positions_is_copied_once_a_round(counting):
    engine = on_kernels(TARGET, lambda e: SpecGen(e, 4, 0.1, 4), 2)
    copied = []

    class Places(list):
        def __setitem__(self, place, keys):
            copied.append(keys)
            super().__setitem__(place, keys)

    asked = [Request([3, 1, 4, 1, 5, 9, 2, 6], 20), Request([2, 7, 1, 8], 20)]
    engine._prepare(asked)
    engine.waiting.clear()
    engine.graphs.lists = Places(engine.graphs.lists)
    rounds = sum(s.proposed > 0 for s in steps_of(engine.generate(asked)))
    assert 2 < len(copied) == len(set(copied)) <= rounds
    assert sum(i["draft"] for i in engine.iterations) > 2 * rounds


def test_compiling_and_capturing_is_in_no_price(counting, monkeypatch):
    """A capture of 1,000 s, of the target's graphs and of the drafter's, is told apart."""
    clock = [0.0]

    def later(seconds):
        clock[0] += seconds
        return clock[0]

    real = graphs.capture
    monkeypatch.setattr(graphs, "capture", lambda *args: (later(1000), real(*args))[1])
    monkeypatch.setattr("time.perf_counter", lambda: later(1))
    engine = on_kernels(TARGET, METHODS["draft"], 2)
    answers = engine.generate([Request([3, 1, 4, 1, 5], 6), Request([9, 2], 9)])
    captures = len(engine.graphs.graphs) + len(engine.scheduler.drafter.graphs.graphs)
    assert captures > 3 and engine.warm_up >= 1000 * captures
    # No account has any of it, not even a half that another one was given back.
    spent = [x for s in steps_of(answers) for x in (s.draft_seconds, s.verify_seconds)]
    spent += [x for i in (*engine.iterations, vars(engine)) for x in i["seconds"].values()]
    assert 0 <= min(spent) and max(spent) < 400


@pytest.mark.parametrize("name", DRAFTERS)
def test_prices_are_those_of_graphs(name, counting, monkeypatch):
    """Timed rounds of a drafter use the pool that its graphs know."""

    class OnKernels(measure.Half):
        def __init__(self, *args):
            super().__init__(*args)
            self.fused = True

    rounds = []

    def run_round(drafter, segments, *args, real=ChainDrafter.run_round):
        rounds.append(drafter.graphs and all(s.keys.cache is drafter.cache for s in segments))
        return real(drafter, segments, *args)

    without_attention(monkeypatch)
    monkeypatch.setattr(measure, "Half", OnKernels)
    monkeypatch.setattr(ChainDrafter, "run_round", run_round)
    drafter = DRAFTERS[name][0]()
    for _ in range(2):
        seconds = measure.round_seconds(TARGET, drafter, 2, 20, [1, 3])
        assert [len(some) for some in seconds.values()] == [1, 1]
    assert len(rounds) > 8 and all(rounds) and not drafter.draft_states


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_round_in_a_graph_drafts_what_single_steps_do(name, temperature, counting):
    """For requests that end at different times, and an early stop that changes from round to round: a graph
    would freeze one that it read from the drafter, not from a table."""
    runs = []
    for in_graph in (False, True):
        engine = on_kernels(TARGET, METHODS[name], 2, in_graph)
        drafter = engine.scheduler.drafter
        proposed = []

        def propose(requests, limits, real=drafter.propose):
            drafter.min_confidence = 0.9 * (len(proposed) % 2)
            out = real(requests, limits)
            proposed.append([(tokens, *rest[:1]) for tokens, _, *rest in out])
            return out

        def round(x, real=drafter.round):
            with mock.patch.object(drafter, "min_confidence", None):
                return real(x)

        drafter.propose, drafter.round = propose, round
        rule = "walk" if "K=3" in name else "coupled"    # chains with noise of their own
        first = Request([3, 1, 4, 1, 5], 6, Sampling(temperature, seed=1, rule=rule))
        second = Request([9, 2], 19, Sampling(temperature, seed=2, rule=rule))
        with scattered(4):
            answers = engine.generate([first, second])
        runs.append((proposed, ids_of(answers)))
        assert bool(drafter.graphs and drafter.graphs.graphs) == in_graph
    assert runs[0] == runs[1]


if __name__ == "__main__":
    told = {}
    for name, check in (test_kernels.CHECKS | CHECKS).items():
        try:
            check()
            told[name] = ""
        except Exception as e:  # one check's failure must not hide the others
            told[name] = f"{type(e).__name__}: {e}"
    print(json.dumps(told))
