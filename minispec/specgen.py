"""SpecGen / SparseSpec (arXiv 2512.01278): a model drafts for itself by attending sparsely, then verifies in full.

Decoding long chains of thought is bound by reading the key/value cache. So draft k tokens with the same weights but only
about 5 % of the cache, then check all of them in one forward that reads all of it. That forward computes every attention
probability anyway, and those probabilities choose the 5 % for the next round (PillarAttn): no second model, no training.

One round of a request that has N tokens in the cache and N + 1 committed:
    DRAFT    k times one row: t0, d1, .. at positions N, N + 1, ..; it sees the selected positions and the round's own rows
    VERIFY   k + 1 rows t0, d1 .. dk at positions N .. N + k with full causal attention, recording scores
    (judge)  greedy or rejection sampling with the draft's own distributions: a of k drafts, and one more token; then, for
             every layer and KV head, select the positions to draft with in the next round
Before the first round the prompt is read (NORMAL). With delayed verification the host judges while the next forward
already runs; the request sits that iteration out (STALL), the others do not wait.

Unified schedule: requests in all phases share one forward. If all drafted together and verified together, forwards would
have B rows k times and then (k + 1) B rows; with the phases spread evenly each has about (2k + 1) / (k + 1) B. A request is
put into the emptiest phase when it starts to draft, by making its first round shorter, and stays there.

Glossary, code <-> paper: k draft steps per round (spec_stride); sparsity = s, the budget's share of the context; a
accepted drafts; `scores` the mean softmax probability of a position over the k + 1 verification rows and the query
heads of a group; `recent` the positions taken because they are the newest.

What differs from the paper and why: draft rows write their keys and values into a short buffer of the round, which
also holds a copy of the selected ones, instead of into the cache. The selection is fixed for a round, so gathering it
once is cheaper on a CPU than gathering it at every step, and the cache never holds a value computed under sparse
attention at all (the paper overwrites them at verification). All k + 1 rows count in the scores; the released
kernel drops rows beyond its first tile. By default scores are handed on to the positions behind and remembered
(`look_ahead`); select="pillar" is the paper's rule. Selections are positions, not slots, so a request may move or leave the device.
On a GPU (`fused_attend`) it is meant to be as in the paper, with CUDA graphs (kernels/graphs.py); it has not run on one yet.
"""
import math
import random
import time

import torch
import torch.nn.functional as F

from minispec.core.attention import FullKeys, group_rows, packed_attend, ungroup_rows
from minispec.core.engine import Segment, check_k, draw_drafts
from minispec.core.kv_cache import KVCache

SELECTIONS = ("ahead", "pillar", "shared", "oracle", "window", "random")
SCHEDULES = ("unified", "lockstep", "random")
REACH, MEMORY = (1, 2, 4), 0.5              # of the selection "ahead": see look_ahead
GROWTH = 64                                  # entries that a pool of selections grows by beyond its need
N_SINKS = 4                                  # first positions that a plain window keeps (StreamingLLM)


class PillarKeys:
    """What the draft rows of a request may see in one round: selected (L, G, c) positions, chosen per layer and KV head, and
    the `recent` newest of `length` cached ones (selected None: all of them); then the rows of the round itself. `base` is
    the request's first slot. One row at a time is drafted, so there is one forward for every draft."""
    scores = None

    def __init__(self, pool, base, length, selected, recent):
        self.pool, self.base, self.length, self.selected, self.recent = pool, base, length, selected, recent
        self.n = length if selected is None else selected.shape[-1] + recent   # entries of the list so far
        self.row = None                                                        # in the pool, once it is gathered


class DraftPool:
    """A copy of what every drafting request may see, side by side, (L, rows, G, width, D), so that one product a layer serves
    all of them. A row is gathered by the first draft step of a round; every step appends to it. (On a GPU the kernel reads
    the cache in place, and there is no copy.)"""

    def __init__(self, cache, room):
        """room: draft rows that a round may append."""
        self.cache, self.room, self.taken = cache, room, []                    # taken: row -> the keys that have it, or None
        layers, groups, slots, d = cache.k.shape
        self.heads = torch.arange(0, layers * groups * slots, slots, device=cache.k.device).view(layers, groups, 1)     # of the cache as one table
        self.k = self.v = cache.k.new_empty(layers, 0, groups, 0, d)

    def give_back(self, keys):
        if keys.row is not None:
            self.taken[keys.row] = keys.row = None

    def _gather(self, keys):
        """Take a row, and copy what is selected into it."""
        if None not in self.taken:
            self.taken.append(None)
        keys.row = self.taken.index(None)
        self.taken[keys.row] = keys
        missing = len(self.taken) - self.k.shape[1], keys.n + self.room - self.k.shape[3]
        if max(missing) > 0:
            more = (0, 0, 0, missing[1] + GROWTH if missing[1] > 0 else 0, 0, 0, 0, missing[0])
            self.k, self.v = F.pad(self.k, more), F.pad(self.v, more)
        old, end = keys.n - keys.recent, keys.base + keys.length
        for copy, cached in ((self.k[:, keys.row], self.cache.k), (self.v[:, keys.row], self.cache.v)):
            if keys.selected is None:
                copy[:, :, :keys.n] = cached[:, :, keys.base:end]
            else:
                rows = self.heads + keys.base + keys.selected                  # whole rows: a tenth of the time of gather
                copy[:, :, :old] = F.embedding(rows, cached.view(-1, copy.shape[-1]))
                copy[:, :, old:keys.n] = cached[:, :, end - keys.recent:end]

    def attend(self, some):
        """attend over one draft row of each of `some` keys: q (n, H, D), k and v (n, G, D) -> (n, H, D)."""
        for keys in some:
            if keys.row is None:
                self._gather(keys)
            keys.n += 1
        device, (_, _, groups, _, d) = self.k.device, self.k.shape
        row, last = torch.tensor([[keys.row, keys.n - 1] for keys in some], device=device).T
        rows, width = max(keys.row for keys in some) + 1, max(keys.n for keys in some)
        ends = torch.full((rows,), width, device=device)
        ends[row] = last + 1
        hidden = torch.arange(width, device=device) >= ends[:, None]
        mask = torch.zeros(rows, 1, 1, width, dtype=self.k.dtype, device=device).masked_fill_(hidden[:, None, None], float("-inf"))

        def attend(layer, q, k, v):
            keys, values = self.k[layer], self.v[layer]
            keys[row, :, last], values[row, :, last] = k, v
            q_rows = q.new_zeros(rows, groups, q.shape[1] // groups, d)        # rows that do not draft now are computed in vain
            q_rows[row] = q.unflatten(1, (groups, -1))
            return F.scaled_dot_product_attention(q_rows, keys[:rows, :, :width], values[:rows, :, :width], attn_mask=mask)[row].flatten(1, 2)
        return attend


class OracleKeys:
    """What no method can know beforehand: the positions that the current query itself attends to most, `budget` of them per
    layer and KV head, found by looking at all. An upper bound for selections, and as slow as full attention. For one row;
    like a PillarKeys it leaves the cache alone."""
    scores = pool = None

    def __init__(self, cache, base, length, budget):
        self.cached, self.length, self.budget = (cache.k[:, :, base:base + length], cache.v[:, :, base:base + length]), length, budget
        self.own = [[] for _ in range(len(cache.k))]                           # layer -> [(k, v) (G, 1, D) of each draft row]

    def attend(self, layer, q, k, v):
        """q (1, H, D), k and v (1, G, D) -> (1, H, D)."""
        self.own[layer].append((k.transpose(0, 1), v.transpose(0, 1)))
        keys, values = (torch.cat([cached[layer], *own], dim=1) for cached, own in zip(self.cached, zip(*self.own[layer])))
        logits = (group_rows(q, k.shape[1]) @ keys.transpose(1, 2)).float() * q.shape[-1] ** -0.5          # (G, g, T)
        best = logits.softmax(-1).mean(1)[:, :self.length].topk(min(self.budget, self.length), dim=-1).indices
        hidden = torch.ones(keys.shape[:2], dtype=torch.bool, device=q.device).scatter_(1, best, False)
        hidden[:, self.length:] = False                                        # the round's own rows are always seen
        probs = logits.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
        return ungroup_rows(probs.to(v.dtype) @ values, 1)


def budget(length, sparsity, min_budget):
    """Positions a draft row may see of `length` cached ones (the paper's budget rule)."""
    return min(length, max(min_budget, math.ceil(sparsity * length)))


def look_ahead(scores, memory):
    """Scores (L, G, T) of the selection "ahead": heads that looked at a position are about to look at those behind it, for text is
    read in order, so a score is passed on to the next 7, a fifth less at every position; and what was looked at in earlier
    rounds, memory (L, G, up to T) or None, counts half with every round since."""
    for step in REACH:                                             # doubling: 3 steps reach 7 positions
        passed = 0.8 ** step * scores[..., :-step]
        scores = torch.cat([scores[..., :step], torch.maximum(scores[..., step:], passed)], dim=-1)
    if memory is not None:
        scores[..., :memory.shape[-1]] = torch.maximum(scores[..., :memory.shape[-1]], MEMORY * memory[..., :scores.shape[-1]])
    return scores


class Round:
    """A request's notes: the selection that its drafts use, the drafts so far, and where it is in its round. `phase` counts
    the iterations of a round: 0 .. k - 1 draft, k verifies, k + 1 is the stall of delayed verification."""

    def __init__(self, selected, recent, phase=None, memory=None):
        self.selected, self.recent = selected, recent          # (L, G, c) positions, or None for all
        self.memory = memory                                   # scores (L, G, T) that the next selection remembers
        self.phase, self.k = phase, None                       # None: not started
        self.keys, self.drafts, self.q = None, [], []
        self.stalled = False


class SpecGen:
    """The planner of self-speculation.

    k: drafts a round; sparsity, min_budget: size of the selection; recent_share: part of the budget that goes to the
    newest positions (the official rule, share 0, forces only the accepted + 2 newest in); select: "pillar", the paper's;
    "ahead", the same with `look_ahead`; or for comparison "shared" (one list for all heads of a layer), "oracle", "window"
    (first and newest positions), "random";
    schedule: "unified", "lockstep" (join the fullest phase) or "random"; delayed: judge beside the next forward.
    """
    name, taps = "specgen", None

    def __init__(self, engine, k=8, sparsity=0.05, min_budget=64, recent_share=0.0, select="ahead", schedule="unified", delayed=False):
        check_k(k)
        if not 0 < sparsity <= 1:
            raise ValueError(f"sparsity {sparsity} is out of range; allowed is above 0 up to 1 (everything)")
        for what, value, allowed in (("selection", select, SELECTIONS), ("schedule", schedule, SCHEDULES)):
            if value not in allowed:
                raise ValueError(f"unknown {what} '{value}'; choose from {', '.join(allowed)}")
        self.engine, self.k, self.sparsity, self.min_budget = engine, k, sparsity, min_budget
        self.recent_share, self.select, self.schedule, self.delayed = recent_share, select, schedule, delayed
        self.fusable, self.pool = select != "oracle", None
        self.rows, self.record = k + 1, select in ("ahead", "pillar", "shared")
        self.unjudged = []                                     # (segment, logits) of the last iteration, if delayed
        self.rng = random.Random(0)                            # of the "random" schedule

    def extra_slots(self, r):
        """The round's buffer, the scores and the draft's distributions, in slots of the cache."""
        c = self.engine.model.config
        slot = 2 * c.n_layer * c.n_kv_head * c.head_dim
        return budget(r.longest, self.sparsity, self.min_budget) + self.k + math.ceil((2 * c.n_layer * c.n_kv_head * r.longest + self.k * c.vocab_size) / slot)

    def widest(self, length):
        return budget(length, self.sparsity, self.min_budget)

    # -- plan: which rows, which keys ----------------------------------------------------------------------------------

    def plan(self, active):
        if self.pool is None or self.pool.cache is not self.engine.cache:
            self.pool = DraftPool(self.engine.cache, self.k)
        plan = [s for s in map(self._segment, active) if s]
        return sorted(plan, key=lambda s: s.kind)              # drafts stand together: one product serves them

    def _segment(self, r):
        if r.n_cached < len(r.tokens) - 1:                     # NORMAL; its last rows choose for the first round
            return self.engine.prefill(r, self.rows)
        state = r.state = r.state or Round(None, 0)            # nothing read, nothing to choose by: see everything
        if state.stalled:                                      # STALL
            return None
        if state.phase is None:
            state.phase = self._first_phase()
        if state.k is None:                                    # a round commits one token beside its drafts
            state.k = min(self.k - state.phase, r.remaining - 1)
        if len(state.drafts) < state.k:                        # DRAFT
            state.keys = state.keys or self._draft_keys(r, state)
            row = [state.drafts[-1] if state.drafts else r.tokens[-1]]
            return Segment(r, row, r.n_cached + len(state.drafts), state.keys, "draft", 1)
        state.phase = self.k                                   # VERIFY
        self._forget(state)
        rows = [r.tokens[-1], *state.drafts]
        keys = FullKeys(self.engine.cache, r.run.first, r.n_cached, len(rows), record=self.record)
        return Segment(r, rows, r.n_cached, keys, "verify", len(rows), state.drafts, torch.stack(state.q) if state.q else None)

    def _first_phase(self):
        """Where in its round a request starts: the emptiest phase, so that every forward has about as many rows."""
        loads = [0] * (self.k + 1)
        for other in self.engine.active:
            if other.state and other.state.phase is not None and other.state.phase <= self.k:
                loads[other.state.phase] += 1
        if self.schedule == "random":
            return self.rng.randrange(self.k + 1)
        return loads.index(max(loads) if self.schedule == "lockstep" else min(loads))

    def _draft_keys(self, r, state):
        if self.select == "oracle":
            return OracleKeys(self.engine.cache, r.run.first, r.n_cached, budget(r.n_cached, self.sparsity, self.min_budget))
        return PillarKeys(self.pool, r.run.first, r.n_cached, state.selected, state.recent)

    def _forget(self, state):
        if isinstance(state.keys, PillarKeys):
            self.pool.give_back(state.keys)
        state.keys = None

    # -- settle: accept, select ----------------------------------------------------------------------------------------

    def settle(self, plan, logits):
        """Take in the drafts, and judge what was verified, now or (delayed) beside the next forward."""
        row, drafting, judged = 0, ([], []), ([], [])          # (segments, their rows of logits)
        for s in plan:
            if s.kind == "prefill":
                s.request.n_cached += len(s.tokens)
            if s.n_logits:
                segments, rows = drafting if s.kind == "draft" else judged
                segments.append(s)
                rows += range(row, row + s.n_logits)
            row += s.n_logits
        if drafting[0]:
            requests = [s.request for s in drafting[0]]
            for r, token, q in zip(requests, *draw_drafts(requests, logits[drafting[1]])):
                r.state.drafts.append(token)
                r.state.phase += 1
                r.state.q += [] if q is None else [q]
        if judged[0] and self.delayed:
            self.unjudged = [(judged[0], logits[judged[1]])]
            for s in judged[0]:
                s.request.state = s.request.state or Round(None, 0)
                s.request.state.phase, s.request.state.stalled = self.k + 1, True
        elif judged[0]:
            yield from self._judge(judged[0], logits[judged[1]])

    def late(self):
        """Judge what the iteration before this one verified."""
        held, self.unjudged = self.unjudged, []
        for segments, logits in held:
            yield from self._judge(segments, logits)

    def _judge(self, segments, logits):
        for s, (accepted, token) in zip(segments, self.engine.judge(segments, logits)):
            r = s.request
            if r.finished:                                     # cancelled meanwhile
                continue
            if s.kind == "verify":
                r.n_cached += 1 + accepted
                r.state = self._select(r, s.keys, accepted)
            else:                                              # all rows of a prompt are good
                r.state = self._select(r, s.keys, len(s.tokens) - 1)
                r.state.phase = None
            yield r, r.commit(s.drafts[:accepted] + [token], len(s.drafts), accepted, self.name if s.kind == "verify" else "")

    def _select(self, r, keys, accepted):
        """The next round's positions from this verification's scores: the accepted + 2 newest (not every row saw
        those, so their averages do not compare), more newest ones by recent_share, then the top scores."""
        length = r.n_cached
        b = budget(length, self.sparsity, self.min_budget)
        layers, groups = self.engine.cache.k.shape[:2]
        recent = min(b, max(accepted + 2, round(self.recent_share * b)))
        if self.select == "window":
            recent = max(b - N_SINKS, min(b, accepted + 2))
        critical, older, memory = b - recent, length - recent, None
        if b == length or self.select == "oracle":
            return Round(None, 0, 0)
        if self.select == "window":
            selected = torch.arange(critical, device=self.engine.model.device).expand(layers, groups, critical)
        elif self.select == "random":
            noise = torch.rand(layers, groups, older, generator=r.rng).to(self.engine.model.device)
            selected = noise.topk(critical, dim=-1).indices
        else:
            scores = keys.scores[:, :, :length]
            if self.select == "shared":
                scores = scores.mean(1, keepdim=True).expand(-1, groups, -1)
            if self.select == "ahead":
                scores = memory = look_ahead(scores, r.state.memory if r.state else None)
            selected = scores[:, :, :older].topk(critical, dim=-1, sorted=False).indices
        return Round(selected, recent, 0, memory)

    def release(self, r):
        if r.state:
            self._forget(r.state)
        r.state = None


# -- when does it pay? -------------------------------------------------------------------------------------------------

def predicted_speedup(k, accepted, attention_share, draft_cost, growth=1.0, verify_cost=1.0, select_cost=0.0, delayed=False, host_cost=0.0, rounds=math.inf, batch=1):
    """Speed-up over autoregressive decoding of the same batch (the paper's cost model). accepted: of k drafts, on average;
    attention_share: part of an autoregressive step; growth: how much longer everything else takes on the (2k + 1) / (k + 1)
    as many rows of a mixed forward. The others are in units of a step's attention: draft_cost that of a draft step, verify_cost
    that of a verification's k + 1 rows, select_cost choosing and gathering for a round. Where a step is bound by reading
    weights and keys, the paper's case, they are s, 1 and 0, and growth is 1. host_cost: what an iteration's planning and judging takes
    longer than in the autoregressive loop, in steps.

    A round takes k + 1 iterations (one more if delayed) and commits accepted + 1 tokens. rounds: of an answer, where all of a
    batch begin together and are waited for: the schedule spreads them over the k + 1 phases, and the last one ends so much later.
    """
    rest, waited = 1 - attention_share, 1 / (1 + min(batch - 1, k) / (k + 1) / rounds)
    return waited * (accepted + 1) / ((k + 1 + delayed) * (growth * rest + host_cost) + (k * draft_cost + verify_cost + select_cost) * attention_share)


@torch.inference_mode()
def measure_costs(model, context, batch, k, sparsity, min_budget, repeats=5):
    """What the cost model needs, measured (medians) on a batch of requests that have `context` tokens: its arguments by name.
    Under an attention share of about a third drafting sparsely cannot win. The rest is timed without any attention: what a
    call for every request costs, however short its context, is attention, which draft rows share and which more rows do not repeat.
    Everything short is timed behind a step that reads all keys, as it happens in serving: nothing is left in the processor's caches."""
    c, room = model.config, context + k + 1
    cache, mixed = KVCache(c, batch * room, model.dtype, model.device), math.ceil(batch * (2 * k + 1) / (k + 1))
    scores, pool = torch.rand(batch, c.n_layer, c.n_kv_head, context, device=model.device), DraftPool(cache, k)

    def seconds(work):
        started = time.perf_counter()
        out = work()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started, out

    def forward(rows, attend):
        tokens = torch.zeros(rows, dtype=torch.long, device=model.device)
        return seconds(lambda: model.logits(model(tokens, torch.full_like(tokens, context), attend())))[0]

    def full(rows):
        keys = [FullKeys(cache, i * room, context, rows, record=rows > 1) for i in range(batch)]
        return forward(batch * rows, lambda: packed_attend([(i * rows, i * rows + rows, one) for i, one in enumerate(keys)]))

    def rest(rows):                                            # of a forward: everything but attention
        full(1)
        return forward(rows, lambda: lambda layer, q, k, v: q)

    def drafting():
        """Of a round: choosing, and the first draft step, which gathers; and a later draft step."""
        top = budget(context, sparsity, min_budget) - 1
        choosing, chosen = seconds(lambda: [look_ahead(s, s).topk(top, dim=-1, sorted=False).indices for s in scores])
        keys = [PillarKeys(pool, i * room, context, one, 1) for i, one in enumerate(chosen)]
        first = forward(batch, lambda: pool.attend(keys))
        full(1)
        later = forward(batch, lambda: pool.attend(keys))
        for one in keys:
            pool.give_back(one)
        return choosing + first - later, later

    t = [(full(1), rest(batch), rest(mixed), full(k + 1), rest(batch * (k + 1)), *drafting()) for _ in range(repeats)]
    whole, others, more, verify, verify_others, select, draft = (sorted(some)[repeats // 2] for some in zip(*t))
    attention = max(whole - others, 1e-9)
    return {"attention_share": attention / (others + attention), "growth": more / others, "draft_cost": max(draft - others, 0) / attention,
            "verify_cost": max((verify - verify_others) / attention, 1.0), "select_cost": max(select, 0) / attention}
