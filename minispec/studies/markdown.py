"""Markdown tables of results. Figures are stored in full and rounded here alone."""
import re

TIMES = "{speedup:.2f} ({speedup_range[0]:.2f}-{speedup_range[1]:.2f})"
SAME = "{identical:d} of {prompts}"


def table(columns, rows):
    """A Markdown table of dicts. columns: {head: template for str.format}."""
    lines = [columns, ["---"] * len(columns)]
    lines += [[cell(template, x) for template in columns.values()] for x in rows]
    return join(lines)


def join(lines):
    """The table of lists of cells."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cell(template, x):
    """The text of a cell; empty where the row lacks a figure, or has None for it."""
    known = {name: value for name, value in x.items() if value is not None}
    try:
        return re.sub("(?<! )%", " %", template.format(**known))
    except (KeyError, TypeError):
        return ""


def pick(text, columns="", rows=""):
    """Of the first table in `text`, the columns "a, b" and the rows "c; d" that begin so, in that order; all
    where nothing is asked for. ValueError for what is not there."""
    if not columns and not rows:
        return text
    head, rule, *body = text.split("\n\n")[0].splitlines()

    def those(names, lines):
        for name in names:
            some = [i for i, line in enumerate(lines) if line.startswith(name)]
            if not some:
                raise ValueError(f"a page asks for '{name}', which is not in the table: {lines}")
            yield some[0]

    if rows:
        body = [body[i] for i in those([f"| {row}" for row in rows.split("; ")], body)]
    cells = [line[2:-2].split(" | ") for line in (head, rule, *body)]
    if columns:
        places = list(those(columns.split(", "), cells[0]))
        cells = [[line[i] for i in places] for line in cells]
    return join(cells)
