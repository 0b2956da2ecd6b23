"""What bench.py measures of diffusion models: steps against accuracy, latency and throughput.

All decoders answer the same held-out problems, which fit the answer slots. A step is a forward in which a
request took part, whatever the batch; the decoder counts it. """
import random
import statistics
from functools import partial

import torch
from tqdm import tqdm

from minispec import cdlm
from minispec.core.requests import Request
from minispec.data import tasks
from minispec.tools import checkpoints, methods
from minispec.tools.answers import verdict

LONGEST_PROMPT = 160            # tokens
FIRST = 3000                    # seed of the first held-out problem used here
BF16 = torch.bfloat16           # accuracy is measured in it, in half the time; latency in the target's dtype
STRICT = 0.999                  # at this threshold the shipped student is as good as its teacher
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99, STRICT)


def load(args, target, tokenizer, dtype=None):
    """{name: build}, where build(batch_size=n, **settings) makes a new engine or decoder: of the target,
    "ar"; of the shipped teacher, also as "dual" with stale keys; of the shipped student. All in another dtype
    than the target's if one is given."""
    if dtype is not None:
        target = checkpoints.load(args.model, target.device, dtype)
    mask_id = cdlm.mask_id_of(tokenizer, cdlm.METHODS["cdlm"][1])

    def of(folder, *kinds):
        model = checkpoints.load(folder, target.device, target.dtype)
        return [partial(cdlm.Decoder, model, mask_id, kind) for kind in kinds]

    models = {"ar": partial(methods.make_engine, "ar", target, methods.settings())}
    models["teacher"], models["dual"] = of(cdlm.METHODS["dlm"][1], "teacher", "dual")
    [models["student"]] = of(cdlm.METHODS["cdlm"][1], "student")
    return models


# -- problems ------------------------------------------------------------------------------------------------

def fitting(tokenizer, family, seed, split="train"):
    """A problem whose solution fits the answer slots: (problem, prompt ids, answer ids (L,), filled up with
    ends of text). Sizes are drawn from the trained range and from 3 on, smaller and smaller until one fits.
    ValueError where none does."""
    rng = random.Random(f"{family}/{split}/{seed}/fitting")
    low, high = tasks.SIZES[family]
    low = min(low, 3)
    for _ in range(100):
        size = rng.randint(low, high)
        problem = tasks.make(family, rng.randrange(1 << 40), split, size)
        prompt = tokenizer.prompt_ids(problem.prompt)
        answer = tokenizer.response_ids(problem.think, problem.answer)
        if len(prompt) <= LONGEST_PROMPT and len(answer) <= cdlm.GEN_LENGTH:
            return problem, prompt, answer + [answer[-1]] * (cdlm.GEN_LENGTH - len(answer))
        high = max(size - 1, low)
    raise ValueError(f"no problem of '{family}' fits a prompt of {LONGEST_PROMPT} and an answer of "
                     f"{cdlm.GEN_LENGTH} tokens")


def held_out(tokenizer, n):
    """n problems a family that fit: [(problem, prompt ids)]."""
    cells = [(family, FIRST + i) for i in range(n) for family in tasks.FAMILIES]
    return [fitting(tokenizer, family, seed, "heldout")[:2] for family, seed in cells]


def requests_of(problems, model):
    return [Request(ids, cdlm.GEN_LENGTH, stop_ids=[model.config.eos_id]) for _, ids in problems]


def solved(problems, generations, tokenizer):
    """[True or False] for each."""
    return [verdict(p, g, tokenizer) for (p, _), g in zip(problems, generations)]


def same_share(answers, reference):
    """Share of answers that are equal to the reference's."""
    return statistics.mean(a == b for a, b in zip(answers, reference))


def answer(decoder, problems, tokenizer, reference=None):
    """Decode and judge: {"problems", "solved", "by_family", "steps", "tokens", "same": share of answers equal
    to `reference`}, and the answers."""
    generations = decoder.generate(requests_of(problems, decoder.model))
    right = solved(problems, generations, tokenizer)
    by_family = {}
    for family in tasks.FAMILIES:
        by_family[family] = statistics.mean(r for r, (p, _) in zip(right, problems) if p.family == family)
    answers = [g.token_ids for g in generations]
    return {"problems": len(problems), "solved": statistics.mean(right), "by_family": by_family,
            "steps": statistics.mean(len(g.steps) for g in generations),
            "tokens": statistics.mean(len(ids) for ids in answers),
            "same": same_share(answers, reference) if reference else None}, answers


# -- studies -------------------------------------------------------------------------------------------------

def cdlm_accuracy(args, model, tokenizer, each):
    """Held-out problems solved by the target, the teacher at a token a step, and the student at the default
    threshold, a stricter one and the paper's: 200 a family. The first 40 of them also as the papers decode,
    most confident slot first. each(cells, measure) -> [measure(*cell)]."""
    models = load(args, model, tokenizer, BF16)
    problems = held_out(tokenizer, 4 if args.quick else 200)
    few = problems[:(2 if args.quick else 40) * len(tasks.FAMILIES)]

    def measure(name, settings):
        some = few if "order" in settings else problems
        row, answers = answer(models[name](batch_size=16, **settings), some, tokenizer)
        return {"decoder": name, **settings, **row}, answers

    cells = [("ar", {}), ("teacher", {})]
    cells += [("student", {"threshold": t}) for t in (cdlm.THRESHOLD, STRICT, 0.9)]
    cells += [("teacher", {"order": "surest"}), ("student", {"threshold": cdlm.THRESHOLD, "order": "surest"})]
    measured = each(cells, measure)
    rows = [row for row, _ in measured]
    reference = measured[1][1]                           # the teacher's answers
    for row, answers in measured[2:]:
        row["same"] = same_share(answers, reference)
    return {"rows": rows}


def cdlm_curves(args, model, tokenizer):
    """Accuracy against steps: the teacher cut to fewer steps a block, the teacher, its dual cache and the
    student with a threshold."""
    models = load(args, model, tokenizer, BF16)
    problems = held_out(tokenizer, 2 if args.quick else 10)
    cells = [("teacher", {"steps": s, "order": "surest"}) for s in (32, 16, 8, 6, 4, 3)]
    cells += [(name, {"threshold": t}) for name in ("teacher", "dual") for t in THRESHOLDS]
    cells += [("student", {"threshold": t, "order": "surest"}) for t in THRESHOLDS]
    cells += [("student", {"threshold": t}) for t in (*THRESHOLDS, 1.0)]
    if args.quick:
        cells = cells[::4]
    rows, reference = [], None
    for name, settings in tqdm(cells, desc="curves"):
        row, answers = answer(models[name](batch_size=16, **settings), problems, tokenizer, reference)
        reference = reference or answers                 # the teacher's at a token a step
        rows.append({"decoder": name, "steps_a_block": settings.get("steps"),
                     "threshold": settings.get("threshold"), "order": settings.get("order"), **row})
    return {"rows": rows}


def intensity(config, n_params, rows, context, batch, width=4):
    """Floating-point operations per byte read, of one forward with so many rows a request: weights are read
    once, keys and values of the context once a request."""
    kv = 2 * config.n_layer * config.n_kv_head * config.head_dim
    attention = 4 * context * config.n_head * config.head_dim * config.n_layer
    return batch * rows * (2 * n_params + attention) / (width * (n_params + batch * context * kv))


def cdlm_speed(args, model, tokenizer):
    """Seconds per problem and tokens/s by batch, in one process, in turn, against the naive teacher of the
    same batch."""
    models = load(args, model, tokenizer)
    rows = []
    student, strict = {"threshold": cdlm.THRESHOLD}, {"threshold": STRICT}
    cells = {"ar": ("ar", {}), "teacher": ("teacher", {}), "teacher, threshold": ("teacher", student),
             "teacher, dual cache": ("dual", student), "student": ("student", student),
             f"student, threshold {STRICT}": ("student", strict)}
    for batch in (1, 4) if args.quick else (1, 8, 32):
        n = 5 if batch == 1 and not args.quick else batch                      # full batches
        problems = held_out(tokenizer, 7)[:n]
        timed = time_cells(models, cells, problems, batch, 1 if args.quick else 3)
        naive = [seconds for seconds, _, _ in timed["teacher"]]
        width = cdlm.GEN_LENGTH + statistics.mean(len(ids) for _, ids in problems)
        for name, runs in timed.items():
            n_rows = {"ar": 1, "teacher": width, "teacher, threshold": width}.get(name, cdlm.BLOCK_SIZE)
            seconds = [s for s, _, _ in runs]
            _, generations, decoder = runs[-1]
            tokens = sum(len(g.token_ids) for g in generations)
            # Where the teacher has fewer runs, later runs of the others are compared with its last.
            ratios = [t / s for s, t in zip(seconds, naive + naive[-1:] * len(seconds))]
            rows.append({
                "decoder": name, "batch": batch, "problems": len(problems),
                "solved": statistics.mean(solved(problems, generations, tokenizer)),
                "seconds_a_problem": statistics.median(seconds) / len(problems),
                "tokens_per_second": tokens / statistics.median(seconds),
                "steps": statistics.mean(len(g.steps) for g in generations),
                "tokens": tokens / len(generations),
                "fed": getattr(decoder, "counts", {}).get("tokens_fed"),
                "intensity": intensity(model.config, model.n_params(), n_rows, width, batch),
                "faster_than_teacher": statistics.median(ratios), "range": [min(ratios), max(ratios)]})
    return {"rows": rows}


def time_cells(models, cells, problems, batch, repeats):
    """{name: [(seconds, generations, decoder)]}, in turn, after one warm-up round. The naive teacher takes
    minutes: it needs no warm-up and has fewer runs the larger the batch."""
    timed = {name: [] for name in cells}
    naive_runs = {1: 3, 8: 2}.get(batch, 1)
    for repeat in tqdm(range(1 + repeats), desc=f"batch {batch}"):
        for name, (who, settings) in cells.items():
            if name == "teacher" and not 1 <= repeat <= naive_runs:
                continue
            decoder = models[who](batch_size=batch, **settings)
            generations = decoder.generate(requests_of(problems, decoder.model))
            if repeat:
                timed[name].append((sum(decoder.seconds.values()), generations, decoder))
    return timed
