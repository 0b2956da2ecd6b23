"""How many of its drafts would self-speculation get accepted along a given text, with any selection?

Decoding answers that slowly, and by a text that every selection changes. Here the text is given, the target
reads it once, and SpecGen's rounds are replayed along it: the k draft rows of a round are fed together, with
the text's own tokens as drafts. At row i the rejection rule would accept what it draws with probability

    chance_i = sum over v of min(p_i(v), q_i(v))

p_i of full, q_i of sparse attention. A round is expected to accept the sum over j of chance_1 .. chance_j. A
coin of each chance decides where the next round begins. This is the law of decoding at temperature 1 along a
text that the model samples: the emitted token has distribution p and was accepted with probability
min(p, q) / p. The one difference is that a verification's rows behind a rejected draft, which count in the
scores, read the text here and rejected drafts there. Next to it the greedy rule: the leading rows on which
both argmaxes are the same.
"""
from types import SimpleNamespace

import torch

from minispec.core.attention import FullKeys, group_rows, packed_attend, ungroup_rows
from minispec.core.kv_cache import KVCache
from minispec.specgen import SpecGen

CHUNK = 512             # tokens of a text that are read at once


class Recorded(FullKeys):
    """FullKeys that keep every row's probabilities: `rows`, by layer, (G, n, T) means over the heads of a
    group."""

    def __init__(self, cache, start, n):
        super().__init__(cache, 0, start, n, record=True)
        self.rows = []

    def _by_products(self, q, keys, values):
        out, probs = super()._by_products(q, keys, values)
        probs = probs.unflatten(1, (-1, self.n))                               # (G, g, n, T)
        self.rows.append(probs.mean(1))
        return out, probs.flatten(1, 2)


@torch.inference_mode()
def read(model, ids, cache, start, end, base=0):
    """Fill a cache with positions start .. end - 1 of ids (T,), of a request whose first slot is `base`."""
    for first in range(start, end, CHUNK):
        feed(model, ids, FullKeys(cache, base, first, min(CHUNK, end - first)))


def feed(model, ids, keys):
    """Hidden states of the rows of a FullKeys."""
    positions = torch.arange(keys.start, keys.start + keys.n, device=ids.device)
    return model(ids[positions], positions, packed_attend([(0, keys.n, keys)]))


class Text:
    """ids that the target has read: its cache, and of `context` what the rounds behind it need: the target's
    distributions p of the rows from position `first` on, and the probabilities rows (L, G, n, T)."""

    def __init__(self, model, ids):
        self.model = model
        self.ids = torch.tensor(ids, device=model.device)
        self.cache = KVCache(model.config, len(ids), model.dtype, model.device)

    @torch.inference_mode()
    def contexts(self, contexts, before, after):
        """Read the text; yields each of `contexts` when the rows from `before` tokens before it up to `after`
        behind it are recorded."""
        start = 0
        for context in contexts:
            read(self.model, self.ids, self.cache, start, context - before)
            keys = Recorded(self.cache, context - before, before + after)
            self.p = self.model.logits(feed(self.model, self.ids, keys)).softmax(-1)
            self.first, self.rows = keys.start, torch.stack(keys.rows)
            start = context + after
            yield context


class Replay:
    """SpecGen's rounds with one selection, behind the first `context` tokens of a text. To its planner it is
    the request, to `packed_attend` the keys of its draft rows. select: SpecGen's, or "oracle": the positions
    that a draft row itself attends to most, which no method can know beforehand."""
    pool = state = None

    def __init__(self, text, context, select, k, sparsity):
        engine = SimpleNamespace(cache=text.cache, model=text.model)
        self.oracle = select == "oracle"
        self.planner = SpecGen(engine, k, sparsity, 0, select="pillar" if self.oracle else select)
        self.text = text
        self.k = k
        self.end = context
        self.coins = torch.Generator().manual_seed(0)
        self.accepted, self.greedy = [], []                # of every round
        self._begin(context - k - 1, k)                    # the prompt's last rows choose for the first round

    def _begin(self, start, accepted):
        """The next round: choose by the k + 1 rows from position `start` on."""
        self.n_cached = start + accepted + 1
        first = start - self.text.first
        scores = self.text.rows[:, :, first:first + self.k + 1].mean(2)
        self.state = self.planner._select(self, SimpleNamespace(scores=scores), accepted)
        # Which cached positions draft rows do not see, (L, G, T).
        self.hidden = torch.zeros(*scores.shape[:2], self.n_cached, dtype=torch.bool, device=scores.device)
        if self.state.selected is not None and not self.oracle:
            self.hidden[:, :, :self.n_cached - self.state.recent] = True
            self.hidden.scatter_(2, self.state.selected, False)

    def attend(self, layer, q, k, v):
        """q (n, H, D), k and v (n, G, D) of a round's draft rows -> (n, H, D)."""
        n, groups, d = k.shape
        seen = self.n_cached
        cached = self.text.cache.layers[layer]
        keys, values = (torch.cat([x[:, :seen], new.transpose(0, 1)], 1) for x, new in zip(cached, (k, v)))
        rows = group_rows(q, groups) * d ** -0.5                               # (G, g * n, D)
        logits = (rows @ keys.transpose(1, 2)).unflatten(1, (-1, n))           # (G, g, n, T + n)
        later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        logits[..., seen:].masked_fill_(later, float("-inf"))

        # Of the cached positions, those that were selected.
        hidden = self.hidden[layer][:, None, None]                             # (G, 1, 1, T)
        if self.oracle:
            mass = logits.softmax(-1)[..., :seen].mean(1)                      # (G, n, T)
            best = mass.topk(self.planner.widest(seen), dim=-1, sorted=False).indices
            hidden = torch.ones_like(mass, dtype=torch.bool).scatter_(2, best, False)[:, None]
        logits[..., :seen].masked_fill_(hidden, float("-inf"))
        return ungroup_rows(logits.softmax(-1).flatten(1, 2) @ values, n)

    def judge(self, q):
        """Count what the round accepts, q (k, V) its drafts' distributions, and begin the next one."""
        first = self.n_cached - self.text.first
        p = self.text.p[first:first + self.k]
        chance = torch.minimum(p, q).sum(-1).cpu()
        same = (p.argmax(-1) == q.argmax(-1)).cpu()
        self.accepted.append(chance.cumprod(0).sum().item())
        self.greedy.append(same.cumprod(0).sum().item())
        self._begin(self.n_cached, self._verdict(chance, same))

    def _verdict(self, chance, same):
        coins = torch.rand(self.k, generator=self.coins)
        return int((coins < chance).cumprod(0).sum())


@torch.inference_mode()
def replay(text, replays, end):
    """Run Replays of one text side by side, while their rounds end before position `end`."""
    live = list(replays)
    while live := [r for r in live if r.n_cached + r.k < end]:
        segments, positions = [], []
        for r in live:
            segments.append((len(positions), len(positions) + r.k, r))
            positions += range(r.n_cached, r.n_cached + r.k)
        positions = torch.tensor(positions, device=text.ids.device)
        hidden = text.model(text.ids[positions], positions, packed_attend(segments))
        for r, logits in zip(live, text.model.logits(hidden).split([r.k for r in live])):
            r.judge(logits.softmax(-1))
