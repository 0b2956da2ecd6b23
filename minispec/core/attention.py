"""Which keys may a query see? The `attend` callables that are handed to the model.

Training:  `dense_attend(mask)` sees whole sequences.
Decoding:  `packed_attend(segments)` serves one packed batch in which every request contributes its own number
           of query rows. Each segment brings its own *keys* object, which stores the rows' k and v where
           they belong and lets the rows' queries read what they may. Here that is FullKeys: all cached
           positions, causal among the new rows, or along the paths of a draft tree. specgen.py adds
           PillarKeys, a short list of positions per layer and head.
On a GPU:  kernels/fused.py does what packed_attend does, all segments in one kernel a layer.

Shapes, for one layer: N packed rows, n of them from one request; H query heads, G key/value heads, g = H /
G query heads share a key head; D numbers a head; T positions that a request has cached, its new rows
included.
"""
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
import torch.nn.functional as F

from minispec.core.cpu import PACKED_TYPES
from minispec.core.kv_cache import KVCache

# cuDNN's attention plans again for every new length, and in decoding every forward has one.
torch.backends.cuda.enable_cudnn_sdp(False)

FEW = 64            # rows of a request up to which it may be served with others; a prompt has more
FILL = 1.5          # read at most so many times the keys that are needed, to serve requests together
LONG = 1024         # keys from which on products are faster in bf16 than torch's attention; prompts: always


# -- training ------------------------------------------------------------------------------------------------

def dense_attend(mask=None):
    """attend over whole sequences q (B, T, H, D), k and v (B, T, G, D).

    mask: bool (T, T) or (B, 1, T, T), True where a query (row) sees a key (column); None means causal."""
    def attend(layer, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))                       # (B, heads, T, D)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out.transpose(1, 2)                                             # (B, T, H, D)
    return attend


# -- decoding: one packed batch, a keys object for every request ---------------------------------------------

def packed_attend(segments):
    """attend over packed rows q (N, H, D). segments: [(first row, last row + 1, keys)], which cover all rows.

    Neighbours whose keys lie in one pool are served together, and so are those whose slots lie side by
    side."""
    parts = []                                           # (first row, last row + 1, attend)
    for pool, some in groupby(segments, lambda segment: segment[2].pool):
        some = list(some)
        together = pool and pool.attend([keys for *_, keys in some])
        if together:
            parts.append((some[0][0], some[-1][1], together))
        else:
            parts += [(first, end, keys.attend) for first, end, keys in some]
    if len(parts) == 1:
        return parts[0][2]

    def attend(layer, q, k, v):
        return torch.cat([part(layer, q[a:b], k[a:b], v[a:b]) for a, b, part in parts])
    return attend


@dataclass(frozen=True)
class Lanes:
    """Requests of one cache with n rows each, served in one call a layer where their runs lie at equal
    distances.

    From its first slot on the pool is read as B lanes of T slots, as many as the longest request has. A lane
    may be nobody's, and what lies in it behind its own request a mask hides."""
    cache: KVCache
    n: int

    def attend(self, some):
        """attend over the rows of `some` FullKeys, or None where a call for each costs less."""
        pools = self.cache.k, self.cache.v
        bases = [keys.base for keys in some]
        lengths = [keys.start + self.n for keys in some]
        t = max(lengths)
        distance = math.gcd(*bases) or t
        n_lanes = 1 + max(bases) // distance
        alone = len(set(bases)) < max(len(some), 2)      # one request, or one with several segments
        if alone or max(bases) + t > pools[0].shape[2] or n_lanes * t > FILL * sum(lengths):
            return None

        lane = torch.tensor(bases, device=pools[0].device) // distance
        slot = torch.cat([torch.arange(keys.new.start, keys.new.stop) for keys in some]).to(lane.device)
        # Views of all layers (B, G, T, D).
        lanes = [x.unfold(2, t, distance)[:, :, :n_lanes].permute(0, 2, 1, 4, 3) for x in pools]
        mask = None                                      # made in the first layer, the same in all

        def attend(layer, q, k, v):
            nonlocal mask
            for pool, x in zip(pools, (k, v)):
                pool[layer].index_copy_(1, slot, x.transpose(0, 1))
            rows = group_rows(q.view(len(some), self.n, *q.shape[1:]), k.shape[1])
            if mask is None:
                mask = q.new_full((n_lanes, 1, rows.shape[2], t), float("-inf"))
                for i, length, keys in zip(lane, lengths, some):
                    hidden = keys.mask_of(q, k.shape[1], length)
                    mask[i, :, :, :length] = 0 if hidden is None else hidden
            rows = rows.new_zeros(n_lanes, *rows.shape[1:]).index_copy_(0, lane, rows)   # (B, G, g * n, D)
            out = F.scaled_dot_product_attention(rows, lanes[0][layer], lanes[1][layer], attn_mask=mask)
            return ungroup_rows(out.index_select(0, lane), self.n).flatten(0, 1)         # (N, H, D)
        return attend


class FullKeys:
    """n new rows at positions start.. of the request whose slots begin at `base`: append their keys and
    values to the cache, and let row i see every position up to start + i.

    tail: bool (n, m), where the rows belong to a tree: which of the last m slots, its own included, each
    row sees instead; it sees all slots before them.

    record=True also leaves, in `scores` (L, G, start + n), the softmax probability each position received,
    averaged over the n rows and the g query heads of a group. Not every row sees the positions from `start`
    on. Their average is over all n rows all the same, so do not compare it with the others'.
    """
    selected = None                                          # all positions

    def __init__(self, cache, base, start, n, record=False, tail=None):
        self.cache = cache
        self.base = base
        self.start = start
        self.n = n
        self.new = slice(base + start, base + start + n)     # slots of the rows themselves
        self.all = slice(base, base + start + n)             # slots of everything that they may see
        self.tail = tail
        self.mask = None                                     # made in the first layer, the same in all
        low = cache.k.dtype == torch.bfloat16 in PACKED_TYPES and not cache.k.is_cuda
        square = tail is None or tail.shape[1] == n          # all rows of a tree are here
        self.in_steps = record or low and square and (n > FEW or start + n >= LONG)
        self.pool = None if self.in_steps or n > FEW else Lanes(cache, n)      # who is served together
        self.scores = None
        if record:
            layers, groups, _, _ = cache.k.shape
            self.scores = torch.empty(layers, groups, start + n, device=cache.k.device)

    @cached_property
    def views(self):
        """Of each layer the rows' own keys and values (n, G, D), and all that they may see (G, T, D).

        They are views of the cache, made for all layers together: reading copies nothing."""
        pools = self.cache.k, self.cache.v
        new = [x[:, :, self.new].transpose(1, 2).unbind() for x in pools]
        return list(zip(*new, *(x[:, :, self.all].unbind() for x in pools)))

    def attend(self, layer, q, k, v):
        """q (n, H, D), k and v (n, G, D) -> (n, H, D)."""
        # Store first: a row sees itself.
        new_keys, new_values, keys, values = self.views[layer]
        new_keys.copy_(k)
        new_values.copy_(v)

        if self.in_steps:
            out, probs = self._by_products(q, keys, values)
            if self.scores is not None:
                self.scores[layer] = probs.mean(1)
            return out
        if self.start == 0 and self.n > 1 and self.tail is None:
            # A prompt from its beginning: torch knows the mask. (Of the cache, whose heads lie together.)
            return dense_attend()(layer, q[None], *(x.transpose(0, 1)[None] for x in (keys, values)))[0]
        return self._fused(q, keys, values)

    def _fused(self, q, keys, values):
        """A few rows after many keys. The heads of a group are rows of one call, so they share its keys."""
        rows = group_rows(q, len(keys))                                        # (G, g * n, D)
        mask = self.mask_of(q, len(keys), keys.shape[1])
        out = F.scaled_dot_product_attention(rows[None], keys[None], values[None], attn_mask=mask)
        return ungroup_rows(out[0], self.n)

    def _by_products(self, q, keys, values):
        """The same in single steps: (out (n, H, D), probabilities (G, g * n, T)).

        In bf16, logits and probabilities are rounded to it. That leaves the model's logits as exact as
        torch's own attention does: what is rounded elsewhere counts more."""
        rows = group_rows(q, len(keys)) * q.shape[-1] ** -0.5                  # (G, g * n, D)
        if q.dtype not in PACKED_TYPES:
            rows, keys, values = rows.float(), keys.float(), values.float()
        # Head by head: to multiply many at once, torch would copy the keys. (Not the values.)
        logits = torch.stack([row @ key.mT for row, key in zip(rows, keys)])   # (G, g * n, T)
        # All rows see what comes before their own positions. (Of a tree nothing is recorded.)
        mask = self.mask_of(q, len(keys), self.n)
        if mask is not None:
            logits[:, :, -self.n:] += mask
        probs = logits.softmax(-1)
        return ungroup_rows(probs @ values, self.n).to(q.dtype), probs

    def mask_of(self, q, n_groups, width):
        """Additive mask (g * n, width) of the newest `width` positions, 0 or -inf; the same in every layer.

        None for a single row that sees everything."""
        if self.n == 1 and self.tail is None:
            return None
        if self.mask is None:
            sees = self.tail
            if sees is None:
                # The rows' own positions are causal.
                sees = torch.ones(self.n, self.n, dtype=torch.bool).tril()
            sees = F.pad(sees, (width - sees.shape[1], 0), value=True)         # (n, width)
            mask = torch.where(sees, 0.0, float("-inf")).to(q)
            self.mask = mask.repeat(q.shape[1] // n_groups, 1)                 # (g * n, width)
        return self.mask


def group_rows(q, n_groups):
    """(.., n, H, D) -> (.., G, g * n, D): the g = H / G heads that share a key head become rows of one
    product."""
    return q.view(*q.shape[:-2], n_groups, -1, q.shape[-1]).movedim(-4, -2).flatten(-3, -2)


def ungroup_rows(out, n):
    """(.., G, g * n, D) -> (.., n, H, D), the inverse of group_rows."""
    return out.view(*out.shape[:-2], -1, n, out.shape[-1]).movedim(-2, -4).flatten(-3, -2)


# -- trees of drafts -----------------------------------------------------------------------------------------

def tree_mask(parents):
    """bool (n + 1, n + 1), who sees whom: row 0 is the root, rows 1 .. n hang from rows `parents` (n,). A row
    sees itself and its ancestors."""
    sees = torch.eye(len(parents) + 1, dtype=torch.bool)
    for i, parent in enumerate(parents, 1):
        sees[i] |= sees[parent]
    return sees


# -- the same on a GPU: kernels/ -----------------------------------------------------------------------------

TREE = 64                # rows of the largest tree that the kernels take (kernels/attention.py)


def can_fuse(model):
    """Whether the Triton kernels run for this model. Where they do not, decoding uses torch's operators."""
    from kernels import available, supported             # here, because importing triton takes a second
    return available(model.embed.weight) and supported(model.config.head_dim, model.dtype)
