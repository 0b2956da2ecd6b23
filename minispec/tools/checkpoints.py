"""Models on disk. A whole model is a Hugging Face folder of the Llama-3, Qwen2 or Qwen3 family: `load`, `save`. A trained drafter
is `config.json`, with the kind of drafter in it, and `model.safetensors`: `load_drafter`, `save_drafter`."""
import hashlib
import json
import math
import os
import re
from dataclasses import asdict, fields

import torch
import torch.nn as nn

from minispec.core.cpu import store_by_columns
from minispec.core.gpt import GPT, GPTConfig, Rope
from minispec.tools.files import blame, opened, read_json, read_tensors, replaced, write_json

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


# -- trained drafters ---------------------------------------------------------------------------------------------------

def save_drafter(module, folder, kind):
    """Write a module with a dataclass `config`."""
    from safetensors.torch import save_file
    os.makedirs(folder, exist_ok=True)
    with replaced(os.path.join(folder, "model.safetensors")) as file:
        save_file({name: x.contiguous() for name, x in module.state_dict().items()}, file, metadata={"format": "pt"})
    write_json(os.path.join(folder, "config.json"), {"model_type": kind, **asdict(module.config)})


def load_drafter(folder, kind, make):
    """make(**config) with the folder's weights. ValueError, in one line, names what is missing, damaged or does not fit."""
    if not os.path.isdir(folder):
        raise ValueError(f"no drafter folder {folder}")
    file, config_file = (os.path.join(folder, name) for name in ("model.safetensors", "config.json"))
    for needed in (config_file, file):
        if not os.path.exists(needed):
            raise ValueError(f"{folder} holds no {os.path.basename(needed)}")
    config = read_json(config_file)
    try:
        if config.pop("model_type", None) != kind:
            raise ValueError(f"this is not a drafter made by train_{kind}.py")
        module = make(**config)
        for field in fields(module.config):                      # a list where a number belongs would show in the middle of decoding
            value, kind = getattr(module.config, field.name), type(field.default)
            wrong = kind in (bool, int, str) and type(value) is not kind or type(value) is tuple and not all(type(i) is int and i >= 0 for i in value)
            if wrong and value is not None:
                raise ValueError(f"{field.name} {value} is of the wrong kind")
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as e:
        raise ValueError(f"{config_file}: {e}") from None
    weights = read_tensors(file)
    try:
        module.load_state_dict(weights)
    except RuntimeError as e:
        raise ValueError(f"{file} does not fit config.json: {str(e).splitlines()[-1].strip()}") from None
    return module


def check_shapes(drafter, target, same):
    """ValueError where a drafter's config does not go with a target's: the fields `same` must be equal, the layers it reads must
    be there, and it must reach as far."""
    for what in same:
        mine, theirs = getattr(drafter, what), getattr(target, what)
        if mine != theirs:
            raise ValueError(f"the drafter was made for a target with {what} {mine}, this one has {theirs}")
    if drafter.taps and max(drafter.taps) > target.n_layer:
        raise ValueError(f"the drafter reads layer {max(drafter.taps)} of the target, which has {target.n_layer}")
    if drafter.block_size < target.block_size:
        raise ValueError(f"the drafter was made for contexts of {drafter.block_size} tokens, the target's are {target.block_size}")


@torch.no_grad()
def fingerprint(target):
    """A short name of a target's weights, "6x256-0a1b2c3d4e5f": layers, width, and a hash of its shape, rows of its embedding and
    of the last layer, and the last norm. Rounded to bf16 first, so that the dtype it was loaded in does not matter."""
    c, last = target.config, target.blocks[-1]
    rows = [target.embed.weight[::max(c.vocab_size // 16, 1)], target.norm.weight, last.qkv.weight[0], last.down.weight[0]]
    numbers = torch.cat([x.flatten() for x in rows]).bfloat16().float().cpu().numpy()
    shape = [c.vocab_size, c.n_layer, c.n_head, c.n_kv_head, c.d_model, c.head_dim, c.d_ff, c.qk_norm, c.qkv_bias, c.tied]
    return f"{c.n_layer}x{c.d_model}-{hashlib.sha256(repr(shape).encode() + numbers.tobytes()).hexdigest()[:12]}"


def check_target(drafter, target, folder):
    """ValueError where a drafter was trained for another target. One from before fingerprints does not say."""
    made_for, this = drafter.target, fingerprint(target)
    if made_for and made_for != this:
        raise ValueError(f"the drafter in {folder} was trained for the target {made_for}, this one is {this}")


def kind_of(folder):
    """"prism", "specdiff", .. for a folder of a trained drafter, else None."""
    file = os.path.join(folder, "config.json")
    if not os.path.exists(file):
        return None
    with blame(file):
        return read_json(file).get("model_type")


def records(folder):
    """The lines of log.jsonl."""
    file = os.path.join(folder, "log.jsonl")
    with blame(file), open(file, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def last_record(folder):
    return records(folder)[-1]


def arm_of(folder):
    """A folder's name is ARM, ARM-PROMPTS, and with -sSEED behind it one of several trainings: (arm, number of prompts or 0)."""
    name, n = re.fullmatch(r"(.+?)(?:-(\d+))?(?:-s\d+)?", folder).groups()
    return name, int(n or 0)
