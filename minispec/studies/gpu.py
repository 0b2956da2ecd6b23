"""What a GPU is asked, cell by cell: `python bench.py --suite gpu` (README, "On a GPU").

    floors    what the device can do: bytes/s of a copy in its memory, bf16 products/s
    kernels   attention over slot lists and scores, against those bytes
    decode    our autoregressive loop on random weights of known shapes, against the time to read weights and
              cache once a token
    serving   SpecGen with long contexts and many requests, against our autoregressive loop
    system    the parts of SpecGen's system, one after the other
    methods   every method on every family by batch, against the same loop

A cell is one row of the result. Finished cells are kept, and `--minutes` ends a run between two; the same
command goes on. A cell for which the memory is too small is noted as such, and the next one begins. With
`--dry-run` all of it runs anywhere in a minute, on tiny shapes and, without a GPU, on the kernels' torch
references: it shows that the script works, and none of its figures means anything.

Kernels are timed by triton.testing.do_bench: after a warm-up, by device events, the cache emptied before
every repeat, so that keys come from memory as they do in decoding. Inputs are random, never zeros.
"""
import contextlib
import gc
import itertools
import statistics
import time
from dataclasses import dataclass, field

import torch

from kernels import attention as packed
from kernels import scores, unavailable
from minispec.core.requests import Request
from minispec.core.gpt import GPT, SIZES, GPTConfig
from minispec.data import tasks
from minispec.studies import results
from minispec.studies.run import rows_of, time_methods
from minispec.studies.specgen import cumulative, serving_rows
from minispec.tools import checkpoints, methods
from minispec.tools.answers import requests_of

QWEN = dict(vocab_size=151936, n_kv_head=8, head_dim=128, block_size=4096, rope_theta=1e6, norm_eps=1e-6,
            qk_norm=True)
QWEN_1B = {**QWEN, "n_layer": 28, "n_head": 16, "d_model": 2048, "d_ff": 6144}
QWEN_8B = {**QWEN, "n_layer": 36, "n_head": 32, "d_model": 4096, "d_ff": 12288, "tied": False}
K, SPARSITY = 8, 0.05


@dataclass
class Shapes:
    """What is measured. kernels: (context, batch, query heads a KV head); serving: (context, requests)."""
    copy_bytes: int = 1 << 32
    matmul: int = 8192
    groups: int = 8                     # KV heads
    head_dim: int = 128
    kernels: tuple = ((4096, 8, 4), (4096, 256, 4), (16384, 64, 4), (65536, 8, 4), (16384, 64, 8))
    models: dict = field(default_factory=lambda: {"Qwen3-1.7B": QWEN_1B, "Qwen3-8B": QWEN_8B})
    new_tokens: int = 128
    serving: tuple = ((8000, 32), (8000, 128), (32000, 32))
    system: tuple = (64, 100, 3)        # chains, their lines, repeats
    batches: tuple = (1, 4, 16, 64)
    pairs: int = 5                      # runs of an engine
    answer: int = 256                   # most tokens of an answer
    families: tuple = tasks.FAMILIES


DRY = Shapes(
    copy_bytes=1 << 16, matmul=32, groups=2, head_dim=16, kernels=((64, 2, 2), (64, 3, 1)),
    models={"tiny": {**SIZES["tiny"], "block_size": 256}}, new_tokens=32, serving=((200, 2),),
    system=(6, 2, 1), batches=(1, 2), pairs=1, answer=24,
    families=tasks.FAMILIES[:1])


# -- timing ----------------------------------------------------------------------------------------

def timed(function, device):
    """{"seconds": median, "range": [least, most]} of a function; of one run where there is no GPU."""
    if device == "cpu":
        started = time.perf_counter()
        function()
        seconds = [time.perf_counter() - started] * 3
    else:
        from triton.testing import do_bench
        seconds = [ms / 1e3 for ms in do_bench(function, quantiles=(0.5, 0, 1))]
    return {"seconds": seconds[0], "range": seconds[1:]}


# -- attention over lists -------------------------------------------------------------------------

def batch_of(kind, context, batch):
    """[(rows, length, selected, tail)] as make_plan takes them. In steady state one request in k + 1
    verifies, the others draft."""
    draft = (1, context, int(SPARSITY * context), context - 16)
    verify = (K + 1, context, 0, 0)
    full = (1, context, 0, 0)
    pattern = {"draft": [draft], "verify": [verify], "full": [full], "mixed": [verify] + [draft] * K}[kind]
    return (pattern * batch)[:batch]


def list_bytes(requests, groups, head_dim, width):
    """The least that attention over these lists must move: each key and value once; indices, queries and
    outputs aside."""
    entries = sum(selected + length - tail for _, length, selected, tail in requests)
    return groups * entries * (2 * head_dim * width + 4)


def inputs(s, requests, group, device, dtype):
    """(q, k, v, slots, selected, plan): random numbers, slots in random order, selections in order of
    position."""
    batch = len(requests)
    rows = sum(r[0] for r in requests)
    longest = max(r[1] for r in requests)
    most = max(r[2] for r in requests)
    q = torch.randn(rows, s.groups * group, s.head_dim, device=device).to(dtype)
    k, v = torch.randn(2, s.groups, batch * longest, s.head_dim, device=device).to(dtype)
    slots = torch.randperm(batch * longest, device=device).view(batch, longest).int()
    selected = None
    if most:
        tail = min(r[3] for r in requests if r[2])
        chosen = torch.rand(batch, s.groups, max(tail, 1), device=device).topk(most).indices
        selected = chosen.sort().values.int()
    return q, k, v, slots, selected, packed.make_plan(requests, group).to(device)


# -- the cells -------------------------------------------------------------------------------------

class Suite:
    """What is measured of a target on a device: the rows of a section's cell are those of the method of its
    name."""

    def __init__(self, args, model, tokenizer):
        self.args = args
        self.model = model
        self.tokenizer = tokenizer
        self.shapes = DRY if args.dry_run else Shapes()
        self.device = args.device
        self.dtype = torch.float32 if args.device == "cpu" else torch.bfloat16

    def cells(self):
        """[(section, settings)]; what depends on nothing comes first. Contexts longer than the target's are
        left out."""
        s = self.shapes
        longest = self.model.config.block_size - 2 * s.new_tokens
        kinds = ("full", "draft", "verify", "mixed", "scores")
        return [
            ("floors", ()),
            *(("kernels", (kind, *shape)) for shape in s.kernels for kind in kinds),
            *(("decode", (name,)) for name in s.models),
            *(("serving", shape) for shape in s.serving if shape[0] <= longest),
            ("system", s.system),
            *(("methods", cell) for cell in itertools.product(s.families, s.batches)),
        ]

    def floors(self):
        """A copy reads and writes every byte."""
        s = self.shapes
        x = torch.randint(1, 255, (s.copy_bytes // 2,), dtype=torch.uint8, device=self.device)
        y = torch.empty_like(x)
        a, b = torch.randn(2, s.matmul, s.matmul, device=self.device).bfloat16()
        copy = timed(lambda: y.copy_(x), self.device)
        product = timed(lambda: a @ b, self.device)
        return [
            {"what": "copy", **copy, "bytes_per_second": 2 * x.numel() / copy["seconds"]},
            {"what": "bf16 product", **product, "flops": 2 * s.matmul ** 3 / product["seconds"]},
        ]

    def kernels(self, kind, context, batch, group):
        """One launch, or for `scores` the second pass."""
        s = self.shapes

        def inputs_of(some):
            return inputs(s, some, group, self.device, self.dtype)

        requests = batch_of("verify" if kind == "scores" else kind, context, batch)
        args = inputs_of(requests)
        q, k, v, slots, _, plan = args
        here = not unavailable(q)
        attend = packed.attention if here else packed.attention_reference
        width = self.dtype.itemsize
        row = {"kernel": kind, "context": context, "batch": batch, "group": group, "reference": not here}
        if kind == "scores":
            _, lse = attend(*args, return_lse=True)
            which = torch.arange(batch, dtype=torch.int32, device=self.device)
            out = torch.empty(batch, s.groups, context, device=self.device)
            score = scores.scores if here else scores.scores_reference
            row["bytes"] = batch * s.groups * context * (s.head_dim * width + 8)
            row.update(timed(lambda: score(q, k, lse, slots, plan, which, out), self.device))
        else:
            row["bytes"] = list_bytes(requests, s.groups, s.head_dim, width)
            row.update(timed(lambda: attend(*args), self.device))
        if kind == "mixed":
            drafts = inputs_of([r for r in requests if r[0] == 1])
            verifies = inputs_of([r for r in requests if r[0] > 1])
            two = timed(lambda: [attend(*drafts), attend(*verifies)], self.device)
            row["two_launches"] = two["seconds"]
        return [row]

    def decode(self, name):
        """Tokens/s at batch 1, and the bytes that a token cannot do without: weights and cache, read once."""
        new, config = self.shapes.new_tokens, GPTConfig(**self.shapes.models[name])
        with built_in(self.dtype, self.device):
            model = GPT(config).eval()
        prompt = [(7 * i) % config.vocab_size for i in range(32)]
        rates = []
        for _ in range(3):
            engine = methods.make_engine("ar", model, methods.settings(), 1)
            engine.generate([Request(prompt, new)])
            rates.append((new - 1) / (sum(engine.seconds.values()) - engine.seconds["prefill"]))

        weights = sum(p.numel() for n, p in model.named_parameters() if config.tied or n != "embed.weight")
        kv = (len(prompt) + new / 2) * 2 * config.n_layer * config.n_kv_head * config.head_dim
        return [{
            "model": name,
            "tokens_per_second": statistics.median(rates),
            "range": [min(rates), max(rates)],
            "bytes": (weights + kv) * self.dtype.itemsize,
        }]

    def serving(self, context, batch):
        s, targets = self.shapes, {str(self.dtype).removeprefix("torch."): self.model}
        return serving_rows(targets, self.args, self.tokenizer, context, batch, s.pairs, s.new_tokens)

    def system(self, *settings):
        return [cumulative(self.args, self.model, self.tokenizer, *settings)]

    def methods(self, family, batch):
        """Every method on one family; a repeat before those that count compiles and captures."""
        n = max(batch, 1 if self.args.dry_run else 3)
        problems = [tasks.make(family, 500 + i, "heldout") for i in range(n)]
        asked = requests_of(problems, self.tokenizer, self.model, self.shapes.answer)
        requests = {f"{family}/{i}": r for i, r in enumerate(asked)}
        names = ["ar", *methods.ready(self.args)]
        cell = family, batch, "different", list(requests)
        runs = time_methods(names, self.args, self.model, requests, cell, self.shapes.pairs, warm_up=True)
        return rows_of(runs, {"workload": family, "batch": batch, "ids": list(requests)})


@contextlib.contextmanager
def built_in(dtype, device):
    """What is built in the block is of this dtype from the start: an 8B model in fp32 first would take 33
    GB."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def free_memory():
    """Give back what cells have left. An engine and its planner hold each other, so `del` alone frees
    nothing."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(args, model, tokenizer, name):
    """All cells, as rows by section, and under "out_of_memory" the cells that did not fit; finished cells are
    kept under a name. None where the time was up before the last one."""
    suite = Suite(args, model, tokenizer)
    todo = suite.cells()
    about = {
        "torch": torch.__version__,
        "target": checkpoints.fingerprint(model),
        "cells": [[section, list(settings)] for section, settings in todo],
    }

    def measured(section, settings):
        rows = None
        with contextlib.suppress(torch.OutOfMemoryError):
            rows = getattr(suite, section)(*settings)
        free_memory()
        return rows

    done = results.resumable(name, about, todo, measured, time.monotonic() + 60 * args.minutes)
    if len(done) < len(todo):
        print(f"{len(done)} of {len(todo)} cells are measured; the same command goes on")
        return None
    out = {"suite": "gpu", "out_of_memory": []}
    for (section, settings), rows in zip(todo, done):
        if rows is None:
            out["out_of_memory"].append(" ".join(map(str, (section, *settings))))
        else:
            out.setdefault(section, []).extend(rows)
    return out
