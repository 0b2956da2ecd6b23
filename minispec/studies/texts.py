"""Long texts for SpecGen's studies, as token ids: what people wrote, and what the model itself wrote."""
import glob
import os
import random

from minispec.core.requests import Request
from minispec.core.verify import Sampling
from minispec.core.engine import Engine, Lockstep
from minispec.data import prompts, tasks
from minispec.tools.files import blame, read_rows

SHARES = 5              # texts of a kind have different turns: each a share of all that there are
QUESTIONS = 80          # the first ones of Spec-Bench are MT-bench
OWN_SHARES = 3          # texts that the model's answers to them make
OWN = 2000              # tokens at most of each answer
NGRAM = 8
FILES = {"reasoning": "reasoning_gym_traces/traces_correct.jsonl", "chat": "instruct/instruction-data.json"}


def repeated(ids, n):
    """Share of the last n of `ids` that end eight tokens which were there before."""
    grams = [tuple(ids[i - NGRAM:i]) for i in range(NGRAM, len(ids) + 1)]
    newest = range(len(grams) - n, len(grams))
    return sum(grams[i] in grams[:i] for i in newest) / n


def kinds(tokenizer):
    """The kinds of text that there are for a model."""
    return ("trace",) if tokenizer.ours else ("reasoning", "chat", "book", "own answers")


def text(kind, number, length, model, tokenizer, data):
    """A text of a kind, by number: `length` ids, or ValueError."""
    if kind == "trace":
        problem = tasks.make("trace", number, "heldout", tasks.lines_for(length))
        ids = tokenizer.prompt_ids(problem.prompt) + tokenizer.encode(problem.think)
    elif not data:
        raise ValueError("real texts are read from a data folder: give --data DIR or set MINISPEC_DATA")
    elif kind == "book":
        books = os.path.join(data, "standardebooks", "*.txt")
        files = sorted(glob.glob(books))
        if number >= len(files):
            raise ValueError(f"of {books} there are {len(files)}; {number + 1} are needed")
        with open(files[number], encoding="utf-8") as f:
            # Not the first chapter; some five characters are a token.
            ids = tokenizer.encode(f.read()[20_000:20_000 + 8 * length])
    elif kind == "own answers":
        ids = own_answers(number, length, model, tokenizer, data)
    else:
        turns = turns_of(kind, data)
        random.Random(0).shuffle(turns)
        turns = ((asked, tokenizer.encode(said)) for asked, said in turns[number::SHARES])
        ids = conversation(turns, tokenizer, length)
    if len(ids) < length:
        raise ValueError(f"the text of the kind {kind} has {len(ids)} tokens; {length} are needed")
    return ids[:length]


def conversation(turns, tokenizer, length):
    """Ids of a chat of turns (question, ids of its answer), as many as `length` needs."""
    messages, n = [], 0
    for asked, said in turns:
        messages += [tokenizer.asked(asked), {"role": "assistant", "content": said}]
        n += len(said)
        if n >= length:
            break
    return tokenizer.chat_ids(messages)


def turns_of(kind, data):
    """[(question, answer)]: chains of thought, which are solutions by several models, or short answers by
    people and a large model."""
    file = os.path.join(data, FILES[kind])
    with blame(file):
        rows = [row for _, row in read_rows(file)]
        if kind == "chat":
            return [(f"{row['instruction']}\n{row['input']}", row["output"]) for row in rows]
        # One answer to each question: several models agree too well.
        return list({row["question"]: row["response"] for row in rows}.items())


def own_answers(number, length, model, tokenizer, data):
    """A conversation whose answers the model samples itself, at the paper's temperature, to questions of
    MT-bench."""
    asked = [p.prompt for p in prompts.load_named("spec_bench", data)[:QUESTIONS][number::OWN_SHARES]]
    requests = [Request(tokenizer.prompt_ids(text), OWN, Sampling(0.65, seed=i), tokenizer.ends)
                for i, text in enumerate(asked)]
    for _ in Engine(model, Lockstep, len(asked)).stream(requests):
        if sum(len(r.generation.token_ids) for r in requests) >= length:
            break
    answers = [r.generation.token_ids for r in requests]
    return conversation(zip(asked, answers), tokenizer, length)
