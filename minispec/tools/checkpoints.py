"""Models on disk: a Hugging Face folder (`load`, `save`, hf_config.py) or a GGUF file (`load`, gguf_file.py)
of the Llama-3, Qwen2 or Qwen3 family. (Trained drafters: drafter_files.py.)
"""
import hashlib
import math
import os
import shutil

import torch
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

from minispec.core.gpt import GPT
from minispec.tools import gguf_file
from minispec.tools.files import naming, opened, read_json, replaced, write_json
from minispec.tools.hf_config import checked, from_hf_config, to_hf_config, weight_names

TEXT_FILES = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"


def save(model, folder, tokenizer_of=None):
    """Write `config.json`, `model.safetensors` and the TEXT_FILES of the folder `tokenizer_of`."""
    # A parameter of GPT is a stack of several of the format.
    state = model.state_dict()
    tensors = {}
    for ours, theirs, rows in weight_names(model.config):
        tensors.update(zip(theirs, state[ours].split(rows)))
    write_folder(folder, tensors, to_hf_config(model.config, str(model.dtype).removeprefix("torch.")))
    if tokenizer_of:
        for name in TEXT_FILES:
            source = f"{tokenizer_of}/{name}"
            if os.path.exists(source):
                with replaced(f"{folder}/{name}") as temporary:
                    shutil.copyfile(source, temporary)


def load(path, device="cpu", dtype=None):
    """The GPT in a Hugging Face folder or a GGUF file (`gguf_file.SMOLLM2` names a packaged one).

    dtype None: as stored; quantised weights become float32. ValueError names, in one line, the file and what
    is missing, damaged or does not fit."""
    source = gguf_file.open_gguf(path) if gguf_file.is_gguf(path) else Folder(path)
    config = source.config
    names = weight_names(config)
    # Rows that pad the vocabulary are cut off, so their ids are never drafted or sampled.
    config.vocab_size = min(config.vocab_size, source.n_tokens)
    with _Shapes():
        model = GPT(config)
    # Weights are read one by one, so memory never holds much more than the model. The source forgets a weight
    # that was read. A weight that is left over belongs to a model that GPT is not.
    state = {}
    for ours, theirs, rows in names:
        kept, *rest = model.get_parameter(ours).shape
        state[ours] = _stacked(source, theirs, [(n, *rest) for n in rows], device, dtype)[:kept]
        # The embedding comes first; its dtype is that of all weights.
        dtype = dtype or state[ours].dtype
    model.load_state_dict(state, strict=False, assign=True)
    model.rope.to(device=device, dtype=dtype)
    if config.tied:
        model.head.weight = model.embed.weight
    if source.tensors:
        raise ValueError(f"{source.file} holds {min(source.tensors)}, which this model does not use")
    return model.eval()


class _Shapes(TorchFunctionMode):
    """Inside, weights are made without memory or numbers, which come from a file. (With the whole model on
    the "meta" device, torch would import 900 modules, which takes seconds.)"""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs["device"] = "meta"
        if func.__name__ != "normal_":
            return func(*args, **kwargs)


def _stacked(source, names, shapes, device, dtype):
    """The stack of the tensors with these names."""
    parts = []
    for name, shape in zip(names, shapes):
        try:
            part = source.tensor(name)
        except KeyError:
            raise ValueError(f"{source.file} lacks {name}") from None
        if part.shape != shape:
            raise ValueError(f"{source.file}: shape of {name} must be {shape} as in the config, got "
                             f"{tuple(part.shape)}")
        wide = part.is_floating_point() and part.element_size() > 1
        if not (wide and all(math.isfinite(x) for x in torch.aminmax(part))):
            raise ValueError(f"{source.file}: {name} must hold finite floating-point numbers of at least 16 "
                             "bits")
        parts.append(part.to(dtype or part.dtype))
    return torch.cat(parts).to(device)


class Folder:
    """A Hugging Face folder for `load`: `config`, the `n_tokens` of the vocabulary without padding, the
    `tensors` that are not read yet, and `tensor(name)`, or a KeyError."""

    def __init__(self, path):
        self.file = path
        config_file = f"{path}/config.json"
        with naming(config_file):
            self.config = checked(from_hf_config(read_json(config_file)))
        # Weights are in model.safetensors or in the shards that an index names. Other files are ignored.
        file = f"{path}/model.safetensors"
        index = f"{file}.index.json"
        if os.path.exists(index):
            with naming(index):
                shards = read_json(index)["weight_map"]
                self.tensors = {name: os.path.join(path, shard) for name, shard in shards.items()}
        else:
            with opened(file) as tensors:
                self.tensors = dict.fromkeys(tensors.keys(), file)
        # Some folders have a head although their config says tied.
        self.config.tied &= "lm_head.weight" not in self.tensors
        words = f"{path}/tokenizer.json"
        self.n_tokens = self.config.vocab_size
        if os.path.exists(words):
            with naming(words):
                data = read_json(words)
                vocab = data["model"]["vocab"]
                if isinstance(vocab, list):
                    raise ValueError("type of the vocabulary must be BPE")
                added = [token["id"] for token in data["added_tokens"]]
                self.n_tokens = 1 + max(*vocab.values(), *added)

    def tensor(self, name):
        """The tensor as it is stored."""
        # The file is mapped again for each tensor, because closing the map frees its pages.
        with opened(self.tensors.pop(name)) as tensors:
            return tensors.get_tensor(name)


def write_folder(folder, tensors, config):
    """Write `config.json` and `model.safetensors`."""
    os.makedirs(folder, exist_ok=True)
    with replaced(f"{folder}/model.safetensors") as file:
        save_file(tensors, file, metadata={"format": "pt"})
    write_json(f"{folder}/config.json", config)


@torch.no_grad()
def fingerprint(target):
    """A short name of a target's weights, "6x256-0a1b2c3d4e5f": layers, width, and a hash.

    The hash covers the shape, some rows of the embedding and of the last layer, and the last norm. Weights
    are rounded to bf16 first, so that the dtype of loading does not matter."""
    c = target.config
    last = target.blocks[-1]
    embeddings = target.embed.weight[::max(c.vocab_size // 16, 1)]
    rows = [embeddings, target.norm.weight, last.qkv.weight[0], last.down.weight[0]]
    numbers = torch.cat([x.flatten() for x in rows]).bfloat16().float().cpu().numpy()
    names = ("vocab_size", "n_layer", "n_head", "n_kv_head", "d_model", "head_dim", "d_ff", "qk_norm",
             "qkv_bias", "tied")
    shape = [getattr(c, name) for name in names]
    digest = hashlib.sha256(repr(shape).encode() + numbers.tobytes()).hexdigest()
    return f"{c.n_layer}x{c.d_model}-{digest[:12]}"
