"""CUDA graphs of a forward on the kernels: captured once, then replayed for every mix of phases.

SpecGen / SparseSpec (arXiv 2512.01278). A forward is some twenty launches per layer, each a few microseconds
of host work, and the kernels of a small model, or of a draft row's 5 % of attention, finish sooner than that.
A graph replays all launches at once, but it fixes addresses, shapes, grids and every number that the host
passed. Requests change phase from forward to forward, so everything that changes must be in memory at fixed
addresses. The kernels read a request's rows, length and list from device tables, in which draft rows,
verifications and prompts differ only in numbers, and return at once where a table contains -1. So a forward
is determined by its `Inputs`. `Graphs` pads its tables to the next of SIZES and sends all of them in one
copy; there is one graph per size:

    rows        pad rows repeat token 0 at position 0. No work item names them, so their attention is
                undefined, and no result depends on it. Their keys and values go to a spare
                block of the cache, which no request owns.
    work        items, merges and the list of scored requests end in -1, up to the most that the rows can ever
                need (`room`).
    requests    each has a slot in the tables. A request that drafts from a list keeps its slot, so that its
                list is copied once a round. Slots without a request have no rows.

The target's logits, which only some rows need, and the scheduler's work stay outside the graph. One set of
buffers is enough, because the host waits for a forward before it prepares the next (the paper alternates
between two). Scores take 1 / (D * e / 2) of the memory of a cache for the same number of tokens.

All steps of a drafter's round are one graph: each step draws its token on the device, where the next step
reads it (core/drafters.py, ChainDrafter).

The tests replace `capture` by a stand-in and run all the rest in Triton's interpreter. On a GPU the
methods wrote the CPU's tokens (docs/gpu.md says when). The cost of padded grids and copies, against the saved
launches, has not been measured.
"""
import gc
import time
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from minispec.core.kv_cache import KVCache
from minispec.core.requests import pack

from .attention import CHUNK, LARGE, Plan, attention, make_plan
from .scores import scores

# Rows; a larger forward takes long enough to hide its launches.
SIZES = (1, 2, 4, 8, 16, 32, 64, *range(128, 641, 64))


@dataclass
class Inputs:
    """The inputs of a forward, on the device: N rows of B requests, up to T positions, up to W selected.

    tokens, positions (N,). new (N,): the slots for the rows' keys and values. table (B, blocks): the blocks
    of each request; slots (B, T) follow from it. selected (B, L, G, W), plan: see attention.py. which (R,):
    the requests whose scores are wanted; the forward writes them to `scores` (L, B, G, T). features (N, F) of
    each row, and per_request, {name: tensor with an entry for each request}: for drafters. options: settings
    that are no tensors; a graph serves one value of them. As requests.Batch it has `attend`."""
    tokens: torch.Tensor
    positions: torch.Tensor
    new: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    selected: torch.Tensor
    which: torch.Tensor
    plan: Plan
    scores: torch.Tensor
    features: torch.Tensor
    per_request: dict
    cache: KVCache
    options: tuple = ()

    def attend(self, layer, q, k, v):
        """Write the rows' keys and values into the cache, and let the rows read. Nothing in here may wait for
        the device or depend on anything but the contents of tensors, because it is captured."""
        keys, values = self.cache.kv[:, layer]
        keys[:, self.new] = k.transpose(0, 1)
        values[:, self.new] = v.transpose(0, 1)
        out, lse = attention(q, keys, values, self.slots, self.selected[:, layer], self.plan)
        if len(self.which):
            scores(q, keys, lse, self.slots, self.plan, self.which, self.scores[layer])
        return out


def tables(buffer, shapes):
    """{name: tensor}, consecutive in a buffer of int32; shapes: {name: (shape, dtype)}."""
    out = {}
    at = 0
    for name, (shape, dtype) in shapes.items():
        n = prod(shape) * dtype.itemsize // 4
        out[name] = buffer[at:at + n].view(dtype).view(shape)
        at += -(-n // 4) * 4                             # to the next 16 bytes
    return out


def capture(function, pool):
    """(graph, the tensors that every replay fills) of a function of fixed tensors. All graphs share a memory
    pool for temporary tensors, because no two run at once."""
    function()                       # compiles kernels and sets libraries up, which a capture forbids
    gc.collect()                     # nor may graphs of earlier engines be freed during one
    graph = torch.cuda.CUDAGraph()
    # thread_local: with delayed verification another thread waits for the device meanwhile, which is allowed.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        out = function()
    return graph, out


@dataclass(eq=False)
class Graphs:
    """Runs function(Inputs) -> [tensors of N rows each] on the kernels. The function must depend only on its
    inputs and on fixed tensors, and must be idempotent (a capture runs it more than once).

    engine: its `warm_up` gets the seconds of compilation and capture. cache: a KVCache with a spare block,
    for pad rows. batch, longest: most requests, and most positions of each. widest: most positions that a
    scheduler selects. features: F of Inputs.features. scored: whether a scheduler reads scores."""
    engine: object
    function: object
    cache: object
    batch: int
    longest: int
    widest: int
    features: int = 0
    scored: bool = False

    def __post_init__(self):
        k = self.cache.k
        layers, groups, _, _ = k.shape
        self.n_blocks = self.cache.blocks_for(self.longest)                  # of a request at most
        self.padding = {"new": self.cache.n_slots, "items": -1, "merges": -1, "which": -1}     # others: 0
        self.n_scored = self.batch if self.scored else 0
        self.selected = k.new_zeros(self.batch, layers, groups, self.widest, dtype=torch.int32)
        self.scores = k.new_zeros(layers, self.n_scored, groups, self.longest, dtype=torch.float32)
        self.lists = [None] * self.batch                 # place -> the keys whose list lies there
        self.statics = {}                                # padded rows -> see `static`
        self.pool = torch.cuda.graph_pool_handle() if k.is_cuda else None
        self.graphs = {}                                 # (padded rows, options) -> (graph, what it fills)
        self.compiled = False

    def room(self, rows):
        """The most work items, merges and partial rows of a forward of `rows`: a request has one tile, and
        another for every LARGE packed rows; a tile has an item for every CHUNK positions."""
        tiles = min(rows, self.batch) + rows * self.cache.group // LARGE
        parts = -(-self.longest // CHUNK)
        if parts == 1:
            return tiles, 0, 0
        return tiles * parts, tiles, rows * self.cache.group * parts

    def static(self, rows, per_request):
        """The buffers of all forwards of `rows`: the host's buffer and its tables, the device's buffer and
        the Inputs in it. per_request: tensors like those of Inputs.per_request."""
        if rows in self.statics:
            return self.statics[rows]
        # 1. The tables, {name: (shape, dtype)}; first those of 64 bits.
        items, merges, part_rows = self.room(rows)
        shapes = dict.fromkeys(("tokens", "positions", "new", "sees"), ((rows,), torch.int64))
        shapes |= {name: (table.shape, table.dtype) for name, table in per_request.items()}
        of_work = {"table": (self.batch, self.n_blocks), "requests": (self.batch, 6), "items": (items, 4),
                   "merges": (merges, 5), "which": (self.n_scored,)}
        shapes |= {name: (shape, torch.int32) for name, shape in of_work.items()}
        # 2. A buffer on either side.
        n = sum(prod(shape) * dtype.itemsize // 4 + 3 for shape, dtype in shapes.values())
        host = torch.zeros(n, dtype=torch.int32, pin_memory=self.cache.k.is_cuda)
        buffer = torch.zeros_like(host, device=self.cache.k.device)
        t = tables(buffer, shapes)
        # 3. What a forward reads of it.
        plan = Plan(t["requests"], t["sees"], t["items"], t["merges"], part_rows, CHUNK)
        features = self.cache.k.new_zeros(rows, self.features)
        x = Inputs(t["tokens"], t["positions"], t["new"], t["table"], None, self.selected, t["which"], plan,
                   self.scores, features, {name: t[name] for name in per_request}, self.cache)
        static = host, {name: own.numpy() for name, own in tables(host, shapes).items()}, buffer, x
        if rows in SIZES:
            self.statics[rows] = static
        return static

    def places(self, segments):
        """Slots in the tables for all segments. A selected list is copied when its keys have no slot
        yet."""
        own = {s.keys for s in segments}
        placed = {keys: i for i, keys in enumerate(self.lists)}
        free = [i for i, keys in enumerate(self.lists) if keys not in own]
        out = []
        for s in segments:
            if s.keys in placed:
                out.append(placed[s.keys])
                continue
            out.append(free.pop(0))
            if s.keys.selected is not None:
                self.lists[out[-1]] = s.keys
                self.selected[out[-1], :, :, :s.keys.selected.shape[-1]] = s.keys.selected
        return out

    def fill(self, rows, segments, places, per_request=None):
        """The Inputs of a packed batch, padded to `rows` rows; arguments as of __call__."""
        # What each request feeds and reads, cut into work items.
        shapes = []                                      # (rows, length, selected positions, tail)
        new = []                                         # the slots that new rows are written to
        for s in segments:
            end = s.start + len(s.tokens)
            # Drafting rows read the positions that were selected and a tail of recent ones, all others a
            # tail from position 0 on.
            n_selected = tail = 0
            if s.keys.selected is not None:
                n_selected = s.keys.selected.shape[-1]
                tail = s.keys.length - s.keys.recent
            shapes.append((len(s.tokens), end, n_selected, tail))
            new += self.cache.slot_list(s.keys.blocks, range(s.start, end))
        trees = {i: s.keys.tail for i, s in enumerate(segments) if s.keys.tail is not None}
        plan = make_plan(shapes, self.cache.group, trees=trees)

        # Requests go to their places, work items name these.
        place = np.array(places)
        requests = np.zeros((self.batch, 6), int)
        requests[places] = plan.requests
        items, merges = plan.items.numpy(), plan.merges.numpy()
        for work in (items, merges):
            work[:, 0] = place[work[:, 0]]
        # So do block tables. Slots without a request repeat the first one's. Entries after the end of a table
        # are never read.
        owners = [segments[0].keys] * self.batch
        for i, s in zip(places, segments):
            owners[i] = s.keys
        spare = [self.cache.n_blocks] * self.n_blocks
        table = [(keys.blocks.table + spare)[:self.n_blocks] for keys in owners]
        scored = [i for i, s in zip(places, segments) if s.keys.scores is not None]
        batch = pack(segments, "cpu", per_request)
        given = {
            "tokens": batch.tokens,
            "positions": batch.positions,
            "new": new,
            "sees": plan.sees,
            "table": table,
            "requests": requests,
            "items": items,
            "merges": merges,
            "which": scored,
            **batch.per_request,
        }
        # All of it in one copy: each takes the host as long as a launch.
        host, filled, buffer, x = self.static(rows, batch.per_request)
        for name, values in given.items():
            filled[name].fill(self.padding.get(name, 0))
            filled[name][:len(values)] = values
        buffer.copy_(host, non_blocking=True)
        if batch.features is not None:
            x.features[:len(batch.features)] = batch.features
        return x

    def __call__(self, segments, per_request=None, options=()):
        """The results of the function for the rows of these segments.

        segments: requests.Segment; keys that record scores get them. per_request (on the host), options: see
        Inputs."""
        # Pad, and send what changes to where the graph reads it.
        n = sum(len(s.tokens) for s in segments)
        rows = next((size for size in SIZES if size >= n), n)
        places = self.places(segments)
        x = self.fill(rows, segments, places, per_request)

        def function():
            # The slots (B, T) of all positions, from the block tables (B, blocks).
            block = self.cache.block
            inside = torch.arange(block, dtype=torch.int32, device=x.table.device)
            slots = torch.add(inside, x.table[:, :, None], alpha=block).flatten(1)
            return self.function(replace(x, slots=slots, options=options))

        # Capture it, or compile the kernels of a batch too large for a graph.
        started = time.perf_counter()
        if rows in SIZES and (rows, options) not in self.graphs:
            self.graphs[rows, options] = capture(function, self.pool)
            self.engine.warm_up += time.perf_counter() - started
        elif not (self.graphs or self.compiled):
            function()[0][:1].cpu()                      # waits, or the next forward is charged with it
            self.compiled = True
            self.engine.warm_up += time.perf_counter() - started
        # Replay, or run it.
        graph, out = self.graphs.get((rows, options), (None, None))
        if graph:
            graph.replay()
        else:
            out = function()
        for s, place in zip(segments, places):
            if s.keys.scores is not None:
                s.keys.scores.copy_(self.scores[:, place, :, :s.keys.length])
        return [y[:n].clone() for y in out]
