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
from minispec.data import masks, tasks
from minispec.data.tokenizer import Tokenizer
from minispec.data.trajectories import Trajectories, as_batch, cut, numbers_of_step
from minispec.studies import cdlm as study
from minispec.tools import checkpoints, training
from minispec.tools.files import read_json, replaced
from minispec.tools.script import Parser, run_main
from minispec.tools.training import Optimizer, Run, bf16, fast_dtype, generator_of, learning_rate, locked

STAGES = ("teacher", "trajectories", "student")
IN_ORDER = 0.6                   # of the blocks are masked in reading order: see `masks.turns`


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
                         help="see student_losses (default %(default)s)")
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


def cut_answers(batch, eos_id):
    longest = masks.text_blocks(batch["answer"], eos_id, cdlm.BLOCK_SIZE).max() * cdlm.BLOCK_SIZE
    return cut(batch, longest, ("answer",))


def to(device, batch):
    return {name: x.to(device) for name, x in batch.items()}


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
    logits = cdlm.mask_free(model.logits(hidden[where]), mask_id)
    loss = F.cross_entropy(logits, answer[where], reduction="none")
    return (loss / (rate * counted.sum(-1, keepdim=True))[where]).sum() / len(answer)


def reference_loss(model, batch, args, mask_id, block_causal, generator, in_order=0.0):
    """The masked-diffusion loss on reference answers with drawn masks: as a student reads them, or as a
    teacher does. in_order: see `masks.turns`."""
    states, mask = masks.teacher_states, cdlm.bidirectional
    if block_causal:
        states, mask = masks.all_blocks, cdlm.two_copies
    answer = batch["answer"]
    rate, counted = states(answer, model.config.eos_id, cdlm.BLOCK_SIZE, generator)
    masked = masks.turns(answer.shape, cdlm.BLOCK_SIZE, generator, in_order) < rate
    batch = to(args.device, batch)
    return dlm_loss(model, batch, masked, rate, counted, mask_id, cdlm.BLOCK_SIZE, mask)


def draw_states(live, gen_length, block_size, generator, later=False):
    """A step k (n, L / B) in the life of each block of trajectories of `live` (n,) decoded slots, uniform
    over it, and the step k* > k whose state is the consistency target: the end of the block, as in the paper,
    or with `later` any step up to there. Blocks behind the one that ends the text were never opened: they are
    at their end."""
    first = torch.arange(0, gen_length, block_size).expand(len(live), -1)
    end = (first + block_size).clamp(max=gen_length)
    k = first + (torch.rand(first.shape, generator=generator) * (end - first)).long()
    k_star = end
    if later:
        k_star = k + 1 + (torch.rand(first.shape, generator=generator) * (end - k - 1)).long()
    # Blocks that were never opened have nothing to teach.
    opened = first < live[:, None]
    return torch.where(opened, k, end), torch.where(opened, k_star, end)


def divergence(target, logits):
    """KL(target || model) (...) of two sets of logits (..., V): it makes the model cover all of the target's
    mass."""
    p, q = target.log_softmax(-1), logits.log_softmax(-1)
    return F.kl_div(q, p, log_target=True, reduction="none").sum(-1)


def state_mean(values, where, block_size, n_states):
    """The mean over states of the mean over their slots. values: of the slots `where` (n, L), `block_size` to
    a state."""
    length = where.shape[1]
    count = F.pad(where, (0, -length % block_size)).unflatten(1, (-1, block_size)).sum(-1).clamp(min=1)
    return (values / masks.per_slot(count, length, block_size)[where]).sum() / n_states


def student_losses(model, teacher_head, batch, k, k_star, mask_id, block_size, weights, later, generator):
    """The student's two losses on trajectories, {"distill", "cons"}. With y the state k of a block, y* its
    state k*, k and k* (n, L / B), and q the student:

        distill  mean over U, the slots that are masked in y, of KL(p_teacher || q(y))
        cons     mean over S, the slots that are masked in y*, of KL(stop(q(y*)) || q(y))

    p_teacher is rebuilt from the hidden row with which the teacher revealed the token, by the teacher's own
    head (V, C). It knew more than y says, and that is the lesson. All blocks of an answer are trained at
    once. `later`: y* lies inside the block. Else y* is the end of the block, as the paper prints it, and S
    has only slots of later blocks: `later_blocks_loss`. weights of (distill, cons): a loss of weight 0 is not
    computed. """
    tokens, rank = batch["tokens"], batch["rank"]
    w_distill, w_cons = weights
    n_states = -(-batch["live"] // block_size).sum()
    zero = torch.zeros((), device=tokens.device)
    losses = {"distill": zero, "cons": zero}

    def masked_at(step):
        return rank >= masks.per_slot(step.to(rank.device), tokens.shape[1], block_size)

    def rows(masked):
        noisy = tokens.masked_fill(masked, mask_id)
        return cdlm.blocks_hidden(model, batch["prompt"], batch["length"], tokens, noisy, block_size)

    def logits(hidden):
        return cdlm.mask_free(model.logits(hidden), mask_id)

    u = masked_at(k)
    if w_distill or (w_cons and later):
        hidden = rows(u)
    if w_distill:
        # What the teacher thought of each slot when it revealed it.
        with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
            goal = cdlm.mask_free(batch["hidden"][u].to(teacher_head.dtype) @ teacher_head.T, mask_id)
        losses["distill"] = state_mean(divergence(goal, logits(hidden[u])), u, block_size, n_states)
    if w_cons and later:
        # What the student itself will think a few steps later.
        s = masked_at(k_star)
        with torch.no_grad():
            goal = logits(rows(s)[s])
        losses["cons"] = state_mean(divergence(goal, logits(hidden[s])), s, block_size, n_states)
    elif w_cons:
        losses["cons"] = later_blocks_loss(model, batch, mask_id, block_size, k, k_star, generator)
    return losses


def later_blocks_loss(model, batch, mask_id, block_size, k, k_star, generator):
    """The consistency loss as printed: while one block of each answer is half done, at its k, predict for all
    slots behind it what you will predict once it is done, at its k*."""
    tokens, rank, live = batch["tokens"], batch["rank"], batch["live"]
    # One block of each answer, its two states, and the slots that are masked in both.
    block = (torch.rand(len(tokens), 1, generator=generator) * -(-live.cpu() // block_size)[:, None]).long()
    k, k_star = (x.gather(1, block)[:, 0].to(rank.device) for x in (k, k_star))
    s = (rank >= k_star[:, None]) & (torch.arange(rank.shape[1], device=rank.device) < live[:, None])

    def logits(step):
        y = tokens.masked_fill(rank >= step[:, None], mask_id)
        hidden = cdlm.answer_hidden(model, batch["prompt"], batch["length"], y, block_size)
        return cdlm.mask_free(model.logits(hidden[s]), mask_id)

    with torch.no_grad():
        goal = logits(k_star)
    return state_mean(divergence(goal, logits(k)), s, s.shape[1], len(tokens))


# -- the three stages ----------------------------------------------------------------------------------------

def train_teacher(args, folder, tokenizer, tokenizer_json, mask_id):
    """First block-causally, all blocks of an answer in one forward, because most of what a mask must learn is
    the same when every slot sees all others. Then as the teacher is used."""
    model = checkpoints.load(args.target, args.device, torch.float32)
    block_steps = args.steps * args.block_warmup
    optimizer = Optimizer(model, lambda name: name.startswith("blocks."))
    run = Run(folder, model, optimizer, args.steps, args.save_every)
    for step in run.steps():
        block_causal = step < block_steps
        if block_causal:
            batch = cut_answers(examples_of_step(tokenizer, args, step, group=4), model.config.eos_id)
        else:
            batch = examples_of_step(tokenizer, args, step)
        generator = generator_of(args, step)
        with bf16(args.device):
            loss = reference_loss(model, batch, args, mask_id, block_causal, generator, IN_ORDER)
        loss.backward()
        optimizer.step(learning_rate(step, step / args.steps, args.lr or 1e-3, args.warmup))
        run.log(loss=loss)
        if run.checkpoint_due(step):
            results = evaluate(model, tokenizer, args, step, mask_id, block_causal)
            checkpoints.save(model, folder, tokenizer_json)
            run.checkpoint(step, **results)


def collect(model, mask_id, requests, block_size=cdlm.BLOCK_SIZE, batch_size=8, order=cdlm.ORDER):
    """The teacher's trajectories, one token a step: tokens and rank (n, L), live (n,) slots that were
    decoded, and hidden (n, L, C) in 16 bit, the row from which each token was revealed, as it enters the
    head. Behind the block that ends the text, every token is an end of text, its rank is its place, and its
    hidden row is 0."""
    teacher = cdlm.Decoder(model, mask_id, "teacher", block_size, None, None, order, batch_size, record=True)
    teacher.generate(requests)
    # Start from what lies behind the text, then write over it what was decoded.
    n, length = len(requests), requests[0].max_new_tokens
    tokens = torch.full((n, length), model.config.eos_id)
    rank = torch.arange(length).repeat(n, 1)
    live = torch.zeros(n, dtype=torch.long)
    hidden = torch.zeros(n, length, model.config.d_model, dtype=torch.float16)
    for row, request in enumerate(requests):
        a = request.state
        m = live[row] = a.n_revealed
        tokens[row, :m] = torch.tensor(a.tokens[a.prompt:a.prompt + m])
        rank[row, :m] = torch.tensor(a.rank[:m])
        hidden[row, :m] = torch.stack([a.hidden[i] for i in range(m)])
    return {"tokens": tokens, "rank": rank, "live": live, "hidden": hidden}


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
                **collect(model, mask_id, requests, cdlm.BLOCK_SIZE, args.batch, args.order)}
        data = {name: x if name == "hidden" else x.to(torch.int32) for name, x in data.items()}
        with replaced(file) as temporary:
            save_file({name: x.contiguous() for name, x in data.items()}, temporary)


def train_student(args, folder, tokenizer, tokenizer_json, mask_id):
    model = checkpoints.load(os.path.join(args.out, "teacher"), args.device, torch.float32)
    trajectories = os.path.join(args.out, "trajectories")
    data = Trajectories(trajectories)
    training.same_settings(trajectories, teacher=checkpoints.fingerprint(model))
    teacher_head = model.head.weight.detach().clone()
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
        k, k_star = draw_states(batch["live"].cpu(), length, cdlm.BLOCK_SIZE, generator, later)
        with bf16(args.device):
            losses = student_losses(model, teacher_head, batch, k, k_star, mask_id, cdlm.BLOCK_SIZE,
                                    (w_distill, w_cons), later, generator)
        # 2. The masked-diffusion loss, on reference answers.
        dlm = torch.zeros((), device=args.device)
        if w_dlm:
            batch = examples_of_step(tokenizer, args, beyond + step, group=4)
            batch = cut_answers(batch, model.config.eos_id)
            with bf16(args.device):
                dlm = reference_loss(model, batch, args, mask_id, True, generator, IN_ORDER)
        loss = w_distill * losses["distill"] + w_cons * losses["cons"] + w_dlm * dlm
        loss.backward()
        optimizer.step(learning_rate(step, step / args.steps, args.lr or 2e-4, args.warmup))
        run.log(**losses, dlm=dlm, loss=loss)
        if run.checkpoint_due(step):
            results = evaluate(model, tokenizer, args, step, mask_id, block_causal=True)
            checkpoints.save(model, folder, tokenizer_json)
            run.checkpoint(step, **results)


# -- what a checkpoint is worth ------------------------------------------------------------------------------

def evaluate(model, tokenizer, args, step, mask_id, block_causal):
    """For the log: the held-out losses, by family, and at the end what decoding gives."""
    results = {"heldout": {}}
    for family in tasks.FAMILIES:
        # Always the same problems, rates and masks, as long as the objective is the same.
        batch = as_batch([study.fitting(tokenizer, family, seed, "heldout")[1:] for seed in range(8)])
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            loss = reference_loss(model, batch, args, mask_id, block_causal, generator)
        results["heldout"][family] = round(loss.item(), 4)
    if args.check and step + 1 == args.steps:
        decoder = cdlm.Decoder(model, mask_id, "student" if block_causal else "teacher",
                               threshold=cdlm.THRESHOLD, order=args.order, batch_size=16)
        problems = [study.fitting(tokenizer, family, 1000 + i, "heldout")[:2]
                    for family in tasks.FAMILIES for i in range(args.check)]
        results["decoded"] = study.answer(decoder, problems, tokenizer)[0]
    return results


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
