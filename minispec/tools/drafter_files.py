"""Trained drafters on disk: a folder with `config.json`, which names the kind of drafter, and
`model.safetensors`."""
import os
from dataclasses import asdict

from minispec.tools.checkpoints import fingerprint, write_folder
from minispec.tools.files import naming, read_json, read_tensors
from minispec.tools.hf_config import checked


def save_drafter(drafter, folder, target):
    """Write a drafter of this target in bf16, which halves the file and does not change the output."""
    tensors = drafter.state_dict()
    for name, x in tensors.items():
        if x.is_floating_point():
            tensors[name] = x.bfloat16()
    c = drafter.config
    config = {"model_type": c.kind, **asdict(c), "target": fingerprint(target)}
    write_folder(folder, tensors, config)


def read_drafter(folder, target, kind):
    """The config (a dict) and the {name: tensor} of the drafter in a folder. ValueError for one of another
    kind, or one that does not fit the target."""
    config_file = os.path.join(folder, "config.json")
    config = read_json(config_file)
    with naming(config_file):
        if config.pop("model_type", None) != kind:
            raise ValueError(f"this is not a drafter made by train_{kind}.py")
        for name in ("d_model", "vocab_size", "block_size"):
            needed, got = getattr(target.config, name), config[name]
            if got != needed:
                raise ValueError(f"{name} of the drafter must be {needed} as in the target, got {got!r}")
    return config, read_tensors(os.path.join(folder, "model.safetensors"))


def load_drafter(folder, target, config_class):
    """The drafter in a folder, on the device and in the dtype of its target.

    ValueError names, in one line, what is missing, damaged or does not fit."""
    config, tensors = read_drafter(folder, target, config_class.kind)
    with naming(os.path.join(folder, "config.json")):
        module = checked(config_class(**config)).make(target)
    try:
        module.load_state_dict(tensors)
    except RuntimeError as e:
        line = str(e).splitlines()[-1].strip()
        raise ValueError(f"{folder}/model.safetensors does not fit config.json: {line}") from None
    return module.to(device=target.device, dtype=target.dtype).eval()


def kind_of(folder):
    """The kind of trained drafter in a folder, "prism", "specdiff", .., or None."""
    file = os.path.join(folder, "config.json")
    with naming(file):
        return read_json(file, {}).get("model_type")
