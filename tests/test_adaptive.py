"""The method that chooses: lossless whoever drafts, and its choices are the sensible ones under prices made up here."""
import itertools
import statistics
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import chi_square, toy_model
from test_engine import JUDGED, PLANNERS, SAMPLED, exact, plain, prompts, run, sampled

from minispec import bounds
from minispec.tools import methods
from minispec.adaptive import Adaptive, Counts, richest
from minispec.core.drafters import Chained, NGram, SmallLM
from minispec.core.engine import Engine, Lockstep
from minispec.core.requests import Request
from minispec.bounds import CostTable
from test_bounds import recorded, time_of
from minispec.core.noise import noise
from minispec.core.words import Words

TARGET, OTHER = toy_model(seed=0), toy_model(seed=1)
CLOSE = toy_model(seed=0)
with torch.no_grad():
    for p, other in zip(CLOSE.parameters(), toy_model(seed=9).parameters()):
        p.add_(0.3 * other)


@pytest.fixture(autouse=True)
def whole_chains(monkeypatch):
    """Random models are unsure of every draft; here chains end where the prices say."""
    monkeypatch.setattr(Chained, "stop", 0.0)


def test_a_drafter_that_ends_its_chains_itself_is_not_told_how_deep(monkeypatch):
    asked = []
    monkeypatch.setattr(Chained, "stop", 0.1)
    monkeypatch.setattr(SmallLM, "propose", lambda self, requests, limits: asked.extend(limits) or [([], None)] * len(requests))
    answer(adaptive(prices(draft=0.3), SmallLM(CLOSE, TARGET)), prompts(3), 1, 20)
    assert max(asked) == 6                                          # as many as allowed, where one would be the best number

    def stop(**prices_):
        drafter = SmallLM(CLOSE, TARGET)
        answer(adaptive(prices(**prices_), drafter), prompts(3), 1, 20)
        return drafter.stop
    # A draft must be the surer the dearer it is: (0.1 + 0.02) seconds of tokens that come at more than one a second.
    assert 0.02 <= stop(draft=0.001, token=0.001) < 0.12 < stop(draft=0.1) < stop(draft=0.3) <= 1


def prices(draft=0.05, base=1.0, token=0.02, **more):
    """A cost table: a step takes `base` and `token` for each token, a draft of the small model `draft`, a lookup nothing."""
    linear = lambda **c: {"kind": "linear", **c}
    drafters = {"ngram": linear(), "draft": linear(step=draft), **{name: linear(step=s) for name, s in more.items()}}
    return CostTable({"verify": linear(base=base, token=token), "draft": drafters, "prefill": linear()})


def named(drafter, name):
    drafter.name = name
    return drafter


def adaptive(cost, *drafters, k=6):
    return lambda e: Lockstep(e, Adaptive(list(drafters), cost, k), k)


def answer(planner, some, batch, new=50):
    engine = Engine(TARGET, planner, batch, prefill_chunk=16)
    return engine.generate([Request(p, new) for p in some])


@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_is_identical_and_all_of_them_draft(batch):
    some = prompts(8)
    got = answer(adaptive(prices(far=0.01), NGram(3, 1), SmallLM(CLOSE, TARGET), named(SmallLM(OTHER, TARGET), "far")), some, batch)
    assert [g.token_ids for g in got] == [g.token_ids for g in answer(Lockstep, some, batch)]
    steps = [s for g in got for s in g.steps]
    assert {s.proposer for s in steps} == {"ngram", "draft", "far", "target"}
    assert all((s.proposer == "target") <= (s.proposed == 0) for s in steps)


PLANNERS["adaptive"] = lambda model, other: adaptive(prices(token=0.0), NGram(3, 1), SmallLM(other, model), k=4)


def test_sampled_output_has_the_targets_distribution():
    """Over all outputs of three tokens; a correct engine fails with probability 1e-6."""
    counts, rate = sampled("adaptive", JUDGED)
    assert chi_square(counts, exact(JUDGED)) > 1e-6
    assert 0.05 < rate < 0.98


@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
def test_a_seed_is_a_text(sampling):
    for batch in (1, 8):
        got, _ = run("adaptive", prompts(8), batch, sampling=sampling)
        assert [g.token_ids for g in got] == plain(8, 30, sampling)


class CherryPicker(Adaptive):
    """Wrong: looks at two draws and keeps the one it likes; the draft no longer comes from the distribution it says."""

    def propose(self, requests, limits):
        first = super().propose(requests, limits)
        with mock.patch.object(Words, "noise", lambda self, streams, positions: noise(streams + (1 << 40), positions, self.size)):
            second = super().propose(requests, limits)
        likes = lambda draft: float(draft[1][0, draft[0][0]]) if draft[1] is not None else 0.0
        return [max(pair, key=likes) for pair in zip(first, second)]


def test_control_choosing_after_the_draw_is_rejected():
    PLANNERS["cherry"] = lambda model, other: lambda e: Lockstep(e, CherryPicker([SmallLM(other, model)], prices(0.0, token=0.0), 4), 4)
    counts, _ = sampled("cherry", JUDGED, 3_000)
    assert chi_square(counts, exact(JUDGED)) < 1e-6


def test_copies_that_are_worth_their_rows_are_judged_next_to_drafts():
    got = answer(adaptive(prices(0.02), NGram(3, 1), SmallLM(CLOSE, TARGET)), [[1, 2, 3, 4] * 6], 1)
    assert [g.token_ids for g in got] == [g.token_ids for g in answer(Lockstep, [[1, 2, 3, 4] * 6], 1)]
    assert any(s.copies and s.drafted for s in got[0].steps) and all(s.copies + s.drafted <= 6 for s in got[0].steps)
    together = answer(adaptive(prices(0.02), NGram(3, 1), SmallLM(CLOSE, TARGET)), [[1, 2, 3, 4] * 6] * 2, 2)
    assert [g.token_ids for g in together] == [got[0].token_ids] * 2 and not any(s.copies for g in together for s in g.steps)
    # The drafter's alpha, then the lookup's. Right with 0.5, 0.25, 0.125; of the second request there are two copies.
    chooser = Adaptive([SmallLM(CLOSE, TARGET), NGram(3, 1)], prices(), 4)
    copied = chooser._copied(np.array([[0.9, 0.5], [0.9, 0.5]]), np.array([[4, 4], [4, 2]]), 0.1)
    assert np.allclose(copied, [[0, 0.5, 0.25, 0.125, 0], [0, 0.5, 0.25, 0, 0]])


def share(generations, who):
    steps = [s for g in generations for s in g.steps]
    return sum(s.proposer == who for s in steps) / len(steps)


def test_choices_follow_prices_and_acceptance():
    some = prompts(4)
    one = lambda cost, *drafters: answer(adaptive(cost, *drafters), some, 1, 60)
    itself = SmallLM(TARGET, TARGET)
    assert share(one(prices(), itself), "draft") > 0.85                        # always right and cheap
    assert share(one(prices(draft=2.0), itself), "target") == 1                # right but dearer than what it saves
    assert share(one(prices(), SmallLM(OTHER, TARGET))[2:], "target") > 0.8    # cheap but wrong: two answers teach that, then tried now and then
    mean = lambda cost: statistics.mean(s.proposed for g in one(cost, SmallLM(CLOSE, TARGET)) for s in g.steps)
    assert mean(prices(draft=0.001, token=0.001)) > mean(prices(draft=0.1, token=0.1)) + 1     # dearer drafts, fewer of them


def test_a_batch_shares_the_price_of_a_draft():
    """A draft forward costs the same for one row and for eight: alone it does not pay, for the whole batch it does."""
    linear = lambda **c: {"kind": "linear", **c}
    cost = CostTable({"verify": linear(row=1.0), "draft": {"draft": linear(step=2.0)}, "prefill": linear()})
    some = [list(range(i, i + 8)) for i in range(8)]
    assert share(answer(adaptive(cost, SmallLM(TARGET, TARGET)), some, 1), "target") == 1
    assert share(answer(adaptive(cost, SmallLM(TARGET, TARGET)), some, 8), "draft") > 0.8


def test_hope_is_what_was_measured_elsewhere_but_never_more_than_start():
    """A wrong drafter that is cheap: tried where nothing is known of it, not where it is known to be wrong; and where it is said to be
    always right, no oftener than where nothing is known."""
    tried = lambda **accept: share(answer(adaptive(CostTable({**prices(0.1).table, "accept": accept}), SmallLM(OTHER, TARGET)), prompts(4), 1, 60), "draft")
    assert tried(draft=0.01) == 0 < tried() == tried(draft=1.0)


def test_reading_a_prompt_must_pay():
    """A drafter that is always right and cheap, but takes long to read: worth it for a long answer, not for a short one; and one
    that has read a prompt is not charged again."""
    table = {**prices().table, "read": {"draft": {"kind": "linear", "token": 0.5}}}
    run = lambda new: answer(adaptive(CostTable(table), SmallLM(TARGET, TARGET)), [list(range(50))], 1, new)
    assert share(run(20), "draft") == 0 and share(run(200), "draft") > 0.85
    drafter = Adaptive([SmallLM(TARGET, TARGET)], CostTable(table), 6)
    engine = Engine(TARGET, lambda e: Lockstep(e, drafter, 6), 1)
    r = Request(list(range(50)), 200)
    before = drafter._reading_seconds("draft", r)
    after = [drafter._reading_seconds("draft", r) for _ in engine.stream([r])]
    assert before == 25.0 and after[3] == 0.0            # the first rounds commit a token and draft
    lookups = CostTable({**prices().table, "read": {"ngram": {"kind": "linear", "token": 100.0}}})       # read at every round anyway, whoever drafts
    assert share(answer(adaptive(lookups, NGram(3, 1)), [[1, 2, 3] * 20], 1, 30), "ngram") == share(answer(adaptive(prices(), NGram(3, 1)), [[1, 2, 3] * 20], 1, 30), "ngram") > 0


def test_never_much_slower_than_the_best_single_and_never_beyond_the_bound():
    """Its recorded rounds, priced by the table it plans with: within 5 % of the best single drafter's best k at each of
    several prices, and not faster than the optimum that knows the future."""
    from minispec.studies.measure import traces_of
    some = prompts(6)
    texts = {f"t/{i}": (g.prompt_ids, g.token_ids) for i, g in enumerate(answer(Lockstep, some, 6, 100))}
    traced = traces_of({"ngram": NGram(3, 1), "draft": SmallLM(CLOSE, TARGET)}, TARGET, texts, 6)
    for draft in (0.02, 0.2):
        cost = prices(draft)
        cell = bounds.ladder(traced, cost, 1, 6)
        rungs = cell["total time"]
        got = answer(adaptive(cost, NGram(3, 1), SmallLM(CLOSE, TARGET)), some, 1, 100)
        plans = [recorded(g.steps) for g in got]
        speedup = cell["seconds"] / sum(time_of(p, t, cost) for p, t in zip(plans, traced))
        best = max(x["speedup"] for x in rungs["L2"].values())
        assert 0.95 * best < speedup <= rungs["L6"] + 1e-9


def test_nobody_is_believed_to_draft_more_than_a_window_holds():
    """At a price that makes ten drafts worth while, a drafter whose window holds two is asked for two."""
    def most(window):
        drafter = SmallLM(TARGET, TARGET)
        if window:
            drafter.gamma = window
        return max(s.proposed for g in answer(adaptive(prices(0.001, token=0.001), drafter, k=10), prompts(2), 1, 60) for s in g.steps)
    assert most(None) == 10 and most(2) == 2


def test_all_that_ship_and_have_a_price_may_draft(shipped):
    """PRISM beside EAGLE too: who of them is worth his price is for the choice to find out."""
    planner = methods.make_engine("adaptive", shipped[0], methods.settings(), 1).planner
    assert set(planner.drafter.drafters) == {"ngram", "draft", "prism", "eagle", "specdiff"}


def test_counts_fade():
    counts = Counts(0.5)
    counts.cells["x"] += 3, 4
    assert counts.rate("x", 0.7) == pytest.approx((3 + 4 * 0.7) / 8) and counts.rate("y", 0.7) == pytest.approx(0.7)
    counts.begin_round()
    assert counts.cells["x"].tolist() == [1.5, 2.0]
    for _ in range(60):
        counts.begin_round()
    assert counts.rate("x", 0.7) == pytest.approx(0.7)


def test_what_it_cannot_choose_from_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no drafter is ready .* price for: ngram, draft"):
        Adaptive([], prices())
    with pytest.raises(ValueError, match="there is no cost table .*none.json; this measures one: python bench.py profile"):
        methods.make_engine("adaptive", TARGET, methods.settings(cost=str(tmp_path / "none.json")), 1)
    assert "adaptive" not in methods.ready(methods.settings(cost=str(tmp_path / "none.json")))


def test_the_richest_choice_is_found():
    """Against all choices of all requests, one drafter at a time beside the lookups, where every draft costs the same to verify."""
    rng, ks = np.random.default_rng(0), np.arange(4)
    asked = np.array([False, True, True])
    for _ in range(30):
        tokens = np.cumsum(rng.uniform(0, 1, (2, 3, 1)) ** ks, -1)
        tokens[ks > rng.integers(0, 4, (2, 3, 1))] = -np.inf
        charge = rng.uniform(0, 0.2, (2, 3, 4)) * (ks > 0) * asked[:, None]
        step, price = 1.0 + rng.uniform(0, 0.5) * ks, rng.uniform(0, 0.6, (3, 1)) * ks * asked[:, None]

        def speed(picks):
            deepest = [max([k for j, k in picks if j == m], default=0) for m in range(3)]
            seconds = np.interp(sum(k for _, k in picks) / 2, ks, step) + sum(price[m, k] for m, k in enumerate(deepest))
            return sum(tokens[i, j, k] for i, (j, k) in enumerate(picks)) / (seconds + sum(charge[i, j, k] for i, (j, k) in enumerate(picks)))

        everything = itertools.product(itertools.product(range(3), range(4)), repeat=2)
        best = max(speed(picks) for picks in everything if len({j for j, k in picks if asked[j] and k}) < 2)
        assert speed(richest(tokens, charge, step, price, asked)) == pytest.approx(best)
        [(j, k)] = richest(tokens[:1], charge[:1], step, price, asked)                            # one request
        quotients = tokens[0] / (step + price + np.where(ks > 0, charge[0], 0))
        assert quotients[j, k] == pytest.approx(quotients.max())
        alone = richest(tokens[:, :1], charge[:, :1], step, price[:1], asked[:1])                 # nobody to ask
        assert all(j == 0 for j, _ in alone) and speed(alone) >= 2.0 - 1e-9
