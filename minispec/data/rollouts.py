"""What drafters are trained on: answers, most of all the target's own, and what it knew at every token.

A folder holds four kinds of shards, each of which is there as a whole or not at all, so that an interrupted
run goes on where it was:

    own-00000.json                prompts that the target wrote itself (magpie.py)
    train-0-128.json              answers to 128 prompts: [prompt ids, answer ids, temperature] of each
    train-0-128-last.safetensors  of every token of these texts: the target's final hidden state, its
                                  argmax, and the log-probability that it gave the token
    given-0-128.json, ..          the same of answers that others wrote (--given)

They are made once and read by every arm, seed and prefix. The states are mapped, not loaded, so an epoch
costs the drafter alone. Prompts of the split "heldout" are never trained on. Nothing is decoded to text and
read back, and the end of text stays where it was chosen.
"""
import itertools
import os
import random
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from minispec.core.attention import dense_attend
from minispec.core.engine import Engine, Lockstep
from minispec.core.requests import Request
from minispec.core.verify import Sampling, argmax
from minispec.core.words import DRAFT_VOCAB
from minispec.data import magpie, prompts, tasks
from minispec.data.tokenizer import Tokenizer
from minispec.tools import checkpoints, training
from minispec.tools.files import blame, read_json, replaced, write_json

SHARD = 128                 # prompts answered between two writes
LONGEST = 1536              # tokens of a training text; longer ones are cut
LOGITS = 512                # rows whose logits are in memory at once


# -- settings ------------------------------------------------------------------------------------------------

def add_arguments(parser):
    """The settings of a drafter's training: which answers to train on, and in what batches."""
    training.add_arguments(parser, lr=2e-3, warmup=50, save_every=200)
    add = parser.add_argument
    add("--target", default="checkpoints/target", metavar="MODEL",
        help="the model to draft for: a folder, a GGUF file, or smollm2 (default %(default)s)")
    add("--minutes", type=float, help="time for all: half for the answers, half for the training")
    add("--prompt-file", metavar="FILE", nargs="+", default=[],
        help="JSON lines of prompts to answer as well")
    add("--given", metavar="FILE",
        help="JSON lines with a prompt and an answer that somebody else wrote: the target reads them, which "
             "takes a fifth of the time of an answer of its own (not counted in --minutes)")
    add("--prompts", type=int, default=4000,
        help="number of training prompts; fewer are a prefix of more (default 4000)")
    add("--heldout", type=int, default=40, help="number of held-out prompts for the estimates (default 40)")
    add("--responses", metavar="DIR", help="folder of the target's answers (default: OUT/responses)")
    add("--temperature", type=float, help="of the target's answers (default: every other one 0, 1)")
    add("--max-new-tokens", type=int, default=1024, help="limit of an answer (default 1024)")
    add("--draft-vocab", type=int, default=DRAFT_VOCAB, metavar="N",
        help="draft only the N tokens that the answers have most (default %(default)s; 0: all)")
    add("--tokens", type=float, default=8e6, help="training tokens in all")
    add("--batch-tokens", type=int, default=512, help="tokens of an optimiser step (default 512)")


def check_arguments(args, **least):
    """ValueError where a setting is below the least that is allowed, or a file is no file of prompts."""
    training.check_arguments(args, prompts=1, heldout=1, max_new_tokens=2, tokens=1, batch_tokens=1,
                             draft_vocab=0, minutes=0, **least)
    # What is wrong fails here, before the work.
    Sampling(args.temperature or 0)
    for file in filter(None, [*args.prompt_file, args.given]):
        prompts.load_prompts(file)


# -- prompts -------------------------------------------------------------------------------------------------

def procedural(split):
    """Problems of our own families in turn, without end."""
    for i in itertools.count():
        for family in tasks.FAMILIES:
            yield tasks.make(family, i, split).prompt


def prompts_of(files, split, own):
    """The prompts of a split, the sources in turn: each file, then `own`, an iterator. Of several turns in a
    file, the first."""
    def of_split(source):
        return (text for text in source if tasks.is_heldout(text) == (split == "heldout"))

    sources = [[p.prompt for p in prompts.load_prompts(file)] for file in files]
    for texts in itertools.zip_longest(*map(of_split, [*sources, own])):
        yield from (text for text in texts if text is not None)


# -- answers and what the target knew ------------------------------------------------------------------------

@dataclass
class Batch:
    """Texts padded on the right to S tokens; what the target wrote is to be learned."""
    ids: torch.Tensor                    # (B, S)
    learn: torch.Tensor                  # (B, S) bool
    log_p: torch.Tensor                  # (B, S) of each token to learn, under the target
    best: torch.Tensor                   # (B, S) what the target would say next
    hidden: torch.Tensor                 # (B, S, C) its final hidden states


class Text(NamedTuple):
    """One text, and the mapped file of a shard's states: `used` tokens of it, from row `first` on."""
    prompt: list
    answer: list
    temperature: float                   # None: another's answer
    states: object
    first: int
    used: int


class Texts(list):
    """The texts of one split."""

    def add(self, rows, file, least):
        """The rows of a shard, with the file of their states, that have more than `least` tokens of an answer
        when they are cut."""
        with blame(file):
            states = safe_open(file, "pt")
        first = 0
        for prompt, answer, temperature in rows:
            n = len(prompt) + len(answer)
            used = min(n, LONGEST)
            if used > len(prompt) + least:
                self.append(Text(prompt, answer, temperature, states, first, used))
            first += n

    def batches(self, device):
        """All texts, a few at a time."""
        for numbers in torch.arange(len(self)).split(4):
            yield self.batch(numbers, device)

    def answers(self):
        """The target's own."""
        return [text.answer for text in self if text.temperature is not None]

    def batch(self, numbers, device):
        """The Batch of the texts with these numbers."""
        rows = [self[i] for i in numbers]
        seen = []
        for text in rows:
            part = slice(text.first, text.first + text.used)
            seen.append({name: text.states.get_slice(name)[part] for name in text.states.keys()})
        return padded(rows, seen, device)


def padded(rows, seen, device="cpu"):
    """A Batch of rows (prompt ids, answer ids, ..), with what the target saw of each (see `read`)."""
    def stack(parts):
        out = pad_sequence(parts, batch_first=True).to(device)
        return out.float() if out.is_floating_point() else out

    best, log_p, hidden = (stack([one[name] for one in seen]) for name in ("best", "log_p", "hidden"))
    ids, learn = [], []
    for (prompt, answer, *_), one in zip(rows, seen):
        n = len(one["best"])
        ids.append(torch.tensor(prompt + answer)[:n])
        learn.append(torch.arange(n) >= len(prompt))
    return Batch(stack(ids), stack(learn), log_p, best.long(), hidden)


@torch.inference_mode()
def read(target, prompt, answer, temperature):
    """What the target knew at each of the n tokens of a text: {"hidden": (n, C), "best": (n,), "log_p":
    (n,)}. log_p: of each token of the answer at this temperature; of a point mass, at 0, it is 0. temperature
    None, of another's answer: 1."""
    temperature = 1 if temperature is None else temperature
    ids = torch.tensor(prompt + answer, device=target.device)
    positions = torch.arange(len(ids), device=target.device)
    hidden = target(ids[None], positions[None], dense_attend())
    best, log_p = [], []
    # The logits of all rows at once would take more memory than all the rest.
    for rows, following in zip(hidden[0].split(LOGITS), ids.roll(-1).split(LOGITS)):
        logits = target.logits(rows).float()
        best.append(argmax(logits))
        if temperature:
            log_p.append(-F.cross_entropy(logits / temperature, following, reduction="none"))
        else:
            log_p.append(torch.zeros(len(rows)))
    log_p = torch.cat(log_p).roll(1)                     # of each token, no longer of the one behind
    log_p[:len(prompt)] = 0
    out = {"hidden": hidden[0].bfloat16(), "best": torch.cat(best).int(), "log_p": log_p}
    return {name: x.cpu() for name, x in out.items()}


def collect(args, target, least=0):
    """(training Texts, held-out Texts, plan). Cut, each training text has more than `least` tokens of an
    answer. plan: see schedule."""
    args.responses = args.responses or f"{args.out}/responses"
    tokenizer = Tokenizer.load(args.target)
    # Answers in the folder must be the same target's.
    training.same_settings(args.responses, target=checkpoints.fingerprint(target),
                           temperature=args.temperature, max_new_tokens=args.max_new_tokens)
    # What the target says to the prompts of both splits, and in which batches that is read.
    heldout = _texts(args, target, tokenizer, "heldout", args.heldout, 0)
    texts = _texts(args, target, tokenizer, "train", args.prompts, least)
    if args.given:
        _read_given(args, target, tokenizer, least, texts)
    for name, some in (("training", texts), ("held-out", heldout)):
        if not some:
            raise ValueError(f"there is no {name} prompt with an answer within {LONGEST} tokens")
    lengths = [text.used for text in texts]
    plan = schedule(args.seed, lengths, args.batch_tokens, args.tokens)
    print(f"{len(texts)} texts, {sum(lengths):,} tokens, {len(plan)} steps")
    return texts, heldout, plan


def _texts(args, target, tokenizer, split, n, least):
    """The target's answers to n prompts, or to as many as it can answer in half of the minutes, from the
    shards or made now."""
    # What an interrupted run had made is used; once its training has begun, no more is made.
    over = float("inf")
    if args.minutes:
        begun = os.path.exists(f"{args.out}/resume.pt")
        over = 0 if begun else time.time() + 30 * args.minutes
    own = procedural(split) if tokenizer.ours else magpie.written(target, tokenizer, args.responses)
    asked = prompts_of(args.prompt_file, split, own)
    out = Texts()
    for start in tqdm(range(0, n, SHARD), desc=f"{split} answers", unit="shard"):
        end = min(start + SHARD, n)
        name = f"{args.responses}/{split}-{start}-{end}"
        if out and time.time() > over and not os.path.exists(name + ".json"):
            break
        # What the target answers, and what it knows at every token of that.
        texts = list(itertools.islice(asked, end - start))
        rows = _answers(args, target, tokenizer, texts, start, name + ".json")
        out.add(rows, _states(target, rows, name), least)
    return out


def _states(target, rows, name):
    """The file of what the target knew at every token of a shard, made now if it is not there."""
    file = name + "-last.safetensors"
    if not os.path.exists(file):
        seen = [read(target, *row) for row in rows]
        with replaced(file) as temporary:
            save_file({key: torch.cat([one[key] for one in seen]) for key in seen[0]}, temporary)
    return file


def _read_given(args, target, tokenizer, least, out):
    """Add the texts of --given to `out`: a prompt, and an answer that somebody else wrote. The target's
    distributions at every token are as good to learn from, though it would seldom come there by itself.
    ValueError where an answer is missing, or the shards are of other texts."""
    rows = []
    for i, p in enumerate(prompts.load_prompts(args.given), 1):
        said = p.think + p.answer                        # of GSM8K, the steps and the result
        if not said:
            raise ValueError(f"{args.given}: prompt {i} has no answer")
        if not tasks.is_heldout(p.prompt):
            answer = tokenizer.encode(said) + [target.config.eos_id]
            rows.append([tokenizer.prompt_ids(p.prompt), answer[:args.max_new_tokens], None])
    for start in tqdm(range(0, len(rows), SHARD), desc="given answers", unit="shard"):
        some = rows[start:start + SHARD]
        name = f"{args.responses}/given-{start}-{start + len(some)}"
        if not os.path.exists(name + ".json"):
            write_json(name + ".json", some)
        if read_json(name + ".json") != some:
            raise ValueError(f"{name}.json has other texts; use another --responses folder")
        out.add(some, _states(target, some, name), least)


def _answers(args, target, tokenizer, texts, first, file):
    """The rows of a shard, made now if it is not there, of prompts number `first` and following. A prompt's
    number is the seed of its answer."""
    asked = [tokenizer.prompt_ids(text) for text in texts]
    if not os.path.exists(file):
        context = target.config.block_size
        ends = [target.config.eos_id, *tokenizer.ends]
        requests = []
        for i, ids in enumerate(asked, first):
            room = min(args.max_new_tokens, context - len(ids))
            if room < 2:
                raise ValueError(f"prompt {i + 1} has {len(ids)} tokens; "
                                 f"the context of this target is {context}")
            temperature = i % 2 if args.temperature is None else args.temperature
            requests.append(Request(ids, room, Sampling(temperature, seed=i), ends))
        made = Engine(target, Lockstep, magpie.TOGETHER).generate(requests)
        rows = [[g.prompt_ids, g.token_ids, r.sampling.temperature] for g, r in zip(made, requests)]
        write_json(file, rows)
    rows = read_json(file)
    with blame(file):
        same = [prompt for prompt, _, _ in rows] == asked
    if not same:
        raise ValueError(f"the answers in {file} are to other prompts; use another --responses folder")
    return rows


# -- batches -------------------------------------------------------------------------------------------------

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
        for row in sorted(order[i:i + 64], key=lengths.__getitem__):
            if batch and (len(batch) + 1) * lengths[row] > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(row)
        batches.append(batch)
    rng.shuffle(batches)
    return batches
