"""Drafters that need no training of their own, and what all drafters share. Interface:

    name                          shown next to the tokens it proposed
    propose(requests, limits)     -> for every request (tokens, q): at most limits[i] draft tokens, and the
                                  distributions (k, V) they were drawn from, or None if they are a point mass
                                  (copied, or an argmax). A tree has a third part, parents: the row that each
                                  draft hangs from (verify.py). It may have a fourth: the rule that judges it,
                                  if that is not point_mass_tree.
    release(request)              the request is finished; forget it

A drafter that reads the target's hidden states also has

    taps                          which ones: layers, or () for the final hidden state (GPT.features)
    observe(request, features)    features (n, F) of the next n positions that the target has cached for good

and one that asks other drafters (adaptive.py)

    chosen                        {request: name of the drafter that proposed now}, shown in place of `name`

A drafter sees what was accepted by reading `request.tokens`. Committed tokens never change, so it compares
them with what it drafted before and knows which of its own keys and values are still right.
"""
from dataclasses import dataclass, field

import torch

from minispec.core.attention import FullKeys, packed_attend
from minispec.core.requests import draw_drafts
from minispec.core.kv_cache import KVCache


# -- what drafters with a cache share ------------------------------------------------------------------------

@dataclass
class Rows:
    """Rows that one request feeds in one forward of a drafter: `tokens` (n) at `positions` (n), which see
    what `keys` lets them see. features (n, F): what else the drafter reads of each row, or None."""
    tokens: list
    positions: list
    keys: FullKeys
    features: torch.Tensor = None


@dataclass
class Notes:
    """What a drafter keeps of one request. Its cache is its own, apart from the target's; row i holds
    committed token i."""
    cache: KVCache
    cached: int = 0                                      # rows of the cache that hold committed tokens
    features: list = field(default_factory=list)         # the target's, (n, F) each, of rows still to be fed
    drafts: list = field(default_factory=list)           # tokens fed behind the committed rows

    def rows(self, start, tokens, features=None, positions=None, tail=None):
        """Rows for cache slots start, start + 1, .. Their positions are the slots unless said otherwise. They
        are causal, unless tail (n, m) says which of the last m slots each row sees (FullKeys): all of them,
        for a window of masks; its own path, for a tree."""
        n = len(tokens)
        positions = range(start, start + n) if positions is None else positions
        return Rows(tokens, positions, FullKeys(self.cache, 0, start, n, tail=tail), features)


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
        #    wait: they
        #    would find themselves.
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


class SmallLM:
    """A small model of the same vocabulary drafts autoregressively (Leviathan et al. 2211.17192), with the
    request's own sampling settings. All requests of the batch draft together; each has a cache of its own
    here."""
    name = "draft"

    def __init__(self, model, target):
        if model.config.vocab_size != target.config.vocab_size:
            raise ValueError(f"the draft model has {model.config.vocab_size} tokens in its vocabulary, "
                             f"the target {target.config.vocab_size}")
        self.model = model
        self.notes = {}                   # request -> Notes

    def propose(self, requests, limits):
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

    def _unread(self, request):
        """The committed tokens that are not cached here, at least the last one: its logits are needed."""
        if request not in self.notes:
            cache = KVCache(self.model.config, request.longest, self.model.dtype, self.model.device)
            self.notes[request] = Notes(cache)
        notes = self.notes[request]
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

    def release(self, request):
        self.notes.pop(request, None)


def _stack(q):
    """The distributions (k, V) of a chain; None where it was an argmax, or is empty."""
    return torch.stack(q) if q and q[0] is not None else None
