"""SpecGen / SparseSpec (arXiv 2512.01278): a model drafts for itself with sparse attention, then verifies
with full attention.

Decoding a long chain of thought is bound by reading the key/value cache. SpecGen drafts k tokens with the
same weights but only about 5 % of the cache, then verifies all of them in one forward that reads the whole
cache. That forward computes every attention probability anyway, and those probabilities select the 5 % for
the next round (PillarAttn): no second model, no training.

One round of a request that has N tokens in the cache and N + 1 committed, in the order of the code below:
    DRAFT    k forwards of one row, t0, d1, .. at positions N, N + 1, ..; the row reads the selected positions
             and the round's earlier rows
    VERIFY   one forward of k + 1 rows t0, d1 .. dk at positions N .. N + k with full causal attention, which
             records the scores; then verify.py accepts a of the k drafts and adds one token
    SELECT   for every layer and KV head, the positions that the next round drafts with
The last rows of the prompt select for the first round. With delayed verification the host verifies the drafts
while the next forward already runs; the request sits that iteration out (a stall), the others do not wait.

Unified schedule: requests in all phases share one forward. If all drafted together and verified together,
forwards would have B rows k times and then (k + 1) B rows; with the phases spread evenly each has about (2k +
1) / (k + 1) B. A request starts in the emptiest phase of the schedule, by making its first round shorter;
from then on all requests advance by one phase a forward.

Glossary, code <-> paper: k draft steps per round (spec_stride); sparsity = s, the budget's share of the
context; a accepted drafts; `scores` the mean softmax probability of a position over the k + 1 verification
rows and the query heads of a group; `recent` the number of newest positions that are read in any case.

Differences from the paper, and why:
    The keys and values that draft rows read are copied to a short buffer once a round, and those of the
    draft rows are appended to the buffer. On a CPU the copy is cheaper than gathering the selection at every
    step, and the cache never holds a value computed under sparse attention (the paper overwrites these values
    at verification). On a GPU draft rows are written to the cache as in the paper, in CUDA graphs
    (kernels/graphs.py).
    All k + 1 rows count in the scores; the released kernel drops rows beyond its first tile.
    By default scores are passed on to the following positions and remembered (`look_ahead`); select="pillar"
    is the paper's rule. The default acceptance rule is `coupled`; the paper's is `rejection`.
    Selections are positions, not slots, so a request may be offloaded and restored to other slots.
"""
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from minispec.core.attention import FullKeys
from minispec.core.requests import Segment, check_k
from minispec.core.scheduler import Scheduler
from minispec.core.verify import choose, warp

SELECTIONS = ("ahead", "pillar", "window")
SCHEDULES = ("unified", "lockstep")
# Constants of the selection "ahead", see look_ahead.
FADE = 0.6
MEMORY = 0.5
GROWTH = 16                                  # entries that buffers grow by beyond their need
N_SINKS = 4                                  # first positions that a plain window keeps (2309.17453)


@dataclass
class SpecGenState:
    """The state of one round of a request.

    selected (L, G, c): the positions that its draft rows read, None for all. recent: the number of newest
    positions that they read besides. memory (L, G, T): scores that the next selection remembers. phase: of
    the schedule, 0 .. k, in which the round starts; None for the first round of a request, until it
    starts. k: drafts of this round, set when it starts. drafts: token ids so far. logits: rows (V,) that they
    were drawn from. keys: PillarKeys of the round, once it drafts.
    """
    selected: torch.Tensor = None
    recent: int = 0
    memory: torch.Tensor = None
    phase: int = None
    k: int = None
    drafts: list = field(default_factory=list)
    logits: list = field(default_factory=list)
    keys: object = None


class SpecGen(Scheduler):
    """The scheduler of self-speculation.

    k: drafts a round. sparsity, min_budget: size of the selection (see `budget`). select: "pillar", the
    paper's; "ahead", the same with `look_ahead`; "window", the first and the newest positions. schedule:
    "unified" or "lockstep" (join the fullest phase). delayed: verify drafts while the next forward runs; a
    round then takes one more iteration, which pays only where the host takes more than 1 / (k + 2) of an
    iteration. ValueError if k or sparsity is out of range.
    """

    def __init__(self, engine, k=8, sparsity=0.05, min_budget=64, select="ahead", schedule="unified",
                 delayed=False):
        check_k(k)
        if not 0 < sparsity <= 1:
            raise ValueError(f"sparsity {sparsity} is out of range; allowed is above 0 up to 1 (everything)")
        self.engine = engine
        self.k = k
        self.sparsity = sparsity
        self.min_budget = min_budget
        self.select = select
        self.in_phase = schedule == "lockstep"
        self.delayed = delayed
        self.rows = k + 1                                  # of a verification
        self.record_prompt = k + 1                         # the prompt's last rows select for the first round
        self.record = None if select == "window" else pillar_scores
        self.pool = None

    def budget(self, length):
        """The number of positions that a draft row reads of `length` cached ones. (The authors' least is 128
        or 192.)"""
        return min(length, max(self.min_budget, math.ceil(self.sparsity * length)))

    def extra_slots(self, r):
        """The round's buffer, the scores and the drafts' distributions, in slots of the cache."""
        c = self.engine.model.config
        heads = c.n_layer * c.n_kv_head
        scores_and_q = 2 * heads * r.longest + self.k * c.vocab_size
        return self.budget(r.longest) + self.k + math.ceil(scores_and_q / (2 * heads * c.head_dim))

    # -- draft and verify: which rows, which keys ------------------------------------------------------------

    def schedule(self, ready):
        """Segments for the requests that draft, then for those that verify."""
        cache = self.engine.cache
        if self.pool is None or self.pool.cache is not cache:
            self.pool = DraftPool(cache, self.k)
        for r in ready:
            # A prompt of one token leaves nothing to select by.
            r.state = r.state or SpecGenState()
        drafting, verifying = [], []
        for r in ready:
            state = r.state
            # 1. A round begins. The verification commits one token besides the drafts, so the last token
            #    needs no draft.
            if state.k is None:
                if state.phase is None:
                    state.phase = self._first_phase(ready)
                state.k = min(self.k - state.phase, r.remaining - 1)
            # 2. The row of the next draft step, with sparse attention.
            rows = [r.tokens[-1], *state.drafts]
            if len(state.drafts) < state.k:
                if state.keys is None:
                    state.keys = PillarKeys(self.pool, r.blocks, r.n_cached, state.selected, state.recent)
                start = r.n_cached + len(state.drafts)
                drafting.append(Segment(r, rows[-1:], start, state.keys, "draft", n_logits=1))
                continue
            # 3. All rows of the verification, with full attention. The draft rows' buffer is free again.
            self.pool.free(state.keys)
            keys = FullKeys(cache, r.blocks, r.n_cached, len(rows), record=self.record)
            q = None
            if state.drafts:
                q = lambda logits=state.logits, how=r.sampling: warp(torch.stack(logits), how)
            verifying.append(Segment(r, rows, r.n_cached, keys, "verify", len(rows), state.drafts, q,
                                     proposer="specgen"))
        return drafting + verifying

    def _first_phase(self, ready):
        """The phase in which a request starts: the emptiest, so that all forwards have about as many rows.
        In phase p the first round has k - p drafts, and reaches the verification with the others."""
        # Requests in each phase: those that feed t0 or a draft, and in the last phase those that verify.
        loads = [0] * (self.k + 1)
        for other in ready:
            state = other.state
            n = len(state.drafts)
            if state.phase is not None:
                loads[self.k if n == state.k else state.phase + n] += 1
        return loads.index(max(loads) if self.in_phase else min(loads))

    def take_drafts(self, segments, logits):
        """Draw the next draft of each request from its row of the logits (n, V)."""
        logits = logits.clone()                            # kept for q: a view would keep all rows
        drawn = choose(segments, logits[:, None].unbind(), drafting=True)
        for s, own, (token,) in zip(segments, logits, drawn):
            s.request.state.drafts.append(token)
            s.request.state.logits.append(own)

    # -- select: the prompt is read, or drafts have been verified --------------------------------------------

    def verified(self, segment, accepted):
        """Begin the next round: select the positions that it drafts with."""
        r = segment.request
        prompt = segment.kind == "prefill"                 # the end of a prompt: all of its rows stay
        r.state = self._select(r, segment.keys, len(segment.tokens) - 1 if prompt else accepted)
        r.state.phase = None if prompt else 0

    def _select(self, r, keys, accepted):
        """The SpecGenState of the next round, from the scores (L, G, T) of a verification's keys. The
        accepted + 2 newest positions are read in any case: not every row saw the accepted drafts, so their
        averages are too low. The older positions with the largest scores fill up the budget."""
        b = self.budget(r.n_cached)
        if b == r.n_cached:                                # all positions fit into the budget
            return SpecGenState()
        recent = min(b, accepted + 2)
        if self.select == "window":
            recent = max(recent, b - N_SINKS)
            layers, groups, *_ = self.engine.cache.k.shape
            sinks = torch.arange(b - recent, device=self.engine.model.device)
            return SpecGenState(sinks.expand(layers, groups, -1), recent)
        scores = keys.scores[:, :, :r.n_cached]
        if self.select == "ahead":
            scores = look_ahead(scores, r.state.memory if r.state else None)
        older = scores[:, :, :-recent]
        return SpecGenState(older.topk(b - recent, dim=-1, sorted=False).indices, recent, scores)

    def release(self, r):
        if r.state:
            self.pool.free(r.state.keys)
        r.state = None


# -- which positions: the scores of a verification -----------------------------------------------------------

def pillar_scores(probs):
    """PillarAttn: the attention that each position received from a verification. probs (.., rows, T) are the
    softmax probabilities of one KV head, of all rows of the request and all query heads of the group; their
    mean is (.., T)."""
    return probs.mean(-2)


def look_ahead(scores, memory):
    """Scores (L, G, T) of the selection "ahead". Attention to a position often moves on to the following
    positions, because text is read in order. So a score is passed on to the next 7 positions, fading with
    each. Scores of earlier rounds, memory (L, G, up to T) or None, count half with every round since."""
    scores = scores.clone()
    # Doubling: 3 steps reach 1 + 2 + 4 = 7 positions.
    for step in (1, 2, 4):
        passed = FADE ** step * scores[..., :-step]
        scores[..., step:].clamp_(min=passed)
    if memory is not None:
        scores[..., :memory.shape[-1]].clamp_(min=MEMORY * memory)
    return scores


# -- the keys of draft rows ----------------------------------------------------------------------------------

@dataclass(eq=False)
class PillarKeys:
    """The keys that a request's draft rows read in one round: at the positions selected (L, G, c), chosen for
    each layer and KV head, at the `recent` newest of `length` cached ones (selected None: at all of them),
    and at the positions of the round's own rows. blocks: the request's. backend: a DraftPool."""
    backend: object
    blocks: object
    length: int
    selected: torch.Tensor
    recent: int
    buffer: int = None                       # its number in the pool, once the keys are gathered
    scores = tail = None                     # see FullKeys

    def __post_init__(self):
        # Entries of the buffer so far.
        self.n = self.length if self.selected is None else self.selected.shape[-1] + self.recent


class DraftPool:
    """The attention backend of draft rows. Each drafting request has a buffer, a copy of the keys and values
    that it reads; all buffers are one tensor kv (2, L, buffers, G, width, D), so that one product a layer
    serves all requests. The first draft step of a round gathers the selection, and every step appends its
    row. (On a GPU the kernel reads the cache in place, and there is no copy.)"""

    def __init__(self, cache, room):
        """room: draft rows that a round may append."""
        self.cache = cache
        self.room = room
        self.taken = []                                    # buffer -> the keys that have it, or None
        layers, groups, _, d = cache.k.shape
        self.kv = cache.kv.new_empty(2, layers, 0, groups, 0, d)

    def plan(self, members):
        """store and read of the draft rows of n keys, a row each; see packed_attend."""
        for keys in members:
            if keys.buffer is None:
                self.gather(keys)
        buffers = [keys.buffer for keys in members]        # of each row
        b = max(buffers) + 1                               # free ones between them are computed for nothing
        *_, groups, width, d = self.kv.shape               # whole buffers, because torch would copy a part
        row_of, new = [0] * b, []                          # the row of each buffer; a free one has any
        # Buffers differ in length: the entries after the end of each are hidden.
        mask = torch.full((b, groups, width, 1), float("-inf"), dtype=self.kv.dtype)
        for i, keys in enumerate(members):
            row_of[keys.buffer] = i
            # The new key goes to the end of the buffer, with a layer seen as one table of vectors (D,).
            new += [(keys.buffer * groups + head) * width + keys.n for head in range(groups)]
            keys.n += 1
            mask[keys.buffer, :, :keys.n] = 0.0
        row_of, buffers, new = (torch.tensor(x, device=self.kv.device) for x in (row_of, buffers, new))
        mask = mask.flatten(0, 1).to(self.kv.device)                           # (b * G, width, 1)

        def store(layer, k, v):
            for pool, x in zip(self.kv[:, layer], (k, v)):
                pool.view(-1, d).index_copy_(0, new, x.reshape(-1, d))

        def read(layer, q):
            keys, values = self.kv[:, layer, :b].flatten(1, 2)                 # (b * G, width, D)
            q = q.index_select(0, row_of).view(b * groups, -1, d)              # (b * G, g, D)
            # Keys come first in the product: torch would copy their transpose.
            logits = torch.baddbmm(mask, keys, q.mT, alpha=d ** -0.5)          # (b * G, width, g)
            out = logits.mT.softmax(-1) @ values                               # (b * G, g, D)
            return out.view(b, -1, d).index_select(0, buffers)                 # (n, H, D)
        return store, read

    def gather(self, keys):
        """Take a buffer, and copy the keys and values of the selected and newest positions into it."""
        if None not in self.taken:
            self.taken.append(None)
        keys.buffer = self.taken.index(None)
        self.taken[keys.buffer] = keys
        # The tensor grows if it has no room.
        more_buffers = max(len(self.taken) - self.kv.shape[2], 0)
        more_width = max(keys.n + self.room - self.kv.shape[4], 0)
        if more_buffers or more_width:
            padding = (0, 0, 0, more_width and more_width + GROWTH, 0, 0, 0, more_buffers)
            self.kv = F.pad(self.kv, padding)
        # The first slot of each layer and head, with the cache seen as one table of vectors (D,).
        layers, groups, n_slots, _ = self.cache.k.shape
        heads = torch.arange(0, layers * groups * n_slots, n_slots, device=self.kv.device)
        heads = heads.view(layers, groups, 1)
        # The slots of all positions, then of those that are read.
        slots = self.cache.slots_of(keys.blocks, range(keys.length))
        if keys.selected is not None:
            newest = slots[keys.length - keys.recent:].expand(*keys.selected.shape[:2], -1)
            slots = torch.cat([slots[keys.selected], newest], 2)               # (L, G, n)
        for pool, cached in zip(self.kv, self.cache.kv):
            # F.embedding copies whole vectors: a tenth of the time of gather.
            pool[:, keys.buffer, :, :keys.n] = F.embedding(heads + slots, cached.flatten(0, 2))

    def free(self, keys):
        """Free the buffer of a round's keys, if they have one."""
        if keys is not None and keys.buffer is not None:
            self.taken[keys.buffer] = None
            keys.buffer = None
