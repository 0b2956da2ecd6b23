"""A Markdown table, and how figures are written in its cells. What was not measured (None) is an empty cell."""


def table(head, rows):
    """A Markdown table of a list of headings and lists of cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def whole(x):
    return "" if x is None else f"{x:.0f}"


def two(x):
    return "" if x is None else f"{x:.2f}"


def millions(n, digits=2):
    return f"{n / 1e6:.{digits}f}M"


def percent(share, digits=0):
    return "" if share is None else f"{100 * share:.{digits}f} %"


def span(ends, digits=2):
    """(low, high) as "low-high"."""
    low, high = ends
    return f"{low:.{digits}f}-{high:.{digits}f}"


def times(x):
    """The speed-up of a row, with its range if it was measured more than once."""
    if "speedup_range" not in x:
        return two(x["speedup"])
    return f"{two(x['speedup'])} ({span(x['speedup_range'])})"


def same(x, of=None):
    """How many answers of a row are identical to the baseline's; empty where they are not meant to be."""
    if x["identical"] is None:
        return ""
    return f"{x['identical']} of {x['prompts'] if of is None else of}"
