"""The PRISM family on toy models: training equals drafting, trees, what caches hold, and that a step
reads one module. What PRISM shares with other trained drafters is in test_trained.py."""

import itertools
import math
import random
import re

import pytest
import torch
from conftest import ROOT, attend_alone, cached_kv, fresh_kv, only_keys, refused, seeded
from test_specdiff import V, chi_square_of, table
from test_trained import TARGET, case, features_of, prompts, texts, toy_prism, trained

from minispec import prism
from minispec.core.engine import Engine
from minispec.core.gpt import dense_attend  # noqa: F401  the page's code uses it
from minispec.core.kv_cache import KVCache
from minispec.core.requests import Request
from minispec.core.scheduler import SyncScheduler
from minispec.core.verify import draw, verify_tree
from minispec.prism import PrismConfig, PrismDrafter, PrismTreeDrafter

ONE, TWO = toy_prism(step_map=(0,)), toy_prism(step_map=(0, 1))


# -- training equals drafting --------------------------------------------------------------------------------


def sequential_states(drafter, ids, row, steps):
    """States of drafting from one row as decoding does it: rows 0 .. row enter a cache with module 0,
    then one row a step, tokens as they stand in ids."""
    tokens = torch.tensor(ids)
    cache = KVCache(drafter.config, row + steps + 1)
    attend = attend_alone(only_keys(cache, 0, row + 1))
    features = features_of(ids)[0, : row + 1]
    states = [drafter(1, tokens[1 : row + 2], features, torch.arange(row + 1), attend)[-1:]]
    for step in range(2, steps + 1):
        at = row + step - 1
        attend = attend_alone(only_keys(cache, at, 1))
        states.append(drafter(step, tokens[at + 1 : at + 2], states[-1], torch.tensor([at]), attend))
    return torch.cat(states)


def recomputed_states(drafter, ids, features, steps):
    """States as the released trainer computes them: at every step its module encodes all earlier inputs
    again."""
    inputs = []
    states = []
    a = features
    rows = torch.arange(ids.shape[1])
    for step in range(1, steps + 1):
        inputs.append((ids.roll(-step, 1), a, rows[None] + step - 1))
        attend = prism.unrolled_attend()
        for tokens, a, at in inputs:
            a = drafter(step, tokens, a, at, attend)
        states.append(a)
    return states


@torch.no_grad()
@pytest.mark.parametrize(
    "step_map, layers", [((0,), 1), ((0, 1), 1), ((0, 1, 2), 1), ((0,), 2)]
)
def test_states_in_training_equal_states_in_drafting(step_map, layers):
    drafter = toy_prism(step_map=step_map, n_layer=layers, gain=4.0)
    steps = 5
    ids = torch.randint(0, 12, (331,), generator=seeded(1)).tolist()
    x = torch.tensor([ids[::-1], ids])
    features = features_of(x)
    states = torch.stack(prism.unroll(drafter, x, features, steps))[:, 1]
    again = torch.stack(recomputed_states(drafter, x, features, steps))[:, 1]
    wrong = 0.0
    for row in (0, 1, 7, 40, 300):
        want = sequential_states(drafter, ids, row, steps)
        assert (states[:, row] - want).abs().max() < 1e-4
        wrong = max(wrong, (again[:, row] - want).abs().max().item())
    # Context keys of the wrong module are something else; with one module there is no wrong one.
    assert wrong > 0.05 if max(step_map) else wrong < 1e-4


def test_gradients_reach_the_keys_and_values_of_every_step():
    attend = prism.unrolled_attend()
    steps = [[torch.randn(1, 5, 2, 4, generator=seeded(10 * i + j)).requires_grad_() for j in range(3)]
             for i in range(2)]
    [attend(0, *some) for some in steps][1].sum().backward()
    inputs = [steps[1][0], *steps[0][1:], *steps[1][1:]]
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in inputs)


def test_the_shortened_test_of_the_page_runs():
    with open(f"{ROOT}/docs/debug-drafter.md", encoding="utf-8") as f:
        code = re.search(r"```python\n(.*?)```", f.read(), re.S)[1]
    ids = torch.randint(0, 12, (331,), generator=seeded(1)).tolist()
    names = {**globals(), "drafter": TWO, "ids": ids}
    exec(code, names)
    names["test_states_in_training_equal_states_in_drafting"]()


@pytest.mark.parametrize("ids", [list(range(12)), [1, 2, 3, 5, 7, 8]], ids=["all tokens", "some"])
def test_the_loss_is_a_divergence(ids):
    """Against the plain formula, row by row; and what is accepted. The target's first rows judge nobody."""
    drafter = toy_prism(gain=4.0)
    if len(ids) < 12:
        drafter.restrict(torch.tensor(ids))
    batch = texts(prompts(3))
    steps, shape = 3, batch.ids.shape
    best = torch.randint(0, 12, shape, generator=seeded())  # or no draft would be right
    loss, accepted = prism.unrolled_loss(drafter, batch._replace(best=best), steps)
    loss.backward()
    got = [p.grad.clone() for p in drafter.parameters()]
    drafter.zero_grad()

    cells = [*itertools.product(*map(range, shape))]
    judged = lambda b, r, k: steps <= r + k < shape[1] - 1 and batch.learn[b, r + k + 1]
    want = 0
    hits = torch.zeros(steps, *shape)
    states = prism.unroll(drafter, batch.ids, batch.hidden, steps)
    for k, a in enumerate(states, 1):
        log_q = TARGET.logits(a)[..., ids].log_softmax(-1)
        rows = []
        for b, r in cells:
            if judged(b, r, k):
                p = TARGET.logits(batch.hidden[b, r + k])[ids].softmax(-1)
                rows.append((p * (p.log() - log_q[b, r])).sum())
                hits[k - 1, b, r] = ids[log_q[b, r].argmax()] == best[b, r + k]
        want = want + sum(rows) / len(rows)
    want.backward()
    assert abs(loss.item() - want.item()) < 1e-4
    assert all(torch.allclose(a, p.grad, atol=1e-5) for a, p in zip(got, drafter.parameters()))
    drafting = [hits[:, b, r].cumprod(0) for b, r in cells if all(judged(b, r, k) for k in (1, 2, 3))]
    assert torch.allclose(accepted, sum(drafting) / len(drafting), atol=1e-5)
    assert 0 < accepted[0] < 1


# -- the walk of a tree: chi-square over all outputs of two tokens -------------------------------------------

def the_walk(draft, parents, p, coins):
    """By choices that coins draw, one for each row."""
    return verify_tree(draft, parents, draw(p, coins).tolist())


def forgets_what_was_rejected(draft, parents, p, coins):
    path, _ = the_walk(draft, parents, p, coins)
    return path, draw(p[path[-1] if path else 0], 1 - coins[-1]).item()


def one_coin_for_all(draft, parents, p, coins):
    return the_walk(draft, parents, p, coins[:1].expand(len(coins)))


@pytest.mark.parametrize("rule", [the_walk, forgets_what_was_rejected, one_coin_for_all])
def test_the_walk_is_lossless_and_the_controls_are_not(rule):
    """A fixed tree of two levels on the Markov chain of test_specdiff.py."""
    draft = [3, 2, 0, 0, 3, 2, 1]

    def judge(chains, q, p, coins):
        path, token = rule(draft, [0, 0, 0, 1, 1, 2, 2], p[[V, *draft]], coins[:8])
        return [draft[i - 1] for i in path], token

    assert (chi_square_of(judge, 4, *table(), 2000)[0] > 1e-6) == (rule is the_walk)


@pytest.mark.parametrize(
    "draft, parents, best, path",
    [
        ([7, 8, 1, 2, 1], [0, 0, 1, 2, 2], [8, 0, 1, 0, 0, 9], [2, 5]),
        ([7, 8, 1, 2, 1], [0, 0, 1, 2, 2], [7, 2, 1, 0, 0, 9], [1]),
        ([1, 9, 3], [0, 1, 2], [1, 2, 3, 4], [1]),
        ([], [], [5], []),
    ],
)
def test_verify_tree_by_hand(draft, parents, best, path):
    assert verify_tree(draft, parents, best) == (path, best[[0, *path][-1]])


# -- trees ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
def test_the_best_nodes_of_a_tree_include_their_ancestors(ties):
    """Ties come from saturated probabilities: a child as probable as its parent must not push it out."""
    rng = random.Random(2)
    log = lambda: rng.choice([0.0, 0.0, -1.0]) if ties else -rng.expovariate(1)
    for _ in range(200):
        parents, scores = [], []
        for i in range(rng.randint(2, 90)):
            parents.append(rng.randrange(-1, i))
            scores.append(log() + (scores[parents[i]] if parents[i] >= 0 else 0.0))
        n = rng.randint(1, 30)
        kept, above = prism.prune(range(len(scores)), parents, scores, n)
        assert len(kept) == len(above) == min(n, len(scores))
        nodes = [-1, *kept]
        assert all(row <= i and nodes[row] == parents[node] for i, (node, row) in enumerate(zip(kept, above)))
        assert sorted(scores[node] for node in kept) == sorted(scores)[-len(kept):]


def test_a_drafter_keeps_states_of_committed_rows_alone(monkeypatch):
    """A view of a whole forward would keep the rows of all requests until the drafter is asked again."""
    kept = []

    def observe(drafter, request, features, real=PrismDrafter.observe):
        if request.generation.token_ids:                 # behind the prompt
            kept.append((features.untyped_storage().nbytes(), features.nbytes))
        real(drafter, request, features)

    monkeypatch.setattr(PrismDrafter, "observe", observe)
    engine = Engine(TARGET, lambda e: SyncScheduler(e, PrismDrafter(TWO, TARGET, 3), 3), 2)
    engine.generate([Request([1, 2, 3], 12), Request([4, 5], 12)])
    assert len(kept) > 4 and all(held == own for held, own in kept)


def first_tree(prompt, stop):
    """The first tree of a request: all nodes, what the engine gets, and how many steps were taken."""
    seen = []
    steps = []

    class Watched(PrismTreeDrafter):
        def result(self, request, drafts, q, limit):
            seen.append((drafts, super().result(request, drafts, q, limit), len(steps)))
            return seen[-1][1]

    drafter = Watched(TWO, TARGET, 4, 2)
    drafter.min_confidence = stop
    request = Request(prompt, 40)
    request.n_cached = len(prompt) - 1
    drafter.observe(request, features_of(prompt)[0, :-1])
    hook = TWO.register_forward_pre_hook(lambda _, args: steps.append(args[0]))
    drafter.propose([request], [28])
    hook.remove()
    return seen[0]


@torch.inference_mode()
@pytest.mark.parametrize("stop", [0.05, 0.1, 0.2])
def test_a_tree_that_ends_early_is_the_probable_part_of_the_whole_one(stop):
    """Behind the first level in which no path is as probable as `stop` there are no steps; of the levels
    before, the nodes that are at least a quarter as probable go to the target, and one in any case.
    """
    depths = set()
    left_out = 0
    levels = [range(2), range(2, 6), range(6, 10), range(10, 14)]
    for prompt in [p for p in prompts(20) if len(p) > 1]:
        nodes, _, steps = first_tree(prompt, 0.0)
        assert (steps, len(nodes[2])) == (4, 14)
        likely = [max(nodes[2][i] for i in level) >= math.log(stop) for level in levels]
        depth = min([*likely, False].index(False) + 1, 4)
        end = levels[depth - 1].stop
        n = sum(math.exp(score) >= stop / 4 for score in nodes[2][:end])
        want = prism.prune(*(column[:end] for column in nodes), max(n, 1))
        _, (tokens, _, parents), steps = first_tree(prompt, stop)
        assert ((tokens, parents), steps) == (want, depth)
        depths.add(depth)
        left_out += end - n
    assert min(depths) < 4 and left_out


# -- caches, and what a step reads ---------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("name", ["prism chain", "prism early tree"])
def test_caches_hold_what_was_accepted_and_nothing_else(name):
    """After every round: the target's cache equals a fresh encoding of the accepted tokens, the drafter's
    a fresh encoding by module 0 from the target's features, which are those of training."""
    drafter = trained("prism")
    engine = Engine(TARGET, case(name), 3, prefill_chunk=16)
    notes = engine.scheduler.drafter.draft_states
    rounds = 0
    for r, _ in engine.stream([Request(p, 25) for p in prompts(6)]):
        if r not in notes or not r.blocks:
            continue
        note, n, m = notes[r], r.n_cached, notes[r].cached
        kept = cached_kv(engine.cache, r.blocks, n)
        assert (kept - fresh_kv(TARGET, r.tokens[:n])).abs().max() < 1e-4
        # The features are of what the target cached, and of nothing else.
        features = features_of(r.tokens[:n])[0]
        own = torch.cat(note.features)
        assert len(own) == n - m and (own - features[m:]).abs().max() < 1e-4
        if m:
            x = torch.tensor(r.tokens[1 : m + 1])
            cache = KVCache(drafter.config, m)
            drafter(1, x, features[:m], torch.arange(m), attend_alone(only_keys(cache, 0, m)))
            kept = cached_kv(note.cache, note.blocks, m)
            assert (kept - cached_kv(cache, cache.only, m)).abs().max() < 1e-4
            rounds += 1
    assert rounds > 20


@torch.no_grad()
@pytest.mark.parametrize(
    "step_map, used",
    [((0,), [0] * 6), ((0, 1), [0, 1, 1, 1, 1, 1]), ((0, 1, 1, 2), [0, 1, 1, 2, 2, 2])],
)
def test_a_draft_step_reads_one_module(step_map, used):
    drafter = toy_prism(step_map=step_map)
    read = set()
    assert KVCache(drafter.config, 10).k.shape[0] == 1  # whatever M is
    assert drafter.n_params() == (max(step_map) + 1) * ONE.n_params()
    for m in drafter.modules():
        if not list(m.children()):
            m.register_forward_hook(lambda m, *_: read.update(m.parameters()))
    for step, module in enumerate(used, 1):
        read.clear()
        attend = attend_alone(only_keys(KVCache(drafter.config, 2), 0, 2))
        drafter(step, torch.zeros(2, dtype=torch.long), torch.zeros(2, 32), torch.arange(2), attend)
        assert read == {*drafter.bank[module].parameters()}


def test_the_stacked_arm_shares_no_cache_layer():
    stack = toy_prism(step_map=(0,), n_layer=2)
    one = ONE.n_params()
    assert one < stack.n_params() < 2 * one
    assert KVCache(stack.config, 4).k.shape[0] == 2


def test_step_map():
    for bad in ((), (0, 2), (1, 0)):
        with refused("must begin with module 0", "use every module"):
            PrismConfig(step_map=bad)
