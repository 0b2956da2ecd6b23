"""CUDA graphs of a forward on the kernels: launched once by the host, replayed ever after, one graph for
every mix of phases.

SpecGen / SparseSpec (arXiv 2512.01278). A forward is some ten launches a layer, each a few microseconds of
host work; a small model's step, or a draft row's 5 % of attention, is over before the next one arrives. A
graph replays all of them at once, but it is frozen: addresses, shapes, grids and every number that the host
passed. Requests change phase from forward to forward, so all that changes must lie in memory, in places that
stay. The kernels read a request's rows, length and list from device tables, in which draft rows,
verifications and prompts differ in numbers only, and leave at once where a table says -1. So a forward is its
`Inputs`; `Graphs` copies them into static ones, padded to the next of SIZES, and there is one graph a size:

    rows        pad rows repeat token 0 at position 0. No work item names them, so their attention is whatever
                memory holds, and nobody reads it. Their keys and values go to a spare slot of the cache,
                which no request owns.
    work        items, merges and the list of scored requests end in -1, up to what so many rows can ever need
                (`room`).
    lists       slots, selections and requests keep what an earlier, larger forward left: nothing reads beyond
                the counts.

Outside the graph stay the target's logits, which only some rows want, and everything of the planner's. One
set of buffers is enough, since the host waits for a forward before it prepares the next (the paper alternates
between two). Scores take 1 / (D * e / 2) of a cache of as many tokens.

Of a drafter all steps of a round are one graph: each draws its token on the device, where the next one reads
it (core/drafters.py, Chained).

Not run on a GPU yet: on a CPU `Recorded` stands in for torch.cuda.CUDAGraph, and the tests run all the rest
in Triton's interpreter. What the padded grids and the copies cost beside what the launches save has not been
measured.
"""
import time
from dataclasses import dataclass, field, replace

import torch

from .attention import CHUNK, LARGE, Plan, make_plan

# Rows; a larger forward reads prompts, which take long enough to hide its launches.
SIZES = (1, 2, 4, 8, 16, 32, 64, *range(128, 641, 64))


BY_ROW = "tokens", "positions", "new", "which", "features"


@dataclass
class Inputs:
    """Everything in which two forwards differ, on the device: N rows of B requests, T positions at most, up
    to W of them selected.

    tokens, positions, new (N,): new, the slots for the rows' keys and values. slots (B, T), selected (B, L,
    G, W), plan: see attention.py. which (R,): the requests whose scores are wanted. The forward fills them
    in, in `scores` (L, B, G, T) of Graphs. features (N, F): what else a drafter reads of each row; more: and
    of each request, {name: tensor}. how: what is no tensor; a graph serves one value of it."""
    tokens: torch.Tensor
    positions: torch.Tensor
    new: torch.Tensor
    slots: torch.Tensor
    selected: torch.Tensor
    which: torch.Tensor
    plan: Plan
    scores: torch.Tensor = None
    features: torch.Tensor = None
    more: dict = field(default_factory=dict)
    how: tuple = ()


def slots_of(first, length):
    """The slots (B, length) of requests whose first slots are `first` (B,)."""
    return first.int()[:, None] + torch.arange(length, dtype=torch.int32, device=first.device)


class Recorded:
    """A graph's stand-in where there is no CUDA: replaying calls the function again, which knows the static
    inputs only."""

    def __init__(self, function):
        self.function = function
        self.out = function()

    def replay(self):
        for held, new in zip(self.out, self.function()):
            held.copy_(new)


def capture(function, pool):
    """(graph, the tensors that every replay fills) of a function of fixed tensors. Temporary ones lie in a
    memory pool that all graphs share, because no two run at once."""
    if pool is None:
        graph = Recorded(function)
        return graph, graph.out
    function()                       # compiles kernels and sets libraries up, which a capture forbids
    graph = torch.cuda.CUDAGraph()
    # thread_local: where verification is delayed, another thread judges meanwhile, and waits for the device,
    # which is no fault
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        out = function()
    return graph, out


class Graphs:
    """Runs function(Inputs) -> [tensors of N rows each] on the kernels. It must depend on its inputs and on
    fixed tensors alone, and running it twice must do what running it once does (a capture runs it more than
    once).

    cache: a KVCache with a spare slot, for pad rows; batch requests at most, of `longest` positions at most;
    widest: how many positions a planner selects at most (0: it selects none, and wants no scores); group =
    H / G; features: F of Inputs.features; more: static tensors for Inputs.more; positions: the most that all
    requests together have (default: as many as the cache has slots)."""

    def __init__(self, function, cache, batch, longest, widest, group, features=0, more=None, positions=None):
        layers, groups, _, _ = cache.k.shape
        self.function = function
        self.cache = cache
        self.n_positions = positions or cache.n_slots
        self.batch = batch
        self.longest = longest
        self.group = group
        # Of work items: see Plan.padded.
        self.padding = {"tokens": 0, "positions": 0, "new": cache.n_slots, "which": -1}

        def empty(*shape, dtype=torch.int32):
            return torch.zeros(shape, dtype=dtype, device=cache.k.device)

        rows = SIZES[-1]
        items, merges, part_rows = self.room(rows)
        scored = batch if widest else 0
        tokens, positions, new, sees = empty(4, rows, dtype=torch.int64)
        plan = Plan(empty(batch, 6), sees, empty(items, 4), empty(merges, 5), part_rows, CHUNK, longest,
                    widest)
        selected = empty(batch, layers, groups, widest)
        scores = empty(layers, scored, groups, longest, dtype=torch.float32)
        of_rows = empty(rows, features, dtype=cache.k.dtype)
        self.static = Inputs(tokens, positions, new, empty(batch, longest), selected, empty(scored), plan,
                             scores, of_rows, more or {})
        self.pool = torch.cuda.graph_pool_handle() if cache.k.is_cuda else None
        self.graphs = {}                                 # (padded rows, how) -> (graph, what it fills)

    def room(self, rows):
        """The most work items, merges and partial rows that so many rows need: a request has one tile, and
        another for every LARGE packed rows; a tile has an item for every CHUNK positions; and all requests
        together have no more positions than slots."""
        requests = min(rows, self.batch)
        more = rows * self.group // LARGE
        parts = -(-self.longest // CHUNK)
        items = min((requests + more) * parts, self.n_positions // CHUNK + requests + more * parts)
        if parts == 1:
            return items, 0, 0
        return items, requests + more, min(items * LARGE, rows * self.group * parts)

    def view(self, rows, how):
        """The static inputs as a forward of so many rows has them."""
        x = self.static
        items, merges, part_rows = self.room(rows)
        plan = replace(x.plan, items=x.plan.items[:items], merges=x.plan.merges[:merges],
                       n_part_rows=part_rows)
        cut = {name: getattr(x, name)[:rows] for name in BY_ROW}
        return replace(x, **cut, plan=plan, how=how)

    def fill(self, static, x):
        """Copy x into the static inputs, each tensor into the corner that it takes up."""
        room = len(static.plan.items), len(static.plan.merges), static.plan.n_part_rows
        plan = x.plan.padded(*room)                      # complains if room is wrong
        names = *BY_ROW, "slots", "selected"
        pairs = [(name, getattr(static, name), getattr(x, name)) for name in names]
        names = "requests", "sees", "items", "merges"
        pairs += [(name, getattr(static.plan, name), getattr(plan, name)) for name in names]
        pairs += [(name, static.more[name], x.more[name]) for name in x.more]
        for name, held, new in pairs:
            if not held.numel():
                continue
            if name in self.padding:
                held[len(new):] = self.padding[name]
            held[tuple(map(slice, new.shape))] = new

    def inputs(self, segments, tokens, positions):
        """The Inputs of a packed batch: rows of requests, each with `tokens`, `start` and `keys`
        (requests.Segment or drafters.Rows)."""
        layers, groups, _, _ = self.cache.k.shape
        device = tokens.device
        # Where each row's keys and values go, and where each position of a request lies.
        ends = [s.start + len(s.tokens) for s in segments]
        new = torch.cat([torch.arange(s.start, end) + s.keys.base for s, end in zip(segments, ends)])
        first = torch.tensor([s.keys.base for s in segments], device=device)
        slots = slots_of(first, max(ends)).clamp(max=self.cache.n_slots - 1)

        # Drafting rows read the positions that were selected and a tail of recent ones, all others a tail
        # from position 0 on.
        lists = [s.keys.selected for s in segments]
        widest = max([chosen.shape[-1] for chosen in lists if chosen is not None], default=0)
        selected = torch.zeros(len(segments), layers, groups, widest, dtype=torch.int32, device=device)
        shapes = []                                      # (rows, length, selected positions, tail)
        for i, (s, chosen) in enumerate(zip(segments, lists)):
            n_selected = tail = 0
            if chosen is not None:
                n_selected = chosen.shape[-1]
                tail = s.keys.length - s.keys.recent
                selected[i, :, :, :n_selected] = chosen
            shapes.append((len(s.tokens), ends[i], n_selected, tail))
        trees = {i: s.keys.tail for i, s in enumerate(segments) if getattr(s.keys, "tail", None) is not None}
        plan = make_plan(shapes, self.group, trees=trees).to(device)

        scored = [i for i, s in enumerate(segments) if s.keys.scores is not None]
        which = torch.tensor(scored, dtype=torch.int32, device=device)
        return Inputs(tokens, positions, new.to(device), slots, selected, which, plan)

    def run(self, segments, tokens, positions):
        return self(self.inputs(segments, tokens, positions))

    def __call__(self, x):
        """(what function(x) returns, the scores, seconds spent on a capture). The scores stay until the next
        call."""
        n = len(x.tokens)
        started = time.perf_counter()
        rows = next((size for size in SIZES if size >= n), None)
        if rows is None:
            return self.function(replace(x, scores=self.static.scores)), self.static.scores, 0.0
        static = self.view(rows, x.how)
        self.fill(static, x)
        spent = 0.0
        if (rows, x.how) not in self.graphs:
            self.graphs[rows, x.how] = capture(lambda: self.function(static), self.pool)
            spent = time.perf_counter() - started
        graph, out = self.graphs[rows, x.how]
        graph.replay()
        return [y[:n].clone() for y in out], static.scores, spent
