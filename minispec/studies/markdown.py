"""A Markdown table, and how figures are written in it. What was not measured (None) is an empty cell."""


def table(head, rows):
    """A Markdown table. head and every row: a text of cells with " | " between them, as `row` makes it of a
    list."""
    rule = row("---" for _ in head.split(" | "))
    return "\n".join(f"| {line} |" for line in (head, rule, *rows))


def row(cells):
    return " | ".join(map(str, cells))


def whole(x):
    return "" if x is None else f"{x:.0f}"


def two(x):
    return "" if x is None else f"{x:.2f}"


def percent(share, digits=0):
    return "" if share is None else f"{100 * share:.{digits}f} %"


def millions(n, digits=2):
    return f"{n / 1e6:.{digits}f}M"


def span(ends, digits=2):
    """(low, high) as "low-high"."""
    low, high = ends
    return f"{low:.{digits}f}-{high:.{digits}f}"


def times(x):
    """The speed-up of a row, with its range if it was measured more than once."""
    if "speedup_range" not in x:
        return two(x["speedup"])
    return f"{x['speedup']:.2f} ({span(x['speedup_range'])})"


def same(x, of=None):
    """How many answers of a row are identical to the baseline's; empty where they are not meant to be."""
    if x["identical"] is None:
        return ""
    return f"{x['identical']} of {x['prompts'] if of is None else of}"
