"""Write the rungs of one request: its seconds for every way to cut the answer into rounds.

Paper: "Performance or Illusion?" 2601.11580; its oracle is the rung "greedy". Lesson: docs/bounds.md, from
"One answer as jumps" on.

A round at position i, when i tokens of the output exist, has kv = batch * (prompt_len + i) cached tokens and
room = n_out - i - 1 drafts at most. With j drafts of drafter m it costs cost.step(kv, batch * (1 + j), batch)
+ cost.draft(m, kv, j, batch) and gains min(j + 1, trace.accept[m][i]) tokens. A plain round has no drafter,
j = 0 and gains one. The first round is at position 1, because the prefill gives the first token.

    "plain"             plain rounds only
    ("fixed", m, k)     for k = 1 .. k_max: min(k, room, trace.offered[m][i]) drafts of m, a plain round where
                        this is 0. Without an array trace.offered[m]: min(k, room)
    ("greedy", g)       the drafter of the group with the largest accept, of equals the first, with
                        min(accept - 1, k_max) drafts; its cost.draft is paid even for 0 drafts
    ("optimum", g)      the fastest rounds of all: plain, or 0 .. k_max drafts of a drafter of the group
    "free drafters"     the optimum of all drafters if cost.draft were 0
    "one pass"          one forward, cost.step(batch * (prompt_len + 1), batch * (n_out - 1), batch); nothing
                        if n_out is 1

A group g is one of `names`, or "all". Every rung has cost.prefill(prompt_len, batch) on top, and is at least
1e-30, because speed-ups divide by it.
"""
from itertools import product  # noqa: F401

import numpy as np  # noqa: F401

from minispec.bounds import follow, least  # noqa: F401

PLACE = "minispec.bounds.rung_seconds"
TESTS = (
    "test_bounds.py::test_greedy_is_not_a_bound",
    "test_bounds.py::test_every_rung_takes_as_long_as_its_rounds[random_table]",
    "test_bounds.py::test_the_optimum_equals_enumeration",
)


def rung_seconds(trace, cost, names, batch, k_max):
    """{rung: seconds of one request}, floats, in a batch of copies, prefill included. trace: a Trace, whose
    accept and offered are {drafter: array (n_out,)}. cost: a CostTable; its functions take arrays, too.
    names: the drafters. k_max: most drafts in a round."""
    raise NotImplementedError
