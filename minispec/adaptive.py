"""Which drafter should draft next, and how many tokens? "Performance or Illusion?" (arXiv 2601.11580) leaves
this open: no drafter is the best one everywhere. Here every request chooses anew in every round, the drafter
and the number of drafts k with the most expected tokens per second:

    goodput(drafter, k) = E(alpha, k) / (T_step(B, k + 1) + T_draft(B, k))        (SmartSpec, 2406.14066)
    E(alpha, k) = 1 + alpha + .. + alpha^k                                        (2211.17192, eq. 1)

T comes from a measured cost table (traces.CostTable) for the present batch size B, alpha is the chance that a
draft is accepted, and k = 0 means that nothing is drafted.

alpha is estimated from counts of accepted and verified drafts. A request's estimate is shrunk to the estimate
over all requests, which is shrunk to a prior: the drafter's acceptance on other texts (the cost table's
`accept`), but at most MAX_PRIOR. The counts decay, so a drafter that failed is tried again some time later.

Prompt lookup costs nothing, so it runs for every request in every round, and is learned from whoever drafts.
Where one request decodes alone, its tokens are also verified next to another drafter's: the round then ends
early only if both are wrong.

What differs from SmartSpec, and why: it sets one k for one drafter and the whole batch. Requests differ, so
here each one chooses. A request prices a round as if all the batch chose like it.

The choice depends on committed tokens alone, never on rejected drafts, so rejection sampling stays exact.
"""
from collections import defaultdict
from functools import cache

import numpy as np

from minispec.core.drafters import Drafter, NGram, with_copies
from minispec.traces import expected_tokens

MAX_PRIOR = 0.85            # a text may be new to every drafter
WEIGHT = 4.0                # verified drafts that a prior counts for
DECAY = 0.9                 # of a request's counts, per round
DECAY_ALL = 0.995           # of the counts over all requests, per round
BUCKET = 256                # tokens of context; costs are looked up once per bucket


class Counts:
    """Accepted and verified drafts, by drafter."""

    def __init__(self):
        self.cells = defaultdict(lambda: np.zeros(2))

    def add(self, name, accepted, verified):
        self.cells[name] += accepted, verified

    def decay(self, factor):
        for cell in self.cells.values():
            cell *= factor

    def rate(self, name, prior):
        """Estimated chance that a draft is accepted."""
        accepted, verified = self.cells[name]
        return (accepted + WEIGHT * prior) / (verified + WEIGHT)


class Adaptive(Drafter):
    """A drafter that chooses among other drafters. drafters: a list, each with a price in the cost table;
    cost: a traces.CostTable; k: most drafts per round. ValueError if there is no drafter, or if two of them
    read different layers of the target."""
    name = "adaptive"

    def __init__(self, drafters, cost, k=16):
        if not drafters:
            raise ValueError("no drafter is ready that the cost table has a price for: "
                             f"{', '.join(cost.drafters)}")
        self.reads = any(d.reads for d in drafters)
        layers = {d.feature_layers for d in drafters if d.feature_layers} or {()}
        if len(layers) > 1:
            raise ValueError(f"all drafters must read the same layers of the target, got {sorted(layers)}")
        self.feature_layers, = layers
        self.drafters = {d.name: d for d in drafters}
        self.lookup = next((d for d in drafters if isinstance(d, NGram)), Drafter())
        self.cost = cost
        self.k = k
        self.counts = Counts()                           # over all requests
        self.history = defaultdict(Counts)               # of each request
        self.drafted = {}                                # request -> [(drafter, drafts, tokens before them)]
        self.chosen = {}                                 # request -> name of its drafter
        self.prices = cache(self._prices)

    def propose(self, requests, limits):
        # 1. Learn from the last round.
        self.counts.decay(DECAY_ALL)
        for r in requests:
            self._learn(r)
        # 2. Look tokens up, then let every request choose.
        lookups = self.lookup.propose(requests, limits)
        context = sum(len(r.tokens) for r in requests) // len(requests)
        seconds = self.prices(len(requests), context // BUCKET)
        out, asked = [], defaultdict(list)               # asked: drafter -> [(index of a request, drafts)]
        for i, (r, limit, (found, _)) in enumerate(zip(requests, limits, lookups)):
            name, k, copies = self._choose(r, limit, len(found), seconds)
            self.chosen[r] = name
            self.drafted[r] = [(self.lookup.name, found, len(r.tokens))]
            out.append((found[:copies], None))
            if name in self.drafters and name != self.lookup.name:
                asked[name].append((i, k))
        # 3. Each drafter drafts for the requests that chose it.
        for name, some in asked.items():
            rows, ks = zip(*some)
            drafts = self.drafters[name].propose([requests[i] for i in rows], ks)
            for i, proposal in zip(rows, drafts):
                r = requests[i]
                self.drafted[r].append((name, proposal[0], len(r.tokens)))
                copies, _ = out[i]
                if len(requests) > 1:                    # trees are slow in a batch (attention.Lanes)
                    copies = []
                out[i] = with_copies(proposal, copies[:limits[i] - len(proposal[0])])
        return out

    def _learn(self, r):
        """Count how many of a request's last drafts were right. The first wrong one was verified too, those
        after it were not."""
        history = self.history[r]
        history.decay(DECAY)
        for name, drafts, start in self.drafted.pop(r, []):
            right = [a == b for a, b in zip(drafts, r.tokens[start:])]
            accepted = (right + [False]).index(False)
            for counts in (history, self.counts):
                counts.add(name, accepted, min(accepted + 1, len(right)))

    def _choose(self, r, limit, found, seconds):
        """(drafter's name, number of drafts, number of looked-up tokens worth verifying) for a request for
        which `found` tokens were looked up."""
        best = {"target": (1 / seconds["target"][0], 0)}         # drafter -> tokens/s and number of drafts
        for name, drafter in self.drafters.items():
            is_lookup = drafter is self.lookup
            prior = min(MAX_PRIOR, self.cost.accept.get(name, MAX_PRIOR))
            alpha = self.history[r].rate(name, self.counts.rate(name, prior))
            tokens = expected_tokens(alpha, found if is_lookup else min(limit, drafter.gamma))
            goodput = tokens / seconds[name][:len(tokens)]
            best[name] = goodput.max(), int(goodput.argmax())
        name = max(best, key=lambda name: best[name])
        _, k = best[name]
        _, copies = best.get(self.lookup.name, (0, 0))
        return name if k else "target", k, copies

    def _prices(self, batch, bucket):
        """{drafter: seconds of a round (k + 1,), by number of drafts} of a batch."""
        kv = batch * (bucket * BUCKET + BUCKET // 2)
        drafts = np.arange(self.k + 1)
        prices = {name: self.cost.round(name, kv, drafts, batch) for name in self.drafters}
        prices[self.lookup.name] = self.cost.round(None, kv, drafts, batch)
        prices["target"] = self.cost.round(None, kv, drafts, batch)
        return prices

    def observe(self, request, features):
        for drafter in self.drafters.values():
            if drafter.reads:
                drafter.observe(request, features)

    @property
    def seconds(self):
        """Seconds that captures of CUDA graphs took, all drafters together."""
        return sum(drafter.seconds for drafter in self.drafters.values())

    def prepare(self, batch, longest):
        for drafter in self.drafters.values():
            drafter.prepare(batch, longest)

    def proposer(self, request):
        return self.chosen[request]

    def release(self, request):
        for notes in (self.history, self.drafted, self.chosen):
            notes.pop(request, None)
        for drafter in self.drafters.values():
            drafter.release(request)
