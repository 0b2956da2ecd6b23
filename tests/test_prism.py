"""The PRISM family on toy models: training equals drafting, drafting is lossless, a step reads one module, caches hold what
they should, and folders are checked. Section numbers and statements are those of our notes on the paper."""
import itertools
import math
import os
import random
from dataclasses import replace

import pytest
import torch
from conftest import attend_alone, cached_kv, chi_square, dense_logits, only_keys, toy_model

from minispec import prism
from minispec.core import verify
from minispec.core.attention import FullKeys, packed_attend, tree_mask
from minispec.core.gpt import dense_attend
from minispec.core.engine import Engine, Lockstep
from minispec.core.requests import Request
from minispec.core.kv_cache import KVCache
from minispec.prism import PrismConfig, PrismDrafter
from minispec.core.words import Words, most_frequent
from minispec.data import recorded, rollouts
from minispec.core.verify import RULES, Sampling, draw, greedy_tree, rejection, warp
from minispec.tools.checkpoints import fingerprint, load_drafter, save_drafter

MAPS = {1: (0,), 2: (0, 1), 3: (0, 1, 2)}


def toy_drafter(target, step_map=(0, 1), seed=5, gain=4.0, **changes):
    """Random, and not near the target as a new one is: so it is right by chance, and not always wrong."""
    drafter = prism.for_target(target, step_map, **changes).eval()
    torch.manual_seed(seed)
    chance = dict(prism.Prism(drafter.config, target).named_parameters())
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            if p.ndim == 2:
                p.copy_(chance[name] * gain)
    return drafter


# A small vocabulary, so that even random trees are often right; three targets would do as well as one.
TARGET = toy_model(vocab=12, seed=2)
DRAFTERS = {m: toy_drafter(TARGET, MAPS[m], gain=2.0) for m in MAPS}


def prompts(n=8, seed=0, vocab=12):
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.choice([1, 2, 9, 16, 17, 40, 100]))] for _ in range(n)]


def lockstep(drafter, depth, width, k, stop=0.0, target=TARGET):
    made = PrismDrafter(drafter, target, depth, width)
    made.stop = stop
    return lambda e: Lockstep(e, made, k)


def run(planner, some, batch=4, max_new=30, sampling=Sampling(), stop=(), target=TARGET, **kw):
    engine = Engine(target, planner, batch, prefill_chunk=16, **kw)
    return engine.generate([Request(p, max_new, replace(sampling, seed=i), stop) for i, p in enumerate(some)]), engine


SHAPES = {"chain": (4, 1, 4), "early stop": (4, 1, 4, 0.15), "tree": (4, 2, 8),
          "early tree": (4, 2, 8, 0.08)}                             # depth, width, drafts, early stop


def texts(n):
    """Answers of TARGET to n prompts, and what it knew of them."""
    rows = [(g.prompt_ids, g.token_ids) for g in run(Lockstep, prompts(n), 10)[0]]
    return recorded.padded([rollouts.read(TARGET, *row, 0) for row in rows])


@pytest.fixture(scope="module")
def trained():
    """A drafter that has learned some answers of the target by heart: long paths of its trees are accepted."""
    drafter = toy_drafter(TARGET, MAPS[2], gain=1.0)
    batch = texts(10)
    opt = torch.optim.Adam(drafter.parameters(), lr=0.01)
    for _ in range(40):
        loss, accepted = prism.unrolled_loss(drafter, batch, 3)
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert accepted[0] > 0.6
    return drafter.eval()


# -- training equals drafting ------------------------------------------------------------------------------------------

def sequential_states(drafter, target, ids, row, steps):
    """States of drafting from one row as decoding does it: rows 0 .. row enter a one-layer cache with module 0, then one row
    a step, tokens as they stand in ids."""
    positions = torch.arange(len(ids))
    features = target(positions.new_tensor(ids)[None], positions[None], dense_attend())
    cache, x = KVCache(drafter.config, row + steps + 1), torch.tensor(ids)
    assert cache.k.shape[0] == drafter.config.n_layer
    a = drafter(1, target.embed(x[1:row + 2]), features[0, :row + 1], positions[:row + 1], attend_alone(only_keys(cache, 0, row + 1)))[-1:]
    states = [a]
    for step in range(2, steps + 1):
        at = row + step - 1
        a = drafter(step, target.embed(x[row + step][None]), a, torch.tensor([at]), attend_alone(only_keys(cache, at, 1)))
        states.append(a)
    return torch.cat(states)


def recomputed_states(drafter, target, ids, features, steps):
    """States as the released trainer computes them: at every step its module encodes all earlier inputs again."""
    inputs, states, a = [], [], features
    rows = torch.arange(ids.shape[1])
    for step in range(1, steps + 1):
        inputs.append((target.embed(ids.roll(-step, 1)), a, rows[None] + step - 1))
        attend = prism.unrolled_attend(rows)
        a = drafter(step, *inputs[0], attend)
        for e, a, at in inputs[1:]:
            a = drafter(step, e[0], a[0], at[0], attend)[None]
        states.append(a)
    return states


@torch.no_grad()
@pytest.mark.parametrize("step_map, layers", [((0,), 1), ((0, 1), 1), ((0, 1, 2), 1), ((0,), 2), ((0, 0, 1), 1)])
def test_states_in_training_equal_states_in_drafting(step_map, layers):
    """On texts whose rows all draft, and where every third does."""
    drafter, steps = toy_drafter(TARGET, step_map, n_layer=layers), 5
    ids = prompts(60)[-1][:1] + [int(t) for t in torch.randint(0, 12, (600,), generator=torch.Generator().manual_seed(1))][:330]
    x = torch.tensor([ids])
    features = TARGET(x, torch.arange(len(ids))[None], dense_attend())
    everyone = torch.arange(len(ids))
    states = prism.unroll(drafter, x, features, steps, everyone)
    third = prism.unroll(drafter, x, features, steps, everyone[::3])
    assert all(torch.allclose(few, all_[::3], atol=1e-5) for few, all_ in zip(third, states))
    again = recomputed_states(drafter, TARGET, x, features, steps)
    wrong = 0.0
    for row in (0, 1, 7, 40, 300):
        want = sequential_states(drafter, TARGET, ids, row, steps)
        got = torch.stack([s[row] for s in states])
        assert (got - want).abs().max() < 1e-4
        wrong = max(wrong, (torch.stack([s[0, row] for s in again]) - want).abs().max().item())
    if max(step_map) and layers == 1:
        assert wrong > 0.05                                        # context keys of the wrong module are something else
    else:
        assert wrong < 1e-4                                        # with one module there is no wrong one


@pytest.mark.parametrize("vocabulary", [None, torch.tensor([1, 2, 3, 5, 7, 8])], ids=["all tokens", "some"])
def test_the_loss_is_a_divergence(vocabulary):
    """Against the plain formula, row by row; and what is accepted. The target's first rows judge nobody."""
    drafter, batch, steps = toy_drafter(TARGET).restrict(vocabulary), texts(3), 3
    best = torch.randint(0, 12, batch.ids.shape, generator=torch.Generator().manual_seed(0))            # or no draft would be right
    batch = batch._replace(best=best)
    loss, accepted = prism.unrolled_loss(drafter, batch, steps)
    loss.backward()
    got = [p.grad.clone() for p in drafter.parameters()]
    drafter.zero_grad()
    want, hits = 0, torch.zeros(steps, *batch.ids.shape)
    ids = torch.arange(12) if vocabulary is None else vocabulary
    everyone = torch.arange(batch.ids.numel())
    for k, a in enumerate(prism.unroll(drafter, batch.ids, batch.hidden, steps, everyone), 1):
        a = a.unflatten(0, batch.ids.shape)
        log_q, rows = TARGET.logits(a)[..., ids].log_softmax(-1), []
        for b, r in itertools.product(*map(range, batch.ids.shape)):
            if steps <= r + k < batch.ids.shape[1] - 1 and batch.learn[b, r + k + 1]:
                p = TARGET.logits(batch.hidden[b, r + k])[ids].softmax(-1)
                rows.append((p * (p.log() - log_q[b, r])).sum())
                hits[k - 1, b, r] = ids[log_q[b, r].argmax()] == batch.best[b, r + k]
        want = want + sum(rows) / len(rows)
    want.backward()
    assert abs(loss.item() - want.item()) < 1e-4
    assert all(torch.allclose(a, p.grad, atol=1e-5) for a, p in zip(got, drafter.parameters()))
    drafting = [(b, r) for b, r in itertools.product(*map(range, batch.ids.shape)) if all(steps <= r + k < batch.ids.shape[1] - 1 and batch.learn[b, r + k + 1] for k in (1, 2, 3))]
    reached = sum(hits[:, b, r].cumprod(0) for b, r in drafting) / len(drafting)
    assert torch.allclose(accepted, reached, atol=1e-5) and 0 < accepted[0] < 1


# -- losslessness ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("modules", [1, 3, "trained"])
def test_greedy_is_identical_to_autoregressive(modules, shape, trained):
    some, drafter = prompts(100 if os.environ.get("MINISPEC_FULL") else 10), DRAFTERS.get(modules, trained)
    want, _ = run(Lockstep, some)
    assert max(len(set(g.token_ids)) for g in want) > 5
    for batch, n in ((1, 2), (8, len(some))):                      # one by one takes longest
        got, engine = run(lockstep(drafter, *SHAPES[shape]), some[:n], batch)
        assert [g.token_ids for g in got] == [g.token_ids for g in want[:n]]
        assert engine.cache.used == 0 and engine.planner.drafter.notes == {}
        steps = [s for g in got for s in g.steps]
        assert all(0 <= s.accepted <= s.proposed <= 4 and s.committed in (s.accepted, s.accepted + 1) for s in steps)
    assert sum(s.accepted for s in steps) > 0.05 * len(steps) and any(s.accepted < s.proposed for s in steps)
    if modules == "trained" and len(some) == 10:                   # those it has learned by heart
        assert sum(s.accepted for s in steps) > (0.8 if shape.startswith("early") else 1.2) * len(steps)
        assert max(s.accepted for s in steps) >= (4 if shape == "chain" else 2)
    if shape.startswith("early"):                                  # they end where the drafter is unsure, not all at once
        assert len({s.proposed for s in steps if 0 < s.position < 25}) > 1


def test_greedy_control_a_tree_walked_without_looking_at_the_tokens_is_caught(monkeypatch):
    import minispec.core.verify
    monkeypatch.setattr(minispec.core.verify, "greedy_tree", lambda draft, parents, best: ([1], best[1]) if draft else ([], best[0]))
    some = prompts(6)
    assert [g.token_ids for g in run(lockstep(DRAFTERS[2], *SHAPES["tree"]), some)[0]] != [g.token_ids for g in run(Lockstep, some)[0]]


@pytest.mark.parametrize("shape", SHAPES)
def test_end_of_text_and_length_limit_inside_an_accepted_run(shape, trained):
    some = prompts(8)
    full, _ = run(Lockstep, some)
    for stop in {g.token_ids[i] for g in full for i in (7, 23)}:
        got, _ = run(lockstep(trained, *SHAPES[shape]), some, stop=[stop])
        for g, f in zip(got, full):
            assert g.token_ids == (f.token_ids[:f.token_ids.index(stop) + 1] if stop in f.token_ids else f.token_ids)
            assert len(g.who) == len(g.token_ids) and sum(s.accepted for s in g.steps) == g.who.count("draft")
    for limit in (1, 2, 3, 6):                                     # down to trees smaller than asked for; the context may be full
        got, _ = run(lockstep(trained, *SHAPES[shape]), some + [[1] * (512 - limit)], max_new=limit)
        assert [g.token_ids for g in got[:8]] == [f.token_ids[:limit] for f in full] and len(got[8].token_ids) == limit


@pytest.mark.parametrize("policy", ["preempt", "offload"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "T1"])
def test_requests_that_leave_the_cache_and_return_lose_nothing(policy, sampling, trained):
    some = prompts(8)
    got, engine = run(lockstep(trained, *SHAPES["tree"]), some, 8, sampling=sampling, cache_tokens=200, admission=policy)
    assert [g.token_ids for g in got] == [g.token_ids for g in run(Lockstep, some, sampling=sampling)[0]]
    assert engine.admission.recomputed or engine.cache.offloaded


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampling", [Sampling(0.65), Sampling(1.0), Sampling(1.0, 0, 0.9), Sampling(0.65, 5)], ids=str)
def test_a_seed_is_a_text(shape, sampling, trained):
    some = prompts(17)
    want = [g.token_ids for g in run(Lockstep, some, 17, sampling=sampling)[0]]
    for batch in (1, 8, 17):
        n = 4 if batch == 1 else 17
        got, _ = run(lockstep(trained, *SHAPES[shape]), some[:n], batch, sampling=sampling)
        assert [g.token_ids for g in got] == want[:n]
    steps = [s for g in got for s in g.steps]
    assert sum(s.accepted for s in steps) > 0.2 * len(steps)


def test_a_seed_is_a_text_under_every_rule_that_walks(trained):
    some = prompts(6)
    want = [g.token_ids for g in run(Lockstep, some, sampling=Sampling(1.0))[0]]
    for rule, shape in itertools.product(RULES, SHAPES):
        got, _ = run(lockstep(trained, *SHAPES[shape]), some, sampling=Sampling(1.0, rule=rule))
        assert ([g.token_ids for g in got] == want) == (rule != "rejection" or "tree" in shape)


# -- sampling: chi-square over all outputs of two tokens (rules) or three (the loop) ------------------------------------

V = 6


def the_walk(draft, parents, p, coins):
    """The walk of a tree by choices that coins draw, one for each row."""
    return greedy_tree(draft, parents, draw(p, coins).tolist())


def tree_counts(rule, rounds=2_000, sampling=Sampling(1.0), coins=lambda g, n: torch.rand(n, generator=g)):
    """Counts (V * V) of the first two tokens when a fixed tree of two levels is judged by `rule` on a Markov chain, and what
    is expected of them."""
    g = torch.Generator().manual_seed(0)
    p = warp(torch.randn(V + 1, V, generator=g) * 1.2, sampling)               # rows: after each token; the last: the first token
    draft, parents = [5, 2, 0, 0, 3, 4, 1], [0, 0, 0, 1, 1, 2, 2]
    rows = p[[V, *draft]]
    counts, depths = torch.zeros(V * V, dtype=torch.long), []
    for _ in range(rounds):
        path, token = rule(draft, parents, rows, coins(g, len(draft) + 1))
        out = [draft[i - 1] for i in path] + [token]
        if len(out) < 2:                                                       # the next round would draw it
            out.append(draw(p[out[0]], torch.rand((), generator=g)).item())
        counts[out[0] * V + out[1]] += 1
        depths.append(len(path))
    return counts, (p[V][:, None] * p[:V]).flatten(), depths


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0, 0, 0.8)], ids=["T0.7", "T1-p0.8"])
def test_the_walk_is_lossless(sampling):
    counts, want, depths = tree_counts(the_walk, sampling=sampling)
    assert chi_square(counts, want) > 1e-6 and set(depths) == {0, 1, 2}


def test_control_a_coin_used_twice_is_rejected():
    def reuse(g, n):
        return torch.rand(1, generator=g).expand(n)
    counts, want, _ = tree_counts(the_walk, coins=reuse)
    assert chi_square(counts, want) < 1e-6


def test_control_a_draw_that_forgets_what_was_rejected_is_itself_rejected():
    def wrong(draft, parents, p, coins):
        path, _ = the_walk(draft, parents, p, coins)
        return path, draw(p[path[-1] if path else 0], 1 - coins[-1]).item()
    counts, want, _ = tree_counts(wrong)
    assert chi_square(counts, want) < 1e-6


def test_greedy_tree_by_hand():
    draft, parents = [7, 8, 1, 2, 1], [0, 0, 1, 2, 2]
    assert greedy_tree(draft, parents, [8, 0, 1, 0, 0, 9]) == ([2, 5], 9)
    assert greedy_tree(draft, parents, [7, 2, 1, 0, 0, 9]) == ([1], 2)
    assert greedy_tree(draft, parents, [3, 2, 1, 0, 0, 9]) == ([], 3)
    assert greedy_tree([], [], [3]) == ([], 3)


def test_the_walk_accepts_as_often_as_rejection_of_point_masses():
    """SpecInfer's rule for a tree of one-token distributions: its children in turn."""
    g, lengths = torch.Generator().manual_seed(3), []
    p = warp(torch.randn(4, V, generator=g) * 2, Sampling(1.0, 0, 0.9))
    draft, parents, chains = [0, 1, 2], [0, 0, 2], [([1], None), ([2, 3], None)]
    for _ in range(4000):
        coins = torch.rand(8, generator=g)
        lengths.append([len(the_walk(draft, parents, p, coins[:4])[0]), len(rejection(chains, draft, p, coins[4:])[0])])
    a, b = torch.tensor(lengths).double().mean(0)
    assert abs(a - b) < 0.06 and 0.3 < a < 1.7


SMALL = toy_model(vocab=8, seed=3, gain=3.0, n_layer=1, n_head=2, n_kv_head=1)
SMALL_DRAFTER = toy_drafter(SMALL, gain=2.0)
PROMPT = [1, 5, 2, 7, 3, 3, 6, 1]
EXACT_ROUNDS = 100_000 if os.environ.get("MINISPEC_FULL") else 1_000


def exact(sampling):
    """Probability of every output of three tokens, (512,)."""
    next_to = lambda *tokens: warp(dense_logits(SMALL, PROMPT + list(tokens))[-1], sampling)
    return torch.stack([next_to()[a] * next_to(a)[b] * next_to(a, b) for a in range(8) for b in range(8)]).flatten()


def sampled(shape, sampling, rounds=EXACT_ROUNDS, drafter=SMALL_DRAFTER):
    """Counts (512,) of the first three tokens of answers (the second and third are what a round of two draft steps is for), and
    the share of draft positions that were accepted."""
    counts, accepted, proposed, done = torch.zeros(512, dtype=torch.long), 0, 0, 0
    while done < rounds:
        requests = [Request(PROMPT, 4, replace(sampling, seed=done + i)) for i in range(250)]
        for g in Engine(SMALL, lockstep(drafter, *shape, target=SMALL), 250).generate(requests):
            a, b, c = g.token_ids[:3]
            counts[a * 64 + b * 8 + c] += 1
            accepted += sum(s.accepted for s in g.steps)
            proposed += sum(s.proposed for s in g.steps)
            done += 1
    return counts, accepted / proposed


GRID = [Sampling(t, 0, top_p, rule="rejection") for t in (1.0, 0.7) for top_p in (0.9, 1.0)]


@pytest.mark.parametrize("sampling", GRID if os.environ.get("MINISPEC_FULL") else GRID[:1], ids=lambda s: f"T{s.temperature}-p{s.top_p}")
@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 1, 2, 0.15), (2, 3, 3)], ids=["chain", "early stop", "tree"])
def test_rejection_has_the_targets_distribution(shape, sampling):
    """A correct rule fails with probability 1e-6. MINISPEC_FULL=1 runs all settings, with 100 times as many answers."""
    counts, rate = sampled(shape, sampling)
    assert chi_square(counts, exact(sampling)) > 1e-6 and 0.05 < rate < 0.95


def test_control_a_chain_that_leaves_an_improbable_draft_out_is_rejected(monkeypatch):
    """To end before the draft that was improbable is to have chosen among the draws."""
    result = PrismDrafter.result

    def wrong(self, drafts, q, limit):
        drafts, q = result(self, drafts, q, limit)
        n = len(drafts) - (len(drafts) > 0 and q[len(drafts) - 1, drafts[-1]].item() < 0.15)
        return drafts[:n], q[:n]
    monkeypatch.setattr(PrismDrafter, "result", wrong)
    counts, _ = sampled((2, 1, 2), AT, 4000)
    assert chi_square(counts, exact(AT)) < 1e-6


def test_control_argmax_chains_judged_by_their_softmax_are_rejected(monkeypatch):
    monkeypatch.setattr(Words, "noise", lambda self, streams, positions: torch.ones(len(streams), self.size))
    counts, _ = sampled((2, 1, 2), AT, 1000)
    assert chi_square(counts, exact(AT)) < 1e-6


# -- a draft vocabulary: the same tests where likely tokens are never drafted ------------------------------------------

AT = GRID[0]
SOME = exact(AT).view(8, 8, 8).sum((0, 2)).argsort()[:5].sort().values                        # all but the three likeliest
LACKING = toy_drafter(SMALL, gain=2.0).restrict(SOME)


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 3, 3)], ids=["chain", "tree"])
def test_a_draft_vocabulary_without_likely_tokens_loses_nothing(shape, monkeypatch):
    counts, rate = sampled(shape, AT, 1000, LACKING)
    assert chi_square(counts, exact(AT)) > 1e-6 and 0.03 < rate < 0.95
    seen = counts.view(8, 8, 8).sum((0, 2))
    assert (seen[SOME] > 0).any() and seen.sum() > 1.5 * seen[SOME].sum()                      # most tokens are of those never drafted
    # Controls: q at the wrong tokens; a tree whose walk forgets the tokens outside.
    if shape[1] == 1:
        monkeypatch.setattr(Words, "whole", lambda self, q: torch.nn.functional.pad(q, (0, 8 - len(SOME))))
    else:
        real, inside = verify.scores, torch.zeros(8).index_fill(0, SOME, 1.0)
        monkeypatch.setattr(verify, "scores", lambda *args: real(*args) * inside)
    assert chi_square(sampled(shape, AT, 1000, LACKING)[0], exact(AT)) < 1e-6


def test_drafts_are_of_the_draft_vocabulary_and_its_ids_are_kept(tmp_path):
    save_drafter(LACKING, tmp_path, SMALL)
    again = load_drafter(tmp_path, SMALL, prism.PrismConfig)
    assert torch.equal(again.vocabulary, SOME) and again.config.draft_vocab == 5
    for shape in ((2, 1, 2), (3, 3, 9)):
        drafts, seen = PrismDrafter(again, SMALL, *shape[:2]), set()
        propose = drafts.propose
        def record(requests, limits):
            out = propose(requests, limits)
            seen.update(token for tokens, *_ in out for token in tokens)
            return out
        drafts.propose = record
        engine = Engine(SMALL, lambda e: Lockstep(e, drafts, shape[2]), 4)
        got = engine.generate([Request(PROMPT[i:], 30) for i in range(4)])
        want = Engine(SMALL, Lockstep, 4).generate([Request(PROMPT[i:], 30) for i in range(4)])
        assert [g.token_ids for g in got] == [g.token_ids for g in want] and seen and seen <= set(SOME.tolist())
    for ids in ([0, 1, 2, 3, 3], [0, 1, 2, 3, 8], [-1, 1, 2, 3, 4]):
        again = load_drafter(tmp_path, SMALL, prism.PrismConfig)
        again.vocabulary = torch.tensor(ids)
        with pytest.raises(ValueError, match="names tokens from 0 to 7, each once"):
            PrismDrafter(again, SMALL)
    config = (tmp_path / "config.json").read_text()
    for wrong in ("8", "-1"):
        (tmp_path / "config.json").write_text(config.replace('"draft_vocab": 5', f'"draft_vocab": {wrong}'))
        with pytest.raises(ValueError, match=f"draft_vocab {wrong} is out of range"):
            load_drafter(tmp_path, SMALL, prism.PrismConfig)


def test_the_most_frequent_tokens_of_answers():
    assert most_frequent([[3, 3, 5], [5, 3, 7]], 2, 8).tolist() == [3, 5]
    assert most_frequent([[3, 3, 5]], 4, 8).tolist() == [3, 5, 0, 1]                           # of those never seen, the first
    assert most_frequent([[3]], 0, 8) is None and most_frequent([[3]], 8, 8) is None


# -- trees -------------------------------------------------------------------------------------------------------------

def random_tree(rng, n):
    return [rng.randrange(i + 1) for i in range(n)]


def test_a_row_of_a_tree_sees_its_path_and_nothing_else():
    rng = random.Random(0)
    for _ in range(20):
        parents = random_tree(rng, rng.randint(0, 20))
        mask = tree_mask(parents)
        for row in range(len(parents) + 1):
            path, at = {row}, row
            while at:
                at = parents[at - 1]
                path.add(at)
            assert mask[row].nonzero()[:, 0].tolist() == sorted(path)
    assert torch.equal(tree_mask([0, 1, 2]), torch.ones(4, 4).tril().bool())   # a chain is causal


@torch.no_grad()
@pytest.mark.parametrize("cached", [0, 1, 30])
def test_logits_of_every_path_equal_those_of_the_path_alone(cached):
    rng = random.Random(1)
    ids, parents = [rng.randrange(12) for _ in range(cached + 1)], random_tree(rng, 12)
    draft, paths, cache = [rng.randrange(12) for _ in parents], [[0]], KVCache(TARGET.config, 60)
    for i, parent in enumerate(parents, 1):
        paths.append([*paths[parent], i])
    if cached:
        TARGET(torch.tensor(ids[:-1]), torch.arange(cached), attend_alone(only_keys(cache, 0, cached)))
    positions = torch.tensor([cached + len(path) - 1 for path in paths])
    hidden = TARGET(torch.tensor([ids[-1], *draft]), positions, attend_alone(only_keys(cache, cached, 13, tail=tree_mask(parents))))
    for row, path in enumerate(paths):
        alone = dense_logits(TARGET, ids + [draft[i - 1] for i in path[1:]])[-1]
        assert (TARGET.logits(hidden[row]) - alone).abs().max() < 1e-4


@pytest.mark.parametrize("ties", [False, True])
def test_the_best_nodes_of_a_tree_include_their_ancestors(ties):
    """Ties come from saturated probabilities: a child as probable as its parent must not push it out."""
    rng = random.Random(2)
    for _ in range(200):
        width, depth, n = rng.randint(2, 5), rng.randint(1, 5), rng.randint(1, 30)
        nodes, opened = [], [(-1, 0.0)]                                        # token, parent and score of a node
        for _ in range(depth):
            first = len(nodes)
            for node, score in opened:
                logs = sorted(((rng.choice([0.0, 0.0, -1.0]) if ties else -rng.expovariate(1)) for _ in range(width)), reverse=True)
                nodes += [(token, node, score + log) for token, log in enumerate(logs)]
            opened = [(i, nodes[i][2]) for i in sorted(sorted(range(first, len(nodes)), key=lambda i: (-nodes[i][2], i))[:width])]
        tokens, q, parents = prism.prune(*zip(*nodes), n)
        assert q is None and len(tokens) == len(parents) == min(n, len(nodes))
        assert all(0 <= parent <= i for i, parent in enumerate(parents))       # parents are kept, and come first
        assert len({(p, t) for p, t in zip(parents, tokens)}) == len(tokens)   # siblings differ
        scores = [score for _, _, score in nodes]
        kept, *_ = prism.prune(range(len(nodes)), [parent for _, parent, _ in nodes], scores, n)
        assert sorted((scores[i] for i in kept), reverse=True) == sorted(scores, reverse=True)[:n]     # and they are the best


def first_tree(prompt, stop):
    """Of the first round that drafts a tree: all nodes, what the engine gets, and how many steps were taken."""
    drafter, seen, steps = PrismDrafter(DRAFTERS[2], TARGET, 4, 2), [], []
    drafter.stop, step, result = stop, drafter.step, drafter.result

    def counted(number, x, states):
        steps.append(number)
        return step(number, x, states)

    def noted(drafts, q, limit):
        seen.append((drafts, result(drafts, q, limit), len(steps)))
        return seen[-1][1]

    drafter.step, drafter.result = counted, noted
    run(lambda e: Lockstep(e, drafter, 28), [prompt], 1)
    return seen[0]


@torch.inference_mode()
@pytest.mark.parametrize("stop", [0.05, 0.1, 0.2])
def test_a_tree_that_ends_early_is_the_probable_part_of_the_whole_one(stop):
    """Behind the first level in which no path is as probable as `stop` there are no steps; of the levels before, the nodes that
    are at least a quarter as probable go to the target, and one in any case."""
    depths, left_out = set(), 0
    for prompt in prompts(12):
        (tokens, parents, scores), _, steps = first_tree(prompt, 0.0)
        assert steps == 4 and len(scores) == 14
        levels = [range(2), range(2, 6), range(6, 10), range(10, 14)]
        likely = [max(scores[i] for i in level) >= math.log(stop) for level in levels]
        depth = min([*likely, False].index(False) + 1, 4)
        nodes = range(levels[depth - 1].stop)
        n = sum(math.exp(scores[i]) >= stop / 4 for i in nodes)
        want = prism.prune(*([x[i] for i in nodes] for x in (tokens, parents, scores)), max(n, 1))
        assert first_tree(prompt, stop)[1:] == (want, depth)
        depths.add(depth)
        left_out += len(nodes) - n
    assert min(depths) < 4 and left_out


# -- caches ------------------------------------------------------------------------------------------------------------

@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
def test_caches_hold_what_was_accepted_and_nothing_else(shape, trained):
    """After every round: the target's cache equals a fresh encoding of the accepted tokens, the drafter's a fresh encoding by
    module 0 from the target's features, which are those of training."""
    engine = Engine(TARGET, lockstep(trained, *SHAPES[shape]), 3, prefill_chunk=16)
    notes, rounds = engine.planner.drafter.notes, 0
    for r, _ in engine.stream([Request(p, 25) for p in prompts(6)]):
        if r not in notes or not r.blocks:
            continue
        n, note = r.n_cached, notes[r]
        fresh, positions, x = KVCache(TARGET.config, n), torch.arange(n), torch.tensor(r.tokens[:n + 1])
        features = TARGET(x[:n], positions, attend_alone(only_keys(fresh, 0, n)))
        assert (cached_kv(engine.cache, r.blocks, n) - cached_kv(fresh, fresh.only, n)).abs().max() < 1e-4
        assert sum(len(f) for f in note.features) == n - note.cached           # what the target cached, and nothing else
        assert (torch.cat(note.features) - features[note.cached:]).abs().max() < 1e-4
        if not note.cached:
            continue
        m, own = note.cached, KVCache(trained.config, note.cached)
        trained(1, TARGET.embed(x[1:m + 1]), features[:m], positions[:m], attend_alone(only_keys(own, 0, m)))
        assert note.cache.k.shape[0] == 1
        assert (cached_kv(note.cache, note.blocks, m) - cached_kv(own, own.only, m)).abs().max() < 1e-4
        rounds += 1
    assert rounds > 20


def test_features_of_decoding_are_those_of_training():
    drafter, seen = toy_drafter(TARGET, gain=2.0), {}

    def planner(engine):
        drafts = PrismDrafter(drafter, TARGET, 3, 2)
        observe = drafts.observe
        drafts.observe = lambda r, f: (seen.setdefault(r, []).append(f), observe(r, f))
        return Lockstep(engine, drafts, 6)

    run(planner, prompts(6), 3)
    for r, features in seen.items():
        x = torch.tensor(r.tokens)[None]
        with torch.no_grad():
            want = TARGET(x, torch.arange(x.shape[1])[None], dense_attend())
        got = torch.cat(features)
        n = min(len(got), x.shape[1])                                          # an answer may end inside an accepted run
        assert got.shape[1] == 32 and n >= x.shape[1] - 1 and (got[:n] - want[0, :n]).abs().max() < 1e-4


# -- what a step reads -------------------------------------------------------------------------------------------------

@torch.no_grad()
@pytest.mark.parametrize("modules", MAPS)
def test_a_draft_step_reads_one_module(modules):
    drafter, read = DRAFTERS[modules], []
    assert KVCache(drafter.config, 10).k.shape == KVCache(DRAFTERS[1].config, 10).k.shape == (1, 2, 12, 8)      # whatever M is; whole blocks
    one = sum(p.numel() for p in drafter.bank[0].parameters())
    assert drafter.n_params() == modules * one
    hooks = [m.register_forward_hook(lambda m, *_: read.append(m)) for m in drafter.modules() if not list(m.children())]
    for step in range(1, 7):
        read.clear()
        drafter(step, torch.zeros(2, 32), torch.zeros(2, 32), torch.arange(2), attend_alone(only_keys(KVCache(drafter.config, 2), 0, 2)))
        touched = {id(p): p.numel() for m in read for p in m.parameters()}
        assert sum(touched.values()) == one
        assert all(id(p) in touched for p in drafter.bank[min(step, modules) - 1].parameters())     # and saturates at the last
    for hook in hooks:
        hook.remove()


def test_total_parameters_and_the_stacked_arm():
    one = toy_drafter(TARGET, (0,)).n_params()
    assert toy_drafter(TARGET, (0, 1)).n_params() == 2 * one
    stack = toy_drafter(TARGET, (0,), n_layer=2)
    assert one < stack.n_params() < 2 * one and KVCache(stack.config, 4).k.shape[0] == 2


def test_step_map():
    c = PrismConfig(step_map=(0, 1, 1, 2))
    assert [c.module_of(k) for k in range(1, 7)] == [0, 1, 1, 2, 2, 2] and c.n_modules == 3
    for bad, message in (((), "use every module"), ((0, 2), "use every module"), ((1, 0), "begin with module 0")):
        with pytest.raises(ValueError, match=message):
            PrismConfig(step_map=bad)


def test_equal_modules_are_one_module():
    """M = 2 with copied weights drafts what M = 1 drafts, bit for bit."""
    two = toy_drafter(TARGET, (0, 1))
    prism.copy_modules(two, DRAFTERS[1])
    for shape in SHAPES.values():
        a, b = (run(lockstep(d, *shape), prompts(3), sampling=Sampling(t))[0] for d, t in ((two, 1.0), (DRAFTERS[1], 1.0)))
        assert [(g.token_ids, g.who) for g in a] == [(g.token_ids, g.who) for g in b]


# -- folders -----------------------------------------------------------------------------------------------------------

def in_bf16(x):
    return x.bfloat16().to(x.dtype) if x.is_floating_point() else x


def test_save_and_load(tmp_path):
    drafter = toy_drafter(TARGET, (0, 1, 1, 2))
    save_drafter(drafter, tmp_path / "d", TARGET)
    again = load_drafter(tmp_path / "d", TARGET, prism.PrismConfig)
    assert again.config == replace(drafter.config, target=fingerprint(TARGET)) and not os.path.exists(tmp_path / "d" / "model.safetensors.tmp")
    assert all(torch.equal(in_bf16(a), b) for a, b in zip(drafter.state_dict().values(), again.state_dict().values()))
    with pytest.raises(ValueError, match="made for a target with vocab_size 12, this one has 8"):
        load_drafter(tmp_path / "d", SMALL, prism.PrismConfig)


def test_damaged_folders_are_named(tmp_path):
    def message(folder):
        with pytest.raises(ValueError) as e:
            load_drafter(str(folder), TARGET, prism.PrismConfig)
        assert "\n" not in str(e.value)
        return str(e.value)

    assert message(tmp_path / "none").startswith("cannot read ")
    assert message(tmp_path).endswith("config.json: No such file or directory")
    save_drafter(DRAFTERS[2], tmp_path, TARGET)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace('"d_ff": 64', '"d_ff": 48'))
    assert "does not fit config.json" in message(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "not a drafter made by train_prism.py" in message(tmp_path)
    save_drafter(DRAFTERS[2], tmp_path, TARGET)
    with open(tmp_path / "model.safetensors", "r+b") as f:
        f.truncate(3000)
    assert "damaged" in message(tmp_path)
    os.remove(tmp_path / "model.safetensors")
    assert message(tmp_path).startswith("there is no ")
