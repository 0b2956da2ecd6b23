"""The tables of docs/bounds.md: what rounds cost, what was accepted, what was observed, and the ladder of
bounds."""
from minispec.bounds import AVERAGES
from minispec.data import tasks
from minispec.studies.markdown import percent, row, same, table, two

PHASES = ("prefill", "draft", "verify", "sample", "overhead")
BOTH = " / ".join(AVERAGES)
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
                f"{gained(x)} | {x['tau']:.2f} | {percent(x['acceptance'])} | {shares} | {same(x)}")
        if "solved" in x:
            right, known = x["solved"]
            line += f" | {right} of {known}" if known else " | "
        rows.append(line)
    head = f"workload | batch | method | tokens/s | speed-up, {BOTH} | tau | accepted"
    solved = " | solved" * ("solved" in r["rows"][0])
    return table(f"{head} | {row(f'{phase} %' for phase in PHASES)} | identical to ar{solved}", rows)


def gained(x):
    """The observed speed-up of a row of `run`."""
    return both(x["speedup"], x.get("rate_speedup"))


def both(total, rate, mark=""):
    """A speed-up by the two averages; one figure where rates of single requests are not known."""
    return " / ".join(two(x) + mark for x in (total, rate) if x is not None)


def methods(r):
    """One request at a time, from the study `run`: a row a method whose answers are the target's, a column a
    workload."""
    alone = [x for x in r["rows"] if x["batch"] == 1 and x["identical"] is not None]
    workloads = list(dict.fromkeys(x["workload"] for x in alone))
    families = [w for w in workloads if w in tasks.FAMILIES] or workloads
    rows = []
    for method in dict.fromkeys(x["method"] for x in alone):
        some = {x["workload"]: x for x in alone if x["method"] == method}
        mean = sum(some[w]["speedup"] for w in families) / len(families)
        if method == "ar":
            cells = [f"1, {some[w]['tokens_per_second']:.0f} tokens/s" for w in workloads]
        else:
            cells = [f"{gained(some[w])}, tau {some[w]['tau']:.1f}" for w in workloads]
        identical, prompts = (sum(x[key] for x in some.values()) for key in ("identical", "prompts"))
        rows.append(row([method, two(mean), *cells, f"{identical} of {prompts}"]))
    return table(row(["method", "mean of the families", *workloads, "identical to ar"]), rows)


# -- bounds ----------------------------------------------------------------------------------------

def ladder_table(r):
    """All that studies/ladder.py found. r: what `analyse` returns."""
    parts = [brief_table(r), f"All speed-ups are {BOTH}.", rungs_table(r)]
    if any(censored(c, m) for c in r["cells"] for m in c["censored"]):
        parts.append(
            f"*: at more than {percent(FEW)} of the positions all drafts of the trace were accepted, so "
            "longer rounds might gain more; the figure only bounds rounds of at most as many drafts.")
    if r["left_out"]:
        parts.append(f"Left out, because the cost table has no price for it: {', '.join(r['left_out'])}.")
    errors = []
    for what, e in (("seconds", r["model_error"]), ("speed-ups", r["speedup_error"])):
        if e:
            median, most = percent(e["median"]), percent(e["max"])
            errors.append(f"modelled over observed {what}: median {median}, at most {most}")
    if errors:
        parts.append(f"Error of the cost model, {'; '.join(errors)}.")
    return "\n\n".join(parts)


def censored(c, m):
    return c["censored"][m] > FEW


def rung(c, name, m=None):
    """A rung of a cell by both averages, marked where it is a bound that the traces are too short for."""
    values = [c[by].get(name) for by in AVERAGES]
    if m is not None:
        values = [some and some.get(m) for some in values]
    marked = name in ("L5", "L6", "L7") and censored(c, m or "all")
    return both(*values, "*" * marked)


def best(c, name, among=None):
    """The drafter with the highest speed-up by total time on a rung, or the best of `among`."""
    some = {m: s for m, s in c[AVERAGES[0]][name].items() if among is None or m in among}
    return max(some, key=some.get) if some else None


def fixed(c, m):
    """The best fixed k of a drafter by each average."""
    cells = [c[by]["L2"][m] for by in AVERAGES]
    ks = " / ".join(dict.fromkeys(str(x["k"]) for x in cells))
    return f"{both(*(x['speedup'] for x in cells))}, k {ks}"


def brief_table(r):
    """A line for each cell: the best of every kind."""
    seen = r["observed"]
    rows = []
    for c in r["cells"]:
        drafters = c[AVERAGES[0]]["L5"]
        line = [c["workload"], batch_of(c)]
        if seen:
            who = best(c, "L0", drafters)
            line += [f"{rung(c, 'L0', who)} {who}" if who else "", rung(c, "L0", "adaptive")]
            line += [percent(c.get("gap")), percent(c.get("gap_modelled"))]
        who = max(drafters, key=lambda m: c[AVERAGES[0]]["L2"][m]["speedup"])
        most = best(c, "L5")
        line += [f"{fixed(c, who)} {who}", f"{rung(c, 'L5', most)} {most}"]
        line += [rung(c, "L6"), rung(c, "L7"), rung(c, "L9"), percent(c["censored"]["all"])]
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
        for m in c["censored"]:
            line = [c["workload"], batch_of(c), m]
            if seen:
                who = "adaptive" if m == "all" else m
                line += [rung(c, "L0", who), two(c["L1"].get(who)), two(c["above"].get(who))]
            if m == "all":
                line += ["", rung(c, "L4", m), rung(c, "L6"), rung(c, "L7"), rung(c, "L9")]
            else:
                line += [fixed(c, m), rung(c, "L4", m), rung(c, "L5", m), "", ""]
            rows.append(row([*line, percent(c["censored"][m])]))
    head = ["workload", "batch", "drafter"]
    if seen:
        head += ["L0 observed", "L1 modelled", "time over the bound's"]
    head += ["L2 best fixed k", "L4 greedy (not a bound)", "L5 / L6 optimum", "L7 free drafters",
             "L9 one pass", "censored"]
    return table(row(head), rows)
