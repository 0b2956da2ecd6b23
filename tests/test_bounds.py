"""The analyser: its bounds against enumeration and explicit loops, and the statements that must hold of it (S1 to S21,
one test each; the missing ones were about formulas that it no longer has)."""
import itertools
import json
import os
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, toy_model, whole

from minispec import bounds
from minispec.bounds import AVERAGES, deepest, replay
from minispec.core.drafters import NGram, SmallLM
from minispec.core.engine import Engine, Lockstep
from minispec.core.requests import Request
from minispec.traces import CostTable, Trace, read_costs, read_traces, write_traces
from minispec.core.verify import greedy_tree

NO_PREFILL = {"prefill": {"kind": "linear"}}
UNIT = {"verify": {"kind": "linear", "base": 1.0}, **NO_PREFILL}                  # a step takes 1, whatever it holds


def linear(**coefficients):
    return {"kind": "linear", **coefficients}


# Llama-3.1-8B on one H100, the constants of the paper's simulator.
PUBLISHED = read_costs(os.path.join(ROOT, "results", "costs_h100.json"))
H100 = CostTable(PUBLISHED)


# -- the reference: one request after the other, by plans (lists of rounds) ------------------------------------------------

class Round(NamedTuple):
    """When `position` output tokens exist, drafter `name` (None: no drafter) proposes `proposed`; `emitted` are gained.
    `copies` tokens are judged next to the drafts. `bounds.replay` reads it as it reads a step of the engine."""
    position: int
    name: str | None
    proposed: int
    emitted: int
    copies: int = 0
    proposer = property(lambda self: self.name)
    drafted = property(lambda self: self.proposed)


def greedy(trace, names, k_max):
    """L4: at every position the drafter with the longest accept (the first of equals) proposes exactly what
    will be accepted, k_max tokens at most. As in the paper it is charged even where it proposes nothing. NOT
    a bound: see the module's docstring."""
    plan = []
    i = 1
    while i < trace.n_out:
        name = max(names, key=lambda m: trace.accept[m][i])
        emitted = min(int(trace.accept[name][i]), k_max + 1)
        plan.append(Round(i, name, emitted - 1, emitted))
        i += emitted
    return plan


def fixed(trace, name, k):
    """k drafts every round, or as many as the drafter has and the output has room for (one is left to the
    bonus)."""
    offered = trace.offered.get(name)
    plan = []
    i = 1
    while i < trace.n_out:
        room = min(k, trace.n_out - i - 1)
        proposed = room if offered is None else min(room, int(offered[i]))
        emitted = min(int(trace.accept[name][i]), proposed + 1)
        plan.append(Round(i, name if room else None, proposed, emitted))
        i += emitted
    return plan


def autoregressive(trace):
    """No drafts at all: the baseline."""
    return [Round(i, None, 0, 1) for i in range(1, trace.n_out)]


def one_pass(trace):
    """L9: the whole output known in advance and verified in one forward."""
    return [Round(1, None, trace.n_out - 2, trace.n_out - 1)] if trace.n_out > 1 else []


def time_of(plan, trace, cost, rows=1):
    """Seconds that a plan costs `rows` copies of the request in lock-step, prefill included (paper: T_step
    summed over steps)."""
    position = np.array([r.position for r in plan], int)
    proposed = np.array([r.proposed for r in plan], int)
    names = np.array([r.name for r in plan], object)
    kv = rows * (trace.prompt_len + position)

    # Every round is one forward of the target ..
    total = cost.prefill(trace.prompt_len, rows) + np.sum(cost.step(kv, rows * (1 + proposed), rows))

    # .. and a drafter is charged for its own rounds.
    for name in sorted(set(names) - {None}):
        own = names == name
        total += np.sum(cost.draft(name, kv[own], proposed[own], rows))
    return float(total)


def charges(trace, cost, names, rows, k_max):
    """What every possible round costs: (step, {name: step and drafting}), arrays (N, k_max + 1) of seconds
    by position and number of drafts."""
    kv = rows * (trace.prompt_len + np.arange(trace.n_out)[:, None])                     # (N, 1)
    drafts = np.arange(k_max + 1)                                                        # (K + 1,)
    step = cost.step(kv, rows * (1 + drafts), rows) + np.zeros((trace.n_out, k_max + 1))
    return step, {m: step + cost.draft(m, kv, drafts, rows) for m in names}


def best_plan(trace, step, charged):
    """L5 (one drafter), L6 (several), L7 (drafters that cost no more than `step`): the plan of least time, by
    dynamic programming from the end. step, charged: as `charges` returns them. Returns (seconds without
    prefill, plan).

    Every round may draft nothing, at no draft cost, or let any drafter propose 1 .. k_max tokens, also more
    than will be accepted: with a measured table that can be cheaper. Exact if what is accepted does not
    depend on where earlier rounds began.

        V[i] = min( step(0) + V[i + 1],
                    min over m, j of  step(j) + draft_m(j) + V[i + min(j + 1, accept_m[i])] )
    """
    n, names = trace.n_out, list(charged)
    drafts = np.arange(step.shape[1])
    accept = np.stack([trace.accept[m] for m in names], 1)                               # (N, M)

    # 1. Where every round would land, and what it costs: (N, M, K + 1).
    position = np.arange(n)[:, None, None]
    landing = position + np.minimum(drafts + 1, accept[..., None])
    times = np.stack(list(charged.values()), 1)
    times[..., 0] = step[:, :1]                          # no drafts, nobody is asked
    # A round of j drafts has room for j + 1 tokens, one of them the bonus.
    times = np.where((drafts > 0) & (position + drafts + 1 > n), np.inf, times)

    # 2. From the end, the best round at every position.
    value = np.zeros(n + 1)                              # least time from here on
    choice = np.zeros(n, int)
    for i in range(n - 1, 0, -1):
        options = (times[i] + value[landing[i]]).ravel()
        choice[i] = options.argmin()
        value[i] = options[choice[i]]

    # 3. From the first token on, follow the choices.
    plan = []
    i = 1
    while i < n:
        m, proposed = divmod(int(choice[i]), len(drafts))
        emitted = int(landing[i, m, proposed]) - i
        plan.append(Round(i, names[m] if proposed else None, proposed, emitted))
        i += emitted
    return value[1], plan


def optimum(trace, cost, names, rows=1, k_max=None):
    """The plan of least price for one request."""
    return best_plan(trace, *charges(trace, cost, names, rows, k_max or deepest([trace], names)))[1]


def rungs(*args, **more):
    """The rungs by total time."""
    return bounds.ladder(*args, **more)["total time"]


# -- traces and prices -----------------------------------------------------------------------------------------------------


def perfect(trace, name, k_max):
    """The trace of a drafter called `name` whose first k_max drafts are always accepted."""
    accept = np.minimum(k_max + 1, trace.n_out - np.arange(trace.n_out))
    return Trace(trace.id, trace.prompt_len, trace.n_out, {name: accept})


def recorded(steps):
    """The plan that an engine followed, from its step records."""
    return [Round(s.position, s.proposer if s.proposed else None, s.proposed, s.committed) for s in steps]


def wasted(plan):
    """Query tokens that gave nothing."""
    return sum(1 + r.proposed - r.emitted for r in plan)


def trace_of(prompt_len=10, **accept):
    """A trace from accept[1:], clipped to the end of the output."""
    n = len(next(iter(accept.values()))) + 1
    return Trace("t", prompt_len, n, {m: np.minimum([1, *a], np.maximum(1, n - np.arange(n))) for m, a in accept.items()})


def random_trace(rng, n, names=("a", "b"), high=6):
    return trace_of(rng.randrange(50), **{m: [rng.randint(1, high) if rng.random() < 0.7 else 1 for _ in range(n - 1)] for m in names})


def random_table(rng, names=("a", "b")):
    """Linear costs in which neither the target, the drafters, the cache nor the overhead is negligible."""
    u = lambda scale: scale * rng.random()
    draft = {m: linear(base=u(0.5), step=u(0.2), row=u(0.02), token=u(0.02), kv=u(1e-3), kv_step=u(1e-4)) for m in names}
    verify, overhead = linear(base=1.0, token=u(0.2), kv=u(2e-3)), linear(base=u(0.4), row=u(0.02))
    return {"verify": verify, "draft": draft, "overhead": overhead}


def noisy_grid(rng, tokens, kv):
    """A measured table as it comes: rising on the whole, but not at every point."""
    rows = [1, 4, 64]
    value = lambda b, n, c: (1 + 0.05 * b * n + 0.001 * b * c) * rng.uniform(0.7, 1.3)
    return {"kind": "grid", "rows": rows, "tokens": tokens, "kv": kv,
            "seconds": [[[value(b, n, c) for c in kv] for n in tokens] for b in rows]}


def loop_seconds(plan, prompt_len, table, rows):
    """What a plan costs, term by term, from the coefficients of a linear table: the slow reference of `price`."""
    get = lambda entry, name: entry.get(name, 0.0)
    verify, over = table["verify"], table.get("overhead", {})
    overhead = get(over, "base") + get(over, "row") * rows
    total = 0.0 if "prefill" in table else get(verify, "base") + get(verify, "token") * rows * prompt_len + overhead
    for position, name, j, *_ in plan:
        kv = sum(prompt_len + position for _ in range(rows))
        total += get(verify, "base") + get(verify, "token") * rows * (1 + j) + get(verify, "kv") * kv + overhead
        if name is not None:
            d = table["draft"][name]
            total += get(d, "base") + get(d, "row") * rows + get(d, "kv") * kv
            total += sum(get(d, "step") + get(d, "token") * rows + get(d, "kv_step") * kv for _ in range(j))
    return total


def all_plans(trace, names, k_max, position=1):
    """Every plan there is: nobody, or any drafter with any number of drafts, at every position."""
    if position >= trace.n_out:
        yield []
        return
    moves = [(None, 0, 1)] + [(m, j, min(j + 1, int(trace.accept[m][position])))
                              for m in names for j in range(1, min(k_max, trace.n_out - position - 1) + 1)]
    for name, j, emitted in moves:
        for rest in all_plans(trace, names, k_max, position + emitted):
            yield [Round(position, name, j, emitted), *rest]


# -- a toy engine and what its drafters would have got accepted at every position --------------------------------------------

TARGET = toy_model(seed=0)
DRAFT = toy_model(seed=0)
with torch.no_grad():
    for p, noise in zip(DRAFT.parameters(), toy_model(seed=9).parameters()):
        p.add_(0.4 * noise)
PROMPT = random.Random(6).choices(range(64), k=24)          # its output wanders, then repeats itself, twice
K, N = 5, 60
DRAFTERS = {"ngram": lambda: NGram(3, 1), "draft": lambda: whole(SmallLM(DRAFT, TARGET))}


def engine_run(name=None):
    planner = (lambda e: Lockstep(e, DRAFTERS[name](), K)) if name else Lockstep
    return Engine(TARGET, planner, 1).generate([Request(PROMPT, N)])[0]


def dense_trace(name, prompt, output, k_max):
    """By replay: k_max drafts at every position, judged by the engine's rule, of which one token is kept."""
    accept = [0]
    for i in range(1, len(output)):
        request = Request(prompt, len(output))
        request.tokens += output[:i]
        draft = DRAFTERS[name]().propose([request], [k_max])[0][0][:len(output) - i]
        path, _ = greedy_tree(draft, range(len(draft)), output[i:] + [-1])
        accept.append(min(len(path) + 1, len(output) - i))
    return np.array(accept)


@pytest.fixture(scope="module")
def live():
    with torch.inference_mode():
        output = engine_run().token_ids
        runs = {name: engine_run(name) for name in DRAFTERS}
        dense = Trace("live", len(PROMPT), N, {name: dense_trace(name, PROMPT, output, K) for name in DRAFTERS})
    assert all(a.max() > 2 and (a[1:-K] == 1).any() for a in dense.accept.values())           # neither perfect nor hopeless
    return SimpleNamespace(output=output, runs=runs, trace=dense)


# -- S1 to S21 -----------------------------------------------------------------------------------------------------------

def test_s01_nothing_accepted_means_no_speedup():
    """If no draft is ever accepted and drafting is free, the oracles L4 to L7 run at plain decoding's speed."""
    even = pytest.approx(1, rel=1e-12)
    t = trace_of(a=[1] * 30, b=[1] * 30)
    table = PUBLISHED | {"draft": {"a": linear(), "b": linear()}}
    for rows in (1, 16):
        out = rungs([t], CostTable(table), rows)
        assert out["L4"] == {"a": even, "b": even, "all": even} and out["L5"] == {"a": even, "b": even} and out["L6"] == out["L7"] == even
        paid = rungs([t], CostTable(table | {"draft": {"a": linear(base=1e-3), "b": linear()}}), rows)
        assert paid["L4"]["a"] < 0.999 and paid["L5"]["a"] == even            # control: greedy pays for drafts it does not make


def test_s02_rungs_are_ordered():
    """L5 >= L2, L5 >= L4, L6 >= each L5, L7 >= L6 and, where a step costs no more than its parts, L9 >= L7; on random traces, most of which break the reach order, with random costs and batch sizes. The greedy
    oracle is not among the bounds: some fixed k beats it somewhere."""
    rng, beaten = random.Random(0), 0
    for _ in range(24):
        some = [random_trace(rng, rng.randint(2, 25)) for _ in range(3)]
        table, rows = random_table(rng), rng.choice([1, 2, 16, 1000])
        out = rungs(some, CostTable(table), rows, k_max=rng.choice([None, 2]))
        slack = 1 + 1e-12
        alone = rungs(some[:1], CostTable(table), rows)
        for m in "ab":
            assert 1 / slack <= out["L5"][m] <= out["L6"] * slack
            assert out["L2"][m]["speedup"] <= out["L5"][m] * slack and out["L4"][m] <= out["L5"][m] * slack
            beaten += alone["L4"][m] < alone["L2"][m]["speedup"] / slack
        assert out["L4"]["all"] <= out["L6"] * slack and out["L6"] <= out["L7"] * slack and out["L7"] <= out["L9"] * slack
    assert beaten > 0


def test_s02_holds_with_a_noisy_measured_table():
    """The same for L2 to L7 with a grid that is not monotone: the optimum may then propose more than will be accepted."""
    rng, useless = random.Random(1), 0
    for _ in range(15):
        some = [random_trace(rng, rng.randint(5, 25)) for _ in range(2)]
        grid = lambda: noisy_grid(rng, [1, 2, 3, 5, 9], [0, 40, 100])
        cost = CostTable({"verify": grid(), "draft": {"a": grid(), "b": grid()}})
        rows = rng.choice([1, 3, 16])
        out = rungs(some, cost, rows)
        for m in "ab":
            rising = [out["L2"][m]["speedup"], out["L5"][m], out["L6"], out["L7"]]
            assert all(a <= b + 1e-12 for a, b in zip(rising, rising[1:]))
        useless += wasted(optimum(some[0], cost, "ab", rows))
    assert useless > 0


def test_s03_greedy_is_not_a_bound():
    """The smallest counter-example, at one unit a step: greedy jumps 1 -> 5 -> 6 -> 7 in 3 steps, fixed k = 2 goes
    1 -> 4 -> 7 in 2, and so does the optimum."""
    t, cost = trace_of(a=[4, 1, 1, 3, 1, 1]), CostTable(UNIT | {"draft": {"a": linear()}})
    assert t.n_out == 7
    ends = lambda plan: [r.position for r in plan] + [plan[-1].position + plan[-1].emitted]
    assert ends(greedy(t, ["a"], 99)) == [1, 5, 6, 7] and time_of(greedy(t, ["a"], 99), t, cost) == 3
    assert ends(fixed(t, "a", 2)) == [1, 4, 7] and time_of(fixed(t, "a", 2), t, cost) == 2
    assert ends(optimum(t, cost, ["a"])) == [1, 4, 7] and time_of(optimum(t, cost, ["a"]), t, cost) == 2


def test_s04_greedy_is_optimal_when_reach_never_shrinks():
    """If i + accept[i] never decreases and every step costs the same, the longest jump is the best one. Without the
    first condition it is not (control)."""
    rng, cost = random.Random(2), CostTable(UNIT | {"overhead": linear(base=0.3), "draft": {"a": linear()}})
    worse = 0
    for _ in range(60):
        n = rng.randint(2, 40)
        any_ = random_trace(rng, n, ("a",), high=9)
        reach = np.minimum(np.maximum.accumulate(np.arange(n) + any_.accept["a"]), n)
        ordered = Trace("t", 0, n, {"a": np.maximum(reach - np.arange(n), 1)})
        assert len(optimum(ordered, cost, ["a"])) == len(greedy(ordered, ["a"], 99))
        worse += len(optimum(any_, cost, ["a"])) < len(greedy(any_, ["a"], 99))
    assert worse > 0


@pytest.mark.parametrize("k", [1, 3, 7])
def test_s05_perfect_drafter_has_a_closed_form(k):
    """All drafts accepted, fixed k, costs without context: k + 1 tokens a round exactly if k + 1 divides N - 1, and then
    S = (k + 1) (t_1 + o) / (t_(k+1) + d_k + o)."""
    draft = {"a": linear(base=0.2, step=0.05)}
    cost = CostTable({"verify": linear(base=1.0, token=0.07), "draft": draft, "overhead": linear(base=0.3), **NO_PREFILL})
    for n in range(2, 4 * (k + 1) + 2):
        t = perfect(Trace("t", 5, n, {}), "a", k)
        plan = fixed(t, "a", k)
        per_round = sum(r.emitted for r in plan) / len(plan)
        assert (per_round == k + 1) == ((n - 1) % (k + 1) == 0)
        if per_round == k + 1:
            want = (k + 1) * (1.07 + 0.3) / (1 + 0.07 * (k + 1) + 0.2 + 0.05 * k + 0.3)
            assert time_of(autoregressive(t), t, cost) / time_of(plan, t, cost) == pytest.approx(want, rel=1e-12)


def test_s09_tokens_are_conserved(live):
    """Emitted tokens sum to what follows the prefill; query tokens are the emitted ones plus the rejected ones; where
    verifying more costs more, the optimum has nothing rejected."""
    t, cost = live.trace, CostTable(random_table(random.Random(4), DRAFTERS))
    plans = [autoregressive(t), fixed(t, "ngram", 4), greedy(t, ["ngram", "draft"], 99), one_pass(t), optimum(t, cost, DRAFTERS)]
    plans += [recorded(run.steps) for run in live.runs.values()]
    for plan in plans:
        assert sum(r.emitted for r in plan) == N - 1
        assert len(plan) + sum(r.proposed for r in plan) == N - 1 + wasted(plan)
        assert all(r.position + r.emitted == after.position for r, after in zip(plan, plan[1:]))
    assert [wasted(plans[i]) for i in (0, 2, 3, 4)] == [0] * 4 and wasted(plans[1]) > 0


def test_s12_the_index_of_a_trace(live):
    """What is accepted at a position is what the engine accepted in each of its rounds; entry 0 is never used, and shifting by one
    would not fit."""
    for name, run in live.runs.items():
        assert run.token_ids == live.output and len(run.steps) > 10
        for s in run.steps:
            assert s.committed == min(live.trace.accept[name][s.position], s.proposed + 1, N - s.position)
    ruined = Trace("t", 10, N, {m: np.concatenate([[99], a[1:]]) for m, a in live.trace.accept.items()})
    cost = CostTable(random_table(random.Random(7), DRAFTERS))
    for plan in (lambda t: fixed(t, "draft", 3), lambda t: greedy(t, DRAFTERS, 99), lambda t: optimum(t, cost, DRAFTERS)):
        assert plan(ruined) == plan(live.trace)
    shifted = Trace("t", 10, N, {"draft": np.minimum(np.concatenate([[0, 1], live.trace.accept["draft"][1:-1]]), N - np.arange(N))})
    assert fixed(shifted, "draft", 3) != fixed(live.trace, "draft", 3)          # control: another index would show


def test_s13_limits_of_a_large_batch():
    """With B going to infinity the gain of fixed k tends to tau (c_q + c_kv c) / (c_q (k + 1) + c_kv c + draft per row), which may
    be a loss; the optimum, which need not draft, never loses."""
    verify, context, k = {"base": 5e-3, "token": 2e-5, "kv": 4e-8}, 600, 3
    cost = CostTable({"verify": linear(**verify), "draft": {"a": linear(base=2e-3, token=1e-6, row=3e-6)}, "overhead": linear(base=1e-3)})
    for alpha in (0.1, 0.6, 1.0):
        tau = sum(alpha ** j for j in range(k + 1))
        limit = tau * (2e-5 + 4e-8 * context) / (2e-5 * (k + 1) + 4e-8 * context + k * 1e-6 + 3e-6)
        rows = 10**9
        kv = rows * context
        spent = cost.step(kv, rows * (k + 1), rows) + cost.draft("a", kv, k, rows)
        assert tau * cost.step(kv, rows, rows) / spent == pytest.approx(limit, rel=1e-5)
    t = random_trace(random.Random(8), 60, ("a",), high=4)
    for rows in (1, 10, 1000, 10**6):
        plain = time_of(autoregressive(t), t, cost, rows)
        assert plain >= time_of(optimum(t, cost, ["a"], rows), t, cost, rows)
    assert plain < time_of(fixed(t, "a", 5), t, cost, rows)


def test_s14_long_contexts_make_verification_free():
    """Verifying k + 1 tokens takes as long as one when the context is long enough, at any fixed batch; for a large batch
    the ratio is 1 + k / (1 + c / S0). Figures of an H100 with an 8B model."""
    ratio = lambda k, context, rows: H100.verify(rows * context, rows * (k + 1), rows) / H100.verify(rows * context, rows, rows)
    s0 = PUBLISHED["verify"]["token"] / PUBLISHED["verify"]["kv"]
    assert round(s0) == 535
    for rows in (1, 64, 4096):
        assert ratio(3, 10**9, rows) == pytest.approx(1, abs=1e-5)
    for context in (100, 5000):
        assert ratio(3, context, 10**9) == pytest.approx(1 + 3 / (1 + context / s0), rel=1e-6)
    table = {128: (1.73, 1.28, 1.05), 512: (2.21, 1.33, 1.05)}
    assert {rows: tuple(round(float(ratio(3, c, rows)), 2) for c in (500, 4000, 32000)) for rows in table} == table


def test_s16_observed_stays_below_the_optimum(live):
    """A live run's rounds, priced by the model (L1), never beat the optimum (L5) on the same output; timed by a clock
    that is off by up to e at every step, they beat it by no more than that error. Timing a different, luckier run would
    break it (control)."""
    rng, e = random.Random(10), 0.05
    for rows, (name, run) in itertools.product((1, 8), live.runs.items()):
        table = random_table(rng, DRAFTERS)
        cost, t = CostTable(table), live.trace
        bound, plan = time_of(optimum(t, cost, [name], rows), t, cost, rows), recorded(run.steps)
        assert sum(r.emitted for r in plan) == N - 1
        assert bound <= time_of(plan, t, cost, rows) * (1 + 1e-12)
        clock = sum(time_of([r], t, CostTable(table | NO_PREFILL), rows) * (1 + rng.uniform(-e, e)) for r in plan)
        assert bound <= (clock + cost.prefill(len(PROMPT), rows)) / (1 - e)
    cost = CostTable(UNIT | {"draft": {"draft": linear()}})
    lucky = fixed(perfect(t, "draft", K), "draft", K)
    assert time_of(lucky, t, cost) < time_of(optimum(t, cost, ["draft"]), t, cost)


def test_s17_closed_form_equals_explicit_loop(tmp_path):
    """From files: identical rows cost what a loop over steps and rows adds up, and plain decoding what its closed form
    (section 2.3 of the notes: arithmetic series over the context) says, to 1e-9."""
    rng = random.Random(11)
    for rows, n in itertools.product((1, 5, 32), (1, 2, 90)):
        t, table = random_trace(rng, n, high=9), random_table(rng)
        write_traces(tmp_path / "t.jsonl", [t])
        (tmp_path / "c.json").write_text(json.dumps(table))
        t, cost = read_traces(tmp_path / "t.jsonl")[0], CostTable(read_costs(tmp_path / "c.json"))
        for plan in (autoregressive(t), fixed(t, "a", 3), greedy(t, "ab", 99), optimum(t, cost, "ab", rows), one_pass(t)):
            assert time_of(plan, t, cost, rows) == pytest.approx(loop_seconds(plan, t.prompt_len, table, rows), rel=1e-9)
        c0, cq, ckv = (table["verify"][name] for name in ("base", "token", "kv"))
        o, steps, p = table["overhead"]["base"] + table["overhead"]["row"] * rows, n - 1, t.prompt_len
        closed = (c0 + cq * rows * p + o) + steps * (c0 + o + cq * rows) + ckv * rows * (steps * (p + 1) + steps * (steps - 1) / 2)
        assert time_of(autoregressive(t), t, cost, rows) == pytest.approx(closed, rel=1e-9)


def test_s18_more_drafters_never_hurt():
    """All drafters together equal the only one; a second one that accepts less and costs more, or the same one twice,
    changes nothing; a better one helps (control)."""
    rng = random.Random(12)
    for _ in range(20):
        t, table = random_trace(rng, 25, ("a", "b")), random_table(rng, ("a",))
        t.accept["b"] = np.minimum(t.accept["a"], t.accept["b"])
        dear = {name: value + 0.01 for name, value in table["draft"]["a"].items() if name != "kind"}
        with_b = lambda entry: CostTable(table | {"draft": {"a": table["draft"]["a"], "b": entry}})
        alone = optimum(t, CostTable(table), ["a"])
        assert optimum(t, with_b(linear(**dear)), ["a", "b"]) == alone
        t.accept["b"] = t.accept["a"]
        assert optimum(t, with_b(table["draft"]["a"]), ["a", "b"]) == alone
        helped = optimum(t, with_b(linear()), ["a", "b"])
        assert time_of(helped, t, with_b(linear())) < time_of(alone, t, CostTable(table)) or len(alone) == 24
    assert greedy(t, ["a"], 99) == greedy(t, ["a", "b"], 99)


def test_s20_drafting_does_not_change_greedy_output(live):
    """Greedy decoding with and without drafting gives the same tokens, one by one (fp32, toy models)."""
    assert len(set(live.output)) > 10                                           # the toy wanders, so equality means something
    for name, run in live.runs.items():
        assert run.token_ids == live.output and any(s.accepted for s in run.steps) and any(s.accepted < s.proposed for s in run.steps)


def test_s21_results_keep_full_precision():
    """What the ladder returns survives JSON unchanged and is nowhere rounded; formatting is for printing only."""
    rng = random.Random(13)
    t, cost = random_trace(rng, 30), CostTable(random_table(rng))
    out = bounds.ladder([t], cost, 4)
    assert json.loads(json.dumps(out)) == out
    out = out["mean rate"]
    assert {"L2", "L4", "L5", "L6", "L7", "L9"} <= set(out)                    # L0 and L1 are of those who observed
    leaves = lambda x: [y for v in x.values() for y in leaves(v)] if isinstance(x, dict) else [x]
    speedups = [x for rung in ("L2", "L5", "L6", "L7", "L9") for x in leaves({"": out[rung]}) if isinstance(x, float)]
    assert len(speedups) > 6 and all(x != round(x, 9) for x in speedups)


# -- the dynamic program, the paper's own rules, batches, choices -----------------------------------------------------------

def test_optimum_equals_enumeration():
    """Of all plans there are, none is cheaper; the price is found by a loop that shares no code with the program."""
    rng = random.Random(14)
    for _ in range(12):
        t, table, rows = random_trace(rng, 6, high=4), random_table(rng), rng.choice([1, 6])
        for names in (["a"], ["a", "b"]):
            want = min(loop_seconds(plan, t.prompt_len, table, rows) for plan in all_plans(t, names, 2))
            assert time_of(optimum(t, CostTable(table), names, rows, 2), t, CostTable(table), rows) == pytest.approx(want, rel=1e-12)


def as_published(trace, names):
    """The oracle of the paper's simulator, defects included: it reads accept[i - 1], charges every round of a neural drafter,
    and with several names prices all rounds as drafter "ngram"."""
    i, plan = 1, []
    while i < trace.n_out:
        accept = max(int(trace.accept[m][i - 1]) for m in names) if i > 1 else 1          # theirs has a dummy 1 in entry 0
        if len(names) > 1:
            charged = "ngram"
        elif names == ["ngram"] and accept == 1:
            charged = None                       # a lookup that found nothing is free
        else:
            charged = names[0]
        plan.append(Round(i, charged, accept - 1, accept))
        i += accept
    return plan


def simulator(trace, names, rows):
    """The paper's simulator, written out: one loop, its index, its prices."""
    v, d, o = PUBLISHED["verify"], {"kv": 2.37768493e-9, "k": 8.41429603e-7, "base": 2.13526175e-3}, PUBLISHED["overhead"]["base"]
    verify = lambda kv, queries: kv * v["kv"] + queries * v["token"] + v["base"]
    total, cur = verify(0, rows * trace.prompt_len) + o, 1
    while cur < trace.n_out:
        length = max(trace.accept[m][cur - 1] for m in names) if cur > 1 else 1           # its dummy entry 0
        kv = rows * (trace.prompt_len + cur)
        t = verify(kv, rows * length)
        share = 0 if list(names) == ["ngram"] and length == 1 else 0.005875 * t
        total += t + o + (d["kv"] * kv + d["k"] * length + d["base"] if list(names) == ["eagle3"] else share)
        cur += length
    return total


@pytest.mark.parametrize("names", [["eagle3"], ["ngram"], ["ngram", "eagle3"]])
def test_as_published_follows_the_papers_simulator(names):
    rng = random.Random(15)
    some = [random_trace(rng, 60, ("ngram", "eagle3"), high=8) for _ in range(5)]
    for rows in (1, 64):
        times = [time_of(as_published(t, names), t, H100, rows) for t in some]
        assert times == pytest.approx([simulator(t, names, rows) for t in some], rel=1e-9)


def test_as_published_differs_where_the_paper_errs():
    """Index shift: the prefill's dummy entry is a round. Combined mode: everything is priced as a lookup. A lookup that
    finds nothing is free."""
    t = trace_of(ngram=[1, 1, 1, 1], eagle3=[4, 3, 2, 1])
    assert [r.position for r in as_published(t, ["eagle3"])] == [1, 2] and [r.position for r in greedy(t, ["eagle3"], 99)] == [1]
    assert {r.name for r in as_published(t, ["eagle3", "ngram"])} == {"ngram"} and greedy(t, ["ngram", "eagle3"], 99)[0].name == "eagle3"
    assert [r.name for r in as_published(t, ["ngram"])] == [None] * 4


def published_file(rng, n):
    """Requests in the simulator's own format: acc_len[0] is the prefill's token, acc_len[i] belongs to i output tokens, and may run past the end."""
    out = []
    for i in range(n):
        length = rng.randint(20, 120)
        lengths = lambda high: {"acc_len": [1, *(rng.randint(1, high) if rng.random() < 0.7 else 1 for _ in range(length - 1))]}
        out.append({"id": str(i), "prompt_token_ids": [7] * rng.randint(50, 900), "generated_token_ids": [8] * length,
                    "acc_eagle": lengths(6), "acc_ngram": lengths(21)})
    return out


@pytest.mark.parametrize("rows", [1, 32, 128])
def test_the_published_simulators_figures_come_out_of_our_greedy_rung(rows):
    """Its file, read one position early as it does: its speed-up is L4 by mean rate, to the last digit that it prints and beyond; by total time the
    figure is another one. With the right position the optimum is above both, and above the greedy rung."""
    rng = random.Random(23)
    early, right = [], []
    for row in published_file(rng, 12):
        p, n, acc = len(row["prompt_token_ids"]), len(row["generated_token_ids"]), row["acc_eagle"]["acc_len"]
        clip = lambda values: [min(a, n - i) for i, a in enumerate(values)]
        early.append(Trace(row["id"], p, n, {"eagle3": np.array(clip([1, *acc[:-1]]))}))
        right.append(Trace(row["id"], p, n, {"eagle3": np.array(clip(acc))}))
    plain = [time_of(autoregressive(t), t, H100, rows) for t in early]
    oracle = [simulator(Trace(t.id, t.prompt_len, t.n_out, {"eagle3": np.minimum([*t.accept["eagle3"][1:], 1], t.n_out - np.arange(t.n_out))}), ["eagle3"], rows)
              for t in early]
    mean = lambda times: np.mean([rows * t.n_out / seconds for t, seconds in zip(early, times)])
    out = bounds.ladder(early, H100, rows)
    assert out["mean rate"]["L4"]["eagle3"] == pytest.approx(mean(oracle) / mean(plain), rel=1e-9)
    assert out["total time"]["L4"]["eagle3"] == pytest.approx(sum(plain) / sum(oracle), rel=1e-9)
    assert out["total time"]["L4"]["eagle3"] != pytest.approx(out["mean rate"]["L4"]["eagle3"], rel=1e-4)
    corrected = bounds.ladder(right, H100, rows)
    for by in AVERAGES:
        assert corrected[by]["L5"]["eagle3"] >= corrected[by]["L4"]["eagle3"] and corrected[by]["L5"]["eagle3"] > out[by]["L4"]["eagle3"]


def test_a_batch_of_different_requests_stays_above_the_bound():
    """With linear costs, 1/B of the lock-step optimum, summed over requests, bounds the time of any batch of at most B
    rows: here continuous batching in which every request follows its own best or some fixed plan."""
    rng = random.Random(16)
    for _ in range(10):
        some, table, size = [random_trace(rng, rng.randint(2, 30), ("a",)) for _ in range(9)], random_table(rng, ("a",)) | NO_PREFILL, 4
        cost = CostTable(table)
        bound = sum(time_of(optimum(t, cost, ["a"], size), t, cost, size) for t in some) / size
        waiting = [(t, optimum(t, cost, ["a"], size) if rng.random() < 0.7 else fixed(t, "a", 2)) for t in some]
        active, total = [], 0.0
        while waiting or active:
            while waiting and len(active) < size:
                t, plan = waiting.pop(0)
                active.append((t, list(plan)))
            now = [(t, plan.pop(0)) for t, plan in active]
            kv = sum(t.prompt_len + r.position for t, r in now)
            total += cost.step(kv, sum(1 + r.proposed for _, r in now), len(now))
            busy = [(t, r) for t, r in now if r.name]
            if busy:
                total += cost.draft("a", sum(t.prompt_len + r.position for t, r in busy), max(r.proposed for _, r in busy), len(busy))
            active = [(t, plan) for t, plan in active if plan]
        assert bound <= total


def test_two_drafters_judged_in_one_round_are_no_faster_than_the_optimum_of_all():
    """Who knows what will be accepted needs only the drafter that gets furthest: the other one's rows are in vain."""
    rng = random.Random(3)
    for _ in range(20):
        t, cost = random_trace(rng, rng.randint(2, 30), ("a", "b")), CostTable(random_table(rng, ("a", "b")) | NO_PREFILL)
        plan, i = [], 1
        while i < t.n_out:
            room = t.n_out - i - 1
            j = rng.randint(0, min(room, 4))
            copies = rng.randint(0, min(room - j, 4))
            gain = max(min(j + 1, int(t.accept["a"][i])), min(copies + 1, int(t.accept["b"][i])))
            plan.append(Round(i, "a" if j else None, j, gain, copies))
            i += gain
        merged = replay([plan], [t.prompt_len], cost, 1)
        assert merged >= time_of(optimum(t, cost, ["a", "b"], 1), t, cost, 1) - 1e-9
        if any(r.copies for r in plan):                       # copies are rows of the verification
            assert merged > replay([[r._replace(copies=0) for r in plan]], [t.prompt_len], cost, 1)


def test_fixed_k_knows_when_a_lookup_finds_nothing():
    """Where the drafter had nothing to offer, a round verifies one token; the lookup is charged all the same."""
    t = trace_of(a=[1, 3, 1, 1, 1, 1])
    t.offered["a"] = np.array([0, 0, 5, 0, 1, 2, 9])
    assert [r[:4] for r in fixed(t, "a", 4)] == [(1, "a", 0, 1), (2, "a", 4, 3), (5, "a", 1, 1), (6, None, 0, 1)]


@pytest.mark.parametrize("grid", [False, True])
def test_a_price_of_one_point_is_paid_every_round(grid):
    """A table measured at one k and one context is a natural one; 3 ms a round are 3 ms a round."""
    t = Trace("w/0", 100, 101, {"mtp": np.minimum(3, 101 - np.arange(101))})
    point = {"kind": "grid", "rows": [1, 16], "tokens": [3], "kv": [512], "seconds": [[[3e-3]], [[3e-3]]]}
    cost = CostTable({"verify": linear(base=6e-3, token=2e-5), "draft": {"mtp": point if grid else linear(base=3e-3)}, **NO_PREFILL})
    plan = fixed(t, "mtp", 2)
    assert len(plan) == 34 and plan[-1].name is None                           # the last round has no room
    assert time_of(plan, t, cost) == pytest.approx(33 * 9.06e-3 + 6.02e-3) == replay([plan], [t.prompt_len], cost, 1)
    out = rungs([t], cost)
    want = 100 * 6.02e-3 / (33 * 9.06e-3 + 6.02e-3)                            # the last token needs no drafts
    assert [out["L2"]["mtp"]["speedup"], out["L5"]["mtp"], out["L6"]] == pytest.approx([want] * 3, rel=1e-9)
    one = CostTable({"verify": {"kind": "grid", "rows": [1], "tokens": [1], "kv": [64], "seconds": [[[1.0]]]}, **NO_PREFILL})
    assert time_of(autoregressive(t), t, one) == 100


def test_every_rung_is_what_its_plans_take():
    """All requests at once give what plans give one by one, by both averages: with outputs of different lengths, lookups that find less than
    they are asked for, and prices that are not monotone."""
    rng = random.Random(21)
    for k_max, rows in ((1, 1), (3, 4), (7, 16)):
        some = [random_trace(rng, n) for n in (17, 1, 2, 40, 3, 40)]
        for t in some[3:]:
            t.offered["a"] = np.array([rng.randint(accept - 1, 9) for accept in t.accept["a"]])
        grid = lambda: noisy_grid(rng, [1, 2, 3, 5, 9], [0, 40, 100])
        cost = CostTable({"verify": grid(), "draft": {"a": grid(), "b": grid()}})
        free = CostTable({"verify": cost.table["verify"], "draft": {"a": linear(), "b": linear()}})
        groups = {"a": "a", "b": "b", "all": "ab"}
        plans = {("L2", m, k): [fixed(t, m, k) for t in some] for m in "ab" for k in range(1, k_max + 1)}
        plans |= {("L4", g): [greedy(t, names, k_max) for t in some] for g, names in groups.items()}
        plans |= {("L5", g): [optimum(t, cost, names, rows, k_max) for t in some] for g, names in groups.items()}
        plans |= {"plain": [autoregressive(t) for t in some], "L9": [one_pass(t) for t in some]}
        want = {rung: [time_of(plan, t, cost, rows) for plan, t in zip(own, some)] for rung, own in plans.items()}
        want["L7"] = [time_of(optimum(t, free, "ab", rows, k_max), t, free, rows) for t in some]
        got = bounds.rung_seconds(some, cost, ["a", "b"], rows, k_max)
        assert set(got) == set(want)
        for rung in want:
            assert got[rung].tolist() == pytest.approx(want[rung], rel=1e-9), rung
        out = bounds.ladder(some, cost, rows, k_max)
        plain, best, n = (np.array(x) for x in (want["plain"], want["L5", "all"], [t.n_out for t in some]))
        assert out["total time"]["L6"] == pytest.approx(plain.sum() / best.sum()) and out["seconds"] == pytest.approx(plain.sum() / rows)
        assert out["mean rate"]["L6"] == pytest.approx((n / best).mean() / (n / plain).mean())
        for by in AVERAGES:
            for m in "ab":
                speedups = [bounds.speedup(by, n, plain, np.array(want["L2", m, k])) for k in range(1, k_max + 1)]
                assert out[by]["L2"][m] == {"k": 1 + int(np.argmax(speedups)), "speedup": pytest.approx(max(speedups))}


def test_the_two_averages_differ_where_requests_do():
    """A request that is never sped up and one that is twice as fast: by total time the long one counts, by mean rate the fast one."""
    n, plain, seconds = np.array([100, 10]), np.array([100.0, 10.0]), np.array([100.0, 5.0])
    assert bounds.speedup("total time", n, plain, seconds) == pytest.approx(110 / 105)
    assert bounds.speedup("mean rate", n, plain, seconds) == pytest.approx(1.5)


def test_the_optimum_takes_what_its_plan_takes():
    rng = random.Random(22)
    cost = CostTable(random_table(rng))
    for t in [random_trace(rng, n) for n in (1, 2, 30, 7, 30)]:
        seconds, plan = best_plan(t, *charges(t, cost, "ab", 2, 4))
        assert seconds == pytest.approx(time_of(plan, t, cost, 2) - cost.prefill(t.prompt_len, 2), rel=1e-9, abs=1e-12)


def test_censored_positions_are_counted():
    t = trace_of(a=[3, 2, 1, 3, 2, 1], b=[1] * 6)
    t.censored = {"a": np.array([True, True, False, False, True, False, False])}
    other = trace_of(a=[1, 1], b=[2, 1])
    other.censored = {"b": np.array([False, True, False])}
    share = bounds.ladder([t, other], CostTable(UNIT | {"draft": {"a": linear(), "b": linear()}}))["censored"]
    assert share == {"a": 2 / 8, "b": 1 / 8, "all": 3 / 8}
    t.censored["b"] = np.array([False, True, True, False, False, False, False])          # where one of the two is censored, the best of all is
    assert bounds.censored_share([t], ["a", "b"]) == 3 / 6


def test_a_bound_of_censored_traces_is_marked():
    rungs = lambda x, k: {"L2": {"a": {"k": k, "speedup": x + 0.25}}, "L4": {"a": 1.0, "all": 1.0}, "L5": {"a": x + 0.5}, "L6": x + 0.75, "L7": x + 1, "L9": x + 2}
    text = lambda share: bounds.table({
        "model_error": None, "speedup_error": None, "left_out": [],
        "cells": [{"workload": "w", "batch": 1, "censored": {"a": share, "all": share}, "total time": rungs(1, 2), "mean rate": rungs(3, 4)}]})
    assert "| w | 1 | all | 1.25 / 3.25, k 2 / 4 a | 1.00 / 1.00 | 1.50* / 3.50* a | 1.75* / 3.75* | 2.00* / 4.00* | 3.00 / 5.00 | 6 % |" in text(0.06) and "only bounds rounds" in text(0.06)
    assert "| w | 1 | all | 1.25 / 3.25, k 2 / 4 a | 1.00 / 1.00 | 1.50 / 3.50 a | 1.75 / 3.75 | 2.00 / 4.00 | 3.00 / 5.00 | 5 % |" in text(0.05) and "only bounds rounds" not in text(0.05)
    assert "All speed-ups are total time / mean rate." in text(0.05)


def test_what_is_left_out_is_said():
    """A drafter without a price, and ids without a workload."""
    some = [trace_of(a=[2, 1], b=[1, 1]), trace_of(a=[1, 1], b=[2, 1])]
    some[0].id, some[1].id = "one", "two"
    result = bounds.analyse(some, UNIT | {"draft": {"a": linear()}})
    assert result["left_out"] == ["b"] and {c["workload"] for c in result["cells"]} == {"requests"}
    assert "no price for it: b." in bounds.table(result)
    both = bounds.analyse(some, UNIT | {"draft": {"a": linear(), "b": linear()}})
    assert both["left_out"] == [] and "Left out" not in bounds.table(both)
    some[0].id, some[1].id = "x/one", "y/two"
    assert list(bounds.by_workload(some)) == ["x", "y"]


def test_model_of_an_h100_by_batch():
    """Step time and ceiling at context 600 and k = 3, as the paper's constants give them."""
    want = {1: (7.14, 3.06), 32: (8.52, 2.68), 64: (9.95, 2.45), 128: (12.80, 2.21), 512: (29.91, 1.84)}
    for rows, (ms, ceiling) in want.items():
        assert float(H100.step(600 * rows, rows, rows)) * 1e3 == pytest.approx(ms, abs=0.006)
        spent = H100.step(600 * rows, 4 * rows, rows) + H100.draft("eagle3", 600 * rows, 3, rows)
        assert 4 * H100.step(600 * rows, rows, rows) / spent == pytest.approx(ceiling, abs=0.006)


def test_ladder_names_a_missing_drafter():
    with pytest.raises(ValueError, match="drafters x are not in the cost table: ngram, eagle3"):
        bounds.ladder([trace_of(x=[1, 1])], H100)
    one_token = Trace("t", 5, 1, {"ngram": np.ones(1, int)})
    assert rungs([one_token], H100)["L9"] == 1


def test_no_torch():
    """The analyzer works on numbers alone: it imports where there is no torch, and nothing but numpy is loaded for it."""
    code = ("import sys; sys.path.insert(0, sys.argv[1]); sys.modules['torch'] = None; before = set(sys.modules); import minispec.bounds; "
            "print({m.split('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names)")
    r = subprocess.run([sys.executable, "-I", "-c", code, ROOT], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert r.returncode == 0, r.stderr
    assert eval(r.stdout) == {"minispec", "numpy", "tqdm"}
