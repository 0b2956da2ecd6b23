"""Measure the inputs of bounds.py: the seconds of a round, and the accepted drafts of every drafter at every
position.

Both use the decoding loop itself. Costs come from the engine's clock (`Engine.iterations`), on rounds of a
chosen shape. Accept lengths come from drafters that the engine calls at every position of a known output:

    cost_table     {rows x drafts x context} -> seconds of draft, verify and the rest, for costs.CostTable
    traces_of      {id: (prompt, output)} -> accept[i], offered[i], censored[i] of every drafter (as in
                   the paper: advance by one token, however many drafts were accepted)
    acceptance     from traces: the probability that a draft is accepted, over all positions

Differences from the paper, and why: The paper's traces are two runs whose outputs diverge; here all drafters
see one output, so that they can be compared and combined at every position. The paper times one drafter at
one k and fits three constants; here batch, drafts and context vary, and the measured grid is the table.

A drafter has a trace if its drafts do not depend on earlier rounds. This holds, up to rounding, for prompt
lookup, small models, and modules that read the target's hidden states. It does not hold for SpecGen, whose
selection depends on where the last round ended. bounds.py also assumes that a round of j drafts has the
first j drafts of the trace. For SpecDiff, whose slots see each other, this holds only for the first slot of a
shorter window.
"""
import statistics
import time
from collections import defaultdict
from functools import partial
from itertools import product

import numpy as np
import torch
from tqdm import tqdm

from minispec.core.attention import FullKeys
from minispec.core.drafters import Drafter
from minispec.core.engine import Engine
from minispec.core.kv_cache import KVCache, whole_blocks
from minispec.core.requests import Request, Segment, pack
from minispec.core.scheduler import SyncScheduler
from minispec.core.verify import verify_tree
from minispec.traces import Trace

# Tokens of each request of a batch.
BATCHES = {"1 x 100": [100], "8 x 100": [100] * 8, "64 x 20 to 400": [20 + 6 * i for i in range(64)],
           "1 x 4,600": [4600], "8 x 200 to 4,000": [200 + 543 * i for i in range(8)],
           "8 x 4,000": [4000] * 8}
LARGE = 1 << 27  # numbers of a tensor that no cache of the processor holds
PASSES = 4  # over all rounds of a cost table
REPEATS = 5  # of a round at batch 1; fewer at larger batch sizes


# -- timing ----------------------------------------------------------------------------------------

class Rote(Drafter):
    """A drafter that proposes token 0 at no cost, to time the rest of a round."""
    name = "rote"

    def propose(self, requests, limits):
        return [([0] * limit, None) for limit in limits]


class Half(Engine):
    """Accepts the first half of the drafts, whether right or wrong. So, as in decoding, some drafts are
    rejected, and the drafter has to read the accepted ones in the next round."""

    def verify(self, segments, logits):
        # Rows of the accepted drafts; row 0 is the root.
        return [(list(range(1, (len(s.drafts) + 3) // 2)), token)
                for s, (_, token) in zip(segments, super().verify(segments, logits))]


def round_seconds(model, drafter, rows, context, drafts, repeats=1):
    """Time single rounds of `rows` requests with `context` cached tokens each on average, for each number of
    drafts. Returns {drafts: [{phase: seconds} of each repeat]}, from the engine's clock.

    A drafter begins a round by reading the tokens committed in the round before. So a round is only timed if
    the round before had the same number of drafts, half of them accepted. The very first round, in which the
    drafter reads the prompt, is a warm-up.
    """
    turn = 1 + repeats
    order = [max(drafts)] + [k for k in drafts for _ in range(turn)]
    seconds = _rounds(model, drafter, rows, context, order)
    # Without the first of each turn.
    return {k: seconds[2 + i * turn:1 + (i + 1) * turn] for i, k in enumerate(drafts)}


def read_seconds(model, drafter, context):
    """Extra seconds of a drafter's first round over its second one, for reading `context` tokens of a
    request. It is measured twice and the second time counts, because the first one may compile kernels."""
    for _ in range(2):
        first, second = _rounds(model, drafter, 1, context, [1, 1])
    return max(first["draft"] - second["draft"], 0.0)


def _rounds(model, drafter, rows, context, order):
    """[{phase: seconds}] of rounds with the numbers of drafts in `order`, with `context` cached tokens
    halfway through them. The requests start as if their prompts had been read: the values in the cache do not
    affect the time."""
    most = max(1, *order)
    drafter.min_confidence = 0.0                                   # all drafts are timed
    engine = Half(model, lambda e: SyncScheduler(e, drafter, most), rows)
    gained = sum((k + 1) // 2 + 1 for k in order)
    context = max(1, context - gained // 2)
    longest = sum(order) + len(order) + most + 1
    c = model.config
    requests = [Request([(7 * i + 3 * row) % c.vocab_size for i in range(context + 1)], longest)
                for row in range(rows)]
    # On a GPU this creates the drafter's graph memory, in which the prompts' hidden states must lie.
    engine._prepare(requests)
    engine.waiting.clear()
    for r in requests:
        r.n_cached = context
        if drafter.uses_hidden_states:
            states = torch.zeros(context, drafter.n_features, dtype=model.dtype, device=model.device)
            drafter.observe(r, states)
    for _ in engine.stream(requests):
        done = len(engine.iterations)
        if done == len(order):
            break
        engine.scheduler.k = order[done]
        if drafter.graphs:
            drafter.graphs.steps = 0                     # else every round takes the steps of the longest
    return [i["seconds"] for i in engine.iterations]


def prefill_seconds(model, rows, prompt_len):
    """Seconds of reading `rows` prompts of `prompt_len` tokens at once, after a warm-up."""
    for _ in range(2):
        engine = Engine(model, SyncScheduler, rows, prefill_chunk=prompt_len)
        # Prompts that begin alike would share their blocks.
        engine.generate([Request([row] * prompt_len, 1) for row in range(rows)])
    return sum(engine.seconds.values())


# -- the cost table --------------------------------------------------------------------------------

def cost_table(model, drafters, rows=(1, 4, 16), contexts=(64, 512, 2048), drafts=(0, 1, 2, 4, 8, 16),
               prompts=(32, 128, 512), passes=PASSES):
    """The input of costs.CostTable for {name: drafter}: measured grids in seconds for verification (forward
    and acceptance), for every drafter and for prompts, and the overhead by batch size. ValueError if no
    context fits into the model's.

    All rounds are timed in several passes, because a machine's speed drifts: a drafter timed only once, in a
    slow minute, would look expensive next to the others. The price of a drafter is the extra time of a round
    with it over a round with free drafts. It includes the drafter's own seconds and the slowdown of the
    target's forward, part of whose weights the drafter's weights have evicted from the cache. A drafter of
    windows is timed up to its whole window (`gamma`)."""
    longest = (1 + REPEATS) * (sum(drafts) + len(drafts))
    contexts = [c for c in contexts if c + longest <= model.config.block_size]
    if not contexts:
        raise ValueError(f"a context of {model.config.block_size} is too small to time rounds of up to "
                         f"{max(drafts)} drafts in it")
    asked = {name: sorted({min(k, d.gamma) for k in drafts if k}) for name, d in drafters.items()}
    asked[None] = [k for k in drafts if k]
    prompts = [n for n in prompts if n < model.config.block_size]
    times = defaultdict(list)
    for b, c in tqdm(list(product(rows, contexts)) * passes, desc="rounds"):
        for name, timed in time_all(model, drafters, asked, drafts, b, c):
            for k, seconds in timed.items():
                times[name, b, c, k] += seconds
        if b in rows[:2] and c == contexts[0]:
            for n in prompts:
                times["prefill", b, n].append({"prefill": prefill_seconds(model, b, n)})

    def verify(b, c, tokens):
        return typical(times[None, b, c, tokens - 1], "verify", "sample")

    def longer(name, b, c, k):
        """Extra seconds of a round with a drafter over a round with free drafts."""
        without = np.interp(k, drafts, [verify(b, c, 1 + j) for j in drafts])
        own = times[name, b, c, k]
        return max(typical(own, "draft", "verify", "sample") - float(without), typical(own, "draft"))

    def read(name, b, _, c):
        return typical(times[name, b, c, "read"], "draft")

    def overhead(b, *_):
        return typical(sum((times[None, b, c, k] for c in contexts for k in drafts), []), "overhead")

    def prefill(b, _, tokens):
        return typical(times["prefill", b, tokens], "prefill")

    def grid(seconds_of, tokens, rows=rows, kv=contexts):
        seconds = [[[seconds_of(b, c, t) for c in kv] for t in tokens] for b in rows]
        return {"kind": "grid", "rows": list(rows), "tokens": tokens, "kv": list(kv), "seconds": seconds}

    return {
        "verify": grid(verify, [1 + k for k in drafts]),
        "draft": {name: grid(partial(longer, name), asked[name]) for name in drafters},
        "read": {name: grid(partial(read, name), contexts, [1], [0]) for name in drafters},
        "prefill": grid(prefill, prompts, rows[:2], [0]),
        "overhead": grid(overhead, [1], kv=[0]),
    }


def time_all(model, drafters, asked, drafts, rows, context):
    """One pass over the rounds of a shape. Yields (name of the drafter, {drafts: [seconds by phase]}). The
    name is None for free drafts; a drafter's key "read" has the seconds of reading the context."""
    repeats = max(1, REPEATS // rows)
    for name, drafter in {None: Rote(), **drafters}.items():
        yield name, round_seconds(model, drafter, rows, context, asked[name], repeats)
        # Rounds without drafts are timed in a row, because plain decoding consists of them: weights stay in
        # the processor's caches, so they are faster than between larger rounds. They are timed beside every
        # drafter, because all speed-ups are relative to their price.
        yield None, round_seconds(model, Rote(), rows, context, (0,), 4)
        if name and rows == 1:
            yield name, {"read": [{"draft": read_seconds(model, drafter, context)}]}


def typical(rounds, *phases):
    """Mean seconds of these phases together, without the fastest and the slowest quarter of the rounds. Where
    a processor has two speeds, a median has one of them by chance, and a long run has their mean."""
    seconds = sorted(sum(one[phase] for phase in phases) for one in rounds)
    quarter = len(seconds) // 4
    return statistics.mean(seconds[quarter:len(seconds) - quarter])


# -- the speed of reading keys ---------------------------------------------------------------------

def memory_speed(device):
    """Bytes per second at which this machine sums a large tensor."""
    x = torch.ones(LARGE, device=device)
    seconds = [clock(x.sum) for _ in range(6)]
    return x.nbytes / min(seconds)


def clock(f):
    """Seconds of f(), including its work on a GPU."""
    started = time.perf_counter()
    f()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


@torch.inference_mode()
def forward_seconds(model, lengths, rows):
    """(seconds of a forward, seconds of its attention), medians, for requests with `lengths` cached tokens
    and `rows` new tokens each. Attention is timed as a forward minus a forward without attention."""
    slots = sum(whole_blocks(t + rows) + whole_blocks(1) for t in lengths)
    cache = KVCache(model.config, slots, model.dtype, model.device)
    places = [cache.open(t + rows) for t in lengths]

    def seconds(attend=None):
        x = pack([Segment(None, [0] * rows, t, FullKeys(cache, blocks, t, rows))
                  for blocks, t in zip(places, lengths)], model.device)
        attend = attend or x.attend
        return clock(lambda: model.logits(model(x.tokens, x.positions, attend)))

    # The first repeat compiles kernels.
    times = [(seconds(), seconds(lambda layer, q, k, v: q)) for _ in range(10)][1:]
    whole, rest = (statistics.median(x) for x in zip(*times))
    return whole, max(whole - rest, 1e-9)


def attention_reads(model):
    """For each of BATCHES, with 1 or 9 rows per request: milliseconds of a forward and of its attention,
    megabytes of keys and values that attention reads, its GB/s, and the machine's memory speed in the same
    minute."""
    c = model.config
    width = 2 * c.n_layer * c.n_kv_head * c.head_dim * model.dtype.itemsize      # bytes of a token
    out = []
    for name, lengths in BATCHES.items():
        if max(lengths) + 9 > c.block_size:
            continue
        for rows in (1, 9):
            whole, attention = forward_seconds(model, lengths, rows)
            read, memory = sum(lengths) * width, memory_speed(model.device)
            out.append({"batch": name, "rows": rows, "ms": 1e3 * whole, "attention_ms": 1e3 * attention,
                        "mb": read / 1e6, "gb_s": read / attention / 1e9, "memory_gb_s": memory / 1e9,
                        "share": read / attention / memory})
    return out


# -- dense accept traces ---------------------------------------------------------------------------

class Forced(Engine):
    """Commits known texts instead of the target's choices. answers: {request: token ids}."""
    answers = None

    def verify(self, segments, logits):
        return [([], self.answers[s.request][len(s.request.generation.token_ids)]) for s in segments]


class Onlooker(SyncScheduler):
    """Records the drafts, noted = {request: {output tokens so far: drafts}}, and verifies none of them."""
    noted = None

    def schedule(self, ready):
        for s in super().schedule(ready):
            self.noted[s.request][len(s.request.generation.token_ids)] = s.drafts
        return SyncScheduler(self.engine).schedule(ready)


def traces_of(drafters, model, texts, k_max):
    """A Trace for each of {id: (prompt, output)}: for each {name: drafter}, the drafts at every position of
    the output that greedy verification would accept.

    At position i a drafter has the prompt and i output tokens. It is asked for k_max drafts, or fewer near
    the end of the output. Then the text advances by one token, however many drafts are right.
    """
    out = [Trace(id, len(prompt), len(output), {}) for id, (prompt, output) in texts.items()]
    for name, drafter in tqdm(drafters.items(), desc="traces"):
        drafter.min_confidence = 0.0                         # all drafts are verified
        most = min(k_max, drafter.gamma)
        engine = Forced(model, lambda e: Onlooker(e, drafter, k_max), 16)
        engine.answers = {Request(prompt, len(output)): output for prompt, output in texts.values()}
        noted = engine.scheduler.noted = defaultdict(dict)
        engine.generate(list(engine.answers))
        for trace, (r, output) in zip(out, engine.answers.items()):
            trace.accept[name] = accept = np.ones(len(output), int)
            trace.offered[name] = offered = np.zeros(len(output), int)
            for i, drafts in noted[r].items():
                # The engine's rule for greedy verification; a chain is a tree.
                path, _ = verify_tree(drafts, range(len(drafts)), output[i:i + len(drafts) + 1])
                accept[i] = len(path) + 1
                offered[i] = len(drafts)
            if (accept > most).any():
                trace.censored[name] = accept > most
    return out


def acceptance(traces, name, k=4):
    """The probability that a draft is accepted: accepted over verified drafts, in rounds of k drafts from
    every position."""
    hits = verified = 0
    for t in traces:
        room = np.minimum(k, t.offered[name][1:])
        accepted = t.accept[name][1:] - 1
        hits += np.minimum(accepted, room).sum()
        verified += np.minimum(accepted + 1, room).sum()   # with the first rejected draft, not the later ones
    return float(hits / max(verified, 1))
