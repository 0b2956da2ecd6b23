"""Markdown tables of results. Figures are stored in full and rounded here alone."""
import re


def table(rows, columns):
    """The table of dicts. columns: {head: template for str.format}."""
    return texts([{head: cell(template, x) for head, template in columns.items()} for x in rows])


def texts(rows, heads=()):
    """The table of dicts {head: text of the cell}, with these columns, or the columns of the longest row."""
    heads = heads or max(rows, key=len)
    lines = [[shown(row.get(head, "")) for head in heads] for row in rows]
    return join([map(shown, heads), ["---"] * len(heads), *lines])


def shown(value):
    """The text of a cell, which may be a name from a file: nothing in it breaks the table."""
    return str(value).replace("\n", " ").replace("|", "\\|")


def join(lines):
    """The table of lists of cells."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cell(template, x):
    """The text of a cell; empty if the row lacks a figure, or has None for it."""
    known = {name: value for name, value in x.items() if value is not None}
    try:
        return re.sub("(?<! )%", " %", template.format(**known))
    except (KeyError, TypeError):
        return ""
