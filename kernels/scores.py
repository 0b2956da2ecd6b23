"""The score kernel of PillarAttn: how much attention every cached position received from a verification.

SpecGen / SparseSpec (arXiv 2512.01278), PillarAttn. For a verifying request with n = k + 1 rows,
per KV head h and position p, with g query heads q to a KV head:

    scores[h, p] = 1 / (n * g)  *  sum over rows i and heads q of  exp(scale * q[i, q] . k[h, p] - lse[i, q])

Probabilities, not logits. Every row and head counts (the released kernel reduces its first tile only). The
divisor is n * g everywhere, and a row that may not see a position adds 0, as in minispec/core/attention.py:
exact and comparable for positions that all rows see, p <= length - n; the newest n - 1 are averages over
rows of which some saw nothing and should not be ranked. The budget rule takes these newest positions without
ranking.

Attention cannot sum these in passing, since a row's log-sum-exp is known only at its end. So a second pass
reads the keys again (not the values) with the lse that attention returned. Dumping logits instead would
move less (2 * n * g * 2 bytes a position and KV head, against D * e) but wants a scratch of n * H * length
values per layer; a comment in the released code finds the two about equally fast.

Shapes, for one layer: q (N, H, D), lse (N, H), k (G, n_slots, D), slots (B, T) as in attention.py; scores
(B, G, T) fp32. Bytes moved for E positions of all scored requests together, e bytes a number:
    G * E * (D * e + 4 + 4)         keys, slot indices, scores out
    n * H * D * e * ceil(T / N)     queries, read again for every block of N positions, from cache
Roofline time = bytes / bandwidth. Example, Qwen3-8B (G 8, D 128, bf16), one layer, 14 requests verifying at
8,192 tokens: E = 115k, 242 MB, 0.07 ms at 3.35 TB/s: half of what their attention reads, 1 / 18 of a full
step of 128 requests.
"""
import torch

from . import jit, tl
from .attention import LOG2E


def settings(dtype, d):
    """Positions and packed rows a step takes, and how fp32 products are made (see attention.py)."""
    if dtype == torch.float32:
        return dict(N=32, M=16, PRECISION="ieee", num_warps=8)
    return dict(N=min(8192 // d, 128), M=32, PRECISION="tf32", num_warps=4)


@jit
def pillar_scores(p_q, p_k, p_lse, p_slot, p_request, p_which, p_scores, scale, group,
                  s_q, s_kv, s_slot, s_request, s_group,
                  D: tl.constexpr, N: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr):
    """Grid (scored requests, G, blocks of N positions). Positions are the rows of the product here, so that
    a position's sum stays within a few threads and the packed rows need no padding to a large tile."""
    request = tl.load(p_which + tl.program_id(0))
    i_g = tl.program_id(1)
    n_groups = tl.num_programs(1)
    if request < 0:                               # padding
        return
    p_request += request * 6
    first_row = tl.load(p_request).to(tl.int64)
    n_rows = tl.load(p_request + 1)
    length = tl.load(p_request + 2)
    if tl.program_id(2) * N >= length:
        return
    # The block's keys, read once.
    o_n = tl.program_id(2) * N + tl.arange(0, N)
    o_d = tl.arange(0, D)
    alive = o_n < length
    b_slot = tl.load(p_slot + request.to(tl.int64) * s_slot + o_n, mask=alive, other=0).to(tl.int64)
    o_k = i_g.to(tl.int64) * s_kv + b_slot[:, None] * D + o_d[None, :]
    b_k = tl.load(p_k + o_k, mask=alive[:, None], other=0.0)               # (N, D)
    # Sum the probabilities of all rows and heads of the group.
    b_sum = tl.zeros((N,), tl.float32)
    for i in range(0, n_rows * group, M):
        o_m = i + tl.arange(0, M)
        row = o_m // group
        head = i_g * group + o_m % group
        valid = row < n_rows
        o_q = (first_row + row)[:, None] * s_q + head[:, None] * D + o_d[None, :]
        b_q = tl.load(p_q + o_q, mask=valid[:, None], other=0.0)           # (M, D)
        o_lse = (first_row + row) * (n_groups * group) + head
        b_lse = tl.load(p_lse + o_lse, mask=valid, other=0.0) * 1.4426950408889634
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale                     # (N, M)
        seen = valid[None, :] & (o_n[:, None] <= (length - n_rows + row)[None, :])
        b_sum += tl.sum(tl.where(seen, tl.exp2(b_s - b_lse[None, :]), 0.0), 1)
    p_scores += request.to(tl.int64) * s_request + i_g * s_group
    tl.store(p_scores + o_n, b_sum / (n_rows * group), mask=alive)


def scores(q, k, lse, slots, plan, which, out):
    """Fill out (B, G, T) fp32 for the requests `which` (n,) int32 (-1: none), n > 0, from the lse (N, H) of
    their attention. Positions from a request's length on are left as they are. Returns out."""
    _, h, d = q.shape
    groups = k.shape[0]
    constants = settings(q.dtype, d)
    scale = d ** -0.5 * LOG2E
    strides = q.stride(0), k.stride(0), slots.stride(0), out.stride(0), out.stride(1)
    pillar_scores[(len(which), groups, -(-out.shape[2] // constants["N"]))](
        q, k, lse, slots, plan.requests, which, out, scale, h // groups, *strides, D=d, **constants)
    return out
