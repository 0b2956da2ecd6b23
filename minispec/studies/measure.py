"""Measure what bounds.py computes from: what a round costs, and what every drafter would get accepted at every position.

Nothing here is a copy of the decoding loop. Costs are the engine's own clock (`Engine.iterations`) on rounds of a chosen
shape; accept lengths come from the drafters themselves, asked at every position of an output that is already known:

    cost_table     {rows x drafts x context} -> seconds of draft, verification, everything else; a table for traces.CostTable
    dense_traces   for one drafter, [(prompt, output)] -> accept[i], offered[i], censored[i]   (section 3.2 of the notes on
                   2601.11580: "advance one token, whatever was accepted", here teacher-forced on one frozen output)
    acceptance     chance that one of a drafter's drafts is accepted, over all positions
    child_rates    chance that the target's token is the drafter's first, second, .. choice, for bounds.best_tree

What differs from the paper and why: its traces are two runs whose outputs diverge; here all drafters see one output, so
that they can be compared and combined at every position. It times one drafter at one k and fits three constants; here
rows, drafts and context vary and the grid itself is the table, with the fits beside it to see how far they are off.

A drafter of this kind must propose the same whatever was drafted before: n-gram, small models and modules that read the
target's states do (to rounding). SpecGen does not, its selection depends on where the last round ended; it has no trace.
"""
import functools
import statistics

import numpy as np
import torch

from minispec.data import traces
from minispec.core.attention import FullKeys, packed_attend
from minispec.core.drafters import NGram
from minispec.core.engine import Engine, Lockstep, Request
from minispec.core.kv_cache import KVCache
from minispec.data.traces import Trace
from minispec.core.verify import greedy_chain

DRAFTS, ROWS, CONTEXTS = (0, 1, 2, 4, 8, 16), (1, 4, 16), (64, 512, 2048)       # the grid of a cost table
PROMPTS = (32, 128, 512)                                                        # prompt lengths for the prefill
PASSES = 3                                                                      # over all rounds of a cost table


# -- costs ---------------------------------------------------------------------------------------------------------------

class Rote:
    """A drafter that costs nothing and knows nothing, to time the rest of a round."""
    name = "rote"

    def propose(self, requests, limits):
        return [([0] * limit, None) for limit in limits]

    def release(self, request):
        pass


class Half(Engine):
    """Accepts the first half of all drafts, right or not: as in decoding, some are rejected, and some the drafter has to read next."""

    def judge(self, segments, logits):
        return [((len(s.drafts) + 1) // 2, token) for s, (_, token) in zip(segments, super().judge(segments, logits))]


def round_seconds(model, drafter, rows, context, drafts, repeats=1):
    """Time single rounds of `rows` requests that have `context` cached tokens each on average, with every number of drafts in turn.
    Returns {drafts: [{phase: seconds} of each repeat]}, from the engine's clock.

    A drafter begins a round by reading what the last one committed, so a round is only timed if the one before had as many drafts,
    of which half were accepted; and the first round of all, in which a drafter reads the prompt, is a warm-up.
    """
    turn = 1 + repeats
    order, out = [max(drafts)] + [k for k in drafts for _ in range(turn)], {k: [] for k in drafts}
    for i, (k, iteration) in enumerate(list(zip(order, _rounds(model, drafter, rows, context, order)))[1:]):
        if i % turn:
            out[k].append(iteration["seconds"])
    return out


def read_seconds(model, drafter, rows, context):
    """What the first round takes a drafter longer than the second, because it reads `context` tokens of each of `rows` requests. The
    first time it does so, kernels for so many rows are compiled, which is no part of the price."""
    for _ in range(2):
        first, second = (i["seconds"]["draft"] for i in _rounds(model, drafter, rows, context, [1, 1]))
    return max(first - second, 0.0)


def _rounds(model, drafter, rows, context, order):
    """The engine's record of rounds with `order` drafts, `context` cached tokens in the middle of them. The requests come as if their
    prompts were read already: what the cache holds makes no difference to the time."""
    engine = Half(model, lambda e: Lockstep(e, drafter, max(1, *order)), rows)
    context = max(1, context - sum((k + 1) // 2 + 1 for k in order) // 2)
    requests = [Request([(7 * i + 3 * row) % model.config.vocab_size for i in range(context + 1)], sum(order) + len(order) + max(1, *order) + 1)
                for row in range(rows)]
    for r in requests:
        r.n_cached = context
        if engine.planner.taps is not None:
            width = model.config.d_model * max(1, len(engine.planner.taps))
            drafter.observe(r, torch.zeros(context, width, dtype=model.dtype, device=model.device))
    for _ in engine.stream(requests):
        done = len(engine.iterations)
        if done == len(order):
            for r in requests:
                r.cancel()
        else:
            engine.planner.k = order[done]
    return engine.iterations


def prefill_seconds(model, rows, prompt_len, repeats=PASSES):
    """Times of reading `rows` prompts at once, one warm-up left out."""
    out = []
    for _ in range(repeats + 1):
        engine = Engine(model, Lockstep, rows, prefill_chunk=prompt_len)
        engine.generate([Request([1 + i % 7 for i in range(prompt_len)], 1) for _ in range(rows)])
        out.append(sum(engine.seconds.values()))
    return out[1:]


def _timed(model, drafters, asked, ks, cells):
    """Rounds of every (rows, context) of cells, which may come again: {("verify" or name, rows, context, drafts): [{phase: seconds}]}, of a
    drafter with the numbers of drafts `asked` of it; and what it took drafters to read, {(name, rows, context): [seconds]}."""
    times, read = {}, {}
    for b, c in cells:
        timed = {("verify", k): some for k, some in (round_seconds(model, Rote(), b, c, ks) | round_seconds(model, Rote(), b, c, (0,), 4)).items()}
        for name, drafter in drafters.items():
            timed |= {(name, k): some for k, some in round_seconds(model, drafter, b, c, asked[name]).items()}
            read.setdefault((name, b, c), []).append(read_seconds(model, drafter, b, c))
        for (name, k), some in timed.items():
            times.setdefault((name, b, c, k), []).extend(some)
    return times, read


def cost_table(model, drafters, rows=ROWS, contexts=CONTEXTS, drafts=DRAFTS, progress=lambda items, **_: items):
    """(cost table, report). drafters: {name: drafter}. The table is what traces.CostTable takes: measured grids of verify
    (forward and acceptance) and of every drafter, a linear prefill, the overhead by rows. report: how well the linear and
    the roofline fit do on the verify grid, and how much the times of a cell scatter. progress: tqdm, or nothing.

    All rounds are timed in PASSES, for a machine's speed drifts: a drafter whose only turn falls into a slow minute would look dear beside
    the others. Verification of one token is timed in rounds without any drafts, one after the other,
    for that is what decoding without a drafter is: one row's weights stay in the caches, and it is faster than between larger rounds.
    Half of all drafts are accepted, for what was accepted is what a drafter reads first; plans that waste less are a little dearer than
    their price. The price of a drafter is what a round with it takes longer than one whose drafts come from nowhere: its own seconds, and
    what the target's forward loses because the drafter's weights have pushed out some of its own. A drafter of windows is timed up to
    the whole window (`gamma`), for it has no more drafts to give."""
    ks, spread = [k for k in drafts if k], []
    asked = {name: sorted({min(k, getattr(d, "gamma", k)) for k in ks}) for name, d in drafters.items()}
    contexts = [c for c in contexts if c + 3 * (sum(drafts) + len(drafts)) <= model.config.block_size]
    if not contexts:
        raise ValueError(f"a context of {model.config.block_size} is too small to time rounds of up to {max(drafts)} drafts in it")
    times, read = _timed(model, drafters, asked, ks, progress([(b, c) for _ in range(PASSES) for b in rows for c in contexts], desc="rounds"))

    def typical(cell, *phases):
        low, middle, high = np.percentile([sum(s[p] for p in phases) for s in times[cell]], (25, 50, 75))
        spread.append((high - low) / max(middle, 1e-9))
        return float(middle)

    def grid(tokens, seconds, kv=contexts):
        return {"kind": "grid", "rows": list(rows), "tokens": tokens, "kv": list(kv), "seconds": [[[seconds(b, c, t) for c in kv] for t in tokens] for b in rows]}

    verify = {(b, c, k + 1): typical(("verify", b, c, k), "verify", "sample") for b in rows for c in contexts for k in (0, *ks)}

    def price(name, b, c, k):
        cell, tokens = (name, b, c, k), [k + 1 for k in ks]
        verified = float(np.interp(k + 1, tokens, [verify[b, c, t] for t in tokens]))
        return max(typical(cell, "draft", "verify", "sample") - verified, statistics.median(s["draft"] for s in times[cell]))

    shapes = [(b, n, s) for b in (rows[0], rows[min(1, len(rows) - 1)]) for n in PROMPTS if n < model.config.block_size
              for s in prefill_seconds(model, b, n)]
    b, n, s = (np.array(x, float) for x in zip(*shapes))
    overhead = {b: statistics.median(s["overhead"] for (name, rows_, *_), some in times.items() if name == "verify" and rows_ == b for s in some) for b in rows}
    table = {"verify": grid([k + 1 for k in drafts], lambda *cell: verify[cell]), "draft": {name: grid(asked[name], functools.partial(price, name)) for name in drafters},
             "read": {name: grid(contexts, lambda b, _, c: statistics.median(read[name, b, c]), [0]) for name in drafters},
             "prefill": traces.fit_linear(b, n, 0 * n, s, ("base", "row", "token")),
             "overhead": {"kind": "grid", "rows": list(rows), "tokens": [1], "kv": [0], "seconds": [[[overhead[b]]] for b in rows]}}
    return traces.check_costs(table), {"fits": verify_fits(verify), "scatter": float(np.median(spread))}


def verify_fits(cells):
    """{kind: its entry and its residuals} of the linear and the roofline fit to {(rows, context, tokens a row): seconds}."""
    rows, context, tokens = np.array(list(cells), float).T
    points = rows, tokens, rows * context, np.array(list(cells.values()))
    fits = {"linear": traces.fit_linear(*points), "roofline": traces.fit_roofline(*points)}
    return {kind: {"entry": entry, **traces.residual(entry, *points)} for kind, entry in fits.items()}


# -- dense accept traces ---------------------------------------------------------------------------------------------------

@torch.inference_mode()
def dense_traces(drafter, model, texts, k_max):
    """What `drafter` would get accepted by greedy verification at every position of texts [(prompt, output)], all texts
    together. Returns [(accept, censored, offered)] of arrays (len(output),), as traces.Trace holds them.

    At position i the drafter knows the prompt and i output tokens, and is asked for k_max drafts, or as many as an engine
    would still ask for; then the text goes on by one token, whatever was proposed.
    """
    requests = [Request(prompt, len(output)) for prompt, output in texts]
    features = [_features(model, drafter, prompt + output) for prompt, output in texts]
    out = [(np.ones(len(o), int), np.zeros(len(o), bool), np.zeros(len(o), int)) for _, o in texts]
    for i in range(1, max(len(output) for _, output in texts)):
        live = [j for j, (_, output) in enumerate(texts) if i < len(output)]
        for j in live:
            r, output = requests[j], texts[j][1]
            r.tokens.append(output[i - 1])
            r.generation.token_ids.append(output[i - 1])
            seen, r.n_cached = r.n_cached, len(r.tokens) - 1
            if features[j] is not None:
                drafter.observe(r, features[j][seen:r.n_cached])
        limits = [min(k_max, len(texts[j][1]) - i - 1) for j in live]
        for j, limit, (draft, *_) in zip(live, limits, drafter.propose([requests[j] for j in live], limits)):
            hits, _ = greedy_chain(draft, texts[j][1][i:i + len(draft) + 1])
            accept, censored, offered = out[j]
            accept[i], censored[i], offered[i] = hits + 1, hits == k_max, len(draft)
    for r in requests:
        drafter.release(r)
    return out


def _features(model, drafter, ids):
    """What the drafter asks to see of the target along `ids`, (T, F); None if it asks for nothing."""
    taps = getattr(drafter, "taps", None)
    if taps is None:
        return None
    keys = FullKeys(KVCache(model.config, len(ids), model.dtype, model.device), 0, 0, len(ids))
    x = torch.tensor(ids, device=model.device)
    return model.features(x, torch.arange(len(ids), device=model.device), packed_attend([(0, len(ids), keys)]), taps)[1]


def traces_of(drafters, model, texts, k_max=16, progress=lambda items, **_: items):
    """A Trace for each of {id: (prompt, output)}, of all {name: drafter} on the same outputs. An n-gram trace needs no
    model: it follows from the tokens."""
    out = {id: Trace(id, len(prompt), len(output), {}) for id, (prompt, output) in texts.items()}
    for name, drafter in progress(list(drafters.items()), desc="traces"):
        if isinstance(drafter, NGram):
            columns = [traces.ngram_trace(p, o, k_max, drafter.max_n, drafter.min_n) for p, o in texts.values()]
        else:
            columns = dense_traces(drafter, model, list(texts.values()), k_max)
        for trace, (accept, censored, offered) in zip(out.values(), columns):
            trace.accept[name] = accept
            if censored.any():
                trace.censored[name] = censored
            if (offered < np.minimum(k_max, trace.n_out - np.arange(trace.n_out) - 1))[1:].any():
                trace.offered[name] = offered
    return list(out.values())


def acceptance(drafter, model, texts, k=4):
    """The chance that a draft is accepted on texts [(prompt, output)]: accepted over judged drafts, k at every position."""
    columns = dense_traces(drafter, model, texts, k)
    hits = sum(int((accept - 1).sum()) for accept, _, _ in columns)
    judged = sum(int(np.minimum(accept, offered).sum()) for accept, _, offered in columns)       # of those offered, up to the first rejected one
    return hits / max(judged, 1)


@torch.inference_mode()
def child_rates(drafter, texts, width=4):
    """Share of positions of texts [(prompt, output)] whose token was the first, second, .. choice of the drafter for its
    first draft: (width,) chances for bounds.best_tree, not increasing. None for a drafter without `first_guesses`."""
    if not hasattr(drafter, "first_guesses"):
        return None
    ranks = []
    for prompt, output in texts:                         # from the second output token on, as drafts do
        logits = drafter.first_guesses(prompt + output)[len(prompt) - 1:]
        true = torch.tensor(output[1:], device=logits.device)
        ranks.append((logits > logits.gather(-1, true[:, None])).sum(-1))
    ranks = torch.cat(ranks)
    rates = [(ranks == b).float().mean().item() for b in range(width)]
    return np.minimum.accumulate(rates).tolist()
