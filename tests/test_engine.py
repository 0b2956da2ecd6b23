"""Losslessness of the whole loop, on toy models: greedy and sampled output equals autoregressive output token
by token, whatever else is in the batch; rejection sampling has the target's distribution."""

import contextlib
import copy
import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import Arbitrary, chi_square, dense_logits, ids_of, prompts, refused, steps_of, toy_model

from minispec import specgen
from minispec.core import draft_head, kv_cache, verify
from minispec.core.drafters import NGram, SmallLM
from minispec.core.engine import Engine
from minispec.core.requests import Request, Segment
from minispec.specgen import SpecGen
from minispec.core.verify import RULES, Sampling, warp
from minispec.core.draft_head import DraftHead
from minispec.core.scheduler import SyncScheduler
from minispec.prism import PrismDrafter
from minispec.specdiff import SpecDiffDrafter
from minispec.tools.answers import summary
import test_trained
from test_trained import CASES, FULL, RANDOM, REJECTED, TINY, case

TARGET = toy_model()
OTHER = toy_model(seed=1, n_layer=1)


def copying(engine, drafter):
    """A drafter next to which copies of any length of match are verified."""
    scheduler = SyncScheduler(engine, drafter, 4, lookup=512)
    scheduler.ngram = NGram(3, 1)
    return scheduler


# {name: (engine, model, drafting model) -> scheduler}
SCHEDULERS = {
    "ar": lambda e, model, other: SyncScheduler(e),
    "ngram": lambda e, model, other: SyncScheduler(e, NGram(3, 1), 5),
    "draft": lambda e, model, other: SyncScheduler(e, SmallLM(other, model), 4),
    "draft, copies": lambda e, model, other: copying(e, SmallLM(other, model)),
    "specgen": lambda e, *_: SpecGen(e, 4, 0.2, 4),
}
METHODS = list(SCHEDULERS)
SCHEDULERS["delayed"] = lambda e, *_: SpecGen(e, 4, 0.2, 4, delayed=True)
TRAINED = {name: lambda e, *_, name=name: case(name)(e) for name in (*CASES, *RANDOM, *REJECTED)}


def target_of(name):
    """The target of a trained drafter has few tokens, so that even random drafts are often right."""
    return test_trained.TARGET if name in (*CASES, *RANDOM) else TARGET


def some(name, n=8):
    return prompts(n, vocab=target_of(name).config.vocab_size)


def make(name, batch=4, model=None, other=OTHER, chunk=16, **kw):
    model = model or target_of(name)
    scheduler = (SCHEDULERS | TRAINED)[name]
    return Engine(model, lambda e: scheduler(e, model, other), batch, prefill_chunk=chunk, **kw)


def ask(prompt_list, max_new=30, sampling=Sampling()):
    return [Request(p, max_new, replace(sampling, seed=i)) for i, p in enumerate(prompt_list)]


def run(name, prompt_list, batch=4, max_new=30, sampling=Sampling(), **kw):
    engine = make(name, batch, **kw)
    return engine.generate(ask(prompt_list, max_new, sampling)), engine


def texts(name, n=8, *args, **kw):
    """Tokens of the answers to some(name, n)."""
    return ids_of(run(name, some(name, n), *args, **kw)[0])


@functools.cache
def answers_of(target, max_new, sampling):
    asked = ask(prompts(12, vocab=target.config.vocab_size), max_new, sampling)
    return ids_of(Engine(target, SyncScheduler, 12).generate(asked))


def plain(name, n, max_new=30, sampling=Sampling()):
    """Tokens of the autoregressive loop for some(name, n)."""
    return answers_of(target_of(name), max_new, sampling)[:n]


def test_autoregressive_equals_dense_forwards():
    generations, _ = run("ar", prompts())
    for prompt, g in zip(prompts(), generations):
        best = dense_logits(TARGET, prompt + g.token_ids)[len(prompt) - 1 : -1].argmax(-1)
        assert g.token_ids == best.tolist()
    assert max(len(set(g.token_ids)) for g in generations) > 5  # texts that do not repeat one token


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("draft", lambda draft, parents, best: (list(range(1, len(draft) + 1)), best[len(draft)])),
        ("prism tree", lambda draft, parents, best: ([1], best[1]) if draft else ([], best[0])),
    ],
)
def test_greedy_control_a_drafter_believed_blindly_is_caught(name, wrong, monkeypatch):
    monkeypatch.setattr(verify, "verify_tree", wrong)
    assert texts(name) != plain(name, 8)


AT_1 = Sampling(1.0)
SETTINGS = [Sampling(), Sampling(0.65, 50, 0.9), Sampling(1.0, 0, 0.9)]
SETTINGS += [Sampling(1.0, rule=rule) for rule in RULES]
WALKED = "ar", "ngram", "prism tree", "prism early tree"  # their drafts are no draws: the walk verifies them


@pytest.mark.parametrize("name", [*SCHEDULERS, *CASES, *RANDOM])
def test_a_seed_is_a_text(name, monkeypatch):
    """Greedy or sampled, whatever the method, the batch, the size of a block and the neighbours, which have
    other settings: token by token that of plain decoding. Rejection alone has other texts."""
    rounds = {sampling: [] for sampling in SETTINGS}
    # Prompts of one token and of 40; the drafters learned the answers to all but the last by heart.
    numbers = 5, 6, 7, 8, 10
    for batch, which, block, settings in ((1, numbers[:1], 4, SETTINGS[:2]), (20, numbers, 16, SETTINGS)):
        monkeypatch.setattr(kv_cache, "BLOCK", block)
        engine = make(name, batch)
        asked = [[ask(some(name, 12), sampling=sampling)[i] for i in which] for sampling in settings]
        got = iter(engine.generate(sum(asked, [])))
        for sampling in settings:
            own = [*itertools.islice(got, len(which))]
            want = plain(name, 12, 30, replace(sampling, rule="coupled"))
            assert (ids_of(own) == [want[i] for i in which]) == (sampling.rule != "rejection" or name in WALKED)
            rounds[sampling] += steps_of(own)
        assert engine.cache.used == 0 and not engine.active
        # Drafters keep nothing of a request that has left.
        drafter = engine.scheduler.drafter
        for d in (drafter, *drafter.drafters.values(), getattr(engine.scheduler, "ngram", drafter)):
            assert not (getattr(d, "draft_states", 0) or getattr(d, "index", 0))
            assert not hasattr(d, "cache") or not d.cache.used
    if name == "ar":
        return
    # Drafts are accepted. Greedy answers of a random model are neither guessed by another one nor copies.
    _, made, greedy = CASES.get(name, (0, {}, 0 if name in RANDOM else -1))
    warm = -1 if name == "ngram" else 0 if name in RANDOM else 0.1
    for sampling, least in zip(SETTINGS, (greedy, warm, warm)):
        assert sum(s.accepted - least for s in rounds[sampling]) > 0
    steps = rounds[Sampling()]
    assert any(s.accepted < s.proposed for s in steps)
    assert (name == "draft, copies") == any(s.lookup and s.drafted for s in steps) or name == "adaptive"
    if "stop" in made:  # ends where the drafter is unsure
        assert len({s.proposed for s in steps if 0 < s.position < 25}) > 1


def test_a_seed_is_a_text_on_two_threads():
    """All other tests have one (conftest.py)."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert texts("draft", 4, sampling=AT_1) == plain("draft", 4, 30, AT_1)
    finally:
        torch.set_num_threads(before)


def test_control_noise_that_depends_on_the_row_is_caught(monkeypatch):
    """Plain decoding and a round of drafts have the same token in different rows."""

    def of_row(logits, sampling, streams, positions, real=verify.scores):
        return real(logits, sampling, streams, range(len(positions)))

    monkeypatch.setattr(verify, "scores", of_row)
    assert texts("draft", sampling=AT_1) != texts("ar", sampling=AT_1)


@pytest.mark.parametrize("name", ["draft", "specgen", "prism tree", "three chains"])
@pytest.mark.parametrize("policy", ["preempt", "offload"])
def test_a_seed_is_a_text_for_requests_that_must_leave_the_cache(name, policy):
    got, engine = run(name, some(name), 8, sampling=AT_1, cache_tokens=220, admission=policy)
    assert ids_of(got) == plain(name, 8, 30, AT_1)
    assert engine.admission.dropped or engine.cache.offloaded


ENDING = [*METHODS, "prism chain", "prism tree", "one chain", "three chains", "random specdiff"]


@pytest.mark.parametrize("name", ENDING)
def test_end_of_text_inside_accepted_drafts(name):
    """Any token may be the stop token: output is the autoregressive one cut after its first occurrence, and
    its record adds up."""
    full = plain(name, 4)
    stops = {full[0][0], full[1][7], full[2][7], full[3][23]}
    cases = [(prompt, ids, stop) for prompt, ids in zip(some(name, 4), full) for stop in stops]
    asked = [Request(prompt, 30, Sampling(), [stop]) for prompt, _, stop in cases]
    for g, (_, ids, stop) in zip(make(name, 16).generate(asked), cases):
        assert g.token_ids == ids[: ids.index(stop) + 1 if stop in ids else None]
        assert g.finish == ("stop" if stop in ids else "length")
        # The prompt gives the first token.
        assert sum(s.committed for s in g.rounds) in (len(g.who), len(g.who) - 1)
        assert len(g.who) == len(g.token_ids)
        assert sum(s.accepted for s in g.rounds) == g.who.count("draft")
        for s in g.rounds:
            assert s.accepted <= s.proposed * (name != "ar") and s.committed - s.accepted in (0, 1)


@pytest.mark.parametrize("name", ENDING)
def test_length_limit_is_exact_and_context_may_be_full(name, usual_blocks):
    for limit in (1, 2, 6):  # down to fewer drafts than asked for
        room = TARGET.config.block_size - limit
        got = ids_of(run(name, some(name, 4) + [[1] * room], 5, limit, chunk=512)[0])
        assert got[:4] == [ids[:limit] for ids in plain(name, 4)] and len(got[4]) == limit
        with refused("exceed the context of 512"):
            run(name, [[1] * (room + 1)], max_new=limit)
    # Neighbours draft on when it has no room left.
    full = [[1] * (TARGET.config.block_size - 3)]
    want = plain(name, 4) + ids_of(make(name, 1).generate(ask(full, 3)))
    assert ids_of(make(name, 5, chunk=512).generate(ask(some(name, 4)) + ask(full, 3))) == want


@pytest.mark.parametrize("name", METHODS)
def test_a_cancelled_request_stops_at_once_and_the_others_go_on(name):
    """Tokens are streamed as they are committed."""
    engine = make(name)
    requests = ask(prompts(4), 30, AT_1)
    seen = {r: [] for r in requests}
    for request, tokens in engine.stream(requests):
        seen[request] += tokens
        assert request.generation.token_ids == seen[request]
        if len(seen[requests[1]]) > 5:
            requests[1].cancel()
            cut = len(seen[requests[1]])
    want = plain(name, 4, 30, AT_1)
    assert requests[1].generation.finish == "cancelled" and cut < 20
    assert list(seen.values()) == [want[0], want[1][:cut], *want[2:]]
    assert engine.cache.used == 0


@pytest.mark.parametrize("name", SCHEDULERS)
def test_leaving_a_stream_in_the_middle_leaves_a_clean_engine(name):
    """The next request needs a larger cache; and a request that was left goes on where it was."""
    first = [*ask(prompts(1), 20, AT_1), *ask(prompts(3), 20)[1:]]
    second = Request(prompts(4)[3], 60)
    engine = make(name, 2)
    for tokens in range(3, 8):
        with contextlib.closing(engine.stream(first)) as stream:
            for _ in stream:
                if len(first[0].generation.token_ids) > tokens:
                    break
        assert engine.cache.used == engine.cache.charged == 0
        assert not engine.active and not engine.waiting
    assert engine.generate([second])[0].token_ids == plain(name, 4, 60)[3]
    assert ids_of(engine.generate(first)) == [*plain(name, 1, 20, AT_1), *plain(name, 3, 20)[1:]]


def test_segments_of_a_left_stream_get_no_verdict():
    """It would be about keys that are gone."""
    waited = 0
    for n in range(1, 12):
        engine = make("delayed", 2)
        stream = engine.stream(ask(prompts(2), 20))
        for _ in zip(range(n), stream):
            pass
        waited += len(engine.pending)
        stream.close()
        assert not engine.pending
    assert waited > 0


@pytest.mark.parametrize("size", ["batch_size", "cache_tokens", "prefill_chunk"])
def test_sizes_below_one_are_refused(size):
    """With a batch or a chunk of 0 no request would ever end."""
    with refused(f"{size} must be 1 or more, got 0"):
        Engine(TARGET, SyncScheduler, **{size: 0})


def test_one_stream_at_a_time_and_a_request_in_one_only():
    engine, other = make("ar", 1), make("ar")
    request, waiting = Request([1, 2, 3], 40), Request([4, 5], 9)
    stream = engine.stream([request, waiting])
    next(stream)
    with refused("another stream of this engine is open"):
        engine.generate([Request([1, 2], 300)])
    for again in ([request], [waiting], [Request([1, 2])] * 2):
        with refused("a request can be in one open stream only, and there once"):
            other.generate(again)
    assert len([*zip(range(20), stream)]) == 20  # the open one goes on undisturbed
    stream.close()
    assert [len(g.token_ids) for g in other.generate([request, waiting])] == [40, 9]


@pytest.mark.parametrize("sampling", [Sampling(), AT_1, Sampling(1.0, rule="rejection")], ids=str)
def test_a_drafter_identical_to_the_target_is_always_accepted(sampling):
    got, _ = run("draft", prompts(6), sampling=sampling, other=TARGET)
    assert all(s.accepted == s.proposed for s in steps_of(got))


TWO = [0, 1, 0, 3, 4]  # chains 1 2 and 3 4 5


@pytest.mark.parametrize(
    "parents, path, proposed, who",
    [
        (TWO, [1, 2], 2, "bonus"),
        (TWO, [1], 2, "correction"),
        (TWO, [3], 3, "correction"),
        (TWO, [], 3, "correction"),
        (None, [1, 2, 3, 4, 5], 5, "bonus"),
        (None, [1], 5, "correction"),
    ],
)
def test_of_several_chains_a_shorter_one_may_be_accepted_whole(parents, path, proposed, who):
    """A rejected longer chain before the accepted rows does not count after them."""
    r = Request([1], 30)
    segment = Segment(r, [1] * 6, 0, None, "verify", 6, [7, 8, 9, 10, 11], parents=parents)
    r.commit(segment, path, 5)
    assert (r.generation.who[-1], r.generation.rounds[0].proposed) == (who, proposed)
    r.commit(Segment(r, [5], 6, None, "verify", 1), [], 5)  # a round without drafts
    engine = SimpleNamespace(seconds={"prefill": 0}, iterations=[])
    accepted = summary([r.generation], engine)["acceptance_by_position"]
    assert accepted == [i < len(path) for i in range(proposed)]


# -- chi-square over all outputs of three tokens, vocabulary 8: plain decoding and rejection -----------------

SCHEDULERS["sparse"] = lambda e, *_: Arbitrary(e, 3, 0.1, 3, select="random")


@torch.no_grad()
def small(seed):
    """Its attention is sharp, so that reading one position of eight is often wrong."""
    model = toy_model(vocab=8, seed=seed, gain=3.0, n_layer=1, n_head=2, n_kv_head=1)
    for linear in (model.blocks[0].qkv, model.blocks[0].out):
        linear.weight.mul_(3)
    return model


SMALL = small(3)
SMALL_OTHER = small(4)
ROUNDS = 100_000 if FULL else 1_500
PROMPT = [1, 5, 2, 7, 3, 3, 6, 1]


@functools.cache
def exact(model, sampling):
    """Probability of every output of three tokens, (V^3,)."""
    v = model.config.vocab_size
    after = lambda *more: warp(dense_logits(model, [*asked(model), *more])[-1], sampling)
    last = [torch.stack([after(a, b) for b in range(v)]) for a in range(v)]
    return torch.stack([after()[a] * after(a)[:, None] * last[a] for a in range(v)]).flatten()


def asked(model):
    return [token % model.config.vocab_size for token in PROMPT]


def sampled(name, sampling, rounds=ROUNDS, control=False):
    """p-value of the first three tokens of answers, until `rounds` rounds were played; and the share of
    drafts accepted. A control ends once its mistake is seen."""
    if name == "draft, copies":  # copies are rare here
        rounds *= 3
    model = TINY if name in REJECTED else SMALL
    v = model.config.vocab_size
    counts = torch.zeros(v**3, dtype=torch.long)
    seed = played = accepted = proposed = 0
    while played < rounds:
        # Room for all drafts of a round; only the first three tokens are of interest.
        requests = [Request(asked(model), 20, replace(sampling, seed=seed + i)) for i in range(250)]
        # A text is one block: small ones, which the tests of seeds have, take four times as long.
        with mock.patch.object(kv_cache, "BLOCK", 32):
            for r, _ in make(name, 250, model, SMALL_OTHER).stream(requests):
                if len(r.generation.token_ids) >= 3:
                    r.cancel()
        for g in (r.generation for r in requests):
            a, b, c = g.token_ids[:3]
            counts[(a * v + b) * v + c] += 1
            accepted += sum(s.accepted for s in g.rounds)
            proposed += sum(s.proposed for s in g.rounds)
            played += 1 if name == "ar" else len(g.rounds)
        seed += 250
        if control and chi_square(counts, exact(model, sampling)) < 1e-6:
            break
    return chi_square(counts, exact(model, sampling)), accepted / max(proposed, 1)


GRID = [Sampling(t, 0, top_p, rule="rejection") for t in (0.7, 1.0) for top_p in (1.0, 0.8)]
REJECTION = Sampling(1.0, rule="rejection")
AT = Sampling(0.9, 0, 0.95, rule="rejection")
JUDGED = [*itertools.product(("draft", "draft, copies", "sparse"), GRID if FULL else GRID[1:2])]
JUDGED += [(name, AT) for name in REJECTED]


@pytest.mark.parametrize("sampling", GRID if FULL else GRID[1:3], ids=str)
def test_plain_sampling_has_the_targets_distribution(sampling, monkeypatch):
    """And so have all methods, which write the same text. A correct engine fails with probability 1e-6. In
    the control two positions share their noise."""
    sampling = replace(sampling, rule="coupled")
    assert sampled("ar", sampling)[0] > 1e-6

    def shared(streams, positions, *args, real=verify.noise, **kw):
        return real(streams, positions // 2, *args, **kw)

    monkeypatch.setattr(verify, "noise", shared)
    assert sampled("ar", sampling, control=True)[0] < 1e-6


@pytest.mark.parametrize("name, sampling", JUDGED, ids=str)
def test_rejection_has_the_targets_distribution(name, sampling):
    """The whole engine; a correct one fails with probability 1e-6. MINISPEC_FULL=1 runs all settings, 100,000
    rounds each."""
    value, rate = sampled(name, sampling)
    assert value > 1e-6
    assert 0.02 < rate < 0.98  # drafts are accepted and rejected


class Remembering(SpecGen):
    """Rejected drafts select what the next round reads, so its q depends on them; here it is theirs. A round's
    first draft is nearly always rejected, and the second stood where the next round begins."""

    def verified(self, segment, accepted):
        r = segment.request
        second = r.state.drafts[accepted + 1 : accepted + 2] if r.state else []
        super().verified(segment, accepted)
        r.state.likely = [token for token in second if token % 2] if second else [0]

    def take_drafts(self, segments, logits):
        for s, own in zip(segments, logits):
            own[:] = 0.0
            if not s.request.state.drafts:
                own[s.request.state.likely] = 5.0
        super().take_drafts(segments, logits)


def test_drafts_that_depend_on_rejected_ones_change_no_distribution(monkeypatch):
    monkeypatch.setattr(kv_cache, "BLOCK", 32)
    requests = [Request(PROMPT, 20, replace(REJECTION, seed=i)) for i in range(2_000)]
    engine = Engine(SMALL, lambda e: Remembering(e, 2, schedule="lockstep"), 1_000)
    for i in (0, 1_000):  # all begin in the same phase
        for r, _ in engine.stream(requests[i : i + 1_000]):
            if len(r.generation.token_ids) >= 3:
                r.cancel()
    odd = torch.tensor([r.generation.token_ids[2] % 2 for r in requests])
    want = exact(SMALL, REJECTION).view(64, 4, 2).sum((0, 1))
    assert chi_square(odd.bincount(), want) > 1e-6


@pytest.mark.parametrize("name", ["draft, copies", "tiny chain", "specgen"])
def test_drafts_that_rejection_verifies_have_new_noise_in_every_round(name, monkeypatch):
    """The drafts of a rejected position decide how many copies are verified, so where the next round begins,
    and what SpecGen selects. If that round drew with the same noise, or tossed the same coins, it would
    depend on them: a bias of a few per cent."""
    target = TINY if name in REJECTED else SMALL
    seen = []

    def noted(real, streams, positions, *args, **kw):
        seen.extend(np.broadcast(streams, positions))
        return real(streams, positions, *args, **kw)

    for module, draw in ((verify, "noise"), (draft_head, "noise"), (verify, "uniform")):
        monkeypatch.setattr(module, draw, functools.partial(noted, getattr(module, draw)))
    for rule in ("rejection", "coupled"):
        seen.clear()
        engine = make(name, 1, target, SMALL_OTHER)
        engine.scheduler.drafter.min_confidence = 0.0  # long chains
        engine.generate(ask([asked(target)] * 4, 20, Sampling(1.0, rule=rule)))
        targets = [verify.stream(seed) for seed in range(4)]
        drafts = [x for x in seen if rule == "coupled" or x[0] not in targets]
        assert len(drafts) > 20
        assert (len(set(drafts)) == len(drafts)) == (rule == "rejection")


@pytest.mark.parametrize("name", ["ar", "specgen"])
def test_a_text_with_no_numbers_spoils_no_later_one(name):
    """The blocks of such a text are used again, by texts that are shorter."""
    model = toy_model()
    with torch.no_grad():
        model.embed.weight[5] = float("inf")
    asked = lambda: [Request([1] * 20 + [i], 8) for i in (2, 3)]
    engine = make(name, 4, model)
    want = ids_of(make(name, 4, model).generate(asked()))
    for _ in range(2):
        with refused("the logits of the model must be numbers"):
            engine.generate([Request([5] * 100, 4)])
        assert ids_of(engine.generate(asked())) == want


def argmax_drafts(self, streams, positions):
    """The classical mistake: the drafter takes its argmax, and the rule divides by its softmax."""
    return torch.ones(len(streams), self.size)


def likeliest(segments, logits, drafting):
    """The same mistake of SpecGen."""
    return [[row.argmax().item()] for row in logits]


def as_drawn(chains, *args, real=verify.rejection):
    """Copies are judged as if they were drawn from q."""
    (own, q), *copied = chains
    return real([(own, q), *((rows[: len(own)], q) for rows, _ in copied)], *args)


def one_coin(segment, real=verify.coins):
    return real(segment)[:1].expand(len(segment.drafts) + 1)


def leave_out_the_improbable(result):
    """To end before the draft that was improbable is to have chosen among the draws."""
    chain, q = result
    n = len(chain) - (len(chain) > 0 and q()[len(chain) - 1, chain[-1]].item() < 0.2)
    return chain[:n], q


def report_another_q(result):
    """The argmax, judged as if it had been drawn from the softmax."""
    chain, q = result
    return q()[: len(chain)].argmax(-1).tolist(), q


def drafts(owner, wrong):
    return owner, "result", lambda self, *args, real=owner.result: wrong(real(self, *args))


@pytest.mark.parametrize(
    "owner, attribute, mistake, name",
    [
        (DraftHead, "noise", argmax_drafts, "draft"),
        (specgen, "choose", likeliest, "sparse"),
        (verify, "rejection", as_drawn, "draft, copies"),
        (verify, "coins", one_coin, "draft"),
        (*drafts(PrismDrafter, leave_out_the_improbable), "tiny prism chain"),
        (*drafts(SpecDiffDrafter, leave_out_the_improbable), "tiny early stop"),
        (*drafts(PrismDrafter, report_another_q), "tiny prism chain"),
        (*drafts(SpecDiffDrafter, report_another_q), "tiny chain"),
    ],
)
def test_control_mistakes_are_rejected(owner, attribute, mistake, name, monkeypatch):
    """In as many rounds as a right engine is judged by."""
    monkeypatch.setattr(owner, attribute, mistake)
    assert sampled(name, AT if name in REJECTED else REJECTION, control=True)[0] < 1e-6


@pytest.mark.parametrize(
    "name", ["tiny prism chain", "tiny prism tree", "tiny chain", "tiny three chains"]
)
def test_a_draft_vocabulary_without_the_likeliest_tokens_loses_nothing(name, monkeypatch):
    """The controls put q at the wrong tokens, or cut the target's distribution as well."""
    likely = exact(TINY, AT).view(6, 6, 6).sum((0, 2))
    kept = likely.argsort()[:4].sort().values
    drafter, settings = REJECTED[name]
    monkeypatch.setitem(REJECTED, name, (copy.deepcopy(drafter).restrict(kept), settings))
    assert sampled(name, AT, ROUNDS // 2)[0] > 1e-6
    if name == "tiny prism tree":
        real = verify.scores
        inside = torch.zeros(6).index_fill(0, kept, 1.0)
        monkeypatch.setattr(verify, "scores", lambda *args: real(*args) * inside)
    monkeypatch.setattr(DraftHead, "whole", lambda self, q: torch.nn.functional.pad(q, (0, 2)))
    assert sampled(name, AT, ROUNDS // 2, control=True)[0] < 1e-6
