"""Trained drafters, PRISM and SpecDiff alike: toys of them for other tests (test_engine.py: what they draft
changes no token), and their folders. MINISPEC_FULL=1 runs a hundred times as many samples."""

import copy
import functools
import os
from dataclasses import replace

import conftest
import pytest
import torch
from conftest import ids_of, refused, same, seeded, table, toy_model, values
from safetensors.torch import load_file, save_file

from minispec import prism, specdiff
from minispec.core.engine import Engine
from minispec.core.requests import Request
from minispec.core.scheduler import SyncScheduler
from minispec.core.verify import Sampling
from minispec.data import recorded, rollouts
from minispec.data.recorded import most_frequent
from minispec.prism import PrismConfig, PrismDrafter, PrismTreeDrafter
from minispec.specdiff import SpecDiffDrafter
from minispec.tools.checkpoints import fingerprint
from minispec.tools.drafter_files import load_drafter, save_drafter

FULL = bool(os.environ.get("MINISPEC_FULL"))
# A small vocabulary, so that even random drafts are often right.
TARGET = toy_model(vocab=12, seed=2)
FORMS = {
    "blind": dict(),
    "reading": dict(reads=True),
    "markov": dict(reads=True, feature_layers=(0, 1), rank=4),
}


def toy_prism(target=TARGET, step_map=(0, 1), gain=2.0, **changes):
    """Random, and not near the target as a new one is: so it is right by chance, and not always wrong."""
    drafter = prism.for_target(target, step_map, **changes).eval()
    torch.manual_seed(5)
    chance = dict(prism.Prism(drafter.config, target).named_parameters())
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            if p.ndim == 2:
                p.copy_(chance[name] * gain)
    return drafter


def toy_specdiff(target=TARGET, gamma=4, n_layer=1, **changes):
    """Untrained, with an open slot and a projection that are not trivial."""
    drafter = specdiff.for_target(target, gamma=gamma, n_layer=n_layer, **changes).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        drafter.mask.normal_()
        if drafter.join is not None:
            drafter.join.weight[:, drafter.config.d_model :].normal_(std=0.2)
        if drafter.config.feature_layers:
            drafter.fuse.weight.add_(torch.randn_like(drafter.fuse.weight) * 0.1)
        for linear in drafter.markov or ():
            linear.weight.normal_(std=0.5)
    return drafter


prompts = functools.partial(conftest.prompts, vocab=12)


def scheduler(drafter, stop=0.0, k=None, **settings):
    """SyncScheduler with a drafter of either kind."""

    def make(engine):
        kind = PrismTreeDrafter if "width" in settings else PrismDrafter
        if not isinstance(drafter, prism.Prism):
            kind = SpecDiffDrafter
        made = kind(drafter, engine.model, **settings)
        made.min_confidence = stop
        return SyncScheduler(engine, made, k or made.gamma * made.width)

    return make


def run(plan, some, batch=4, max_new=30, sampling=Sampling()):
    engine = Engine(TARGET, plan, batch, prefill_chunk=16)
    requests = [Request(p, max_new, replace(sampling, seed=i)) for i, p in enumerate(some)]
    return engine.generate(requests), engine


def features_of(ids, layers=()):
    """The target's states (B, T, F), from these layers, too, of texts (B, T), or of one."""
    x = torch.as_tensor(ids)
    return TARGET(x.view(-1, x.shape[-1]), feature_layers=layers)


def texts(some):
    """Answers of TARGET as a batch."""
    rows = [(g.prompt_ids, g.token_ids) for g in run(SyncScheduler, some, 10)[0]]
    return recorded.padded([rollouts.read(TARGET, *row, 0) for row in rows])


def fit(drafter, loss, steps, lr=0.01):
    """Train a drafter; loss(step) is a scalar."""
    optimizer = torch.optim.Adam(drafter.parameters(), lr=lr)
    for step in range(steps):
        one = loss(step)
        optimizer.zero_grad()
        one.backward()
        optimizer.step()
    return one.item()


@functools.cache
@torch.inference_mode(False)
@torch.enable_grad()
def trained(kind):
    """A drafter that has learned some answers of the target by heart: long drafts of it are accepted."""
    batch = texts(prompts(10))
    if kind == "prism":
        drafter = toy_prism(gain=1.0)
        fit(drafter, lambda step: prism.unrolled_loss(drafter, batch, 3)[0], 40)
    else:
        drafter = toy_specdiff(reads=True, n_layer=2)
        fit(drafter, lambda step: specdiff.training_loss(drafter, "ce", batch, 32, seeded(step)), 80)
    return drafter.eval()


# kind, settings, the drafts of a step at least that are accepted of a trained one
CASES = {name: row for name, *row in values("""
    "prism chain"      | "prism"    | {"depth": 4, "k": 4} | 1.2
    "prism early stop" | "prism"    | {"depth": 4, "k": 4, "stop": 0.15} | 0.8
    "prism tree"       | "prism"    | {"depth": 4, "width": 2, "k": 8} | 1.2
    "prism early tree" | "prism"    | {"depth": 4, "width": 2, "k": 8, "stop": 0.08} | 0.8
    "one chain"        | "specdiff" | {} | 1.0
    "early stop"       | "specdiff" | {"stop": 0.8} | 0.6
    "three chains"     | "specdiff" | {"k_drafts": 3} | 1.0
    "warm chains"      | "specdiff" | {"k_drafts": 3, "temperature": 1.5} | 1.0
    "eight chains"     | "specdiff" | {"k_drafts": 8, "temperature": 2.0} | 0.6
""")}


def case(name):
    if name in CASES:
        kind, settings, _ = CASES[name]
        return scheduler(trained(kind), **settings)
    drafter, settings = {**RANDOM, **REJECTED}[name]
    return scheduler(drafter, **settings)


TINY = toy_model(vocab=6, seed=3, gain=3.0, n_layer=1, n_head=2, n_kv_head=1)
TOYS = {"prism": toy_prism, "specdiff": toy_specdiff}


def untrained(target, rows):
    """{name: (drafter, settings)} of a table: name, kind, its shape, settings."""
    return {name: (TOYS[kind](target, **shape), settings) for name, kind, shape, settings in values(rows)}


RANDOM = untrained(TARGET, """
    "random prism 1"  | "prism"    | {"step_map": [0]} | {"k": 6}
    "random prism 3"  | "prism"    | {"step_map": [0, 1, 2]} | {"k": 6}
    "random specdiff" | "specdiff" | {} | {"k": 6}
    "random markov"   | "specdiff" | {"reads": true, "feature_layers": [0, 1], "rank": 4} | {"k": 6}
""")
REJECTED = untrained(TINY, """
    "tiny prism chain"      | "prism"    | {} | {"depth": 2, "k": 2}
    "tiny prism early stop" | "prism"    | {} | {"depth": 2, "k": 2, "stop": 0.15}
    "tiny prism tree"       | "prism"    | {} | {"depth": 2, "width": 3, "k": 3}
    "tiny chain"            | "specdiff" | {"gamma": 2, "reads": true} | {}
    "tiny early stop"       | "specdiff" | {"gamma": 2, "reads": true} | {"stop": 0.8}
    "tiny three chains"     | "specdiff" | {"gamma": 2, "rank": 2} | {"k_drafts": 3}
""")


# -- folders -------------------------------------------------------------------------------------------------

DRAFTERS = {
    "prism": toy_prism(step_map=(0, 1, 1, 2)),
    "some tokens": toy_prism().restrict(torch.tensor([1, 2, 5])),
    **{form: toy_specdiff(**changes) for form, changes in FORMS.items()},
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_save_and_load(name, tmp_path):
    drafter = DRAFTERS[name]
    save_drafter(drafter, tmp_path, TARGET)
    again = load_drafter(tmp_path, TARGET, type(drafter.config))
    assert again.config == replace(drafter.config, target=fingerprint(TARGET))
    stored = copy.deepcopy(drafter).bfloat16().float()
    assert same(stored.state_dict(), again.state_dict())


# A text in config.json, its replacement, part of the line; or what else is done to the folder.
DAMAGED = """
"d_ff": 64 | "d_ff": 48 | d_ff of the drafter must be 64 as in the target, got 48
"n_layer": 1 | "n_layer": 2 | does not fit config.json
"prism" | "llama" | not a drafter made by train_prism.py
"draft_vocab": 3 | "draft_vocab": 12 | draft_vocab 12 is out of range
"draft_vocab": 3 | "draft_vocab": -1 | draft_vocab must be a number at least 0 and at most 1048576, got -1
"qk_norm": false | "qk_norm": "no" | qk_norm of the drafter must be False as in the target, got 'no'
"tied": false | "tied": "no" | tied must be true or false, got 'no'
"feature_layers": [] | "feature_layers": [0, 99] | feature_layers must be layers of the target, got [0, 99]
"vocab_size": 12 | "vocab_size": 6 | vocab_size of the drafter must be 12 as in the target, got 6
"block_size": 512 | "block_size": 1024 | block_size of the drafter must be 512 as in the target, got 1024
"d_model": 32 | "d_model": 16 | d_model of the drafter must be 32 as in the target, got 16
"n_layer": 1 | "n_layer": 1000000000 | at most 1024
"head_dim": 8 | "head_dim": "wide" | head_dim of the drafter must be 8 as in the target, got 'wide'
no object | | config.json
no number | | holds values that are not finite numbers
"n_head": 4 | "n_head": 8 | n_head of the drafter must be 4 as in the target, got 8
shorter weights | | damaged
"""


@pytest.mark.parametrize("damage, instead, message", table(DAMAGED))
def test_damaged_folders_are_named(damage, instead, message, tmp_path):
    save_drafter(DRAFTERS["some tokens"], tmp_path, TARGET)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    if instead:
        config.write_text(config.read_text().replace(damage, instead))
    elif damage == "no object":
        config.write_text("[1]")
    elif damage == "no number":
        tensors = load_file(weights)
        tensors["bank.0.norm.weight"][0] = float("nan")
        save_file(tensors, weights)
    else:
        weights.write_bytes(weights.read_bytes()[:3000])
    with refused(message):
        load_drafter(tmp_path, TARGET, PrismConfig)


def test_drafts_are_of_the_draft_vocabulary():
    some = [1, 2, 5]
    plain, _ = run(SyncScheduler, prompts(4))
    for drafter in (toy_prism(), toy_specdiff()):
        drafter.restrict(torch.tensor(some))
        got, _ = run(scheduler(drafter), prompts(4))
        drafted = {t for g in got for t, who in zip(g.token_ids, g.who) if who == "draft"}
        assert ids_of(got) == ids_of(plain) and set() < drafted <= set(some)
    for ids in ([0, 1, 1], [0, 1, 12], [-1, 1, 2]):
        with refused("names tokens from 0 to 11, each once"):
            PrismDrafter(toy_prism().restrict(torch.tensor(ids)), TARGET)


def test_the_most_frequent_tokens_of_answers():
    tokens = torch.tensor([3, 7, 5, 5, 3, 3])
    # Of those never seen, the first.
    assert most_frequent(tokens, 5, 8).tolist() == [3, 5, 7, 0, 1]
    assert most_frequent(tokens, 0, 8) is most_frequent(tokens, 8, 8) is None
