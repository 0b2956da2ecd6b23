"""The `config.json` and the weight names of a Hugging Face folder of the Llama-3, Qwen2 or Qwen3 family."""
from dataclasses import fields

from minispec.core.gpt import GPTConfig

KINDS = ("llama", "qwen2", "qwen3")
FIELDS = {              # GPTConfig's name: config.json's name
    "vocab_size": "vocab_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads", "d_model": "hidden_size", "head_dim": "head_dim",
    "d_ff": "intermediate_size", "block_size": "max_position_embeddings", "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings", "bos_id": "bos_token_id",
    "eos_id": "eos_token_id",
}
# The only value of these keys that the model supports, if they are there.
ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False,
        "use_mrope": False, "partial_rotary_factor": 1.0, "rope_interleaved": False,
        "quantization_config": None}
ROPE = ("rope_theta", "rope_type", "type", "rope_scaling", "rope_parameters")
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

# The largest values. A larger one is damage, and a model of that size could take all memory.
MOST = {"n_layer": 1 << 10, "head_dim": 1 << 8, "rope_theta": 1e12, "norm_eps": 1e-2}
MILLION = 1 << 20                                        # all others
FROM_ZERO = ("bos_id", "eos_id", "draft_vocab", "rank", "diffusion_block_size")


def weight_names(c):
    """[(GPT's parameter, Hugging Face names of its parts, rows of each part)]. A parameter is the stack of
    its parts."""
    q_rows = c.n_head * c.head_dim
    kv_rows = c.n_kv_head * c.head_dim
    layer = [                                            # ours, theirs, rows
        ("qkv.weight", [f"self_attn.{x}_proj.weight" for x in "qkv"], [q_rows, kv_rows, kv_rows]),
        ("out.weight", ["self_attn.o_proj.weight"], [c.d_model]),
        ("gate_up.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [c.d_ff, c.d_ff]),
        ("down.weight", ["mlp.down_proj.weight"], [c.d_model]),
        ("norm1.weight", ["input_layernorm.weight"], [c.d_model]),
        ("norm2.weight", ["post_attention_layernorm.weight"], [c.d_model]),
    ]
    if c.qkv_bias:
        layer.append(("qkv.bias", [f"self_attn.{x}_proj.bias" for x in "qkv"], [q_rows, kv_rows, kv_rows]))
    if c.qk_norm:
        layer += [(f"{x}_norm.weight", [f"self_attn.{x}_norm.weight"], [c.head_dim]) for x in "qk"]

    out = [("embed.weight", ["model.embed_tokens.weight"], [c.vocab_size]),
           ("norm.weight", ["model.norm.weight"], [c.d_model])]
    if not c.tied:
        out.append(("head.weight", ["lm_head.weight"], [c.vocab_size]))
    return out + [(f"blocks.{i}.{ours}", [f"model.layers.{i}.{name}" for name in theirs], rows)
                  for i in range(c.n_layer) for ours, theirs, rows in layer]


def to_hf_config(c, dtype):
    """The `config.json` of the family whose shape c has: Llama, Qwen2 (QKV bias) or Qwen3 (QK-norm)."""
    kind = "Llama"
    if c.qk_norm:
        kind = "Qwen3"
    if c.qkv_bias:
        kind = "Qwen2"
    out = {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(),
           **{theirs: getattr(c, ours) for ours, theirs in FIELDS.items()},
           "hidden_act": "silu", "torch_dtype": dtype}
    if c.rope_scaling:
        out["rope_scaling"] = {"rope_type": "llama3", **c.rope_scaling}
    if c.diffusion_block_size:
        out["diffusion_block_size"] = c.diffusion_block_size
    return out


def from_hf_config(d):
    """GPTConfig of a Llama, Qwen2 or Qwen3 `config.json`. ValueError names an unsupported entry."""
    kind = d.get("model_type")
    if kind not in KINDS:
        raise ValueError(f"architecture must be one of {', '.join(KINDS)}, got {kind!r}")

    # Positions: transformers 5 nests what 4 kept flat.
    rope = {**(d.get("rope_scaling") or {}), **(d.get("rope_parameters") or {})}
    d = {"rope_theta": 10000.0, **d, **rope}
    scaling = d.get("rope_type") or rope.get("type") or "default"
    if scaling not in ("none", "default", "llama3"):
        raise ValueError(f"rope scaling must be default or llama3, got {scaling!r}")
    known = ROPE + SCALING * (scaling == "llama3")
    for key, value in d.items():
        unused = (key in rope or "rope" in key) and key not in known
        if (unused or key in ONLY) and value not in (None, ONLY.get(key)):
            raise ValueError(f"{key} must be {ONLY.get(key) or 'absent'}, got {value!r}")

    c = {ours: d.get(theirs) for ours, theirs in FIELDS.items()}
    c["n_kv_head"] = c["n_kv_head"] or c["n_head"]
    c["head_dim"] = c["head_dim"] or c["d_model"] // c["n_head"]
    if scaling == "llama3":
        c["rope_scaling"] = {key: rope[key] for key in SCALING}
    if isinstance(c["eos_id"], list):
        c["eos_id"] = c["eos_id"][0]
    c["tied"] = c["tied"] or False
    c["diffusion_block_size"] = d.get("diffusion_block_size", 0)
    return GPTConfig(**c, qk_norm=kind == "qwen3", qkv_bias=kind == "qwen2")


def checked(c):
    """The config c of a model or a drafter. ValueError names a value that no model can have."""
    scaling = dict(c.rope_scaling or {})
    divisors = scaling.pop("divisors", None)
    # Each value alone; the values of `scaling` are floats.
    kinds = {field.name: type(field.default) for field in fields(c)}
    for name, x in {**scaling, **vars(c)}.items():
        kind = kinds.get(name, float)
        if kind is bool and type(x) is not bool:
            raise ValueError(f"{name} must be true or false, got {x!r}")
        if kind not in (int, float) or (x is None and name in FROM_ZERO):
            continue
        most = MOST.get(name, MILLION)
        possible = type(x) in (int, kind) and 0 <= x <= most
        if not possible or (x == 0 and name not in FROM_ZERO):
            least = "at least" if name in FROM_ZERO else "above"
            raise ValueError(f"{name} must be a number {least} 0 and at most {most:.7g}, got {x!r}")

    # Values that must fit together.
    if divisors and len(divisors) != c.head_dim // 2:
        raise ValueError(f"rope_freqs must have {c.head_dim // 2} values, got {len(divisors)}")
    if c.head_dim % 2:
        raise ValueError(f"head_dim must be even, got {c.head_dim}")
    if c.n_head % c.n_kv_head:
        raise ValueError(f"n_kv_head must divide n_head {c.n_head}, got {c.n_kv_head}")
    return c
