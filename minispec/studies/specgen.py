"""What bench.py measures of SpecGen: accepted drafts and attention mass on long texts, throughput, the parts
of the system. Studies as in target.py. What is read: see texts.py."""
import statistics
from functools import partial
from itertools import product

import torch

from minispec.core.cpu import PACKED_TYPES
from minispec.core.kv_cache import KVCache
from minispec.core.requests import Request
from minispec.core.verify import Sampling
from minispec.data import prompts, tasks
from minispec.specgen import SCHEDULES, predicted_speedup
from minispec.studies import results, texts
from minispec.studies.replay import Replay, Text, read, replay
from minispec.studies.sparse import measure_costs
from minispec.studies.timing import identical, race, ratio
from minispec.tools import checkpoints, methods
from minispec.tools.answers import requests_of, schedule_view

K, SPARSITY = 8, 0.05
CONTEXTS = (1000, 2000, 4000, 7000)
BEFORE, AFTER = 17, 112                 # rows that are recorded before a context and behind it
SELECTIONS = ("oracle", "pillar", "ahead", "window")
# One setting varies at a time, at this context.
VARIED_AT = 4000
VARIED = [("pillar", k, SPARSITY) for k in (4, 16)] + [("pillar", K, s) for s in (0.01, 0.02, 0.1)]
DISTINCT = 2                            # texts of a larger batch, because reading takes longer than decoding
NEW = 64                                # tokens of an answer where throughput is measured
SERVING = ((1000, 1), (4000, 1), (7000, 1), (1000, 8), (4000, 8), (7000, 8))


# -- acceptance ------------------------------------------------------------------------------------

def acceptance(args, model, tokenizer):
    """What SpecGen gets accepted along long texts, by kind of text, context, selection, k and budget; and
    where attention goes."""
    contexts = CONTEXTS[:1] if args.quick else CONTEXTS
    kinds = texts.kinds(tokenizer)

    def along(kind):
        """By context how repetitive the text is, the attention mass by layer, and [[select, k, sparsity, mean
        accepted by rejection, by the greedy rule, rounds]]."""
        ids = texts.text(kind, 0, contexts[-1] + AFTER, model, tokenizer, args.data)
        text = Text(model, ids)
        out = {}
        for context in text.contexts(contexts, BEFORE, AFTER):
            settings = [*product(SELECTIONS, (K,), (SPARSITY,))] + VARIED * (context == VARIED_AT)
            replays = [Replay(text, context, *setting) for setting in settings]
            replay(text, replays, context + AFTER)
            rows = [[*setting, statistics.mean(r.accepted), statistics.mean(r.greedy), len(r.accepted)]
                    for setting, r in zip(settings, replays)]
            repeated = texts.repeated(ids[:context + AFTER], AFTER)
            out[str(context)] = {"repeated": repeated, "mass": text.mass, "rows": rows}
        return out

    found = results.each_kept("acceptance", args, model, {})([(kind,) for kind in kinds], along)
    return {"k": K, "sparsity": SPARSITY, "kinds": dict(zip(kinds, found))}


# -- serving ---------------------------------------------------------------------------------------

def serving(args, model, tokenizer):
    """Several requests with long contexts: decoded tokens/s of SpecGen and of the autoregressive loop, greedy
    and sampled, and what the cost model predicts from timings of single steps."""
    targets = {"float32": model}
    if torch.bfloat16 in PACKED_TYPES:                           # else it is slower than fp32 here
        targets["bfloat16"] = checkpoints.load(args.model, args.device, torch.bfloat16)

    def measure(context, batch):
        return serving_rows(targets, args, tokenizer, context, batch, 1 if args.quick else 2)

    each = results.each_kept("serving", args, model, {"new": NEW})
    rows = each(((1000, 2),) if args.quick else SERVING, measure)
    return {"k": K, "sparsity": args.sparsity, "rows": sum(rows, [])}


def serving_rows(targets, args, tokenizer, context, batch, pairs, new=NEW):
    """The rows of one context and batch, for the targets by dtype."""
    model = next(iter(targets.values()))
    kinds = texts.kinds(tokenizer)
    ids = [texts.text(kinds[i % len(kinds)], i // len(kinds), context, model, tokenizer, args.data)
           for i in range(min(batch, DISTINCT))]
    ids = (ids * batch)[:batch]
    rows = []
    for temperature in (0.0, 1.0):
        cells = {}
        for dtype, target in targets.items():
            cells |= warm_cells(target, args, dtype, ids, temperature, new)
        runs = race(cells, pairs, f"{batch} requests at {context}", see=seen)
        baselines = [runs["ar", dtype] for dtype in targets]
        for (method, dtype), timed in runs.items():
            some = [texts.repeated(g.prompt_ids + g.token_ids, new) for g in timed[-1].generations]
            row = {"context": context, "requests": batch, "pairs": pairs, "method": method, "dtype": dtype,
                   "temperature": temperature, **ratio(timed, *baselines),
                   "repeated": statistics.mean(some), "identical": None}
            if method == "specgen":
                row |= against_prediction(timed, runs["ar", dtype], targets[dtype], args, context, batch, new)
            if temperature:                                      # the same distribution, other tokens
                row["identical"] = None
            rows.append(row)
    return rows


def seen(engine):
    """Whether graphs run, and medians over the iterations without prompts: seconds of one, and what of it is
    neither drafting nor verifying."""
    spent = [i["seconds"] for i in engine.iterations if not i["prefill"]]
    whole = statistics.median(sum(s.values()) for s in spent)
    host = statistics.median(s["sample"] + s["overhead"] for s in spent)
    return bool(engine.graphs), whole, host


def warm_cells(model, args, dtype, prompts, temperature, new):
    """{(method, dtype): build} for `race`: plain decoding and SpecGen behind prompts (ids) that are read
    once, before the first run, into a cache that all runs share."""
    longest = len(prompts[0]) + new
    planner = methods.make_engine("specgen", model, args, len(prompts)).planner
    slots = longest + planner.extra_slots(Request(prompts[0], new))
    cache = KVCache(model.config, slots * len(prompts), model.dtype, model.device, spare=1)
    # Requests enter in order, so the i-th has the i-th run of slots. There are DISTINCT prompts, again and
    # again.
    for i, ids in enumerate(prompts[:DISTINCT]):
        read(model, torch.tensor(ids, device=model.device), cache, 0, len(ids), i * longest)
    once = DISTINCT * longest
    for base in range(once, len(prompts) * longest, longest):
        for x in (cache.k, cache.v):
            x[:, :, base:base + longest] = x[:, :, base - once:base - once + longest]

    def build(method):
        engine = methods.make_engine(method, model, args, len(prompts))
        engine.cache = cache
        requests = [Request(ids, new, Sampling(temperature, seed=i)) for i, ids in enumerate(prompts)]
        for r in requests:
            r.n_cached = len(r.tokens) - K - 1                   # the last rows are read again, and recorded
        return engine, requests

    return {(method, dtype): partial(build, method) for method in ("ar", "specgen")}


def against_prediction(timed, plain, target, args, context, batch, new):
    """What SpecGen did next to plain decoding in the same dtype, and what the cost model says that it
    should do. The model's terms are timed step by step and without CUDA graphs, so where graphs run there
    is no prediction."""
    last, graphs, _, host = timed[-1], *timed[-1].seen
    _, step, plain_host = plain[-1].seen
    rate, plain_rate = (statistics.median(run.decoding_rate for run in runs) for runs in (timed, plain))
    accepted = statistics.mean(s.accepted for g in last.generations for s in g.steps if s.proposed == K)
    out = {
        "accepted": accepted,
        "own_speedup": rate / plain_rate,
        "identical": identical(plain[-1], last),
    }
    if graphs:
        return out
    costs = measure_costs(target, context, batch, K, args.sparsity, args.min_budget)
    costs["host_cost"] = max(host - plain_host, 0.0) / step
    rounds = new / (accepted + 1)
    out["predicted"] = predicted_speedup(K, accepted, **costs, rounds=rounds, batch=batch)
    return {**out, **costs}


# -- the system ------------------------------------------------------------------------------------

STAGES = {              # {stage: (method, settings)}
    "autoregressive, reserve": ("ar", {}),
    "naive self-speculation": ("specgen", {"schedule": "lockstep"}),
    "+ unified schedule": ("specgen", {}),
    "+ cache manager (offload)": ("specgen", {"admission": "offload"}),
    "+ delayed verification": ("specgen", {"admission": "offload", "delayed": True}),
}


def scheduler(args, model, tokenizer):
    """The parts of SpecGen's system, one after the other; and how even the forwards of 40 requests are in
    steady state."""
    n, size, repeats = (4, 8, 1) if args.quick else (8, 50 if tokenizer.ours else 160, 2)
    stages = cumulative(args, model, tokenizer, n, size, repeats)
    if tokenizer.ours:                                           # rows are rows, whose model it is
        stages["evenness"] = evenness(args, model, tokenizer, 8 if args.quick else 40)
    return stages


def cumulative(args, model, tokenizer, n, size, repeats):
    """n chains of `size` lines at once, or answers to n questions of MT-bench of at most so many tokens, in a
    cache of half of what all of them may need."""
    if tokenizer.ours:
        problems = [tasks.make("trace", 700 + i, "heldout", size) for i in range(n)]
    else:
        problems = prompts.load_named("spec_bench", args.data)[:n]
    limit = None if tokenizer.ours else size

    def requests():
        return requests_of(problems, tokenizer, model, limit)

    demand = sum(r.longest for r in requests())

    def build(method, changes):
        settings = methods.settings(**{**vars(args), "cache_tokens": demand // 2, **changes})
        return methods.make_engine(method, model, settings, n), requests()

    cells = {stage: partial(build, *cell) for stage, cell in STAGES.items()}
    runs = race(cells, repeats, "scheduler", warm_up=False, see=schedule_view)
    plain = runs["autoregressive, reserve"]
    rows = []
    for stage, timed in runs.items():
        last = timed[-1]
        host = (last.phases["sample"] + last.phases["overhead"]) / last.seconds
        rows.append({"stage": stage, **ratio(timed, plain), **last.seen, "host": host,
                     "identical": identical(plain[-1], last)})
    return {"requests": n, "cache_tokens": demand // 2, "demand": demand, "rows": rows}


def evenness(args, model, tokenizer, batch):
    """Rows of every forward in steady state, by schedule."""
    problems = [tasks.make("trace", i, "heldout", 12) for i in range(batch)]
    even = {}
    for schedule in SCHEDULES:
        settings = methods.settings(**{**vars(args), "schedule": schedule})
        engine = methods.make_engine("specgen", model, settings, batch)
        engine.generate(requests_of(problems, tokenizer, model, 120))
        full = [i for i in engine.iterations if i["active"] == batch and not i["prefill"]]
        # Without the first and the last round.
        even[schedule] = [i["draft"] + i["verify"] for i in full][9:-9]
    return even
