"""The Markdown table of every study, from its file in results/. Numbers are stored in full and rounded here alone.

`render(name, result)` looks into TABLES at the end. The tables of docs/bounds.md, which are the largest, are in
tables_bounds.py. Some tables are of studies that are no longer measured; what they found is still shown.
"""
import glob
import math
import os
import statistics

from minispec.data import tasks
from minispec.studies.markdown import millions, percent, same, span, table, times, two, whole
from minispec.studies.tables_bounds import costs_table, ladder_table, run_table, trace_table
from minispec.tools import checkpoints
from minispec.tools.files import blame, opened

SHOWN_FROM = {"speed": "run"}           # tables that are drawn from another study's file


def render(name, result):
    """The Markdown table of a study's result."""
    return TABLES[name](result)


# -- the target ----------------------------------------------------------------------------------------------------------

def accuracy(r):
    rows = []
    for family, x in r["families"].items():
        least, most = x["size"]
        size = least if least == most else f"{least}-{most}"
        rows.append([family, size, x["problems"], whole(x["mean_tokens"]), percent(x["accuracy"], 1)])
    rows.append(["mean of the five families", "", "", "", percent(r["mean"], 1)])
    return table(["held-out problems", "size", "problems", "tokens an answer", "solved"], rows)


def lossless(r):
    rows = []
    for dtype in ("float32", "bfloat16"):
        noise = f"{r[dtype]['row_count_noise']:.2g}"
        for method, x in r[dtype]["methods"].items():
            rows.append([method, dtype, same(x), f"{x['largest_tie_gap']:.3g}", noise])
    head = ["method", "dtype", "identical to autoregressive", "largest top-2 gap at a difference", "row-count noise of a logit"]
    return table(head, rows)


def speed(r):
    """One request at a time, from the study `run`: a row a method, a column a workload."""
    rows_at_1 = [x for x in r["rows"] if x["batch"] == 1]
    workloads = list(dict.fromkeys(x["workload"] for x in rows_at_1))
    rows = []
    for method in dict.fromkeys(x["method"] for x in rows_at_1):
        some = {x["workload"]: x for x in rows_at_1 if x["method"] == method}
        mean = statistics.mean(x["speedup"] for w, x in some.items() if w in tasks.FAMILIES)
        cells = [f"{times(some[w])}, tau {some[w]['tau']:.1f}" if w in some else "" for w in workloads]
        if method == "ar":
            cells = [f"1, {whole(some[w]['tokens_per_second'])} tokens/s" for w in workloads]
        lossless = some[workloads[0]]["identical"] is not None
        total = {key: sum(x[key] for x in some.values()) for key in ("identical", "prompts")} if lossless else None
        rows.append([method, two(mean), *cells, same(total) if lossless else "own answers"])
    return table(["method", "mean of the families", *workloads, "identical to ar"], rows)


def transformers(r):
    def spread(rates):
        return f"{whole(statistics.median(rates))} ({whole(min(rates))}-{whole(max(rates))})"

    return table(["loop", "tokens/s, median (range)", "ratio to transformers"], [
        ["transformers generate", spread(r["transformers"]), "1.00"],
        ["minispec ar", spread(r["minispec"]), two(r["ratio"])]])


def checkpoints_of_others(r):
    methods = [name for name in next(iter(r["families"].values()))["greedy"] if name != "transformers"]
    rows = []
    for family, x in r["families"].items():
        ids = x["ids"]
        rows.append([family, x["folders"], f"{x['logit_difference']:.1e}", f"{ids['same']:,} of {ids['strings']:,}",
                     f"{ids['tokens']:,}", *(f"{n} of {x['prompts']}" for n in x["greedy"].values())])
    families = table(["family", "random folders", "largest logit difference", "texts with the same ids", "tokens",
                      "ar like transformers", *(f"{name} like ar" for name in methods)], rows)

    def gigabytes(n):
        return f"{n / 1e9:.2f} GB"

    rows = [[dtype, gigabytes(m["bytes"]), gigabytes(m["peak"]), two(m["peak"] / m["bytes"]), gigabytes(m["before"])]
            for dtype, m in r["memory"].items()]
    size = f"{r['memory']['bfloat16']['parameters'] / 1e9:.2f} billion parameters, stored as bf16, loaded as"
    head = [size, "weights", "peak memory of the process", "times the weights", "of it Python and torch"]
    return families + "\n\n" + table(head, rows)


def knocks(r):
    rows = []
    for what, x in (("wrong command lines", r["lines"]), ("damaged files", r["files"])):
        exits = [f"{x['exits'].get(code, 0):,}" for code in ("0", "2")]
        rows.append([what, f"{x['cases']:,}", *exits, x["failures"], whole(x["slowest_seconds"])])
    fuzzed = table(["fuzzed", "cases", "exit 0", "exit 2 with a line", "tracebacks, hangs, half-written files",
                    "slowest, CPU seconds"], rows)
    rows = [[f"`{script}.py`", x["kills"], x["runs_that_reached_the_end"]] for script, x in r["kill"]["scripts"].items()]
    killed = table(["killed (kill -9) at random moments and started again", "kills",
                    "runs that reached the end, equal to an undisturbed one"], rows)
    return fuzzed + "\n\n" + killed


# -- SpecGen ---------------------------------------------------------------------------------------------------------------

def attention(r):
    rows = []
    for context, x in r["mass"].items():
        rows.append([f"{context} tokens", *map(two, x["layers"]), two(x["mean"])])
    layers = [f"layer {i}" for i in range(len(rows[0]) - 2)]
    return table(["mass in the top 5 % of keys", *layers, "mean"], rows)


def acceptance(r):
    rows = []
    for x in r["rows"]:
        label = x["select"]
        if x["recent_share"]:
            label += f", {percent(x['recent_share'])} newest"
        elif label == "pillar":
            label += ", the paper's rule"
        accepted = f"{two(x['accepted'])} ± {two(x['standard_error'])}"
        rows.append([label, x["k"], f"{100 * x['sparsity']:g} %", accepted, percent(x["accepted"] / x["k"]), two(x["tau"]),
                     x["rounds"]])
    return table(["selection", "k", "budget s", "accepted (± standard error over requests)", "of k", "tau", "rounds"], rows)


def serving(r):
    rows = []
    for x in r["rows"]:
        row = [x["context"], x["requests"], x["method"], x["dtype"], whole(x["tokens_per_second"]), times(x)]
        if x["method"] == "specgen":
            row += [two(x["accepted"]), percent(x.get("attention_share")), two(x["own_speedup"]), two(x.get("predicted")),
                    same(x, x["requests"])]
        else:
            row += [""] * 5
        rows.append(row)
    return table(["context", "requests", "method", "dtype", "tokens/s", "speed-up over the best ar (range)", "accepted of 8",
                  "attention share", "speed-up in its dtype", "predicted", "identical to ar in its dtype"], rows)


def stages(r):
    rows = [[x["stage"], whole(x["tokens_per_second"]), times(x), f"{x['active_mean']:.1f}", x["iterations"], x["offloaded"],
             x["recomputed"], same(x, r["requests"])] for x in r["rows"]]
    return table(["stage", "tokens/s", "speed-up (range)", "requests at once", "forwards", "tokens offloaded", "recomputed",
                  "identical to ar"], rows)


def scheduler(r):
    rows = [[name, f"{e['mean']:.1f}", two(e["deviation"] / e["mean"]), f"{e['most'] / e['least']:.1f}"]
            for name, e in r["evenness"].items()]
    head = ["schedule, 40 requests", "rows a forward", "standard deviation / mean", "most / least"]
    return stages(r) + "\n\n" + table(head, rows)


# -- trained drafters ------------------------------------------------------------------------------------------------------

def arms(r):
    """Trained drafters next to each other; intervals are 95 % bootstraps over prompts. `of the seeds`: least and largest tau
    of the trainings."""
    first = next(iter(r["arms"].values()))
    settings = [key for key in first if key.startswith("at_")]
    rows = []
    for name, x in r["arms"].items():
        log = x["log"]
        row = [name, x["seeds"], millions(x["parameters"]), millions(log["tokens"], 1), whole(log["seconds"] / 60)]
        for key in settings:
            a = x[key]
            row += [f"{two(a['tau'])} ({span(a['interval'])})", span((min(a["seeds"]), max(a["seeds"])))]
            row += [f"{a['ratio']:.3f} ({span(a['ratio_interval'], 3)})" if "ratio" in a else ""]
        greedy = x[settings[0]]
        rows.append([*row, " ".join(map(two, greedy["by_depth"])), " / ".join(map(two, greedy["by_family"].values()))])

    head = ["drafter", "seeds", "parameters", "trained tokens", "minutes"]
    for key in settings:
        head += [f"tau, temperature {key.removeprefix('at_')}", "of the seeds", f"ratio to {r['reference']}"]
    families = " / ".join(first[settings[0]]["by_family"])
    return table([*head, "accepted by depth", f"tau of {families}"], rows)


def shapes(r):
    measured = ("tokens_per_second", "speedup", "speedup_range", "tau", "identical")
    columns = [c for c in r["rows"][0] if c not in measured]
    rows = []
    for x in r["rows"]:
        settings = ["" if x[c] is None else x[c] for c in columns]
        rows.append([*settings, two(x["tau"]), whole(x["tokens_per_second"]), times(x), same(x, r["prompts"])])
    names = [c.replace("_", " ") for c in columns]
    return table([*names, "tau", "tokens/s", "speed-up over greedy ar (range)", "identical to it"], rows)


def prism_steps(r):
    conditions = [key for key, x in r["rows"][0].items() if isinstance(x, dict)]
    rows = []
    for x in r["rows"]:
        row = [x["dtype"], x["arm"], millions(x["parameters"]), millions(x["parameters_read"])]
        for how in conditions:
            row += [f"{x[how]['milliseconds']:.3f}", f"{x[how]['ratio']:.3f}"]
        rows.append(row)
    head = ["dtype", "drafter", "parameters", "read by a step"]
    for how in conditions:
        head += [f"ms a draft step, {how}", "ratio to 1 module"]
    return table(head, rows)


def specdiff_budgets(r):
    rows = []
    for x in r["rows"]:
        methods = x["ar"], x["specdiff"]
        rows.append([x["budget"], *(f"{100 * m['solved'] / x['problems']:.0f} %" for m in methods),
                     *(f"{m['seconds']:.1f}" for m in methods)])
    head = ["tokens an answer may have", "solved, ar", "solved, specdiff", "seconds, ar", "seconds, specdiff"]
    return table(head, rows)


# -- diffusion models ------------------------------------------------------------------------------------------------------

def cdlm_accuracy(r):
    """Which decoder solves how much, by family."""
    families = list(r["rows"][0]["by_family"])
    rows = []
    for x in r["rows"]:
        decoder = x["decoder"]
        if "threshold" in x:
            decoder += f", threshold {x['threshold']}"
        if "order" in x:
            decoder += f", {x['order']} slot first"
        rows.append([decoder, x["problems"], percent(x["solved"], 1), *(percent(x["by_family"][f]) for f in families),
                     f"{x['steps']:.1f}", whole(x["tokens"]), percent(x["same"])])
    return table(["decoder", "problems", "solved", *families, "steps an answer", "tokens an answer",
                  "same answer as the teacher"], rows)


def cdlm_curves(r):
    """Accuracy against steps."""
    rows = []
    for x in r["rows"]:
        setting = f"{x['steps_a_block']} steps a block" if x["steps_a_block"] else f"threshold {x['threshold']:g}"
        if x["order"]:
            setting += f", {x['order']} slot first"
        rows.append([x["decoder"], setting, f"{x['steps']:.1f}", f"{x['tokens'] / x['steps']:.1f}", percent(x["solved"]),
                     percent(x["same"])])
    return table(["decoder", "setting", "steps an answer", "tokens a step", f"solved of {r['rows'][0]['problems']}",
                  "same answer as the teacher at a token a step"], rows)


def cdlm_blocks(r):
    """Block sizes at inference; and gaps inside a block, where they were measured."""
    rows = [[x["block_size"], percent(x["solved"]), f"{x['steps']:.1f}", whole(x["tokens"])] for x in r["sizes"]]
    sizes = table(["block size in decoding (32 in training)", "solved", "steps an answer", "tokens an answer"], rows)
    if "infill" not in r:
        return sizes
    rows = [[x["gap"], x["answers"], percent(x["given"]), percent(x["open"])] for x in r["infill"]]
    return sizes + "\n\n" + table(["open slots in the middle of a block", "answers",
                                   "filled as in the reference, the rest of the block given", "nothing behind given"], rows)


def cdlm_speed(r):
    rows = []
    for x in r["rows"]:
        fed = "" if x["fed"] is None else f"{x['fed'] / x['problems'] / x['tokens']:.1f}"
        faster = f"{x['faster_than_teacher']:.1f} ({span(x['range'], 1)})"
        rows.append([x["batch"], x["decoder"], f"{x['seconds_a_problem']:.3f}", faster, whole(x["tokens_per_second"]),
                     f"{x['steps']:.1f}", whole(x["tokens"]), fed, f"{x['intensity']:.1f}", percent(x["solved"])])
    return table(["batch", "decoder", "seconds a problem", "times faster than the teacher (range)", "tokens/s",
                  "steps an answer", "tokens an answer", "rows fed a token", "operations a byte", "solved"], rows)


def cdlm_losses(r):
    """Students by loss; solved is the mean of the seeds, and the least and the most of them."""
    rows = []
    for name, x in r["arms"].items():
        seeds = x["seeds"]
        solved = f"{percent(x['solved'])} ({100 * min(seeds):.0f}-{100 * max(seeds):.0f})"
        rows.append([name, len(seeds), whole(x["trained"]), f"{x['seconds'] / 60:.1f}", f"{x['heldout']:.3f}", solved,
                     f"{x['steps']:.1f}", whole(x["tokens"])])
    return table(["student", "seeds", "training steps", "minutes", "held-out masked loss", f"solved of {r['problems']}",
                  "steps an answer", "tokens an answer"], rows)


def cdlm_teachers(r):
    steps = sorted({int(step) for arm in r["arms"].values() for step in arm["heldout"]})
    rows = []
    for name, arm in r["arms"].items():
        losses = [arm["heldout"].get(str(s)) for s in steps]
        row = [name, *("" if loss is None else f"{loss:.3f}" for loss in losses)]
        if arm["decoded"]:
            x = arm["decoded"]
            row += [f"{percent(x['solved'])} of {x['problems']}", f"{x['steps']:.1f}"]
        else:
            row += ["", ""]
        rows.append(row)
    return table(["held-out masked loss after steps", *steps, "solved at the end", "steps an answer"], rows)


# -- a GPU -----------------------------------------------------------------------------------------------------------------

def gpu(r):
    """The sections of the GPU suite, a table each; those that did not fit into memory are named at the end."""
    copy, product = r["floors"]
    copied = copy["bytes_per_second"]

    def microseconds(seconds):
        return "" if seconds is None else f"{1e6 * seconds:.1f}"

    floor = table(["floor", "measured"], [["copy", f"{copied / 1e12:.2f} TB/s"],
                                          ["bf16 product", f"{product['flops'] / 1e12:.0f} Tflop/s"]])

    rows = []
    for x in r.get("kernels", ()):
        least, most = map(microseconds, x["range"])
        rows.append([x["kernel"] + ", torch reference" * x["reference"], x["context"], x["batch"], x["group"],
                     f"{microseconds(x['seconds'])} ({least}-{most})", percent(x["bytes"] / x["seconds"] / copied),
                     *(microseconds(x.get(n)) for n in ("two_launches", "sdpa", "flex"))])
    kernels = table(["kernel", "context", "requests", "heads a KV head", "us (range)", "share of copy speed",
                     "two launches, us", "SDPA, us", "FlexAttention, us"], rows)

    rows = []
    for x in r.get("decode", ()):
        wait = "" if x["wait"] is None else two(1e3 * x["wait"])
        rows.append([x["model"], f"{whole(x['tokens_per_second'])} ({span(x['range'], 0)})", whole(copied / x["bytes"]),
                     percent(x["tokens_per_second"] * x["bytes"] / copied), whole(x["transformers"]), wait])
    decode = table(["random weights, batch 1", "tokens/s (range)", "floor", "share", "transformers, tokens/s",
                    "wait between forwards, ms"], rows)

    rows = [[x["context"], x["requests"], x["method"], whole(x["tokens_per_second"]), times(x), two(x.get("predicted")),
             two(x.get("accepted")), same(x, x["requests"])] for x in r.get("serving", ())]
    served = table(["context", "requests", "method", "tokens/s", "speed-up (range)", "predicted", "accepted of 8",
                    "identical to ar"], rows)

    rows = [[x["workload"], x["batch"], x["method"], whole(x["tokens_per_second"]), times(x), two(x["tau"]), same(x)]
            for x in r.get("methods", ())]
    methods = table(["workload", "batch", "method", "tokens/s", "speed-up (range)", "tau", "identical to ar"], rows)

    parts = [floor, kernels, decode, served, methods, *map(stages, r.get("system", ())), *map(ladder_table, r.get("bounds", ()))]
    if r.get("out_of_memory"):
        parts.append(f"Out of memory: {'; '.join(r['out_of_memory'])}.")
    return "\n\n".join(parts)


# -- checkpoints -----------------------------------------------------------------------------------------------------------

def training_table(folder):
    """Command, size, tokens, minutes and last held-out figures of every checkpoint, from its command.txt and log.jsonl."""
    rows = []
    for file in sorted(glob.glob(os.path.join(folder, "**", "command.txt"), recursive=True)):
        where = os.path.dirname(file)
        with open(file, encoding="utf-8") as f:
            command = f.read().strip()
        with blame(os.path.join(where, "log.jsonl")):
            log = checkpoints.records(where)
            last = log[-1]
            trained = millions(last["tokens"], 1) + " tokens" if "tokens" in last else f"{last['step']:,} steps"
            figures = [trained, whole(seconds_of(log) / 60), f"{last['loss']:.3f}"]
        with opened(os.path.join(where, "model.safetensors")) as f:
            parameters = sum(math.prod(f.get_slice(tensor).get_shape()) for tensor in f.keys())
        rows.append([os.path.relpath(where, folder), millions(parameters), *figures, f"`{command}`"])
    return table(["checkpoint", "parameters", "trained on", "minutes on 1 or 2 CPU cores", "last loss", "command"], rows)


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
    "speed": speed,
    "transformers": transformers,
    "checkpoints": checkpoints_of_others,
    "knocks": knocks,
    "attention": attention,
    "acceptance": acceptance,
    "serving": serving,
    "scheduler": scheduler,
    "prism_arms": arms,
    "specdiff_objectives": arms,
    "prism_trees": shapes,
    "specdiff_chains": shapes,
    "prism_steps": prism_steps,
    "specdiff_budgets": specdiff_budgets,
    "cdlm_accuracy": cdlm_accuracy,
    "cdlm_curves": cdlm_curves,
    "cdlm_blocks": cdlm_blocks,
    "cdlm_speed": cdlm_speed,
    "cdlm_losses": cdlm_losses,
    "cdlm_teachers": cdlm_teachers,
    "gpu": gpu,
    "profile": costs_table,
    "trace": trace_table,
    "run": run_table,
    "bounds": ladder_table,
}
