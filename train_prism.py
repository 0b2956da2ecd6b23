"""Train a drafter of the PRISM / EAGLE family for any target. One page, nanoGPT style.

    python train_prism.py --out checkpoints/prism --arm prism2                       # for the shipped target
    python train_prism.py --out /tmp/one --arm ttt1 --responses checkpoints/prism/responses      # the same data, one module
    python train_prism.py --out /tmp/two --arm prism2 --init /tmp/one                # modules start as copies of a trained one
    python train_prism.py --out /tmp/more --arm ttt1 --init /tmp/one                 # its control: as much training, no module more

The target answers the prompts itself (greedily, unless --temperature says otherwise); the answers are kept in shards, from
which other arms, seeds and prefixes (--prompts 1000, 2000, ..) can be trained. Its hidden states are computed when they are
needed. Interrupt it at any time: the same command continues. Writes config.json, model.safetensors, log.jsonl, command.txt,
and resume.pt with the optimisers' state. tau, on the way, estimates the tokens a round of chain drafting would commit.
"""
import json
import os
import random
import zlib

import minispec  # before torch: it tunes the allocator
import torch
from tqdm import tqdm

from minispec import gpt, prism, tasks
from minispec.engine import Engine, Lockstep, Request
from minispec.script import Parser, run_main
from minispec.tokenizer import Tokenizer
from minispec.training import learning_rate, optimizers, train
from minispec.verify import Sampling

# unroll: draft steps in the loss. All arms but the first are trained to draft from their own states.
ARMS = {
    "eagle2": dict(step_map=(0,), n_layer=1, unroll=1),           # one module, one step: EAGLE and EAGLE-2
    "ttt1": dict(step_map=(0,), n_layer=1, unroll=None),          # one module, many steps: HASS, EAGLE-3
    "prism2": dict(step_map=(0, 1), n_layer=1, unroll=None),      # the paper's: step 1 reads module 0, all later ones module 1
    "prism3": dict(step_map=(0, 1, 2), n_layer=1, unroll=None),
    "stack2": dict(step_map=(0,), n_layer=2, unroll=None),        # as many parameters as prism2, all of them read at every step
}
SHARD = 64                  # prompts answered between two writes
LIMITS = {"prompts": 1, "heldout": 1, "max-new-tokens": 2, "tokens": 1, "batch-tokens": 1, "max-length": 8, "unroll": 1, "save-every": 1}


def parse_args():
    p = Parser(__doc__)
    p.add_argument("--target", default="checkpoints/target", metavar="DIR", help="the model to draft for (default %(default)s)")
    p.add_argument("--out", required=True, help="folder to write the drafter to")
    p.add_argument("--arm", default="prism2", choices=ARMS, help="which member of the family (default prism2)")
    p.add_argument("--taps", default="last", choices=("last", "three"), help="what it reads of the target: the final hidden state, or three layers")
    p.add_argument("--init", metavar="DIR", help="start from this drafter; further modules begin as copies of its last")
    p.add_argument("--recompute", action="store_true", help="ablation: the context's keys from the current module, as in the released trainer")
    p.add_argument("--tasks", default=",".join(tasks.FAMILIES), help="families of procedural prompts, in turn (default: all)")
    p.add_argument("--prompt-file", metavar="FILE", help="JSON lines of prompts to use instead")
    p.add_argument("--prompts", type=int, default=4000, help="number of training prompts; fewer are a prefix of more (default 4000)")
    p.add_argument("--heldout", type=int, default=40, help="number of held-out prompts for the estimates (default 40)")
    p.add_argument("--responses", metavar="DIR", help="folder of the target's answers (default: OUT/responses)")
    p.add_argument("--temperature", type=float, default=0.0, help="of the target's answers (default 0, greedy)")
    p.add_argument("--max-new-tokens", type=int, default=1024, help="limit of an answer (default 1024)")
    p.add_argument("--unroll", type=int, default=5, help="draft steps in the loss (default 5; arm eagle2: 1)")
    p.add_argument("--decay", type=float, default=1.0, help="weight of a step in the loss relative to the one before (EAGLE-3: 0.8)")
    p.add_argument("--tokens", type=float, default=8e6, help="training tokens in all")
    p.add_argument("--batch-tokens", type=int, default=4096, help="tokens an optimiser step")
    p.add_argument("--max-length", type=int, default=1536, help="longer texts are cut (default 1536)")
    p.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    p.add_argument("--warmup", type=int, default=50, help="steps of linear warm-up")
    p.add_argument("--seed", type=int, default=1337, help="of the weights and the order of the data; the data do not depend on it")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    args = p.parse_args()
    for name, least in LIMITS.items():
        if getattr(args, name.replace("-", "_")) < least:
            raise ValueError(f"{name} {getattr(args, name.replace('-', '_')):g} is out of range; allowed is {least} or more")
    args.sampling = Sampling(args.temperature)                   # ValueError where it is out of range
    return args


# -- data: the target's answers ----------------------------------------------------------------------------------------

def prompts_of(args, split, n):
    """n prompts of a split; fewer are always a prefix of more."""
    if args.prompt_file:
        some = [p.prompt for p in tasks.load_prompts(args.prompt_file) if tasks.is_heldout(p.prompt) == (split == "heldout")]
        if not some:
            raise ValueError(f"{args.prompt_file} has no prompts for the split '{split}'; every eighth or so is held out, so give it more")
        return some[:n]
    families = args.tasks.split(",")
    return [tasks.make(families[i % len(families)], i // len(families), split).prompt for i in range(n)]


def check_folder(args, folder):
    """Answers in `folder` must be the same target's: note what they depend on beside the prompts, or compare. ValueError names
    the difference."""
    with open(os.path.join(args.target, "model.safetensors"), "rb") as f:
        target = zlib.crc32(f.read())
    made_with = {"target": target, "temperature": args.temperature, "max_new_tokens": args.max_new_tokens}
    file = os.path.join(folder, "settings.json")
    if os.path.exists(file):
        with open(file, encoding="utf-8") as f:
            other = json.load(f)
        for key, value in made_with.items():
            if other.get(key) != value:
                raise ValueError(f"the answers in {folder} were made with {key} {other.get(key)}, now it is {value}; use another --responses folder")
    os.makedirs(folder, exist_ok=True)
    gpt.write_json(file, made_with)


def answers(args, target, tokenizer, folder, split, n):
    """The target's answers to n prompts as [(prompt ids, answer ids)], from the shards of `folder` or made now."""
    prompts, out = prompts_of(args, split, n), []
    shards = range(0, len(prompts), SHARD)
    for start in tqdm(shards, desc=f"{split} answers", unit="shard", disable=all(os.path.exists(_shard(folder, split, i)) for i in shards)):
        file, some = _shard(folder, split, start), prompts[start:start + SHARD]
        rows = []
        if os.path.exists(file):
            with open(file, encoding="utf-8") as f:
                rows = json.load(f)
            if any(row[0] != tokenizer.prompt_ids(prompt) for row, prompt in zip(rows, some)):
                raise ValueError(f"the answers in {file} are to other prompts; use another --responses folder")
        if len(rows) < len(some):                                # a shorter run before this one ended inside this shard
            requests = []
            for i, prompt in enumerate(some[len(rows):], start + len(rows)):
                ids = tokenizer.prompt_ids(prompt)
                room = min(args.max_new_tokens, target.config.block_size - len(ids))
                if room < 2:
                    raise ValueError(f"prompt {i + 1} has {len(ids)} tokens; the context of this target is {target.config.block_size}")
                requests.append(Request(ids, room, Sampling(args.temperature, seed=i), [target.config.eos_id]))
            rows += [[g.prompt_ids, g.token_ids] for g in Engine(target, Lockstep, 16).generate(requests)]
            gpt.write_json(file, rows)
        out += rows[:len(some)]
    return out


def _shard(folder, split, start):
    return os.path.join(folder, f"{split}-{start // SHARD:05d}.json")


def schedule(seed, lengths, batch_tokens, tokens):
    """The rows of every step until `tokens` are used up: [(row numbers, tokens so far)]. Batches hold texts of like length."""
    rng, out, used = random.Random(seed), [], 0
    while used < tokens:
        order, batches = rng.sample(range(len(lengths)), len(lengths)), []
        for i in range(0, len(order), 64):
            batch = []
            for row in sorted(order[i:i + 64], key=lambda row: lengths[row]):
                if batch and (len(batch) + 1) * lengths[row] > batch_tokens:
                    batches.append(batch)
                    batch = []
                batch.append(row)
            batches.append(batch)
        rng.shuffle(batches)
        for batch in batches:
            if used < tokens:
                used += sum(lengths[row] for row in batch)
                out.append((batch, used))
    return out


def batch_of(rows, length, device):
    """(ids, learn), each (B, S): texts padded on the right; what the target wrote is to be learned."""
    s = min(max(len(p) + len(a) for p, a in rows), length)
    ids, learn = torch.zeros(len(rows), s, dtype=torch.long), torch.zeros(len(rows), s, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(rows):
        text = torch.tensor(prompt + answer)[:s]
        ids[i, :len(text)] = text
        learn[i, len(prompt):len(text)] = True
    return ids.to(device), learn.to(device)


# -- training ----------------------------------------------------------------------------------------------------------

@torch.no_grad()
def evaluate(model, target, heldout, args, autocast):
    """On held-out answers, five drafts a round: tau, and how often draft 1, 2, .. is right where those before it are."""
    total, n = torch.zeros(5), 0
    for i in range(0, len(heldout), 4):
        ids, learn = batch_of(heldout[i:i + 4], args.max_length, args.device)
        with autocast:
            _, accepted = prism.unrolled_loss(model, target, ids, learn, 5)
        total, n = total + accepted.cpu() * learn.sum().item(), n + learn.sum().item()
    share = total / n
    given = share / torch.cat([torch.ones(1), share[:-1]]).clamp(min=1e-9)
    return {"heldout_tau": round(1 + share.sum().item(), 4), "heldout_acceptance": [round(a, 4) for a in given.tolist()]}


def main():
    args = parse_args()
    arm = ARMS[args.arm]
    unroll = arm["unroll"] or args.unroll
    target, tokenizer = gpt.load(args.target, args.device), Tokenizer.load(args.target)
    target.requires_grad_(False)
    prompts_of(args, "train", args.prompts), prompts_of(args, "heldout", args.heldout)       # a wrong name fails before the work
    torch.manual_seed(args.seed)
    taps = prism.three_taps(target.config.n_layer) if args.taps == "three" else ()
    model = prism.for_target(target, arm["step_map"], arm["n_layer"], taps)
    if args.init:
        source = prism.load(args.init, args.device)
        source.check(target)
        if (source.config.n_layer, source.config.taps) != (arm["n_layer"], taps):
            raise ValueError(f"{args.init} has modules of {source.config.n_layer} layers and reads taps {source.config.taps}; "
                             f"this arm needs {arm['n_layer']} and {taps}")
        prism.copy_modules(model, source)
    folder = args.responses or os.path.join(args.out, "responses")
    check_folder(args, folder)
    os.makedirs(args.out, exist_ok=True)
    with torch.inference_mode():
        rows, heldout = (answers(args, target, tokenizer, folder, split, n) for split, n in (("train", args.prompts), ("heldout", args.heldout)))
    lengths = [min(len(p) + len(a), args.max_length) for p, a in rows]
    rows = [row for row, n in zip(rows, lengths) if n > len(row[0]) + unroll]                # something to guess at every step
    lengths = [min(len(p) + len(a), args.max_length) for p, a in rows]
    if not rows:
        raise ValueError(f"no answer is longer than {unroll} tokens within max-length {args.max_length}; nothing to train on")
    plan = schedule(args.seed, lengths, args.batch_tokens, args.tokens)
    one = sum(p.numel() for p in model.bank[0].parameters())
    print(f"{args.arm}: {model.n_params() / 1e6:.2f}M parameters, {one / 1e6:.2f}M read by a draft step; {len(rows)} texts, {sum(lengths):,} tokens, {len(plan)} steps")

    autocast = torch.autocast(args.device.split(":")[0], torch.bfloat16)

    def loss_of(step):
        ids, learn = batch_of([rows[i] for i in plan[step][0]], args.max_length, args.device)
        with autocast:
            loss, accepted = prism.unrolled_loss(model, target, ids, learn, unroll, args.decay, args.recompute)
        return {"loss": loss / unroll, "tau": 1 + accepted.sum()}

    train(args.out, model, optimizers(model, args.lr), len(plan), loss_of,
          lambda step: learning_rate(step, plan[step][1] / plan[-1][1], args.lr, args.warmup), lambda: prism.save(model, args.out),
          lambda step: {"tokens": plan[step][1], **evaluate(model, target, heldout, args, autocast)}, args.save_every, args.device)


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues from the last checkpoint")
