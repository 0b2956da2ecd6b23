"""The base classes of all drafters, prompt lookup, and a small model as a drafter.

    Drafter         the interface between the engine and a drafter
    ChainDrafter    a drafter with its own keys and values; on a GPU a round is one CUDA graph
    NGram           prompt lookup
    SmallLM         a small model

prism.py and specdiff.py have the drafters that are trained, adaptive.py one that asks others.

A drafter finds the accepted tokens in `request.tokens`. It keeps no keys of its drafts: the next round feeds
the newly committed tokens, accepted drafts among them, and overwrites these keys.
"""
from dataclasses import dataclass, field
from functools import partial

import torch

from minispec.core.attention import FullKeys
from minispec.core.kv_cache import Allocation, KVCache
from minispec.core.requests import MAX_K, Segment, pack
from minispec.core.noise import apart, mix, stream
from minispec.core.verify import graft, warp
from minispec.core.draft_head import DraftHead


MIN_CONFIDENCE = 0.3    # default min_confidence of chains; see ChainDrafter
PAD_DRAFT = -1          # instead of a draft, after the end of a chain


class Drafter:
    """The interface between the engine and a drafter. This drafter never drafts, which is plain decoding."""
    name = "target"         # shown next to the drafts
    gamma = MAX_K           # the most drafts that follow one another
    width = 1               # more: it may propose trees
    min_confidence = 0.0    # above 0: it ends a chain itself; see ChainDrafter
    uses_hidden_states = False      # whether it reads the target's final hidden states
    feature_layers = ()     # F layers of the target whose states it reads besides
    select = None           # of trees under the rule `selection`: see specdiff.best_path
    drafters = {}           # name -> the drafters that this one chooses among
    graphs = None           # of a ChainDrafter on a GPU: kernels.rounds.Rounds, which replays `round`
    promises = {}           # request -> {drafter: [drafts, tokens, tokens/s] that were expected}

    def propose(self, requests, limits):
        """A proposal for every request, (tokens, q): a chain of at most limits[i] drafts, and a function
        without arguments for the distributions (k, V) that the first ones were drawn from, None if they are
        unknown. A tree is (tokens, q, parents, chains, lookup), of which the last two may be missing; see the
        fields of Segment."""
        return [([], None)] * len(requests)

    def observe(self, request, features):
        """features (n, (F + 1) * C): the target's hidden states at the next n committed positions, of the
        feature_layers, then the final ones. Called only for drafters that read them."""

    def release(self, request):
        """The request is finished; forget it."""


# -- drafters with a cache -----------------------------------------------------------------------------------

@dataclass
class DraftState:
    """The state of a drafter for one request. Its cache is apart from the target's; position i there holds
    committed token i (PRISM: token i + 1, joined with the target's hidden state at i)."""
    cache: KVCache
    room: int                                            # slots that a round writes after its first rows
    blocks: Allocation = field(default_factory=Allocation)
    cached: int = 0                                      # rows of the cache that hold committed tokens
    features: list = field(default_factory=list)         # (n, (F + 1) * C) each, of rows still to be fed

    def rows(self, tokens, tail=None):
        """The Segment of the rows after the cached ones, with the features that wait for them. The rows are
        causal and stay in the cache, unless tail (n, m) says which of the last m positions each row sees
        (FullKeys): then the next rows overwrite them."""
        self.cache.extend(self.blocks, self.cached + len(tokens) + self.room)
        keys = FullKeys(self.cache, self.blocks, self.cached, len(tokens), tail=tail)
        features = torch.cat(self.features) if self.features else None
        self.features = []
        if tail is None:
            self.cached += len(tokens)
        return Segment(None, tokens, keys.start, keys, features=features)


class ChainDrafter(Drafter):
    """A drafter with its own keys and values, a DraftState for every request. Its first step reads the tokens
    committed since the last round. Every further step reads the token that the step before it drew, on the
    device.

    config: the shape of the cache; model: the target, or a model of its own, with its dtype and device;
    room: slots that a request may need besides those of its tokens.

    A subclass has `draft_head` (DraftHead); first_rows(request, limit) -> [Segment], the first of which ends
    with the last committed token, or [] if it cannot draft yet; and step(number, tokens, states, positions,
    attend) -> states (N, C), one forward of N rows that reads `states`: those of the step before, in step 1
    the features.
    width: rows of a request in every step but the first. (SpecDiff has a `round` of one forward, without
    steps; its width is its number of chains.)

    Early end: a chain ends once the drafter's confidence, the product of its probabilities of the drafts, is
    below `min_confidence`. The draft that drops below is still verified: discarding it would bias the drafts
    away from q."""
    min_confidence = MIN_CONFIDENCE
    segments = 1                # of a request in one round

    def __init__(self, config, model, room):
        self.config = config
        self.model = model
        self.room = room
        self.draft_states = {}                           # request -> DraftState
        self.cache = KVCache(config, 0, model.dtype, model.device)       # of all requests; it grows

    def state_of(self, request):
        """The DraftState of a request."""
        return self.draft_states.setdefault(request, DraftState(self.cache, self.room))

    def release(self, request):
        if state := self.draft_states.pop(request, None):
            state.cache.close(state.blocks)

    @property
    def n_features(self):
        """The width of the features that it reads."""
        return (len(self.feature_layers) + 1) * self.config.d_model

    def observe(self, request, features):
        """Keep them until the rows that read them are fed. (Another drafter may have asked for more layers.)
        """
        self.state_of(request).features.append(features[:, -self.n_features:])

    def run_round(self, segments, per_request, options):
        """The tensors that `round` returns for a list of Segments."""
        if self.graphs is None:
            return self.round(pack(segments, self.model.device, per_request, options))
        return self.graphs(segments, per_request, options)

    def propose(self, requests, limits):
        out = [([], None)] * len(requests)
        # 1. The requests that can draft, in groups that draw alike.
        groups = {}
        for i, (r, limit) in enumerate(zip(requests, limits)):
            segments = self.first_rows(r, limit) if limit > 0 else []
            if segments:
                groups.setdefault(self.settings_of(r), []).append((i, segments))
        # 2. A round of each group, with as many steps as its deepest request takes: one more row is cheap.
        for settings, group in groups.items():
            indices, fed = zip(*group)
            segments, last, n = [], [], 0
            for own in fed:
                last.append(n + len(own[0].tokens) - 1)
                n += sum(len(s.tokens) for s in own)
                segments += own
            some = [requests[i] for i in indices]
            steps = min(self.gamma, max(limits[i] for i in indices))
            per_request = {
                # the row of each request's last token, and its number of slots after the first step
                "last": last,
                "ends": [self.draft_states[r].cached for r in some],
                # its stream of noise, and the position of its first draft
                "streams": [stream(r.sampling.seed, settings.lane) for r in some],
                "at": [len(r.tokens) + apart(r, settings.lane) for r in some],
                # a table, because a CUDA graph would freeze a number
                "min_confidence": [float(self.min_confidence)] * len(some),
            }
            drafts, q = self.run_round(segments, per_request, (steps, settings))
            # 3. The drafts as the engine wants them.
            for i, tokens, own in zip(indices, drafts.tolist(), q):
                out[i] = self.result(requests[i], tokens, own, limits[i])
        return out

    def settings_of(self, request):
        """The settings that its drafts are drawn with."""
        return request.sampling.drafting.settings

    def round(self, x):
        """All steps of chains: the drafts (B, steps), PAD_DRAFT after a chain that ended early, and the
        distributions (B, steps, N) that they were drawn from."""
        steps, settings = x.options
        # The first step reads all new rows of a request; the last of them guesses.
        states = self.step(1, x.tokens, x.features, x.positions, x.attend)[x.per_request["last"]]
        tokens, qs, least = [], [], x.per_request["min_confidence"]
        confidence = [states.new_ones(len(states), dtype=torch.float)]         # before each step
        # A graph takes all steps, so their noise is made at once, in fewer operators.
        together = 1 if x.ends_early else steps
        for number in range(1, steps + 1):
            if x.ends_early and (confidence[-1] < least).all():
                break
            if number > 1:
                # The drawn token is the next row.
                x = x.next_rows(number, token[:, None])
                states = self.step(number, x.tokens, states, x.positions, x.attend)
            # The draft is the largest of q / noise, or of q.
            q = scores = warp(self.draft_head.head(states), settings)          # (B, N)
            if settings.temperature:
                at = (number - 1) % together
                if not at:
                    noise = self.noise(x, together, number - 1)
                scores = q / noise[:, at]
            index = scores.argmax(-1)
            token = self.draft_head.tokens(index)
            confidence.append(confidence[-1] * q.gather(-1, index[:, None])[:, 0])
            tokens.append(token)
            qs.append(q)
        ended = torch.stack(confidence[:-1], 1) < least[:, None]
        return [torch.stack(tokens, 1).masked_fill(ended, PAD_DRAFT), torch.stack(qs, 1)]

    def noise(self, x, n, first=0, chain=0):
        """The noise (B, n, N) of n drafts, from number `first` on, of a request's chain number `chain`."""
        streams, at = x.per_request["streams"], x.per_request["at"]
        if chain:
            streams = mix(streams + chain)
        at = at[:, None] + torch.arange(first, first + n, device=at.device)
        return self.draft_head.noise(streams.repeat_interleave(n), at.flatten()).unflatten(0, (-1, n))

    def result(self, request, drafts, q, limit):
        """The proposal for a request, at most `limit` drafts: a chain of the first `drafts`, and their q (n,
        N), see Drafter.propose."""
        n = [*drafts[:limit], PAD_DRAFT].index(PAD_DRAFT)
        return drafts[:n], partial(self.draft_head.whole, q)


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
        return [(self.lookup(r, limit), None) for r, limit in zip(requests, limits)]

    def lookup(self, request, n):
        """Up to n tokens that followed the last earlier occurrence of the text's end."""
        tokens = request.tokens
        # 1. Index what was committed since the last call. The n-grams that end at the very last token must
        #    wait, because they would find themselves.
        done, seen = self.index.get(request, (0, {}))
        for end in range(done, len(tokens)):
            for size in range(self.min_n, min(self.max_n, end) + 1):
                seen[tuple(tokens[end - size:end])] = end
        self.index[request] = len(tokens), seen
        # 2. Look up how the text ends, the longest n-gram first.
        for size in range(self.max_n, self.min_n - 1, -1):
            if at := seen.get(tuple(tokens[-size:])):
                return tokens[at:at + n]
        return []

    def release(self, request):
        self.index.pop(request, None)


def with_lookup(proposal, lookup):
    """A proposal (see Drafter.propose) as a tree, with prompt-lookup tokens as one more chain of it. A tree
    that rejection verifies is returned as it is."""
    drafts, q, *tree = proposal
    if len(tree) > 1:
        return proposal
    tokens = list(drafts)
    parents = list(tree[0]) if tree else list(range(len(drafts)))
    rows = graft(lookup, tokens, parents)
    new = len(tokens) - len(drafts)
    if not new:
        return proposal
    chains = None
    if q and not tree:
        chains = [(list(range(1, len(drafts) + 1)), q), (rows, None)]
    return tokens, q, parents, chains, new


class SmallLM(ChainDrafter):
    """A small model of the same vocabulary drafts autoregressively (Leviathan et al. 2211.17192), with the
    request's own sampling settings. All requests of the batch draft together. Either model may have more
    tokens than the other; only tokens of both are drafted."""
    name = "draft"

    def __init__(self, model, target):
        if model.config.block_size < target.config.block_size:
            raise ValueError(f"the draft model reads contexts of {model.config.block_size} tokens, "
                             f"the target of {target.config.block_size}")
        super().__init__(model.config, model, MAX_K)
        ours, theirs = model.config.vocab_size, target.config.vocab_size
        both = torch.arange(min(ours, theirs), device=model.device)
        self.draft_head = DraftHead(model, None if ours == theirs else both)
        self.draft_head.vocab_size = theirs              # q is compared with the target's p

    def step(self, number, tokens, states, positions, attend):
        """One step; see ChainDrafter. A token that the small model lacks is read as its last one."""
        return self.model(tokens.clamp(max=self.config.vocab_size - 1), positions, attend)

    def first_rows(self, request, limit):
        """Rows for the tokens committed since the last round, at least for the last token, whose logits are
        needed. Accepted drafts are fed once more, because one more row costs next to nothing."""
        state = self.state_of(request)
        state.cached = min(state.cached, len(request.tokens) - 1)
        return [state.rows(request.tokens[state.cached:])]
