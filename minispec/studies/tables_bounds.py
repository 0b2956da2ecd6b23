"""The tables of docs/bounds.md: what rounds cost, what was accepted, what was observed, and the ladder of bounds."""
from minispec.studies import results
from minispec.studies.markdown import percent, same, table, two, whole

PHASES = ("prefill", "draft", "verify", "sample", "overhead")


def batch_of(x):
    return f"{x['batch']} {x['kind']}" if x["batch"] > 1 else 1


def highest(some):
    """(name, value) of the largest value in {name: value}."""
    return max(some.items(), key=lambda x: x[1]) if some else ("", None)


# -- profile -----------------------------------------------------------------------------------------------------------------

def costs_table(r):
    """T4: the cost model. How the measured grid looks, and how well a few constants would do in its place."""
    grid, overhead, drafts = r["table"]["verify"], r["table"]["overhead"], r["table"]["draft"]
    tokens, kv = grid["tokens"], grid["kv"]
    wanted = tokens.index(5) - 1 if 5 in tokens else 0                         # 4 drafts, or as many as a window has
    shown = {m: min(wanted, len(g["tokens"]) - 1) for m, g in drafts.items()}

    rows = []
    for i, batch in enumerate(grid["rows"]):
        for c in sorted({0, len(kv) - 1}):                                     # the shortest and the longest context
            seconds = [cell[c] for cell in grid["seconds"][i]]
            rows.append([batch, kv[c], ms(seconds[0]), *(two(s / seconds[0]) for s in seconds[1:]),
                         ms(overhead["seconds"][i][0][0]),
                         *(ms(g["seconds"][i][shown[m]][c]) for m, g in drafts.items())])
    head = ["rows", "context", "verify 1 token, ms", *(f"{t} tokens, times" for t in tokens[1:]), "overhead, ms",
            *(f"{m} drafts {g['tokens'][shown[m]]}, ms" for m, g in drafts.items())]
    scatter = percent(r["scatter"])
    return "\n\n".join([table(head, rows), fits_table(r["fits"]),
                        f"Median spread of a cell's repeats (interquartile range over median): {scatter}."])


def fits_table(fits):
    rows = []
    for kind, f in fits.items():
        coefficients = ", ".join(f"{term} {1e6 * s:.3g}" for term, s in f["entry"].items() if term != "kind")
        rates = [f[name] for name in ("kv_bytes_per_s", "weight_bytes_per_s", "flops_per_s")]
        rows.append([kind, coefficients + " us", f"{f['r2']:.3f}", percent(f["median"]), percent(f["max"]),
                     *(f"{rate / 1e9:.1f}" if rate else "" for rate in rates)])
    return table(["fit of the verify grid", "coefficients", "R2", "median error", "largest error", "cache GB/s",
                  "weights GB/s", "GFLOP/s"], rows)


def ms(seconds):
    return two(1000 * seconds)


# -- trace and run -----------------------------------------------------------------------------------------------------------

def trace_table(r):
    """T3: accept lengths by workload and drafter, weighted by position and by round."""
    def spread(x):
        return f"{two(x['mean'])} / {whole(x['median'])} / {two(x['std'])}"

    rows = []
    for workload, drafters in r["accept"].items():
        for name, x in drafters.items():
            at = x["by_position"]
            rows.append([workload, name, x["positions"], spread(at), f"{whole(at['p5'])}-{whole(at['p95'])}",
                         spread(x["by_round"]), percent(x["censored"], 1)])
    return table(["workload", "drafter", "positions", "tokens a round would gain at a position: mean / median / deviation",
                  "5-95 %", f"the same over rounds of {r['k']} drafts", f"all {r['k_max']} accepted"], rows)


def run_table(r):
    """What was observed, and T2: where its time went."""
    judged = "solved" in r["rows"][0]
    rows = []
    for x in r["rows"]:
        total = sum(x["phases"].values())
        shares = [whole(100 * x["phases"][phase] / total) for phase in PHASES]
        row = [x["workload"], batch_of(x), x["method"], whole(x["tokens_per_second"]), two(x["speedup"]), two(x["tau"]),
               percent(x["acceptance"]), *shares, same(x)]
        if judged:
            right, known = x["solved"]
            row.append(f"{right} of {known}" if known else "")
        rows.append(row)
    head = ["workload", "batch", "method", "tokens/s", "speed-up", "tau", "accepted", *(f"{phase} %" for phase in PHASES),
            "identical to ar"]
    return table(head + ["solved"] * judged, rows)


# -- bounds ------------------------------------------------------------------------------------------------------------------

def ladder_table(r):
    """T1: the rungs, first a line for each cell, then one for each drafter in it; then what Amdahl's law says."""
    parts = [brief_table(r), rungs_table(r), free_table(r)]
    errors = []
    for what, e in (("seconds", r["model_error"]), ("speed-ups", r["speedup_error"])):
        if e:
            errors.append(f"modelled over observed {what}: median {percent(e['median'])}, at most {percent(e['max'])}")
    if errors:
        parts.append(f"Error of the cost model, {'; '.join(errors)}.")
    return "\n\n".join(parts)


def brief_table(r):
    """A line for each cell: the best of every kind."""
    rows = []
    for c in r["cells"]:
        row = [c["workload"], batch_of(c)]
        if r["observed"]:
            who, single = highest({m: s for m, s in c["L0"].items() if m in c["L5"]})
            row += [f"{two(single)} {who}", two(c["L0"].get("adaptive")), percent(c.get("gap")), percent(c.get("gap_modelled"))]
        fixed_by, fixed = highest({f"{m}, k {x['k']}": x["speedup"] for m, x in c["L2"].items()})
        bound_by, bound = highest(c["L5"])
        rows.append([*row, f"{two(fixed)} {fixed_by}", f"{two(bound)} {bound_by}", two(c["L6"]), two(c["L7"]), two(c["L9"])])
    observed = ["observed, best single", "observed, adaptive", "share of the gap to L6 it closes", "the same, modelled"]
    return table(["workload", "batch", *(observed if r["observed"] else []), "L2 best fixed k", "L5 optimum, best single",
                  "L6 all drafters", "L7 free drafters", "L9 one pass"], rows)


def rungs_table(r):
    """All rungs, a line for each drafter of a cell and one for all of them together."""
    published = any("published" in c for c in r["cells"])
    rows = []
    for c in r["cells"]:
        for m in [*c["L5"], "all"]:
            row = [c["workload"], batch_of(c), m]
            if r["observed"]:
                row += [two(c[rung].get("adaptive" if m == "all" else m)) for rung in ("L0", "L1", "above")]
            greedy = [two(c["L3"].get(m)), two(c["L4"].get(m))]
            perfect = two(c["L8"].get(m))
            if m == "all":
                row += ["", *greedy, two(c["L6"]), two(c["L7"]), perfect, two(c["L9"]), ""]
            else:
                fixed, alike = c["L2"][m], c["L10"][m]
                row += [f"{two(fixed['speedup'])}, k {fixed['k']}", *greedy, two(c["L5"][m]), "", perfect, "",
                        f"{two(alike['speedup'])}, alpha {two(alike['alpha'])}"]
            if "published" in c:
                row.append(two(c["published"].get(m)))
            rows.append(row)
    observed = ["L0 observed", "L1 modelled", "time over the bound's"] if r["observed"] else []
    return table(["workload", "batch", "drafter", *observed, "L2 best fixed k", "L3 k by request", "L4 greedy (not a bound)",
                  "L5 / L6 optimum", "L7 free drafters", "L8 perfect drafter", "L9 one pass", "L10 i.i.d.",
                  *(["the paper's simulator"] if published else [])], rows)


def free_table(r):
    """What would be gained if a part of a round took no time (Amdahl's law); and the best tree of one shape."""
    rows = []
    for c in r["cells"]:
        for m, free in c["L12"].items():
            tree = "{speedup:.2f}, {nodes} nodes, depth {depth}".format(**c["L11"][m]) if m in c["L11"] else ""
            rows.append([c["workload"], batch_of(c), m, *(two(free.get(x)) for x in ("rejected", "draft", "overhead", "all")), tree])
    return table(["workload", "batch", "drafter, best fixed k", "rejected tokens free", "drafting free", "overhead free",
                  "all three", "L11 best static tree"], rows)


# -- all together ------------------------------------------------------------------------------------------------------------

def whole_table(folder=None):
    """What `bench.py` prints at the end: every method on every workload, as observed, as modelled, and what is possible; from
    the files that run, bounds, accuracy and cdlm_accuracy left in results/."""
    run, bounds, accuracy, diffusion = (results.read(name, folder) or {}
                                        for name in ("run", "bounds", "accuracy", "cdlm_accuracy"))
    cells = {(c["workload"], c["batch"], c["kind"]): c for c in bounds.get("cells", ())}
    # Lossless methods solve what the target solves. Diffusion models have answers of their own; the default threshold is first.
    lossless = {family: x["accuracy"] for family, x in accuracy.get("families", {}).items()}
    own = {}
    for x in diffusion.get("rows", ()):
        own.setdefault(x["decoder"], x["by_family"])

    rows = []
    for x in run["rows"]:
        method, c = x["method"], cells.get((x["workload"], x["batch"], x["kind"]), {})
        solved = {"cdlm": own.get("student", {}), "dlm": own.get("teacher", {})}.get(method, lossless)
        bound = c.get("L6") if method == "adaptive" else c.get("L5", {}).get(method)
        rows.append([x["workload"], batch_of(x), method, whole(x["tokens_per_second"]), two(x["speedup"]), two(x["tau"]),
                     percent(x["acceptance"]), two(c.get("L1", {}).get(method)), two(bound), same(x),
                     percent(solved.get(x["workload"]))])
    return table(["workload", "batch", "method", "tokens/s", "speed-up", "tau", "accepted", "speed-up, modelled", "bound",
                  "identical to ar", "solved"], rows)
