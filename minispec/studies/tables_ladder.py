"""The ladder of bounds as tables: a line for each cell, then a line for each drafter in it."""
from minispec.studies.markdown import percent, row, table, two

FEW = 0.05                       # the censored share of positions above which a bound is marked


def ladder_table(r):
    """All that studies/ladder.py found. r: what `analyse` returns; cells that were stored before there was a
    censored share have empty places for it."""
    parts = [brief_table(r), rungs_table(r)]
    if any(censored(c, m) for c in r["cells"] for m in [*c["L5"], "all"]):
        parts.append(
            f"*: at more than {percent(FEW)} of the positions all drafts of the trace were accepted, so "
            "longer rounds might gain more; the figure only bounds rounds of at most as many drafts.")
    if any("published" in c for c in r["cells"]):
        parts.append(published_table(r))
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


def batch_of(c):
    return f"{c['batch']} {c['kind']}" if c["batch"] > 1 else 1


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


def published_table(r):
    """The paper's simulator next to the optimum, both by both averages: its own is of rates, that of all
    other tables of time."""
    rows = []
    for c in r["cells"]:
        for m, x in c.get("published", {}).items():
            line = [c["workload"], batch_of(c), m]
            for average in ("total", "rates"):
                line += [two(x["simulator"][average]), two(x["optimum"][average])]
            rows.append(row(line))
    head = ["workload", "batch", "drafter",
            "the paper's simulator, total time", "L5 / L6 optimum, total time",
            "the paper's simulator, mean of rates", "L5 / L6 optimum, mean of rates"]
    return table(row(head), rows)
