"""Recorded answers, the training data of drafters: for every token of a text the target's hidden states, and
for every token of an answer also the target's argmax and the token's log-probability. On a GPU the shards
hold no states, which saves 3.5 KB per token of SmolLM2: each training step computes them again.

minispec/data/rollouts.py makes them, in a separate process, which a training starts first. They lie in a
folder of shards, DIR/train-0-128.safetensors and so on, which every variant, seed and number of prompts
shares. Here they are read: the settings, a batch, and a run through all of them (`DrafterRun`).
"""
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from minispec import SHIPPED
from minispec.core.verify import LEAST_TEMPERATURE, Sampling
from minispec.tools import checkpoints, training
from minispec.tools.files import naming, read_rows, read_tensors

OWN = "own"                 # among prompt files: the prompts that the target writes itself
LONGEST = 1536              # tokens of a training text; longer ones are cut
LOGITS = 4096               # rows whose logits are computed at a time
DRAFT_VOCAB = 4000          # default; a target with fewer tokens needs no draft vocabulary
GROUP = 256                 # rows sorted by length at a time
ROUND = 16                  # padded lengths are a multiple of this, so that few shapes occur
LR = 2e-3                   # at the peak, from scratch; a third of it for a trained drafter
# The settings of `add_answers`, which a training hands on.
OF_ANSWERS = ("target", "prompt_file", "prompts", "given", "heldout", "temperature", "max_new_tokens",
              "device")


# -- settings ------------------------------------------------------------------------------------------------

def add_answers(parser):
    """The settings of the target's answers."""
    add = parser.add_argument
    add("--target", default=SHIPPED, metavar="MODEL",
        help="the model that answers: a folder, a GGUF file, or smollm2 (default %(default)s)")
    add("--prompt-file", metavar="FILE", nargs="+", default=[],
        help="JSON lines of prompts to answer; own: prompts that the target writes itself (default own)")
    add("--prompts", type=int, default=4000,
        help="number of training prompts; fewer are a prefix of more (default %(default)s)")
    add("--given", metavar="FILE",
        help="JSON lines of prompts with given answers, which the target only reads: a fifth of the time of "
             "an answer of its own (not counted in --minutes)")
    add("--heldout", type=int, default=40,
        help="number of held-out prompts for the estimates (default %(default)s)")
    add("--temperature", type=float,
        help="temperature of the target's answers (default: 0, 0.7, 0, 1 in turn)")
    add("--max-new-tokens", type=int, default=1024, help="tokens of an answer at most (default %(default)s)")


def add_arguments(parser):
    """The settings of a drafter's training."""
    training.add_arguments(parser, lr=None, save_every=200)
    add_answers(parser)
    add = parser.add_argument
    add("--minutes", type=float,
        help="minutes in all: half for the answers (again after an interruption), half for the training")
    add("--responses", metavar="DIR", help="folder of the target's answers (default: OUT/responses)")
    add("--last-layer", action="store_true",
        help="read the target's last layer alone (default: a low, a middle and the last layer)")
    add("--draft-vocab", type=int, default=DRAFT_VOCAB, metavar="N",
        help="size of the draft vocabulary: the N most frequent tokens of the answers (default %(default)s; "
             "0: all tokens)")
    add("--tokens", type=float, default=8e6, help="training tokens in all (default 8e6)")
    add("--batch-tokens", type=int, default=512, help="tokens of an optimiser step (default %(default)s)")


def parsed(parser):
    """The settings of the command line. ValueError where a number is out of range, or a file is not JSON
    lines."""
    args = training.parsed(parser)
    # Mistakes show here, before the work.
    Sampling(args.temperature or 0)
    if "responses" in args:                              # not for rollouts.py
        if args.minutes == 0:
            raise ValueError("minutes must be above 0, got 0")
        if args.lr is None:
            args.lr = LR / 3 if args.init else LR
    for file in filter(None, [*args.prompt_file, args.given]):
        if file != OWN:
            read_rows(file)
    return args


# -- choices from the target and its answers -----------------------------------------------------------------

def feature_layers_of(config):
    """The numbers of a low and a middle layer. With the final states in place of a high layer's, they are
    the input of EAGLE-3 (2503.01840)."""
    return tuple(sorted({config.n_layer // 10, config.n_layer // 2}))


def most_frequent(tokens, n, vocab_size):
    """The n tokens (n,) that occur most among `tokens`; None, which means all, where n is 0 or no fewer than
    there are."""
    if not 0 < n < vocab_size:
        return None
    # Then the first tokens that never occur: byte-level BPE numbers its tokens from frequent to rare.
    counts = torch.bincount(tokens, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:n]


# -- texts ---------------------------------------------------------------------------------------------------

class Batch(NamedTuple):
    """Texts padded on the right to S tokens; the answers' tokens are to be learned."""
    ids: torch.Tensor                    # (B, S)
    learn: torch.Tensor                  # (B, S) bool
    log_p: torch.Tensor                  # (B, S) of each token to learn, under the target
    best: torch.Tensor                   # (B, S) the target's argmax, in front of tokens to learn
    lower: torch.Tensor                  # (B, S, F * C) hidden states of its feature_layers
    hidden: torch.Tensor                 # (B, S, C) its final hidden states

    def features(self, config):
        """(B, S, (F + 1) * C), as a drafter of this config reads them in decoding."""
        return torch.cat([self.lower, self.hidden], -1) if config.feature_layers else self.hidden


def padded(texts, device="cpu", target=None):
    """The Batch of texts {field: tensor (S, ..)}. Where some have no states, the target reads them now."""
    read = all("hidden" in text for text in texts)
    columns = {}
    for name in Batch._fields if read else ("ids", "learn"):
        column = pad_sequence([text[name] for text in texts], batch_first=True)
        more = -column.shape[1] % ROUND
        columns[name] = F.pad(column, [0, 0] * (column.ndim - 2) + [0, more]).to(device)
    if not read:
        temperature = torch.stack([text["temperature"] for text in texts]).to(device)
        columns |= states(target, **columns, temperature=temperature)
    columns |= {name: columns[name].float() for name in ("lower", "hidden")}
    return Batch(**columns)


@torch.no_grad()
def states(target, ids, learn, temperature):
    """The other fields of a Batch, from a forward of the target over texts ids (B, S) whose answers were
    sampled at temperature (B,). At temperature 0 the target is a point mass, and log_p is 0."""
    width = target.config.d_model
    features = target(ids, feature_layers=feature_layers_of(target.config))      # (B, S, (F + 1) * C)
    # The rows in front of the answer's tokens guess them.
    learn = learn[:, 1:]                                 # (B, S - 1) whether the token after a row is one
    hidden = features[:, :-1][learn][:, -width:]
    tokens = ids[:, 1:][learn]
    heat = temperature[:, None].expand(learn.shape)[learn]
    best, log_p = [], []
    for some, token, t in zip(*(x.split(LOGITS) for x in (hidden, tokens, heat))):
        logits = target.logits(some).float()
        best.append(logits.argmax(-1))
        loss = F.cross_entropy(logits / t.clamp(min=LEAST_TEMPERATURE)[:, None], token, reduction="none")
        log_p.append(-loss.where(t > 0, 0.0))
    out = {"best": torch.zeros_like(ids), "log_p": torch.zeros(ids.shape, device=ids.device)}
    # A probability stands at its token, a guess in front of it.
    out["best"][:, :-1][learn] = torch.cat(best)
    out["log_p"][:, 1:][learn] = torch.cat(log_p)
    return {**out, "lower": features[..., :-width], "hidden": features[..., -width:]}


def texts_of(file, least=0):
    """The texts of a shard that have more than `least` tokens of an answer. ValueError names a damaged file.
    """
    texts = {}
    with naming(file):
        for name, x in read_tensors(file).items():
            number, field = name.split(".")
            texts.setdefault(int(number), {})[field] = x
        return [text for _, text in sorted(texts.items()) if text["learn"].sum() > least]


def record(args):
    """Let the target write the answers that --responses lacks (data/rollouts.py). Returns the files of all
    shards. Ends with the exit code of that process where it fails."""
    command = [sys.executable, "-m", "minispec.data.rollouts", "--out", args.responses]
    for name in OF_ANSWERS:
        value = getattr(args, name)
        if value not in (None, []):
            values = value if isinstance(value, list) else [value]
            command += [f"--{name.replace('_', '-')}", *map(str, values)]
    if args.minutes:
        # Once the training has begun, no more answers are made.
        begun, minutes = Path(args.out, "begun"), str(args.minutes / 2)
        done = os.path.exists(f"{args.out}/resume.pt") or begun.exists() and begun.read_text() == minutes
        command += ["--minutes", "0" if done else minutes]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)
    if done.returncode < 0:
        raise ValueError(f"the process that writes the answers was killed by signal {-done.returncode}, "
                         "perhaps because memory ran out; try a smaller --max-new-tokens and other --responses")
    if done.returncode:
        sys.exit(done.returncode)
    if args.minutes:
        begun.write_text(minutes)
    return done.stdout.splitlines()


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
    """Every row once, in batches of about `batch_tokens` padded tokens, shuffled; a longer text is alone."""
    order = rng.sample(range(len(lengths)), len(lengths))
    batches = []
    for i in range(0, len(order), GROUP):
        # Not all rows are sorted, so that batches differ from epoch to epoch.
        batch = []
        for row in sorted(order[i:i + GROUP], key=lengths.__getitem__):
            if batch and (len(batch) + 1) * lengths[row] > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(row)
        batches.append(batch)
    rng.shuffle(batches)
    return batches


# -- the training --------------------------------------------------------------------------------------------

def begin(args, drafter_of):
    """(target, the drafter to train): drafter_of(args, target), in fp32."""
    dtype = training.fast_dtype(args.device)
    target = checkpoints.load(args.target, args.device, dtype).requires_grad_(False)
    torch.manual_seed(args.seed)
    return target, drafter_of(args, target).float()


class DrafterRun(training.Run):
    """The training of a drafter on texts with more than `least` tokens of an answer; some are held out. The
    drafter gets the draft vocabulary of these answers."""

    def __init__(self, args, model, least=0):
        args.responses = args.responses or f"{args.out}/responses"
        self.heldout, self.texts = [], []
        for file in record(args):
            if Path(file).name.startswith("heldout"):
                self.heldout += texts_of(file)
            else:
                self.texts += texts_of(file, least)
        if not self.texts or not self.heldout:
            raise ValueError(f"too few prompts, or none with an answer within {LONGEST} tokens")
        tokens = torch.cat([text["ids"][text["learn"]] for text in self.texts])
        model.restrict(most_frequent(tokens, args.draft_vocab, model.config.vocab_size))
        # The batches of all steps.
        lengths = [len(text["ids"]) for text in self.texts]
        self.plan = schedule(args.seed, lengths, args.batch_tokens, args.tokens)
        # It is saved and compared: other trainings may add answers to the folder.
        args.recorded_tokens = sum(lengths)
        print(f"{len(lengths)} texts, {args.recorded_tokens:,} tokens, {len(self.plan)} steps")
        super().__init__(args, args.out, model, len(self.plan), args.lr,
                         args.minutes and args.minutes / 2)

    def batches(self):
        """(step, its Batch) of the steps that are still missing. tokens: tokens used so far; used: their
        share of all."""
        for step in self.steps():
            numbers, self.tokens = self.plan[step]
            self.used = self.tokens / self.plan[-1][1]
            yield step, padded([self.texts[i] for i in numbers], self.args.device, self.model.target)

    @torch.no_grad()
    def heldout_mean(self, estimate):
        """The mean of estimate(Batch), {name: number}, over the held-out texts; those of a batch of four share
        its estimate."""
        total = Counter()
        for i in range(0, len(self.heldout), 4):
            some = self.heldout[i:i + 4]
            with training.bf16(self.args.device):
                means = estimate(padded(some, self.args.device, self.model.target))
            total.update({name: x * len(some) / len(self.heldout) for name, x in means.items()})
        return total
