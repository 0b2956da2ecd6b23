"""How good the trained drafters are, whatever a forward costs: tokens committed per round, of chains of five
drafts, by workload."""
import numpy as np

from minispec.core.verify import Sampling
from minispec.data import loops
from minispec.studies.results import each_kept, engine_of, problems_of
from minispec.tools import methods
from minispec.tools.answers import requests_of
from minispec.tools.intervals import interval
from minispec.tools.markdown import table

DRAFTS = 5
NEW = 128                   # tokens of an answer
TEMPERATURES = (0.0, 0.7)
BASE = "eagle"              # the drafter that others are compared with


def tau(args, model, tokenizer):
    """Every round drafts five tokens, sure or not. A greedy answer ends where it begins to repeat itself."""
    problems = problems_of(tokenizer, 1 if args.quick else 5, args.data)
    names = [name for name in methods.TRAINED if name in methods.ready(args)]
    cells = [(workload, temperature) for temperature in TEMPERATURES for workload in problems]

    def measured(workload, temperature):
        return {name: rounds_of(name, problems[workload], temperature, args, model, tokenizer)
                for name in names}

    found = each_kept("tau", args, model, cells, measured)
    rows = []
    for temperature in TEMPERATURES:
        own = {workload: counts for (workload, t), counts in zip(cells, found) if t == temperature}
        whole = {name: sum((counts[name] for counts in own.values()), []) for name in names}
        for workload, counts in {**own, "all": whole}.items():
            rows += [row_of(workload, temperature, name, counts) for name in names]
    return {"rows": rows, "table": table(rows, TAU)}


def rounds_of(name, problems, temperature, args, model, tokenizer):
    """[[tokens, rounds]] of each problem's answer with this drafter; the first token is no round's."""
    engine = engine_of(name, model, args, 8, depth=DRAFTS, gamma=DRAFTS, k_drafts=1)
    engine.scheduler.drafter.min_confidence = 0.0
    requests = requests_of(problems, tokenizer, model, NEW, Sampling(temperature))
    return [[len(g.token_ids) - 1, len(g.rounds)] for g in loops.generate(engine, requests)]


def row_of(workload, temperature, name, counts):
    """tau of a method, and its ratio to BASE on the same prompts, with intervals."""
    def mean(x):
        return x[..., 0].sum(-1) / np.maximum(x[..., 1].sum(-1), 1)

    own, base = (np.array(counts[method]) for method in (name, BASE))
    return {
        "workload": workload, "temperature": temperature, "method": name, "prompts": len(own),
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
    f"next to {BASE} (95 %)": "{ratio:.3f} ({ratio_range[0]:.3f}-{ratio_range[1]:.3f})",
}
