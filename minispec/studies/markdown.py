"""Markdown tables of results. Figures are stored in full and rounded here alone."""
import re

TIMES = "{speedup:.2f} ({speedup_range[0]:.2f}-{speedup_range[1]:.2f})"
SAME = "{identical:d} of {prompts}"


def table(columns, rows):
    """A Markdown table of dicts. columns: {head: template for str.format}."""
    return texts([{head: cell(template, x) for head, template in columns.items()} for x in rows])


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


def pick(text, columns="", rows="", say=""):
    """Of the first table in `text`, the columns "a, b" and the rows "c; d" that begin so, in that order, with
    what follows the table; all where nothing is asked for. Or the sentence `say`, in which {a @ c} becomes
    the cell of that column and row. ValueError for what is not there."""
    shown, *notes = text.split("\n\n")
    head, rule, *body = shown.splitlines()
    heads = cells_of(head)

    def cell_at(match):
        column, row = match[1].split(" @ ")
        return cells_of(body[place(f"| {row}", body)])[place(column, heads)]

    if say:
        return re.sub("{(.+?)}", cell_at, say)
    if rows:
        body = [body[place(f"| {row}", body)] for row in rows.split("; ")]
    places = range(len(heads))
    if columns:
        places = [place(column, heads) for column in columns.split(", ")]
    shown = join([[cells_of(line)[i] for i in places] for line in (head, rule, *body)])
    return "\n\n".join([shown, *notes])


def cells_of(line):
    return line[2:-2].split(" | ")


def place(name, lines):
    """Which one of `lines` is the first that begins so."""
    for i, line in enumerate(lines):
        if line.startswith(name):
            return i
    raise ValueError(f"a page asks for '{name}', which is not in the table: {lines}")
