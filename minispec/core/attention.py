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
from functools import cached_property
from itertools import groupby

import torch
import torch.nn.functional as F

from minispec.core.cpu import PACKED_TYPES

# cuDNN's attention plans again for every new length, and in decoding every forward has one.
torch.backends.cuda.enable_cudnn_sdp(False)


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

    Neighbours whose keys lie in one pool are served together."""
    parts = []                                           # (first row, last row + 1, attend)
    for pool, some in groupby(segments, lambda segment: segment[2].pool):
        some = list(some)
        if pool is None:
            parts += [(first, end, keys.attend) for first, end, keys in some]
        else:
            parts.append((some[0][0], some[-1][1], pool.attend([keys for *_, keys in some])))
    if len(parts) == 1:
        return parts[0][2]

    def attend(layer, q, k, v):
        return torch.cat([part(layer, q[a:b], k[a:b], v[a:b]) for a, b, part in parts])
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
    pool = None                                              # in the cache itself

    def __init__(self, cache, base, start, n, record=False, tail=None):
        self.cache = cache
        self.base = base
        self.start = start
        self.n = n
        self.new = slice(base + start, base + start + n)     # slots of the rows themselves
        self.all = slice(base, base + start + n)             # slots of everything that they may see
        self.tail = tail
        self.mask = None                                     # made in the first layer, the same in all
        self.scores = None
        if record:
            layers, groups, _, _ = cache.k.shape
            self.scores = torch.empty(layers, groups, start + n, device=cache.k.device)

    @cached_property
    def views(self):
        """Of each layer the rows' own keys and values (G, n, D), and all that they may see (G, T, D).

        They are views of the cache, made for all layers together: reading copies nothing."""
        pools = self.cache.k, self.cache.v
        return list(zip(*(x[:, :, slots].unbind() for slots in (self.new, self.all) for x in pools)))

    def attend(self, layer, q, k, v):
        """q (n, H, D), k and v (n, G, D) -> (n, H, D)."""
        # Store first: a row sees itself.
        new_keys, new_values, keys, values = self.views[layer]
        new_keys.copy_(k.transpose(0, 1))
        new_values.copy_(v.transpose(0, 1))

        if self.scores is not None:
            out, probs = self._by_products(q, keys, values)
            self.scores[layer] = probs.mean(1)
            return out
        if self.start == 0 and self.n > 1 and self.tail is None:
            return self._prompt(q, keys, values)
        return self._fused(q, keys, values)

    def _prompt(self, q, keys, values):
        """A prompt from its beginning, where torch knows the mask."""
        q = q.transpose(0, 1)
        out = F.scaled_dot_product_attention(q[None], keys[None], values[None], is_causal=True,
                                             enable_gqa=True)
        return out[0].transpose(0, 1)

    def _fused(self, q, keys, values):
        """A few rows after many keys. The heads of a group are rows of one call, so they share its keys."""
        rows = group_rows(q, len(keys))                                        # (G, g * n, D)
        mask = self._mask(q, len(keys), keys.shape[1])
        out = F.scaled_dot_product_attention(rows[None], keys[None], values[None], attn_mask=mask)
        return ungroup_rows(out[0], self.n)

    def _by_products(self, q, keys, values):
        """The same in single steps: (out (n, H, D), probabilities (G, g * n, T)).

        In bf16, logits and probabilities are rounded to it. That leaves the model's logits as exact as
        torch's own attention does: what is rounded elsewhere counts more."""
        rows = group_rows(q, len(keys)) * q.shape[-1] ** -0.5                  # (G, g * n, D)
        if q.dtype not in PACKED_TYPES:
            rows, keys, values = rows.float(), keys.float(), values.float()
        # Head by head: to multiply many at once, torch would copy the keys.
        logits = torch.stack([row @ key.mT for row, key in zip(rows, keys)])   # (G, g * n, T)
        # All rows see what comes before their own positions. (Of a tree nothing is recorded.)
        mask = self._mask(q, len(keys), self.n)
        if mask is not None:
            logits[:, :, -self.n:] += mask
        probs = logits.softmax(-1)
        return ungroup_rows(probs @ values, self.n).to(q.dtype), probs

    def _mask(self, q, n_groups, width):
        """Additive mask (g * n, width) of the newest `width` positions, 0 or -inf; the same in every layer.

        None for a single row that sees everything."""
        if self.n == 1 and self.tail is None:
            return None
        if self.mask is None:
            sees = self.tail
            if sees is None:
                # The rows' own positions are causal.
                sees = torch.ones(self.n, self.n, dtype=torch.bool).tril()
            unseen = F.pad(~sees.to(q.device), (width - sees.shape[1], 0))     # (n, width)
            mask = torch.zeros(self.n, width, dtype=q.dtype, device=q.device)
            mask.masked_fill_(unseen, float("-inf"))
            self.mask = mask.repeat(q.shape[1] // n_groups, 1)                 # (g * n, width)
        return self.mask


def group_rows(q, n_groups):
    """(n, H, D) -> (G, g * n, D): the g = H / G heads that share a key head become rows of one product."""
    n, h, d = q.shape
    return q.view(n, n_groups, h // n_groups, d).permute(1, 2, 0, 3).reshape(n_groups, -1, d)


def ungroup_rows(out, n):
    """(G, g * n, D) -> (n, H, D), the inverse of group_rows."""
    groups, gn, d = out.shape
    return out.view(groups, gn // n, n, d).permute(2, 0, 1, 3).reshape(n, -1, d)


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
