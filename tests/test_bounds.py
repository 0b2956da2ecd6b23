"""The analyzer: its bounds against enumeration and explicit loops, and the 21 statements that must
hold of it (S1 to S21, one test each). Statistical tests say how often they would fail by chance."""
import itertools
import json
import math
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, toy_model

from minispec import bounds
from minispec.data import traces
from minispec.bounds import (as_published, autoregressive, fixed, greedy, observed_rounds, one_pass, optimum, perfect,
                             price)
from minispec.core.drafters import NGram, SmallLM
from minispec.core.engine import Engine, Lockstep, Request
from minispec.data.traces import PUBLISHED, CostTable, Trace, ngram_trace, read_traces, write_traces
from minispec.core.verify import greedy_chain

NO_PREFILL = {"prefill": {"kind": "linear"}}
UNIT = {"verify": {"kind": "linear", "base": 1.0}, **NO_PREFILL}                  # a step takes 1, whatever it holds
H100 = CostTable(PUBLISHED)


def linear(**coefficients):
    return {"kind": "linear", **coefficients}


def trace_of(prompt_len=10, **accept):
    """A trace from accept[1:], clipped to the end of the output."""
    n = len(next(iter(accept.values()))) + 1
    return Trace("t", prompt_len, n, {m: np.minimum([1, *a], np.maximum(1, n - np.arange(n))) for m, a in accept.items()})


def random_trace(rng, n, names=("a", "b"), high=6):
    return trace_of(rng.randrange(50), **{m: [rng.randint(1, high) if rng.random() < 0.7 else 1 for _ in range(n - 1)] for m in names})


def random_table(rng, names=("a", "b"), switch=0.0):
    """Linear costs in which neither the target, the drafters, the cache nor the overhead is negligible."""
    u = lambda scale: scale * rng.random()
    draft = {m: linear(base=u(0.5), step=u(0.2), row=u(0.02), token=u(0.02), kv=u(1e-3), kv_step=u(1e-4)) for m in names}
    verify, overhead = linear(base=1.0, token=u(0.2), kv=u(2e-3)), linear(base=u(0.4), row=u(0.02))
    return {"verify": verify, "draft": draft, "overhead": overhead, "switch": switch}


def noisy_grid(rng, tokens, kv):
    """A measured table as it comes: rising on the whole, but not at every point."""
    rows = [1, 4, 64]
    value = lambda b, n, c: (1 + 0.05 * b * n + 0.001 * b * c) * rng.uniform(0.7, 1.3)
    return {"kind": "grid", "rows": rows, "tokens": tokens, "kv": kv,
            "seconds": [[[value(b, n, c) for c in kv] for n in tokens] for b in rows]}


def loop_seconds(plan, prompt_len, table, rows):
    """What a plan costs, term by term, from the coefficients of a linear table: the slow reference of `price`."""
    get = lambda entry, name: entry.get(name, 0.0)
    verify, over, last = table["verify"], table.get("overhead", {}), None
    overhead = get(over, "base") + get(over, "row") * rows
    total = 0.0 if "prefill" in table else get(verify, "base") + get(verify, "token") * rows * prompt_len + overhead
    for position, name, j, _ in plan:
        kv = sum(prompt_len + position for _ in range(rows))
        total += get(verify, "base") + get(verify, "token") * rows * (1 + j) + get(verify, "kv") * kv + overhead
        if name is not None:
            d = table["draft"][name]
            total += get(d, "base") + get(d, "row") * rows + get(d, "kv") * kv
            total += sum(get(d, "step") + get(d, "token") * rows + get(d, "kv_step") * kv for _ in range(j))
            total += table.get("switch", 0.0) if last not in (None, name) else 0.0
            last = name
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
            yield [bounds.Round(position, name, j, emitted), *rest]


def time_of(plan, trace, cost, rows=1):
    return price(plan, trace, cost, rows).time


# -- a toy engine and what its drafters would have got accepted at every position --------------------------------------------

TARGET = toy_model(seed=0)
DRAFT = toy_model(seed=0)
with torch.no_grad():
    for p, noise in zip(DRAFT.parameters(), toy_model(seed=9).parameters()):
        p.add_(0.4 * noise)
PROMPT = random.Random(6).choices(range(64), k=24)          # its output wanders, then repeats itself, twice
K, N = 5, 60
DRAFTERS = {"ngram": lambda: NGram(3, 1), "draft": lambda: SmallLM(DRAFT, TARGET)}


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
        accepted, _ = greedy_chain(draft, output[i:] + [-1])
        accept.append(min(accepted + 1, len(output) - i))
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
    """If no draft is ever accepted and drafting is free, the oracles L4 to L7 run at plain decoding's speed, exactly."""
    t = trace_of(a=[1] * 30, b=[1] * 30)
    table = PUBLISHED | {"draft": {"a": linear(), "b": linear()}}
    for rows in (1, 16):
        out = bounds.ladder([t], CostTable(table), rows)
        assert out["L4"] == {"a": 1, "b": 1, "all": 1} and out["L5"] == {"a": 1, "b": 1} and out["L6"] == out["L7"] == 1
        paid = bounds.ladder([t], CostTable(table | {"draft": {"a": linear(base=1e-3), "b": linear()}}), rows)
        assert paid["L4"]["a"] < 1 and paid["L5"]["a"] == 1            # control: greedy pays for drafts it does not make


def test_s02_rungs_are_ordered():
    """L5 >= L3 >= L2, L5 >= L4, L6 >= each L5, L7 >= L6, L8 >= L5 and, where a step costs no more than its parts, L9 >= L7
    and L8; on random traces, most of which break the reach order, with random costs and batch sizes. The greedy
    oracle is not among the bounds: some fixed k beats it somewhere."""
    rng, beaten = random.Random(0), 0
    for case in range(24):
        some = [random_trace(rng, rng.randint(2, 25)) for _ in range(3)]
        table, rows = random_table(rng), rng.choice([1, 2, 16, 1000])
        if case % 4 == 0:
            table["verify"] = {"kind": "roofline", "base": 1.0, "kv": 2e-3, "token": 0.05}
        out = bounds.ladder(some, CostTable(table), rows, k_max=rng.choice([None, 2]))
        slack = 1 + 1e-12
        for m in "ab":
            assert out["L2"][m]["speedup"] <= out["L3"][m] * slack and out["L3"][m] <= out["L5"][m] * slack
            assert out["L4"][m] <= out["L5"][m] * slack and out["L5"][m] <= min(out["L6"], out["L8"][m]) * slack
            assert out["L8"][m] <= out["L9"] * slack and out["L5"][m] >= 1 / slack
            beaten += out["L4"][m] < out["L3"][m] / slack
        assert out["L4"]["all"] <= out["L6"] * slack and out["L6"] <= out["L7"] * slack and out["L7"] <= out["L9"] * slack
    assert beaten > 0


def test_s02_holds_with_a_noisy_measured_table():
    """The same for L2 to L7 with a grid that is not monotone: the optimum may then propose more than will be accepted."""
    rng, wasted = random.Random(1), 0
    for _ in range(15):
        some = [random_trace(rng, rng.randint(5, 25)) for _ in range(2)]
        grid = lambda: noisy_grid(rng, [1, 2, 3, 5, 9], [0, 40, 100])
        cost = CostTable({"verify": grid(), "draft": {"a": grid(), "b": grid()}})
        rows = rng.choice([1, 3, 16])
        out = bounds.ladder(some, cost, rows)
        for m in "ab":
            rising = [out["L2"][m]["speedup"], out["L3"][m], out["L5"][m], out["L6"], out["L7"]]
            assert all(a <= b + 1e-12 for a, b in zip(rising, rising[1:]))
        wasted += price(optimum(some[0], cost, "ab", rows), some[0], cost, rows).wasted
    assert wasted > 0


def test_s03_greedy_is_not_a_bound():
    """The smallest counter-example, at one unit a step: greedy jumps 1 -> 5 -> 6 -> 7 in 3 steps, fixed k = 2 goes
    1 -> 4 -> 7 in 2, and so does the optimum."""
    t, cost = trace_of(a=[4, 1, 1, 3, 1, 1]), CostTable(UNIT | {"draft": {"a": linear()}})
    assert t.n_out == 7
    ends = lambda plan: [r.position for r in plan] + [plan[-1].position + plan[-1].emitted]
    assert ends(greedy(t, ["a"])) == [1, 5, 6, 7] and time_of(greedy(t, ["a"]), t, cost) == 3
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
        assert len(optimum(ordered, cost, ["a"])) == len(greedy(ordered, ["a"]))
        worse += len(optimum(any_, cost, ["a"])) < len(greedy(any_, ["a"]))
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


def test_s06_expected_tokens_at_the_ends():
    """alpha 1 gives k + 1, alpha 0 gives 1; in between E grows with k towards 1 / (1 - alpha), by the closed form."""
    e = bounds.expected_tokens
    for alpha, k in itertools.product((0.0, 0.1, 0.5, 0.9, 1.0), range(8)):
        want = k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)
        assert e(alpha, k) == pytest.approx(want, rel=1e-12) and e([alpha] * k, k) == e(alpha, k)
        assert alpha == 0 or e(alpha, k + 1) > e(alpha, k)
    assert e(0.8, 400) == pytest.approx(5, rel=1e-12) and e([0.9, 0.5], 2) == pytest.approx(1 + 0.9 + 0.45)


@pytest.mark.parametrize("alpha, k, want", [(0.8, 5, 3.689), (0.6, 3, 2.176), (0.9, 10, 6.862)])
def test_s07_monte_carlo_of_iid_acceptance(alpha, k, want):
    """Tokens counted over simulated rounds agree with the formula within 4 standard errors: by chance, a wrong alarm
    in one of 16,000 (the seed is fixed, so never or always)."""
    coins = np.random.default_rng(0).random((100_000, k)) < alpha
    gained = 1 + np.cumprod(coins, 1).sum(1)
    off = lambda e: abs(gained.mean() - e) / (gained.std() / math.sqrt(len(gained)))
    e = bounds.expected_tokens(alpha, k)
    assert round(e, 3) == want and off(e) < 4
    assert off(bounds.expected_tokens(alpha - 0.02, k)) > 4                     # control: the test would see it


def test_s08_tokens_per_round_from_acceptance(live):
    """Mean tokens a round = 1 + sum of P_j, P_j the share of rounds whose j-th draft was accepted; and = 1 + k times
    the acceptance rate if every round proposes k. Exact on what an engine recorded."""
    for name, run in live.runs.items():
        plan = observed_rounds(run.steps)
        p = [np.mean([min(s.accepted, s.committed - 1) >= j for s in run.steps]) for j in range(1, K + 1)]
        assert np.allclose(bounds.accepted_by_position(plan), p[:max(r.emitted for r in plan) - 1], atol=0)
        assert np.mean([r.emitted for r in plan]) == pytest.approx(1 + bounds.accepted_by_position(plan).sum(), rel=1e-12)
    full = [r for r in fixed(live.trace, "draft", 3) if r.proposed == 3]
    rate = sum(r.emitted - 1 for r in full) / sum(r.proposed for r in full)
    assert 0 < rate < 1 and np.mean([r.emitted for r in full]) == pytest.approx(1 + 3 * rate, rel=1e-12)


def test_s09_tokens_are_conserved(live):
    """Emitted tokens sum to what follows the prefill; query tokens are the emitted ones plus the rejected ones; where
    verifying more costs more, the optimum has nothing rejected."""
    t, cost = live.trace, CostTable(random_table(random.Random(4), DRAFTERS))
    plans = [autoregressive(t), fixed(t, "ngram", 4), greedy(t, ["ngram", "draft"]), one_pass(t), optimum(t, cost, DRAFTERS)]
    plans += [observed_rounds(run.steps) for run in live.runs.values()]
    for plan in plans:
        p = price(plan, t, cost)
        assert sum(r.emitted for r in plan) == N - 1
        assert p.rounds + p.proposed == N - 1 + p.wasted and p.wasted == sum(1 + r.proposed - r.emitted for r in plan)
        assert p.time == sum(p.phases.values()) and (p.phases["rejected"] > 0) == (p.wasted > 0)
    assert [price(plans[i], t, cost).wasted for i in (0, 2, 3, 4)] == [0] * 4 and price(plans[1], t, cost).wasted > 0


def test_s10_best_k_three_ways():
    """Trying all k, adding drafts while one more pays, and rounding the Lambert-W optimum choose the same k."""
    known = {(.8, .05): 8, (.8, .125): 5, (.8, .375): 2, (.9, .02): 19, (.6, .05): 4, (.7, .1): 4, (.3, .35): 0}
    rng = random.Random(5)
    pairs = list(known) + [(rng.uniform(0.02, 0.97), rng.uniform(0.01, 1.5)) for _ in range(200)]
    for alpha, c in pairs:
        brute = max(range(150), key=lambda k: bounds.leviathan_speedup(alpha, k, c))
        assert bounds.best_gamma(alpha, c) == bounds.best_gamma_lambert(alpha, c) == brute == known.get((alpha, c), brute)
    for alpha, c in ((1.0, 0.1), (0.5, 0.0)):
        with pytest.raises(ValueError, match="no best k"):
            bounds.best_gamma(alpha, c)


def test_s11_a_gain_is_possible_iff_alpha_exceeds_c():
    """Some k >= 1 is faster than plain decoding exactly if alpha > c; then k = 1 already gains (1 + alpha) / (1 + c)."""
    for alpha, c in itertools.product(np.linspace(0.05, 0.95, 10), np.linspace(0.025, 1.2, 24)):
        best = max(bounds.leviathan_speedup(alpha, k, c) for k in range(1, 60))
        assert (best > 1) == (alpha > c)
        assert bounds.leviathan_speedup(alpha, 1, c) == pytest.approx((1 + alpha) / (1 + c)) and best >= (1 + alpha) / (1 + c) - 1e-12


def test_s12_the_index_of_a_trace(live):
    """The n-gram trace from tokens alone equals the replay of the engine's drafter at every position, and what the
    engine accepted in each of its rounds; entry 0 is never used, and shifting by one would not fit."""
    rng = random.Random(6)
    texts = [(PROMPT, live.output)] + [([rng.randrange(3) for _ in range(n)], [rng.randrange(3) for _ in range(60)]) for n in (1, 2, 30)]
    for prompt, output in texts:
        accept, censored, offered = ngram_trace(prompt, output, K, 3, 1)
        dense = dense_trace("ngram", prompt, output, K)
        assert (accept[1:] == dense[1:]).all() and (offered + 1 >= accept).all()
        assert (accept[1:-1] != dense[2:]).any()                                # control
        assert all(accept[i] == K + 1 for i in np.flatnonzero(censored))
    accept, censored, _ = ngram_trace([6, 6, 5, 5, 5] * 2, [6, 6, 5, 5, 5], 2, 3, 1)
    assert accept.tolist() == [3, 3, 3, 2, 1] and censored.tolist() == [True, True, True, False, False]     # the end cuts, no more
    for name, run in live.runs.items():
        assert run.token_ids == live.output and len(run.steps) > 10
        for s in run.steps:
            assert s.committed == min(live.trace.accept[name][s.position], s.proposed + 1, N - s.position)
    ruined = Trace("t", 10, N, {m: np.concatenate([[99], a[1:]]) for m, a in live.trace.accept.items()})
    cost = CostTable(random_table(random.Random(7), DRAFTERS))
    for plan in (lambda t: fixed(t, "draft", 3), lambda t: greedy(t, DRAFTERS), lambda t: optimum(t, cost, DRAFTERS)):
        assert plan(ruined) == plan(live.trace)
    shifted = Trace("t", 10, N, {"draft": np.concatenate([[0, 1], live.trace.accept["draft"][1:-1]])})
    assert fixed(shifted, "draft", 3) != fixed(live.trace, "draft", 3)          # control: another index would show


def test_s13_limits_of_a_large_batch():
    """With B going to infinity the gain of fixed k tends to tau (c_q + c_kv c) / (c_q (k + 1) + c_kv c + draft per row), which may
    be a loss; the optimum, which need not draft, never loses."""
    verify, context, k = {"base": 5e-3, "token": 2e-5, "kv": 4e-8}, 600, 3
    cost = CostTable({"verify": linear(**verify), "draft": {"a": linear(base=2e-3, token=1e-6, row=3e-6)}, "overhead": linear(base=1e-3)})
    for tau in (1.2, 2.5, 4.0):
        limit = tau * (2e-5 + 4e-8 * context) / (2e-5 * (k + 1) + 4e-8 * context + k * 1e-6 + 3e-6)
        assert bounds.step_speedup(tau, cost, "a", k, context, 10**9) == pytest.approx(limit, rel=1e-5)
    t = random_trace(random.Random(8), 60, ("a",), high=4)
    for rows in (1, 10, 1000, 10**6):
        plain = time_of(autoregressive(t), t, cost, rows)
        assert plain >= time_of(optimum(t, cost, ["a"], rows), t, cost, rows)
    assert plain < time_of(fixed(t, "a", 5), t, cost, rows)


def test_s14_long_contexts_make_verification_free():
    """Verifying k + 1 tokens takes as long as one when the context is long enough, at any fixed batch; for a large batch
    the ratio is 1 + k / (1 + c / S0). Figures of an H100 with an 8B model; beyond the critical context drafting gains."""
    ratio = lambda k, context, rows: H100.verify(rows * context, rows * (k + 1), rows) / H100.verify(rows * context, rows, rows)
    s0 = PUBLISHED["verify"]["token"] / PUBLISHED["verify"]["kv"]
    assert round(s0) == 535
    for rows in (1, 64, 4096):
        assert ratio(3, 10**9, rows) == pytest.approx(1, abs=1e-5)
    for context in (100, 5000):
        assert ratio(3, context, 10**9) == pytest.approx(1 + 3 / (1 + context / s0), rel=1e-6)
    table = {128: (1.73, 1.28, 1.05), 512: (2.21, 1.33, 1.05)}
    assert {rows: tuple(round(float(ratio(3, c, rows)), 2) for c in (500, 4000, 32000)) for rows in table} == table
    critical = bounds.critical_context(2.0, 3, s0, 0.2)
    assert ratio(3, critical, 10**9) + 0.2 == pytest.approx(2.0, rel=1e-6)
    assert bounds.critical_context(1.2, 3, s0, 0.2) == math.inf and bounds.critical_context(9.0, 3, s0, 0.2) == 0


def test_s15_trees():
    """One child per node is a chain, by its formula; with children in decreasing order the dynamic program is the sum of
    the n largest path products; and it equals trying all trees."""
    for alpha in (0.3, 0.9):
        assert np.allclose(bounds.tree_tokens([alpha], 9), [bounds.expected_tokens(alpha, k) for k in range(9)], rtol=1e-12)
    children = [.6, .15, .07, .04]
    best = bounds.tree_tokens(children, 64)
    assert [round(float(best[n - 1]), 3) for n in (1, 2, 4, 8, 16, 32, 64)] == [1, 1.6, 2.176, 2.636, 3.076, 3.497, 3.875]
    assert np.allclose(np.cumsum(bounds.tree_scores(children, 64, 64)), best, rtol=1e-12)
    assert np.allclose(bounds.tree_scores(children[:2], 9, 1), [1, .6, .15], atol=0)     # no deeper than one level
    rng = random.Random(9)
    for _ in range(5):
        some = [rng.random() for _ in range(3)]                                 # not in order: only the program is right
        assert np.allclose(bounds.tree_tokens(some, 7), [brute_tree(some, n) for n in range(1, 8)], rtol=1e-12)
    assert sum(bounds.tree_scores([.5, .1, .9], 4, 9)) < bounds.tree_tokens([.5, .1, .9], 4)[-1] == 2.5     # control


def brute_tree(children, n):
    """Most expected tokens over all ordered trees of n nodes whose nodes have at most len(children) children."""
    def forests(nodes, rank):                                                   # nodes below one parent, from child `rank` on
        if nodes == 0 or rank == len(children):
            return 0.0 if nodes == 0 else -math.inf
        return max(children[rank] * brute_tree(children, m) + forests(nodes - m, rank + 1) for m in range(1, nodes + 1))
    return 1 + forests(n - 1, 0)


def test_s16_observed_stays_below_the_optimum(live):
    """A live run's rounds, priced by the model (L1), never beat the optimum (L5) on the same output; timed by a clock
    that is off by up to e at every step, they beat it by no more than that error. Timing a different, luckier run would
    break it (control)."""
    rng, e = random.Random(10), 0.05
    for rows, (name, run) in itertools.product((1, 8), live.runs.items()):
        table = random_table(rng, DRAFTERS)
        cost, t = CostTable(table), live.trace
        bound, plan = time_of(optimum(t, cost, [name], rows), t, cost, rows), observed_rounds(run.steps)
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
        t, table = random_trace(rng, n, high=9), random_table(rng, switch=0.1)
        write_traces(tmp_path / "t.jsonl", [t])
        (tmp_path / "c.json").write_text(json.dumps(table))
        t, cost = read_traces(tmp_path / "t.jsonl")[0], CostTable.load(tmp_path / "c.json")
        for plan in (autoregressive(t), fixed(t, "a", 3), greedy(t, "ab"), optimum(t, cost, "ab", rows), one_pass(t)):
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
    assert greedy(t, ["a"]) == greedy(t, ["a", "b"])


def test_s19_cache_bytes():
    """Qwen3-0.6B beside Qwen3-8B multiplies the cache by 1 + 28 / 36; Llama-3.1-8B keeps 128 KiB a token."""
    large, small, llama = (traces.kv_bytes_per_token(layers, 8, 128) for layers in (36, 28, 32))
    assert (large, small, llama) == (147456, 114688, 131072) and 1 + small / large == 1 + 28 / 36
    assert traces.kv_bytes_per_token(36, 8, 128, 4) == 2 * large


def test_s20_drafting_does_not_change_greedy_output(live):
    """Greedy decoding with and without drafting gives the same tokens, one by one (fp32, toy models)."""
    assert len(set(live.output)) > 10                                           # the toy wanders, so equality means something
    for name, run in live.runs.items():
        assert run.token_ids == live.output and any(s.accepted for s in run.steps) and any(s.accepted < s.proposed for s in run.steps)


def test_s21_results_keep_full_precision():
    """What the ladder returns survives JSON unchanged and is nowhere rounded; formatting is for printing only."""
    rng = random.Random(13)
    t, cost = random_trace(rng, 30), CostTable(random_table(rng))
    plans = {t.id: fixed(t, "a", 2)}
    observed = {"a": {"ar_seconds": 3.0, "seconds": 2.0, "plans": plans}}
    out = bounds.ladder([t], cost, 4, observed=observed, child_rates={"a": [.6, .2]})
    assert json.loads(json.dumps(out)) == out and [r for r in bounds.RUNGS if r not in out] == []
    leaves = lambda x: [y for v in x.values() for y in leaves(v)] if isinstance(x, dict) else [x]
    speedups = [x for rung in ("L2", "L3", "L5", "L6", "L7", "L9", "L12") for x in leaves({"": out[rung]}) if isinstance(x, float)]
    assert len(speedups) > 10 and all(x != round(x, 9) for x in speedups)
    assert out["L0"] == {"a": 1.5} and out["L1"]["a"] == time_of(autoregressive(t), t, cost, 4) / time_of(plans["t"], t, cost, 4)


# -- the dynamic program, the paper's own rules, batches, choices -----------------------------------------------------------

@pytest.mark.parametrize("switch", [0.0, 0.15])
def test_optimum_equals_enumeration(switch):
    """Of all plans there are, none is cheaper; the price is found by a loop that shares no code with the program."""
    rng = random.Random(14)
    for _ in range(12):
        t, table, rows = random_trace(rng, 6, high=4), random_table(rng, switch=switch), rng.choice([1, 6])
        for names in (["a"], ["a", "b"]):
            want = min(loop_seconds(plan, t.prompt_len, table, rows) for plan in all_plans(t, names, 2))
            assert time_of(optimum(t, CostTable(table), names, rows, 2), t, CostTable(table), rows) == pytest.approx(want, rel=1e-12)


def test_switching_is_charged_and_avoided():
    t = trace_of(a=[3, 1, 1, 3, 1, 1, 3, 1, 1], b=[1, 1, 1, 3, 1, 1, 1, 1, 1])
    draft = {"a": linear(base=0.1), "b": linear()}
    who = lambda switch: [r.name for r in optimum(t, CostTable(UNIT | {"draft": draft, "switch": switch}), "ab")]
    assert who(0.0) == ["a", "b", "a"] and who(0.2) == ["a", "a", "a"]
    free = CostTable(UNIT | {"draft": draft, "switch": 0.2}).free()
    assert free.switch == 0 and free.draft("a", 9, 3) == 0 and free.verify(9, 3) == 1
    plan = [bounds.Round(i, name, 0, 1) for i, name in enumerate(["a", None, "b", "b", "a"], 1)]
    assert price(plan, t, CostTable(UNIT | {"draft": draft, "switch": 0.2})).phases["draft"] == pytest.approx(3 * 0.0 + 2 * 0.1 + 2 * 0.2)


def simulator(trace, names, k, rows):
    """The paper's simulator, written out: one loop, its index, its prices (all calls matched)."""
    v, d, o = PUBLISHED["verify"], {"kv": 2.37768493e-9, "k": 8.41429603e-7, "base": 2.13526175e-3}, PUBLISHED["overhead"]["base"]
    verify = lambda kv, queries: kv * v["kv"] + queries * v["token"] + v["base"]
    total, cur = verify(0, rows * trace.prompt_len) + o, 1
    while cur < trace.n_out:
        longest = max(trace.accept[m][cur - 1] for m in names)
        length, kv = longest if k is None else k + 1, rows * (trace.prompt_len + cur)
        t = verify(kv, rows * length)
        share = 0 if list(names) == ["ngram"] and length == 1 else 0.005875 * t
        total += t + o + (d["kv"] * kv + d["k"] * length + d["base"] if list(names) == ["eagle3"] else share)
        cur += min(longest, length)
    return total


@pytest.mark.parametrize("names", [["eagle3"], ["ngram"], ["ngram", "eagle3"]])
def test_as_published_follows_the_papers_simulator(names):
    rng = random.Random(15)
    some = [random_trace(rng, 60, ("ngram", "eagle3"), high=8) for _ in range(5)]
    for rows, k in itertools.product((1, 64), (None, 1, 3)):
        times = [time_of(as_published(t, names, k), t, H100, rows) for t in some]
        assert times == pytest.approx([simulator(t, names, k, rows) for t in some], rel=1e-9)
    rate = lambda seconds: np.mean([t.n_out / s for t, s in zip(some, seconds)])
    base = [time_of(autoregressive(t), t, H100, rows) for t in some]
    assert bounds.mean_rate_speedup(some, base, times) == pytest.approx(rate(times) / rate(base), rel=1e-12)


def test_as_published_differs_where_the_paper_errs():
    """Index shift: the prefill's dummy entry is a round. Combined mode: everything is priced as a lookup. No match: a
    fixed-k lookup that gained nothing was, with some chance, not made."""
    t = trace_of(ngram=[1, 1, 1, 1], eagle3=[4, 3, 2, 1])
    assert [r.position for r in as_published(t, ["eagle3"])] == [1, 2] and [r.position for r in greedy(t, ["eagle3"])] == [1]
    assert {r.name for r in as_published(t, ["eagle3", "ngram"])} == {"ngram"} and greedy(t, ["ngram", "eagle3"])[0].name == "eagle3"
    assert [r.name for r in as_published(t, ["ngram"])] == [None] * 4
    proposed = [r.proposed for r in as_published(trace_of(ngram=[1] * 400), ["ngram"], 3, 0.2, random.Random(0))]
    assert set(proposed) == {0, 3} and 0.1 < np.mean(np.array(proposed) == 3) < 0.3        # 5 standard errors either way


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


def test_fixed_k_knows_when_a_lookup_finds_nothing():
    """Where the drafter had nothing to offer, a round verifies one token; the lookup is charged all the same."""
    t = trace_of(a=[1, 3, 1, 1, 1, 1])
    t.offered["a"] = np.array([0, 0, 5, 0, 1, 2, 9])
    assert [tuple(r) for r in fixed(t, "a", 4)] == [(1, "a", 0, 1), (2, "a", 4, 3), (5, "a", 1, 1), (6, None, 0, 1)]


def test_goodput_choice_maximises_and_stays_below_the_bound():
    """It is the best of all choices by the formula; and followed online it cannot beat the optimum over all drafters."""
    rng = random.Random(17)
    cost = CostTable(random_table(rng))
    e, kv = bounds.expected_tokens, 300
    rates = {"a": 0.8, "b": [0.9, 0.2, 0.1]}
    options = {(m, k): e(rates[m], k) / (cost.step(kv, 1 + k) + cost.draft(m, kv, k)) for m in "ab" for k in range(1, 4)}
    options[None, 0] = 1 / cost.step(kv, 1)
    name, k, goodput = bounds.goodput_choice(rates, cost, kv, k_max=3)
    assert (name, k) == max(options, key=options.get) and goodput == pytest.approx(options[name, k])
    assert bounds.goodput_choice({"a": 0.0}, cost, kv)[:2] == (None, 0)
    assert bounds.goodput_choice({"a": 1.0}, CostTable(UNIT | {"draft": {"a": linear()}}), kv)[:2] == ("a", 8)
    t, plan, i, seen = random_trace(rng, 80), [], 1, {"a": [1, 2], "b": [1, 2]}
    while i < t.n_out:
        name, k, _ = bounds.goodput_choice({m: hit / tried for m, (hit, tried) in seen.items()}, cost, t.prompt_len + i, k_max=4)
        k = min(k, t.n_out - i - 1)
        emitted = min(k + 1, int(t.accept[name][i])) if name else 1
        if name:
            seen[name] = [seen[name][0] + emitted - 1, seen[name][1] + min(k, emitted)]
        plan.append(bounds.Round(i, name, k, emitted))
        i += emitted
    assert time_of(plan, t, cost) >= time_of(optimum(t, cost, "ab"), t, cost)


def test_model_of_an_h100_by_batch():
    """Step time, shares, break-even and ceiling at context 600 and k = 3, as the notes on the paper's model list them."""
    want = {1: (7.14, 1.31, 3.06), 32: (8.52, 1.49, 2.68), 64: (9.95, 1.63, 2.45), 128: (12.80, 1.81, 2.21), 512: (29.91, 2.17, 1.84)}
    for rows, (ms, even, ceiling) in want.items():
        assert float(H100.step(600 * rows, rows, rows)) * 1e3 == pytest.approx(ms, abs=0.006)
        assert bounds.break_even(H100, "eagle3", 3, 600, rows) == pytest.approx(even, abs=0.006)
        assert bounds.step_speedup(4, H100, "eagle3", 3, 600, rows) == pytest.approx(ceiling, abs=0.006)
    rates = traces.implied_rates(PUBLISHED["verify"], 131072, 16.06e9, 2 * 8.03e9)
    assert [round(x / 1e12, 2) for x in rates.values()] == [3.34, 2.73, 764.39]


def test_analytic_helpers():
    for alpha, k in ((0.0, 3), (0.37, 1), (0.8, 5), (1.0, 4)):
        assert bounds.fit_alpha(bounds.expected_tokens(alpha, k), k) == pytest.approx(alpha, abs=1e-12)
    assert (2.176 - 1) / 3 < bounds.fit_alpha(2.176, 3)                         # the acceptance rate is not alpha
    with pytest.raises(ValueError, match="tau 4.5 is out of range; allowed is 1 to 4 with 3 drafts"):
        bounds.fit_alpha(4.5, 3)
    known = {(.6, 2): (1.96, 1.53), (.7, 3): (2.53, 1.58), (.8, 2): (2.44, 1.23), (.8, 5): (3.69, 1.63), (.9, 2): (2.71, 1.11),
             (.9, 10): (6.86, 1.60)}
    for (alpha, k), pair in known.items():
        assert (round(bounds.leviathan_speedup(alpha, k, 0), 2), round(bounds.operations_factor(alpha, k, 0), 2)) == pair
    curve = bounds.analytic_curve(0.8, H100, "eagle3", 600, 1, 20)
    assert curve[0] == 1 and curve[3] == bounds.step_speedup(bounds.expected_tokens(0.8, 3), H100, "eagle3", 3, 600)
    chain = bounds.best_tree([0.8], H100, "eagle3", 600, 1, 21, 20)             # with one child, the best chain
    assert (chain["nodes"] - 1, chain["depth"]) == (curve.argmax(),) * 2 and chain["speedup"] == pytest.approx(curve.max())
    tree = bounds.best_tree([0.6, 0.2, 0.1], H100, "eagle3", 600)
    assert tree["speedup"] > bounds.best_tree([0.6], H100, "eagle3", 600)["speedup"] and tree["nodes"] > tree["depth"] + 1
    assert bounds.best_tree([0.6, 0.2, 0.1], H100, "eagle3", 600, 512)["nodes"] < tree["nodes"]     # a large batch wants less
    assert bounds.best_tree([0.01], H100, "eagle3", 600, 512) == {"nodes": 1, "depth": 0, "speedup": 1.0}


def test_amdahl_split():
    out = bounds.amdahl(10.0, [{"prefill": 1, "verify": 2, "draft": 1, "rejected": 0.5, "overhead": 0.25, "sample": 0.25}] * 2)
    assert out == pytest.approx({"rejected": 10 / 9, "draft": 10 / 8, "sample": 10 / 9.5, "overhead": 10 / 9.5, "all": 10 / 6})
    assert "sample" not in bounds.amdahl(10.0, [{"verify": 1, "draft": 1}])


def test_spread_of_accept_lengths():
    """By position a long match is counted at each of its tokens, by round once."""
    t = trace_of(a=[5, 4, 3, 2, 1, 1, 1, 1])
    position, step = bounds.spread(t.accept["a"][1:]), bounds.spread([r.emitted for r in greedy(t, ["a"])])
    assert position["mean"] == 2.25 and step["mean"] == 2 and step["median"] == 1 and set(step) == {"mean", "median", "std", "p5", "p95"}


def test_a_trace_that_cannot_advance_is_refused():
    for column in ([1, 0, 1], [1, 1]):
        with pytest.raises(ValueError, match="trace 't': accept.a needs 3 entries, all after the first at least 1"):
            Trace("t", 1, 3, {"a": np.array(column)})


def test_ladder_names_a_missing_drafter():
    with pytest.raises(ValueError, match="drafters x are not in the cost table: ngram, eagle3"):
        bounds.ladder([trace_of(x=[1, 1])], H100)
    with pytest.raises(ValueError, match="no drafter 'x' in the cost table; it has ngram, eagle3"):
        H100.draft("x", 1, 1)
    one_token = Trace("t", 5, 1, {"ngram": np.ones(1, int)})
    assert bounds.ladder([one_token], H100)["L9"] == 1


def test_no_torch():
    """The analyzer works on numbers alone: it imports where there is no torch, and nothing but numpy is loaded for it."""
    code = ("import sys; sys.path.insert(0, sys.argv[1]); sys.modules['torch'] = None; before = set(sys.modules); import minispec.bounds; "
            "print({m.split('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names)")
    r = subprocess.run([sys.executable, "-I", "-c", code, ROOT], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert r.returncode == 0, r.stderr
    assert eval(r.stdout) == {"minispec", "numpy"}
