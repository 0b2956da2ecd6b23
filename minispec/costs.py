"""Cost tables: the seconds of each part of a round, from a file that anyone can write.

A cost table is one JSON object: seconds as a function of the batch (requests in the forward), tokens per
request and cached tokens.

    {"about": {anything}, "verify": TIME, "draft": {name: TIME}, "read": {name: TIME}, "prefill": TIME,
     "overhead": TIME, "accept": {name: chance}}

Only verify is required. tokens are 1 + drafts for verify, the drafts for draft, and the tokens that are read
for prefill and read. prefill, read and overhead are evaluated at 0 cached tokens, overhead at 1 token. read:
extra seconds of a drafter's first round for a request, by the tokens that it reads then. accept: chance that
a draft is accepted, measured on other texts (not a trace's `accept`); the prior of `adaptive`. TIME is one of

    {"kind": "linear", "base": s, "row": s, "token": s, "step": s, "kv": s, "kv_step": s}   missing ones are 0
        seconds each: base once; row per request; token per token of all requests; step per token of one
        request (a drafter's sequential steps); kv per cached token of all requests; kv_step the same at
        every step
    {"kind": "grid", "rows": [..], "tokens": [..], "kv": [..], "seconds": [[[..]]]}
        measured: seconds[rows][tokens][kv], where rows are batch sizes, tokens and cached tokens are per
        request; linear between points, and along the last segment beyond the last point; an axis of
        one point is constant

The paper's cost ("Speculative Decoding: Performance or Illusion?", arXiv 2601.11580) is eight constants in
the code, fitted at one k. Here costs may be a measured grid. numpy and the standard library only.
"""
import json
import textwrap
from itertools import product

import numpy as np

from minispec.tools.files import naming, read_json

PARTS = ("about", "verify", "draft", "read", "prefill", "overhead", "accept")
LINEAR = ("base", "row", "token", "step", "kv", "kv_step")
GRID = ("rows", "tokens", "kv")
DEPTHS = {                       # how deep the lists of each field are nested
    "linear": dict.fromkeys(LINEAR, 0),
    "grid": {**dict.fromkeys(GRID, 1), "seconds": 3},
}
MOST = 1e9                       # largest number accepted from a file
FREE = {"kind": "linear"}


# -- files -----------------------------------------------------------------------------------------

def read_costs(path):
    """The checked cost table (a dict as described above) of a JSON file. ValueError names file and field."""
    table = read_json(path)
    with naming(path):
        return check_costs(table)


def check_costs(table):
    """Return `table` if it is a valid cost table (already parsed), else ValueError with the field."""
    if unknown := table.keys() - PARTS:
        raise ValueError(f"{min(unknown)}: unknown field; known are {', '.join(PARTS)}")
    times = {name: table[name] for name in ("verify", "prefill", "overhead") if name in table}
    for part in ("draft", "read"):
        times |= {f"{part}.{name}": time for name, time in table.get(part, {}).items()}
    for where, time in times.items():
        with naming(where):
            _check_time(time, where)
    if seconds(table["verify"], 1, 1, 1) <= 0:
        raise ValueError("verify: a forward that takes no time at all has no speed-up")
    if not isinstance(table.get("about", {}), dict):
        raise ValueError("about must be an object")
    for name, chance in table.get("accept", {}).items():
        if not 0 <= chance <= 1:
            raise ValueError(f"accept.{name} must be from 0 to 1, got {chance}")
    return table


def _check_time(time, where):
    """ValueError, LookupError or TypeError if a TIME entry lacks a field, or has an unknown or a bad one."""
    kind = time["kind"]
    depths = DEPTHS[kind]
    if unknown := time.keys() - {"kind", *depths}:
        raise ValueError(f"{where}.{min(unknown)}: unknown field; known are {', '.join(depths)}")
    for name, depth in depths.items():
        value = np.array(time.get(name, 0) if kind == "linear" else time[name])
        fits = value.dtype.kind in "if" and value.ndim == depth and value.size
        if not (fits and (0 <= value).all() and (value <= MOST).all()):          # false for NaN, too
            raise ValueError(f"{where}.{name} must be numbers from 0 to {MOST:g} in lists {depth} deep, got "
                             f"{short(time[name])}")
    if kind == "grid":
        axes = [time[name] for name in GRID]
        if any((np.diff(axis) <= 0).any() for axis in axes):
            raise ValueError(f"{where}: {', '.join(GRID)} must increase")
        if np.shape(time["seconds"]) != tuple(map(len, axes)):
            raise ValueError(f"{where}.seconds must have the shape {tuple(map(len, axes))} of "
                             f"{', '.join(GRID)}")


def short(value):
    """A value from a file, for a message."""
    return textwrap.shorten(json.dumps(value, default=repr), 40)


# -- the cost model ----------------------------------------------------------------------------------

class CostTable:
    """Seconds of each part of a round. kv and queries are totals over the batch, drafts and prompt_len are
    per request; numbers or arrays that broadcast. ValueError if the table is not valid."""

    def __init__(self, table):
        self.table = {"draft": {}, "read": {}, "overhead": FREE, **check_costs(table)}
        self.drafters = tuple(self.table["draft"])
        self.accept = table.get("accept", {})

    def verify(self, kv, queries, batch=1):
        """T_verify: one target forward of `queries` tokens over `kv` cached ones."""
        return seconds(self.table["verify"], batch, queries / batch, kv)

    def step(self, kv, queries, batch=1):
        """A round without its drafting: verification and the overhead T_ovh, which is the time of neither
        model, sampling included."""
        return self.verify(kv, queries, batch) + seconds(self.table["overhead"], batch, 1, 0)

    def draft(self, name, kv, drafts, batch=1):
        """T_draft: drafter `name` proposes `drafts` tokens for each request."""
        return seconds(self.table["draft"][name], batch, drafts, kv)

    def round(self, name, kv, drafts, batch=1):
        """Rounds in which drafter `name` proposes `drafts` tokens (k + 1,) for each request. 0 drafts cost no
        drafting. name None: a drafter without cost, such as prompt lookup."""
        step = self.step(kv, batch * (1 + drafts), batch)
        return step if name is None else step + self.draft(name, kv, drafts, batch) * (drafts > 0)

    def read(self, name, tokens):
        """Drafter `name` reads `tokens` tokens of a request for the first time; 0 if not in the table."""
        return seconds(self.table["read"].get(name, FREE), 1, tokens, 0)

    def prefill(self, prompt_len, batch=1):
        """The forward over the prompts, which gives the first token; if not in the table, a step of that many
        tokens."""
        if "prefill" in self.table:
            return seconds(self.table["prefill"], batch, prompt_len, 0)
        return self.step(0, batch * prompt_len, batch)


def expected_tokens(alpha, k):
    """Tokens that a round of 0, 1 .. k drafts commits on average (k + 1,), where each draft is accepted with
    chance alpha (2211.17192, eq. 1)."""
    return np.cumsum(float(alpha) ** np.arange(k + 1))


def seconds(entry, batch, tokens, kv):
    """A TIME entry of the cost table for `batch` requests with `tokens` tokens each and `kv` cached tokens in
    all."""
    if entry["kind"] == "grid":
        return _interpolate(entry, batch, tokens, kv / batch)
    base, row, token, step, per_kv, kv_step = (entry.get(name, 0.0) for name in LINEAR)
    return base + row * batch + (token * batch + step) * tokens + (per_kv + kv_step * tokens) * kv


def _interpolate(grid, batch, tokens, kv):
    """Linear in each of the three axes; below the first point as at it, beyond the last one along the last
    segment."""
    values = np.array(grid["seconds"], float)
    corners = []
    for name, x in zip(GRID, (batch, tokens, kv)):
        axis = np.array(grid[name], float)
        low = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, max(len(axis) - 2, 0))
        high = np.minimum(low + 1, len(axis) - 1)
        # An axis of one point is constant.
        width = np.where(high > low, axis[high] - axis[low], np.inf)
        weight = np.maximum(x - axis[low], 0) / width
        corners.append([(low, 1 - weight), (high, weight)])
    out = sum(values[i, j, l] * (u * v * w) for (i, u), (j, v), (l, w) in product(*corners))
    return np.maximum(out, values.min())         # noise must not extrapolate below the smallest measurement
