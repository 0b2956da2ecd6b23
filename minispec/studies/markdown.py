"""A Markdown table, and how figures are written in it. What was not measured (None) is an empty cell."""


def table(head, rows):
    """A Markdown table. head and every row: a text of cells with " | " between them, as `row` makes it of a
    list."""
    rule = row("---" for _ in head.split(" | "))
    return "\n".join(f"| {line} |" for line in (head, rule, *rows))


def row(cells):
    return " | ".join(map(str, cells))


def pick(text, columns="", rows=""):
    """Of the first table in `text`, the columns "a, b" and the rows "c; d" that begin so, in that order; all
    where nothing is asked for. ValueError for what is not there."""
    if not columns and not rows:
        return text
    head, _, *body = (line[2:-2] for line in text.split("\n\n")[0].splitlines())

    def those(names, lines):
        for name in names:
            some = [i for i, line in enumerate(lines) if line.startswith(name)]
            if not some:
                raise ValueError(f"a page asks for '{name}', which is not in the table: {lines}")
            yield some[0]

    names = head.split(" | ")
    places = list(those(columns.split(", "), names)) if columns else range(len(names))
    chosen = [body[i] for i in those(rows.split("; "), body)] if rows else body
    cells = [line.split(" | ") for line in (head, *chosen)]
    first, *others = (row(line[i] for i in places) for line in cells)
    return table(first, others)


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
