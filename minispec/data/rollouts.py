"""What drafters are trained on: answers, most of all the target's own, and what it knew at every token.

A folder holds three kinds of shards, each of which is there as a whole or not at all, so that an interrupted
run goes on where it was:

    own-00000.json             prompts that the target wrote itself (magpie.py)
    train-0-128.safetensors    answers to 128 prompts: the ids of each text, and of every token the target's
                               final hidden state and those of two lower layers; of the answer's tokens its
                               argmax, and the log-probability that it gave the token
    given-0-128.safetensors    the same of answers that others wrote (--given)

They are made once and read by every arm, seed and prefix. The states are mapped, not loaded, so an epoch
costs the drafter alone. Prompts of the split "heldout" are never trained on. Nothing is decoded to text and
read back, and the end of text stays where it was chosen. A greedy answer ends where it starts to loop.

The training of a drafter makes its shards. For train_cdlm.py this command makes them:

    python -m minispec.data.rollouts --target FOLDER --out DIR
"""
import itertools
import os
import time
from collections import Counter
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from minispec import SHIPPED
from minispec.core.attention import dense_attend
from minispec.core.drafters import Drafter
from minispec.core.engine import Engine, Lockstep
from minispec.core.requests import Request
from minispec.core.verify import Sampling, argmax
from minispec.core.words import DRAFT_VOCAB, feature_layers_of, most_frequent, restrict
from minispec.data import magpie, prompts, tasks
from minispec.data.loops import loops
from minispec.data.tokenizer import Tokenizer
from minispec.tools import checkpoints, training
from minispec.tools.files import blame, read_tensors, replaced
from minispec.tools.script import Parser, add_device, run_main

SHARD = 128                 # prompts answered between two writes
LONGEST = 1536              # tokens of a training text; longer ones are cut
ROUND = 16
TEMPERATURES = (0, 0.7, 0, 1)           # of the target's answers, in turn


# -- settings ------------------------------------------------------------------------------------------------

def add_answers(parser):
    """The settings of the target's answers."""
    add = parser.add_argument
    add("--target", default=SHIPPED, metavar="MODEL",
        help="the model that answers: a folder, a GGUF file, or smollm2 (default %(default)s)")
    add("--prompt-file", metavar="FILE", nargs="+", default=[],
        help="JSON lines of prompts to answer (default: prompts that the target writes itself)")
    add("--prompts", type=int, default=4000,
        help="number of training prompts; fewer are a prefix of more (default 4000)")
    add("--given", metavar="FILE",
        help="JSON lines with a prompt and an answer that somebody else wrote: the target reads them, which "
             "takes a fifth of the time of an answer of its own (not counted in --minutes)")
    add("--given-answers", type=int, metavar="N",
        help="read the first N of these answers (default: all)")
    add("--heldout", type=int, default=40, help="number of held-out prompts for the estimates (default 40)")
    add("--temperature", type=float, help="of the target's answers (default: 0, 0.7, 0, 1 in turn)")
    add("--max-new-tokens", type=int, default=1024, help="limit of an answer (default 1024)")


def add_arguments(parser):
    """The settings of a drafter's training: which answers to train on, and in what batches."""
    training.add_arguments(parser, lr=2e-3, save_every=200)
    add_answers(parser)
    add = parser.add_argument
    add("--minutes", type=float, help="time for all: half for the answers, half for the training")
    add("--responses", metavar="DIR", help="folder of the target's answers (default: OUT/responses)")
    add("--last-layer", action="store_true",
        help="the drafter reads the target's last layer alone (default: a low, a middle and the last one)")
    add("--draft-vocab", type=int, default=DRAFT_VOCAB, metavar="N",
        help="draft only the N tokens that the answers have most (default %(default)s; 0: all)")
    add("--tokens", type=float, default=8e6, help="training tokens in all")
    add("--batch-tokens", type=int, default=512, help="tokens of an optimiser step (default 512)")


def parsed(parser):
    """The settings of the command line. ValueError where a number is out of range, or a file is no file of
    prompts."""
    args = training.parsed(parser)
    # What is wrong fails here, before the work.
    Sampling(args.temperature or 0)
    for file in filter(None, [*args.prompt_file, args.given]):
        prompts.load_prompts(file)
    return args


# -- prompts -------------------------------------------------------------------------------------------------

def procedural(split):
    """Problems of our own families in turn, without end."""
    for i in itertools.count():
        for family in tasks.FAMILIES:
            yield tasks.make(family, i, split).prompt


def prompts_of(files, split, own):
    """The prompts of a split, the files in turn; without files those of `own`, an iterator. Of several turns
    in a file, the first."""
    sources = [[p.prompt for p in prompts.load_prompts(file)] for file in files] or [own]
    for text in itertools.chain.from_iterable(itertools.zip_longest(*sources)):
        if text is not None and tasks.is_heldout(text) == (split == "heldout"):
            yield text


# -- answers and what the target knew ------------------------------------------------------------------------

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


def padded(texts, device="cpu"):
    """The Batch of texts, see `read`. S is a multiple of ROUND, so that few shapes occur."""
    columns = {}
    for name in Batch._fields:
        column = pad_sequence([text[name] for text in texts], batch_first=True)
        more = -column.shape[1] % ROUND
        column = F.pad(column, [0, 0] * (column.ndim - 2) + [0, more]).to(device)
        columns[name] = column.float() if name in ("lower", "hidden") else column
    return Batch(**columns)


@torch.inference_mode()
def read(target, prompt, answer, temperature):
    """A text, cut to LONGEST tokens, as the fields of a Batch: the target reads it in one forward."""
    ids = torch.tensor(prompt + answer, device=target.device)[:LONGEST]
    positions = torch.arange(len(ids), device=target.device)
    layers = feature_layers_of(target.config)
    features = target(ids[None], positions[None], dense_attend(), layers)[0]
    return known(target, ids, len(prompt), features, temperature)


@torch.inference_mode()
def known(target, ids, n_prompt, features, temperature):
    """The fields of a Batch, of one text: ids (n,), the first n_prompt of them the prompt's, and features (n,
    (F + 1) * C) of each. log_p: of each token of the answer at this temperature; of a point mass, at 0, it is
    0."""
    width = target.config.d_model
    # The rows in front of the answer's tokens guess them.
    first = max(n_prompt - 1, 0)
    logits = target.logits(features[first:-1, -width:]).float()
    log_p = torch.zeros(len(ids), device=ids.device)
    best = torch.zeros_like(ids)
    if len(logits):
        best[first:-1] = argmax(logits)
        if temperature:
            log_p[first + 1:] = -F.cross_entropy(logits / temperature, ids[first + 1:], reduction="none")
    learn = torch.arange(len(ids), device=ids.device) >= n_prompt
    features = features.bfloat16()
    text = {"ids": ids, "learn": learn, "log_p": log_p, "best": best,
            "lower": features[:, :-width], "hidden": features[:, -width:]}
    return {name: x.cpu().contiguous() for name, x in text.items()}


class Recorder(Drafter):
    """Keeps the target's states of every request that is decoded with it, and never drafts."""
    reads = True

    def __init__(self, target):
        self.feature_layers = feature_layers_of(target.config)
        self.rows = {}                                   # request -> [features]

    def observe(self, request, features):
        self.rows.setdefault(request, []).append(features.clone())

    def text(self, target, request):
        """The fields of a Batch. No forward has read the last token, and nobody needs its states."""
        features = torch.cat(self.rows.pop(request))
        features = torch.cat([features, features.new_zeros(1, features.shape[1])])[:LONGEST]
        ids = torch.tensor(request.tokens[:LONGEST], device=target.device)
        n_prompt = len(request.generation.prompt_ids)
        return known(target, ids, n_prompt, features, request.sampling.temperature)


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
    out = []
    for start in tqdm(range(0, n, SHARD), desc=f"{split} answers", unit="shard"):
        end = min(start + SHARD, n)
        file = f"{args.responses}/{split}-{start}-{end}.safetensors"
        if out and time.time() > over and not os.path.exists(file):
            break
        ids = [tokenizer.prompt_ids(text) for text in itertools.islice(asked, end - start)]
        out += _shard(file, ids, _answers(args, target, tokenizer, ids, start), least)
    return out


def _answers(args, target, tokenizer, asked, first):
    """The texts of the target's answers to prompts number `first` and following. A prompt's number is the
    seed of its answer."""
    context = target.config.block_size
    requests = []
    for i, ids in enumerate(asked, first):
        room = min(args.max_new_tokens, context - len(ids))
        if room < 1:
            raise ValueError(f"prompt {i + 1} has {len(ids)} tokens; the context of this target is {context}")
        temperature = TEMPERATURES[i % len(TEMPERATURES)] if args.temperature is None else args.temperature
        requests.append(Request(ids, room, Sampling(temperature, seed=i), tokenizer.ends))
    # The states come from the forwards that decode.
    recorder = Recorder(target)
    engine = Engine(target, partial(Lockstep, drafter=recorder, k=1), magpie.TOGETHER)
    for request, _ in engine.stream(requests):
        if request.sampling.temperature == 0 and loops(request.generation.token_ids):
            request.cancel()
    for request in requests:
        yield recorder.text(target, request)


def _given(args, target, tokenizer, least):
    """The texts of --given: a prompt, and an answer that somebody else wrote. The target's distributions at
    every token are as good to learn from, though it would seldom come there by itself. ValueError where an
    answer is missing."""
    rows = []
    for i, p in enumerate(prompts.load_prompts(args.given), 1):
        said = p.think + p.answer                        # of GSM8K, the steps and the result
        if not said:
            raise ValueError(f"{args.given}: prompt {i} has no answer")
        if not tasks.is_heldout(p.prompt):
            answer = tokenizer.encode(said) + tokenizer.ends[:1]
            rows.append((tokenizer.prompt_ids(p.prompt), answer[:args.max_new_tokens], 1))
    rows = rows[:args.given_answers]
    out = []
    for start in tqdm(range(0, len(rows), SHARD), desc="given answers", unit="shard"):
        some = rows[start:start + SHARD]
        file = f"{args.responses}/given-{start}-{start + len(some)}.safetensors"
        made = (read(target, *row) for row in some)
        out += _shard(file, [prompt + answer for prompt, answer, _ in some], made, least)
    return out


def _shard(file, begin, made, least):
    """The texts of a shard that have more than `least` tokens of an answer. If its file is not there, it is
    written from `made`, an iterator of texts. ValueError where its texts do not begin like those in `begin`.
    """
    if not os.path.exists(file):
        tensors = {f"{i}.{name}": x for i, text in enumerate(made) for name, x in text.items()}
        with replaced(file) as temporary:
            save_file(tensors, temporary)
    tensors = read_tensors(file)
    out = []
    for i, ids in enumerate(begin):
        with blame(file):
            text = {name: tensors[f"{i}.{name}"] for name in Batch._fields}
        if text["ids"][:len(ids)].tolist() != ids[:LONGEST]:
            raise ValueError(f"{file} is of other texts; use another --responses folder")
        if text["learn"].sum() > least:
            out.append(text)
    return out


def both_splits(args, target, least=0):
    """(held-out texts, training texts): what the target says to the prompts, in --responses."""
    tokenizer = Tokenizer.load(args.target)
    # Answers in the folder must be the same target's.
    training.same_settings(args.responses, target=checkpoints.fingerprint(target),
                           temperature=args.temperature, max_new_tokens=args.max_new_tokens)
    heldout = _texts(args, target, tokenizer, "heldout", args.heldout, 0)
    texts = _texts(args, target, tokenizer, "train", args.prompts, least)
    if args.given:
        texts += _given(args, target, tokenizer, least)
    return heldout, texts


# -- the training --------------------------------------------------------------------------------------------

def start(args, drafter_of, train):
    """What train_prism.py and train_specdiff.py do: train(args, target, model) with the drafter
    drafter_of(args, target), in a folder of its own."""
    dtype = training.fast_dtype(args.device)
    target = checkpoints.load(args.target, args.device, dtype).requires_grad_(False)
    torch.manual_seed(args.seed)
    model = drafter_of(args, target).float()
    with training.locked(args.out):
        train(args, target, model)


class DrafterRun(training.Run):
    """The training of a drafter on what its target says: texts and held-out texts, made now if they are not
    in the folder. Each text has more than `least` tokens of an answer. A new drafter gets its draft
    vocabulary."""

    def __init__(self, args, target, model, least=0):
        args.responses = args.responses or f"{args.out}/responses"
        self.heldout, self.texts = both_splits(args, target, least)
        # The words that it uses.
        answers = [text["ids"][text["learn"]].tolist() for text in self.texts]
        restrict(model, most_frequent(answers, args.draft_vocab, target.config.vocab_size))
        if not self.texts or not self.heldout:
            raise ValueError(f"too few prompts, or none with an answer within {LONGEST} tokens")
        # In which batches they are read.
        lengths = [len(text["ids"]) for text in self.texts]
        self.plan = training.schedule(args.seed, lengths, args.batch_tokens, args.tokens)
        print(f"{len(lengths)} texts, {sum(lengths):,} tokens, {len(self.plan)} steps")
        super().__init__(args, args.out, model, len(self.plan), args.lr,
                         muon=training.fast_dtype(args.device) == torch.bfloat16,
                         minutes=args.minutes and args.minutes / 2)

    def batches(self):
        """(step, its Batch) of the steps that are still missing. tokens: how many are used up; used: their
        share of all."""
        for step in self.steps():
            numbers, self.tokens = self.plan[step]
            self.used = self.tokens / self.plan[-1][1]
            yield step, padded([self.texts[i] for i in numbers], self.args.device)

    @torch.no_grad()
    def heldout_mean(self, estimate):
        """The mean of estimate(Batch), {name: number}, over the held-out texts."""
        total = Counter()
        for i in range(0, len(self.heldout), 4):
            some = self.heldout[i:i + 4]
            with training.bf16(self.args.device):
                means = estimate(padded(some, self.args.device))
            total.update({name: x * len(some) / len(self.heldout) for name, x in means.items()})
        return total


# -- answers alone -------------------------------------------------------------------------------------------

def main():
    parser = Parser(__doc__)
    add_answers(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the answers")
    add_device(parser)
    args = parsed(parser)
    args.responses, args.minutes = args.out, None
    target = checkpoints.load(args.target, args.device, training.fast_dtype(args.device))
    both_splits(args, target)


if __name__ == "__main__":
    run_main(main, "interrupted; the same command goes on")
