"""What the bounds of bounds.py are computed from: accept traces and cost tables, as files that anyone can write.

A trace file has one JSON object per line, one line per request (reference: "Speculative Decoding: Performance or
Illusion?", arXiv 2601.11580, its per-position accept lengths):

    {"id": "arith/17", "prompt_len": 90, "n_out": 4, "accept": {"ngram": [1, 3, 1, 1]},
     "censored": {"ngram": [false, false, false, false]}, "offered": {"ngram": [0, 8, 0, 2]}}

accept[name][i] is 1 + the number of drafts accepted in a round that starts when exactly i output tokens exist, so a
round from there gains at most that many tokens; it never reaches beyond the end (at most n_out - i). Entry 0 is not
used: the first output token comes from the prompt. censored marks rounds in which all k_max drafts were accepted, so
that the true value may be larger. offered is how many drafts the drafter had at all (a lookup may find none); without
it every length could be asked for. censored and offered are optional.
All drafters of a line were run on one and the same output; a trace taken on another text belongs on another line.

A cost table is one JSON object: seconds as a function of rows (requests in the forward), tokens per row and cached tokens.

    {"about": {anything}, "verify": TIME, "draft": {name: TIME}, "read": {name: TIME}, "prefill": TIME, "overhead": TIME, "switch": seconds,
     "accept": {name: chance}}

Only verify is needed; read is what a drafter takes, beside drafting, for the first round in which it sees so many tokens; accept is the chance
that a draft is accepted on some texts, which tells the method `adaptive` what to hope of a drafter that costs anything; "about" may hold anything (device, dtype, versions,
command). TIME is one of

    {"kind": "linear", "base": s, "row": s, "token": s, "step": s, "kv": s, "kv_step": s}       missing ones are 0
        s are seconds each: base once; per row; per token of all rows; per token of one row (a drafter's sequential steps);
        per cached token of all rows; the same at every step
    {"kind": "roofline", "base": s, "kv": s, "token": s}     max(base + kv * cached, token * tokens of all rows)
    {"kind": "grid", "rows": [..], "tokens": [..], "kv": [..], "seconds": [[[..]]]}  measured, seconds[rows][tokens][kv], with
        tokens and cached tokens per row; linear between points, and along its last segment beyond the last one
    {"kind": "share", "of_verify": x}     a drafter that takes this part of the verification that follows

What differs from the paper's files: theirs hold raw token ids and unclipped values of two separate runs, and the cost is
seven constants in the code. numpy and the standard library only.
"""
import itertools
import json
import math
import re
from dataclasses import dataclass, field

import numpy as np

from minispec.tools.files import replaced

LINEAR = ("base", "row", "token", "step", "kv", "kv_step")
ROOFLINE = ("base", "kv", "token")
GRID = ("rows", "tokens", "kv")
MAX_PROMPT = 2**31

# Llama-3.1-8B on one H100, the constants of the paper's simulator (fitted by its authors at k = 3).
PUBLISHED = {
    "about": {"source": "arXiv 2601.11580, its simulator", "model": "Llama-3.1-8B", "device": "H100 80 GB"},
    "verify": {"kind": "linear", "base": 5.88590713e-3, "token": 2.10103129e-5, "kv": 3.92645679e-8},
    "draft": {"ngram": {"kind": "share", "of_verify": 0.005875},
              # theirs counts 1 + j tokens, hence one more d_k in the base
              "eagle3": {"kind": "linear", "base": 2.13526175e-3 + 8.41429603e-7, "step": 8.41429603e-7, "kv": 2.37768493e-9}},
    "overhead": {"kind": "linear", "base": 1.20683946e-3},
}


# -- accept traces --------------------------------------------------------------------------------------------------------

@dataclass
class Trace:
    """One request. accept, censored, offered: {drafter: array (n_out,)} as described above. ValueError if a column of
    accept has another length, or an entry below 1, with which no plan would ever reach the end."""
    id: str
    prompt_len: int
    n_out: int
    accept: dict
    censored: dict = field(default_factory=dict)
    offered: dict = field(default_factory=dict)

    def __post_init__(self):
        for name, column in self.accept.items():
            if len(column) != self.n_out or np.any(np.asarray(column)[1:] < 1):
                raise ValueError(f"trace '{self.id}': accept.{name} needs {self.n_out} entries, all after the first at least 1")


def read_traces(path):
    """List of Trace from a JSON-lines file. ValueError, in one line with file, line and field, if anything is wrong."""
    traces, seen = [], {}
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        row = _parsed(line, path, number)
        try:
            trace = _trace(row)
            if trace.id in seen:
                raise ValueError(f"id: '{trace.id}' is on line {seen[trace.id]} already")
            if traces and set(trace.accept) != set(traces[0].accept):
                raise ValueError(f"accept: the drafters are {', '.join(trace.accept)}, but {', '.join(traces[0].accept)} above")
        except ValueError as e:
            raise ValueError(f"{path}:{number}: {e}") from None
        traces.append(trace)
        seen[trace.id] = number
    if not traces:
        raise ValueError(f"{path}:1: no trace in this file")
    return traces


def write_traces(path, traces):
    """Write a list of Trace so that `read_traces` returns it again."""
    plain = lambda columns: {name: np.asarray(column).tolist() for name, column in columns.items()}
    with replaced(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for t in traces:
            row = {"id": t.id, "prompt_len": t.prompt_len, "n_out": t.n_out, "accept": plain(t.accept)}
            optional = {"censored": plain(t.censored), "offered": plain(t.offered)}
            file.write(json.dumps(row | {name: columns for name, columns in optional.items() if columns}, separators=(",", ":")) + "\n")


def _text(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        with open(path, "rb") as file:
            line = file.read()[:e.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: not UTF-8 text") from None


def _parsed(text, path, first_line=1):
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}:{first_line + e.lineno - 1}: not JSON ({e.msg} at column {e.colno})") from None
    except (ValueError, RecursionError):         # a number of thousands of digits; brackets nested without end
        raise ValueError(f"{path}:{first_line}: not JSON that can be read") from None


def _short(value):
    shown = json.dumps(value) if not isinstance(value, str) else f"'{value}'"
    return shown if len(shown) <= 40 else shown[:37] + "..."


def _size(values):
    return f"{len(values)}" if isinstance(values, list) else _short(values)


def _integer(value, low, high, where):
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{where}: expected an integer from {low} to {high}, got {_short(value)}")
    return value


def _object(value, where, known, needed=()):
    """known: the names allowed in it, () for any; needed: those that must be there. Returns it."""
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'the whole'}: expected an object, got {_short(value)}")
    prefix = where + "." if where else ""
    for name in value:
        if known and name not in known:
            raise ValueError(f"{prefix}{name}: unknown field; known are {', '.join(known)}")
    for name in needed:
        if name not in value:
            raise ValueError(f"{prefix}{name}: missing")
    return value


def _trace(row):
    """Check one parsed line; ValueError names the field."""
    _object(row, "", ("id", "prompt_len", "n_out", "accept", "censored", "offered"), ("id", "prompt_len", "n_out", "accept"))
    if not isinstance(row["id"], str):
        raise ValueError(f"id: expected a string, got {_short(row['id'])}")
    prompt_len = _integer(row["prompt_len"], 0, MAX_PROMPT, "prompt_len")
    accept = _object(row["accept"], "accept", ())
    if not accept:
        raise ValueError("accept: no drafter in it")
    n = _integer(row["n_out"], 1, MAX_PROMPT, "n_out")
    trace = Trace(row["id"], prompt_len, n, {})
    for name, values in accept.items():
        trace.accept[name] = _column(values, n, f"accept.{name}", lambda i: (1, n - i), int)
    for name, values in _object(row.get("censored", {}), "censored", tuple(accept)).items():
        trace.censored[name] = _column(values, n, f"censored.{name}", None, bool)
    for name, values in _object(row.get("offered", {}), "offered", tuple(accept)).items():
        trace.offered[name] = _column(values, n, f"offered.{name}", lambda i: (0, MAX_PROMPT), int)
        short = np.flatnonzero(trace.offered[name][1:] + 1 < trace.accept[name][1:])
        if len(short):
            i = 1 + int(short[0])
            raise ValueError(f"offered.{name}[{i}]: {trace.offered[name][i]} drafts cannot give accept {trace.accept[name][i]}")
    return trace


def _column(values, n, where, bounds, kind):
    """A list of n values as an array; entry 0 may be anything and becomes 0 if it is not of this kind."""
    if not isinstance(values, list) or len(values) != n:
        raise ValueError(f"{where}: expected a list of n_out = {n} values, got {_size(values)}")
    for i in range(1, n):
        if kind is int:
            _integer(values[i], *bounds(i), f"{where}[{i}]")
        elif type(values[i]) is not bool:
            raise ValueError(f"{where}[{i}]: expected true or false, got {_short(values[i])}")
    first = values[0] if type(values[0]) is kind and abs(values[0]) <= MAX_PROMPT else kind(0)
    return np.array([first] + values[1:], dtype=kind)


def ngram_trace(prompt, output, k_max=20, max_n=4, min_n=2, earliest=False):
    """The trace of a prompt-lookup drafter, from tokens alone: it depends on nothing but the text (section 3 of the paper).

    prompt, output: token ids. Proposed are the up to k_max tokens after the most recent earlier occurrence (earliest:
    the first one, as in the paper's engine) of the last n tokens, for the longest n from max_n down to min_n that has one.
    Returns arrays (len(output),): accept, censored, offered.
    """
    tokens, n_out, seen = list(prompt), len(output), {}
    accept, censored, offered = np.ones(n_out, int), np.zeros(n_out, bool), np.zeros(n_out, int)
    done = 0
    for i in range(n_out):
        for end in range(done, len(tokens)):     # not the n-gram that ends at the last token, it would find itself
            for n in range(min_n, min(max_n, end) + 1):
                gram = tuple(tokens[end - n:end])
                if not (earliest and gram in seen):
                    seen[gram] = end
        done = len(tokens)
        grams = (tuple(tokens[-n:]) for n in range(min(max_n, len(tokens)), min_n - 1, -1))
        at = next((seen[g] for g in grams if g in seen), len(tokens))
        draft, true = tokens[at:at + k_max], output[i:]
        hits = next((j for j, (a, b) in enumerate(zip(draft, true)) if a != b), min(len(draft), len(true)))
        accept[i], censored[i], offered[i] = min(hits + 1, n_out - i), hits == k_max < n_out - i, len(draft)
        tokens.append(output[i])
    return accept, censored, offered


# -- cost tables as files ------------------------------------------------------------------------------------------------

def read_costs(path):
    """The checked cost table (a dict as described above) of a JSON file. ValueError with file, line and field."""
    text = _text(path)
    table = _parsed(text, path)
    try:
        return check_costs(table)
    except ValueError as e:
        raise ValueError(f"{path}:{_line_of(text, str(e).split(':')[0])}: {e}") from None


def _line_of(text, where):
    """Line of the field `where`, like draft.eagle.kv[2]: the last of its keys that can be found, in order."""
    at = 0
    for key in re.sub(r"\[\d+\]", "", where).split("."):
        found = re.compile(rf'"{re.escape(key)}"\s*:').search(text, at)
        at = found.start() if found else at
    return text[:at].count("\n") + 1


def check_costs(table):
    """Return `table` if it is a valid cost table (already parsed), else ValueError that starts with the field."""
    _object(table, "", ("about", "verify", "draft", "read", "prefill", "overhead", "switch", "accept"), ("verify",))
    for name in ("verify", "prefill", "overhead"):
        if name in table:
            _check_time(table[name], name, ("linear", "roofline", "grid"))
    for name, entry in _object(table.get("draft", {}), "draft", ()).items():
        _check_time(entry, f"draft.{name}", ("linear", "roofline", "grid", "share"))
    for name, entry in _object(table.get("read", {}), "read", ()).items():
        _check_time(entry, f"read.{name}", ("linear", "roofline", "grid"))
    _seconds(table.get("switch", 0), "switch")
    for name, chance in _object(table.get("accept", {}), "accept", ()).items():
        if type(chance) not in (int, float) or not 0 <= chance <= 1:
            raise ValueError(f"accept.{name}: expected a number from 0 to 1, got {_short(chance)}")
    verify = table["verify"]
    paid = np.ravel(verify["seconds"]) if verify["kind"] == "grid" else [sum(verify.get(name, 0) for name in LINEAR)]
    if min(paid) <= 0:
        raise ValueError("verify: a forward that takes no time at all has no speed-up")
    return table


def _seconds(value, where):
    if type(value) not in (int, float) or not 0 <= value <= 1e9:         # also refuses NaN and infinity
        raise ValueError(f"{where}: expected a number from 0 to 1e9, got {_short(value)}")


def _check_time(entry, where, kinds):
    if not isinstance(entry, dict) or entry.get("kind") not in kinds:
        got = _short(entry.get("kind")) if isinstance(entry, dict) else _short(entry)
        raise ValueError(f"{where}: expected an object whose kind is {' or '.join(kinds)}, got {got}")
    known = {"linear": LINEAR, "roofline": ROOFLINE, "grid": (*GRID, "seconds"), "share": ("of_verify",)}[entry["kind"]]
    whole = entry["kind"] in ("grid", "share")
    _object(entry, where, ("kind", *known), known if whole else ())
    if entry["kind"] != "grid":
        for name in known:
            _seconds(entry.get(name, 0), f"{where}.{name}")
        return
    for name in GRID:
        axis = entry[name]
        if not isinstance(axis, list) or not axis:
            raise ValueError(f"{where}.{name}: expected a list of numbers, got {_short(axis)}")
        for i, value in enumerate(axis):
            _seconds(value, f"{where}.{name}[{i}]")
        if any(b <= a for a, b in zip(axis, axis[1:])):
            raise ValueError(f"{where}.{name}: expected increasing numbers, got {_short(axis)}")
    _check_nested(entry["seconds"], [len(entry[name]) for name in GRID], f"{where}.seconds")


def _check_nested(values, shape, where):
    if not shape:
        return _seconds(values, where)
    if not isinstance(values, list) or len(values) != shape[0]:
        raise ValueError(f"{where}: expected a list of {shape[0]} values, got {_size(values)}")
    for i, value in enumerate(values):
        _check_nested(value, shape[1:], f"{where}[{i}]")


# -- what a step costs: the paper's latency model, and what it becomes with measured tables ----------------------------

class CostTable:
    """Seconds of each part of a round. Arguments are totals over the rows, numbers or arrays that broadcast; `drafts` is
    per row. Raises ValueError if the table is not valid or has no such drafter."""

    def __init__(self, table):
        self.table = check_costs(table)
        self.drafters = tuple(table.get("draft", {}))
        self.switch, self.accept = table.get("switch", 0.0), table.get("accept", {})

    @classmethod
    def load(cls, path):
        """From a JSON file; see `read_costs` for its errors."""
        return cls(read_costs(path))

    def verify(self, kv, queries, rows=1):
        """T_verify: one target forward of `queries` tokens over `kv` cached ones."""
        return seconds(self.table["verify"], rows, queries / rows, kv)

    def overhead(self, rows=1):
        """T_ovh: all that a step needs beside the two models, sampling included."""
        return seconds(self.table["overhead"], rows, 1, 0) if "overhead" in self.table else 0.0

    def step(self, kv, queries, rows=1):
        """T(B, .): verification and overhead, what every round pays."""
        return self.verify(kv, queries, rows) + self.overhead(rows)

    def draft(self, name, kv, drafts, rows=1):
        """T_draft: drafter `name` proposes `drafts` tokens for each row."""
        if name not in self.drafters:
            raise ValueError(f"no drafter '{name}' in the cost table; it has {', '.join(self.drafters) or 'none'}")
        entry = self.table["draft"][name]
        if entry["kind"] == "share":
            return entry["of_verify"] * self.verify(kv, rows * (1 + drafts), rows)
        return seconds(entry, rows, drafts, kv)

    def read(self, name, tokens, rows=1):
        """What drafter `name` takes to read `tokens` tokens of each row that it has not seen; 0 if not in the table."""
        entry = self.table.get("read", {}).get(name)
        return seconds(entry, rows, tokens, 0) if entry else 0.0

    def prefill(self, prompt_len, rows=1):
        """The forward over the prompts, which gives the first token; T_verify(0, sum of P) + T_ovh if not in the table."""
        if "prefill" in self.table:
            return seconds(self.table["prefill"], rows, prompt_len, 0)
        return self.step(0, rows * prompt_len, rows)

    def free(self):
        """The same table with drafters that cost nothing (L7)."""
        return CostTable(self.table | {"draft": {name: {"kind": "linear"} for name in self.drafters}, "switch": 0.0})


def seconds(entry, rows, tokens, kv):
    """A TIME entry of the cost table at `rows` rows with `tokens` tokens each and `kv` cached tokens in all."""
    if entry["kind"] == "grid":
        return _interpolate(entry, rows, tokens, kv / rows)
    c = {name: entry.get(name, 0.0) for name in LINEAR}
    if entry["kind"] == "roofline":
        return np.maximum(c["base"] + c["kv"] * kv, c["token"] * rows * tokens)
    return c["base"] + c["row"] * rows + (c["token"] * rows + c["step"]) * tokens + (c["kv"] + c["kv_step"] * tokens) * kv


def _interpolate(grid, rows, tokens, kv):
    """Linear in each of the three axes; below the first point as at it, beyond the last one along the last segment."""
    values, corners = np.array(grid["seconds"], float), []
    for axis, x in zip((grid["rows"], grid["tokens"], grid["kv"]), (rows, tokens, kv)):
        axis, x = np.array(axis, float), np.maximum(x, axis[0])
        if len(axis) == 1:
            corners.append([(0, 1.0)])           # measured at one value only: constant
            continue
        i = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
        w = (x - axis[i]) / (axis[i + 1] - axis[i])
        corners.append([(i, 1 - w), (i + 1, w)])
    out = sum(values[i, j, l] * (u * v * w) for (i, u), (j, v), (l, w) in itertools.product(*corners))
    return np.maximum(out, values.min())         # noise must not lead an extrapolation below what was ever measured


def fit_linear(rows, tokens, kv, times, terms=("base", "token", "kv")):
    """Fit a linear entry to measured times, arrays (n,): relative least squares with coefficients >= 0.
    terms: the coefficients to use. With so few, trying all subsets is exact: the best one without a negative wins."""
    features = dict(zip(LINEAR, (np.ones(len(times)), rows, rows * tokens, tokens, kv, kv * tokens)))
    best = (float(len(times)), {})
    for used in itertools.chain.from_iterable(itertools.combinations(terms, n) for n in range(1, len(terms) + 1)):
        x = np.stack([features[t] for t in used], 1) / times[:, None]
        scale = np.abs(x).max(0) + 1e-300
        c = np.linalg.lstsq(x / scale, np.ones(len(times)), rcond=None)[0] / scale
        error = float(((x @ c - 1) ** 2).sum())
        if (c >= 0).all() and error < best[0] * (1 - 1e-9):
            best = (error, dict(zip(used, c.tolist())))
    return {"kind": "linear", **best[1]}


def fit_roofline(rows, tokens, kv, times, rounds=20):
    """Fit max(base + kv * cached, token * all tokens) to measured times, arrays (n,). Points are given to one side or the
    other by a threshold on the tokens of the forward, then by the fit itself; the best of all starts is returned."""
    best, queries = None, rows * tokens
    for start in np.unique(queries):
        memory = queries <= start
        for _ in range(rounds):
            side = lambda mask, terms: fit_linear(rows[mask], tokens[mask], kv[mask], times[mask], terms) if mask.any() else {}
            entry = {**side(memory, ("base", "kv")), **side(~memory, ("token",)), "kind": "roofline"}
            error = float(((seconds(entry, rows, tokens, kv) / times - 1) ** 2).sum())
            if best is None or error < best[0]:
                best = (error, entry)
            again = entry.get("base", 0) + entry.get("kv", 0) * kv >= entry.get("token", 0) * queries
            if (again == memory).all():
                break
            memory = again
    return best[1]


def residual(entry, rows, tokens, kv, times):
    """How far an entry is from measured times, arrays (n,): R2, and the median and largest relative error."""
    off = seconds(entry, rows, tokens, kv) - times
    spread_ = ((times - times.mean()) ** 2).sum()
    relative = np.abs(off) / times
    return {"r2": float(1 - (off**2).sum() / spread_) if spread_ else float("nan"),
            "median": float(np.median(relative)), "max": float(relative.max())}


def implied_rates(entry, kv_bytes, weight_bytes, flops):
    """What a linear or roofline verify entry says about the device, to see whether it is plausible: bytes/s read from
    the cache and for the weights, operations/s. kv_bytes and flops are per token. A coefficient of 0 gives infinity."""
    rate = lambda amount, name: amount / entry[name] if entry.get(name) else math.inf
    return {"kv_bytes_per_s": rate(kv_bytes, "kv"), "weight_bytes_per_s": rate(weight_bytes, "base"),
            "flops_per_s": rate(flops, "token")}


def kv_bytes_per_token(layers, kv_heads, head_dim, dtype_bytes=2):
    """Bytes that one token occupies in a cache of keys and values."""
    return 2 * layers * kv_heads * head_dim * dtype_bytes
