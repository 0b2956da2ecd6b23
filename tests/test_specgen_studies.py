"""The studies of SpecGen: rounds along a given text, their tables, and the terms of the cost model."""
import types

import pytest
import torch
from conftest import attend_alone, toy_model

from minispec.core.attention import FullKeys
from minispec.core.engine import Engine, Lockstep
from minispec.core.requests import Request
from minispec.specgen import DraftPool, SpecGen, look_ahead, predicted_speedup
from minispec.studies import specgen as studies
from minispec.studies import texts
from minispec.studies.replay import BestKeys, Replay, Text, replay
from minispec.studies.specgen import measure_costs
from minispec.studies.tables import render
from minispec.tools import methods

MODEL = toy_model()
PROMPT = torch.randint(0, 64, (90,), generator=torch.Generator().manual_seed(5)).tolist()
AR = Engine(MODEL, Lockstep, 1).generate([Request(PROMPT, 120)])[0]


@pytest.fixture(scope="module")
def read_text():
    """A text of the toy model's own, read up to 100 tokens and 75 beyond."""
    text = Text(MODEL, (PROMPT + AR.token_ids)[:180])
    assert list(text.contexts([100], 75)) == [100]
    return text


@pytest.mark.parametrize("select, k, sparsity", [("window", 4, 0.1), ("window", 8, 0.3), ("pillar", 8, 1.0), ("pillar", 3, 0.1), ("ahead", 8, 0.1)])
def test_a_replay_accepts_what_decoding_accepts(read_text, select, k, sparsity, monkeypatch):
    """Along the model's greedy answer, round by round: rows behind a rejected draft are the same, too, which count in the scores."""
    monkeypatch.setattr("minispec.studies.replay.TEMPERATURES", (0.0,))
    r = Replay(read_text, 100, select, k, sparsity)
    replay(read_text, [r], 175)
    engine = Engine(MODEL, lambda e: SpecGen(e, k, sparsity, 0, select=select), 1)
    # The engine's first token is the last one of the text that was read.
    request = Request((PROMPT + AR.token_ids)[:100], 81)
    engine.generate([request])
    decoded = [s.accepted for s in request.generation.steps]
    replayed = [a for a, in r.accepted]
    assert len(replayed) > 5 and replayed == decoded[:len(replayed)]


def test_a_replay_with_everything_accepts_everything(read_text):
    r = Replay(read_text, 100, "pillar", 8, 1.0)
    replay(read_text, [r], 175)
    assert len(r.accepted) == 8 and torch.tensor(r.accepted).min() > 8 - 1e-3


def test_rounds_side_by_side_are_rounds_alone(read_text):
    settings = [("pillar", 8, 0.1), ("ahead", 4, 0.05), ("oracle", 5, 0.05), ("window", 8, 0.1)]
    together = [Replay(read_text, 100, *s) for s in settings]
    replay(read_text, together, 175)
    for r, s in zip(together, settings):
        alone = Replay(read_text, 100, *s)
        replay(read_text, [alone], 175)
        assert torch.allclose(torch.tensor(alone.accepted), torch.tensor(r.accepted), atol=1e-4)


def test_replays_leave_the_text_as_it_was_read(read_text):
    kept = read_text.cache.k.clone()
    replay(read_text, [Replay(read_text, 100, select, 8, 0.05) for select in ("oracle", "pillar")], 175)
    assert torch.equal(read_text.cache.k, kept)


def test_replayed_chances_are_the_rejection_rules_own(read_text, monkeypatch):
    """sum of min(p, q) is how often sampled drafts are accepted."""
    monkeypatch.setattr("minispec.studies.replay.TEMPERATURES", (1.0,))
    r = Replay(read_text, 100, "window", 1, 0.05)
    p = read_text.logits[0].softmax(-1)
    q = torch.rand(64, generator=torch.Generator().manual_seed(0)).softmax(0)
    r.judge(q.log()[None])
    drafts = torch.multinomial(q, 20000, True, generator=torch.Generator().manual_seed(1))
    assert (p[drafts] / q[drafts]).clamp(max=1).mean().item() == pytest.approx(r.accepted[0][0], abs=0.02)


def test_what_an_oracle_reads_is_the_best_of_each_row(read_text):
    """Two rows, each with its own best 9 positions of 100, by dense attention under a mask."""
    d = MODEL.config.head_dim
    q, k, v = torch.randn(3, 2, 4, d, generator=torch.Generator().manual_seed(0)).unbind()
    k, v = k[:, :2], v[:, :2]
    with read_text.lent(slice(100, 102)):
        keys = BestKeys(read_text.cache, read_text.blocks, 100, 2, 9)
        out = attend_alone(keys)(0, q, k, v)
        all_k, all_v = (x[0, :, :102].repeat_interleave(2, 0) for x in (read_text.cache.k, read_text.cache.v))
        logits = torch.einsum("nhd,htd->hnt", q, all_k) / d ** 0.5
        logits[:, 0, 101] = float("-inf")
        mass = logits.softmax(-1)[:, :, :100].unflatten(0, (2, 2)).mean(1).repeat_interleave(2, 0)
        worst = mass.topk(91, largest=False).indices
        want = logits.scatter(2, worst, float("-inf")).softmax(-1) @ all_v
    assert torch.allclose(out, want.transpose(0, 1), atol=1e-5)


def test_repeated_grams():
    assert texts.repeated(list(range(30)), 10) == 0 and texts.repeated([1, 2] * 10, 5) == 1
    assert texts.repeated([*range(8), 50, *range(8)], 4) == 0.25


@pytest.fixture
def tiny(monkeypatch):
    """(settings, tokenizer) of studies on texts of the toy model."""
    monkeypatch.setattr(texts, "text", lambda kind, number, length, *_: (PROMPT + AR.token_ids)[number:number + length])
    for name, value in dict(CONTEXTS=(60,), AFTER=60, NEW=30).items():
        monkeypatch.setattr(studies, name, value)
    return methods.settings(quick=True, data=None), types.SimpleNamespace(ours=True)


def test_the_study_of_acceptance_runs_and_is_shown(tiny):
    out = studies.acceptance(tiny[0], MODEL, tiny[1])
    text, = out["kinds"]["trace"]
    assert [row[0] for row in text["60"]["rows"]] == list(studies.SELECTIONS)
    assert all(0 <= accepted <= 8 for row in text["60"]["rows"] for accepted in row[3])
    assert "| pillar, 8, 5 % | " in render("acceptance", out) and "trace, 60 tokens" in render("acceptance_kinds", out)


def test_the_study_of_serving_continues_prompts_that_were_read_once(tiny):
    rows = studies.serving_rows(tiny[0], MODEL, tiny[1], 60, 3, 0)
    assert [(r["method"], r["temperature"]) for r in rows] == [(m, t) for t in (0.0, 0.65) for m in ("ar", "ngram", studies.PAPER, "specgen")]
    assert [r.get("identical") for r in rows] == [None, 3, 3, 3] + [None] * 4
    assert [bool(r.get("predicted")) for r in rows] == [False, False, True, False] * 2
    assert "| 3 of 3 |" in render("serving", {"rows": rows})
    want = Engine(MODEL, Lockstep, 1).generate([Request(PROMPT[:60], 30)])[0].token_ids
    kept = studies.read_once(MODEL, [PROMPT[:60]])
    engine, requests = studies.warm_cells(MODEL, tiny[0], kept, [PROMPT[:60]], 0.0)["ar"]()
    assert engine.generate(requests)[0].token_ids == want and engine.iterations[0]["prefill"] == 9


def test_the_study_of_the_system_goes_on_with_thoughts_that_were_read_once(tiny, monkeypatch):
    for name, value in dict(THOUGHTS=(300, 600), MORE=20).items():           # a tenth of it is asked for
        monkeypatch.setattr(studies, name, value)
    out = studies.scheduler(tiny[0], MODEL, types.SimpleNamespace(ours=False))
    assert [r["stage"] for r in out["rows"]] == list(studies.STAGES) and {r["identical"] for r in out["rows"]} == {8}
    assert out["cache_tokens"] == (sum(30 + i * 30 // 7 for i in range(8)) + 8 * 20) // 2
    assert all(r["prefill_rows"] == 8 * 9 for r in out["rows"])


def test_attention_share_grows_with_the_context():
    model = toy_model(block_size=16384)
    long, short = (measure_costs(model, n, 4, 8, 0.05, 64) for n in (16000, 64))
    assert 0 < short["attention_share"] < long["attention_share"] < 1 and long["verify_cost"] >= 1
    assert predicted_speedup(8, 8, **long) > 0                     # they are its arguments


def test_costs_of_a_model_whose_clock_is_known(monkeypatch):
    """A forward takes 10 and 1 a row, attention 3 a request and 1 for 100 entries that a row sees, and so on: the costs are these,
    whatever is fixed about attention belongs to attention, and the prediction is a round's time by hand."""
    clock = [0.0]

    def tick(seconds, x=None):
        clock[0] += seconds
        return x

    class Model:
        config, dtype, device = MODEL.config, torch.float32, torch.device("cpu")

        def __call__(self, tokens, positions, attend):
            c, n = self.config, tick(10 + len(tokens), len(tokens))
            return attend(0, torch.zeros(n, c.n_head, c.head_dim), *torch.zeros(2, n, c.n_kv_head, c.head_dim))

        def logits(self, hidden):
            return hidden

    class Full(FullKeys):
        def __init__(self, *args, **kw):
            super().__init__(*args, **kw)
            self.server = self                                              # each request is a call of its own

        def serve(self, some):
            return lambda layer, k, v: None, lambda layer, q: tick(3 + self.n * (self.length - self.n) / 100, q)

    class Pool(DraftPool):
        def gather(self, keys):
            shape = self.k.shape
            super().gather(keys)
            tick(2 + 50 * (self.k.shape != shape))                          # a pool grows once, not in every round

        def serve(self, some):
            store, read = super().serve(some)
            return store, lambda *args: tick(4, read(*args))

    for name, fake in (("time", types.SimpleNamespace(perf_counter=lambda: clock[0])), ("FullKeys", Full), ("DraftPool", Pool),
                       ("look_ahead", lambda scores, memory, real=look_ahead: tick(0.5, real(scores, memory)))):
        monkeypatch.setattr(studies, name, fake)
    costs = measure_costs(Model(), 100, 4, 8, 0.05, 10)
    rest, mixed, attention = 10 + 4, 10 + 8, 4 * (3 + 1)                    # 4 requests; 8 rows are 4 * 17 / 9, rounded up
    draft, verify, select = 4, 4 * (3 + 9), 4 * (0.5 + 2)
    assert costs == pytest.approx({"attention_share": attention / (rest + attention), "growth": mixed / rest, "draft_cost": draft / attention,
                                   "verify_cost": verify / attention, "select_cost": select / attention})
    assert predicted_speedup(8, 6, **costs) == pytest.approx(7 * (rest + attention) / (9 * mixed + 8 * draft + verify + select))
