"""What the small kernels of a layer (kernels/fused.py) compute, in torch's operators; and a CUDA graph's stand-in."""
import torch.nn.functional as F


def add_rms_norm(x, delta, norm):
    x = x if delta is None else x + delta
    return x, F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def rope_and_store(qkv, block, rope, positions, new, keys, values):
    c = block.config
    q, k, v = qkv.unflatten(-1, (-1, c.head_dim)).split([c.n_head, c.n_kv_head, c.n_kv_head], dim=1)
    if c.qk_norm:
        q, k = block.q_norm(q), block.k_norm(k)
    cos, sin = rope(positions, qkv.dtype)
    q, k = (x * cos + x.roll(c.head_dim // 2, -1) * sin for x in (q, k))
    keys[:, new] = k.transpose(0, 1)
    values[:, new] = v.transpose(0, 1)
    return q


def silu_mul(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class Recorded:
    """A graph's stand-in where there is no CUDA: replaying calls the function again, which knows the static
    inputs only."""

    def __init__(self, function):
        self.function = function
        self.out = function()

    def replay(self):
        for held, new in zip(self.out, self.function()):
            held.copy_(new)


def capture(function, pool):
    """graphs.capture without a GPU."""
    graph = Recorded(function)
    return graph, graph.out
