"""The two inputs of bounds.py, as files that anyone can write: accept traces (`Trace`) and cost tables
(`CostTable`, the seconds of each part of a round).

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
the cost is seven constants in the code. Costs may be a measured grid; the paper's are linear, with constants
fitted at one k. numpy and the standard library only.
"""
import json
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from minispec.tools.files import blame, read_json, read_rows, replaced

LINEAR = ("base", "row", "token", "step", "kv", "kv_step")
GRID = ("rows", "tokens", "kv")
FIELDS = {"linear": LINEAR, "grid": (*GRID, "seconds"), "share": ("of_verify",)}
MOST = 1e9                       # the largest number that is believed
FREE = {"kind": "linear"}


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
        # 1. Every field is what it should be.
        _expect(isinstance(self.id, str), "id", "a string", self.id)
        for name, least in (("prompt_len", 0), ("n_out", 1)):
            value = getattr(self, name)
            _expect(type(value) is int and least <= value <= MOST, name, f"an integer from {least}", value)
        for name, kind in (("accept", int), ("censored", bool), ("offered", int)):
            columns = getattr(self, name)
            _fields(columns, name, self.accept)
            setattr(self, name, {m: _column(c, self.n_out, kind, f"{name}.{m}") for m, c in columns.items()})

        # 2. A round gains at least one token, at most what is missing, and no more than was offered and one.
        left = self.n_out - np.arange(self.n_out)
        for m, accept in self.accept.items():
            most = np.minimum(left, self.offered.get(m, left) + 1)
            wrong = (accept < 1) | (accept > most)
            for i in 1 + np.flatnonzero(wrong[1:]):
                raise ValueError(f"accept.{m}[{i}]: expected an integer from 1 to {most[i]}, by what is "
                                 f"missing and what was offered, got {accept[i]}")


def _column(values, n, kind, where):
    """A list of n values of a kind as an array; entry 0 may be anything and becomes 0."""
    possible = isinstance(values, (list, np.ndarray)) and len(values) == n
    _expect(possible, where, f"a list of n_out = {n} values", values)
    rest = np.array(values[1:])
    possible = n == 1 or rest.dtype == kind and rest.ndim == 1
    _expect(possible, where, "true or false" if kind is bool else "integers", values)
    return np.array([0, *rest], kind)


def read_traces(path):
    """List of Trace from a JSON-lines file. ValueError, in one line with file, line and field, if anything is
    wrong."""
    traces, seen = [], set()
    for where, row in read_rows(path):
        with blame(where):
            _fields(row, "", Trace.__dataclass_fields__, ("id", "prompt_len", "n_out", "accept"))
            trace = Trace(**row)
            if not trace.accept:
                raise ValueError("accept: no drafter in it")
            if trace.id in seen:
                raise ValueError(f"id: '{trace.id}' is in the file already")
            if traces and set(trace.accept) != set(traces[0].accept):
                first = ", ".join(traces[0].accept)
                raise ValueError(f"accept: the drafters are {', '.join(trace.accept)}, but {first} above")
        traces.append(trace)
        seen.add(trace.id)
    if not traces:
        raise ValueError(f"{path}: no trace in this file")
    return traces


def write_traces(path, traces):
    """Write a list of Trace so that `read_traces` returns it again."""
    with replaced(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for t in traces:
            row = {name: value for name, value in vars(t).items() if value != {}}
            file.write(json.dumps(row, separators=(",", ":"), default=np.ndarray.tolist) + "\n")


# -- cost tables -----------------------------------------------------------------------------------

def read_costs(path):
    """The checked cost table (a dict as described above) of a JSON file. ValueError with file and field."""
    table = read_json(path)
    with blame(path):
        return check_costs(table)


def check_costs(table):
    """Return `table` if it is a valid cost table (already parsed), else ValueError that starts with the
    field."""
    known = ("about", "verify", "draft", "read", "prefill", "overhead", "accept")
    _fields(table, "", known, ("verify",))
    about = table.get("about", {})
    _expect(isinstance(about, dict), "about", "an object", about)
    for name in ("verify", "prefill", "overhead"):
        if name in table:
            _check_time(table[name], name, ("linear", "grid"))
    for part, kinds in (("draft", ("linear", "grid", "share")), ("read", ("linear", "grid"))):
        for name, entry in table.get(part, {}).items():
            _check_time(entry, f"{part}.{name}", kinds)
    for name, chance in table.get("accept", {}).items():
        _numbers(chance, 0, f"accept.{name}", 1)
    verify = table["verify"]
    paid = verify["seconds"] if verify["kind"] == "grid" else sum(verify.get(name, 0) for name in LINEAR)
    if np.min(paid) <= 0:
        raise ValueError("verify: a forward that takes no time at all has no speed-up")
    return table


def _check_time(entry, where, kinds):
    possible = isinstance(entry, dict) and entry.get("kind") in kinds
    _expect(possible, where, f"an object whose kind is {' or '.join(kinds)}", entry)
    kind = entry["kind"]
    names = FIELDS[kind]
    _fields(entry, where, ("kind", *names), () if kind == "linear" else names)
    if kind != "grid":
        for name in names:
            _numbers(entry.get(name, 0), 0, f"{where}.{name}")
        return
    shape = []
    for name in GRID:
        axis = _numbers(entry[name], 1, f"{where}.{name}")
        _expect((np.diff(axis) > 0).all(), f"{where}.{name}", "increasing numbers", entry[name])
        shape.append(len(axis))
    found = _numbers(entry["seconds"], 3, f"{where}.seconds").shape
    what = f"a number for each of {shape} rows, tokens and kv"
    _expect(list(found) == shape, f"{where}.seconds", what, found)


# -- the cost model ----------------------------------------------------------------------------------

class CostTable:
    """Seconds of each part of a round. Arguments are totals over the rows, numbers or arrays that broadcast;
    `drafts` is per row. ValueError if the table is not valid."""

    def __init__(self, table):
        self.table = {"draft": {}, "read": {}, "overhead": FREE, **check_costs(table)}
        self.drafters = tuple(self.table["draft"])
        self.accept = table.get("accept", {})

    def verify(self, kv, queries, rows=1):
        """T_verify: one target forward of `queries` tokens over `kv` cached ones."""
        return seconds(self.table["verify"], rows, queries / rows, kv)

    def step(self, kv, queries, rows=1):
        """What every round pays: verification and the overhead T_ovh, all that a round needs besides the two
        models, sampling included."""
        return self.verify(kv, queries, rows) + seconds(self.table["overhead"], rows, 1, 0)

    def draft(self, name, kv, drafts, rows=1):
        """T_draft: drafter `name` proposes `drafts` tokens for each row."""
        entry = self.table["draft"][name]
        if entry["kind"] == "share":
            return entry["of_verify"] * self.verify(kv, rows * (1 + drafts), rows)
        return seconds(entry, rows, drafts, kv)

    def read(self, name, tokens):
        """What drafter `name` takes to read `tokens` tokens of a request that it has not seen; 0 if not in
        the table."""
        return seconds(self.table["read"].get(name, FREE), 1, tokens, 0)

    def prefill(self, prompt_len, rows=1):
        """The forward over the prompts, which gives the first token; a step of so many tokens if not in the
        table."""
        if "prefill" in self.table:
            return seconds(self.table["prefill"], rows, prompt_len, 0)
        return self.step(0, rows * prompt_len, rows)


def seconds(entry, rows, tokens, kv):
    """A TIME entry of the cost table at `rows` rows with `tokens` tokens each and `kv` cached tokens in
    all."""
    if entry["kind"] == "grid":
        return _interpolate(entry, rows, tokens, kv / rows)
    base, row, token, step, per_kv, kv_step = (entry.get(name, 0.0) for name in LINEAR)
    return base + row * rows + (token * rows + step) * tokens + (per_kv + kv_step * tokens) * kv


def _interpolate(grid, rows, tokens, kv):
    """Linear in each of the three axes; below the first point as at it, beyond the last one along the last
    segment."""
    values = np.array(grid["seconds"], float)
    least = values.min()
    # What was measured at one value only is constant: the next point is infinitely far away.
    values = np.pad(values, [(0, int(n == 1)) for n in values.shape], mode="edge")
    corners = []
    for name, x in zip(GRID, (rows, tokens, kv)):
        axis = np.array(grid[name], float)
        axis = np.append(axis, np.inf) if len(axis) == 1 else axis
        x = np.maximum(x, axis[0])
        i = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
        weight = (x - axis[i]) / (axis[i + 1] - axis[i])
        corners.append([(i, 1 - weight), (i + 1, weight)])
    out = sum(values[i, j, l] * (u * v * w) for (i, u), (j, v), (l, w) in product(*corners))
    return np.maximum(out, least)        # noise must not lead an extrapolation below what was ever measured


# -- what both kinds of files need -----------------------------------------------------------------

def _fields(value, where, known, needed=()):
    """ValueError where an object has other fields than the known ones, or lacks one that is needed."""
    _expect(isinstance(value, dict), where or "the whole", "an object", value)
    prefix = where + "." if where else ""
    for name in [*value, *needed]:
        if name not in known:
            raise ValueError(f"{prefix}{name}: unknown field; known are {', '.join(known)}")
        if name not in value:
            raise ValueError(f"{prefix}{name}: missing")


def _numbers(values, depth, where, most=MOST):
    """Numbers from 0 to `most`, in lists `depth` deep, as an array. The comparison also refuses NaN."""
    try:
        array = np.array(values)
    except ValueError:                       # lists of several lengths
        array = np.array(None)
    possible = array.dtype.kind in "if" and array.ndim == depth and array.size
    possible = possible and ((0 <= array) & (array <= most)).all()
    what = f"numbers in lists {depth} deep" if depth else "a number"
    _expect(possible, where, f"{what} from 0 to {most:g}", values)
    return array


def _expect(condition, where, what, got):
    """ValueError that names the field where the condition does not hold."""
    if not condition:
        shown = json.dumps(got, default=repr)
        raise ValueError(f"{where}: expected {what}, got {shown if len(shown) <= 40 else shown[:37] + '...'}")
