"""What bench.py measures of SpecGen: attention mass and what a selection catches of it, accepted drafts,
long contexts, the parts of the system. Studies as in target.py."""
import statistics

import torch
from tqdm import tqdm

from minispec.core.attention import mass_in_top
from minispec.core.engine import Engine
from minispec.data import tasks
from minispec.specgen import SCHEDULES, SpecGen, predicted_speedup
from minispec.studies.sparse import Compared, measure_costs
from minispec.studies.timing import identical, iteration_seconds, race, ratio
from minispec.tools import checkpoints, methods
from minispec.tools.answers import requests_of, schedule_view

K = 8                   # drafts a round
NEW = 96                # tokens of an answer where throughput is measured
# (context, requests)
SERVING = ((1000, 1), (8192, 1), (1000, 8), (4000, 8), (8192, 8), (1000, 16), (4000, 16))


def warm_requests(tokenizer, model, context, new_tokens, n):
    """n held-out `trace` problems entered in the middle: the prompt and the first part of the reference
    chain, `context` tokens in all, are given. A long context is reached in seconds, and all methods
    continue the same text."""
    size = tasks.lines_for(context + 2 * new_tokens)
    problems = [tasks.make("trace", i, "heldout", size) for i in range(n)]
    return requests_of(problems, tokenizer, model, new_tokens, warm=context)


# -- attention -------------------------------------------------------------------------------------

class Captured(SpecGen):
    """SpecGen that notes, at every verification, how much of the attention mass on cached positions the
    round's selection had caught: (context, share) in engine.notes."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.record = True

    def _select(self, r, keys, accepted):
        if r.state and r.state.selected is not None:              # none at the end of a prompt
            cached = keys.all.stop - keys.all.start - keys.n       # when the round began
            scores = keys.scores[:, :, :cached]
            chosen = scores.gather(2, r.state.selected).sum(-1)
            newest = scores[:, :, cached - r.state.recent:].sum(-1)
            share = (chosen + newest) / scores.sum(-1)
            self.engine.notes.append((cached, share.mean().item()))
        return super()._select(r, keys, accepted)


def attention(args, model, tokenizer):
    """Attention mass each layer's heads put on their own top 5 % of keys, at 2,000 and 4,000 tokens; and
    what SpecGen's selection of 5 % catches of it along a chain: [context, mean over the rounds of its
    hundred, rounds]."""
    mass = {}
    for context in (2000, 4000):
        requests = warm_requests(tokenizer, model, context, 64, 2 if args.quick else 8)
        some = torch.stack([mass_in_top(model, torch.tensor([r.tokens]), 0.05) for r in requests])
        mass[str(context)] = {
            "layers": some.mean((0, 2)).tolist(),
            "mean": some.mean().item(),
        }
    selections = ("ahead", "pillar", "window")
    captured = {select: captured_along(select, args, model, tokenizer) for select in selections}
    return {"mass": mass, "captured": captured}


def captured_along(select, args, model, tokenizer):
    """[[context, mean share of the mass caught, rounds]] by hundreds of tokens of context, for one way to
    select."""
    n, lines = (1, 20) if args.quick else (4, 100)
    problems = [tasks.make("trace", i, "heldout", lines) for i in range(n)]
    engine = Engine(model, lambda e: Captured(e, K, 0.05, 64, 0.0, select), 4)
    engine.notes = []
    engine.generate(requests_of(problems, tokenizer, model))

    hundreds = {}
    for context, share in engine.notes:
        hundreds.setdefault(context // 100 * 100, []).append(share)
    return [[context, statistics.mean(some), len(some)] for context, some in sorted(hundreds.items())]


# -- acceptance ------------------------------------------------------------------------------------

def acceptance(args, model, tokenizer):
    """SpecGen on long chains: accepted drafts and tau by selection, budget s, share of newest positions and
    k, at contexts of 4,000 tokens and more. One setting varies at a time."""
    n, new = (2, 64) if args.quick else (8, 160)
    cells = [(select, K, 0.05, 0.0) for select in ("oracle", "ahead", "pillar", "shared", "window", "random")]
    if not args.quick:
        cells += [("pillar", K, 0.05, share) for share in (0.25, 0.5, 0.75)]
        cells += [("ahead", K, 0.05, 0.25)]
        cells += [(select, K, s, 0.0) for select in ("ahead", "pillar") for s in (0.01, 0.02, 0.1, 0.25)]
        cells += [(select, K, s, 0.0) for select in ("window", "random") for s in (0.02, 0.1)]
        cells += [("ahead", k, 0.05, 0.0) for k in (2, 4, 16, 20)]
        cells += [("ahead", K, 1.0, 0.0)]

    rows = []
    for select, k, sparsity, recent_share in tqdm(cells, desc="acceptance"):
        engine = Engine(model, lambda e: Compared(e, k, sparsity, 0, recent_share, select), n)
        generations = engine.generate(warm_requests(tokenizer, model, 4000, new, n))
        # Rounds that the schedule or the end of the answer cut short are left out.
        rounds = [[s for s in g.steps if s.proposed == k] for g in generations]
        means = [statistics.mean(s.accepted for s in some) for some in rounds if some]
        error = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0
        rows.append({
            "select": select,
            "k": k,
            "sparsity": sparsity,
            "recent_share": recent_share,
            "accepted": statistics.mean(means),
            "standard_error": error,
            "tau": statistics.mean(s.committed for some in rounds for s in some),
            "rounds": sum(map(len, rounds)),
        })
    return {"context": 4000, "requests": n, "new_tokens": new, "rows": rows}


# -- serving ---------------------------------------------------------------------------------------

def serving(args, model, tokenizer):
    """SpecGen where it should win: several requests with long contexts. Speed-up over the autoregressive
    loop of the same batch (the faster dtype), and what the cost model predicts from timings of single steps
    (for the same dtype)."""
    half = checkpoints.load(args.model, args.device, torch.bfloat16)
    targets = {"float32": model, "bfloat16": half}
    rows = []
    for context, batch in ((1000, 2),) if args.quick else SERVING:
        pairs = 1 if args.quick else 5 if context * batch == 8 * 8192 else 2
        rows += serving_rows(targets, args, tokenizer, context, batch, pairs)
    return {"k": K, "sparsity": args.sparsity, "rows": rows}


def serving_rows(targets, args, tokenizer, context, batch, pairs, new=NEW):
    """The rows of one context and batch, for the targets by dtype."""
    def build(method, target):
        return lambda: (methods.make_engine(method, target, args, batch),
                        warm_requests(tokenizer, target, context, new, batch))

    cells = {(m, dtype): build(m, target) for m in ("ar", "specgen") for dtype, target in targets.items()}
    runs = race(cells, pairs, f"{batch} requests at {context}")
    baselines = [runs["ar", dtype][0] for dtype in targets]
    rows = []
    for (method, dtype), run in runs.items():
        row = {"context": context, "requests": batch, "pairs": pairs, "method": method, "dtype": dtype,
               **ratio(run[0], *baselines), "identical": None}
        if method == "specgen":
            row.update(against_prediction(run, runs["ar", dtype], targets[dtype], args, context, batch, new))
        rows.append(row)
    return rows


def against_prediction(run, plain, target, args, context, batch, new):
    """What SpecGen did next to plain decoding in the same dtype, and what the cost model says that it
    should do. The model's terms are timed step by step and without CUDA graphs, so where graphs run there
    is no prediction."""
    rates, engine, generations = run
    plain_rates, plain_engine, plain_generations = plain
    accepted = statistics.mean(s.accepted for g in generations for s in g.steps if s.proposed == K)
    out = {
        "accepted": accepted,
        "own_speedup": statistics.median(rates) / statistics.median(plain_rates),
        "identical": identical(plain_generations, generations),
    }
    if engine.graphs:
        return out
    costs = measure_costs(target, context, batch, K, args.sparsity, args.min_budget)
    step, plain_host = iteration_seconds(plain_engine)
    _, host = iteration_seconds(engine)
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
    "preempt instead of offload": ("specgen", {"admission": "preempt"}),
    "oracle lengths": ("specgen", {"admission": "oracle"}),
}


def scheduler(args, model, tokenizer):
    """The parts of SpecGen's system, one after the other; and how even the forwards are with 40 requests in
    steady state."""
    n, lines, repeats = (4, 8, 1) if args.quick else (8, 50, 2)
    stages = cumulative(args, model, tokenizer, n, lines, repeats)
    return {**stages, "evenness": evenness(args, model, tokenizer, 8 if args.quick else 40)}


def cumulative(args, model, tokenizer, n, lines, repeats):
    """n chains of so many lines at once, in a cache of half of what all of them may need."""
    problems = [tasks.make("trace", 700 + i, "heldout", lines) for i in range(n)]
    demand = sum(r.longest for r in requests_of(problems, tokenizer, model))

    def build(method, changes):
        settings = methods.settings(**{**vars(args), "cache_tokens": demand // 2, **changes})
        return lambda: (methods.make_engine(method, model, settings, n),
                        requests_of(problems, tokenizer, model))

    runs = race({stage: build(*cell) for stage, cell in STAGES.items()}, repeats, "scheduler", warm_up=False)
    plain_rates, _, plain = runs["autoregressive, reserve"]
    rows = []
    for stage, (rates, engine, generations) in runs.items():
        rows.append({"stage": stage, **ratio(rates, plain_rates), **schedule_view(engine),
                     "identical": identical(plain, generations)})
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
        rows = [i["draft"] + i["verify"] for i in full][9:-9]         # without the first and the last round
        even[schedule] = {
            "rows": rows,
            "mean": statistics.mean(rows),
            "deviation": statistics.pstdev(rows),
            "most": max(rows),
            "least": min(rows),
        }
    return even
