"""Accept traces, one of the two inputs of bounds.py (costs.py has the other): a file that anyone can write.

A trace file has one JSON object per line and request (reference: "Speculative Decoding: Performance or
Illusion?", arXiv 2601.11580, its per-position accept lengths):

    {"id": "arith/17", "prompt_len": 90, "n_out": 4, "accept": {"ngram": [1, 3, 1, 1]},
     "censored": {"ngram": [false, false, false, false]}, "offered": {"ngram": [0, 8, 0, 2]}}

id: the part before the last "/" is the workload.
accept[name][i]: 1 + the number of accepted drafts in a round that starts when exactly i output tokens exist,
    so the most tokens that such a round can gain; at most n_out - i. Entry 0 is not used and read as 0: the
    first output token comes from the prompt.
censored (optional): all drafts of this round were accepted, so the true value may be larger.
offered (optional): drafts that the drafter had for this round (a lookup may find none). Without it, a drafter
    has the number that it is asked for.

All drafters of a line ran on the same output. The paper's files hold token ids and unclipped values of two
separate runs. numpy and the standard library only.
"""
import json
from dataclasses import dataclass, field

import numpy as np

from minispec.costs import MOST, short
from minispec.tools.files import naming, read_rows, replaced


@dataclass
class Trace:
    """One request. accept, censored, offered: {drafter: array (n_out,)} as described above. ValueError names
    the field if a column has the wrong length or type, or an impossible entry."""
    id: str
    prompt_len: int
    n_out: int
    accept: dict
    censored: dict = field(default_factory=dict)
    offered: dict = field(default_factory=dict)

    def __post_init__(self):
        # 1. Types and shapes.
        typed = isinstance(self.id, str) and type(self.prompt_len) is type(self.n_out) is int
        if not (typed and 0 <= self.prompt_len <= MOST and 1 <= self.n_out <= MOST):
            raise ValueError("id must be a string, prompt_len an integer from 0, n_out an integer from 1, "
                             f"got {short([self.id, self.prompt_len, self.n_out])}")
        for name, kind in (("accept", int), ("censored", bool), ("offered", int)):
            columns = getattr(self, name)
            if unknown := columns.keys() - self.accept:
                raise ValueError(f"{name}.{min(unknown)}: accept has no such drafter")
            setattr(self, name, {m: _column(c, self.n_out, kind, f"{name}.{m}") for m, c in columns.items()})

        # 2. A round gains at least one token, at most those that are missing, and at most offered + 1.
        missing = self.n_out - np.arange(self.n_out)
        for m, accept in self.accept.items():
            most = np.minimum(missing, self.offered.get(m, missing) + 1)
            for i in np.flatnonzero((accept < 1) | (accept > most))[1:]:         # entry 0 is not used
                raise ValueError(f"accept.{m}[{i}] must be from 1 to {most[i]} (n_out - {i} tokens are "
                                 f"missing, offered + 1 can be gained), got {accept[i]}")


def _column(values, n, kind, where):
    """A list of n values of a kind as an array (n,); entry 0 may be anything and becomes 0."""
    with naming(where):
        array = np.array([kind(), *values[1:]])
    if array.shape != (n,) or array.dtype != kind:
        raise ValueError(f"{where} must be a list of n_out = {n} values of type {kind.__name__}, got "
                         f"{short(values)}")
    return array


def read_traces(path):
    """List of Trace from a JSON-lines file. ValueError names file, line and field if anything is wrong."""
    traces = {}
    for where, row in read_rows(path):
        with naming(where):
            trace = Trace(**row)
            first = next(iter(traces.values()), trace)
            if trace.id in traces:
                raise ValueError(f"id '{trace.id}' is in the file already")
            if trace.accept.keys() != first.accept.keys():
                raise ValueError("accept must have the drafters of the first line, "
                                 f"{', '.join(first.accept)}, got {', '.join(trace.accept)}")
        traces[trace.id] = trace
    if not traces:
        raise ValueError(f"{path}: no trace in this file")
    return list(traces.values())


def write_traces(path, traces):
    """Write a list of Trace so that `read_traces` returns it again."""
    with replaced(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for t in traces:
            row = {name: value for name, value in vars(t).items() if value != {}}
            file.write(json.dumps(row, separators=(",", ":"), default=np.ndarray.tolist) + "\n")
