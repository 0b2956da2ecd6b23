"""Drafters that need no training of their own, and what all drafters share. Interface:

    name                          shown next to the tokens it proposed
    propose(requests, limits)     -> for every request (tokens, q): at most limits[i] draft tokens, and the
                                  distributions (k, V) they were drawn from, or None if they are a point mass
                                  (copied, or an argmax). A tree has a third part, parents: the row that each
                                  draft hangs from (verify.py). It may have a fourth: the rule that judges it,
                                  if that is not point_mass_tree.
    release(request)              the request is finished; forget it

A drafter that can draft in a CUDA graph also has

    prepare(batch, longest)       make the graphs, for so many requests of so many tokens (see Cached)

A drafter that reads the target's hidden states also has

    taps                          which ones: layers, or () for the final hidden state (GPT.features)
    observe(request, features)    features (n, F) of the next n positions that the target has cached for good

and one that asks other drafters (adaptive.py)

    chosen                        {request: name of the drafter that proposed now}, shown in place of `name`

A drafter sees what was accepted by reading `request.tokens`. Committed tokens never change, so it compares
them with what it drafted before and knows which of its own keys and values are still right.
"""
from dataclasses import dataclass, field, replace

import torch

from minispec.core.attention import FullKeys, can_fuse, packed_attend
from minispec.core.requests import MAX_K, draw_drafts
from minispec.core.kv_cache import KVCache, Run
from minispec.core.verify import Sampling, draw, warp
from minispec.core.words import Words


# -- what drafters with a cache share ------------------------------------------------------------------------

@dataclass
class Rows:
    """Rows that one request feeds in one forward of a drafter: `tokens` (n) at `positions` (n), which see
    what `keys` lets them see. features (n, F): what else the drafter reads of each row, or None."""
    tokens: list
    positions: list
    keys: FullKeys
    features: torch.Tensor = None

    @property
    def start(self):
        """Rows of the request that were cached before these."""
        return self.keys.start


@dataclass
class Notes:
    """What a drafter keeps of one request. Its cache is apart from the target's; row i of its run there holds
    committed token i."""
    cache: KVCache
    run: Run
    cached: int = 0                                      # rows of the cache that hold committed tokens
    features: list = field(default_factory=list)         # the target's, (n, F) each, of rows still to be fed
    drafts: list = field(default_factory=list)           # tokens fed behind the committed rows

    def rows(self, start, tokens, features=None, positions=None, tail=None):
        """Rows for cache slots start, start + 1, .. Their positions are the slots unless said otherwise. They
        are causal, unless tail (n, m) says which of the last m slots each row sees (FullKeys): all of them,
        for a window of masks; its own path, for a tree."""
        n = len(tokens)
        positions = range(start, start + n) if positions is None else positions
        return Rows(tokens, positions, FullKeys(self.cache, self.run.first, start, n, tail=tail), features)


def pack(work, device):
    """Rows of several requests, a list of Rows, as the inputs of one forward: tokens (N,), positions (N,), an
    attend by which every row sees the keys of its own request, and features (N, F) or None."""
    tokens, positions, segments = [], [], []
    for rows in work:
        first = len(tokens)
        tokens += rows.tokens
        positions += rows.positions
        segments.append((first, len(tokens), rows.keys))
    features = None
    if work[0].features is not None:
        features = torch.cat([rows.features for rows in work])
    tokens = torch.tensor(tokens, device=device)
    positions = torch.tensor(positions, device=device)
    return tokens, positions, packed_attend(segments), features


class Cached:
    """What drafters with a cache share: notes of every request, and on a GPU the graph of a round."""
    pool = None                 # on a GPU, once `prepare` was called: one cache for all requests,
    size = 0                    # the slots of each,
    graphs = None               # and kernels.graphs.Graphs
    seconds = 0.0               # that captures took

    def __init__(self, config, target):
        self.config = config                             # of the cache
        self.target = target
        self.notes = {}                                  # request -> Notes

    def note(self, request, room=0):
        """The notes of a request, which may need `room` slots more than its tokens."""
        if request not in self.notes:
            cache = self.pool
            run = cache.open(self.size) if cache else None
            if run is None:                              # on a CPU, or while requests are paused
                slots = request.longest + room
                cache = KVCache(self.config, slots, self.target.dtype, self.target.device)
                run = cache.open(slots)
            self.notes[request] = Notes(cache, run)
        return self.notes[request]

    def release(self, request):
        if notes := self.notes.pop(request, None):
            notes.cache.close(notes.run)

    def make_graphs(self, function, batch, longest, room, width=0, segments=1):
        """Graphs of function(Inputs) for requests of so many tokens, and `room` slots more each, which have
        so many segments in a forward. width: F of the features (N, F) that it reads."""
        from kernels.graphs import Graphs
        c = self.config
        device = self.target.device
        self.size = longest + room
        self.pool = KVCache(c, batch * self.size, self.target.dtype, device, spare=1)
        more = {"table": torch.zeros(3, batch, dtype=torch.long, device=device),
                "coins": torch.zeros(batch, room, device=device)}
        group = c.n_head // c.n_kv_head
        self.graphs = Graphs(function, self.pool, segments * batch, self.size, 0, group, width, more,
                             segments * self.pool.n_slots)

    def run_graph(self, work, more=None, how=()):
        """What a graph's function returns for `work`, a list of Rows."""
        tokens, positions, _, features = pack(work, self.target.device)
        x = self.graphs.inputs(work, tokens, positions)
        x.features = features
        x.more = more or {}
        x.how = how
        out, _, seconds = self.graphs(x)
        self.seconds += seconds
        return out


class Chained(Cached):
    """A drafter of chains, of which a whole round can be one CUDA graph. Its first step reads what was
    committed since the last round, every further one feeds the token that the one before it drew, on the
    device. Without a GPU, and where requests of a batch draw in different ways, it takes its steps one by one
    instead.

    The drafter has `words` (Words), and step(number, tokens (N,), states (N, C) or None, x) -> states (N, C),
    one step on the kernels, of rows x (kernels/graphs.py)."""
    steps = 0                                            # of the longest round so far
    alike = False                                        # whether it drafts without chance

    def prepare(self, batch, longest, width=0):
        if can_fuse(self.target):
            self.make_graphs(self._round, batch, longest, MAX_K, width)
            self.later = self.later_plan(batch, 1)

    def later_plan(self, batch, rows):
        """The plan of a later step, which feeds so many rows of every request."""
        from kernels.attention import make_plan
        trees = dict.fromkeys(range(batch), torch.ones(rows, rows, dtype=torch.bool)) if rows > 1 else None
        plan = make_plan([(rows, self.size, 0, 0)] * batch, self.graphs.group, trees=trees)
        return plan.to(self.target.device)

    def in_graph(self, requests, notes):
        """Whether these requests can draft in one graph: they have places in the pool, and draw alike."""
        if not (self.graphs and requests and all(some.cache is self.pool for some in notes)):
            return False
        return self.alike or len({r.sampling.settings for r in requests}) == 1

    def chains(self, requests, work, limits):
        """[(tokens, q)] of requests that feed `work` (a list of Rows) first, limits[i] > 0 drafts each."""
        # One number of steps for all rounds saves captures; what is drafted too much is cut off.
        self.steps = max(self.steps, *limits)
        more = self.table(work)
        coins = torch.zeros(more["table"].shape[1], MAX_K)
        for i, (r, limit) in enumerate(zip(requests, limits)):
            if r.sampling.temperature > 0:
                coins[i, :limit] = r.coins(limit)
        more["coins"] = coins.to(self.target.device)
        drafts, *q = self.run_graph(work, more, (self.steps, requests[0].sampling.settings))
        drafts = drafts.tolist()
        return [(drafts[i][:limit], q[0][i, :limit] if q else None) for i, limit in enumerate(limits)]

    def table(self, work):
        """Of every request its last row in `work`, its first slot, and how many slots it will have filled."""
        table = []
        last = -1
        for rows in work:
            last += len(rows.tokens)
            table.append((last, rows.keys.base, rows.start + len(rows.tokens)))
        # Places without a request repeat the first one, to the same result.
        table += table[:1] * (len(self.later.requests) - len(table))
        return {"table": torch.tensor(table).T.to(self.target.device)}

    def _round(self, x):
        """All steps: the drafts (B, steps), and, where they are sampled, the distributions (B, steps, V)."""
        from kernels.graphs import slots_of
        steps, settings = x.how
        last, first, ends = x.more["table"]
        states = self.step(1, x.tokens, x.features, x)[last]
        slots = slots_of(first, self.size)
        requests = self.later.requests.clone()
        tokens, qs = [], []
        for number in range(1, steps + 1):
            logits = self.words.logits(states)
            index = logits.argmax(-1)
            if settings[0] > 0:
                qs.append(warp(logits, Sampling(*settings)))
                index = draw(qs[-1], x.more["coins"][:, number - 1])
            tokens.append(self.words.tokens(index))
            if number == steps:
                break
            # The drawn token is the request's next row.
            at = ends + number - 1
            requests[:, 2] = at + 1
            row = replace(x, tokens=tokens[-1], positions=at.clamp(max=self.config.block_size - 1),
                          new=first + at, slots=slots, plan=replace(self.later, requests=requests))
            states = self.step(number + 1, tokens[-1], states, row)
        out = [torch.stack(tokens, 1)]
        if qs:
            out.append(self.words.whole(torch.stack(qs, 1)))
        return out


# -- drafters ------------------------------------------------------------------------------------------------

class NGram:
    """Prompt lookup (Saxena 2023): propose what followed the most recent earlier occurrence of the last n
    tokens, for the longest n from max_n down to min_n that has one."""
    name = "ngram"

    def __init__(self, max_n=4, min_n=2):
        self.max_n = max_n
        self.min_n = min_n
        self.index = {}  # request -> (tokens indexed, {n-gram: position after its last occurrence})

    def propose(self, requests, limits):
        return [(self.lookup(r, limit), None) for r, limit in zip(requests, limits)]

    def lookup(self, request, limit):
        """At most `limit` tokens to copy; [] where nothing matches."""
        at = self.find(request)
        return [] if at is None else request.tokens[at:at + limit]

    def find(self, request):
        """The position of the first token to copy; None where nothing matches."""
        tokens = request.tokens
        # 1. Index what was committed since the last call. The n-grams that end at the very last token must
        #    wait, because they would find themselves.
        done, seen = self.index.get(request, (0, {}))
        for end in range(done, len(tokens)):
            for n in range(self.min_n, min(self.max_n, end) + 1):
                seen[tuple(tokens[end - n:end])] = end
        self.index[request] = len(tokens), seen
        # 2. Look up how the text ends, the longest n-gram first.
        for n in range(min(self.max_n, len(tokens)), self.min_n - 1, -1):
            at = seen.get(tuple(tokens[-n:]))
            if at is not None:
                return at
        return None

    def release(self, request):
        self.index.pop(request, None)


class SmallLM(Chained):
    """A small model of the same vocabulary drafts autoregressively (Leviathan et al. 2211.17192), with the
    request's own sampling settings. All requests of the batch draft together. Its cache is apart from
    the target's."""
    name = "draft"

    def __init__(self, model, target):
        if model.config.vocab_size != target.config.vocab_size:
            raise ValueError(f"the draft model has {model.config.vocab_size} tokens in its vocabulary, "
                             f"the target {target.config.vocab_size}")
        super().__init__(model.config, model)
        self.model = model
        self.words = Words(model)

    def step(self, number, tokens, states, x):
        """A step on the kernels; see Chained."""
        from kernels.fused import decode
        model = self.model
        return decode(model.blocks, model.norm, model.rope, model.embed(tokens), x, self.pool)[0]

    def propose(self, requests, limits):
        live = [i for i, limit in enumerate(limits) if limit > 0]
        some = [requests[i] for i in live]
        if self.in_graph(some, [self.note(r) for r in some]):
            return self._in_graph(requests, limits, live)
        # 1. Each request first feeds what was committed since its last round.
        feeds = [self._unread(r) for r in requests]
        drafts = [[] for _ in requests]
        qs = [[] for _ in requests]
        # 2. Then one draft token a step, of all requests that may draft more.
        for step in range(max(limits)):
            live = [i for i, limit in enumerate(limits) if limit > step]
            logits = self._forward([requests[i] for i in live], [feeds[i] for i in live])
            for i, token, q in zip(live, *draw_drafts([requests[i] for i in live], logits)):
                drafts[i].append(token)
                qs[i].append(q)
                feeds[i] = [token]
        # 3. Note which drafts are cached now. The last one was never fed.
        for r, some in zip(requests, drafts):
            if some:
                self.notes[r].cached = len(r.tokens)
                self.notes[r].drafts = some[:-1]
        return [(some, _stack(q)) for some, q in zip(drafts, qs)]

    def _in_graph(self, requests, limits, live):
        """The same for requests `live` in one graph."""
        some = [requests[i] for i in live]
        unread = [self._unread(r) for r in some]
        work = [self.notes[r].rows(self.notes[r].cached, tokens) for r, tokens in zip(some, unread)]
        out = [([], None)] * len(requests)
        for i, (drafts, q) in zip(live, self.chains(some, work, [limits[i] for i in live])):
            notes = self.notes[requests[i]]
            notes.cached = len(requests[i].tokens)
            notes.drafts = drafts[:-1]
            out[i] = drafts, q
        return out

    def _unread(self, request):
        """The committed tokens that are not cached here, at least the last one: its logits are needed."""
        notes = self.note(request)
        # Drafts that were accepted are cached already.
        for token, draft in zip(request.tokens[notes.cached:], notes.drafts):
            if token != draft:
                break
            notes.cached += 1
        notes.drafts = []
        notes.cached = min(notes.cached, len(request.tokens) - 1)
        return request.tokens[notes.cached:]

    def _forward(self, requests, feeds):
        """Feed each request its tokens; returns the logits (len(requests), V) after the last token of
        each."""
        work, last, n = [], [], 0
        for request, tokens in zip(requests, feeds):
            notes = self.notes[request]
            work.append(notes.rows(notes.cached, tokens))
            notes.cached += len(tokens)
            n += len(tokens)
            last.append(n - 1)
        tokens, positions, attend, _ = pack(work, self.model.device)
        return self.model.logits(self.model(tokens, positions, attend)[last])


def _stack(q):
    """The distributions (k, V) of a chain; None where it was an argmax, or is empty."""
    return torch.stack(q) if q and q[0] is not None else None
