"""SpecGen on long texts.

    serving      tokens/s and accepted drafts of requests with long contexts
    scheduler    the parts of the system, added one after the other

The puzzle model continues chains of its family `trace`. A real model continues the story in minispec/data, at
contexts up to 4,000 tokens, or, with a data folder, chains of thought, which are longer.
"""
import random
import statistics
import time
from functools import partial

from minispec.core.engine import Engine
from minispec.core.requests import Request
from minispec.core.scheduler import SyncScheduler
from minispec.core.verify import Sampling
from minispec.data import loops, prompts, tasks
from minispec.studies import measure, results
from minispec.studies.results import SAME, engine_of, identical, speedups, suitable, time_interleaved
from minispec.tools.answers import schedule_view
from minispec.tools.files import naming, read_rows
from minispec.tools.markdown import table

K = 8
TEMPERATURE = 0.65                      # the paper's; greedy long answers repeat themselves
PILLAR = "specgen --select pillar"      # the paper's form
WINDOW = "specgen --select window"      # as in MagicDec
NEW = 160                               # tokens of an answer
THOUGHTS = "reasoning_gym_traces/traces_correct.jsonl"
SHIFT = 50                              # tokens between the starts of two texts of the story


# -- texts -----------------------------------------------------------------------------------------

def text(number, length, tokenizer, data):
    """`length` ids of text `number`; ValueError if it is shorter."""
    if tokenizer.is_puzzle_model:
        problem = tasks.make("trace", number, "heldout", tasks.lines_for(length))
        ids = tokenizer.prompt_ids(problem.prompt) + tokenizer.encode(problem.think)
    elif data:
        file = f"{data}/{THOUGHTS}"
        with naming(file):
            # One answer per question: the answers of several models are too similar. Training reads the
            # questions that are not held out.
            solved = list({row["question"]: row["response"] for _, row in read_rows(file)
                           if tasks.is_heldout(row["question"])}.items())
        random.Random(number).shuffle(solved)
        written = "\n\n".join(map("\n".join, solved))
        ids = tokenizer.encode(written[:8 * length])
    else:
        ids = tokenizer.encode(prompts.story())[number * SHIFT:]
    if len(ids) < length:
        raise ValueError(f"text {number} has {len(ids)} tokens; {length} are needed")
    return ids[:length]


# -- prompts, read once ----------------------------------------------------------------------------

def read(model, prompts):
    """{prompt: its keys and values (2, L, G, n, D)} for prompts (lists of ids), for `resumed`."""
    kept = {}
    for ids in prompts:
        engine, request = Engine(model, SyncScheduler, 1), Request(ids, 1)
        for _ in engine.stream([request]):
            slots = engine.cache.slots_of(request.blocks, range(len(ids)))
            kept[tuple(ids)] = engine.cache.kv[:, :, :, slots]
    return kept


def resumed(name, model, args, batch, kept, **changes):
    """An engine whose requests enter with the kept keys and values of their prompts, so no run reads a prompt
    again, except for its last k + 1 rows, whose scores are recorded."""
    engine = engine_of(name, model, args, batch, k=None, **changes)      # K drafts of SpecGen
    enter = engine.admission._enter

    def resume(r):
        entered = enter(r)
        old = kept.get(tuple(r.tokens))
        if entered and old is not None:
            started = time.perf_counter()
            r.n_cached = len(r.tokens) - K - 1
            slots = engine.cache.slots_of(r.blocks, range(r.n_cached))
            engine.cache.kv[:, :, :, slots] = old[:, :, :, :r.n_cached]
            engine.charge(r, "prefill", time.perf_counter() - started)
        return entered

    engine.admission._enter = resume
    return engine


# -- serving ---------------------------------------------------------------------------------------

DISTINCT = 4                            # texts of a larger batch
# Tokens of the context, number of requests, number of the first text, temperature.
CELLS = (
    (7000, 8, 0, TEMPERATURE),
    (7000, 1, 0, TEMPERATURE),
    (4000, 8, 0, TEMPERATURE),
    (7000, 1, 0, 0.0),
    (1000, 8, 0, TEMPERATURE),
    (4000, 1, 1, TEMPERATURE),
    (1000, 1, 2, TEMPERATURE),
    (4000, 8, 0, 0.0),
    (1000, 16, 0, TEMPERATURE),
)
SERVING = {
    "requests x context": "{requests} x {context}",
    "T": "{temperature:g}",
    "first text": "{text}",
    "method": "{method}",
    "tokens/s": "{tokens_per_second:.1f}",
    "speed-up (range)": "{speedup:.2f} ({speedup_range[0]:.2f}-{speedup_range[1]:.2f})",
    "accepted of 8": "{accepted:.2f}",
    "attention share": "{attention_share:.0%}",
    "predicted": "{predicted:.2f}",
    "identical to ar": "{identical:d} of {requests}",
}


def serving(args, model, tokenizer):
    """Several requests with long contexts: tokens/s of decoding with the plain loop, prompt lookup, EAGLE,
    window attention and SpecGen. Greedy answers end where they begin to repeat themselves. "predicted" is
    SpecGen's speed-up computed from three timings without its schedule: a plain step, its attention and a
    verification."""
    longest = 7000 if tokenizer.is_puzzle_model or args.data else 4000                    # of the texts
    longest = min(longest, model.config.block_size - NEW)
    cells = [(1000, 2, 0, TEMPERATURE)] if args.quick else CELLS
    cells = [cell for cell in cells if cell[0] <= longest]
    if not cells:
        raise results.LeftOut(f"serving needs a context of {1000 + NEW} tokens")
    fitting = suitable(args, model, (WINDOW, PILLAR))
    names = ["ar", *(name for name in ("ngram", "eagle", WINDOW, PILLAR, "specgen") if name in fitting)]
    measured = partial(serving_rows, args, model, tokenizer, names)
    rows = sum(results.each_kept("serving", args, model, cells, measured, methods=names), [])
    # The short table: sampled answers at the longest context.
    longest = max(x["context"] for x in rows)
    short = [x for x in rows if x["temperature"] and x["context"] == longest
             and x["method"] not in ("ar", WINDOW)]
    columns = {head: form for head, form in SERVING.items() if head not in ("T", "first text")}
    return {"rows": rows, "table": table(rows, SERVING), "short": table(short, columns)}


def serving_rows(args, model, tokenizer, names, context, batch, first, temperature):
    """The result rows of one cell, for the methods `names`, on texts from number `first` on."""
    some = [text(first + i, context, tokenizer, args.data) for i in range(min(batch, DISTINCT))]
    kept, asked = read(model, some), (some * batch)[:batch]
    step, attention = measure.forward_seconds(model, [context] * batch, 1)
    verification, _ = measure.forward_seconds(model, [context] * batch, K + 1)
    draft = step - (1 - args.sparsity) * attention       # a draft step reads a part of the cache
    about = {"context": context, "requests": batch, "text": first, "temperature": temperature}

    def requests(longest):
        return [Request(ids, new, Sampling(temperature, seed=i))
                for i, (ids, new) in enumerate(zip(asked, longest))]

    plain = loops.generate(resumed("ar", model, args, batch, kept), requests([NEW] * batch))
    longest = [len(g.token_ids) for g in plain]

    def build(name):
        if name != "eagle":
            return resumed(name, model, args, batch, kept), requests(longest)
        # EAGLE's drafter needs the hidden states of the whole prompt. All prompts are read before any request
        # decodes, so that no decoded row hides in a forward that reads.
        engine = engine_of(name, model, args, batch)
        schedule = engine.scheduler.schedule
        engine.scheduler.schedule = lambda read: schedule(read) if len(read) == len(engine.active) else []
        return engine, requests(longest)

    # A batch needs no warm-up, because reading the texts was one.
    repeats = 2 if batch == 1 else 1
    runs = time_interleaved(names, build, repeats, f"{batch} requests at {context}", batch == 1)
    rows = []
    for name, timed in runs.items():
        row = {**about, "method": name, **speedups(timed, runs["ar"])}
        if name != "ar":
            row["identical"] = identical(runs["ar"][-1], timed[-1])
        if name in (PILLAR, "specgen"):
            rounds = [s for g in timed[-1].generations for s in g.rounds if s.proposed == K]
            accepted = statistics.mean(s.accepted for s in rounds)
            row |= {"accepted": accepted, "attention_share": attention / step,
                    "predicted": (accepted + 1) * step / (K * draft + verification)}
        rows.append(row)
    return rows


# -- the system ------------------------------------------------------------------------------------

REQUESTS = 8
LENGTHS = (1500, 4000)                  # tokens of the shortest and the longest text
MORE = 128                              # tokens of each answer
STAGES = {
    "autoregressive, reserve": "ar",
    "naive self-speculation": "specgen --schedule lockstep",
    "+ unified schedule": "specgen",
    "+ cache manager (offload)": "specgen --admission offload",
    "+ delayed verification": "specgen --admission offload --delayed",
}
SCHEDULER = {
    "stage": "{stage}",
    "tokens/s": "{tokens_per_second:.0f}",
    "speed-up (range)": "{speedup:.2f} ({speedup_range[0]:.2f}-{speedup_range[1]:.2f})",
    "requests at once": "{active_mean:.1f}",
    "forwards": "{iterations}",
    "tokens offloaded": "{offloaded}",
    "identical to ar": SAME,
}


def scheduler(args, model, tokenizer):
    """The parts of SpecGen's system, added one after the other, for requests that continue texts of different
    lengths, with a cache of half the slots that they need. The length of an answer is not known in advance,
    so `reserve` keeps room for the longest request for each of them."""
    shortest, longest = (tokens // (10 if args.quick else 1) for tokens in LENGTHS)
    longest = min(longest, model.config.block_size - MORE)
    shortest = min(shortest, longest)
    lengths = [shortest + i * (longest - shortest) // (REQUESTS - 1) for i in range(REQUESTS)]
    random.Random(0).shuffle(lengths)
    ids = [text(i, length, tokenizer, args.data) for i, length in enumerate(lengths)]
    kept, slots = read(model, ids), sum(length + MORE for length in lengths) // 2

    def build(stage):
        requests = [Request(x, MORE, Sampling(TEMPERATURE, seed=i)) for i, x in enumerate(ids)]
        for r in requests:
            r.longest = longest + MORE
        return resumed(STAGES[stage], model, args, REQUESTS, kept, cache_tokens=slots), requests

    repeats = 1 if args.quick else 2
    runs = time_interleaved(STAGES, build, repeats, "scheduler", warm_up=False, see=schedule_view)
    plain, *_ = runs.values()
    rows = [{"stage": stage, "prompts": REQUESTS, **speedups(timed, plain), **timed[-1].seen,
             "identical": identical(plain[-1], timed[-1])} for stage, timed in runs.items()]
    return {"cache_tokens": slots, "rows": rows, "table": table(rows, SCHEDULER)}
