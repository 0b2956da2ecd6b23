"""What drafters are trained on: the target's own answers to training prompts, kept in shards as token ids,
each answer with the log-probabilities that the target gave its tokens. Made once, read by every arm, seed and
prefix; prompts of the split "heldout" are never trained on. Nothing is decoded to text and read back, and the
end of text stays where it was chosen. """
import os
import random

import torch
from tqdm import tqdm

from minispec.data import prompts, tasks
from minispec.core.attention import dense_attend
from minispec.core.engine import Engine, Lockstep
from minispec.core.requests import Request
from minispec.tools import checkpoints, training
from minispec.tools.files import blame, read_json, write_json
from minispec.core.verify import Sampling

SHARD = 64                  # prompts answered between two writes


def add_arguments(parser):
    """The settings of a drafter's training: which answers to train on, and in what batches."""
    training.add_arguments(parser, lr=2e-3, warmup=50, save_every=200)
    add = parser.add_argument
    add("--target", default="checkpoints/target", metavar="DIR",
        help="the model to draft for (default %(default)s)")
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


def check_arguments(args, **least):
    """ValueError where a setting is below the least that is allowed, or names no prompts."""
    training.check_arguments(args, prompts=1, heldout=1, max_new_tokens=2, tokens=1, batch_tokens=1,
                             max_length=8, **least)
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
def collect(args, target, tokenizer, least=0):
    """(training rows, held-out rows, plan). A row is (prompt ids, answer ids, log-probabilities of the
    answer's tokens); within max-length it has more than `least` tokens of an answer. plan: see schedule."""
    folder = args.responses or os.path.join(args.out, "responses")
    # Answers in the folder must be the same target's.
    training.same_settings(folder, target=checkpoints.fingerprint(target), temperature=args.temperature,
                           max_new_tokens=args.max_new_tokens)
    rows = _answers(args, target, tokenizer, folder, "train", args.prompts)
    heldout = _answers(args, target, tokenizer, folder, "heldout", args.heldout)

    # Long texts are cut; something to learn must be left of them.
    rows = [row for row in rows if _length(row, args) > len(row[0]) + least]
    heldout = [row for row in heldout if _length(row, args) > len(row[0])]
    for name, some in (("training", rows), ("held-out", heldout)):
        if not some:
            raise ValueError(f"no {name} answer is long enough within max-length {args.max_length}")
    lengths = [_length(row, args) for row in rows]
    plan = schedule(args.seed, lengths, args.batch_tokens, args.tokens)
    print(f"{len(rows)} texts, {sum(lengths):,} tokens, {len(plan)} steps")
    return rows, heldout, plan


def _length(row, args):
    """Tokens of a text, prompt and answer, after cutting."""
    prompt, answer, _ = row
    return min(len(prompt) + len(answer), args.max_length)


def _answers(args, target, tokenizer, folder, split, n):
    """The target's answers to n prompts, from the shards of `folder` or made now."""
    asked = prompts_of(args, split, n)
    starts = range(0, len(asked), SHARD)
    out = []
    for start in tqdm(starts, desc=f"{split} answers", unit="shard"):
        file = os.path.join(folder, f"{split}-{start // SHARD:05d}.json")
        texts = asked[start:start + SHARD]
        rows = []
        if os.path.exists(file):
            rows = read_json(file)
            with blame(file):
                same = all(row[0] == tokenizer.prompt_ids(text) for row, text in zip(rows, texts))
            if not same:
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


def of_those_before(share):
    """How often draft 1, 2, .. is right where those before it are, from how often the first 1, 2, .. are."""
    given = share / torch.cat([torch.ones(1), share[:-1]]).clamp(min=1e-9)
    return [round(a, 4) for a in given.tolist()]


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
