"""PillarAttn: what is selected, what a draft row sees, and that nothing sparse survives a round."""
import types

import pytest
import torch
from conftest import Arbitrary, attend_alone, cached_kv, dense_logits, only_keys, toy_model

from minispec import specgen
from minispec.core.attention import FullKeys, dense_attend, packed_attend
from minispec.core.engine import Engine, Lockstep
from minispec.core.requests import Request
from minispec.core.kv_cache import KVCache
from minispec.specgen import DraftPool, PillarKeys, Round, SpecGen, budget, look_ahead, pillar_scores, predicted_speedup
from minispec.studies import texts
from minispec.studies import specgen as studies
from minispec.studies.replay import BestKeys, Replay, Text, replay
from minispec.studies.specgen import measure_costs
from minispec.studies.tables import render
from minispec.tools import methods

MODEL = toy_model()
PROMPT = torch.randint(0, 64, (90,), generator=torch.Generator().manual_seed(5)).tolist()


def filled_cache(n, room=20):
    cache = KVCache(MODEL.config, n + room + 7)
    cache.open(7)
    blocks = cache.open(n + room)
    with torch.inference_mode():
        MODEL(torch.tensor(PROMPT[:n]), torch.arange(n), attend_alone(FullKeys(cache, blocks, 0, n)))
    return cache, blocks


def draft_hidden(keys, tokens, start):
    """Hidden states of single-row draft steps."""
    with torch.inference_mode():
        return torch.cat([MODEL(torch.tensor([t]), torch.tensor([start + j]), packed_attend([(0, 1, keys)])) for j, t in enumerate(tokens)])


def dense_probs(ids):
    """Attention probabilities (L, H, T, T) of a sequence."""
    out = []

    def attend(layer, q, k, v):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))[0] / q.shape[-1] ** 0.5
        out.append(scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), float("-inf")).softmax(-1))
        return dense_attend()(layer, q, k, v)

    with torch.inference_mode():
        MODEL(torch.tensor([ids]), torch.arange(len(ids))[None], attend)
    return torch.stack(out)


def masked_reference(selected, recent, n, tokens):
    """The same draft rows by dense attention under a mask per layer and KV head."""
    ids = PROMPT[:n] + tokens
    t = len(ids)

    def attend(layer, q, k, v):
        seen = torch.ones(t, t).tril().bool().expand(k.shape[2], t, t).clone()
        for g in range(k.shape[2]):
            seen[g, n:, :n] = False
            seen[g, n:, n - recent:n] = True
            seen[g, n:, selected[layer, g]] = True
        share = q.shape[2] // k.shape[2]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(share, 2))[0] / q.shape[-1] ** 0.5
        probs = scores.masked_fill(~seen.repeat_interleave(share, 0), float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", probs, v[0].repeat_interleave(share, 1))[None]

    with torch.inference_mode():
        return MODEL(torch.tensor([ids]), torch.arange(t)[None], attend)[0, n:]


def test_draft_rows_see_the_selection_the_recent_window_and_themselves():
    n, recent = 60, 6
    cache, blocks = filled_cache(n)
    selected = torch.stack([torch.randperm(n - recent)[:9] for _ in range(4)]).view(2, 2, 9)
    keys = PillarKeys(DraftPool(cache, 3), blocks, n, selected, recent)
    got = draft_hidden(keys, [3, 1, 4], n)
    assert (got - masked_reference(selected, recent, n, [3, 1, 4])).abs().max() < 1e-4
    assert keys.n == 9 + 6 + 3                                  # step j reads b + j entries


def test_requests_that_draft_together_see_what_each_sees_alone():
    """Two of three rows of a pool draft; their lists differ in length, one of them is everything."""
    cache, n = KVCache(MODEL.config, 240), (60, 37, 50)
    with torch.inference_mode():
        runs = [cache.open(64) for _ in n]
        for run, length in zip(runs, n):
            MODEL(torch.tensor(PROMPT[:length]), torch.arange(length), packed_attend([(0, length, FullKeys(cache, run, 0, length))]))

    def lists(pool):
        return [PillarKeys(pool, run, length, None if i == 1 else torch.arange(5 * i + 4).expand(2, 2, -1), 3 * (i != 1))
                for i, (run, length) in enumerate(zip(runs, n))]

    shared, alone = lists(DraftPool(cache, 2)), [lists(DraftPool(cache, 2))[i] for i in range(3)]
    draft_hidden(shared[0], [7], n[0])                                         # takes the first row, then sits out
    for token in (3, 5):
        with torch.inference_mode():
            together = MODEL(torch.tensor([token, token]), torch.tensor([37, 50]), packed_attend([(0, 1, shared[1]), (1, 2, shared[2])]))
        want = [draft_hidden(alone[i], [token], n[i]) for i in (1, 2)]
        assert (together - torch.cat(want)).abs().max() < 1e-4
    assert shared[1].server.taken == shared
    shared[1].server.give_back(shared[1])
    assert shared[1].server.taken == [shared[0], None, shared[2]] and shared[1].row is None


def test_full_list_equals_dense_and_cold_start_sees_everything():
    n = 50
    cache, blocks = filled_cache(n)
    everything = torch.arange(n - 4).expand(2, 2, -1)
    with torch.inference_mode():
        dense = MODEL.logits(draft_hidden(PillarKeys(DraftPool(cache, 2), blocks, n, everything, 4), [9, 8], n))
        cold = MODEL.logits(draft_hidden(PillarKeys(DraftPool(cache, 2), blocks, n, None, 0), [9, 8], n))
    want = dense_logits(MODEL, PROMPT[:n] + [9, 8])[n:]
    assert (dense - want).abs().max() < 1e-4 and (cold - want).abs().max() < 1e-4


def test_draft_steps_leave_the_cache_alone():
    cache, blocks = filled_cache(40)
    before = cache.k.clone(), cache.v.clone()
    draft_hidden(PillarKeys(DraftPool(cache, 3), blocks, 40, torch.arange(10).expand(2, 2, -1), 5), [1, 2, 3], 40)
    assert torch.equal(cache.k, before[0]) and torch.equal(cache.v, before[1])


def test_budget_rule():
    assert budget(1000, 0.05, 0) == 50 and budget(1001, 0.05, 0) == 51
    assert budget(1000, 0.05, 64) == 64 and budget(40, 0.05, 64) == 40 and budget(5, 1.0, 0) == 5


@pytest.mark.parametrize("select", ["pillar", "ahead"])
@pytest.mark.parametrize("accepted", [0, 3, 8])
def test_selection_is_topk_of_the_scores_per_layer_and_head(accepted, select):
    planner = SpecGen(Engine(MODEL, Lockstep), k=8, sparsity=0.25, min_budget=4, select=select)
    planner.engine.cache = KVCache(MODEL.config, 8)
    request = Request(PROMPT)
    request.n_cached = 80
    keys = only_keys(KVCache(MODEL.config, 90), 71, 9, record=pillar_scores)
    keys.scores.copy_(torch.rand(keys.scores.shape) ** 8)
    scores = keys.scores[:, :, :80]
    if select == "ahead":
        request.state = Round(None, 0, memory=torch.rand(2, 2, 75) ** 8)
        scores = specgen.look_ahead(scores, request.state.memory)
    state = planner._select(request, keys, accepted)
    recent = accepted + 2
    assert state.recent == recent and state.selected.shape == (2, 2, 20 - recent)
    for layer in range(2):
        for g in range(2):
            want = scores[layer, g, :80 - recent].topk(20 - recent).indices
            assert set(state.selected[layer, g].tolist()) == set(want.tolist())
    assert set(state.selected[0, 0].tolist()) != set(state.selected[1, 1].tolist())


def generate(**settings):
    """(generation, engine, selections made) of one long request."""
    made = []

    class Spy(Arbitrary):
        def _select(self, *args):
            made.append(super()._select(*args))
            return made[-1]

        def release(self, request):                             # look at the cache before the slots go back
            self.final = cached_kv(self.engine.cache, request.blocks, request.n_cached)

    engine = Engine(MODEL, lambda e: Spy(e, **settings), 1)
    return engine.generate([Request(PROMPT, 120)])[0], engine, made


AR = Engine(MODEL, Lockstep, 1).generate([Request(PROMPT, 120)])[0]


@pytest.mark.parametrize("k, sparsity", [(1, 0.02), (8, 0.05), (4, 1.0)])
@pytest.mark.parametrize("select", Arbitrary.selections)
def test_output_never_depends_on_the_selection(k, sparsity, select):
    generation, engine, made = generate(k=k, sparsity=sparsity, min_budget=2, select=select)
    assert generation.token_ids == AR.token_ids
    rounds = [s for s in generation.steps]
    assert len(made) == len(rounds) + 1                         # by the prompt, then exactly once a verification
    if sparsity == 1.0:
        assert all(s.accepted == s.proposed for s in rounds)    # sees everything, so accepts everything


def test_copied_tokens_make_fewer_draft_steps_and_the_same_drafts():
    """Of one request alone. What is copied is judged by what a draft step says, and the right ones count as steps that were made."""
    text = (PROMPT[:12] * 20)[:200]
    requests = [Request(text, 60) for _ in range(2)]
    engines = [Engine(MODEL, lambda e: SpecGen(e, 6, 0.2, 8, lookup=n), 1) for n in (0, 5)]
    without, copied = (e.generate([r])[0] for e, r in zip(engines, requests))
    steps = [sum(i["draft"] > 0 for i in e.iterations) for e in engines]
    assert steps[1] < 0.8 * steps[0] and max(i["draft"] for i in engines[1].iterations) == 6
    assert [(s.proposed, s.accepted) for s in without.steps] == [(s.proposed, s.accepted) for s in copied.steps]
    assert copied.token_ids == Engine(MODEL, Lockstep, 1).generate([Request(text, 60)])[0].token_ids


def test_two_requests_share_the_rows_for_copies():
    text = (PROMPT[:12] * 20)[:200]
    engine = Engine(MODEL, lambda e: SpecGen(e, 6, 0.2, 8, lookup=5), 2)
    got = engine.generate([Request(text, 60), Request(text[3:], 60)])
    want = Engine(MODEL, Lockstep, 1).generate([Request(text, 60), Request(text[3:], 60)])
    assert [g.token_ids for g in got] == [g.token_ids for g in want]
    assert max(i["draft"] for i in engine.iterations if i["active"] == 2) == 6


def test_a_tiny_budget_is_sometimes_wrong():
    generation, _, _ = generate(k=8, sparsity=0.02, min_budget=2)
    assert any(s.accepted < s.proposed for s in generation.steps)


@pytest.mark.parametrize("chunk", [3, 64, 512])
def test_the_end_of_the_prompt_chooses_for_the_first_round(chunk):
    made = []

    class Spy(SpecGen):
        def _select(self, r, keys, accepted):
            made.append((super()._select(r, keys, accepted), keys, accepted, r.n_cached))
            return made[-1][0]

    engine = Engine(MODEL, lambda e: Spy(e, k=8, sparsity=0.1, min_budget=2), 1, prefill_chunk=chunk)
    assert engine.generate([Request(PROMPT, 20)])[0].token_ids == AR.token_ids[:20]
    state, keys, accepted, n_cached = made[0]
    assert n_cached == len(PROMPT) and accepted == keys.n - 1 and keys.n == min(chunk, 9)
    want = dense_probs(PROMPT)[:, :, -keys.n:].mean(2).unflatten(1, (2, -1)).mean(2)         # (L, G, T)
    assert (keys.scores - want).abs().max() < 1e-4
    assert state.selected.shape[-1] + state.recent == budget(len(PROMPT), 0.1, 2)


def test_cache_after_rounds_equals_a_dense_pass():
    """Check 5 of the method: keys and values of all committed positions come from full attention."""
    generation, engine, _ = generate(k=8, sparsity=0.05, min_budget=4)
    kv = engine.planner.final
    n = kv.shape[3]
    assert n == len(PROMPT) + len(generation.token_ids) - 1     # committed = cached + 1
    cache, (ids) = KVCache(MODEL.config, n), (PROMPT + generation.token_ids)[:n]
    with torch.inference_mode():
        MODEL(torch.tensor(ids), torch.arange(n), attend_alone(only_keys(cache, 0, n)))
    assert (kv - cached_kv(cache, cache.only, n)).abs().max() < 1e-4


def test_ahead_passes_scores_on_and_remembers():
    scores, memory = torch.zeros(1, 1, 20), torch.zeros(1, 1, 12)
    scores[..., 3], scores[..., 18], memory[..., 5], memory[..., 11] = 1.0, 0.5, 1.0, 4.0
    got = specgen.look_ahead(scores.clone(), memory)[0, 0]
    want = [specgen.FADE ** (i - 3) if 3 <= i <= 10 else 0.0 for i in range(20)]
    want[5], want[11], want[18], want[19] = max(want[5], 0.5), 2.0, 0.5, 0.3
    assert got.tolist() == pytest.approx(want)


def test_a_prompt_says_how_far_it_is_read():
    engine, seen = Engine(MODEL, Lockstep, 1, prefill_chunk=32), []
    engine.on_read = seen.append
    engine.generate([Request(PROMPT, 2)])
    assert seen == [32, 32, 26]


# -- rounds along a given text -------------------------------------------------------------------------------------------

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


# -- schedule ----------------------------------------------------------------------------------------------------------

def serve(n, batch, k=4, new=50, engine=None, **settings):
    """n requests of like length; returns (generations, engine)."""
    engine = Engine(MODEL, lambda e: SpecGen(e, k, 0.1, 4, **settings), batch, prefill_chunk=64, **(engine or {}))
    rng = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, 64, (40,), generator=rng).tolist() for _ in range(n)]
    return engine.generate([Request(p, new) for p in prompts]), engine, Engine(MODEL, Lockstep, n).generate([Request(p, new) for p in prompts])


def rows(engine):
    """Rows of every iteration in which all requests draft or verify."""
    full = max(i["active"] for i in engine.iterations)
    return torch.tensor([float(i["draft"] + i["verify"]) for i in engine.iterations if i["active"] == full and not i["prefill"]][6:-6])


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("schedule", ["unified", "lockstep"])
def test_schedules_and_delay_leave_the_output_alone(schedule, delayed):
    got, engine, want = serve(9, 5, schedule=schedule, delayed=delayed)
    assert [g.token_ids for g in got] == [g.token_ids for g in want]
    assert engine.cache.used == 0 and engine.cache.charged == 0


def test_unified_rows_are_even_and_lockstep_rows_are_not():
    k = 4
    _, even, _ = serve(15, 15, k)
    assert set(rows(even).tolist()) == {3.0 * (2 * k + 1)}                  # 3 requests in each of k + 1 phases: m (2 k + 1)
    _, peaks, _ = serve(15, 15, k, schedule="lockstep")
    assert rows(peaks).max() / rows(peaks).min() == k + 1


def test_latecomers_fill_the_emptiest_phase():
    engine = Engine(MODEL, lambda e: SpecGen(e, 3, 0.1, 4), 8)
    engine.active = [Request([1, 2]) for _ in range(5)]
    for r in engine.active:
        r.n_cached = 1
    planner, phases = engine.planner, []
    engine.cache = KVCache(MODEL.config, 400)
    for r in engine.active:
        r.blocks = engine.cache.open(60)
        planner.plan([other for other in engine.active if other.blocks])
        phases.append(r.state.place)
    assert phases == [0, 1, 2, 3, 0]


def test_first_round_is_shorter_and_all_later_ones_are_whole():
    got, _, _ = serve(5, 5, 4, new=120)
    assert sorted(g.steps[0].proposed for g in got) == [0, 1, 2, 3, 4]
    assert all(s.proposed == 4 for g in got for s in g.steps[1:-2])


def test_a_delayed_verification_stalls_its_request_once():
    k, n = 4, 6                                                             # one request in each of k + 2 states
    got, engine, _ = serve(n, n, k, delayed=True)
    sync, _, _ = serve(n, n, k)
    assert [g.token_ids for g in got] == [g.token_ids for g in sync]
    assert sum(i["stalled"] for i in engine.iterations) >= sum(len(g.steps) for g in got)
    assert all(i["draft"] + i["verify"] + i["prefill"] > 0 or i["stalled"] for i in engine.iterations)


# -- cost model --------------------------------------------------------------------------------------------------------

def test_cost_model_gives_the_notes_table():
    for share, sync, delayed in ((0.30, 1.07, 0.96), (0.50, 1.38, 1.26), (0.70, 1.95, 1.80), (0.77, 2.27, 2.12), (0.85, 2.82, 2.66)):
        assert predicted_speedup(8, 0.77 * 8, share, 0.05) == pytest.approx(sync, abs=0.02)
        assert predicted_speedup(8, 0.77 * 8, share, 0.05, delayed=True) == pytest.approx(delayed, abs=0.02)
    assert predicted_speedup(8, 6, 0.6, 0.05, rounds=3) == predicted_speedup(8, 6, 0.6, 0.05)              # one request waits for nobody
    assert predicted_speedup(8, 6, 0.6, 0.05, rounds=2, batch=4) == pytest.approx(6 / 7 * predicted_speedup(8, 6, 0.6, 0.05))
    assert predicted_speedup(8, 6, 0.6, 0.05, rounds=2, batch=40) == pytest.approx(9 / 13 * predicted_speedup(8, 6, 0.6, 0.05))
    assert predicted_speedup(8, 6, 0.6, 0.05, host_cost=0.1) == pytest.approx(7 / (7 / predicted_speedup(8, 6, 0.6, 0.05) + 0.9))
    for dearer in (dict(growth=1.5), dict(verify_cost=2), dict(select_cost=0.5)):
        assert predicted_speedup(8, 6, 0.6, 0.05, **dearer) < predicted_speedup(8, 6, 0.6, 0.05) < predicted_speedup(8, 6, 0.6, 0.04)


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


@pytest.mark.parametrize("bad", [dict(k=0), dict(k=99), dict(sparsity=0.0), dict(sparsity=1.5), dict(lookup=-1)])
def test_settings_out_of_range(bad):
    with pytest.raises(ValueError, match="allowed is|choose from"):
        SpecGen(None, **bad)
