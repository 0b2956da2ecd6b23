"""What bounds.py computes from, as files that anyone can write: accept traces and cost tables.

A trace file has one JSON object per line, one line per request (reference: "Speculative Decoding: Performance
or Illusion?", arXiv 2601.11580, its per-position accept lengths):

    {"id": "arith/17", "prompt_len": 90, "n_out": 4, "accept": {"ngram": [1, 3, 1, 1]},
     "censored": {"ngram": [false, false, false, false]}, "offered": {"ngram": [0, 8, 0, 2]}}

What is in front of "/" in the id is the workload. accept[name][i] is 1 + the number of drafts accepted in a
round that starts when exactly i output tokens exist, so a round from there gains at most that many tokens; it
never reaches beyond the end (at most n_out - i). Entry 0 is not used: the first output token comes from the
prompt. censored marks rounds in which all k_max drafts were accepted, so that the true value may be larger.
offered is how many drafts the drafter had at all (a lookup may find none); without it every length could be
asked for. censored and offered are optional.
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

from minispec.tools.files import read_json, replaced

LINEAR = ("base", "row", "token", "step", "kv", "kv_step")
GRID = ("rows", "tokens", "kv")
FIELDS = {"linear": LINEAR, "grid": (*GRID, "seconds"), "share": ("of_verify",)}
MOST = 2**31                     # the largest integer that is believed


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
        _expect(isinstance(self.id, str), "id", "a string", self.id)
        for name, least in (("prompt_len", 0), ("n_out", 1)):
            value = getattr(self, name)
            possible = type(value) is int and least <= value <= MOST
            _expect(possible, name, f"an integer from {least} to {MOST}", value)
        for name, kind in (("accept", int), ("censored", bool), ("offered", int)):
            columns = _object(getattr(self, name), name, self.accept)
            setattr(self, name, {m: _column(c, self.n_out, kind, f"{name}.{m}") for m, c in columns.items()})

        # A round gains at least one token, at most what is missing, and no more than was offered and one.
        left = self.n_out - np.arange(self.n_out)
        for m, accept in self.accept.items():
            for i in _wrong((accept < 1) | (accept > left)):
                raise ValueError(f"accept.{m}[{i}]: expected an integer from 1 to {left[i]}, got {accept[i]}")
        for m, offered in self.offered.items():
            for i in _wrong((offered < 0) | (offered + 1 < self.accept[m])):
                got = self.accept[m][i]
                raise ValueError(f"offered.{m}[{i}]: {offered[i]} drafts cannot give accept {got}")


def _wrong(mask):
    """The positions that a mask names; entry 0 is not used."""
    return 1 + np.flatnonzero(mask[1:])


def _column(values, n, kind, where):
    """A list of n values as an array; entry 0 may be anything and becomes 0 if it is not of this kind."""
    values = values.tolist() if isinstance(values, np.ndarray) else values
    a_list = f"a list of n_out = {n} values"
    _expect(isinstance(values, list), where, a_list, values)
    _expect(len(values) == n, where, a_list, len(values))
    what = "true or false" if kind is bool else "an integer"
    for i, value in enumerate(values):
        if i and (type(value) is not kind or abs(value) > MOST):
            _expect(False, f"{where}[{i}]", what, value)
    first = values[0] if type(values[0]) is kind else 0
    return np.array([first, *values[1:]], kind)


def read_traces(path):
    """List of Trace from a JSON-lines file. ValueError, in one line with file, line and field, if anything is
    wrong."""
    try:
        with open(path, encoding="utf-8-sig") as file:       # -sig: with or without a byte-order mark
            lines = file.read().split("\n")
    except OSError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text") from None

    traces, seen = [], {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{path}:{number}: not JSON ({e})") from None
        try:
            _object(row, "", Trace.__dataclass_fields__, ("id", "prompt_len", "n_out", "accept"))
            if row["accept"] == {}:
                raise ValueError("accept: no drafter in it")
            trace = Trace(**row)
            if trace.id in seen:
                raise ValueError(f"id: '{trace.id}' is on line {seen[trace.id]} already")
            if traces and set(trace.accept) != set(traces[0].accept):
                first = ", ".join(traces[0].accept)
                raise ValueError(f"accept: the drafters are {', '.join(trace.accept)}, but {first} above")
        except ValueError as e:
            raise ValueError(f"{path}:{number}: {e}") from None
        traces.append(trace)
        seen[trace.id] = number
    if not traces:
        raise ValueError(f"{path}:1: no trace in this file")
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
    try:
        return check_costs(table)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def check_costs(table):
    """Return `table` if it is a valid cost table (already parsed), else ValueError that starts with the
    field."""
    known = ("about", "verify", "draft", "read", "prefill", "overhead", "accept")
    _object(table, "", known, ("verify",))
    for name in ("verify", "prefill", "overhead"):
        if name in table:
            _check_time(table[name], name, ("linear", "grid"))
    for part, kinds in (("draft", ("linear", "grid", "share")), ("read", ("linear", "grid"))):
        for name, entry in _object(table.get(part, {}), part).items():
            _check_time(entry, f"{part}.{name}", kinds)
    for name, chance in _object(table.get("accept", {}), "accept").items():
        _number(chance, f"accept.{name}", "1")
    verify = table["verify"]
    paid = verify["seconds"] if verify["kind"] == "grid" else sum(verify.get(name, 0) for name in LINEAR)
    if np.min(paid) <= 0:
        raise ValueError("verify: a forward that takes no time at all has no speed-up")
    return table


def _check_time(entry, where, kinds):
    kind = entry.get("kind") if isinstance(entry, dict) else entry
    known = isinstance(entry, dict) and kind in kinds
    _expect(known, where, f"an object whose kind is {' or '.join(kinds)}", kind)
    known = FIELDS[kind]
    _object(entry, where, ("kind", *known), () if kind == "linear" else known)
    if kind != "grid":
        for name in known:
            _number(entry.get(name, 0), f"{where}.{name}")
        return
    axes = [_grid(entry[name], 1, f"{where}.{name}") for name in GRID]
    for name, axis in zip(GRID, axes):
        _expect((np.diff(axis) > 0).all(), f"{where}.{name}", "increasing numbers", entry[name])
    shape = tuple(map(len, axes))
    if _grid(entry["seconds"], 3, f"{where}.seconds").shape != shape:
        raise ValueError(f"{where}.seconds: expected a number for each of {shape} rows, tokens and kv")


def _grid(values, depth, where):
    """Lists of numbers, `depth` deep, as an array."""
    try:
        array = np.array(values, float)
    except (ValueError, TypeError, OverflowError):
        array = np.empty(0)
    possible = array.ndim == depth and array.size and ((0 <= array) & (array <= MOST)).all()
    _expect(possible, where, f"numbers from 0 in lists {depth} deep", values)
    return array


# -- what both kinds of files need -----------------------------------------------------------------

def _object(value, where, known=(), needed=()):
    """known: the names allowed in it, () for any; needed: those that must be there. Returns it."""
    _expect(isinstance(value, dict), where or "the whole", "an object", value)
    prefix = where + "." if where else ""
    for name in value:
        if known and name not in known:
            raise ValueError(f"{prefix}{name}: unknown field; known are {', '.join(known)}")
    for name in needed:
        if name not in value:
            raise ValueError(f"{prefix}{name}: missing")
    return value


def _number(value, where, most="1e9"):
    # The comparison also refuses NaN and infinity.
    possible = type(value) in (int, float) and 0 <= value <= float(most)
    _expect(possible, where, f"a number from 0 to {most}", value)


def _expect(condition, where, what, got):
    """ValueError that names the field where the condition does not hold."""
    if not condition:
        shown = f"'{got}'" if isinstance(got, str) else json.dumps(got, default=repr)
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        raise ValueError(f"{where}: expected {what}, got {shown}")
