"""Train CDLM: a diffusion model from the target (the teacher), its trajectories, and from these the student.

    python train_cdlm.py --out mine/cdlm                         # all three stages, hours
    # an ablation: another student from the same teacher and trajectories
    python train_cdlm.py --out mine/cdlm --weights 1 0 0 --name distill
    # students of the shipped teacher, here from trajectories in reading order, recorded with a cache
    python train_cdlm.py --out mine/first --teacher checkpoints/cdlm/teacher --order first --dual
    # another model: its answers to prompts, then the same
    python -m minispec.data.rollouts --target FOLDER --out mine/answers --prompt-file prompts.jsonl
    python train_cdlm.py --out mine/cdlm --target FOLDER --answers mine/answers

    teacher        OUT/teacher: the target's weights, trained to fill in masks; every slot sees all others
    trajectories   OUT/trajectories: the teacher answers training prompts, one token a step, the most
                   confident slot first; stored are tokens, ranks and hidden rows (cdlm.trajectory)
    student        OUT/student: the teacher's weights, trained on trajectories (two losses) and answers (one)

Learning rates peak at 1e-3 (teacher) and 2e-4 (student), unless --lr says otherwise. Interrupt it at any
time: the same command continues where the last checkpoint or shard was, with the same result. A stage that
is finished is not done again. Models are Hugging Face folders with log.jsonl and command.txt next to them.
A target without a mask token gets one: OUT/target is a copy with it.
"""
import os
from argparse import Namespace
from itertools import product
from pathlib import Path

import minispec  # before torch: it tunes the allocator
import torch
from safetensors.torch import save_file
from tqdm import tqdm

from minispec import cdlm
from minispec.core.requests import Request
from minispec.core.verify import Sampling
from minispec.data import tasks
from minispec.data.tokenizer import MASK, Tokenizer
from minispec.tools import checkpoints, training
from minispec.tools.files import naming, opened, read_json, read_tensors, replaced, write_json
from minispec.tools.script import Parser, run_main
from minispec.tools.training import Run, bf16, fast_dtype, generator_of, locked

BLOCK_SIZES = (4, 8, 16, 32)     # B; they divide cdlm.GEN_LENGTH
BLOCK_WARMUP = 0.5               # of the teacher's steps have block-causal attention
IN_ORDER = 0.6                   # of the blocks are masked in reading order: see `cdlm.turns`
SHARD = 32                       # trajectories in a file
OWN_NAMES = ("target", "teacher", "trajectories")        # of other folders in --out
# Settings that concern no teacher.
OF_STUDENTS = ("name", "weights", "reverse_kl", "prompts", "order", "temperatures", "dual")
HELDOUT = 15                     # examples of the held-out loss


def parse_args():
    p = Parser(__doc__)
    training.add_arguments(p, lr=None, save_every=200)
    add = p.add_argument
    add("--target", default=minispec.SHIPPED,
        help="the autoregressive model that the teacher starts from (default %(default)s)")
    add("--teacher", metavar="DIR", help="a trained teacher (default: train OUT/teacher)")
    add("--answers", metavar="DIR",
        help="the target's answers to prompts (default: problems of our families, with their solutions)")
    add("--prompt-length", type=int, default=tasks.LONGEST_PROMPT,
        help="longest prompt in tokens; longer ones are left out (default %(default)s)")
    add("--block-size", type=int, default=cdlm.BLOCK_SIZE, choices=BLOCK_SIZES,
        help="slots of a block (default %(default)s)")
    add("--steps", type=int, default=8000,
        help="optimiser steps of teacher and student (default %(default)s)")
    add("--batch", type=int, default=16, help="answers a step (default %(default)s)")
    add("--prompts", type=int, default=4000, help="prompts with trajectories (default %(default)s)")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.5], metavar="T",
        help="temperatures of each prompt's trajectories (default 0 0.5)")
    add("--order", choices=cdlm.ORDERS, default="surest",
        help="slot that a trajectory reveals next (default %(default)s)")
    add("--dual", action="store_true",
        help="trajectories with the dual cache of cdlm.Decoder: faster, approximate")
    add("--name", default="student", help="the student's folder in --out (default %(default)s)")
    add("--weights", type=float, nargs=3, default=[1.0, 0.5, 0.01], metavar=("DISTILL", "CONS", "DLM"),
        help="weights of the student's losses (default 1 0.5 0.01)")
    add("--reverse-kl", action="store_true", help="distillation and consistency by KL(student || goal)")
    p.set_defaults(examples=None)                        # number of answers, see `answered`
    args = training.parsed(p)
    if os.path.normpath(args.name) in (*OWN_NAMES, "."):
        raise ValueError(f"name must be none of {', '.join(OWN_NAMES)}, got '{args.name}'")
    if not all(0 <= x <= training.MOST for x in args.weights) or not any(args.weights):
        raise ValueError("weights must be 0 or more, and one of them above 0, got "
                         + " ".join(f"{x:g}" for x in args.weights))
    for temperature in args.temperatures:
        Sampling(temperature)                            # ValueError if it is out of range
    return args


# -- data: an example is (prompt ids, answer ids (L,), filled up with ends of text) --------------------------

def examples_of(args, tokenizer):
    """example(n, split="train"): the n-th example, always the same, of --answers or of our own problems."""
    if not os.path.isdir(args.target):
        raise ValueError(f"target must be a Hugging Face folder, got {args.target}")
    if args.answers:
        return answered(args, tokenizer)
    if not tokenizer.is_puzzle_model:
        raise ValueError(f"{args.target} needs --answers DIR; this makes some: python -m "
                         f"minispec.data.rollouts --target {args.target} --out DIR")
    if args.prompt_length < tasks.LONGEST_PROMPT:
        raise ValueError(f"prompt-length must be {tasks.LONGEST_PROMPT} or more without --answers, got "
                         f"{args.prompt_length}")

    def problem(n, split="train"):
        family = tasks.FAMILIES[n % len(tasks.FAMILIES)]
        return tasks.fitting(tokenizer, family, n, split, cdlm.GEN_LENGTH)[1:]
    return problem


def answered(args, tokenizer):
    """The same from the answers that rollouts.py wrote. ValueError where they are another target's."""
    settings = f"{args.answers}/settings.json"
    with naming(settings):
        target = checkpoints.fingerprint(checkpoints.load(args.target))
        training.unchanged(read_json(settings), {"target": target})
    rows = {"train": read_answers(args, tokenizer, "train", "given"),
            "heldout": read_answers(args, tokenizer, "heldout")}
    if not all(rows.values()):
        raise ValueError(f"{args.answers} lacks answers to prompts of at most {args.prompt_length} tokens")
    args.examples = len(rows["train"])
    args.prompts = min(args.prompts, args.examples)
    return lambda n, split="train": rows[split][n % len(rows[split])]


def read_answers(args, tokenizer, *kinds):
    """Examples of the shards of these kinds. An answer is cut to L slots; one that neither fills them nor
    ends (a loop, or a limit of tokens) is left out."""
    examples = {}                                        # a prompt may be in two shards
    files = [file for kind in kinds for file in Path(args.answers).glob(f"{kind}-*.safetensors")]
    for file in sorted(files):
        with naming(file), opened(file) as tensors:
            for i in sorted({name.split(".")[0] for name in tensors.keys()}):
                ids, learn = (tensors.get_tensor(f"{i}.{name}") for name in ("ids", "learn"))
                prompt, answer = ids[~learn].tolist(), ids[learn].tolist()[:cdlm.GEN_LENGTH]
                answer = [tokenizer.ends[0] if x in tokenizer.ends else x for x in answer]
                missing = cdlm.GEN_LENGTH - len(answer)
                if len(prompt) <= args.prompt_length and (not missing or ids[-1] in tokenizer.ends):
                    examples[tuple(prompt)] = (prompt, answer + tokenizer.ends[:1] * missing)
    return list(examples.values())


def padded(prompts, width=0):
    """Prompts (n, at least `width`), padded on the left."""
    width = max(width, *map(len, prompts))
    return torch.tensor([[cdlm.PADDING] * (width - len(ids)) + ids for ids in prompts])


def ready(batch, device):
    """The tensors of a batch on the device, without the columns that are padding in all prompts, and without
    blocks that no trajectory opened."""
    batch = {name: x.to(device) for name, x in batch.items()}
    batch["prompt"] = batch["prompt"][:, (batch["prompt"] != cdlm.PADDING).any(0)]
    if "live" in batch:
        longest = batch["live"].max()
        batch.update({name: batch[name][:, :longest] for name in ("tokens", "rank", "hidden")})
    return batch


def reference_batch(model, examples, blockwise, generator, in_order=0.0):
    """Examples with drawn masks, for `cdlm.dlm_loss`."""
    prompts, answers = zip(*examples)
    answer, block_size = torch.tensor(answers), cdlm.block_size_of(model)
    if blockwise:                        # blocks behind the text are neither predicted nor seen
        opened = cdlm.text_blocks(answer, model.config.eos_id, block_size).max()
        answer = answer[:, :opened * block_size]
    rates = cdlm.student_rates if blockwise else cdlm.teacher_rates
    rate, counted = rates(answer, model.config.eos_id, block_size, generator)
    masked = cdlm.turns(answer.shape, block_size, generator, in_order) < rate
    batch = {"prompt": padded(prompts), "answer": answer, "masked": masked, "rate": rate, "counted": counted}
    return ready(batch, model.device)


# -- the end of text and the mask token ----------------------------------------------------------------------

def load(folder, tokenizer, device="cpu", dtype=None):
    """The model in a folder. Its answers are filled up with one end of text, also where the target knows
    several."""
    model = checkpoints.load(folder, device, dtype)
    model.config.eos_id = tokenizer.ends[0]
    return model


def with_mask(source, folder):
    """The folder `source`, or a copy of it in `folder` whose vocabulary has a mask token too, embedded as the
    mean of all others."""
    tokenizer, file = Tokenizer.load(source), f"{folder}/tokenizer.json"
    if not tokenizer.ends:
        raise ValueError(f"{source} names no end of text, with which answers are filled up")
    if MASK in tokenizer.special:
        return source
    if os.path.exists(file) and MASK in Tokenizer.load(folder).special:
        return folder
    model = load(source, tokenizer)
    mask_id = tokenizer.vocab_size                       # weights may end before the tokens do
    for layer in (model.embed, model.head):
        rows = layer.weight
        more = rows.mean(0, keepdim=True).expand(mask_id + 1 - len(rows), -1)
        layer.weight = torch.nn.Parameter(torch.cat([rows, more]))
    model.config.vocab_size = mask_id + 1
    checkpoints.save(model, folder, source)
    data = read_json(file)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    data["added_tokens"].append({"id": mask_id, "content": MASK, "special": True, **plain})
    write_json(file, data)
    return folder


# -- trajectories --------------------------------------------------------------------------------------------

def collect(decoder, requests, width=0):
    """The trajectories of a recording decoder that answers these requests: the padded prompts, and the
    fields of `cdlm.trajectory`, stacked."""
    prompts = [g.prompt_ids for g in decoder.generate(requests)]
    rows = [cdlm.trajectory(r.state, decoder.model.config.eos_id) for r in requests]
    data = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {"prompt": padded(prompts, width), **data}


def passed_over(rank, live):
    """The share of the reveals that left a masked slot to the left in their block: 0 from left to right, 0.87
    in a random order of blocks of 32."""
    lived = torch.arange(rank.shape[1]) < live[:, None]
    return (rank < rank.cummax(-1).values)[lived].float().mean().item()


def collect_trajectories(args, tokenizer, example, folder, teacher):
    """The trajectories of the model in the folder `teacher` as one {name: tensor (n, ..)}, see `collect`;
    missing shards are made."""
    model = load(teacher, tokenizer, args.device, fast_dtype(args.device))
    # Students of all seeds share them: a problem's number is the seed of its answer.
    training.same_settings(folder, args, "prompts", "order", "temperatures", "dual", "block_size",
                           teacher=checkpoints.fingerprint(model))
    decoder = cdlm.Decoder(model, tokenizer.mask_id, "dual" if args.dual else "teacher", order=args.order,
                           batch_size=args.batch, record=True, block_size=args.block_size)
    cells = list(product(range(args.prompts), args.temperatures))
    shards = []
    for start in tqdm(range(0, len(cells), SHARD), unit="shard", desc="trajectories"):
        file = f"{folder}/{start // SHARD:05d}.safetensors"
        if not os.path.exists(file):
            requests = [Request(example(n)[0], cdlm.GEN_LENGTH, Sampling(t, seed=n), tokenizer.ends)
                        for n, t in cells[start:start + SHARD]]
            found = collect(decoder, requests, args.prompt_length)
            with replaced(file) as temporary:
                save_file(found, temporary)
        shards.append(read_tensors(file))
    with naming(folder):
        data = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
        if not all(0 <= x < model.config.vocab_size for x in torch.aminmax(data["tokens"])):
            raise ValueError("tokens of a shard are not in the vocabulary")
    share = passed_over(data["rank"], data["live"])
    print(f"{len(data['live'])} trajectories; {share:.0%} of the reveals left a masked slot to the left")
    return data


# -- teacher and student -------------------------------------------------------------------------------------

def train(args, tokenizer, example, folder, source, lr, weights, data=None):
    """Train the model in the folder `source`. weights: of the three losses; data: a student's trajectories.

    A teacher has the last loss alone. It begins block-causally, all blocks of an answer in one forward,
    because most that a mask must learn is the same with either attention; then with its own, in which every
    slot sees all others."""
    model, mask_id = load(source, tokenizer, args.device, torch.float32), tokenizer.mask_id
    model.config.diffusion_block_size = args.block_size
    weights = dict(zip(("distill", "cons", "dlm"), weights))
    teacher_head = model.head.weight.detach().clone()    # a student starts as its teacher
    settings = Namespace(**{name: x for name, x in vars(args).items() if data or name not in OF_STUDENTS})
    run = Run(settings, folder, model, args.steps, lr if args.lr is None else args.lr, once=not data)
    for step in run.steps():
        g = generator_of(args, step)
        blockwise = bool(data) or step < args.steps * BLOCK_WARMUP
        if data:
            numbers = torch.randint(len(data["live"]), (args.batch,), generator=g)
            batch = ready({name: x[numbers] for name, x in data.items()}, args.device)
        # The losses; one of weight 0 is not computed.
        losses = {}
        with bf16(args.device):
            if weights["distill"]:
                k = cdlm.draw_states(batch["live"], batch["rank"].shape[1], args.block_size, g)
                losses["distill"] = cdlm.distillation_loss(model, teacher_head, batch, k, mask_id,
                                                           args.reverse_kl)
            if weights["cons"]:
                losses["cons"] = cdlm.consistency_loss(model, batch, mask_id, g, args.reverse_kl)
            if weights["dlm"]:
                numbers = torch.randint(1 << 40, (args.batch,), generator=g).tolist()
                references = reference_batch(model, map(example, numbers), blockwise, g, IN_ORDER)
                losses["dlm"] = cdlm.dlm_loss(model, references, mask_id, blockwise)
        # One step of the optimiser on their weighted sum.
        loss = sum(weights[name] * x for name, x in losses.items())
        loss.backward()
        run.update((step + 1) / args.steps, **losses, loss=loss)
        if run.checkpoint_due():
            checkpoints.save(model, folder, source)
            run.checkpoint(heldout=evaluate(model, example, mask_id, blockwise))


@torch.no_grad()
def evaluate(model, example, mask_id, blockwise):
    """The masked loss of held-out examples, always the same ones with the same masks. A teacher's loss jumps
    when its attention changes, and the masks with it."""
    examples = [example(n, "heldout") for n in range(HELDOUT)]
    batch = reference_batch(model, examples, blockwise, torch.Generator().manual_seed(0))
    return round(cdlm.dlm_loss(model, batch, mask_id, blockwise).item(), 4)


def main():
    args = parse_args()
    example = examples_of(args, Tokenizer.load(args.target))
    for folder in filter(None, (args.target, args.teacher)):
        config, mask_id = checkpoints.Folder(folder).config, Tokenizer.load(folder).special.get(MASK, 0)
        if cdlm.GEN_LENGTH + args.prompt_length > config.block_size:
            raise ValueError(f"prompts of {args.prompt_length} and answers of {cdlm.GEN_LENGTH} tokens "
                             f"exceed the context of {config.block_size}")
        if mask_id >= config.vocab_size:
            raise ValueError(f"{folder}: the mask token {mask_id} is not in the vocabulary of the weights, "
                             f"{config.vocab_size} tokens")
    copy = f"{args.out}/target"
    begun = os.path.exists(f"{args.out}/settings.json")
    if os.path.exists(copy) and not begun and MASK not in Tokenizer.load(args.target).special:
        raise ValueError(f"{copy} exists already, and would be a copy of {args.target} with a mask token; "
                         "use another --out")
    training.same_settings(args.out, args, "answers", "examples", "prompt_length",
                           target=checkpoints.fingerprint(checkpoints.load(args.target)))
    target = with_mask(args.target, copy)
    tokenizer = Tokenizer.load(target)
    if args.teacher and Tokenizer.load(args.teacher).known != tokenizer.known:
        raise ValueError(f"the teacher {args.teacher} has another vocabulary than the target {args.target}")
    teacher = args.teacher or f"{args.out}/teacher"
    trajectories, student = f"{args.out}/trajectories", f"{args.out}/{args.name}"
    if not args.teacher:
        with locked(teacher):
            train(args, tokenizer, example, teacher, target, 1e-3, (0, 0, 1))
    with locked(trajectories):
        data = collect_trajectories(args, tokenizer, example, trajectories, teacher)
    with locked(student):
        # Also a finished student is not taken for another one.
        training.same_settings(student, args, "weights", "reverse_kl", "lr", "seed", "steps", "batch")
        train(args, tokenizer, example, student, teacher, 2e-4, args.weights, data)


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues from the last checkpoint or shard", "--batch")
