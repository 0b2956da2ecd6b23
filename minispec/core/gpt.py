"""A standard decoder-only transformer. Attention is passed in as a function, so every decoding method shares
this file.

    hidden = gpt(tokens, positions, attend)          # attend(layer, q, k, v) -> out

RMSNorm, rotary positions (RoPE), grouped-query attention, SwiGLU; QK-norm, QKV bias and a tied head are
options. With them the class covers the Llama-3, Qwen2 and Qwen3 families, whose folders
tools/checkpoints.py reads and writes.

`attend` decides which keys a query sees. Training passes `dense_attend`. Decoding passes a function
that writes k and v into a cache and reads the keys that each row may see (attention.py). A method of this
repository is a new `attend`, a new drafter, or both; the body below never changes.

Shapes: `...` is (B, T) in training and (N,), packed rows of several requests, in decoding; C = d_model,
H = query heads, G = key/value heads, D = head_dim, V = vocabulary.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from minispec.core.cpu import Linear, rms_norm


# -- primitives ----------------------------------------------------------------------------------------------

class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        weight = self.weight
        if x.is_cuda or torch.is_grad_enabled():
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return rms_norm(x, weight, self.eps)


BEYOND = 64                 # positions after the end of the context; a chain has fewer drafts (MAX_K)


def llama3_scaling(inv_freq, factor=1.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192, divisors=None):
    """Llama-3.1's scaling to a longer context: the frequencies inv_freq (D/2,), in radians per position, with
    the slow ones reduced.

    Dimensions with fewer than low_freq_factor turns in the context of pretraining turn `factor` times slower.
    Dimensions with more than high_freq_factor turns stay unchanged. Between the two the reduction is
    interpolated. divisors (D/2,): the reduction of each dimension, if a file gives these instead."""
    if divisors is not None:
        return inv_freq / torch.tensor(divisors, device=inv_freq.device)
    turns = inv_freq * original_max_position_embeddings / (2 * math.pi)
    keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - keep) * inv_freq / factor + keep * inv_freq


def rotate(x, cos, sin):
    """Rotary position embedding of x (..., heads, D) by cos and sin (..., 1, D).

    Dimension i pairs with i + D/2, so halves (a, b) become (a cos - b sin, b cos + a sin). The minus is in
    the table, which saves one operator per layer."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Rope(nn.Module):
    """The table of all positions' angles, a module without weights: positions (...) -> cos and sin (..., 1,
    D). The first half of sin is negated, for `rotate`."""

    def __init__(self, config):
        super().__init__()
        half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        inv_freq = llama3_scaling(config.rope_theta ** -half, **config.rope_scaling or {})
        # Drafts that go beyond the context are dropped later, but they need an angle.
        angle = torch.outer(torch.arange(config.block_size + BEYOND).float(), inv_freq)
        self.register_buffer("cos", torch.cat([angle.cos(), angle.cos()], dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat([-angle.sin(), angle.sin()], dim=-1), persistent=False)

    def forward(self, positions, dtype):
        return [table[positions][..., None, :].to(dtype) for table in (self.cos, self.sin)]


# -- a layer -------------------------------------------------------------------------------------------------

class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)). Projections of the same input are fused."""

    def __init__(self, layer, c):
        super().__init__()
        self.layer = layer
        self.config = c
        self.norm1 = RMSNorm(c.d_model, c.norm_eps)
        self.norm2 = RMSNorm(c.d_model, c.norm_eps)
        self.qkv = Linear(c.d_model, (c.n_head + 2 * c.n_kv_head) * c.head_dim, bias=c.qkv_bias)
        self.out = Linear(c.n_head * c.head_dim, c.d_model, bias=False)
        self.gate_up = Linear(c.d_model, 2 * c.d_ff, bias=False)
        self.down = Linear(c.d_ff, c.d_model, bias=False)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.norm_eps)

    def forward(self, x, cos, sin, attend):
        # 1. q (..., H, D), k and v (..., G, D), with positions applied to q and k.
        c = self.config
        qkv = self.qkv(self.norm1(x)).view(*x.shape[:-1], -1, c.head_dim)     # (..., H + 2G, D)
        qk, v = qkv.split_with_sizes([c.n_head + c.n_kv_head, c.n_kv_head], -2)
        heads = [c.n_head, c.n_kv_head]
        if c.qk_norm:
            q, k = qk.split_with_sizes(heads, -2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], -2)
        q, k = rotate(qk, cos, sin).split_with_sizes(heads, -2)                # both in one operation
        # 2. Attention, then the feed-forward layer.
        x = x + self.out(attend(self.layer, q, k, v).flatten(-2))             # (..., H, D) -> (..., C)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def body(module, rope, x, positions, attend, feature_layers=()):
    """Runs x (..., C) at positions (...) through the blocks of a module and its last norm: states (..., C).

    feature_layers: numbers of F layers whose normed output is put before the final states: (..., (F + 1) *
    C)."""
    cos, sin = rope(positions, module.norm.weight.dtype)         # not x's dtype: autocast may have changed it
    features = []
    for block in module.blocks:
        x = block(x, cos, sin, attend)
        if block.layer in feature_layers:
            features.append(module.norm(x))
    x = module.norm(x)
    return torch.cat([*features, x], -1) if features else x


# -- the model -----------------------------------------------------------------------------------------------

@dataclass
class GPTConfig:
    vocab_size: int = 2048
    n_layer: int = 6
    n_head: int = 4             # H, query heads
    n_kv_head: int = 2          # G, key/value heads; H / G query heads share one
    d_model: int = 256          # C
    head_dim: int = 64          # D
    d_ff: int = 768             # inner width of the SwiGLU feed-forward layer
    block_size: int = 10240     # longest context in tokens (nanoGPT's name)
    rope_theta: float = 500_000.0  # large: content look-ups over 8k tokens need many slow dimensions
    rope_scaling: dict = None   # arguments of llama3_scaling: Llama-3.1 and later
    norm_eps: float = 1e-5
    qk_norm: bool = False       # True: Qwen3; it bounds attention logits
    qkv_bias: bool = False      # True: Qwen2
    tied: bool = True           # output head = token embedding
    bos_id: int = 2040
    eos_id: int = 2041
    diffusion_block_size: int = 0  # slots of a block (cdlm.py); 0: unknown, or no diffusion model


# One dial that makes everything smaller. `micro` is the drafter of `nano`, `tiny` is for tests.
SIZES = {
    "tiny": dict(n_layer=2, n_head=4, n_kv_head=2, d_model=32, head_dim=8, d_ff=64),
    "micro": dict(n_layer=2, n_head=2, n_kv_head=1, d_model=96, head_dim=48, d_ff=256),
    "nano": dict(n_layer=6, n_head=4, n_kv_head=2, d_model=256, head_dim=64, d_ff=768),
}


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(i, c) for i in range(c.n_layer))
        self.norm = RMSNorm(c.d_model, c.norm_eps)
        self.head = Linear(c.d_model, c.vocab_size, bias=False)
        self.rope = Rope(c)
        self.apply(self._init)
        # Tie after the initialisation: a tied head keeps the embedding's wide numbers.
        if c.tied:
            self.head.weight = self.embed.weight

    def _init(self, module):
        """GPT-2's initialisation, N(0, 0.02), with two changes.

        Projections that write to the residual stream are scaled by depth. Embeddings are wider: tokens that
        start far apart are distinguished, and so copied, earlier in training."""
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.2)
        if isinstance(module, Block):
            for linear in (module.out, module.down):
                nn.init.normal_(linear.weight, std=0.02 / (2 * self.config.n_layer) ** 0.5)

    @property
    def device(self):
        return self.embed.weight.device

    @property
    def dtype(self):
        return self.embed.weight.dtype

    def forward(self, tokens, positions=None, attend=None, feature_layers=()):
        """Final hidden states (..., C), after the last norm, of tokens (...) at positions (...);
        feature_layers as for `body`. By default tokens (B, T) are whole sequences, and attention is causal.

        attend(layer, q (..., H, D), k (..., G, D), v (..., G, D)) -> (..., H, D); positions are already
        applied to q and k."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        return body(self, self.rope, self.embed(tokens), positions, attend or dense_attend(), feature_layers)

    def logits(self, hidden):
        """(..., C) -> (..., V)."""
        return self.head(hidden)

    def n_params(self):
        """Number of parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())


# -- training ------------------------------------------------------------------------------------------------

def dense_attend(mask=None):
    """attend over whole sequences q (B, T, H, D), k and v (B, T, G, D).

    mask: bool (T, T) or (B, 1, T, T), True where a query (row) sees a key (column); None means causal."""
    def attend(layer, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))                       # (B, heads, T, D)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out.transpose(1, 2)                                             # (B, T, H, D)
    return attend
