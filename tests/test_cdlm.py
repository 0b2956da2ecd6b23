"""CDLM on toy models: masks, exactness of the block cache, the samplers against plain loops, trajectories.
Numbers in test names' comments are the statements of the checklist that the paper's notes end with."""
import json
import math
from functools import partial
from unittest import mock

import pytest
import torch
from conftest import TARGET, save_toy_target, toy_model

import decode
import train_cdlm
from minispec import cdlm
from minispec.core import gpt
from minispec.tools import checkpoints
from minispec.data import tasks
from minispec.tools import methods
from minispec.core.attention import dense_attend
from minispec.core.requests import Request
from minispec.data.tokenizer import Tokenizer
from minispec.core.verify import Sampling


MASK, L, B = 63, 28, 8           # the last block of 28 slots is short
WHOLE = 32                       # slots in training, where all blocks are whole
PROMPTS = [list(range(1, 10)), list(range(5, 19)), [7], list(range(30, 52))]
KINDS = ("student", "teacher", "dual")


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    with mock.patch.object(cdlm, "BLOCK_SIZE", B):
        yield


@pytest.fixture(scope="module")
def model():
    """A mask embedding near 0 makes predictions depend on the context, so that answers wander; logits spread by about 3."""
    model = toy_model(n_layer=3)
    with torch.no_grad():
        model.embed.weight[MASK] *= 0.01
        model.head.weight *= 5
    return model


def requests(prompts=PROMPTS, length=L, stop=(), temperature=0.0):
    return [Request(p, length, Sampling(temperature, seed=i), stop) for i, p in enumerate(prompts)]


def pad_prompts(prompts):
    """Lists of ids -> left-padded (n, width)."""
    return train_cdlm.ready({"prompt": train_cdlm.padded(prompts)}, "cpu")["prompt"]


def at(trajectories, k):
    """State k (n,) of trajectories (n, L): the slots of rank < k hold their tokens."""
    return trajectories["tokens"].masked_fill(trajectories["rank"] >= k[:, None], MASK)


def filled(reqs):
    """All slots of the answers, also those behind an end of text."""
    return [r.state.tokens[r.state.prompt:] for r in reqs]


def dense(model, prompt, slots, mask=cdlm.block_causal, block_size=B):
    """Logits (L, V) of one answer without a cache: the slow, obvious reference."""
    with torch.inference_mode(), mock.patch.object(cdlm, "BLOCK_SIZE", block_size):
        hidden = cdlm.answer_hidden(model, torch.tensor([prompt]), torch.tensor([slots]), mask)
        return cdlm.mask_free(model.logits(hidden), MASK)[0]


# -- masks (1, 2, 6) ---------------------------------------------------------------------------------------------------

def test_block_causal_mask_is_its_definition():                                    # 1
    prompts, width, length, block = [[3] * n for n in (1, 5, 13)], 13, 20, B
    positions, blocks = cdlm.layout(pad_prompts(prompts), length, block)
    mask, everything = cdlm.block_causal(blocks)[:, 0], cdlm.bidirectional(blocks)[:, 0]
    for row, p in enumerate(map(len, prompts)):
        number = lambda i: 0 if i < p else 1 + (i - p) // block
        first = width - p
        assert positions[row, first:].tolist() == list(range(p + length)) and everything[row, first:, first:].all()
        for i in range(p + length):
            assert mask[row, first + i, first:].tolist() == [number(j) <= number(i) for j in range(p + length)]
        assert not mask[row, first:, :first].any() and not everything[row, first:, :first].any()
        assert mask[row].any(-1).all() and everything[row].any(-1).all()


def test_later_blocks_do_not_reach_back(model):                                    # 2, 6
    prompt, slots = PROMPTS[0], torch.randint(0, 60, (L,), generator=torch.Generator().manual_seed(0)).tolist()
    for b in range(3):
        end = (b + 1) * B
        other = slots[:end] + [(t + 1) % 60 for t in slots[end:]]
        one, two = dense(model, prompt, slots), dense(model, prompt, other)
        assert torch.equal(one[:end], two[:end]) and not torch.equal(one[end:], two[end:])
    whole = lambda s: dense(model, prompt, s, block_size=L)                        # one block: bidirectional
    assert not torch.allclose(whole(slots)[1], whole(slots[:-1] + [0])[1])


def test_prompt_never_sees_the_answer(model):                                      # 6
    def prompt_rows(slots):
        positions, blocks = cdlm.layout(torch.tensor(PROMPTS[:1]), L, L)
        return model(torch.tensor([PROMPTS[0] + slots]), positions, dense_attend(cdlm.block_causal(blocks)))[:, :9]
    assert torch.equal(prompt_rows([1] * L), prompt_rows([2] * L))


@pytest.mark.parametrize("size", [0, 4])
def test_two_copies_train_every_block_as_decoding_meets_it(model, size):
    """In blocks of the model's size; 0: its config does not say one."""
    model, weights, size = toy_model(n_layer=3, diffusion_block_size=size), model.state_dict(), size or B
    model.load_state_dict(weights)
    g, prompt = torch.Generator().manual_seed(0), pad_prompts(PROMPTS)
    clean = torch.randint(0, 60, (len(PROMPTS), L), generator=g)
    noisy = clean.masked_fill(torch.rand(clean.shape, generator=g) < 0.5, MASK)
    with torch.inference_mode():
        got = cdlm.blocks_hidden(model, prompt, clean, noisy)
        for first in range(0, L, size):
            block = slice(first, first + size)
            alone = clean.clone()
            alone[:, block] = noisy[:, block]
            assert (got[:, block] - cdlm.answer_hidden(model, prompt, alone)[:, block]).abs().max() < 1e-5


def test_whose_token_a_row_predicts():                                             # 8
    """A model that says what it is fed: a slot gets the token before it, and a block's first slot is settled before the block opens."""
    echo = toy_model(tied=True)
    with torch.no_grad():
        for block in echo.blocks:
            for p in block.parameters():
                p.zero_()
    slots = list(range(20, 20 + L))
    assert dense(echo, PROMPTS[0], slots).argmax(-1).tolist() == [PROMPTS[0][-1]] + slots[:-1]
    two = cdlm.blocks_hidden(echo, torch.tensor(PROMPTS[:1]), torch.tensor([slots]), torch.tensor([slots]) + 10)
    assert echo.logits(two)[0].argmax(-1)[B - 1:B + 2].tolist() == [36, 27, 38]
    decoder = Compared(echo, MASK)
    decoder.generate(requests(PROMPTS[:1]))
    assert decoder.worst <= 1e-5


def test_a_blocks_first_slot_does_not_see_its_block(model):                        # 8
    slots = list(range(20, 20 + L))
    one, two = (dense(model, PROMPTS[0], slots[:B + 1] + [t] * (B - 1) + slots[2 * B:]) for t in (3, 4))
    assert torch.equal(one[B], two[B]) and not torch.equal(one[B + 1], two[B + 1])


# -- the exact cache (3, 4, 5) -----------------------------------------------------------------------------------------

class Compared(cdlm.Decoder):
    """A student that compares every forward with one that has no cache."""
    worst = 0.0

    def forward(self, active):
        hidden, logits, spent = super().forward(active)
        want = [dense(self.model, a.tokens[:a.prompt], a.tokens[a.prompt:], block_size=self.block_size)
                [[i - a.prompt for i in a.masked()]] for a in active]
        self.worst = max(self.worst, (logits - torch.cat(want)).abs().max().item())
        assert self.stale or torch.equal(logits.argmax(-1), torch.cat(want).argmax(-1))
        return hidden, logits, spent

    stale = False


class Stale(Compared):
    """The mistake: keep the keys of a block's last denoising pass, in which some of its tokens were still masks."""
    stale = True

    def window(self, a):
        if a.n_cached >= a.prompt:
            a.n_cached = a.first
        return super().window(a)


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("size", [None, 4, 16])
def test_cached_logits_equal_uncached_ones(model, steps, size):                    # 3, 4
    decoder = Compared(model, MASK, steps_a_block=steps, batch_size=4, block_size=size)
    decoder.generate(requests())
    assert 0 < decoder.worst <= 1e-5


def test_cached_logits_in_fp64(model, monkeypatch):                                # 3
    monkeypatch.setattr(cdlm, "mask_free", lambda logits, mask_id: logits.index_fill(-1, torch.tensor([mask_id]), -1e9))
    double = toy_model(n_layer=3).double()
    decoder = Compared(double, MASK, batch_size=4)
    decoder.generate(requests())
    assert decoder.worst <= 1e-12


def test_keys_of_the_last_denoising_pass_are_wrong(model):                         # 5
    decoder = Stale(model, MASK, steps_a_block=3, batch_size=4)
    decoder.generate(requests())
    assert decoder.worst > 0.1


# -- decoding (6, 7, 9, 18, 19, 20, 25) --------------------------------------------------------------------------------

@pytest.mark.parametrize("threshold", [None, 0.0, 0.5, 1.0])
def test_blocks_of_one_are_left_to_right(model, threshold, monkeypatch):           # 6
    prompt, slots = PROMPTS[1], [MASK] * 12
    for i in range(12):
        slots[i] = dense(model, prompt, slots, block_size=1)[i].argmax().item()
    monkeypatch.setattr(cdlm, "BLOCK_SIZE", 1)
    [g] = cdlm.Decoder(model, MASK, threshold=threshold).generate(requests([prompt], 12))
    assert g.token_ids == slots and len(g.steps) == 12


def naive(model, prompt, length, block, steps, order="surest"):
    """The teacher's loop as the notes write it down (section 1.3), on one prompt: `steps` steps in all; or from left to right."""
    x, n_blocks = prompt + [MASK] * length, length // block
    for b in range(n_blocks):
        first, last = len(prompt) + b * block, len(prompt) + (b + 1) * block
        m, per_block = x[first:last].count(MASK), steps // n_blocks
        for s in range(per_block):
            logits = dense(model, prompt, x[len(prompt):], cdlm.bidirectional)
            confidence, x0 = logits.softmax(-1).max(-1)
            confidence = torch.cat([torch.zeros(len(prompt)), confidence if order == "surest" else -torch.arange(length)])
            hidden = torch.tensor([t != MASK for t in x])
            hidden[:first] = hidden[last:] = True
            confidence[hidden] = -math.inf
            for i in confidence.topk(m // per_block + (s < m % per_block)).indices.tolist():
                x[i] = x0[i - len(prompt)].item()
    return x[len(prompt):]


@pytest.mark.parametrize("size", [4, 12])
def test_a_decoder_may_have_other_blocks_than_the_model(model, size):              # 7
    reqs = requests(length=24)
    cdlm.Decoder(model, MASK, "teacher", order="surest", batch_size=3, block_size=size).generate(reqs)
    assert filled(reqs) == [naive(model, p, 24, size, 24) for p in PROMPTS] != [naive(model, p, 24, B, 24) for p in PROMPTS]
    assert all(rank // size == i // size for r in reqs for i, rank in enumerate(r.state.rank))


def test_the_block_size_is_the_models(model, tmp_path):
    """Kept in config.json; a config without it means 32 (here B), as of the models that ship."""
    own = toy_model(n_layer=3, diffusion_block_size=4)
    own.load_state_dict(model.state_dict())
    for name, saved in (("plain", model), ("own", own)):
        checkpoints.save(saved, tmp_path / name)
    assert "diffusion_block_size" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    loaded = checkpoints.load(tmp_path / "own")
    assert loaded.config.diffusion_block_size == 4 and cdlm.block_size_of(loaded) == 4 and cdlm.block_size_of(checkpoints.load(tmp_path / "plain")) == B
    tokens = lambda model, **how: [g.token_ids for g in cdlm.Decoder(model, MASK, **how).generate(requests())]
    assert tokens(loaded) == tokens(model, block_size=4) != tokens(model) == tokens(loaded, block_size=B)
    # Training has the same blocks: a slot does not see the block behind its own.
    answer = torch.randint(0, 60, (1, 8), generator=torch.Generator().manual_seed(0))
    other = torch.cat([answer[:, :4], answer[:, 4:] + 1], 1)
    with torch.inference_mode():
        one, two = (cdlm.answer_hidden(loaded, torch.tensor(PROMPTS[:1]), x) for x in (answer, other))
        assert torch.equal(one[:, :4], two[:, :4]) and not torch.equal(cdlm.answer_hidden(model, torch.tensor(PROMPTS[:1]), other)[:, :4], two[:, :4])
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    for wrong in ("x", -4, 2.5, 1 << 30):
        (tmp_path / "own" / "config.json").write_text(json.dumps({**config, "diffusion_block_size": wrong}))
        with pytest.raises(ValueError, match=f"diffusion_block_size {wrong} is out of range"):
            checkpoints.load(tmp_path / "own")


@pytest.mark.parametrize("order", cdlm.ORDERS)
@pytest.mark.parametrize("steps", [24, 15, 3])
def test_teacher_is_the_loop_of_the_notes(model, steps, order):                    # 7
    reqs = requests(length=24)
    cdlm.Decoder(model, MASK, "teacher", steps_a_block=steps // 3, order=order, batch_size=3).generate(reqs)
    assert filled(reqs) == [naive(model, p, 24, B, steps, order) for p in PROMPTS]
    if order == "first":
        assert all([i for _, i in sorted(zip(r.state.rank, range(24)))] == list(range(24)) for r in reqs)
    if steps == 24:
        same = requests(length=24)
        cdlm.Decoder(model, MASK, "teacher", order=order).generate(same)
        assert filled(same) == filled(reqs)


def test_masks_of_later_blocks_are_in_the_teachers_input(model):                   # 7
    short, long = (cdlm.Decoder(model, MASK, "teacher").generate(requests(length=n)) for n in (B, L))
    assert [g.token_ids for g in short] != [g.token_ids[:B] for g in long]


def test_dual_cache_is_exact_for_one_step_a_block_and_approximate_else(model):
    def run(kind, steps):
        decoder = cdlm.Decoder(model, MASK, kind, steps_a_block=steps, batch_size=2)
        return [g.token_ids for g in decoder.generate(requests())], decoder.counts
    (one, _), (same, _) = run("teacher", 1), run("dual", 1)
    assert one == same
    (exact, full), (close, cheap) = run("teacher", 4), run("dual", 4)
    assert exact != close and full["forwards"] == cheap["forwards"] and cheap["tokens_fed"] < full["tokens_fed"] / 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"threshold": 0.2}, {"threshold": 0.2, "order": "surest"}, {"steps_a_block": 3}])
def test_batches_of_different_prompts_equal_single_runs(model, kind, settings):    # 9
    single = [cdlm.Decoder(model, MASK, kind, **settings).generate([r])[0] for r in requests(stop=[45])]
    batch = cdlm.Decoder(model, MASK, kind, batch_size=3, **settings).generate(requests(stop=[45]))
    assert [(g.token_ids, g.finish, len(g.steps)) for g in batch] == [(g.token_ids, g.finish, len(g.steps)) for g in single]


def test_sampling_is_seeded_and_independent_of_the_batch(model):
    run = lambda n: [g.token_ids for g in cdlm.Decoder(model, MASK, "student", batch_size=n).generate(requests(temperature=1.0))]
    greedy = [g.token_ids for g in cdlm.Decoder(model, MASK, "student").generate(requests())]
    assert run(1) == run(4) != greedy
    surest = [Request(p, L, Sampling(1.0, top_k=1, seed=i)) for i, p in enumerate(PROMPTS)]
    assert [g.token_ids for g in cdlm.Decoder(model, MASK, "student").generate(surest)] == greedy


def test_threshold_sets_the_steps(model):                                          # 18
    run = lambda t, kind="student": cdlm.Decoder(model, MASK, kind, t, batch_size=4).generate(requests())
    for kind in ("student", "teacher"):
        assert all(len(g.steps) == L for g in run(1.0, kind)) and all(len(g.steps) == math.ceil(L / B) for g in run(0.0, kind))
    assert [g.token_ids for g in run(1.0, "teacher")] == [g.token_ids for g in run(None, "teacher")]
    between = [len(g.steps) for g in run(0.1)]
    assert all(math.ceil(L / B) <= n <= L for n in between) and min(between) < L


def test_progress_and_ties():                                                      # 18
    surest, first = (partial(cdlm.pick, order=order) for order in ("surest", "first"))
    assert surest([0.2, 0.95, 0.91], threshold=0.9) == [1, 2] and surest([0.2, 0.5, 0.5], threshold=0.9) == [1]
    assert surest([0.5, 0.5, 0.1], 2) == [0, 1] and surest([], threshold=0.9) == [] and surest([0.3], 0) == []
    assert first([0.2, 0.95, 0.91], threshold=0.9) == [1, 2] and first([0.2, 0.5, 0.6], threshold=0.9) == [0]
    assert first([0.1, 0.5, 0.6], 2) == [0, 1] and first([], threshold=0.9) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threshold", [None, 0.3, 0.0])
def test_nothing_is_masked_before_the_end_of_text_nor_opened_behind(model, kind, threshold):   # 19
    free = requests(PROMPTS[:2])
    cdlm.Decoder(model, MASK, kind, threshold).generate(free)
    out_of_order = 0
    for request, slots in zip(free, filled(free)):
        for eos in sorted(set(slots))[::3]:
            [r], [block] = (requests([request.state.tokens[:request.state.prompt]], stop=[eos]) for _ in range(2))
            for one, record in ((r, False), (block, True)):              # a trajectory completes its last block
                cdlm.Decoder(model, MASK, kind, threshold, record=record).generate([one])
            want = slots[:slots.index(eos) + 1]
            assert r.generation.token_ids == block.generation.token_ids == want and r.generation.finish == "stop"
            end = math.ceil(len(want) / B) * B
            assert all(t == MASK for t in filled([r])[0][end:]) and filled([block])[0][:end] == slots[:end]
            assert all(t == MASK for t in filled([block])[0][end:])
            assert len(r.generation.steps) <= len(block.generation.steps) <= len(request.generation.steps)
            out_of_order += MASK in filled([r])[0][:end]
    assert out_of_order or threshold is not None


def test_stream_hands_on_what_is_final(model):                                     # 19
    [r] = requests(PROMPTS[:1])
    parts = [tokens for _, tokens in cdlm.Decoder(model, MASK).stream([r])]
    assert sum(parts, []) == r.generation.token_ids == filled([r])[0] and r.generation.finish == "length" and len(r.generation.who) == L
    [other] = requests(PROMPTS[:1])
    for n, _ in enumerate(cdlm.Decoder(model, MASK).stream([other])):
        if n == 9:
            other.cancel()
    assert other.generation.finish == "cancelled" and other.generation.token_ids == sum(parts[:10], [])     # nothing came after it


def test_counters_are_measured(model, monkeypatch):                                # 20
    fed, forward = [], gpt.GPT.forward
    monkeypatch.setattr(gpt.GPT, "forward", lambda self, tokens, *rest: fed.append(tokens.numel()) or forward(self, tokens, *rest))
    for kind in KINDS:
        fed.clear()
        decoder = cdlm.Decoder(model, MASK, kind, steps_a_block=2, batch_size=2)
        got = decoder.generate(requests())
        assert decoder.counts == {"forwards": len(fed), "tokens_fed": sum(fed), "tokens_kept": sum(len(g.token_ids) for g in got)}
        assert all(sum(s.committed for s in g.steps) == len(g.token_ids) for g in got)
        assert abs(sum(s.verify_seconds for g in got for s in g.steps) - decoder.seconds["prefill"] - decoder.seconds["verify"]) < 1e-6
    decoder = cdlm.Decoder(model, MASK, steps_a_block=2)
    decoder.generate(requests(PROMPTS[:1], 2 * B))
    assert decoder.counts == {"forwards": 4, "tokens_fed": len(PROMPTS[0]) + 4 * B + B + 2, "tokens_kept": 2 * B}


def test_a_stream_left_in_the_middle_is_not_in_the_way_of_the_next(model):
    """The answers that were open go with their stream; the decoder serves others, also longer ones, as before."""
    decoder = cdlm.Decoder(model, MASK, batch_size=2)
    stream = decoder.stream(requests())
    next(stream)
    want = [g.token_ids for g in cdlm.Decoder(model, MASK).generate(requests(length=3 * L))]
    assert [g.token_ids for g in decoder.generate(requests(length=3 * L))] == want
    stream.close()
    for _ in decoder.stream(requests()):
        break
    assert [g.token_ids for g in decoder.generate(requests(length=3 * L))] == want


def test_what_a_decoder_does_not_take(model):
    with pytest.raises(ValueError, match="threshold -1 is out of range"):
        cdlm.Decoder(model, MASK, threshold=-1)
    with pytest.raises(ValueError, match="exceed the context of 512"):
        cdlm.Decoder(model, MASK).generate(requests(length=600))


# -- trajectories (10, 11, 12) -----------------------------------------------------------------------------------------

def collected(model, requests, **settings):
    return train_cdlm.collect(cdlm.Decoder(model, MASK, "teacher", batch_size=2, record=True, **settings), requests)


@pytest.fixture(scope="module")
def trajectories(model):
    """(those of PROMPTS, as a training batch)."""
    data = train_cdlm.ready(collected(model, requests(length=WHOLE), order="surest"), "cpu")
    return {**data, "answer": data["tokens"]}


def test_a_trajectory_reveals_a_token_a_step_block_by_block(trajectories):         # 10
    tokens, rank = trajectories["tokens"], trajectories["rank"]
    assert (trajectories["live"] == WHOLE).all() and (rank.sort(-1).values == torch.arange(WHOLE)).all()
    assert (rank // B == torch.arange(WHOLE) // B).all()
    states = [at(trajectories, torch.full((4,), k)) for k in range(WHOLE + 1)]
    for k in range(WHOLE):
        new = states[k] != states[k + 1]
        assert (new.sum(-1) == 1).all() and (states[k][new] == MASK).all()
        assert (states[k + 1][:, :k // B * B] != MASK).all() and (states[k + 1][:, (k // B + 1) * B:] == MASK).all()
    assert torch.equal(states[-1], tokens)


def test_a_trajectory_in_the_order_of_the_text(model):
    data = collected(model, requests(length=WHOLE), order="first")
    assert torch.equal(data["rank"], torch.arange(WHOLE).expand(4, -1)) and (data["hidden"].abs().sum(-1) > 0).all()


def test_how_far_from_left_to_right(trajectories):
    """The share of reveals that left a masked slot to the left; of random orders of n slots all but H(n) / n."""
    share = lambda *rank, live=4: train_cdlm.passed_over(torch.tensor([rank]), torch.tensor([live]))
    assert [share(0, 1, 2, 3), share(1, 0, 2, 3), share(1, 2, 3, 0), share(3, 2, 1, 0)] == [0, 0.25, 0.25, 0.75]
    assert [share(1, 0, 3, 2, live=2), share(0, 1, 3, 2, live=2)] == [0.5, 0]          # slots that were never decoded do not count
    random = torch.rand(2000, 32, generator=torch.Generator().manual_seed(0)).argsort(-1)
    mean = train_cdlm.passed_over(random, torch.full((2000,), 32))
    assert abs(mean - (1 - sum(1 / i for i in range(1, 33)) / 32)) < 0.005 and f"{mean:.2f}" in train_cdlm.passed_over.__doc__
    # By a walk through the states.
    rank = trajectories["rank"]
    passed = sum(bool((rank[row, :slot] > rank[row, slot]).any()) for row in range(4) for slot in range(WHOLE))
    assert 0 < passed and train_cdlm.passed_over(rank, trajectories["live"]) == pytest.approx(passed / 4 / WHOLE)


def test_hidden_rows_give_the_teachers_distribution_back(model, trajectories):     # 11
    assert trajectories["hidden"].dtype == torch.float16
    for row, prompt in enumerate(PROMPTS[:2]):
        tokens, rank = trajectories["tokens"][row:row + 1], trajectories["rank"][row:row + 1]
        for slot in range(WHOLE):
            y = at({"tokens": tokens, "rank": rank}, rank[:, slot])[0].tolist()
            want = dense(model, prompt, y, cdlm.bidirectional)[slot]
            got = cdlm.mask_free(model.logits(trajectories["hidden"][row, slot].float()), MASK)
            assert y[slot] == MASK and (got.softmax(-1) - want.softmax(-1)).abs().max() <= 1e-3
            assert got.argmax() == want.argmax() == tokens[0, slot]


def test_blocks_behind_the_end_of_text_are_not_lived_through(model):               # 10, 12
    free = requests(PROMPTS[:1], WHOLE)
    cdlm.Decoder(model, MASK, "teacher").generate(free)
    eos = filled(free)[0][B + 2]
    reqs = requests(PROMPTS[:1], WHOLE, stop=[eos])
    at = filled(free)[0].index(eos)
    live = (at // B + 1) * B
    old, model.config.eos_id = model.config.eos_id, eos
    data = collected(model, reqs)
    model.config.eos_id = old
    assert data["live"].tolist() == [live] and data["tokens"][0, :live].tolist() == filled(free)[0][:live] and (data["tokens"][0, live:] == eos).all()
    assert (data["rank"].sort(-1).values == torch.arange(WHOLE)).all() and (data["hidden"][0, :live].abs().sum(-1) > 0).all() and (data["hidden"][0, live:] == 0).all()
    k, ends = cdlm.draw_states(data["live"].repeat(200), WHOLE, B, torch.Generator().manual_seed(0)), torch.arange(B, WHOLE + B, B)
    opened = torch.arange(0, WHOLE, B) < live
    assert (k < ends)[:, opened].all() and (k == ends)[:, ~opened].all()     # nothing to learn behind the text


def test_problems_fit_and_fill_up_with_ends_of_text():
    tokenizer = Tokenizer.load(TARGET)
    for family in tasks.FAMILIES:
        for split in ("train", "heldout"):
            problem, prompt, answer = tasks.fitting(tokenizer, family, 3, split, 256)
            body = tokenizer.response_ids(problem.think, problem.answer)
            assert len(answer) == 256 and len(prompt) <= 160 and answer[:len(body)] == body and set(answer[len(body):]) <= {tokenizer.special["<|eos|>"]}
            assert tasks.is_heldout(problem.prompt) == (split == "heldout") and tasks.check(problem, tokenizer.answer_text(answer))


# -- decode.py ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("args, message", [
    (["--method", "cdlm", "--drafter", "nowhere"], "cannot read nowhere/config.json"),
    (["--method", "cdlm", "--drafter", TARGET, "--threshold", "7"], "threshold 7.0 is out of range; allowed is 0"),
    (["--method", "cdlm", "--explain", "2"], "--explain is for methods that verify drafts")])
def test_bad_input_is_one_line(args, message):
    with pytest.raises(ValueError) as e:
        decode.main(args)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_settings_reach_the_decoder(toy):
    target = checkpoints.load(toy)
    for method, threshold in (("cdlm", cdlm.THRESHOLD), ("dlm", None)):
        plain = methods.make_engine(method, target, methods.settings(drafter=toy), 1)
        assert (plain.order, plain.threshold, plain.kind) == ("first", threshold, cdlm.METHODS[method])
        other = methods.make_engine(method, target, methods.settings(drafter=toy, order="surest", threshold=0.5, block_size=5), 3)
        assert (other.order, other.threshold, other.batch_size, other.block_size) == ("surest", 0.5, 3, 5) and plain.block_size == B


def test_a_model_of_ones_own_has_diffusion_models_of_its_own():
    for model, folder in ((TARGET, ""), ("smollm2", "smollm2/")):
        found = [methods.folder_of(method, methods.settings(model=model)) for method in ("cdlm", "dlm")]
        assert [path.endswith(f"checkpoints/{folder}cdlm/{kind}") for path, kind in zip(found, ("student", "teacher"))] == [True, True]
        assert ("cdlm" in methods.ready(methods.settings(model=model))) == (model == TARGET)


def test_the_target_is_loaded_to_compare_alone(toy, tmp_path, capsys, monkeypatch):
    target, loaded, load = save_toy_target(tmp_path, seed=1), [], checkpoints.load
    monkeypatch.setattr(checkpoints, "load", lambda path, *how: loaded.append(path) or load(path, *how))
    args = ["--method", "cdlm", "--drafter", toy, "--task", "revise", "--size", "3", "--max-new-tokens", "32", "--json", str(tmp_path / "o.json")]
    for model, more, want in (("nowhere", [], [toy]), (target, ["--compare"], [toy, target])):
        loaded.clear()
        decode.main([*args, "--model", model, *more])
        assert loaded == want and capsys.readouterr().out.startswith(f"{toy}: ")
        assert json.loads((tmp_path / "o.json").read_text())["model"] == toy


def test_decode_json(toy, tmp_path, capsys):
    for method in ("cdlm", "dlm"):
        decode.main(["--model", toy, "--method", method, "--drafter", toy, "--task", "revise", "--size", "3", "--n", "2", "--batch", "2",
                     "--max-new-tokens", "64", "--threshold", "0.0", "--compare", "--json", str(tmp_path / "o.json")])
        out = capsys.readouterr().out
        d = json.loads((tmp_path / "o.json").read_text())
        assert d["counts"]["forwards"] >= 2 and d["counts"]["tokens_kept"] == d["new_tokens"] and "tokens per forward" in out and "speed-up" in out
        assert "identical" not in out and len(d["requests"]) == 2


def test_decode_with_another_block_size(toy, tmp_path):
    args = ["--model", toy, "--method", "cdlm", "--drafter", toy, "--prompt", "hi", "--max-new-tokens", "48", "--threshold", "0", "--json", str(tmp_path / "o.json")]
    for more, steps in (([], 48 / B), (["--block-size", "4"], 12), (["--block-size", "100"], 1)):
        decode.main([*args, *more])
        assert json.loads((tmp_path / "o.json").read_text())["counts"]["forwards"] == steps
