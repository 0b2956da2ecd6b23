"""The terms of SpecGen's cost model, timed on this machine."""
import math
import time

import torch

from minispec.core.attention import FullKeys, packed_attend
from minispec.core.kv_cache import KVCache
from minispec.specgen import DraftPool, PillarKeys, budget, look_ahead


@torch.inference_mode()
def measure_costs(model, context, batch, k, sparsity, min_budget, repeats=5):
    """The arguments of specgen.predicted_speedup by name, measured (medians) on a batch of requests that have
    `context` tokens.

    Under an attention share of about a third drafting sparsely cannot win. The rest of a step is timed
    without any attention: what a call for every request costs, however short its context, is attention, which
    draft rows share and which more rows do not repeat. Everything short is timed behind a step that reads all
    keys, as it happens in serving: nothing is left in the processor's caches.
    """
    bench = _Bench(model, context, batch, k, sparsity, min_budget)
    times = {}
    for _ in range(repeats):
        for name, seconds in bench.once().items():
            times.setdefault(name, []).append(seconds)
    t = {name: sorted(some)[repeats // 2] for name, some in times.items()}
    attention = max(t["step"] - t["rest"], 1e-9)
    return {"attention_share": attention / (t["rest"] + attention),
            "growth": t["mixed rest"] / t["rest"],
            "draft_cost": max(t["draft"] - t["rest"], 0) / attention,
            "verify_cost": max((t["verify"] - t["verify rest"]) / attention, 1.0),
            "select_cost": max(t["select"], 0) / attention}


class _Bench:
    """Single steps of a batch on a cache of its own, to be timed."""

    def __init__(self, model, context, batch, k, sparsity, min_budget):
        c = model.config
        self.model = model
        self.context = context
        self.batch = batch
        self.k = k
        self.room = context + k + 1
        self.top = budget(context, sparsity, min_budget) - 1
        self.cache = KVCache(c, batch * self.room, model.dtype, model.device)
        self.pool = DraftPool(self.cache, k)
        self.scores = torch.rand(batch, c.n_layer, c.n_kv_head, context, device=model.device)

    def once(self):
        """Seconds by name."""
        mixed = math.ceil(self.batch * (2 * self.k + 1) / (self.k + 1))
        t = {"step": self._full(1), "rest": self._rest(self.batch), "mixed rest": self._rest(mixed),
             "verify": self._full(self.k + 1), "verify rest": self._rest(self.batch * (self.k + 1))}
        t["select"], t["draft"] = self._drafting()
        return t

    def _forward(self, rows, make_attend):
        """One pass over `rows` rows. make_attend is timed too, because lists are gathered there."""
        tokens = torch.zeros(rows, dtype=torch.long, device=self.model.device)
        positions = torch.full_like(tokens, self.context)
        started = time.perf_counter()
        self.model.logits(self.model(tokens, positions, make_attend()))
        return self._since(started)

    def _since(self, started):
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def _full(self, rows):
        """`rows` rows a request, which read all keys."""
        keys = [FullKeys(self.cache, i * self.room, self.context, rows, record=rows > 1)
                for i in range(self.batch)]
        segments = [(i * rows, i * rows + rows, one) for i, one in enumerate(keys)]
        return self._forward(self.batch * rows, lambda: packed_attend(segments))

    def _rest(self, rows):
        """Everything of a forward but attention."""
        self._full(1)
        return self._forward(rows, lambda: lambda layer, q, k, v: q)

    def _drafting(self):
        """(choosing and gathering for a round, a draft step). The first draft step of a round is the one
        that gathers."""
        started = time.perf_counter()
        chosen = [look_ahead(s, None).topk(self.top, dim=-1, sorted=False).indices for s in self.scores]
        choosing = self._since(started)
        keys = [PillarKeys(self.pool, i * self.room, self.context, one, 1) for i, one in enumerate(chosen)]
        first = self._forward(self.batch, lambda: self.pool.attend(keys))
        self._full(1)
        later = self._forward(self.batch, lambda: self.pool.attend(keys))
        for one in keys:
            self.pool.give_back(one)
        return choosing + first - later, later
