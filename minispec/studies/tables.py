"""The Markdown table of every study, from its file in results/: `render` looks into TABLES at the end. The
tables of docs/bounds.md are in tables_bounds.py."""
from itertools import product

import numpy as np

from minispec.data import tasks
from minispec.studies.markdown import SAME, TIMES, table
from minispec.studies.tables_bounds import costs_table, ladder_table, methods, run_table, trace_table

# Tables of another study's file.
SHOWN_FROM = {"methods": "run", "acceptance_kinds": "acceptance"}


def render(name, result):
    """The Markdown table of a study's result. A study that is no longer measured left it in the file."""
    if name not in TABLES:
        return result["table"]
    shown = TABLES[name]
    return shown(result) if callable(shown) else table(shown, result["rows"])


# -- losslessness ----------------------------------------------------------------------------------

LOSSLESS = {
    "method": "{method}",
    "dtype": "{dtype}",
    "identical to autoregressive": SAME,
    "largest top-2 gap at a difference": "{largest_tie_gap:.3g}",
}


# -- SpecGen ---------------------------------------------------------------------------------------

# Student's t by degrees of freedom: three texts of one kind, and of four.
STUDENT = {2: 4.303, 8: 2.306}


def _accepted(text, context, setting):
    """Accepted drafts of a setting [select, k, sparsity] behind a context of a text, by temperature."""
    return next(x[3] for x in text[context]["rows"] if x[:3] == list(setting))


def of_kinds(kinds, context, setting, i):
    """Mean over the kinds of text at the i-th temperature, and half of its 95 % interval over the texts."""
    found = [[_accepted(text, context, setting)[i] for text in some] for some in kinds.values()]
    freedom = sum(len(texts) - 1 for texts in found)
    if freedom not in STUDENT:
        return np.mean(found), np.nan
    error = sum(np.var(texts, ddof=1) / len(texts) for texts in found) ** 0.5 / len(found)
    return np.mean([np.mean(texts) for texts in found]), STUDENT[freedom] * error


def acceptance(r):
    """Selections and settings by context and temperature: mean of the kinds of text, with its interval."""
    first, *_ = next(iter(r["kinds"].values()))
    rows, columns = {}, {"selection, k, budget s": "{setting}"}
    for i, temperature in enumerate(r["temperatures"]):
        for context, at in first.items():
            name = f"at_{context}_{i}"
            columns[f"{context} tokens at T = {temperature:g}"] = f"{{{name}}}"
            for select, k, sparsity, *_ in at["rows"]:
                setting = f"{select}, {k}, {sparsity:.0%}"
                row = rows.setdefault(setting, {"setting": setting})
                found = of_kinds(r["kinds"], context, (select, k, sparsity), i)
                row[name] = "{:.2f} ± {:.2f}".format(*found)
    return table(columns, rows.values())


def kinds(r):
    """What the kinds of text differ in, at the usual setting and the first temperature: means of the texts,
    with the least and the largest."""
    selections = ("pillar", "ahead", "window", "oracle")
    contexts = next(iter(r["kinds"].values()))[0]
    rows = []
    for context, (kind, some) in product(contexts, r["kinds"].items()):
        repeated = np.mean([text[context]["repeated"] for text in some])
        row = {"text": f"{kind}, {context} tokens", "repeated": repeated}
        for select in selections:
            found = [_accepted(text, context, (select, r["k"], r["sparsity"]))[0] for text in some]
            row[select] = f"{np.mean(found):.2f} ({min(found):.2f}-{max(found):.2f})"
        rows.append(row)
    shown = {select: f"{{{select}}}" for select in selections}
    return table({"text": "{text}", "repeated 8-grams": "{repeated:.0%}", **shown}, rows)


SERVING = {
    "requests x context, temperature": "{requests} x {context}, {temperature:g}",
    "texts": "{texts}",
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
    rows += [{**x, "drafter": f"{x['drafter']} {way}", "at_0": x[way]}
             for x in rows for way in r.get("ways", ())]
    columns = {
        "drafter": "{drafter}",
        "seeds": "{seeds}",
        "parameters": "{parameters:,}",
        "trained tokens": "{log[tokens]:,.0f}",
    }
    for key in (key for key in rows[0] if key.startswith("at_")):
        at = f" at temperature {key[3:]}"
        columns["tau" + at] = "{AT[tau]:.2f} ({AT[interval][0]:.2f}-{AT[interval][1]:.2f})".replace("AT", key)
        columns[f"ratio to {r['reference']}" + at] = (
            "{AT[ratio]:.3f} ({AT[ratio_interval][0]:.3f}-{AT[ratio_interval][1]:.3f})".replace("AT", key))
    # Diffusion drafters were estimated on held-out answers by each way of accepting.
    if isinstance(rows[0]["log"].get("heldout_tau"), dict):
        for way in ("greedy", "point_mass", "rejection"):
            columns[f"{way} held-out tau"] = f"{{log[heldout_tau][{way}]:.2f}}"
    # What was measured before workloads were kept apart lacks them.
    for w in rows[0]["at_0"].get("by_workload", ()):
        columns[w] = f"{{at_0[by_workload][{w}]:.2f}}"
    return table(columns, rows)


VOCABULARY = {
    "tokens to draft": "{tokens:,}",
    "tau at temperature 0": "{tau:.2f}",
    "ms a draft": "{milliseconds:.2f}",
}
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


TABLES = {                       # a function of the result, or the columns of its rows
    "lossless": LOSSLESS,
    "methods": methods,
    "acceptance": acceptance,
    "acceptance_kinds": kinds,
    "serving": SERVING,
    "scheduler": STAGES,
    "prism_arms": arms,
    "specdiff_objectives": arms,
    "draft_vocabulary": VOCABULARY,
    "specdiff_chains": CHAINS,
    "cdlm_accuracy": DECODERS,
    "cdlm_curves": DECODERS,
    "profile": costs_table,
    "trace": trace_table,
    "run": run_table,
    "speed": methods,
    "bounds": ladder_table,
}
