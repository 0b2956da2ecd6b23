"""Training text of our own models: a seeded stream of procedural problems, packed into sequences.

The loss is taken on responses: prompts are random by construction and nothing can be learned from predicting
them. Every sequence starts with the beginning-of-text token, which occurs nowhere else, so heads that find
nothing to fetch have a place to look.
"""
import random

import torch

from minispec.data import tasks

WEIGHTS = (0.40, 0.12, 0.12, 0.20, 0.16)       # how often each of tasks.FAMILIES is drawn
TOKENS_PER_LINE = 48                           # of a `trace` program: 10 in the prompt, 38 in the chain


def draw(rng, max_tokens, longest):
    """A random training problem. `trace` programs get as long as max_tokens allows: log-uniform, or the full
    length where `longest`."""
    family = "trace" if longest else rng.choices(tasks.FAMILIES, WEIGHTS)[0]
    # Sizes from the trained range, as far as the tokens allow.
    low, high = tasks.SIZES[family]
    if family == "trace":
        low = 3
        lines = int(max_tokens / TOKENS_PER_LINE)
        high = max(min(lines, tasks.TRACE_MAX), 4)
        size = high if longest else int(low * (high / low) ** rng.random())
    else:
        high = max(low, round(high * min(max_tokens / 768, 1)))
        size = rng.randint(low, high)
    return tasks.make(family, rng.randrange(1 << 40), "train", size)


def encode(tokenizer, problem):
    """(ids, learn): token ids of one problem, and whether each is a target of the loss."""
    head = tokenizer.prompt_ids(problem.prompt)
    body = tokenizer.response_ids(problem)
    return head + body, [False] * len(head) + [True] * len(body)


def sequence(tokenizer, seed, n, length):
    """Sequence number n of `length` + 1 tokens: (tokens, learn). It depends on its arguments alone: training
    resumes exactly."""
    rng = random.Random(f"{seed}/{n}/{length}")
    ids = [tokenizer.special["<|bos|>"]]
    learn = [False]
    # Most long sequences begin with one program that fills them; the rest are packed problems.
    longest = length > 2048 and rng.random() < 0.7
    while len(ids) <= length:
        problem = draw(rng, length if longest else min(length, 1536), longest)
        more_ids, more_learn = encode(tokenizer, problem)
        ids += more_ids[1:]                                 # without <bos>: the sequence has one
        learn += more_learn[1:]
        longest = False
    return torch.tensor(ids[:length + 1]), torch.tensor(learn[:length + 1])
