"""CUDA graphs of a forward on the kernels: launched once by the host, replayed ever after, one graph for every mix of phases.

SpecGen / SparseSpec (arXiv 2512.01278). An eager forward is some twenty launches a layer, each a few microseconds of host work; a
small model's step, or a draft row's 5 % of attention, is over before the next one arrives. A graph replays all of them at once, but
it is frozen: addresses, shapes, grids and every number that the host passed. Requests change phase from forward to forward, so
all that changes must lie in memory, in places that stay. The kernels read a request's rows, length and list from device
tables, in which draft rows, verifications and prompts differ in numbers only, and leave at once where a table says -1. So
a forward is its `Inputs`; `Graphs` copies them into static ones, padded to the next of SIZES, and there is one graph a size:

    rows        pad rows repeat token 0 at position 0. No work item names them, so their attention is whatever memory holds, and
                nobody reads it. Their keys and values go to a spare slot of the cache, which no request owns.
    work        items, merges and the list of scored requests end in -1, up to what so many rows can ever need (`room`).
    lists       slots, selections and requests keep what an earlier, larger forward left: nothing reads beyond the counts.

Outside the graph stay the logits, which only some rows want, and everything of the planner's. One set of buffers is enough, since
the host waits for a forward before it prepares the next (the paper alternates between two). Scores take 1 / (D * e / 2) of a
cache of as many tokens.

Not run on a GPU yet: on a CPU `Recorded` stands in for torch.cuda.CUDAGraph, and the tests run all the rest in Triton's
interpreter. What the padded grids and the copies cost beside what the launches save has not been measured.
"""
import time
from dataclasses import dataclass, replace

import torch

from .attention import CHUNK, LARGE, Plan

SIZES = (1, 2, 4, 8, 16, 32, 64, *range(128, 641, 64))      # rows; a larger forward reads prompts, long enough to hide its launches


@dataclass
class Inputs:
    """Everything in which two forwards differ, on the device: N rows of B requests, T positions at most, up to W of them selected.
    tokens, positions, new (N,): new, the slots for the rows' keys and values. slots (B, T), selected (B, L, G, W), plan: see
    attention.py. which (R,): the requests whose scores are wanted. The forward fills them in, in `scores` (L, B, G, T) of Graphs."""
    tokens: torch.Tensor
    positions: torch.Tensor
    new: torch.Tensor
    slots: torch.Tensor
    selected: torch.Tensor
    which: torch.Tensor
    plan: Plan
    scores: torch.Tensor = None


class Recorded:
    """A graph's stand-in where there is no CUDA: replaying calls the function again, which knows the static inputs only."""

    def __init__(self, function):
        self.function, self.out = function, function()

    def replay(self):
        for held, new in zip(self.out, self.function()):
            held.copy_(new)


def capture(function, pool):
    """(graph, the tensors that every replay fills anew) of a function of fixed tensors. Temporary ones lie in a memory pool that all
    graphs share, for no two run at once."""
    if pool is None:
        return (graph := Recorded(function)), graph.out
    function()                                              # compiles kernels and sets libraries up, which a capture forbids
    graph = torch.cuda.CUDAGraph()
    # thread_local: where verification is delayed, another thread judges meanwhile, and waits for the device, which is no fault
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        out = function()
    return graph, out


class Graphs:
    """Runs function(Inputs) -> [tensors of N rows each] on the kernels. It must depend on its inputs and on fixed tensors alone, and
    running it twice must do what running it once does (a capture runs it more than once).

    cache: a KVCache with a spare slot, for pad rows; batch requests at most, of `longest` positions at most; widest: how many positions
    a planner selects at most (0: it selects none, and wants no scores); group = H / G."""

    def __init__(self, function, cache, batch, longest, widest, group):
        layers, groups, _, _ = cache.k.shape
        self.function, self.n_slots, self.batch, self.longest, self.group = function, cache.n_slots, batch, longest, group
        rows, (items, merges, part_rows) = SIZES[-1], self.room(SIZES[-1])
        self.padding = {"tokens": 0, "positions": 0, "new": cache.n_slots, "which": -1}      # of plans: see Plan.padded
        scored, empty = batch * (widest > 0), lambda *shape, dtype=torch.int32: torch.zeros(shape, dtype=dtype, device=cache.k.device)
        self.static = Inputs(*(empty(rows, dtype=torch.int64) for _ in range(3)), empty(batch, longest), empty(batch, layers, groups, widest),
                             empty(scored), Plan(empty(batch, 5), empty(items, 4), empty(merges, 5), part_rows, CHUNK, longest, widest),
                             empty(layers, scored, groups, longest, dtype=torch.float32))
        self.pool = torch.cuda.graph_pool_handle() if cache.k.is_cuda else None
        self.graphs = {}                                    # padded rows -> (graph, what it fills)

    def room(self, rows):
        """The most work items, merges and partial rows that so many rows need: a request has one tile, and another for every LARGE
        packed rows; a tile has an item for every CHUNK positions; and all requests together have no more positions than slots."""
        requests, more, parts = min(rows, self.batch), rows * self.group // LARGE, -(-self.longest // CHUNK)
        items = min((requests + more) * parts, self.n_slots // CHUNK + requests + more * parts)
        return items, (requests + more) * (parts > 1), min(items * LARGE, rows * self.group * parts) * (parts > 1)

    def view(self, rows):
        """The static inputs as a forward of so many rows has them."""
        x, (items, merges, part_rows) = self.static, self.room(rows)
        plan = replace(x.plan, items=x.plan.items[:items], merges=x.plan.merges[:merges], n_part_rows=part_rows)
        return replace(x, tokens=x.tokens[:rows], positions=x.positions[:rows], new=x.new[:rows], which=x.which[:rows], plan=plan)

    def fill(self, static, x):
        """Copy x into the static inputs, each tensor into the corner that it takes up."""
        plan = x.plan.padded(len(static.plan.items), len(static.plan.merges), static.plan.n_part_rows)      # complains if room is wrong
        pairs = [(name, getattr(static, name), getattr(x, name)) for name in ("tokens", "positions", "new", "slots", "selected", "which")]
        pairs += [(name, getattr(static.plan, name), getattr(plan, name)) for name in ("requests", "items", "merges")]
        for name, held, new in pairs:
            if name in self.padding:
                held[len(new):] = self.padding[name]
            held[tuple(map(slice, new.shape))] = new

    def __call__(self, x):
        """(what function(x) returns, the scores, seconds spent on a capture). The scores stay until the next call."""
        n, started = len(x.tokens), time.perf_counter()
        rows = next((size for size in SIZES if size >= n), None)
        if rows is None:
            return self.function(replace(x, scores=self.static.scores)), self.static.scores, 0.0
        static = self.view(rows)
        self.fill(static, x)
        if new := rows not in self.graphs:
            self.graphs[rows] = capture(lambda: self.function(static), self.pool)
        spent = (time.perf_counter() - started) * new
        graph, out = self.graphs[rows]
        graph.replay()
        return [y[:n].clone() for y in out], static.scores, spent
