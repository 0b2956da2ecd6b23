"""Measurements for the analyzer, on toy models: dense traces agree with what engines accept, prices with the
rounds that were timed. Nothing here asserts a time; a clock that matters is a counter."""

import functools
import itertools
import random

import numpy as np
import pytest
import torch
from conftest import near_toy, refused, toy_model, whole

from minispec import bounds, prism, traces
from minispec.core.drafters import NGram, SmallLM
from minispec.core.engine import Engine
from minispec.core.requests import Request
from minispec.core.scheduler import SyncScheduler
from minispec.data import recorded, rollouts
from minispec.specgen import SpecGen
from minispec.studies import measure
from minispec.costs import CostTable
from test_bounds import autoregressive, fixed, linear, time_of
from test_trained import fit

TARGET = toy_model()
DRAFT = near_toy(0.4)
K = 5
NEW = 50
PROMPTS = [random.Random(s).choices(range(64), k=n) for s, n in ((6, 24), (1, 2), (2, 7), (3, 40))]


@functools.cache
def heads():
    """A drafter that has learned one of the target's answers by heart, so that it is sometimes right."""
    torch.manual_seed(5)
    drafter = prism.for_target(TARGET, (0, 1))
    [answer] = Engine(TARGET, SyncScheduler, 1).generate([Request(PROMPTS[0], 60)])
    batch = recorded.padded([rollouts.read(TARGET, [], answer.prompt_ids + answer.token_ids, 0)])
    fit(drafter, lambda step: prism.unrolled_loss(drafter, batch, 3)[0], 30)
    return drafter.eval()


DRAFTERS = {
    "ngram": lambda: NGram(3, 1),
    "draft": lambda: whole(SmallLM(DRAFT, TARGET)),
    "prism": lambda: whole(prism.PrismDrafter(heads(), TARGET, K)),
}


@functools.cache
def run(name=None, batch=2, k=K):
    scheduler = (lambda e: SyncScheduler(e, DRAFTERS[name](), k)) if name else SyncScheduler
    engine = Engine(TARGET, scheduler, batch, prefill_chunk=16)
    return engine.generate([Request(p, NEW - 3 * i) for i, p in enumerate(PROMPTS)]), engine


@pytest.fixture(scope="module")
def dense():
    """Traces of the autoregressive loop's outputs by all drafters."""
    texts = {f"toy/{i}": (g.prompt_ids, g.token_ids) for i, g in enumerate(run()[0])}
    return measure.traces_of({name: make() for name, make in DRAFTERS.items()}, TARGET, texts, K)


# -- traces ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
def test_dense_trace_is_what_the_engine_accepts(name, dense):
    """At every round of a live run: gained = accept there, cut by what was proposed. The control reads one
    entry earlier, as the paper's simulator does. And the rounds of a fixed k follow from a trace alone.
    """
    wrong = 0
    for k in (K, 1):
        for g, t in zip(run(name, k=k)[0], dense):
            assert [(r.position, r.drafted, r.emitted) for r in fixed(t, name, k)] == [
                (s.position, s.proposed, s.committed) for s in g.rounds
            ]
            for s in g.rounds:
                wrong += s.committed != min(max(1, t.accept[name][s.position - 1]), s.proposed + 1)
    assert wrong > 3
    assert max(max(t.accept[name][1:]) for t in dense) > 1


def test_acceptance_is_accepted_over_judged_drafts(dense):
    texts = {"a": (PROMPTS[0], run()[0][0].token_ids)}
    # A drafter may make fewer drafts than it is asked for: then its own limit censors.
    short = SmallLM(TARGET, TARGET)
    short.gamma = 3
    (t,) = measure.traces_of({"short": short}, TARGET, texts, K)
    assert t.censored["short"].tolist() == (t.accept["short"] == 4).tolist() and t.censored["short"].any()
    assert 0 < measure.acceptance(dense, "draft") < 1
    t = traces.Trace("a", 5, 6, {"d": [0, 1, 4, 2, 2, 1]}, offered={"d": [0, 0, 3, 1, 4, 0]})
    # Cut at 2 drafts; nothing offered, nothing judged.
    assert measure.acceptance([t], "d", 2) == pytest.approx((0 + 2 + 1 + 1) / (0 + 2 + 1 + 2))


# -- clocks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, *DRAFTERS, "specgen"])
def test_phases_sum_to_the_step(name, monkeypatch):
    """With a clock that counts how often it was asked: the phases sum to all its ticks but one after each
    iteration, as a whole and for each iteration."""
    ticks = itertools.count()
    monkeypatch.setattr("minispec.core.engine.time.perf_counter", lambda: float(next(ticks)))
    plans = {None: SyncScheduler, "specgen": lambda e: SpecGen(e, 4, 0.2, 4)}
    plan = plans.get(name, lambda e: SyncScheduler(e, DRAFTERS[name](), K))
    engine = Engine(TARGET, plan, 2, prefill_chunk=16)
    got = engine.generate([Request(p, 20) for p in PROMPTS])
    spent = [i["seconds"] for i in engine.iterations]
    # A round has its request's share, by rows.
    for kind in ("draft", "verify"):
        of_rounds = sum(getattr(s, f"{kind}_seconds") for g in got for s in g.rounds)
        assert of_rounds == pytest.approx(engine.seconds[kind])
    # The first tick is 0, the last sees that all is done.
    assert sum(engine.seconds.values()) == next(ticks) - len(spent) - 1
    total = {part: sum(s[part] for s in spent) for part in spent[0]}
    assert total["sample"] > 0
    total["other"] = total.pop("sample") + total.pop("overhead")
    assert engine.seconds == pytest.approx(total)
    assert min(x for s in spent for x in s.values()) >= 0
    assert (engine.seconds["draft"] > 0) == (name is not None)


@pytest.mark.parametrize("name", [None, *DRAFTERS])
def test_rounds_of_every_shape_are_timed(name, monkeypatch):
    """The engine makes the rounds that were asked for: the number of rows says so."""
    fed = []

    class Watched(measure.Half):
        def forward(self, plan):
            fed.append(plan)
            return super().forward(plan)

    monkeypatch.setattr(measure, "Half", Watched)
    drafter = DRAFTERS[name]() if name else measure.Rote()
    timed = measure.round_seconds(TARGET, drafter, 3, 64, (0, 2, 4), 2)
    assert {k: len(some) for k, some in timed.items()} == {0: 2, 2: 2, 4: 2}
    near = pytest.approx(64, abs=6 if name == "ngram" else 2)
    assert np.mean([s.start for plan in fed for s in plan]) == near
    assert all(s.kind == "verify" for plan in fed for s in plan)
    if name != "ngram":  # a lookup may find nothing
        drafts = (4, 0, 0, 0, 2, 2, 2, 4, 4, 4)
        assert [[len(s.tokens) for s in plan] for plan in fed] == [[k + 1] * 3 for k in drafts]
        # Half of the drafts, and one token more.
        assert np.diff([plan[0].start for plan in fed]).tolist() == [k // 2 + 1 for k in drafts[:-1]]


def test_attention_is_timed_by_what_a_forward_takes_longer(monkeypatch):
    """A forward takes 2 s with attention and 0.5 s without, memory 1 s."""
    times = itertools.cycle((2.0, 0.5))
    monkeypatch.setattr(measure, "clock", lambda f: (f(), next(times))[1])
    monkeypatch.setattr(measure, "memory_speed", lambda device: 1e6)
    monkeypatch.setattr(measure, "BATCHES", {"small": [30, 40], "large": [10_000]})
    assert measure.forward_seconds(TARGET, [30, 40], 9) == (2.0, 1.5)
    c = TARGET.config
    read = 70 * 2 * c.n_layer * c.n_kv_head * c.head_dim * 4 / 1e6
    got = [(r["batch"], r["rows"], r["mb"], r["share"]) for r in measure.attention_reads(TARGET)]
    assert got == [("small", n, read, pytest.approx(read / 1.5)) for n in (1, 9)]


# -- the cost table ----------------------------------------------------------------------------------


def test_cost_table_is_one_that_the_analyzer_takes():
    drafters = {name: make() for name, make in DRAFTERS.items()}
    lower = prism.for_target(TARGET, feature_layers=(0,))
    drafters["lower layers"] = whole(prism.PrismDrafter(lower, TARGET, K))
    table = measure.cost_table(TARGET, drafters, (1, 2), (16,), (0, 1, 4), passes=1)
    cost = CostTable(table)
    assert set(cost.drafters) == set(table["read"]) == set(drafters)
    assert np.shape(table["verify"]["seconds"]) == (2, 3, 1)
    assert (table["verify"]["tokens"], table["draft"]["draft"]["tokens"]) == ([1, 2, 5], [1, 4])
    assert np.shape(table["prefill"]["seconds"]) == (2, len(table["prefill"]["tokens"]), 1)
    assert cost.step(16, 1) > 0 and cost.draft("prism", 32, 4, 2) > 0
    with refused("too small to time"):
        measure.cost_table(TARGET, drafters, (1,), (4096,), (0, 1, 4))


def priced(monkeypatch, seconds, drafters, drafts):
    """The cost table when a round takes seconds(drafter's class, drafts, whether other rounds are timed in
    turn) = (verify, draft); the first pass over the rounds may take ten times as long."""

    def rounds(model, drafter, rows, context, drafts, repeats=1):
        factor = 10 if next(visits) <= 2 * len(drafters) + 1 else 1
        out = {}
        for k in drafts:
            verify, draft = seconds(type(drafter).__name__, k, len(drafts) > 1)
            out[k] = [{
                "verify": factor * verify, "sample": factor * 0.5, "draft": factor * draft, "overhead": 0.1
            }]
        return out

    monkeypatch.setattr(measure, "round_seconds", rounds)
    tables = []
    for first in (1000, 0):  # the second time the first pass is in a slow minute
        visits = itertools.count(first)
        tables.append(measure.cost_table(TARGET, drafters, (1,), (16,), drafts))
        assert next(visits) == first + (2 * len(drafters) + 2) * measure.PASSES
    assert all(tables[0][key] == tables[1][key] for key in ("verify", "draft"))
    return tables[0]


def test_price_of_a_drafter_is_what_its_rounds_take_longer(monkeypatch):
    """One token is priced by rounds without drafts, one after the other."""
    verify = {"Rote": (2.0, 3.0), "SmallLM": (3.5, 3.5), "NGram": (2.5, 2.5)}
    seconds = lambda name, k, in_turn: (verify[name][in_turn], float(k * (name != "Rote")))
    table = priced(monkeypatch, seconds, {"draft": DRAFTERS["draft"](), "ngram": NGram()}, (0, 1, 4))
    assert table["verify"]["seconds"] == [[[2.5], [3.5], [3.5]]]
    assert table["draft"]["draft"]["seconds"] == [[[1.5], [4.5]]]
    assert table["draft"]["ngram"]["seconds"] == [[[1.0], [4.0]]]


def test_a_window_is_priced_by_the_drafts_that_it_has(monkeypatch):
    """Asked for 8 it drafts 4, so 8 is no point of its grid, and the price of verifying 4 is between the
    points of the target's: 5.75 s less 3, and less 5, a third of the way from 3 to 9."""
    seconds = lambda name, k, in_turn: (k + 1.0, 0.0) if name == "Rote" else (5.5, 0.25)
    drafter = DRAFTERS["draft"]()
    drafter.gamma = 4
    table = priced(monkeypatch, seconds, {"draft": drafter}, (0, 2, 8))
    assert table["verify"]["tokens"] == [1, 3, 9]
    assert table["draft"]["draft"]["tokens"] == [2, 4]
    assert table["draft"]["draft"]["seconds"] == [[[2.75], [0.75]]]


def test_a_price_is_the_mean_of_the_rounds_in_the_middle():
    """Without the fastest and the slowest quarter: of 1, 1, 3, 3 s, and 1 s of sampling."""
    rounds = [{"verify": s, "sample": 1.0} for s in (3.0, 1.0, 90.0, 1.0, 3.0, 1.0, 3.0, 0.0)]
    assert measure.typical(rounds, "verify", "sample") == 3.0
    assert measure.typical(rounds[:1], "verify") == 3.0


def test_price_of_reading_is_the_first_round_next_to_the_second(monkeypatch):
    # Each time after one that does not count.
    rounds = iter([{"draft": s} for s in (9.0, 1.0, 5.0, 1.0, 9.0, 1.0, 1.0, 2.0)])
    monkeypatch.setattr(measure, "_rounds", lambda *args: [next(rounds), next(rounds)])
    assert [measure.read_seconds(TARGET, None, 16) for _ in range(2)] == [4.0, 0.0]


def test_prompts_of_a_batch_share_nothing_when_they_are_priced(monkeypatch):
    engines = []
    noted = lambda *args, **kw: engines.append(Engine(*args, **kw)) or engines[-1]
    monkeypatch.setattr(measure, "Engine", noted)
    measure.prefill_seconds(TARGET, 9, 90)
    assert [e.admission.shared for e in engines] == [0, 0]
    assert all(sum(i["prefill"] for i in e.iterations) == 9 * 90 for e in engines)


# -- replay and the ladder of a run ------------------------------------------------------------------

NOTHING = linear()
TABLE = {
    "verify": linear(base=1.0, row=0.1, token=0.2, kv=1e-3),
    "overhead": linear(base=0.3, row=0.05),
    "draft": {
        "ngram": linear(row=0.01),
        "draft": linear(base=0.1, step=0.1, kv=1e-4),
        "prism": linear(base=0.2, step=0.05),
    },
    "prefill": linear(base=0.5, token=0.1),
}


def replayed(plans, prompts, batch, **changes):
    return bounds.replay(plans, prompts, CostTable({**TABLE, **changes}), batch)


def test_replay_is_price_for_copies_and_counts_the_engines_iterations(dense):
    cost = CostTable(TABLE | {"prefill": NOTHING})
    for t, rows in itertools.product(dense[:2], (1, 3)):
        plan = fixed(t, "draft", 3)
        got = bounds.replay([plan] * rows, [t.prompt_len] * rows, cost, rows)
        assert got == pytest.approx(time_of(plan, t, cost, rows))
    unit = dict(prefill=NOTHING, overhead=NOTHING, draft={"draft": NOTHING}, verify=linear(base=1.0))
    plans = [fixed(t, "draft", K) for t in dense]
    for batch, slack in ((1, 0), (4, 3)):  # prompts end at different iterations
        iterations = sum(i["verify"] > 0 for i in run("draft", batch)[1].iterations)
        assert abs(replayed(plans, [t.prompt_len for t in dense], batch, **unit) - iterations) <= slack


def test_reading_is_charged_once_for_each_drafter_that_a_request_asked():
    t = traces.Trace("a", 10, 9, {"draft": [0] + [1] * 8})
    plan = autoregressive(t)[:2] + fixed(t, "draft", 2)[2:]
    plans = [plan, autoregressive(t)]
    prompts = [10, 10]
    for read, seconds in ((linear(base=2.0), 2.0), (linear(token=1.0), 10 + plan[2].position)):
        with_price = replayed(plans, prompts, 2, read={"draft": read})
        assert with_price - replayed(plans, prompts, 2) == pytest.approx(seconds)


def test_ladder_of_a_run(dense):
    """Seconds made by the model itself: no error, L0 = L1, nothing below the bound; a time that is impossible
    is seen."""
    plans = {m: [fixed(t, m, K) for t in dense] for m in DRAFTERS}
    plans["ar"] = [autoregressive(t) for t in dense]
    model = {m: replayed(p, [t.prompt_len for t in dense], 2) for m, p in plans.items()}
    model["adaptive"] = model["draft"]

    def analysed(seconds, **changes):
        """The result and its only cell."""
        # Of the last request a drafter is twice as fast.
        gains = {m: [1, 1, 1, 1 + (m != "ar")] for m in seconds}
        rows = [
            {
                "workload": "toy",
                "batch": 2,
                "ids": [t.id for t in dense],
                "identical": 1,
                "tokens": sum(t.n_out for t in dense),
                "method": m,
                "seconds": s,
                "modelled": model[m],
                "speedup": seconds["ar"] / s,
                "rates": [gain / s for gain in gains[m]],
                "rate_speedup": sum(gains[m]) / 4 * seconds["ar"] / s,
                **changes,
            }
            for m, s in seconds.items()
        ]
        found = bounds.analyse(dense, TABLE, rows)
        return found, found["cells"][0]

    result, one = analysed(model)
    assert result["model_error"]["max"] == max(map(abs, one["error"].values())) < 1e-9
    assert one["total time"]["observed"] == pytest.approx(one["modelled"])
    low, high = one["range"]["observed"]["draft"]
    assert low < one["mean rate"]["observed"]["draft"] < high
    assert [low, high] == pytest.approx([one["modelled"]["draft"], 1.75 * one["modelled"]["draft"]])
    assert one["range"]["observed"]["ar"] == [1, 1]
    assert min(one["above"].values()) >= 1 - 1e-9

    slower, _ = analysed({m: 2 * s for m, s in model.items()})
    assert slower["model_error"]["median"] == pytest.approx(0.5)
    assert slower["speedup_error"]["max"] < 1e-9
    off, cell = analysed({**model, "draft": model["draft"] / 1.25})
    assert cell["speedup_error"]["draft"] == pytest.approx(-0.2)
    assert "modelled over observed speed-ups: median 0 %, at most 20 %" in bounds.table(off)
    assert analysed({**model, "draft": model["draft"] / 20})[1]["above"]["draft"] < 1
    with refused("'toy/9' that has no trace"):
        analysed(model, ids=["toy/9"])
