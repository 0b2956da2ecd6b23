"""The method that chooses: lossless whoever drafts, and its choices follow prices and acceptance."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from conftest import ids_of, near_toy, refused, steps_of, toy_model
from test_bounds import grid, linear, time_of
import test_engine
from test_engine import REJECTION, SCHEDULERS, prompts, sampled

from minispec import bounds
from minispec.adaptive import Adaptive, rate
from minispec.core.drafters import ChainDrafter, Drafter, NGram, SmallLM
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


def prices(draft=0.05, base=1.0, token=0.02):
    """A cost table. Seconds: of a step `base`, and `token` per token; of a draft of the small model `draft`;
    of a lookup none."""
    drafters = {"ngram": linear(), "draft": linear(step=draft), "far": linear(step=0.01)}
    verify = linear(base=base, token=token)
    return CostTable({"verify": verify, "draft": drafters, "prefill": linear()})


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
    return np.mean([s.proposer == who for s in steps_of(generations)])


SCHEDULERS["adaptive"] = lambda e, model, other: adaptive(
    prices(token=0.0), NGram(3, 1), SmallLM(other, model), k=4
)(e)


# -- lossless --------------------------------------------------------------------------------------

def test_a_drafter_need_be_no_chain_drafter():
    [prompt] = prompts(1)
    plain = ids_of(answer(SyncScheduler, [prompt]))
    text = prompt + plain[0]

    class Known(Drafter):
        name = "far"

        def propose(self, requests, limits):
            return [(text[len(r.tokens):][:limit], None) for r, limit in zip(requests, limits)]

    got = answer(adaptive(prices(token=0.0), NGram(3, 1), Known()), [prompt])
    assert ids_of(got) == plain and share(got, "far") > 0.5


def test_greedy_is_identical_and_all_of_them_draft(monkeypatch):
    """A batch with one drafter, asked once, and one length: rows of equal lengths share their products."""
    noted = []

    def propose(self, requests, limits, real=Adaptive.propose):
        out = real(self, requests, limits)
        noted.append((self.name, len({*limits}) == 1, [len(drafts) for drafts, *_ in out]))
        return out

    monkeypatch.setattr(Adaptive, "propose", propose)
    some = prompts(8)
    drafters = NGram(3, 1), small(CLOSE), small(OTHER, "far")
    got = answer(adaptive(prices(), *drafters), some, 4)
    assert ids_of(got) == ids_of(answer(SyncScheduler, some, 4))
    steps = steps_of(got)
    assert {s.proposer for s in steps} >= {"ngram", "draft", "far"}
    assert not any(s.proposed for s in steps if s.proposer == "target")
    alike = [lengths for name, equal, lengths in noted if equal and name != "ngram"]
    assert all(len({*lengths}) == 1 for lengths in alike) and max(map(len, alike)) == 4


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
    """Of the whole batch, against a loop over drafters and lengths. Measured prices may fall; every second
    request is new to the drafters; what they accept elsewhere counts up to a limit; "far" has a window."""
    rng = np.random.default_rng(0)
    names = "ngram", "draft", "far"
    chosen = set()
    for batch in [1, 3] * 40:
        verify = grid([1, 3], [1, 2, 3, 4, 5, 6], [0], rng.uniform(1, 2, (2, 6, 1)))
        draft = {name: linear(step=rng.uniform(0, 0.15)) for name in names}
        read = dict.fromkeys(names, linear(token=0.3))
        accept = {"draft": 0.3, "far": 1.0}
        cost = CostTable({"verify": verify, "draft": draft, "read": read, "accept": accept})
        chooser = Adaptive([NGram(), small(CLOSE), small(OTHER, "far")], cost, 5)
        chooser.drafters["far"].gamma = 2
        some = [Request([1, 2, 3], n) for n in rng.integers(6, 40, batch)]
        limits = rng.integers(0, 6, batch).tolist()
        found = [[7] * rng.integers(0, 5) for _ in some]
        room = {"ngram": [*map(len, found)], "draft": limits, "far": [min(n, 2) for n in limits]}
        kv = 128 * batch
        best = {("target", 0): batch / cost.step(kv, batch, batch)}
        for name in names:
            total = chooser.counts[name]
            total += sorted(rng.uniform(0, 9, 2))
            for r in some[::2]:                              # the others have not read their prompts
                own = chooser.history[r][name]
                own += sorted(rng.uniform(0, 9, 2))
            prior = 0.3 if name == "draft" else 0.85
            chances = [rate(chooser.history[r][name], rate(total, prior)) for r in some]
            for k in range(1, max(room[name]) + 1):
                seconds = cost.step(kv, batch * (k + 1), batch)
                most = [min(k, n) for n in room[name]]
                tokens = [sum(chance**j for j in range(n + 1)) for chance, n in zip(chances, most)]
                if name != "ngram":
                    seconds += cost.draft(name, kv, k, batch)
                    new = zip(tokens[1::2], some[1::2])
                    seconds += sum(n * cost.read(name, 3) / r.remaining for n, r in new)
                best[name, k] = sum(tokens) / seconds
        choice = chooser._choose(some, limits, found)
        assert best[choice] == pytest.approx(max(best.values()))
        chosen.add(choice[0])
        if batch == 1:
            promised = chooser.promises[some[0]]
            speed = {name: promise[2] for name, promise in promised.items()}
            assert choice == (max(speed, key=speed.get), promised[choice[0]][0])
    assert chosen >= {*names}


def test_choices_follow_acceptance():
    one = lambda model: answer(adaptive(prices(), small(model)), prompts(4))
    assert share(one(TARGET), "draft") > 0.85  # always right and cheap
    wrong = one(OTHER)[2:]  # two answers teach that
    assert 0.8 < share(wrong, "target") < 1  # tried again now and then


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
            rounds = [(s.position, s.proposer if s.proposed else None, s.proposed) for s in g.rounds]
            taken += time_of(rounds, t, cost)
        best = max(x["speedup"] for x in cell["total time"]["best fixed k"].values())
        assert 0.95 * best < cell["seconds"] / taken <= cell["total time"]["optimum of all"] + 1e-9


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
