"""SpecGen / SparseSpec (arXiv 2512.01278): a model drafts for itself by attending sparsely, then verifies in
full.

Decoding long chains of thought is bound by reading the key/value cache. So draft k tokens with the same
weights but only about 5 % of the cache, then check all of them in one forward that reads all of it. That
forward computes every attention probability anyway, and those probabilities choose the 5 % for the next round
(PillarAttn): no second model, no training.

One round of a request that has N tokens in the cache and N + 1 committed:
    DRAFT    k times one row: t0, d1, .. at positions N, N + 1, ..; it sees the selected positions and the
             round's own rows (with `lookup`, fewer times, some rows)
    VERIFY   k + 1 rows t0, d1 .. dk at positions N .. N + k with full causal attention, recording scores
    (judge)  the walk (verify.py), or rejection with the draft's own distributions: a of k drafts, and one
             more token; then, for every layer and KV head, select the positions to draft with next
Before the first round the prompt is read. With delayed verification the host judges while the next forward
already runs; the request sits that iteration out (a stall), the others do not wait.

Unified schedule: requests in all phases share one forward. If all drafted together and verified together,
forwards would have B rows k times and then (k + 1) B rows; with the phases spread evenly each has about (2k +
1) / (k + 1) B. A request is put into the emptiest place of the schedule when it starts to draft, by making
its first round shorter, and stays there.

Glossary, code <-> paper: k draft steps per round (spec_stride); sparsity = s, the budget's share of the
context; a accepted drafts; `scores` the mean softmax probability of a position over the k + 1 verification
rows and the query heads of a group; `recent` how many positions are taken because they are the newest.

What differs from the paper and why: draft rows write their keys and values into a short buffer of the round,
which also holds a copy of the selected ones, instead of into the cache. The selection is fixed for a round,
so gathering it once is cheaper on a CPU than gathering it at every step, and the cache never holds a value
computed under sparse attention at all (the paper overwrites them at verification). All k + 1 rows count in
the scores; the released kernel drops rows beyond its first tile. By default scores are handed on to the
positions behind and remembered (`look_ahead`); select="pillar" is the paper's rule. Selections are positions,
not slots, so a request may leave the device and come back elsewhere. With `lookup` a draft step has more rows than one, as
long as rows cost little: what followed the last time that the text went like this. Sparse attention judges
these copies, and full attention what passed, three levels as in TriForce (2404.11912). On a GPU
(kernels/fused.py) it is meant to be as in the paper, with CUDA graphs (kernels/graphs.py); it has not run on
one yet.
"""
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from minispec.core.attention import FullKeys, group_rows, ungroup_rows
from minispec.core.drafters import NGram
from minispec.core.engine import Planner
from minispec.core.requests import Segment, check_k, check_lookup
from minispec.core.verify import walk, warp

SELECTIONS = ("ahead", "pillar", "window")
SCHEDULES = ("unified", "lockstep")
# Of the selection "ahead": see look_ahead.
REACH = (1, 2, 4)
FADE = 0.6
MEMORY = 0.5
GROWTH = 16                                  # entries that a pool of selections grows by beyond its need
N_SINKS = 4                                  # first positions that a plain window keeps (StreamingLLM)


# -- what draft rows see -------------------------------------------------------------------------------------

@dataclass(eq=False)
class PillarKeys:
    """What the draft rows of a request may see in one round: selected (L, G, c) positions, chosen per layer
    and KV head, and the `recent` newest of `length` cached ones (selected None: all of them); then the rows
    of the round itself, of which a forward has `rows`. `blocks` are the request's; `server` is a DraftPool."""
    server: object
    blocks: object
    length: int
    selected: torch.Tensor
    recent: int
    rows: int = 1
    row: int = None  # in the pool, once it is gathered
    scores = None

    def __post_init__(self):
        # Entries of the list so far.
        self.n = self.length if self.selected is None else self.selected.shape[-1] + self.recent


class DraftPool:
    """A copy of what every drafting request may see, (L, rows, G, width, D), so that one product a layer
    serves all of them. A row is gathered by the first draft step of a round; every step appends to it. (On a
    GPU the kernel reads the cache in place, and there is no copy.)"""

    def __init__(self, cache, room):
        """room: draft rows that a round may append."""
        self.cache = cache
        self.room = room
        self.taken = []                                    # row -> the keys that have it, or None
        layers, groups, _, d = cache.k.shape
        self.k = self.v = cache.k.new_empty(layers, 0, groups, 0, d)

    def give_back(self, keys):
        if keys is not None and keys.row is not None:
            self.taken[keys.row] = None
            keys.row = None

    def gather(self, keys):
        """Take a row, and copy what is selected into it."""
        if None not in self.taken:
            self.taken.append(None)
        keys.row = self.taken.index(None)
        self.taken[keys.row] = keys
        self._grow(len(self.taken), keys.n + self.room)
        # Where each layer's and head's slots begin, of the cache seen as one table of rows (D,).
        layers, groups, n_slots, _ = self.cache.k.shape
        heads = torch.arange(0, layers * groups * n_slots, n_slots, device=self.k.device).view(layers, groups, 1)
        # The slots of all positions, then of those that are seen.
        slots = self.cache.slots_of(keys.blocks, range(keys.length))
        if keys.selected is not None:
            newest = slots[keys.length - keys.recent:].expand(*keys.selected.shape[:2], -1)
            slots = torch.cat([slots[keys.selected], newest], 2)               # (L, G, n)
        for pool, cached in ((self.k, self.cache.k), (self.v, self.cache.v)):
            # F.embedding copies whole rows: a tenth of the time of gather.
            pool[:, keys.row, :, :keys.n] = F.embedding(heads + slots, cached.flatten(0, 2))

    def _grow(self, rows, width):
        more_rows = max(rows - self.k.shape[1], 0)
        more_width = max(width - self.k.shape[3], 0)
        if more_width:
            more_width += GROWTH
        if more_rows or more_width:
            padding = (0, 0, 0, more_width, 0, 0, 0, more_rows)
            self.k, self.v = (F.pad(x, padding) for x in (self.k, self.v))

    def serve(self, some):
        """store and read of the draft rows of `some` keys, see packed_attend."""
        for keys in some:
            if keys.row is None:
                self.gather(keys)
        n_lists = max(keys.row for keys in some) + 1       # those that do not draft now are computed too
        most = max(keys.rows for keys in some)             # queries of every list; some are nobody's
        _, _, groups, width, d = self.k.shape              # all of it, because torch would copy a part
        # Which row of the forward a list's query is, and which of these a row is.
        query, place, new = [0] * (n_lists * most), [], []
        # Lists differ in length: what is behind the end of each is hidden.
        hidden = torch.full((n_lists, groups, width, most), float("-inf"), dtype=self.k.dtype)
        for keys in some:
            for i in range(keys.rows):
                place.append(keys.row * most + i)
                query[place[-1]] = len(place) - 1
                # The new key goes to the end of the list, of a layer seen as one table of rows (D,).
                new += [(keys.row * groups + head) * width + keys.n for head in range(groups)]
                keys.n += 1
                hidden[keys.row, :, :keys.n, i] = 0.0
        query, place, new = (torch.tensor(x, device=self.k.device) for x in (query, place, new))
        hidden = hidden.flatten(0, 1).to(self.k.device)                        # (lists * G, width, most)
        mask = None                                        # made in the first layer, the same in all

        def store(layer, k, v):
            # Append this step's keys and values.
            for pool, x in ((self.k[layer], k), (self.v[layer], v)):
                pool.view(-1, d).index_copy_(0, new, x.reshape(-1, d))

        def read(layer, q):
            nonlocal mask
            # All queries read their lists in one product.
            keys, values = (pool[layer, :n_lists].flatten(0, 1) for pool in (self.k, self.v))
            if mask is None:                               # of a single row it fits all heads of a group
                mask = hidden if most == 1 else hidden.repeat(1, 1, q.shape[1] // groups)
            q = q.index_select(0, query).view(n_lists, most, -1, d)
            q = group_rows(q, groups).flatten(0, 1)                            # (lists * G, g * most, D)
            # With the keys first, torch need not turn them around.
            logits = torch.baddbmm(mask, keys, q.mT, alpha=d ** -0.5)          # (lists * G, width, g * most)
            out = (logits.mT.softmax(-1) @ values).unflatten(0, (n_lists, groups))
            return ungroup_rows(out, most).flatten(0, 1).index_select(0, place)          # (n, H, D)
        return store, read


# -- which positions -----------------------------------------------------------------------------------------

def budget(length, sparsity, min_budget):
    """Positions a draft row may see of `length` cached ones (the paper's budget rule)."""
    return min(length, max(min_budget, math.ceil(sparsity * length)))


def look_ahead(scores, memory):
    """Scores (L, G, T) of the selection "ahead". Heads that looked at a position are about to look at those
    behind it, because text is read in order. So a score is passed on to the next 7, and fades with every
    position. And what was looked at in earlier rounds, memory (L, G, up to T) or None, counts half with every
    round since."""
    # Doubling: 3 steps reach 7 positions.
    for step in REACH:
        passed = FADE ** step * scores[..., :-step]
        scores = torch.cat([scores[..., :step], torch.maximum(scores[..., step:], passed)], dim=-1)
    if memory is not None:
        n = min(memory.shape[-1], scores.shape[-1])
        scores[..., :n] = torch.maximum(scores[..., :n], MEMORY * memory[..., :n])
    return scores


# -- the state of a request ----------------------------------------------------------------------------------

@dataclass
class Round:
    """A request's notes: the selection that its drafts use, the drafts so far, and where it is in its round.

    selected (L, G, c): positions, or None for all. recent: how many of the newest are seen besides. memory
    (L, G, T): scores that the next selection remembers. place: the first iteration of the schedule's k + 1
    that it has; None for the first round of a request, which gets its place when it starts. k: drafts of this
    round, set at its start. q: the distributions that the drafts were drawn from, for rejection.

    In an iteration a request feeds

        DRAFT   1 row and copies: t0, then d1, ..    while it has less than k drafts
        VERIFY  k + 1 rows: t0, d1 .. dk             then; its verdict begins a new Round and selection
    """
    selected: torch.Tensor = None
    recent: int = 0
    memory: torch.Tensor = None
    place: int = None
    k: int = None
    drafts: list = field(default_factory=list)
    q: list = field(default_factory=list)
    keys: PillarKeys = None

    @property
    def is_drafted(self):
        return len(self.drafts) == self.k


class SpecGen(Planner):
    """The planner of self-speculation.

    k: drafts a round; sparsity, min_budget: size of the selection; select: "pillar", the paper's; "ahead",
    the same with `look_ahead`; "window", the first and the newest positions; schedule: "unified" or
    "lockstep" (join the fullest place); delayed: judge next to the next forward. A round then has an
    iteration more, so this pays only where the host takes over 1 / (k + 2) of one: on a GPU. lookup: rows
    that a draft step may have besides, of all requests together, for tokens copied from the text (0: none, as
    in the paper). ValueError for settings out of range.
    """
    name = "specgen"

    def __init__(self, engine, k=8, sparsity=0.05, min_budget=64, select="ahead", schedule="unified",
                 delayed=False, lookup=0):
        check_k(k)
        check_lookup(lookup)
        if not 0 < sparsity <= 1:
            raise ValueError(f"sparsity {sparsity} is out of range; allowed is above 0 up to 1 (everything)")
        self.engine = engine
        self.k = k
        self.sparsity = sparsity
        self.min_budget = min_budget
        self.select = select
        self.schedule = schedule
        self.delayed = delayed
        self.rows = k + 1                                  # of a verification
        self.record_prompt = k + 1                         # the prompt's last rows choose for the first round
        self.record = select != "window"                   # whether verifications leave their scores
        self.pool = None
        self.lookup = lookup
        self.ngram = NGram()

    def extra_slots(self, r):
        """The round's buffer, the scores and the draft's distributions, in slots of the cache."""
        c = self.engine.model.config
        heads = c.n_layer * c.n_kv_head
        scores_and_q = 2 * heads * r.longest + self.k * c.vocab_size
        return self.widest(r.longest) + self.k + math.ceil(scores_and_q / (2 * heads * c.head_dim))

    def widest(self, length):
        return budget(length, self.sparsity, self.min_budget)

    # -- plan: which rows, which keys ------------------------------------------------------------------------

    def plan(self, ready):
        """Segments for the requests that draft or verify. Those that draft come first: one product serves
        them."""
        if self.pool is None or self.pool.cache is not self.engine.cache:
            self.pool = DraftPool(self.engine.cache, self.k)
        for r in ready:
            if r.state is None:                            # a prompt of one token leaves nothing to choose by
                r.state = Round()
            if r.state.k is None:
                self._start(r, ready)
        drafting = [r for r in ready if not r.state.is_drafted]
        drafting = [self._draft(r, r.state, self.lookup // len(drafting)) for r in drafting]
        return drafting + [self._verify(r, r.state) for r in ready if r.state.is_drafted]

    def _start(self, r, ready):
        """Begin a round: so many drafts as its place leaves, and one token comes besides them."""
        if r.state.place is None:
            r.state.place = self._first_place(ready)
        r.state.k = min(self.k - r.state.place, r.remaining - 1)

    def _first_place(self, ready):
        """Where in the schedule a request starts: the emptiest place, so that all forwards have about as
        many rows."""
        # How many are at each place of a round: t0 or a draft, or, at the last one, the verification.
        loads = [0] * (self.k + 1)
        for other in ready:
            state = other.state
            if state is not None and state.place is not None:
                loads[self.k if state.is_drafted else state.place + len(state.drafts)] += 1
        return loads.index(max(loads) if self.schedule == "lockstep" else min(loads))

    def _draft(self, r, state, spare):
        if state.keys is None:
            state.keys = PillarKeys(self.pool, r.blocks, r.n_cached, state.selected, state.recent)
        token = state.drafts[-1] if state.drafts else r.tokens[-1]
        copies = self.ngram.copies(r, min(spare, state.k - len(state.drafts) - 1), state.drafts)
        rows = [token, *copies]
        state.keys.rows = len(rows)
        start = r.n_cached + len(state.drafts)
        return Segment(r, rows, start, state.keys, "draft", len(rows), copies)

    def _verify(self, r, state):
        self.pool.give_back(state.keys)                    # the drafts' list is not needed any more
        rows = [r.tokens[-1], *state.drafts]
        keys = FullKeys(self.engine.cache, r.blocks, r.n_cached, len(rows), record=self.record)
        q = torch.stack(state.q) if state.q else None
        return Segment(r, rows, r.n_cached, keys, "verify", len(rows), state.drafts, q)

    # -- settle: drafts, then verdicts and selections --------------------------------------------------------

    def take_drafts(self, segments, logits):
        """Draw the next drafts of each request from the logits (n, V) of its rows. The walk judges copies by
        the distribution that sparse attention gives: so each draft is drawn from that, whether it was copied
        or not."""
        each = logits.split([len(s.tokens) for s in segments])
        for s, own, (path, token) in zip(segments, each, walk(segments, logits, drafting=True)):
            state, sampling = s.request.state, s.request.sampling
            right = len(path)
            state.drafts += [*s.drafts[:right], token]
            if sampling.temperature > 0 and sampling.rule == "rejection":
                state.q += warp(own[:right + 1], sampling).unbind()
            s.keys.n -= len(s.drafts) - right              # the next step overwrites the wrong ones

    def judged(self, segment, accepted):
        """So many drafts were accepted: choose what the next round drafts with."""
        r = segment.request
        prompt = segment.kind == "prefill"                 # its end, of which all rows are good
        r.state = self._select(r, segment.keys, len(segment.tokens) - 1 if prompt else accepted)
        r.state.place = None if prompt else 0

    def _select(self, r, keys, accepted):
        """The next round's positions: the accepted + 2 newest (not every row saw those, so their averages do
        not compare), then the top scores of this verification."""
        b = self.widest(r.n_cached)
        # All of it fits into the budget: nothing to choose.
        if b == r.n_cached:
            return Round()
        recent = min(b, accepted + 2)
        if self.select == "window":
            recent = max(recent, b - N_SINKS)
            layers, groups, *_ = self.engine.cache.k.shape
            sinks = torch.arange(b - recent, device=self.engine.model.device)
            return Round(sinks.expand(layers, groups, -1), recent)
        scores = keys.scores[:, :, :r.n_cached]
        if self.select == "ahead":
            scores = look_ahead(scores, r.state.memory if r.state else None)
        older = scores[:, :, :-recent]
        return Round(older.topk(b - recent, dim=-1, sorted=False).indices, recent, scores)

    def proposer(self, request):
        return self.name

    def release(self, r):
        if r.state:
            self.pool.give_back(r.state.keys)
        r.state = None
        self.ngram.release(r)


# -- when does it pay? ---------------------------------------------------------------------------------------

def predicted_speedup(k, accepted, attention_share, draft_cost, growth=1.0, verify_cost=1.0, select_cost=0.0,
                      delayed=False, host_cost=0.0, rounds=math.inf, batch=1):
    """Speed-up over autoregressive decoding of the same batch (the paper's cost model).

    accepted: of k drafts, on average. attention_share: part of an autoregressive step. growth: how much
    longer everything else takes on the (2k + 1) / (k + 1) as many rows of a mixed forward. In units of a
    step's attention: draft_cost that of a draft step, verify_cost that of a verification's k + 1 rows,
    select_cost choosing and gathering for a round. Where a step is bound by reading weights and keys, the
    paper's case, they are s, 1 and 0, and growth is 1. host_cost: what an iteration's planning and judging
    takes longer than in the autoregressive loop, in steps.

    A round takes k + 1 iterations (one more if delayed) and commits accepted + 1 tokens. rounds: of an
    answer, where all of a batch begin together and are waited for: the schedule spreads them over k + 1
    places, and the last one ends so much later.
    """
    iteration = growth * (1 - attention_share) + host_cost
    attention = (k * draft_cost + verify_cost + select_cost) * attention_share
    seconds = (k + 1 + delayed) * iteration + attention  # of a round, in autoregressive steps
    spread = min(batch - 1, k) / (k + 1)  # rounds that the last request is behind
    return (accepted + 1) / seconds / (1 + spread / rounds)
