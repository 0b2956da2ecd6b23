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
    for file in [*args.prompt_file, *([args.given] if args.given else [])]:
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


class Texts:
    """The texts of one split: `rows`, (prompt ids, answer ids, temperature; None: another's answer) each, and
    of each `place`, the mapped file of its states, its first row in there, and how many tokens of it are
    used."""

    def __init__(self):
        self.rows = []
        self.places = []

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
                self.rows.append((prompt, answer, temperature))
                self.places.append((states, first, used))
            first += n

    def lengths(self):
        return [used for _, _, used in self.places]

    def batches(self, device, size=4):
        """All texts, `size` at a time."""
        for numbers in torch.arange(len(self.rows)).split(size):
            yield self.batch(numbers.tolist(), device)

    def answers(self):
        """The target's own."""
        return [answer for _, answer, temperature in self.rows if temperature is not None]

    def batch(self, numbers, device):
        """The Batch of the texts with these numbers."""
        seen = []
        for i in numbers:
            states, first, used = self.places[i]
            part = slice(first, first + used)
            seen.append({name: states.get_slice(name)[part] for name in states.keys()})
        return padded([self.rows[i] for i in numbers], seen, device)


def padded(rows, seen, device="cpu"):
    """A Batch of rows (prompt ids, answer ids, ..), with what the target saw of each (see `read`)."""
    def stack(name):
        out = pad_sequence([one[name] for one in seen], batch_first=True).to(device)
        return out.float() if out.is_floating_point() else out.long()

    best = stack("best")
    ids = torch.zeros(best.shape, dtype=torch.long)
    learn = torch.zeros(best.shape, dtype=torch.bool)
    for i, (prompt, answer, *_) in enumerate(rows):
        n = len(seen[i]["best"])
        ids[i, :n] = torch.tensor(prompt + answer)[:n]
        learn[i, len(prompt):n] = True
    return Batch(ids.to(device), learn.to(device), stack("log_p"), best, stack("hidden"))


@torch.inference_mode()
def read(target, prompt, answer, temperature):
    """What the target knew at each of the n tokens of a text: {"hidden": (n, C), "best": (n,), "log_p": (n,)}.
    log_p: of each token of the answer at this temperature; of a point mass, at 0, it is 0. temperature None,
    of another's answer: 1."""
    temperature = 1 if temperature is None else temperature
    ids = torch.tensor(prompt + answer, device=target.device)
    positions = torch.arange(len(ids), device=target.device)
    hidden = target(ids[None], positions[None], dense_attend())
    best = torch.zeros_like(ids)
    log_p = torch.zeros(len(ids), device=target.device)
    # The logits of all rows at once would take more memory than all the rest.
    for i in range(0, len(ids), LOGITS):
        logits = target.logits(hidden[0, i:i + LOGITS]).float()
        best[i:i + LOGITS] = argmax(logits)
        following = ids[i + 1:i + 1 + LOGITS]
        if temperature:
            logits = logits[:len(following)] / temperature
            log_p[i + 1:i + 1 + len(following)] = -F.cross_entropy(logits, following, reduction="none")
    log_p[:len(prompt)] = 0
    out = {"hidden": hidden[0].bfloat16(), "best": best.int(), "log_p": log_p}
    return {name: x.cpu() for name, x in out.items()}


def collect(args, target, least=0):
    """(training Texts, held-out Texts, plan). Cut, each training text has more than `least` tokens of an
    answer. plan: see schedule."""
    args.responses = args.responses or os.path.join(args.out, "responses")
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
        if not some.rows:
            raise ValueError(f"there is no {name} prompt with an answer within {LONGEST} tokens")
    plan = schedule(args.seed, texts.lengths(), args.batch_tokens, args.tokens)
    print(f"{len(texts.rows)} texts, {sum(texts.lengths()):,} tokens, {len(plan)} steps")
    return texts, heldout, plan


def _texts(args, target, tokenizer, split, n, least):
    """The target's answers to n prompts, or to as many as it can answer in half of the minutes, from the
    shards or made now."""
    # What an interrupted run had made is used; once its training has begun, no more is made.
    over = float("inf")
    if args.minutes:
        begun = os.path.exists(os.path.join(args.out, "resume.pt"))
        over = 0 if begun else time.time() + 30 * args.minutes
    own = procedural(split) if tokenizer.ours else magpie.written(target, tokenizer, args.responses)
    asked = prompts_of(args.prompt_file, split, own)
    out = Texts()
    for start in tqdm(range(0, n, SHARD), desc=f"{split} answers", unit="shard"):
        end = min(start + SHARD, n)
        name = os.path.join(args.responses, f"{split}-{start}-{end}")
        if out.rows and time.time() > over and not os.path.exists(name + ".json"):
            break
        texts = list(itertools.islice(asked, end - start))
        if not texts:
            break
        # What the target answers, and what it knows at every token of that.
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
        name = os.path.join(args.responses, f"given-{start}-{start + len(some)}")
        if not os.path.exists(name + ".json"):
            write_json(name + ".json", some)
        if read_json(name + ".json") != some:
            raise ValueError(f"{name}.json has other texts; use another --responses folder")
        out.add(some, _states(target, some, name), least)


def _answers(args, target, tokenizer, texts, start, file):
    """The rows of a shard, which begins with prompt number `start`."""
    if not os.path.exists(file):
        write_json(file, _generate(args, target, tokenizer, texts, start))
    rows = read_json(file)
    with blame(file):
        same = [prompt for prompt, _, _ in rows] == [tokenizer.prompt_ids(text) for text in texts]
    if not same:
        raise ValueError(f"the answers in {file} are to other prompts; use another --responses folder")
    return rows


def _generate(args, target, tokenizer, texts, first):
    """New rows of prompts number `first` and following; a prompt's number is the seed of its answer."""
    requests = []
    for i, text in enumerate(texts, first):
        ids = tokenizer.prompt_ids(text)
        context = target.config.block_size
        room = min(args.max_new_tokens, context - len(ids))
        if room < 2:
            raise ValueError(f"prompt {i + 1} has {len(ids)} tokens; the context of this target is {context}")
        temperature = i % 2 if args.temperature is None else args.temperature
        ends = [target.config.eos_id, *tokenizer.ends]
        requests.append(Request(ids, room, Sampling(temperature, seed=i), ends))
    generations = Engine(target, Lockstep, magpie.TOGETHER).generate(requests)
    return [[g.prompt_ids, g.token_ids, r.sampling.temperature] for g, r in zip(generations, requests)]


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
        for row in sorted(order[i:i + 64], key=lambda row: lengths[row]):
            if batch and (len(batch) + 1) * lengths[row] > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(row)
        batches.append(batch)
    rng.shuffle(batches)
    return batches
