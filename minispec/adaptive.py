"""Which drafter should draft next, and how many tokens? "Performance or Illusion?" (arXiv 2601.11580) leaves
this open: no drafter is best everywhere. Here the batch chooses each round the drafter and k,
the limit of drafts per request, with the most expected tokens per second:

    goodput(drafter, k) = (sum over requests of E(alpha, k)) / T(drafter, k)      (SmartSpec, 2406.14066)
    E(alpha, k) = 1 + alpha + .. + alpha^k                                        (2211.17192, eq. 1)

T, the seconds of a round, comes from a cost table (costs.CostTable) for the batch size; k may be 0. alpha,
the chance that a draft is accepted, is estimated from counts: a request's estimate is shrunk to the one over
all requests, which is shrunk to a prior, the drafter's acceptance on other texts. Counts decay, so a drafter
that failed is tried again later. Prompt lookup costs nothing, so it runs in every round. If one request
decodes alone, its prompt-lookup tokens are verified beside the drafts of the chosen drafter, and a drafter
that ends a chain where it is unsure gets no k, except in a CUDA graph. The choice may depend on rejected
drafts; rejection sampling stays exact, because every round drafts with new noise (`noise.apart`).
"""
from collections import defaultdict
from functools import cache, partial

import numpy as np

from minispec.core.drafters import Drafter, NGram, with_lookup
from minispec.costs import expected_tokens

MAX_PRIOR = 0.85            # a text may be new to every drafter
WEIGHT = 4.0                # verified drafts that a prior counts for
DECAY = 0.9                 # of a request's counts, per round
DECAY_ALL = 0.995           # of the counts over all requests, per round
BUCKET = 256                # tokens of context; costs are looked up once per bucket


def rate(count, prior):
    """Estimated chance that a draft is accepted."""
    accepted, verified = count
    return (accepted + WEIGHT * prior) / (verified + WEIGHT)


class Adaptive(Drafter):
    """A drafter that chooses among `drafters`, which all have a price in `cost` (costs.CostTable). k: most
    drafts per round. ValueError if there is no drafter, or if they read different layers of the target."""

    def __init__(self, drafters, cost, k=16):
        if not drafters:
            raise ValueError("no drafter is ready that the cost table has a price for: " +
                             ", ".join(cost.drafters))
        self.uses_hidden_states = any(d.uses_hidden_states for d in drafters)
        layers = {d.feature_layers for d in drafters if d.feature_layers} or {()}
        if len(layers) > 1:
            raise ValueError(f"all drafters must read the same layers of the target, got {sorted(layers)}")
        self.feature_layers, = layers
        self.drafters = {d.name: d for d in drafters}
        self.lookup = next((d for d in drafters if isinstance(d, NGram)), Drafter())
        self.cost, self.k = cost, k
        zeros = partial(np.zeros, 2)
        self.counts = defaultdict(zeros)                 # drafter -> accepted, verified drafts
        self.history = defaultdict(partial(defaultdict, zeros))          # the same by request
        self.drafted = {}                                # request -> [(drafter, drafts, tokens before them)]
        self.promises = {}                               # request -> {drafter: [drafts, tokens, tokens/s]}
        self.prices, self.read = cache(self._prices), cache(cost.read)

    def propose(self, requests, limits):
        # 1. Learn from the last round.
        for count in self.counts.values():
            count *= DECAY_ALL
        for r in requests:
            self._learn(r)
        # 2. Look tokens up, then choose.
        lookups = [found for found, _ in self.lookup.propose(requests, limits)]
        name, k = self._choose(requests, limits, lookups)
        self.name = name                                 # shown next to the drafts of this round
        for r, found in zip(requests, lookups):
            self.drafted[r] = [(self.lookup.name, found, len(r.tokens))]
        if name in ("target", self.lookup.name):
            return [(found[:k], None) for found in lookups]
        # 3. Draft.
        alone = len(requests) == 1
        drafter = self.drafters[name]
        # A chain that ends where it is unsure needs no k; in a graph all steps are taken.
        unsure = alone and drafter.min_confidence and not drafter.graphs
        ks = limits if unsure else [min(k, limit) for limit in limits]
        if drafter.graphs:
            drafter.graphs.steps = k                     # or all rounds have the steps of the longest
        out = drafter.propose(requests, ks)
        for r, (drafts, *_) in zip(requests, out):
            self.drafted[r].append((name, drafts, len(r.tokens)))
        if alone:                                        # in a batch, trees are slow
            drafts, most = out[0][0], self.promises[requests[0]][self.lookup.name][0]
            out = [with_lookup(out[0], lookups[0][:min(most, limits[0] - len(drafts))])]
        return out

    def _learn(self, r):
        """Count a request's last drafts and lookups, verified or not, up to the first one that was wrong."""
        for count in self.history[r].values():
            count *= DECAY
        for name, drafts, start in self.drafted.pop(r, []):
            right = [a == b for a, b in zip(drafts, r.tokens[start:])]
            accepted = (right + [False]).index(False)
            for counts in (self.history[r], self.counts):
                counts[name] += accepted, min(accepted + 1, len(right))

    def _choose(self, requests, limits, lookups):
        """(drafter, k) for the batch. lookups: the prompt-lookup tokens of each request."""
        batch = len(requests)
        context = sum(len(r.tokens) for r in requests) // batch
        seconds = self.prices(batch, context // BUCKET)
        goodput = {("target", 0): batch / seconds["target"][0]}
        for r in requests:
            self.promises[r] = {"target": [0, 1.0, 1 / seconds["target"][0]]}
        for name, drafter in self.drafters.items():
            is_lookup = drafter is self.lookup
            prior = min(MAX_PRIOR, self.cost.accept.get(name, MAX_PRIOR))
            price, most = seconds[name].copy(), 1
            tokens = np.empty((batch, len(price)))
            for row, r, limit, found in zip(tokens, requests, limits, lookups):
                own = self.history[r]
                alpha = rate(own[name], rate(self.counts[name], prior))
                gains = expected_tokens(alpha, len(found) if is_lookup else min(limit, drafter.gamma))
                most = max(most, len(gains))             # more drafts than anyone can use may look cheaper
                row[:len(gains)], row[len(gains):] = gains, gains[-1]
                # A drafter reads the prompt before its first draft. All tokens to come share that price.
                if not is_lookup and not own[name][1]:
                    price += row * self.read(name, len(r.generation.prompt_ids)) / r.remaining
            total = tokens.sum(0) / price
            k = int(total[:most].argmax())
            goodput[name, k] = total[k]
            for r, gains in zip(requests, tokens):
                self.promises[r][name] = [k, float(gains[k]), float(gains[k] / price[k])]
        return max(goodput, key=goodput.get)

    def _prices(self, batch, bucket):
        """{drafter: seconds of a round (k + 1,), by number of drafts} of a batch."""
        kv = batch * (bucket * BUCKET + BUCKET // 2)
        drafts = np.arange(self.k + 1)
        paid = {name: name for name in self.drafters} | {"target": None, self.lookup.name: None}
        return {name: self.cost.round(paid[name], kv, drafts, batch) for name in paid}

    def observe(self, request, features):
        for drafter in self.drafters.values():
            if drafter.uses_hidden_states:
                drafter.observe(request, features)

    def release(self, request):
        for notes in (self.history, self.drafted, self.promises):
            notes.pop(request, None)
        for drafter in self.drafters.values():
            drafter.release(request)
