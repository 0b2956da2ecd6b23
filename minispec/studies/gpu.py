"""What a GPU is asked, cell by cell: `python bench.py --suite gpu` (README, "On a GPU").

    floors    what the device can do: bytes a second of a copy in its memory, bf16 products a second
    kernels   attention over slot lists and scores, against those bytes; beside PyTorch's SDPA and FlexAttention on the same work
    decode    our autoregressive loop on random weights of known shapes, against the time to read weights and cache once a token, and
              against the loop of transformers, if that is installed; how long the device waits between two forwards
    serving   SpecGen with long contexts and many requests, against our autoregressive loop
    system    the parts of SpecGen's system, one after the other
    methods   every method on every family by batch, against the same loop
    bounds    what a round costs, what every drafter would get accepted, and from both the ladder of bounds by batch

A cell is one row of the result. Finished cells are kept, and `--minutes` ends a run in between; the same command goes on. With
`--dry-run` all of it runs anywhere in a minute, on tiny shapes and, without a GPU, on the kernels' torch references: it shows
that the script works, and none of its figures means anything.

How it is timed: warm-up first, then the median of at least five repeats by device events, with the spread; inputs are random, never
zeros; between repeats a buffer larger than the cache is overwritten, so that keys come from memory as they do in decoding.
"""
import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from kernels import attention as packed
from kernels import scores, unavailable

from minispec.core import gpt
from minispec.data import tasks
from minispec.studies import ladder, specgen as studies
from minispec.tools import checkpoints, methods
from minispec.studies import measure as rounds
from minispec.tools.answers import requests_of
from minispec.core.engine import Request

QWEN = dict(vocab_size=151936, n_kv_head=8, head_dim=128, block_size=4096, rope_theta=1e6, norm_eps=1e-6, qk_norm=True)
K, SPARSITY = 8, 0.05


@dataclass
class Shapes:
    """What is measured. kernels: (context, batch, query heads a KV head); serving: (context, requests)."""
    copy_bytes: int = 1 << 32
    matmul: int = 8192
    groups: int = 8                     # KV heads
    head_dim: int = 128
    kernels: tuple = ((4096, 8, 4), (4096, 64, 4), (4096, 256, 4), (16384, 8, 4), (16384, 64, 4), (65536, 8, 4), (16384, 64, 1), (16384, 64, 8))
    models: dict = field(default_factory=lambda: {"Qwen3-1.7B": {**QWEN, **dict(n_layer=28, n_head=16, d_model=2048, d_ff=6144)},
                                                  "Qwen3-8B": {**QWEN, **dict(n_layer=36, n_head=32, d_model=4096, d_ff=12288, tied=False)}})
    new_tokens: int = 128
    serving: tuple = ((8000, 32), (8000, 128), (8000, 256), (32000, 32), (32000, 64))
    system: tuple = (64, 100, 3)        # chains, their lines, repeats
    batches: tuple = (1, 4, 16, 64)
    repeats: int = 7
    grid: dict = field(default_factory=lambda: {"contexts": (64, 1024, 4096)})          # of the cost table; the rest as measure.py has it


DRY = Shapes(1 << 16, 32, 2, 16, ((64, 2, 2), (64, 3, 1)), {"tiny": {**gpt.SIZES["tiny"], "block_size": 256}}, 32, ((200, 2),), (6, 3, 1), (1, 2), 2,
             {"contexts": (64,), "drafts": (0, 1, 2)})


# -- timing --------------------------------------------------------------------------------------------------------------

class Clock:
    """Seconds of a function, {"seconds": median, "range": [least, most]}: by device events on a GPU, by the wall clock elsewhere."""

    def __init__(self, device, repeats):
        self.cuda, self.repeats = device.startswith("cuda"), repeats
        self.flush = torch.empty(1 << 28 if self.cuda else 1, dtype=torch.uint8, device=device)

    def __call__(self, function, warm_up=3):
        for _ in range(warm_up):
            function()
        times = [self.once(function) for _ in range(self.repeats)]
        return {"seconds": statistics.median(times), "range": [min(times), max(times)]}

    def once(self, function):
        self.flush.fill_(1)
        if not self.cuda:
            started = time.perf_counter()
            function()
            return time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


# -- floors and kernels --------------------------------------------------------------------------------------------------

def floors(s, clock, device):
    """A copy reads and writes every byte."""
    x = torch.randint(1, 255, (s.copy_bytes // 2,), dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    a, b = torch.randn(2, s.matmul, s.matmul, device=device).bfloat16()
    copy, product = clock(lambda: y.copy_(x)), clock(lambda: a @ b)
    return [{"what": "copy", **copy, "bytes_per_second": 2 * x.numel() / copy["seconds"]},
            {"what": "bf16 product", **product, "flops": 2 * s.matmul ** 3 / product["seconds"]}]


def batch_of(kind, context, batch):
    """[(rows, length, selected, tail)] as make_plan takes them. In steady state one request in k + 1 verifies and the others draft."""
    draft, verify, full = (1, context, int(SPARSITY * context), context - 16), (K + 1, context, 0, 0), (1, context, 0, 0)
    pattern = {"draft": [draft], "verify": [verify], "full": [full], "mixed": [verify] + [draft] * K}[kind]
    return (pattern * batch)[:batch]


def list_bytes(requests, groups, head_dim, width):
    """The least that attention over these lists must move: each key and value once, indices, queries and outputs aside."""
    entries = sum(selected + length - tail for _, length, selected, tail in requests)
    return groups * entries * (2 * head_dim * width + 4)


def inputs(s, requests, group, device):
    """(q, k, v, slots, selected, plan): random numbers, slots in random order, selections in order of position."""
    longest, n = max(r[1] for r in requests), sum(r[0] for r in requests)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    q = torch.randn(n, s.groups * group, s.head_dim, device=device).to(dtype)
    k, v = torch.randn(2, s.groups, len(requests) * longest, s.head_dim, device=device).to(dtype)
    slots = torch.randperm(len(requests) * longest, device=device).view(len(requests), longest).int()
    most = max(r[2] for r in requests)
    tail = min(r[3] for r in requests if r[2]) if most else 0
    selected = torch.rand(len(requests), s.groups, max(tail, 1), device=device).topk(most).indices.sort().values.int() if most else None
    return q, k, v, slots, selected, packed.make_plan(requests, group).to(device)


def kernel(s, clock, device, kind, context, batch, group):
    """One launch, or for `scores` the second pass, beside PyTorch's own attention where it can do the same work."""
    requests = batch_of("verify" if kind == "scores" else kind, context, batch)
    args = inputs(s, requests, group, device)
    q, k, v, slots, _, plan = args
    here = not unavailable(q)
    attend = packed.attention if here else packed.attention_reference
    width = q.element_size()
    row = {"kernel": kind, "context": context, "batch": batch, "group": group, "bytes": list_bytes(requests, s.groups, s.head_dim, width), "reference": not here}
    if kind == "scores":
        _, lse = attend(*args, return_lse=True)
        which, out = torch.arange(batch, dtype=torch.int32, device=device), torch.empty(batch, s.groups, context, device=device)
        score = scores.scores if here else scores.scores_reference
        row |= {"bytes": batch * s.groups * context * (s.head_dim * width + 8)} | clock(lambda: score(q, k, lse, slots, plan, which, out))
    else:
        row |= clock(lambda: attend(*args))
    if kind == "mixed":
        parts = [inputs(s, [r for r in requests if (r[0] > 1) == big], group, device) for big in (False, True)]
        row["two_launches"] = clock(lambda: [attend(*p) for p in parts])["seconds"]
    if kind in ("full", "verify"):
        row |= others(s, clock, device, requests, group)
    return [row]


def others(s, clock, device, requests, group):
    """Seconds of PyTorch's attention on the same rows and contexts, keys of each request side by side in memory, which is easier."""
    (n, length, _, _), batch, cuda = requests[0], len(requests), device.startswith("cuda")
    dtype = torch.bfloat16 if cuda else torch.float32
    q = torch.randn(batch, s.groups * group, n, s.head_dim, device=device).to(dtype)
    k, v = torch.randn(2, batch, s.groups, length, s.head_dim, device=device).to(dtype)
    sees = torch.arange(length, device=device) <= torch.arange(length - n, length, device=device)[:, None]
    out = {"sdpa": clock(lambda: F.scaled_dot_product_attention(q, k, v, sees if n > 1 else None, enable_gqa=True))["seconds"]}
    if cuda:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        mask = create_block_mask(lambda b, h, i, j: j <= i + length - n, None, None, n, length, device=device)
        flex = torch.compile(flex_attention)
        out["flex"] = clock(lambda: flex(q, k, v, block_mask=mask, enable_gqa=True))["seconds"]
    return out


# -- the engine ----------------------------------------------------------------------------------------------------------

def decode(s, device, name):
    """Tokens a second at batch 1, and the bytes that a token cannot do without: weights and cache, read once."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    with torch.device(device):
        model = gpt.GPT(gpt.GPTConfig(**s.models[name])).to(dtype).eval()
    c, prompt = model.config, [(7 * i) % model.config.vocab_size for i in range(32)]
    rates, waits = [], []
    for _ in range(3):
        engine = methods.make_engine("ar", model, methods.settings(), 1)
        engine.generate([Request(prompt, s.new_tokens)])
        rates.append((s.new_tokens - 1) / studies.busy(engine))
    if engine.graphs:
        engine.graphs = Gaps(engine.graphs)
        engine.generate([Request(prompt, s.new_tokens)])
        waits = engine.graphs.seconds()
    read = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if c.tied or n != "embed.weight")
    read += (len(prompt) + s.new_tokens / 2) * 2 * c.n_layer * c.n_kv_head * c.head_dim * model.embed.weight.element_size()
    del model, engine                                    # room for theirs
    return [{"model": name, "tokens_per_second": statistics.median(rates), "range": [min(rates), max(rates)], "bytes": read,
             "wait": statistics.median(waits) if waits else None, "transformers": transformers_rate(c, dtype, device, prompt, s.new_tokens)}]


class Gaps:
    """Stands before the engine's graphs and notes how long the device has no forward to do between two of them; the product with the
    vocabulary, which is outside the graphs, falls into that time."""

    def __init__(self, graphs):
        self.graphs, self.marks = graphs, []

    def __getattr__(self, name):
        return getattr(self.graphs, name)

    def __call__(self, x):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out = self.graphs(x)
        end.record()
        self.marks.append((begin, end))
        return out

    def seconds(self):
        torch.cuda.synchronize()
        return [end.elapsed_time(begin) / 1e3 for (_, end), (begin, _) in zip(self.marks, self.marks[1:])]


def transformers_rate(c, dtype, device, prompt, new_tokens):
    """Tokens a second of transformers' own loop on random weights of the same shape, less the time of the prompt and the first token,
    as in ours; None where it is not installed."""
    try:
        import transformers
    except ImportError:
        return None
    shape = {k: v for k, v in checkpoints.to_hf_config(c).items() if k not in ("architectures", "torch_dtype")}
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**shape)).to(dtype).eval()

    def seconds(n):
        started = time.perf_counter()
        model.generate(torch.tensor([prompt], device=device), max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0)
        return time.perf_counter() - started

    seconds(new_tokens)                                  # warms up
    return statistics.median((new_tokens - 1) / (seconds(new_tokens) - seconds(1)) for _ in range(3))


def bounds(args, model, tokenizer, s, families):
    """The ladder on this device's prices."""
    drafters = methods.chain_drafters(model, args, max(s.grid.get("drafts", rounds.DRAFTS)))
    table, _ = rounds.cost_table(model, drafters, s.batches, **s.grid)
    problems = {f"{f}/{i}": tasks.make(f, 800 + i, "heldout") for f in families for i in range(1 if args.dry_run else 8)}
    generations = methods.make_engine("ar", model, args, 16).generate(requests_of(list(problems.values()), tokenizer, model, 24 if args.dry_run else 256))
    texts = {name: (g.prompt_ids, g.token_ids) for name, g in zip(problems, generations)}
    return [{"costs": table, **ladder.analyse(rounds.traces_of(drafters, model, texts), table, batches=s.batches)}]


def measure(section, settings, args, model, tokenizer, s, clock):
    """The rows of one cell."""
    if section == "floors":
        return floors(s, clock, args.device)
    if section == "kernels":
        return kernel(s, clock, args.device, *settings)
    if section == "decode":
        return decode(s, args.device, *settings)
    if section == "system":
        return [studies.cumulative(args, model, tokenizer, *settings)]
    if section == "bounds":
        return bounds(args, model, tokenizer, s, settings)
    targets, pairs = {str(model.dtype).removeprefix("torch."): model}, 1 if args.dry_run else 5
    if section == "serving":
        return studies.serving_rows(targets, args, tokenizer, *settings, pairs, s.new_tokens)
    family, batch = settings
    problems = [tasks.make(family, 500 + i, "heldout") for i in range(max(batch, 1 if args.dry_run else 3))]
    rows = studies.speed_rows(targets, args, family, lambda t: requests_of(problems, tokenizer, t, 24 if args.dry_run else 192), batch, pairs)
    return [{"batch": batch, **row} for row in rows]


def cells(s, families, context):
    """[(section, settings)] in the order of worth: what depends on nothing comes first. context: the target's; longer ones are left out."""
    return [("floors", ())] + [("kernels", (kind, *shape)) for shape in s.kernels for kind in ("full", "draft", "verify", "mixed", "scores")] + \
        [("decode", (name,)) for name in s.models] + [("serving", shape) for shape in s.serving if shape[0] + 2 * s.new_tokens <= context] + \
        [("system", s.system)] + [("methods", (f, b)) for f in families for b in s.batches] + [("bounds", families)]


def run(args, model, tokenizer, measured):
    """All cells, as rows by section; None where the time was up before the last one. measured(about, cells, measure) -> what
    measure(*cell) gives, of as many cells as there was time for."""
    s = DRY if args.dry_run else Shapes()
    clock, families = Clock(args.device, s.repeats), tasks.FAMILIES[:1] if args.dry_run else tasks.FAMILIES
    todo = cells(s, families, model.config.block_size)
    about = {"dry_run": args.dry_run, "torch": torch.__version__, "target": checkpoints.fingerprint(model), "cells": [[section, list(settings)] for section, settings in todo]}
    done = measured(about, todo, lambda section, settings: measure(section, settings, args, model, tokenizer, s, clock))
    if len(done) < len(todo):
        print(f"{len(done)} of {len(todo)} cells are measured; the same command goes on")
        return None
    out = {}
    for (section, _), rows in zip(todo, done):
        out.setdefault(section, []).extend(rows)
    return out
