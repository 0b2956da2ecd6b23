"""Drafters that need no training of their own. Interface:

    name                          shown beside the tokens it proposed
    propose(requests, limits)     -> one (tokens, q) per request: at most limits[i] draft tokens, and the distributions
                                  (k, V) they were drawn from, or None if they are a point mass (copied, or an argmax)
                                  of a tree also a third part, parents: the row that each draft hangs from (verify.py), and
                                  perhaps a fourth: the rule that judges it, if it is not point_mass_tree
    release(request)              the request is finished; forget it

and, for those that read the target's hidden states,

    taps                          which ones: layers, or () for the final hidden state (GPT.features)
    observe(request, features)    features (n, F) of the next n positions that the target has cached for good

and, for one that asks others (adaptive.py),

    chosen                        {request: name of who proposed its drafts this round}, shown in place of `name`

A drafter sees what was accepted by reading `request.tokens`: committed tokens never change, so the common prefix with
what it drafted before tells what to keep.
"""
import torch

from minispec.core.attention import FullKeys, dense_attend, packed_attend
from minispec.core.engine import draw_drafts
from minispec.core.kv_cache import KVCache


class NGram:
    """Prompt lookup (Saxena 2023): propose what followed the most recent earlier occurrence of the last n tokens, for
    the longest n from max_n down to min_n that has one."""
    name = "ngram"

    def __init__(self, max_n=4, min_n=2):
        self.max_n, self.min_n = max_n, min_n
        self.index = {}                   # request -> (tokens indexed, {n-gram: position after its last occurrence})

    def propose(self, requests, limits):
        return [(self._lookup(r, limit), None) for r, limit in zip(requests, limits)]

    def _lookup(self, request, limit):
        at = self.find(request)
        return [] if at is None else request.tokens[at:at + max(limit, 0)]

    def find(self, request):
        """The position of the first token to copy; None where nothing matches."""
        tokens = request.tokens
        done, seen = self.index.get(request, (0, {}))
        for end in range(done, len(tokens)):            # the n-gram that ends at the very last token is not indexed yet,
            for n in range(self.min_n, self.max_n + 1):  # it would find itself
                if end >= n:
                    seen[tuple(tokens[end - n:end])] = end
        self.index[request] = (len(tokens), seen)
        for n in range(self.max_n, self.min_n - 1, -1):
            at = seen.get(tuple(tokens[-n:]))
            if at is not None and len(tokens) >= n:
                return at
        return None

    def release(self, request):
        self.index.pop(request, None)


class SmallLM:
    """A small model of the same vocabulary drafts autoregressively (Leviathan et al. 2211.17192), with the request's own
    sampling settings, all requests of the batch together. Each request has a cache of its own here."""
    name = "draft"

    def __init__(self, model, target):
        if model.config.vocab_size != target.config.vocab_size:
            raise ValueError(f"the draft model has {model.config.vocab_size} tokens in its vocabulary, the target {target.config.vocab_size}")
        self.model = model
        self.notes = {}                   # request -> _Notes

    def propose(self, requests, limits):
        feeds = []                        # what each request must feed first: tokens committed but not cached here
        for r in requests:
            note = self.notes.get(r)
            if note is None:
                n = len(r.tokens) + r.remaining
                note = self.notes[r] = _Notes(KVCache(self.model.config, n, self.model.dtype, self.model.device))
            new = r.tokens[note.cached:]  # of the drafts fed last time, those accepted are cached already
            note.cached += next((i for i, (a, b) in enumerate(zip(new, note.fed)) if a != b), min(len(new), len(note.fed)))
            note.cached = min(note.cached, len(r.tokens) - 1)  # the last one is fed again where all were cached: its logits are needed
            feeds.append(r.tokens[note.cached:])
        drafts, qs = [[] for _ in requests], [[] for _ in requests]
        for step in range(max(limits)):
            rows = [i for i in range(len(requests)) if limits[i] > step]
            logits = self._forward([(self.notes[requests[i]], feeds[i]) for i in rows])
            for i, token, q in zip(rows, *draw_drafts([requests[i] for i in rows], logits)):
                drafts[i].append(token)
                qs[i].append(q)
                feeds[i] = [token]
        for i, r in enumerate(requests):
            if drafts[i]:
                self.notes[r].cached, self.notes[r].fed = len(r.tokens), drafts[i][:-1]
        return [(d, torch.stack(q) if q and q[0] is not None else None) for d, q in zip(drafts, qs)]

    def first_guesses(self, ids):
        """Logits (len(ids) - 2, V) of what it would draft in place of each of ids[2:], knowing all before."""
        x = torch.tensor([ids], device=self.model.device)
        return self.model.logits(self.model(x, torch.arange(len(ids), device=x.device)[None], dense_attend()))[0, 1:-1]

    def _forward(self, work):
        """Feed each (note, tokens); returns the logits (len(work), V) after the last token of each."""
        tokens, positions, segments, last = [], [], [], []
        for note, feed in work:
            keys = FullKeys(note.cache, 0, note.cached, len(feed))
            segments.append((len(tokens), len(tokens) + len(feed), keys))
            tokens += feed
            positions += range(note.cached, note.cached + len(feed))
            last.append(len(tokens) - 1)
            note.cached += len(feed)
        device = self.model.device
        hidden = self.model(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), packed_attend(segments))
        return self.model.logits(hidden[last])

    def release(self, request):
        self.notes.pop(request, None)


class _Notes:
    """A request as the draft model knows it: a cache of its own, how many committed tokens it holds, and the drafts fed
    after them."""

    def __init__(self, cache):
        self.cache, self.cached, self.fed = cache, 0, []
