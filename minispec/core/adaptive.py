"""Who should draft now, and how much? The open question of "Performance or illusion" (arXiv 2601.11580, section on combining
drafters) answered online: every round and for every request, the choice with the most expected tokens per second.

    goodput(drafter, k) = E(alpha, k) / (T_step(B, k + 1) + T_draft(k))     E = 1 + alpha + .. + alpha^k  (2211.17192, eq. 1)

with T from a measured cost table (traces.CostTable) and alpha, the chance that a draft is accepted, from what was accepted
so far (SmartSpec, 2406.14066, section 4). k = 0 is allowed: then nobody drafts.

How alpha is estimated. Counts of drafts judged and accepted fade with time; a request's estimate leans on that of all requests,
and that one on a hope, so a drafter of which there is hope is tried again once the memory of its failure has faded. The hope is what the
drafter reached on other texts (the cost table's `accept`), but no more than START: some texts are new to everyone, and a whole batch
would try long drafts at once.
An n-gram lookup costs nothing, so it is made at every round and learns at every round, whoever drafts; and it says how sure
it is: the longer the text before the copied place agrees, the more likely it goes on to. Its alpha is one per match length.

What differs from SmartSpec and why: it chooses k for one drafter and the whole batch; here each request chooses, among
several drafters, and all together want the most tokens a second (`richest`): a drafter that would serve one row of sixteen
is not worth its forward, and who would draft much deeper than the others must be worth the wait.

A drafter that has not read a request's tokens must do so before it drafts, and on a long prompt that may take longer than
the whole answer. The table's price of reading is spread over the tokens that the request may still get.

The choice depends on committed tokens alone, never on the coins that will judge it, so the output is the target's own,
greedy or sampled.
"""
import numpy as np

from minispec.core.drafters import NGram

START, LOOKUP, WEIGHT = 0.85, 0.7, 4.0  # most alpha hoped of a drafter that was never tried, that of a lookup, and how many trials this opinion is worth
FADE, FADE_ALL = 0.9, 0.995             # what a round leaves of a request's counts, and of the counts of all requests
MATCHES = (3, 4, 6, 8, 12, 16, 24, 32)  # match lengths that are told apart


class Counts:
    """Accepted and judged drafts, by situation; old ones fade."""

    def __init__(self, fade):
        self.fade, self.now, self.cells = fade, 0, {}          # situation -> [accepted, judged, when]

    def add(self, situation, accepted, judged):
        a, n, _ = self.read(situation)
        self.cells[situation] = (a + accepted, n + judged, self.now)

    def read(self, situation):
        """(accepted, judged), faded to now, and now."""
        a, n, when = self.cells.get(situation, (0.0, 0.0, self.now))
        left = self.fade ** (self.now - when)
        return a * left, n * left, self.now

    def rate(self, situation, belief):
        a, n, _ = self.read(situation)
        return (a + WEIGHT * belief) / (n + WEIGHT)


class _Notes:
    """What is known of a request: its own counts, and what was drafted last: [(situation, drafts, tokens then)]."""

    def __init__(self):
        self.counts, self.asked = Counts(FADE), []


class Adaptive:
    """A drafter that asks other drafters; for the engine's Lockstep planner. drafters: a list, whose names the cost table
    knows; of those that read the target's states all must read the same. k: the most drafts a round."""
    name = "adaptive"

    def __init__(self, drafters, cost, k=16):
        unknown = [d.name for d in drafters if d.name not in cost.drafters]
        if unknown or not drafters:
            raise ValueError(f"no price for drafter {', '.join(unknown) or '(none given)'}; the cost table has {', '.join(cost.drafters) or 'none'}")
        readers = [d.taps for d in drafters if getattr(d, "taps", None) is not None]
        if any(taps != readers[0] for taps in readers):
            raise ValueError(f"the drafters read different layers of the target: {readers}")
        self.taps = readers[0] if readers else None
        self.drafters, self.cost, self.k = {d.name: d for d in drafters}, cost, k
        self.asked = np.array([not isinstance(d, NGram) for d in drafters])       # a lookup is made anyway
        self.counts, self.notes, self.prices = Counts(FADE_ALL), {}, {}
        self.hope = {name: min(START, cost.accept.get(name, START)) for name in self.drafters}
        self.chosen = {}                 # request -> who proposes for it now; the engine records it

    def propose(self, requests, limits):
        self.counts.now += 1
        found = [self._learn_and_look(r, limit) for r, limit in zip(requests, limits)]
        picks = self._choose(requests, limits, found)
        out = [([], None)] * len(requests)
        for name, drafter in self.drafters.items():
            rows = [i for i, (who, _) in enumerate(picks) if who == name]
            if rows and isinstance(drafter, NGram):
                drafts = [(found[i][name][1][:picks[i][1]], None) for i in rows]
            elif rows:
                drafts = drafter.propose([requests[i] for i in rows], [picks[i][1] for i in rows])
            for i, draft in zip(rows, drafts if rows else []):
                out[i] = draft
                if not isinstance(drafter, NGram):
                    self.notes[requests[i]].asked.append((name, draft[0], len(requests[i].tokens)))
        self.chosen.update((r, who or "target") for r, (who, _) in zip(requests, picks))
        return out

    def _learn_and_look(self, r, limit):
        """Count what became of the last drafts, then say what each drafter offers now: {name: (situation, drafts)}, drafts
        None where they must be asked for."""
        notes = self.notes.setdefault(r, _Notes())
        notes.counts.now += 1
        for situation, drafts, at in notes.asked:
            true = r.tokens[at:at + len(drafts)]
            hits = next((j for j, (a, b) in enumerate(zip(drafts, true)) if a != b), len(true))
            for counts in (notes.counts, self.counts):
                counts.add(situation, hits, min(hits + 1, len(true)))
        notes.asked, offers = [], {}
        for name, drafter in self.drafters.items():
            offers[name] = name, None
            if isinstance(drafter, NGram):
                at = drafter.find(r)
                drafts = r.tokens[at:at + limit] if at is not None else []
                length = _agreement(r.tokens, at) if drafts else 0
                offers[name] = (name, sum(length >= m for m in MATCHES)), drafts
                if drafts:
                    notes.asked.append((*offers[name], len(r.tokens)))
        return offers

    def _choose(self, requests, limits, found):
        """[(drafter's name or None, drafts)] of every request."""
        names, ks = list(self.drafters), np.arange(self.k + 1)
        alpha, most, reading = np.zeros((3, len(requests), len(names)))
        window, common = [getattr(d, "gamma", self.k) for d in self.drafters.values()], {}       # common: what all requests say of a situation
        for i, (r, limit, offers) in enumerate(zip(requests, limits, found)):
            for j, (situation, drafts) in enumerate(offers.values()):
                if situation not in common:
                    common[situation] = self.counts.rate(situation, self.hope[names[j]] if drafts is None else LOOKUP)
                alpha[i, j] = self.notes[r].counts.rate(situation, common[situation])
                most[i, j] = min(limit, window[j]) if drafts is None else len(drafts)
                reading[i, j] = self._unread(names[j], r) / r.remaining if drafts is None else 0.0       # a lookup has read already, whoever drafts
        tokens = np.cumsum(alpha[..., None] ** ks, -1)
        charge = reading[..., None] * tokens
        tokens[ks > most[..., None]] = -np.inf
        step, price = self._prices(len(requests), int(sum(len(r.tokens) for r in requests) / len(requests)))
        return [(names[j] if k else None, k) for j, k in richest(tokens, charge, step, price, self.asked)]

    def _unread(self, name, r):
        """Seconds that it takes a drafter to read what it does not know of a request; the tokens of a round or two are in the
        price of drafting."""
        note = self.drafters[name].notes.get(r)
        tokens = len(r.tokens) - (note.cached if note else 0)
        if tokens <= 2 * self.k:
            return 0.0
        key = name, tokens // 256
        if key not in self.prices:
            self.prices[key] = float(self.cost.read(name, tokens))
        return self.prices[key]

    def _prices(self, rows, context):
        """Seconds of a step (k + 1,) by drafts per row, and of drafting (drafters, k + 1), looked up once per 256 tokens."""
        key = rows, context // 256
        if key not in self.prices:
            kv, ks = rows * (key[1] * 256 + 128), np.arange(self.k + 1)
            price = [np.broadcast_to(self.cost.draft(name, kv, ks, rows), ks.shape) for name in self.drafters]
            self.prices[key] = np.broadcast_to(self.cost.step(kv, rows * (1 + ks), rows), ks.shape), np.array(price)
        return self.prices[key]

    def observe(self, request, features):
        for drafter in self.drafters.values():
            if getattr(drafter, "taps", None) is not None:
                drafter.observe(request, features)

    def release(self, request):
        self.notes.pop(request, None)
        self.chosen.pop(request, None)
        for drafter in self.drafters.values():
            drafter.release(request)


def richest(tokens, charge, step, price, asked):
    """The choices [(drafter, drafts)] of all requests that give the batch the most expected tokens a second.

    tokens (rows, M, k + 1): expected of a request by drafter and number of drafts, -inf for more than there can be; charge, of
    the same shape: seconds that only this request costs. step (k + 1): seconds of verifying so many drafts a request.
    price (M, k + 1): seconds of drafting. asked (M,): False for lookups, which are made anyway; beside them one drafter drafts,
    for all who want it, as deep as one of them wants, for a draft costs almost the same for one row as for the batch.

    For one request that is a look at all quotients. For more, Dinkelbach's method: let a second be worth so many tokens. Then every
    request by itself takes what leaves it most when its seconds are paid for, and the quotient that results is what a second is
    worth next."""
    rows, _, n = tokens.shape
    if rows == 1:
        quotient = tokens[0] / (step + price * asked[:, None] + charge[0])
        quotient[:, 0] = 1 / step[0]
        return [divmod(int(quotient.argmax()), n)]
    ks, request, worth, best = np.arange(n), np.arange(rows), rows / step[0], [(0, 0)] * rows
    each = (step[-1] - step[1]) / (rows * max(n - 2, 1))           # verification: so much a draft, and at once so much for the first
    first = step[1] - step[0] - each * rows
    while True:
        value = tokens - worth * (charge + each * ks)
        value[..., 0] = 1.0
        takes = np.where(asked[:, None], ks == 0, True)            # (M, k + 1): what is open to every request
        if asked.any():
            lookup = value[:, ~asked].max((1, 2), initial=1.0)
            total = np.maximum(np.maximum.accumulate(value[:, asked], -1), lookup[:, None, None]).sum(0) - worth * (price[asked] + first) * (ks > 0)
            who, depth = np.unravel_index(total.argmax(), total.shape)
            takes[np.flatnonzero(asked)[who], :depth + 1] = True
        j, k = np.divmod(np.where(takes, value, -np.inf).reshape(rows, -1).argmax(-1), n)
        drafting = sum(price[m, k[j == m].max(initial=0)] for m in np.flatnonzero(asked) if k[j == m].any())
        quotient = tokens[request, j, k].sum() / (np.interp(k.mean(), ks, step) + drafting + (charge[request, j, k] * (k > 0)).sum())
        if quotient <= worth * (1 + 1e-9):
            return best
        worth, best = quotient, list(zip(j.tolist(), k.tolist()))


def _agreement(tokens, at):
    """How many tokens before position `at` equal the last ones, up to the largest of MATCHES."""
    n = 0
    while n < min(at, MATCHES[-1]) and tokens[at - 1 - n] == tokens[-1 - n]:
        n += 1
    return n
