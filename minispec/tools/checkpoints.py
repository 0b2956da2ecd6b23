"""Folders of trained drafters: `config.json`, with the kind of drafter in it, and `model.safetensors`. (Whole models have the
Hugging Face layout instead, see gpt.py.)"""
import hashlib
import json
import os
import re
from dataclasses import asdict, fields

import torch

from minispec.tools.files import blame, read_json, read_tensors, replaced, write_json


def save(module, folder, kind):
    """Write a module with a dataclass `config`."""
    from safetensors.torch import save_file
    os.makedirs(folder, exist_ok=True)
    with replaced(os.path.join(folder, "model.safetensors")) as file:
        save_file({name: x.contiguous() for name, x in module.state_dict().items()}, file, metadata={"format": "pt"})
    write_json(os.path.join(folder, "config.json"), {"model_type": kind, **asdict(module.config)})


def load(folder, kind, make):
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
