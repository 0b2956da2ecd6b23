"""SpecGen / SparseSpec (arXiv 2512.01278): a model drafts for itself by attending sparsely, then verifies in full.

Decoding long chains of thought is bound by reading the key/value cache. So draft k tokens with the same weights but only
about 5 % of the cache, then check all of them in one forward that reads all of it. That forward computes every attention
probability anyway, and those probabilities choose the 5 % for the next round (PillarAttn): no second model, no training.

One round of a request that has N tokens in the cache and N + 1 committed:
    1 draft    k times one row: t0, d1, .. at positions N, N + 1, ..; it sees the selected positions and the round's own rows
    2 verify   k + 1 rows t0, d1 .. dk at positions N .. N + k with full causal attention, recording scores
    3 accept   greedy or rejection sampling with the draft's own distributions: a of k drafts, and one more token
    4 select   for every layer and KV head, the positions to draft with in the next round

Glossary, code <-> paper: k draft steps per round (spec_stride); sparsity = s, the budget's share of the context; a
accepted drafts; `scores` the mean softmax probability of a position over the k + 1 verification rows and the query
heads of a group; `recent` the positions taken because they are the newest.

What differs from the paper and why: draft rows write their keys and values into a short buffer of the round, which
also holds a copy of the selected ones, instead of into the cache. The selection is fixed for a round, so gathering it
once is cheaper on a CPU than gathering it at every step, and the cache never holds a value computed under sparse
attention at all (the paper overwrites them at verification). All k + 1 rows count in the scores; the released
kernel drops rows beyond its first tile.
Not here yet: unified scheduling of phases, delayed verification, the dynamic cache manager.
"""
import math

import torch
import torch.nn.functional as F

from .attention import FullKeys, group_rows, ungroup_rows
from .engine import Segment, draw_drafts

SELECTIONS = ("pillar", "window", "random")
N_SINKS = 4                                  # first positions that a plain window keeps (StreamingLLM)


class PillarKeys:
    """The keys of one round of draft steps: a gathered copy of the selected positions, then the round's own rows.

    selected: (L, G, c) positions, chosen per layer and KV head, or None for all of them (the cold start after a prompt);
    recent: how many of the newest `length` cached positions come on top; k: draft steps to leave room for. `attend` is for single rows (one draft step).
    """

    def __init__(self, cache, base, length, selected, recent, k):
        layers, groups, _, d = cache.k.shape
        n = length if selected is None else selected.shape[-1] + recent
        self.k = torch.empty(layers, groups, n + k, d, dtype=cache.k.dtype, device=cache.k.device)
        self.v = torch.empty_like(self.k)
        for buffer, pool in ((self.k, cache.k), (self.v, cache.v)):
            if selected is None:
                buffer[:, :, :n] = pool[:, :, base:base + length]
            else:
                index = (base + selected)[..., None].expand(-1, -1, -1, d)
                buffer[:, :, :n - recent] = pool.gather(2, index)
                buffer[:, :, n - recent:n] = pool[:, :, base + length - recent:base + length]
        self.n = n

    def attend(self, layer, q, k, v):
        """q (1, H, D), k and v (1, G, D) -> (1, H, D). Rows are appended in the order of the layers, so layer 0 opens
        a step."""
        if layer == 0:
            self.n += 1
        self.k[layer, :, self.n - 1], self.v[layer, :, self.n - 1] = k[0], v[0]
        rows = group_rows(q, k.shape[1])
        return ungroup_rows(F.scaled_dot_product_attention(rows[None], self.k[None, layer, :, :self.n],
                                                           self.v[None, layer, :, :self.n])[0], 1)


def budget(length, sparsity, min_budget):
    """Positions a draft row may see of `length` cached ones (the paper's budget rule)."""
    return min(length, max(min_budget, math.ceil(sparsity * length)))


class SpecGen:
    """The planner of self-speculation. Every request runs its own rounds: phases differ between requests.

    k: drafts a round; sparsity, min_budget: size of the selection; recent_share: part of the budget that goes to the
    newest positions (the official rule, share 0, forces only the accepted + 2 newest in); select: "pillar", or
    "window" (first and newest positions) and "random" for comparison.
    """
    name = "specgen"

    def __init__(self, engine, k=8, sparsity=0.05, min_budget=64, recent_share=0.5, select="pillar"):
        if not 1 <= k <= 32:
            raise ValueError(f"k {k} is out of range; allowed is 1 to 32 draft tokens a round")
        if not 0 < sparsity <= 1:
            raise ValueError(f"sparsity {sparsity} is out of range; allowed is above 0 up to 1 (everything)")
        if select not in SELECTIONS:
            raise ValueError(f"unknown selection '{select}'; choose from {', '.join(SELECTIONS)}")
        self.engine, self.k, self.sparsity, self.min_budget = engine, k, sparsity, min_budget
        self.recent_share, self.select = recent_share, select

    # -- plan: which rows, which keys ----------------------------------------------------------------------------------

    def plan(self, active):
        return [self._segment(r) for r in active]

    def _segment(self, r):
        if r.n_cached < len(r.tokens) - 1:
            return self.engine.prefill(r)
        state = r.state
        if state is None:                                     # cold start: no scores yet, see everything
            state = r.state = Round(None, 0)
        k = min(self.k, r.remaining - 1)                      # a round commits one token beside its drafts
        if len(state.drafts) < k:
            if state.keys is None:
                state.keys = PillarKeys(self.engine.cache, r.base, r.n_cached, state.selected, state.recent, k)
            row = [state.drafts[-1] if state.drafts else r.tokens[-1]]
            return Segment(r, row, r.n_cached + len(state.drafts), state.keys, "draft", 1)
        rows = [r.tokens[-1], *state.drafts]
        keys = FullKeys(self.engine.cache, r.base, r.n_cached, len(rows), record=self.select == "pillar")
        return Segment(r, rows, r.n_cached, keys, "verify", len(rows), state.drafts, torch.stack(state.q) if state.q else None)

    # -- settle: accept, select ----------------------------------------------------------------------------------------

    def settle(self, plan, logits):
        row, drafting, judged = 0, ([], []), ([], [])          # (segments or requests, their rows of logits)
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
                r.state.q += [] if q is None else [q]
        if judged[0]:
            for s, (accepted, token) in zip(judged[0], self.engine.judge(judged[0], logits[judged[1]])):
                if s.kind == "verify":
                    s.request.n_cached += 1 + accepted
                    s.request.state = self._select(s.request, s.keys, accepted)
                proposer = self.name if s.kind == "verify" else ""
                yield s.request, s.request.commit(s.drafts[:accepted] + [token], len(s.drafts), accepted, proposer)

    def _select(self, request, keys, accepted):
        """The next round's positions from this verification's scores: the accepted + 2 newest (not every row saw
        those, so their averages do not compare), more newest ones by recent_share, then the top scores."""
        length = request.n_cached
        b = budget(length, self.sparsity, self.min_budget)
        layers, groups = self.engine.cache.k.shape[:2]
        recent = min(b, max(accepted + 2, round(self.recent_share * b)))
        if self.select == "window":
            recent = max(b - N_SINKS, min(b, accepted + 2))
        critical, older = b - recent, length - recent
        if b == length:
            return Round(None, 0)
        if self.select == "pillar":
            selected = keys.scores[:, :, :older].topk(critical, dim=-1, sorted=False).indices
        elif self.select == "window":
            selected = torch.arange(critical, device=self.engine.model.device).expand(layers, groups, critical)
        else:
            noise = torch.rand(layers, groups, older, generator=request.rng).to(self.engine.model.device)
            selected = noise.topk(critical, dim=-1).indices
        return Round(selected, recent)

    def release(self, request):
        request.state = None


class Round:
    """A request's notes: the selection its next drafts use, and the drafts of the round so far."""

    def __init__(self, selected, recent):
        self.selected, self.recent = selected, recent          # (L, G, c) positions, or None for all
        self.keys, self.drafts, self.q = None, [], []
