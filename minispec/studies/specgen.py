"""What bench.py measures of SpecGen: accepted drafts on long texts, throughput, the parts of the system.
Studies as in run.py. What is read: see texts.py."""
import math
import random
import statistics
import time
from functools import partial
from itertools import product

import torch

from minispec.core.admission import Admission
from minispec.core.attention import FullKeys, packed_attend
from minispec.core.kv_cache import KVCache, whole_blocks
from minispec.core.requests import Request
from minispec.core.verify import Sampling
from minispec.data import tasks
from minispec.specgen import (SCHEDULES, DraftPool, PillarKeys, budget, look_ahead, pillar_scores,
                              predicted_speedup)
from minispec.studies import results, texts
from minispec.studies.replay import TEMPERATURES, Replay, Text, read, replay
from minispec.studies.results import dtype_name
from minispec.studies.timing import engine_of, identical, race, ratio
from minispec.tools import methods
from minispec.tools.answers import requests_of, schedule_view

K, SPARSITY = 8, 0.05
CONTEXTS = (1000, 2000, 4000, 7000)
AFTER = 80                              # tokens behind a context in which rounds are replayed
TEXTS = 3                               # of each kind
SELECTIONS = ("oracle", "pillar", "ahead", "window")
# One setting varies at a time, at this context.
VARIED_AT = 4000
VARIED = [("pillar", k, SPARSITY) for k in (4, 16)] + [("pillar", K, s) for s in (0.01, 0.02, 0.1)]
DISTINCT = 2                            # texts of a larger batch, because reading takes longer than decoding
NEW = 160                               # tokens of an answer where throughput is measured
REPEATS = 5                             # of the timings that a prediction is made of
PAPER = "specgen --lookup 0"
# Tokens of a context, requests, and from which kind of text on they are.
SERVING = ((1000, 1, 0), (4000, 1, 0), (7000, 1, 0), (7000, 1, 1), (1000, 8, 0), (4000, 8, 0), (7000, 8, 0),
           (4000, 16, 0))
THOUGHTS = (1500, 4000)                 # tokens of chains of thought, the shortest and the longest
MORE = 128                              # tokens that the model adds to each


# -- acceptance ------------------------------------------------------------------------------------

def acceptance(args, model, tokenizer):
    """What SpecGen gets accepted along long texts, by kind of text, context, selection, k and budget."""
    contexts = CONTEXTS[:1] if args.quick else CONTEXTS

    def along(kind, number):
        """Of one text by context: how repetitive it is, and [[select, k, sparsity, mean accepted at each of
        TEMPERATURES]]."""
        ids = texts.text(kind, number, contexts[-1] + AFTER, model, tokenizer, args.data)
        text = Text(model, ids)
        out = {}
        for context in text.contexts(contexts, AFTER):
            settings = [*product(SELECTIONS, (K,), (SPARSITY,))] + VARIED * (context == VARIED_AT)
            replays = [Replay(text, context, *setting) for setting in settings]
            replay(text, replays, context + AFTER)
            rows = [[*setting, [statistics.mean(x) for x in zip(*r.accepted)]]
                    for setting, r in zip(settings, replays)]
            repeated = texts.repeated(ids[:context + AFTER], AFTER)
            out[str(context)] = {"repeated": repeated, "rows": rows}
        return out

    kinds = texts.kinds(tokenizer)
    cells = [(kind, i) for i in range(1 if args.quick else TEXTS) for kind in kinds]
    found = results.each_kept("acceptance", args, model, cells, along)
    by_kind = {kind: [text for cell, text in zip(cells, found) if cell[0] == kind] for kind in kinds}
    return {"k": K, "sparsity": SPARSITY, "temperatures": TEMPERATURES, "kinds": by_kind}


# -- serving ---------------------------------------------------------------------------------------

def serving(args, model, tokenizer):
    """Several requests with long contexts: decoded tokens/s of SpecGen, of prompt lookup and of the
    autoregressive loop, greedy and sampled, and what the cost model predicts of the paper's SpecGen from
    timings of single steps."""
    measure = partial(serving_rows, args, model, tokenizer)
    cells = [(1000, 2, 0)] if args.quick else SERVING
    rows = results.each_kept("serving", args, model, cells, measure)
    return {"rows": sum(rows, [])}


def serving_rows(args, model, tokenizer, context, batch, first):
    """The rows of one context and batch, of texts from kind number `first` on."""
    repeats = 2 if batch == 1 else 1
    kinds = texts.kinds(tokenizer)
    numbers = [divmod(first + i, len(kinds)) for i in range(min(batch, DISTINCT))]
    ids = [texts.text(kinds[kind], i, context, model, tokenizer, args.data) for i, kind in numbers]
    names = ", ".join(dict.fromkeys(kinds[kind] for _, kind in numbers))
    kept = read_once(model, ids)
    ids = (ids * batch)[:batch]
    costs = {}
    if model.device.type == "cpu":
        costs = measure_costs(model, context, batch, K, args.sparsity, args.min_budget)
    rows = []
    for temperature in (0.0, TEMPERATURES[0]):
        cells = warm_cells(model, args, kept, ids, temperature)
        runs = race(cells, repeats, f"{batch} requests at {context}", see=seen)
        for method, timed in runs.items():
            row = {"context": context, "requests": batch, "texts": names, "method": method,
                   "temperature": temperature, "dtype": dtype_name(model), **ratio(timed, runs["ar"])}
            # Sampled answers are of the same distribution, of other tokens.
            if method != "ar" and not temperature:
                row["identical"] = identical(runs["ar"][-1], timed[-1])
            if method == PAPER:
                row |= against_prediction(row, timed[-1], runs["ar"][-1], costs)
            rows.append(row)
    return rows


def seen(engine):
    """Medians over the iterations without prompts: seconds of one, and what of it is neither drafting nor
    verifying."""
    spent = [i["seconds"] for i in engine.iterations if not i["prefill"]]
    whole = statistics.median(sum(s.values()) for s in spent)
    return whole, statistics.median(s["sample"] + s["overhead"] for s in spent)


def read_once(model, prompts):
    """{prompt: its keys and values (2, L, G, n, D)} of prompts (ids), for `Resumed`."""
    kept = {}
    for ids in prompts:
        cache = KVCache(model.config, len(ids), model.dtype, model.device)
        read(model, torch.tensor(ids, device=model.device), cache, cache.open(len(ids)), 0, len(ids))
        kept[tuple(ids)] = cache.kv
    return kept


class Resumed(Admission):
    """Requests enter with what was `kept` of their prompts, so that no run reads them again, but for the last
    rows, which are recorded."""
    kept = {}                            # {prompt: its keys and values}

    def _enter(self, r):
        entered = super()._enter(r)
        old = self.kept.get(tuple(r.tokens))
        if entered and old is not None:
            started = time.perf_counter()
            r.n_cached = len(r.tokens) - K - 1
            slots = self.engine.cache.slots_of(r.blocks, range(r.n_cached))
            self.engine.cache.kv[:, :, :, slots] = old[:, :, :, :r.n_cached]
            self.engine.charge(r, "prefill", time.perf_counter() - started)
        return entered


def resumed(way, model, args, batch, kept, **changes):
    """An engine whose requests enter with what was kept of their prompts."""
    engine = engine_of(way, model, args, batch, **changes)
    engine.admission = Resumed(engine, engine.admission.policy)
    engine.admission.kept = kept
    return engine


def warm_cells(model, args, kept, prompts, temperature):
    """{method: build} for `race`: plain decoding, SpecGen, where it copies also the paper's, which does not,
    and prompt lookup alone, behind prompts (ids) that were read once."""
    def build(way):
        requests = [Request(ids, NEW, Sampling(temperature, seed=i)) for i, ids in enumerate(prompts)]
        return resumed(way, model, args, len(prompts), kept, lookup=None), requests

    ways = ["ar", "ngram", PAPER] + ["specgen"] * (methods.LOOKUP >= len(prompts))
    return {way: partial(build, way) for way in ways}


def against_prediction(row, run, plain, costs):
    """What SpecGen did next to plain decoding, and what the cost model says that it should do. The model's
    terms are timed step by step without CUDA graphs, so on a GPU there is no prediction."""
    accepted = statistics.mean(s.accepted for g in run.generations for s in g.steps if s.proposed == K)
    if not costs:
        return {"accepted": accepted}
    (_, host), (step, plain_host) = run.seen, plain.seen
    costs = {**costs, "host_cost": max(host - plain_host, 0.0) / step}
    rounds = NEW / (accepted + 1)
    predicted = predicted_speedup(K, accepted, **costs, rounds=rounds, batch=row["requests"])
    return {"accepted": accepted, **costs, "predicted": predicted}


# -- the terms of SpecGen's cost model, timed on a CPU ------------------------------------------------

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
    cache = KVCache(c, batch * whole_blocks(room), model.dtype, model.device)
    places = [cache.open(room) for _ in range(batch)]
    pool = DraftPool(cache, k)
    scores = torch.rand(batch, c.n_layer, c.n_kv_head, context)

    def forward(rows, make_attend):
        """One pass over `rows` rows. make_attend is timed too, because lists are gathered there."""
        tokens = torch.zeros(rows, dtype=torch.long)
        positions = torch.full_like(tokens, context)
        started = time.perf_counter()
        model.logits(model(tokens, positions, make_attend()))
        return time.perf_counter() - started

    def full(rows):
        """`rows` rows a request, which read all keys."""
        keys = [FullKeys(cache, blocks, context, rows, record=pillar_scores if rows > 1 else None) for blocks in places]
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
        choosing = time.perf_counter() - started
        keys = [PillarKeys(pool, blocks, context, one, 1) for blocks, one in zip(places, chosen)]
        segments = [(i, i + 1, one) for i, one in enumerate(keys)]
        first = forward(batch, lambda: packed_attend(segments))
        full(1)
        t["draft"] = forward(batch, lambda: packed_attend(segments))
        t["select"] = choosing + first - t["draft"]
        for one in keys:
            pool.give_back(one)
        yield t


# -- the system ------------------------------------------------------------------------------------

STAGES = {
    "autoregressive, reserve": "ar",
    "naive self-speculation": PAPER + " --schedule lockstep",
    "+ unified schedule": PAPER,
    "+ cache manager (offload)": PAPER + " --admission offload",
    "+ delayed verification": PAPER + " --admission offload --delayed",
}


def scheduler(args, model, tokenizer):
    """The parts of SpecGen's system, one after the other: on n chains of `size` lines, in a cache of a
    quarter of what all of them may ask for, which is half of what they take; of a real model on chains of
    thought that it goes on with. And how even the forwards of 40 requests are in steady state."""
    n = 8
    size, repeats = (8, 1) if args.quick else (50, 2)
    if tokenizer.ours:
        problems = [tasks.make("trace", 700 + i, "heldout", size) for i in range(n)]
        kept, requests = {}, partial(requests_of, problems, tokenizer, model)
        slots = sum(r.longest for r in requests()) // 4
    else:
        kept, requests, slots = thoughts(args, model, tokenizer, n)

    def build(way):
        return resumed(way, model, args, n, kept, cache_tokens=slots), requests()

    cells = {stage: partial(build, way) for stage, way in STAGES.items()}
    runs = race(cells, repeats, "scheduler", warm_up=False, see=schedule_view)
    plain, *_ = runs.values()
    rows = [{"stage": stage, "prompts": n, **ratio(timed, plain), **timed[-1].seen,
             "identical": identical(plain[-1], timed[-1])} for stage, timed in runs.items()]
    stages = {"cache_tokens": slots, "rows": rows}
    if tokenizer.ours:                                           # rows are rows, whose model it is
        stages["evenness"] = evenness(args, model, tokenizer, 8 if args.quick else 40)
    return stages


def thoughts(args, model, tokenizer, n):
    """n chains of thought that have come to different lengths: (what is kept of them, a function that makes
    the requests, slots of a cache of half of what they take)."""
    shortest, longest = (tokens // (10 if args.quick else 1) for tokens in THOUGHTS)
    lengths = [shortest + i * (longest - shortest) // (n - 1) for i in range(n)]
    random.Random(0).shuffle(lengths)
    prompts = [texts.text("reasoning", i, length, model, tokenizer, args.data)
               for i, length in enumerate(lengths)]

    def requests():
        some = [Request(ids, MORE) for ids in prompts]
        for r in some:
            r.longest = longest + MORE                           # none knows that it is about to end
        return some

    return read_once(model, prompts), requests, sum(length + MORE for length in lengths) // 2


def evenness(args, model, tokenizer, batch):
    """Rows of every forward in steady state, by schedule."""
    problems = [tasks.make("trace", i, "heldout", 12) for i in range(batch)]
    even = {}
    for schedule in SCHEDULES:
        engine = engine_of(f"{PAPER} --schedule {schedule}", model, args, batch)
        engine.generate(requests_of(problems, tokenizer, model, 120))
        full = [i for i in engine.iterations if i["active"] == batch and not i["prefill"]]
        # Without the first and the last round.
        even[schedule] = [i["draft"] + i["verify"] for i in full][9:-9]
    return even
