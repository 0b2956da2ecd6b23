"""Let a target answer prompts, and record its hidden states, argmax and log-probabilities at every token.

    python -m minispec.data.rollouts --target FOLDER --out DIR

It prints the files of all shards. Each shard is there as a whole or not at all, so an interrupted command
goes on where it was:

    own-00000.json             prompts that the target wrote itself (magpie.py)
    train-0-128.safetensors    answers to 128 prompts: the ids of each text, and for every token the target's
                               final hidden state and those of two lower layers; for the answer's tokens its
                               argmax, and the token's log-probability. On a GPU a shard has 1,024 prompts
                               and no states
    heldout-0-40.safetensors   the same of held-out prompts, which no training reads
    given-0-128.safetensors    the same of answers that others wrote (--given)

No answer is decoded to text and read back, and the end of text stays where it was chosen. A greedy answer
ends where it starts to loop. The trainings of drafters run this command first; data/recorded.py reads the
shards.
"""
import itertools
import os
import sys
import time

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from minispec.core.engine import Engine
from minispec.core.requests import Request
from minispec.core.scheduler import SyncScheduler
from minispec.core.verify import Sampling
from minispec.data import loops, magpie, prompts, tasks
from minispec.data.magpie import TOGETHER
from minispec.data.recorded import LONGEST, OWN, add_answers, parsed, states
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
                   help="minutes for all answers; the first shard of each split is always made (default: no "
                        "limit)")
    p.add_argument("--part", default="0/1", metavar="I/N",
                   help="write every N-th shard alone, from number I on: N processes share the work")
    add_device(p)
    args = parsed(p)
    args.part = part_of(args.part)
    return args


def part_of(text):
    """(I, N) of "I/N"."""
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and int(i) < int(n)):
        raise ValueError(f"part must be I/N, with I from 0 to N - 1, got {text}")
    return int(i), int(n)


# -- prompts -------------------------------------------------------------------------------------------------

def procedural(split):
    """Problems of our own families in turn, without end."""
    for i in itertools.count():
        for family in tasks.FAMILIES:
            yield tasks.make(family, i, split).prompt


def prompts_of(files, split, own):
    """The prompts of a split, the files in turn; "own", or no file, is the iterator `own`. A file's prompts
    of several turns are cut to the first turn."""
    sources = [own if file == OWN else [p.prompt for p in prompts.load_prompts(file)]
               for file in files or [OWN]]
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

def read(target, prompt, answer, temperature):
    """A text, cut to LONGEST tokens or the target's context, as the fields of a Batch. The target reads it
    for its states; on a GPU each training step does so."""
    ids = torch.tensor((prompt + answer)[:min(LONGEST, target.config.block_size)], device=target.device)
    learn = torch.arange(len(ids), device=ids.device) >= len(prompt)
    temperature = torch.tensor(float(temperature), device=ids.device)
    text = {"ids": ids, "learn": learn, "temperature": temperature}
    if not ids.is_cuda:
        text |= {name: x[0] for name, x in states(target, ids[None], learn[None], temperature[None]).items()}
    return {name: (x.bfloat16() if name in ("lower", "hidden") else x).cpu().contiguous()
            for name, x in text.items()}


# -- shards --------------------------------------------------------------------------------------------------

def answer(args, engine, tokenizer, split, n):
    """Yields the files of the target's answers to n prompts, or to fewer, where the minutes are over. Of
    --part I/N only every N-th file is written."""
    target = engine.model
    own = procedural(split) if tokenizer.is_puzzle_model else magpie.written(target, tokenizer, args.out)
    context, left_out = min(target.config.block_size, LONGEST), []
    asked = fitting(prompts_of(args.prompt_file, split, own), tokenizer, context, left_out)
    size = SHARD if target.device.type == "cpu" else 8 * SHARD
    part, parts = args.part
    for number, start in enumerate(tqdm(range(0, n, size), desc=f"{split} answers", unit="shard")):
        end = min(start + size, n)
        file = f"{args.out}/{split}-{start}-{end}.safetensors"
        if start and time.time() > args.over and not os.path.exists(file):
            break
        ids = list(itertools.islice(asked, end - start))
        if not ids:                                      # the prompts have run out
            break
        if number % parts == part:
            yield shard(file, ids, answers(args, engine, tokenizer, ids, start))
    if left_out:
        print(f"{len(left_out)} {split} prompts of {context} tokens or more are left out", file=sys.stderr)


def answers(args, engine, tokenizer, asked, first):
    """The texts of the target's answers to prompts number `first` and following. A prompt's number is the
    seed of its answer."""
    target, requests = engine.model, []
    for i, ids in enumerate(asked, first):
        room = min(args.max_new_tokens, min(target.config.block_size, LONGEST) - len(ids))
        temperature = TEMPERATURES[i % len(TEMPERATURES)] if args.temperature is None else args.temperature
        requests.append(Request(ids, room, Sampling(temperature, seed=i), tokenizer.ends))
    for request, g in zip(requests, loops.generate(engine, requests)):
        yield read(target, g.prompt_ids, g.token_ids, request.sampling.temperature)


def given(args, target, tokenizer):
    """The texts of --given as (prompt ids, answer ids): prompts with answers that somebody else wrote. The
    target's distributions at every token are as good to learn from, though it would seldom come there by
    itself. ValueError where an answer is missing."""
    rows = []
    for i, p in enumerate(prompts.load_prompts(args.given), 1):
        said = p.think + p.answer                        # of GSM8K, the steps and the result
        if not said:
            raise ValueError(f"{args.given}: prompt {i} has no answer")
        if not tasks.is_heldout(p.prompt):
            ids, prompt_ids = tokenizer.encode(said) + tokenizer.ends[:1], tokenizer.prompt_ids(p.prompt)
            rows.append((prompt_ids, ids[:args.max_new_tokens]))
            if max(prompt_ids + ids) >= target.config.vocab_size:
                raise ValueError(f"{args.given}: prompt {i} has tokens for which {args.target} has no weights")
    return rows


def shard(file, begin, made):
    """The name of a shard's file. If it is not there, it is written from `made`, an iterator of texts.
    ValueError where its texts do not begin like those in `begin`."""
    if not os.path.exists(file):
        tensors = {f"{i}.{name}": x for i, text in enumerate(made) for name, x in text.items()}
        with replaced(file) as temporary:
            save_file(tensors, temporary)
    with opened(file) as tensors:
        texts = {name: tensors.get_tensor(name).tolist() for name in tensors.keys() if name.endswith(".ids")}
    wanted = {f"{i}.ids": ids for i, ids in enumerate(begin)}
    # A text goes on behind its prompt, or is cut.
    if texts.keys() != wanted.keys() or any(text[:len(wanted[name])] != wanted[name][:len(text)]
                                            for name, text in texts.items()):
        raise ValueError(f"{file} holds other texts; use another folder for the answers")
    return file


def main():
    args = parse_args()
    target = checkpoints.load(args.target, args.device, training.fast_dtype(args.device))
    tokenizer = Tokenizer.load(args.target)
    # Answers in the folder must be the same target's.
    training.same_settings(args.out, args, "temperature", "max_new_tokens",
                           target=checkpoints.fingerprint(target))
    # Where prompts have a date, it stays the day on which the folder was begun (copies must keep file times).
    tokenizer.now = time.localtime(os.path.getmtime(f"{args.out}/settings.json"))
    rows = given(args, target, tokenizer) if args.given else []          # not counted in --minutes
    args.over = time.time() + 60 * args.minutes if args.minutes is not None else float("inf")
    together = min(TOGETHER if args.device == "cpu" else 2 * TOGETHER, max(args.prompts, args.heldout))
    # One pool from the start: while a pool grows, the old one is there too.
    most = min(LONGEST, target.config.block_size)
    longest = min(args.max_new_tokens + magpie.LONGEST, most)
    engine = Engine(target, SyncScheduler, together, max(together * longest, most))
    files = [*answer(args, engine, tokenizer, "heldout", args.heldout)]
    if not files and args.part[1] == 1:
        raise ValueError("no prompt is held out (about one in eight is) and fits; give more")
    files += answer(args, engine, tokenizer, "train", args.prompts)
    # Given answers are read at temperature 1.
    part, parts = args.part
    for start in tqdm(range(part * SHARD, len(rows), parts * SHARD), desc="given answers", unit="shard"):
        some = rows[start:start + SHARD]
        file = f"{args.out}/given-{start}-{start + len(some)}.safetensors"
        begin = [prompt + ids for prompt, ids in some]
        files.append(shard(file, begin, (read(target, *row, 1) for row in some)))
    print("".join(f"{file}\n" for file in files), end="")


if __name__ == "__main__":
    run_main(main, "interrupted; the same command goes on", "--max-new-tokens")
