"""The key/value cache: one pool of token slots, a run of them for every request, and host memory for
what must leave.

A slot holds the keys and values of one token in all layers; position p of a request lies in slot `run.first +
p`. A run is contiguous, so appending is a slice assignment and reading is a view: decoding never copies the
cache. Rolling rejected tokens back needs no method at all: what counts as cached is the request's own length,
and the next tokens overwrite the rest; of a draft tree, `keep` moves the accepted path together. The price is
paid when a run must grow where no room is left beside it: then it moves. (The papers' systems use page size 1
and a slot table instead, which never moves and always gathers; a GPU hides the gather, a CPU does not.)
"""
from dataclasses import dataclass, field

import torch

MOST = 1 << 40              # slots; a larger number does not even fit into the error of an allocator


def beside(stream):
    """A block in which what this thread asks of a GPU goes to another stream (None: to the current one),
    behind what the current one was asked before."""
    if stream:
        stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


@dataclass(eq=False)
class Run:
    """`size` slots from slot `first` on. host: the run's tail, moved out in chunks (2, L, G, n, D), last out
    last."""
    first: int
    size: int
    host: list = field(default_factory=list)

    @property
    def end(self):
        return self.first + self.size

    @property
    def on_host(self):
        """Tokens of this run that are in host memory."""
        return sum(chunk.shape[3] for chunk in self.host)


class KVCache:
    """Pool of n_slots token slots. kv, and its halves k and v: (L, G, n_slots, D), heads before slots, so
    that the keys of one head are contiguous and the products with them are plain matrix products. `charged`
    slots are kept free for buffers that live elsewhere but count against the same memory. spare: slots more,
    behind the others, that are nobody's; rows that pad a CUDA graph write there."""

    def __init__(self, config, n_slots, dtype=torch.float32, device="cpu", spare=0):
        if not 0 <= n_slots <= MOST:
            raise ValueError(f"a cache of {n_slots} tokens is out of range; allowed is 0 to {MOST}")
        shape = (2, config.n_layer, config.n_kv_head, n_slots + spare, config.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.k, self.v = self.kv[0], self.kv[1]
        self.n_slots = n_slots
        self.runs = []                                   # in use, by first slot
        self.used = 0
        self.charged = 0
        self.moved = self.offloaded = 0                  # tokens copied so far
        self.side = torch.cuda.Stream(self.k.device) if self.k.is_cuda else None

    @property
    def free(self):
        return self.n_slots - self.used - self.charged

    def open(self, n):
        """A run of n slots, or None when there is no room now."""
        run = Run(0, 0)
        return run if self.resize(run, n) else None

    def close(self, run):
        """Give a run back."""
        self.resize(run, 0)

    def resize(self, run, n):
        """Make a run n slots long; it keeps what it holds, perhaps in another place. False when there is no
        room."""
        if n - run.size > self.free:
            return False
        if n > run.size and self._room_behind(run) < n:
            self._move(run, n)
        if n == 0 and run.size:
            self.runs.remove(run)
        self.used += n - run.size
        run.size = n
        return True

    def _room_behind(self, run):
        """Slots from the run's first one up to the next run; an empty run has no place yet."""
        if not run.size:
            return 0
        behind = [r.first for r in self.runs if r.first > run.first]
        return min(behind, default=self.n_slots) - run.first

    def _move(self, run, n):
        """Put a run where n slots are free: into the first gap that takes them, else pack all others to the
        left."""
        # 1. What it holds leaves first, because others may move over it.
        others = [r for r in self.runs if r is not run]
        content = self.kv[:, :, :, run.first:run.end].clone()
        # 2. Where is room?
        start = 0
        for r in [*others, Run(self.n_slots, 0)]:
            if r.first - start >= n:
                break
            start = r.end
        else:
            start = self._pack(others)
        # 3. There it goes.
        run.first = start
        self.kv[:, :, :, run.first:run.end] = content
        self.moved += run.size
        self.runs = sorted([*others, run], key=lambda r: r.first)

    def _pack(self, runs):
        """Move runs to the left, without gaps. Returns the first slot behind them."""
        start = 0
        for r in runs:
            if r.first != start:
                content = self.kv[:, :, :, r.first:r.end].clone()        # the two places may overlap
                self.kv[:, :, :, start:start + r.size] = content
                self.moved += r.size
                r.first = start
            start += r.size
        return start

    def keep(self, first, rows):
        """Of the tokens in slots first, first + 1, .. keep those at offsets `rows`, moved together in this
        order."""
        if rows != list(range(len(rows))):
            index = torch.tensor(rows, device=self.k.device) + first
            kept = self.kv[:, :, :, index]                       # indexing copies, so overlap does no harm
            self.kv[:, :, :, first:first + len(rows)] = kept

    # -- host memory -----------------------------------------------------------------------------------------

    def offload(self, run, chunk):
        """Move the last `chunk` slots of a run (all, if it is shorter) to the host."""
        n = min(chunk, run.size)
        # The newest tokens leave; those before them stay where they are.
        run.host.append(self._to_host(self.kv[:, :, :, run.end - n:run.end].clone()))
        self.resize(run, run.size - n)
        self.offloaded += n

    def _to_host(self, x):
        """x (a copy of its own, so that the slots are free at once) in host memory. From a GPU it leaves on a
        stream of its own, to pinned memory, while the next forward runs."""
        if self.side is None:
            return x
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        with beside(self.side):
            host.copy_(x, non_blocking=True)
        x.record_stream(self.side)
        return host

    def restore(self, run):
        """Bring the chunk that left last back behind what the run holds. False when there is no room."""
        chunk = run.host[-1]
        n = chunk.shape[3]
        old = run.size
        if not self.resize(run, old + n):
            return False
        if self.side:                                    # it may still be on its way out
            torch.cuda.current_stream().wait_stream(self.side)
        self.kv[:, :, :, run.first + old:run.end].copy_(chunk, non_blocking=True)
        run.host.pop()
        return True
