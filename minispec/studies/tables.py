"""The Markdown table of every study, from its file in results/. Numbers are stored in full and rounded here
alone.

`render(name, result)` looks into TABLES at the end. The tables of docs/bounds.md, which are the largest,
are in tables_bounds.py.
"""
import glob
import math
import os

from minispec.studies.markdown import millions, percent, row, same, span, table, times, two
from minispec.studies.tables_bounds import costs_table, ladder_table, methods, run_table, trace_table
from minispec.studies.tables_specgen import FROM, SPECGEN, stages
from minispec.tools import checkpoints
from minispec.tools.files import blame, opened

SHOWN_FROM = {"methods": "run", **FROM}          # tables that are drawn from another study's file


def render(name, result):
    """The Markdown table of a study's result. A study that is no longer measured left it in the file."""
    return TABLES[name](result) if name in TABLES else result["table"]


# -- the target ------------------------------------------------------------------------------------

def accuracy(r):
    rows = []
    for family, x in r["families"].items():
        least, most = x["size"]
        size = least if least == most else f"{least}-{most}"
        rows.append(f"{family} | {size} | {x['problems']} | {x['mean_tokens']:.0f} | "
                    f"{percent(x['accuracy'], 1)}")
    rows.append(f"mean of the five families |  |  |  | {percent(r['mean'], 1)}")
    return table("held-out problems | size | problems | tokens an answer | solved", rows)


def lossless(r):
    rows = []
    for dtype in ("float32", "bfloat16"):
        noise = f"{r[dtype]['row_count_noise']:.2g}"
        for method, x in r[dtype]["methods"].items():
            rows.append(f"{method} | {dtype} | {same(x)} | {x['largest_tie_gap']:.3g} | {noise}")
    return table("method | dtype | identical to autoregressive | largest top-2 gap at a difference | "
                 "row-count noise of a logit", rows)


# -- trained drafters ------------------------------------------------------------------------------

def arms(r):
    """Trained drafters next to each other; intervals are 95 % bootstraps over prompts. `of the seeds`:
    least and largest tau of the trainings."""
    first = next(iter(r["arms"].values()))
    settings = [key for key in first if key.startswith("at_")]
    rows = []
    for name, x in r["arms"].items():
        log = x["log"]
        cells = [name, x["seeds"], millions(x["parameters"])]
        cells += [millions(log["tokens"], 1), f"{log['seconds'] / 60:.0f}"]
        for a in (x[key] for key in settings):
            cells += [f"{a['tau']:.2f} ({span(a['interval'])})", span((min(a["seeds"]), max(a["seeds"])))]
            cells += [f"{a['ratio']:.3f} ({span(a['ratio_interval'], 3)})" if "ratio" in a else ""]
        greedy = x[settings[0]]
        cells += [" ".join(map(two, greedy["by_depth"])), " / ".join(map(two, greedy["by_family"].values()))]
        rows.append(row(cells))

    taus = row(f"tau, temperature {key[3:]} | of the seeds | ratio to {r['reference']}" for key in settings)
    families = " / ".join(first[settings[0]]["by_family"])
    return table(f"drafter | seeds | parameters | trained tokens | minutes | {taus} | "
                 f"accepted by depth | tau of {families}", rows)


def shapes(r):
    measured = ("tokens_per_second", "speedup", "speedup_range", "tau", "identical")
    columns = [c for c in r["rows"][0] if c not in measured]
    rows = []
    for x in r["rows"]:
        settings = row("" if x[c] is None else x[c] for c in columns)
        rows.append(f"{settings} | {x['tau']:.2f} | {x['tokens_per_second']:.0f} | {times(x)} | "
                    f"{same(x, r['prompts'])}")
    names = row(c.replace("_", " ") for c in columns)
    return table(f"{names} | tau | tokens/s | speed-up over greedy ar (range) | identical to it", rows)


# -- diffusion models ------------------------------------------------------------------------------

def cdlm_accuracy(r):
    """Which decoder solves how much, by family."""
    rows = []
    for x in r["rows"]:
        decoder = x["decoder"]
        if "threshold" in x:
            decoder += f", threshold {x['threshold']}"
        if "order" in x:
            decoder += f", {x['order']} slot first"
        families = row(map(percent, x["by_family"].values()))
        rows.append(f"{decoder} | {x['problems']} | {percent(x['solved'], 1)} | {families} | "
                    f"{x['steps']:.1f} | {x['tokens']:.0f} | {percent(x['same'])}")
    return table(f"decoder | problems | solved | {row(x['by_family'])} | steps an answer | "
                 "tokens an answer | same answer as the teacher", rows)


def cdlm_curves(r):
    """Accuracy against steps."""
    rows = []
    for x in r["rows"]:
        if x["steps_a_block"]:
            setting = f"{x['steps_a_block']} steps a block"
        else:
            setting = f"threshold {x['threshold']:g}"
        if x["order"]:
            setting += f", {x['order']} slot first"
        rows.append(f"{x['decoder']} | {setting} | {x['steps']:.1f} | {x['tokens'] / x['steps']:.1f} | "
                    f"{percent(x['solved'])} | {percent(x['same'])}")
    return table("decoder | setting | steps an answer | tokens a step | "
                 f"solved of {r['rows'][0]['problems']} | same answer as the teacher at a token a step", rows)


def cdlm_speed(r):
    rows = []
    for x in r["rows"]:
        fed = "" if x["fed"] is None else f"{x['fed'] / x['problems'] / x['tokens']:.1f}"
        faster = f"{x['faster_than_teacher']:.1f} ({span(x['range'], 1)})"
        rows.append(f"{x['batch']} | {x['decoder']} | {x['seconds_a_problem']:.3f} | {faster} | "
                    f"{x['tokens_per_second']:.0f} | {x['steps']:.1f} | {x['tokens']:.0f} | {fed} | "
                    f"{x['intensity']:.1f} | {percent(x['solved'])}")
    return table("batch | decoder | seconds a problem | times faster than the teacher (range) | "
                 "tokens/s | steps an answer | tokens an answer | rows fed a token | "
                 "operations a byte | solved", rows)


# -- a GPU -----------------------------------------------------------------------------------------

def gpu(r):
    """The sections of the GPU suite, a table each; those that did not fit into memory are named at the
    end."""
    copy, product = r["floors"]
    copied = copy["bytes_per_second"]
    parts = [table("floor | measured", [f"copy | {copied / 1e12:.2f} TB/s",
                                        f"bf16 product | {product['flops'] / 1e12:.0f} Tflop/s"])]

    def micro(seconds):
        return "" if seconds is None else f"{1e6 * seconds:.1f}"

    rows = []
    for x in r.get("kernels", ()):
        least, most = map(micro, x["range"])
        rows.append(f"{x['kernel']}{', torch reference' * x['reference']} | {x['context']} | "
                    f"{x['batch']} | {x['group']} | {micro(x['seconds'])} ({least}-{most}) | "
                    f"{percent(x['bytes'] / x['seconds'] / copied)} | {micro(x.get('two_launches'))}")
    parts.append(table("kernel | context | requests | heads a KV head | us (range) | "
                       "share of copy speed | two launches, us", rows))

    rows = []
    for x in r.get("decode", ()):
        rate = x["tokens_per_second"]
        rows.append(f"{x['model']} | {rate:.0f} ({span(x['range'], 0)}) | {copied / x['bytes']:.0f} | "
                    f"{percent(rate * x['bytes'] / copied)}")
    parts.append(table("random weights, batch 1 | tokens/s (range) | floor | share", rows))

    rows = [f"{x['context']} | {x['requests']} | {x['method']} | {x['tokens_per_second']:.0f} | "
            f"{times(x)} | {two(x.get('predicted'))} | {two(x.get('accepted'))} | "
            f"{same(x, x['requests'])}"
            for x in r.get("serving", ())]
    parts.append(table("context | requests | method | tokens/s | speed-up (range) | predicted | "
                       "accepted of 8 | identical to ar", rows))

    rows = [f"{x['workload']} | {x['batch']} | {x['method']} | {x['tokens_per_second']:.0f} | "
            f"{times(x)} | {x['tau']:.2f} | "
            f"{same(x)}" for x in r.get("methods", ())]
    parts.append(table("workload | batch | method | tokens/s | speed-up (range) | tau | "
                       "identical to ar", rows))

    parts += map(stages, r.get("system", ()))
    if r.get("out_of_memory"):
        parts.append(f"Out of memory: {'; '.join(r['out_of_memory'])}.")
    return "\n\n".join(parts)


# -- checkpoints -----------------------------------------------------------------------------------

def training_table(folder):
    """Command, size, tokens, minutes and last held-out loss of every checkpoint, from its command.txt and
    log.jsonl."""
    rows = []
    for file in sorted(glob.glob(os.path.join(folder, "**", "command.txt"), recursive=True)):
        where = os.path.dirname(file)
        with open(file, encoding="utf-8") as f:
            command = f.read().strip()
        with blame(os.path.join(where, "log.jsonl")):
            log = checkpoints.records(where)
            last = log[-1]
            trained = f"{last['step']:,} steps"
            if "tokens" in last:
                trained = f"{millions(last['tokens'], 1)} tokens"
            figures = f"{trained} | {seconds_of(log) / 60:.0f} | {last['loss']:.3f}"
        with opened(os.path.join(where, "model.safetensors")) as f:
            size = millions(sum(math.prod(f.get_slice(tensor).get_shape()) for tensor in f.keys()))
        rows.append(f"{os.path.relpath(where, folder)} | {size} | {figures} | `{command}`")
    return table("checkpoint | parameters | trained on | minutes on 1 or 2 CPU cores | last loss | "
                 "command", rows)


def seconds_of(log):
    """Seconds of a training. A run that was begun again from these weights counts from 0 once more."""
    total, before = 0.0, 0.0
    for record in log:
        now = record["seconds"]
        total += now - before if now > before else now
        before = now
    return total


TABLES = {
    "accuracy": accuracy,
    "lossless": lossless,
    "methods": methods,
    "prism_arms": arms,
    "specdiff_objectives": arms,
    "prism_trees": shapes,
    "specdiff_chains": shapes,
    "cdlm_accuracy": cdlm_accuracy,
    "cdlm_curves": cdlm_curves,
    "cdlm_speed": cdlm_speed,
    "gpu": gpu,
    "profile": costs_table,
    "trace": trace_table,
    "run": run_table,
    "bounds": ladder_table,
    **SPECGEN,
}
