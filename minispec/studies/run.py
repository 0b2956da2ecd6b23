"""Every method on every workload: the default studies of bench.py, and `speed`.

    profile     the cost table of this machine                                   -> results/costs.json
    trace       the accepted drafts of every drafter at every position           -> results/traces.jsonl
    run         the speed of every method, next to plain decoding of the same batch
    bounds      the ladder of bounds from the first two files, next to the speed-ups of `run`
    speed       like run, with longer answers, in batches only of all workloads together; also trees, and
                prompt-lookup tokens next to a drafter's drafts
"""
import os
import statistics
from dataclasses import dataclass, replace

import numpy as np
import torch

from minispec import ROOT, traces
from minispec import bounds as ladder_of
from minispec.bounds import COMBINED
from minispec.core.verify import Sampling
from minispec.costs import CostTable, read_costs
from minispec.data import loops, tasks
from minispec.studies import measure, results
from minispec.studies.results import SAME, engine_of, identical, suitable, time_interleaved
from minispec.tools import methods
from minispec.tools.answers import requests_of, tau
from minispec.tools.files import naming, read_json, write_json
from minispec.tools.intervals import interval
from minispec.tools.markdown import table, texts


# -- sizes of the studies --------------------------------------------------------------------------

@dataclass
class Size:
    """new: tokens of an answer at most. traced: problems of each workload. batches, mixed: {batch size:
    number of problems}, for each workload and for all workloads together; sampled: like mixed, at
    temperature 0.7. deepest: drafts at each position of a trace. costs: the grid of the cost table."""
    new: int
    traced: int
    batches: dict
    mixed: dict
    sampled: dict
    deepest: int
    costs: dict


# Mixtures have the same number of problems of each workload.
SMALL = Size(160, 16, {1: 10, 4: 12, 16: 16}, {1: 12, 4: 24, 16: 48}, {1: 12}, 16, {})
# For a real model: twelve to fifteen minutes on two cores that multiply bf16. No round of the engine has more
# than 32 drafts, so no round that can be decoded is censored. The longest prompts have 1,400 tokens.
REAL = Size(64, 2, {1: 2}, {1: 9, 4: 9, 16: 18}, {}, 32,
            {"contexts": (64, 1024), "prompts": (32, 256, 1024)})
ANSWERS = Size(256, 10, {1: 10}, {2: 9, 4: 9, 8: 18, 16: 18}, {1: 9}, 32, {})
MEAN, DECODING = "mean (95 %)", "mean, decoding"
PRICED = 16                      # number of the problem, of each workload, that `profile` alone uses
WHOLE = "mixed, whole answers"   # a workload: greedy answers are not cut where they repeat themselves
QUICK = Size(32, 2, {1: 1}, {4: 8}, {4: 4}, 16,
             {"rows": (1, 4), "contexts": (64,), "drafts": (0, 1, 4), "prompts": (32, 64), "passes": 1})


def size(args, usual):
    """The usual Size of a study, or QUICK, or with --problems of each workload and mixtures in proportion."""
    if args.quick:
        return QUICK
    if not args.problems:
        return usual
    parts = {}
    for name in ("batches", "mixed", "sampled"):
        parts[name] = {b: n * args.problems // usual.traced for b, n in getattr(usual, name).items()}
    return replace(usual, traced=args.problems, **parts)


def size_of(args, tokenizer):
    """The Size of a ladder for this model: the puzzle model is fast enough for the larger one."""
    return size(args, SMALL if tokenizer.is_puzzle_model else REAL)


# -- profile ---------------------------------------------------------------------------------------

def profile(args, model, tokenizer):
    """The cost of a round on this machine, by batch, drafts and context; and the acceptance of each drafter,
    on problems that no other study uses, if a workload has enough of them. Also writes costs.json, except
    with --quick."""
    how = size_of(args, tokenizer)
    drafters, some = traces_of(args, model, tokenizer, how, 1, first=PRICED)
    costs = measure.cost_table(model, drafters, **how.costs)
    costs["accept"] = {name: measure.acceptance(some, name) for name in drafters}
    # By batch size, the number of drafts per round with the least time on these traces. Prices of batches
    # between those of the grid are interpolated.
    best_k = {}
    for rows in range(1, costs["verify"]["rows"][-1] + 1):
        fixed = ladder_of.ladder(some, CostTable(costs), rows)["total time"]["best fixed k"]
        best_k[str(rows)] = {name: best["k"] for name, best in fixed.items()}
    costs["about"] = {
        "device": results.device_name(args.device),
        "dtype": results.dtype_name(model),
        "torch": torch.__version__,
        "best_k": best_k,
    }
    if not args.quick:
        write_json(results.path("costs.json"), costs)
    reads = measure.attention_reads(model)
    return {"costs": costs, "reads": reads, "table": f"{costs_table(costs)}\n\n{table(reads, READS)}"}


def costs_table(costs):
    """The Markdown table of round costs in ms, at the shortest and the longest context of the grid."""
    grid = costs["verify"]
    rows = []
    for i, batch in enumerate(grid["rows"]):
        for c in sorted({0, len(grid["kv"]) - 1}):
            row = {"rows": batch, "context": grid["kv"][c]}
            for tokens, seconds in zip(grid["tokens"], grid["seconds"][i]):
                row[f"verify {tokens}, ms"] = f"{1000 * seconds[c]:.1f}"
            for name, own in costs["draft"].items():
                row[f"{name} {own['tokens'][-1]}, ms"] = f"{1000 * own['seconds'][i][-1][c]:.1f}"
            rows.append(row)
    return texts(rows)


READS = {
    "requests x tokens": "{batch}",
    "rows each": "{rows}",
    "forward, ms": "{ms:.1f}",
    "attention, ms": "{attention_ms:.1f}",
    "keys and values, MB": "{mb:.0f}",
    "GB/s": "{gb_s:.1f}",
    "memory, GB/s": "{memory_gb_s:.1f}",
    "of memory speed": "{share:.0%}",
}


# -- trace -----------------------------------------------------------------------------------------

def trace(args, model, tokenizer):
    """The accepted drafts of every drafter at every position of the plain loop's greedy answers. Also writes
    traces.jsonl, except with --quick."""
    how = size_of(args, tokenizer)
    drafters, some = traces_of(args, model, tokenizer, how, how.traced)
    if not args.quick:
        traces.write_traces(results.path("traces.jsonl"), some)
    rows = []
    for workload, own in ladder_of.by_workload(some).items():
        for name, drafter in drafters.items():
            gains = np.concatenate([t.accept[name][1:] for t in own])
            rows.append({"workload": workload, "drafter": name, "positions": len(gains),
                         "k": min(how.deepest, drafter.gamma), "gain": float(gains.mean()),
                         "censored": ladder_of.censored_share(own, [name])})
    return {"rows": rows, "table": table(rows, TRACE)}


TRACE = {
    "workload": "{workload}",
    "drafter": "{drafter}",
    "positions": "{positions}",
    "tokens a round would gain at a position": "{gain:.2f}",
    "most drafts": "{k}",
    "all of them accepted": "{censored:.1%}",
}


def traces_of(args, model, tokenizer, how, n, first=0):
    """({name: drafter} of chains, their traces) of the target's greedy answers, up to the point where they
    begin to repeat themselves, to n problems of each workload, starting with problem number `first`."""
    drafters = methods.chain_drafters(model, args, how.deepest)
    problems = numbered(tokenizer, n, args.data, first)
    requests = requests_of(problems.values(), tokenizer, model, how.new)
    # One at a time, as in `run`: in bf16 the answers of a batch may be others.
    answers = loops.generate(engine_of("ar", model, args, 1), requests)
    outputs = {id: (g.prompt_ids, g.token_ids) for id, g in zip(problems, answers)}
    return drafters, measure.traces_of(drafters, model, outputs, how.deepest)


def numbered(tokenizer, n, data, first=0):
    """{"workload/i": problem} of n problems of each workload, in turn: first problem 0 of every workload,
    then problem 1, and so on."""
    problems = results.problems_of(tokenizer, n, data, first)
    return {f"{w}/{i}": own[i] for i in range(n) for w, own in problems.items() if i < len(own)}


# -- run and speed ---------------------------------------------------------------------------------

def run(args, model, tokenizer):
    """Every method on every workload and on their mixture, by batch size, next to the plain loop of the same
    batch and dtype. For a real model SpecGen is left out; `serving` measures it on long texts.

    In a cell the methods take turns, the plain loop first, at batch 1 after every request: a machine's speed
    changes from minute to minute, and ratios do not. Diffusion models have studies of their own (cdlm.py).

    Every drafter has the best number of drafts per round for the batch by the cost table, unless --k gives it.
    At batch 1 trained drafters have none, because they end a chain where they are unsure.
    """
    how = size_of(args, tokenizer)
    names = suitable(args, model)
    if not (args.quick or tokenizer.is_puzzle_model):
        names = [name for name in names if name != "specgen"]    # these texts are too short for it
    rows, cut = observe("run", args, model, tokenizer, how, names)
    shares = [x | {phase: seconds / x["seconds"] for phase, seconds in x["phases"].items()} for x in rows]
    return {"rows": rows, "table": table(shares, RUN), "methods": texts(methods_table(rows)) + cut}


# The observed speed-ups, with each phase's share of the time.
RUN = {
    "workload": "{workload}",
    "batch": "{batch}",
    "method": "{method}",
    "tokens/s": "{tokens_per_second:.0f}",
    f"speed-up, {ladder_of.BOTH}": "{speedup:.2f} / {rate_speedup:.2f}",
    "tau": "{tau:.2f}",
    "accepted": "{acceptance:.0%}",
    **{phase: f"{{{phase}:.0%}}" for phase in ("prefill", "draft", "verify", "other")},
    "identical to ar": SAME,
}


def speed(args, model, tokenizer):
    """Long answers, at batch 1 and of all workloads together in batches: trained drafters with chains, with
    trees, and with prompt-lookup tokens next to their drafts; and `adaptive`, which chooses among drafters."""
    wanted = ("ngram", *methods.TRAINED, *TREES, *COPIES, COMBINED)
    names = [name for name in suitable(args, model, TREES + COPIES) if name in wanted]
    how = size(args, ANSWERS)
    # One prompt of each workload, of a real model alone.
    whole = {} if tokenizer.is_puzzle_model else {1: len(results.problems_of(tokenizer, 1, args.data))}
    rows, cut = observe("speed", args, model, tokenizer, how, names, whole)
    lines = methods_table(rows)
    found = {"rows": rows, "table": texts(lines) + cut,
             "means": {line["method"]: line[MEAN] for line in lines},
             "short": texts(short(lines, args), SHORT) + cut}
    if whole:
        found["loops"] = texts(loops_table(rows))
    return found


TREES = ["eagle --tree 8", "prism --tree 8"]
COPIES = [f"{name} --prompt-lookup 8" for name in methods.TRAINED]     # at batch 1 only
# Columns of the table in README.md.
SMALL_MODEL = "puzzle model"
SHORT = ("method", MEAN, DECODING, "mt_bench", "math_reasoning", "humaneval", "mixed, batch 8",
         "mixed, T = 0.7, batch 1", SMALL_MODEL, "identical to ar")
PAPERS = ("prism", "specdiff", COMBINED)


def observe(study, args, model, tokenizer, how, names, whole={}):
    """(result rows of a study that times methods next to the plain loop, a note on the answers that are cut);
    see `run`. whole: like how.mixed, for answers that are not cut."""
    names = ["ar", *names]
    problems = numbered(tokenizer, how.traced, args.data)
    longest, cut = before_loops(problems, tokenizer, model, args, how.new)
    prices = read_costs(args.cost) if os.path.exists(args.cost) else {}
    with naming(args.cost):
        # Of every batch size up to 16, see `profile`.
        best_k = {batch: dict(best) for batch, best in prices.get("about", {}).get("best_k", {}).items()}

    def measured(workload, batch, ids, temperature):
        def build(name):
            k = args.k
            if not k and (batch > 1 or name not in methods.TRAINED):
                k = best_k.get(str(batch), {}).get(name)
            requests = []
            for seed, i in enumerate(ids):
                new = how.new if temperature or workload == WHOLE else longest[i]
                sampling = Sampling(temperature, seed=seed)
                requests += requests_of([problems[i]], tokenizer, model, new, sampling)
            return engine_of(name, model, args, batch, k=k), requests

        some = [name for name in names if batch == 1 or name not in COPIES]
        # On a GPU a warm-up run compiles the kernels.
        desc = f"{workload}, batch {batch}"
        timed = time_interleaved(some, build, 1, desc, args.device != "cpu")
        about = {"workload": workload, "batch": batch, "ids": ids, "temperature": temperature}
        return rows_of(timed, about, prices)

    rows = results.each_kept(study, args, model, cells_of(list(problems), how, whole), measured,
                             new_tokens=how.new, methods=names, prices=prices)
    return sum(rows, []), cut


def before_loops(problems, tokenizer, model, args, new):
    """({id: tokens of the greedy answer to a problem, which ends where it begins to repeat itself}, a note on
    these ends). All drafters guess a loop, so loops flatter every speed-up."""
    requests = requests_of(problems.values(), tokenizer, model, new)
    answers = loops.generate(engine_of("ar", model, args, 1), requests)
    lengths = {id: len(g.token_ids) for id, g in zip(problems, answers)}
    cut = [len(g.token_ids) for g in answers if g.finish == "cancelled"]
    note = f"\n\n{len(cut)} of {len(answers)} greedy answers begin to repeat themselves and end there"
    return lengths, note + (f", after {statistics.mean(cut):.0f} tokens on average." if cut else ".")


def cells_of(ids, how, whole):
    """[(workload, batch, ids, temperature)] for each workload of the ids "workload/i", and for all workloads
    together, unless there are fewer problems than the batch has places."""
    some = [(w, f"{w}/", how.batches, 0.0) for w in dict.fromkeys(i.split("/")[0] for i in ids)]
    some += [("mixed", "", how.mixed, 0.0), ("mixed, T = 0.7", "", how.sampled, 0.7), (WHOLE, "", whole, 0.0)]
    cells = [(workload, batch, balanced([i for i in ids if i.startswith(prefix)], n), temperature)
             for workload, prefix, batches, temperature in some for batch, n in batches.items()]
    return [cell for cell in cells if len(cell[2]) >= cell[1]]


def balanced(ids, n):
    """About the first n of ids "workload/i": as many of each workload, at least one."""
    workloads = len({i.split("/")[0] for i in ids}) or 1
    return ids[:max(n - n % workloads, workloads)]


def rows_of(timed, about, prices):
    """The result rows of a cell, one for each method. about: entries that all rows get. prices: a cost table,
    or {} if there is none."""
    runs = {name: once for name, (once,) in timed.items()}
    plain = runs["ar"]
    rate = plain.tokens / plain.seconds
    cost = CostTable(prices) if prices else None
    rows = []
    for name, run in runs.items():
        plans = [g.rounds for g in run.generations]
        prompts = [len(g.prompt_ids) for g in run.generations]
        steps = sum(plans, [])
        proposed = sum(s.proposed for s in steps)
        method = name.split()[0]
        priced = cost and "--tree" not in name and method in ("ar", COMBINED, *cost.drafters)
        rows.append({
            **about,
            "method": name,
            "seconds": run.seconds,
            "tokens": run.tokens,
            "tokens_per_second": run.tokens / run.seconds,
            "speedup": run.tokens / run.seconds / rate,
            "decoding": run.decoding_rate / plain.decoding_rate,
            "rates": run.rates,
            "rate_speedup": statistics.mean(run.rates) / statistics.mean(plain.rates),
            "tau": tau(steps),
            "acceptance": sum(s.accepted for s in steps) / proposed if proposed else None,
            "phases": run.phases,
            "modelled": ladder_of.replay(plans, prompts, cost, about["batch"]) if priced else None,
            "identical": identical(plain, run),
            "prompts": len(prompts),
        })
    return rows


# -- their tables ----------------------------------------------------------------------------------

def methods_table(rows):
    """A line {head: text} for each method. Columns: each workload at batch 1, then the mixture of all
    workloads, in batches and sampled."""
    # The mixture repeats the other workloads' requests, so the mean leaves it out.
    by_method = {}                                       # method: {workload: row}
    for x in rows:
        if x["batch"] == 1 and not x["workload"].startswith("mixed"):
            by_method.setdefault(x["method"], {})[x["workload"]] = x
    plain = by_method["ar"]
    # The puzzle model was not trained on text like GSM8K, so its mean leaves GSM8K out.
    families = [w for w in plain if w in tasks.FAMILIES] or plain
    mixed = [x for x in rows
             if x["workload"].startswith("mixed") and x["workload"] != WHOLE
             and (x["batch"] > 1 or x["temperature"])]
    lines = []
    for method, some in by_method.items():
        line = {"method": method, MEAN: mean_speedup(some, plain, families)}
        line[DECODING] = f"{statistics.mean(some[w]['decoding'] for w in families):.2f}"
        template = "1, {tokens_per_second:.0f} tokens/s" if method == "ar" else "{speedup:.2f}, tau {tau:.1f}"
        line |= {w: template.format(**x) for w, x in some.items()}
        line |= {f"{x['workload']}, batch {x['batch']}": f"{x['speedup']:.2f}"
                 for x in mixed if x["method"] == method}
        same, asked = (sum(x[key] for x in some.values()) for key in ("identical", "prompts"))
        lines.append({**line, "identical to ar": f"{same} of {asked}"})
    return lines


def short(lines, args):
    """The lines of a real model with the puzzle model's means, if these were measured on such a device; the
    best mean of the papers' methods is bold."""
    of_small = methods.settings(model=methods.SHIPPED, device=args.device)
    file = f"{methods.results_of(of_small, ROOT + 'results')}/speed.json"
    with naming(file):
        small = read_json(file)["result"]["means"] if os.path.exists(file) else {}
    mean = lambda line: float(line[MEAN].split()[0])
    best = max((line for line in lines if line["method"].split()[0] in PAPERS), key=mean, default=None)
    return [{**line, SMALL_MODEL: small.get(line["method"], ""),
             MEAN: f"**{line[MEAN]}**" if line is best else line[MEAN]} for line in lines]


def mean_speedup(some, plain, workloads):
    """The mean speed-up over prompts, with its interval; the same prompt's tokens/s are compared."""
    own, others = (np.concatenate([rows[w]["rates"] for w in workloads]) for rows in (some, plain))
    ratios = own / others
    low, high = interval(lambda x: x.mean(-1), ratios)
    return f"{ratios.mean():.2f} ({low:.2f}-{high:.2f})"


def loops_table(rows):
    """A line {head: text} for each method: its mean speed-up on the same prompts, with answers cut where they
    begin to repeat themselves, and whole."""
    rate = {(x["method"], i): r for x in rows if not x["workload"].startswith("mixed")
            for i, r in zip(x["ids"], x["rates"])}
    whole = {x["method"]: x for x in rows if x["workload"] == WHOLE}
    lines = []
    for method, x in whole.items():
        cut = statistics.mean(rate[method, i] / rate["ar", i] for i in x["ids"])
        uncut = statistics.mean(r / plain for r, plain in zip(x["rates"], whole["ar"]["rates"]))
        lines.append({"method": method, "prompts": len(x["ids"]),
                      "answers that end at the loop": f"{cut:.2f}",
                      "whole answers": f"{uncut:.2f}", "tau of whole answers": f"{x['tau']:.1f}"})
    return lines


# -- bounds ----------------------------------------------------------------------------------------

def bounds(args, model, tokenizer):
    """The ladder of bounds, from the traces and the cost table measured here, next to the speed-ups of `run`.
    For other files: python -m minispec.bounds."""
    some = traces.read_traces(results.path("traces.jsonl"))
    prices, file = read_costs(args.cost), results.path("run.json")
    with naming(file):
        measured, about = read_json(file), prices.get("about", {})
        for name in ("device", "dtype"):
            if measured[name] != about.get(name, measured[name]):
                raise ValueError(f"{name} must be {about[name]} as in {args.cost}, got {measured[name]}; "
                                 "measure profile and run on one machine")
        found = ladder_of.analyse(some, prices, measured["result"]["rows"])
    whole = ladder_of.table(found)
    rows = [ladder_of.row_of(c, "all") for c in found["cells"] if c["workload"] in LADDERS]
    notes = whole.partition("\n\n")[2]
    drafts = ladder_of.drafts_table(found["best_drafts"])
    return {**found, "table": f"{whole}\n\n{drafts}", "drafts": drafts,
            "short": f"{texts(rows, RUNGS)}\n\n{notes}"}


# Rows and columns of the table in docs/bounds.md.
LADDERS = ("mt_bench", "math_reasoning", "humaneval", "edit", "mixed")
RUNGS = ("workload", "batch", "observed", "best fixed k", "optimum of one", "optimum of all", "free drafters",
         "one pass")
