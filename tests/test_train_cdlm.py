"""What CDLM is trained with: sets of slots, losses against slow references, the training script on toy models.
Numbers in comments are the statements of the checklist that the paper's notes end with."""
import json
import math
import os
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import TARGET, run_script, save_toy_target, toy_model
from safetensors.torch import load_file, save_file
from test_cdlm import MASK, PROMPTS, WHOLE as L, B, at, collected, dense, filled, pad_prompts, requests
from test_cdlm import model, small_blocks, trajectories  # noqa: F401  fixtures

import decode
import train_cdlm
from minispec import cdlm
from minispec.data import rollouts, tasks
from minispec.data.tokenizer import Tokenizer
from minispec.tools import checkpoints
from minispec.tools.training import Optimizer, schedule


# -- losses (13, 14, 15, 17) -------------------------------------------------------------------------------------------

ENDS = [8, 16, 24, 32]           # of the blocks of L slots


def test_sets_of_slots(trajectories):                                              # 13
    rank, ends, g = trajectories["rank"], torch.tensor(ENDS), torch.Generator().manual_seed(1)
    masked = lambda k: rank >= k.repeat_interleave(B, 1)
    for _ in range(20):
        k = cdlm.draw_states(trajectories["live"], L, B, g)
        assert (k < ends).all() and (k >= ends - B).all()
        assert torch.equal(masked(k).sum(-1), (ends - k).sum(-1)) and not masked(ends.expand(4, -1)).any()
    drawn = torch.cat([cdlm.draw_states(trajectories["live"], L, B, g) for _ in range(100)])
    assert (drawn.unique() == torch.arange(L)).all()


def lived(n, k):
    """(n, L / B): every block has lived k steps."""
    return (torch.arange(0, L, B) + k).expand(n, -1)


def distillation(model, batch, k):
    return cdlm.distillation_loss(model, model.head.weight.detach(), batch, lived(len(batch["live"]), k), MASK)


def consistency(model, batch):
    return cdlm.consistency_loss(model, batch, MASK, torch.Generator().manual_seed(0))


def test_last_block_has_no_consistency_loss(model, trajectories):                  # 13
    short = {name: x[:, :B] if x.ndim > 1 and name != "prompt" else x for name, x in trajectories.items()}
    short["live"] = torch.full((4,), B)                  # answers of one block
    loss = consistency(model, short)
    assert loss == 0
    loss.backward()                                      # trained alone, such a batch teaches nothing, and does no harm
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    model.zero_grad()
    assert consistency(model, trajectories) > 0


def test_nothing_behind_the_text_is_in_the_consistency_loss(model, trajectories):   # 13
    """Rows whose text ends with the first block have no later block to be consistent in, although the batch has more slots."""
    loss = lambda live: consistency(model, {**trajectories, "live": torch.tensor(live)})
    assert loss([B] * 4) == 0 < loss([L] * 4)


def test_consistency_loss_by_hand(model, trajectories):                            # 13
    rank, tokens, want = trajectories["rank"], trajectories["tokens"], 0.0
    k = (torch.rand(4, generator=torch.Generator().manual_seed(0)) * L).long().tolist()
    for row, prompt in enumerate(PROMPTS):
        b = k[row] // B
        one = {"tokens": tokens[row:row + 1], "rank": rank[row:row + 1]}
        logp = lambda step: dense(model, prompt, at(one, torch.tensor([step]))[0].tolist()).log_softmax(-1)[ENDS[b]:]
        if b < 3:
            want += cdlm.kl(logp(ENDS[b]), logp(k[row])).mean().item() / 4
    assert want > 0 and abs(consistency(model, trajectories).item() / want - 1) < 1e-3


def test_divergence():                                                             # 14, 17
    a, b = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(0))
    p, q = a.softmax(-1), b.softmax(-1)
    want, masked = (p * (p / q).log()).sum(-1), cdlm.mask_free(a, 3)
    for rounded in (False, True):                        # training multiplies in bf16, but a divergence near 0 would drown in that
        with torch.autocast("cpu", torch.bfloat16, rounded):
            assert torch.allclose(cdlm.kl(a, b), want, atol=1e-5) and (cdlm.kl(a, a).abs() < 1e-6).all()
    assert cdlm.kl(masked, cdlm.mask_free(b, 3)).isfinite().all() and masked.softmax(-1)[:, 3].sum() == 0


def test_a_model_has_nothing_to_learn_from_its_own_last_step(model):               # 14
    """Trajectories of the model itself, block-causal: in a block's last step the only masked slot is predicted from the state in
    which it was finalised; earlier states know less."""
    reqs = requests(length=L)
    cdlm.Decoder(model, MASK, "student", batch_size=4, record=True).generate(reqs)
    answers, prompt = [r.state for r in reqs], pad_prompts(PROMPTS)
    tokens = torch.tensor(filled(reqs))
    own = {"tokens": tokens, "answer": tokens, "rank": torch.tensor([a.rank for a in answers]), "live": torch.full((4,), L), "prompt": prompt,
           "hidden": torch.stack([torch.stack([a.hidden[i] for i in range(L)]) for a in answers])}
    losses = [distillation(model, own, k) for k in (7, 4, 0)]
    assert abs(losses[0]) < 1e-4 and losses[2] > losses[1] > 10 * abs(losses[0])


def test_consistency_gradient_reaches_one_side_only(model, trajectories, monkeypatch):     # 14
    calls, real = [], cdlm.answer_hidden
    monkeypatch.setattr(cdlm, "answer_hidden", lambda *args: calls.append(real(*args)) or calls[-1])
    consistency(model, trajectories).backward()
    assert [c.requires_grad for c in calls] == [False, True] and model.embed.weight.grad.abs().sum() > 0
    model.zero_grad()


def rates_of(rates):
    return rates[:, None].expand(-1, L), torch.ones(len(rates), L, dtype=torch.bool)


def dlm_loss(model, batch, rate, counted, g, mask):
    masked = cdlm.turns(rate.shape, B, g) < rate
    batch = {**batch, "masked": masked, "rate": rate, "counted": counted}
    return cdlm.dlm_loss(model, batch, MASK, mask is cdlm.two_copies).item()


def test_dlm_loss_by_hand(model, trajectories):                                    # 15
    rate, answer, seed = torch.tensor([0.25, 0.5, 0.75, 1.0]), trajectories["answer"], lambda: torch.Generator().manual_seed(3)
    masked = torch.rand(answer.shape, generator=seed()) < rate[:, None]
    for mask in (cdlm.bidirectional, cdlm.two_copies):
        want = 0.0
        for row, prompt in enumerate(PROMPTS):
            for block in [range(L)] if mask is not cdlm.two_copies else [range(e - B, e) for e in ENDS]:
                slots = [MASK if masked[row, i] and (mask is not cdlm.two_copies or i in block) else answer[row, i].item() for i in range(L)]
                logp = dense(model, prompt, slots, cdlm.block_causal if mask is cdlm.two_copies else mask).log_softmax(-1)
                want -= sum(logp[i, answer[row, i]].item() / rate[row].item() for i in block if masked[row, i]) / L / len(PROMPTS)
        assert abs(dlm_loss(model, trajectories, *rates_of(rate), seed(), mask) - want) < 1e-3 * want


def test_dlm_loss_of_a_uniform_model_is_log_v(trajectories):                       # 15
    flat, g = toy_model(gain=0.0), torch.Generator().manual_seed(0)
    big = {name: x.repeat(16, *[1] * (x.ndim - 1)) for name, x in trajectories.items()}
    mean = lambda states, mask: sum(dlm_loss(flat, big, *states(), g, mask) for _ in range(30)) / 30
    for states, mask in ((lambda: rates_of(cdlm.mask_rates(64, g)), cdlm.bidirectional), (lambda: cdlm.student_states(big["answer"], 45, B, g), cdlm.two_copies),
                         (lambda: cdlm.teacher_states(big["answer"], 45, B, g), cdlm.bidirectional)):
        assert abs(mean(states, mask) / math.log(63) - 1) < 0.04                   # 63: the mask itself is never predicted


def test_states_of_training():
    """Answers of 3, 1, 4 and 2 blocks of text."""
    answer = torch.full((4, L), 45)
    for row, n in enumerate((17, 3, 27, 8)):             # then an end of text, in the block behind if the text fills its own
        answer[row, :n] = 7
    g = torch.Generator().manual_seed(0)
    assert cdlm.text_blocks(answer, 45, B).tolist() == [3, 1, 4, 2] and cdlm.text_blocks(torch.full((1, L), 7), 45, B).tolist() == [4]
    seen = [set() for _ in range(4)]
    for _ in range(60):
        rate, counted = (x[::2] for x in cdlm.teacher_states(answer.repeat_interleave(2, 0), 45, B, g))
        for row in range(4):
            slots = counted[row].nonzero()[:, 0].tolist()
            block = slots[0] // B
            seen[row].add(block)
            assert slots == list(range(block * B, min(block * B + B, L))) and len(rate[row, slots].unique()) == 1 and 1 / B <= rate[row, slots[0]] <= 1
            assert (rate[row, :slots[0]] == 0).all() and (rate[row, slots[-1] + 1:] == 1).all()
    assert seen == [{0, 1, 2}, {0}, {0, 1, 2, 3}, {0, 1}]
    rate, counted = cdlm.student_states(answer, 45, B, g)
    assert counted.sum(-1).tolist() == [24, 8, 32, 16] and all(len(rate[row, e - 4:e].unique()) == 1 for row in range(4) for e in ENDS)
    rate, counted = cdlm.teacher_states(answer, 45, B, g)
    assert counted.sum(-1)[1::2].tolist() == [L, L] and (rate[1::2] == rate[1::2, :1]).all() and (counted.sum(-1)[::2] <= B).all()


def test_turns_follow_the_text_as_far_as_they_are_told():
    g, length, block = torch.Generator().manual_seed(0), 64, 32
    plain = cdlm.turns((2000, length), block, g)
    some, ordered = cdlm.turns((2000, length), block, g, 0.5), cdlm.turns((2000, length), block, g, 1.0)
    for rate in (0.1, 0.5, 0.9):                         # about so many masks either way
        assert abs((plain < rate).float().mean() - rate) < 0.01 and abs((ordered[:, :block] < rate).float().mean() - rate) < 0.07
    first, last = (ordered < 0.5)[:, [0, block]].float().mean(), (ordered < 0.5)[:, [block - 1]].float().mean()
    assert first < 0.05 and last > 0.95 and ((plain < 0.5).float().mean(0) - 0.5).abs().max() < 0.06
    half = (some < 0.5)[:, [0, block]].float().mean()
    assert abs(half - (0.25 + first / 2)) < 0.02         # half of the blocks, whichever they are
    in_line = lambda turn: (turn[:, :block].diff() < 0).all(1).float().mean()
    assert in_line(plain) == 0 and 0.05 < in_line(ordered) < 0.3 and abs(in_line(some) - in_line(ordered) / 2) < 0.04
    a, b = (cdlm.turns((4, L), B, torch.Generator().manual_seed(3), x) for x in (0.0, 1.0))
    assert torch.equal(a, torch.rand(4, L, generator=torch.Generator().manual_seed(3))) and not torch.equal(a, b)


def test_mask_rates_cover_the_interval_evenly():
    rates = cdlm.mask_rates(100, torch.Generator().manual_seed(0))
    assert ((rates >= 1e-3) & (rates <= 1)).all() and (rates.sort().values.diff() < 0.011).all()


# -- training (16 and the script) --------------------------------------------------------------------------------------

def test_student_learns_the_trajectories_in_a_third_of_the_steps():                # 16
    torch.manual_seed(0)
    prompts, length, steps = [torch.randint(0, 60, (6,)).tolist() for _ in range(8)], 16, 120
    teacher = toy_model(n_layer=3)
    with torch.no_grad():
        teacher.embed.weight[MASK] *= 0.01
        teacher.head.weight *= 60                        # so sure of its tokens that the student can become surer than 0.9
    batch, g = train_cdlm.ready(collected(teacher, requests(prompts, length), order="surest"), "cpu"), torch.Generator().manual_seed(0)
    student = toy_model(d_model=64, head_dim=16, d_ff=128, gain=1.0)
    optimizer = Optimizer(student, muon=True)            # as the script
    for step in range(steps):
        k = cdlm.draw_states(batch["live"], length, B, g)
        cdlm.distillation_loss(student, teacher.head.weight.detach(), batch, k, MASK).backward()
        optimizer.step(1e-2 * min(1, 2 * (1 - step / steps)))
    got = cdlm.Decoder(student, MASK, threshold=0.9, batch_size=8).generate(requests(prompts, length))
    same = sum(a == b for g, row in zip(got, batch["tokens"].tolist()) for a, b in zip(g.token_ids, row)) / batch["tokens"].numel()
    assert same > 0.9 and sum(len(g.steps) for g in got) / 8 <= length / 3


SMALL = ["--steps", "12", "--batch", "4", "--save-every", "4", "--prompts", "3",
         "--lr", "5e-3", "--device", "cpu", "--seed", "7"]


FAMILIES = "trace", "arith"                              # of problems; a held-out loss of each at every checkpoint


def train(monkeypatch, toy, out, *args, gen_length=160):
    monkeypatch.setattr(cdlm, "GEN_LENGTH", gen_length)
    monkeypatch.setattr(tasks, "FAMILIES", FAMILIES)
    monkeypatch.setattr(train_cdlm, "SHARD", 2)
    monkeypatch.setattr(sys, "argv", ["train_cdlm.py", "--target", toy, "--out", str(out), *SMALL, *args])
    train_cdlm.main()


@pytest.fixture(scope="module")
def trained(toy, tmp_path_factory):
    """The folder of an uninterrupted run of all three stages."""
    out = tmp_path_factory.mktemp("cdlm") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        train(patch, toy, out, "--weights", "1", "0.5", "1")
    return out


def log(folder):
    return [json.loads(line) for line in open(folder / "log.jsonl")]


def test_all_stages_lower_their_losses(trained):
    for stage in ("teacher", "student"):
        records = log(trained / stage)
        assert [r["step"] for r in records] == [4, 8, 12] and records[-1]["loss"] < records[0]["loss"]
        assert set(records[0]["heldout"]) == set(FAMILIES)
        assert "train_cdlm.py --target" in (trained / stage / "command.txt").read_text()
        assert not [f for f in os.listdir(trained / stage) if f.endswith(".tmp")]
    total = lambda record: sum(record["heldout"].values())
    assert total(log(trained / "student")[-1]) < total(log(trained / "student")[0])
    assert log(trained / "student")[0]["heldout"]["trace"] < log(trained / "teacher")[0]["heldout"]["trace"]      # it starts from the teacher
    assert sorted(os.listdir(trained / "trajectories")) == ["00000.safetensors", "00001.safetensors", "00002.safetensors", "lock", "settings.json"]


def test_a_loss_without_weight_is_not_computed(toy, tmp_path, monkeypatch):          # 17
    asked = {"turns": [], "distillation_loss": [], "consistency_loss": []}
    for name in asked:
        real = getattr(cdlm, name)
        monkeypatch.setattr(cdlm, name, lambda *a, name=name, real=real: asked[name].append(a) or real(*a))
    train(monkeypatch, toy, tmp_path, "--steps", "2", "--prompts", "1", "--weights", "1", "0", "1")
    assert len(asked["distillation_loss"]) == 2 and not asked["consistency_loss"]
    heldout = 2 * len(FAMILIES)                        # of both stages: always measured on masks drawn at random
    assert sorted(a[-1] for a in asked["turns"]) == [0.0] * heldout + [train_cdlm.IN_ORDER] * 4
    train(monkeypatch, toy, tmp_path, "--steps", "2", "--prompts", "1", "--weights", "0", "0.5", "0", "--name", "cons")
    assert len(asked["distillation_loss"]) == len(asked["consistency_loss"]) == 2 and set(log(tmp_path / "cons")[0]) == {"step", "cons", "loss", "heldout", "seconds"}


class Killed(Exception):
    pass


def test_interrupted_stages_resume_to_the_same_result(trained, toy, tmp_path, monkeypatch):
    def kill_after(n, owner, name):
        real, calls = getattr(owner, name), []

        def counted(*args, **kw):
            calls.append(1)
            if len(calls) > n:
                raise Killed
            return real(*args, **kw)

        monkeypatch.setattr(owner, name, counted)
        with pytest.raises(Killed):
            train(monkeypatch, toy, tmp_path, "--weights", "1", "0.5", "1")
        monkeypatch.setattr(owner, name, real)

    kill_after(2 * (4 + 2) + 1, cdlm, "dlm_loss")       # in the teacher's step 10: 2 held-out losses a checkpoint
    kill_after(2, train_cdlm, "collect")                     # before the third shard
    assert len(list((tmp_path / "trajectories").glob("*.safetensors"))) == 2
    (tmp_path / "trajectories" / "00002.safetensors.tmp").write_bytes(b"half")
    kill_after(6, cdlm, "distillation_loss")
    assert len(log(tmp_path / "student")) == 1
    train(monkeypatch, toy, tmp_path, "--weights", "1", "0.5", "1")
    for name in ("teacher/model", "student/model", *(f"trajectories/0000{i}" for i in range(3))):
        a, b = load_file(trained / f"{name}.safetensors"), load_file(tmp_path / f"{name}.safetensors")
        assert all(torch.equal(a[n], b[n]) for n in a), name
    for stage in ("teacher", "student"):
        assert [{**r, "seconds": 0} for r in log(trained / stage)] == [{**r, "seconds": 0} for r in log(tmp_path / stage)]


def test_trajectories_reveal_the_most_confident_slot_first(toy, tmp_path, monkeypatch, capsys):
    """As the script records them. In reading order the rank of a slot would be its place."""
    seen, pick = [], cdlm.pick

    def watched(confidence, *args):
        seen.append((confidence, pick(confidence, *args)))
        return seen[-1][1]

    monkeypatch.setattr(cdlm, "GEN_LENGTH", 160)
    monkeypatch.setattr(cdlm, "pick", watched)
    args, tokenizer = SimpleNamespace(device="cpu", prompts=1, prompt_length=160, seed=7, batch=2, block_size=B), Tokenizer.load(TARGET)
    collect = lambda: train_cdlm.collect_trajectories(args, tokenizer, partial(train_cdlm.problem, args, tokenizer), tmp_path, toy)
    collect()
    assert len(seen) >= 2 * B and all(picked == [confidence.index(max(confidence))] for confidence, picked in seen)
    rank = train_cdlm.load_trajectories(tmp_path)["rank"][:, :B]
    assert (rank.sort().values == torch.arange(B)).all() and (rank != torch.arange(B)).any()
    data = train_cdlm.load_trajectories(tmp_path)
    assert f"2 trajectories; {train_cdlm.passed_over(data['rank'], data['live']):.0%} of the reveals left a masked slot to the left" in capsys.readouterr().out
    # Those of another order are refused, and those from the time when there was one order alone.
    settings = json.loads((tmp_path / "settings.json").read_text())
    for order, said in ({"order": "first"}, "first"), ({}, "None"):
        (tmp_path / "settings.json").write_text(json.dumps({name: x for name, x in settings.items() if name != "order"} | order))
        with pytest.raises(ValueError, match=f"was begun with order {said}, not surest"):
            collect()


def test_trajectory_files(trained, toy, monkeypatch):                              # 12
    data = train_cdlm.load_trajectories(trained / "trajectories")
    assert len(data["live"]) == 6 and os.path.getsize(trained / "trajectories" / "00000.safetensors") < 2 * (160 * 32 * 2 + 160 * 8 * 3 + 2000)
    batch = train_cdlm.ready({name: x[[0, 1, 5]] for name, x in data.items()}, "cpu")
    assert batch["hidden"].shape == (3, 160, 32) and batch["tokens"].shape == batch["rank"].shape == (3, 160) and batch["hidden"].dtype == torch.float16 and batch["tokens"].dtype == torch.long
    assert torch.equal(batch["prompt"][0], batch["prompt"][1]) and (batch["prompt"][:, 0] != cdlm.PADDING).any()        # two temperatures of one problem
    for prompt in batch["prompt"]:
        assert prompt[prompt != cdlm.PADDING][0] == Tokenizer.load(TARGET).special["<|bos|>"]
    order = [numbers for numbers, _ in schedule(1, [1] * 6, 2, 12)]
    assert sorted(sum(order[:3], [])) == sorted(sum(order[3:], [])) == list(range(6)) and order[:3] != order[3:]
    with pytest.raises(ValueError, match="was begun with seed 7, not 8; use another folder or the same settings"):
        train(monkeypatch, toy, trained, "--seed", "8")
    (trained / "teacher" / "model.safetensors").rename(trained / "kept")
    (trained / "teacher" / "model.safetensors").write_bytes((trained / "student" / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="trajectories.* was begun with teacher .*, not "):
        train(monkeypatch, toy, trained, "--name", "other")
    (trained / "kept").rename(trained / "teacher" / "model.safetensors")


# -- another target ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """(folder of a random target that knows neither masks nor our problems, folder of its answers to a file of prompts)."""
    folder = tmp_path_factory.mktemp("other")
    target = save_toy_target(folder, seed=2)
    tokenizer = os.path.join(target, "tokenizer.json")
    with open(tokenizer) as f:
        text = f.read().replace("<|mask|>", "<|spare|>").replace("<|answer|>", "<|free|>")
    with open(tokenizer, "w") as f:
        f.write(text)
    (folder / "target" / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Is {i} more than {i * i}?"}) + "\n" for i in range(60)))
    run_script(rollouts, "--target", target, "--out", folder / "answers", "--prompt-file", folder / "prompts.jsonl", "--prompts", 12, "--heldout", 3,
               "--max-new-tokens", 40, "--device", "cpu")
    return target, str(folder / "answers")


def test_a_target_that_knows_no_masks_is_trained_end_to_end(other, tmp_path, monkeypatch, capsys):
    target, answers = other
    train(monkeypatch, target, tmp_path, "--answers", answers, "--block-size", "4", "--prompts", "100", gen_length=32)
    old, new, tokenizer = checkpoints.load(target), checkpoints.load(tmp_path / "target"), Tokenizer.load(tmp_path / "target")
    assert tokenizer.mask_id == old.config.vocab_size == new.config.vocab_size - 1 == 2048 and tokenizer.special.keys() - Tokenizer.load(target).special.keys() == {"<|mask|>"}
    assert new.config.eos_id == tokenizer.ends[0]        # what fills up the answers
    for name in ("embed", "head"):
        rows, more = getattr(old, name).weight, getattr(new, name).weight
        assert torch.equal(rows, more[:2048]) and torch.allclose(rows.mean(0), more[2048])
    assert all(torch.equal(p, dict(new.named_parameters())[name]) for name, p in old.named_parameters() if name[:4] not in ("embe", "head"))
    data, texts = train_cdlm.load_trajectories(tmp_path / "trajectories"), len(load_file(os.path.join(answers, "train-0-12.safetensors"))) // 6
    assert 2 <= len(data["live"]) <= 2 * texts == 24 and (data["tokens"] != 2048).all()          # not more than there are prompts
    assert f"{len(data['live'])} trajectories; " in capsys.readouterr().out
    for stage in ("teacher", "student"):
        records = log(tmp_path / stage)
        assert len(records) == 3 and all(record["heldout"].keys() == {"heldout"} and math.isfinite(record["loss"]) for record in records)
        assert Tokenizer.load(tmp_path / stage).mask_id == 2048 and Tokenizer.load(tmp_path / stage).chat_template == "{{ messages[0].content }}!"
        assert json.loads((tmp_path / stage / "config.json").read_text())["diffusion_block_size"] == 4
    assert log(tmp_path / "student")[-1]["distill"] < log(tmp_path / "student")[0]["distill"]
    args = ["--model", target, "--method", "cdlm", "--drafter", str(tmp_path / "student"), "--prompt", "Is 2 more than 4?", "--max-new-tokens", "32"]
    decode.main([*args, "--threshold", "0", "--json", str(tmp_path / "o.json")])
    assert 1 <= json.loads((tmp_path / "o.json").read_text())["counts"]["forwards"] <= 8
    # Once more: all is there.
    train(monkeypatch, target, tmp_path, "--answers", answers, "--block-size", "4", "--prompts", "100", gen_length=32)
    assert capsys.readouterr().out.count("is complete") == 2


def test_what_another_target_needs(other, toy, tmp_path, monkeypatch):
    target, answers = other
    (tmp_path / "settings.json").write_text("[]")
    for model, more, message in ((target, ["--answers", str(tmp_path)], "settings.json is damaged"),
                                 (target, [], f"{target} needs --answers DIR; this makes some: python -m minispec.data.rollouts"),
                                 (toy, ["--answers", answers], "was begun with target .*, not "),
                                 (toy, ["--prompt-length", "159"], "prompt-length must be 160 or more without --answers, got 159"),
                                 (target, ["--answers", "nowhere"], "cannot read nowhere/settings.json"),
                                 (target, ["--answers", answers, "--prompt-length", "2"], f"{answers} lacks answers to prompts of at most 2 tokens")):
        with pytest.raises(ValueError, match=message):
            train(monkeypatch, model, tmp_path, *more, gen_length=32)
    with pytest.raises(SystemExit):
        train(monkeypatch, target, tmp_path, "--block-size", "5")


def test_which_answers_are_examples(tmp_path, monkeypatch):
    """Cut to the slots, or filled up behind an end of text. One that was given up, and one to a long prompt, are left out."""
    monkeypatch.setattr(cdlm, "GEN_LENGTH", 4)
    tokenizer = SimpleNamespace(ends=[9, 8])
    texts = {"0": ([1, 2], [3, 4, 8]), "1": ([1], [3, 4, 5, 6, 7]), "2": ([1], [3, 4, 5]), "3": ([1, 2, 3], [4, 9])}
    tensors = {f"{i}.ids": torch.tensor(prompt + answer) for i, (prompt, answer) in texts.items()}
    tensors |= {f"{i}.learn": torch.arange(len(prompt + answer)) >= len(prompt) for i, (prompt, answer) in texts.items()}
    save_file(tensors, tmp_path / "given-0-4.safetensors")
    args = SimpleNamespace(answers=tmp_path, prompt_length=2)
    assert train_cdlm.read_answers(args, tokenizer, "given") == [([1, 2], [3, 4, 8, 9]), ([1], [3, 4, 5, 6])] and train_cdlm.read_answers(args, tokenizer, "train") == []


def test_a_gguf_file_without_a_mask_token_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(train_cdlm.Tokenizer, "load", lambda path: SimpleNamespace(special={}))
    with pytest.raises(ValueError, match="target must be a Hugging Face folder, got model.gguf"):
        train_cdlm.with_mask("model.gguf", tmp_path)


def test_bad_training_input_is_one_line(toy, tmp_path, monkeypatch):
    for args, message in ((["--batch", "0"], "batch 0 is out of range"),
                          (["--weights", "0", "0", "0"], "weights 0 0 0 leave nothing to train for"), (["--target", "nowhere"], "cannot read nowhere: No such file")):
        with pytest.raises(ValueError, match=message):
            train(monkeypatch, toy, tmp_path, *args)
    with pytest.raises(ValueError, match="exceed the context of 512"):
        train(monkeypatch, toy, tmp_path, gen_length=600)
