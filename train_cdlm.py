"""Train CDLM: a diffusion model from the target (the teacher), what it does, and from that the block-causal
student.

    python train_cdlm.py --out mine/cdlm                         # all three stages, hours
    # an ablation, from the same teacher
    python train_cdlm.py --out mine/cdlm --weights 1 0 0 --name distill

    teacher        OUT/teacher: the target's weights, trained to fill in masks; every slot sees all others
    trajectories   OUT/trajectories: the teacher answers training prompts, one token a step, the most
                   confident first; stored are the tokens, their ranks, and the hidden rows that they were
                   revealed from
    student        OUT/student: the teacher's weights, trained on the trajectories with three losses

Learning rates peak at 1e-3 (teacher) and 2e-4 (student), unless --lr says otherwise. Interrupt it at any
time: the same command continues where the last checkpoint or shard was, with the same result. A stage that
is finished is not done again. Models are Hugging Face folders with log.jsonl and command.txt next to them.
"""
import os
from pathlib import Path

import minispec  # before torch: it tunes the allocator
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tqdm import tqdm

from minispec import cdlm
from minispec.cdlm import mask_free
from minispec.core.requests import Request
from minispec.core.verify import Sampling
from minispec.data import masks, tasks
from minispec.data.tokenizer import Tokenizer
from minispec.studies import cdlm as study
from minispec.tools import checkpoints, training
from minispec.tools.files import blame, read_tensors, replaced
from minispec.tools.script import Parser, run_main
from minispec.tools.training import Divergence, Run, bf16, fast_dtype, generator_of, locked, schedule

BLOCK_WARMUP = 0.5               # of the teacher's steps have block-causal attention
IN_ORDER = 0.6                   # of the blocks are masked in reading order: see `masks.turns`
TEMPERATURES = (0.0, 0.5)        # each problem has a trajectory at either
SHARD = 32                       # trajectories in a file


def parse_args():
    p = Parser(__doc__)
    training.add_arguments(p, lr=None, save_every=200)
    add = p.add_argument
    add("--target", default=minispec.SHIPPED,
        help="the autoregressive model that the teacher starts from (default %(default)s)")
    add("--steps", type=int, default=8000,
        help="optimiser steps of teacher and student (default %(default)s)")
    add("--batch", type=int, default=16, help="answers a step (default %(default)s)")
    add("--prompts", type=int, default=4000, help="problems with trajectories (default %(default)s)")
    add("--name", default="student", help="the student's folder in --out (default %(default)s)")
    add("--weights", type=float, nargs=3, default=[1.0, 0.5, 0.01], metavar=("DISTILL", "CONS", "DLM"),
        help="of the student's losses (default 1 0.5 0.01)")
    args = training.parsed(p)
    if not any(args.weights):
        raise ValueError("weights 0 0 0 leave nothing to train for; at least one must be above 0")
    return args


# -- data ----------------------------------------------------------------------------------------------------

def example(tokenizer, n):
    """Training problem number n: (prompt ids, answer ids (L,), filled up with ends of text)."""
    family = tasks.FAMILIES[n % len(tasks.FAMILIES)]
    return study.fitting(tokenizer, family, n)[1:]


def padded(prompts):
    """Prompts (n, width), padded on the left. The width is always the same, so that shards fit together."""
    return torch.tensor([[cdlm.PADDING] * (study.LONGEST_PROMPT - len(ids)) + ids for ids in prompts])


def ready(batch, device):
    """The tensors of a batch on the device, without what is padding in all prompts."""
    batch = {name: x.to(device) for name, x in batch.items()}
    batch["prompt"] = batch["prompt"][:, (batch["prompt"] != cdlm.PADDING).any(0)]
    return batch


def load_trajectories(folder):
    """The shards of a folder as one: {name: tensor (n, ..)}, see `collect`."""
    shards = [read_tensors(file) for file in sorted(Path(folder).glob("*.safetensors"))]
    with blame(folder):
        return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


# -- losses (2.3) --------------------------------------------------------------------------------------------

def dlm_loss(model, batch, mask_id, block_causal):
    """The masked-diffusion loss, where the slots `masked` (n, L) of the answers are masks. rate (n, L): with
    what probability each slot became one. The loss is the mean over rows of the summed cross-entropies of
    masked slots, each divided by its rate and by the number of `counted` slots (n, L). With all counted and
    one rate t a row, that is 1 / (t L) times the sum: an upper bound on the answer's negative log-likelihood
    per slot."""
    answer = batch["answer"]
    where = batch["masked"] & batch["counted"]
    # Each block behind clean ones, or the whole answer with its masks.
    noisy = answer.masked_fill(batch["masked"], mask_id)
    if block_causal:
        hidden = cdlm.blocks_hidden(model, batch["prompt"], answer, noisy)
    else:
        hidden = cdlm.answer_hidden(model, batch["prompt"], noisy, cdlm.bidirectional)
    # A slot that is masked with probability t counts 1 / t, so that every slot weighs the same in the mean.
    logits = mask_free(model.logits(hidden[where]), mask_id)
    loss = F.cross_entropy(logits, answer[where], reduction="none")
    share = batch["rate"] * batch["counted"].sum(-1, keepdim=True)
    return (loss / share[where]).sum() / len(answer)


def reference_loss(model, examples, mask_id, block_causal, generator, in_order=0.0):
    """The masked-diffusion loss on reference answers with drawn masks: as a student reads them, or as a
    teacher does. in_order: see `masks.turns`."""
    prompts, answers = zip(*examples)
    answer = torch.tensor(answers)
    states = masks.all_blocks if block_causal else masks.teacher_states
    rate, counted = states(answer, model.config.eos_id, generator)
    masked = masks.turns(answer.shape, generator, in_order) < rate
    batch = {"prompt": padded(prompts), "answer": answer, "masked": masked, "rate": rate, "counted": counted}
    return dlm_loss(model, ready(batch, model.device), mask_id, block_causal)


def draw_states(live, length, generator):
    """A step k (n, L / B) in the life of each block of trajectories of `live` (n,) decoded slots, uniform
    over it. Blocks behind the one that ends the text were never opened: they are at their end, and have
    nothing to teach."""
    first = torch.arange(0, length, cdlm.BLOCK_SIZE)
    lived = torch.rand(len(live), len(first), generator=generator) * cdlm.BLOCK_SIZE
    k = first + lived.long()
    return torch.where(first < live.cpu()[:, None], k, first + cdlm.BLOCK_SIZE)


def distillation_loss(model, teacher_head, batch, k, mask_id):
    """Mean over the slots that are masked in y of KL(p_teacher || q(y)). y: the state k (n, L / B) of every
    block; q: the student. All blocks of an answer are trained at once.

    p_teacher is rebuilt from the hidden row with which the teacher revealed the token, by the teacher's own
    head (V, C). It knew more than y says, and that is the lesson."""
    tokens = batch["tokens"]
    k = k.to(tokens.device)
    masked = batch["rank"] >= masks.per_slot(k)
    noisy = tokens.masked_fill(masked, mask_id)
    hidden = cdlm.blocks_hidden(model, batch["prompt"], tokens, noisy)
    # What the teacher thought of each slot when it revealed it.
    with torch.autocast(tokens.device.type, enabled=False):
        goal = mask_free(batch["hidden"][masked].to(teacher_head.dtype) @ teacher_head.T, mask_id)
    values = Divergence(goal)(mask_free(model.logits(hidden[masked]), mask_id))
    # The mean over the masked slots of a block, of all blocks with text.
    count = masks.per_slot(cdlm.BLOCK_SIZE - k % cdlm.BLOCK_SIZE)
    return (values / count[masked]).sum() / (batch["live"] // cdlm.BLOCK_SIZE).sum()


def consistency_loss(model, batch, mask_id, generator):
    """Mean over the slots that are masked in y* of KL(stop(q(y*)) || q(y)). y: any state of a trajectory; y*:
    the state in which y's open block is complete. So these are slots of later blocks: while one block of each
    answer is half done, predict for all slots behind it what you will predict once it is done."""
    tokens, rank, live = batch["tokens"], batch["rank"], batch["live"][:, None]
    # The two states (n, 1), and the slots that are masked in both.
    k = (torch.rand(len(tokens), 1, generator=generator).to(live.device) * live).long()
    k_star = (k // cdlm.BLOCK_SIZE + 1) * cdlm.BLOCK_SIZE
    s = (rank >= k_star) & (rank < live)

    def logits(step):
        y = tokens.masked_fill(rank >= step, mask_id)
        hidden = cdlm.answer_hidden(model, batch["prompt"], y)
        return mask_free(model.logits(hidden[s]), mask_id)

    with torch.no_grad():
        goal = logits(k_star)
    count = s.sum(-1, keepdim=True).expand_as(s)
    return (Divergence(goal)(logits(k)) / count[s]).sum() / len(tokens)


# -- trajectories --------------------------------------------------------------------------------------------

def collect(decoder, requests):
    """What a recording decoder does to answer requests of L slots, as tensors (n, ..): the prompts, the
    tokens (n, L), the rank (n, L) at which each was revealed, how many slots were decoded: `live` (n,), and
    hidden (n, L, C) in 16 bit, the row from which each token was revealed, as it enters the head. Behind the
    block that ends the text, every token is an end of text, its rank is its place, and its hidden row is
    0."""
    decoder.generate(requests)
    config = decoder.model.config
    answers = [request.state for request in requests]
    tokens = torch.tensor([a.tokens[a.prompt:] for a in answers])
    hidden = torch.zeros(*tokens.shape, config.d_model, dtype=torch.float16)
    for rows, a in zip(hidden, answers):
        rows[list(a.hidden)] = torch.stack(list(a.hidden.values()))
    return {
        "prompt": padded([a.tokens[:a.prompt] for a in answers]),
        "tokens": tokens.masked_fill(tokens == decoder.mask_id, config.eos_id),
        "rank": torch.tensor([a.rank for a in answers]),
        "live": torch.tensor([a.n_revealed for a in answers]),
        "hidden": hidden,
    }


def collect_trajectories(args, tokenizer, mask_id, folder, teacher):
    """The answers of the model in the folder `teacher`, in shards."""
    model = checkpoints.load(teacher, args.device, fast_dtype(args.device))
    training.same_settings(folder, prompts=args.prompts, seed=args.seed, order="surest",
                           teacher=checkpoints.fingerprint(model))
    # In reading order, the rank of a token would only repeat its place.
    decoder = cdlm.Decoder(model, mask_id, "teacher", order="surest", batch_size=args.batch, record=True)
    cells = [(number, temperature) for number in range(args.prompts) for temperature in TEMPERATURES]
    for start in tqdm(range(0, len(cells), SHARD), unit="shard", desc="trajectories"):
        file = f"{folder}/{start // SHARD:05d}.safetensors"
        if os.path.exists(file):
            continue
        requests = []
        for number, temperature in cells[start:start + SHARD]:
            seed = args.seed * 1000003 + number
            prompt, _ = example(tokenizer, seed)
            sampling = Sampling(temperature, seed=seed)
            requests.append(Request(prompt, cdlm.GEN_LENGTH, sampling, [model.config.eos_id]))
        with replaced(file) as temporary:
            save_file(collect(decoder, requests), temporary)


# -- teacher and student -------------------------------------------------------------------------------------

def train(args, tokenizer, mask_id, folder, source, lr, weights, data=None):
    """Train the model in the folder `source`. weights: of the three losses; data: a student's trajectories.

    A teacher has the last loss alone. It begins block-causally, all blocks of an answer in one forward,
    because most of what a mask must learn is the same when every slot sees all others; then as it is used."""
    model = checkpoints.load(source, args.device, torch.float32)
    if cdlm.GEN_LENGTH + study.LONGEST_PROMPT > model.config.block_size:
        raise ValueError(f"prompts of {study.LONGEST_PROMPT} and answers of {cdlm.GEN_LENGTH} tokens exceed "
                         f"the context of {model.config.block_size}")
    weights = dict(zip(("distill", "cons", "dlm"), weights))
    teacher_head = model.head.weight.detach().clone()
    if data:
        plan = schedule(args.seed, [1] * len(data["live"]), args.batch, args.steps * args.batch)
    run = Run(args, folder, model, args.steps, args.lr or lr, muon=True)
    for step in run.steps():
        generator = generator_of(args, step)
        block_causal = bool(data) or step < args.steps * BLOCK_WARMUP
        if data:
            numbers, _ = plan[step]
            batch = ready({name: x[numbers] for name, x in data.items()}, args.device)
        # The losses; one of weight 0 is not computed.
        losses = {}
        with bf16(args.device):
            if weights["distill"]:
                k = draw_states(batch["live"], cdlm.GEN_LENGTH, generator)
                losses["distill"] = distillation_loss(model, teacher_head, batch, k, mask_id)
            if weights["cons"]:
                losses["cons"] = consistency_loss(model, batch, mask_id, generator)
            if weights["dlm"]:
                numbers = torch.randint(1 << 40, (args.batch,), generator=generator).tolist()
                examples = [example(tokenizer, n) for n in numbers]
                losses["dlm"] = reference_loss(model, examples, mask_id, block_causal, generator, IN_ORDER)
        # One step of the optimiser on their weighted sum.
        loss = sum(weights[name] * x for name, x in losses.items())
        loss.backward()
        run.update((step + 1) / args.steps, **losses, loss=loss)
        if run.checkpoint_due():
            checkpoints.save(model, folder, source)
            run.checkpoint(heldout=evaluate(model, tokenizer, mask_id, block_causal))


@torch.no_grad()
def evaluate(model, tokenizer, mask_id, block_causal):
    """The held-out losses, by family."""
    heldout = {}
    for family in tasks.FAMILIES:
        # Always the same problems, rates and masks, as long as the objective is the same.
        examples = [study.fitting(tokenizer, family, seed, "heldout")[1:] for seed in range(8)]
        generator = torch.Generator().manual_seed(0)
        loss = reference_loss(model, examples, mask_id, block_causal, generator)
        heldout[family] = round(loss.item(), 4)
    return heldout


def main():
    args = parse_args()
    tokenizer = Tokenizer.load(args.target)
    shared = args, tokenizer, cdlm.mask_id_of(tokenizer, args.target)
    teacher, trajectories, student = (f"{args.out}/{name}" for name in ("teacher", "trajectories", args.name))
    with locked(teacher):
        train(*shared, teacher, args.target, 1e-3, (0, 0, 1))
    with locked(trajectories):
        collect_trajectories(*shared, trajectories, teacher)
    with locked(student):
        train(*shared, student, teacher, 2e-4, args.weights, load_trajectories(trajectories))


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues from the last checkpoint or shard", "--batch")
