"""The one model of this repository: a decoder-only GPT in today's shape that does not know how it is decoded.

    hidden = gpt(tokens, positions, attend)          # attend(layer, q, k, v) -> out

RMSNorm, rotary positions (RoPE), grouped-query attention, SwiGLU; QK-norm, QKV bias and a tied head are options.
With them the class covers the Llama-3, Qwen2 and Qwen3 families, whose Hugging Face folders `load` and `save` read and
write. What a query may see is not decided here: `attend` is handed in. Training passes a dense causal one, decoding
one that writes k and v into a cache and reads what the step may see (see attention.py). A method of this repository
is a new `attend`, a new drafter, or both; the body below never changes.

Shapes, the same letters everywhere: `...` is (B, T) in training and (N,), packed rows of several requests, in
decoding; C = d_model, H = query heads, G = key/value heads, D = head_dim, V = vocabulary.
"""
import math
import os
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from minispec.tools.files import blame, opened, read_json, replaced, write_json


@dataclass
class GPTConfig:
    vocab_size: int = 2048
    n_layer: int = 6
    n_head: int = 4             # H, query heads
    n_kv_head: int = 2          # G, key/value heads; H / G query heads share one
    d_model: int = 256          # C
    head_dim: int = 64          # D
    d_ff: int = 768             # inner width of the SwiGLU feed-forward layer
    block_size: int = 10240     # longest context, in tokens
    rope_theta: float = 500_000.0  # a large base leaves many slow dimensions, which content look-ups over 8k tokens need
    rope_scaling: dict = None   # Llama-3.1 and later, see `stretched`
    norm_eps: float = 1e-5
    qk_norm: bool = False       # True: Qwen3; it caps attention logits, and so how sharply a head can look
    qkv_bias: bool = False      # True: Qwen2
    tied: bool = True           # output head = token embedding
    shift: bool = True          # a row predicts the token behind it; False: its own slot's, as some diffusion models do
    bos_id: int = 2040
    eos_id: int = 2041


# One dial that makes everything smaller. `micro` is the drafter of `nano`, `tiny` is for tests.
SIZES = {
    "tiny": dict(n_layer=2, n_head=4, n_kv_head=2, d_model=32, head_dim=8, d_ff=64),
    "micro": dict(n_layer=2, n_head=2, n_kv_head=1, d_model=96, head_dim=48, d_ff=256),
    "nano": dict(n_layer=6, n_head=4, n_kv_head=2, d_model=256, head_dim=64, d_ff=768),
    "small": dict(vocab_size=4096, n_layer=10, n_head=7, n_kv_head=7, d_model=448, head_dim=64, d_ff=1344),
}


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def stretched(turn, factor=1.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192):
    """Llama-3's longer context: dimensions that turn (D/2,), radians a position, less than low_freq_factor times in the context
    of pretraining do it `factor` times slower, those that turn more than high_freq_factor times stay, between them it slides."""
    times = turn * original_max_position_embeddings / (2 * math.pi)
    keep = ((times - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - keep) * turn / factor + keep * turn


def rope_table(config, device=None):
    """cos and sin of every position's rotation angles, each (block_size, D), in fp32; `rotate` says why the first half of
    sin is negated."""
    half = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    turn = stretched(config.rope_theta ** -half, **config.rope_scaling or {})
    angle = torch.outer(torch.arange(config.block_size, device=device).float(), turn)
    return torch.cat([angle.cos(), angle.cos()], dim=-1), torch.cat([-angle.sin(), angle.sin()], dim=-1)


def rotate(x, cos, sin):
    """Rotary position embedding of x (..., heads, D) by cos and sin (..., 1, D): dimension i pairs with i + D/2, so
    halves (a, b) become (a cos - b sin, b cos + a sin). The minus stands in the table: one operator less a layer."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Rope(nn.Module):
    """The table of all positions, as a module without weights: positions (...) -> cos and sin (..., 1, D) for `rotate`."""

    def __init__(self, config):
        super().__init__()
        cos, sin = rope_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, positions, dtype):
        return self.cos[positions][..., None, :].to(dtype), self.sin[positions][..., None, :].to(dtype)


PACK_UP_TO = 1 << 22        # elements: a packed matrix is a second copy, which a model of billions has no room for
CACHED = 1 << 22            # elements: of all matrices of a model that stays in the processor's cache from one row to the next
PACKED_TYPES = {torch.float32, torch.bfloat16}
if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
    PACKED_TYPES.clear()
elif not torch.ops.mkldnn._is_mkldnn_bf16_supported():
    PACKED_TYPES.discard(torch.bfloat16)


class Linear(nn.Linear):
    """nn.Linear that decodes faster on a CPU. Several rows are multiplied with a copy of the matrix in oneDNN's own layout, which is
    what torch.compile does too; torch's own product is slow for few rows in fp32. A single row uses that copy as well, or plain and
    larger rounds in turn would drive each other's weights from the processor's cache. But in a model that is small enough to
    stay there, a single row in fp32 is fastest with matrices stored by columns (`store_by_columns`). The copy is made anew
    when an optimiser or a loader has changed the weights; gradients never see it."""
    _packed = None, None                                 # (version and place of the weights, their copy)
    small = False                                        # a part of a small model, see store_by_columns

    def forward(self, x):
        if not self._packs(x):
            return F.linear(x, self.weight, self.bias)
        state = self.weight._version, self.weight.data_ptr()
        if self._packed[0] != state:
            self._packed = state, torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
        return torch.ops.mkldnn._linear_pointwise(x, self._packed[1], self.bias, "none", [], "")

    def _packs(self, x):
        w = self.weight
        if self.small and w.dtype == torch.float32 and x.numel() == w.shape[1]:               # a single row
            return False
        plain = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or w.is_cuda or w.is_inference()
        return w.dtype in PACKED_TYPES and x.dtype == w.dtype and w.numel() <= PACK_UP_TO and not plain


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)). The projections that read the same input are fused."""

    def __init__(self, layer, c):
        super().__init__()
        self.layer, self.config = layer, c
        self.norm1, self.norm2 = RMSNorm(c.d_model, c.norm_eps), RMSNorm(c.d_model, c.norm_eps)
        self.qkv = Linear(c.d_model, (c.n_head + 2 * c.n_kv_head) * c.head_dim, bias=c.qkv_bias)
        self.out = Linear(c.n_head * c.head_dim, c.d_model, bias=False)
        self.gate_up = Linear(c.d_model, 2 * c.d_ff, bias=False)
        self.down = Linear(c.d_ff, c.d_model, bias=False)
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.norm_eps), RMSNorm(c.head_dim, c.norm_eps)

    def forward(self, x, cos, sin, attend):
        c = self.config
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, c.head_dim))         # (..., H + 2G, D)
        if c.qk_norm:
            q, k, v = qkv.split([c.n_head, c.n_kv_head, c.n_kv_head], dim=-2)
            q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        else:
            qk, v = qkv.split([c.n_head + c.n_kv_head, c.n_kv_head], dim=-2)
            q, k = rotate(qk, cos, sin).split([c.n_head, c.n_kv_head], dim=-2)
        x = x + self.out(attend(self.layer, q, k, v).flatten(-2))             # (..., H, D) -> (..., C)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


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
        if c.tied:
            self.head.weight = self.embed.weight

    def _init(self, module):
        """GPT-2's initialisation, N(0, 0.02) with the projections that write to the residual stream scaled by depth, but
        wider embeddings: tokens that start out far apart are told apart, and so copied, earlier in training."""
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

    def forward(self, tokens, positions, attend, taps=None):
        """Final hidden states (..., C), after the last norm, of tokens (...) at positions (...).

        attend(layer, q (..., H, D), k (..., G, D), v (..., G, D)) -> (..., H, D) with rotary positions already
        applied to q and k. `taps`, a dict, asks for hidden states on the way: {layer: None} is filled with the
        input of that layer (layer n_layer: the output of the last one, before the norm).
        """
        x = self.embed(tokens)
        cos, sin = self.rope(positions, x.dtype)
        for block in self.blocks:
            if taps is not None and block.layer in taps:
                taps[block.layer] = x
            x = block(x, cos, sin, attend)
        if taps is not None and len(self.blocks) in taps:
            taps[len(self.blocks)] = x
        return self.norm(x)

    def features(self, tokens, positions, attend, layers=()):
        """What a drafter reads of this model: (final hidden states (..., C), features (..., F)). The features are the inputs
        of `layers`, side by side, or the final hidden states where none are named. Training and decoding both ask here."""
        taps = dict.fromkeys(layers)
        hidden = self(tokens, positions, attend, taps or None)
        return hidden, torch.cat([taps[i] for i in layers], dim=-1) if layers else hidden

    def logits(self, hidden):
        """(..., C) -> (..., V)."""
        return self.head(hidden)

    def n_params(self):
        """Number of parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())


def three_taps(n_layer):
    """A low, a middle and a high layer, for drafters that read more than the target's last state."""
    return n_layer // 6, n_layer // 2, n_layer - n_layer // 6


# -- Hugging Face folders ----------------------------------------------------------------------------------------------

def _hf_names(layer, c):
    """(our parameter, [its parts' Hugging Face names], rows of each part) of one block; parts are stacked rows."""
    p, a, m = f"blocks.{layer}.", f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
    heads = [c.n_head * c.head_dim, c.n_kv_head * c.head_dim, c.n_kv_head * c.head_dim]
    rows = [("qkv.weight", [a + f"{x}_proj.weight" for x in "qkv"], heads),
            ("out.weight", [a + "o_proj.weight"], [c.d_model]),
            ("gate_up.weight", [m + "gate_proj.weight", m + "up_proj.weight"], [c.d_ff, c.d_ff]),
            ("down.weight", [m + "down_proj.weight"], [c.d_model]),
            ("norm1.weight", [f"model.layers.{layer}.input_layernorm.weight"], [c.d_model]),
            ("norm2.weight", [f"model.layers.{layer}.post_attention_layernorm.weight"], [c.d_model])]
    if c.qkv_bias:
        rows.append(("qkv.bias", [a + f"{x}_proj.bias" for x in "qkv"], heads))
    if c.qk_norm:
        rows += [(f"{x}_norm.weight", [a + f"{x}_norm.weight"], [c.head_dim]) for x in "qk"]
    return [(p + ours, theirs, sizes) for ours, theirs, sizes in rows]


def _all_names(c):
    names = [("embed.weight", ["model.embed_tokens.weight"], [c.vocab_size]), ("norm.weight", ["model.norm.weight"], [c.d_model])]
    names += [] if c.tied else [("head.weight", ["lm_head.weight"], [c.vocab_size])]
    return names + [row for layer in range(c.n_layer) for row in _hf_names(layer, c)]


LARGEST = {"vocab_size": 1 << 22, "n_layer": 1 << 10, "n_head": 1 << 10, "n_kv_head": 1 << 10, "d_model": 1 << 18, "head_dim": 1 << 12, "d_ff": 1 << 20, "block_size": 1 << 22}
LARGEST_ROPE = 1 << 28      # elements of its tables, 1 GB each; a damaged `config.json` could ask for all memory
COPIED = 1024       # rows of a weight that are converted at once
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
KINDS = ("llama", "qwen2", "qwen3")
ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "partial_rotary_factor": 1.0,
        "quantization_config": None}     # what `config.json` may say of these, if anything


def to_hf_config(c, dtype="float32"):
    """The `config.json` of the family whose shape c has: Llama, Qwen2 (QKV bias) or Qwen3 (QK-norm)."""
    if c.qk_norm and c.qkv_bias:
        raise ValueError("no Hugging Face family has both QK-norm and QKV bias")
    kind = "Qwen3" if c.qk_norm else "Qwen2" if c.qkv_bias else "Llama"
    return {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "vocab_size": c.vocab_size,
        "hidden_size": c.d_model, "intermediate_size": c.d_ff, "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head, "num_key_value_heads": c.n_kv_head, "head_dim": c.head_dim,
        "max_position_embeddings": c.block_size, "rope_theta": c.rope_theta, "rms_norm_eps": c.norm_eps,
        "hidden_act": "silu", "tie_word_embeddings": c.tied, "attention_bias": False, "mlp_bias": False,
        "initializer_range": 0.02, "bos_token_id": c.bos_id, "eos_token_id": c.eos_id, "torch_dtype": dtype,
        **({"rope_scaling": {"rope_type": "llama3", **c.rope_scaling}} if c.rope_scaling else {}), **({} if c.shift else {"shift": False}),
    }


def from_hf_config(d):
    """GPTConfig of a Llama, Qwen2 or Qwen3 `config.json`. ValueError names what this model does not do."""
    kind = d.get("model_type")
    if kind not in KINDS:
        raise ValueError(f"model_type '{kind}' is not supported; supported are {', '.join(KINDS)}")
    for key, only in ONLY.items():
        if d.get(key) not in (None, only):
            raise ValueError(f"{key} {d[key]} is not supported")
    rope = {**(d.get("rope_scaling") or {}), **(d.get("rope_parameters") or {})}       # transformers 5 nests what 4 kept flat
    scaling = rope.get("rope_type") or rope.get("type") or "default"
    if scaling not in ("default", "llama3"):
        raise ValueError(f"rope scaling '{scaling}' is not supported; supported is llama3")
    eos, n_head = d.get("eos_token_id"), d["num_attention_heads"]
    c = GPTConfig(
        vocab_size=d["vocab_size"], n_layer=d["num_hidden_layers"], n_head=n_head, n_kv_head=d.get("num_key_value_heads") or n_head,
        d_model=d["hidden_size"], head_dim=d.get("head_dim") or d["hidden_size"] // n_head, d_ff=d["intermediate_size"],
        block_size=d["max_position_embeddings"], norm_eps=d["rms_norm_eps"],
        rope_theta=rope.get("rope_theta") or d.get("rope_theta") or 10000.0,
        rope_scaling={key: rope[key] for key in SCALING} if scaling == "llama3" else None,
        qk_norm=kind == "qwen3", qkv_bias=kind == "qwen2", tied=bool(d.get("tie_word_embeddings")), shift=bool(d.get("shift", True)),
        bos_id=d.get("bos_token_id"), eos_id=eos[0] if isinstance(eos, list) else eos)
    return checked(c)


def checked(c):
    """The GPTConfig c. ValueError where a file says sizes of which no model could be made."""
    for name, most in LARGEST.items():
        if type(getattr(c, name)) is not int or not 1 <= getattr(c, name) <= most:
            raise ValueError(f"{name} {getattr(c, name)} is out of range; allowed is 1 to {most}")
    for name, x in {"norm_eps": c.norm_eps, "rope_theta": c.rope_theta, **(c.rope_scaling or {})}.items():
        if type(x) not in (int, float) or not 0 < x < 1e30:
            raise ValueError(f"{name} {x} is out of range; allowed is any number above 0")
    for name, x in {"bos_id": c.bos_id, "eos_id": c.eos_id}.items():
        if x is not None and type(x) is not int:
            raise ValueError(f"{name} {x} is not a token id")
    if c.n_head % c.n_kv_head or c.head_dim % 2:
        raise ValueError(f"{c.n_head} heads over {c.n_kv_head} key/value heads of {c.head_dim} dimensions do not divide evenly")
    if c.block_size * c.head_dim > LARGEST_ROPE:
        raise ValueError(f"a context of {c.block_size} with heads of {c.head_dim} dimensions is too long; allowed are {LARGEST_ROPE // c.head_dim} tokens")
    return c


def save(model, folder, tokenizer_json=None):
    """Write `config.json`, `model.safetensors`, `generation_config.json` and, if given, the tokenizer's two files."""
    from safetensors.torch import save_file
    c, state, tensors = model.config, model.state_dict(), {}
    config = to_hf_config(c, str(model.dtype).removeprefix("torch."))
    os.makedirs(folder, exist_ok=True)
    for ours, theirs, sizes in _all_names(c):
        for name, part in zip(theirs, state[ours].split(sizes)):
            tensors[name] = part.contiguous()
    with replaced(os.path.join(folder, "model.safetensors")) as file:
        save_file(tensors, file, metadata={"format": "pt"})
    write_json(os.path.join(folder, "config.json"), config)
    write_json(os.path.join(folder, "generation_config.json"), {"bos_token_id": c.bos_id, "eos_token_id": c.eos_id})
    if tokenizer_json:
        name = {t["id"]: t["content"] for t in tokenizer_json["added_tokens"]}
        write_json(os.path.join(folder, "tokenizer.json"), tokenizer_json)
        write_json(os.path.join(folder, "tokenizer_config.json"), {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": name.get(c.bos_id), "eos_token": name.get(c.eos_id), "pad_token": "<|pad|>",
            "chat_template": "<|bos|><|prompt|>{{ messages[-1]['content'] }}\n<|think|>", "model_max_length": c.block_size})


def load(folder, device="cpu", dtype=None):
    """The GPT in a Hugging Face folder; dtype None: as stored. Weights are read one by one, so memory never holds much more
    than the model. ValueError, in one line, names the file and what is missing, damaged or does not fit."""
    config = _read_config(folder)
    files = _weight_files(folder, config)
    with torch.device("meta"):                                   # shapes without memory
        model = GPT(config)
    for ours, theirs, sizes in _all_names(config):               # the embedding is first
        path, name = ours.rsplit(".", 1)
        module = model.get_submodule(path)
        shapes = [(n, *getattr(module, name).shape[1:]) for n in sizes]
        setattr(module, name, nn.Parameter(_read_weight(files, theirs, shapes, device, dtype)))
        if module is model.embed:
            dtype = model.dtype
            model.rope = Rope(config).to(device=device, dtype=dtype)     # here, for later weights fit where its table was computed
    if config.tied:
        model.head.weight = model.embed.weight
    return store_by_columns(model.eval())


def _read_config(folder):
    """The GPTConfig of a folder."""
    file = os.path.join(folder, "config.json")
    if not os.path.isdir(folder):
        raise ValueError(f"no model folder {folder}")
    if not os.path.exists(file):
        raise ValueError(f"{folder} holds no config.json")
    data = read_json(file)
    try:
        return from_hf_config(data)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as e:
        raise ValueError(f"{file} is damaged or lacks a field: {e}") from None
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None


def _weight_files(folder, config):
    """{tensor: its file} from model.safetensors, or from the shards that model.safetensors.index.json lists."""
    file, index = (os.path.join(folder, name) for name in ("model.safetensors", "model.safetensors.index.json"))
    if os.path.exists(file):
        with opened(file) as tensors:
            files = dict.fromkeys(tensors.keys(), file)
    elif os.path.exists(index):
        file = index
        shards = read_json(index)
        with blame(index):
            files = {name: os.path.join(folder, shard) for name, shard in shards["weight_map"].items()}
    else:
        pickled = sorted(name for name in os.listdir(folder) if name.endswith((".bin", ".pt", ".pth")))
        raise ValueError(f"{folder} holds no model.safetensors" + (f"; {pickled[0]} is a pickle, which could run anything and is never read" if pickled else ""))
    missing = [n for _, theirs, _ in _all_names(config) for n in theirs if n not in files]
    if missing:
        raise ValueError(f"{file} lacks {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""))
    return files


def _read_weight(files, names, shapes, device, dtype):
    """The tensors of these names, one upon the other. Files are mapped anew for each: closing a map is what frees its pages."""
    out, row = None, 0
    for name, shape in zip(names, shapes):
        file = files[name]
        with opened(file) as tensors:
            part = tensors.get_tensor(name)
        if part.shape != shape:
            raise ValueError(f"{file}: {name} has shape {tuple(part.shape)}, config.json says {tuple(shape)}")
        if part.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{file}: {name} is stored as {part.dtype}; supported are float32, bfloat16 and float16".replace("torch.", ""))
        if not all(map(math.isfinite, torch.aminmax(part))):
            raise ValueError(f"{file}: {name} holds values that are not finite numbers")
        if out is None:
            out = torch.empty(sum(n for n, *_ in shapes), *shape[1:], dtype=dtype or part.dtype, device=device)
        for some in part.split(COPIED):
            out[row:row + len(some)] = some.to(out.dtype)
            row += len(some)
    return out


def store_by_columns(model):
    """Store the fp32 matrices of a small model on a CPU column by column, which changes nothing but speed: a single row, that is a draft
    step or plain decoding, is then multiplied in half the time. bf16, GPUs and large models (`Linear`) prefer rows."""
    matrices = [m for m in model.modules() if isinstance(m, Linear) and m.weight.dtype == torch.float32 and not m.weight.is_cuda]
    if sum(m.weight.numel() for m in matrices) <= CACHED:
        for m in matrices:
            m.weight.data, m.small = m.weight.data.t().contiguous().t(), True
    return model
