"""How good trained drafters are, whatever a forward costs: tokens committed per round, by workload.

    tau       the drafters of this target, with chains of five and of eight drafts
    arms      the same for the drafters of other trainings, in folders --drafter/GROUP/NAME
    chains    SpecDiff with self-selection: by number of chains, their temperature, and drafts of a window
"""
import shlex
from itertools import product
from pathlib import Path

import numpy as np

from minispec.core.verify import Sampling
from minispec.studies.results import LeftOut, counts_of, each_kept, engine_of, per_round, problems_of
from minispec.tools import drafter_files, methods
from minispec.tools.answers import requests_of
from minispec.tools.intervals import with_range
from minispec.tools.markdown import table

DRAFTS = 5
LENGTHS = (5, 8)            # of chains, in `tau`
NEW = 128                   # tokens of an answer
TEMPERATURES = (0.0, 0.7)


def tau(args, model, tokenizer):
    """The trained drafters of this target."""
    names = sorted(methods.TRAINED.keys() & methods.ready(args))
    drafters = {f"k = {k}: {name}": f"{name} --k {k}"
                for k, name in product([args.k] if args.k else LENGTHS, names)}
    return compare("tau", drafters, 10, args, model, tokenizer)


def arms(args, model, tokenizer):
    """The drafters in the folders --drafter/GROUP/NAME, each next to the first one of its group. They may be
    of different kinds."""
    drafters = {}
    for file in sorted(Path(args.drafter).glob("*/*/config.json")) if args.drafter else []:
        group, name = file.parts[-3:-1]
        kind = drafter_files.kind_of(file.parent)
        if kind in methods.TRAINED:
            drafters[f"{group}: {name}"] = f"{kind} --drafter {shlex.quote(str(file.parent))}"
    return compare("arms", drafters, 2, args, model, tokenizer)


def chains(args, model, tokenizer):
    """SpecDiff with K chains of gamma drafts, of which the target's probabilities select one. Several chains
    are drawn at temperature T_q; in an answer's last gamma K tokens fewer chains fit."""
    if "specdiff" not in methods.ready(args):
        raise LeftOut("chains needs a SpecDiff drafter")
    drafters = {f"K = {k}": f"specdiff --k-drafts {k}" for k in (1, 2, 4, 8)}
    for k in (2, 4, 8):
        drafters[f"K = {k}, T_q = 0.7"] = f"specdiff --k-drafts {k} --draft-temperature 0.7"
    for gamma in (4, 8, 16):
        drafters[f"K = 1, gamma = {gamma}"] = f"specdiff --k {gamma}"
    return compare("chains", drafters, 2, args, model, tokenizer, "selection")


def compare(study, drafters, n, args, model, tokenizer, rule="coupled"):
    """tau of {name: method with options} on n problems of each workload, with five drafts a chain
    in every round, or --k. A name may begin with a group and a colon."""
    if not drafters:
        raise LeftOut(f"{study} needs trained drafters; those of arms are in folders --drafter/GROUP/NAME")
    problems = sum(problems_of(tokenizer, 1 if args.quick else n, args.data).values(), [])
    cells = list(product(TEMPERATURES, drafters))

    def measured(temperature, name):
        engine = engine_of(drafters[name], model, args, 8, k=args.k or DRAFTS)
        sampling = Sampling(temperature, rule=rule)
        return counts_of(engine, requests_of(problems, tokenizer, model, NEW, sampling))

    found = dict(zip(cells, each_kept(study, args, model, cells, measured)))
    rows = []
    first = {name.rpartition(":")[0]: name for name in reversed(drafters)}                 # of each group
    workloads = *dict.fromkeys(p.family for p in problems), "all"
    for temperature, workload, name in product(TEMPERATURES, workloads, drafters):
        some = [i for i, p in enumerate(problems) if workload in (p.family, "all")]
        base = first[name.rpartition(":")[0]]
        own, others = (np.array(found[temperature, one])[some] for one in (name, base))
        about = {"workload": workload, "temperature": temperature, "method": name}
        rows.append({**about, **figures(own, others)})
    other = first.get("", "the first of its group")
    columns = {**TAU, f"next to {other} (95 %)": "{ratio:.3f} ({ratio_range[0]:.3f}-{ratio_range[1]:.3f})"}
    return {"rows": rows, "table": table(rows, columns),
            "short": table([x for x in rows if x["workload"] == "all"], columns)}


def figures(own, base):
    """tau, and its ratio to the base's on the same prompts, with intervals, from counts (see `counts_of`).
    Prompts without a round do not count; without any other there are no figures."""
    rounds = (own[:, -1] > 0) & (base[:, -1] > 0)
    own, base = own[rounds], base[rounds]
    if not len(own):
        return {"prompts": 0}

    def ratio(own, base):
        return per_round(own) / per_round(base)

    return {"prompts": len(own), **with_range("tau", per_round, own), **with_range("ratio", ratio, own, base)}


TAU = {
    "workload": "{workload}",
    "temperature": "{temperature:g}",
    "drafter": "{method}",
    "prompts": "{prompts}",
    "tau (95 %)": "{tau:.2f} ({tau_range[0]:.2f}-{tau_range[1]:.2f})",
}
