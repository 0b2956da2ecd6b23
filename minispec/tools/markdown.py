"""Markdown tables of results. Figures are stored in full and rounded here alone."""
import re


def texts(rows):
    """The table of dicts {head: what its cell shows}, with the columns of the longest one."""
    heads = max(rows, key=len)
    lines = [[shown(row.get(head, "")) for head in heads] for row in rows]
    return join([map(shown, heads), ["---"] * len(heads), *lines])


def shown(value):
    """What a cell shows, which may be a name from a file: nothing that breaks the table."""
    return str(value).replace("\n", " ").replace("|", "\\|")


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
