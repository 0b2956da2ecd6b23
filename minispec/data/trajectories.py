"""What a diffusion teacher did, as training batches of its student (train_cdlm.py).

A trajectory is the tokens (L,) of an answer, the rank (L,) at which each slot was revealed, the hidden rows
(L, C) from which they were, and how many slots are live: the text ends in the last block of those.
"""
import glob

import torch

from minispec.tools.files import blame, read_tensors


def as_batch(pairs, width=0):
    """[(prompt ids, answer ids)] -> tensors, prompts padded on the left to (n, width) or the longest."""
    prompts, answers = zip(*pairs)
    width = width or max(map(len, prompts))
    return {"prompt": torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
            "length": torch.tensor([len(p) for p in prompts]), "answer": torch.tensor(answers)}


def load_trajectories(folder):
    """The shards of a folder as one: {name: tensor (n, ..)}."""
    shards = [read_tensors(file) for file in sorted(glob.glob(f"{glob.escape(folder)}/*.safetensors"))]
    with blame(folder):
        return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


def batch_of(data, numbers):
    """These trajectories, without what is empty in all of them: the left of the prompts, and slots behind the
    text, which decoding never opened."""
    batch = {name: x[numbers] for name, x in data.items()}
    batch["prompt"] = batch["prompt"][:, -int(batch["length"].max()):]
    for name in ("tokens", "rank", "hidden"):
        batch[name] = batch[name][:, :int(batch["live"].max())]
    return batch
