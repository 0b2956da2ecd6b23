"""The analyser: its rungs against enumeration and plans, and the statements that must hold of them."""

import itertools
import json
import random
from typing import NamedTuple

import numpy as np
import pytest
from conftest import ROOT, refused, values

from minispec import bounds
from minispec.bounds import AVERAGES, COMBINED, replay, rung_seconds
from minispec.costs import CostTable, read_costs
from minispec.traces import Trace


def linear(**coefficients):
    return {"kind": "linear", **coefficients}


def grid(rows, tokens, kv, seconds):
    return {"kind": "grid", "rows": rows, "tokens": tokens, "kv": kv, "seconds": seconds}


def prices(draft, **verify):
    """A cost table in which only drafting and verifying take time."""
    return {"verify": linear(**verify), "draft": draft, "prefill": linear()}


FREE = {"a": linear(), "b": linear()}
UNIT = prices(FREE, base=1.0)  # a step takes 1
# Llama-3.1-8B on one H100, the constants of the paper's simulator.
PUBLISHED = read_costs(f"{ROOT}/results/costs_h100.json")
H100 = CostTable(PUBLISHED)


# -- the reference: one request by plans, which are lists of rounds ---------------------------------


class Round(NamedTuple):
    """At `position` the drafter `proposer` (None: no drafter) proposes `drafted` tokens, and `emitted` ones
    are gained; `lookup` tokens are verified next to the drafts. `bounds.replay` reads it like a round of the
    engine."""

    position: int
    proposer: str | None
    drafted: int
    emitted: int
    lookup: int = 0


def plan_of(trace, choose):
    """The rounds (name, proposed) that choose(position, room) gives."""
    plan = []
    position = 1
    while position < trace.n_out:
        name, proposed = choose(position, trace.n_out - position - 1)
        gain = min(int(trace.accept[name][position]), proposed + 1) if name else 1
        plan.append(Round(position, name, proposed, gain))
        position += gain
    return plan


def autoregressive(trace):
    return plan_of(trace, lambda i, room: (None, 0))


def fixed(trace, name, k):
    def choose(i, room):
        offered = trace.offered[name][i] if name in trace.offered else k
        drafts = int(min(k, room, offered))
        return (name, drafts) if drafts else (None, 0)

    return plan_of(trace, choose)


def greedy(trace, names, k_max):
    def choose(i, room):
        name = max(names, key=lambda m: trace.accept[m][i])
        return name, min(int(trace.accept[name][i]) - 1, k_max)

    return plan_of(trace, choose)


def one_pass(trace):
    return [Round(1, None, trace.n_out - 2, trace.n_out - 1)] if trace.n_out > 1 else []


def all_plans(trace, names, k_max, position=1):
    """Every plan there is: nobody, or any drafter with any number of drafts, at every position."""
    if position >= trace.n_out:
        yield []
        return
    moves = [Round(position, None, 0, 1)]
    for m, j in itertools.product(names, range(1, min(k_max, trace.n_out - position - 1) + 1)):
        moves.append(Round(position, m, j, min(j + 1, int(trace.accept[m][position]))))
    for move in moves:
        for rest in all_plans(trace, names, k_max, position + move.emitted):
            yield [move, *rest]


def time_of(plan, trace, cost, batch=1):
    """Seconds of a plan for a batch of lookup, prefill included."""
    total = float(cost.prefill(trace.prompt_len, batch))
    for position, name, proposed, *_ in plan:
        kv = batch * (trace.prompt_len + position)
        total += float(cost.step(kv, batch * (1 + proposed), batch))
        if name:
            total += float(cost.draft(name, kv, proposed, batch))
    return total


# -- traces and prices -----------------------------------------------------------------------------


def trace_of(prompt_len=10, **accept):
    """A trace from accept[1:], clipped to the end of the output."""
    n = len(next(iter(accept.values()))) + 1
    left = np.maximum(1, n - np.arange(n))
    return Trace("t", prompt_len, n, {m: np.minimum([1, *a], left) for m, a in accept.items()})


def test_no_drafter_is_named_like_all_of_them():
    with refused("may not be named all"):
        bounds.compared([trace_of(all=[1, 1])], CostTable(prices({"all": linear()}, base=1.0)))


def random_trace(rng, n, high=6):
    lengths = lambda: [rng.randint(1, high) if rng.random() < 0.7 else 1 for _ in range(n - 1)]
    return trace_of(rng.randrange(50), **{m: lengths() for m in "ab"})


def random_table(rng):
    """Linear costs in which neither the target, the drafters, the cache nor the overhead is negligible."""
    drawn = lambda **scales: linear(
        **{name: scale * rng.random() for name, scale in scales.items()}
    )
    draft = {
        m: drawn(base=0.5, step=0.2, row=0.02, token=0.02, kv=1e-3, kv_step=1e-4) for m in "ab"
    }
    verify = {**drawn(token=0.2, kv=2e-3), "base": 1.0}
    return {"verify": verify, "draft": draft, "overhead": drawn(base=0.4, row=0.02)}


def noisy_table(rng):
    """Measured grids that rise on the whole, but not at every point."""
    rows, tokens, kv = [1, 4, 64], [1, 2, 3, 5, 9], [0, 40, 100]
    value = lambda b, n, c: (1 + 0.05 * b * n + 0.001 * b * c) * rng.uniform(0.7, 1.3)
    seconds = lambda: [[[value(b, n, c) for c in kv] for n in tokens] for b in rows]
    measured = lambda: grid(rows, tokens, kv, seconds())
    return {"verify": measured(), "draft": {m: measured() for m in "ab"}}


both_tables = pytest.mark.parametrize("table", [random_table, noisy_table])


def rungs(some, table, *args):
    """The rungs by total time."""
    return bounds.ladder(some, CostTable(table), *args)["total time"]


def seconds_of(trace, cost, names="ab", batch=1, k_max=20):
    return rung_seconds(trace, cost, list(names), batch, k_max)


# -- against loops and enumeration -----------------------------------------------------------------


@both_tables
def test_every_rung_takes_as_long_as_its_rounds(table):
    """With outputs of different lengths, and lookups that find fewer drafts than they are asked for."""
    rng = random.Random(21)
    for (k_max, batch), n in itertools.product(((1, 1), (3, 4), (7, 16)), (1, 2, 3, 17, 40)):
        t = random_trace(rng, n)
        if n > 2:
            t.offered["a"] = np.array(
                [rng.randint(max(accept - 1, 0), 9) for accept in t.accept["a"]]
            )
        cost = CostTable(table(rng))
        got = seconds_of(t, cost, "ab", batch, k_max)
        plans = {"plain": autoregressive(t), "one pass": one_pass(t)}
        plans |= {("fixed", m, k): fixed(t, m, k) for m in "ab" for k in range(1, k_max + 1)}
        groups = {"a": "a", "b": "b", "all": "ab"}
        plans |= {("greedy", g): greedy(t, names, k_max) for g, names in groups.items()}
        want = {rung: time_of(plan, t, cost, batch) for rung, plan in plans.items()}
        assert {rung: got[rung] for rung in want} == pytest.approx(want, rel=1e-9)
        assert got.keys() - want == {*(("optimum", g) for g in groups), "free drafters"}


def test_the_optimum_equals_enumeration():
    """Of all plans there are, none is faster."""
    rng = random.Random(14)
    for table in [random_table] * 8 + [noisy_table] * 4:
        t = random_trace(rng, 6, high=4)
        some = table(rng)
        batch = rng.choice([1, 6])
        got = seconds_of(t, CostTable(some), "ab", batch, 2)
        for rung, names, draft in (
            (("optimum", "a"), "a", {}),
            (("optimum", "all"), "ab", {}),
            ("free drafters", "ab", {"draft": FREE}),
        ):
            cost = CostTable({**some, **draft})
            want = min(time_of(plan, t, cost, batch) for plan in all_plans(t, names, 2))
            assert got[rung] == pytest.approx(want, rel=1e-12)


# -- statements that must hold ---------------------------------------------------------------------


@both_tables
def test_rungs_are_ordered(table):
    """On random traces, batches and prices."""
    rng = random.Random(0)
    for _ in range(24):
        some = [random_trace(rng, rng.randint(2, 25)) for _ in range(3)]
        out = rungs(some, table(rng), rng.choice([1, 2, 16]), rng.choice([None, 2]))
        for m in "ab":
            rising = [
                max(1, out["best fixed k"][m]["speedup"], out["greedy (not a bound)"][m]),
                out["optimum of one"][m],
                out["optimum of all"],
                out["free drafters"],
            ]
            assert np.diff(rising).min() > -1e-9
        assert out["greedy (not a bound)"]["all"] <= out["optimum of all"] * (1 + 1e-12)
        if table is random_table:  # a step costs no more than its parts
            assert out["free drafters"] <= out["one pass"] * (1 + 1e-12)


def test_greedy_is_not_a_bound():
    """The smallest counter-example, at one unit a step: greedy jumps 1 -> 5 -> 6 -> 7, fixed k = 2 goes
    1 -> 4 -> 7, and so does the optimum."""
    t = trace_of(a=[4, 1, 1, 3, 1, 1])
    got = seconds_of(t, CostTable(UNIT), "a")
    assert (got["greedy", "a"], got["fixed", "a", 2], got["optimum", "a"]) == (3, 2, 2)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_a_perfect_drafter_has_a_closed_form(k):
    """Where k + 1 divides N - 1: S = (k + 1) (t_1 + o) / (t_(k+1) + d_k + o)."""
    table = prices({"a": linear(base=0.2, step=0.05)}, base=1.0, token=0.07)
    cost = CostTable(table | {"overhead": linear(base=0.3)})
    want = (k + 1) * (1.07 + 0.3) / (1 + 0.07 * (k + 1) + 0.2 + 0.05 * k + 0.3)
    for n in range(2, 4 * (k + 1) + 2):
        got = seconds_of(trace_of(5, a=[k + 1] * (n - 1)), cost, "a", 1, k)
        full = (n - 1) % (k + 1) == 0
        assert (got["plain"] / got["fixed", "a", k] == pytest.approx(want, rel=1e-12)) == full


def test_figures_of_an_h100():
    """Step time in ms and the ceiling of k = 3 by batch, at context 600, as the paper's constants give
    them."""
    for batch, *want in values("""
        1   | 7.14  | 3.06
        32  | 8.52  | 2.68
        128 | 12.80 | 2.21
        512 | 29.91 | 1.84
    """):
        plain, three = H100.round("eagle3", 600 * batch, np.array([0, 3]), batch)
        assert [1e3 * plain, 4 * plain / three] == pytest.approx(want, abs=0.006)


def test_replay_verifies_looked_up_tokens_next_to_drafts():
    cost = CostTable(prices({"a": linear(step=10.0)}, token=1.0))
    assert replay([[Round(1, "a", 2, 3, lookup=4)]], [5], cost, 1) == 1 + 2 + 4 + 20


# -- the paper's simulator -------------------------------------------------------------------------


def simulator(accept, prompt_len, names, batch):
    """The paper's simulator, written out: it reads accept[cur - 1], charges every round of a neural drafter,
    and prices the winner of several drafters as a lookup."""
    verify = PUBLISHED["verify"]
    overhead = PUBLISHED["overhead"]["base"]
    price = lambda kv, queries: kv * verify["kv"] + queries * verify["token"] + verify["base"]
    total = price(0, batch * prompt_len) + overhead
    cur = 1
    while cur < len(accept[names[0]]):
        length = max(accept[m][cur - 1] for m in names)
        kv = batch * (prompt_len + cur)
        step = price(kv, batch * length)
        eagle = 2.37768493e-9 * kv + 8.41429603e-7 * length + 2.13526175e-3
        total += step + overhead + (eagle if names == ["eagle3"] else 0.005875 * step)
        cur += length
    return total


@pytest.mark.parametrize("batch", [1, 32, 128])
@pytest.mark.parametrize("names", [["eagle3"], ["ngram", "eagle3"]])
def test_the_papers_figures_come_out_of_the_greedy_rung(names, batch):
    """Their traces, read one position early and priced as theirs: greedy, by mean rate. At the right position
    the optimum is above their figure."""
    rng = random.Random(23)
    early, right, theirs = [], [], []
    for _ in range(12):
        p, n = rng.randint(50, 900), rng.randint(20, 120)
        lengths = lambda high: [
            rng.randint(1, high) if rng.random() < 0.7 else 1 for _ in range(n - 1)
        ]
        accept = {"eagle3": lengths(6), "ngram": lengths(21)}
        early.append(trace_of(p, **{m: [1, *accept[m][:-1]] for m in names}))
        right.append(trace_of(p, **{m: accept[m] for m in names}))
        shifted = {
            m: [*early[-1].accept[m][1:].tolist(), 1] for m in names
        }  # clipped, as they stop
        theirs.append(simulator(shifted, p, names, batch))
    alone = len(names) == 1
    lookup = dict.fromkeys(names, PUBLISHED["draft"]["ngram"])
    cost = H100 if alone else CostTable({**PUBLISHED, "draft": lookup})
    out, corrected = (bounds.ladder(some, cost, batch) for some in (early, right))
    plain = np.array([time_of(autoregressive(t), t, cost, batch) for t in early])
    tokens = np.array([t.n_out for t in early])
    for by in AVERAGES:
        want = bounds.speedup(by, tokens, plain, np.array(theirs))
        assert out[by]["greedy (not a bound)"]["eagle3" if alone else "all"] == pytest.approx(want, rel=1e-9)
        assert want < (corrected[by]["optimum of one"]["eagle3"] if alone else corrected[by]["optimum of all"])


# -- when to draft at all --------------------------------------------------------------------------


def test_the_best_number_of_drafts_is_the_ladders_where_context_is_free():
    rng = random.Random(3)
    some = [random_trace(rng, n) for n in (17, 40)]
    draft = {"a": linear(base=0.1, step=0.1), "b": linear(base=30.0)}
    table = prices(draft, base=1.0, token=0.05)
    best = rungs(some, table, 4, 5)["best fixed k"]
    for row in bounds.best_drafts(some, CostTable(table), {4: {"total time": {}}}, 5):
        assert row["drafters"]["a"] == {
            "k": best["a"]["k"],
            "speedup": pytest.approx(best["a"]["speedup"]),
        }
        assert row["drafters"]["b"] == {"k": 0, "speedup": 1.0}


def test_without_rounds_nothing_is_gained():
    """An answer of one token comes from the prompt."""
    rows = bounds.best_drafts([trace_of(a=[])], CostTable(UNIT), {4: {"total time": {}}}, 5)
    assert {row["drafters"]["a"]["speedup"] for row in rows} == {1.0}


def test_a_drafter_pays_for_its_context_and_for_what_it_finds():
    """Verifying reads nothing here, drafting reads the context. Half of the positions offer no draft."""
    n = 40
    t = trace_of(5, a=[2, 1] * ((n - 1) // 2))
    t.offered = {"a": np.arange(t.n_out) % 2}
    cost = CostTable(prices({"a": linear(kv=3e-3)}, base=1.0))
    cells = {1: {"total time": {"observed": {"ar": 1.0, "a": 1.2, COMBINED: 9.0}}}}
    rows = bounds.best_drafts([t], cost, cells)
    for row in rows:
        seconds = 1 + row["context"] * 3e-3  # of a round, which gains two tokens
        assert row["drafters"]["a"]["speedup"] == pytest.approx(max(1, 2 / seconds), rel=0.06)
        assert (row["drafters"]["a"]["k"] == 0) == (seconds > 2)
    assert [row.get("clock") for row in rows] == [("a", 1.2), None]
    lines = bounds.drafts_table(rows).splitlines()
    assert "| a, 1.20 |" in lines[2] and lines[3].startswith("| 1 | 512 | none | none |")


# -- the ladder and its table ----------------------------------------------------------------------


def test_the_ladder_is_made_of_the_rungs():
    """By both averages, in full precision, also after JSON."""
    rng = random.Random(13)
    some = [random_trace(rng, n) for n in (17, 40)]
    cost = CostTable(random_table(rng))
    out = bounds.ladder(some, cost, 4, 3)
    assert json.loads(json.dumps(out)) == out
    times = [seconds_of(t, cost, "ab", 4, 3) for t in some]
    plain = np.array([t["plain"] for t in times])
    assert out["seconds"] == pytest.approx(plain.sum() / 4)

    def by_hand(of, best):
        """All rungs of a ladder, for best {drafter: drafts}."""
        each = lambda kind, names: {name: of((kind, name)) for name in names}
        return {
            "best fixed k": {m: {"k": k, "speedup": of(("fixed", m, k))} for m, k in best.items()},
            "greedy (not a bound)": each("greedy", ("a", "b", "all")),
            "optimum of one": each("optimum", "ab"),
            "optimum of all": of(("optimum", "all")),
            "free drafters": of("free drafters"),
            "one pass": of("one pass"),
        }

    for by in AVERAGES:
        of = lambda rung: bounds.speedup(by, np.array([17, 40]), plain, np.array([t[rung] for t in times]))
        best = {m: max((of(("fixed", m, k)), k) for k in (1, 2, 3))[1] for m in "ab"}
        assert out[by] == by_hand(of, best)
    # A sample of two requests may have only one of them. The last average is the mean rate.
    alone = lambda rung: pytest.approx(sorted(one["plain"] / one[rung] for one in times))
    assert out["range"] == by_hand(alone, best)


def test_the_two_averages_differ_where_requests_do():
    """One request is never sped up, one is twice as fast."""
    plain = np.array([100.0, 10.0])
    found = [
        bounds.speedup(by, np.array([100, 10]), plain, np.array([100.0, 5.0])) for by in AVERAGES
    ]
    assert found == pytest.approx([110 / 105, 1.5])


def test_censored_positions_are_counted():
    flags = lambda *where: np.isin(np.arange(7), where)
    t = trace_of(a=[3, 2, 1, 3, 2, 1], b=[1] * 6)
    other = trace_of(a=[1, 1], b=[2, 1])
    t.censored, other.censored = {"a": flags(0, 1, 4)}, {"b": flags(1)[:3]}
    share = bounds.ladder([t, other], CostTable(UNIT))["censored"]
    assert share == {"a": 2 / 8, "b": 1 / 8, "all": 3 / 8}
    t.censored["b"] = flags(1, 2)  # where one of the two is censored, the best of all is
    assert bounds.censored_share([t], ["a", "b"]) == 3 / 6


SPEEDUPS = {
    ("fixed", "a", 2): 1.25, ("fixed", "a", 4): 1.25, ("greedy", "a"): 1, ("greedy", "all"): 1,
    ("optimum", "a"): 1.5, ("optimum", "all"): 1.75, "free drafters": 2, "one pass": 3
}
CELL = {
    "workload": "w", "batch": 1,
    "total time": bounds.by_key(SPEEDUPS.get, {"a": 2}),
    "mean rate": bounds.by_key(lambda rung: SPEEDUPS[rung] + 2, {"a": 4}),
    "range": bounds.by_key(lambda rung: [SPEEDUPS[rung] + 1, SPEEDUPS[rung] + 3], {"a": 4}),
}
ROW = (
    "| w | 1 | all | 1.25 / 3.25 (2.25-4.25), k 2 / 4 a | 1.00 / 3.00 (2.00-4.00) | "
    "1.50* / 3.50* (2.50-4.50) a | 1.75* / 3.75* (2.75-4.75) | 2.00* / 4.00* (3.00-5.00) | "
    "3.00 / 5.00 (4.00-6.00) | "
)


@pytest.mark.parametrize("share, mark", [(0.06, "*"), (0.05, "")])
def test_a_bound_of_censored_traces_is_marked(share, mark):
    cells = [{**CELL, "censored": {"a": share, "all": share}}]
    text = bounds.table({"model_error": None, "speedup_error": None, "left_out": [], "cells": cells})
    assert ROW.replace("*", mark) + f"{100 * share:.0f} % |" in text
    assert ("only bounds rounds" in text) == bool(mark)


def test_drafters_without_a_price_and_ids_without_a_workload():
    some = [trace_of(a=[2, 1], b=[1, 1]), trace_of(a=[1, 1], b=[2, 1])]
    for ids, workloads in (("one", "two"), {"requests"}), (("x/one", "y/two"), {"x", "y"}):
        some[0].id, some[1].id = ids
        for priced, missing in (({"a": linear()}, ["b"]), (FREE, [])):
            result = bounds.analyse(some, UNIT | {"draft": priced})
            assert result["left_out"] == missing
            assert {c["workload"] for c in result["cells"]} == workloads
            assert ("no price for it: b." in bounds.table(result)) == bool(missing)
    with refused("drafters x are not in the cost table: ngram, eagle3"):
        bounds.ladder([trace_of(x=[1, 1])], H100)
    assert rungs([Trace("t", 5, 1, {"ngram": np.ones(1, int)})], PUBLISHED)["one pass"] == 1



def test_a_batch_pays_for_all_its_requests():
    cost = CostTable({"verify": linear(base=1), "overhead": linear(row=2), "prefill": linear(row=10, token=1)})
    assert (cost.step(0, 3, 3), cost.prefill(5, 2)) == (7, 30)