"""Losslessness of the whole loop, on toy models: greedy and sampled output equals autoregressive output token
by token, whatever else is in the batch; rejection sampling has the target's distribution."""
import contextlib
import functools
import itertools
import os
from dataclasses import replace

import pytest
import torch
from conftest import Arbitrary, chi_square, dense_logits, prompts, toy_model

from minispec import specgen
from minispec.core import verify
from minispec.core.drafters import Drafter, NGram, SmallLM
from minispec.core.engine import Engine, SyncScheduler
from minispec.core.requests import Request, Segment
from minispec.specgen import SpecGen
from minispec.core.verify import RULES, Sampling, warp
from minispec.core.draft_head import DraftHead
from minispec.tools.answers import summary

TARGET = toy_model(seed=0)
OTHER = toy_model(seed=1, n_layer=1)


def copying(engine, drafter, k, max_n=3):
    """A drafter next to which copies of any length of match are verified."""
    scheduler = SyncScheduler(engine, drafter, k, lookup=999)
    scheduler.ngram = NGram(max_n, 1)
    return scheduler


def sparse(engine, **settings):
    return SpecGen(engine, sparsity=0.2, min_budget=4, **settings)


# {name: (engine, model, drafting model) -> scheduler}
SCHEDULERS = {
    "ar": lambda e, model, other: SyncScheduler(e),
    "ngram": lambda e, model, other: SyncScheduler(e, NGram(3, 1), 5),
    "draft": lambda e, model, other: SyncScheduler(e, SmallLM(other, model), 4),
    "draft, copies": lambda e, model, other: copying(e, SmallLM(other, model), 4),
    "specgen": lambda e, model, other: sparse(e, k=4),
}
METHODS = list(SCHEDULERS)
SCHEDULERS["delayed"] = lambda e, model, other: sparse(e, k=4, delayed=True)


def make(name, batch=4, model=TARGET, other=OTHER, **kw):
    return Engine(model, lambda e: SCHEDULERS[name](e, model, other), batch, prefill_chunk=16, **kw)


def ask(prompt_list, max_new=30, sampling=Sampling(), stop=()):
    return [Request(p, max_new, replace(sampling, seed=i), stop) for i, p in enumerate(prompt_list)]


def run(name, prompt_list, batch=4, max_new=30, sampling=Sampling(), stop=(), **kw):
    engine = make(name, batch, **kw)
    return engine.generate(ask(prompt_list, max_new, sampling, stop)), engine


def texts(name, n=8, *args, **kw):
    """Tokens of the answers to prompts(n)."""
    return [g.token_ids for g in run(name, prompts(n), *args, **kw)[0]]


@functools.cache
def plain(n, max_new=30, sampling=Sampling()):
    return texts("ar", n, max_new=max_new, sampling=sampling)


def test_autoregressive_equals_dense_forwards():
    generations, engine = run("ar", prompts())
    for prompt, g in zip(prompts(), generations):
        ids = list(prompt)
        for _ in range(30):
            ids.append(dense_logits(TARGET, ids)[-1].argmax().item())
        assert g.token_ids == ids[len(prompt):]
    assert max(len(set(g.token_ids)) for g in generations) > 5    # texts that do not repeat one token
    assert engine.cache.used == 0


@pytest.mark.parametrize("name", METHODS[1:])
def test_greedy_is_identical_to_autoregressive(name):
    got, engine = run(name, prompts(8), batch=3)
    assert [g.token_ids for g in got] == plain(8)
    assert engine.cache.used == 0
    assert not engine.active
    assert (name == "draft, copies") == any(s.lookup and s.drafted for g in got for s in g.rounds)


def test_greedy_control_a_drafter_believed_blindly_is_caught(monkeypatch):
    def believe(draft, parents, best):
        return list(range(1, len(draft) + 1)), best[len(draft)]

    monkeypatch.setattr(verify, "greedy_tree", believe)
    assert texts("draft") != plain(8)


SAMPLED = [Sampling(0.65), Sampling(1.0), Sampling(1.0, 0, 0.9), Sampling(0.65, 50, 0.9)]
AT_1 = Sampling(1.0)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
def test_a_seed_is_a_text(name, sampling):
    """Whatever the method, the batch and the neighbours: token by token that of plain decoding."""
    for batch in (1, 8, 17):
        n = 4 if batch == 1 else 17
        got, engine = run(name, prompts(n), batch, sampling=sampling)
        assert [g.token_ids for g in got] == plain(17, 30, sampling)[:n]
        assert engine.cache.used == 0
    assert plain(17, 30, sampling) != plain(17, 30, replace(sampling, temperature=1.5))
    steps = [s for g in got for s in g.rounds]
    assert name in ("ar", "ngram") or sum(s.accepted for s in steps) > 0.2 * len(steps)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "rejection"])
@pytest.mark.parametrize("name", ["draft", "draft, copies", "specgen"])
def test_a_seed_is_a_text_under_every_rule_that_walks(name, rule):
    assert texts(name, sampling=Sampling(1.0, rule=rule)) == plain(8, 30, AT_1)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_seed_is_a_text_on_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert texts("draft", 4, sampling=AT_1) == plain(4, 30, AT_1)
    finally:
        torch.set_num_threads(before)


def test_rejection_writes_another_text_and_copies_alone_do_not():
    sampling = Sampling(1.0, rule="rejection")
    assert texts("draft", sampling=sampling) != plain(8, 30, AT_1)
    assert texts("ngram", sampling=sampling) == plain(8, 30, sampling) == plain(8, 30, AT_1)


def test_control_noise_that_depends_on_the_row_is_caught(monkeypatch):
    """Plain decoding and a round of drafts have the same token in different rows."""
    def of_row(logits, sampling, streams, positions, real=verify.scores):
        return real(logits, sampling, streams, range(len(positions)))

    monkeypatch.setattr(verify, "scores", of_row)
    assert texts("draft", sampling=AT_1) != texts("ar", sampling=AT_1)


@pytest.mark.parametrize("name", ["ar", "draft", "specgen"])
@pytest.mark.parametrize("policy", ["preempt", "offload"])
def test_a_seed_is_a_text_for_requests_that_must_leave_the_cache(name, policy):
    got, engine = run(name, prompts(8), 8, sampling=AT_1, cache_tokens=240, admission=policy)
    assert [g.token_ids for g in got] == plain(8, 30, AT_1)
    assert engine.admission.recomputed or engine.cache.offloaded


@pytest.mark.parametrize("name", METHODS)
def test_end_of_text_inside_accepted_drafts(name):
    """Any token may be the stop token: output is the autoregressive one cut after its first occurrence."""
    full = plain(4)
    for stop in {full[0][0], full[1][7], full[2][7], full[3][23]}:
        for g, ids in zip(run(name, prompts(4), stop=[stop])[0], full):
            cut = ids[:ids.index(stop) + 1] if stop in ids else ids
            assert g.token_ids == cut
            assert g.finish == ("stop" if stop in ids else "length")
            assert len(g.who) == len(g.token_ids)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("limit", [1, 2, 3, 6])
def test_length_limit_is_exact_and_context_may_be_full(name, limit):
    room = TARGET.config.block_size - limit
    got, _ = run(name, prompts(4) + [[1] * room], max_new=limit)
    assert [len(g.token_ids) for g in got] == [limit] * 5
    with pytest.raises(ValueError, match="exceed the context of 512"):
        run(name, [[1] * (room + 1)], max_new=limit)


@pytest.mark.parametrize("name", METHODS)
def test_record_adds_up(name):
    for g in run(name, prompts(8))[0]:
        # The prompt gives the first token.
        assert sum(s.committed for s in g.rounds) in (len(g.token_ids), len(g.token_ids) - 1)
        assert sum(s.accepted for s in g.rounds) == g.who.count("draft")
        for s in g.rounds:
            assert 0 <= s.accepted <= s.proposed
            assert s.committed in (s.accepted, s.accepted + 1)
            assert name != "ar" or s.proposed == 0


def test_small_pool_serves_all_requests_in_turn():
    got, engine = run("specgen", prompts(10), batch=8, cache_tokens=240)
    assert engine.cache.n_slots == 240
    assert [g.token_ids for g in got] == plain(10)
    with pytest.raises(ValueError, match="cannot hold a request"):
        run("ar", [[1] * 140], cache_tokens=160)


def test_tokens_are_streamed_as_they_are_committed():
    requests = ask(prompts(3))
    seen = {r: [] for r in requests}
    for request, tokens in make("specgen", 2).stream(requests):
        seen[request] += tokens
        assert request.generation.token_ids == seen[request]
    assert all(len(tokens) == 30 for tokens in seen.values())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("sampling", [Sampling(), AT_1], ids=str)
def test_a_cancelled_request_stops_at_once_and_the_others_go_on(name, sampling):
    want = plain(4, 30, sampling)
    engine = make(name)
    requests = ask(prompts(4), 30, sampling)
    got = requests[1].generation
    cut = None
    for _ in engine.stream(requests):
        if cut is None and len(got.token_ids) > 5:
            requests[1].cancel()
            cut = len(got.token_ids)
    assert got.finish == "cancelled"
    assert got.token_ids == want[1][:cut]
    assert all(requests[i].generation.token_ids == want[i] for i in (0, 2, 3))
    assert engine.cache.used == 0


@pytest.mark.parametrize("name, way", [*((name, "break") for name in SCHEDULERS), ("delayed", "exception")])
def test_leaving_a_stream_in_the_middle_leaves_a_clean_engine(name, way):
    """The next request needs a larger cache; and a request that was left goes on where it was."""
    first = [*ask(prompts(1), 20, AT_1), *ask(prompts(3), 20)[1:]]
    second = Request(prompts(4)[3], 60)
    engine = make(name, 2)
    stream = engine.stream(first)
    with contextlib.suppress(KeyError):
        for _ in stream:
            if len(first[0].generation.token_ids) > 4:
                if way == "exception":
                    raise KeyError
                break
    stream.close()
    assert engine.cache.used == engine.cache.charged == 0
    assert not engine.active
    assert not engine.waiting
    assert engine.generate([second])[0].token_ids == plain(4, 60)[3]
    again = [g.token_ids for g in engine.generate(first)]
    assert again == [*plain(1, 20, AT_1), *plain(3, 20)[1:]]


def test_segments_of_a_left_stream_get_no_verdict():
    """It would be about keys that are gone."""
    waited = 0
    for n in range(1, 12):
        first = ask(prompts(2), 20)
        engine = make("delayed", 2)
        stream = engine.stream(first)
        for _ in zip(range(n), stream):
            pass
        waited += len(engine.pending)
        stream.close()
        before = [list(r.tokens) for r in first]
        engine.generate([Request([1, 2], 5)])
        assert [r.tokens for r in first] == before
    assert waited > 0


def test_one_stream_at_a_time():
    engine = make("ar")
    stream = engine.stream([Request([1, 2, 3], 40)])
    next(stream)
    with pytest.raises(ValueError, match="another stream of this engine is open"):
        engine.generate([Request([1, 2], 300)])
    assert len(list(stream)) == 39                       # the open one goes on undisturbed


@pytest.mark.parametrize("sampling", [Sampling(), AT_1, Sampling(1.0, rule="rejection")], ids=str)
def test_a_drafter_identical_to_the_target_is_always_accepted(sampling):
    got, _ = run("draft", prompts(6), sampling=sampling, other=TARGET)
    assert all(s.accepted == s.proposed for g in got for s in g.rounds)


class Planted(Drafter):
    """Drafts one tree: `right` of the target's next tokens, and beside the first a wrong chain of three."""
    width = 2

    def __init__(self, right):
        self.right = right

    def propose(self, requests, limits):
        text = plain(1)[0]
        done = len(requests[0].generation.token_ids)
        if done > 1:
            return super().propose(requests, limits)
        own = text[done:done + self.right]
        wrong = [(text[done] + 1) % 64, 0, 0]
        parents = [*range(self.right), 0, self.right + 1, self.right + 2]
        return [(own + wrong, None, parents)]


@pytest.mark.parametrize("right, who, proposed", [(1, "bonus", 1), (2, "bonus", 2), (0, "correction", 3)])
def test_a_bonus_follows_an_accepted_draft_without_a_child(right, who, proposed):
    """Also where another chain of the tree is deeper: no draft after the accepted one was rejected."""
    engine = Engine(TARGET, lambda e: SyncScheduler(e, Planted(right), 8), 1)
    g, = engine.generate(ask(prompts(1)))
    assert g.token_ids == plain(1)[0]
    assert g.who[:2 + right] == ["plain", *["draft"] * right, who]
    assert (g.rounds[0].proposed, g.rounds[0].accepted) == (proposed, right)
    assert summary([g], engine)["acceptance_by_position"] == [float(right > 0)] * proposed


TWO = [0, 1, 0, 3, 4]            # chains 1 2 and 3 4 5


@pytest.mark.parametrize("parents, path, proposed, who", [
    (TWO, [1, 2], 2, "bonus"), (TWO, [1], 2, "correction"), (TWO, [3], 3, "correction"),
    (None, [1, 2, 3, 4, 5], 5, "bonus"), (None, [1], 5, "correction")])
def test_of_several_chains_a_shorter_one_may_be_accepted_whole(parents, path, proposed, who):
    """A rejected longer chain before the accepted rows does not count after them."""
    r = Request([1], 30)
    segment = Segment(r, [1] * 6, 0, None, "verify", 6, [7, 8, 9, 10, 11], parents=parents)
    r.commit(segment, path, 5, "specdiff")
    assert r.generation.who[-1] == who
    assert r.generation.rounds[0].proposed == proposed


# -- chi-square over all outputs of three tokens, vocabulary 8: plain decoding and rejection -----------------

SCHEDULERS["sparse"] = lambda e, *_: Arbitrary(e, 3, 0.1, 1, select="random")


@torch.no_grad()
def small(seed):
    """Its attention is sharp, so that reading one position of eight is often wrong."""
    model = toy_model(vocab=8, seed=seed, gain=3.0, n_layer=1, n_head=2, n_kv_head=1)
    for linear in (model.blocks[0].qkv, model.blocks[0].out):
        linear.weight.mul_(3)
    return model


SMALL = small(3)
SMALL_OTHER = small(4)
FULL = bool(os.environ.get("MINISPEC_FULL"))
ROUNDS = 100_000 if FULL else 4_000
PROMPT = [1, 5, 2, 7, 3, 3, 6, 1]


def exact(sampling):
    """Probability of every output of three tokens, (512,)."""
    def after(*more):
        return warp(dense_logits(SMALL, [*PROMPT, *more])[-1], sampling)

    out = torch.zeros(8, 8, 8)
    for a, b in itertools.product(range(8), repeat=2):
        out[a, b] = after()[a] * after(a)[b] * after(a, b)
    return out.flatten()


def sampled(name, sampling, rounds=ROUNDS):
    """Counts (512,) of the first three tokens of answers, until `rounds` rounds were played; and the share of
    drafts accepted."""
    counts = torch.zeros(512, dtype=torch.long)
    steps = []
    seed = 0
    played = 0
    while played < rounds:
        requests = [Request(PROMPT, 4, replace(sampling, seed=seed + i)) for i in range(250)]
        for g in make(name, 250, SMALL, SMALL_OTHER).generate(requests):
            a, b, c = g.token_ids[:3]
            counts[a * 64 + b * 8 + c] += 1
            steps += g.rounds
            played += 1 if name == "ar" else len(g.rounds)
        seed += 250
    return counts, sum(s.accepted for s in steps) / max(sum(s.proposed for s in steps), 1)


def p_value(*args):
    counts, _ = sampled(*args)
    return chi_square(counts, exact(args[1]))


GRID = [Sampling(t, 0, top_p, rule="rejection") for t in (0.7, 1.0) for top_p in (1.0, 0.8)]
REJECTION = Sampling(1.0, rule="rejection")


@pytest.mark.parametrize("sampling", GRID, ids=str)
def test_plain_sampling_has_the_targets_distribution(sampling, monkeypatch):
    """And so have all methods, which write the same text. A correct engine fails with probability 1e-6. In
    the control two positions share their noise."""
    sampling = replace(sampling, rule="coupled")
    assert p_value("ar", sampling) > 1e-6

    def shared(streams, positions, *args, real=verify.noise, **kw):
        return real(streams, positions // 2, *args, **kw)

    monkeypatch.setattr(verify, "noise", shared)
    assert p_value("ar", sampling) < 1e-6


@pytest.mark.parametrize("name", ["draft", "draft, copies", "sparse"])
@pytest.mark.parametrize("sampling", GRID if FULL else GRID[1:2], ids=str)
def test_rejection_has_the_targets_distribution(name, sampling):
    """The whole engine; a correct one fails with probability 1e-6. MINISPEC_FULL=1 runs all settings, 100,000
    rounds each (test_verify.py always runs them on the rules alone)."""
    # Copies are rare here: as many rounds as their control needs.
    counts, rate = sampled(name, sampling, max(ROUNDS, 15_000 if name == "draft, copies" else 0))
    assert chi_square(counts, exact(sampling)) > 1e-6
    assert 0.05 < rate < 0.98                          # drafts are accepted and rejected


def argmax_drafts(self, streams, positions):
    """The classical mistake: the drafter takes its argmax, and the rule divides by its softmax."""
    return torch.ones(len(streams), self.size)


def likeliest(segments, logits, drafting):
    """The same mistake of SpecGen."""
    return [([], row.argmax().item()) for row in logits]


def as_drawn(chains, *args, real=verify.rejection):
    """Copies are judged as if they were drawn from q."""
    (own, q), *copied = chains
    return real([(own, q), *((rows[:len(own)], q) for rows, _ in copied)], *args)


def one_coin(segment, real=verify.coins):
    return real(segment)[:1].expand(len(segment.drafts) + 1)


@pytest.mark.parametrize("owner, attribute, mistake, name, rounds", [
    (DraftHead, "noise", argmax_drafts, "draft", 5_000),
    (specgen, "walk", likeliest, "sparse", 5_000),
    (verify, "rejection", as_drawn, "draft, copies", 15_000),
    (verify, "coins", one_coin, "draft", 5_000)])
def test_control_mistakes_are_rejected(owner, attribute, mistake, name, rounds, monkeypatch):
    monkeypatch.setattr(owner, attribute, mistake)
    assert p_value(name, REJECTION, rounds) < 1e-6
