"""Trained drafters on disk: a folder with `config.json`, which names the kind of drafter, and
`model.safetensors`."""
from dataclasses import asdict

from minispec.tools.checkpoints import fingerprint, write_folder
from minispec.tools.files import naming, read_json, read_tensors
from minispec.tools.hf_config import checked

# A drafter has its target's.
SHAPE = ("d_model", "vocab_size", "block_size", "n_head", "n_kv_head", "head_dim", "d_ff", "qk_norm",
         "qkv_bias")


def save_drafter(drafter, folder, target):
    """Write a drafter of this target in bf16, which halves the file and does not change the output."""
    tensors = drafter.state_dict()
    for name, x in tensors.items():
        if x.is_floating_point():
            tensors[name] = x.bfloat16()
    c = drafter.config
    config = {"model_type": c.kind, **asdict(c), "target": fingerprint(target)}
    write_folder(folder, tensors, config)


def load_drafter(folder, target, config_class):
    """The drafter in a folder, on the device and in the dtype of its target.

    ValueError names, in one line, what is missing, damaged or does not fit."""
    config_file = f"{folder}/config.json"
    config = read_json(config_file)
    with naming(config_file):
        if config.pop("model_type", None) != config_class.kind:
            raise ValueError(f"this is not a drafter made by train_{config_class.kind}.py")
        for name in SHAPE:
            needed, got = getattr(target.config, name), config[name]
            if got != needed:
                raise ValueError(f"{name} of the drafter must be {needed} as in the target, got {got!r}")
        layers = config.get("feature_layers", ())
        if len(set(layers) & set(range(target.config.n_layer))) < len(layers):
            raise ValueError(f"feature_layers must be layers of the target, got {layers}")
        module = checked(config_class(**config)).make(target)
    tensors = read_tensors(f"{folder}/model.safetensors")
    try:
        module.load_state_dict(tensors)
    except RuntimeError as e:
        line = str(e).splitlines()[-1].strip()
        raise ValueError(f"{folder}/model.safetensors does not fit config.json: {line}") from None
    return module.to(device=target.device, dtype=target.dtype).eval()


def kind_of(folder):
    """The kind of trained drafter in a folder, "prism", "specdiff", .., or None."""
    file = f"{folder}/config.json"
    with naming(file):
        return read_json(file, {}).get("model_type")
