"""The Markdown table of every study, from its file in results/: `render` looks into TABLES at the end. The
tables of docs/bounds.md are in tables_bounds.py."""
from itertools import product

import numpy as np

from minispec.data import tasks
from minispec.studies.markdown import SAME, TIMES, table
from minispec.studies.tables_bounds import costs_table, ladder_table, methods, run_table, trace_table

# Tables of another study's file.
SHOWN_FROM = {"methods": "run", "acceptance_kinds": "acceptance", "prism_curves": "prism_arms"}


def render(name, result):
    """The Markdown table of a study's result. A study that is no longer measured left it in the file."""
    if name not in TABLES:
        return result["table"]
    shown = TABLES[name]
    return shown(result) if callable(shown) else table(shown, result["rows"])


# -- losslessness ----------------------------------------------------------------------------------

def lossless(r):
    rows = [{"method": method, "dtype": dtype, **x}
            for dtype, measured in r.items() for method, x in measured["methods"].items()]
    return table({
        "method": "{method}",
        "dtype": "{dtype}",
        "identical to autoregressive": SAME,
        "largest top-2 gap at a difference": "{largest_tie_gap:.3g}",
    }, rows)


# -- SpecGen ---------------------------------------------------------------------------------------

def _accepted(at, *setting):
    """[select, k, sparsity, accepted by rejection, by the greedy rule, rounds] of a setting at a context."""
    return next((x for x in at["rows"] if x[:3] == list(setting)), None)


def acceptance(r):
    """Selections and settings by context: mean of the kinds of text, with the least and the largest."""
    first, *_ = kinds = list(r["kinds"].values())
    rows = {}
    for context, at in first.items():
        for setting in (tuple(x[:3]) for x in at["rows"]):
            found = [_accepted(text[context], *setting)[3] for text in kinds]
            row = rows.setdefault(setting, {"select": setting[0], "k": setting[1], "sparsity": setting[2]})
            row[f"at {context}"] = [np.mean(found), min(found), max(found)]
    shape = "{at N[0]:.2f}" if len(kinds) == 1 else "{at N[0]:.2f} ({at N[1]:.2f}-{at N[2]:.2f})"
    cells = {f"{context} tokens": shape.replace("N", context) for context in first}
    return table({"selection, k, budget s": "{select}, {k}, {sparsity:.0%}", **cells}, rows.values())


def kinds(r):
    """What the kinds of text differ in, at the usual setting."""
    rows = []
    contexts = next(iter(r["kinds"].values()))
    for context, (kind, text) in product(contexts, r["kinds"].items()):
        at = text[context]
        row = {"text": f"{kind}, {context} tokens", "repeated": at["repeated"]}
        for select in ("pillar", "ahead", "window", "oracle"):
            row[select] = _accepted(at, select, r["k"], r["sparsity"])
        rows.append(row)
    return table({
        "text": "{text}",
        "repeated 8-grams": "{repeated:.0%}",
        "pillar": "{pillar[3]:.2f}",
        "pillar, greedy": "{pillar[4]:.2f}",
        "ahead": "{ahead[3]:.2f}",
        "window": "{window[3]:.2f}",
        "oracle": "{oracle[3]:.2f}",
    }, rows)


SERVING = {
    "requests x context, temperature": "{requests} x {context}, {temperature:g}",
    "method": "{method}",
    "dtype": "{dtype}",
    "tokens/s": "{tokens_per_second:.1f}",
    "speed-up": "{speedup:.2f}",
    "accepted of 8": "{accepted:.2f}",
    "attention share": "{attention_share:.0%}",
    "predicted": "{predicted:.2f}",
    "identical to ar": "{identical:d} of {requests}",
}
STAGES = {
    "stage": "{stage}",
    "tokens/s": "{tokens_per_second:.0f}",
    "speed-up (range)": TIMES,
    "requests at once": "{active_mean:.1f}",
    "forwards": "{iterations}",
    "tokens offloaded": "{offloaded}",
    "identical to ar": SAME,
}


# -- trained drafters ------------------------------------------------------------------------------

def arms(r):
    """Trained drafters next to each other; intervals are 95 % bootstraps over prompts."""
    rows = [{"drafter": name, **x} for name, x in r["arms"].items()]
    columns = {
        "drafter": "{drafter}",
        "seeds": "{seeds}",
        "parameters": "{parameters:,}",
        "trained tokens": "{log[tokens]:,.0f}",
    }
    for key in (key for key in rows[0] if key.startswith("at_")):
        at = f", temperature {key[3:]}"
        columns["tau" + at] = "{AT[tau]:.2f} ({AT[interval][0]:.2f}-{AT[interval][1]:.2f})".replace("AT", key)
        columns[f"ratio to {r['reference']}" + at] = (
            "{AT[ratio]:.3f} ({AT[ratio_interval][0]:.3f}-{AT[ratio_interval][1]:.3f})".replace("AT", key))
    # What was measured before workloads were kept apart lacks them.
    for w in rows[0]["at_0"].get("by_workload", ()):
        columns[w] = f"{{at_0[by_workload][{w}]:.2f}}"
    return table(columns, rows)


def curves(r):
    """tau on held-out answers along the trainings: a row for each checkpoint."""
    rows = []
    for at in zip(*(x["curve"] for x in r["arms"].values())):
        row = {"tokens": at[0]["tokens"]}
        for name, record in zip(r["arms"], at):
            row[name] = f"{record['heldout_tau']:.2f}, {record['seconds'] / 60:.0f} min"
        rows.append(row)
    return table({"trained tokens": "{tokens:,}", **{name: f"{{{name}}}" for name in r["arms"]}}, rows)


CHAINS = {
    "chains": "{chains}",
    "rule": "{rule}",
    "draft temperature": "{draft_temperature}",
    "temperature": "{temperature}",
    "tau": "{tau:.2f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "speed-up over greedy ar (range)": TIMES,
    "identical to it": SAME,
}


# -- diffusion models ------------------------------------------------------------------------------

DECODERS = {
    "decoder": "{decoder}",
    "steps a block": "{steps_a_block}",
    "threshold": "{threshold:g}",
    "slot first": "{order}",
    "problems": "{problems}",
    "solved": "{solved:.1%}",
    **{family: f"{{by_family[{family}]:.0%}}" for family in tasks.FAMILIES},
    "steps an answer": "{steps:.1f}",
    "tokens an answer": "{tokens:.0f}",
    "same answer as the teacher": "{same:.0%}",
}


# -- a GPU -----------------------------------------------------------------------------------------

GPU = {
    "floors": {"floor": "{what}", "per second": "{rate:.3g}"},
    "kernels": {
        "kernel": "{kernel}",
        "context": "{context}",
        "requests": "{batch}",
        "heads a KV head": "{group}",
        "seconds": "{seconds:.3g}",
        "share of copy speed": "{share:.0%}",
    },
    "decode": {
        "random weights, batch 1": "{model}",
        "seconds a token": "{seconds:.3g}",
        "share of copy speed": "{share:.0%}",
    },
}


def gpu(r):
    """The sections of the GPU suite, a table each; those that did not fit into memory are named at the
    end."""
    parts = []
    for section in (name for name in GPU if name in r):
        rows = r[section]
        if section in ("kernels", "decode"):
            copied = r["floors"][0]["rate"]
            rows = [{**x, "share": x["bytes"] / x["seconds"] / copied} for x in rows]
        parts.append(table(GPU[section], rows))
    if r["out_of_memory"]:
        parts.append(f"Out of memory: {'; '.join(r['out_of_memory'])}.")
    return "\n\n".join(parts)


TABLES = {                       # a function of the result, or the columns of its rows
    "lossless": lossless,
    "methods": methods,
    "acceptance": acceptance,
    "acceptance_kinds": kinds,
    "serving": SERVING,
    "scheduler": STAGES,
    "prism_arms": arms,
    "prism_curves": curves,
    "specdiff_objectives": arms,
    "specdiff_chains": CHAINS,
    "cdlm_accuracy": DECODERS,
    "cdlm_curves": DECODERS,
    "gpu": gpu,
    "profile": costs_table,
    "trace": trace_table,
    "run": run_table,
    "bounds": ladder_table,
}
