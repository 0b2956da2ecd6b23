"""Train CDLM: a diffusion model from the target (the teacher), what it does, and from that the block-causal
student.

    python train_cdlm.py --out checkpoints/cdlm                         # all three stages, hours
    python train_cdlm.py --out checkpoints/cdlm --stage teacher         # or one after the other
    python train_cdlm.py --out checkpoints/cdlm --stage trajectories
    # an ablation
    python train_cdlm.py --out checkpoints/cdlm --stage student --weights 1 0 0 --name distill

    teacher        OUT/teacher: the target's weights, trained to fill in masks; every slot sees all others
    trajectories   OUT/trajectories: the teacher answers training prompts, one token a step; stored are the
                   tokens, their ranks, and the hidden rows that they were revealed from
    student        OUT/student: the teacher's weights, trained on the trajectories with three losses

Learning rates peak at 1e-3 (teacher) and 2e-4 (student), unless --lr says otherwise. Interrupt it at any
time: the same command continues where the last checkpoint or shard was, with the same result. A stage that
is finished is not done again. Models are Hugging Face folders with log.jsonl and command.txt next to them.
"""
import glob
import os
import random

import minispec  # before torch: it tunes the allocator
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tqdm import tqdm

from minispec import cdlm
from minispec.core.requests import Request
from minispec.core.verify import Sampling
from minispec.data import tasks
from minispec.data.tokenizer import Tokenizer
from minispec.studies import cdlm as study
from minispec.tools import checkpoints, training
from minispec.tools.files import read_json, read_tensors, replaced
from minispec.tools.script import Parser, run_main
from minispec.tools.training import Optimizer, Run, bf16, fast_dtype, generator_of, learning_rate, locked

STAGES = ("teacher", "trajectories", "student")
IN_ORDER = 0.6                   # of the blocks are masked from about one slot on, not at random: see `turns`


def parse_args():
    p = Parser(__doc__)
    training.add_arguments(p, lr=None, warmup=50, save_every=200)
    p.add_argument("--stage", default="all", choices=("all", *STAGES), help="default: all, in this order")

    both = p.add_argument_group("teacher and student")
    both.add_argument("--steps", type=int, default=8000, help="optimiser steps (default %(default)s)")
    both.add_argument("--batch", type=int, default=16, help="answers a step (default %(default)s)")
    both.add_argument("--check", type=int, default=4,
                      help="held-out problems of a family that are decoded at the end (default %(default)s)")

    teacher = p.add_argument_group("teacher")
    teacher.add_argument("--target", default="checkpoints/target",
                         help="the autoregressive model it starts from (default %(default)s)")
    teacher.add_argument("--block-warmup", type=float, default=0.5,
                         help="share of its steps with block-causal attention (default %(default)s)")

    trajectories = p.add_argument_group("trajectories")
    trajectories.add_argument("--prompts", type=int, default=4000,
                              help="training problems (default %(default)s)")
    trajectories.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.5],
                              help="one trajectory at each for every problem (default 0 0.5)")
    trajectories.add_argument("--shard", type=int, default=64,
                              help="trajectories in a file (default %(default)s)")
    trajectories.add_argument("--order", default=cdlm.ORDER, choices=cdlm.ORDERS,
                              help="which slot a step reveals: the first masked one, or the most confident "
                                   "as in the paper (default %(default)s)")

    student = p.add_argument_group("student")
    student.add_argument("--name", default="student", help="its folder in --out (default %(default)s)")
    student.add_argument("--weights", type=float, nargs=3, default=(1.0, 0.5, 0.01),
                         metavar=("DISTILL", "CONS", "DLM"), help="of the losses (default 1 0.5 0.01)")
    student.add_argument("--cons-target", default="block_end", choices=("block_end", "later_state"),
                         help="see cdlm.student_losses (default %(default)s)")
    args = p.parse_args()
    training.check_arguments(args, steps=1, batch=1, prompts=1, shard=1)
    if not 0 <= args.block_warmup <= 1:
        raise ValueError(f"block-warmup {args.block_warmup} is out of range; allowed is 0 to 1")
    return args


# -- data ----------------------------------------------------------------------------------------------------

def example(tokenizer, seed, n):
    """Training problem number n: (prompt ids, answer ids (L,), filled up with ends of text). It depends on
    (seed, n) alone, so that training resumes exactly."""
    rng = random.Random(f"{seed}/cdlm/{n}")
    return study.fitting(tokenizer, rng.choice(tasks.FAMILIES), rng.randrange(1 << 40))[1:]


def examples_of_step(tokenizer, args, step, group=1):
    """The batch of a step. Where batches are grouped, those of a group share out their examples by the
    answers' length: the shorter the longest answer of a batch, the less there is to compute."""
    n = args.batch
    first = step - step % group
    pairs = [example(tokenizer, args.seed, i) for i in range(first * n, (first + group) * n)]
    pairs.sort(key=lambda pair: pair[1].index(pair[1][-1]))
    turn = random.Random(f"{args.seed}/group/{first}").sample(range(group), group)[step % group]
    return as_batch(pairs[turn * n:(turn + 1) * n])


def as_batch(pairs):
    """[(prompt ids, answer ids)] -> tensors, prompts padded on the left to (n, width)."""
    prompts, answers = zip(*pairs)
    width = max(len(p) for p in prompts)
    return {"prompt": torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
            "length": torch.tensor([len(p) for p in prompts]), "answer": torch.tensor(answers)}


class Trajectories:
    """The shards of a folder as one list."""

    def __init__(self, folder):
        files = sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors")))
        shards = [read_tensors(file) for file in files]
        self.where = [(shard, i) for shard in shards for i in range(len(shard["live"]))]
        if not self.where:
            raise ValueError(f"{folder} holds no trajectories; run --stage trajectories first")

    def batch(self, numbers):
        rows = [{name: x[i] for name, x in shard.items()} for shard, i in (self.where[n] for n in numbers)]
        width = max(int(r["length"]) for r in rows)
        out = {name: torch.stack([r[name] for r in rows]) for name in rows[0] if name != "prompt"}
        out["prompt"] = torch.stack([F.pad(r["prompt"], (width, 0))[-width:] for r in rows])
        return {name: x if name == "hidden" else x.long() for name, x in out.items()}


def numbers_of_step(step, batch, live, seed, group=4):
    """Which trajectories of `live` (n,) slots make up the batch of a step: each one once an epoch, in another
    order every epoch. `group` neighbouring batches share out theirs by length."""
    n, out, order = len(live), [], []
    for i in range(step * batch, (step + 1) * batch):
        if not order or i % n == 0:
            order = random.Random(f"{seed}/epoch/{i // n}").sample(range(n), n)
            size = group * batch
            groups = [sorted(order[a:a + size], key=lambda j: live[j]) for a in range(0, n, size)]
            order = sum(groups, [])
        out.append(order[i % n])
    return out


def cut(batch, longest, names):
    """The batch without the slots from `longest` on: no text is there, decoding never opens them."""
    return {name: x[:, :longest] if name in names else x for name, x in batch.items()}


def cut_answers(batch, eos_id):
    longest = text_blocks(batch["answer"], eos_id, cdlm.BLOCK_SIZE).max() * cdlm.BLOCK_SIZE
    return cut(batch, longest, ("answer",))


def to(device, batch):
    return {name: x.to(device) for name, x in batch.items()}


# -- which slots of a training answer are masked -------------------------------------------------------------
# Random numbers are drawn on the CPU, so that they are the same on every device.

def mask_rates(n, generator, low=1e-3):
    """n mask rates in [low, 1], spread evenly over it from one random offset, so that batches differ
    little."""
    u = (torch.rand((), generator=generator) + torch.arange(n) / n) % 1
    return (1 - low) * u[torch.randperm(n, generator=generator)] + low


def text_blocks(answer, eos_id, block_size):
    """How many blocks (n,) of answers (n, L), filled up with ends of text, hold text: up to the one with the
    first end."""
    return (answer != eos_id).sum(-1).clamp(max=answer.shape[1] - 1) // block_size + 1


def all_blocks(answer, eos_id, block_size, generator):
    """For `two_copies`: mask rates (n, L), one for each block, and the slots (n, L) to predict: those of
    blocks with text, because decoding never opens the others."""
    n, length = answer.shape
    n_blocks = -(-length // block_size)
    rate = mask_rates(n * n_blocks, generator, 1 / block_size).view(n, n_blocks)
    counted = torch.arange(n_blocks) < text_blocks(answer, eos_id, block_size)[:, None]
    return cdlm.per_slot(rate, length, block_size), cdlm.per_slot(counted, length, block_size)


def open_block(answer, eos_id, block_size, generator):
    """The states that block-wise decoding meets, as mask rates (n, L): one block of the text is masked at a
    rate, the blocks before it are finished, those behind it all masks. Also the slots (n, L) to predict:
    those of that block."""
    n, length = answer.shape
    block = (torch.rand(n, generator=generator) * text_blocks(answer, eos_id, block_size)).long()[:, None]
    rate = mask_rates(n, generator, 1 / block_size)[:, None]
    of_slot = torch.arange(length) // block_size
    return torch.where(of_slot == block, rate, (of_slot > block).float()), of_slot == block


def teacher_states(answer, eos_id, block_size, generator):
    """For every second row the states of `open_block`. For the others one rate for all slots, with the ends
    of text that fill up an answer: with them the model says how long its answer is."""
    rate, counted = open_block(answer, eos_id, block_size, generator)
    rate[1::2] = mask_rates(len(answer) // 2, generator)[:, None]
    counted[1::2] = True
    return rate, counted


def turns(shape, block_size, generator, in_order=0.0):
    """When, from 1 down to 0, each slot (n, L) is revealed: masked are the slots whose turn is below their
    rate. Turns are random numbers, but in a share `in_order` of the blocks they follow the text from left to
    right, more or less. So does decoding: a slot mostly waits for the slots before it. Random masks hardly
    ever show a block like that."""
    n, length = shape
    turn = torch.rand(shape, generator=generator)
    if not in_order:
        return turn
    blocks = (n, -(-length // block_size))
    loose = cdlm.per_slot(torch.rand(blocks, generator=generator), length, block_size)
    ordered = cdlm.per_slot(torch.rand(blocks, generator=generator), length, block_size)
    overtake = 0.75 * block_size * loose ** 2                    # so many slots may overtake each other
    place = torch.arange(length) % block_size
    left_to_right = 1 - (place + (1 + overtake) * turn) / (block_size + overtake)
    return torch.where(ordered < in_order, left_to_right, turn)


def draw_masks(states, answer, eos_id, generator, in_order=0.0):
    """For answers (n, L): which slots are masked, at what rates, and which count; `states` draws the rates.
    All (n, L)."""
    rate, counted = states(answer, eos_id, cdlm.BLOCK_SIZE, generator)
    masked = turns(answer.shape, cdlm.BLOCK_SIZE, generator, in_order) < rate
    return masked, rate, counted


# -- the three stages ----------------------------------------------------------------------------------------

def train_teacher(args, folder, tokenizer, tokenizer_json, mask_id):
    """First block-causally, all blocks of an answer in one forward, because most of what a mask must learn is
    the same when every slot sees all others. Then as the teacher is used."""
    model = checkpoints.load(args.target, args.device, torch.float32)
    eos, lr = model.config.eos_id, args.lr or 1e-3
    block_steps = args.steps * args.block_warmup
    kind = "teacher" if block_steps < args.steps else "student"      # only block-causal? then decode it so
    optimizer = Optimizer(model, lambda name: name.startswith("blocks."))
    run = Run(folder, model, optimizer, args.steps, args.save_every)
    for step in run.steps():
        generator = generator_of(args, step)
        if step < block_steps:
            states, mask = all_blocks, cdlm.two_copies
            batch = cut_answers(examples_of_step(tokenizer, args, step, group=4), eos)
        else:
            states, mask = teacher_states, cdlm.bidirectional
            batch = examples_of_step(tokenizer, args, step)
        masks = draw_masks(states, batch["answer"], eos, generator, IN_ORDER)
        with bf16(args.device):
            loss = cdlm.dlm_loss(model, to(args.device, batch), *masks, mask_id, cdlm.BLOCK_SIZE, mask)
        loss.backward()
        optimizer.step(learning_rate(step, step / args.steps, lr, args.warmup))
        run.log(loss=loss)
        if run.checkpoint_due(step):
            results = evaluate(model, tokenizer, args, step, states, mask, kind, mask_id)
            checkpoints.save(model, folder, tokenizer_json)
            run.checkpoint(step, **results)


def collect_trajectories(args, folder, tokenizer, tokenizer_json, mask_id):
    model = checkpoints.load(os.path.join(args.out, "teacher"), args.device, fast_dtype(args.device))
    settings = {name: getattr(args, name) for name in ("prompts", "shard", "order", "seed", "temperatures")}
    training.same_settings(folder, **settings, gen_length=cdlm.GEN_LENGTH, block_size=cdlm.BLOCK_SIZE,
                           teacher=checkpoints.fingerprint(model))
    each = len(args.temperatures)
    n = args.prompts * each
    for shard in tqdm(range(-(-n // args.shard)), unit="shard", desc="trajectories"):
        file = os.path.join(folder, f"{shard:05d}.safetensors")
        if os.path.exists(file):
            continue
        items = range(shard * args.shard, min((shard + 1) * args.shard, n))
        pairs = [example(tokenizer, args.seed, i // each) for i in items]
        requests = []
        for i, (prompt, _) in zip(items, pairs):
            sampling = Sampling(args.temperatures[i % each], seed=args.seed * 1000003 + i)
            requests.append(Request(prompt, cdlm.GEN_LENGTH, sampling, [model.config.eos_id]))
        batch = as_batch(pairs)
        data = {"prompt": batch["prompt"], "length": batch["length"],
                **cdlm.collect(model, mask_id, requests, cdlm.BLOCK_SIZE, args.batch, args.order)}
        data = {name: x if name == "hidden" else x.to(torch.int32) for name, x in data.items()}
        with replaced(file) as temporary:
            save_file({name: x.contiguous() for name, x in data.items()}, temporary)


def train_student(args, folder, tokenizer, tokenizer_json, mask_id):
    model = checkpoints.load(os.path.join(args.out, "teacher"), args.device, torch.float32)
    trajectories = os.path.join(args.out, "trajectories")
    data = Trajectories(trajectories)
    training.same_settings(trajectories, teacher=checkpoints.fingerprint(model))
    teacher_head = model.head.weight.detach().clone()
    eos, lr = model.config.eos_id, args.lr or 2e-4
    beyond = args.prompts * 1000             # reference answers of other problems than the trajectories'
    live = [int(shard["live"][i]) for shard, i in data.where]
    later = args.cons_target == "later_state"
    w_distill, w_cons, w_dlm = args.weights
    optimizer = Optimizer(model, lambda name: name.startswith("blocks."))
    run = Run(folder, model, optimizer, args.steps, args.save_every)
    for step in run.steps():
        generator = generator_of(args, step)
        # 1. Distillation and consistency, on states of the teacher's trajectories.
        batch = data.batch(numbers_of_step(step, args.batch, live, args.seed))
        batch = to(args.device, cut(batch, int(batch["live"].max()), ("tokens", "rank", "hidden")))
        length = batch["tokens"].shape[1]
        k, k_star = cdlm.draw_states(batch["live"].cpu(), length, cdlm.BLOCK_SIZE, generator, later)
        with bf16(args.device):
            losses = cdlm.student_losses(model, teacher_head, batch, k, k_star, mask_id, cdlm.BLOCK_SIZE,
                                         (w_distill, w_cons), later, generator)
        # 2. The masked-diffusion loss, on reference answers.
        dlm = torch.zeros((), device=args.device)
        if w_dlm:
            batch = cut_answers(examples_of_step(tokenizer, args, beyond + step, group=4), eos)
            masks = draw_masks(all_blocks, batch["answer"], eos, generator, IN_ORDER)
            batch = to(args.device, batch)
            with bf16(args.device):
                dlm = cdlm.dlm_loss(model, batch, *masks, mask_id, cdlm.BLOCK_SIZE, cdlm.two_copies)
        loss = w_distill * losses["distill"] + w_cons * losses["cons"] + w_dlm * dlm
        loss.backward()
        optimizer.step(learning_rate(step, step / args.steps, lr, args.warmup))
        run.log(**losses, dlm=dlm, loss=loss)
        if run.checkpoint_due(step):
            results = evaluate(model, tokenizer, args, step, all_blocks, cdlm.two_copies, "student", mask_id)
            checkpoints.save(model, folder, tokenizer_json)
            run.checkpoint(step, **results)


# -- what a checkpoint is worth ------------------------------------------------------------------------------

def evaluate(model, tokenizer, args, step, states, mask, kind, mask_id):
    """For the log: the held-out losses, and at the end what decoding gives."""
    results = {"heldout": heldout_loss(model, tokenizer, args, states, mask, mask_id)}
    if step + 1 == args.steps:
        decoder = cdlm.Decoder(model, mask_id, kind, threshold=cdlm.THRESHOLD, order=args.order,
                               batch_size=16)
        problems = [study.fitting(tokenizer, family, 1000 + i, "heldout")[:2]
                    for family in tasks.FAMILIES for i in range(args.check)]
        results["decoded"] = study.answer(decoder, problems, tokenizer)[0] if problems else {}
    return results


@torch.no_grad()
def heldout_loss(model, tokenizer, args, states, mask, mask_id):
    """The masked-diffusion loss per slot of held-out problems, by family: always the same problems, rates and
    masks, as long as the objective is the same."""
    out = {}
    for family in tasks.FAMILIES:
        batch = as_batch([study.fitting(tokenizer, family, seed, "heldout")[1:] for seed in range(8)])
        masks = draw_masks(states, batch["answer"], model.config.eos_id, torch.Generator().manual_seed(0))
        loss = cdlm.dlm_loss(model, to(args.device, batch), *masks, mask_id, cdlm.BLOCK_SIZE, mask)
        out[family] = round(loss.item(), 4)
    return out


def main():
    args = parse_args()
    stages = STAGES if args.stage == "all" else (args.stage,)
    source = args.target if stages[0] == "teacher" else os.path.join(args.out, "teacher")
    tokenizer, context = Tokenizer.load(source), checkpoints.load(source).config.block_size
    if cdlm.GEN_LENGTH + study.LONGEST_PROMPT > context:
        raise ValueError(f"prompts of {study.LONGEST_PROMPT} and answers of {cdlm.GEN_LENGTH} tokens exceed "
                         f"the context of {context}")
    mask_id = cdlm.mask_id_of(tokenizer, source)
    tokenizer_json = read_json(os.path.join(source, "tokenizer.json"))
    work = {"teacher": train_teacher, "trajectories": collect_trajectories, "student": train_student}
    for stage in stages:
        folder = os.path.join(args.out, args.name if stage == "student" else stage)
        with locked(folder):
            work[stage](args, folder, tokenizer, tokenizer_json, mask_id)


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues from the last checkpoint or shard", "--batch")
