"""Markdown tables of what the scripts of this folder measure; each script writes its own next to its
figures."""
import statistics

from minispec.studies.results import SAME
from minispec.tools.markdown import cell, join


def spread(rates, digits=0):
    return f"{statistics.median(rates):.{digits}f} ({min(rates):.{digits}f}-{max(rates):.{digits}f})"


def lines(head, rows):
    """A table of texts with " | " between cells."""
    cells = [line.split(" | ") for line in (head, *rows)]
    return join([cells[0], ["---"] * len(cells[0]), *cells[1:]])


def llamacpp(r):
    """The parts of tests/compare_llamacpp.py that were measured, a table each."""
    tokens = lambda part: f"tokens/s, {part['threads']} threads, median (range)"
    parts = []
    if "speed" in r:
        rows = [f"{x['loop']} | {x['dtype']} | {spread(x['tokens_per_second'], 1)} | {x['ratio']:.2f} | "
                f"{cell(SAME, x)}" for x in r["speed"]["rows"]]
        parts.append(lines(f"loop | dtype | {tokens(r['speed'])} | ours, times as fast | same text", rows))
    rows = []
    if "ids" in r:
        rows.append(f"texts with the ids of `tokenizers` | {r['ids']['same']:,} of {r['ids']['texts']:,}")
    if "greedy" in r:
        x = r["greedy"]
        what = f"answers of {x['new_tokens']} tokens that are transformers' most likely, float32"
        rows.append(f"{what} | {x['same']} of {x['prompts']}")
    for dtype, x in r.get("load", {}).items():
        memory = (x["peak"] - x["before"]) / x["bytes"]
        rows.append(f"loading as {dtype} | {x['seconds']:.1f} s, at most {memory:.2f} times the weights")
    return "\n\n".join([*parts, lines("check | result", rows)])


def checkpoints(r):
    rows = []
    for family, x in r["families"].items():
        ids = x["ids"]
        greedy = " | ".join(f"{n} of {x['prompts']}" for n in x["greedy"].values())
        rows.append(f"{family} | {x['folders']} | {x['logit_difference']:.1e} | "
                    f"{ids['same']:,} of {ids['strings']:,} | {ids['tokens']:,} | {greedy}")
    like_ar = " | ".join(f"{name} like ar" for name in list(x["greedy"])[1:])
    families = lines("family | random folders | largest logit difference | texts with the same ids | "
                     f"tokens | ar like transformers | {like_ar}", rows)

    rows = []
    for dtype, m in r["memory"].items():
        size, peak, before = (f"{m[key] / 1e9:.2f} GB" for key in ("bytes", "peak", "before"))
        rows.append(f"{dtype} | {size} | {peak} | {m['peak'] / m['bytes']:.2f} | {before}")
    billions = f"{r['memory']['bfloat16']['parameters'] / 1e9:.2f} billion parameters"
    return families + "\n\n" + lines(f"{billions}, stored as bf16, loaded as | weights | "
                                     "peak memory of the process | times the weights | "
                                     "of it Python and torch", rows)


def knocks(r):
    rows = []
    for what, x in (("wrong command lines", r["lines"]), ("damaged files", r["files"])):
        fine, refused = (x["exits"].get(code, 0) for code in ("0", "2"))
        rows.append(f"{what} | {x['cases']:,} | {fine:,} | {refused:,} | {x['failures']} | "
                    f"{x['slowest_seconds']:.0f}")
    fuzzed = lines("fuzzed | cases | exit 0 | exit 2 with a line | "
                   "tracebacks, hangs, half-written files | slowest, CPU seconds", rows)
    rows = [f"`{script}.py` | {x['kills']} | {x['runs_that_reached_the_end']}"
            for script, x in r["kill"]["scripts"].items()]
    return fuzzed + "\n\n" + lines("killed (kill -9) at random moments and started again | kills | "
                                   "runs that reached the end, equal to an undisturbed one", rows)
