"""Train CDLM: a diffusion model from the target (the teacher), what it does, and from that the block-causal
student.

    python train_cdlm.py --out mine/cdlm                         # all three stages, hours
    # an ablation, from the same teacher
    python train_cdlm.py --out mine/cdlm --weights 1 0 0 --name distill

    teacher        OUT/teacher: the target's weights, trained to fill in masks; every slot sees all others
    trajectories   OUT/trajectories: the teacher answers training prompts, one token a step; stored are the
                   tokens, their ranks, and the hidden rows that they were revealed from
    student        OUT/student: the teacher's weights, trained on the trajectories with three losses

Learning rates peak at 1e-3 (teacher) and 2e-4 (student), unless --lr says otherwise. Interrupt it at any
time: the same command continues where the last checkpoint or shard was, with the same result. A stage that
is finished is not done again. Models are Hugging Face folders with log.jsonl and command.txt next to them.
"""
import os
import random
from pathlib import Path

import minispec  # before torch: it tunes the allocator
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tqdm import tqdm

from minispec import cdlm
from minispec.cdlm import BLOCK_SIZE, mask_free
from minispec.core.requests import Request
from minispec.core.verify import Sampling
from minispec.data import masks, tasks
from minispec.data.tokenizer import Tokenizer
from minispec.studies import cdlm as study
from minispec.tools import checkpoints, training
from minispec.tools.files import blame, read_tensors, replaced
from minispec.tools.script import Parser, run_main
from minispec.tools.training import Run, bf16, divergence, fast_dtype, generator_of, locked, schedule

BLOCK_WARMUP = 0.5               # of the teacher's steps have block-causal attention
IN_ORDER = 0.6                   # of the blocks are masked in reading order: see `masks.turns`
TEMPERATURES = (0.0, 0.5)        # each problem has a trajectory at either
SHARD = 32                       # trajectories in a file


def parse_args():
    p = Parser(__doc__)
    training.add_arguments(p, lr=None, save_every=200)
    add = p.add_argument
    add("--target", default="checkpoints/target",
        help="the autoregressive model that the teacher starts from (default %(default)s)")
    add("--steps", type=int, default=8000,
        help="optimiser steps of teacher and student (default %(default)s)")
    add("--batch", type=int, default=16, help="answers a step (default %(default)s)")
    add("--prompts", type=int, default=4000, help="problems with trajectories (default %(default)s)")
    add("--name", default="student", help="the student's folder in --out (default %(default)s)")
    add("--weights", type=float, nargs=3, default=(1.0, 0.5, 0.01), metavar=("DISTILL", "CONS", "DLM"),
        help="of the student's losses (default 1 0.5 0.01)")
    args = training.parsed(p)
    if not any(args.weights):
        raise ValueError("weights 0 0 0 leave nothing to train for; at least one must be above 0")
    return args


# -- data ----------------------------------------------------------------------------------------------------

def example(tokenizer, seed, n):
    """Training problem number n: (prompt ids, answer ids (L,), filled up with ends of text). It depends on
    (seed, n) alone, so that training resumes exactly."""
    rng = random.Random(f"{seed}/cdlm/{n}")
    return study.fitting(tokenizer, rng.choice(tasks.FAMILIES), rng.randrange(1 << 40))[1:]


def as_batch(pairs, width=0):
    """[(prompt ids, answer ids)] -> tensors, prompts padded on the left to (n, width) or the longest."""
    prompts, answers = zip(*pairs)
    width = width or max(map(len, prompts))
    return {"prompt": torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
            "length": torch.tensor([len(p) for p in prompts]), "answer": torch.tensor(answers)}


def examples_of_step(tokenizer, args, step):
    numbers = range(step * args.batch, (step + 1) * args.batch)
    return as_batch([example(tokenizer, args.seed, n) for n in numbers])


def to(device, batch):
    return {name: x.to(device) for name, x in batch.items()}


def load_trajectories(folder):
    """The shards of a folder as one: {name: tensor (n, ..)}. A trajectory is the tokens (L,) of an answer,
    the rank (L,) at which each slot was revealed, the hidden rows (L, C) from which they were, and how many
    slots are live: the text ends in the last block of those."""
    shards = [read_tensors(file) for file in sorted(Path(folder).glob("*.safetensors"))]
    with blame(folder):
        return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


def batch_of(data, numbers):
    """These trajectories, without what is empty in all of them: the left of the prompts, and slots behind the
    text, which decoding never opened."""
    batch = {name: x[numbers] for name, x in data.items()}
    batch["prompt"] = batch["prompt"][:, -int(batch["length"].max()):]
    for name in ("tokens", "rank", "hidden"):
        batch[name] = batch[name][:, :int(batch["live"].max())]
    return batch


# -- losses (2.3) --------------------------------------------------------------------------------------------

def dlm_loss(model, batch, masked, rate, counted, mask_id, block_size, mask):
    """The masked-diffusion loss, where the slots `masked` (n, L) of the answers are masks. rate (n, L): with
    what probability each slot became one. The loss is the mean over rows of the summed cross-entropies of
    masked slots, each divided by its rate and by the number of `counted` slots (n, L). With all counted and
    one rate t a row, that is 1 / (t L) times the sum: an upper bound on the answer's negative log-likelihood
    per slot."""
    answer = batch["answer"]
    rate, counted, masked = (x.to(answer.device) for x in (rate, counted, masked))
    # Each block behind clean ones, or the whole answer with its masks.
    noisy = answer.masked_fill(masked, mask_id)
    where = masked & counted
    if mask is cdlm.two_copies:
        hidden = cdlm.blocks_hidden(model, batch["prompt"], batch["length"], answer, noisy, block_size)
    else:
        hidden = cdlm.answer_hidden(model, batch["prompt"], batch["length"], noisy, block_size, mask)
    # A slot that is masked with probability t counts 1 / t, so that every slot weighs the same in the mean.
    logits = mask_free(model.logits(hidden[where]), mask_id)
    loss = F.cross_entropy(logits, answer[where], reduction="none")
    return (loss / (rate * counted.sum(-1, keepdim=True))[where]).sum() / len(answer)


def reference_loss(model, batch, args, mask_id, block_causal, generator, in_order=0.0):
    """The masked-diffusion loss on reference answers with drawn masks: as a student reads them, or as a
    teacher does. in_order: see `masks.turns`."""
    states, mask = masks.teacher_states, cdlm.bidirectional
    answer = batch["answer"]
    if block_causal:
        states, mask = masks.all_blocks, cdlm.two_copies
        # No block behind the text is counted, or seen by one that is.
        longest = masks.text_blocks(answer, model.config.eos_id, BLOCK_SIZE).max() * BLOCK_SIZE
        answer = answer[:, :longest]
    rate, counted = states(answer, model.config.eos_id, BLOCK_SIZE, generator)
    masked = masks.turns(answer.shape, BLOCK_SIZE, generator, in_order) < rate
    batch = to(args.device, {**batch, "answer": answer})
    return dlm_loss(model, batch, masked, rate, counted, mask_id, BLOCK_SIZE, mask)


def draw_states(live, gen_length, block_size, generator):
    """A step k (n, L / B) in the life of each block of trajectories of `live` (n,) decoded slots, uniform
    over it. Blocks behind the one that ends the text were never opened: they are at their end, and have
    nothing to teach."""
    first = torch.arange(0, gen_length, block_size).expand(len(live), -1)
    end = (first + block_size).clamp(max=gen_length)
    k = first + (torch.rand(first.shape, generator=generator) * (end - first)).long()
    return torch.where(first < live[:, None], k, end)


def distillation_loss(model, teacher_head, batch, k, mask_id, block_size):
    """Mean over the slots that are masked in y of KL(p_teacher || q(y)). y: the state k (n, L / B) of every
    block; q: the student. All blocks of an answer are trained at once.

    p_teacher is rebuilt from the hidden row with which the teacher revealed the token, by the teacher's own
    head (V, C). It knew more than y says, and that is the lesson."""
    tokens, rank = batch["tokens"], batch["rank"]
    k, length = k.to(rank.device), rank.shape[1]
    masked = rank >= masks.per_slot(k, length, block_size)
    noisy = tokens.masked_fill(masked, mask_id)
    hidden = cdlm.blocks_hidden(model, batch["prompt"], batch["length"], tokens, noisy, block_size)
    # What the teacher thought of each slot when it revealed it.
    with torch.autocast(tokens.device.type, enabled=False):
        goal = mask_free(batch["hidden"][masked].to(teacher_head.dtype) @ teacher_head.T, mask_id)
    values = divergence(goal, mask_free(model.logits(hidden[masked]), mask_id))
    # The mean over the masked slots of a block, of all blocks with text.
    ends = torch.arange(block_size, length + block_size, block_size, device=k.device).clamp(max=length)
    count = masks.per_slot(ends - k, length, block_size)
    return (values / count[masked]).sum() / (-(-batch["live"] // block_size)).sum()


def consistency_loss(model, batch, k, mask_id, block_size, generator):
    """Mean over the slots that are masked in y* of KL(stop(q(y*)) || q(y)). y* is the state in which the
    block is complete, so these are slots of later blocks: while one block of each answer is half done,
    predict for all slots behind it what you will predict once it is done."""
    tokens, rank, live = batch["tokens"], batch["rank"], batch["live"]
    # One block of each answer, its two states, and the slots that are masked in both.
    block = (torch.rand(len(tokens), 1, generator=generator) * -(-live.cpu() // block_size)[:, None]).long()
    k = k.gather(1, block)[:, 0].to(rank.device)
    k_star = ((block[:, 0] + 1) * block_size).to(rank.device)
    s = (rank >= k_star[:, None]) & (torch.arange(rank.shape[1], device=rank.device) < live[:, None])

    def logits(step):
        y = tokens.masked_fill(rank >= step[:, None], mask_id)
        hidden = cdlm.answer_hidden(model, batch["prompt"], batch["length"], y, block_size)
        return mask_free(model.logits(hidden[s]), mask_id)

    with torch.no_grad():
        goal = logits(k_star)
    count = s.sum(-1, keepdim=True).expand_as(s)
    return (divergence(goal, logits(k)) / count[s]).sum() / len(tokens)


# -- the three stages ----------------------------------------------------------------------------------------

def train_teacher(args, folder, tokenizer, mask_id):
    """First block-causally, all blocks of an answer in one forward, because most of what a mask must learn is
    the same when every slot sees all others. Then as the teacher is used."""
    model = checkpoints.load(args.target, args.device, torch.float32)
    train(args, folder, tokenizer, mask_id, model, args.target, 1e-3, (0, 0, 1))


def collect(model, mask_id, requests, block_size=BLOCK_SIZE, batch_size=8, order=cdlm.ORDER):
    """The teacher's trajectories, one token a step: tokens and rank (n, L), live (n,) slots that were
    decoded, and hidden (n, L, C) in 16 bit, the row from which each token was revealed, as it enters the
    head. Behind the block that ends the text, every token is an end of text, its rank is its place, and its
    hidden row is 0."""
    teacher = cdlm.Decoder(model, mask_id, "teacher", block_size, order=order, batch_size=batch_size,
                           record=True)
    teacher.generate(requests)
    # What was decoded, then what lies behind the text.
    rows = []
    for request in requests:
        a = request.state
        live = a.n_revealed
        behind = range(live, request.max_new_tokens)
        tokens = a.tokens[a.prompt:a.prompt + live] + [model.config.eos_id] * len(behind)
        hidden = torch.stack([a.hidden[i] for i in range(live)])
        rows.append({
            "tokens": torch.tensor(tokens),
            "rank": torch.tensor(a.rank[:live] + [*behind]),
            "live": torch.tensor(live),
            "hidden": F.pad(hidden, (0, 0, 0, len(behind))),
        })
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def collect_trajectories(args, folder, tokenizer, mask_id):
    model = checkpoints.load(f"{args.out}/teacher", args.device, fast_dtype(args.device))
    training.same_settings(folder, prompts=args.prompts, seed=args.seed,
                           teacher=checkpoints.fingerprint(model))
    cells = [(number, temperature) for number in range(args.prompts) for temperature in TEMPERATURES]
    for start in tqdm(range(0, len(cells), SHARD), unit="shard", desc="trajectories"):
        file = f"{folder}/{start // SHARD:05d}.safetensors"
        if os.path.exists(file):
            continue
        # The teacher answers the problems of a shard.
        pairs, requests = [], []
        for i, (number, temperature) in enumerate(cells[start:start + SHARD], start):
            pairs.append(example(tokenizer, args.seed, number))
            sampling = Sampling(temperature, seed=args.seed * 1000003 + i)
            requests.append(Request(pairs[-1][0], cdlm.GEN_LENGTH, sampling, [model.config.eos_id]))
        batch = as_batch(pairs, study.LONGEST_PROMPT)
        data = collect(model, mask_id, requests, batch_size=args.batch)
        data.update(prompt=batch["prompt"], length=batch["length"])
        with replaced(file) as temporary:
            save_file(data, temporary)


def train_student(args, folder, tokenizer, mask_id):
    teacher = f"{args.out}/teacher"
    model = checkpoints.load(teacher, args.device, torch.float32)
    data = load_trajectories(f"{args.out}/trajectories")
    train(args, folder, tokenizer, mask_id, model, teacher, 2e-4, args.weights, data)


def train(args, folder, tokenizer, mask_id, model, source, lr, weights, data=None):
    """The loop of teacher and student. model: from the folder `source`; weights: of the three losses, of
    which a teacher has the last one alone; data: a student's trajectories."""
    weights = dict(zip(("distill", "cons", "dlm"), weights))
    teacher_head = model.head.weight.detach().clone()
    first = 0
    if data is not None:
        plan = schedule(args.seed, [1] * len(data["live"]), args.batch, args.steps * args.batch)
        # A student's reference answers are of other problems than the trajectories.
        first = args.prompts * 1000
    run = Run(args, folder, model, args.steps, args.lr or lr, muon=True)
    for step in run.steps():
        generator = generator_of(args, step)
        block_causal = data is not None or step < args.steps * BLOCK_WARMUP
        if data is not None:
            # States of the teacher's trajectories.
            batch = batch_of(data, plan[step][0])
            k = draw_states(batch["live"], batch["tokens"].shape[1], BLOCK_SIZE, generator)
            batch = to(args.device, batch)
        # The losses; one of weight 0 is not computed.
        losses = {}
        with bf16(args.device):
            if weights["distill"]:
                losses["distill"] = distillation_loss(model, teacher_head, batch, k, mask_id, BLOCK_SIZE)
            if weights["cons"]:
                losses["cons"] = consistency_loss(model, batch, k, mask_id, BLOCK_SIZE, generator)
            if weights["dlm"]:
                batch = examples_of_step(tokenizer, args, first + step)
                losses["dlm"] = reference_loss(model, batch, args, mask_id, block_causal, generator, IN_ORDER)
        # One step of the optimiser on their weighted sum.
        loss = sum(weights[name] * x for name, x in losses.items())
        loss.backward()
        run.update((step + 1) / args.steps, **losses, loss=loss)
        if run.checkpoint_due():
            checkpoints.save(model, folder, source)
            run.checkpoint(heldout=evaluate(model, tokenizer, args, mask_id, block_causal))


def evaluate(model, tokenizer, args, mask_id, block_causal):
    """The held-out losses, by family."""
    heldout = {}
    for family in tasks.FAMILIES:
        # Always the same problems, rates and masks, as long as the objective is the same.
        batch = as_batch([study.fitting(tokenizer, family, seed, "heldout")[1:] for seed in range(8)])
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            loss = reference_loss(model, batch, args, mask_id, block_causal, generator)
        heldout[family] = round(loss.item(), 4)
    return heldout


def main():
    args = parse_args()
    tokenizer = Tokenizer.load(args.target)
    context = checkpoints.load(args.target).config.block_size
    if cdlm.GEN_LENGTH + study.LONGEST_PROMPT > context:
        raise ValueError(f"prompts of {study.LONGEST_PROMPT} and answers of {cdlm.GEN_LENGTH} tokens exceed "
                         f"the context of {context}")
    mask_id = cdlm.mask_id_of(tokenizer, args.target)
    stages = (("teacher", train_teacher), ("trajectories", collect_trajectories), (args.name, train_student))
    for name, stage in stages:
        folder = f"{args.out}/{name}"
        with locked(folder):
            stage(args, folder, tokenizer, mask_id)


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues from the last checkpoint or shard", "--batch")
