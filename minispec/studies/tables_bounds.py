"""The tables of docs/bounds.md: what rounds cost, what was accepted, what was observed, and the ladder of
bounds."""
from minispec.studies import results
from minispec.studies.markdown import percent, row, same, table, two

PHASES = ("prefill", "draft", "verify", "sample", "overhead")


def batch_of(x):
    return f"{x['batch']} {x['kind']}" if x["batch"] > 1 else 1


# -- profile ---------------------------------------------------------------------------------------

def costs_table(r):
    """T4: the cost model. How the measured grid looks, and how well a few constants would do in its place."""
    grid, overhead, drafts = r["table"]["verify"], r["table"]["overhead"], r["table"]["draft"]
    tokens, kv = grid["tokens"], grid["kv"]
    wanted = tokens.index(5) - 1 if 5 in tokens else 0                  # 4 drafts, or as many as a window has
    shown = {m: min(wanted, len(g["tokens"]) - 1) for m, g in drafts.items()}

    rows = []
    for i, batch in enumerate(grid["rows"]):
        host = overhead["seconds"][i][0][0]
        for c in sorted({0, len(kv) - 1}):                              # the shortest and the longest context
            first, *others = (cell[c] for cell in grid["seconds"][i])
            factors = row(two(s / first) for s in others)
            drafting = row(f"{1000 * g['seconds'][i][shown[m]][c]:.2f}" for m, g in drafts.items())
            rows.append(f"{batch} | {kv[c]} | {1000 * first:.2f} | {factors} | {1000 * host:.2f} | "
                        f"{drafting}")
    factors = row(f"{t} tokens, times" for t in tokens[1:])
    drafting = row(f"{m} drafts {g['tokens'][shown[m]]}, ms" for m, g in drafts.items())
    measured = table(f"rows | context | verify 1 token, ms | {factors} | overhead, ms | {drafting}", rows)
    scatter = f"Median spread of a cell's repeats (interquartile range over median): {percent(r['scatter'])}."
    return "\n\n".join([measured, fits_table(r["fits"]), scatter])


def fits_table(fits):
    rows = []
    for kind, f in fits.items():
        terms = ", ".join(f"{term} {1e6 * s:.3g}" for term, s in f["entry"].items() if term != "kind")
        rates = [f[name] for name in ("kv_bytes_per_s", "weight_bytes_per_s", "flops_per_s")]
        shown = row(f"{rate / 1e9:.1f}" if rate else "" for rate in rates)
        rows.append(f"{kind} | {terms} us | {f['r2']:.3f} | {percent(f['median'])} | "
                    f"{percent(f['max'])} | {shown}")
    return table("fit of the verify grid | coefficients | R2 | median error | largest error | "
                 "cache GB/s | weights GB/s | GFLOP/s", rows)


# -- trace and run ---------------------------------------------------------------------------------

def trace_table(r):
    """T3: accept lengths by workload and drafter, weighted by position and by round."""
    def spread(x):
        return f"{x['mean']:.2f} / {x['median']:.0f} / {x['std']:.2f}"

    rows = []
    for workload, drafters in r["accept"].items():
        for name, x in drafters.items():
            at = x["by_position"]
            rows.append(f"{workload} | {name} | {x['positions']} | {spread(at)} | "
                        f"{at['p5']:.0f}-{at['p95']:.0f} | {spread(x['by_round'])} | "
                        f"{percent(x['censored'], 1)}")
    return table("workload | drafter | positions | "
                 "tokens a round would gain at a position: mean / median / deviation | 5-95 % | "
                 f"the same over rounds of {r['k']} drafts | all {r['k_max']} accepted", rows)


def run_table(r):
    """What was observed, and T2: where its time went."""
    rows = []
    for x in r["rows"]:
        total = sum(x["phases"].values())
        shares = row(f"{100 * x['phases'][phase] / total:.0f}" for phase in PHASES)
        line = (f"{x['workload']} | {batch_of(x)} | {x['method']} | {x['tokens_per_second']:.0f} | "
                f"{x['speedup']:.2f} | {x['tau']:.2f} | {percent(x['acceptance'])} | {shares} | {same(x)}")
        if "solved" in x:
            right, known = x["solved"]
            line += f" | {right} of {known}" if known else " | "
        rows.append(line)
    head = "workload | batch | method | tokens/s | speed-up | tau | accepted"
    solved = " | solved" * ("solved" in r["rows"][0])
    return table(f"{head} | {row(f'{phase} %' for phase in PHASES)} | identical to ar{solved}", rows)


# -- all together ----------------------------------------------------------------------------------

def whole_table(folder=None):
    """What `bench.py` prints at the end: every method on every workload, as observed, as modelled, and what
    is possible; from the files that run, bounds, accuracy and cdlm_accuracy left in results/."""
    studies = ("run", "bounds", "accuracy", "cdlm_accuracy")
    run, bounds, accuracy, diffusion = (results.read(name, folder) or {} for name in studies)
    cells = {(c["workload"], c["batch"], c["kind"]): c for c in bounds.get("cells", ())}
    # Lossless methods solve what the target solves. Diffusion models solve what they solved at the default
    # threshold, which comes first.
    lossless = {family: x["accuracy"] for family, x in accuracy.get("families", {}).items()}
    own = {}
    for x in diffusion.get("rows", ()):
        own.setdefault(x["decoder"], x["by_family"])
    solved_by = {"cdlm": own.get("student", {}), "dlm": own.get("teacher", {})}

    rows = []
    for x in run["rows"]:
        method = x["method"]
        c = cells.get((x["workload"], x["batch"], x["kind"]), {})
        modelled = c.get("L1", {}).get(method)
        bound = c.get("L6") if method == "adaptive" else c.get("L5", {}).get(method)
        solved = solved_by.get(method, lossless).get(x["workload"])
        rows.append(f"{x['workload']} | {batch_of(x)} | {method} | {x['tokens_per_second']:.0f} | "
                    f"{x['speedup']:.2f} | {x['tau']:.2f} | {percent(x['acceptance'])} | "
                    f"{two(modelled)} | {two(bound)} | {same(x)} | {percent(solved)}")
    return table("workload | batch | method | tokens/s | speed-up | tau | accepted | "
                 "speed-up, modelled | bound | identical to ar | solved", rows)
