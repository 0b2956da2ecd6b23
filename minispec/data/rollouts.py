"""Let a target answer prompts, and record its hidden states, argmax and log-probabilities on the way.

    python -m minispec.data.rollouts --target FOLDER --out DIR

It prints the files of all shards. Each shard is there as a whole or not at all, so an interrupted command
goes on where it was:

    own-00000.json             prompts that the target wrote itself (magpie.py)
    train-0-128.safetensors    answers to 128 prompts: the ids of each text, and for every token the target's
                               final hidden state and those of two lower layers; for the answer's tokens its
                               argmax, and the token's log-probability
    heldout-0-40.safetensors   the same of held-out prompts, which no training reads
    given-0-128.safetensors    the same of answers that others wrote (--given)

Nothing is decoded to text and read back, and the end of text stays where it was chosen. A greedy answer ends
where it starts to loop. The trainings of drafters run this command first; data/recorded.py reads the shards.
"""
import gc
import itertools
import os
import sys
import time
from functools import partial

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tqdm import tqdm

from minispec.core.gpt import dense_attend
from minispec.core.drafters import Drafter
from minispec.core.engine import Engine, SyncScheduler
from minispec.core.requests import Request
from minispec.core.verify import Sampling, argmax
from minispec.core.draft_head import feature_layers_of
from minispec.data import magpie, prompts, tasks
from minispec.data.loops import loops
from minispec.data.recorded import LONGEST, add_answers, parsed
from minispec.data.tokenizer import Tokenizer
from minispec.tools import checkpoints, training
from minispec.tools.files import opened, replaced
from minispec.tools.script import Parser, add_device, run_main

SHARD = 128                             # prompts answered between two writes
TEMPERATURES = (0, 0.7, 0, 1)           # of the target's answers, in turn


def parse_args():
    p = Parser(__doc__)
    add_answers(p)
    p.add_argument("--out", required=True, metavar="DIR", help="folder of the answers")
    p.add_argument("--minutes", type=float,
                   help="minutes for all answers; the first shard is always made (default: no limit)")
    add_device(p)
    return parsed(p)


# -- prompts -------------------------------------------------------------------------------------------------

def procedural(split):
    """Problems of our own families in turn, without end."""
    for i in itertools.count():
        for family in tasks.FAMILIES:
            yield tasks.make(family, i, split).prompt


def prompts_of(files, split, own):
    """The prompts of a split, the files in turn; without files the prompts of `own`, an iterator. A file's
    prompts of several turns are cut to the first turn."""
    sources = [[p.prompt for p in prompts.load_prompts(file)] for file in files] or [own]
    for text in itertools.chain.from_iterable(itertools.zip_longest(*sources)):
        if text is not None and tasks.is_heldout(text) == (split == "heldout"):
            yield text


def fitting(texts, tokenizer, context, left_out):
    """The ids of the texts that leave room for an answer in a context; the others go to the list left_out."""
    for text in texts:
        ids = tokenizer.prompt_ids(text)
        if len(ids) < context:
            yield ids
        else:
            left_out.append(text)


# -- a text and the target's states -------------------------------------------------------------------------

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
    uses_hidden_states = True

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


# -- shards --------------------------------------------------------------------------------------------------

def answer(args, target, tokenizer, split, n):
    """Yields the files of the target's answers to n prompts, or to fewer, where the minutes are over."""
    over = time.time() + 60 * args.minutes if args.minutes is not None else float("inf")
    own = procedural(split) if tokenizer.is_puzzle_model else magpie.written(target, tokenizer, args.out)
    context, left_out = target.config.block_size, []
    asked = fitting(prompts_of(args.prompt_file, split, own), tokenizer, context, left_out)
    for start in tqdm(range(0, n, SHARD), desc=f"{split} answers", unit="shard"):
        end = min(start + SHARD, n)
        file = f"{args.out}/{split}-{start}-{end}.safetensors"
        if start and time.time() > over and not os.path.exists(file):
            break
        ids = list(itertools.islice(asked, end - start))
        yield shard(file, ids, answers(args, target, tokenizer, ids, start))
    if left_out:
        print(f"{len(left_out)} {split} prompts are longer than the context of {context} tokens and left out",
              file=sys.stderr)


def answers(args, target, tokenizer, asked, first):
    """The texts of the target's answers to prompts number `first` and following. A prompt's number is the
    seed of its answer."""
    requests = []
    for i, ids in enumerate(asked, first):
        room = min(args.max_new_tokens, target.config.block_size - len(ids))
        temperature = TEMPERATURES[i % len(TEMPERATURES)] if args.temperature is None else args.temperature
        requests.append(Request(ids, room, Sampling(temperature, seed=i), tokenizer.ends))
    # The states come from the forwards that decode.
    recorder = Recorder(target)
    engine = Engine(target, partial(SyncScheduler, drafter=recorder, k=1), magpie.TOGETHER)
    for request, _ in engine.stream(requests):
        if request.sampling.temperature == 0 and loops(request.generation.token_ids):
            request.cancel()
    del engine
    gc.collect()                         # an engine and its scheduler hold each other, and the cache is large
    for request in requests:
        yield recorder.text(target, request)


def given(args, target, tokenizer):
    """Yields the files of --given: prompts with answers that somebody else wrote. The target's distributions
    at every token are as good to learn from, though it would seldom come there by itself. ValueError where an
    answer is missing."""
    rows = []
    for i, p in enumerate(prompts.load_prompts(args.given), 1):
        said = p.think + p.answer                        # of GSM8K, the steps and the result
        if not said:
            raise ValueError(f"{args.given}: prompt {i} has no answer")
        if not tasks.is_heldout(p.prompt):
            ids = tokenizer.encode(said) + tokenizer.ends[:1]
            rows.append((tokenizer.prompt_ids(p.prompt), ids[:args.max_new_tokens], 1))
    rows = rows[:args.given_answers]
    for start in tqdm(range(0, len(rows), SHARD), desc="given answers", unit="shard"):
        some = rows[start:start + SHARD]
        file = f"{args.out}/given-{start}-{start + len(some)}.safetensors"
        yield shard(file, [prompt + ids for prompt, ids, _ in some], (read(target, *row) for row in some))


def shard(file, begin, made):
    """The name of a shard's file. If it is not there, it is written from `made`, an iterator of texts.
    ValueError where its texts do not begin like those in `begin`."""
    if not os.path.exists(file):
        tensors = {f"{i}.{name}": x for i, text in enumerate(made) for name, x in text.items()}
        with replaced(file) as temporary:
            save_file(tensors, temporary)
    with opened(file) as tensors:
        for i, ids in enumerate(begin):
            if tensors.get_tensor(f"{i}.ids")[:len(ids)].tolist() != ids[:LONGEST]:
                raise ValueError(f"{file} is of other texts; use another --responses folder")
    return file


def main():
    args = parse_args()
    target = checkpoints.load(args.target, args.device, training.fast_dtype(args.device))
    tokenizer = Tokenizer.load(args.target)
    # Answers in the folder must be the same target's.
    training.same_settings(args.out, target=checkpoints.fingerprint(target), temperature=args.temperature,
                           max_new_tokens=args.max_new_tokens)
    files = [*answer(args, target, tokenizer, "heldout", args.heldout),
             *answer(args, target, tokenizer, "train", args.prompts)]
    if args.given:
        files += given(args, target, tokenizer)
    print(*files, sep="\n")


if __name__ == "__main__":
    run_main(main, "interrupted; the same command goes on")
