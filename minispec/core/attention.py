"""Which keys may a query see? The `attend` callables that are handed to the model.

Training:  gpt.dense_attend(mask) sees whole sequences.
Decoding:  `packed_attend(spans)` attends for one packed batch in which every request has its own number of
           query rows. The rows of a request come with a *keys* object, which says where their keys and
           values are stored and which positions they may read. FullKeys reads all cached positions,
           causally among the new rows or along the paths of a draft tree. specgen.py adds PillarKeys, a few
           positions per layer and KV head. Keys with the same `backend` are computed together, in as few
           groups as padding allows (`computed_together`):

               OneRequest    a prompt, or the only request: its keys as one matrix
               FewRows       up to FEW rows each of several requests: block by block
               DraftPool     SpecGen's draft rows: a copy of the selected keys (specgen.py)

On a GPU:  kernels/attention.py replaces packed_attend for the models that it supports (`kernels.can_run`).
           cdlm.py always uses packed_attend.

Shapes, for one layer: N packed rows of B requests, n of them from one request; H query heads, G key/value
heads, g = H / G query heads share a key head; D numbers a head; T positions that a request has cached, its
new rows included.
"""
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minispec.core import cpu
from minispec.core.gpt import dense_attend
from minispec.core.kv_cache import KVCache

# cuDNN makes a new plan for every length, and in decoding every forward has another length.
torch.backends.cuda.enable_cudnn_sdp(False)

FEW = 64            # rows of a request up to which it is computed together with others; a prompt has more
MOST_PADDING = 20_000       # padding rows times keys of a group; with more, two groups are faster
MOST_UNREAD = 16            # rows times blocks between two spans; with more, two products are faster


# -- decoding: one packed batch, a keys object for every request ---------------------------------------------

def packed_attend(spans, device=None):
    """attend over packed rows q (N, H, D). spans: [(first row, last row + 1, keys)], which cover all rows.

    backend.plan(list of keys) does all that is the same in every layer. It returns store(layer, k, v), which
    stores the new rows' keys and values (n, G, D), and read(layer, q (n, H, D)) -> (n, H, D)."""
    parts = []                                           # (rows, store, read)
    for backend, members in computed_together(spans):
        rows = torch.tensor([row for first, end, _ in members for row in range(first, end)], device=device)
        parts.append((rows, *backend.plan([keys for *_, keys in members])))

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


def computed_together(spans):
    """The spans in groups, [(backend, spans)]. Spans with the same number of rows are in one group. They join
    a group with more rows if that takes little padding, because every group costs a dozen operators a layer.
    """
    alike = {}                                           # (backend, rows) -> spans, the most rows first
    for span in sorted(spans, key=lambda span: span[0] - span[1]):
        alike.setdefault((span[2].backend, span[1] - span[0]), []).append(span)
    groups = []
    newest = {}                                          # backend -> its last group, the rows, the padding
    for (backend, n), own in alike.items():
        group, most, padding = newest.get(backend, ([], n, 0))
        padding += sum((most - n) * keys.length for *_, keys in own)
        # A request with two segments would have its blocks read twice.
        twice = {keys.blocks for *_, keys in group} & {keys.blocks for *_, keys in own}
        if not group or twice or padding > MOST_PADDING:
            group, most, padding = [], n, 0
            groups.append((backend, group))
        group += own
        newest[backend] = group, most, padding
    return [(backend, sorted(group)) for backend, group in groups]


class FullKeys:
    """n new rows at positions start.. of a request that has `blocks` of the cache: append their keys and
    values, and let row i see every position up to start + i.

    tail: bool (n, m), for rows that are not causal, as in a tree: which of the last m positions each row
    sees. All rows see all positions before these.

    record(probs (.., rows, T)) -> (.., T): if given, `scores` (L, G, T) keeps its results for the softmax
    probabilities of each layer and KV head. Their rows are the n rows of the g query heads of a group.
    """
    selected = None                                          # all positions

    def __init__(self, cache, blocks, start, n, record=None, tail=None):
        self.cache = cache
        self.blocks = blocks
        self.start = start
        self.n = n
        self.tail = tail
        self.length = start + n if tail is None else max(start + n, tail.shape[1])       # T
        self.record = record
        self.scores = None
        if record:
            layers, groups, _, _ = cache.k.shape
            self.scores = torch.empty(layers, groups, self.length, device=cache.k.device)
        self.backend = FewRows(cache) if n <= FEW else OneRequest()

    def sees(self):
        """bool (n, m): which of the newest m positions each row sees. All rows see all positions before."""
        if self.tail is not None:
            return self.tail
        return torch.ones(self.n, self.n, dtype=torch.bool).tril()


def writer(members):
    """store(layer, k, v) of some FullKeys: the new rows go to their slots."""
    cache = members[0].cache
    slots = [slot for keys in members
             for slot in cache.slot_list(keys.blocks, range(keys.start, keys.start + keys.n))]
    slots = torch.tensor(slots, device=cache.k.device)
    k_slots, v_slots = cache.kv.transpose(2, 3)          # (L, n_slots, G, D)

    def store(layer, k, v):
        k_slots[layer].index_copy_(0, slots, k)
        v_slots[layer].index_copy_(0, slots, v)
    return store


def additive(sees, cache):
    """The mask (.., g * n, T) to add to logits, -inf where not sees (.., n, T); the same for each of the g
    heads of a group."""
    mask = torch.where(sees, 0.0, float("-inf")).to(cache.k)
    return torch.cat([mask] * cache.group, -2)


class OneRequest:
    """Attention of one request's rows over all of its keys: a prompt, or a request alone."""

    def plan(self, members):
        keys, = members
        cache = keys.cache
        read_cache = cache.reader(keys.blocks, keys.length)
        by_products = keys.record or cpu.products_are_faster(cache.k, keys.n <= FEW, keys.length)
        # A text from its beginning needs no mask, which would have n x n elements.
        if keys.start == 0 and keys.tail is None and not by_products:
            def read_causal(layer, q):
                k, v = (x.transpose(0, 1)[None] for x in read_cache(layer))    # (1, T, G, D)
                return dense_attend()(layer, q[None], k, v)[0]
            return writer(members), read_causal
        sees = keys.sees()
        newest = sees.shape[1]
        mask = None if sees.all() else additive(sees, cache)                   # (g * n, newest)
        if mask is not None and not by_products:
            mask = F.pad(mask, (keys.length - newest, 0))                      # (g * n, T)

        def read(layer, q):
            k, v = read_cache(layer)                                           # (G, T, D)
            q = group_rows(q, len(k))                                          # (G, g * n, D)
            if not by_products:
                out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask)
                return ungroup_rows(out[0], keys.n)
            # Head by head: to multiply all at once, torch would copy the keys. (It does not copy the values.)
            q = q * q.shape[-1] ** -0.5
            logits = torch.stack([rows @ key.mT for rows, key in zip(q, k)])
            if mask is not None:
                logits[..., -newest:] += mask
            probs = logits.softmax(-1)
            if keys.record:
                keys.scores[layer] = keys.record(probs)
            return ungroup_rows(probs @ v, keys.n)
        return writer(members), read


@dataclass(frozen=True)
class FewRows:
    """Attention of requests with few new rows each, over the blocks of one cache.

    Blocks are read where they lie. One product reads a span of neighbouring blocks, because torch would copy
    scattered ones. A softmax over a request's blocks is made from its maximum and its sum, as in
    flash-decoding."""
    cache: KVCache

    def plan(self, members):
        cache = self.cache
        if len(members) == 1 and cache.lies_together(members[0].blocks, members[0].length):
            return OneRequest().plan(members)
        # 1. n rows for every request: its last row is repeated. And the m blocks that are read.
        n = max(keys.n for keys in members)
        is_row = torch.tensor([i < keys.n for keys in members for i in range(n)])
        padded = is_row.cumsum(0) - 1                                          # (B * n,) of the N rows
        own_rows = is_row.nonzero()[:, 0]                                      # (N,) of the B * n rows
        longest = max(cache.blocks_for(keys.length) for keys in members)       # blocks of a request
        blocks, owner, number = blocks_in_order(members, cache, n, unseen=longest)
        spans = neighbours(blocks, cache)

        # 2. The mask of those blocks that some row does not see as a whole.
        owner, number = torch.tensor(owner), torch.tensor(number)              # (m,)
        sees = torch.zeros(len(members), n, (longest + 1) * cache.block, dtype=torch.bool)
        for of_request, keys in zip(sees, members):
            newest = keys.sees()
            of_request[:, :keys.length] = True
            of_request[:keys.n, keys.length - newest.shape[1]:keys.length] = newest
        sees = sees.unflatten(2, (-1, cache.block))[owner, :, number]          # (m, n, BLOCK)
        masked = (~sees).flatten(1).any(1).nonzero()[:, 0]
        mask = additive(sees[masked], cache)
        # The blocks request by request, in the order of its positions; unseen ones are its last.
        order = (owner * (longest + 1) + number).argsort()
        recorded = {i: order[owner[order] == i] for i, keys in enumerate(members) if keys.record}
        first = order[number[order] == 0]                # the first block of each request
        one_each = longest == 1 and not recorded
        owner, masked, first, padded, own_rows = (
            x.to(cache.k.device) for x in (owner, masked, first, padded, own_rows))
        owns = F.one_hot(owner, len(members)).mT.to(cache.k)                   # (B, m)

        def products(rows, layer, values):
            """rows (G, m, r, ..) times the keys, or the values, of their blocks -> (G, m, r, ..)."""
            out = rows.new_empty(*rows.shape[:3], cache.k.shape[-1] if values else cache.block)
            for span, *kv in spans:
                for g, x in enumerate(kv[values][layer]):
                    torch.bmm(rows[g, span], x if values else x.mT, out=out[g, span])
            return out

        def read(layer, q):
            # 3. The logits, and of every row the maximum over all blocks of its request.
            q = q.index_select(0, padded).unflatten(0, (-1, n))
            q = group_rows(q, cache.k.shape[1])                                # (B, G, g * n, D)
            q = (q * q.shape[-1] ** -0.5).transpose(0, 1)
            groups, b, rows, _ = q.shape
            x = products(q.index_select(1, owner), layer, 0)                   # (G, m, g * n, BLOCK)
            x.index_add_(1, masked, mask.expand(groups, -1, -1, -1))
            if one_each:
                # Short texts need no sums over blocks.
                out = products(x.softmax(-1), layer, 1).index_select(1, first)
            else:
                of_row = owner[None, :, None].expand(groups, -1, rows)
                most = x.float().amax(-1).to(x)              # in bf16 amax takes three times as long
                top = x.new_full((groups, b, rows), float("-inf")).scatter_reduce_(1, of_row, most, "amax")
                # 4. exp(logit - maximum), its sum, and the values that it weighs, added up by request.
                x.sub_(top.index_select(1, owner)[..., None]).exp_()
                total = owns.float() @ x.sum(-1).float()                       # (G, B, g * n)
                out = (owns @ products(x, layer, 1).flatten(2)).view_as(q)
                for i, own in recorded.items():
                    probs = x[:, own] / total[:, i, None, :, None]             # (G, blocks, g * n, BLOCK)
                    keys = members[i]
                    probs = probs.unflatten(2, (-1, n))[:, :, :, :keys.n].flatten(2, 3)  # without padding
                    keys.scores[layer] = keys.record(probs).flatten(1)[:, :keys.length]
                out = (out / total[..., None]).to(q.dtype)                     # (G, B, g * n, D)
            return ungroup_rows(out.transpose(0, 1), n).flatten(0, 1).index_select(0, own_rows)  # (N, H, D)
        return writer(members), read


def blocks_in_order(members, cache, n, unseen):
    """The m blocks that FewRows reads, in the order of the pool: their numbers there, the requests that they
    belong to, and their numbers in the tables of these requests. A block that several requests share is
    repeated for each of them, after all other blocks. A few blocks that lie between two are read, too, as
    number `unseen` of the request before them; their contents must be finite. n: rows of each request."""
    readers = Counter()
    entries = []                                         # (readers before, block, request, number)
    for i, keys in enumerate(members):
        for j, block in enumerate(keys.blocks.table[:cache.blocks_for(keys.length)]):
            entries.append((readers[block], block, i, j))
            readers[block] += 1
    entries.sort()
    read = entries[:1]
    for entry in entries[1:]:
        _, last, owner, _ = read[-1]
        between = range(last + 1, entry[1])
        if len(between) * n <= MOST_UNREAD:
            read += [(0, block, owner, unseen) for block in between]
        read.append(entry)
    _, *columns = zip(*read)
    return columns


def neighbours(blocks, cache):
    """The spans of `blocks` that lie side by side in the pool: a slice of the list, and their keys and their
    values (L, G, blocks, BLOCK, D)."""
    starts = [i for i, block in enumerate(blocks) if not i or block != blocks[i - 1] + 1]
    pool = cache.kv.unflatten(3, (-1, cache.block))      # (2, L, G, blocks, BLOCK, D)
    return [(slice(first, end), *pool[:, :, :, blocks[first]:blocks[end - 1] + 1])
            for first, end in zip(starts, [*starts[1:], len(blocks)])]


def group_rows(q, n_groups):
    """(.., n, H, D) -> (.., G, g * n, D): the g = H / G heads that share a key head become rows of one
    product."""
    return q.unflatten(-2, (n_groups, -1)).movedim(-4, -2).flatten(-3, -2)


def ungroup_rows(out, n):
    """(.., G, g * n, D) -> (.., n, H, D), the inverse of group_rows."""
    return out.unflatten(-2, (-1, n)).movedim(-2, -4).flatten(-3, -2)


# -- trees of drafts -----------------------------------------------------------------------------------------

def tree_mask(parents):
    """bool (n + 1, n + 1), which row sees which: row 0 is the root, rows 1 .. n hang from rows `parents`
    (n,). A row sees itself and its ancestors."""
    sees = torch.eye(len(parents) + 1, dtype=torch.bool)
    for i, parent in enumerate(parents, 1):
        sees[i] |= sees[parent]
    return sees
