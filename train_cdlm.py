"""Train a diffusion language model from the target, record what it does, and train the block-causal student from that (CDLM).

    python train_cdlm.py --target checkpoints/target --out checkpoints/cdlm                     # all three stages, hours
    python train_cdlm.py --target checkpoints/target --out checkpoints/cdlm --stage teacher     # or one after the other
    python train_cdlm.py --out checkpoints/cdlm --stage trajectories
    python train_cdlm.py --out checkpoints/cdlm --stage student --weights 1 0 0 --name student_distill      # an ablation

    teacher       OUT/teacher        the target's weights, trained to fill in masks, every slot seeing all others
    trajectories  OUT/trajectories   the teacher answers training prompts a token a step; shards of tokens, ranks, hidden rows
    student       OUT/student        the teacher's weights, trained on the trajectories with three losses, block-causal

Interrupt it at any time: the same command continues where the last checkpoint or shard was, with the same result. A stage
that is finished is not done again. Models are Hugging Face folders with log.jsonl and command.txt beside them.
"""
import os
import random

import minispec  # before torch: it tunes the allocator
import torch
from safetensors.torch import save_file
from tqdm import tqdm

from minispec import cdlm, cdlm_losses
from minispec.data import corpus, tasks
from minispec.studies import cdlm as cdlm_studies
from minispec.tools import checkpoints
from minispec.core.engine import Request
from minispec.tools.files import blame, read_json, read_tensors, replaced, write_json
from minispec.tools.script import Parser, check_device, run_main
from minispec.data.tokenizer import Tokenizer
from minispec.tools.training import Optimizer, Run, learning_rate, locked
from minispec.core.verify import Sampling

STAGES = ("teacher", "trajectories", "student")


def parse_args(argv=None):
    p = Parser(__doc__)
    p.add_argument("--out", required=True, help="folder to write the stages' folders to")
    p.add_argument("--stage", default="all", choices=("all", *STAGES), help="default: all, in this order")
    p.add_argument("--target", default="checkpoints/target", help="teacher: the autoregressive model it starts from (default %(default)s)")
    p.add_argument("--name", default="student", help="student: its folder in --out (default %(default)s)")
    p.add_argument("--gen-length", type=int, default=cdlm.GEN_LENGTH, help="slots of an answer (default %(default)s)")
    p.add_argument("--block-size", type=int, default=cdlm.BLOCK_SIZE, help="slots of a block (default %(default)s)")
    p.add_argument("--longest-prompt", type=int, default=cdlm.LONGEST_PROMPT, help="tokens (default %(default)s)")
    p.add_argument("--data", default=os.environ.get("MINISPEC_DATA"), help="folder with real text; without it, procedural problems alone")
    p.add_argument("--real-share", type=float, default=0.04, help="teacher: share of real questions and answers (default %(default)s)")
    p.add_argument("--steps", type=int, default=8000, help="optimiser steps of a training stage (default %(default)s)")
    p.add_argument("--batch", type=int, default=16, help="answers a step (default %(default)s)")
    p.add_argument("--lr", type=float, help="peak learning rate (default: teacher 1e-3, student 2e-4)")
    p.add_argument("--warmup", type=int, default=50, help="steps of linear warm-up")
    p.add_argument("--block-warmup", type=float, default=0.5, help="teacher: share of its steps in which it is trained block-causally, all blocks at once (default %(default)s)")
    p.add_argument("--in-order", type=float, default=0.6, help="share of blocks that are masked from about one slot on, not at random; see cdlm_losses.turns (default %(default)s)")
    p.add_argument("--no-shift", action="store_true", help="teacher: the row of a slot predicts that slot, not the one behind it")
    p.add_argument("--prompts", type=int, default=4000, help="trajectories: training problems (default %(default)s)")
    p.add_argument("--temperatures", type=float, nargs="+", default=(0.0, 0.5), help="trajectories: one each of every problem (default 0 0.5)")
    p.add_argument("--shard", type=int, default=64, help="trajectories: how many a file (default %(default)s)")
    p.add_argument("--order", default=cdlm.ORDER, choices=cdlm.ORDERS, help="trajectories: which slot the teacher reveals in a step: the first masked one or the surest, as in the paper (default %(default)s)")
    p.add_argument("--all-blocks", action="store_true", help="trajectories: decode the blocks behind the end of text too")
    p.add_argument("--weights", type=float, nargs=3, default=(1.0, 0.5, 0.01), metavar=("DISTILL", "CONS", "DLM"), help="student: of the losses (default 1 0.5 0.01)")
    p.add_argument("--kl", default="forward", choices=("forward", "reverse"), help="student: direction of the divergences")
    p.add_argument("--cons-target", default="block_end", choices=("block_end", "later_state"), help="student: see cdlm_losses.student_losses")
    p.add_argument("--check", type=int, default=4, help="held-out problems a family that are decoded when a training stage ends (default %(default)s)")
    p.add_argument("--seed", type=int, default=1337)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    return p.parse_args(argv)


# -- data --------------------------------------------------------------------------------------------------------------

class Examples:
    """Training questions that fit; the n-th depends on (seed, n) alone, so that training resumes exactly."""

    def __init__(self, tokenizer, args):
        self.tokenizer, self.args = tokenizer, args
        real = corpus.real_documents(args.data) if args.data else {}
        self.real = [d for name in sorted(real) for d in real[name] if d[0] and len(d[0]) + len(d[1]) < 8 * args.gen_length]

    def __call__(self, n):
        """(prompt ids, answer ids (L,), filled up with ends of text)."""
        args, rng = self.args, random.Random(f"{self.args.seed}/cdlm/{n}")
        if self.real and rng.random() < args.real_share:
            for prompt, think, answer in rng.sample(self.real, min(len(self.real), 20)):
                head, body = self.tokenizer.prompt_ids(prompt), self.tokenizer.response_ids(think, answer)
                if len(head) <= args.longest_prompt and len(body) <= args.gen_length:
                    return head, body + [body[-1]] * (args.gen_length - len(body))
        return cdlm.fitting(self.tokenizer, rng.choice(tasks.FAMILIES), rng.randrange(1 << 40), "train", args.gen_length, args.longest_prompt)[1:]

    def batch(self, step, group=1):
        """The batch of a step. Where batches are grouped, those of a group share out their examples by the answers' length."""
        n, first = self.args.batch, step - step % group
        pairs = sorted(map(self, range(first * n, (first + group) * n)), key=lambda pair: pair[1].index(pair[1][-1]))
        at = random.Random(f"{self.args.seed}/group/{first}").sample(range(group), group)[step % group]
        return as_batch(pairs[at * n:(at + 1) * n])


def as_batch(pairs):
    prompts, answers = zip(*pairs)
    prompt, length = cdlm.pad_prompts(prompts)
    return {"prompt": prompt, "length": length, "answer": torch.tensor(answers)}


class Trajectories:
    """The shards of a folder as one list."""

    def __init__(self, folder):
        files = sorted(f for f in os.listdir(folder) if f.endswith(".safetensors"))
        self.shards = [self._read(os.path.join(folder, f)) for f in files]
        self.where = [(s, i) for s in self.shards for i in range(len(s["live"]))]

    @staticmethod
    def _read(file):
        shard = read_tensors(file)
        with blame(file):
            n, length, _ = shard["hidden"].shape
            shapes = {"tokens": (n, length), "rank": (n, length), "live": (n,), "length": (n,), "prompt": (n, shard["prompt"].shape[1])}
            if any(shard[name].shape != shape or shard[name].min() < 0 for name, shape in shapes.items()) or max(shard["live"].max(), shard["rank"].max() + 1) > length or \
                    shard["length"].max() > shard["prompt"].shape[1]:
                raise ValueError("its tensors do not fit each other")
        return shard

    def batch(self, numbers):
        rows = [{name: x[i] for name, x in shard.items()} for shard, i in (self.where[n] for n in numbers)]
        width = max(int(r["length"]) for r in rows)
        out = {name: torch.stack([r[name] for r in rows]) for name in rows[0] if name != "prompt"}
        out["prompt"] = torch.stack([torch.nn.functional.pad(r["prompt"], (width, 0))[-width:] for r in rows])
        return {name: x if name == "hidden" else x.long() for name, x in out.items()}


def numbers_of_step(step, batch, live, seed, group=4):
    """Which trajectories of `live` (n,) slots make up the batch of a step: each one once an epoch, in an order drawn anew for each;
    `group` neighbouring batches share out theirs by length."""
    n, out, order = len(live), [], []
    for i in range(step * batch, (step + 1) * batch):
        if not order or i % n == 0:
            order = random.Random(f"{seed}/epoch/{i // n}").sample(range(n), n)
            order = [j for a in range(0, n, group * batch) for j in sorted(order[a:a + group * batch], key=lambda j: live[j])]
        out.append(order[i % n])
    return out


def short(batch, eos_id, block_size, names=("answer",)):
    """The batch without the blocks behind its longest text: decoding never opens them, and nothing before sees them."""
    longest = int(batch["live"].max() if "live" in batch else cdlm_losses.text_blocks(batch["answer"], eos_id, block_size).max() * block_size)
    return {name: x[:, :longest] if name in names else x for name, x in batch.items()}


# -- stages ------------------------------------------------------------------------------------------------------------

def fit(args, name, model, tokenizer_json, tokenizer, loss_of, objective_of, kind, mask_id, lr):
    """Both training stages. At every checkpoint the log gets the held-out losses, at the end what decoding with it gives."""
    folder = os.path.join(args.out, name)

    def evaluate(step):
        record = {"heldout": heldout_loss(model, tokenizer, args, *objective_of(step), mask_id)}
        if step + 1 == args.steps:
            record["decoded"] = decoded(cdlm.Decoder(model, mask_id, kind, args.block_size, cdlm.THRESHOLD, order=args.order, batch_size=16), tokenizer, args)
        return record

    optimizer = Optimizer(model, lambda name: name.startswith("blocks."))
    with locked(folder):
        run = Run(folder, model, optimizer, args.steps, args.save_every)
        for step in run.steps():
            losses = loss_of(step)
            losses["loss"].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(learning_rate(step, step / args.steps, lr, args.warmup))
            run.log(**losses)
            if run.checkpoint_due(step):
                results = evaluate(step)
                checkpoints.save(model, folder, tokenizer_json)
                run.checkpoint(step, **results)


@torch.no_grad()
def heldout_loss(model, tokenizer, args, states, mask, mask_id):
    """The masked-diffusion loss per slot of held-out problems by family; the same problems, rates and masks every time, as long as the
    objective is the same."""
    out, eos = {}, model.config.eos_id
    for family in tasks.FAMILIES:
        problems = [cdlm.fitting(tokenizer, family, seed, "heldout", args.gen_length, args.longest_prompt)[1:] for seed in range(8)]
        batch, generator = as_batch(problems), torch.Generator().manual_seed(0)
        rate, counted = states(batch["answer"], eos, args.block_size, generator)
        out[family] = round(cdlm_losses.dlm_loss(model, to(args.device, batch), mask_id, rate, counted, generator, args.block_size, mask).item(), 4)
    return out


def decoded(decoder, tokenizer, args):
    """Held-out problems solved, in all and by family, forwards and tokens of an answer."""
    problems = [cdlm.fitting(tokenizer, family, 1000 + i, "heldout", args.gen_length, args.longest_prompt)[:2] for family in tasks.FAMILIES for i in range(args.check)]
    return cdlm_studies.answer(decoder, problems, tokenizer, gen_length=args.gen_length)[0] if problems else {}


def to(device, batch):
    return {name: x.to(device) for name, x in batch.items()}


def train_teacher(args, tokenizer, tokenizer_json, mask_id):
    """First block-causally, all blocks of an answer in one forward, for most of what a mask must learn is the same when every slot
    sees all others. Then as the teacher is used."""
    model = checkpoints.load(args.target, args.device, torch.float32)
    if args.no_shift:
        model.config.shift = False
    examples, bf16, eos = Examples(tokenizer, args), torch.autocast(args.device.split(":")[0], torch.bfloat16), model.config.eos_id
    first = args.steps * args.block_warmup
    objective_of = lambda step: (cdlm_losses.all_blocks, cdlm_losses.two_copies) if step < first else (cdlm_losses.teacher_states, cdlm_losses.bidirectional)

    def loss_of(step):
        (states, mask), generator = objective_of(step), torch.Generator().manual_seed(args.seed * 1000003 + step)
        batch = examples.batch(step, group=4 if mask is cdlm_losses.two_copies else 1)
        if mask is cdlm_losses.two_copies:
            batch = short(batch, eos, args.block_size)
        rate, counted = states(batch["answer"], eos, args.block_size, generator)
        with bf16:
            return {"loss": cdlm_losses.dlm_loss(model, to(args.device, batch), mask_id, rate, counted, generator, args.block_size, mask, args.in_order)}

    kind = "teacher" if first < args.steps else "student"            # one that was only ever block-causal must be decoded so
    fit(args, "teacher", model, tokenizer_json, tokenizer, loss_of, objective_of, kind, mask_id, args.lr or 1e-3)


def collect_trajectories(args, tokenizer, mask_id):
    folder = os.path.join(args.out, "trajectories")
    os.makedirs(folder, exist_ok=True)
    model, examples, each = checkpoints.load(os.path.join(args.out, "teacher"), args.device, torch.bfloat16), Examples(tokenizer, args), len(args.temperatures)
    settings = {name: getattr(args, name) for name in ("prompts", "shard", "gen_length", "block_size", "longest_prompt", "real_share", "all_blocks", "order", "seed")}
    settings |= {"temperatures": list(args.temperatures), "real_text": bool(examples.real), "teacher": checkpoints.fingerprint(model)}
    file = os.path.join(folder, "settings.json")
    if os.path.exists(file):
        old = read_json(file)
        with blame(file):
            changed = [name for name in settings if settings[name] != old.get(name)]
        if changed:
            raise ValueError(f"{folder} was begun with {changed[0]} {old.get(changed[0])}, not {settings[changed[0]]}; use another --out or the same settings")
    write_json(file, settings)
    n = args.prompts * each
    for shard in tqdm(range(-(-n // args.shard)), unit="shard", desc="trajectories"):
        file, items = os.path.join(folder, f"{shard:05d}.safetensors"), range(shard * args.shard, min((shard + 1) * args.shard, n))
        if os.path.exists(file):
            continue
        batch = as_batch([examples(i // each) for i in items])
        requests = [Request(prompt[-length:].tolist(), args.gen_length, Sampling(args.temperatures[i % each], seed=args.seed * 1000003 + i), [model.config.eos_id])
                    for i, prompt, length in zip(items, batch["prompt"], batch["length"])]
        data = {"prompt": batch["prompt"], "length": batch["length"], **cdlm.collect(model, mask_id, requests, args.block_size, batch_size=args.batch, stop="never" if args.all_blocks else "block", order=args.order)}
        data = {name: x if name == "hidden" else x.to(torch.int32) for name, x in data.items()}
        with replaced(file) as temporary:
            save_file({name: x.contiguous() for name, x in data.items()}, temporary)


def train_student(args, tokenizer, tokenizer_json, mask_id):
    teacher = os.path.join(args.out, "teacher")
    model = checkpoints.load(teacher, args.device, torch.float32)
    head = model.head.weight.detach().clone()
    folder = os.path.join(args.out, "trajectories")
    file = os.path.join(folder, "settings.json")
    data = Trajectories(folder) if os.path.exists(file) else None
    if not data or not data.where:
        raise ValueError(f"{folder} holds no trajectories; run --stage trajectories first")
    settings = read_json(file)
    if not isinstance(settings, dict) or not {"gen_length", "block_size", "teacher"} <= set(settings):
        raise ValueError(f"{file} is damaged: it does not say how the trajectories were made")
    if any(max(s["tokens"].max(), s["prompt"].max()) >= model.config.vocab_size or s["hidden"].shape[2] != model.config.d_model for s in data.shards):
        raise ValueError(f"the trajectories in {folder} are not of the model in {teacher}")
    for name in ("gen_length", "block_size"):
        if settings[name] != getattr(args, name):
            raise ValueError(f"the trajectories have {name.replace('_', '-')} {settings[name]}, not {getattr(args, name)}")
    if settings["teacher"] != checkpoints.fingerprint(model):
        raise ValueError(f"the trajectories in {folder} are of another teacher than the one in {teacher}; remove them and run --stage trajectories")
    bf16 = torch.autocast(args.device.split(":")[0], torch.bfloat16)

    examples, live, eos = Examples(tokenizer, args), [int(shard["live"][i]) for shard, i in data.where], model.config.eos_id
    beyond = args.prompts * 1000                         # reference answers of problems that are not the trajectories'

    def loss_of(step):
        batch = short(data.batch(numbers_of_step(step, args.batch, live, args.seed)), eos, args.block_size, ("tokens", "rank", "hidden"))
        reference = short(examples.batch(beyond + step, group=4), eos, args.block_size) if args.weights[2] else None
        generator = torch.Generator().manual_seed(args.seed * 1000003 + step)
        k, k_star = cdlm_losses.draw_states(batch["live"], batch["tokens"].shape[1], args.block_size, generator, args.cons_target)
        with bf16:
            return cdlm_losses.student_losses(model, head, to(args.device, batch), reference and to(args.device, reference), mask_id, args.block_size, eos, k, k_star,
                                              generator, args.weights, args.kl, args.cons_target, args.in_order)

    fit(args, args.name, model, tokenizer_json, tokenizer, loss_of, lambda step: (cdlm_losses.all_blocks, cdlm_losses.two_copies), "student", mask_id, args.lr or 2e-4)


def main():
    args = parse_args()
    for name in ("gen_length", "block_size", "steps", "batch", "prompts", "shard", "save_every", "warmup"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name.replace('_', '-')} {getattr(args, name)} is out of range; allowed is 1 or more")
    for name in ("block_warmup", "in_order"):
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"{name.replace('_', '-')} {getattr(args, name)} is out of range; allowed is 0 to 1")
    check_device(args.device)
    stages = STAGES if args.stage == "all" else (args.stage,)
    source = args.target if stages[0] == "teacher" else os.path.join(args.out, "teacher")
    tokenizer, context = Tokenizer.load(source), checkpoints.load(source).config.block_size
    if args.gen_length + args.longest_prompt > context:
        raise ValueError(f"gen-length {args.gen_length} and longest-prompt {args.longest_prompt} exceed the context of {context}")
    mask_id = cdlm.mask_id_of(tokenizer, source)
    tokenizer_json = read_json(os.path.join(source, "tokenizer.json"))
    if "teacher" in stages:
        train_teacher(args, tokenizer, tokenizer_json, mask_id)
    if "trajectories" in stages:
        with locked(os.path.join(args.out, "trajectories")):
            collect_trajectories(args, tokenizer, mask_id)
    if "student" in stages:
        train_student(args, tokenizer, tokenizer_json, mask_id)


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues from the last checkpoint or shard", "--batch")
