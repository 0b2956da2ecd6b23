"""Losslessness of the whole loop, on toy models: greedy and sampled output equals autoregressive output token by token, that of
rejection sampling has the target's distribution, and no request notices its neighbours."""
import functools
import os
import random
from dataclasses import replace

import pytest
import torch
from conftest import Arbitrary, chi_square, dense_logits, toy_model

from minispec.core import verify
from minispec.core.drafters import Drafter, NGram, SmallLM
from minispec.core.engine import Engine, Lockstep
from minispec.core.requests import Request, Segment
from minispec.specgen import SpecGen
from minispec.core.verify import RULES, Sampling, walk, warp
from minispec.core.words import Words
from minispec.tools.answers import summary

TARGET, OTHER = toy_model(seed=0), toy_model(seed=1, n_layer=1)


def copying(engine, drafter, k, max_n=3):
    """A drafter next to which copies of any length of match are judged."""
    planner = Lockstep(engine, drafter, k, lookup=999)
    planner.ngram = NGram(max_n, 1)
    return planner


PLANNERS = {
    "ar": lambda model, other: Lockstep,
    "ngram": lambda model, other: lambda e: Lockstep(e, NGram(3, 1), 5),
    "draft": lambda model, other: lambda e: Lockstep(e, SmallLM(other, model), 4),
    "draft, copies": lambda model, other: lambda e: copying(e, SmallLM(other, model), 4),
    "specgen": lambda model, other: lambda e: SpecGen(e, k=4, sparsity=0.2, min_budget=4),
    "lookup": lambda model, other: lambda e: SpecGen(e, k=6, sparsity=0.2, min_budget=4, lookup=99),
}
METHODS = list(PLANNERS)
PLANNERS["delayed"] = lambda model, other: lambda e: SpecGen(e, k=4, sparsity=0.2, min_budget=4, delayed=True)


def prompts(n=8, vocab=64, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.choice([1, 2, 9, 16, 17, 40, 100]))] for _ in range(n)]


def run(name, prompt_list, batch=4, max_new=30, sampling=Sampling(), stop=(), model=TARGET, other=OTHER, **kw):
    engine = Engine(model, PLANNERS[name](model, other), batch, prefill_chunk=16, **kw)
    requests = [Request(p, max_new, replace(sampling, seed=i), stop) for i, p in enumerate(prompt_list)]
    return engine.generate(requests), engine


@functools.cache
def plain(n, max_new=30, sampling=Sampling()):
    """Tokens of the autoregressive loop for prompts(n)."""
    return [g.token_ids for g in run("ar", prompts(n), max_new=max_new, sampling=sampling)[0]]


def reference(prompt, n):
    """Greedy tokens from dense forwards alone."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(dense_logits(TARGET, ids)[-1].argmax().item())
    return ids[len(prompt):]


def test_autoregressive_equals_dense_forwards():
    some = prompts()
    generations, engine = run("ar", some)
    assert [g.token_ids for g in generations] == [reference(p, 30) for p in some]
    assert max(len(set(g.token_ids)) for g in generations) > 5    # the toy wanders, so equality means something
    assert engine.cache.used == 0


@pytest.mark.parametrize("name", ["ngram", "draft", "draft, copies", "specgen", "lookup"])
def test_greedy_is_identical_to_autoregressive(name):
    got, engine = run(name, prompts(8), batch=3)
    assert [g.token_ids for g in got] == plain(8)
    assert engine.cache.used == 0 and not engine.active
    assert (name == "draft, copies") == any(s.copies and s.drafted for g in got for s in g.steps)


def test_greedy_control_a_drafter_believed_blindly_is_caught(monkeypatch):
    import minispec.core.verify
    monkeypatch.setattr(minispec.core.verify, "greedy_tree", lambda draft, parents, best: (list(range(1, len(draft) + 1)), best[len(draft)]))
    assert [g.token_ids for g in run("draft", prompts(8))[0]] != plain(8)


SAMPLED = [Sampling(0.65), Sampling(1.0), Sampling(1.0, 0, 0.9), Sampling(0.65, 50, 0.9)]


@pytest.mark.parametrize("name", [*METHODS, "delayed"])
@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
def test_a_seed_is_a_text(name, sampling):
    """Whatever the method, the batch and the neighbours: token by token that of plain decoding."""
    for batch in (1, 8, 17):
        n = 4 if batch == 1 else 17
        got, engine = run(name, prompts(n), batch, sampling=sampling)
        assert [g.token_ids for g in got] == plain(17, 30, sampling)[:n] and engine.cache.used == 0
    assert plain(17, 30, sampling) != plain(17, 30, replace(sampling, temperature=1.5))
    steps = [s for g in got for s in g.steps]
    assert name in ("ar", "ngram") or sum(s.accepted for s in steps) > 0.2 * len(steps)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "rejection"])
@pytest.mark.parametrize("name", ["draft", "draft, copies", "lookup"])
def test_a_seed_is_a_text_under_every_rule_that_walks(name, rule):
    got, _ = run(name, prompts(8), sampling=Sampling(1.0, rule=rule))
    assert [g.token_ids for g in got] == plain(8, 30, Sampling(1.0))


def test_a_seed_is_a_text_on_any_number_of_threads():
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            got, _ = run("draft", prompts(4), sampling=Sampling(1.0))
        finally:
            torch.set_num_threads(before)
        assert [g.token_ids for g in got] == plain(4, 30, Sampling(1.0))


def test_rejection_writes_another_text_and_copies_alone_do_not():
    sampling = Sampling(1.0, rule="rejection")
    assert [g.token_ids for g in run("draft", prompts(8), sampling=sampling)[0]] != plain(8, 30, Sampling(1.0))
    assert [g.token_ids for g in run("ngram", prompts(8), sampling=sampling)[0]] == plain(8, 30, Sampling(1.0))
    assert plain(8, 30, sampling) == plain(8, 30, Sampling(1.0))


def test_control_noise_that_depends_on_the_row_is_caught(monkeypatch):
    """Plain decoding and a round of drafts have the same token in different rows."""
    real = verify.scores
    monkeypatch.setattr(verify, "scores", lambda logits, sampling, streams, positions: real(logits, sampling, streams, range(len(positions))))
    assert [g.token_ids for g in run("draft", prompts(8), sampling=Sampling(1.0))[0]] != plain.__wrapped__(8, 30, Sampling(1.0))


@pytest.mark.parametrize("name", ["ar", "draft", "specgen"])
@pytest.mark.parametrize("policy", ["preempt", "offload"])
def test_a_seed_is_a_text_for_who_must_leave_the_cache(name, policy):
    got, engine = run(name, prompts(8), 8, sampling=Sampling(1.0), cache_tokens=240, admission=policy)
    assert [g.token_ids for g in got] == plain(8, 30, Sampling(1.0))
    assert engine.admission.recomputed or engine.cache.offloaded


@pytest.mark.parametrize("name", METHODS)
def test_end_of_text_inside_an_accepted_run(name):
    """Any token may be the stop token: output is the autoregressive one cut after its first occurrence."""
    some = prompts(4)
    full = plain(4)
    for stop in {full[0][0], full[1][7], full[2][7], full[3][23]}:
        got, _ = run(name, some, stop=[stop])
        for g, ids in zip(got, full):
            cut = ids[:ids.index(stop) + 1] if stop in ids else ids
            assert g.token_ids == cut and g.finish == ("stop" if stop in ids else "length")
            assert len(g.who) == len(g.token_ids)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("limit", [1, 2, 3, 6])
def test_length_limit_is_exact_and_context_may_be_full(name, limit):
    some = prompts(4) + [[1] * (TARGET.config.block_size - limit)]
    got, _ = run(name, some, max_new=limit)
    assert [len(g.token_ids) for g in got] == [limit] * 5
    with pytest.raises(ValueError, match="exceed the context of 512"):
        run(name, [[1] * (TARGET.config.block_size - limit + 1)], max_new=limit)


@pytest.mark.parametrize("name", METHODS)
def test_record_adds_up(name):
    got, _ = run(name, prompts(8))
    for g in got:
        assert sum(s.committed for s in g.steps) in (len(g.token_ids), len(g.token_ids) - 1)    # a prefill gives the first token
        assert sum(s.accepted for s in g.steps) == g.who.count("draft")
        assert all(0 <= s.accepted <= s.proposed and s.committed in (s.accepted, s.accepted + 1) for s in g.steps)
    if name == "ar":
        assert all(s.proposed == 0 for g in got for s in g.steps)


def test_small_pool_serves_all_requests_in_turn():
    some = prompts(10)
    got, engine = run("specgen", some, batch=8, cache_tokens=240)
    assert engine.cache.n_slots == 240
    assert [g.token_ids for g in got] == plain(10)
    with pytest.raises(ValueError, match="cannot hold a request"):
        run("ar", [[1] * 140], cache_tokens=160)


def test_tokens_are_streamed_as_they_are_committed():
    some = prompts(3)
    engine = Engine(TARGET, PLANNERS["specgen"](TARGET, OTHER), 2)
    requests, seen = [Request(p, 30) for p in some], {}
    for request, tokens in engine.stream(requests):
        seen.setdefault(request, []).extend(tokens)
        assert request.generation.token_ids == seen[request]
    assert all(len(seen[r]) == 30 for r in requests)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cancelled_request_stops_at_once_and_the_others_go_on(name, temperature):
    some = prompts(4)
    want = plain(4, 30, Sampling(temperature))
    engine = Engine(TARGET, PLANNERS[name](TARGET, OTHER), 4)
    requests, n = [Request(p, 30, Sampling(temperature, seed=i)) for i, p in enumerate(some)], None
    for request, _ in engine.stream(requests):
        if n is None and len(requests[1].generation.token_ids) > 5:
            requests[1].cancel()
            n = len(requests[1].generation.token_ids)
    got = requests[1].generation
    assert got.finish == "cancelled" and got.token_ids == want[1][:len(got.token_ids)] and len(got.token_ids) == n
    assert all(requests[i].generation.token_ids == want[i] for i in (0, 2, 3)) and engine.cache.used == 0


@pytest.mark.parametrize("name, way", [*((name, "break") for name in METHODS), *(("delayed", way) for way in ("break", "close", "exception"))])
def test_leaving_a_stream_in_the_middle_leaves_a_clean_engine(name, way):
    """The next request is longer, so it needs a larger cache; and a request that was left goes on where it was."""
    first = [Request(p, 20, Sampling(float(i == 0), seed=i)) for i, p in enumerate(prompts(3))]    # one is sampled
    second = Request(prompts(4)[3], 60)
    engine = Engine(TARGET, PLANNERS[name](TARGET, OTHER), 2)
    stream = engine.stream(first)
    try:
        for _ in stream:
            if len(first[0].generation.token_ids) > 4:
                if way == "exception":
                    raise KeyError
                break
    except KeyError:
        pass
    stream.close()
    assert engine.cache.used == engine.cache.charged == 0 and not engine.active and not engine.waiting
    assert engine.generate([second])[0].token_ids == plain(4, 60)[3]
    assert [g.token_ids for g in engine.generate(first)] == [plain(1, 20, Sampling(1.0))[0], *plain(3, 20)[1:]]


def test_what_a_left_stream_did_not_judge_is_forgotten():
    """Its verdict would be one on keys that are gone."""
    waited = 0
    for n in range(1, 12):
        first, engine = [Request(p, 20) for p in prompts(2)], Engine(TARGET, PLANNERS["delayed"](TARGET, OTHER), 2)
        stream = engine.stream(first)
        for _ in zip(range(n), stream):
            pass
        waited += len(engine.unjudged)
        stream.close()
        before = [list(r.tokens) for r in first]
        engine.generate([Request([1, 2], 5)])
        assert [r.tokens for r in first] == before
    assert waited > 0


def test_one_stream_at_a_time():
    engine = Engine(TARGET, Lockstep, 2)
    stream = engine.stream([Request([1, 2, 3], 40)])
    next(stream)
    with pytest.raises(ValueError, match="another stream of this engine is open"):
        engine.generate([Request([1, 2], 300)])
    assert len(list(stream)) == 39                       # the open one goes on undisturbed


def test_a_drafter_identical_to_the_target_is_always_accepted():
    some = prompts(6)
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, rule="rejection")):
        got, _ = run("draft", some, sampling=sampling, other=TARGET)
        assert all(s.accepted == s.proposed for g in got for s in g.steps)


class Planted(Drafter):
    """Drafts one tree: `right` of the target's next tokens, and next to the first one a wrong chain of three."""
    width = 2

    def __init__(self, right):
        self.right = right

    def propose(self, requests, limits):
        text, done = plain(1)[0], len(requests[0].generation.token_ids)
        own, wrong = text[done:done + self.right], [(text[done] + 1) % 64, 0, 0]
        if done > 1:
            return super().propose(requests, limits)
        return [(own + wrong, None, [*range(self.right), 0, self.right + 1, self.right + 2])]


@pytest.mark.parametrize("right, who, proposed", [(1, "bonus", 1), (2, "bonus", 2), (0, "correction", 3)])
def test_a_bonus_follows_an_accepted_draft_without_a_child(right, who, proposed):
    """Also where another chain of the tree is deeper: it was not rejected behind the accepted draft."""
    engine = Engine(TARGET, lambda e: Lockstep(e, Planted(right), 8), 1)
    g, = engine.generate([Request(prompts(1)[0], 30)])
    assert g.token_ids == plain(1)[0] and g.who[:2 + right] == ["plain", *["draft"] * right, who]
    assert (g.steps[0].proposed, g.steps[0].accepted) == (proposed, right)
    assert summary([g], engine)["acceptance_by_position"] == [float(right > 0)] * proposed


def test_of_several_chains_a_shorter_one_may_be_accepted_whole():
    """K chains, and copies next to a chain: a rejected longer one before the accepted rows does not count behind them."""
    for parents, path, proposed, who in (([0, 1, 0, 3, 4], [1, 2], 2, "bonus"), ([0, 1, 0, 3, 4], [1], 2, "correction"),
                                         ([0, 1, 0, 3, 4], [3], 3, "correction"), (None, [1, 2, 3, 4, 5], 5, "bonus"), (None, [1], 5, "correction")):
        r = Request([1], 30)
        r.commit(Segment(r, [1] * 6, 0, None, "verify", 6, [7, 8, 9, 10, 11], parents=parents), path, 5, "specdiff")
        assert r.generation.who[-1] == who and r.generation.steps[0].proposed == proposed


# -- sampling: chi-square over all outputs of three tokens, vocabulary 8: plain decoding and rejection -------------------

PLANNERS["sparse"] = lambda model, other: lambda e: Arbitrary(e, k=3, sparsity=0.1, min_budget=1, select="random")
PLANNERS["sparse, lookup"] = lambda model, other: lambda e: Arbitrary(e, k=3, sparsity=0.1, min_budget=1, select="random", lookup=999)
SMALL, SMALL_OTHER = (toy_model(vocab=8, seed=s, gain=3.0, n_layer=1, n_head=2, n_kv_head=1) for s in (3, 4))
with torch.no_grad():                                # sharp attention that counts, so that reading one position of eight is often wrong
    for small in (SMALL, SMALL_OTHER):
        small.blocks[0].qkv.weight.mul_(3)
        small.blocks[0].out.weight.mul_(3)
FULL = bool(os.environ.get("MINISPEC_FULL"))
ROUNDS = 100_000 if FULL else 4_000
PROMPT = [1, 5, 2, 7, 3, 3, 6, 1]


def exact(sampling):
    """Probability of every output of three tokens, (512,)."""
    p1 = warp(dense_logits(SMALL, PROMPT)[-1], sampling)
    out = torch.zeros(8, 8, 8)
    for a in range(8):
        p2 = warp(dense_logits(SMALL, PROMPT + [a])[-1], sampling)
        for b in range(8):
            out[a, b] = p1[a] * p2[b] * warp(dense_logits(SMALL, PROMPT + [a, b])[-1], sampling)
    return out.flatten()


def sampled(name, sampling, rounds=ROUNDS):
    """Counts (512,) of the first three tokens of answers, until `rounds` rounds were played; and the share of drafts
    accepted."""
    counts, played, proposed, accepted, seed = torch.zeros(512, dtype=torch.long), 0, 0, 0, 0
    while played < rounds:
        requests = [Request(PROMPT, 4, replace(sampling, seed=seed + i)) for i in range(250)]
        for g in Engine(SMALL, PLANNERS[name](SMALL, SMALL_OTHER), 250).generate(requests):
            a, b, c = g.token_ids[:3]
            counts[a * 64 + b * 8 + c] += 1
            played += len(g.steps) if name != "ar" else 1
            proposed += sum(s.proposed for s in g.steps)
            accepted += sum(s.accepted for s in g.steps)
        seed += 250
    return counts, accepted / max(proposed, 1)


GRID = [Sampling(t, 0, top_p, rule="rejection") for t in (0.7, 1.0) for top_p in (1.0, 0.8)]
JUDGED = Sampling(1.0, rule="rejection")


@pytest.mark.parametrize("sampling", GRID, ids=lambda s: f"T{s.temperature}-p{s.top_p}")
def test_plain_sampling_has_the_targets_distribution(sampling, monkeypatch):
    """And so have all methods, which write the same. A correct engine fails with probability 1e-6. The control has the noise of one
    position at the next one, too."""
    counts, _ = sampled("ar", replace(sampling, rule="coupled"))
    assert chi_square(counts, exact(sampling)) > 1e-6
    real = verify.noise
    monkeypatch.setattr(verify, "noise", lambda streams, positions, size: real(streams, positions // 2, size))
    counts, _ = sampled("ar", replace(sampling, rule="coupled"))
    assert chi_square(counts, exact(sampling)) < 1e-6


@pytest.mark.parametrize("name", ["draft", "draft, copies", "sparse", "sparse, lookup"])
@pytest.mark.parametrize("sampling", GRID if FULL else GRID[1:2], ids=lambda s: f"T{s.temperature}-p{s.top_p}")
def test_rejection_has_the_targets_distribution(name, sampling):
    """The whole engine; a correct one fails with probability 1e-6. MINISPEC_FULL=1 runs all settings, 100,000 rounds each
    (test_verify.py always runs them on the rules alone)."""
    # Copies are rare here: as many rounds as their control needs.
    least = {"draft, copies": 15_000, "sparse, lookup": 10_000}
    counts, rate = sampled(name, sampling, max(ROUNDS, least.get(name, 0)))
    assert chi_square(counts, exact(sampling)) > 1e-6
    assert 0.05 < rate < 0.98                          # drafts are accepted and rejected


def test_control_drafts_by_argmax_judged_by_softmax_are_rejected(monkeypatch):
    """The classical mistake: the drafter takes its argmax, the rule divides by its softmax."""
    monkeypatch.setattr(Words, "noise", lambda self, streams, positions: torch.ones(len(streams), self.size))
    counts, _ = sampled("draft", JUDGED, 5_000)
    assert chi_square(counts, exact(JUDGED)) < 1e-6


def test_control_guesses_that_are_believed_are_rejected(monkeypatch):
    """A draft that was copied and not judged was not drawn from sparse attention's distribution."""
    def believe(segments, logits, drafting):
        return [(list(range(1, len(s.drafts) + 1)), token) for s, (_, token) in zip(segments, walk(segments, logits, drafting))]
    monkeypatch.setattr("minispec.specgen.walk", believe)
    counts, _ = sampled("sparse, lookup", JUDGED, 10_000)
    assert chi_square(counts, exact(JUDGED)) < 1e-6


def test_control_copies_judged_as_if_they_were_drawn_are_rejected(monkeypatch):
    def as_drawn(chains, *args, real=verify.rejection):
        (own, q), *copied = chains
        return real([(own, q), *((rows[:len(own)], q) for rows, _ in copied)], *args)
    monkeypatch.setattr(verify, "rejection", as_drawn)
    counts, _ = sampled("draft, copies", JUDGED, 15_000)
    assert chi_square(counts, exact(JUDGED)) < 1e-6


def test_control_one_coin_for_a_round_is_rejected(monkeypatch):
    real = verify.coins
    monkeypatch.setattr(verify, "coins", lambda segment: real(segment)[:1].expand(len(segment.drafts) + 1))
    counts, _ = sampled("draft", JUDGED, 5_000)
    assert chi_square(counts, exact(JUDGED)) < 1e-6
