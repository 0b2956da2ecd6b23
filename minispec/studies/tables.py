"""The Markdown table of every study, from its file in results/. Numbers are stored in full and rounded here alone."""
import glob
import math
import os
import statistics

from minispec.data import tasks
from minispec.tools import checkpoints
from minispec.tools.files import blame, opened, read_json


def _table(head, rows):
    return "\n".join("| " + " | ".join(map(str, r)) + " |" for r in [head, ["---"] * len(head), *rows])


def _two(x):
    return "" if x is None else f"{x:.2f}"


def _times(x):
    return f"{x['speedup']:.2f} ({x['speedup_range'][0]:.2f}-{x['speedup_range'][1]:.2f})"


def _batch(cell):
    return f"{cell['batch']} {cell['kind']}" if cell["batch"] > 1 else 1


def render(name, r):
    """The Markdown table of a study's result."""
    if name == "accuracy":
        rows = [[f, "{}-{}".format(*x["size"]) if x["size"][0] != x["size"][1] else x["size"][0], x["problems"], f"{x['mean_tokens']:.0f}", f"{100 * x['accuracy']:.1f} %"]
                for f, x in r["families"].items()]
        return _table(["held-out problems", "size", "problems", "tokens an answer", "solved"], rows + [["mean of the five families", "", "", "", f"{100 * r['mean']:.1f} %"]])
    if name == "gpu":
        return _gpu(r)
    if name == "lossless":
        rows = [[m, d, f"{x['identical']} of {x['prompts']}", f"{x['largest_tie_gap']:.3g}", f"{r[d]['row_count_noise']:.2g}"]
                for d in ("float32", "bfloat16") for m, x in r[d]["methods"].items()]
        return _table(["method", "dtype", "identical to autoregressive", "largest top-2 gap at a difference", "row-count noise of a logit"], rows)
    if name == "attention":
        mass, layers = r["mass"], len(r["mass"]["4000"]["layers"])
        return _table(["mass in the top 5 % of keys", *(f"layer {i}" for i in range(layers)), "mean"],
                      [[f"{at} tokens", *(f"{m:.2f}" for m in mass[at]["layers"]), f"{mass[at]['mean']:.2f}"] for at in mass])
    if name == "acceptance":
        label = lambda x: x["select"] + (f", {100 * x['recent_share']:.0f} % newest" if x["recent_share"] else ", the paper's rule" if x["select"] == "pillar" else "")
        rows = [[label(x), x["k"], f"{100 * x['sparsity']:g} %", f"{x['accepted']:.2f} ± {x['standard_error']:.2f}", f"{100 * x['accepted'] / x['k']:.0f} %", f"{x['tau']:.2f}", x["rounds"]] for x in r["rows"]]
        return _table(["selection", "k", "budget s", "accepted (± standard error over requests)", "of k", "tau", "rounds"], rows)
    if name == "speed":
        cells = {(x["method"], x["dtype"], x["workload"]): x for x in r["rows"]}
        workloads, arms = list(dict.fromkeys(x["workload"] for x in r["rows"])), list(dict.fromkeys((x["method"], x["dtype"]) for x in r["rows"]))
        cell = lambda x: f"{_times(x)}, tau {x['tau']:.1f}" if x["method"] != "ar" else f"{_times(x)}, {x['tokens_per_second']:.0f} tokens/s"
        mean = lambda m, d: statistics.mean(cells[m, d, w]["speedup"] for w in workloads if w in tasks.FAMILIES)
        rows = [[m, d, f"{mean(m, d):.2f}", *(cell(cells[m, d, w]) for w in workloads), f"{sum(cells[m, d, w]['identical'] for w in workloads)} of {sum(cells[m, d, w]['prompts'] for w in workloads)}"]
                for m, d in arms]
        return _table(["method", "dtype", "mean of the families", *workloads, "identical to ar in its dtype"], rows)
    if name == "serving":
        rows = [[x["context"], x["requests"], x["method"], x["dtype"], f"{x['tokens_per_second']:.0f}", _times(x),
                 *([f"{x['accepted']:.2f}", f"{100 * x['attention_share']:.0f} %", f"{x['own_speedup']:.2f}", f"{x['predicted']:.2f}", f"{x['identical']} of {x['requests']}"]
                   if x["method"] == "specgen" else [""] * 5)] for x in r["rows"]]
        return _table(["context", "requests", "method", "dtype", "tokens/s", "speed-up over the best ar (range)", "accepted of 8", "attention share",
                       "speed-up in its dtype", "predicted", "identical to ar in its dtype"], rows)
    if name == "scheduler":
        even = [[name, f"{e['mean']:.1f}", f"{e['deviation'] / e['mean']:.2f}", f"{e['most'] / e['least']:.1f}"] for name, e in r["evenness"].items()]
        return (_stages(r) + "\n\n" + _table(["schedule, 40 requests", "rows a forward", "standard deviation / mean", "most / least"], even))
    if name in ("profile", "trace", "run", "bounds"):
        return {"profile": _costs, "trace": _accepts, "run": _runs, "bounds": _ladder}[name](r)
    if name.startswith("cdlm_"):
        return {"cdlm_accuracy": _decoders, "cdlm_curves": _curves, "cdlm_blocks": _blocks, "cdlm_speed": _latency, "cdlm_losses": _losses, "cdlm_teachers": _teachers}[name](r)
    if name in ("prism_arms", "specdiff_objectives"):
        return _arms(r)
    if name in ("prism_trees", "specdiff_chains"):
        columns = [c for c in r["rows"][0] if c not in ("tokens_per_second", "speedup", "speedup_range", "tau", "identical")]
        rows = [[*("" if x[c] is None else x[c] for c in columns), f"{x['tau']:.2f}", f"{x['tokens_per_second']:.0f}", _times(x), "" if x["identical"] is None else f"{x['identical']} of {r['prompts']}"] for x in r["rows"]]
        return _table([*(c.replace("_", " ") for c in columns), "tau", "tokens/s", "speed-up over greedy ar (range)", "identical to it"], rows)
    if name == "prism_steps":
        conditions = [key for key, x in r["rows"][0].items() if isinstance(x, dict)]
        return _table(["dtype", "drafter", "parameters", "read by a step", *(x for how in conditions for x in (f"ms a draft step, {how}", "ratio to 1 module"))],
                      [[x["dtype"], x["arm"], f"{x['parameters'] / 1e6:.2f}M", f"{x['parameters_read'] / 1e6:.2f}M",
                        *(f"{x[how][n]:.3f}" for how in conditions for n in ("milliseconds", "ratio"))] for x in r["rows"]])
    if name == "specdiff_budgets":
        rows = [[x["budget"], *(f"{100 * x[m]['solved'] / x['problems']:.0f} %" for m in ("ar", "specdiff")), *(f"{x[m]['seconds']:.1f}" for m in ("ar", "specdiff"))] for x in r["rows"]]
        return _table(["tokens an answer may have", "solved, ar", "solved, specdiff", "seconds, ar", "seconds, specdiff"], rows)
    if name == "checkpoints":
        rows = [[family, x["folders"], f"{x['logit_difference']:.1e}", f"{x['ids']['same']:,} of {x['ids']['strings']:,}", f"{x['ids']['tokens']:,}",
                 *(f"{n} of {x['prompts']}" for n in x["greedy"].values())]
                for family, x in r["families"].items()]
        gb = lambda n: f"{n / 1e9:.2f} GB"
        memory = [[d, gb(m["bytes"]), gb(m["peak"]), f"{m['peak'] / m['bytes']:.2f}", gb(m["before"])] for d, m in r["memory"].items()]
        methods = [name for name in next(iter(r["families"].values()))["greedy"] if name != "transformers"]
        return (_table(["family", "random folders", "largest logit difference", "texts with the same ids", "tokens", "ar like transformers",
                        *(f"{name} like ar" for name in methods)], rows)
                + "\n\n" + _table([f"{r['memory']['bfloat16']['parameters'] / 1e9:.2f} billion parameters, stored as bf16, loaded as", "weights",
                                   "peak memory of the process", "times the weights", "of it Python and torch"], memory))
    if name == "knocks":
        kinds = [["wrong command lines", r["lines"]], ["damaged files", r["files"]]]
        rows = [[what, f"{x['cases']:,}", f"{x['exits'].get('0', 0):,}", f"{x['exits'].get('2', 0):,}", x["failures"], f"{x['slowest_seconds']:.0f}"] for what, x in kinds]
        kills = [[f"`{script}.py`", x["kills"], x["runs_that_reached_the_end"]] for script, x in r["kill"]["scripts"].items()]
        return (_table(["fuzzed", "cases", "exit 0", "exit 2 with a line", "tracebacks, hangs, half-written files", "slowest, CPU seconds"], rows) + "\n\n"
                + _table(["killed (kill -9) at random moments and started again", "kills", "runs that reached the end, equal to an undisturbed one"], kills))
    if name == "transformers":
        return _table(["loop", "tokens/s, median (range)", "ratio to transformers"],
                      [["transformers generate", _spread(r["transformers"]), "1.00"], ["minispec ar", _spread(r["minispec"]), f"{r['ratio']:.2f}"]])
    raise KeyError(name)


def _arms(r):
    """Trained drafters beside each other; intervals are 95 % bootstraps over prompts. `seeds`: least and largest tau of the trainings."""
    kinds = [key for key in next(iter(r["arms"].values())) if key.startswith("at_")]
    span = lambda x: f"{x[0]:.2f}-{x[1]:.2f}"
    rows = []
    for name, x in r["arms"].items():
        row = [name, x["seeds"], f"{x['parameters'] / 1e6:.2f}M", f"{x['log']['tokens'] / 1e6:.1f}M", f"{x['log']['seconds'] / 60:.0f}"]
        for key in kinds:
            a = x[key]
            row += [f"{a['tau']:.2f} ({span(a['interval'])})", span((min(a["seeds"]), max(a["seeds"]))),
                    f"{a['ratio']:.3f} ({a['ratio_interval'][0]:.3f}-{a['ratio_interval'][1]:.3f})" if "ratio" in a else ""]
        rows.append([*row, " ".join(f"{p:.2f}" for p in x[kinds[0]]["by_depth"]), " / ".join(f"{t:.2f}" for t in x[kinds[0]]["by_family"].values())])
    heads = [h for key in kinds for h in (f"tau, temperature {key.removeprefix('at_')}", "of the seeds", f"ratio to {r['reference']}")]
    families = " / ".join(next(iter(r["arms"].values()))[kinds[0]]["by_family"])
    return _table(["drafter", "seeds", "parameters", "trained tokens", "minutes", *heads, "accepted by depth", f"tau of {families}"], rows)


def _costs(r):
    """T4: the cost model. How the measured grid looks, and how well three constants would do in its place."""
    grid, over, ms = r["table"]["verify"], r["table"]["overhead"], lambda s: f"{1000 * s:.2f}"
    last = len(grid["kv"]) - 1
    at = lambda i, j, c: grid["seconds"][i][j][c]
    drafts = {m: g for m, g in r["table"]["draft"].items()}
    k = grid["tokens"].index(5) - 1 if 5 in grid["tokens"] else 0
    shown = {m: min(k, len(g["tokens"]) - 1) for m, g in drafts.items()}       # a short window has fewer
    rows = [[b, grid["kv"][c], ms(at(i, 0, c)), *(f"{at(i, j, c) / at(i, 0, c):.2f}" for j in range(1, len(grid["tokens"]))),
             ms(over["seconds"][i][0][0]), *(ms(g["seconds"][i][shown[m]][c]) for m, g in drafts.items())]
            for i, b in enumerate(grid["rows"]) for c in ((0, last) if last else (0,))]
    head = ["rows", "context", "verify 1 token, ms", *(f"{t} tokens, times" for t in grid["tokens"][1:]), "overhead, ms",
            *(f"{m} drafts {g['tokens'][shown[m]]}, ms" for m, g in drafts.items())]
    entry = lambda e: ", ".join(f"{term} {1e6 * e[term]:.3g}" for term in e if term != "kind")
    fits = [[kind, entry(f["entry"]) + " us", f"{f['r2']:.3f}", f"{100 * f['median']:.0f} %", f"{100 * f['max']:.0f} %",
             *(f"{f[rate] / 1e9:.1f}" if f[rate] else "" for rate in ("kv_bytes_per_s", "weight_bytes_per_s", "flops_per_s"))] for kind, f in r["fits"].items()]
    return (_table(head, rows) + "\n\n" + _table(["fit of the verify grid", "coefficients", "R2", "median error", "largest error",
            "cache GB/s", "weights GB/s", "GFLOP/s"], fits) + f"\n\nMedian spread of a cell's repeats (interquartile range over median): {100 * r['scatter']:.0f} %.")


def _accepts(r):
    """T3: accept lengths by workload and drafter, weighted by position and by round."""
    show = lambda x: f"{x['mean']:.2f} / {x['median']:.0f} / {x['std']:.2f}"
    rows = [[w, m, x["positions"], show(x["by_position"]), f"{x['by_position']['p5']:.0f}-{x['by_position']['p95']:.0f}", show(x["by_round"]), f"{100 * x['censored']:.1f} %"]
            for w, some in r["accept"].items() for m, x in some.items()]
    return _table(["workload", "drafter", "positions", "tokens a round would gain at a position: mean / median / deviation", "5-95 %",
                   f"the same over rounds of {r['k']} drafts", f"all {r['k_max']} accepted"], rows)


def _runs(r):
    """What was observed, and T2: where its time went."""
    shares = lambda p: [f"{100 * p[x] / sum(p.values()):.0f}" for x in ("prefill", "draft", "verify", "sample", "overhead")]
    rows = [[x["workload"], _batch(x), x["method"], f"{x['tokens_per_second']:.0f}", f"{x['speedup']:.2f}", f"{x['tau']:.2f}",
             f"{100 * x['acceptance']:.0f} %" if x["acceptance"] is not None else "", *shares(x["phases"]), _identical(x),
             *(["{} of {}".format(*x["solved"]) if x["solved"][1] else ""] if "solved" in x else [])] for x in r["rows"]]
    return _table(["workload", "batch", "method", "tokens/s", "speed-up", "tau", "accepted", "prefill %", "draft %", "verify %", "sample %", "overhead %",
                   "identical to ar", *(["solved"] if "solved" in r["rows"][0] else [])], rows)


def _ladder(r):
    """T1: the rungs, first a line for each cell, then one for each drafter in it."""
    seen = r["observed"]
    best = lambda some: max(some.items(), key=lambda x: x[1]) if some else ("", None)
    brief, full, amdahl = [], [], []
    for c in r["cells"]:
        l0 = c.get("L0", {})
        who, single = best({m: s for m, s in l0.items() if m in c["L5"]})
        bound_by, bound = best(c["L5"])
        fixed_by, fixed_ = best({f"{m}, k {x['k']}": x["speedup"] for m, x in c["L2"].items()})
        observed = [f"{_two(single)} {who}", _two(l0.get("adaptive")), _percent(c.get("gap")), _percent(c.get("gap_modelled"))] if seen else []
        brief.append([c["workload"], _batch(c), *observed, f"{fixed_:.2f} {fixed_by}", f"{bound:.2f} {bound_by}", _two(c["L6"]), _two(c["L7"]), _two(c["L9"])])
        for m in [*c["L5"], "all"]:
            key, all_ = "adaptive" if m == "all" else m, m == "all"
            observed = [_two(c[x].get(key)) for x in ("L0", "L1", "above")] if seen else []
            full.append([c["workload"], _batch(c), m, *observed, "" if all_ else f"{c['L2'][m]['speedup']:.2f}, k {c['L2'][m]['k']}", _two(c["L3"].get(m)), _two(c["L4"].get(m)),
                         _two(c["L6"] if all_ else c["L5"][m]), _two(c["L7"]) if all_ else "", _two(c["L8"].get(m)), _two(c["L9"]) if all_ else "",
                         "" if all_ else f"{c['L10'][m]['speedup']:.2f}, alpha {c['L10'][m]['alpha']:.2f}", *([_two(c["published"].get(m))] if "published" in c else [])])
        amdahl += [[c["workload"], _batch(c), m, *(_two(c["L12"][m].get(x)) for x in ("rejected", "draft", "overhead", "all")),
                    "{speedup:.2f}, {nodes} nodes, depth {depth}".format(**c["L11"][m]) if m in c["L11"] else ""] for m in c["L12"]]
    out = [_table(["workload", "batch", *(["observed, best single", "observed, adaptive", "share of the gap to L6 it closes", "the same, modelled"] if seen else []), "L2 best fixed k",
                   "L5 optimum, best single", "L6 all drafters", "L7 free drafters", "L9 one pass"], brief),
           _table(["workload", "batch", "drafter", *(["L0 observed", "L1 modelled", "time over the bound's"] if seen else []), "L2 best fixed k", "L3 k by request",
                   "L4 greedy (not a bound)", "L5 / L6 optimum", "L7 free drafters", "L8 perfect drafter", "L9 one pass", "L10 i.i.d.",
                   *(["the paper's simulator"] if any("published" in c for c in r["cells"]) else [])], full),
           _table(["workload", "batch", "drafter, best fixed k", "rejected tokens free", "drafting free", "overhead free", "all three", "L11 best static tree"], amdahl)]
    if r["model_error"]:
        says = [f"{what}: median {100 * e['median']:.0f} %, at most {100 * e['max']:.0f} %" for what, e in
                (("modelled over observed seconds", r["model_error"]), ("modelled over observed speed-ups", r["speedup_error"])) if e]
        out.append(f"Error of the cost model, {'; '.join(says)}.")
    return "\n\n".join(out)


def _percent(x):
    return "" if x is None else f"{100 * x:.0f} %"


def _identical(row):
    return "" if row["identical"] is None else f"{row['identical']} of {row['prompts']}"


def _decoders(r):
    """Who solves how much, by family."""
    families = list(r["rows"][0]["by_family"])
    rows = [[x["decoder"] + (f", threshold {x['threshold']}" if "threshold" in x else "") + (f", {x['order']} slot first" if "order" in x else ""), x["problems"], f"{100 * x['solved']:.1f} %", *(f"{100 * x['by_family'][f]:.0f} %" for f in families), f"{x['steps']:.1f}", f"{x['tokens']:.0f}", _percent(x["same"])] for x in r["rows"]]
    return _table(["decoder", "problems", "solved", *families, "steps an answer", "tokens an answer", "same answer as the teacher"], rows)


def _curves(r):
    """Accuracy against steps."""
    setting = lambda x: f"{x['steps_a_block']} steps a block" if x["steps_a_block"] else f"threshold {x['threshold']:g}"
    rows = [[x["decoder"], setting(x) + (f", {x['order']} slot first" if x["order"] else ""), f"{x['steps']:.1f}", f"{x['tokens'] / x['steps']:.1f}", f"{100 * x['solved']:.0f} %", _percent(x["same"])] for x in r["rows"]]
    return _table(["decoder", "setting", "steps an answer", "tokens a step", f"solved of {r['rows'][0]['problems']}", "same answer as the teacher at a token a step"], rows)


def _blocks(r):
    """Block sizes at inference, and gaps inside a block."""
    sizes = _table(["block size in decoding (32 in training)", "solved", "steps an answer", "tokens an answer"],
                   [[x["block_size"], _percent(x["solved"]), f"{x['steps']:.1f}", f"{x['tokens']:.0f}"] for x in r["sizes"]])
    return sizes + "\n\n" + _table(["open slots in the middle of a block", "answers", "filled as in the reference, the rest of the block given", "nothing behind given"],
                                   [[x["gap"], x["answers"], _percent(x["given"]), _percent(x["open"])] for x in r["infill"]])


def _latency(r):
    rows = [[x["batch"], x["decoder"], f"{x['seconds_a_problem']:.3f}", f"{x['faster_than_teacher']:.1f} ({x['range'][0]:.1f}-{x['range'][1]:.1f})", f"{x['tokens_per_second']:.0f}", f"{x['steps']:.1f}",
             f"{x['tokens']:.0f}", "" if x["fed"] is None else f"{x['fed'] / x['problems'] / x['tokens']:.1f}", f"{x['intensity']:.1f}", _percent(x["solved"])] for x in r["rows"]]
    return _table(["batch", "decoder", "seconds a problem", "times faster than the teacher (range)", "tokens/s", "steps an answer", "tokens an answer", "rows fed a token",
                   "operations a byte", "solved"], rows)


def _losses(r):
    """Students by loss; solved is the mean of the seeds, and the least and the most of them."""
    rows = [[name, len(x["seeds"]), f"{x['trained']:.0f}", f"{x['seconds'] / 60:.1f}", f"{x['heldout']:.3f}", f"{_percent(x['solved'])} ({100 * min(x['seeds']):.0f}-{100 * max(x['seeds']):.0f})",
             f"{x['steps']:.1f}", f"{x['tokens']:.0f}"] for name, x in r["arms"].items()]
    return _table(["student", "seeds", "training steps", "minutes", "held-out masked loss", f"solved of {r['problems']}", "steps an answer", "tokens an answer"], rows)


def _stages(r):
    return _table(["stage", "tokens/s", "speed-up (range)", "requests at once", "forwards", "tokens offloaded", "recomputed", "identical to ar"],
                  [[x["stage"], f"{x['tokens_per_second']:.0f}", _times(x), f"{x['active_mean']:.1f}", x["iterations"], x["offloaded"], x["recomputed"],
                    f"{x['identical']} of {r['requests']}"] for x in r["rows"]])


def _gpu(r):
    """The sections of the GPU suite, a table each."""
    copy = r["floors"][0]["bytes_per_second"]
    tables = [_table(["floor", "measured"], [["copy", f"{copy / 1e12:.2f} TB/s"], ["bf16 product", f"{r['floors'][1]['flops'] / 1e12:.0f} Tflop/s"]])]
    micro = lambda x: "" if x is None else f"{1e6 * x:.1f}"
    tables.append(_table(["kernel", "context", "requests", "heads a KV head", "us (range)", "share of copy speed", "two launches, us", "SDPA, us", "FlexAttention, us"],
                         [[x["kernel"] + ", torch reference" * x["reference"], x["context"], x["batch"], x["group"], f"{micro(x['seconds'])} ({micro(x['range'][0])}-{micro(x['range'][1])})",
                           f"{100 * x['bytes'] / x['seconds'] / copy:.0f} %", *(micro(x.get(n)) for n in ("two_launches", "sdpa", "flex"))] for x in r["kernels"]]))
    tables.append(_table(["random weights, batch 1", "tokens/s (range)", "floor", "share", "transformers, tokens/s", "wait between forwards, ms"],
                         [[x["model"], f"{x['tokens_per_second']:.0f} ({x['range'][0]:.0f}-{x['range'][1]:.0f})", f"{copy / x['bytes']:.0f}",
                           f"{100 * x['tokens_per_second'] * x['bytes'] / copy:.0f} %", "" if x["transformers"] is None else f"{x['transformers']:.0f}",
                           "" if x["wait"] is None else f"{1e3 * x['wait']:.2f}"] for x in r["decode"]]))
    tables.append(_table(["context", "requests", "method", "tokens/s", "speed-up (range)", "predicted", "accepted of 8", "identical to ar"],
                         [[x["context"], x["requests"], x["method"], f"{x['tokens_per_second']:.0f}", _times(x), _two(x.get("predicted")), _two(x.get("accepted")),
                           "" if x["identical"] is None else f"{x['identical']} of {x['requests']}"] for x in r.get("serving", ())]))
    tables.append(_table(["workload", "batch", "method", "tokens/s", "speed-up (range)", "tau", "identical to ar"],
                         [[x["workload"], x["batch"], x["method"], f"{x['tokens_per_second']:.0f}", _times(x), f"{x['tau']:.2f}", f"{x['identical']} of {x['prompts']}"] for x in r["methods"]]))
    return "\n\n".join([*tables, _stages(r["system"][0]), _ladder(r["bounds"][0])])


def _teachers(r):
    steps = sorted({int(step) for arm in r["arms"].values() for step in arm["heldout"]})
    losses = lambda arm: [f"{arm['heldout'][str(s)]:.3f}" if str(s) in arm["heldout"] else "" for s in steps]
    decoded = lambda x: [f"{100 * x['solved']:.0f} % of {x['problems']}", f"{x['steps']:.1f}"] if x else ["", ""]
    return _table(["held-out masked loss after steps", *steps, "solved at the end", "steps an answer"], [[name, *losses(arm), *decoded(arm["decoded"])] for name, arm in r["arms"].items()])


def whole_table(folder):
    """What `bench.py` prints at the end: every method on every workload, as observed, as modelled, and what is possible; from the files
    that run, bounds and accuracy left in a folder."""
    run, bounds, accuracy, diffusion = ({} for _ in range(4))
    for name, into in (("run", run), ("bounds", bounds), ("accuracy", accuracy), ("cdlm_accuracy", diffusion)):
        file = os.path.join(folder, name + ".json")
        if os.path.exists(file):
            with blame(file):
                into.update(read_json(file)["result"])
    cells, rows = {(c["workload"], c["batch"], c["kind"]): c for c in bounds.get("cells", ())}, []
    own = {}
    for x in diffusion.get("rows", ()):                  # the default threshold comes first
        own.setdefault(x["decoder"], x["by_family"])
    lossless = {f: x["accuracy"] for f, x in accuracy.get("families", {}).items()}
    for x in run["rows"]:
        c, m = cells.get((x["workload"], x["batch"], x["kind"]), {}), x["method"]
        solved = {"cdlm": own.get("student", {}), "dlm": own.get("teacher", {})}.get(m, lossless).get(x["workload"])
        rows.append([x["workload"], _batch(x), m, f"{x['tokens_per_second']:.0f}", _two(x["speedup"]), f"{x['tau']:.2f}",
                     _percent(x["acceptance"]), _two(c.get("L1", {}).get(m)), _two(c.get("L6") if m == "adaptive" else c.get("L5", {}).get(m)),
                     _identical(x), _percent(solved)])
    return _table(["workload", "batch", "method", "tokens/s", "speed-up", "tau", "accepted", "speed-up, modelled", "bound", "identical to ar", "solved"], rows)


def training_table(folder):
    """Command, size, tokens, minutes and last held-out figures of every checkpoint, from its command.txt and log.jsonl."""
    rows = []
    for file in sorted(glob.glob(os.path.join(folder, "**", "command.txt"), recursive=True)):
        where = os.path.dirname(file)
        with open(file, encoding="utf-8") as f:
            command = f.read().strip()
        with blame(os.path.join(where, "log.jsonl")):
            log = checkpoints.records(where)
            seconds = sum(max(b - a, 0) if b > a else b for a, b in zip([0] + [r["seconds"] for r in log], [r["seconds"] for r in log]))
            last = [f"{log[-1]['tokens'] / 1e6:.1f}M tokens" if "tokens" in log[-1] else f"{log[-1]['step']:,} steps", f"{seconds / 60:.0f}", f"{log[-1]['loss']:.3f}"]
        with opened(os.path.join(where, "model.safetensors")) as f:
            params = sum(math.prod(f.get_slice(tensor).get_shape()) for tensor in f.keys())
        rows.append([os.path.relpath(where, folder), f"{params / 1e6:.2f}M", *last, f"`{command}`"])
    return _table(["checkpoint", "parameters", "trained on", "minutes on 1 or 2 CPU cores", "last loss", "command"], rows)


def _spread(values):
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"
