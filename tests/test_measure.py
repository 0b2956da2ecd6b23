"""Measurements that feed the analyzer, on toy models: dense traces agree with what engines accept, plans with what engines
do, and clocks with themselves. Nothing here asserts a time; where a clock matters, it is a counter."""
import functools
import itertools
import random

import numpy as np
import pytest
import torch
from conftest import toy_model, whole

from minispec import bounds, prism
from minispec import bounds, traces
from minispec.data import recorded, rollouts
from test_bounds import autoregressive, fixed, time_of
from minispec.studies import measure
from minispec.traces import CostTable
from minispec.studies.tables import render
from minispec.core.drafters import NGram, SmallLM
from minispec.core.engine import Engine, Lockstep
from minispec.core.requests import Request
from minispec.specgen import SpecGen

TARGET, DRAFT = toy_model(seed=0), toy_model(seed=0)
with torch.no_grad():
    for p, noise in zip(DRAFT.parameters(), toy_model(seed=9).parameters()):
        p.add_(0.4 * noise)
K, NEW = 5, 50
PROMPTS = [random.Random(s).choices(range(64), k=n) for s, n in ((6, 24), (1, 2), (2, 7), (3, 40))]


@functools.cache
def heads():
    """A drafter that has learned one of the target's answers by heart, so that it is sometimes right."""
    torch.manual_seed(5)
    drafter = prism.for_target(TARGET, (0, 1))
    [answer] = Engine(TARGET, Lockstep, 1).generate([Request(PROMPTS[0], 60)])
    batch = recorded.padded([rollouts.read(TARGET, [], answer.prompt_ids + answer.token_ids, 0)])
    opt = torch.optim.Adam(drafter.parameters(), lr=0.01)
    for _ in range(30):
        loss, _ = prism.unrolled_loss(drafter, batch, 3)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return drafter.eval()


DRAFTERS = {"ngram": lambda: NGram(3, 1), "draft": lambda: whole(SmallLM(DRAFT, TARGET)),
            "prism": lambda: whole(prism.PrismDrafter(heads(), TARGET, K))}


@functools.cache
def run(name=None, batch=2, k=K):
    engine = Engine(TARGET, (lambda e: Lockstep(e, DRAFTERS[name](), k)) if name else Lockstep, batch, prefill_chunk=16)
    return engine.generate([Request(p, NEW - 3 * i) for i, p in enumerate(PROMPTS)]), engine


@pytest.fixture(scope="module")
def dense():
    """{id: (prompt, output)} of the autoregressive loop, and its traces by all drafters."""
    texts = {f"toy/{i}": (g.prompt_ids, g.token_ids) for i, g in enumerate(run()[0])}
    return texts, measure.traces_of({name: make() for name, make in DRAFTERS.items()}, TARGET, texts, K)


@pytest.mark.parametrize("name", DRAFTERS)
def test_dense_trace_is_what_the_engine_accepts_where_it_comes_by(name, dense):
    """At every round of a live run: gained = accept there, cut by what was proposed. The control reads one entry earlier,
    as the paper's simulator does."""
    wrong = 0
    for g, t in zip(run(name)[0], dense[1]):
        assert len(g.steps) > 2
        for s in g.steps:
            assert s.committed == min(t.accept[name][s.position], s.proposed + 1)
            wrong += s.committed != min(max(1, t.accept[name][s.position - 1]), s.proposed + 1)
    assert wrong > 3
    assert max(max(t.accept[name][1:]) for t in dense[1]) > 1                  # and something is accepted at all


def test_traces_survive_their_file(dense, tmp_path):
    traces.write_traces(tmp_path / "t.jsonl", dense[1])
    for a, b in zip(dense[1], traces.read_traces(tmp_path / "t.jsonl")):
        assert a.id == b.id and all((a.accept[m][1:] == b.accept[m][1:]).all() for m in DRAFTERS)
        assert set(a.censored) == set(b.censored) and set(a.offered) == set(b.offered)


@pytest.mark.parametrize("name", DRAFTERS)
def test_fixed_k_replays_the_engines_rounds(name, dense):
    """What `fixed` reads off a trace is round by round what the engine did, so a run needs no record; and one k is not
    another (control)."""
    for k in (1, 4):
        for g, t in zip(run(name, k=k)[0], dense[1]):
            assert [(r.position, r.proposed, r.emitted) for r in fixed(t, name, k)] == [(s.position, s.proposed, s.committed) for s in g.steps]
    assert sum(len(fixed(t, "draft", 1)) for t in dense[1]) != sum(len(fixed(t, "draft", 4)) for t in dense[1])


TABLE = {"verify": {"kind": "linear", "base": 1.0, "row": 0.1, "token": 0.2, "kv": 1e-3}, "overhead": {"kind": "linear", "base": 0.3, "row": 0.05},
         "draft": {"ngram": {"kind": "linear", "row": 0.01}, "draft": {"kind": "linear", "base": 0.1, "step": 0.1, "kv": 1e-4},
                   "prism": {"kind": "linear", "base": 0.2, "step": 0.05}}, "prefill": {"kind": "linear", "base": 0.5, "token": 0.1}}


def test_replay_is_price_for_copies_and_counts_the_engines_iterations(dense):
    cost = CostTable(TABLE | {"prefill": {"kind": "linear"}})
    for t, rows in itertools.product(dense[1][:2], (1, 3)):
        plan = fixed(t, "draft", 3)
        assert bounds.replay([plan] * rows, [t.prompt_len] * rows, cost, rows) == pytest.approx(time_of(plan, t, cost, rows))
    unit = CostTable({"verify": {"kind": "linear", "base": 1.0}, "draft": {"draft": {"kind": "linear"}}, "prefill": {"kind": "linear"}})
    for batch in (1, 4):
        plans = [fixed(t, "draft", K) for t in dense[1]]
        iterations = sum(i["verify"] > 0 for i in run("draft", batch)[1].iterations)
        # Prompts of 40 tokens take three iterations to read, one of 2 tokens one: with 4 at once, rounds begin apart.
        assert abs(bounds.replay(plans, [t.prompt_len for t in dense[1]], unit, batch) - iterations) <= (0 if batch == 1 else 3)


# -- clocks ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [None, *DRAFTERS, "specgen"])
def test_phases_sum_to_the_step(name, monkeypatch):
    """With a clock that counts how often it was asked: the phases sum to all its ticks but one after each iteration, as
    a whole and for each iteration."""
    ticks = itertools.count()
    monkeypatch.setattr("minispec.core.engine.time.perf_counter", lambda: float(next(ticks)))
    planner = Lockstep if name is None else (lambda e: SpecGen(e, 4, 0.2, 4)) if name == "specgen" else lambda e: Lockstep(e, DRAFTERS[name](), K)
    engine = Engine(TARGET, planner, 2, prefill_chunk=16)
    engine.generate([Request(p, 20) for p in PROMPTS])
    n = len(engine.iterations)
    assert sum(engine.seconds.values()) == next(ticks) - n - 1                 # the first tick is 0, the last sees that all is done
    for phase in ("draft", "verify", "prefill"):
        assert engine.seconds[phase] == pytest.approx(sum(i["seconds"][phase] for i in engine.iterations))
    assert engine.seconds["other"] == pytest.approx(sum(i["seconds"]["sample"] + i["seconds"]["overhead"] for i in engine.iterations))
    assert all(v >= 0 for i in engine.iterations for v in i["seconds"].values())
    assert (engine.seconds["draft"] > 0) == (name is not None) and sum(i["seconds"]["sample"] for i in engine.iterations) > 0


def test_acceptance_is_accepted_over_judged_drafts(dense):
    texts = dense[0]
    some = measure.traces_of({"itself": SmallLM(TARGET, TARGET), "other": SmallLM(DRAFT, TARGET)}, TARGET, texts, K)
    assert measure.acceptance(some, "itself") == 1 and 0 < measure.acceptance(some, "other") < 1
    t = traces.Trace("a", 5, 6, {"d": [0, 1, 5 - 1, 2, 2, 1]}, offered={"d": [0, 0, 3, 1, 4, 0]})
    assert measure.acceptance([t], "d", 2) == pytest.approx((0 + 2 + 1 + 1) / (0 + 2 + 1 + 2))      # cut at 2 drafts; nothing offered, nothing judged


@pytest.mark.parametrize("name", [None, *DRAFTERS])
def test_rounds_of_every_shape_are_timed(name, monkeypatch):
    """The engine makes the rounds that were asked for: the number of rows says so."""
    rows_fed = []

    class Watched(measure.Half):
        def forward(self, plan):
            rows_fed.append([(s.kind, len(s.tokens), s.start) for s in plan])
            return super().forward(plan)

    monkeypatch.setattr(measure, "Half", Watched)
    timed = measure.round_seconds(TARGET, DRAFTERS[name]() if name else measure.Rote(), 3, 64, (0, 2, 4), 2)
    assert {k: len(some) for k, some in timed.items()} == {0: 2, 2: 2, 4: 2}
    assert np.mean([start for plan in rows_fed for _, _, start in plan]) == pytest.approx(64, abs=6 if name == "ngram" else 2)
    assert all({"draft", "verify", "sample", "overhead"} <= set(s) for some in timed.values() for s in some)
    if name != "ngram":                                                        # a lookup may find nothing
        assert [[n for _, n, _ in plan] for plan in rows_fed] == [[k + 1] * 3 for k in (4, 0, 0, 0, 2, 2, 2, 4, 4, 4)]
        starts = [plan[0][2] for plan in rows_fed]
        assert [b - a for a, b in zip(starts, starts[1:])] == [3, 1, 1, 1, 2, 2, 2, 3, 3]           # half of the drafts, and one token more
    assert all(kind == "verify" for plan in rows_fed for kind, _, _ in plan)


def test_cost_table_is_one_that_the_analyzer_takes():
    drafters = {name: make() for name, make in DRAFTERS.items()}
    table = measure.cost_table(TARGET, drafters, (1, 2), (16,), (0, 1, 4))
    cost = CostTable(table)
    assert set(cost.drafters) == set(DRAFTERS) and np.shape(table["verify"]["seconds"]) == (2, 3, 1)
    assert table["verify"]["tokens"] == [1, 2, 5] and table["draft"]["draft"]["tokens"] == [1, 4]
    assert np.shape(table["prefill"]["seconds"]) == (2, len(table["prefill"]["tokens"]), 1)
    assert cost.step(16, 1) > 0 and cost.draft("prism", 32, 4, 2) > 0 and set(table["read"]) == set(DRAFTERS)
    with pytest.raises(ValueError, match="too small to time"):
        measure.cost_table(TARGET, drafters, (1,), (4096,), (0, 1, 4))


def test_price_of_a_drafter_is_what_its_rounds_take_longer(monkeypatch):
    """And of one token that of rounds without drafts, one after the other."""
    def rounds(model, drafter, rows, context, drafts, repeats=1):
        verify = {"Rote": 3.0 if len(drafts) > 1 else 2.0, "SmallLM": 3.5, "NGram": 2.5}[type(drafter).__name__]
        return {k: [{"verify": verify, "sample": 0.5, "draft": 0.0 if type(drafter) is measure.Rote else 1.0 * k, "overhead": 0.1}] for k in drafts}

    monkeypatch.setattr(measure, "round_seconds", rounds)
    price = lambda: measure.cost_table(TARGET, {"draft": DRAFTERS["draft"](), "ngram": NGram()}, (1,), (16,), (0, 1, 4))
    table = price()
    assert table["verify"]["seconds"] == [[[2.5], [3.5], [3.5]]]
    assert table["draft"]["draft"]["seconds"] == [[[1.5], [4.5]]] and table["draft"]["ngram"]["seconds"] == [[[1.0], [4.0]]]
    visits = itertools.count()

    def drifting(*args):                                                       # the first pass, of four visits, meets a slow minute
        slow = 10 if next(visits) < 4 else 1
        return {k: [{p: slow * s for p, s in one.items()} for one in some] for k, some in rounds(*args).items()}

    monkeypatch.setattr(measure, "round_seconds", drifting)
    drifted = price()
    assert (drifted["verify"], drifted["draft"]) == (table["verify"], table["draft"]) and next(visits) == 4 * measure.PASSES


def test_a_window_is_priced_by_the_drafts_that_it_has(monkeypatch):
    """Asked for 8 it drafts 4, so 8 is no point of its grid, and what verifying 4 takes is between the points of the target's."""
    verify = {0: 1.0, 2: 3.0, 8: 9.0}

    def rounds(model, drafter, rows, context, drafts, repeats=1):
        window = type(drafter) is not measure.Rote
        return {k: [{"verify": 5.5 if window else verify[k], "sample": 0.0, "draft": 0.25 if window else 0.0, "overhead": 0.1}] for k in drafts}

    drafter = DRAFTERS["draft"]()
    drafter.gamma = 4
    monkeypatch.setattr(measure, "round_seconds", rounds)
    table = measure.cost_table(TARGET, {"draft": drafter}, (1,), (16,), (0, 2, 8))
    assert table["verify"]["tokens"] == [1, 3, 9] and table["draft"]["draft"]["tokens"] == [2, 4]
    assert table["draft"]["draft"]["seconds"] == [[[2.75], [0.75]]]           # 5.75 less 3, and less 5, a third of the way from 3 to 9


def test_price_of_reading_is_the_first_round_beside_the_second(monkeypatch):
    rounds = iter([{"draft": s} for s in (9.0, 1.0, 5.0, 1.0, 9.0, 1.0, 1.0, 2.0)])           # each time after one that does not count
    monkeypatch.setattr(measure, "_rounds", lambda *args: [next(rounds), next(rounds)])
    assert measure.read_seconds(TARGET, None, 1, 16) == 4.0 and measure.read_seconds(TARGET, None, 1, 16) == 0.0
    assert CostTable({"verify": {"kind": "linear", "base": 1}, "read": {"a": {"kind": "linear", "base": 1, "token": 0.5}}}).read("a", 10) == 6.0
    assert CostTable({"verify": {"kind": "linear", "base": 1}}).read("a", 10) == 0.0


def test_reading_is_charged_once_for_each_drafter_that_a_request_asked():
    cost, t = CostTable({**TABLE, "read": {"draft": {"kind": "linear", "base": 2.0}}}), traces.Trace("a", 10, 9, {"draft": [0] + [1] * 8})
    plan = autoregressive(t)[:2] + fixed(t, "draft", 2)[2:]
    def reading(plans, cost):
        free = CostTable({**cost.table, "read": {}})
        return bounds.replay(plans, [10] * len(plans), cost, 2) - bounds.replay(plans, [10] * len(plans), free, 2)

    assert reading([plan, autoregressive(t)], cost) == pytest.approx(2.0) and reading([plan], CostTable(TABLE)) == 0
    assert reading([plan], CostTable({**TABLE, "read": {"draft": {"kind": "linear", "token": 1.0}}})) == pytest.approx(10 + plan[2].position)


# -- the ladder from files -------------------------------------------------------------------------------------------------

def runs_of(some, methods, seconds, modelled, cell=("toy", 2)):
    rows = [{"workload": cell[0], "batch": cell[1], "ids": [t.id for t in some], "method": name, "k": K, "seconds": seconds[name], "tokens": sum(t.n_out for t in some),
             "modelled": modelled[name], "identical": 1} for name in methods]
    return [{**r, "speedup": rows[0]["seconds"] / r["seconds"], "rate_speedup": None} for r in rows]


def test_ladder_of_a_run_and_of_files_alone(dense):
    """Seconds made by the model itself: no error, L0 = L1, nothing below the bound; half the time is seen to be impossible."""
    some, cost = dense[1], CostTable(TABLE)
    plans = {"ar": [autoregressive(t) for t in some]} | {m: [fixed(t, m, K) for t in some] for m in DRAFTERS}
    model = {m: bounds.replay(p, [t.prompt_len for t in some], cost, 2) for m, p in plans.items()}
    for m in ("draft", "prism"):                                               # as the study `run` finds them; a lookup in vain is free there
        steps = [g.steps for g in run(m)[0]]
        assert bounds.replay(steps, [t.prompt_len for t in some], cost, 2) == pytest.approx(model[m])
    rows = runs_of(some, ["ar", *DRAFTERS], model, model)
    combined = {**rows[2], "method": "adaptive"}
    result = bounds.analyse(some, TABLE, [*rows, combined])
    [cell] = result["cells"]
    assert all(abs(e) < 1e-9 for e in cell["error"].values()) and result["model_error"]["max"] < 1e-9
    rungs = cell["total time"]
    assert rungs["L0"] == pytest.approx(cell["L1"])
    assert all(x >= 1 - 1e-9 for x in cell["above"].values())
    assert rungs["L6"] >= max(rungs["L5"].values()) - 1e-9
    single = max(s for m, s in rungs["L0"].items() if m != "adaptive")
    assert cell["gap"] == pytest.approx((rungs["L0"]["draft"] - single) / (rungs["L6"] - single))
    single = max(s for m, s in cell["L1"].items() if m != "adaptive")
    assert cell["gap_modelled"] == pytest.approx((cell["L1"]["adaptive"] - single) / (rungs["L6"] - single))
    slower = bounds.analyse(some, TABLE, runs_of(some, ["ar", *DRAFTERS], {m: 2 * s for m, s in model.items()}, model))        # since it was priced
    assert slower["model_error"]["median"] == pytest.approx(0.5) and slower["speedup_error"]["max"] < 1e-9 and "ar" not in slower["cells"][0]["speedup_error"]
    off = bounds.analyse(some, TABLE, runs_of(some, ["ar", "draft"], {"ar": model["ar"], "draft": model["draft"] / 1.25}, model))
    assert off["cells"][0]["speedup_error"] == pytest.approx({"draft": -0.2}) and "modelled over observed speed-ups: median 20 %, at most 20 %" in render("bounds", off)
    impossible = bounds.analyse(some, TABLE, runs_of(some, ["ar", "draft"], {"ar": model["ar"], "draft": model["draft"] / 20}, model))
    assert impossible["cells"][0]["above"]["draft"] < 1
    alone = bounds.analyse(some, TABLE)
    assert [(c["workload"], c["batch"]) for c in alone["cells"]] == [("toy", b) for b in bounds.BATCHES] and alone["model_error"] is None
    with pytest.raises(ValueError, match="'toy/9' that has no trace"):
        bounds.analyse(some, TABLE, [{**rows[0], "ids": ["toy/9"]}])
