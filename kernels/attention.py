"""Packed-batch attention over slot lists: draft, verification and prefill rows of all requests in one launch.

SpecGen / SparseSpec (arXiv 2512.01278), the fused draft and verification kernel. A batch mixes requests in
different phases: drafting ones feed one row each, which sees a short list of positions; verifying ones k + 1
rows, which see everything before them; others a chunk of their prompt. All three are one case here. The n
rows of a request are its newest n positions, and they read a *list* of entries that ends with those positions
themselves:

    entry e = 0 .. c - 1        position selected[request, KV head, e]            c critical positions
    entry e = c ..              position tail + e - c, up to length - 1           recent ones, the n rows' own

Full attention is c = 0 and tail = 0: there is no request type. A row sees the entries whose position is not
beyond its own. The rows of a draft tree see their paths instead: 64 bits of each row say which of the newest
64 positions it sees, and it sees all before them. Selections are positions in the text, not places in the
pool; `slots` translates in the kernel, so that a request can move (be offloaded, restored elsewhere) with its
selection unchanged. Any slot, in any order: the kernels use no blocks (graphs.py makes slots of
block tables).

Shapes, for one layer: q (N, H, D) packed rows; k, v (G, n_slots, D); g = H / G query heads share a KV head; B
requests. A tile is up to 16 or 64 *packed rows* (row, head of the group) of one request and KV head, so that
a draft row's g heads, or a verification's (k + 1) * g, share every key that is read. As in the paper, one
launch holds both tile shapes (16 x 128 and 64 x 64 there; `settings` has ours). Long lists are split into
chunks of a *fixed* number of entries, a program each, and a second small kernel merges their results by the
log-sum-exp. Because the chunk is fixed, a request's result is the same, bit for bit, with any neighbours; the
paper balances chunks over the batch instead.

Bytes moved, with E entries read by all tiles together and e bytes a number:
    G * E * (2 * D * e + 4)         keys, values, slot indices; a selected entry costs 4 more
    N * H * D * 2 * e               queries in, outputs out
    G * P * (D + 1) * 4 * 2         results of split tiles, P packed rows in all parts, written and read again
                                    (mostly in L2)
Roofline time = bytes / bandwidth as long as the flops a byte of keys and values, the tile's rows (64) in
bf16, are under the device's balance (H100: 989 Tflop/s / 3.35 TB/s = 295). Example, Qwen3-8B (G 8, g 4, D
128, bf16), one layer, 128 requests at 8,192 tokens, k = 8, s = 0.05: 14 verify, 114 draft, E = 14 * 8,192 +
114 * 414 = 162k entries: 668 MB, and 67 MB for 16 parts of the verifying tiles: 0.22 ms at 3.35 TB/s. With
all 128 decoding in full: 4.3 GB, 1.3 ms.
"""
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from . import SEEN, jit, tl

SMALL, LARGE = 16, 64                   # packed rows of a tile; 16 is the least that tl.dot takes
CHUNK = 512                             # entries one program reads; a constant, see above
LOG2E = 1.4426950408889634              # kernels use exp2, as the hardware does


def settings(dtype, d):
    """What the kernel is compiled with. N_: entries read in one step. STAGES_: steps in flight; a key needs
    three, since its position, its slot and itself are loads that wait for one another.

    The choice keeps head sizes of 32 to 256 free of spills (tests/compile_report.py); it was made without a
    GPU, not tuned on one. PRECISION concerns fp32 alone, which is there to prove identity, not for speed, and
    must not lose 13 bits to TF32; bf16 and fp16 products are exact anyway."""
    if dtype == torch.float32:
        return dict(N_SMALL=16 if d <= 64 else 64, N_LARGE=16, STAGES_SMALL=2, STAGES_LARGE=2,
                    PRECISION="ieee", num_warps=16)
    return dict(N_SMALL=128 if d <= 64 else 32, N_LARGE=min(4096 // d, 64), STAGES_SMALL=5, STAGES_LARGE=3,
                PRECISION="tf32", num_warps=4 if d <= 128 else 8)


@jit
def attend_tile(p_q, p_k, p_v, p_slot, p_selected, p_sees, p_request, p_item, p_out, p_lse, p_part,
                p_part_lse, scale, chunk, group, s_q, s_kv, s_slot, s_request, s_group,
                D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
                PRECISION: tl.constexpr):
    """M packed rows of one request and KV head over one chunk of their list."""
    i_g = tl.program_id(1)
    n_groups = tl.num_programs(1)
    # The work item. Offsets of all that is large have 64 bits: pools and tables may exceed 2^31 numbers.
    request = tl.load(p_item)
    first_packed = tl.load(p_item + 1)
    first_entry = tl.load(p_item + 2)
    part = tl.load(p_item + 3).to(tl.int64)
    # Its request.
    p_request += request * 6
    first_row = tl.load(p_request).to(tl.int64)
    n_rows = tl.load(p_request + 1)
    length = tl.load(p_request + 2)
    n_selected = tl.load(p_request + 3)
    tail = tl.load(p_request + 4)
    causal = tl.load(p_request + 5)
    p_slot += request.to(tl.int64) * s_slot
    p_selected += request.to(tl.int64) * s_request + i_g * s_group
    p_k += i_g.to(tl.int64) * s_kv
    p_v += i_g.to(tl.int64) * s_kv

    # The tile's queries, and what each may see: positions up to its own, or those that its bits name.
    o_m = tl.arange(0, M)
    o_d = tl.arange(0, D)
    row = (first_packed + o_m) // group
    head = i_g * group + (first_packed + o_m) % group
    valid = row < n_rows
    o_q = (first_row + row)[:, None] * s_q + head[:, None] * D + o_d[None, :]
    b_q = tl.load(p_q + o_q, mask=valid[:, None], other=0.0)               # (M, D)
    b_sees = tl.load(p_sees + first_row + row, mask=valid, other=-1)       # (M,), two words of 32 bits
    b_low = b_sees.to(tl.int32)
    b_high = (b_sees >> 32).to(tl.int32)
    position = length - 1 - causal * (n_rows - 1 - row)
    # No row reads entries after the position of the tile's last row: a prefill tile stops at its diagonal.
    last_row = tl.minimum((first_packed + M - 1) // group, n_rows - 1)
    end = n_selected + length - tail - causal * (n_rows - 1 - last_row)
    end = tl.minimum(first_entry + chunk, end)

    b_max = tl.full((M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((M,), tl.float32)
    b_acc = tl.zeros((M, D), tl.float32)
    for i in tl.range(first_entry, end, N, num_stages=STAGES):
        # Entry -> position -> slot -> key and value.
        o_n = i + tl.arange(0, N)
        alive = o_n < end
        listed = o_n < n_selected
        b_chosen = tl.load(p_selected + o_n, mask=listed, other=0)
        b_pos = tl.where(listed, b_chosen, tail + o_n - n_selected)
        b_slot = tl.load(p_slot + b_pos, mask=alive, other=0).to(tl.int64)
        o_kv = b_slot[:, None] * D + o_d[None, :]
        b_k = tl.load(p_k + o_kv, mask=alive[:, None], other=0.0)          # (N, D)
        b_v = tl.load(p_v + o_kv, mask=alive[:, None], other=0.0)
        # Logits of the positions that a row sees. Bit j: position length - 1 - j; all rows see those before.
        back = tl.maximum(length - 1 - b_pos, 0)
        b_word = tl.where(back[None, :] < 32, b_low[:, None], b_high[:, None])                  # (M, N)
        b_bit = (b_word >> (back & 31)[None, :]) & 1
        on_path = (b_bit | (back >= 64)[None, :]) != 0
        seen = on_path & (b_pos[None, :] <= position[:, None])
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale                     # (M, N)
        b_s = tl.where(alive[None, :] & seen, b_s, float("-inf"))
        # One softmax over all steps: earlier sums shrink when a larger logit appears.
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_ref = tl.where(b_new == float("-inf"), 0.0, b_new)  # a row that has seen nothing yet: no inf - inf
        b_p = tl.exp2(b_s - b_ref[:, None])
        b_shrink = tl.exp2(b_max - b_ref)
        b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision=PRECISION)
        b_max = b_new

    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_out = b_acc / b_sum[:, None]
    b_lse = b_max + tl.log2(b_sum)                # -inf for a row that sees nothing of this chunk
    if part < 0:
        # The only chunk: this is the result.
        o_out = (first_row + row) * (n_groups * group) + head
        tl.store(p_out + o_out[:, None] * D + o_d[None, :], b_out.to(p_out.dtype.element_ty),
                 mask=valid[:, None])
        tl.store(p_lse + o_out, b_lse / 1.4426950408889634, mask=valid)
    else:
        o_part = (part + o_m) * n_groups + i_g
        tl.store(p_part + o_part[:, None] * D + o_d[None, :], b_out, mask=valid[:, None])
        tl.store(p_part_lse + o_part, b_lse, mask=valid)


@jit
def packed_attention(p_q, p_k, p_v, p_slot, p_selected, p_sees, p_request, p_item, p_out, p_lse, p_part,
                     p_part_lse, scale, chunk, group, s_q, s_kv, s_slot, s_request, s_group,
                     D: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr,
                     N_SMALL: tl.constexpr, N_LARGE: tl.constexpr,
                     STAGES_SMALL: tl.constexpr, STAGES_LARGE: tl.constexpr, PRECISION: tl.constexpr):
    """Grid (work items, G). An item is (request, first packed row, first entry, row of the partial results or
    -1). scale includes log2(e)."""
    p_item += tl.program_id(0) * 4
    request = tl.load(p_item)
    if request < 0:                               # padding: all plans of a CUDA graph are equally long
        return
    tile = (p_q, p_k, p_v, p_slot, p_selected, p_sees, p_request, p_item, p_out, p_lse, p_part, p_part_lse,
            scale, chunk, group, s_q, s_kv, s_slot, s_request, s_group)
    if tl.load(p_request + request * 6 + 1) * group <= SMALL:
        attend_tile(*tile, D, SMALL, N_SMALL, STAGES_SMALL, PRECISION)
    else:
        attend_tile(*tile, D, LARGE, N_LARGE, STAGES_LARGE, PRECISION)


@jit
def merge_parts(p_part, p_part_lse, p_request, p_merge, p_out, p_lse, group,
                D: tl.constexpr, M: tl.constexpr):
    """Grid (split tiles, G, LARGE / M). Out of a tile's parts, each a mean under its own softmax, the mean
    under all of it: sum of 2^(lse_j - lse) * part_j. A record is (request, first packed row, packed rows,
    first part row, parts)."""
    i_g = tl.program_id(1)
    n_groups = tl.num_programs(1)
    p_merge += tl.program_id(0) * 5
    request = tl.load(p_merge)
    first_packed = tl.load(p_merge + 1)
    n_packed = tl.load(p_merge + 2)
    part = tl.load(p_merge + 3).to(tl.int64)
    n_parts = tl.load(p_merge + 4)
    o_m = tl.program_id(2) * M + tl.arange(0, M)
    o_d = tl.arange(0, D)
    if request < 0 or tl.program_id(2) * M >= n_packed:
        return

    valid = o_m < n_packed
    b_max = tl.full((M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((M,), tl.float32)
    b_acc = tl.zeros((M, D), tl.float32)
    for i in range(n_parts):
        o_part = (part + i * n_packed + o_m) * n_groups + i_g
        b_lse = tl.load(p_part_lse + o_part, mask=valid, other=0.0)
        b_part = tl.load(p_part + o_part[:, None] * D + o_d[None, :], mask=valid[:, None], other=0.0)
        b_new = tl.maximum(b_max, b_lse)          # every row sees its first entry: never -inf here
        b_shrink = tl.exp2(b_max - b_new)
        b_weight = tl.exp2(b_lse - b_new)
        b_acc = b_acc * b_shrink[:, None] + b_part * b_weight[:, None]
        b_sum = b_sum * b_shrink + b_weight
        b_max = b_new

    o_packed = first_packed + o_m
    row = tl.load(p_request + request * 6).to(tl.int64) + o_packed // group
    o_out = row * (n_groups * group) + i_g * group + o_packed % group
    b_out = (b_acc / b_sum[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_out + o_out[:, None] * D + o_d[None, :], b_out, mask=valid[:, None])
    tl.store(p_lse + o_out, (b_max + tl.log2(b_sum)) / 1.4426950408889634, mask=valid)


# -- the host's part -----------------------------------------------------------------------------------------

@dataclass
class Plan:
    """What an iteration's launches, one a layer, have in common. Int32 tensors, to be copied to the device
    once.

    requests (B, 6): first row in q, rows, length with the rows' own, selected positions, first position of
    the tail, 1 if the rows are causal. sees (N,) int64: bit j says whether a row sees position length - 1 -
    j. items (n, 4) and merges (m, 5): see the kernels. n_part_rows: rows of partial results. chunk: entries
    of an item."""
    requests: torch.Tensor
    sees: torch.Tensor
    items: torch.Tensor
    merges: torch.Tensor
    n_part_rows: int
    chunk: int

    def to(self, device):
        names = "requests", "sees", "items", "merges"
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def make_plan(requests, group, chunk=CHUNK, trees=None):
    """Cut the lists of a packed batch into work items.

    requests: [(rows, length, n_selected, tail)], one for each row of the slot table; rows may be 0 (a request
    that waits). length counts the rows' own positions, which lie at the end of the tail, and selected ones
    lie before it: n_selected <= tail <= length - rows. trees: {request: bool (rows, m)}, which of the last m
    <= SEEN positions each row sees; without it they are causal."""
    # In numpy, because torch takes twice as long for operations as small as these.
    rows, length, n_selected, tail = np.array(requests, np.int64).reshape(-1, 4).T
    # Trees: the newest position is the lowest bit.
    first_row = rows.cumsum() - rows
    causal = np.ones_like(rows)
    sees = np.full(rows.sum(), -1)
    for i, mask in (trees or {}).items():
        causal[i] = 0
        bits = F.pad(mask.long(), (SEEN - mask.shape[1], 0), value=1) << torch.arange(SEEN - 1, -1, -1)
        sees[first_row[i]:first_row[i] + len(mask)] = bits.sum(1).numpy()

    # Tiles: up to `height` packed rows of a request.
    packed = rows * group
    height = np.where(packed <= SMALL, SMALL, LARGE)
    request, i_tile = _expand((packed + height - 1) // height)
    first = i_tile * height[request]
    n = np.minimum(height[request], packed[request] - first)               # its packed rows
    # Its list ends where its last row does.
    behind = rows[request] - 1 - (first + n - 1) // group                  # rows after its last one
    entries = (n_selected + length - tail)[request] - behind * causal[request]
    parts = (entries + chunk - 1) // chunk
    part_rows = np.where(parts > 1, parts * n, 0)
    first_part = part_rows.cumsum() - part_rows

    # Items: a chunk of a tile's list each. Tiles of several chunks are merged.
    tile, i_part = _expand(parts)
    part = np.where(parts[tile] > 1, first_part[tile] + i_part * n[tile], -1)
    items = np.stack([request[tile], first[tile], i_part * chunk, part], 1)
    merges = np.stack([request, first, n, first_part, parts], 1)[parts > 1]
    requests = np.stack([first_row, rows, length, n_selected, tail, causal], 1)
    requests, items, merges = (torch.from_numpy(x.astype(np.int32)) for x in (requests, items, merges))
    return Plan(requests, torch.from_numpy(sees), items, merges, int(part_rows.sum()), chunk)


def _expand(counts):
    """counts (n,) -> for each of counts.sum() members the index of its owner and its rank there:
    [2, 1] -> 0 0 1, 0 1 0."""
    owner = np.arange(len(counts)).repeat(counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]


def attention(q, k, v, slots, selected, plan):
    """Every row's attention over the positions that the plan lets it see.

    q (N, H, D), k and v (G, n_slots, D) of one layer, slots (B, T) int32: the slot of every position,
    selected (B, G, C) int32 positions, all on the plan's device. Heads and lists are contiguous, and lists
    hold all that the plan reads. Keys and values of the rows are already in the pool.

    Returns (N, H, D), and the natural logarithm (N, H), in fp32, of every row's sum of exp(q . k / sqrt(D)).
    """
    n, h, d = q.shape
    groups = k.shape[0]
    # Results, and results of parts where lists are split.
    out = q.new_empty(n, h, d)
    lse = q.new_empty(n, h, dtype=torch.float32)
    part = q.new_empty(plan.n_part_rows, groups, d, dtype=torch.float32)
    part_lse = q.new_empty(plan.n_part_rows, groups, dtype=torch.float32)
    strides = q.stride(0), k.stride(0), slots.stride(0), selected.stride(0), selected.stride(1)
    scale = d ** -0.5 * LOG2E
    packed_attention[(len(plan.items), groups)](
        q, k, v, slots, selected, plan.sees, plan.requests, plan.items, out, lse, part, part_lse, scale,
        plan.chunk, h // groups, *strides, D=d, SMALL=SMALL, LARGE=LARGE, **settings(q.dtype, d))
    if len(plan.merges):
        merge_parts[(len(plan.merges), groups, LARGE // SMALL)](
            part, part_lse, plan.requests, plan.merges, out, lse, h // groups, D=d, M=SMALL)
    return out, lse
