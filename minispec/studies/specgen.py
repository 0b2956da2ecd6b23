"""What bench.py measures of the shipped models, the engine and SpecGen. Every study is a function (settings, target, tokenizer) ->
a dict that JSON can hold; `quick` is a tenth of the work. tables.py and figures.py say how each one is shown."""
import statistics

import torch
from tqdm import tqdm

from minispec import specgen
from minispec.tools import checkpoints
from minispec.data import tasks
from minispec.tools import methods
from minispec.tools.answers import requests_of, schedule_view, summary, tie_gap, verdict
from minispec.core.attention import FullKeys, mass_in_top, packed_attend
from minispec.core.engine import Engine
from minispec.core.kv_cache import KVCache


def warm_requests(tokenizer, model, context, new_tokens, n, seed=0):
    """Held-out `trace` problems entered in the middle: the prompt and the first part of the reference chain, `context`
    tokens in all, are given. A long context is reached in seconds, and all methods continue the same text."""
    size = tasks.lines_for(context + 2 * new_tokens)
    return requests_of([tasks.make("trace", seed + i, "heldout", size) for i in range(n)], tokenizer, model, new_tokens, warm=context)


def accuracy(args, model, tokenizer):
    """Share of held-out problems solved, greedy, at the trained difficulty; and `trace` with chains of 4,000 tokens."""
    n, rows = 20 if args.quick else 200, {}
    for name, family, size, count in [(f, f, None, n) for f in tasks.FAMILIES] + [("trace, 4,000 tokens", "trace", 4000 // tasks.TOKENS_PER_LINE, n // 4)]:
        problems = [tasks.make(family, i, "heldout", size) for i in range(count)]
        engine = methods.make_engine("ar", model, args, 16 if size else 32)
        requests = requests_of(problems, tokenizer, model)
        with tqdm(total=count, desc=name) as bar:
            for request, _ in engine.stream(requests):
                bar.update(int(request.finished))
        generations = [r.generation for r in requests]
        right = sum(verdict(p, g, tokenizer) for p, g in zip(problems, generations))
        rows[name] = {"size": [size, size] if size else list(tasks.SIZES[family]), "problems": count, "correct": right, "accuracy": right / count,
                      "mean_tokens": statistics.mean(len(g.token_ids) for g in generations), "finished": sum(g.finish == "stop" for g in generations)}
    return {"families": rows, "mean": statistics.mean(rows[f]["accuracy"] for f in tasks.FAMILIES)}


def lossless(args, model, tokenizer):
    """Greedy output against autoregressive output on held-out prompts of all families: identical in fp32; in bf16, where
    the number of rows changes rounding, a first difference must sit at a near-tie."""
    per_family, out = 4 if args.quick else 20, {}
    problems = [tasks.make(f, 1000 + i, "heldout") for f in tasks.FAMILIES for i in range(per_family)]
    for dtype in (torch.float32, torch.bfloat16):
        target = checkpoints.load(args.model, dtype=dtype)
        reference = methods.make_engine("ar", target, args, 10).generate(requests_of(problems, tokenizer, target))
        rows = {}
        for name in tqdm(methods.ready(args), desc=str(dtype)):
            got = methods.make_engine(name, target, args, 10).generate(requests_of(problems, tokenizer, target))
            gaps = [tie_gap(target, r.prompt_ids, r.token_ids, g.token_ids) for r, g in zip(reference, got) if r.token_ids != g.token_ids]
            rows[name] = {"prompts": len(problems), "identical": len(problems) - len(gaps), "largest_tie_gap": max(gaps, default=0.0)}
        out[str(dtype).removeprefix("torch.")] = {"methods": rows, "row_count_noise": row_count_noise(target, tokenizer)}
    return out


@torch.inference_mode()
def row_count_noise(model, tokenizer):
    """Largest difference of a logit between feeding a held-out chain one row at a time and nine rows at a time."""
    largest = 0.0
    for seed in range(4):
        p = tasks.make("trace", seed, "heldout", 12)
        ids = (tokenizer.prompt_ids(p.prompt) + tokenizer.encode(p.think))[:360]
        runs = []
        for n in (1, 9):
            cache, logits = KVCache(model.config, 360, model.dtype), []
            for start in range(0, 360, n):
                x, keys = torch.tensor(ids[start:start + n]), FullKeys(cache, 0, start, n)
                logits.append(model.logits(model(x, torch.arange(start, start + n), packed_attend([(0, n, keys)]))).float())
            runs.append(torch.cat(logits))
        largest = max(largest, (runs[0] - runs[1]).abs().max().item())
    return largest


class Captured(specgen.SpecGen):
    """SpecGen that notes, at every verification, how much of the attention mass on cached positions the round's selection
    had caught: (context, share) in engine.notes."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.record = True

    def _select(self, r, keys, accepted):
        if r.state and r.state.selected is not None:              # none at the end of a prompt
            n = keys.all.stop - keys.all.start - keys.n            # cached when the round began
            old = keys.scores[:, :, :n]
            caught = old.gather(2, r.state.selected).sum(-1) + old[:, :, n - r.state.recent:].sum(-1)
            self.engine.notes.append((n, (caught / old.sum(-1)).mean().item()))
        return super()._select(r, keys, accepted)


def attention(args, model, tokenizer):
    """Attention mass each layer's heads put on their own top 5 % of keys, at 2,000 and 4,000 tokens; and what SpecGen's
    selection of 5 % catches of it, from the beginning of a chain to its end: [context, mean over the rounds of its hundred, rounds]."""
    out, n = {}, 2 if args.quick else 8
    for at in (2000, 4000):
        masses = torch.stack([mass_in_top(model, torch.tensor([r.tokens]), 0.05) for r in warm_requests(tokenizer, model, at, 64, n)])
        out[str(at)] = {"layers": masses.mean((0, 2)).tolist(), "heads": masses.mean(0).tolist(), "mean": masses.mean().item()}
    captured = {}
    for select in ("ahead", "pillar", "window"):
        engine = Engine(model, lambda e: Captured(e, 8, 0.05, 64, 0.0, select), 4)
        engine.notes, problems = [], [tasks.make("trace", i, "heldout", 20 if args.quick else 100) for i in range(1 if args.quick else 4)]
        engine.generate(requests_of(problems, tokenizer, model))
        hundreds = {}
        for context, share in engine.notes:
            hundreds.setdefault(context // 100 * 100, []).append(share)
        captured[select] = [[context, statistics.mean(some), len(some)] for context, some in sorted(hundreds.items())]
    return {"mass": out, "captured": captured}


def acceptance(args, model, tokenizer):
    """SpecGen on long chains: accepted drafts and tau by selection, budget s, share of newest positions and k, at contexts
    of 4,000 tokens and more; one setting varies at a time."""
    n, new, rows = (2, 64, []) if args.quick else (8, 160, [])
    cells = [(select, 8, 0.05, 0.0) for select in ("oracle", "ahead", "pillar", "shared", "window", "random")]
    cells += [("pillar", 8, 0.05, share) for share in (0.25, 0.5, 0.75)] + [("ahead", 8, 0.05, 0.25)]
    cells += [(select, 8, s, 0.0) for select in ("ahead", "pillar") for s in (0.01, 0.02, 0.1, 0.25)] + [(select, 8, s, 0.0) for select in ("window", "random") for s in (0.02, 0.1)]
    cells += [("ahead", k, 0.05, 0.0) for k in (2, 4, 16, 20)] + [("ahead", 8, 1.0, 0.0)]
    for select, k, sparsity, share in tqdm(cells[:6] if args.quick else cells, desc="acceptance"):
        engine = Engine(model, lambda e: specgen.SpecGen(e, k, sparsity, 0, share, select), n)
        generations = engine.generate(warm_requests(tokenizer, model, 4000, new, n))
        # Rounds that the schedule or the end of the answer cut short are left out.
        steps = [[s for s in g.steps if s.proposed == k] for g in generations]
        means = [statistics.mean(s.accepted for s in one) for one in steps if one]
        rows.append({"select": select, "k": k, "sparsity": sparsity, "recent_share": share, "accepted": statistics.mean(means),
                     "standard_error": statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0,
                     "tau": statistics.mean(s.committed for one in steps for s in one), "rounds": sum(map(len, steps))})
    return {"context": 4000, "requests": n, "new_tokens": new, "rows": rows}


def busy(engine):
    """Seconds of decoding: everything but reading the prompts, which all methods do alike."""
    return engine.seconds["draft"] + engine.seconds["verify"] + engine.seconds["other"]


def phases(engine):
    """Seconds by phase of everything that an engine, or a diffusion model's decoder, has answered."""
    if not hasattr(engine, "iterations"):
        return {"sample": 0.0, "overhead": engine.seconds["other"], **{p: s for p, s in engine.seconds.items() if p != "other"}}
    return {p: sum(i["seconds"][p] for i in engine.iterations) for p in engine.iterations[0]["seconds"]}


def race(cells, repeats, desc, warm_up=True):
    """cells: {name: function that returns (engine, fresh requests)}. Runs them in turn, `repeats` times after one warm-up;
    {name: ([tokens a second], last engine, last generations)}."""
    out = {}
    for repeat in tqdm(range(repeats + warm_up), desc=desc):
        for name, build in cells.items():
            engine, requests = build()
            generations = engine.generate(requests)
            counts = repeat >= warm_up
            out[name] = out.get(name, ([],))[0] + [sum(len(g.token_ids) for g in generations) / busy(engine)] * counts, engine, generations
    return out


def ratio(rates, *baselines):
    """Median and range of the pairwise ratios to the fastest of the baselines."""
    ratios = [r / max(b) for r, b in zip(rates, zip(*baselines))]
    return {"tokens_per_second": statistics.median(rates), "speedup": statistics.median(ratios), "speedup_range": [min(ratios), max(ratios)]}


def iteration_seconds(engine):
    """Seconds of an iteration without prompts, and what of it is neither drafting nor verifying; medians."""
    spent = [i["seconds"] for i in engine.iterations if not i["prefill"]]
    return statistics.median(sum(s.values()) for s in spent), statistics.median(s["sample"] + s["overhead"] for s in spent)


def speed(args, model, tokenizer):
    """Tokens a second of every method in both dtypes, one request at a time, against the faster dtype of the autoregressive loop."""
    rows, targets = [], {"float32": model, "bfloat16": checkpoints.load(args.model, args.device, torch.bfloat16)}
    workloads = {f: (lambda t, f=f: requests_of([tasks.make(f, 500 + i, "heldout") for i in range(3)], tokenizer, t, 192)) for f in tasks.FAMILIES}
    workloads["trace at 4,000"] = lambda t: warm_requests(tokenizer, t, 4000, 128, 3)
    for workload, requests in workloads.items():
        rows += speed_rows(targets, args, workload, requests, 1, 1 if args.quick else 3)
    return {"batch": 1, "rows": rows}


def speed_rows(targets, args, workload, requests, batch, repeats):
    """Every method in every dtype of `targets`, on requests(target), against the fastest autoregressive loop among them."""
    rows, cells = [], {(m, d): (lambda m=m, t=t: (methods.make_engine(m, t, args, batch), requests(t))) for m in ["ar", *methods.ready(args)] for d, t in targets.items()}
    results = race(cells, repeats, workload)
    for (m, d), (rates, engine, generations) in results.items():
        rows.append({"workload": workload, "method": m, "dtype": d, **ratio(rates, *(results["ar", d][0] for d in targets)),
                     "tau": summary(generations, engine)["tau"],
                     "identical": sum(a.token_ids == b.token_ids for a, b in zip(results["ar", d][2], generations)), "prompts": len(generations)})
    return rows


def serving(args, model, tokenizer):
    """SpecGen where it should win: several requests with long contexts. Speed-up over the autoregressive loop of the same
    batch (the faster dtype), and what the cost model predicts from timings of single steps (for the same dtype)."""
    rows, targets = [], {"float32": model, "bfloat16": checkpoints.load(args.model, args.device, torch.bfloat16)}
    sweep = ((1000, 1), (8192, 1), (1000, 8), (4000, 8), (8192, 8), (1000, 16), (4000, 16))
    grid = [(1000, 2, 1)] if args.quick else [(context, batch, 5 if context * batch == 8 * 8192 else 2) for context, batch in sweep]
    for context, batch, pairs in grid:
        rows += serving_rows(targets, args, tokenizer, context, batch, pairs)
    return {"k": 8, "sparsity": args.sparsity, "rows": rows}


def serving_rows(targets, args, tokenizer, context, batch, pairs, new=96):
    """The rows of one context and batch, for the targets by dtype."""
    cells = {(m, d): (lambda m=m, t=t: (methods.make_engine(m, t, args, batch), warm_requests(tokenizer, t, context, new, batch)))
             for m in ("ar", "specgen") for d, t in targets.items()}
    rows, results = [], race(cells, pairs, f"{batch} requests at {context}")
    for (m, d), (rates, engine, generations) in results.items():
        row = {"context": context, "requests": batch, "pairs": pairs, "method": m, "dtype": d, **ratio(rates, *(results["ar", d][0] for d in targets)), "identical": None}
        if m == "specgen":
            accepted = statistics.mean(s.accepted for g in generations for s in g.steps if s.proposed == 8)
            costs = specgen.measure_costs(targets[d], context, batch, 8, args.sparsity, args.min_budget)
            own = statistics.median(rates) / statistics.median(results["ar", d][0])
            (step, host), (_, ours) = iteration_seconds(results["ar", d][1]), iteration_seconds(engine)
            costs["host_cost"] = max(ours - host, 0.0) / step
            row |= {"accepted": accepted, **costs, "own_speedup": own, "phase_seconds": dict(engine.seconds),
                    "predicted": specgen.predicted_speedup(8, accepted, **costs, rounds=new / (accepted + 1), batch=batch),
                    "identical": sum(a.token_ids == b.token_ids for a, b in zip(results["ar", d][2], generations))}
        rows.append(row)
    return rows


def scheduler(args, model, tokenizer):
    """The parts of SpecGen's system, one after the other; and how even the forwards are with 40 requests in steady state."""
    return {**cumulative(args, model, tokenizer, *((4, 8, 1) if args.quick else (8, 50, 2))), "evenness": evenness(args, model, tokenizer, 8 if args.quick else 40)}


def cumulative(args, model, tokenizer, n, lines, repeats):
    """n chains of so many lines at once, in a cache of half of what all of them may need."""
    problems = [tasks.make("trace", 700 + i, "heldout", lines) for i in range(n)]
    new = lambda: requests_of(problems, tokenizer, model)
    demand = sum(r.longest for r in new())
    stages = {"autoregressive, reserve": ("ar", {}), "naive self-speculation": ("specgen", {"schedule": "lockstep"}), "+ unified schedule": ("specgen", {}),
              "+ cache manager (offload)": ("specgen", {"admission": "offload"}), "+ delayed verification": ("specgen", {"admission": "offload", "delayed": True}),
              "preempt instead of offload": ("specgen", {"admission": "preempt"}), "oracle lengths": ("specgen", {"admission": "oracle"})}
    cells = {name: (lambda m=m, c=c: (methods.make_engine(m, model, methods.settings(**{**vars(args), "cache_tokens": demand // 2, **c}), n), new()))
             for name, (m, c) in stages.items()}
    results, rows = race(cells, repeats, "scheduler", warm_up=False), []
    plain = results["autoregressive, reserve"]
    for name, (rates, engine, generations) in results.items():
        rows.append({"stage": name, **ratio(rates, plain[0]), **schedule_view(engine),
                     "identical": sum(a.token_ids == b.token_ids for a, b in zip(plain[2], generations))})
    return {"requests": n, "cache_tokens": demand // 2, "demand": demand, "rows": rows}


def evenness(args, model, tokenizer, batch):
    """Rows of every forward in steady state, by schedule."""
    even = {}
    for schedule in specgen.SCHEDULES:
        engine = methods.make_engine("specgen", model, methods.settings(**{**vars(args), "schedule": schedule}), batch)
        engine.generate(requests_of([tasks.make("trace", i, "heldout", 12) for i in range(batch)], tokenizer, model, 120))
        steady = [i["draft"] + i["verify"] for i in engine.iterations if i["active"] == batch and not i["prefill"]][9:-9]
        even[schedule] = {"rows": steady, "mean": statistics.mean(steady), "deviation": statistics.pstdev(steady), "most": max(steady), "least": min(steady)}
    return even
