"""Which keys may a query see? The `attend` callables that are handed to the model.

Training:  `dense_attend(mask)` sees whole sequences.
Decoding:  `packed_attend(segments)` serves one packed batch in which every request contributes its own number
           of query rows. Each segment brings its own *keys* object, which says where the rows' k and v
           belong and what the rows' queries may read. Here that is FullKeys: all cached positions, causal
           among the new rows, or along the paths of a draft tree. specgen.py adds PillarKeys, a short list of
           positions per layer and head. Keys that can share a product name the same `server`.
On a GPU:  kernels/fused.py does what packed_attend does, all segments in one kernel a layer.

Shapes, for one layer: N packed rows, n of them from one request; H query heads, G key/value heads, g = H /
G query heads share a key head; D numbers a head; T positions that a request has cached, its new rows
included.
"""
import functools
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minispec.core.cpu import PACKED_TYPES
from minispec.core.kv_cache import KVCache

# cuDNN's attention plans again for every new length, and in decoding every forward has one.
torch.backends.cuda.enable_cudnn_sdp(False)

FEW = 64            # rows of a request up to which it is served with others; a prompt has more
FEW_BLOCKS = 8      # that torch's attention reads in less time than products


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

def packed_attend(segments, device=None):
    """attend over packed rows q (N, H, D). segments: [(first row, last row + 1, keys)], which cover all rows.
    Keys with the same server are served together, but of one request only those that come first: the next
    ones read what these store."""
    groups, turns = {}, Counter()
    for first, end, keys in segments:
        turn = turns[keys.blocks]
        turns[keys.blocks] += 1
        groups.setdefault((turn, keys.server), []).append((first, end, keys))
    parts = []                                           # (rows, attend over them)
    for (_, server), some in sorted(groups.items(), key=lambda group: group[0][0]):
        rows = [row for first, end, _ in some for row in range(first, end)]
        parts.append((rows, server.attend([keys for *_, keys in some])))
    if len(parts) == 1:
        return parts[0][1]
    parts = [(torch.tensor(rows, device=device), part) for rows, part in parts]          # once for all layers

    def attend(layer, q, k, v):
        out = torch.empty_like(q)
        for rows, part in parts:
            own = [x.index_select(0, rows) for x in (q, k, v)]
            out.index_copy_(0, rows, part(layer, *own))
        return out
    return attend


class FullKeys:
    """n new rows at positions start.. of a request that has `blocks` of the cache: append their keys and
    values, and let row i see every position up to start + i.

    tail: bool (n, m), which of the last m positions each row sees instead, where the rows belong to a tree or
    see each other; each sees all positions before them.

    record=True also leaves, in `scores` (L, G, start + n), the softmax probability each position received,
    averaged over the n rows and the g query heads of a group. Not every row sees the positions from `start`
    on. Their average is over all n rows all the same, so do not compare it with the others'.
    """
    selected = None                                          # all positions

    def __init__(self, cache, blocks, start, n, record=False, tail=None):
        self.cache = cache
        self.blocks = blocks
        self.start = start
        self.n = n
        self.tail = tail
        self.length = start + n if tail is None else max(start + n, tail.shape[1])       # T
        self.scores = None
        if record:
            layers, groups, _, _ = cache.k.shape
            self.scores = torch.empty(layers, groups, self.length, device=cache.k.device)
        # Requests with about as many rows are served together: those up to the same power of two.
        self.server = FewRows(cache, (n - 1).bit_length()) if n <= FEW else OneRequest()

    def sees(self):
        """bool (n, T): the positions that each row sees."""
        if self.tail is not None:
            return F.pad(self.tail, (self.length - self.tail.shape[1], 0), value=True)
        return torch.arange(self.length) <= self.start + torch.arange(self.n)[:, None]


def writer(some):
    """store(layer, k, v): keys and values (N, G, D) of the new rows of FullKeys go to their slots."""
    cache = some[0].cache
    slots = [cache.slots_of(keys.blocks, range(keys.start, keys.start + keys.n)) for keys in some]
    slots = torch.cat(slots)
    k_slots, v_slots = (x.transpose(1, 2).unbind() for x in cache.kv)          # (n_slots, G, D) each

    def store(layer, k, v):
        k_slots[layer].index_copy_(0, slots, k)
        v_slots[layer].index_copy_(0, slots, v)
    return store


def additive(hidden, like):
    """A mask to add to logits: -inf where hidden (.., n, T)."""
    return torch.where(hidden, float("-inf"), 0.0).to(like)


def of_group(mask):
    """mask(g): the same (.., g * n, T) for the g heads of a group, made once."""
    return functools.cache(lambda g: mask.repeat(*[1] * (mask.ndim - 2), g, 1))


class OneRequest:
    """Attention of one request's rows, by plain products with all of its keys: for chunks of prompts, and for a
    long text alone."""

    def attend(self, some):
        """attend: q (n, H, D), k and v (n, G, D) -> (n, H, D)."""
        keys, = some
        store = writer(some)
        read = keys.cache.reader(keys.blocks, keys.length)
        # Products are faster than torch's attention for few rows, and in bf16, where they are as exact: other
        # roundings count more.
        dtype = keys.cache.k.dtype
        by_products = keys.n <= FEW or dtype == torch.bfloat16 and dtype in PACKED_TYPES
        causal = keys.start == 0 and keys.tail is None
        newest = keys.n if keys.tail is None else keys.tail.shape[1]           # the others all rows see
        mask = additive(~keys.sees(), keys.cache.k)                            # (n, T)

        def attend(layer, q, k, v):
            store(layer, k, v)
            k, v = read(layer)                                                 # (G, T, D)
            if not by_products or q.is_cuda:
                q = q.transpose(0, 1)[None]
                out = F.scaled_dot_product_attention(q, k[None], v[None], None if causal else mask,
                                                     is_causal=causal, enable_gqa=True)
                return out[0].transpose(0, 1)
            rows = group_rows(q * q.shape[-1] ** -0.5, len(k))                 # (G, g * n, D)
            # Head by head: to multiply many at once, torch would copy the keys. (Not the values.)
            logits = torch.stack([row @ key.mT for row, key in zip(rows, k)])
            logits.unflatten(1, (-1, keys.n))[..., -newest:] += mask[:, -newest:]
            probs = logits.softmax(-1)
            if keys.scores is not None:
                keys.scores[layer] = probs.mean(1)
            return ungroup_rows(probs @ v, keys.n)
        return attend


@dataclass(frozen=True)
class FewRows:
    """Attention of requests with at most 2 ** size new rows each, over the blocks of one cache.

    Blocks are read where they lie. A product would copy scattered ones, so it takes a span of neighbours."""
    cache: KVCache
    size: int

    def attend(self, some):
        """attend over the rows of `some` FullKeys."""
        cache = self.cache
        store = writer(some)
        # 1. Every request gets as many rows as the one with most, its last one repeated.
        most = max(keys.n for keys in some)
        padded, own, n = [], [], 0
        for i, keys in enumerate(some):
            own += range(i * most, i * most + keys.n)
            padded += [n + min(row, keys.n - 1) for row in range(most)]
            n += keys.n
        ragged = len(padded) > n
        padded, own = (torch.tensor(rows, device=cache.k.device) for rows in (padded, own))

        # 2. The blocks in order, and what the rows do not see of each.
        tables = [keys.blocks.table[:cache.blocks_for(keys.length)] for keys in some]
        blocks = sorted(sum(tables, []))
        hidden = torch.zeros(len(blocks), most, cache.block, dtype=torch.bool)         # (m, most, BLOCK)
        owner = torch.zeros(len(blocks), dtype=torch.long)
        at = {block: i for i, block in enumerate(blocks)}
        for i, (keys, table) in enumerate(zip(some, tables)):
            tables[i] = table = [at[block] for block in table]
            owner[table] = i
            sees = F.pad(keys.sees(), (0, len(table) * cache.block - keys.length))
            hidden[table, :keys.n] = ~sees.unflatten(1, (-1, cache.block)).transpose(0, 1)

        # 3. Two ways to read them.
        in_order = sum(tables, []) == list(range(len(blocks))) and blocks[-1] - blocks[0] < len(blocks)
        even = in_order and len(blocks) == len(some) * len(tables[0])
        record = any(keys.scores is not None for keys in some)
        if even and len(some) == 1 and (record or len(blocks) > FEW_BLOCKS):
            return OneRequest().attend(some)
        if even and len(blocks) <= FEW_BLOCKS and not record:
            read = self._side_by_side(len(some), blocks, hidden)
        else:
            read = self._block_by_block(some, blocks, tables, owner, hidden)

        def attend(layer, q, k, v):
            store(layer, k, v)
            if ragged:
                q = q.index_select(0, padded)
            q = group_rows(q.view(-1, most, *q.shape[1:]), k.shape[1])         # (B, G, g * most, D)
            out = ungroup_rows(read(layer, q), most).flatten(0, 1)             # (N, H, D)
            return out.index_select(0, own) if ragged else out
        return attend

    def _side_by_side(self, n, blocks, hidden):
        """read(layer, q): n requests that have equally many blocks, one behind the other, are a batch of
        torch's attention. It starts fast and reads slowly, which fits few blocks."""
        span = slice(blocks[0] * self.cache.block, (blocks[-1] + 1) * self.cache.block)
        views = [x[:, :, span].unflatten(2, (n, -1)).transpose(1, 2).unbind() for x in self.cache.kv]
        hidden = hidden.unflatten(0, (n, -1)).transpose(1, 2).flatten(2)       # (B, most, T)
        most = hidden.shape[1]
        mask = of_group(additive(hidden, self.cache.k)[:, None])

        def read(layer, q):
            keys, values = views[0][layer], views[1][layer]
            return F.scaled_dot_product_attention(q, keys, values, mask(q.shape[2] // most))
        return read

    def _block_by_block(self, some, blocks, tables, owner, hidden):
        """read(layer, q): a product a head and span for the logits of all blocks, and one for the values. A
        softmax over a request's blocks comes from its maximum and its sum, as in flash-decoding."""
        cache = self.cache
        _, groups, _, d = cache.k.shape
        masked = hidden.flatten(1).any(1).nonzero()[:, 0]                      # most blocks are seen as a whole
        most = hidden.shape[1]
        mask = of_group(additive(hidden[masked], cache.k))                     # (t, g * most, BLOCK)
        owner, masked = owner.to(cache.k.device), masked.to(cache.k.device)
        # Spans of neighbours: which of `blocks`, and views (L, G, blocks of the span, BLOCK, D).
        starts = [i for i, block in enumerate(blocks) if not i or block != blocks[i - 1] + 1]
        spans = []
        for first, end in zip(starts, [*starts[1:], len(blocks)]):
            slots = slice(blocks[first] * cache.block, (blocks[end - 1] + 1) * cache.block)
            spans.append((slice(first, end), *cache.kv[:, :, :, slots].unflatten(3, (-1, cache.block))))

        def products(rows, layer, values):
            """rows (G, m, r, ..) times the keys, or the values, of their blocks -> (G, m, r, ..)."""
            out = rows.new_empty(*rows.shape[:3], d if values else cache.block)
            for span, *kv in spans:
                for g, x in enumerate(kv[values][layer]):
                    torch.bmm(rows[g, span], x if values else x.mT, out=out[g, span])
            return out

        def read(layer, q):
            b, _, rows, _ = q.shape
            q = (q * d ** -0.5).transpose(0, 1)
            x = products(q.index_select(1, owner), layer, 0)                   # (G, m, g * most, BLOCK)
            x.index_add_(1, masked, mask(rows // most).expand(groups, -1, -1, -1))
            # Of every row the maximum and the sum over all blocks of its request.
            of_row = owner[None, :, None].expand(groups, -1, rows)
            top = x.new_full((groups, b, rows), float("-inf")).scatter_reduce_(1, of_row, x.amax(-1), "amax")
            x.sub_(top.index_select(1, owner)[..., None]).exp_()
            total = torch.zeros_like(top, dtype=torch.float32)
            total.index_add_(1, owner, x.sum(-1, dtype=torch.float32))
            out = torch.zeros_like(q, dtype=torch.float32).index_add_(1, owner, products(x, layer, 1).float())
            for i, keys in enumerate(some):
                if keys.scores is not None:
                    p = x[:, tables[i]] / total[:, i, None, :, None]           # (G, blocks, g * most, BLOCK)
                    p = p.unflatten(2, (-1, most))[:, :, :, :keys.n].mean((2, 3))
                    keys.scores[layer] = p.flatten(1)[:, :keys.length]
            return (out / total[..., None]).to(q.dtype).transpose(0, 1)
        return read


def group_rows(q, n_groups):
    """(.., n, H, D) -> (.., G, g * n, D): the g = H / G heads that share a key head become rows of one
    product."""
    if q.shape[-3] == 1:
        return q.view(*q.shape[:-3], n_groups, -1, q.shape[-1])
    return q.view(*q.shape[:-2], n_groups, -1, q.shape[-1]).movedim(-4, -2).flatten(-3, -2)


def ungroup_rows(out, n):
    """(.., G, g * n, D) -> (.., n, H, D), the inverse of group_rows."""
    if n == 1:
        return out.reshape(*out.shape[:-3], 1, -1, out.shape[-1])
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
