"""Training of CDLM: states, losses against slow references, the training script on toy models.
Numbers in comments are the statements of the checklist that the paper's notes end with."""

import contextlib
import io
import json
import math
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import (TARGET, dies_after, log_of, refusal, refused, run_script, same, save_toy_target,
                      seeded, table, toy_model, values, weights)
from safetensors.torch import load_file, save_file
from test_cdlm import MASK, PROMPTS, WHOLE as L, B, at, collected, decoded, dense, requests
from test_cdlm import model, small_diffusion_blocks, trajectories  # noqa: F401  fixtures

import decode
import train_cdlm
from minispec import cdlm
from minispec.data import rollouts, tasks
from minispec.data.tokenizer import Tokenizer
from minispec.tools import checkpoints
from minispec.tools.training import Optimizer

STARTS = torch.arange(0, L, B)  # of the blocks of L slots
EOS = 45


# -- losses (13, 14, 15) -------------------------------------------------------------------------------------


def distillation(model, batch, k, reverse=False):
    """Every block has lived k steps."""
    k = (STARTS + k).expand(len(batch["live"]), -1)
    return cdlm.distillation_loss(model, model.head.weight, batch, k, MASK, reverse)


def consistency(model, batch, reverse=False):
    return cdlm.consistency_loss(model, batch, MASK, seeded(), reverse)


def test_drawn_states_are_all_states_of_open_blocks():  # 13
    live = torch.tensor([L, B])
    k = torch.stack([cdlm.draw_states(live, L, B, seeded(i)) for i in range(300)])
    for block, first in enumerate(STARTS.tolist()):
        assert k[:, 0, block].unique().tolist() == list(range(first, first + B))
    assert (k[:, 1, 1:] == STARTS[1:] + B).all()


@pytest.mark.parametrize("live, some", [([B] * 4, False), ([L] * 4, True)])
def test_only_later_blocks_of_the_text_have_a_consistency_loss(
    model, trajectories, live, some
):  # 13
    loss = consistency(model, {**trajectories, "live": torch.tensor(live)})
    assert (loss > 0) == some
    loss.backward()  # trained alone, such a batch does no harm
    assert any(p.grad is not None and p.grad.any() for p in model.parameters()) == some
    model.zero_grad()


@pytest.mark.parametrize("reverse", [False, True])
def test_consistency_loss_by_hand(model, trajectories, reverse):  # 13
    drawn = (torch.rand(4, generator=seeded()) * L).long().tolist()
    want = 0.0
    for row, (prompt, k) in enumerate(zip(PROMPTS, drawn)):
        end = (k // B + 1) * B
        states = (at(trajectories, step)[row].tolist() for step in (end, k))
        goal, q = (dense(model, prompt, state)[end:] for state in states)
        if end < L:
            want += cdlm.kl(cdlm.goal_of(goal), q, reverse).mean().item() / 4
    assert want > 0
    assert consistency(model, trajectories, reverse).item() == pytest.approx(want, rel=1e-3)


def test_consistency_gradient_reaches_one_side_only(model, trajectories, monkeypatch):  # 14
    grads = []
    real = cdlm.answer_hidden

    def noted(*args):
        hidden = real(*args)
        grads.append(hidden.requires_grad)
        return hidden

    monkeypatch.setattr(cdlm, "answer_hidden", noted)
    consistency(model, trajectories)
    assert grads == [False, True]


def test_kl_is_its_definition():  # 14, 17
    """Also where a training multiplies in bf16: KL must stay in fp32."""
    a, b = torch.randn(2, 5, 20, generator=seeded(), requires_grad=True)
    p = a.softmax(-1)
    q = b.softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        for reverse, want in ((False, p * (p / q).log()), (True, q * (q / p).log())):
            loss = cdlm.kl(cdlm.goal_of(a), b, reverse)
            assert torch.allclose(loss, want.sum(-1), atol=1e-5)
            goal, student = torch.autograd.grad(loss.sum(), (a, b), allow_unused=True)
            assert goal is None
            assert student.any()
            masked = cdlm.kl(cdlm.goal_of(cdlm.mask_free(a, 3)), cdlm.mask_free(b, 3), reverse)
            assert masked.isfinite().all()
            assert torch.autograd.grad(masked.sum(), b)[0].isfinite().all()
        assert (cdlm.kl(cdlm.goal_of(a), a).abs() < 1e-6).all()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_model_has_nothing_to_learn_from_its_own_last_step(model, reverse):  # 14
    """Trajectories of the model itself, block-causal: in a block's last step the only masked slot is
    predicted from the state in which it was revealed; earlier states know less."""
    own = train_cdlm.collect(cdlm.Decoder(model, MASK, batch_size=4, record=True), requests(length=L))
    last, middle, first = (distillation(model, own, k, reverse) for k in (7, 4, 0))
    assert abs(last) < 1e-4
    assert first > middle > 10 * abs(last)


def dlm_loss(model, batch, rate, counted, g, block_causal):
    masked = cdlm.turns(rate.shape, B, g) < rate
    batch = {**batch, "masked": masked, "rate": rate, "counted": counted}
    return cdlm.dlm_loss(model, batch, MASK, block_causal).item()


@pytest.mark.parametrize("block_causal", [False, True])
def test_dlm_loss_by_hand(model, trajectories, block_causal):  # 15
    answer = trajectories["answer"]
    rate = torch.tensor([0.25, 0.5, 0.75, 1.0])[:, None].expand(-1, L)
    masked = torch.rand(answer.shape, generator=seeded(3)) < rate
    mask = cdlm.block_causal if block_causal else cdlm.bidirectional
    want = 0.0
    for row, prompt in enumerate(PROMPTS):
        for block in STARTS.tolist() if block_causal else [0]:
            noisy = masked[row].clone()
            if block_causal:  # the other blocks are clean
                noisy &= torch.arange(L) // B == block // B
            logits = dense(model, prompt, answer[row].masked_fill(noisy, MASK).tolist(), mask)
            loss = torch.nn.functional.cross_entropy(logits, answer[row], reduction="none")
            want += (loss / rate[row])[noisy].sum().item() / L / 4
    counted = torch.ones(4, L, dtype=torch.bool)
    got = dlm_loss(model, trajectories, rate, counted, seeded(3), block_causal)
    assert got == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize(
    "rates, block_causal", [(cdlm.student_rates, True), (cdlm.teacher_rates, False)]
)
def test_dlm_loss_of_a_uniform_model_is_log_v(trajectories, rates, block_causal):  # 15
    flat = toy_model(gain=0.0, n_layer=1)
    g = seeded()
    big = {name: x.repeat(16, *[1] * (x.ndim - 1)) for name, x in trajectories.items()}
    losses = [
        dlm_loss(flat, big, *rates(big["answer"], EOS, B, g), g, block_causal) for _ in range(30)
    ]
    assert sum(losses) / 30 == pytest.approx(math.log(63), rel=0.04)  # the mask is never predicted


# -- states --------------------------------------------------------------------------------------------------

TEXTS = (17, 3, 27, 8)  # tokens of answers; a text that fills its block ends in the next one
OPENED = [3, 1, 4, 2]  # blocks


@pytest.fixture
def answers():
    answer = torch.full((4, L), EOS)
    for row, n in enumerate(TEXTS):
        answer[row, :n] = 7
    return answer


def test_student_rates(answers):
    assert cdlm.text_blocks(answers, EOS, B).tolist() == OPENED
    assert cdlm.text_blocks(torch.full((1, L), 7), EOS, B).tolist() == [4]
    rate, counted = cdlm.student_rates(answers, EOS, B, seeded())
    assert counted.sum(-1).tolist() == [B * n for n in OPENED]
    assert (rate.unflatten(1, (4, B)).diff() == 0).all()
    assert len(rate.unique()) == 16


def test_teacher_rates(answers):
    seen = [set() for _ in OPENED]
    slots = torch.arange(L)
    g = seeded()
    for _ in range(60):
        rate, counted = cdlm.teacher_rates(answers.repeat_interleave(2, 0), EOS, B, g)
        assert counted[1::2].all()
        assert (rate[1::2] == rate[1::2, :1]).all()
        for row, (rates, block) in enumerate(zip(rate[::2], counted[::2])):
            first = block.nonzero()[0].item()
            seen[row].add(first // B)
            assert torch.equal(block, slots // B == first // B)
            assert (rates[block] == rates[first]).all()
            assert 1 / B <= rates[first] <= 1
            assert (rates[:first] == 0).all()
            assert (rates[first + B :] == 1).all()
    assert seen == [set(range(n)) for n in OPENED]


def test_turns_follow_the_text_in_a_share_of_the_blocks():
    length = 64
    block = 32
    g = seeded()
    plain, some, ordered = (
        cdlm.turns((2000, length), block, g, share) for share in (0.0, 0.5, 1.0)
    )
    for turn in (plain, ordered):  # the rates are kept, more or less
        for rate in (0.1, 0.5, 0.9):
            assert abs((turn < rate).float().mean() - rate) < 0.07
    first = lambda turn: (turn < 0.5)[:, [0, block]].float().mean()
    assert abs(first(plain) - 0.5) < 0.06
    assert first(ordered) < 0.05
    assert abs(first(some) - (first(plain) + first(ordered)) / 2) < 0.04
    in_line = lambda turn: (turn[:, :block].diff() < 0).all(1).float().mean()
    assert in_line(plain) == 0
    assert 0.05 < in_line(ordered) < 0.3


def test_mask_rates_cover_the_interval_evenly():
    rates = cdlm.mask_rates(100, seeded())
    assert ((rates >= 1e-3) & (rates <= 1)).all()
    assert ((rates - 1e-3) * 100 / 0.999).long().unique().tolist() == list(range(100))


def test_blocks_that_no_text_opened_are_left_out_and_change_no_loss(
    model, trajectories, monkeypatch
):
    live = torch.tensor([2 * B, B, B, 2 * B])
    short = {**trajectories, "live": live}
    cut = train_cdlm.ready(short, "cpu")
    assert {cut[name].shape[1] for name in ("tokens", "rank", "hidden")} == {2 * B}
    k = STARTS + torch.where(STARTS < live[:, None], 3, B)
    distill = [
        cdlm.distillation_loss(model, model.head.weight, batch, k[:, :n], MASK)
        for batch, n in ((short, 4), (cut, 2))
    ]
    cons = [consistency(model, batch) for batch in (short, cut)]
    # The same for reference answers: a whole block of ends of text behind them.
    monkeypatch.setattr(model.config, "eos_id", EOS)
    examples = [(prompt, [7] * n + [EOS] * (L - n)) for prompt, n in zip(PROMPTS, (3, 9, 7, 12))]
    batch = train_cdlm.reference_batch(model, examples, True, seeded())
    assert batch["answer"].shape == (4, 2 * B)
    more = {
        name: torch.nn.functional.pad(batch[name], (0, B), value=value)
        for name, value in (("answer", EOS), ("masked", False), ("counted", False), ("rate", 0.5))
    }
    dlm = [cdlm.dlm_loss(model, x, MASK, True) for x in (batch, {**batch, **more})]
    for one, other in (distill, cons, dlm):
        assert one.item() == pytest.approx(other.item(), rel=1e-4) and one > 0
    assert train_cdlm.reference_batch(model, examples, False, seeded())["answer"].shape == (4, L)


# -- the script (12, 16, 17) ---------------------------------------------------------------------------------


def test_student_learns_the_trajectories_in_a_third_of_the_steps():  # 16
    torch.manual_seed(0)
    prompts = [torch.randint(0, 60, (6,)).tolist() for _ in range(8)]
    length = 16
    steps = 120
    teacher = toy_model(n_layer=3)
    with torch.no_grad():
        teacher.embed.weight[MASK] *= 0.01
        teacher.head.weight *= 60  # sure of its tokens: the student can pass 0.9
    batch = collected(teacher, requests(prompts, length))
    g = seeded()
    student = toy_model(d_model=64, head_dim=16, d_ff=128, gain=1.0)
    optimizer = Optimizer(student)  # as the script
    for step in range(steps):
        k = cdlm.draw_states(batch["live"], length, B, g)
        cdlm.distillation_loss(student, teacher.head.weight, batch, k, MASK).backward()
        optimizer.step(1e-2 * min(1, 2 * (1 - step / steps)))
    got = decoded(student, asked=requests(prompts, length), threshold=0.9, batch_size=8)
    same = torch.tensor([g.token_ids for g in got]) == batch["tokens"]
    assert same.float().mean() > 0.9
    assert sum(len(g.rounds) for g in got) / 8 <= length / 3


SMALL = "--steps 12 --batch 4 --save-every 4 --prompts 3 --lr 5e-3 --device cpu --seed 7"


def train(target, out, more="", gen_length=160, by=run_script):
    """by: how the script is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cdlm, "GEN_LENGTH", gen_length)
        patch.setattr(tasks, "FAMILIES", ("trace", "arith"))
        patch.setattr(train_cdlm, "SHARD", 4)
        patch.setattr(train_cdlm, "HELDOUT", 4)
        return by(train_cdlm, f"--out {out} {SMALL} --target {target} {more}")


NOTES = {}  # of the run `trained`


@pytest.fixture(scope="module")
def trained(toy, tmp_path_factory):
    """The folder of an uninterrupted run of all three stages."""
    out = tmp_path_factory.mktemp("cdlm") / "whole"

    def watched(confidence, *args, pick=cdlm.pick):
        picked = pick(confidence, *args)
        assert picked == [confidence.index(max(confidence))]  # the most confident slot first
        return picked

    shown = io.StringIO()
    watching = mock.patch.multiple(cdlm, turns=mock.Mock(wraps=cdlm.turns), pick=watched)
    with watching, contextlib.redirect_stdout(shown):
        train(toy, out, "--weights 1 0.5 1")
        NOTES.update(shown=shown.getvalue(), turns=cdlm.turns.call_args_list)
    return out


def recorded(folder):
    """The trajectories of a folder, and their tensors by name."""
    shards = [load_file(file) for file in sorted(folder.glob("trajectories/*.safetensors"))]
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


def test_all_stages_lower_their_losses(trained):
    teacher, student = (log_of(trained / stage) for stage in ("teacher", "student"))
    for stage, records in (("teacher", teacher), ("student", student)):
        assert [r["step"] for r in records] == [4, 8, 12]
        assert records[-1]["loss"] < records[0]["loss"]
        assert not list((trained / stage).glob("*.tmp"))
    assert student[-1]["heldout"] < student[0]["heldout"] < teacher[0]["heldout"]


# An ablation, its options, and the losses in its log.
ARMS = """
distill | --weights 1 0 0.01 | distill dlm
cons | --weights 0 1 0 | cons
reverse | --reverse-kl | distill cons dlm
seed | --seed 8 | distill cons dlm
"""


@pytest.mark.parametrize("name, options, losses", table(ARMS))
def test_ablations_share_teacher_and_trajectories(name, options, losses, trained, toy, monkeypatch):  # 17
    """A loss without weight is not computed."""
    monkeypatch.setattr(train_cdlm, "collect", None)
    train(toy, trained, f"--steps 2 --name {name} {options}")
    assert list(log_of(trained / name)[0]) == ["step", *losses.split(), "loss", "heldout", "seconds"]


def test_other_trajectories_of_the_same_teacher(trained, toy, tmp_path, capsys):
    options = f"--teacher {trained}/teacher --steps 2 --order first --temperatures 0 --dual"
    with mock.patch.object(cdlm, "Decoder", wraps=cdlm.Decoder) as decoder:
        train(toy, tmp_path, options)
    assert decoder.call_args.args[2] == "dual"
    rank = recorded(tmp_path)["rank"]
    assert torch.equal(rank, torch.arange(160).expand(3, -1))
    assert not (tmp_path / "teacher").exists()
    assert "3 trajectories; 0% of the reveals" in capsys.readouterr().out
    # Flipped bits of a shard are no tokens.
    file = sorted((tmp_path / "trajectories").glob("*.safetensors"))[0]
    save_file(load_file(file) | {"tokens": load_file(file)["tokens"] + 2048}, file)
    with refused("trajectories: tokens of a shard are not in the vocabulary"):
        train(toy, tmp_path, f"{options} --name other")


def test_masks_follow_the_text_in_training_alone(trained):
    """A stage has twelve steps, and three losses on held-out answers."""
    in_order = sorted(call.args[3] for call in NOTES["turns"])
    assert in_order == [0.0] * 6 + [train_cdlm.IN_ORDER] * 24


def test_interrupted_stages_resume_to_the_same_result(trained, toy, tmp_path):
    def kill_after(n, owner, name):
        with dies_after(n, owner, name), pytest.raises(KeyboardInterrupt):
            train(toy, tmp_path, "--weights 1 0.5 1")

    kill_after(2 * (4 + 1) + 1, cdlm, "dlm_loss")  # in the teacher's step 10
    kill_after(1, train_cdlm, "collect")  # before the second shard
    shards = tmp_path / "trajectories"
    assert len(list(shards.glob("*.safetensors"))) == 1
    (shards / "00001.safetensors.tmp").write_bytes(b"half")
    kill_after(6, cdlm, "distillation_loss")
    assert len(log_of(tmp_path / "student")) == 1
    train(toy, tmp_path, "--weights 1 0.5 1")
    for name in ("teacher/model", "student/model", *(f"trajectories/0000{i}" for i in range(2))):
        assert same(*(load_file(folder / f"{name}.safetensors") for folder in (trained, tmp_path))), name
    for stage in ("teacher", "student"):
        one, two = (
            [{**r, "seconds": 0} for r in log_of(folder / stage)] for folder in (trained, tmp_path)
        )
        assert one == two


def test_trajectory_files(trained, tokenizer):  # 12
    files = sorted((trained / "trajectories").glob("*.safetensors"))
    assert [file.name for file in files] == ["00000.safetensors", "00001.safetensors"]
    assert files[0].stat().st_size < 4 * (
        160 * 32 * 2 + 160 * 8 * 3 + 2000
    )  # hidden rows in 16 bit
    data = recorded(trained)
    share = train_cdlm.passed_over(data["rank"], data["live"])
    assert f"6 trajectories; {share:.0%} of the reveals left a masked slot" in NOTES["shown"]
    assert data["hidden"].shape == (6, 160, 32)
    assert all(data[name].shape == (6, 160) for name in ("prompt", "tokens", "rank"))
    assert torch.equal(data["prompt"][0], data["prompt"][1])  # two temperatures of one problem
    batch = train_cdlm.ready(data, "cpu")["prompt"]
    first = [prompt[prompt != cdlm.PADDING][0].item() for prompt in batch]
    assert set(first) == {tokenizer.special["<|bos|>"]}
    assert (batch[:, 0] != cdlm.PADDING).any()


# -- another target ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """(folder of a random target that knows neither masks nor our problems, folder of its answers)."""
    folder = tmp_path_factory.mktemp("other")
    target = folder / "target"
    save_toy_target(folder, seed=2)
    text = (target / "tokenizer.json").read_text()
    text = text.replace("<|mask|>", "<|spare|>").replace("<|answer|>", "<|free|>")
    (target / "tokenizer.json").write_text(text)
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    rows = [json.dumps({"prompt": f"Is {i} more than {i * i}?"}) + "\n" for i in range(60)]
    (folder / "prompts.jsonl").write_text("".join(rows))
    run_script(
        rollouts,
        f"--target {target} --out {folder}/answers --prompts 12 --heldout 3 --prompt-file "
        f"{folder}/prompts.jsonl --max-new-tokens 40 --device cpu",
    )
    return str(target), str(folder / "answers")


def test_a_target_that_knows_no_masks_is_trained_end_to_end(other, tmp_path, capsys):
    target, answers = other[0], shutil.copytree(other[1], tmp_path / "answers")
    options = f"--answers {answers} --block-size 4 --prompts 100"
    train(target, tmp_path, options, gen_length=32)
    # OUT/target: one token more, with the mean of the others as its embedding.
    old = checkpoints.load(target)
    new = checkpoints.load(tmp_path / "target")
    assert new.config.eos_id == Tokenizer.load(target).ends[0]  # it fills up the answers
    for (name, was), now in zip(old.named_parameters(), new.parameters()):
        assert torch.equal(was, now[: len(was)])
        assert now.shape == was.shape or torch.allclose(was.mean(0), now[2048]), name
    assert new.embed.weight.shape[0] == new.head.weight.shape[0] == 2049
    data = recorded(tmp_path)
    assert 2 <= len(data["live"]) <= 24  # two of each of at most 12 prompts
    assert (data["tokens"] != 2048).all()
    assert f"{len(data['live'])} trajectories; " in capsys.readouterr().out
    for stage in ("target", "teacher", "student"):
        tokenizer = Tokenizer.load(tmp_path / stage)
        assert tokenizer.mask_id == 2048
        assert tokenizer.chat_template == "{{ messages[0].content }}!"
    for stage in ("teacher", "student"):
        assert len(log_of(tmp_path / stage)) == 3
        assert all(math.isfinite(r["loss"] + r["heldout"]) for r in log_of(tmp_path / stage))
        assert checkpoints.load(tmp_path / stage).config.diffusion_block_size == 4
    first, *_, last = log_of(tmp_path / "student")
    assert last["heldout"] < first["heldout"]
    run_script(
        decode,
        f"--model {target} --method cdlm --drafter {tmp_path}/student --prompt 'Is 2 more?' "
        f"--max-new-tokens 32 --threshold 0 --json {tmp_path}/o",
    )
    assert 1 <= json.loads((tmp_path / "o").read_text())["counts"]["forwards"] <= 8
    train(target, tmp_path, options, gen_length=32)
    said = capsys.readouterr().out
    assert said.count("is complete") == 2 and "resuming" not in said
    for more in ("weights", "batch"):
        with refused(f"student/settings.json: the folder was begun with {more}"):
            train(target, tmp_path, f"{options} --{more} {'1 0 0' if more == 'weights' else 2}", gen_length=32)
    # A finished teacher is not trained on for a longer student.
    train(target, tmp_path, f"{options} --name long --steps 13", gen_length=32)
    assert len(log_of(tmp_path / "teacher")) == 3 and log_of(tmp_path / "long")[-1]["step"] == 13
    # The config of a teacher may name another end of text than the one that fills up the answers.
    file = tmp_path / "teacher" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": 5}))
    train(target, tmp_path, f"{options} --name other --steps 1", gen_length=32)
    assert checkpoints.load(tmp_path / "other").config.eos_id == Tokenizer.load(target).ends[0]
    with refused(f"the teacher {TARGET} has another vocabulary than the target {target}"):
        train(target, tmp_path, f"{options} --teacher {TARGET}", gen_length=32)
    # With other answers it does not go on.
    (file,) = answers.glob("train-*")
    more = load_file(file)
    for name, ids in more.items():
        if name.endswith(".ids"):
            ids[0] += 1                                  # another prompt
    save_file(more, answers / "train-900-912.safetensors")
    with refused("begun with examples"):
        train(target, tmp_path, options, gen_length=32)


def test_a_folder_is_not_taken_for_the_copy_of_a_target(other, tmp_path):
    """The target itself is in the way in its folder, and a model of another training."""
    target, answers = other
    shutil.copytree(target, tmp_path / "target")
    before = (tmp_path / "target" / "model.safetensors").read_bytes()
    for source in (target, tmp_path / "target"):
        with refused("target exists already, and would be a copy of"):
            train(source, tmp_path, f"--answers {answers}", gen_length=32)
    assert (tmp_path / "target" / "model.safetensors").read_bytes() == before


def test_a_teacher_goes_on_whatever_its_student_will_be(toy, tmp_path):
    with mock.patch.object(train_cdlm, "collect_trajectories", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            train(toy, tmp_path)
    file = tmp_path / "teacher" / "resume.pt"
    saved = torch.load(file)
    torch.save({**saved, "step": 8, "finished": False}, file)
    with mock.patch.object(train_cdlm, "collect_trajectories", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            train(toy, tmp_path, "--weights 1 0 0 --reverse-kl --order first --dual --name x")
        with refused("begun with batch 4, not 2"):
            torch.save({**saved, "step": 8, "finished": False}, file)
            train(toy, tmp_path, "--batch 2")


# Arguments behind --target, part of the line.
BAD = """
{other} --answers {tmp}/made | settings.json is damaged
{other} | needs --answers DIR; this makes some: python -m minispec.data.rollouts
{toy} --answers {answers} | the folder was begun with target
checkpoints/target --out {trained} | {trained}/settings.json: the folder was begun with target
{toy} --prompt-length 159 | prompt-length must be 160 or more without --answers, got 159
{other} --answers nowhere | cannot read nowhere/settings.json
{other} --answers {answers} --prompt-length 2 | lacks answers to prompts of at most 2
{toy} --batch 0 | batch 0 is out of range
{toy} --weights 0 0 0 | weights must be 0 or more, and one of them above 0, got 0 0 0
{toy} --weights 1 -1 0 | and one of them above 0, got 1 -1 0
{toy} --weights nan 1 0 | and one of them above 0, got nan 1 0
{toy} --temperatures 0 -1 | temperature -1.0 is out of range
nowhere | cannot read nowhere/tokenizer.json: No such file
{toy} --prompt-length 400 | exceed the context of 512
{toy} --name teacher | name must be none of target, teacher, trajectories, got 'teacher'
{toy} --name ./teacher/ | name must be none of target, teacher, trajectories, got './teacher/'
{toy} --block-size 5 | argument --block-size: invalid choice: 5
{toy} --out {trained} --name x --prompts 4 | begun with prompts 3, not 4; use another folder or the same
{toy} --out {trained} --name x --order first | begun with order surest, not first
{toy} --out {trained} --name x --dual | begun with dual False, not True
{toy} --out {trained} --name x --temperatures 0 | begun with temperatures [0.0, 0.5], not [0.0]
{toy} --out {trained} --name x --prompt-length 161 | begun with prompt_length 160, not 161
{toy} --out {trained} --name x --teacher {toy} | trajectories/settings.json: the folder was begun with teacher
"""


@pytest.mark.parametrize("args, message", table(BAD))
def test_bad_input_is_one_line(args, message, other, toy, trained, tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "settings.json").write_text("[]")
    target, answers = other
    names = dict(other=target, answers=answers, toy=toy, trained=trained, tmp=tmp_path)
    assert message.format(**names) in train(args.format(**names), tmp_path, by=refusal)


def test_answers_become_examples(tmp_path, monkeypatch):
    """Cut to the slots, or filled up behind an end of text. An answer that was given up in a loop, and one to
    a long prompt, are left out. Shards may have prompts in common."""
    monkeypatch.setattr(cdlm, "GEN_LENGTH", 4)
    # Prompt, answer, slots.
    texts = values("""
        [1, 2]    | [3, 4, 8]       | [3, 4, 9, 9]
        [1]       | [3, 4, 5, 6, 7] | [3, 4, 5, 6]
        [1]       | [3, 4, 5]       | null
        [1, 2, 3] | [4, 9]          | null
    """)
    tensors = {}
    for i, (prompt, answer, _) in enumerate(texts):
        tensors[f"{i}.ids"] = torch.tensor(prompt + answer)
        tensors[f"{i}.learn"] = torch.arange(len(prompt + answer)) >= len(prompt)
    for name in ("given-0-4", "given-0-5"):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    args = SimpleNamespace(answers=tmp_path, prompt_length=2)
    tokenizer = SimpleNamespace(ends=[9, 8])
    given, train = (train_cdlm.read_answers(args, tokenizer, kind) for kind in ("given", "train"))
    # One end of text, whichever of them the answer has.
    assert given == [(prompt, slots) for prompt, _, slots in texts if slots]
    assert train == []


def test_a_target_that_can_get_no_mask_token_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(train_cdlm.Tokenizer, "load", lambda path: SimpleNamespace(special={}, ends=[]))
    line = refusal(train_cdlm, f"--target smollm2 --out {tmp_path}")  # before its answers are asked for
    assert line == "target must be a Hugging Face folder, got smollm2"
    with refused("names no end of text"):
        train_cdlm.with_mask(str(tmp_path), tmp_path / "target")


def test_a_tokenizer_without_added_tokens_gets_a_mask(other, tmp_path):
    shutil.copytree(other[0], tmp_path / "target")
    file = tmp_path / "target" / "tokenizer.json"
    data = json.loads(file.read_text())
    old, data["added_tokens"] = data["added_tokens"], []
    file.write_text(json.dumps(data))
    train_cdlm.with_mask(str(tmp_path / "target"), str(tmp_path / "masked"))
    (token,) = json.loads((tmp_path / "masked" / "tokenizer.json").read_text())["added_tokens"]
    assert token["id"] == min(x["id"] for x in old) and set(token) <= set(old[0])
    # A token without weights keeps its number.
    data["added_tokens"] = [*old, {**old[0], "id": 2048, "content": "more"}]
    file.write_text(json.dumps(data))
    train_cdlm.with_mask(str(tmp_path / "target"), str(tmp_path / "more"))
    assert Tokenizer.load(tmp_path / "more").mask_id == 2049
    assert checkpoints.load(tmp_path / "more").head.weight.shape[0] == 2050


def test_a_bug_while_recording_is_no_error_of_a_file(trained, toy, tmp_path):
    bug = mock.patch.object(train_cdlm, "collect", side_effect=RuntimeError("a bug"))
    with bug, pytest.raises(RuntimeError, match="a bug"):
        train(toy, tmp_path, f"--teacher {trained}/teacher")


def test_a_learning_rate_of_0_teaches_nothing(trained, toy, tmp_path):
    shutil.copytree(trained / "trajectories", tmp_path / "trajectories")
    train(toy, tmp_path, f"--teacher {trained}/teacher --steps 1 --lr 0")
    assert same(weights(trained / "teacher"), weights(tmp_path / "student"))
