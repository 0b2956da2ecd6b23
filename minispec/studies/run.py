"""Every method on every workload: what bench.py measures when it is asked for nothing else.

    profile     what a round costs on this machine                               -> results/costs.json
    trace       what every drafter would get accepted at every position          -> results/traces.jsonl
    run         how fast every method is, next to plain decoding of the same batch
    speed       the same for longer answers, mostly of one request at a time; trees and copies, too
    lossless    whether every method gives the very output of plain decoding, in fp32 and in bf16

`bounds` (bounds.py) computes what is possible from the first two, and holds it against the third. A study is
a function (settings, target, tokenizer) -> a dict that JSON can hold. `--quick` is a tenth of the work.
tables.py and figures.py say how each one is shown.
"""
import os
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from tqdm import tqdm

from minispec import traces
from minispec.bounds import COMBINED, by_workload, censored_share, ladder, replay
from minispec.core.verify import Sampling
from minispec.studies import measure, results, workloads
from minispec.studies.timing import engine_of, identical, race
from minispec.tools import checkpoints, methods
from minispec.tools.answers import requests_of, tie_gap
from minispec.tools.files import write_json


# -- how much is measured --------------------------------------------------------------------------

@dataclass
class Size:
    """new: most tokens of an answer. traced: problems of each workload. batches, mixed: {requests at once:
    how many problems} of each workload, and of all together; sampled: the same of all at temperature 1.
    deepest: drafts in traces. costs: the grid of the cost table. repeats: runs in turn, of which the middle
    one counts."""
    new: int
    traced: int
    batches: dict
    mixed: dict
    sampled: dict
    deepest: int
    costs: dict
    repeats: int = 1


SMALL = Size(160, 16, {1: 4, 4: 8, 16: 16}, {1: 12, 4: 12, 16: 24}, {1: 12}, 16, {}, repeats=3)
# Of SmolLM2, some ten minutes where two idle cores multiply bf16. No round of the engine has more than 32
# drafts, so nothing is censored that could be decoded.
REAL = Size(64, 2, {1: 2}, {1: 9, 4: 8, 16: 16}, {}, 32, {"contexts": (64, 512), "prompts": (32, 256)})
LONGER = ("bench.py speed takes half an hour: answers of 256 tokens, 4 problems of each workload "
          "instead of 2, sampled ones too, trees of drafts, copies next to drafts, a batch of 8. "
          "bench.py serving, as long: SpecGen, on long texts")
ANSWERS = Size(256, 4, {1: 4}, {8: 18}, {1: 6}, 32, {})
QUICK = Size(32, 2, {1: 1}, {4: 8}, {4: 4}, 16,
             {"rows": (1, 4), "contexts": (64,), "drafts": (0, 1, 4), "prompts": (32, 64), "passes": 1})


def size(args, tokenizer):
    """The small model is fast enough for the whole study."""
    if args.quick:
        return QUICK
    return SMALL if tokenizer.ours else REAL


# -- profile ---------------------------------------------------------------------------------------

def profile(args, model, tokenizer):
    """What a round costs on this machine, by rows, drafts and context; and how often drafters are right, on
    problems that are used nowhere else. Without --quick also costs.json."""
    how = size(args, tokenizer)
    drafters = methods.chain_drafters(model, args, how.deepest)
    table = measure.cost_table(model, drafters, **how.costs)

    some = traces_of(drafters, model, args, tokenizer, how, 1, first=how.traced)
    # Prompt lookup says itself what it expects.
    table["accept"] = {name: measure.acceptance(some, name) for name in drafters if name != "ngram"}
    # By rows, the drafts a round that would have cost least time for these traces.
    best_k = {}
    for rows in table["verify"]["rows"]:
        fixed = ladder(some, traces.CostTable(table), rows)["total time"]["L2"]
        best_k[str(rows)] = {name: best["k"] for name, best in fixed.items()}
    table["about"] = {
        "device": results.device_name(args.device),
        "dtype": results.dtype_name(model),
        "torch": torch.__version__,
        "best_k": best_k,
    }
    if not args.quick:
        write_json(results.path("costs.json"), table)
    return {"table": table, "reads": measure.attention_reads(model)}


# -- trace -----------------------------------------------------------------------------------------

def trace(args, model, tokenizer):
    """What every drafter would get accepted at every position of one frozen greedy output. Without --quick
    also traces.jsonl."""
    how = size(args, tokenizer)
    drafters = methods.chain_drafters(model, args, how.deepest)
    some = traces_of(drafters, model, args, tokenizer, how, how.traced)
    if not args.quick:
        traces.write_traces(results.path("traces.jsonl"), some)
    accepted = {w: statistics(t, list(drafters), 8) for w, t in by_workload(some).items()}
    return {"k_max": how.deepest, "k": 8, "accept": accepted}


def traces_of(drafters, model, args, tokenizer, how, n, first=0):
    """The traces of the target's own answers to n problems of each workload, from the first-th on."""
    problems = workloads.numbered(tokenizer, n, args.data, first)
    requests = requests_of(problems.values(), tokenizer, model, how.new)
    answers = engine_of("ar", model, args, 16).generate(requests)
    texts = {id: (g.prompt_ids, g.token_ids) for id, g in zip(problems, answers)}
    return measure.traces_of(drafters, model, texts, how.deepest)


def statistics(some, names, k):
    """{drafter: mean tokens that a round would gain, by position and by round of k drafts, and the censored
    share}. By position a long match is counted at each of its tokens, by round once."""
    out = {}
    for m in names:
        positions = np.concatenate([t.accept[m][1:] for t in some])
        if len(positions):
            out[m] = {
                "positions": len(positions),
                "by_position": float(positions.mean()),
                "by_round": sum(t.n_out - 1 for t in some) / sum(rounds(t, m, k) for t in some),
                "censored": censored_share(some, [m]),
            }
    return out


def rounds(trace, name, k):
    """How many rounds of up to k drafts an output takes."""
    n, position = 0, 1
    while position < trace.n_out:
        position += min(int(trace.accept[name][position]), k + 1)
        n += 1
    return n


# -- run -------------------------------------------------------------------------------------------

def run(args, model, tokenizer):
    """Every method on every workload and on all mixed, by batch, next to the autoregressive loop of the same
    batch and dtype; of a real model without SpecGen, which `serving` measures on long texts.

    In a cell all methods run in turn, the plain loop first: a machine's speed changes from minute to minute,
    ratios do not. The diffusion models give answers of their own and so are compared by tokens/s; `dlm`, a
    whole forward a token, gets one request of each workload.

    A drafter proposes as many drafts a round as the prices call best for the batch, unless --k says how many.
    Trained drafters end a chain by themselves, where they are unsure.
    """
    how = size(args, tokenizer)
    names = suitable(args, model)
    if how is REAL:
        print(LONGER)
        names = [name for name in names if name != "specgen"]    # for which these texts are too short
    return observe("run", args, model, tokenizer, how, names)


def speed(args, model, tokenizer):
    """Long answers, mostly one request at a time: trained drafters alone, in trees, with copies next to their
    drafts, and what chooses among them."""
    wanted = ("ngram", *methods.TRAINED, *ALONE, COMBINED)
    names = [name for name in suitable(args, model, ALONE) if name in wanted]
    return observe("speed", args, model, tokenizer, QUICK if args.quick else ANSWERS, names)


def observe(study, args, model, tokenizer, how, names):
    """The rows of a study that times methods next to the plain loop; see `run`."""
    names = ["ar", *names]
    problems = workloads.numbered(tokenizer, how.traced, args.data)
    prices = traces.read_costs(args.cost) if os.path.exists(args.cost) else {}
    best_k = prices.get("about", {}).get("best_k", {})

    def build(name, batch, ids, temperature):
        k = args.k or best_k.get(str(batch), {}).get(name)
        some = [problems[i] for i in ids]
        requests = requests_of(some, tokenizer, model, how.new, Sampling(temperature))
        return engine_of(name, model, args, batch, k=k), requests

    def measured(workload, batch, ids, temperature):
        ways = {}
        for name in names:
            if name == "dlm" and workload.startswith("mixed") or batch > 1 and name in ("dlm", *ALONE):
                continue
            ways[name] = partial(build, name, batch, ids[:1] if name == "dlm" else ids, temperature)
        # On a GPU a run before those that count compiles the kernels.
        timed = race(ways, how.repeats, f"{workload}, batch {batch}", args.device != "cpu")
        about = {"workload": workload, "batch": batch, "ids": ids, "temperature": temperature}
        return rows_of(timed, about, prices)

    rows = results.each_kept(study, args, model, cells_of(list(problems), how), measured, new_tokens=how.new,
                             methods=names, prices=prices)
    return {"new_tokens": how.new, "rows": sum(rows, [])}


def cells_of(ids, how):
    """[(workload, batch, ids, temperature)] of ids "workload/i", and of all workloads together."""
    cells = []
    for w in dict.fromkeys(i.split("/")[0] for i in ids):
        own = [i for i in ids if i.startswith(w + "/")]
        cells += [(w, batch, own[:n], 0.0) for batch, n in how.batches.items()]
    cells += [("mixed", batch, ids[:n], 0.0) for batch, n in how.mixed.items()]
    return cells + [("mixed, T = 1", batch, ids[:n], 1.0) for batch, n in how.sampled.items()]


def suitable(args, model, ways=()):
    """Of the methods that are ready, those that run with this target and these settings, and the `ways` of
    theirs; a line for each other one says why not."""
    fitting = []
    for name in methods.ready(args):
        try:
            methods.make_engine(name, model, args, 1)
            fitting.append(name)
        except ValueError as e:
            print(f"{name} is left out: {e}")
    return fitting + [way for way in ways if way.split()[0] in fitting]


def middle(runs):
    """The one of the median time; of an even number the faster of the two."""
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]


def rows_of(timed, about, prices):
    """The rows of a cell, one for each method. about: what they have in common. prices: a cost table, or {}
    where there is none."""
    plain = middle(timed["ar"])
    cost = traces.CostTable(prices) if prices else None
    rows = []
    for name, runs in timed.items():
        run = middle(runs)
        plans = [g.steps for g in run.generations]
        prompts = [len(g.prompt_ids) for g in run.generations]
        steps = sum(plans, [])
        proposed = sum(s.proposed for s in steps)
        method = name.split()[0]
        priced = cost and name not in TREES and method in ("ar", COMBINED, *cost.drafters)
        compared = method in methods.METHODS
        rows.append({
            **about,
            "method": name,
            "seconds": run.seconds,
            "tokens": run.tokens,
            "tokens_per_second": run.tokens / run.seconds,
            "speedup": run.tokens / run.seconds * plain.seconds / plain.tokens,
            "rate_speedup": run.request_rate / plain.request_rate,
            "tau": run.tau,
            "acceptance": sum(s.accepted for s in steps) / proposed if proposed else None,
            "phases": run.phases,
            "modelled": replay(plans, prompts, cost, about["batch"]) if priced else None,
            "identical": identical(plain, run) if compared else None,
            "prompts": len(prompts),
        })
    return rows


# -- losslessness ----------------------------------------------------------------------------------

# Ways of a method that decide which rows are fed together, or what is judged.
TREES = ["eagle --tree 8", "prism --tree 8"]
COPYING = [f"{name} --prompt-lookup 8" for name in methods.TRAINED]
ALONE = [*TREES, *COPYING]  # run with one request at a time: rows cost time where there are many
WAYS = [
    "specgen --delayed",
    "specgen --schedule lockstep",
    "specgen --prompt-lookup 40",
    "specgen --select pillar",
    "specgen --select window",
    "specgen --admission preempt --cache-tokens 2000",
    "specgen --admission offload --cache-tokens 2000",
    *TREES,
    "specdiff --k-drafts 3",
    # As many rows for each of ten requests as COPYING has for one.
    *(f"{name} --prompt-lookup 80" for name in methods.TRAINED),
]
# How answers are drawn, and requests at a time.
DRAWN = {
    "greedy": (Sampling(), 10),
    "T 0.65": (Sampling(0.65), 17),
    "T 1": (Sampling(1.0), 8),
    "top": (Sampling(1.0, 50, 0.9), 1),
}
LONGEST = 400           # tokens of a prompt of a real model, because reading takes longer than answering


def lossless(args, model, tokenizer):
    """Greedy and sampled output against autoregressive output: identical in fp32; in bf16, where the number
    of rows changes rounding, a first difference must sit at a near-tie."""
    new = 160 if tokenizer.ours else 48
    workload = workloads.problems_of(tokenizer, 4 if args.quick else 20, args.data)
    problems = [p for p in sum(workload.values(), [])
                if tokenizer.ours or len(tokenizer.prompt_ids(p.prompt)) <= LONGEST]
    names = [name for name in suitable(args, model, WAYS) if name.split()[0] in methods.METHODS]

    rows = []
    for dtype, some in (("float32", problems), ("bfloat16", problems[::5])):
        target = checkpoints.load(args.model, args.device, getattr(torch, dtype))

        def answers(name, drawn):
            sampling, batch = DRAWN[drawn]
            asked = some if drawn == "greedy" or dtype == "bfloat16" else some[::2 if tokenizer.ours else 5]
            requests = requests_of(asked, tokenizer, target, new, sampling)
            return engine_of(name, target, args, batch).generate(requests)

        plain = {drawn: answers("ar", drawn) for drawn in DRAWN}
        for name in tqdm(names, desc=dtype):
            row = {"method": name, "dtype": dtype, "prompts": len(some), "sampled": len(plain["T 1"])}
            gaps = []
            for drawn, (sampling, _) in DRAWN.items():
                pairs = list(zip(plain[drawn], answers(name, drawn)))
                row[drawn] = sum(a.token_ids == b.token_ids for a, b in pairs)
                gaps += [tie_gap(target, a.prompt_ids, a.token_ids, b.token_ids, replace(sampling, seed=i))
                         for i, (a, b) in enumerate(pairs)]
            rows.append({**row, "identical": row["greedy"], "largest_tie_gap": max(gaps)})
    return {"new_tokens": new, "rows": rows}
