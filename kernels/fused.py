"""A model's blocks on the kernels: the layers of gpt.py, with attention over the slots of the cache.

Everything but attention and scores is torch's own operators, as on a CPU, so that one code says what a layer
is. Launching them costs the host nothing, because a forward is replayed as a CUDA graph (graphs.py).
"""
import torch

from .attention import attention
from .scores import scores


def decode(blocks, norm, rope, h, x, cache, taps=None):
    """What blocks and their last norm make of rows h (N, C), x being the batch they are (graphs.Inputs).

    Writes the rows' keys and values into the cache. Returns [hidden (N, C)], and with taps also the features
    (N, F) as in GPT.features. Nothing in here may wait for the device or depend on anything but the
    contents of tensors, because it is captured in a CUDA graph (graphs.py)."""
    def attend(layer, q, k, v):
        # Keys and values go to the slots of their rows; then every row reads its list.
        keys, values = cache.layers[layer]                                     # (G, n_slots, D)
        keys[:, x.new] = k.transpose(0, 1)
        values[:, x.new] = v.transpose(0, 1)
        out, lse = attention(q, keys, values, x.slots, x.selected[:, layer], x.plan)
        if len(x.which):
            scores(q, keys, lse, x.slots, x.plan, x.which, x.scores[layer])
        return out

    cos, sin = rope(x.positions, h.dtype)
    features = {}
    for block in blocks:
        features[block.layer] = h
        h = block(h, cos, sin, attend)
    features[len(blocks)] = h
    hidden = norm(h)
    if taps is None:
        return [hidden]
    return [hidden, torch.cat([features[i] for i in taps], -1) if taps else hidden]
