"""Writes a GPT and a byte-level vocabulary as a GGUF file, as llama.cpp's converter does. For tests and
comparisons."""
import gguf
import numpy as np

from minispec.tools import checkpoints

def side_by_side(w, head_dim):
    """The inverse of gguf_file.halves, with numpy."""
    return w.reshape(-1, 2, head_dim // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def architecture(config):
    return "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"


def write_gguf(path, model, tokens, special, merges, pre="smollm", template=None, kind="F32", types=True,
               user_defined=(), add_bos=None, unused=()):
    """tokens: spelled, by id; special: their ids, and of these user_defined; merges: "a b"; kind: how
    matrices are stored; types: whether the types of tokens are; unused: ids that only fill up."""
    c = model.config
    name = architecture(c)
    w = gguf.GGUFWriter(str(path), name)
    kinds = {3: special, 4: user_defined, 5: unused}
    for what, value in {
        "context_length": c.block_size, "embedding_length": c.d_model, "block_count": c.n_layer,
        "feed_forward_length": c.d_ff, "head_count": c.n_head, "head_count_kv": c.n_kv_head,
        "key_length": c.head_dim, "value_length": c.head_dim, "layer_norm_rms_eps": c.norm_eps,
        "rope_freq_base": c.rope_theta, "rope_dimension_count": c.head_dim, "tokenizer_model": "gpt2",
        "tokenizer_pre": pre, "token_list": tokens, "token_merges": merges, "add_bos_token": add_bos,
        "token_types": [max(k for k in (1, *kinds) if k == 1 or i in kinds[k]) for i in range(len(tokens))]
        if types else None, "bos_token_id": c.bos_id, "eos_token_id": c.eos_id, "chat_template": template,
    }.items():
        if value is not None:
            getattr(w, f"add_{what}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, c.n_layer)
    state = model.state_dict()
    for ours, theirs, sizes in checkpoints.weight_names(c):
        for hf, part in zip(theirs, state[ours].float().split(sizes)):
            x = part.numpy()
            if name == "llama" and hf.split(".")[-2] in ("q_proj", "k_proj"):
                x = side_by_side(x, c.head_dim)
            store = gguf.GGMLQuantizationType[kind if x.ndim == 2 else "F32"]
            data = np.ascontiguousarray(x) if store.name == "F32" else gguf.quantize(x, store)
            w.add_tensor(names.get_name(hf, (".weight", ".bias")), data, raw_dtype=store)
    for part in ("header", "kv_data", "tensors"):
        getattr(w, f"write_{part}_to_file")()
    w.close()
    return str(path)
