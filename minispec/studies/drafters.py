"""How good trained drafters are, whatever a forward costs: tokens committed per round, by workload.

    tau       the drafters of this target, with chains of five drafts
    arms      the same for the drafters of other trainings, in folders --drafter/NAME
    chains    SpecDiff with one to eight chains of five drafts, and self-selection
"""
from itertools import product
from pathlib import Path

import numpy as np

from minispec.core.verify import Sampling
from minispec.data import loops
from minispec.studies.results import each_kept, engine_of, problems_of
from minispec.tools import drafter_files, methods
from minispec.tools.answers import requests_of
from minispec.tools.intervals import interval
from minispec.tools.markdown import table

DRAFTS = 5
NEW = 128                   # tokens of an answer
TEMPERATURES = (0.0, 0.7)


def tau(args, model, tokenizer):
    """The trained drafters of this target."""
    ready = methods.ready(args)
    drafters = {name: (name, args.drafter) for name in sorted(methods.TRAINED) if name in ready}
    return compare("tau", drafters, 5, args, model, tokenizer)


def arms(args, model, tokenizer):
    """The drafters in the folders --drafter/NAME; they may be of different kinds."""
    drafters = {}
    for file in sorted(Path(args.drafter or "").glob("*/config.json")):
        kind = drafter_files.kind_of(file.parent)
        if kind in methods.TRAINED:
            drafters[file.parent.name] = (kind, str(file.parent))
    if not drafters:
        raise ValueError("arms needs --drafter DIR, a folder of drafters that train_prism.py or "
                         "train_specdiff.py wrote: DIR/NAME")
    return compare("arms", drafters, 2, args, model, tokenizer)


def chains(args, model, tokenizer):
    """SpecDiff with more and more chains, of which the target's probabilities select one."""
    drafters = {f"K = {k}": (f"specdiff --k-drafts {k}", args.drafter) for k in (1, 2, 4, 8)}
    return compare("chains", drafters, 2, args, model, tokenizer, "selection")


def compare(study, drafters, n, args, model, tokenizer, rule="coupled"):
    """tau of {name: (method with options, folder)} on n problems of each workload. Every round drafts five
    tokens a chain, sure or not. A greedy answer ends where it begins to repeat itself."""
    problems = sum(problems_of(tokenizer, 1 if args.quick else n, args.data).values(), [])
    cells = list(product(TEMPERATURES, drafters))

    def measured(temperature, name):
        """[[tokens, rounds]] of each problem's answer; the first token is no round's."""
        method, folder = drafters[name]
        engine = engine_of(method, model, args, 8, drafter=folder, depth=DRAFTS, gamma=DRAFTS)
        engine.scheduler.drafter.min_confidence = 0.0
        requests = requests_of(problems, tokenizer, model, NEW, Sampling(temperature, rule=rule))
        return [[len(g.token_ids) - 1, len(g.rounds)] for g in loops.generate(engine, requests)]

    found = dict(zip(cells, each_kept(study, args, model, cells, measured, drafters=list(drafters))))
    rows = []
    base = next(iter(drafters))
    workloads = *dict.fromkeys(p.family for p in problems), "all"
    for temperature, workload, name in product(TEMPERATURES, workloads, drafters):
        some = [i for i, p in enumerate(problems) if workload in (p.family, "all")]
        own, others = (np.array(found[temperature, one])[some] for one in (name, base))
        rows.append({"workload": workload, "temperature": temperature, "method": name, **figures(own, others)})
    columns = {**TAU, f"next to {base} (95 %)": "{ratio:.3f} ({ratio_range[0]:.3f}-{ratio_range[1]:.3f})"}
    return {"rows": rows, "table": table(rows, columns),
            "short": table([x for x in rows if x["workload"] == "all"], columns)}


def figures(own, base):
    """tau, and its ratio to the base's on the same prompts, with intervals, from [[tokens, rounds]]."""
    def mean(x):
        return x[..., 0].sum(-1) / np.maximum(x[..., 1].sum(-1), 1)

    return {
        "prompts": len(own),
        "tau": float(mean(own)), "tau_range": interval(mean, own),
        "ratio": float(mean(own) / mean(base)),
        "ratio_range": interval(lambda x, y: mean(x) / mean(y), own, base),
    }


TAU = {
    "workload": "{workload}",
    "temperature": "{temperature:g}",
    "drafter": "{method}",
    "prompts": "{prompts}",
    "tau (95 %)": "{tau:.2f} ({tau_range[0]:.2f}-{tau_range[1]:.2f})",
}
