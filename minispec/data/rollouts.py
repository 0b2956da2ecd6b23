"""What drafters are trained on: the target's own answers to training prompts, kept in shards as token ids, each answer with the
log-probabilities that the target gave its tokens. Made once, read by every arm, seed and prefix; prompts of the split
"heldout" are never trained on. Nothing is decoded to text and read back, and the end of text stays where it was chosen.
"""
import glob
import math
import os
import random
import zlib

import torch
from tqdm import tqdm

from minispec.data import prompts, tasks
from minispec.core.attention import dense_attend
from minispec.core.engine import Engine, Lockstep, Request
from minispec.tools.files import blame, read_json, write_json
from minispec.tools.script import check_device
from minispec.core.verify import Sampling

SHARD = 64                  # prompts answered between two writes
LIMITS = {"prompts": 1, "heldout": 1, "max-new-tokens": 2, "tokens": 1, "batch-tokens": 1, "max-length": 8, "save-every": 1, "warmup": 0}
MOST = 10 ** 10             # of all of them: nobody means more


def add_arguments(parser):
    """The settings that say which answers to train on, and in what batches."""
    parser.add_argument("--target", default="checkpoints/target", metavar="DIR", help="the model to draft for (default %(default)s)")
    parser.add_argument("--out", required=True, help="folder to write the drafter to")
    parser.add_argument("--tasks", default=",".join(tasks.FAMILIES), help="families of procedural prompts, in turn (default: all)")
    parser.add_argument("--prompt-file", metavar="FILE", help="JSON lines of prompts to use instead")
    parser.add_argument("--prompts", type=int, default=4000, help="number of training prompts; fewer are a prefix of more (default 4000)")
    parser.add_argument("--heldout", type=int, default=40, help="number of held-out prompts for the estimates (default 40)")
    parser.add_argument("--responses", metavar="DIR", help="folder of the target's answers (default: OUT/responses)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the target's answers (default 0, greedy)")
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="limit of an answer (default 1024)")
    parser.add_argument("--tokens", type=float, default=8e6, help="training tokens in all")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens an optimiser step")
    parser.add_argument("--max-length", type=int, default=1536, help="longer texts are cut (default 1536)")
    parser.add_argument("--warmup", type=int, default=50, help="steps of linear warm-up")
    parser.add_argument("--seed", type=int, default=1337, help="of the weights and the order of the data; the data do not depend on it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")


def check_arguments(args, limits):
    """ValueError where a setting is below the least that `limits`, or LIMITS here, allow for it; or names no prompts."""
    for name, least in {**LIMITS, **limits}.items():
        value = getattr(args, name.replace("-", "_"))
        if value is not None and not least <= value <= MOST:
            raise ValueError(f"{name} {value:g} is out of range; allowed is {least} or more, up to {MOST:.0e}")
    check_device(args.device)
    Sampling(args.temperature)
    prompts_of(args, "train", args.prompts), prompts_of(args, "heldout", args.heldout)


def prompts_of(args, split, n):
    """n prompts of a split; fewer are always a prefix of more. Of several turns in a file, the first."""
    if args.prompt_file:
        some = [p.prompt for p in prompts.load_prompts(args.prompt_file) if tasks.is_heldout(p.prompt) == (split == "heldout")]
        if not some:
            raise ValueError(f"{args.prompt_file} has no prompts for the split '{split}'; every eighth or so is held out, so give it more")
        return some[:n]
    families = args.tasks.split(",")
    return [tasks.make(families[i % len(families)], i // len(families), split).prompt for i in range(n)]


@torch.inference_mode()
def collect(args, target, tokenizer):
    """(training rows, held-out rows), each [(prompt ids, answer ids, log-probabilities of the answer's tokens)]."""
    folder = args.responses or os.path.join(args.out, "responses")
    _check_folder(args, folder)
    return tuple(_answers(args, target, tokenizer, folder, split, n) for split, n in (("train", args.prompts), ("heldout", args.heldout)))


def _check_folder(args, folder):
    """Answers in `folder` must be the same target's: note what they depend on beside the prompts, or compare. ValueError names
    the difference."""
    target = 0
    for file in sorted(glob.glob(os.path.join(glob.escape(args.target), "*.safetensors"))):
        with open(file, "rb") as f:
            target = zlib.crc32(f.read(), target)
    made_with = {"target": target, "temperature": args.temperature, "max_new_tokens": args.max_new_tokens, "probabilities": True}
    file = os.path.join(folder, "settings.json")
    if os.path.exists(file):
        other = read_json(file)
        if not isinstance(other, dict):
            raise ValueError(f"{file} is damaged: a JSON object is needed")
        for key, value in made_with.items():
            if other.get(key) != value:
                raise ValueError(f"the answers in {folder} were made with {key} {other.get(key)}, now it is {value}; use another --responses folder")
    os.makedirs(folder, exist_ok=True)
    write_json(file, made_with)


def _answers(args, target, tokenizer, folder, split, n):
    """The target's answers to n prompts, from the shards of `folder` or made now."""
    asked, out = prompts_of(args, split, n), []
    shards = range(0, len(asked), SHARD)
    for start in tqdm(shards, desc=f"{split} answers", unit="shard", disable=all(os.path.exists(_shard(folder, split, i)) for i in shards)):
        file, some = _shard(folder, split, start), asked[start:start + SHARD]
        rows = []
        if os.path.exists(file):
            rows = _read_shard(file, target.config.vocab_size)
            if any(row[0] != tokenizer.prompt_ids(prompt) for row, prompt in zip(rows, some)):
                raise ValueError(f"the answers in {file} are to other prompts; use another --responses folder")
        if len(rows) < len(some):                                # a shorter run before this one ended inside this shard
            requests = []
            for i, prompt in enumerate(some[len(rows):], start + len(rows)):
                ids = tokenizer.prompt_ids(prompt)
                room = min(args.max_new_tokens, target.config.block_size - len(ids))
                if room < 2:
                    raise ValueError(f"prompt {i + 1} has {len(ids)} tokens; the context of this target is {target.config.block_size}")
                requests.append(Request(ids, room, Sampling(args.temperature, seed=i), [target.config.eos_id, *tokenizer.ends]))
            got = Engine(target, Lockstep, 16).generate(requests)
            rows += [[g.prompt_ids, g.token_ids, log_probs(target, g.prompt_ids, g.token_ids, args.temperature)] for g in got]
            write_json(file, rows)
        out += rows[:len(some)]
    return out


def _read_shard(file, vocab_size):
    """The rows of a shard: [[prompt ids, answer ids, a number for each of these]]."""
    rows = read_json(file)
    with blame(file):
        if type(rows) is not list:
            raise ValueError("a list of rows is needed")
        for prompt, answer, logs in rows:
            if not all(type(x) is list for x in (prompt, answer, logs)) or not all(type(i) is int and 0 <= i < vocab_size for i in prompt + answer) or len(answer) != len(logs) or not all(map(math.isfinite, logs)):
                raise ValueError(f"a row is not made of token ids below {vocab_size} and a number for each of the answer's")
    return rows


def _shard(folder, split, start):
    return os.path.join(folder, f"{split}-{start // SHARD:05d}.json")


def log_probs(target, prompt, answer, temperature):
    """log p of each token of an answer under the target at this temperature; at 0 it is a point mass, so they all are 0."""
    if temperature == 0:
        return [0.0] * len(answer)
    ids = torch.tensor([prompt + answer], device=target.device)
    hidden = target(ids[:, :-1], torch.arange(ids.shape[1] - 1, device=target.device)[None], dense_attend())[0, len(prompt) - 1:]
    log_p = (target.logits(hidden).float() / temperature).log_softmax(-1)
    return [round(x, 5) for x in log_p.gather(1, ids[0, len(prompt):, None])[:, 0].tolist()]


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
    """(ids, learn, log_p), each (B, S): texts padded on the right; what the target wrote is to be learned; 0 elsewhere."""
    s = min(max(len(p) + len(a) for p, a, _ in rows), length)
    ids, learn, log_p = torch.zeros(len(rows), s, dtype=torch.long), torch.zeros(len(rows), s, dtype=torch.bool), torch.zeros(len(rows), s)
    for i, (prompt, answer, logs) in enumerate(rows):
        text = torch.tensor(prompt + answer)[:s]
        ids[i, :len(text)] = text
        learn[i, len(prompt):len(text)] = True
        log_p[i, len(prompt):len(text)] = torch.tensor(logs)[:max(s - len(prompt), 0)]
    return ids.to(device), learn.to(device), log_p.to(device)
