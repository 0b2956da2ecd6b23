"""Which drafter should draft next, and how many tokens? "Performance or Illusion?" (arXiv 2601.11580) leaves
this open: no drafter is best everywhere. Here each request chooses in every round the drafter and the number
of drafts k with the most expected tokens per second:

    goodput(drafter, k) = E(alpha, k) / (T_step(B, k + 1) + T_draft(B, k))        (SmartSpec, 2406.14066)
    E(alpha, k) = 1 + alpha + .. + alpha^k                                        (2211.17192, eq. 1)

T comes from a cost table (costs.CostTable) for the batch size B; k may be 0. alpha, the chance that a draft
is accepted, is estimated from counts: a request's estimate is shrunk to the one over all requests, which is
shrunk to a prior, the drafter's acceptance on other texts. Counts decay, so a drafter that failed is tried
again later. Prompt lookup costs nothing, so it runs in every round, next to any drafter. If a request decodes
alone, the tokens found are also verified next to another drafter's. SmartSpec sets one k for the batch; here
each request chooses, as if the whole batch did, but besides prompt lookup only one drafter drafts in
a round. A trained drafter ends its chains itself: its k only decides whether it drafts. Only committed tokens
decide, so rejection sampling stays exact.
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
    name = "adaptive"

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
        self.chosen = {}                                 # request -> name of its drafter
        self.promises = {}                               # request -> {drafter: drafts, tokens, tokens/s}
        self.prices, self.read = cache(self._prices), cache(cost.read)

    def propose(self, requests, limits):
        # 1. Learn from the last round.
        for count in self.counts.values():
            count *= DECAY_ALL
        for r in requests:
            self._learn(r)
        # 2. Look tokens up, then let every request choose.
        lookups = self.lookup.propose(requests, limits)
        context = sum(len(r.tokens) for r in requests) // len(requests)
        seconds = self.prices(len(requests), context // BUCKET)
        for r, limit, (found, _) in zip(requests, limits, lookups):
            self.promises[r] = self._promise(r, limit, len(found), seconds)
        shared = self._shared(requests)
        out, asked = [], []                              # asked: the requests that `shared` drafts for
        for i, (r, (found, _)) in enumerate(zip(requests, lookups)):
            best = self.promises[r]
            name = max(("target", self.lookup.name, shared), key=lambda name: best[name][2])
            self.chosen[r] = name = name if best[name][0] else "target"
            self.drafted[r] = [(self.lookup.name, found, len(r.tokens))]
            out.append((found[:best[self.lookup.name][0]], None))
            if name not in ("target", self.lookup.name):
                asked.append(i)
        # 3. Draft. A drafter with min_confidence ends a chain itself.
        if asked:
            drafter, some = self.drafters[shared], [requests[i] for i in asked]
            ks = [limits[i] if drafter.min_confidence else self.promises[requests[i]][shared][0] for i in asked]
            for i, r, proposal in zip(asked, some, drafter.propose(some, ks)):
                self.drafted[r].append((shared, proposal[0], len(r.tokens)))
                # Trees are slow in a batch.
                room = limits[i] - len(proposal[0]) if len(requests) == 1 else 0
                out[i] = with_lookup(proposal, out[i][0][:room])
        return out

    def _learn(self, r):
        """Count a request's last drafts. The first wrong one was verified too, those after it were not."""
        for count in self.history[r].values():
            count *= DECAY
        for name, drafts, start in self.drafted.pop(r, []):
            right = [a == b for a, b in zip(drafts, r.tokens[start:])]
            accepted = (right + [False]).index(False)
            for counts in (self.history[r], self.counts):
                counts[name] += accepted, min(accepted + 1, len(right))

    def _promise(self, r, limit, n_found, seconds):
        """{drafter: [drafts, tokens, tokens/s] of its best number of drafts} for a request with n_found
        prompt-lookup tokens. seconds: of `_prices`."""
        own = self.history[r]
        best = {"target": [0, 1.0, 1 / seconds["target"][0]]}
        for name, drafter in self.drafters.items():
            is_lookup = drafter is self.lookup
            prior = min(MAX_PRIOR, self.cost.accept.get(name, MAX_PRIOR))
            alpha = rate(own[name], rate(self.counts[name], prior))
            tokens = expected_tokens(alpha, n_found if is_lookup else min(limit, drafter.gamma))
            price = seconds[name][:len(tokens)]
            # A drafter reads the prompt before its first draft. All tokens to come share that price.
            if not is_lookup and not own[name][1]:
                price = price + tokens * self.read(name, len(r.generation.prompt_ids)) / r.remaining
            goodput = tokens / price
            k = int(goodput.argmax())
            best[name] = [k, float(tokens[k]), float(goodput[k])]
        return best

    def _shared(self, requests):
        """The drafter, besides prompt lookup, with which the batch has most tokens per second if each request
        may do without it. Two drafters would take turns."""
        usual = "target", self.lookup.name
        total = lambda name: sum(max(self.promises[r][x][2] for x in (*usual, name)) for r in requests)
        return max((name for name in self.drafters if name != self.lookup.name), key=total, default="target")

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

    def proposer(self, request):
        return self.chosen[request]

    def release(self, request):
        for notes in (self.history, self.drafted, self.chosen, self.promises):
            notes.pop(request, None)
        for drafter in self.drafters.values():
            drafter.release(request)
