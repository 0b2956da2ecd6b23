"""The key/value cache: one pool of blocks, a block table for every request (PagedAttention, 2309.06180), and
host memory for requests that are offloaded.

A block holds the keys and values of BLOCK tokens in all layers. Position p of a request lies in block
`table[p // BLOCK]`, so a request grows by one block at a time, anywhere in the pool, without moving.
Attention reads whole blocks where they lie (attention.py). Rejected tokens need no rollback: a request counts
its cached tokens itself, and the next tokens overwrite the rest. Only the accepted path of a draft tree is
moved together (`keep`). prefix_cache.py lets texts that begin alike share blocks.
"""
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

BLOCK = 128                 # tokens; smaller ones cost more operations, larger ones more empty slots
MOST = 1 << 40              # slots; larger numbers overflow inside the allocator


def whole_blocks(n):
    """The slots of the blocks that n tokens need."""
    return -(-n // BLOCK) * BLOCK


def beside(stream):
    """A context in which this thread's GPU work goes to another stream (None: the current one), after all
    work that the current stream has been given."""
    if stream:
        stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


@dataclass(eq=False)
class Allocation:
    """The blocks of a request. table: their numbers in the pool, in order of position. host: chunks (2, L, G,
    n, D) of its last tokens that are in host memory; the one that left last is the last. most: blocks of its
    longest text."""
    table: list = field(default_factory=list)
    host: list = field(default_factory=list)
    most: int = 0


class KVCache:
    """Pool of blocks for at least n_slots tokens. kv (2, L, G, slots, D): the keys k, then the values. Heads
    come before slots, so that a head's keys are contiguous and products with them are plain matrix products.
    `charged` slots are kept free for buffers that live elsewhere but count against the same memory. spare:
    additional blocks that no request gets; rows that pad a CUDA graph write there."""

    def __init__(self, config, n_slots=0, dtype=torch.float32, device="cpu", spare=0):
        if not 0 <= n_slots <= MOST:
            raise ValueError(f"a cache of {n_slots} tokens is out of range; allowed is 0 to {MOST}")
        self.block = BLOCK
        self.n_blocks = self.blocks_for(n_slots)
        slots = (self.n_blocks + spare) * self.block
        shape = (2, config.n_layer, config.n_kv_head, slots, config.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.group = config.n_head // config.n_kv_head   # g, query heads that share a key head
        self.free_blocks = list(range(self.n_blocks))
        self.charged = 0
        self.offloaded = 0                               # tokens copied so far, in whole blocks
        self.side = torch.cuda.Stream(self.kv.device) if self.kv.is_cuda else None

    @property
    def k(self):
        return self.kv[0]

    @property
    def n_slots(self):
        return self.n_blocks * self.block

    @property
    def used(self):
        return self.n_slots - len(self.free_blocks) * self.block

    @property
    def free(self):
        return self.n_slots - self.used - self.charged

    def blocks_for(self, n):
        """Blocks that n tokens need."""
        return -(-n // self.block)

    def size(self, blocks):
        """Slots of an Allocation."""
        return len(blocks.table) * self.block

    def open(self, n):
        """An Allocation of n slots, or None when there is no room now."""
        blocks = Allocation()
        return blocks if self.resize(blocks, n) else None

    def close(self, blocks):
        """Give all blocks back."""
        self.resize(blocks, 0)

    def resize(self, blocks, n):
        """Give an Allocation blocks for n slots. False when there is no room."""
        more = self.blocks_for(n) - len(blocks.table)
        if more > 0 and more * self.block > self.free:
            return False
        if more > 0:
            blocks.table += self._take(more, blocks)
        for _ in range(-more):
            self._give_back(blocks.table.pop())
        return True

    def _take(self, n, blocks):
        """n blocks in order, the lowest free ones, because neighbours are read at once."""
        self.free_blocks.sort()
        taken = self.free_blocks[:n]
        del self.free_blocks[:n]
        return taken

    def _give_back(self, block):
        self.free_blocks.append(block)

    def extend(self, blocks, n):
        """Give an Allocation blocks for at least n slots, if need be by copying the pool to a larger one."""
        if n > self.size(blocks) and not self.resize(blocks, n):
            self.enlarge(self.n_slots + max(n, self.n_slots))
            self.resize(blocks, n)

    def enlarge(self, n_slots):
        """Copy the pool to one of at least n_slots."""
        more = self.blocks_for(n_slots) - self.n_blocks
        self.kv = F.pad(self.kv, (0, 0, 0, more * self.block))
        self.free_blocks += range(self.n_blocks, self.n_blocks + more)
        self.n_blocks += more

    # -- where tokens lie ------------------------------------------------------------------------------------

    def slot_list(self, blocks, positions):
        """The slots of positions, as a list."""
        return [blocks.table[p // self.block] * self.block + p % self.block for p in positions]

    def slots_of(self, blocks, positions):
        """The slots of positions (n,), on the device."""
        return torch.tensor(self.slot_list(blocks, positions), dtype=torch.long, device=self.kv.device)

    def lies_together(self, blocks, n):
        """Whether the blocks of the first n positions are neighbours, in order."""
        table = blocks.table[:self.blocks_for(n)]
        return table == list(range(table[0], table[0] + len(table)))

    def reader(self, blocks, n):
        """read(layer): the keys and values (G, n, D) of the first n positions; views where they lie
        together."""
        if self.lies_together(blocks, n):
            first = blocks.table[0] * self.block
            views = [x[:, :, first:first + n].unbind() for x in self.kv]
            return lambda layer: (views[0][layer], views[1][layer])
        slots = self.slots_of(blocks, range(n))
        return lambda layer: self.kv[:, layer, :, slots]

    def keep(self, kept):
        """Keep the tokens at positions start + `rows` of each (blocks, start, rows) in `kept`, and move them
        to start, start + 1, .. in this order."""
        old, new = [], []
        for blocks, start, rows in kept:
            if rows != list(range(len(rows))):
                old += self.slot_list(blocks, [start + row for row in rows])
                new += self.slot_list(blocks, range(start, start + len(rows)))
        if new:
            old, new = torch.tensor([old, new], device=self.kv.device)
            self.kv[:, :, :, new] = self.kv[:, :, :, old]        # indexing copies first, so overlap is safe

    # -- host memory -----------------------------------------------------------------------------------------

    def offload(self, blocks, chunk):
        """Move the last `chunk` slots of a request (all, if it has fewer) to the host."""
        size = self.size(blocks)
        n = min(self.blocks_for(chunk) * self.block, size)
        # The newest tokens leave, the others stay where they are.
        slots = self.slots_of(blocks, range(size - n, size))
        host = x = self.kv[:, :, :, slots]
        # From a GPU it is sent on a separate stream, to pinned memory, while the next forward runs.
        if self.side:
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            with beside(self.side):
                host.copy_(x, non_blocking=True)
            x.record_stream(self.side)
        blocks.host.append(host)
        self.resize(blocks, size - n)
        self.offloaded += n

    def restore(self, blocks):
        """Bring the chunk that left last back, into free blocks."""
        chunk = blocks.host[-1]
        size = self.size(blocks)
        self.resize(blocks, size + chunk.shape[3])
        if self.side:                                    # the copy to the host may still be running
            torch.cuda.current_stream().wait_stream(self.side)
        slots = self.slots_of(blocks, range(size, size + chunk.shape[3]))
        self.kv[:, :, :, slots] = chunk.to(self.kv.device, non_blocking=True)
        blocks.host.pop()
