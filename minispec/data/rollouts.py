"""What drafters are trained on: the target's own answers to training prompts, kept in shards as token ids,
each answer with the log-probabilities that the target gave its tokens. Made once, read by every arm, seed and
prefix; prompts of the split "heldout" are never trained on. Nothing is decoded to text and read back, and the
end of text stays where it was chosen. """
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
# The least that a setting may be.
LIMITS = {"prompts": 1, "heldout": 1, "max-new-tokens": 2, "tokens": 1, "batch-tokens": 1, "max-length": 8,
          "save-every": 1, "warmup": 0}
MOST = 10 ** 10             # and the most


def add_arguments(parser):
    """The settings that say which answers to train on, and in what batches."""
    add = parser.add_argument
    add("--target", default="checkpoints/target", metavar="DIR",
        help="the model to draft for (default %(default)s)")
    add("--out", required=True, help="folder to write the drafter to")
    add("--tasks", default=",".join(tasks.FAMILIES),
        help="families of procedural prompts, in turn (default: all)")
    add("--prompt-file", metavar="FILE", help="JSON lines of prompts to use instead")
    add("--prompts", type=int, default=4000,
        help="number of training prompts; fewer are a prefix of more (default 4000)")
    add("--heldout", type=int, default=40, help="number of held-out prompts for the estimates (default 40)")
    add("--responses", metavar="DIR", help="folder of the target's answers (default: OUT/responses)")
    add("--temperature", type=float, default=0.0, help="of the target's answers (default 0, greedy)")
    add("--max-new-tokens", type=int, default=1024, help="limit of an answer (default 1024)")
    add("--tokens", type=float, default=8e6, help="training tokens in all")
    add("--batch-tokens", type=int, default=4096, help="tokens an optimiser step")
    add("--max-length", type=int, default=1536, help="longer texts are cut (default 1536)")
    add("--warmup", type=int, default=50, help="steps of linear warm-up")
    add("--seed", type=int, default=1337,
        help="of the weights and the order of the data; the data do not depend on it")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--save-every", type=int, default=200, help="steps between checkpoints")


def check_arguments(args, limits):
    """ValueError where a setting is below the least that `limits`, or LIMITS here, allow for it; or names no
    prompts."""
    for name, least in {**LIMITS, **limits}.items():
        value = getattr(args, name.replace("-", "_"))
        if value is not None and not least <= value <= MOST:
            raise ValueError(f"{name} {value:g} is out of range; "
                             f"allowed is {least} or more, up to {MOST:.0e}")
    check_device(args.device)
    Sampling(args.temperature)
    # A wrong name of a file or a family fails here, before the work.
    prompts_of(args, "train", args.prompts)
    prompts_of(args, "heldout", args.heldout)


def prompts_of(args, split, n):
    """n prompts of a split; fewer are always a prefix of more. Of several turns in a file, the first."""
    if args.prompt_file:
        texts = [p.prompt for p in prompts.load_prompts(args.prompt_file)]
        texts = [text for text in texts if tasks.is_heldout(text) == (split == "heldout")]
        if not texts:
            raise ValueError(f"{args.prompt_file} has no prompts for the split '{split}'; "
                             "about every eighth is held out, so give it more")
        return texts[:n]
    families = args.tasks.split(",")
    return [tasks.make(families[i % len(families)], i // len(families), split).prompt for i in range(n)]


@torch.inference_mode()
def collect(args, target, tokenizer):
    """(training rows, held-out rows), each [(prompt ids, answer ids, log-probabilities of the answer's
    tokens)]."""
    folder = args.responses or os.path.join(args.out, "responses")
    _check_folder(args, folder)
    rows = _answers(args, target, tokenizer, folder, "train", args.prompts)
    heldout = _answers(args, target, tokenizer, folder, "heldout", args.heldout)
    return rows, heldout


def _check_folder(args, folder):
    """Answers in `folder` must be the same target's: note what they depend on next to the prompts, or
    compare. ValueError names the difference."""
    target = 0                                                   # a check sum of its weights
    for file in sorted(glob.glob(os.path.join(glob.escape(args.target), "*.safetensors"))):
        with open(file, "rb") as f:
            target = zlib.crc32(f.read(), target)
    made_with = {"target": target, "temperature": args.temperature, "max_new_tokens": args.max_new_tokens,
                 "probabilities": True}
    file = os.path.join(folder, "settings.json")
    if os.path.exists(file):
        other = read_json(file)
        if not isinstance(other, dict):
            raise ValueError(f"{file} is damaged: a JSON object is needed")
        for key, value in made_with.items():
            if other.get(key) != value:
                raise ValueError(f"the answers in {folder} were made with {key} {other.get(key)}, "
                                 f"now it is {value}; use another --responses folder")
    os.makedirs(folder, exist_ok=True)
    write_json(file, made_with)


def _answers(args, target, tokenizer, folder, split, n):
    """The target's answers to n prompts, from the shards of `folder` or made now."""
    asked = prompts_of(args, split, n)
    starts = range(0, len(asked), SHARD)
    all_there = all(os.path.exists(_shard(folder, split, start)) for start in starts)
    out = []
    for start in tqdm(starts, desc=f"{split} answers", unit="shard", disable=all_there):
        file = _shard(folder, split, start)
        texts = asked[start:start + SHARD]
        rows = []
        if os.path.exists(file):
            rows = _read_shard(file, target.config.vocab_size)
            if any(row[0] != tokenizer.prompt_ids(text) for row, text in zip(rows, texts)):
                raise ValueError(f"the answers in {file} are to other prompts; "
                                 "use another --responses folder")
        if len(rows) < len(texts):                   # none yet, or those of a run with fewer prompts
            rows += _generate(args, target, tokenizer, texts[len(rows):], start + len(rows))
            write_json(file, rows)
        out += rows[:len(texts)]
    return out


def _generate(args, target, tokenizer, texts, first):
    """New rows of prompts number `first` and following; a prompt's number is the seed of its answer."""
    requests = []
    for i, text in enumerate(texts, first):
        ids = tokenizer.prompt_ids(text)
        context = target.config.block_size
        room = min(args.max_new_tokens, context - len(ids))
        if room < 2:
            raise ValueError(f"prompt {i + 1} has {len(ids)} tokens; the context of this target is {context}")
        sampling = Sampling(args.temperature, seed=i)
        requests.append(Request(ids, room, sampling, [target.config.eos_id, *tokenizer.ends]))
    rows = []
    for g in Engine(target, Lockstep, 16).generate(requests):
        logs = log_probs(target, g.prompt_ids, g.token_ids, args.temperature)
        rows.append([g.prompt_ids, g.token_ids, logs])
    return rows


def _read_shard(file, vocab_size):
    """The rows of a shard: [[prompt ids, answer ids, a number for each of these]]."""
    rows = read_json(file)
    with blame(file):
        if not isinstance(rows, list):
            raise ValueError("a list of rows is needed")
        for prompt, answer, logs in rows:
            ids = prompt + answer
            known = all(type(i) is int and 0 <= i < vocab_size for i in ids)
            if not known or len(answer) != len(logs) or not all(map(math.isfinite, logs)):
                raise ValueError(f"a row is not made of token ids below {vocab_size} "
                                 "and a number for each of the answer's")
    return rows


def _shard(folder, split, start):
    return os.path.join(folder, f"{split}-{start // SHARD:05d}.json")


def log_probs(target, prompt, answer, temperature):
    """log p of each token of an answer under the target at this temperature; at 0 it is a point mass, so they
    all are 0."""
    if temperature == 0:
        return [0.0] * len(answer)
    ids = torch.tensor([prompt + answer], device=target.device)
    positions = torch.arange(ids.shape[1] - 1, device=target.device)[None]
    hidden = target(ids[:, :-1], positions, dense_attend())
    logits = target.logits(hidden[0, len(prompt) - 1:]).float()           # row i predicts answer token i
    log_p = (logits / temperature).log_softmax(-1)
    return [round(x, 5) for x in log_p.gather(1, ids[0, len(prompt):, None])[:, 0].tolist()]


def schedule(seed, lengths, batch_tokens, tokens):
    """The rows of every step until `tokens` are used up: [(row numbers, tokens so far)]. Batches hold texts
    of similar length, because shorter ones are padded."""
    rng = random.Random(seed)
    plan = []
    used = 0
    while used < tokens:
        for batch in _epoch(rng, lengths, batch_tokens):
            if used < tokens:
                used += sum(lengths[row] for row in batch)
                plan.append((batch, used))
    return plan


def _epoch(rng, lengths, batch_tokens):
    """Every row once, in batches of at most `batch_tokens` padded tokens, shuffled."""
    order = rng.sample(range(len(lengths)), len(lengths))
    batches = []
    for i in range(0, len(order), 64):
        # Sort only 64 at a time, so that batches differ from epoch to epoch.
        batch = []
        for row in sorted(order[i:i + 64], key=lambda row: lengths[row]):
            if batch and (len(batch) + 1) * lengths[row] > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(row)
        batches.append(batch)
    rng.shuffle(batches)
    return batches


def batch_of(rows, length, device):
    """(ids, learn, log_p), each (B, S): texts padded on the right; what the target wrote is to be learned; 0
    elsewhere."""
    s = min(max(len(prompt) + len(answer) for prompt, answer, _ in rows), length)
    ids = torch.zeros(len(rows), s, dtype=torch.long)
    learn = torch.zeros(len(rows), s, dtype=torch.bool)
    log_p = torch.zeros(len(rows), s)
    for i, (prompt, answer, logs) in enumerate(rows):
        text = torch.tensor(prompt + answer)[:s]
        start = len(prompt)
        ids[i, :len(text)] = text
        learn[i, start:len(text)] = True
        log_p[i, start:len(text)] = torch.tensor(logs)[:max(s - start, 0)]
    return ids.to(device), learn.to(device), log_p.to(device)
