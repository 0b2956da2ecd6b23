"""What bench.py measures of trained drafters: arms of the PRISM family, objectives of SpecDiff-2, what shapes of drafts are worth.
Studies as in studies.py. Accepted length is tau: tokens that a round commits, its own token included, summed over all rounds
and divided by their number; intervals are bootstraps over prompts, differences between drafters are paired by prompt."""
import os
import statistics
import time

import numpy as np
import torch
from tqdm import tqdm

from minispec import prism
from minispec.core import gpt
from minispec.data import prompts, tasks
from minispec.tools import checkpoints, methods
from minispec.tools.answers import requests_of, summary, verdict
from minispec.core.attention import dense_attend
from minispec.core.engine import Request
from minispec.prism import PrismDrafter
from minispec.studies.specgen import race, ratio
from minispec.core.verify import Sampling

FIRST, NEW = 2000, 192             # seed of the first held-out problem used here, tokens of an answer
REFERENCE = {"prism": "ttt1", "specdiff": "mdlm"}


def interval(committed, rounds, other=None, draws=2000):
    """(low, high), 95 % of bootstrap resamples of the prompts, of tau = sum of committed (n,) / sum of rounds (n,); or, given
    another drafter's (committed, rounds) on the same prompts, of the ratio of both taus."""
    some = np.random.default_rng(0).integers(len(rounds), size=(draws, len(rounds)))
    tau = lambda c, r: c[some].sum(1) / r[some].sum(1)
    values = tau(committed, rounds) / (1 if other is None else tau(*other))
    return [float(x) for x in np.percentile(values, (2.5, 97.5))]


def accepted_lengths(engine, problems, tokenizer, temperature=0.0):
    """Decode the problems with chains; {"tau", "by_family", "by_depth", "prompts": [[committed, rounds]]}. by_depth:
    how often draft 1, 2, .. is accepted where those before it are."""
    requests = requests_of(problems, tokenizer, engine.model, NEW, Sampling(temperature))
    steps = [g.steps for g in engine.generate(requests)]
    committed, rounds = (np.array([sum(f(s) for s in one) for one in steps], float) for f in (lambda s: s.committed, lambda s: 1))
    families = np.array([p.family for p in problems])
    by_family = {f: float(committed[families == f].sum() / rounds[families == f].sum()) for f in dict.fromkeys(families.tolist())}
    reached = [sum(s.accepted >= d and s.proposed >= d for one in steps for s in one) for d in range(max(s.proposed for one in steps for s in one) + 1)]
    tried = [sum(s.accepted >= d - 1 and s.proposed >= d for one in steps for s in one) for d in range(1, len(reached))]
    return {"tau": float(committed.sum() / rounds.sum()), "by_family": by_family,
            "by_depth": [r / max(t, 1) for r, t in zip(reached[1:], tried)], "prompts": np.stack([committed, rounds], 1).tolist()}


def compare(kind, args, model, tokenizer, temperatures):
    """Every drafter of this kind in a folder of --arms, greedy and sampled, on the same held-out problems. Seeds of an arm are one: their
    tokens and rounds are added up prompt by prompt. An arm is held against the reference arm with as many training prompts."""
    if not args.arms or not os.path.isdir(args.arms):
        raise ValueError(f"this study compares trained drafters: --arms must be a folder with one folder each (train_{kind}.py), got {args.arms}")
    problems = [tasks.make(f, FIRST + i, "heldout") for f in tasks.FAMILIES for i in range(4 if args.quick else 20)]
    if args.data:
        problems += prompts.load_named("gsm8k", args.data)[:4 if args.quick else 20]
    trained = {}
    for name in tqdm([a for a in sorted(os.listdir(args.arms)) if checkpoints.kind_of(os.path.join(args.arms, a)) == kind], desc=kind):
        folder = os.path.join(args.arms, name)
        settings = methods.settings(**{**vars(args), "drafter": folder, "depth": 5, "tree": 0})
        engine = methods.make_engine(kind, model, settings, 16)
        drafter = engine.planner.drafter
        module = drafter.prism if kind == "prism" else drafter.drafter
        trained.setdefault(checkpoints.arm_of(name), []).append({"parameters": module.n_params(), "parameters_read": module.n_params() if kind == "specdiff" else sum(p.numel() for p in module.bank[0].parameters()),
                    "log": checkpoints.last_record(folder), **{f"at_{t:g}": accepted_lengths(engine, problems, tokenizer, t) for t in temperatures}})
    if not trained:
        raise ValueError(f"{args.arms} holds no drafter made by train_{kind}.py")
    reference = REFERENCE[kind] if REFERENCE[kind] in {name for name, _ in trained} else next(iter(trained))[0]
    out = {}
    for (name, n), seeds in sorted(trained.items(), key=lambda x: (-x[0][1], x[0][0])):
        arm = out[f"{name}, {n} prompts" if n else name] = {**seeds[0], "seeds": len(seeds)}
        for at in (f"at_{t:g}" for t in temperatures):
            summed = lambda some: sum(np.array(x[at]["prompts"]) for x in some).T          # (committed, rounds) of every prompt
            (committed, rounds), other = summed(seeds), trained.get((reference, n))
            arm[at] = {"tau": committed.sum() / rounds.sum(), "interval": interval(committed, rounds), "seeds": [x[at]["tau"] for x in seeds],
                       **{key: _mean([x[at][key] for x in seeds]) for key in ("by_family", "by_depth")}}
            if other:
                against = summed(other)
                arm[at] |= {"ratio": arm[at]["tau"] / (against[0].sum() / against[1].sum()), "ratio_interval": interval(committed, rounds, tuple(against))}
    return {"prompts": len(problems), "reference": reference, "arms": out}


def _mean(some):
    """Entry by entry, the mean of lists, as far as all of them go, or dicts of numbers."""
    if isinstance(some[0], dict):
        return {key: statistics.mean(x[key] for x in some) for key in some[0]}
    return [statistics.mean(x) for x in zip(*some)]


def prism_arms(args, model, tokenizer):
    """Accepted lengths of the trained arms of the PRISM family, chains of 5."""
    return compare("prism", args, model, tokenizer, (0.0,))


def specdiff_objectives(args, model, tokenizer):
    """Tokens a verification by training objective, one chain, at temperature 0 and 1."""
    return compare("specdiff", args, model, tokenizer, (0.0, 1.0))


FLUSH = 1 << 24                     # numbers, 64 MB: more than the processor's caches hold
CONDITIONS = ("alone", "decoding", "cold")


def prism_steps(args, model, tokenizer):
    """Milliseconds of one draft step by number of modules, and of two stacked layers: untrained, for time does not depend on it.
    Alone: one drafter's steps follow each other, nothing else runs. Decoding: between two rounds of drafts the target reads all its
    weights, as in verification. Cold: before every step the processor's caches are filled with other things, so that it reads its
    weights from memory, as a model does that is too large for them."""
    arms = {"1 module": ((0,), 1), "2 modules": ((0, 1), 1), "3 modules": ((0, 1, 2), 1), "2 layers, stacked": ((0,), 2)}
    repeats, drafts, context = 20 if args.quick else 400, 4, min(512, model.config.block_size // 2)
    rows = []
    for dtype, target in {"float32": model, "bfloat16": checkpoints.load(args.model, args.device, torch.bfloat16)}.items():
        drafters = {name: PrismDrafter(gpt.store_by_columns(prism.for_target(target, *arm).to(target.dtype)), target, drafts) for name, arm in arms.items()}
        times = _step_times(target, drafters, repeats, drafts, context)
        for name, drafter in drafters.items():
            row = {"dtype": dtype, "arm": name, "parameters": drafter.prism.n_params(), "parameters_read": sum(p.numel() for p in drafter.prism.bank[0].parameters())}
            for how in CONDITIONS:
                some, plain = times[how, name], times[how, "1 module"]
                row[how] = {"milliseconds": 1000 * statistics.median(some), "ratio": statistics.median(a / b for a, b in zip(some, plain))}
            rows.append(row)
    return {"repeats": repeats, "drafts": drafts, "context": context, "rows": rows}


@torch.no_grad()
def _step_times(target, drafters, repeats, drafts, context):
    """{(condition, name): seconds of a draft step, of each repeat} for {name: PrismDrafter}, in turn, so that a slow moment slows all."""
    times, requests, elsewhere = {(how, name): [] for how in CONDITIONS for name in drafters}, {}, []
    other, ids = torch.zeros(FLUSH, device=target.device), torch.arange(drafts + 1, device=target.device)
    feature = lambda n: torch.zeros(n, target.config.d_model, dtype=target.dtype, device=target.device)

    def flush(*_):
        other[0].item()                                      # a GPU finishes what it was asked for, then the clock starts, and stops
        started = time.perf_counter()
        other.add_(1)[0].item()
        elsewhere.append(time.perf_counter() - started)

    def verify():
        target.logits(target(ids[None], ids[None], dense_attend()))[0, 0, 0].item()

    def timed(name):
        note = drafters[name].notes[requests[name]]
        note.features, note.cached = [feature(1)], context - 1
        elsewhere.clear()
        started = time.perf_counter()
        drafters[name].propose([requests[name]], [drafts])
        return (time.perf_counter() - started - sum(elsewhere)) / drafts

    for name, drafter in drafters.items():
        r = requests[name] = Request([1 + i % 50 for i in range(context + 1)], drafts * repeats)
        r.n_cached = context
        drafter.observe(r, feature(context))
        drafter.propose([r], [1])
    for _ in tqdm(range(repeats), desc=f"draft steps, {str(target.dtype).removeprefix('torch.')}"):
        for name, drafter in drafters.items():
            for _ in range(8):                               # what ran before is forgotten after some rounds
                last = timed(name)
            times["alone", name].append(last)
            for _ in range(2):
                verify()
                last = timed(name)
            times["decoding", name].append(last)
            hook = drafter.prism.register_forward_pre_hook(flush)
            times["cold", name].append(timed(name))
            hook.remove()
    return times


def prism_trees(args, model, tokenizer):
    """Chains and trees of the shipped drafters, one request at a time: tau, and speed-up over the autoregressive loop."""
    shapes = [(3, 1, 0), (5, 1, 0), (8, 1, 0), (12, 1, 0), (16, 1, 0), (3, 2, 4), (3, 4, 8), (4, 3, 8), (5, 2, 8), (6, 2, 12), (8, 2, 12), (6, 3, 16), (8, 4, 32)]
    return _shapes(args, model, tokenizer, {(name, *shape): (name, dict(zip(("depth", "width", "tree"), shape)))
                   for name in ("eagle", "prism") if name in methods.ready(args) for shape in (shapes[:4] if args.quick else shapes)}, ("method", "depth", "width", "drafts"))


def specdiff_chains(args, model, tokenizer):
    """K chains of the shipped diffusion drafter by rule and draft temperature, target greedy and at temperature 1."""
    grid = [(1, rule, None) for rule in ("rejection", "selection")] + [(k, rule, t) for k in (2, 4, 8) for rule in ("selection", "walk", "rejection") for t in (0.7, 1.0)]
    cells = {(k, rule, t, temperature): ("specdiff", {"k_drafts": k, "rule": rule, "draft_temperature": t, "temperature": temperature})
             for temperature in (0.0, 1.0) for k, rule, t in grid}
    return _shapes(args, model, tokenizer, dict(list(cells.items())[:3]) if args.quick else cells, ("chains", "rule", "draft_temperature", "temperature"))


def _shapes(args, model, tokenizer, cells, columns):
    problems = [tasks.make(f, FIRST + i, "heldout") for f in tasks.FAMILIES for i in range(1 if args.quick else 2)]

    def build(method, changes):
        settings = methods.settings(**{**vars(args), **changes})
        return lambda: (methods.make_engine(method, model, settings, 1), requests_of(problems, tokenizer, model, NEW, Sampling(changes.get("temperature", 0.0))))

    results = race({"ar": build("ar", {}), **{key: build(*cell) for key, cell in cells.items()}}, 1 if args.quick else 2, "shapes")
    rows = []
    for key, (rates, engine, generations) in list(results.items())[1:]:
        rows.append({**dict(zip(columns, key)), **ratio(rates, results["ar"][0]), "tau": summary(generations, engine)["tau"],
                     "identical": None if cells[key][1].get("temperature") else sum(a.token_ids == g.token_ids for a, g in zip(results["ar"][2], generations))})
    return {"prompts": len(problems), "rows": rows}


def specdiff_budgets(args, model, tokenizer):
    """Problems solved against seconds, for answers cut at several budgets of tokens."""
    problems = [tasks.make(f, FIRST + i, "heldout") for f in tasks.FAMILIES for i in range(1 if args.quick else 8)]
    rows = []
    for budget in (64, 128, 256, 512, 1024):
        row = {"budget": budget, "problems": len(problems)}
        for name in ("ar", "specdiff"):
            engine = methods.make_engine(name, model, args, 1)
            generations = engine.generate(requests_of(problems, tokenizer, model, budget))
            row[name] = {"solved": sum(verdict(p, g, tokenizer) for p, g in zip(problems, generations)), "seconds": sum(engine.seconds.values())}
        rows.append(row)
    return {"rows": rows}
