"""The decoder layer on the kernels: ten launches where torch's operators take thirty.

    add_rms_norm        x + delta, and its RMSNorm, in one pass
    (qkv)               cuBLAS, as are all matrices
    rope_and_store      QK-norm, rotary positions, keys and values into the cache; the queries come back
    attention           and the merge of split lists (attention.py); scores where they are asked for
    (out)
    add_rms_norm
    (gate_up)
    silu_mul            silu(gate) * up
    (down)              its sum with x is the next layer's first kernel

A step of a small model is bound by launches and by the memory traffic between them, not by arithmetic: each
of the three small kernels reads its input once and writes its result once. Sums are made in fp32 and rounded
where torch's operators round. `decode` is gpt.GPT's body made of them, for the blocks of a target or of a
drafter.
"""
import torch

from . import jit, tl
from .attention import attention
from .scores import scores

BLOCK = 1024                            # numbers of a row that a program of silu_mul takes


@jit
def add_rms_norm_kernel(p_x, p_delta, p_weight, p_sum, p_out, eps, width, BLOCK: tl.constexpr):
    """Grid (N,). A program takes a whole row."""
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BLOCK)
    inside = o_c < width
    b_x = tl.load(p_x + i_row * width + o_c, mask=inside, other=0.0)
    b_x += tl.load(p_delta + i_row * width + o_c, mask=inside, other=0.0)
    tl.store(p_sum + i_row * width + o_c, b_x, mask=inside)
    # The norm: x over the root of its mean square.
    b_x = b_x.to(tl.float32)
    b_scale = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 0) / width + eps)
    b_weight = tl.load(p_weight + o_c, mask=inside, other=0.0).to(tl.float32)
    b_out = b_x * b_scale * b_weight
    tl.store(p_out + i_row * width + o_c, b_out.to(p_out.dtype.element_ty), mask=inside)


@jit
def rope_and_store_kernel(p_qkv, p_q_weight, p_k_weight, p_cos, p_sin, p_position, p_new, p_q, p_k, p_v,
                          eps, n_q, n_kv, s_kv, NORM: tl.constexpr, D: tl.constexpr):
    """Grid (N, H + 2 G). A program takes one head of one row to where it belongs."""
    i_row = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1)
    o_d = tl.arange(0, D)
    p_qkv += (i_row * (n_q + 2 * n_kv) + i_head) * D
    b_x = tl.load(p_qkv + o_d)
    i_slot = tl.load(p_new + i_row)
    # A value goes to the cache as it is.
    if i_head >= n_q + n_kv:
        tl.store(p_v + (i_head - n_q - n_kv).to(tl.int64) * s_kv + i_slot * D + o_d, b_x)
        return
    # Dimension i turns with i + D / 2, its partner.
    o_partner = (o_d + D // 2) % D
    b_x = b_x.to(tl.float32)
    b_partner = tl.load(p_qkv + o_partner).to(tl.float32)
    # One scale for the whole head, so the partner has it too.
    if NORM:
        p_weight = p_q_weight
        if i_head >= n_q:
            p_weight = p_k_weight
        b_scale = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 0) / D + eps)
        b_x = b_x * b_scale * tl.load(p_weight + o_d).to(tl.float32)
        b_partner = b_partner * b_scale * tl.load(p_weight + o_partner).to(tl.float32)
    o_angle = tl.load(p_position + i_row) * D + o_d
    b_cos = tl.load(p_cos + o_angle).to(tl.float32)
    b_sin = tl.load(p_sin + o_angle).to(tl.float32)               # its first half is negative
    b_x = b_x * b_cos + b_partner * b_sin
    b_x = b_x.to(p_q.dtype.element_ty)
    if i_head < n_q:
        tl.store(p_q + (i_row * n_q + i_head) * D + o_d, b_x)
    else:
        tl.store(p_k + (i_head - n_q).to(tl.int64) * s_kv + i_slot * D + o_d, b_x)


@jit
def silu_mul_kernel(p_gate_up, p_out, width, BLOCK: tl.constexpr):
    """Grid (N, blocks of the width)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_f < width
    p_gate_up += i_row * 2 * width + o_f
    b_gate = tl.load(p_gate_up, mask=inside, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate_up + width, mask=inside, other=0.0)
    b_gate = (b_gate * tl.sigmoid(b_gate)).to(b_up.dtype)
    tl.store(p_out + i_row * width + o_f, b_gate * b_up, mask=inside)


# -- the host's part -----------------------------------------------------------------------------------------

def norm_settings(width):
    """What add_rms_norm is compiled with for rows (C,): a thread has about eight of their numbers."""
    block = 1 << (width - 1).bit_length()
    return dict(BLOCK=block, num_warps=min(max(block // 256, 1), 16))


def add_rms_norm(x, delta, norm):
    """(x + delta, norm of it), rows (N, C)."""
    n, width = x.shape
    total = torch.empty_like(x)
    out = torch.empty_like(x)
    add_rms_norm_kernel[(n,)](x, delta, norm.weight, total, out, norm.eps, width, **norm_settings(width))
    return total, out


def rope_and_store(qkv, block, rope, positions, new, keys, values):
    """Rows qkv (N, (H + 2 G) * D) of a block's projection at positions (N,): writes keys and values (G,
    n_slots, D) at slots new (N,), and returns the queries (N, H, D)."""
    c = block.config
    q = qkv.new_empty(len(qkv), c.n_head, c.head_dim)
    weights = (block.q_norm.weight, block.k_norm.weight) if c.qk_norm else (qkv, qkv)
    rope_and_store_kernel[(len(qkv), c.n_head + 2 * c.n_kv_head)](
        qkv, *weights, rope.cos, rope.sin, positions, new, q, keys, values, c.norm_eps, c.n_head, c.n_kv_head,
        keys.stride(0), NORM=c.qk_norm, D=c.head_dim, num_warps=1)
    return q


def silu_mul(gate_up):
    """silu(gate) * up of rows (N, 2 F), the gates first -> (N, F)."""
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(n, width)
    silu_mul_kernel[(n, -(-width // BLOCK))](gate_up, out, width, BLOCK=BLOCK)
    return out


# -- a forward -----------------------------------------------------------------------------------------------

def decode(blocks, norm, rope, h, x, cache, feature_layers=()):
    """gpt.body on the kernels: rows h (N, C) of a batch x (graphs.Inputs) through blocks and their last norm.

    Writes the rows' keys and values into the cache. Returns hidden (N, C), with feature_layers as gpt.body.
    Nothing in here may wait for the device or depend on anything but the contents of tensors, because it is
    captured in a CUDA graph (graphs.py)."""
    delta = torch.zeros_like(h)
    features = []
    for layer, block in enumerate(blocks):
        # Attention: project, turn and store, read.
        h, normed = add_rms_norm(h, delta, block.norm1)
        keys, values = cache.k[layer], cache.v[layer]
        q = rope_and_store(block.qkv(normed), block, rope, x.positions, x.new, keys, values)
        out, lse = attention(q, keys, values, x.slots, x.selected[:, layer], x.plan)
        if len(x.which):
            scores(q, keys, lse, x.slots, x.plan, x.which, x.scores[layer])
        # Feed-forward.
        h, normed = add_rms_norm(h, block.out(out.flatten(1)), block.norm2)
        delta = block.down(silu_mul(block.gate_up(normed)))
        if layer in feature_layers:
            features.append(add_rms_norm(h, delta, norm)[1])
    hidden = add_rms_norm(h, delta, norm)[1]
    return torch.cat([*features, hidden], -1) if features else hidden
