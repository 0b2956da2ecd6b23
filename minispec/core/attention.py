"""Which keys may a query see? The `attend` callables that are handed to the model.

Training:  gpt.dense_attend(mask) sees whole sequences.
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


# -- decoding: one packed batch, a keys object for every request ---------------------------------------------

def packed_attend(segments, device=None):
    """attend over packed rows q (N, H, D). segments: [(first row, last row + 1, keys)], which cover all rows.
    Keys with the same server are served together: server.serve(list of keys) -> store(layer, k, v), which
    keeps the new rows' keys and values (n, G, D), and read(layer, q (n, H, D)) -> (n, H, D)."""
    groups = {}
    for first, end, keys in segments:
        groups.setdefault(keys.server, []).append((first, end, keys))
    parts = []                                           # (rows, store, read)
    for server, some in groups.items():
        rows = torch.tensor([row for first, end, _ in some for row in range(first, end)], device=device)
        parts.append((rows, *server.serve([keys for *_, keys in some])))

    def attend(layer, q, k, v):
        if len(parts) == 1:
            _, store, read = parts[0]
            store(layer, k, v)
            return read(layer, q)
        # All rows are stored before any are read, because a request may feed several segments.
        for rows, store, _ in parts:
            store(layer, k.index_select(0, rows), v.index_select(0, rows))
        out = torch.empty_like(q)
        for rows, _, read in parts:
            out.index_copy_(0, rows, read(layer, q.index_select(0, rows)))
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
        self.server = FewRows(cache, n) if n <= FEW else OneRequest()

    def sees(self):
        """bool (n, T): the positions that each row sees."""
        if self.tail is not None:
            return F.pad(self.tail, (self.length - self.tail.shape[1], 0), value=True)
        return torch.arange(self.length) <= self.start + torch.arange(self.n)[:, None]


def writer(some):
    """store(layer, k, v) of some FullKeys: the new rows go to their slots."""
    cache = some[0].cache
    slots = [slot for keys in some
             for slot in cache.slot_list(keys.blocks, range(keys.start, keys.start + keys.n))]
    first, n = slots[0], len(slots)
    together = slots == list(range(first, first + n))
    slots = torch.tensor(slots, device=cache.k.device)
    of_layers = cache.kv.transpose(2, 3)                 # (2, L, n_slots, G, D)
    k_slots, v_slots = (of_layers[:, :, first:first + n] if together else of_layers).unbind()

    def store(layer, k, v):
        if together:
            k_slots[layer].copy_(k)
            v_slots[layer].copy_(v)
        else:
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
    """Attention of one request's rows over all of its keys: of chunks of prompts, and of a request alone."""

    def serve(self, some):
        keys, = some
        few = keys.n <= FEW
        cached = keys.cache.reader(keys.blocks, keys.length)
        # Products are faster than torch's attention where keys are many, and in bf16 rows; they are as exact,
        # because other roundings count more.
        dtype = keys.cache.k.dtype
        low = dtype == torch.bfloat16 and dtype in PACKED_TYPES and not keys.cache.k.is_cuda
        by_products = keys.length > FEW_BLOCKS * keys.cache.block if few else low
        by_products |= keys.scores is not None
        causal = keys.start == 0 and keys.tail is None and not few
        newest = keys.n if keys.tail is None else keys.tail.shape[1]           # the others all rows see
        mask = None if keys.n == newest == 1 else of_group(additive(~keys.sees(), keys.cache.k))

        def read(layer, q):
            k, v = cached(layer)                                               # (G, T, D)
            if causal and not by_products:
                q = q.transpose(0, 1)[None]
                out = F.scaled_dot_product_attention(q, k[None], v[None], is_causal=True, enable_gqa=True)
                return out[0].transpose(0, 1)
            rows = group_rows(q, len(k))                                       # (G, g * n, D)
            of_rows = mask and mask(rows.shape[1] // keys.n)
            if not by_products:
                out = F.scaled_dot_product_attention(rows[None], k[None], v[None], of_rows)
                return ungroup_rows(out[0], keys.n)
            # Head by head: to multiply many at once, torch would copy the keys. (Not the values.)
            rows = rows * q.shape[-1] ** -0.5
            logits = torch.stack([row @ key.mT for row, key in zip(rows, k)])
            if mask:
                logits[..., -newest:] += of_rows[:, -newest:]
            probs = logits.softmax(-1)
            if keys.scores is not None:
                keys.scores[layer] = probs.mean(1)
            return ungroup_rows(probs @ v, keys.n)
        return writer(some), read


@dataclass(frozen=True)
class FewRows:
    """Attention of requests with n new rows each, over the blocks of one cache.

    Blocks are read where they lie. A product would copy scattered ones, so it takes a span of neighbours."""
    cache: KVCache
    n: int

    def serve(self, some):
        cache = self.cache
        if len(some) == 1 and cache.lies_together(some[0].blocks, some[0].length):
            return OneRequest().serve(some)
        # 1. The blocks, in the order of the pool. One that several requests read comes again, behind the
        # others.
        counts = [cache.blocks_for(keys.length) for keys in some]
        readers = Counter()
        order = []                                       # (readers before, block, request, number there)
        for i, keys in enumerate(some):
            for j, block in enumerate(keys.blocks.table[:counts[i]]):
                order.append((readers[block], block, i, j))
                readers[block] += 1
        in_order = order == sorted(order)
        _, blocks, owner, number = zip(*sorted(order))
        owner, number = torch.tensor(owner), torch.tensor(number)              # (m,)
        # 2. What the rows do not see of each.
        hidden = torch.ones(len(some), self.n, max(counts) * cache.block, dtype=torch.bool)
        for of_request, keys in zip(hidden, some):
            of_request[:, :keys.length] = ~keys.sees()
        hidden = hidden.unflatten(2, (-1, cache.block))[owner, :, number]      # (m, n, BLOCK)

        # 3. Two ways to read them.
        together = in_order and blocks == tuple(range(blocks[0], blocks[0] + len(blocks)))
        record = any(keys.scores is not None for keys in some)
        if together and len(set(counts)) == 1 and len(blocks) <= FEW_BLOCKS and not record:
            cached = self._side_by_side(len(some), blocks, hidden)
        else:
            cached = self._block_by_block(some, blocks, owner, number, hidden)

        def read(layer, q):
            q = group_rows(q.view(-1, self.n, *q.shape[1:]), cache.k.shape[1])         # (B, G, g * n, D)
            return ungroup_rows(cached(layer, q), self.n).flatten(0, 1)        # (N, H, D)
        return writer(some), read

    def _side_by_side(self, n, blocks, hidden):
        """read(layer, q): n requests that have equally many blocks, one behind the other, are a batch of
        torch's attention. It starts fast and reads slowly, which fits few blocks."""
        span = slice(blocks[0] * self.cache.block, (blocks[-1] + 1) * self.cache.block)
        views = [x[:, :, span].unflatten(2, (n, -1)).transpose(1, 2).unbind() for x in self.cache.kv]
        hidden = hidden.unflatten(0, (n, -1)).transpose(1, 2).flatten(2)       # (B, n, T)
        mask = of_group(additive(hidden, self.cache.k)[:, None])

        def read(layer, q):
            keys, values = views[0][layer], views[1][layer]
            return F.scaled_dot_product_attention(q, keys, values, mask(q.shape[2] // self.n))
        return read

    def _block_by_block(self, some, blocks, owner, number, hidden):
        """read(layer, q): a product a head and span for the logits of all blocks, and one for the values. A
        softmax over a request's blocks comes from its maximum and its sum, as in flash-decoding."""
        cache = self.cache
        _, groups, _, d = cache.k.shape
        own = [(owner == i).nonzero()[:, 0] for i in range(len(some))]
        own = [rows[number[rows].argsort()] for rows in own]                   # each request's blocks
        masked = hidden.flatten(1).any(1).nonzero()[:, 0]                      # most blocks are seen as a whole
        mask = of_group(additive(hidden[masked], cache.k))                     # (t, g * n, BLOCK)
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
            x = products(q.index_select(1, owner), layer, 0)                   # (G, m, g * n, BLOCK)
            x.index_add_(1, masked, mask(rows // self.n).expand(groups, -1, -1, -1))
            # Of every row the maximum and the sum over all blocks of its request.
            of_row = owner[None, :, None].expand(groups, -1, rows)
            top = x.new_full((groups, b, rows), float("-inf")).scatter_reduce_(1, of_row, x.amax(-1), "amax")
            x.sub_(top.index_select(1, owner)[..., None]).exp_()
            exact = torch.promote_types(x.dtype, torch.float32)
            total = torch.zeros_like(top, dtype=exact).index_add_(1, owner, x.sum(-1, dtype=exact))
            out = torch.zeros_like(q, dtype=exact).index_add_(1, owner, products(x, layer, 1).to(exact))
            for i, keys in enumerate(some):
                if keys.scores is not None:
                    p = x[:, own[i]] / total[:, i, None, :, None]              # (G, blocks, g * n, BLOCK)
                    keys.scores[layer] = p.mean(2).flatten(1)[:, :keys.length]
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
