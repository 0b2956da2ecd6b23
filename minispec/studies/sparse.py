"""The terms of SpecGen's cost model, timed on this machine."""
import math
import statistics
import time

import torch

from minispec.core.attention import FullKeys, packed_attend
from minispec.core.kv_cache import KVCache
from minispec.specgen import DraftPool, PillarKeys, budget, look_ahead

REPEATS = 5


@torch.inference_mode()
def measure_costs(model, context, batch, k, sparsity, min_budget):
    """The arguments of specgen.predicted_speedup by name, measured (medians) on a batch of requests that have
    `context` tokens.

    Under an attention share of about a third drafting sparsely cannot win. The rest of a step is timed
    without any attention: what a call for every request costs, however short its context, is attention, which
    draft rows share and which more rows do not repeat. Everything short is timed behind a step that reads all
    keys, as it happens in serving: nothing is left in the processor's caches.
    """
    samples = list(timed_steps(model, context, batch, k, budget(context, sparsity, min_budget) - 1))
    t = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    attention = max(t["step"] - t["rest"], 1e-9)
    return {"attention_share": attention / (t["rest"] + attention),
            "growth": t["mixed rest"] / t["rest"],
            "draft_cost": max(t["draft"] - t["rest"], 0) / attention,
            "verify_cost": max((t["verify"] - t["verify rest"]) / attention, 1.0),
            "select_cost": max(t["select"], 0) / attention}


def timed_steps(model, context, batch, k, selected):
    """Yields, REPEATS times, the seconds of single steps by name, on a cache of their own. Draft rows see
    `selected` positions."""
    c = model.config
    room = context + k + 1
    cache = KVCache(c, batch * room, model.dtype, model.device)
    pool = DraftPool(cache, k)
    scores = torch.rand(batch, c.n_layer, c.n_kv_head, context, device=model.device)

    def since(started):
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def forward(rows, make_attend):
        """One pass over `rows` rows. make_attend is timed too, because lists are gathered there."""
        tokens = torch.zeros(rows, dtype=torch.long, device=model.device)
        positions = torch.full_like(tokens, context)
        started = time.perf_counter()
        model.logits(model(tokens, positions, make_attend()))
        return since(started)

    def full(rows):
        """`rows` rows a request, which read all keys."""
        keys = [FullKeys(cache, i * room, context, rows, record=rows > 1) for i in range(batch)]
        segments = [(i * rows, i * rows + rows, one) for i, one in enumerate(keys)]
        return forward(batch * rows, lambda: packed_attend(segments))

    def rest(rows):
        """Everything of a forward but attention."""
        full(1)
        return forward(rows, lambda: lambda layer, q, k, v: q)

    for _ in range(REPEATS):
        t = {
            "step": full(1),
            "rest": rest(batch),
            "mixed rest": rest(math.ceil(batch * (2 * k + 1) / (k + 1))),
            "verify": full(k + 1),
            "verify rest": rest(batch * (k + 1)),
        }

        # Choosing for a round, and its draft steps, of which the first one gathers.
        started = time.perf_counter()
        chosen = [look_ahead(s, None).topk(selected, dim=-1, sorted=False).indices for s in scores]
        choosing = since(started)
        keys = [PillarKeys(pool, i * room, context, one, 1) for i, one in enumerate(chosen)]
        first = forward(batch, lambda: pool.attend(keys))
        full(1)
        t["draft"] = forward(batch, lambda: pool.attend(keys))
        t["select"] = choosing + first - t["draft"]
        for one in keys:
            pool.give_back(one)
        yield t
