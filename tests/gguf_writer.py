"""Writes a GPT and a byte-level vocabulary as a GGUF file, as llama.cpp's converter does. For tests and comparisons."""
import gguf
import numpy as np

from minispec.tools import checkpoints

KINDS = {"F32": gguf.GGMLQuantizationType.F32, "F16": gguf.GGMLQuantizationType.F16, "BF16": gguf.GGMLQuantizationType.BF16,
         "Q8_0": gguf.GGMLQuantizationType.Q8_0, "Q4_1": gguf.GGMLQuantizationType.Q4_1}


def side_by_side(w, head_dim):
    """The inverse of gguf_file.halves, with numpy."""
    return w.reshape(-1, 2, head_dim // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def architecture(config):
    return "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"


def write_gguf(path, model, tokens, special, merges, pre="smollm", template=None, kind="F32", types=True, user_defined=(), add_bos=None,
               unused=()):
    """tokens: spelled, by id; special: their ids, and of these user_defined; merges: "a b"; kind: how matrices are stored; types:
    whether the types of tokens are; unused: ids that only fill up."""
    c = model.config
    name = architecture(c)
    w = gguf.GGUFWriter(str(path), name)
    w.add_context_length(c.block_size)
    w.add_embedding_length(c.d_model)
    w.add_block_count(c.n_layer)
    w.add_feed_forward_length(c.d_ff)
    w.add_head_count(c.n_head)
    w.add_head_count_kv(c.n_kv_head)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_layer_norm_rms_eps(c.norm_eps)
    w.add_rope_freq_base(c.rope_theta)
    w.add_rope_dimension_count(c.head_dim)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    kinds = [4 if i in user_defined else 3 if i in special else 5 if i in unused else 1 for i in range(len(tokens))]
    if types:
        w.add_token_types(kinds)
    if add_bos is not None:
        w.add_add_bos_token(add_bos)
    w.add_token_merges(merges)
    if c.bos_id is not None:
        w.add_bos_token_id(c.bos_id)
    if c.eos_id is not None:
        w.add_eos_token_id(c.eos_id)
    if template:
        w.add_chat_template(template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, c.n_layer)
    state = model.state_dict()
    for ours, theirs, sizes in checkpoints.weight_names(c):
        for hf, part in zip(theirs, state[ours].float().split(sizes)):
            x = part.numpy()
            if name == "llama" and hf.split(".")[-2] in ("q_proj", "k_proj"):
                x = side_by_side(x, c.head_dim)
            store = KINDS[kind] if x.ndim == 2 else KINDS["F32"]
            data = np.ascontiguousarray(x) if store == KINDS["F32"] else gguf.quantize(x, store)
            w.add_tensor(names.get_name(hf, (".weight", ".bias")), data, raw_dtype=store)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return str(path)
