"""Every method on every workload: what bench.py measures when it is asked for nothing else.

    profile     what a round costs on this machine                               -> results/costs.json
    trace       what every drafter would get accepted at every position          -> results/traces.jsonl
    run         how fast every method is, next to plain decoding of the same batch

`bounds` (ladder.py) computes what is possible from the first two, and holds it against the third. Studies
as in target.py.
"""
from dataclasses import dataclass, field
from functools import partial

import torch

from minispec import cdlm
from minispec.bounds import by_workload
from minispec.core.engine import Engine
from minispec.core.requests import Request
from minispec.data import traces
from minispec.studies import cdlm as diffusion
from minispec.studies import ladder, measure, results, workloads
from minispec.studies.timing import identical, race
from minispec.tools import checkpoints, methods
from minispec.tools.answers import requests_of, verdict
from minispec.tools.files import write_json


# -- how much is measured --------------------------------------------------------------------------

@dataclass
class Size:
    """new: most tokens of an answer. traced: problems of each workload. batches: (requests at once, kind,
    how many problems) of a workload; "copies" are clones of one request, as in 2601.11580. mixed: (requests
    at once, how many problems) of all workloads together. deepest: drafts in traces. costs: the grid of the
    cost table. repeats: runs in turn where one request at a time, or a mix, is timed; the middle one
    counts."""
    new: int
    traced: int
    batches: tuple
    mixed: tuple
    deepest: int
    costs: dict = field(default_factory=dict)
    repeats: int = 1


LONG = Size(160, 16, ((1, "different", 4), (4, "different", 8), (16, "different", 16), (16, "copies", 1)),
            ((1, 12), (4, 12), (16, 24)), 16, repeats=3)
# Ten minutes of a real model on two slow cores are a short answer of each workload, and a mix. No round of
# the engine has more than 32 drafts, so nothing is censored that could be decoded.
GRID = {"rows": (1, 4), "contexts": (64, 1024), "drafts": (0, 1, 4, 16), "prompts": (32, 256), "passes": 2}
SHORT = Size(32, 2, ((1, "different", 1),), ((4, 8),), 32, GRID)
MORE = "--long adds batch 16, copies, 16 problems of each workload, answers of 160 tokens and repeats"


def size(args, tokenizer):
    """The small model is fast enough for the long study."""
    return LONG if tokenizer.ours or args.long else SHORT


# -- profile ---------------------------------------------------------------------------------------

def profile(args, model, tokenizer):
    """What a round costs on this machine, by rows, drafts and context; and how often drafters are right, on
    problems that are used nowhere else. Without --quick also costs.json."""
    how = size(args, tokenizer)
    grid = {"rows": (1, 4), "contexts": (64,), "drafts": (0, 1, 4)} if args.quick else how.costs
    drafters = methods.chain_drafters(model, args, how.deepest)
    table, scatter = measure.cost_table(model, drafters, **grid)

    # Prompt lookup is left out, because it says itself what it expects.
    asked = {name: d for name, d in drafters.items() if name != "ngram"}
    if asked:
        problems = workloads.problems_of(tokenizer, 1 if args.quick else 2, args.data, first=how.traced)
        some = requests_of(sum(problems.values(), []), tokenizer, model, how.new)
        answers = methods.make_engine("ar", model, args, 16).generate(some)
        texts = [(g.prompt_ids, g.token_ids) for g in answers]
        table["accept"] = {name: measure.acceptance(d, model, texts) for name, d in asked.items()}
    table["about"] = {
        "device": results.device_name(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }
    if not args.quick:
        write_json(results.path("costs.json"), table)
    return {"table": table, "scatter": scatter}


# -- cells -----------------------------------------------------------------------------------------

def cells_of(requests, how, mixed):
    """[(workload, batch, kind, ids)] of requests {"workload/i": ..}; mixed: also all workloads together."""
    ids = list(requests)
    names = dict.fromkeys(i.split("/")[0] for i in ids)
    cells = []
    for w in names:
        own = [i for i in ids if i.startswith(w + "/")]
        cells += [(w, batch, kind, own[:n]) for batch, kind, n in how.batches]
    if mixed or len(names) > 1:
        cells += [("mixed", batch, "different", ids[:n]) for batch, n in how.mixed]
    return cells


# -- trace -----------------------------------------------------------------------------------------

def trace(args, model, tokenizer):
    """What every drafter would get accepted at every position of one frozen greedy output. Without --quick
    also traces.jsonl."""
    how = size(args, tokenizer)
    requests = workloads.requests(args, model, tokenizer, 2 if args.quick else how.traced, how.new)
    generations = methods.make_engine("ar", model, args, 16).generate(list(requests.values()))
    texts = {name: (g.prompt_ids, g.token_ids) for name, g in zip(requests, generations)}
    drafters = methods.chain_drafters(model, args, how.deepest)
    some = measure.traces_of(drafters, model, texts, how.deepest)
    if not args.quick:
        traces.write_traces(results.path("traces.jsonl"), some)
    accepted = {w: ladder.statistics(t, list(drafters), 8) for w, t in by_workload(some).items()}
    return {
        "k_max": how.deepest,
        "k": 8,
        "requests": len(texts),
        "accept": accepted,
    }


# -- run -------------------------------------------------------------------------------------------

def run(args, model, tokenizer):
    """Every method on every workload and on all mixed, by batch, next to the autoregressive loop of the same
    batch and dtype.

    In a cell all methods run in turn, the plain loop first: a machine's speed changes from minute to minute,
    ratios do not. Copies are for methods that have a trace. The diffusion models give answers of their own
    and so are compared by tokens/s; `dlm`, a whole forward a token, gets one request of each workload.
    """
    how = size(args, tokenizer)
    new = args.max_new_tokens or how.new
    if args.workload:
        requests, problems = workloads.own_requests(args, model, tokenizer, new)
    else:
        requests = workloads.requests(args, model, tokenizer, 4 if args.quick else how.traced, new)
        problems = {}
    names = ["ar", *suitable(args, model)]
    cells = cells_of(requests, how, mixed=not args.workload)
    if args.quick:
        cells = [cell for cell in cells if cell[1] == 4]

    def measured(workload, batch, kind, ids):
        many = (workload == "mixed" or batch == 1) and not args.quick
        cell = workload, batch, kind, ids
        timed = time_methods(names, args, model, requests, cell, how.repeats if many else 1)
        rows = rows_of(timed, {"workload": workload, "batch": batch, "kind": kind, "ids": ids})
        if problems:
            for row in rows:
                generations = timed[row["method"]][-1].generations
                row["solved"] = solved([problems[i] for i in ids], generations, tokenizer)
        return rows

    same = {
        "new_tokens": new,
        "methods": names,
        "prices": traces.read_costs(args.cost) if "adaptive" in names else None,       # it plans with them
    }
    each = results.each_kept("run", args, model, same)
    rows = [row for rows in each(cells, measured) for row in rows]
    if how is SHORT:
        print(MORE)
    return {"new_tokens": new, "rows": rows}


def suitable(args, model):
    """Of the methods that are ready, those for this target; a line names the others."""
    fitting, others = [], []
    for name in methods.ready(args) + methods.diffusion_ready(args):
        try:
            methods.make_engine(name, model, args, 1)
            fitting.append(name)
        except ValueError:
            others.append(name)
    if others:
        print(f"left out, because they were trained for another target: {', '.join(others)}")
    return fitting


def drafts_of(engine):
    """Drafts a round; None for a decoder that has no rounds."""
    return engine.planner.k if isinstance(engine, Engine) else None


def time_methods(names, args, model, requests, cell, repeats, warm_up=False):
    """{method: [Run of every repeat]} of one cell (workload, batch, kind, ids), methods in turn."""
    workload, batch, kind, ids = cell
    copies = batch if kind == "copies" else 1

    def build(name, ids):
        engine = methods.make_engine(name, model, args, batch)
        asked = [requests[i] for i in ids for _ in range(copies)]
        return engine, [Request(r.tokens, r.max_new_tokens, stop_ids=r.stop_ids) for r in asked]

    cells = {}
    for name in names:
        if kind == "copies" and (name in methods.DIFFUSION or name == "specgen"):
            continue
        if name == "dlm" and (batch > 1 or workload == "mixed"):
            continue
        cells[name] = partial(build, name, ids[:1] if name == "dlm" else ids)
    return race(cells, repeats, f"{workload}, batch {batch}", warm_up, drafts_of)


def middle(runs):
    """The one of the median time; of an even number the faster of the two."""
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]


def rows_of(timed, about):
    """The rows of a cell, one for each method. about: what they have in common, with the "ids" that were
    asked."""
    plain = middle(timed["ar"])
    rows = []
    for name, runs in timed.items():
        run = middle(runs)
        steps = [s for g in run.generations for s in g.steps]
        lossless = name in methods.METHODS
        row = {
            **about,
            "method": name,
            "k": run.seen,
            "seconds": run.seconds,
            "tokens": run.tokens,
            "tokens_per_second": run.tokens / run.seconds,
            "speedup": run.tokens / run.seconds * plain.seconds / plain.tokens,
            "rate_speedup": run.request_rate / plain.request_rate,
            "tau": run.tau,
            "acceptance": None,
            "rounds": len(steps),
            "phases": run.phases,
            "plans": None,
            "identical": identical(plain, run) if lossless else None,
            "prompts": len(run.generations),
        }
        if len(runs) > 1:
            ratios = [a.seconds / b.seconds for a, b in zip(timed["ar"], runs)]
            row["speedup_range"] = [min(ratios), max(ratios)]
        if lossless and name != "ar":
            row["acceptance"] = sum(s.accepted for s in steps) / (sum(s.proposed for s in steps) or 1)
        if name == ladder.COMBINED:
            row["plans"] = {i: ladder.pack(g.steps) for i, g in zip(about["ids"], run.generations)}
        rows.append(row)
    return rows


def solved(problems, generations, tokenizer):
    """[answers that are right, answers that can be checked]"""
    verdicts = [verdict(p, g, tokenizer) for p, g in zip(problems, generations)]
    known = [v for v in verdicts if v is not None]
    return [sum(known), len(known)]


# -- diffusion models ------------------------------------------------------------------------------

def cdlm_accuracy(args, model, tokenizer):
    """The study of studies/cdlm.py, kept row by row, because it takes long."""
    folders = {name: folder for name, (_, folder) in cdlm.METHODS.items()}
    prints = {name: checkpoints.fingerprint(checkpoints.load(folder)) for name, folder in folders.items()}
    each = results.each_kept("cdlm_accuracy", args, model, prints)
    return diffusion.cdlm_accuracy(args, model, tokenizer, each)
