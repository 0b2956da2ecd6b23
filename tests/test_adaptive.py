"""The method that chooses: lossless whoever drafts, and its choices follow prices and acceptance."""

import statistics
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ids_of, near_toy, refused, toy_model
from test_bounds import Round, linear, time_of
import test_engine
from test_engine import REJECTION, SCHEDULERS, prompts, sampled

from minispec import bounds
from minispec.adaptive import Adaptive, rate
from minispec.core.drafters import ChainDrafter, NGram, SmallLM
from minispec.core.engine import Engine
from minispec.core.noise import noise
from minispec.core.requests import Request
from minispec.core.draft_head import DraftHead
from minispec.core.scheduler import SyncScheduler
from minispec.studies.measure import traces_of
from minispec.tools import methods
from minispec.costs import CostTable

TARGET = toy_model()
OTHER = toy_model(seed=1)
CLOSE = near_toy(0.3)


@pytest.fixture(autouse=True)
def whole_chains(monkeypatch):
    """Random models are unsure of every draft; here chains do not end for that."""
    monkeypatch.setattr(ChainDrafter, "min_confidence", 0.0)


def prices(draft=0.05, base=1.0, token=0.02, **more):
    """A cost table. Seconds: of a step `base`, and `token` per token; of a draft of the small model `draft`;
    of a lookup none."""
    drafters = {"ngram": linear(), "draft": linear(step=draft), "far": linear(step=0.01)}
    verify = linear(base=base, token=token)
    return CostTable({"verify": verify, "draft": drafters, "prefill": linear(), **more})


def small(model, name="draft"):
    drafter = SmallLM(model, TARGET)
    drafter.name = name
    return drafter


def adaptive(cost, *drafters, k=6):
    return lambda e: SyncScheduler(e, Adaptive(list(drafters), cost, k), k)


def answer(scheduler, some, batch=1, new=60):
    engine = Engine(TARGET, scheduler, batch, prefill_chunk=16)
    return engine.generate([Request(p, new) for p in some])


def share(generations, who):
    steps = [s for g in generations for s in g.rounds]
    return sum(s.proposer == who for s in steps) / len(steps)


SCHEDULERS["adaptive"] = lambda e, model, other: adaptive(
    prices(token=0.0), NGram(3, 1), SmallLM(other, model), k=4
)(e)


# -- lossless --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_is_identical_and_all_of_them_draft(batch):
    some = prompts(8)
    drafters = NGram(3, 1), small(CLOSE), small(OTHER, "far")
    got = answer(adaptive(prices(), *drafters), some, batch)
    assert ids_of(got) == ids_of(answer(SyncScheduler, some, batch))
    steps = [s for g in got for s in g.rounds]
    assert {s.proposer for s in steps} >= {"ngram", "draft", "far"}
    assert not any(s.proposed for s in steps if s.proposer == "target")


def test_sampled_output_has_the_targets_distribution():
    """Over all outputs of three tokens; a correct engine fails with probability 1e-6."""
    value, accepted = sampled("adaptive", REJECTION, 2_000)
    assert value > 1e-6
    assert 0.05 < accepted < 0.98


def test_a_seed_is_a_text(monkeypatch):
    test_engine.test_a_seed_is_a_text("adaptive", monkeypatch)


class CherryPicker(Adaptive):
    """Wrong: of two draws it keeps the one with the larger q, so drafts no longer come from q."""

    def propose(self, requests, limits):
        first = super().propose(requests, limits)
        other = lambda self, streams, positions: noise(streams + (1 << 40), positions, self.size)
        with mock.patch.object(DraftHead, "noise", other):
            second = super().propose(requests, limits)
        likes = lambda draft: float(draft[1]()[0, draft[0][0]]) if draft[1] else 0.0
        return [max(pair, key=likes) for pair in zip(first, second)]


def test_control_choosing_after_the_draw_is_rejected():
    SCHEDULERS["cherry"] = lambda e, model, other: SyncScheduler(
        e, CherryPicker([SmallLM(other, model)], prices(0.0, token=0.0), 4), 4
    )
    assert sampled("cherry", REJECTION, 3_000)[0] < 1e-6


def test_looked_up_tokens_are_verified_next_to_drafts():
    """Of a request that decodes alone."""
    some = prompts(3)
    for batch in (1, 3):
        short = small(CLOSE)
        short.gamma = 2
        got = answer(adaptive(prices(0.01), NGram(3, 1), short), some, batch)
        assert ids_of(got) == ids_of(answer(SyncScheduler, some, batch))
        steps = [s for g in got for s in g.rounds]
        assert any(s.lookup and s.drafted for s in steps) == (batch == 1)
        assert all(s.lookup + s.drafted <= 6 for s in steps)


# -- choices ---------------------------------------------------------------------------------------


def test_the_choice_has_the_most_expected_tokens_per_second():
    """Against a loop over drafters and lengths."""
    rng = np.random.default_rng(0)
    names = "ngram", "draft", "far"
    for _ in range(50):
        draft = {name: linear(step=rng.uniform(0, 0.3)) for name in names}
        cost = CostTable({"verify": linear(base=1.0, token=rng.uniform(0, 0.3)), "draft": draft})
        chooser = Adaptive([NGram(), small(CLOSE), small(OTHER, "far")], cost, 5)
        r = Request([1, 2, 3])
        found, limit = rng.integers(0, 5), rng.integers(0, 6)
        best = {("target", 0): 1 / cost.step(128, 1)}
        for name in names:
            own, total = chooser.history[r][name], chooser.counts[name]
            own += sorted(rng.uniform(0, 9, 2))
            total += own + sorted(rng.uniform(0, 9, 2))
            chance = rate(own, rate(total, 0.85))
            for k in range(1, (found if name == "ngram" else limit) + 1):
                seconds = cost.step(128, k + 1) + (name != "ngram") * cost.draft(name, 128, k)
                best[name, k] = sum(chance**j for j in range(k + 1)) / seconds
        promised = chooser._promise(r, int(limit), int(found), chooser.prices(1, 0))
        name = max(promised, key=lambda name: promised[name][2])
        assert (name, promised[name][0]) == max(best, key=best.get)


def test_one_drafter_drafts_for_a_batch():
    """Two requests would take one drafter, two the other, and the fifth none."""
    chooser = Adaptive([NGram(3, 1), small(CLOSE), small(OTHER, "far")], prices(), 4)
    some = [Request(list(range(i, i + 8)), 20) for i in range(5)]
    for name, right, own in [("draft", 0.9, some[:2]), ("far", 0.8, some[2:4]), ("draft", 0.0, some[4:])]:
        for r in own:
            for d in ("draft", "far"):
                chooser.history[r][d][:] = 100 * (right if d == name else 0.0), 100
    with torch.inference_mode():
        chooser.propose(some, [4] * 5)
    assert [chooser.chosen[r] for r in some] == ["draft", "draft", "target", "target", "target"]
    # The first request will take the tokens that were looked up, so the second decides.
    speeds = dict(target=90, ngram=300, draft=250, far=200), dict(target=90, ngram=90, draft=100, far=120)
    for r, own in zip(some, speeds):
        chooser.promises[r] = {name: [1, 2.0, speed] for name, speed in own.items()}
    assert chooser._shared(some[:2]) == "far"


def test_choices_follow_prices_and_acceptance():
    some = prompts(4)
    one = lambda cost, model: answer(adaptive(cost, small(model)), some)
    assert share(one(prices(), TARGET), "draft") > 0.85  # always right and cheap
    assert share(one(prices(draft=2.0), TARGET), "target") == 1  # right, but slower than what it saves
    wrong = one(prices(), OTHER)[2:]  # two answers teach that
    assert 0.8 < share(wrong, "target") < 1  # tried again now and then
    mean = lambda cost: statistics.mean(s.proposed for g in one(cost, CLOSE) for s in g.rounds)
    assert mean(prices(draft=0.001, token=0.001)) > mean(prices(draft=0.1, token=0.1)) + 1


def test_a_batch_shares_the_price_of_a_draft():
    """A draft forward costs the same for one request and for eight, for which alone it pays."""
    draft = {"draft": linear(step=2.0)}
    cost = CostTable({"verify": linear(row=1.0), "draft": draft, "prefill": linear()})
    some = [list(range(i, i + 8)) for i in range(8)]
    got = {batch: answer(adaptive(cost, small(TARGET)), some, batch) for batch in (1, 8)}
    assert share(got[1], "target") == 1
    assert share(got[8], "draft") > 0.8


def test_the_prior_is_the_measured_acceptance_up_to_a_limit():
    """A wrong drafter that is cheap is tried if nothing is known of it, or if it is said to be right."""

    def tried(**accept):
        return share(answer(adaptive(prices(0.1, accept=accept), small(OTHER)), prompts(4)), "draft")

    assert tried(draft=0.01) == 0 < tried() == tried(draft=1.0)


def test_reading_a_prompt_must_pay():
    """A good drafter that takes long to read pays for a long answer only; lookups read nothing more."""
    reading = lambda name: prices(read={name: linear(token=0.5)})

    def drafts(new):
        scheduler = adaptive(reading("draft"), small(TARGET))
        return share(answer(scheduler, [list(range(50))], 1, new), "draft")

    assert drafts(20) == 0
    assert drafts(200) > 0.85
    lookups = [
        share(answer(adaptive(cost, NGram(3, 1)), [[1, 2, 3] * 20]), "ngram")
        for cost in (prices(), reading("ngram"))
    ]
    assert lookups[0] == lookups[1] > 0


def test_about_as_fast_as_the_best_single_drafter_and_within_the_bound():
    """Its recorded rounds at the prices it plans with: within 5 % of the best fixed k of the best drafter."""
    some = prompts(6)
    known = {
        f"t/{i}": (g.prompt_ids, g.token_ids) for i, g in enumerate(answer(SyncScheduler, some, 6, 100))
    }
    traced = traces_of({"ngram": NGram(3, 1), "draft": small(CLOSE)}, TARGET, known, 6)
    for draft in (0.02, 0.2):
        cost = prices(draft)
        cell = bounds.ladder(traced, cost, 1, 6)
        taken = 0
        for g, t in zip(answer(adaptive(cost, NGram(3, 1), small(CLOSE)), some, 1, 100), traced):
            taken += time_of(
                [
                    Round(s.position, s.proposer if s.proposed else None, s.proposed, s.committed)
                    for s in g.rounds
                ],
                t,
                cost,
            )
        best = max(x["speedup"] for x in cell["total time"]["L2"].values())
        assert 0.95 * best < cell["seconds"] / taken <= cell["total time"]["L6"] + 1e-9


@pytest.mark.parametrize("stop, most", [(0.0, 2), (0.1, 6)])
def test_a_drafter_that_ends_its_chains_itself_is_not_told_how_deep(monkeypatch, stop, most):
    asked = []
    nothing = lambda self, requests, limits: asked.extend(limits) or [([], None)] * len(requests)
    monkeypatch.setattr(SmallLM, "propose", nothing)
    drafter = small(CLOSE)
    drafter.min_confidence = stop
    answer(adaptive(prices(draft=0.6), drafter), prompts(3), 1, 20)
    assert max(asked) == most


@pytest.mark.parametrize("window", [10, 2])
def test_a_drafter_is_asked_for_at_most_its_window(window):
    drafter = small(TARGET)
    drafter.gamma = window
    got = answer(adaptive(prices(0.001, token=0.001), drafter, k=10), prompts(2))
    assert max(s.proposed for g in got for s in g.rounds) == window


def test_missing_drafters_and_costs_are_refused(tmp_path):
    with refused("no drafter is ready", " price for: ngram, draft"):
        Adaptive([], prices())
    deep, final = small(CLOSE), small(OTHER, "far")
    deep.feature_layers, final.feature_layers = (0,), (1,)
    with refused("same layers of the target, got [(0,), (1,)]"):
        Adaptive([deep, final], prices())
    settings = methods.settings(cost=str(tmp_path / "none.json"))
    with refused("there is no cost table", "none.json; this measures one: python bench.py profile"):
        methods.make_engine("adaptive", TARGET, settings, 1)
    assert "adaptive" not in methods.ready(settings)
