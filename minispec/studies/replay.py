"""How many of its drafts would self-speculation get accepted along a given text, with any selection?

Decoding answers that slowly, and by a text that every selection changes. Here the text is given, the target
reads it once, and SpecGen's rounds are replayed along it, with the text's own tokens as drafts. At row i the
rejection rule accepts what it draws with probability

    chance_i = sum over v of min(p_i(v), q_i(v))

p_i of full, q_i of sparse attention. A round is expected to accept the sum over j of chance_1 .. chance_j. A
coin of each chance decides which draft is rejected. Drafting goes on behind it from the token that would have
been rejected, of distribution (q - p)+, because a verification's scores are of all its rows, those behind a
rejected draft too. (With the text there, they would know what the next round looks at.) The next round begins
with the text's token in the rejected one's place. This is the law of decoding along a text that the model
samples: the emitted token has distribution p and was accepted with probability min(p, q) / p.
"""
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from minispec.core.attention import (FullKeys, group_rows, packed_attend,
                                      ungroup_rows, writer)
from minispec.core.kv_cache import KVCache
from minispec.core.verify import Sampling, draw, warp
from minispec.specgen import DraftPool, PillarKeys, SpecGen, pillar_scores

CHUNK = 512             # tokens of a text that are read at once
TEMPERATURES = (0.65, 1.0)              # chances are of all, coins of the first


def feed(model, rows):
    """Hidden states of rows [(ids (n,), position of the first, keys)], together."""
    segments, positions = [], []
    for ids, start, keys in rows:
        segments.append((len(positions), len(positions) + len(ids), keys))
        positions += range(start, start + len(ids))
    tokens = torch.cat([ids for ids, _, _ in rows])
    return model(tokens, torch.tensor(positions, device=tokens.device), packed_attend(segments))


@torch.inference_mode()
def read(model, ids, cache, blocks, start, end):
    """Fill `blocks` of a cache with positions start .. end - 1 of ids (T,). Returns the hidden states of the
    last chunk."""
    for first in range(start, end, CHUNK):
        part = ids[first:min(first + CHUNK, end)]
        hidden = feed(model, [(part, first, FullKeys(cache, blocks, first, len(part)))])
    return hidden


class Text:
    """ids that the target reads: its cache, where position p lies in slot p, and the target's logits (n, V) of
    the rows from `first` on."""

    def __init__(self, model, ids):
        self.model = model
        self.ids = torch.tensor(ids, device=model.device)
        self.cache = KVCache(model.config, len(ids), model.dtype, model.device)
        self.blocks = self.cache.open(len(ids))

    @torch.inference_mode()
    def contexts(self, contexts, after):
        """Yields each of `contexts` when the text is read up to `after` tokens (one chunk at most) behind
        it."""
        start = 0
        for self.first in contexts:
            read(self.model, self.ids, self.cache, self.blocks, start, self.first)
            start = self.first + after
            hidden = read(self.model, self.ids, self.cache, self.blocks, self.first, start)
            self.logits = self.model.logits(hidden)
            yield self.first

    @contextmanager
    def lent(self, slots):
        """Whatever is written into these slots of the cache, the text's keys and values come back."""
        pools = self.cache.k, self.cache.v
        kept = [x[:, :, slots].clone() for x in pools]
        yield
        for x, old in zip(pools, kept):
            x[:, :, slots] = old


class BestKeys(FullKeys):
    """For each draft row the `budget` cached positions that it attends to most itself, which no method can
    know beforehand. A row needs all keys to find them, so this is no way to draft."""

    def __init__(self, cache, blocks, start, n, budget):
        super().__init__(cache, blocks, start, n)
        self.budget = budget
        self.server = self                               # served alone

    def serve(self, some):
        cached = self.cache.reader(self.blocks, self.length)
        mask = F.pad(torch.where(self.sees(), 0.0, float("-inf")), (self.start, 0)).to(self.cache.k)

        def read(layer, q):
            k, v = cached(layer)
            rows = group_rows(q * q.shape[-1] ** -0.5, len(k))                 # (G, g * n, D)
            logits = (rows @ k.mT).unflatten(1, (-1, self.n)) + mask           # (G, g, n, T)
            probs = logits.softmax(-1)
            mass = probs[..., :self.start].mean(1)                             # (G, n, context)
            best = mass.topk(self.budget, dim=-1, sorted=False).indices
            # Dropping probabilities and dividing by their sum is a softmax over the rest.
            probs[..., :self.start] *= torch.zeros_like(mass).scatter_(2, best, 1.0)[:, None]
            probs = (probs / probs.sum(-1, keepdim=True)).flatten(1, 2)
            return ungroup_rows(probs @ v, self.n)
        return writer(some), read


class Replay:
    """SpecGen's rounds with one selection, behind the first `context` tokens of a text. To its planner it is
    the request. select: SpecGen's, or "oracle", BestKeys."""
    state = None

    def __init__(self, text, context, select, k, sparsity):
        self.oracle = select == "oracle"
        self.planner = SpecGen(text, k, sparsity, 0, select="window" if self.oracle else select)
        self.text = text
        self.k = k
        self.coins = torch.Generator().manual_seed(0)
        self.accepted = []                                 # of every round, by temperature
        # The prompt's last rows choose for the first round.
        self.n_cached = context - k - 1
        self.n_accepted = k
        self.rows = self.of_text(k + 1)                    # t0 and the drafts
        self.end_round()

    def of_text(self, n):
        """n tokens of the text from t0 on, which is at position n_cached."""
        return self.text.ids[self.n_cached:self.n_cached + n]

    def rows_of_text(self):
        """What the round feeds first, for `feed`: t0 and all drafts but the last, as the text has them."""
        if self.oracle:
            budget = self.planner.widest(self.n_cached)
            keys = BestKeys(self.text.cache, self.text.blocks, self.n_cached, self.k, budget)
        else:
            keys = FullKeys(self.seen, self.seen_blocks, self.n_seen, self.k)
        return self.of_text(self.k), self.n_cached, keys

    def judge(self, logits):
        """Count what the round accepts, logits (k, V) of its rows, and draw the draft that is rejected."""
        first = self.n_cached - self.text.first
        wanted = self.text.logits[first:first + self.k]
        ways = [Sampling(temperature) for temperature in TEMPERATURES]
        chances = [torch.minimum(warp(wanted, way), warp(logits, way)).sum(-1) for way in ways]
        self.accepted.append([chance.cumprod(0).sum().item() for chance in chances])
        coins = torch.rand(self.k, generator=self.coins)
        self.n_accepted = n = int((coins < chances[0].cpu()).cumprod(0).sum())
        self.rows = self.of_text(n + 1)
        if n < self.k:
            self.draft((warp(logits[n], ways[0]) - warp(wanted[n], ways[0])).clamp(min=0))

    def draft(self, weights):
        coin = torch.rand((), generator=self.coins).to(weights.device)
        self.rows = torch.cat([self.rows, draw(weights, coin)[None]])

    def row_behind(self):
        """What it feeds behind a rejected draft, for `feed`: the last draft."""
        n = len(self.rows) - 1
        return self.rows[-1:], self.n_cached + n, FullKeys(self.seen, self.seen_blocks, self.n_seen + n, 1)

    @torch.inference_mode()
    def end_round(self):
        """Verify t0 and the drafts, and choose what the next round sees."""
        text = self.text
        keys = FullKeys(text.cache, text.blocks, self.n_cached, len(self.rows), record=pillar_scores)
        if self.planner.record:
            with text.lent(slice(self.n_cached, self.n_cached + len(self.rows))):
                feed(self.text.model, [(self.rows, self.n_cached, keys)])
        self.n_cached += self.n_accepted + 1

        # Draft rows see a little cache: the selection, and room for their own keys.
        self.state = self.planner._select(self, keys, self.n_accepted)
        pool = DraftPool(text.cache, self.k)
        chosen = PillarKeys(pool, text.blocks, self.n_cached, self.state.selected, self.state.recent)
        pool.gather(chosen)
        self.n_seen = chosen.n
        self.seen = KVCache(text.model.config, self.n_seen + self.k, text.model.dtype, text.model.device)
        self.seen_blocks = self.seen.open(self.n_seen + self.k)
        self.seen.kv[:, :, :, :self.n_seen] = torch.stack([pool.k[:, 0], pool.v[:, 0]])[:, :, :, :self.n_seen]


@torch.inference_mode()
def replay(text, replays, end):
    """Run Replays of one text side by side, while their rounds end before position `end`."""
    model = text.model
    while live := [r for r in replays if r.n_cached + r.k < end]:
        # The text's own tokens as drafts: their rows need not wait for each other.
        with text.lent(slice(min(r.n_cached for r in live), max(r.n_cached + r.k for r in live))):
            hidden = feed(model, [r.rows_of_text() for r in live])
        for r, logits in zip(live, model.logits(hidden).split([r.k for r in live])):
            r.judge(logits)

        # Behind a rejected draft one row at a time, of selections that go by scores.
        while more := [r for r in live if r.planner.record and len(r.rows) <= r.k]:
            logits = model.logits(feed(model, [r.row_behind() for r in more]))
            for r, row in zip(more, logits):
                r.draft(warp(row, Sampling(TEMPERATURES[0])))
        for r in live:
            r.end_round()
