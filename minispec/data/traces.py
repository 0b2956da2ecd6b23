"""What bounds.py computes from, as files that anyone can write: accept traces and cost tables.

A trace file has one JSON object per line, one line per request (reference: "Speculative Decoding: Performance
or Illusion?", arXiv 2601.11580, its per-position accept lengths):

    {"id": "arith/17", "prompt_len": 90, "n_out": 4, "accept": {"ngram": [1, 3, 1, 1]},
     "censored": {"ngram": [false, false, false, false]}, "offered": {"ngram": [0, 8, 0, 2]}}

What is in front of "/" in the id is the workload. accept[name][i] is 1 + the number of drafts accepted in a
round that starts when exactly i output tokens exist, so a round from there gains at most that many tokens; it
never reaches beyond the end (at most n_out - i). Entry 0 is not used and read as 0: the first output token
comes from the prompt. censored marks rounds in which all k_max drafts were accepted, so that the true value
may be larger. offered is how many drafts the drafter had at all (a lookup may find none); without it every
length could be asked for. censored and offered are optional.
All drafters of a line were run on one and the same output; a trace taken on another text is another line.

A cost table is one JSON object: seconds as a function of rows (requests in the forward), tokens per row and
cached tokens.

    {"about": {anything}, "verify": TIME, "draft": {name: TIME}, "read": {name: TIME}, "prefill": TIME,
     "overhead": TIME, "accept": {name: chance}}

Only verify is needed. read is what a drafter takes, on top of drafting, for the first round in which it sees
so many tokens; accept is the chance that a draft is accepted on some texts, which tells the method `adaptive`
what to hope; about may hold anything (device, versions, command). TIME is one of

    {"kind": "linear", "base": s, "row": s, "token": s, "step": s, "kv": s, "kv_step": s}   missing ones are 0
        s are seconds each: base once; per row; per token of all rows; per token of one row (a drafter's
        sequential steps); per cached token of all rows; the same at every step
    {"kind": "grid", "rows": [..], "tokens": [..], "kv": [..], "seconds": [[[..]]]}
        measured, seconds[rows][tokens][kv], with tokens and cached tokens per row; linear between points, and
        along its last segment beyond the last one
    {"kind": "share", "of_verify": x}     a drafter that takes this part of the verification that follows

What differs from the paper's files: theirs hold raw token ids and unclipped values of two separate runs, and
the cost is seven constants in the code. numpy and the standard library only.
"""
import json
from dataclasses import dataclass, field

import numpy as np

from minispec.data.prompts import read_rows
from minispec.tools.files import blame, read_json, replaced

LINEAR = ("base", "row", "token", "step", "kv", "kv_step")
GRID = ("rows", "tokens", "kv")
FIELDS = {"linear": LINEAR, "grid": (*GRID, "seconds"), "share": ("of_verify",)}
MOST = 1e9                       # the largest number that is believed


# -- accept traces ---------------------------------------------------------------------------------

@dataclass
class Trace:
    """One request. accept, censored, offered: {drafter: array (n_out,)} as described above.
    ValueError, beginning with the field, if a column has another length or an impossible entry."""
    id: str
    prompt_len: int
    n_out: int
    accept: dict
    censored: dict = field(default_factory=dict)
    offered: dict = field(default_factory=dict)

    def __post_init__(self):
        self.id = str(self.id)
        for name, least in (("prompt_len", 0), ("n_out", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MOST:
                raise ValueError(f"{name}: expected an integer from {least}, got {value}")
        for name, kind in (("accept", int), ("censored", bool), ("offered", int)):
            columns = getattr(self, name)
            setattr(self, name, {m: _column(c, self.n_out, kind, f"{name}.{m}") for m, c in columns.items()})

        # A round gains at least one token, at most what is missing, and no more than was offered and one.
        left = self.n_out - np.arange(self.n_out)
        for m, accept in self.accept.items():
            offered = self.offered.get(m, accept)
            possible = (1 <= accept) & (accept <= np.minimum(left, offered + 1))
            wrong = 1 + np.flatnonzero(~possible[1:])                # entry 0 is not used
            if len(wrong):
                i = wrong[0]
                raise ValueError(f"accept.{m}[{i}]: {accept[i]} is out of range; allowed is 1 to {left[i]}, "
                                 "and at most one more than was offered")


def _column(values, n, kind, where):
    """A list of n values of a kind as an array; entry 0 may be anything and becomes 0."""
    rest = np.array(values[1:])
    if len(values) != n or (n > 1 and (rest.dtype != kind or rest.ndim != 1)):
        raise ValueError(f"{where}: expected a list of n_out = {n} values of the type {kind.__name__}")
    return np.array([0, *rest], kind)


def read_traces(path):
    """List of Trace from a JSON-lines file. ValueError, in one line with file and line, if anything is
    wrong."""
    traces = []
    for where, row in read_rows(path):
        with blame(where):
            traces.append(Trace(**row))
            first, last = (", ".join(sorted(t.accept)) for t in (traces[0], traces[-1]))
            if last != first:
                raise ValueError(f"accept: the drafters are {last}, but {first} above")
    if not traces:
        raise ValueError(f"{path}: no trace in this file")
    return traces


def write_traces(path, traces):
    """Write a list of Trace so that `read_traces` returns it again."""
    with replaced(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for t in traces:
            row = {"id": t.id, "prompt_len": t.prompt_len, "n_out": t.n_out}
            for name in ("accept", "censored", "offered"):
                columns = {m: column.tolist() for m, column in getattr(t, name).items()}
                if columns:
                    row[name] = columns
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


# -- cost tables -----------------------------------------------------------------------------------

def read_costs(path):
    """The checked cost table (a dict as described above) of a JSON file. ValueError with file and field."""
    table = read_json(path)
    with blame(path):
        return check_costs(table)


def check_costs(table):
    """Return `table` if it is a valid cost table (already parsed), else ValueError that names the field."""
    times = [(name, table[name]) for name in ("prefill", "overhead", "verify") if name in table]
    for part in ("draft", "read"):
        times += [(f"{part}.{name}", entry) for name, entry in table.get(part, {}).items()]
    for where, entry in times:
        with blame(where):
            _check_time(entry, where.startswith("draft."))
    for name, chance in table.get("accept", {}).items():
        if not 0 <= chance <= 1:
            raise ValueError(f"accept.{name}: expected a chance from 0 to 1, got {chance}")
    if not isinstance(table.get("about", {}), dict):
        raise ValueError("about: expected an object")
    verify = table["verify"]
    paid = verify["seconds"] if verify["kind"] == "grid" else sum(verify.get(name, 0) for name in LINEAR)
    if np.min(paid) <= 0:
        raise ValueError("verify: a forward that takes no time at all has no speed-up")
    return table


def _check_time(entry, drafter):
    """ValueError where a TIME says what none can mean; only a drafter's may be a share."""
    kind = entry["kind"]
    if kind not in FIELDS or (kind == "share" and not drafter):
        raise ValueError(f"the kind '{kind}' is not one of those that are allowed here")
    known = {"kind", *FIELDS[kind]}
    odd = set(entry) - known if kind == "linear" else set(entry) ^ known
    if odd:
        raise ValueError(f"{', '.join(sorted(odd))}: unknown or missing; a {kind} has "
                         f"{', '.join(FIELDS[kind])}")

    # Every number alone, then the shape of a grid. The comparison also refuses NaN.
    for name in entry.keys() - {"kind"}:
        x = np.array(entry[name])
        right = x.dtype.kind in "if" and (x.ndim == 0 or kind == "grid")
        if not right or not ((0 <= x) & (x <= MOST)).all():
            raise ValueError(f"{name}: expected numbers from 0 to {MOST:g}")
    if kind == "grid":
        shape = tuple(len(entry[name]) for name in GRID)
        if np.shape(entry["seconds"]) != shape or 0 in shape:
            raise ValueError(f"seconds: expected a number for each of {shape} rows, tokens and kv")
        if any((np.diff(entry[name]) <= 0).any() for name in GRID):
            raise ValueError("rows, tokens and kv must be increasing numbers")
