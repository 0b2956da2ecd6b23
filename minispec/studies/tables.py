"""The Markdown table of every study, from its file in results/: `render` looks into TABLES at the end."""
import statistics
from itertools import product

import numpy as np

from minispec import bounds
from minispec.data import tasks
from minispec.tools.markdown import cell, texts

# Tables of another study's file.
SHOWN_FROM = {"methods": "run", "acceptance_kinds": "acceptance"}
PHASES = ("prefill", "draft", "verify", "sample", "overhead")
TIMES = "{speedup:.2f} ({speedup_range[0]:.2f}-{speedup_range[1]:.2f})"
SAME = "{identical:d} of {prompts}"


def render(name, result):
    """The Markdown table of a study's result. A study that is no longer measured left it in the file."""
    if name not in TABLES:
        return result["table"]
    shown = TABLES[name]
    return shown(result) if callable(shown) else table(shown, result["rows"])


def table(columns, rows):
    """A Markdown table of dicts. columns: {head: template for str.format}."""
    return texts([{head: cell(template, x) for head, template in columns.items()} for x in rows])


# -- losslessness ----------------------------------------------------------------------------------

LOSSLESS = {
    "method": "{method}",
    "dtype": "{dtype}",
    "identical to autoregressive": SAME,
    "T = 0.65": "{T 0.65:d} of {sampled}",
    "T = 1": "{T 1:d} of {sampled}",
    "top-p 0.9, top-k 50": "{top:d} of {sampled}",
    "largest top-2 gap at a difference": "{largest_tie_gap:.3g}",
}


def lossless(result):
    """Without the columns of figures that older results lack."""
    first = result["rows"][0]
    return table({head: form for head, form in LOSSLESS.items() if cell(form, first)}, result["rows"])


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
    rows = {}
    for i, temperature in enumerate(r["temperatures"]):
        for context, at in first.items():
            for select, k, sparsity, *_ in at["rows"]:
                setting = f"{select}, {k}, {100 * sparsity:.0f} %"
                row = rows.setdefault(setting, {"selection, k, budget s": setting})
                mean, half = of_kinds(r["kinds"], context, (select, k, sparsity), i)
                row[f"{context} tokens at T = {temperature:g}"] = f"{mean:.2f} ± {half:.2f}"
    return texts(rows.values())


def kinds(r):
    """What the kinds of text differ in, at the usual setting and the first temperature: means of the texts,
    with the least and the largest."""
    contexts = next(iter(r["kinds"].values()))[0]
    rows = []
    for context, (kind, some) in product(contexts, r["kinds"].items()):
        repeated = 100 * np.mean([text[context]["repeated"] for text in some])
        row = {"text": f"{kind}, {context} tokens", "repeated 8-grams": f"{repeated:.0f} %"}
        for select in ("pillar", "ahead", "window", "oracle"):
            found = [_accepted(text, context, (select, r["k"], r["sparsity"]))[0] for text in some]
            row[select] = f"{np.mean(found):.2f} ({min(found):.2f}-{max(found):.2f})"
        rows.append(row)
    return texts(rows)


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
    rows = []
    for name, way in [*product(r["arms"], [""]), *product(r["arms"], r.get("ways", ()))]:
        arm = r["arms"][name]
        row = {
            "drafter": f"{name} {way}".strip(),
            "seeds": arm["seeds"],
            "parameters": f"{arm['parameters']:,}",
            "trained tokens": f"{arm['log']['tokens']:,.0f}",
        }
        found = {key: arm[way or key] for key in arm if key.startswith("at_")}
        for key, x in found.items():
            at = f"at temperature {key[3:]}"
            row[f"tau {at}"] = cell("{tau:.2f} ({interval[0]:.2f}-{interval[1]:.2f})", x)
            row[f"ratio to {r['reference']} {at}"] = cell(
                "{ratio:.3f} ({ratio_interval[0]:.3f}-{ratio_interval[1]:.3f})", x)
        # Diffusion drafters were estimated on held-out answers by each way of accepting.
        for rule in ("greedy", "point_mass", "rejection"):
            if text := cell(f"{{heldout_tau[{rule}]:.2f}}", arm["log"]):
                row[f"{rule} held-out tau"] = text
        # What was measured before workloads were kept apart lacks them.
        row |= {w: f"{tau:.2f}" for w, tau in found["at_0"].get("by_workload", {}).items()}
        rows.append(row)
    return texts(rows)


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


# -- profile and trace -----------------------------------------------------------------------------

def costs_table(r):
    """What rounds cost: of a measured grid the shortest and the longest context, in ms. Then how fast attention
    reads its keys."""
    grid, drafts = r["table"]["verify"], r["table"]["draft"]
    rows = []
    for i, batch in enumerate(grid["rows"]):
        for c in sorted({0, len(grid["kv"]) - 1}):
            row = {"rows": batch, "context": grid["kv"][c]}
            for tokens, seconds in zip(grid["tokens"], grid["seconds"][i]):
                row[f"verify {tokens}, ms"] = f"{1000 * seconds[c]:.1f}"
            for name, own in drafts.items():
                row[f"{name} {own['tokens'][-1]}, ms"] = f"{1000 * own['seconds'][i][-1][c]:.1f}"
            rows.append(row)
    if "reads" not in r:
        return texts(rows)
    return texts(rows) + "\n\n" + table(READS, r["reads"])


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


def trace_table(r):
    """Accept lengths by workload and drafter, by position and by round."""
    return texts([{
        "workload": workload,
        "drafter": name,
        "positions": x["positions"],
        "tokens a round would gain at a position": f"{x['by_position']:.2f}",
        f"in rounds of {r['k']} drafts": f"{x['by_round']:.2f}",
        f"all {r['k_max']} accepted": f"{100 * x['censored']:.1f} %",
    } for workload, drafters in r["accept"].items() for name, x in drafters.items()])


# -- run -------------------------------------------------------------------------------------------

def run_table(r):
    """What was observed, and where its time went."""
    rows = []
    for x in r["rows"]:
        total = sum(x["phases"].values())
        shares = {phase: x["phases"][phase] / total for phase in PHASES}
        # Older results have the speed-up of the total time alone.
        gained = cell("{speedup:.2f} / {rate_speedup:.2f}", x) or cell("{speedup:.2f}", x)
        rows.append({**x, **shares, "gained": gained})
    return table({
        "workload": "{workload}",
        "batch": "{batch}",
        "method": "{method}",
        "tokens/s": "{tokens_per_second:.0f}",
        f"speed-up, {bounds.BOTH}": "{gained}",
        "tau": "{tau:.2f}",
        "accepted": "{acceptance:.0%}",
        **{phase: f"{{{phase}:.0%}}" for phase in PHASES},
        "identical to ar": SAME,
    }, rows)


def methods(r):
    """From the studies `run` and `speed`: a row a method whose answers are the target's, a column a workload,
    one request at a time; behind them the mix sampled, and in batches."""
    # The mix asks the other workloads' requests once more.
    alone = [x for x in r["rows"]
             if x["batch"] == 1 and x["identical"] is not None and not x["workload"].startswith("mixed")]
    workloads = dict.fromkeys(x["workload"] for x in alone)
    # Of the small model GSM8K is left out of the mean: text that it never learned.
    families = [w for w in workloads if w in tasks.FAMILIES] or workloads
    mixed = [x for x in r["rows"]
             if x["workload"].startswith("mixed") and (x["batch"] > 1 or x.get("temperature"))]
    plain = {x["workload"]: _decoding_rate(x) for x in alone if x["method"] == "ar"}
    rows = []
    for method in dict.fromkeys(x["method"] for x in alone):
        some = {x["workload"]: x for x in alone if x["method"] == method}
        mean = statistics.mean(some[w]["speedup"] for w in families)
        decoding = statistics.mean(_decoding_rate(some[w]) / plain[w] for w in families)
        row = {"method": method, "mean": f"{mean:.2f}", "in decoding": f"{decoding:.2f}"}
        for w, x in some.items():
            row[w] = f"{x['speedup']:.2f}, tau {x['tau']:.1f}"
            if method == "ar":
                row[w] = f"1, {x['tokens_per_second']:.0f} tokens/s"
        row |= {f"{x['workload']}, batch {x['batch']}": f"{x['speedup']:.2f}"
                for x in mixed if x["method"] == method}
        same, asked = (sum(x[key] for x in some.values()) for key in ("identical", "prompts"))
        row["identical to ar"] = f"{same} of {asked}"
        rows.append(row)
    return texts(rows)


def _decoding_rate(x):
    """Tokens/s of a row of `run` without reading the prompts."""
    return x["tokens"] / (x["seconds"] - x["phases"]["prefill"])


TABLES = {                       # a function of the result, or the columns of its rows
    "lossless": lossless,
    "methods": methods,
    "acceptance": acceptance,
    "acceptance_kinds": kinds,
    "serving": SERVING,
    "scheduler": STAGES,
    "prism_arms": arms,
    "specdiff_objectives": arms,
    "specdiff_chains": CHAINS,
    "cdlm_accuracy": DECODERS,
    "cdlm_curves": DECODERS,
    "profile": costs_table,
    "trace": trace_table,
    "run": run_table,
    "speed": methods,
    "bounds": bounds.table,
}
