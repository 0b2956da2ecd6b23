"""Training text: a seeded stream of procedural problems and real documents, packed into sequences.

A document is (prompt, response). The loss is taken on responses: prompts of procedural problems are random by
construction and nothing can be learned from predicting them. Every sequence starts with the beginning-of-text token,
which stands nowhere else, so heads that find nothing to fetch have a place to look.

Real text is read from a data folder (--data or MINISPEC_DATA) and is optional; SOURCES says what and from where.
"""
import glob
import os
import random
import sysconfig

import numpy as np

from minispec.data import prompts, tasks
from minispec.tools.files import blame, read_json

SOURCES = {     # folder: (public source, licence)
    "gsm8k": ("github.com/openai/grade-school-math, grade_school_math/data", "MIT"),
    "reasoning_gym_traces": ("github.com/open-thought/reasoning-gym-eval", "Apache-2.0"),
    "marco_o1": ("github.com/AIDC-AI/Marco-o1, data", "Apache-2.0"),
    "instruct": ("github.com/rasbt/LLMs-from-scratch, ch07", "Apache-2.0"),
    "standardebooks": ("github.com/standardebooks, one repository a book", "public domain"),
}
HELDOUT_BOOK = "the-princess-and-the-goblin"
EXCLUDED_TASK = "arithmetic/gsm_symbolic"      # its questions are variations of GSM8K's test set


def real_documents(folder, split="train"):
    """{source: [(prompt, think, answer)]} of the real text under `folder`; sources that are not there are left out.
    Books and code are plain text: prompt None. Standard-library code comes with every Python."""
    def documents(path, row_to_document, keep_row=lambda r: keep(r["question"])):
        file = os.path.join(folder, path)
        rows = [row for _, row in prompts.read_rows(file)] if file.endswith(".jsonl") else read_json(file)
        with blame(file):
            return [row_to_document(r) for r in rows if keep_row(r)]

    keep = lambda text: tasks.is_heldout(text) == (split != "train")
    out = {}
    if folder and os.path.isdir(folder):
        have = lambda name: os.path.isdir(os.path.join(folder, name))
        if have("gsm8k"):
            out["gsm8k"] = documents("gsm8k/train.jsonl", lambda r: (r["question"] + "\n", *prompts.split_gsm8k(r["answer"])))
        if have("reasoning_gym_traces"):
            out["traces"] = documents("reasoning_gym_traces/traces_correct.jsonl", lambda r: (r["question"] + "\n", r["response"] + "\n", r["expected_answer"]),
                                      lambda r: r["task"] != EXCLUDED_TASK and keep(r["question"]))
        if have("marco_o1"):
            out["marco"] = documents("marco_o1/CoT_demo.json", lambda r: (r["instruction"] + "\n", r["response"] + "\n", ""), lambda r: keep(r["instruction"]))
        if have("instruct"):
            out["instruct"] = documents("instruct/instruction-data.json", lambda r: ((r["instruction"] + "\n" + r["input"]).strip() + "\n", "", r["output"]),
                                        lambda r: keep(r["instruction"]))
        books = [p for p in sorted(glob.glob(os.path.join(folder, "standardebooks", "*.txt")))
                 if (HELDOUT_BOOK in p) == (split != "train")]
        out["books"] = [(None, chunk, "") for path in books for chunk in _chunks(path, 4000)]
    code = sorted(glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "*.py")))
    out["code"] = [(None, chunk, "") for path in code if keep(os.path.basename(path)) for chunk in _chunks(path, 2500)]
    return {name: docs for name, docs in out.items() if docs}


def _chunks(path, size):
    with open(path, encoding="utf-8", errors="replace") as f:
        text = f.read()
    return [text[i:i + size] for i in range(0, len(text), size)]


def procedural_document(rng, max_tokens, longest=False):
    """(prompt, think, answer) of a random training problem. `trace` programs get as long as max_tokens allows:
    log-uniform, or the full length where `longest`."""
    family = "trace" if longest else rng.choices(tasks.FAMILIES, weights=(0.40, 0.12, 0.12, 0.20, 0.16))[0]
    low, high = tasks.SIZES[family]
    if family == "trace":
        low, high = 3, max(min(int(max_tokens / (tasks.TOKENS_PER_LINE + 10)), tasks.TRACE_MAX), 4)   # 10: its prompt line
        size = high if longest else int(low * (high / low) ** rng.random())
    else:
        size = rng.randint(low, max(low, round(high * min(max_tokens / 768, 1))))
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
    """Endless packed training sequences, the n-th of which depends on (seed, n) alone: training resumes exactly.

    real: {source: documents} and `share`, the part of documents drawn from them, by size of the source.
    """

    def __init__(self, tokenizer, real, share, seed):
        self.tokenizer, self.seed, self.share = tokenizer, seed, share if real else 0.0
        self.names = sorted(real)
        self.real = real
        self.weights = [sum(len(d[1]) + len(d[2]) for d in real[name]) ** 0.7 for name in self.names]  # favour small sources

    def sequence(self, n, length, block_size=0):
        """Sequence number n of `length` + 1 tokens: (tokens, positions, learn) as numpy arrays.

        Half of the sequences shorter than block_size skip positions at two random places (positional skip-wise
        training, PoSE), so that short, cheap sequences teach the distances of long ones too.
        """
        rng = random.Random(f"{self.seed}/{n}/{length}")
        ids, learn = [self.tokenizer.special["<|bos|>"]], [False]
        longest = length > 2048 and rng.random() < 0.7
        while len(ids) <= length:
            if not longest and rng.random() < self.share:
                document = rng.choice(self.real[rng.choices(self.names, self.weights)[0]])
            else:
                document = procedural_document(rng, min(length, 1536) if not longest else length, longest)
            longest = False
            more, flags = encode(self.tokenizer, document)
            ids += more
            learn += flags
        positions = np.arange(length + 1)
        spare = block_size - length - 1
        if spare > 0 and rng.random() < 0.5:
            for jump in (rng.randint(0, spare // 2), rng.randint(0, spare // 2)):
                positions[rng.randint(1, length):] += jump
        return np.array(ids[:length + 1], dtype=np.int64), positions, np.array(learn[:length + 1])
