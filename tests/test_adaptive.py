"""The method that chooses: lossless whoever drafts, and its choices follow prices and acceptance."""

import statistics
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from conftest import ids_of, near_toy, refused, steps_of, toy_model
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
    steps = steps_of(generations)
    return sum(s.proposer == who for s in steps) / len(steps)


SCHEDULERS["adaptive"] = lambda e, model, other: adaptive(
    prices(token=0.0), NGram(3, 1), SmallLM(other, model), k=4
)(e)


# -- lossless --------------------------------------------------------------------------------------


def test_greedy_is_identical_and_all_of_them_draft():
    some = prompts(8)
    drafters = NGram(3, 1), small(CLOSE), small(OTHER, "far")
    got = answer(adaptive(prices(), *drafters), some, 4)
    assert ids_of(got) == ids_of(answer(SyncScheduler, some, 4))
    steps = steps_of(got)
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
    assert sampled("cherry", REJECTION, 3_000, control=True)[0] < 1e-6


def test_looked_up_tokens_are_verified_next_to_drafts():
    """Of a request that decodes alone."""
    some = prompts(3)
    for batch in (1, 3):
        short = small(CLOSE)
        short.gamma = 2
        got = answer(adaptive(prices(0.01), NGram(3, 1), short), some, batch)
        assert ids_of(got) == ids_of(answer(SyncScheduler, some, batch))
        steps = steps_of(got)
        assert any(s.lookup and s.drafted for s in steps) == (batch == 1)
        assert all(s.lookup + s.drafted <= 6 for s in steps)


# -- choices ---------------------------------------------------------------------------------------


def test_the_choice_has_the_most_expected_tokens_per_second():
    """Of the whole batch, against a loop over drafters and lengths."""
    rng = np.random.default_rng(0)
    names = "ngram", "draft", "far"
    chosen = set()
    for batch in [1, 3] * 40:
        draft = {name: linear(step=rng.uniform(0, 0.3)) for name in names}
        verify, read = linear(base=1.0, token=rng.uniform(0, 0.1)), {"draft": linear(token=0.05)}
        cost = CostTable({"verify": verify, "draft": draft, "read": read})
        chooser = Adaptive([NGram(), small(CLOSE), small(OTHER, "far")], cost, 5)
        some = [Request([1, 2, 3]) for _ in range(batch)]
        limits = rng.integers(0, 6, batch).tolist()
        found = [[7] * rng.integers(0, 5) for _ in some]
        chances = defaultdict(list)
        for name in names:
            total = chooser.counts[name]
            total += sorted(rng.uniform(0, 9, 2))
            for r in some[::2]:                              # the others have not read their prompts
                own = chooser.history[r][name]
                own += sorted(rng.uniform(0, 9, 2))
            for r in some:
                own = chooser.history[r][name]
                chances[name].append(rate(own, rate(total, 0.85)))
        kv = 128 * batch
        best = {("target", 0): batch / cost.step(kv, batch, batch)}
        for name in names:
            for k in range(1, 6):
                seconds = cost.step(kv, batch * (k + 1), batch)
                seconds += (name != "ngram") * cost.draft(name, kv, k, batch)
                most = [min(k, len(f) if name == "ngram" else limit) for f, limit in zip(found, limits)]
                tokens = [sum(chance**j for j in range(n + 1)) for chance, n in zip(chances[name], most)]
                if name == "draft":
                    new = zip(tokens[1::2], some[1::2])
                    seconds += sum(n * cost.read(name, 3) / r.remaining for n, r in new)
                best[name, k] = sum(tokens) / seconds
        choice = chooser._choose(some, limits, found)
        assert best[choice] == pytest.approx(max(best.values()))
        chosen.add(choice[0])
        if batch == 1:
            speed = {name: promise[2] for name, promise in chooser.promises[some[0]].items()}
            assert choice[0] == max(speed, key=speed.get)
    assert chosen >= {*names}


def test_a_batch_drafts_with_one_drafter_and_one_length(monkeypatch):
    """Rows of equal lengths share their products."""
    noted = []

    def propose(self, requests, limits, real=Adaptive.propose):
        out = real(self, requests, limits)
        names = {self.name}
        noted.append((*names, {len(drafts) for drafts, *_ in out} if len({*limits}) == 1 else {0}))
        return out

    monkeypatch.setattr(Adaptive, "propose", propose)
    answer(adaptive(prices(), NGram(3, 1), small(CLOSE), small(OTHER, "far")), prompts(8), 4)
    assert {name for name, _ in noted} >= {"ngram", "draft"}
    assert all(len(lengths) == 1 for name, lengths in noted if name != "ngram")


def test_choices_follow_prices_and_acceptance():
    some = prompts(4)
    one = lambda cost, model: answer(adaptive(cost, small(model)), some)
    assert share(one(prices(), TARGET), "draft") > 0.85  # always right and cheap
    assert share(one(prices(draft=2.0), TARGET), "target") == 1  # right, but slower than what it saves
    wrong = one(prices(), OTHER)[2:]  # two answers teach that
    assert 0.8 < share(wrong, "target") < 1  # tried again now and then
    mean = lambda cost: statistics.mean(s.proposed for s in steps_of(one(cost, CLOSE)))
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


@pytest.mark.parametrize("stop, batch, most", [(0.0, 1, 2), (0.1, 1, 6), (0.1, 3, 2)])
def test_a_drafter_that_ends_its_chains_itself_is_not_told_how_deep(stop, batch, most, monkeypatch):
    """But in a batch, where every row costs."""
    asked = []
    nothing = lambda self, requests, limits: asked.extend(limits) or [([], None)] * len(requests)
    monkeypatch.setattr(SmallLM, "propose", nothing)
    drafter = small(CLOSE)
    drafter.min_confidence = stop
    answer(adaptive(prices(draft=0.6 * batch, base=batch), drafter), [[i] * 9 for i in range(3)], batch, 20)
    assert max(asked) == most


def test_a_graph_takes_the_steps_that_were_priced_not_those_of_the_longest_round(monkeypatch):
    taken = []
    drafter = small(CLOSE)
    drafter.graphs = SimpleNamespace(steps=8)
    nothing = lambda self, requests, limits: taken.append(self.graphs.steps) or [([], None)] * len(requests)
    monkeypatch.setattr(SmallLM, "propose", nothing)
    chooser = Adaptive([drafter], prices(), 6)
    request = Request([1, 2, 3], 20)
    for k in (4, 2):
        monkeypatch.setattr(chooser, "_choose", lambda *_: ("draft", k))
        chooser.promises[request] = {chooser.lookup.name: (0,)}
        chooser.propose([request], [6])
    assert taken == [4, 2]


def test_no_more_drafts_than_anyone_has_are_priced():
    """Measured prices may fall."""
    grid = {"kind": "grid", "rows": [1], "tokens": [1, 2, 3], "kv": [0], "seconds": [[[1.0], [1.5], [1.2]]]}
    chooser = Adaptive([NGram()], CostTable({"verify": grid, "draft": {"ngram": linear()}}), 4)
    r = Request([1, 2, 3])
    chooser._choose([r], [4], [[7]])
    k, tokens, speed = chooser.promises[r]["ngram"]
    assert (k, speed) == (1, tokens / 1.5)


@pytest.mark.parametrize("window", [10, 2])
def test_a_drafter_is_asked_for_at_most_its_window(window):
    drafter = small(TARGET)
    drafter.gamma = window
    got = answer(adaptive(prices(0.001, token=0.001), drafter, k=10), prompts(2))
    assert max(s.proposed for s in steps_of(got)) == window


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
