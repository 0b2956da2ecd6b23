"""The analyser: its rungs against enumeration and plans, and the statements that must hold of them."""

import itertools
import json
import random
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, near_toy, toy_model, whole

from minispec import bounds
from minispec.bounds import AVERAGES, COMBINED, replay, rung_seconds
from minispec.core.drafters import NGram, SmallLM
from minispec.core.engine import Engine, SyncScheduler
from minispec.core.requests import Request
from minispec.core.verify import greedy_tree
from minispec.costs import CostTable, read_costs
from minispec.traces import Trace, read_traces, write_traces


def linear(**coefficients):
    return {"kind": "linear", **coefficients}


NO_PREFILL = {"prefill": linear()}
UNIT = {"verify": linear(base=1.0), **NO_PREFILL}  # a step takes 1
FREE = {"a": linear(), "b": linear()}
# Llama-3.1-8B on one H100, the constants of the paper's simulator.
PUBLISHED = read_costs(f"{ROOT}/results/costs_h100.json")
H100 = CostTable(PUBLISHED)


# -- the reference: one request by plans, which are lists of rounds ---------------------------------


class Round(NamedTuple):
    """At `position` drafter `name` (None: no drafter) proposes `proposed`, and `emitted` tokens are gained;
    `lookup` tokens are verified next to the drafts. `bounds.replay` reads it like a step of the engine.
    """

    position: int
    name: str | None
    proposed: int
    emitted: int
    lookup: int = 0
    proposer = property(lambda self: self.name)
    drafted = property(lambda self: self.proposed)


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
        return (name, int(min(k, room, offered))) if room else (None, 0)

    return plan_of(trace, choose)


def greedy(trace, names, k_max=99):
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


def recorded(steps):
    """The plan that an engine followed, from its step records."""
    return [
        Round(s.position, s.proposer if s.proposed else None, s.proposed, s.committed) for s in steps
    ]


# -- traces and prices -----------------------------------------------------------------------------


def trace_of(prompt_len=10, **accept):
    """A trace from accept[1:], clipped to the end of the output."""
    n = len(next(iter(accept.values()))) + 1
    left = np.maximum(1, n - np.arange(n))
    return Trace("t", prompt_len, n, {m: np.minimum([1, *a], left) for m, a in accept.items()})


def random_trace(rng, n, names="ab", high=6):
    lengths = lambda: [rng.randint(1, high) if rng.random() < 0.7 else 1 for _ in range(n - 1)]
    return trace_of(rng.randrange(50), **{m: lengths() for m in names})


def perfect(n, k):
    """The first k drafts of drafter a are always accepted."""
    return trace_of(5, a=[k + 1] * (n - 1))


def random_table(rng, names="ab"):
    """Linear costs in which neither the target, the drafters, the cache nor the overhead is negligible."""

    def drawn(**scales):
        return linear(**{name: scale * rng.random() for name, scale in scales.items()})

    draft = {m: drawn(base=0.5, step=0.2, row=0.02, token=0.02, kv=1e-3, kv_step=1e-4) for m in names}
    verify = {**drawn(token=0.2, kv=2e-3), "base": 1.0}
    return {"verify": verify, "draft": draft, "overhead": drawn(base=0.4, row=0.02)}


def noisy_table(rng, names="ab"):
    """Measured grids that rise on the whole, but not at every point."""
    rows = [1, 4, 64]
    tokens = [1, 2, 3, 5, 9]
    kv = [0, 40, 100]
    value = lambda b, n, c: (1 + 0.05 * b * n + 0.001 * b * c) * rng.uniform(0.7, 1.3)
    grid = lambda: {
        "kind": "grid",
        "rows": rows,
        "tokens": tokens,
        "kv": kv,
        "seconds": [[[value(b, n, c) for c in kv] for n in tokens] for b in rows],
    }
    return {"verify": grid(), "draft": {m: grid() for m in names}}


def rungs(some, table, *args):
    """The rungs by total time."""
    return bounds.ladder(some, CostTable(table), *args)["total time"]


def seconds_of(trace, cost, names="ab", batch=1, k_max=20):
    return rung_seconds(trace, cost, list(names), batch, k_max)


# -- against loops and enumeration -----------------------------------------------------------------


@pytest.mark.parametrize("table", [random_table, noisy_table])
def test_every_rung_takes_as_long_as_its_rounds(table):
    """With outputs of different lengths, and lookups that find fewer drafts than they are asked for."""
    rng = random.Random(21)
    for (k_max, batch), n in itertools.product(((1, 1), (3, 4), (7, 16)), (1, 2, 3, 17, 40)):
        t = random_trace(rng, n)
        if n > 2:
            t.offered["a"] = np.array([rng.randint(max(accept - 1, 0), 9) for accept in t.accept["a"]])
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


def test_plain_decoding_has_a_closed_form(tmp_path):
    """From files: an arithmetic series over the context."""
    rng = random.Random(11)
    for batch, n in itertools.product((1, 5, 32), (1, 2, 90)):
        t = random_trace(rng, n, high=9)
        table = random_table(rng)
        write_traces(tmp_path / "t.jsonl", [t])
        (tmp_path / "c.json").write_text(json.dumps(table))
        t = read_traces(tmp_path / "t.jsonl")[0]
        cost = CostTable(read_costs(tmp_path / "c.json"))
        base, token, kv = (table["verify"][name] for name in ("base", "token", "kv"))
        base += table["overhead"]["base"] + table["overhead"]["row"] * batch
        steps = n - 1
        p = t.prompt_len
        want = n * base + token * batch * (p + steps)
        want += kv * batch * (steps * (p + 1) + steps * (steps - 1) / 2)
        got = seconds_of(t, cost, "ab", batch, 1)["plain"]
        assert got == pytest.approx(want, rel=1e-9)


# -- statements that must hold ---------------------------------------------------------------------


def test_nothing_accepted_means_no_speedup():
    even = pytest.approx(1, rel=1e-12)
    t = trace_of(a=[1] * 30, b=[1] * 30)
    for batch in (1, 16):
        out = rungs([t], PUBLISHED | {"draft": FREE}, batch)
        assert [*out["L4"].values(), *out["L5"].values(), out["L6"], out["L7"]] == [even] * 7
        # Control: greedy pays for drafts that it does not make.
        paid = rungs([t], PUBLISHED | {"draft": FREE | {"a": linear(base=1e-3)}}, batch)
        assert paid["L4"]["a"] < 0.999
        assert paid["L5"]["a"] == even


@pytest.mark.parametrize("table", [random_table, noisy_table])
def test_rungs_are_ordered(table):
    """On random traces, batches and prices. Greedy is no bound: some fixed k beats it somewhere."""
    rng = random.Random(0)
    beaten = 0
    for _ in range(24):
        some = [random_trace(rng, rng.randint(2, 25)) for _ in range(3)]
        prices = table(rng)
        out = rungs(some, prices, rng.choice([1, 2, 16]), rng.choice([None, 2]))
        alone = rungs(some[:1], prices)
        for m in "ab":
            rising = [out["L2"][m]["speedup"], out["L5"][m], out["L6"], out["L7"]]
            assert rising == sorted(rising) or np.allclose(rising, sorted(rising), rtol=1e-12)
            assert max(1, out["L4"][m]) <= out["L5"][m] * (1 + 1e-12)
            beaten += alone["L4"][m] < alone["L2"][m]["speedup"] * (1 - 1e-9)
        assert out["L4"]["all"] <= out["L6"] * (1 + 1e-12)
        if table is random_table:  # a step costs no more than its parts
            assert out["L7"] <= out["L9"] * (1 + 1e-12)
    assert beaten > 0


def test_greedy_is_not_a_bound():
    """The smallest counter-example, at one unit a step: greedy jumps 1 -> 5 -> 6 -> 7, fixed k = 2 goes
    1 -> 4 -> 7, and so does the optimum."""
    t = trace_of(a=[4, 1, 1, 3, 1, 1])
    cost = CostTable(UNIT | {"draft": FREE})
    assert [r.position for r in greedy(t, "a")] == [1, 5, 6]
    assert [r.position for r in fixed(t, "a", 2)] == [1, 4]
    got = seconds_of(t, cost, "a")
    assert (got["greedy", "a"], got["fixed", "a", 2], got["optimum", "a"]) == (3, 2, 2)


def test_greedy_is_optimal_when_reach_never_shrinks():
    """If i + accept[i] never decreases and every step costs the same, the longest jump is the best one;
    without the first condition it is not (control)."""
    rng = random.Random(2)
    worse = 0
    cost = CostTable(UNIT | {"overhead": linear(base=0.3), "draft": FREE})
    for _ in range(60):
        t = random_trace(rng, rng.randint(2, 40), "a", high=9)
        reach = np.maximum.accumulate(np.arange(t.n_out) + t.accept["a"])
        ordered = trace_of(a=(reach - np.arange(t.n_out))[1:].tolist())
        best = seconds_of(ordered, cost, "a")
        any_ = seconds_of(t, cost, "a")
        assert best["optimum", "a"] == pytest.approx(best["greedy", "a"])
        worse += any_["optimum", "a"] < any_["greedy", "a"] - 0.5
    assert worse > 0


@pytest.mark.parametrize("k", [1, 3, 7])
def test_a_perfect_drafter_has_a_closed_form(k):
    """Where k + 1 divides N - 1: S = (k + 1) (t_1 + o) / (t_(k+1) + d_k + o)."""
    cost = CostTable(
        {
            "verify": linear(base=1.0, token=0.07),
            "draft": {"a": linear(base=0.2, step=0.05)},
            "overhead": linear(base=0.3),
            **NO_PREFILL,
        }
    )
    want = (k + 1) * (1.07 + 0.3) / (1 + 0.07 * (k + 1) + 0.2 + 0.05 * k + 0.3)
    for n in range(2, 4 * (k + 1) + 2):
        got = seconds_of(perfect(n, k), cost, "a", 1, k)
        full = (n - 1) % (k + 1) == 0
        assert (got["plain"] / got["fixed", "a", k] == pytest.approx(want, rel=1e-12)) == full


def test_more_drafters_never_hurt():
    """A second drafter that accepts less and costs more, or the same one twice, changes nothing; a free one
    helps (control)."""
    rng = random.Random(12)
    for _ in range(20):
        t = random_trace(rng, 25)
        table = random_table(rng, "a")
        own = table["draft"]["a"]
        slow = {name: value + 0.01 for name, value in own.items() if name != "kind"}
        best = lambda b: seconds_of(t, CostTable(table | {"draft": {"a": own, "b": b}}))[
            "optimum", "all"
        ]
        alone = seconds_of(t, CostTable(table), "a")["optimum", "a"]
        t.accept["b"] = np.minimum(t.accept["a"], t.accept["b"])
        assert best(linear(**slow)) == alone
        t.accept["b"] = t.accept["a"]
        assert best(own) == alone
        assert best(linear()) < alone


def test_a_large_batch_has_a_limit():
    """The gain of fixed k tends to tau (c_q + c_kv c) / (c_q (k + 1) + c_kv c + draft per row), which may be
    a loss; the optimum need not draft and never loses."""
    verify = {"base": 5e-3, "token": 2e-5, "kv": 4e-8}
    context = 600
    k = 3
    batch = 10**9
    draft = {"a": linear(base=2e-3, token=1e-6, row=3e-6)}
    cost = CostTable({"verify": linear(**verify), "draft": draft, "overhead": linear(base=1e-3)})
    limit = (2e-5 + 4e-8 * context) / (2e-5 * (k + 1) + 4e-8 * context + k * 1e-6 + 3e-6)
    spent = cost.round("a", batch * context, np.array([0, k]), batch)
    assert spent[0] / spent[1] == pytest.approx(limit, rel=1e-5)
    t = random_trace(random.Random(8), 60, "a", high=4)
    for batch in (1, 10, 1000, 10**6):
        got = seconds_of(t, cost, "a", batch)
        assert got["plain"] >= got["optimum", "a"]
    assert got["plain"] < got["fixed", "a", 5]


def test_figures_of_an_h100():
    """As the paper's constants give them: long contexts make verification free, large batches do not; step
    time and the ceiling of k = 3 by batch, at context 600."""
    ratio = lambda context, batch: (
        H100.verify(batch * context, batch * 4, batch) / H100.verify(batch * context, batch, batch)
    )
    s0 = PUBLISHED["verify"]["token"] / PUBLISHED["verify"]["kv"]
    assert round(s0) == 535
    for batch in (1, 64, 4096):
        assert ratio(10**9, batch) == pytest.approx(1, abs=1e-5)
    for context in (100, 5000):
        assert ratio(context, 10**9) == pytest.approx(1 + 3 / (1 + context / s0), rel=1e-6)
    for batch, want in {128: (1.73, 1.28, 1.05), 512: (2.21, 1.33, 1.05)}.items():
        assert [ratio(c, batch) for c in (500, 4000, 32000)] == pytest.approx(want, abs=0.006)
    for batch, want in {1: (7.14, 3.06), 32: (8.52, 2.68), 128: (12.80, 2.21), 512: (29.91, 1.84)}.items():
        plain, three = H100.round("eagle3", 600 * batch, np.array([0, 3]), batch)
        assert (1e3 * plain, 4 * plain / three) == pytest.approx(want, abs=0.006)


def test_a_price_of_one_point_is_paid_every_round():
    """A table measured at one k and one context is a natural one; 3 ms a round are 3 ms a round."""
    t = trace_of(100, mtp=[3] * 100)
    point = {
        "kind": "grid",
        "rows": [1, 16],
        "tokens": [3],
        "kv": [512],
        "seconds": [[[3e-3]], [[3e-3]]],
    }
    for draft in (point, linear(base=3e-3)):
        cost = CostTable(
            {"verify": linear(base=6e-3, token=2e-5), "draft": {"mtp": draft}, **NO_PREFILL}
        )
        want = 33 * 9.06e-3 + 6.02e-3  # the last token needs no drafts
        got = seconds_of(t, cost, ["mtp"], 1, 2)
        found = [
            got["fixed", "mtp", 2],
            got["optimum", "mtp"],
            got["optimum", "all"],
            replay([fixed(t, "mtp", 2)], [t.prompt_len], cost, 1),
        ]
        assert found == pytest.approx([want] * 4, rel=1e-9)


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
    the optimum is above greedy and above their figure."""
    rng = random.Random(23)
    early = []
    right = []
    theirs = []
    for _ in range(12):
        p = rng.randint(50, 900)
        n = rng.randint(20, 120)
        lengths = lambda high: [rng.randint(1, high) if rng.random() < 0.7 else 1 for _ in range(n - 1)]
        accept = {"eagle3": lengths(6), "ngram": lengths(21)}
        early.append(trace_of(p, **{m: [1, *accept[m][:-1]] for m in names}))
        right.append(trace_of(p, **{m: accept[m] for m in names}))
        shifted = {m: [*early[-1].accept[m][1:].tolist(), 1] for m in names}  # clipped, as they stop
        theirs.append(simulator(shifted, p, names, batch))
    cost = H100
    group = names[0]
    if len(names) > 1:
        lookup = PUBLISHED["draft"]["ngram"]
        cost = CostTable({**PUBLISHED, "draft": dict.fromkeys(names, lookup)})
        group = "all"
    out = bounds.ladder(early, cost, batch)
    corrected = bounds.ladder(right, cost, batch)
    plain = np.array([time_of(autoregressive(t), t, cost, batch) for t in early])
    tokens = np.array([t.n_out for t in early])
    want = {
        "total time": plain.sum() / sum(theirs),
        "mean rate": np.mean(tokens / theirs) / np.mean(tokens / plain),
    }
    best = lambda average: average["L6"] if group == "all" else average["L5"][group]
    for by in AVERAGES:
        assert out[by]["L4"][group] == pytest.approx(want[by], rel=1e-9)
        assert best(corrected[by]) >= corrected[by]["L4"][group]
        assert best(corrected[by]) > want[by]
    assert want["total time"] != pytest.approx(want["mean rate"], rel=1e-4)


# -- a live engine, and batches of different requests ----------------------------------------------

TARGET = toy_model()
DRAFT = near_toy(0.4)
PROMPT = random.Random(6).choices(range(64), k=24)  # its output wanders, then repeats itself, twice
K = 5
N = 60
DRAFTERS = {"ngram": lambda: NGram(3, 1), "draft": lambda: whole(SmallLM(DRAFT, TARGET))}


def dense_accept(name, output):
    """By replay: K drafts at every position, verified by the engine's rule, of which one token is kept."""
    accept = [0]
    for i in range(1, N):
        request = Request(PROMPT, N)
        request.tokens += output[:i]
        draft = DRAFTERS[name]().propose([request], [K])[0][0][: N - i]
        path, _ = greedy_tree(draft, range(len(draft)), output[i:] + [-1])
        accept.append(min(len(path) + 1, N - i))
    return np.array(accept)


@pytest.fixture(scope="module")
def live():
    run = lambda scheduler: Engine(TARGET, scheduler, 1).generate([Request(PROMPT, N)])[0]
    with torch.inference_mode():
        output = run(SyncScheduler).token_ids
        runs = {
            name: run(lambda e: SyncScheduler(e, drafter(), K)) for name, drafter in DRAFTERS.items()
        }
        accept = {name: dense_accept(name, output) for name in DRAFTERS}
    # Neither perfect nor hopeless.
    assert all(a.max() > 2 and (a[1:-K] == 1).any() for a in accept.values())
    return SimpleNamespace(output=output, runs=runs, trace=Trace("live", len(PROMPT), N, accept))


def test_a_trace_says_what_the_engine_accepts(live):
    """At the very position: shifted by one it would not fit. The output is the target's, and all its tokens
    are in the records."""
    assert len(set(live.output)) > 10
    for name, run in live.runs.items():
        accept = live.trace.accept[name]
        assert run.token_ids == live.output
        assert len(run.rounds) > 10
        assert sum(s.committed for s in run.rounds) == N - 1
        fits = {
            shift: all(
                s.committed == min(accept[s.position - shift], s.proposed + 1, N - s.position)
                for s in run.rounds
            )
            for shift in (0, 1)
        }
        assert fits == {0: True, 1: False}
    # Entry 0 is never used.
    ruined = Trace("t", 10, N, {m: np.array([99, *a[1:]]) for m, a in live.trace.accept.items()})
    cost = CostTable(random_table(random.Random(7), DRAFTERS))
    assert seconds_of(ruined, cost, DRAFTERS) == seconds_of(
        Trace("t", 10, N, live.trace.accept), cost, DRAFTERS
    )


def test_a_live_run_stays_below_the_optimum(live):
    """Priced by the model, its rounds never beat the optimum of the same output; a luckier run would."""
    rng = random.Random(10)
    t = live.trace
    for batch, (name, run) in itertools.product((1, 8), live.runs.items()):
        cost = CostTable(random_table(rng, DRAFTERS))
        bound = seconds_of(t, cost, [name], batch)["optimum", name]
        assert bound <= time_of(recorded(run.rounds), t, cost, batch) * (1 + 1e-12)
    cost = CostTable(UNIT | {"draft": {"a": linear(), "draft": linear()}})
    assert (
        time_of(fixed(perfect(N, K), "a", K), t, cost)
        < seconds_of(t, cost, ["draft"])["optimum", "draft"]
    )


def random_plan(rng, t, names):
    def choose(i, room):
        j = rng.randint(0, min(room, 4))
        return (rng.choice(names), j) if j else (None, 0)

    return plan_of(t, choose)


def test_a_batch_of_different_requests_stays_above_the_bound():
    """With linear costs, 1/B of the lock-step optimum, summed over requests, bounds the time of any batch of
    at most B requests: here continuous batching of greedy, fixed and random plans."""
    rng = random.Random(16)
    size = 4
    for _ in range(10):
        some = [random_trace(rng, rng.randint(2, 30), "a") for _ in range(9)]
        cost = CostTable(random_table(rng, "a") | NO_PREFILL)
        bound = sum(seconds_of(t, cost, "a", size)["optimum", "a"] for t in some) / size
        for plan in (
            lambda t: greedy(t, "a"),
            lambda t: fixed(t, "a", 2),
            lambda t: random_plan(rng, t, "a"),
            autoregressive,
        ):
            assert bound <= replay(list(map(plan, some)), [t.prompt_len for t in some], cost, size)


def test_two_drafters_verified_in_one_round_are_no_faster_than_the_optimum_of_all():
    """With perfect foresight one proposal is enough, the longer one."""
    rng = random.Random(3)
    for _ in range(20):
        t = random_trace(rng, rng.randint(2, 30))
        cost = CostTable(random_table(rng) | NO_PREFILL)
        plan = []
        i = 1
        while i < t.n_out:
            room = t.n_out - i - 1
            j = rng.randint(0, min(room, 4))
            lookup = rng.randint(0, min(room - j, 4))
            gain = max(min(j + 1, int(t.accept["a"][i])), min(lookup + 1, int(t.accept["b"][i])))
            plan.append(Round(i, "a" if j else None, j, gain, lookup))
            i += gain
        merged = replay([plan], [t.prompt_len], cost, 1)
        assert merged >= seconds_of(t, cost)["optimum", "all"] - 1e-9
        bare = replay([[r._replace(lookup=0) for r in plan]], [t.prompt_len], cost, 1)
        assert (merged > bare) == any(r.lookup for r in plan)


# -- when to draft at all --------------------------------------------------------------------------


def test_the_best_number_of_drafts_is_the_ladders_where_context_is_free():
    rng = random.Random(3)
    some = [random_trace(rng, n) for n in (17, 40)]
    draft = {"a": linear(base=0.1, step=0.1), "b": linear(base=30.0)}
    table = {"verify": linear(base=1.0, token=0.05), "draft": draft, **NO_PREFILL}
    best = rungs(some, table, 4, 5)["L2"]
    for row in bounds.best_drafts(some, CostTable(table), {4: {"total time": {}}}, 5):
        assert row["drafters"]["a"] == {"k": best["a"]["k"], "speedup": pytest.approx(best["a"]["speedup"])}
        assert row["drafters"]["b"] == {"k": 0, "speedup": 1.0}


def test_a_drafter_pays_for_its_context_and_for_what_it_finds():
    """Verifying reads nothing here, drafting reads the context. Half of the positions offer no draft."""
    n = 40
    t = trace_of(5, a=[2, 1] * ((n - 1) // 2))
    t.offered = {"a": np.arange(t.n_out) % 2}
    cost = CostTable({"verify": linear(base=1.0), "draft": {"a": linear(kv=1e-3)}, **NO_PREFILL})
    cells = {1: {"total time": {"L0": {"ar": 1.0, "a": 1.2, COMBINED: 9.0}}}}
    rows = bounds.best_drafts([t], cost, cells)
    for row in rows:
        seconds = 1 + row["context"] * 1e-3              # of a round, which gains two tokens
        assert row["drafters"]["a"]["speedup"] == pytest.approx(max(1, 2 / seconds), rel=0.06)
        assert (row["drafters"]["a"]["k"] == 0) == (seconds > 2)
    assert [row.get("clock") for row in rows] == [("a", 1.2), None, None]
    lines = bounds.drafts_table(rows).splitlines()
    assert "| a, 1.20 |" in lines[2] and lines[4].startswith("| 1 | 2048 | none | none |")


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
    tokens = np.array([t.n_out for t in some])
    assert out["seconds"] == pytest.approx(plain.sum() / 4)
    for by in AVERAGES:
        of = lambda rung: bounds.speedup(by, tokens, plain, np.array([t[rung] for t in times]))
        best = lambda m: max((of(("fixed", m, k)), k) for k in (1, 2, 3))
        assert out[by] == {
            "L2": {m: {"k": best(m)[1], "speedup": best(m)[0]} for m in "ab"},
            "L4": {group: of(("greedy", group)) for group in ("a", "b", "all")},
            "L5": {m: of(("optimum", m)) for m in "ab"},
            "L6": of(("optimum", "all")),
            "L7": of("free drafters"),
            "L9": of("one pass"),
        }


def test_the_two_averages_differ_where_requests_do():
    """One request is never sped up, one is twice as fast."""
    n = np.array([100, 10])
    plain = np.array([100.0, 10.0])
    seconds = np.array([100.0, 5.0])
    assert bounds.speedup("total time", n, plain, seconds) == pytest.approx(110 / 105)
    assert bounds.speedup("mean rate", n, plain, seconds) == pytest.approx(1.5)


def test_censored_positions_are_counted():
    flags = lambda *where: np.isin(np.arange(7), where)
    t = trace_of(a=[3, 2, 1, 3, 2, 1], b=[1] * 6)
    other = trace_of(a=[1, 1], b=[2, 1])
    t.censored, other.censored = {"a": flags(0, 1, 4)}, {"b": flags(1)[:3]}
    share = bounds.ladder([t, other], CostTable(UNIT | {"draft": FREE}))["censored"]
    assert share == {"a": 2 / 8, "b": 1 / 8, "all": 3 / 8}
    t.censored["b"] = flags(1, 2)  # where one of the two is censored, the best of all is
    assert bounds.censored_share([t], ["a", "b"]) == 3 / 6


@pytest.mark.parametrize("share, mark", [(0.06, "*"), (0.05, "")])
def test_a_bound_of_censored_traces_is_marked(share, mark):
    def average(x, k):
        return {
            "L2": {"a": {"k": k, "speedup": x + 0.25}},
            "L4": {"a": 1.0, "all": 1.0},
            "L5": {"a": x + 0.5},
            "L6": x + 0.75,
            "L7": x + 1,
            "L9": x + 2,
        }

    cell = {
        "workload": "w",
        "batch": 1,
        "censored": {"a": share, "all": share},
        "total time": average(1, 2),
        "mean rate": average(3, 4),
    }
    text = bounds.table({"model_error": None, "speedup_error": None, "left_out": [], "cells": [cell]})
    row = (
        f"| w | 1 | all | 1.25 / 3.25, k 2 / 4 a | 1.00 / 1.00 | 1.50{mark} / 3.50{mark} a | "
        f"1.75{mark} / 3.75{mark} | 2.00{mark} / 4.00{mark} | 3.00 / 5.00 | {share:.0%} |"
    )
    assert row.replace("%", " %") in text
    assert ("only bounds rounds" in text) == bool(mark)


def test_drafters_without_a_price_and_ids_without_a_workload():
    some = [trace_of(a=[2, 1], b=[1, 1]), trace_of(a=[1, 1], b=[2, 1])]
    some[0].id, some[1].id = "one", "two"
    for priced, missing in (({"a": linear()}, ["b"]), (FREE, [])):
        result = bounds.analyse(some, UNIT | {"draft": priced})
        assert result["left_out"] == missing
        assert {c["workload"] for c in result["cells"]} == {"requests"}
        assert ("no price for it: b." in bounds.table(result)) == bool(missing)
    some[0].id, some[1].id = "x/one", "y/two"
    assert list(bounds.by_workload(some)) == ["x", "y"]
    with pytest.raises(ValueError, match="drafters x are not in the cost table: ngram, eagle3"):
        bounds.ladder([trace_of(x=[1, 1])], H100)
    assert rungs([Trace("t", 5, 1, {"ngram": np.ones(1, int)})], PUBLISHED)["L9"] == 1
