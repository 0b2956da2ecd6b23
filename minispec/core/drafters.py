"""Drafters that need no training of their own, and what all drafters share.

    Drafter     what the engine asks of a drafter
    Cached      has keys and values of its own; notes of every request
    Chained     drafts token by token; on a GPU a round is one CUDA graph
    NGram       copies from the text
    SmallLM     a small model

prism.py and specdiff.py have the drafters that are trained, adaptive.py one that asks others.

A drafter sees what was accepted by reading `request.tokens`. Committed tokens never change, so it compares
them with what it drafted before and knows which of its own keys and values are still right.
"""
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from minispec.core import gpt
from minispec.core.attention import TREE, FullKeys, can_fuse
from minispec.core.kv_cache import Allocation, KVCache, whole_blocks
from minispec.core.requests import MAX_K, Batch, Segment, pack
from minispec.core.noise import stream
from minispec.core.verify import graft, warp
from minispec.core.words import Words


STOP = 0.3              # what the early stop of chains is by default; see Chained
NONE = -1               # in the place of a draft


class Drafter:
    """What the engine asks of a drafter. This one never drafts, which is plain decoding."""
    name = "target"         # shown next to the tokens that it proposed
    gamma = MAX_K           # the most drafts that follow one another
    width = 1               # more: it may propose trees
    stop = 0.0              # above 0: it ends a chain itself; see Chained
    reads = False           # whether it reads the target's final hidden states,
    feature_layers = ()     # and those of these layers
    seconds = 0.0           # that captures of CUDA graphs took

    def propose(self, requests, limits):
        """For every request (tokens, q): at most limits[i] draft tokens, and None, or, if rejection shall
        judge them, the distributions (k, V) that they were drawn from. A tree has a third part, parents: the
        row that each draft hangs from (verify.py). It may have a fourth: its chains, if rejection shall judge
        it; and a fifth: how many drafts, the last ones, are copies."""
        return [([], None)] * len(requests)

    def observe(self, request, features):
        """features (n, (F + 1) * C): the target's hidden states of the next n positions that it has cached
        for good: of the feature_layers, then the final ones. Asked of drafters that read them."""

    def prepare(self, batch, longest):
        """On a GPU: make the graphs, for so many requests of so many tokens (see Cached)."""

    def proposer(self, request):
        """The name of who drafted for this request."""
        return self.name

    def release(self, request):
        """The request is finished; forget it."""


# -- what drafters with a cache share ------------------------------------------------------------------------

@dataclass
class Notes:
    """What a drafter keeps of one request. Its cache is apart from the target's; position i there holds
    committed token i (PRISM: token i + 1, with what the target knew before it)."""
    cache: KVCache
    room: int                                            # slots that a round writes behind its first rows
    blocks: Allocation = field(default_factory=Allocation)
    cached: int = 0                                      # rows of the cache that hold committed tokens
    features: list = field(default_factory=list)         # the target's, (n, F) each, of rows still to be fed

    def rows(self, tokens, features=None, tail=None):
        """Rows behind those that are cached. They are causal, unless tail (n, m) says which of the last m
        positions each row sees (FullKeys)."""
        self.cache.extend(self.blocks, self.cached + len(tokens) + self.room)
        keys = FullKeys(self.cache, self.blocks, self.cached, len(tokens), tail=tail)
        return Segment(None, tokens, self.cached, keys, features=features)

    def take_features(self):
        features = torch.cat(self.features)
        self.features = []
        return features


class Cached(Drafter):
    """What drafters with a cache share: notes of every request, and one function `round` of a batch, which is
    a forward or a whole round of them. Torch's operators run it as it is, a GPU replays it as one graph.

    config: of the cache; rope: of its rows; room: slots that a request may need more than its tokens."""
    graphs = None               # on a GPU, once `prepare` was called: kernels.graphs.Graphs,
    size = 0                    # for requests of so many slots

    def __init__(self, config, target, rope, room):
        self.config = config
        self.target = target
        self.rope = rope
        self.room = room
        self.notes = {}                                  # request -> Notes
        self.cache = KVCache(config, 0, target.dtype, target.device)     # of all requests; it grows

    def note(self, request):
        """The notes of a request."""
        if request not in self.notes:
            self.notes[request] = notes = Notes(self.cache, self.room)
            if self.graphs and not self.cache.resize(notes.blocks, self.size):
                # While requests are paused: apart from the graphs, whose pool must stay where it is.
                notes.cache = KVCache(self.config, 0, self.target.dtype, self.target.device)
        return self.notes[request]

    def release(self, request):
        if notes := self.notes.pop(request, None):
            notes.cache.close(notes.blocks)

    @property
    def n_features(self):
        """The width of the features that it reads."""
        return (len(self.feature_layers) + 1) * self.config.d_model

    def observe(self, request, features):
        """Kept until the rows that read them are fed. (Another drafter may have asked for more layers.)"""
        self.note(request).features.append(features[:, -self.n_features:])

    def make_graphs(self, batch, longest, segments=1, more=None):
        """Graphs of rounds for requests of so many tokens, which have so many segments in a forward. more:
        see Graphs."""
        from kernels.graphs import Graphs
        c = self.config
        self.size = whole_blocks(longest + self.room)
        self.cache = KVCache(c, batch * self.size, self.target.dtype, self.target.device, spare=1)
        group = c.n_head // c.n_kv_head
        features = self.n_features if self.reads else 0
        self.graphs = Graphs(self.round, self.cache, segments * batch, self.size, 0, group, features, more)

    def in_pool(self, work):
        return self.graphs is not None and all(rows.keys.cache is self.cache for rows in work)

    def run_round(self, work, more=None, how=()):
        """What `round` returns for `work`, a list of Segments."""
        if not self.in_pool(work):
            return self.round(pack(work, self.target.device, more, how))
        out, seconds = self.graphs(work, more, how)
        self.seconds += seconds
        return out

    def body(self, module, h, x):
        """What the blocks and the norm of a module make of rows h (N, C) of a batch x."""
        if not isinstance(x, Batch):
            from kernels.fused import decode
            return decode(module.blocks, module.norm, self.rope, h, x, self.cache)
        return gpt.body(module, self.rope, h, x.positions, x.attend)


class Chained(Cached):
    """A drafter whose first step reads what was committed since the last round, while every further one feeds
    what the one before it drew, on the device. So a whole round can be one CUDA graph.

    The drafter has `words` (Words); first_rows(request) -> Segment, or None if it cannot draft yet; and
    step(number, x, states (N, C) or None) -> states (N, C), one step of rows x. width: rows of a request in
    every step but the first.

    Early stop: while the product of the drafter's own probabilities of a chain's drafts is below `stop`, no
    further one is worth its time. A low one ends the chain, it does not leave it: where rejection judges, who
    was drawn must be judged, or the drafts would not be drawn from q any more."""
    depth = MAX_K                                        # the most steps
    stop = STOP
    steps = 0                                            # of the longest round on a GPU so far

    def prepare(self, batch, longest):
        from kernels.attention import make_plan
        if not can_fuse(self.target) or (self.width > 1 and self.room > TREE):
            return
        device = self.target.device
        one_each = torch.zeros(batch, dtype=torch.long)
        more = dict.fromkeys(("last", "ends", "streams", "at"), one_each) | {"stop": torch.zeros(batch)}
        self.make_graphs(batch, longest, more=more)
        # The plan of a later step.
        trees = dict.fromkeys(range(batch), torch.ones(self.width, self.width)) if self.width > 1 else None
        plan = make_plan([(self.width, self.size, 0, 0)] * batch, self.graphs.group, trees=trees)
        self.later = plan.to(device)

    def propose(self, requests, limits):
        out = [([], None)] * len(requests)
        # 1. Who can draft, in groups that draw alike.
        work, groups = {}, {}
        for i, (r, limit) in enumerate(zip(requests, limits)):
            rows = self.first_rows(r) if limit > 0 else None
            if rows:
                work[i] = rows
                groups.setdefault(r.sampling.drafting.settings, []).append(i)
        # 2. A round of each group.
        for settings, group in groups.items():
            steps = min(self.depth, max(limits[i] for i in group))
            drafts, *q = self.draft([requests[i] for i in group], [work[i] for i in group], steps, settings)
            for row, (i, some) in enumerate(zip(group, drafts.tolist())):
                out[i] = self.result(some, q[0][row] if q else None, limits[i])
        return out

    def result(self, drafts, q, limit):
        """What the engine gets of a round's drafts."""
        drafts = drafts[:min(limit, self.depth)]
        n = drafts.index(NONE) if NONE in drafts else len(drafts)
        return drafts[:n], None if q is None else q[:n]

    def draft(self, requests, work, steps, settings):
        """A round of requests that feed `work` first. All take as many steps as the deepest: a row more costs
        little."""
        # Of every request: its last row, how many slots it will have filled, and where its noise is.
        lists = {
            "last": [n - 1 for n in accumulate(len(rows.tokens) for rows in work)],
            "ends": [rows.start + len(rows.tokens) for rows in work],
            "streams": [stream(r.sampling.seed, settings.lane) for r in requests],
            "at": [len(r.tokens) for r in requests],
        }
        absent = 0
        if self.in_pool(work):
            # In a graph as many as the longest round had, which saves captures. Places without a request
            # repeat the first one, to the same result.
            self.steps = steps = max(self.steps, steps)
            absent = len(self.later.requests) - len(work)
        more = {name: torch.tensor(some + some[:1] * absent) for name, some in lists.items()}
        more["stop"] = torch.full(more["last"].shape, self.stop)         # a table, because it may change
        return self.run_round(work, more, (steps, settings))

    def round(self, x):
        """All steps of chains: the drafts (B, steps), NONE behind a chain that ended early, and, for
        rejection, the distributions (B, steps, V) that they were drawn from."""
        steps, settings = x.how
        # The first step reads all new rows of a request; its last one guesses.
        states = self.step(1, x, x.features)[x.more["last"]]
        tokens, qs = [], []
        reach = states.new_ones(len(states), dtype=torch.float)      # of every request, see `stop`
        for number in range(1, steps + 1):
            ended = reach < x.more["stop"]
            if isinstance(x, Batch) and ended.all():     # a graph takes all steps
                break
            if number > 1:
                # The drawn token is the next row.
                x = self.next_rows(x, number, token[:, None])
                states = self.step(number, x, states)
            q, scores = self.guess(number, x, states[:, None])                 # (B, 1, N)
            qs.append(q)
            index = scores.argmax(-1)
            token = self.words.tokens(index[:, 0])
            tokens.append(token.where(~ended, NONE))
            reach = reach * q.gather(-1, index[..., None])[:, 0, 0]
        out = [torch.stack(tokens, 1)]
        if settings.temperature > 0 and settings.rule == "rejection":
            out.append(self.words.whole(torch.cat(qs, 1)))
        return out

    def guess(self, number, x, states):
        """The drafter's distributions q (B, w, N) of a step with states (B, w, C), and the scores whose
        largest are drafted. A tree is drawn with the target's noise, or not at all."""
        _, settings = x.how
        logits = self.words.logits(states).float()
        if settings.temperature == 0 or self.width > 1 and settings.rule != "coupled":
            q = logits.softmax(-1)
            return q, q
        q = warp(logits, settings)
        return q, q / self.words.noise(x.more["streams"], x.more["at"] + number - 1)[:, None]

    def next_rows(self, x, number, tokens, sees=None):
        """The batch of a later step out of the one before: tokens (n, w) are the newest rows of n requests,
        all of them one position further. sees (n, w, m): of a tree, see Notes.rows."""
        n, w = tokens.shape
        ends = x.more["ends"] + (number - 2)             # the new rows' position, of chains in the cache too
        positions = ends.clamp(max=self.config.block_size - 1)[:, None].expand(n, w).flatten().contiguous()
        x = replace(x, tokens=tokens.flatten(), positions=positions, features=None)
        if isinstance(x, Batch):
            masks = [None] * n if sees is None else sees
            spans = []
            for i, (mask, (_, _, before)) in enumerate(zip(masks, x.segments)):
                keys = FullKeys(before.cache, before.blocks, before.start + before.n, w, tail=mask)
                spans.append((i * w, (i + 1) * w, keys))
            x.segments = spans
            return x
        # On the kernels: slots, lengths and who sees whom, all on the device. Every step before wrote w rows.
        first = (number - 2) * (w - 1)
        new = ends[:, None] + torch.arange(first, first + w, device=ends.device)
        requests = self.later.requests.clone()
        requests[:, 2] = new[:, -1] + 1
        plan = replace(self.later, requests=requests)
        if sees is not None:
            back = torch.arange(sees.shape[-1] - 1, -1, -1, device=ends.device)
            plan.sees = ~((~sees).long() << back).sum(-1).flatten()
        return replace(x, new=x.slots.gather(1, new).flatten().long(), plan=plan)


# -- drafters ------------------------------------------------------------------------------------------------

class NGram(Drafter):
    """Prompt lookup (Saxena 2023): propose what followed the most recent earlier occurrence of the last n
    tokens, for the longest n from max_n down to min_n that has one."""
    name = "ngram"

    def __init__(self, max_n=4, min_n=2):
        self.max_n = max_n
        self.min_n = min_n
        self.index = {}  # request -> (tokens indexed, {n-gram: position after its last occurrence})

    def propose(self, requests, limits):
        return [(self.copies(r, limit), None) for r, limit in zip(requests, limits)]

    def copies(self, request, n, more=()):
        """What followed the last time that the text went like this: up to n tokens."""
        at = self.find(request, more) if n > 0 else None
        return [] if at is None else request.tokens[at:at + n]

    def find(self, request, more=()):
        """The position of the first token to copy, to go on with what was committed and then `more`; None
        where nothing matches."""
        tokens = request.tokens
        # 1. Index what was committed since the last call. The n-grams that end at the very last token must
        #    wait, because they would find themselves.
        done, seen = self.index.get(request, (0, {}))
        for end in range(done, len(tokens)):
            for n in range(self.min_n, min(self.max_n, end) + 1):
                seen[tuple(tokens[end - n:end])] = end
        self.index[request] = len(tokens), seen
        # 2. Look up how the text ends, the longest n-gram first.
        last = [*tokens[-self.max_n:], *more]
        for n in range(min(self.max_n, len(last)), self.min_n - 1, -1):
            at = seen.get(tuple(last[-n:]))
            if at is not None:
                return at
        return None

    def release(self, request):
        self.index.pop(request, None)


def with_copies(proposal, copies):
    """A proposal (see Drafter.propose) as a tree that a chain of copied tokens grows on, unless it is a tree
    that rejection judges."""
    drafts, q, *tree = proposal
    if len(tree) > 1:
        return proposal
    tokens = list(drafts)
    parents = list(tree[0]) if tree else list(range(len(drafts)))
    rows = graft(copies, tokens, parents)
    new = len(tokens) - len(drafts)
    if not new:
        return proposal
    chains = None
    if q is not None:
        chains = [(list(range(1, len(drafts) + 1)), q), (rows, None)]
    return tokens, None, parents, chains, new


class SmallLM(Chained):
    """A small model of the same vocabulary drafts autoregressively (Leviathan et al. 2211.17192), with the
    request's own sampling settings. All requests of the batch draft together. Its cache is apart from
    the target's. Either model may have more tokens than the other; only tokens of both are drafted."""
    name = "draft"

    def __init__(self, model, target):
        if model.config.block_size < target.config.block_size:
            raise ValueError(f"the draft model reads contexts of {model.config.block_size} tokens, "
                             f"the target of {target.config.block_size}")
        super().__init__(model.config, model, model.rope, MAX_K)
        ours, theirs = model.config.vocab_size, target.config.vocab_size
        both = torch.arange(min(ours, theirs), device=model.device)
        self.words = Words(model, None if ours == theirs else both)
        self.words.vocab_size = theirs                   # q is judged by the target's p

    def step(self, number, x, states):
        """One step; see Chained. A token of the target alone is read as the last one of the small model."""
        tokens = x.tokens.clamp(max=self.config.vocab_size - 1)
        return self.body(self.target, self.words.embed(tokens), x)

    def first_rows(self, request):
        """The tokens committed since the last round, at least the last one: its logits are needed. Accepted
        drafts are fed once more, because a row more costs next to nothing."""
        notes = self.note(request)
        notes.cached = min(notes.cached, len(request.tokens) - 1)
        rows = notes.rows(request.tokens[notes.cached:])
        notes.cached = len(request.tokens)
        return rows
