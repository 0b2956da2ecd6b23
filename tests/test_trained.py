"""Trained drafters, PRISM and SpecDiff alike, on toy models: what they draft changes no token, their
caches come back, rejection has the target's distribution, and folders are checked. MINISPEC_FULL=1 runs a
hundred times as many samples."""

import copy
import functools
import itertools
import os
from dataclasses import replace

import conftest
import pytest
import torch
from conftest import chi_square, dense_logits, seeded, table, toy_model

from minispec import prism, specdiff
from minispec.core import verify
from minispec.core.engine import Engine, SyncScheduler
from minispec.core.gpt import dense_attend
from minispec.core.requests import Request
from minispec.core.verify import RULES, Sampling, warp
from minispec.core.draft_head import DraftHead, most_frequent
from minispec.data import recorded, rollouts
from minispec.prism import PrismConfig, PrismDrafter
from minispec.specdiff import SpecDiffConfig, SpecDiffDrafter
from minispec.tools.checkpoints import fingerprint
from minispec.tools.drafter_files import load_drafter, save_drafter

FULL = bool(os.environ.get("MINISPEC_FULL"))
# A small vocabulary, so that even random drafts are often right.
TARGET = toy_model(vocab=12, seed=2)
MAPS = {1: (0,), 2: (0, 1), 3: (0, 1, 2)}
FORMS = {
    "blind": dict(),
    "reading": dict(reads=True),
    "three layers": dict(reads=True, feature_layers=(0, 1)),
    "markov": dict(reads=True, feature_layers=(0, 1), rank=4),
}


def toy_prism(target=TARGET, step_map=(0, 1), seed=5, gain=2.0, **changes):
    """Random, and not near the target as a new one is: so it is right by chance, and not always wrong."""
    drafter = prism.for_target(target, step_map, **changes).eval()
    torch.manual_seed(seed)
    chance = dict(prism.Prism(drafter.config, target).named_parameters())
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            if p.ndim == 2:
                p.copy_(chance[name] * gain)
    return drafter


def toy_specdiff(target=TARGET, seed=5, gamma=4, n_layer=1, **changes):
    """Untrained, with an open slot and a projection that are not trivial."""
    drafter = specdiff.for_target(target, gamma=gamma, n_layer=n_layer, **changes).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        drafter.mask.normal_()
        if drafter.join is not None:
            drafter.join.weight[:, drafter.config.d_model :].normal_(std=0.2)
        if drafter.fuse is not None:
            drafter.fuse.weight.add_(torch.randn_like(drafter.fuse.weight) * 0.1)
        if drafter.markov is not None:
            for linear in drafter.markov:
                linear.weight.normal_(std=0.5)
    return drafter


prompts = functools.partial(conftest.prompts, vocab=12)


def scheduler(drafter, target=TARGET, stop=0.0, k=None, **settings):
    """SyncScheduler with a drafter of either kind."""

    def make(engine):
        kind = PrismDrafter if isinstance(drafter, prism.Prism) else SpecDiffDrafter
        made = kind(drafter, target, **settings)
        made.min_confidence = stop
        return SyncScheduler(engine, made, k or made.gamma * made.width)

    return make


def run(plan, some, batch=4, max_new=30, sampling=Sampling(), stop=(), target=TARGET, **kw):
    engine = Engine(target, plan, batch, prefill_chunk=16, **kw)
    requests = [Request(p, max_new, replace(sampling, seed=i), stop) for i, p in enumerate(some)]
    return engine.generate(requests), engine


def ids_of(generations):
    return [g.token_ids for g in generations]


def features_of(ids, layers=()):
    """The target's states (B, T, F), from these layers, too, of texts (B, T), or of one."""
    x = torch.as_tensor(ids)
    return TARGET(x.view(-1, x.shape[-1]), torch.arange(x.shape[-1])[None], dense_attend(), layers)


def steps_of(generations):
    return [s for g in generations for s in g.rounds]


@functools.cache
def plain(n, sampling=Sampling()):
    """Tokens of the autoregressive loop for prompts(n)."""
    return ids_of(run(SyncScheduler, prompts(n), 17, sampling=sampling)[0])


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
        assert prism.unrolled_loss(drafter, batch, 3)[1][0] > 0.6
    else:
        drafter = toy_specdiff(reads=True, n_layer=2)
        fit(
            drafter, lambda step: specdiff.training_loss(drafter, "ce", batch, 32, seeded(step)), 80
        )
        assert specdiff.estimate(drafter, batch, 32)["greedy"] > 2
    return drafter.eval()


# kind, settings, the drafts of a step at least that are accepted of a trained one
CASES = {
    "prism chain": ("prism", dict(depth=4, k=4), 1.2),
    "prism early stop": ("prism", dict(depth=4, k=4, stop=0.15), 0.8),
    "prism tree": ("prism", dict(depth=4, width=2, k=8), 1.2),
    "prism early tree": ("prism", dict(depth=4, width=2, k=8, stop=0.08), 0.8),
    "one chain": ("specdiff", dict(), 1.0),
    "early stop": ("specdiff", dict(stop=0.8), 0.6),
    "three chains": ("specdiff", dict(k_drafts=3), 1.0),
    "warm chains": ("specdiff", dict(k_drafts=3, temperature=1.5), 1.0),
    "eight chains": ("specdiff", dict(k_drafts=8, temperature=2.0), 0.6),
}
every_case = pytest.mark.parametrize("name", CASES)


def case(name):
    kind, settings, _ = CASES[name]
    return scheduler(trained(kind), **settings)


# -- losslessness --------------------------------------------------------------------------------------------


@every_case
def test_greedy_is_identical_to_autoregressive(name):
    many = 100 if FULL else 10
    _, settings, least = CASES[name]
    assert max(len(set(ids)) for ids in plain(many)) > 5
    for batch, n in ((1, 2), (8, many)):  # one by one takes longest
        got, engine = run(case(name), prompts(n), batch)
        assert ids_of(got) == plain(n)
        assert engine.cache.used == 0
        assert engine.scheduler.drafter.draft_states == {}
    steps = steps_of(got)
    assert all(0 <= s.accepted <= s.proposed for s in steps)
    assert all(s.committed in (s.accepted, s.accepted + 1) for s in steps)
    assert sum(s.accepted for s in steps) > least * len(steps)
    assert any(s.accepted < s.proposed for s in steps)
    if "stop" in settings:  # ends where the drafter is unsure
        assert len({s.proposed for s in steps if 0 < s.position < 25}) > 1


RANDOM = {f"prism {m}": toy_prism(step_map=MAPS[m]) for m in (1, 3)} | {"specdiff": toy_specdiff()}


@pytest.mark.parametrize("name", RANDOM)
def test_greedy_is_identical_with_random_drafters(name):
    got, _ = run(scheduler(RANDOM[name]), prompts(6), 3)
    assert ids_of(got) == plain(6)
    steps = steps_of(got)
    assert any(s.accepted for s in steps)
    assert any(s.accepted < s.proposed for s in steps)


def test_control_a_tree_walked_without_looking_at_the_tokens_is_caught(monkeypatch):
    def blind(draft, parents, best):
        return ([1], best[1]) if draft else ([], best[0])

    monkeypatch.setattr(verify, "greedy_tree", blind)
    assert ids_of(run(case("prism tree"), prompts(6))[0]) != plain(6)


@every_case
def test_end_of_text_and_length_limit_inside_an_accepted_run(name):
    some = prompts(8)
    full = plain(8)
    for stop in {ids[i] for ids in full for i in (7, 23)}:
        got, _ = run(case(name), some, stop=[stop])
        for g, ids in zip(got, full):
            end = ids.index(stop) + 1 if stop in ids else len(ids)
            assert g.token_ids == ids[:end]
            assert len(g.who) == end
            assert sum(s.accepted for s in g.rounds) == g.who.count("draft")
    for limit in (1, 2, 3, 6):  # down to fewer drafts than asked for
        almost_full = [1] * (512 - limit)  # the context
        got, _ = run(case(name), [*some, almost_full], max_new=limit)
        assert ids_of(got[:8]) == [ids[:limit] for ids in full]
        assert len(got[8].token_ids) == limit


@pytest.mark.parametrize("policy", ["preempt", "offload"])
@pytest.mark.parametrize(
    "name, temperature", [("prism tree", 0.0), ("prism tree", 1.0), ("three chains", 0.0)]
)
def test_requests_that_leave_the_cache_and_return_lose_nothing(policy, name, temperature):
    sampling = Sampling(temperature)
    got, engine = run(
        case(name), prompts(8), 8, sampling=sampling, cache_tokens=220, admission=policy
    )
    assert ids_of(got) == plain(8, sampling)
    assert engine.admission.recomputed or engine.cache.offloaded


@every_case
@pytest.mark.parametrize(
    "sampling", [Sampling(0.65), Sampling(1.0, 0, 0.9), Sampling(0.65, 5)], ids=str
)
def test_a_seed_is_a_text(name, sampling):
    for batch, n in ((1, 4), (17, 17)):
        got, _ = run(case(name), prompts(n), batch, sampling=sampling)
        assert ids_of(got) == plain(17, sampling)[:n]
    steps = steps_of(got)
    assert sum(s.accepted for s in steps) > 0.1 * len(steps)


@pytest.mark.parametrize("rule", RULES)
def test_a_seed_is_a_text_under_every_rule_that_walks(rule):
    """Rejection alone has other texts; the walk judges trees that were drafted without chance."""
    sampling = Sampling(1.0, rule=rule)
    plans = {
        name: case(name) for name in ("prism chain", "prism tree", "one chain", "three chains")
    }
    plans["markov"] = scheduler(toy_specdiff(**FORMS["markov"]))
    for name, plan in plans.items():
        same = ids_of(run(plan, prompts(6), sampling=sampling)[0]) == plain(6, Sampling(1.0))
        assert same == (rule != "rejection" or name == "prism tree"), name


# -- sampling: chi-square over all answers of up to three tokens; a correct rule fails with probability 1e-6 -

TINY = toy_model(vocab=6, seed=3, gain=3.0, n_layer=1, n_head=2, n_kv_head=1)
PROMPT = [1, 5, 2, 4, 3, 3]
END = 2
AT = Sampling(0.9, 0, 0.95, rule="rejection")
REJECTED = {
    "prism chain": (toy_prism(TINY), dict(depth=2, k=2)),
    "prism early stop": (toy_prism(TINY), dict(depth=2, k=2, stop=0.15)),
    "prism tree": (toy_prism(TINY), dict(depth=2, width=3, k=3)),
    "one chain": (toy_specdiff(TINY, gamma=2, reads=True), dict()),
    "early stop": (toy_specdiff(TINY, gamma=2, reads=True), dict(stop=0.8)),
    "three chains": (toy_specdiff(TINY, gamma=2), dict(k_drafts=3)),
}


@functools.cache
def next_to(*tokens):
    return warp(dense_logits(TINY, PROMPT + list(tokens))[-1], AT)


@functools.cache
def answers():
    """{answer: its probability}: three tokens, or fewer and the end."""
    out = {}
    for tokens in itertools.product(range(6), repeat=3):
        cut = tokens[: tokens.index(END) + 1] if END in tokens else tokens
        parts = [next_to(*cut[:i])[token].item() for i, token in enumerate(cut)]
        out[cut] = torch.tensor(parts).prod().item()
    return out


def sampled(name, rounds=1000, vocabulary=None):
    """(p-value of the first three tokens of answers, accepted drafts an answer)."""
    drafter, settings = REJECTED[name]
    if vocabulary is not None:
        drafter = copy.deepcopy(drafter).restrict(vocabulary)
    rounds *= 40 if FULL else 1
    cells = {answer: i for i, answer in enumerate(answers())}
    counts = torch.zeros(len(cells), dtype=torch.long)
    accepted = 0
    for first in range(0, rounds, 250):
        # Room for all drafts of a round; only the first three tokens are of interest.
        requests = [Request(PROMPT, 20, replace(AT, seed=first + i), [END]) for i in range(250)]
        for r, _ in Engine(TINY, scheduler(drafter, TINY, **settings), 250).stream(requests):
            if len(r.generation.token_ids) >= 3:
                r.cancel()
        for g in (r.generation for r in requests):
            counts[cells[tuple(g.token_ids[:3])]] += 1
            accepted += sum(s.accepted for s in g.rounds)
    return chi_square(counts, torch.tensor([*answers().values()])), accepted / rounds


@pytest.mark.parametrize("name", REJECTED)
def test_rejection_has_the_targets_distribution(name):
    value, accepted = sampled(name)
    assert value > 1e-6
    assert accepted > 0.05


def leave_out_the_improbable(result):
    """To end before the draft that was improbable is to have chosen among the draws."""
    chain, q = result
    n = len(chain) - (len(chain) > 0 and q[len(chain) - 1, chain[-1]].item() < 0.2)
    return chain[:n], q[:n]


def report_another_q(result):
    """The argmax, judged as if it had been drawn from the softmax."""
    chain, q = result
    return q.argmax(-1).tolist(), q


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("prism chain", leave_out_the_improbable),
        ("early stop", leave_out_the_improbable),
        ("prism chain", report_another_q),
        ("one chain", report_another_q),
    ],
)
def test_controls_are_rejected(name, wrong, monkeypatch):
    kind, method = (PrismDrafter, "result") if "prism" in name else (SpecDiffDrafter, "_chains")
    honest = getattr(kind, method)
    monkeypatch.setattr(kind, method, lambda self, *args: wrong(honest(self, *args)))
    assert sampled(name, 4000)[0] < 1e-6


@pytest.mark.parametrize("name", ["prism chain", "prism tree", "one chain", "three chains"])
def test_a_draft_vocabulary_without_the_likeliest_tokens_loses_nothing(name, monkeypatch):
    """The controls put q at the wrong tokens, or cut the target's distribution as well."""
    likely = sum(next_to(first) * next_to()[first] for first in range(6))
    some = likely.argsort()[:4].sort().values
    assert sampled(name, vocabulary=some)[0] > 1e-6
    if name == "prism tree":
        real = verify.scores
        inside = torch.zeros(6).index_fill(0, some, 1.0)
        monkeypatch.setattr(verify, "scores", lambda *args: real(*args) * inside)
    monkeypatch.setattr(
        DraftHead, "whole", lambda self, q: torch.nn.functional.pad(q, (0, 6 - len(some)))
    )
    assert sampled(name, vocabulary=some)[0] < 1e-6


# -- folders -------------------------------------------------------------------------------------------------

DRAFTERS = {
    "prism": (lambda: toy_prism(step_map=(0, 1, 1, 2)), PrismConfig),
    "some tokens": (lambda: toy_prism().restrict(torch.tensor([1, 2, 5])), PrismConfig),
    **{
        form: (functools.partial(toy_specdiff, **changes), SpecDiffConfig)
        for form, changes in FORMS.items()
    },
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_save_and_load(name, tmp_path):
    make, config = DRAFTERS[name]
    drafter = make()
    save_drafter(drafter, tmp_path, TARGET)
    again = load_drafter(tmp_path, TARGET, config)
    assert again.config == replace(drafter.config, target=fingerprint(TARGET))
    want = drafter.state_dict()
    got = again.state_dict()
    assert want.keys() == got.keys()
    for key, x in want.items():
        stored = x.bfloat16().to(x.dtype) if x.is_floating_point() else x
        assert torch.equal(stored, got[key])


NARROW = toy_model(vocab=12, n_layer=1, d_model=16, n_head=2, n_kv_head=1)
OTHERS = {
    "vocab_size of the drafter must be 6 as in the target, got 12": TINY,
    "block_size of the drafter must be 1024 as in the target, got 512": toy_model(
        vocab=12, block_size=1024
    ),
    "d_model of the drafter must be 16 as in the target, got 32": NARROW,
}


@pytest.mark.parametrize("message", OTHERS)
def test_a_drafter_of_another_target_is_refused(message, tmp_path):
    save_drafter(toy_specdiff(), tmp_path, TARGET)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, OTHERS[message], SpecDiffConfig)


# A text in config.json, its replacement, part of the line; or what else is done to the folder.
DAMAGED = """
"d_ff": 64 | "d_ff": 48 | does not fit config.json
"prism" | "llama" | not a drafter made by train_prism.py
"draft_vocab": 3 | "draft_vocab": 12 | draft_vocab 12 is out of range
"draft_vocab": 3 | "draft_vocab": -1 | draft_vocab must be a number from 0 and at most 1048576, got -1
"qk_norm": false | "qk_norm": "no" | qk_norm must be true or false, got 'no'
shorter weights | | damaged
no weights | | there is no
no config | | cannot read
"""


@pytest.mark.parametrize("damage, instead, message", table(DAMAGED))
def test_damaged_folders_are_named(damage, instead, message, tmp_path):
    save_drafter(DRAFTERS["some tokens"][0](), tmp_path, TARGET)
    config = tmp_path / "config.json"
    weights = tmp_path / "model.safetensors"
    if instead:
        assert damage in config.read_text()
        config.write_text(config.read_text().replace(damage, instead))
    elif damage == "shorter weights":
        weights.write_bytes(weights.read_bytes()[:3000])
    else:
        os.remove(weights if damage == "no weights" else config)
    with pytest.raises(ValueError, match=message) as e:
        load_drafter(tmp_path, TARGET, PrismConfig)
    assert "\n" not in str(e.value)


def test_drafts_are_of_the_draft_vocabulary():
    some = [1, 2, 5]
    for kind, drafter in (("prism", toy_prism()), ("specdiff", toy_specdiff())):
        drafter.restrict(torch.tensor(some))
        got, _ = run(scheduler(drafter), prompts(4))
        drafted = {t for g in got for t, who in zip(g.token_ids, g.who) if who == "draft"}
        assert ids_of(got) == plain(4) and drafted <= set(some), kind
    for ids in ([0, 1, 1], [0, 1, 12], [-1, 1, 2]):
        with pytest.raises(ValueError, match="names tokens from 0 to 11, each once"):
            PrismDrafter(toy_prism().restrict(torch.tensor(ids)), TARGET)


def test_the_most_frequent_tokens_of_answers():
    assert most_frequent([[3, 3, 5], [5, 3, 7]], 2, 8).tolist() == [3, 5]
    assert most_frequent([[3, 3, 5]], 4, 8).tolist() == [
        3,
        5,
        0,
        1,
    ]  # of those never seen, the first
    assert most_frequent([[3]], 0, 8) is None
    assert most_frequent([[3]], 8, 8) is None
