"""The PRISM family on toy models: training equals drafting, drafting is lossless, a step reads one module, caches hold what
they should, and training works. Section numbers and statements are those of our notes on the paper."""
import os
import random

import pytest
import torch
from conftest import chi_square, dense_logits, toy_model

from minispec import prism
from minispec.attention import FullKeys, dense_attend, packed_attend, path_mask, tree_mask
from minispec.engine import Engine, Lockstep, Request
from minispec.kv_cache import KVCache
from minispec.prism import PrismConfig, PrismDrafter
from minispec.verify import Sampling, draw, greedy_tree, point_mass_tree, warp

MAPS = {1: (0,), 2: (0, 1), 3: (0, 1, 2)}


def toy_drafter(target, step_map=(0, 1), seed=5, gain=4.0, **changes):
    torch.manual_seed(seed)
    drafter = prism.for_target(target, step_map, **changes).eval()
    with torch.no_grad():
        for p in drafter.parameters():
            if p.ndim == 2:
                p.mul_(gain)
    return drafter


# A small vocabulary, so that even random trees are often right; three targets would do as well as one.
TARGET = toy_model(vocab=12, seed=2)
DRAFTERS = {m: toy_drafter(TARGET, MAPS[m], gain=2.0) for m in MAPS}


def prompts(n=8, seed=0, vocab=12):
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.choice([1, 2, 9, 16, 17, 40, 100]))] for _ in range(n)]


def lockstep(drafter, depth, width, k, target=TARGET):
    return lambda e: Lockstep(e, PrismDrafter(drafter, target, depth, width), k)


def run(planner, some, batch=4, max_new=40, temperature=0.0, stop=(), target=TARGET, **kw):
    engine = Engine(target, planner, batch, prefill_chunk=16, **kw)
    return engine.generate([Request(p, max_new, Sampling(temperature, seed=i), stop) for i, p in enumerate(some)]), engine


SHAPES = {"chain": (4, 1, 4), "tree": (4, 3, 12)}         # depth, width, drafts


@pytest.fixture(scope="module")
def trained():
    """A drafter that has learned some answers of the target by heart: long paths of its trees are accepted."""
    drafter = toy_drafter(TARGET, MAPS[2], gain=1.0)
    answers = [g.prompt_ids + g.token_ids for g in run(Lockstep, prompts(10), 10)[0]]
    ids, learn = torch.zeros(10, 140, dtype=torch.long), torch.zeros(10, 140, dtype=torch.bool)
    for i, (a, p) in enumerate(zip(answers, prompts(10))):
        ids[i, :len(a)] = torch.tensor(a)
        learn[i, len(p):len(a)] = True
    opt = torch.optim.Adam(drafter.parameters(), lr=0.01)
    for _ in range(60):
        loss, accepted = prism.unrolled_loss(drafter, TARGET, ids, learn, 3)
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
    _, features = target.features(positions.new_tensor(ids)[None], positions[None], dense_attend(), drafter.config.taps)
    cache, x = KVCache(drafter.config, row + steps + 1), torch.tensor(ids)
    assert cache.k.shape[0] == drafter.config.n_layer
    a = drafter(1, target.embed(x[1:row + 2]), drafter.fuse(features[0, :row + 1]), positions[:row + 1], FullKeys(cache, 0, 0, row + 1).attend)[-1:]
    states = [a]
    for step in range(2, steps + 1):
        at = row + step - 1
        a = drafter(step, target.embed(x[row + step][None]), a, torch.tensor([at]), FullKeys(cache, 0, at, 1).attend)
        states.append(a)
    return torch.cat(states)


@torch.no_grad()
@pytest.mark.parametrize("step_map, layers, taps", [((0,), 1, ()), ((0, 1), 1, ()), ((0, 1, 2), 1, (0, 1, 2)), ((0,), 2, ()), ((0, 0, 1), 1, (0, 1, 2))])
def test_states_in_training_equal_states_in_drafting(step_map, layers, taps):
    drafter, steps = toy_drafter(TARGET, step_map, n_layer=layers, taps=taps), 5
    ids = prompts(60)[-1][:1] + [int(t) for t in torch.randint(0, 12, (600,), generator=torch.Generator().manual_seed(1))][:330]
    x = torch.tensor([ids])
    _, features = TARGET.features(x, torch.arange(len(ids))[None], dense_attend(), taps)
    states = prism.unroll(drafter, TARGET, x, features, steps)
    again = prism.unroll(drafter, TARGET, x, features, steps, recompute=True)
    wrong = 0.0
    for row in (0, 1, 7, 40, 255, 256, 300):                       # blocks of queries end at 256
        want = sequential_states(drafter, TARGET, ids, row, steps)
        got = torch.stack([s[0, row] for s in states])
        assert (got - want).abs().max() < 1e-4
        wrong = max(wrong, (torch.stack([s[0, row] for s in again]) - want).abs().max().item())
    if max(step_map) and layers == 1:
        assert wrong > 0.05                                        # context keys of the wrong module are something else
    else:
        assert wrong < 1e-4                                        # with one module there is no wrong one


# -- losslessness ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("modules", [1, 2, 3, "trained"])
def test_greedy_is_identical_to_autoregressive(modules, shape, trained):
    some, drafter = prompts(10), DRAFTERS.get(modules, trained)
    want, _ = run(Lockstep, some)
    assert max(len(set(g.token_ids)) for g in want) > 5
    for batch in (1, 8):
        got, engine = run(lockstep(drafter, *SHAPES[shape]), some, batch)
        assert [g.token_ids for g in got] == [g.token_ids for g in want]
        assert engine.cache.runs == [] and engine.planner.drafter.notes == {}
        steps = [s for g in got for s in g.steps]
        assert sum(s.accepted for s in steps) > 0.05 * len(steps) and any(s.accepted < s.proposed for s in steps)
        assert all(0 <= s.accepted <= s.proposed <= 4 and s.committed in (s.accepted, s.accepted + 1) for s in steps)
    if modules == "trained":
        assert sum(s.accepted for s in steps) > 1.2 * len(steps) and max(s.accepted for s in steps) == 4
