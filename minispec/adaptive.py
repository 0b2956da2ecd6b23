"""Which drafter should draft now, and how much? The open question of "Performance or illusion" (arXiv
2601.11580, section on combining drafters) answered online: every round, the choices with the most expected
tokens per second.

    goodput(drafter, k) = E(alpha, k) / (T_step(B, k + 1) + T_draft(k))
    E(alpha, k) = 1 + alpha + .. + alpha^k                                  (2211.17192, eq. 1)

with T from a measured cost table (traces.CostTable) and alpha, the chance that a draft is accepted, from what
was accepted so far (SmartSpec, 2406.14066, section 4). k = 0 is allowed: then nothing is drafted.

How alpha is estimated. Counts of drafts judged and accepted fade with time. A request's estimate leans on
that of all requests, and that one on a hope, so a drafter of which there is hope is tried again once the
memory of its failure has faded. The hope is what the drafter reached on other texts (the cost table's
`accept`), but no more than START: some texts are new to every drafter, and a whole batch would try long
drafts at once. An n-gram lookup costs nothing, so it is made in every round and learned from in every round,
whichever drafter drafts. It also says how sure it is: the longer the text before the copied place agrees, the
more likely it goes on to. So its alpha is one per match length. Copies that are likely enough to be worth
their rows are judged next to whatever is drafted: a round is wrong only where both are.

What differs from SmartSpec and why: it chooses k for one drafter and the whole batch. Here each request
chooses among several drafters, and all together want the most tokens/s (`richest`): a drafter that would
serve one row of sixteen is not worth its forward, and a row that drafts much deeper than the others must be
worth the wait.

A drafter that ends its chains itself (drafters.py, early stop) is told no k, but how probable a chain must be
for one more draft to be worth its seconds, at the tokens/s of this round.

A drafter that has not read a request's tokens must do so before it drafts, and on a long prompt that may take
longer than the whole answer. The table's price of reading is spread over the tokens that the request may
still get.

The choice depends on committed tokens alone, never on the coins of rejection, so that rule is exact here too.

Glossary: situation <-> what an alpha is counted for: a drafter, or a lookup with so long a match.
"""
from collections import defaultdict

import numpy as np

from minispec.core.drafters import Drafter, NGram, with_copies

START = 0.85                # most alpha hoped of a drafter that was never tried
LOOKUP = 0.7                # the alpha hoped of a lookup
WEIGHT = 4.0                # how many trials such an opinion is worth
FADE = 0.9                  # what a round leaves of a request's counts
FADE_ALL = 0.995            # what a round leaves of the counts of all requests
MATCHES = (3, 4, 6, 8, 12, 16, 24, 32)  # match lengths that are told apart
LEAST = 0.02                # of an early stop
BUCKET = 256                # prices are looked up once per so many tokens of context


class Counts:
    """Accepted and judged drafts, by situation; old ones fade."""

    def __init__(self, fade):
        self.fade = fade
        self.cells = defaultdict(lambda: np.zeros(2))    # situation -> accepted, judged

    def begin_round(self):
        for cell in self.cells.values():
            cell *= self.fade

    def rate(self, situation, belief):
        """The estimate of alpha: WEIGHT trials went as `belief` says, the others as counted."""
        accepted, judged = self.cells[situation]
        return (accepted + WEIGHT * belief) / (judged + WEIGHT)


class History(Counts):
    """What is known of a request: its own counts, and what was drafted last: [(situation, drafts, tokens
    then)]."""

    def __init__(self):
        super().__init__(FADE)
        self.drafted = []


class Adaptive(Drafter):
    """A drafter that asks other drafters; for the engine's Lockstep planner. drafters: a list, all of them
    with a price in the cost table. k: the most drafts a round."""
    name = "adaptive"

    def __init__(self, drafters, cost, k=16):
        if not drafters:
            there = ", ".join(cost.drafters)
            raise ValueError(f"no drafter is ready that the cost table has a price for: {there}")
        self.reads = any(d.reads for d in drafters)
        layers = {d.feature_layers for d in drafters if d.feature_layers}
        if len(layers) > 1:
            raise ValueError(f"all drafters must read the same layers of the target, got {sorted(layers)}")
        self.feature_layers = layers.pop() if layers else ()
        self.drafters = {d.name: d for d in drafters}
        self.cost = cost
        self.k = k
        # Lookups are made anyway; the others must be asked.
        self.asked = np.array([not isinstance(d, NGram) for d in drafters])
        self.hope = {name: min(START, cost.accept.get(name, START)) for name in self.drafters}
        self.counts = Counts(FADE_ALL)                   # of all requests
        self.history = defaultdict(History)              # of each request
        self.prices = {}                                 # what was looked up in the cost table
        self.chosen = {}                                 # request -> the name of who proposes now

    def propose(self, requests, limits):
        # 1. Learn what became of the last drafts.
        self.counts.begin_round()
        for r in requests:
            self._learn(r)
        # 2. See what lookups find, and choose.
        found = [self._look(r, limit) for r, limit in zip(requests, limits)]
        picks = self._choose(requests, limits, found)
        # 3. Collect the drafts: lookups are there already, other drafters draft for all who chose them.
        out = [([], None)] * len(requests)
        asked = {}                                       # drafter -> the rows that want it
        for i, (name, k, _) in enumerate(picks):
            self.chosen[requests[i]] = name or "target"
            if name in found[i]:
                _, copies = found[i][name]
                out[i] = copies[:k], None
            elif name:
                asked.setdefault(name, []).append(i)
        for name, rows in asked.items():
            drafter = self.drafters[name]
            # One that ends its chains itself was told what a draft must be worth, and need not know how deep.
            depths = [limits[i] if drafter.stop else picks[i][1] for i in rows]
            drafted = drafter.propose([requests[i] for i in rows], depths)
            for i, proposal in zip(rows, drafted):
                r = requests[i]
                self.history[r].drafted.append((name, proposal[0], len(r.tokens)))
                copies = next((copies for _, copies in found[i].values() if copies), [])
                out[i] = with_copies(proposal, copies[:min(picks[i][2], limits[i] - len(proposal[0]))])
        return out

    def _learn(self, r):
        """Count how many of a request's last drafts were right. The first wrong one was judged too, those
        after it were not."""
        history = self.history[r]
        history.begin_round()
        for situation, drafts, at in history.drafted:
            true = r.tokens[at:at + len(drafts)]
            hits = 0
            while hits < len(true) and drafts[hits] == true[hits]:
                hits += 1
            for counts in (history, self.counts):
                counts.cells[situation] += hits, min(hits + 1, len(true))
        history.drafted = []

    def _look(self, r, limit):
        """{name: (situation, copies)} of all lookups. They are noted as drafted: they are judged whoever
        drafts."""
        found = {}
        for name, drafter in self.drafters.items():
            if isinstance(drafter, NGram):
                at = drafter.find(r)
                copies = [] if at is None else r.tokens[at:at + limit]
                length = _agreement(r.tokens, at) if copies else 0
                situation = name, sum(length >= m for m in MATCHES)
                found[name] = situation, copies
                self.history[r].drafted.append((situation, copies, len(r.tokens)))
        return found

    def _choose(self, requests, limits, found):
        """[(name of the drafter or None, number of drafts, how many copies to judge next to them)] of
        every request."""
        # 1. Of every request and drafter: alpha, the most drafts there can be, and seconds of reading per
        #    token gained.
        shape = len(requests), len(self.drafters)
        alpha, most, reading = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for i, r in enumerate(requests):
            for j, (name, drafter) in enumerate(self.drafters.items()):
                if name in found[i]:                     # a lookup, which has read already
                    situation, copies = found[i][name]
                    alpha[i, j] = self._alpha(r, situation, LOOKUP)
                    most[i, j] = len(copies)
                else:
                    alpha[i, j] = self._alpha(r, name, self.hope[name])
                    most[i, j] = min(limits[i], drafter.gamma)
                    reading[i, j] = self._reading_seconds(name, r) / r.remaining
        context = int(sum(len(r.tokens) for r in requests) / len(requests))
        step, price = self._prices(len(requests), context)
        # 2. What copies would add to a drafter's drafts: a token is gained if the draft is right up to it, or
        #    the copy is. So these are the expected tokens by number of drafts, and the seconds that only this
        #    request costs.
        ks = np.arange(self.k + 1)
        row = (step[-1] - step[1]) / (len(requests) * max(self.k - 1, 1))      # seconds that it takes
        # Alone. In a batch trees are not served in one call (attention.Lanes), so their rows take longer.
        copied = self._copied(alpha, most, row / step[0] if len(requests) == 1 else np.inf)
        next_to = copied[:, None] * self.asked[:, None]                        # (rows, M, k + 1)
        tokens = np.cumsum(alpha[..., None] ** ks * (1 - next_to), -1) + next_to.sum(-1, keepdims=True)
        tokens[..., 0] = 1
        charge = reading[..., None] * tokens + row * (next_to > 0).sum(-1, keepdims=True)
        charge[..., 0] = 0
        tokens[ks > most[..., None]] = -np.inf
        self.considered = requests, tokens, charge, step, price
        # 3. The choices that together give the most tokens/s.
        names = list(self.drafters)
        picks = richest(tokens, charge, step, price, self.asked)
        # 4. A further draft is expected to give alpha tokens if all before it are right. So these must be
        #    right with the probability at which that is worth the seconds: a row more, and a share of a draft
        #    step.
        j, k = np.array(picks).T
        worth = _tokens_per_second(j, k, tokens, charge, step, price)
        seconds = (step[-1] - step[1] + price[:, -1] - price[:, 1]) / (len(requests) * max(self.k - 1, 1))
        least = np.clip(worth * seconds / alpha.mean(0), LEAST, 1)
        for drafter, stop in zip(self.drafters.values(), least.tolist()):
            drafter.stop = drafter.stop and stop
        n_copies = (copied > 0).sum(1)
        return [(names[j] if k else None, k, n) for (j, k), n in zip(picks, n_copies)]

    def promises(self, request):
        """What the last choice expected of every drafter for this request, with its best number of drafts:
        {name: [drafts, tokens, tokens/s]}."""
        requests, tokens, charge, step, price = self.considered
        tokens = tokens[requests.index(request)]                               # (M, k + 1)
        rate = tokens / (step + price + charge[requests.index(request)])
        best = rate.argmax(-1)
        return {name: [int(k), float(tokens[j, k]), float(rate[j, k])]
                for j, (name, k) in enumerate(zip(self.drafters, best))}

    def _copied(self, alpha, most, least):
        """The chance (rows, k + 1) that the first 1, 2, .. copies are right, of as many as are right more
        often than `least`; 0 behind them."""
        ks = np.arange(self.k + 1)
        lookups = np.flatnonzero(~self.asked)
        chance = alpha[:, lookups, None] ** ks
        chance[(ks > most[:, lookups, None]) | (ks == 0) | (chance < least)] = 0
        return chance.max(1, initial=0)

    def _alpha(self, r, situation, hope):
        """The chance that a draft is accepted: the request's own counts lean on those of all requests, those
        on a hope."""
        return self.history[r].rate(situation, self.counts.rate(situation, hope))

    def _reading_seconds(self, name, r):
        """Seconds that a drafter takes to read what it does not know of a request. The tokens of a round or
        two are in the price of drafting."""
        notes = self.drafters[name].notes.get(r)
        tokens = len(r.tokens) - (notes.cached if notes else 0)
        if tokens <= 2 * self.k:
            return 0.0
        key = name, tokens // BUCKET
        if key not in self.prices:
            self.prices[key] = float(self.cost.read(name, tokens))
        return self.prices[key]

    def _prices(self, rows, context):
        """Seconds of a step (k + 1,) by drafts per row, and of drafting (drafters, k + 1)."""
        key = rows, context // BUCKET
        if key not in self.prices:
            kv = rows * (key[1] * BUCKET + BUCKET // 2)
            ks = np.arange(self.k + 1)
            step = np.broadcast_to(self.cost.step(kv, rows * (1 + ks), rows), ks.shape)
            price = [np.broadcast_to(self.cost.draft(name, kv, ks, rows), ks.shape) for name in self.drafters]
            price = np.array(price)
            price[~self.asked] = 0                       # lookups are made anyway
            price[:, 0] = 0
            self.prices[key] = step, price
        return self.prices[key]

    def observe(self, request, features):
        for drafter in self.drafters.values():
            if drafter.reads:
                drafter.observe(request, features)

    @property
    def seconds(self):
        """That captures of graphs took, of all drafters."""
        return sum(drafter.seconds for drafter in self.drafters.values())

    def prepare(self, batch, longest):
        for drafter in self.drafters.values():
            drafter.prepare(batch, longest)

    def proposer(self, request):
        return self.chosen[request]

    def release(self, request):
        self.history.pop(request, None)
        self.chosen.pop(request, None)
        for drafter in self.drafters.values():
            drafter.release(request)


# -- the choice ----------------------------------------------------------------------------------------------

def richest(tokens, charge, step, price, asked):
    """The choices [(drafter, drafts)] of all requests that give the batch the most expected tokens/s.

    tokens (rows, M, k + 1): expected of a request by drafter and number of drafts, -inf for more than there
    can be. charge, of the same shape: seconds that only this request costs. step (k + 1,): seconds of
    verifying so many drafts a request. price (M, k + 1): seconds of drafting. Both are 0 for no drafts.
    asked (M,): False for lookups, which are made anyway, at no price.

    Next to the lookups one drafter drafts, for all requests that want it, as deep as one of them wants: a
    draft costs almost the same for one row as for the batch.

    The best quotient tokens / seconds is found by Dinkelbach's method. Suppose a second is worth `worth`
    tokens. Then the seconds of a choice can be subtracted from its tokens, and every request finds its best
    difference by itself, which it could not for a quotient. If the choices so found have a quotient above
    `worth`, it is the next `worth`. If they do not, no choices have: what was found last is the best.
    """
    if len(tokens) == 1:                                 # the largest of all quotients
        quotient = tokens[0] / (step + price + charge[0])
        return [divmod(int(quotient.argmax()), len(step))]
    best = [(0, 0)] * len(tokens)
    worth = len(tokens) / step[0]                        # begin with nothing drafted
    while True:
        j, k = _most_left(tokens, charge, step, price, asked, worth)
        quotient = _tokens_per_second(j, k, tokens, charge, step, price)
        if quotient <= worth * (1 + 1e-9):
            return best
        worth = quotient
        best = list(zip(j.tolist(), k.tolist()))


def _most_left(tokens, charge, step, price, asked, worth):
    """The choices, drafters (rows,) and numbers of drafts (rows,), that leave most tokens when a second costs
    `worth`."""
    rows, _, n = tokens.shape
    ks = np.arange(n)
    # 1. Verification, shared out: every draft costs `each`, and the first one of the batch `first` on top.
    each = (step[-1] - step[1]) / (rows * max(n - 2, 1))
    first = step[1] - step[0] - each * rows
    # 2. What a choice leaves its request, apart from the drafting that requests share.
    left = tokens - worth * (charge + each * ks)
    # 3. Which one drafter should draft, and how deep? Up to that depth every request takes what suits it, or
    #    keeps its lookup.
    allowed = np.where(asked[:, None], ks == 0, True)                          # (M, k + 1)
    if asked.any():
        lookup = left[:, ~asked].max((1, 2), initial=1.0)                      # (rows,)
        up_to = np.maximum.accumulate(left[:, asked], -1)                      # (rows, asked, k + 1)
        total = np.maximum(up_to, lookup[:, None, None]).sum(0)                # (asked, k + 1)
        total = total - worth * (price[asked] + first) * (ks > 0)
        drafter, depth = np.unravel_index(total.argmax(), total.shape)
        allowed[np.flatnonzero(asked)[drafter], :depth + 1] = True
    # 4. Every request by itself.
    left = np.where(allowed, left, -np.inf).reshape(rows, -1)
    return np.divmod(left.argmax(-1), n)


def _tokens_per_second(j, k, tokens, charge, step, price):
    """Expected tokens/s of the batch if request i gets k[i] drafts of drafter j[i]."""
    request = np.arange(len(k))
    # The drafter that is asked takes as long as its deepest row.
    drafting = price[j, k].max()
    verifying = np.interp(k.mean(), np.arange(len(step)), step)
    own = charge[request, j, k].sum()
    return tokens[request, j, k].sum() / (verifying + drafting + own)


def _agreement(tokens, at):
    """How many tokens before position `at` equal the last ones, up to the largest of MATCHES."""
    n = 0
    while n < min(at, MATCHES[-1]) and tokens[at - 1 - n] == tokens[-1 - n]:
        n += 1
    return n
