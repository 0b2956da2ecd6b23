"""A drafter's round as one CUDA graph: all its draft steps are launched at once, and each step reads on the
device the token that the step before it drew (core/drafters.py, ChainDrafter).

`accelerate` gives an engine and its drafters their graphs. From then on a drafter's keys and values lie in
one pool, and `Rows` are what requests.Batch is for torch's operators.
"""
from dataclasses import dataclass, replace

import torch

from minispec.core.drafters import ChainDrafter
from minispec.core.kv_cache import KVCache, whole_blocks

from . import can_run
from .attention import Plan, make_plan
from .graphs import Graphs, Inputs


@dataclass
class Rows(Inputs):
    """The rows of one draft step of all requests, on the kernels; see requests.Batch."""
    later: Plan = None          # the plan of every step after the first
    ahead: tuple = None         # of all these steps: positions, slots of the new rows, tables of requests
    ends_early = False          # a graph takes all steps

    def next_rows(self, number, tokens, sees=None):
        # Slots, lengths and masks, all on the device; those that no draft changes, for all steps at once.
        ahead = self.ahead or self.steps_ahead(tokens.shape[1])
        positions, new, requests = (table[number - 2] for table in ahead)
        plan = replace(self.later, requests=requests)
        if sees is not None:
            back = torch.arange(sees.shape[-1] - 1, -1, -1, device=sees.device)
            plan.sees = ~((~sees).long() << back).sum(-1).flatten()
        return replace(self, tokens=tokens.flatten(), positions=positions, features=None, new=new, plan=plan,
                       ahead=ahead)

    def steps_ahead(self, w):
        """`ahead` for steps of w rows a request. Every step writes its rows after those of the step
        before."""
        ends, (steps, _) = self.per_request["ends"], self.options
        step = torch.arange(steps - 1, device=ends.device)[:, None]                     # (steps, 1)
        at = (ends + step * w)[..., None] + torch.arange(w, device=ends.device)         # (steps, B, w)
        requests = self.later.requests.repeat(len(step), 1, 1)                          # (steps, B, 6)
        requests[:, :, 2] = at[:, :, -1] + 1
        new = self.slots[None].take_along_dim(at, 2).long().flatten(1)                  # (steps, B * w)
        return (ends + step).repeat_interleave(w, 1), new, requests


class Rounds(Graphs):
    """Graphs of a drafter's rounds, for the requests of an engine, of up to `longest` tokens."""
    steps = 0                   # of the longest round so far

    def __init__(self, engine, drafter, longest):
        model = drafter.model
        self.drafter = drafter
        batch = engine.batch_size
        # All slots that a request may need, for as many as are active or paused: the pool must not grow,
        # because graphs know its address.
        size = whole_blocks(longest + drafter.room)
        drafter.cache = KVCache(drafter.config, batch * size, model.dtype, model.device, spare=1)
        # The rows of every later step see one another, until a tree says which (a chain's is alone).
        w = drafter.width
        trees = dict.fromkeys(range(batch), torch.ones(w, w))
        plan = make_plan([(w, size, 0, 0)] * batch, drafter.cache.group, trees=trees)
        self.later = plan.to(model.device)
        super().__init__(engine, self.round, drafter.cache, batch * drafter.segments, size, 0,
                         drafter.n_features)

    def round(self, x):
        return self.drafter.round(Rows(**vars(x), later=self.later))

    def __call__(self, work, per_request, options):
        # As many steps as the longest round so far, so that one graph serves all. Batch slots without a
        # request repeat the first request, to the same result.
        steps, settings = options
        self.steps = max(self.steps, steps)
        absent = self.engine.batch_size - len(per_request["last"])
        per_request = {name: x + x[:1] * absent for name, x in per_request.items()}
        return super().__call__(work, per_request, (self.steps, settings))


def accelerate(engine, longest):
    """Let the target of an engine run in graphs, for requests of up to `longest` tokens, and its drafter, or
    the drafters that it chooses among, where they have a cache and the kernels serve them."""
    drafter = engine.scheduler.drafter
    for some in [drafter, *drafter.drafters.values()]:
        # Its tree has at most `room` rows. (A chain's room is at most MAX_K, which always fits.)
        if isinstance(some, ChainDrafter) and can_run(some.model, some.room):
            some.graphs = Rounds(engine, some, longest)
    # Last: without them all of this is made again, if it was interrupted.
    widest = engine.scheduler.budget(longest)
    engine.graphs = Graphs(engine, engine.run, engine.cache, engine.batch_size, longest, widest,
                           scored=engine.scheduler.record is not None)
