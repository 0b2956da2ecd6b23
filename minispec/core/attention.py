"""Which keys may a query see? The `attend` callables that are handed to the model.

Training:  `dense_attend(mask)` sees whole sequences (cpu.py has the same, faster on a CPU).
Decoding:  `packed_attend(segments)` serves one packed batch in which every request contributes its own number of
           query rows. Each segment brings its own *keys* object, which stores the rows' k and v where they belong and
           lets the rows' queries read what they may:
             FullKeys   all cached positions, causal among the new rows (or along the paths of a draft tree);
                        optionally records attention scores
             (specgen.py adds PillarKeys, a short list of positions per layer and head, all requests' in one pool)
           `fused_attend(cache, fused_inputs(..))` does the same on a GPU, all segments in one launch of a Triton kernel a layer.
"""
import torch
import torch.nn.functional as F


def dense_attend(mask=None):
    """attend over whole sequences q (B, T, H, D), k and v (B, T, G, D). mask: bool (T, T) or (B, 1, T, T), True where
    a query (row) sees a key (column); None means causal."""
    def attend(layer, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))                       # (B, heads, T, D)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out.transpose(1, 2)                                             # (B, T, H, D)
    return attend


def packed_attend(segments):
    """attend over packed rows q (N, H, D). segments: [(first row, last row + 1, keys)], which cover all rows. Neighbours whose keys
    lie in one pool are served together."""
    parts = []                                           # [first row, last row + 1, [keys]]
    for a, b, keys in segments:
        if parts and keys.pool is not None and parts[-1][2][0].pool is keys.pool:
            parts[-1][1] = b
            parts[-1][2].append(keys)
        else:
            parts.append([a, b, [keys]])
    parts = [(a, b, some[0].attend if some[0].pool is None else some[0].pool.attend(some)) for a, b, some in parts]
    if len(parts) == 1:
        return parts[0][2]

    def attend(layer, q, k, v):
        return torch.cat([part(layer, q[a:b], k[a:b], v[a:b]) for a, b, part in parts])
    return attend


def can_fuse(x):
    """Whether the Triton kernels run on tensors like x. (Importing triton takes a second, which a CPU need not wait.)"""
    from kernels import unavailable
    return not unavailable(x)


def fused_inputs(cache, plan, tokens, positions, group):
    """All that the kernels read of an engine's plan (a list of Segments), as kernels.graphs.Inputs; group = H / G."""
    from kernels import graphs
    from kernels.attention import make_plan
    (layers, groups, _, _), device, shapes = cache.k.shape, cache.k.device, []
    longest = max(s.start + len(s.tokens) for s in plan)
    widest = max([s.keys.selected.shape[-1] for s in plan if s.keys.selected is not None], default=0)
    selected = torch.zeros(len(plan), layers, groups, widest, dtype=torch.int32, device=device)
    for i, s in enumerate(plan):
        chosen = s.keys.selected
        if chosen is not None:
            selected[i, :, :, :chosen.shape[-1]] = chosen
        tail = 0 if chosen is None else s.keys.length - s.keys.recent
        shapes.append((len(s.tokens), s.start + len(s.tokens), 0 if chosen is None else chosen.shape[-1], tail))
    first = torch.tensor([s.request.run.first for s in plan], device=device)
    slots = (first[:, None] + torch.arange(longest, device=device)).clamp(max=cache.n_slots - 1).int()
    new = torch.cat([torch.arange(s.start, s.start + len(s.tokens)) + s.request.run.first for s in plan]).to(device)
    which = torch.tensor([i for i, s in enumerate(plan) if s.keys.scores is not None], dtype=torch.int32, device=device)
    return graphs.Inputs(tokens, positions, new, slots, selected, which, make_plan(shapes, group).to(device))


def fused_attend(cache, x):
    """packed_attend for x = fused_inputs(..), in one launch a layer (kernels/attention.py). Draft rows write their keys and values
    into the cache here, where verification overwrites them, and read the selected positions in place. Nothing in here may wait
    for the device or depend on anything but tensors' contents: it is captured in a CUDA graph (kernels/graphs.py)."""
    from kernels import attention as kernel
    from kernels import scores as score_kernel

    def attend(layer, q, k, v):
        keys, values = cache.layers[layer]
        keys[:, x.new], values[:, x.new] = k.transpose(0, 1), v.transpose(0, 1)
        if not len(x.which):
            return kernel.attention(q, keys, values, x.slots, x.selected[:, layer], x.plan)
        out, lse = kernel.attention(q, keys, values, x.slots, x.selected[:, layer], x.plan, return_lse=True)
        score_kernel.scores(q, keys, lse, x.slots, x.plan, x.which, x.scores[layer])
        return out
    return attend


def keep_scores(plan, scores):
    """Give the segments that record their scores, out of (L, B, G, T)."""
    for i, s in enumerate(plan):
        if s.keys.scores is not None:
            s.keys.scores.copy_(scores[:, i, :, :s.keys.scores.shape[-1]])


LONG = 2048              # keys


def products_are_faster(q):
    """Whether matrix products beat torch's fused attention on LONG contexts for rows like q: in bf16 on a CPU they take half
    the time."""
    return q.dtype == torch.bfloat16 and q.device.type == "cpu"


def group_rows(q, n_groups):
    """(n, H, D) -> (G, g * n, D): the g = H / G query heads that share a key head become rows of one product."""
    n, h, d = q.shape
    if n == 1:                                           # plain decoding: a view will do
        return q.view(n_groups, h // n_groups, d)
    return q.view(n, n_groups, h // n_groups, d).permute(1, 2, 0, 3).reshape(n_groups, -1, d)


def ungroup_rows(out, n):
    """(G, g * n, D) -> (n, H, D), the inverse of group_rows."""
    groups, gn, d = out.shape
    if n == 1:
        return out.reshape(1, -1, d)
    return out.view(groups, gn // n, n, d).permute(2, 0, 1, 3).reshape(n, -1, d)


def causal_tail(n, length, dtype, device):
    """Additive mask (n, length): row i of the last n positions does not see the n - 1 - i positions after its own."""
    mask = torch.zeros(n, length, dtype=dtype, device=device)
    mask[:, length - n:] += torch.full((n, n), float("-inf"), dtype=dtype, device=device).triu(1)
    return mask


def path_mask(paths, n):
    """bool (len(paths), n): row i sees the columns that paths[i] lists. In a draft tree a row's path is itself and its ancestors."""
    mask = torch.zeros(len(paths), n, dtype=torch.bool)
    mask[[i for i, path in enumerate(paths) for _ in path], [j for path in paths for j in path]] = True
    return mask


def tree_mask(parents):
    """bool (n + 1, n + 1) for row 0, the root, and rows 1 .. n that hang from rows `parents` (n,): who sees whom."""
    paths = [[0]]
    for i, parent in enumerate(parents, 1):
        paths.append([*paths[parent], i])
    return path_mask(paths, len(paths))


class FullKeys:
    """n new rows at positions start.. of the request whose slots begin at `base`: append their keys and values to the
    cache, and let row i see every position up to start + i.

    tail: bool (n, m), where the rows belong to a tree: which of the last m slots, its own included, each row sees
    instead; it sees all slots before them.

    record=True also leaves, in `scores` (L, G, start + n), the softmax probability each position received, averaged
    over the n rows and the g query heads of a group. Positions from `start` on are not seen by every row; their
    average is over all n rows all the same and should not be compared with the others'.
    """
    selected = pool = None                                   # all positions, in the cache itself

    def __init__(self, cache, base, start, n, record=False, tail=None):
        self.cache, self.new, self.all = cache, slice(base + start, base + start + n), slice(base, base + start + n)
        self.n, self.first, self.tail = n, start == 0 and tail is None, tail
        layers, groups, _, _ = cache.k.shape
        self.scores = torch.empty(layers, groups, start + n, device=cache.k.device) if record else None
        self.mask = None

    def attend(self, layer, q, k, v):
        """q (n, H, D), k and v (n, G, D) -> (n, H, D)."""
        keys, values = self.cache.layers[layer]                                # (G, n_slots, D)
        keys[:, self.new], values[:, self.new] = k.transpose(0, 1), v.transpose(0, 1)
        keys, values = keys[:, self.all], values[:, self.all]                  # views: nothing is copied
        groups, share = k.shape[1], q.shape[1] // k.shape[1]
        if self.scores is None and self.first and self.n > 1:                  # a prompt from its beginning
            return F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys[None], values[None], is_causal=True,
                                                  enable_gqa=True)[0].transpose(0, 1)
        rows = group_rows(q, groups)                                           # (G, g * n, D)
        fused = self.scores is None and (keys.shape[1] < LONG or not products_are_faster(q))
        if self.mask is None and (self.n > 1 or self.tail is not None):        # the same in every layer
            width = keys.shape[1] if fused else self.n if self.tail is None else self.tail.shape[1]
            self.mask = (causal_tail if self.tail is None else self._tail)(self.n, width, q.dtype, q.device).repeat(share, 1)
        if fused:
            return ungroup_rows(F.scaled_dot_product_attention(rows[None], keys[None], values[None], attn_mask=self.mask)[0], self.n)
        rows = rows * q.shape[-1] ** -0.5
        if products_are_faster(q):                                             # linear takes keys as they lie; @ would copy them
            logits = torch.stack([F.linear(some, own) for some, own in zip(rows, keys)])
        else:
            logits = rows @ keys.transpose(1, 2)                               # (G, g * n, T)
        if self.mask is not None:                                              # all rows see what is before its columns
            logits[:, :, -self.mask.shape[1]:] += self.mask
        probs = logits.softmax(-1, dtype=torch.float32)
        if self.scores is not None:
            self.scores[layer] = probs.mean(1)
        return ungroup_rows(probs.to(values.dtype) @ values, self.n)

    def _tail(self, n, length, dtype, device):
        """`tail` as an additive mask (n, length)."""
        mask = torch.zeros(n, length, dtype=dtype, device=device)
        return mask.masked_fill_(F.pad(~self.tail.to(device), (length - self.tail.shape[1], 0)), float("-inf"))


@torch.no_grad()
def mass_in_top(model, tokens, fraction=0.05, rows=64):
    """How sharply the heads look: the attention mass that the last `rows` queries of tokens (1, T) put on their own
    `fraction` largest keys, mean over the rows. Returns (n_layer, H); 1 means that this part of the keys is all a
    head reads. The premise of sparse attention, PillarAttn included, is that this is close to 1."""
    c, t = model.config, tokens.shape[1]
    out = torch.zeros(c.n_layer, c.n_head)
    top = max(int(fraction * t), 1)
    seen = torch.arange(t, device=tokens.device) <= torch.arange(t - rows, t, device=tokens.device)[:, None]
    dense = dense_attend()

    def attend(layer, q, k, v):
        keys = k[0].repeat_interleave(c.n_head // c.n_kv_head, dim=1)          # (T, H, D)
        scores = torch.einsum("qhd,khd->hqk", q[0, -rows:].float(), keys.float()) / c.head_dim ** 0.5
        probs = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[layer] = probs.topk(top, dim=-1).values.sum(-1).mean(-1)
        return dense(layer, q, k, v)

    model(tokens, torch.arange(t, device=tokens.device)[None], attend)
    return out
