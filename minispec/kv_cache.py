"""The key/value cache: one pool of token slots, and for every request a run of them.

A slot holds the keys and values of one token in all layers; position p of a request lies in slot `base + p`.
A request gets a run of slots that fits its prompt and its longest answer when it is admitted, so appending is a
slice assignment and reading is a view: decoding never copies the cache. Rolling rejected tokens back needs no
method at all: what counts as cached is the request's own length, and the next tokens overwrite the rest.
"""
import torch


class KVCache:
    """Pool of n_slots token slots. k and v: (L, G, n_slots, D), heads before slots, so that the keys of one head are
    contiguous and the products with them are plain matrix products."""

    def __init__(self, config, n_slots, dtype=torch.float32, device="cpu"):
        shape = (config.n_layer, config.n_kv_head, n_slots, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.n_slots = n_slots
        self.runs = []                               # (first slot, number of slots) in use, sorted

    def open(self, n):
        """Reserve n consecutive slots, first fit. Returns the first, or None when there is no room now."""
        start = 0
        for i, (first, size) in enumerate(self.runs + [(self.n_slots, 0)]):
            if first - start >= n:
                self.runs.insert(i, (start, n))
                return start
            start = first + size
        return None

    def close(self, base):
        """Give the run that starts at slot `base` back."""
        self.runs = [run for run in self.runs if run[0] != base]

    def keep(self, base, start, path):
        """Keep only the rows `path` (increasing offsets) of those written from position `start` on, moved together:
        position start + i then holds what was at start + path[i]. A chain keeps a prefix, for which nothing moves."""
        if list(path) == list(range(len(path))):
            return
        source = base + start + torch.as_tensor(path, device=self.k.device)
        for x in (self.k, self.v):
            x[:, :, base + start:base + start + len(path)] = x[:, :, source]
