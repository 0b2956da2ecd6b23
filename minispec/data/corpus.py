"""Training text: a seeded stream of procedural problems and real documents, packed into sequences.

A document is (prompt, response). The loss is taken on responses: prompts of procedural problems are random by
construction and nothing can be learned from predicting them. Every sequence starts with the beginning-of-text
token, which occurs nowhere else, so heads that find nothing to fetch have a place to look.

Real text is read from a data folder (--data or MINISPEC_DATA) and is optional. Its subfolders, where they
come from, and their licences:

    gsm8k                   github.com/openai/grade-school-math, grade_school_math/data      MIT
    reasoning_gym_traces    github.com/open-thought/reasoning-gym-eval                       Apache-2.0
    marco_o1                github.com/AIDC-AI/Marco-o1, data                                Apache-2.0
    instruct                github.com/rasbt/LLMs-from-scratch, ch07                         Apache-2.0
    standardebooks          github.com/standardebooks, one repository a book                 public domain
"""
import glob
import os
import random
import sysconfig

import numpy as np

from minispec.data import prompts, tasks
from minispec.tools.files import blame

HELDOUT_BOOK = "the-princess-and-the-goblin"
EXCLUDED_TASK = "arithmetic/gsm_symbolic"      # its questions are variations of GSM8K's test set


def real_documents(folder):
    """{source: [(prompt, think, answer)]} of the real text under `folder` that is not held out; sources that
    are not there are left out. Books and code are plain text: prompt None. Standard-library code comes with
    every Python."""
    out = {}
    if folder and os.path.isdir(folder):
        for name, (path, form) in CHAT.items():
            file = os.path.join(folder, path)
            if os.path.isdir(os.path.dirname(file)):
                out[name] = _chat_documents(file, form)
        out["books"] = []
        for path in sorted(glob.glob(os.path.join(folder, "standardebooks", "*.txt"))):
            if HELDOUT_BOOK not in path:
                out["books"] += _plain_documents(path, 4000)
    out["code"] = []
    for path in sorted(glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "*.py"))):
        if not tasks.is_heldout(os.path.basename(path)):
            out["code"] += _plain_documents(path, 2500)
    return {name: documents for name, documents in out.items() if documents}


# How a row of each source becomes (question, (prompt, think, answer)). The question decides its split.

def _gsm8k(r):
    return r["question"], (r["question"] + "\n", *prompts.split_gsm8k(r["answer"]))


def _traces(r):
    return r["question"], (r["question"] + "\n", r["response"] + "\n", r["expected_answer"])


def _marco(r):
    return r["instruction"], (r["instruction"] + "\n", r["response"] + "\n", "")


def _instruct(r):
    prompt = (r["instruction"] + "\n" + r["input"]).strip() + "\n"
    return r["instruction"], (prompt, "", r["output"])


CHAT = {        # source: (file, form of its rows)
    "gsm8k": ("gsm8k/train.jsonl", _gsm8k),
    "traces": ("reasoning_gym_traces/traces_correct.jsonl", _traces),
    "marco": ("marco_o1/CoT_demo.json", _marco),
    "instruct": ("instruct/instruction-data.json", _instruct),
}


def _chat_documents(file, form):
    rows = prompts.read_rows(file)
    out = []
    with blame(file):
        for _, row in rows:
            if row.get("task") == EXCLUDED_TASK:
                continue
            question, document = form(row)
            if not tasks.is_heldout(question):
                out.append(document)
    return out


def _plain_documents(path, size):
    """The text of a file in pieces of `size` characters."""
    with open(path, encoding="utf-8", errors="replace") as f:
        text = f.read()
    return [(None, text[i:i + size], "") for i in range(0, len(text), size)]


def procedural_document(rng, max_tokens, longest=False):
    """(prompt, think, answer) of a random training problem. `trace` programs get as long as max_tokens
    allows: log-uniform, or the full length where `longest`."""
    family = "trace"
    if not longest:
        family = rng.choices(tasks.FAMILIES, weights=(0.40, 0.12, 0.12, 0.20, 0.16))[0]
    low, high = tasks.SIZES[family]
    if family == "trace":
        low = 3
        lines = int(max_tokens / (tasks.TOKENS_PER_LINE + 10))            # 10: its prompt line
        high = max(min(lines, tasks.TRACE_MAX), 4)
        size = high if longest else int(low * (high / low) ** rng.random())
    else:
        high = max(low, round(high * min(max_tokens / 768, 1)))
        size = rng.randint(low, high)
    p = tasks.make(family, rng.randrange(1 << 40), "train", size)
    return p.prompt, p.think, p.answer


def encode(tokenizer, document):
    """(ids, learn): token ids of one document, and whether each is a target of the loss."""
    prompt, think, answer = document
    if prompt is None:
        ids = [*tokenizer.encode(think), tokenizer.special["<|eos|>"]]
        return ids, [True] * len(ids)
    head = tokenizer.prompt_ids(prompt)[1:]                 # without <bos>: the sequence has one
    body = tokenizer.response_ids(think, answer)
    return head + body, [False] * len(head) + [True] * len(body)


class Stream:
    """Endless packed training sequences, the n-th of which depends on (seed, n) alone: training resumes
    exactly.

    real: {source: documents} and `share`, the part of documents drawn from them, by size of the source.
    """

    def __init__(self, tokenizer, real, share, seed):
        self.tokenizer = tokenizer
        self.real = real
        self.share = share if real else 0.0
        self.seed = seed
        self.names = sorted(real)
        # The power of 0.7 favours small sources.
        sizes = [sum(len(think) + len(answer) for _, think, answer in real[name]) for name in self.names]
        self.weights = [size ** 0.7 for size in sizes]

    def sequence(self, n, length, block_size=0):
        """Sequence number n of `length` + 1 tokens: (tokens, positions, learn) as numpy arrays.

        Half of the sequences shorter than block_size skip positions at two random places (positional
        skip-wise training, PoSE), so that short, cheap sequences teach the distances of long ones too. """
        rng = random.Random(f"{self.seed}/{n}/{length}")
        ids = [self.tokenizer.special["<|bos|>"]]
        learn = [False]
        # Most long sequences begin with one program that fills them; the rest are packed documents.
        longest = length > 2048 and rng.random() < 0.7
        while len(ids) <= length:
            if longest:
                document = procedural_document(rng, length, longest=True)
                longest = False
            elif rng.random() < self.share:
                source = rng.choices(self.names, self.weights)[0]
                document = rng.choice(self.real[source])
            else:
                document = procedural_document(rng, min(length, 1536))
            more_ids, more_learn = encode(self.tokenizer, document)
            ids += more_ids
            learn += more_learn

        positions = np.arange(length + 1)
        spare = block_size - length - 1
        if spare > 0 and rng.random() < 0.5:
            for jump in (rng.randint(0, spare // 2), rng.randint(0, spare // 2)):
                positions[rng.randint(1, length):] += jump
        return np.array(ids[:length + 1], dtype=np.int64), positions, np.array(learn[:length + 1])
