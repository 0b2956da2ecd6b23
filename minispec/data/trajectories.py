"""What a diffusion teacher did, as training batches of its student (train_cdlm.py).

A trajectory is the tokens (L,) of an answer, the rank (L,) at which each slot was revealed, the hidden rows
(L, C) from which they were, and how many slots are live: the text ends in the last block of those.
"""
import glob
import os
import random

import torch
import torch.nn.functional as F

from minispec.tools.files import read_tensors


def as_batch(pairs):
    """[(prompt ids, answer ids)] -> tensors, prompts padded on the left to (n, width)."""
    prompts, answers = zip(*pairs)
    width = max(len(p) for p in prompts)
    return {"prompt": torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
            "length": torch.tensor([len(p) for p in prompts]), "answer": torch.tensor(answers)}


class Trajectories:
    """The shards of a folder as one list."""

    def __init__(self, folder):
        files = sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors")))
        shards = [read_tensors(file) for file in files]
        self.where = [(shard, i) for shard in shards for i in range(len(shard["live"]))]
        if not self.where:
            raise ValueError(f"{folder} holds no trajectories; run --stage trajectories first")

    def batch(self, numbers):
        rows = [{name: x[i] for name, x in shard.items()} for shard, i in (self.where[n] for n in numbers)]
        width = max(int(r["length"]) for r in rows)
        out = {name: torch.stack([r[name] for r in rows]) for name in rows[0] if name != "prompt"}
        out["prompt"] = torch.stack([F.pad(r["prompt"], (width, 0))[-width:] for r in rows])
        return {name: x if name == "hidden" else x.long() for name, x in out.items()}


def numbers_of_step(step, batch, live, seed, group=4):
    """Which trajectories of `live` (n,) slots make up the batch of a step: each one once an epoch, in another
    order every epoch. `group` neighbouring batches share out theirs by length."""
    n, out, order = len(live), [], []
    for i in range(step * batch, (step + 1) * batch):
        if not order or i % n == 0:
            order = random.Random(f"{seed}/epoch/{i // n}").sample(range(n), n)
            size = group * batch
            groups = [sorted(order[a:a + size], key=lambda j: live[j]) for a in range(0, n, size)]
            order = sum(groups, [])
        out.append(order[i % n])
    return out


def cut(batch, longest, names):
    """The batch without the slots from `longest` on: no text is there, decoding never opens them."""
    return {name: x[:, :longest] if name in names else x for name, x in batch.items()}
