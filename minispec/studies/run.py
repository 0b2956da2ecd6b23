"""Every method on every workload: what bench.py measures when it is asked for nothing else.

    profile     what a round costs on this machine                               -> results/costs.json
    trace       what every drafter would get accepted at every position          -> results/traces.jsonl
    run         how fast every method is, next to plain decoding of the same batch

`bounds` (ladder.py) computes what is possible from the first two, and holds it against the third. Studies
as in target.py.
"""
from dataclasses import dataclass

import torch

from minispec import cdlm
from minispec.bounds import by_workload
from minispec.core.requests import Request
from minispec.data import prompts, tasks, traces
from minispec.studies import cdlm as diffusion
from minispec.studies import ladder, measure, results
from minispec.studies.timing import identical, phases
from minispec.tools import checkpoints, methods
from minispec.tools.answers import converse, requests_of, summary, verdict
from minispec.tools.files import write_json

DEEPEST = 16            # most drafts a round in cost tables and traces
NEW = 160               # most tokens of an answer
FIRST = 800             # seed of the first held-out problem used here
REPEATS = 3             # runs in turn where one request at a time, or a mix, is timed; the middle one counts

# Batches of a family: (requests at once, kind, how many of its problems). "copies" are clones of one
# request, as in 2601.11580.
BATCHES = ((1, "different", 4), (4, "different", 8), (16, "different", 16), (16, "copies", 1))
MIXED = ((1, 12), (4, 12), (16, 24))


# -- profile ---------------------------------------------------------------------------------------

def profile(args, model, tokenizer):
    """What a round costs on this machine, by rows, drafts and context; and how often drafters are right, on
    problems that are used nowhere else. Without --quick also results/costs.json."""
    small = {"rows": (1, 4), "contexts": (64,), "drafts": (0, 1, 4)} if args.quick else {}
    drafters = methods.chain_drafters(model, args, DEEPEST)
    table, scatter = measure.cost_table(model, drafters, **small)

    n = 1 if args.quick else 2
    problems = [tasks.make(f, 600 + i, "heldout") for f in tasks.FAMILIES for i in range(n)]
    engine = methods.make_engine("ar", model, args, 16)
    answers = engine.generate(requests_of(problems, tokenizer, model, NEW))
    texts = [(g.prompt_ids, g.token_ids) for g in answers]
    # Prompt lookup is left out, because it says itself what it expects.
    table["accept"] = {name: measure.acceptance(d, model, texts)
                       for name, d in drafters.items() if name != "ngram"}
    table["about"] = {
        "device": results.device_name(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }
    if not args.quick:
        write_json(results.path("costs.json"), table)
    return {"table": table, "scatter": scatter}


# -- workloads -------------------------------------------------------------------------------------

def family_requests(tokenizer, model, n, data=None):
    """{"family/i": request}: the held-out problems on which outputs are frozen, traced and timed, the i-th
    of each family in turn. With a folder of real prompts also questions of GSM8K."""
    problems = {f: [tasks.make(f, FIRST + i, "heldout") for i in range(n)] for f in tasks.FAMILIES}
    if data:
        problems["gsm8k"] = prompts.load_named("gsm8k", data)[:n]
    requests = {f: requests_of(some, tokenizer, model, NEW) for f, some in problems.items()}
    return {f"{f}/{i}": requests[f][i] for i in range(n) for f in requests}


def workload_requests(args, model, tokenizer):
    """({"block/i": request}, {"block/i": problem}) of --workload: a family, a file of prompts known by
    name, or any other file; its blocks in turn. A second turn, "block/i/2", is asked after the target's own
    greedy answer, which every method gives."""
    n = 4 if args.quick else 16
    name = args.workload
    if name in tasks.FAMILIES:
        problems = [tasks.make(name, FIRST + i, "heldout") for i in range(n)]
    elif name in prompts.PROMPT_FILES:
        problems = prompts.load_named(name, args.data)
    else:
        problems = prompts.load_prompts(name)

    def requests(some):
        return requests_of(some, tokenizer, model, args.max_new_tokens or NEW)

    def answer(some):
        return methods.make_engine("ar", model, args, 1).generate(requests(some))

    blocks = {}
    for p in problems:
        blocks.setdefault(p.family, []).append(p)
    asked = {}
    for i in range(n):
        for block, some in blocks.items():
            if i < len(some):
                turns = converse([some[i]], answer) if some[i].turns else [(some[i], None, 1)]
                for problem, _, turn in turns:
                    asked[f"{block}/{i}/{turn}" if turn > 1 else f"{block}/{i}"] = problem
    return dict(zip(asked, requests(list(asked.values())))), asked


def cells_of(requests, mixed):
    """[(workload, batch, kind, ids)] of requests {"workload/i": ..}; mixed: also all workloads together."""
    ids = list(requests)
    workloads = dict.fromkeys(i.split("/")[0] for i in ids)
    cells = []
    for w in workloads:
        own = [i for i in ids if i.startswith(w + "/")]
        cells += [(w, batch, kind, own[:n]) for batch, kind, n in BATCHES]
    if mixed or len(workloads) > 1:
        cells += [("mixed", batch, "different", ids[:n]) for batch, n in MIXED]
    return cells


# -- trace -----------------------------------------------------------------------------------------

def trace(args, model, tokenizer):
    """What every drafter would get accepted at every position of one frozen greedy output. Without --quick
    also results/traces.jsonl."""
    requests = family_requests(tokenizer, model, 2 if args.quick else 16, args.data)
    generations = methods.make_engine("ar", model, args, 16).generate(list(requests.values()))
    texts = {name: (g.prompt_ids, g.token_ids) for name, g in zip(requests, generations)}
    drafters = methods.chain_drafters(model, args, DEEPEST)
    some = measure.traces_of(drafters, model, texts, DEEPEST)
    if not args.quick:
        traces.write_traces(results.path("traces.jsonl"), some)
    accepted = {w: ladder.statistics(t, list(drafters), 8) for w, t in by_workload(some).items()}
    return {
        "k_max": DEEPEST,
        "k": 8,
        "requests": len(texts),
        "accept": accepted,
    }


# -- run -------------------------------------------------------------------------------------------

def run(args, model, tokenizer):
    """Every method on every family and on all mixed, by batch, next to the autoregressive loop of the same
    batch and dtype.

    In a cell all methods run in turn; one request at a time and the mixed workload REPEATS times, of which
    the middle one counts. Copies are for methods that have a trace. The diffusion models, which give
    answers of their own and so are compared by tokens/s, run once; `dlm`, a whole forward a token, gets one
    request of each family.
    """
    if args.workload:
        requests, problems = workload_requests(args, model, tokenizer)
    else:
        requests, problems = family_requests(tokenizer, model, 4 if args.quick else 16, args.data), {}
    names = ["ar", *suitable(args, model)]
    cells = cells_of(requests, mixed=not args.workload)
    if args.quick:
        cells = [cell for cell in cells if cell[1] == 4]

    def measured(workload, batch, kind, ids):
        repeats = REPEATS if (workload == "mixed" or batch == 1) and not args.quick else 1
        timed = time_methods(names, args, model, requests, (workload, batch, kind, ids), repeats)
        rows = rows_of(timed, {"workload": workload, "batch": batch, "kind": kind, "ids": ids})
        if problems:
            for row in rows:
                generations = timed[row["method"]][-1].generations
                row["solved"] = solved([problems[i] for i in ids], generations, tokenizer)
        return rows

    same = {
        "new_tokens": args.max_new_tokens or NEW,
        "methods": names,
        "prices": traces.read_costs(args.cost) if "adaptive" in names else None,       # it plans with them
    }
    each = results.each_kept("run", args, model, same)
    rows = [row for rows in each(cells, measured) for row in rows]
    return {"new_tokens": same["new_tokens"], "rows": rows}


def suitable(args, model):
    """Of the methods that are ready, those for this target. A drafter of another one is left out with a
    line that says so."""
    out = []
    for name in methods.ready(args) + methods.diffusion_ready(args):
        try:
            methods.make_engine(name, model, args, 1)
            out.append(name)
        except ValueError as e:
            print(f"{name} is left out: {e}")
    return out


@dataclass
class Timed:
    """One run of a method: what is left of an engine when its cache and its graphs are gone."""
    seconds: float          # prompts included; capturing a GPU's graphs, once for every shape, is not
    phases: dict
    generations: list
    k: int                  # drafts a round; None where nobody drafts
    tau: float


def time_methods(names, args, model, requests, cell, repeats, warm_up=False):
    """{method: [Timed of every repeat]} of one cell (workload, batch, kind, ids), methods in turn."""
    workload, batch, kind, ids = cell
    copies = batch if kind == "copies" else 1
    timed = {}
    for repeat in range(-warm_up, repeats):
        for name in names:
            diffusion = name in methods.DIFFUSION
            if diffusion and repeat > 0 or kind == "copies" and (diffusion or name == "specgen"):
                continue
            if name == "dlm" and (batch > 1 or workload == "mixed"):
                continue
            asked = [requests[i] for i in (ids[:1] if name == "dlm" else ids)]
            engine = methods.make_engine(name, model, args, batch)
            generations = engine.generate([again(r) for r in asked for _ in range(copies)])
            if repeat >= 0:
                spent = phases(engine)
                drafts = not diffusion and name != "ar"
                run = Timed(sum(spent.values()), spent, generations, engine.planner.k if drafts else None,
                            summary(generations, engine)["tau"])
                timed.setdefault(name, []).append(run)
    return timed


def again(request):
    """The same request, not decoded yet."""
    return Request(request.tokens, request.max_new_tokens, stop_ids=request.stop_ids)


def middle(runs):
    """The one of the median time; of an even number the faster of the two."""
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]


def rows_of(timed, about):
    """The rows of a cell, one for each method. about: what they have in common, with the "ids" that were
    asked."""
    plain = middle(timed["ar"])
    plain_price = plain.seconds / tokens_of(plain.generations)
    rows = []
    for name, runs in timed.items():
        run = middle(runs)
        tokens = tokens_of(run.generations)
        steps = [s for g in run.generations for s in g.steps]
        lossless = name in methods.METHODS
        row = {
            **about,
            "method": name,
            "k": run.k,
            "seconds": run.seconds,
            "tokens": tokens,
            "tokens_per_second": tokens / run.seconds,
            "speedup": plain_price * tokens / run.seconds,
            "tau": run.tau,
            "acceptance": None,
            "rounds": len(steps),
            "phases": run.phases,
            "plans": None,
            "identical": identical(plain.generations, run.generations) if lossless else None,
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


def tokens_of(generations):
    return sum(len(g.token_ids) for g in generations)


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
