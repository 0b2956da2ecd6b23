"""The tables of docs/bounds.md: what rounds cost, what was accepted, what was observed, and the ladder of
bounds."""
from minispec.studies import results
from minispec.studies.markdown import percent, row, same, table, two

PHASES = ("prefill", "draft", "verify", "sample", "overhead")
FEW = 0.05                       # the censored share of positions above which a bound is marked


def batch_of(x):
    return f"{x['batch']} {x['kind']}" if x["batch"] > 1 else 1


# -- profile ---------------------------------------------------------------------------------------

def costs_table(r):
    """T4: the cost model, some cells of the measured grid."""
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
    return "\n\n".join([measured, scatter])


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


# -- bounds ----------------------------------------------------------------------------------------

def ladder_table(r):
    """All that studies/ladder.py found. r: what `analyse` returns; cells that were stored before there was a
    censored share have empty places for it."""
    parts = [brief_table(r), rungs_table(r)]
    if any(censored(c, m) for c in r["cells"] for m in [*c["L5"], "all"]):
        parts.append(
            f"*: at more than {percent(FEW)} of the positions all drafts of the trace were accepted, so "
            "longer rounds might gain more; the figure only bounds rounds of at most as many drafts.")
    if r.get("left_out"):
        parts.append(f"Left out, because the cost table has no price for it: {', '.join(r['left_out'])}.")
    errors = []
    for what, e in (("seconds", r["model_error"]), ("speed-ups", r["speedup_error"])):
        if e:
            median, most = percent(e["median"]), percent(e["max"])
            errors.append(f"modelled over observed {what}: median {median}, at most {most}")
    if errors:
        parts.append(f"Error of the cost model, {'; '.join(errors)}.")
    return "\n\n".join(parts)


def highest(some):
    """(name, value) of the largest value in {name: value}."""
    return max(some.items(), key=lambda x: x[1]) if some else ("", None)


def share(c, m):
    """The censored share of drafter m, or of "all"."""
    return c.get("censored", {}).get(m)


def censored(c, m):
    return (share(c, m) or 0) > FEW


def bound(c, m, speedup):
    """A rung that is a bound, marked where the traces are too short to say so."""
    return two(speedup) + "*" * censored(c, m)


def brief_table(r):
    """A line for each cell: the best of every kind."""
    seen = r["observed"]
    rows = []
    for c in r["cells"]:
        line = [c["workload"], batch_of(c)]
        if seen:
            who, single = highest({m: s for m, s in c["L0"].items() if m in c["L5"]})
            line += [f"{two(single)} {who}", two(c["L0"].get("adaptive"))]
            line += [percent(c.get("gap")), percent(c.get("gap_modelled"))]
        fixed_by, fixed = highest({f"{m}, k {x['k']}": x["speedup"] for m, x in c["L2"].items()})
        best, most = highest(c["L5"])
        line += [f"{two(fixed)} {fixed_by}", f"{bound(c, best, most)} {best}"]
        line += [bound(c, "all", c["L6"]), bound(c, "all", c["L7"]), two(c["L9"]), percent(share(c, "all"))]
        rows.append(row(line))
    head = ["workload", "batch"]
    if seen:
        head += ["observed, best single", "observed, adaptive", "share of the gap to L6 it closes",
                 "the same, modelled"]
    head += ["L2 best fixed k", "L5 optimum, best single", "L6 all drafters", "L7 free drafters",
             "L9 one pass", "censored"]
    return table(row(head), rows)


def rungs_table(r):
    """All rungs, a line for each drafter of a cell and one for all of them together."""
    seen = r["observed"]
    rows = []
    for c in r["cells"]:
        for m in [*c["L5"], "all"]:
            line = [c["workload"], batch_of(c), m]
            if seen:
                line += [two(c[rung].get("adaptive" if m == "all" else m)) for rung in ("L0", "L1", "above")]
            if m == "all":
                line += ["", two(c["L4"].get(m)), bound(c, m, c["L6"]), bound(c, m, c["L7"]), two(c["L9"])]
            else:
                fixed = c["L2"][m]
                best = f"{two(fixed['speedup'])}, k {fixed['k']}"
                line += [best, two(c["L4"][m]), bound(c, m, c["L5"][m]), "", ""]
            rows.append(row([*line, percent(share(c, m))]))
    head = ["workload", "batch", "drafter"]
    if seen:
        head += ["L0 observed", "L1 modelled", "time over the bound's"]
    head += ["L2 best fixed k", "L4 greedy (not a bound)", "L5 / L6 optimum", "L7 free drafters",
             "L9 one pass", "censored"]
    return table(row(head), rows)


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
