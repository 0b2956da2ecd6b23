"""CDLM on toy models: masks, exactness of the block cache, the decoders against plain loops, trajectories.
Numbers in comments are the statements of the checklist that the paper's notes end with."""

import json
import math
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import decoded as said_by_decode
from conftest import ROOT, TARGET, ids_of, refused, save_toy_target, seeded, toy_model

import train_cdlm
from minispec import cdlm
from minispec.core.requests import Request
from minispec.core.verify import Sampling
from minispec.data import tasks
from minispec.tools import checkpoints, methods

# the last block of 28 slots is short
MASK = 63
L = 28
B = 8
WHOLE = 32  # slots in training, where all blocks are whole
PROMPTS = [list(range(1, 10)), list(range(5, 19)), [7], list(range(30, 52))]
KINDS = ("student", "teacher", "dual")


@pytest.fixture(scope="module", autouse=True)
def small_diffusion_blocks():
    with mock.patch.object(cdlm, "BLOCK_SIZE", B):
        yield


@pytest.fixture(scope="module")
def model():
    """With a mask embedding near 0, predictions depend on the context; logits spread by about 3."""
    model = toy_model(n_layer=3)
    with torch.no_grad():
        model.embed.weight[MASK] *= 0.01
        model.head.weight *= 5
    return model


def requests(prompts=PROMPTS, length=L, stop=(), temperature=0.0):
    return [Request(p, length, Sampling(temperature, seed=i), stop) for i, p in enumerate(prompts)]


def decoded(model, kind="student", asked=None, **settings):
    """The generations of a decoder."""
    return cdlm.Decoder(model, MASK, kind, **settings).generate(asked or requests())


def tokens_of(*args, **settings):
    return ids_of(decoded(*args, **settings))


def at(trajectories, k):
    """State k, a number or (n, 1), of trajectories (n, L): the slots of rank < k hold their tokens."""
    return trajectories["tokens"].masked_fill(trajectories["rank"] >= k, MASK)


def filled(asked):
    """All slots of the answers, also those behind an end of text."""
    return [r.state.tokens[r.state.n_prompt :] for r in asked]


def dense(model, prompt, slots, mask=cdlm.block_causal, block_size=B):
    """Logits (L, V) of one answer without a cache: the slow, obvious reference."""
    with torch.inference_mode(), mock.patch.object(cdlm, "BLOCK_SIZE", block_size):
        hidden = cdlm.answer_hidden(model, torch.tensor([prompt]), torch.tensor([slots]), mask)
        return cdlm.mask_free(model.logits(hidden), MASK)[0]


# -- masks (1, 2, 6, 8) --------------------------------------------------------------------------------------


def test_padding_is_unseen_and_no_softmax_is_empty():  # 1, 6
    """test_docs.py draws the masks without padding."""
    width = 13
    length = 20
    positions, blocks = cdlm.layout(train_cdlm.padded([[3] * n for n in (1, 5, width)]), length, B)
    masks = [cdlm.block_causal(blocks), cdlm.bidirectional(blocks), cdlm.two_copies(blocks, length)]
    for row, p in enumerate((1, 5, width)):
        first = width - p
        assert positions[row, first:].tolist() == list(range(p + length))
        for mask in masks:
            seen = mask[row, 0]
            assert not seen[first:, :first].any()
            assert seen.any(-1).all()


@pytest.mark.parametrize("size", [0, 4])
def test_two_copies_train_every_block_as_decoding_meets_it(model, size):
    """In blocks of the model's size; 0: its config does not say one."""
    own = toy_model(n_layer=3, diffusion_block_size=size)
    own.load_state_dict(model.state_dict())
    prompt = train_cdlm.padded(PROMPTS)
    clean = torch.randint(0, 60, (len(PROMPTS), L), generator=seeded())
    noisy = clean.masked_fill(torch.rand(clean.shape, generator=seeded()) < 0.5, MASK)
    with torch.inference_mode():
        got = cdlm.blocks_hidden(own, prompt, clean, noisy)
        for first in range(0, L, size or B):
            block = slice(first, first + (size or B))
            alone = clean.clone()
            alone[:, block] = noisy[:, block]
            want = cdlm.answer_hidden(own, prompt, alone)[:, block]
            assert (got[:, block] - want).abs().max() < 1e-5


def test_the_row_before_a_slot_predicts_it():  # 8
    """A model that repeats its input: a slot gets the token before it, a block's first slot the clean one."""
    echo = toy_model(tied=True)
    with torch.no_grad():
        for p in echo.blocks.parameters():
            p.zero_()
    slots = list(range(20, 20 + L))
    assert dense(echo, PROMPTS[0], slots).argmax(-1).tolist() == [PROMPTS[0][-1]] + slots[:-1]
    clean = torch.tensor([slots])
    two = cdlm.blocks_hidden(echo, torch.tensor(PROMPTS[:1]), clean, clean + 10)
    assert echo.logits(two)[0].argmax(-1)[B - 1 : B + 2].tolist() == [36, 27, 38]


# -- the exact cache (3, 4, 5) -------------------------------------------------------------------------------


class Compared(cdlm.Decoder):
    """A student that compares every forward with one that has no cache."""

    worst = 0.0

    def forward(self, active):
        hidden, logits, seconds = super().forward(active)
        want = []
        for a in active:
            whole = dense(
                self.model,
                a.tokens[: a.n_prompt],
                a.tokens[a.n_prompt :],
                block_size=self.block_size,
            )
            want.append(whole[[i - a.n_prompt for i in a.masked()]])
        self.worst = max(self.worst, (logits - torch.cat(want)).abs().max().item())
        return hidden, logits, seconds


class Stale(Compared):
    """The mistake: keep the keys of a block's last step, in which some of its slots were still masks."""

    def spans(self, a):
        if a.n_cached >= a.n_prompt:
            a.n_cached = a.first
        return super().spans(a)


def worst(decoder, model, **settings):
    decoder = decoder(model, MASK, batch_size=4, **settings)
    decoder.generate(requests())
    return decoder.worst


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("size", [None, 1, 4, 16])
def test_cached_logits_equal_uncached_ones(model, steps, size):  # 3, 4, 6
    assert 0 < worst(Compared, model, steps_a_block=steps, block_size=size) <= 1e-5


def test_cached_logits_in_fp64(monkeypatch, usual_blocks):  # 3
    """In one block of the cache: sums over several are in fp32."""
    only = lambda logits, mask_id: logits.index_fill(-1, torch.tensor([mask_id]), -1e9)
    monkeypatch.setattr(cdlm, "mask_free", only)
    assert worst(Compared, toy_model(n_layer=3).double()) <= 1e-12


def test_keys_of_the_last_denoising_step_are_wrong(model):  # 5
    assert worst(Stale, model, steps_a_block=3) > 0.1


# -- decoding (7, 9, 18, 19, 20) -----------------------------------------------------------------------------


def naive(model, prompt, length, block, steps, order):
    """The teacher's loop as the notes write it down (section 1.3), on one prompt, `steps` steps a block."""
    x = [MASK] * length
    for first in range(0, length, block):
        for s in range(steps):
            logits = dense(model, prompt, x, cdlm.bidirectional)
            confidence, x0 = logits.softmax(-1).max(-1)
            if order == "first":
                confidence = -torch.arange(length).float()
            open_ = torch.arange(length) // block == first // block
            confidence[~open_ | (torch.tensor(x) != MASK)] = -math.inf
            n = block // steps + (s < block % steps)
            for i in confidence.topk(n).indices.tolist():
                x[i] = x0[i].item()
    return x


@pytest.mark.parametrize("order", cdlm.ORDERS)
@pytest.mark.parametrize("size, steps", [(8, 8), (8, 5), (8, 1), (4, 4), (12, 12)])
def test_teacher_is_the_loop_of_the_notes(model, size, steps, order):  # 7
    asked = requests(PROMPTS[1:3], length=24)
    settings = {"order": order, "batch_size": 3, "block_size": size}
    decoded(model, "teacher", asked, steps_a_block=steps, **settings)
    assert filled(asked) == [naive(model, p, 24, size, steps, order) for p in PROMPTS[1:3]]
    ranks = [list(r.state.revealed) for r in asked]
    assert all([slot // size for slot in rank] == [i // size for i in range(24)] for rank in ranks)
    if order == "first":
        assert ranks == [list(range(24))] * 2
    if steps == size:
        assert tokens_of(model, "teacher", requests(PROMPTS[1:3], length=24), **settings) == filled(asked)


def test_the_block_size_is_the_models(model, tmp_path):
    """It is kept in config.json; a config without it means 32 (here B), as in the shipped models."""
    own = toy_model(n_layer=3, diffusion_block_size=4)
    own.load_state_dict(model.state_dict())
    checkpoints.save(own, tmp_path / "own")
    checkpoints.save(model, tmp_path / "plain")
    own, plain = (checkpoints.load(tmp_path / name) for name in ("own", "plain"))
    assert (cdlm.block_size_of(own), cdlm.block_size_of(plain)) == (4, B)
    assert tokens_of(own) == tokens_of(model, block_size=4) != tokens_of(model)
    assert tokens_of(plain) == tokens_of(model) == tokens_of(own, block_size=B)
    file = tmp_path / "own" / "config.json"
    config = json.loads(file.read_text())
    for wrong in ("x", -4, 2.5, 1 << 30):
        file.write_text(json.dumps({**config, "diffusion_block_size": wrong}))
        with refused("diffusion_block_size must be a number"):
            checkpoints.load(tmp_path / "own")


def test_dual_cache_is_exact_for_one_step_a_block_and_approximate_else(model):
    assert tokens_of(model, "teacher", steps_a_block=1) == tokens_of(model, "dual", steps_a_block=1)
    exact, close = (
        cdlm.Decoder(model, MASK, kind, steps_a_block=4) for kind in ("teacher", "dual")
    )
    one, two = (ids_of(decoder.generate(requests())) for decoder in (exact, close))
    assert one != two
    assert exact.counts["forwards"] == close.counts["forwards"]
    assert close.counts["tokens_fed"] < exact.counts["tokens_fed"] / 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"threshold": 0.2}, {"threshold": 0.2, "order": "surest"}, {"steps_a_block": 3}],
)
def test_batches_of_different_prompts_equal_single_runs(model, kind, settings):  # 9
    shown = lambda g: (g.token_ids, g.finish, len(g.rounds))
    single = [shown(*decoded(model, kind, [r], **settings)) for r in requests(stop=[45])]
    batch = decoded(model, kind, requests(stop=[45]), batch_size=3, **settings)
    assert list(map(shown, batch)) == single


def test_sampling_is_seeded_and_independent_of_the_batch(model):
    one, four = (tokens_of(model, asked=requests(temperature=1.0), batch_size=n) for n in (1, 4))
    assert one == four != tokens_of(model)
    narrow = [Request(p, L, Sampling(1.0, top_k=1, seed=i)) for i, p in enumerate(PROMPTS)]
    assert tokens_of(model, asked=narrow) == tokens_of(model)
    # The confidence is that of the drawn token.
    logits, (r,) = torch.randn(6, 64, generator=seeded()), requests(PROMPTS[:1], temperature=1.0)
    drawn, sure = cdlm.choose(logits, [SimpleNamespace(request=r)], [range(6)])
    assert sure == pytest.approx(logits.softmax(-1)[range(6), drawn].tolist())


@pytest.mark.parametrize("kind", ["student", "teacher"])
def test_threshold_sets_the_steps(model, kind):  # 18
    fewest = math.ceil(L / B)
    runs = {t: decoded(model, kind, threshold=t, batch_size=4) for t in (0.0, 0.1, 1.0)}
    steps = {t: [len(g.rounds) for g in some] for t, some in runs.items()}
    assert steps[0.0] == [fewest] * 4
    assert steps[1.0] == [L] * 4
    assert fewest <= min(steps[0.1]) < L
    assert ids_of(runs[1.0]) == tokens_of(model, kind)


@pytest.mark.parametrize(
    "confidence, settings, surest, first",
    [
        ([0.2, 0.95, 0.91], {"threshold": 0.9}, [1, 2], [1, 2]),
        ([0.2, 0.5, 0.5], {"threshold": 0.9}, [1], [0]),  # ties to the left
        ([0.1, 0.5, 0.5], {"n": 2}, [1, 2], [0, 1]),
        ([0.2, 1.0, 1.0], {"threshold": 1.0}, [1], [0]),
        ([], {"threshold": 0.9}, [], []),
        ([0.3], {"n": 0}, [], []),
    ],
)
def test_picked_slots(confidence, settings, surest, first):  # 18
    assert cdlm.pick(confidence, order="surest", **settings) == surest
    assert cdlm.pick(confidence, order="first", **settings) == first


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threshold", [None, 0.3, 0.0])
def test_no_mask_is_left_before_the_end_of_text_and_no_block_opened_behind(
    model, kind, threshold
):  # 19
    free = requests(PROMPTS[:2])
    decoded(model, kind, free, threshold=threshold)
    out_of_order = 0
    cases = [
        (prompt, slots, eos)
        for prompt, slots in zip(PROMPTS, filled(free))
        for eos in sorted(set(slots))[::3]
    ]
    rounds, states = [], []
    for record in (True, False):  # a recorded one completes its last block
        asked = [Request(prompt, L, stop_ids=[eos]) for prompt, _, eos in cases]
        found = decoded(model, kind, asked, threshold=threshold, record=record)
        for g, (_, slots, eos) in zip(found, cases):
            assert (g.token_ids, g.finish) == (slots[: slots.index(eos) + 1], "stop")
        rounds.append([len(g.rounds) for g in found])
        states.append(filled(asked))
    for i, (_, slots, eos) in enumerate(cases):
        end = math.ceil((slots.index(eos) + 1) / B) * B
        assert states[0][i] == slots[:end] + [MASK] * (L - end)
        assert set(states[1][i][end:]) <= {MASK}
        assert rounds[1][i] <= rounds[0][i]
        out_of_order += MASK in states[1][i][:end]
    assert out_of_order or threshold is not None


def test_stream_hands_on_final_tokens(model):  # 19
    [r] = requests(PROMPTS[:1])
    parts = [tokens for _, tokens in cdlm.Decoder(model, MASK).stream([r])]
    assert sum(parts, []) == r.generation.token_ids == filled([r])[0]
    assert r.generation.finish == "length"
    assert len(r.generation.who) == L
    [other] = requests(PROMPTS[:1])
    for n, _ in enumerate(cdlm.Decoder(model, MASK).stream([other])):
        if n == 9:
            other.cancel()
    assert other.generation.finish == "cancelled"
    assert other.generation.token_ids == sum(parts[:10], [])  # nothing came after it


def test_a_stream_left_in_the_middle_is_not_in_the_way_of_the_next(model):
    longer = lambda: requests(length=2 * L)
    want = tokens_of(model, asked=longer(), steps_a_block=3)
    decoder = cdlm.Decoder(model, MASK, batch_size=2, steps_a_block=3)
    stream = decoder.stream(requests())
    next(stream)
    for _ in range(2):  # left open, then closed
        assert ids_of(decoder.generate(longer())) == want
        stream.close()
    # A request of the stream that was left goes on, from the tokens that it has, beside another.
    left, other = longer()[:2]
    for r, _ in decoder.stream([left, other]):
        if len(left.generation.token_ids) > L:
            break
    assert ids_of(decoder.generate([left, longer()[2]]))[1] == want[2]
    assert len(left.generation.token_ids) == 2 * L
    # Two streams in turn do not see each other's keys.
    asked = longer()
    for _ in zip_longest(*(decoder.stream([r]) for r in asked)):
        pass
    assert ids_of([r.generation for r in asked]) == want
    # Not of the same request.
    asked = longer()
    stream = decoder.stream(asked)
    next(stream)
    with refused("a request can be in one open stream only"):
        decoder.generate(asked[:1])
    stream.close()
    assert ids_of(decoder.generate(asked[2:])) == want[2:]


def test_counters_are_measured(model, monkeypatch):  # 20
    fed = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda x, *rest: fed.append(x.numel()) or forward(x, *rest))
    for kind in KINDS:
        fed.clear()
        decoder = cdlm.Decoder(model, MASK, kind, steps_a_block=2, batch_size=2)
        got = decoder.generate(requests())
        kept = [len(g.token_ids) for g in got]
        assert decoder.counts == {"forwards": len(fed), "tokens_fed": sum(fed)}
        assert [sum(s.committed for s in g.rounds) for g in got] == kept
        seconds = sum(s.verify_seconds for g in got for s in g.rounds)
        assert seconds == pytest.approx(
            decoder.seconds["prefill"] + decoder.seconds["verify"], abs=1e-6
        )
    decoder = cdlm.Decoder(model, MASK, steps_a_block=2)
    decoder.generate(requests(PROMPTS[:1], 2 * B))
    # Four steps of a block, and the clean rows: the prompt, the finished block, twice the row before a block.
    assert decoder.counts["tokens_fed"] == len(PROMPTS[0]) + 4 * B + B + 2


@pytest.mark.parametrize(
    "settings, length, message",
    [
        ({"threshold": -1}, L, "threshold -1 is out of range"),
        ({}, 600, "exceed the context of 512"),
    ],
)
def test_bad_decoding_is_refused(model, settings, length, message):
    with refused(message):
        decoded(model, asked=requests(length=length), **settings)


# -- trajectories (10, 11, 12) -------------------------------------------------------------------------------


def recorded(model, asked, order="surest"):
    decoder = cdlm.Decoder(model, MASK, "teacher", order=order, batch_size=2, record=True)
    return train_cdlm.collect(decoder, asked)


def collected(*args):
    """Trajectories as a training batch."""
    return train_cdlm.ready(recorded(*args), "cpu")


@pytest.fixture(scope="module")
def trajectories(model):
    """Those of PROMPTS, as a training batch."""
    data = collected(model, requests(length=WHOLE))
    return {**data, "answer": data["tokens"]}


def test_a_trajectory_reveals_a_token_a_step_block_by_block(trajectories):  # 10
    rank = trajectories["rank"]
    slots = torch.arange(WHOLE)
    assert (trajectories["live"] == WHOLE).all()
    assert (rank.sort(-1).values == slots).all()
    assert (rank // B == slots // B).all()
    assert (rank != slots).any()
    assert (trajectories["tokens"] != MASK).all()


@pytest.mark.parametrize(
    "rank, live, want",
    [
        ([0, 1, 2, 3], 4, 0),
        ([1, 2, 3, 0], 4, 0.25),
        ([3, 2, 1, 0], 4, 0.75),
        ([1, 0, 3, 2], 2, 0.5),
        ([0, 1, 3, 2], 2, 0),
    ],
)  # undecoded slots do not count
def test_how_far_from_left_to_right(rank, live, want):
    assert train_cdlm.passed_over(torch.tensor([rank]), torch.tensor([live])) == want


def test_how_far_random_orders_are_from_left_to_right():
    random = torch.rand(2000, 32, generator=seeded()).argsort(-1)
    mean = train_cdlm.passed_over(random, torch.full((2000,), 32))
    assert abs(mean - (1 - sum(1 / i for i in range(1, 33)) / 32)) < 0.005
    assert f"{mean:.2f}" in train_cdlm.passed_over.__doc__


def test_hidden_rows_give_the_teachers_distribution_back(model, trajectories):  # 11
    assert trajectories["hidden"].dtype == torch.float16
    for row, prompt in enumerate(PROMPTS[:2]):
        for slot in range(WHOLE):
            y = at(trajectories, trajectories["rank"][:, slot, None])[row].tolist()
            want = dense(model, prompt, y, cdlm.bidirectional)[slot]
            got = cdlm.mask_free(model.logits(trajectories["hidden"][row, slot].float()), MASK)
            assert y[slot] == MASK
            assert (got.softmax(-1) - want.softmax(-1)).abs().max() <= 1e-3
            assert got.argmax() == want.argmax() == trajectories["tokens"][row, slot]


def test_blocks_behind_the_end_of_text_are_not_decoded(model, monkeypatch):  # 10, 12
    free = requests(PROMPTS[:1], WHOLE)
    decoded(model, "teacher", free)
    [slots] = filled(free)
    eos = slots[B + 2]
    live = (slots.index(eos) // B + 1) * B
    monkeypatch.setattr(model.config, "eos_id", eos)
    data = recorded(model, requests(PROMPTS[:1], WHOLE, stop=[eos]), "first")
    assert data["live"].tolist() == [live]
    assert data["tokens"][0].tolist() == slots[:live] + [eos] * (WHOLE - live)
    assert torch.equal(data["hidden"][0].any(-1), torch.arange(WHOLE) < live)
    assert data["rank"][0].tolist() == list(range(WHOLE))
    # No state of training has masks behind the text.
    k = cdlm.draw_states(data["live"].repeat(200), WHOLE, B, seeded())
    assert torch.equal((k < torch.arange(B, WHOLE + B, B)).all(0), torch.arange(0, WHOLE, B) < live)

@pytest.mark.parametrize("family", tasks.FAMILIES)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_problems_fit_and_fill_up_with_ends_of_text(family, split, tokenizer):
    problem, prompt, answer = tasks.fitting(tokenizer, family, 3, split, 256)
    body = tokenizer.response_ids(problem)
    assert answer == body + [tokenizer.special["<|eos|>"]] * (256 - len(body))
    assert len(prompt) <= tasks.LONGEST_PROMPT
    assert tasks.is_heldout(problem.prompt) == (split == "heldout")
    assert tasks.check(problem, tokenizer.answer_text(answer))


def test_the_lessons_example_of_y_and_y_star(monkeypatch):
    """docs/cdlm.md: the states that the consistency loss makes of that trajectory at step 1."""
    lines = [line.split() for line in Path(ROOT, "docs", "cdlm.md").read_text().splitlines()]
    page = {line[0]: line[1:] for line in lines if line}
    tokens = torch.arange(8)[None]
    rank = torch.tensor([list(map(int, page["rank"]))])
    seen = []

    def noted(model, prompt, answer):
        seen.append(["_" if i == MASK else page["token"][i] for i in answer[0].tolist()])
        return torch.zeros(1, 8, 32)

    monkeypatch.setattr(cdlm, "answer_hidden", noted)
    batch = {"prompt": tokens, "tokens": tokens, "rank": rank, "live": torch.tensor([8])}
    cdlm.consistency_loss(toy_model(diffusion_block_size=4), batch, MASK, seeded(11))
    assert seen == [page["y*"], page["y"]]
    y, y_star = (
        {slot for slot, x in zip(page["slot"], page[name]) if x == "_"} for name in ("y", "y*")
    )
    assert set(page["U_y"][1:4]) == y - y_star
    assert set(page["S_y"][1:5]) == y_star


# -- decode.py -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, threshold", [("cdlm", cdlm.THRESHOLD), ("dlm", None)])
def test_settings_reach_the_decoder(toy, method, threshold):
    target = checkpoints.load(toy)
    plain = methods.make_engine(method, target, methods.settings(drafter=toy), 1)
    assert (plain.order, plain.threshold, plain.block_size) == ("first", threshold, B)
    assert plain.kind == cdlm.METHODS[method]
    settings = methods.settings(drafter=toy, order="surest", threshold=0.5, block_size=5)
    other = methods.make_engine(method, target, settings, 3)
    assert (other.order, other.threshold, other.batch_size, other.block_size) == (
        "surest",
        0.5,
        3,
        5,
    )


@pytest.mark.parametrize("model, folder", [(TARGET, ""), ("smollm2", "smollm2/")])
def test_another_model_has_other_diffusion_models(model, folder):
    settings = methods.settings(model=model)
    for method, kind in cdlm.METHODS.items():
        assert methods.folder_of(method, settings).endswith(f"checkpoints/{folder}cdlm/{kind}")
    assert ("cdlm" in methods.ready(settings)) == (model == TARGET)


def test_the_target_is_loaded_to_compare_alone(toy, tmp_path):
    target = save_toy_target(tmp_path, seed=1)
    line = f"--method cdlm --drafter {toy} --prompt hi --max-new-tokens 32 --model "
    for model, want in (("nowhere", [toy]), (f"{target} --compare", [toy, target])):
        with mock.patch.object(checkpoints, "load", wraps=checkpoints.load) as load:
            said, out = said_by_decode(tmp_path, line + model)
        assert [call.args[0] for call in load.call_args_list] == want
        assert said["model"] == toy
        assert out.startswith(f"{toy}: ")


@pytest.mark.parametrize("method", cdlm.METHODS)
def test_decode_json(toy, tmp_path, method):
    line = f"--model {toy} --method {method} --drafter {toy} --task revise --size 3 --n 2 --batch 2 "
    said, out = said_by_decode(tmp_path, line + "--max-new-tokens 64 --threshold 0.0 --compare")
    assert said["counts"]["forwards"] >= 2
    assert len(said["requests"]) == 2
    assert "tokens per forward" in out
    assert "speed-up" in out
    assert "identical" not in out


def test_decode_with_another_block_size(toy, tmp_path):
    line = f"--model {toy} --method cdlm --drafter {toy} --prompt hi --threshold 0 "
    said, _ = said_by_decode(tmp_path, line + "--max-new-tokens 48 --block-size 4")
    assert said["counts"]["forwards"] == 12
