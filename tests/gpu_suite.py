"""What a GPU can do, cell by cell, as bench.py's studies say what methods do with it (docs/gpu.md):

    python tests/gpu_suite.py                        # on a GPU; writes results/gpu/gpu.json
    python tests/gpu_suite.py --quick --device cpu   # tiny shapes: it shows that the script works

    floors    bytes/s of a copy in its memory
    kernels   attention over slot lists and scores, against those bytes
    decode    our autoregressive loop on the target (--model), against the time to read weights and cache once
              a token
    speed     prompt lookup and the trained drafters next to that loop, on the problems of bench.py speed
    serving   SpecGen next to it, on long texts that have been read before

A cell for which the memory is too small is noted as such, and the next one begins; an interrupted run goes on
where it was. Kernels are timed by triton.testing.do_bench: after a warm-up, by device events, the cache
emptied before every repeat, so that keys come from memory as they do in decoding. Inputs are random, never
zeros.
"""
import gc
import os
import time
from dataclasses import dataclass
from functools import cache, partial

import root  # noqa: F401  before torch
import torch

from kernels import attention as packed
from kernels import available, scores
from minispec.core.requests import Request
from minispec.core.verify import Sampling
from minispec.data.tokenizer import Tokenizer
from minispec.studies import results, run, specgen
from minispec.tools import checkpoints, methods
from minispec.tools.answers import requests_of, summary
from minispec.tools.markdown import table
from minispec.tools.script import Parser, check_device, run_main

K, SPARSITY = 8, 0.05
SHORT = ["eagle --k 3", "prism --k 3"]  # a graph takes all steps of a chain
FORMS = (specgen.WINDOW, specgen.PILLAR, specgen.PILLAR + " --delayed")
TEXTS = 4                               # different ones of a batch
BEGINNING = 24                          # tokens of an answer of the first engine
KINDS = ("full", "draft", "verify", "mixed", "scores")


@dataclass
class Shapes:
    """What is measured. kernels: (context, batch, query heads a KV head). speed: (requests at once, problems
    of each workload). serving: (context, requests)."""
    copy_bytes: int = 1 << 32
    groups: int = 8                     # KV heads
    head_dim: int = 128
    kernels: tuple = ((4096, 8, 4), (4096, 256, 4), (16384, 64, 4), (65536, 8, 4), (16384, 64, 8))
    speed: tuple = ((1, 1), (8, 2))
    serving: tuple = ((7000, 8), (7000, 64), (7000, 256))
    new_tokens: int = 128


TINY = Shapes(1 << 16, 2, 16, ((64, 2, 2), (64, 3, 1)), ((2, 1),), ((100, 2),), 32)


def timed(function, device):
    """Seconds of a function: the median; of one run where there is no GPU."""
    if device.type != "cpu":
        from triton.testing import do_bench
        return do_bench(function, return_mode="median") / 1e3
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


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
    rows, lengths, counts, _ = zip(*requests)
    longest = max(lengths)
    q = torch.randn(sum(rows), s.groups * group, s.head_dim, device=device).to(dtype)
    k, v = torch.randn(2, s.groups, batch * longest, s.head_dim, device=device).to(dtype)
    slots = torch.randperm(batch * longest, device=device).view(batch, longest).int()
    tail = min((r[3] for r in requests if r[2]), default=0)
    chosen = torch.rand(batch, s.groups, tail, device=device).topk(max(counts)).indices
    selected = chosen.sort().values.int()
    return q, k, v, slots, selected, packed.make_plan(requests, group).to(device)


# -- the cells -------------------------------------------------------------------------------------

def gpu(args, model, tokenizer=None):
    """All cells, as rows by section, and under "out_of_memory" the cells that did not fit. Without a
    tokenizer the methods are left out."""
    if args.device == "cpu" and not args.quick:
        raise ValueError("the kernels need --device cuda; --quick runs the rest on tiny shapes anywhere")
    s = TINY if args.quick else Shapes()
    sections = dict(SECTIONS)

    def measured(section, *settings):
        try:
            found = sections[section](s, model, *settings)
            return found if isinstance(found, list) else [found]
        except torch.OutOfMemoryError:
            return None
        finally:
            free()

    cells = [("floors",), ("decode",)]
    if available(torch.empty(0, device=args.device)):
        cells += [("kernels", kind, *shape) for shape in s.kernels for kind in KINDS]
    if tokenizer:
        sections |= {"speed": partial(speed, args, tokenizer), "serving": partial(serving, args, tokenizer)}
        cells += [("speed", *shape) for shape in s.speed] + [("serving", *shape) for shape in s.serving]
    out = {"out_of_memory": []}
    for cell, rows in zip(cells, results.each_kept("gpu", args, model, cells, measured)):
        if rows is None:
            out["out_of_memory"].append(" ".join(map(str, cell)))
        else:
            out.setdefault(cell[0], []).extend(rows)
    return out


def free():
    """Return the memory of what is gone. An engine and its scheduler hold each other, so `del` alone frees
    nothing."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def floors(s, model):
    """Bytes that are copied in a second, each read and written."""
    x = torch.randint(1, 255, (s.copy_bytes // 2,), dtype=torch.uint8, device=model.device)
    y = torch.empty_like(x)
    return {"what": "bytes copied", "rate": 2 * x.numel() / timed(lambda: y.copy_(x), model.device)}


def kernels(s, model, kind, context, batch, group):
    """One launch, or for `scores` the second pass."""
    device, dtype = model.device, model.dtype
    requests = batch_of("verify" if kind == "scores" else kind, context, batch)
    given = inputs(s, requests, group, device, dtype)
    q, k, v, slots, _, plan = given
    row = {"kernel": kind, "context": context, "batch": batch, "group": group}
    if kind == "scores":
        _, lse = packed.attention(*given)
        which = torch.arange(batch, dtype=torch.int32, device=device)
        out = torch.empty(batch, s.groups, context, device=device)
        row["bytes"] = batch * s.groups * context * (s.head_dim * dtype.itemsize + 8)
        row["seconds"] = timed(lambda: scores.scores(q, k, lse, slots, plan, which, out), device)
    else:
        row["bytes"] = list_bytes(requests, s.groups, s.head_dim, dtype.itemsize)
        row["seconds"] = timed(lambda: packed.attention(*given), device)
    return row


def decode(s, model):
    """Seconds a token at batch 1, and the bytes that it cannot do without: weights and cache, read once."""
    prompt = [(7 * i) % model.config.vocab_size for i in range(32)]
    for _ in range(2):                                   # the first one compiles and captures
        engine = methods.make_engine("ar", model, methods.settings(), 1)
        engine.generate([Request(prompt, s.new_tokens)])
    seconds = (sum(engine.seconds.values()) - engine.seconds["prefill"]) / (s.new_tokens - 1)

    c = model.config
    weights = sum(p.numel() for name, p in model.named_parameters() if c.tied or name != "embed.weight")
    kv = (len(prompt) + s.new_tokens / 2) * 2 * c.n_layer * c.n_kv_head * c.head_dim
    return {"seconds": seconds, "bytes": (weights + kv) * model.dtype.itemsize}


# -- the methods -----------------------------------------------------------------------------------

def speed(args, tokenizer, s, model, batch, n):
    """A row for each drafter on n problems of each workload, `batch` of them at once. Greedy answers end where
    they begin to repeat themselves."""
    problems = run.numbered(tokenizer, n, args.data)
    longest, _ = run.before_loops(problems, tokenizer, model, args, s.new_tokens)
    names = results.suitable(args, model, SHORT + run.TREES + run.COPIES)
    wanted = ("ngram", *methods.TRAINED, *SHORT, *run.TREES, *(run.COPIES if batch == 1 else ()))

    def requests():
        return [r for id, problem in problems.items()
                for r in requests_of([problem], tokenizer, model, longest[id])]

    about = {"batch": batch, "requests": len(problems)}
    build = partial(results.engine_of, model=model, args=args, batch=batch)
    return next_to_plain(build, [name for name in names if name in wanted], requests, about)


@cache
def texts_read(model, tokenizer, data, context):
    """Texts of so many tokens, and their keys and values."""
    texts = [specgen.text(i, context, tokenizer, data) for i in range(TEXTS)]
    return texts, specgen.read(model, texts)


def serving(args, tokenizer, s, model, context, batch):
    """A row for each form of SpecGen on requests with `context` tokens, sampled as in the paper. All requests
    enter at once, each with a copy of the keys of its text: requests that read their prompts one after the
    other would never decode together."""
    texts, kept = texts_read(model, tokenizer, args.data, context)
    names = [name for name in results.suitable(args, model, FORMS) if name.startswith("specgen")]

    def requests():
        return [Request(texts[i % len(texts)], s.new_tokens, Sampling(specgen.TEMPERATURE, seed=i))
                for i in range(batch)]

    about = {"context": context, "requests": batch}
    build = partial(specgen.resumed, model=model, args=args, batch=batch, kept=kept)
    return next_to_plain(build, names, requests, about)


def next_to_plain(build, names, requests, about):
    """A row for the plain loop and for each method of `names`: decoding, without the prompts. Two engines,
    build(name), answer, and the second one counts: the first one begins the answers, compiles and loads
    libraries. (Its prompts would be in its cache, but not those of drafters that read them.)"""
    rows = []
    for name in ("ar", *names):
        for most in (BEGINNING, None):
            engine = None
            free()
            engine = build(name)
            asked = requests()
            for r in asked:
                r.max_new_tokens = min(r.max_new_tokens, most or r.max_new_tokens)
            answers = engine.generate(asked)
            seconds = {phase: x for phase, x in engine.seconds.items() if phase != "prefill"}
        tokens = sum(len(g.token_ids) for g in answers)
        if name == "ar":
            plain = answers
        rate = tokens / sum(seconds.values())
        rows.append({
            **about, "method": name, "tokens": tokens, "seconds": seconds, "tokens_per_second": rate,
            "speedup": rate / (rows[0]["tokens_per_second"] if rows else rate),
            "tau": summary(answers, engine)["tau"], "iterations": len(engine.iterations),
            "identical": sum(a.token_ids == b.token_ids for a, b in zip(answers, plain)),
        })
        del engine
        free()
    return rows


SECTIONS = {"floors": floors, "kernels": kernels, "decode": decode}


# -- tables ---------------------------------------------------------------------------------------

TABLES = {
    "floors": {"floor": "{what}", "per second": "{rate:.3g}"},
    "kernels": {
        "kernel": "{kernel}",
        "context": "{context}",
        "requests": "{batch}",
        "heads a KV head": "{group}",
        "seconds": "{seconds:.3g}",
        "share of copy speed": "{share:.0%}",
    },
    "decode": {
        "seconds a token of the plain loop, batch 1": "{seconds:.3g}",
        "share of copy speed": "{share:.0%}",
    },
    "speed": {
        "at once": "{batch}",
        "method": "{method}",
        "tokens/s": "{tokens_per_second:.0f}",
        "speed-up": "{speedup:.2f}",
        "tau": "{tau:.2f}",
        "identical to ar": "{identical} of {requests}",
    },
    "serving": {
        "requests x context": "{requests} x {context}",
        "method": "{method}",
        "tokens/s": "{tokens_per_second:.0f}",
        "speed-up": "{speedup:.2f}",
        "tau": "{tau:.2f}",
        "forwards": "{iterations}",
        "seconds in them": "{forward:.2f}",
        "beside them": "{seconds[other]:.2f}",
        "identical to ar": "{identical} of {requests}",
    },
}


def tables(r):
    """The sections of the suite, a table each; those that did not fit into memory are named at the
    end."""
    parts = []
    for section in (name for name in TABLES if name in r):
        rows = r[section]
        if section in ("kernels", "decode"):
            copied = r["floors"][0]["rate"]
            rows = [{**x, "share": x["bytes"] / x["seconds"] / copied} for x in rows]
        if section == "serving":
            rows = [{**x, "forward": x["seconds"]["draft"] + x["seconds"]["verify"]} for x in rows]
        parts.append(table(rows, TABLES[section]))
    if r["out_of_memory"]:
        parts.append(f"Out of memory: {'; '.join(r['out_of_memory'])}.")
    return "\n\n".join(parts)


def main():
    p = Parser(__doc__)
    p.add_argument("--quick", action="store_true", help="tiny shapes; not written to results/")
    p.add_argument("--data", default=os.environ.get("MINISPEC_DATA") or None, metavar="DIR",
                   help="folder of real prompt files (default $MINISPEC_DATA)")
    methods.add_arguments(p)
    p.set_defaults(device="cuda")
    args = p.parse_args()
    check_device(args.device)
    results.FOLDER += "/gpu"
    os.makedirs(results.FOLDER, exist_ok=True)
    started = time.perf_counter()
    model = checkpoints.load(args.model, args.device, torch.bfloat16)
    result = gpu(args, model, Tokenizer.load(args.model))
    result["table"] = tables(result)
    print(result["table"])
    if not args.quick:
        results.write("gpu", result, time.perf_counter() - started, args.device, results.dtype_name(model))


if __name__ == "__main__":
    run_main(main)
