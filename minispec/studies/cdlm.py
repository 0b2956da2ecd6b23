"""What bench.py measures of diffusion models: steps against accuracy, latency and throughput, block sizes, losses.
Studies as in studies.py. All decoders answer the same held-out problems, which fit 256 slots; a step is a forward in which a
request took part, whatever the batch, counted by the decoder."""
import os
import statistics
from dataclasses import dataclass

import torch
from tqdm import tqdm

from minispec import cdlm
from minispec.data import tasks
from minispec.tools import checkpoints, methods
from minispec.tools.answers import verdict
from minispec.core.engine import Request

FIRST = 3000                    # seed of the first held-out problem used here
BF16 = torch.bfloat16           # what decides accuracy is decoded in it: half the time of fp32; latencies are measured in the target's dtype
STRICT = 0.999                  # where the shipped student is as good as its teacher
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99, STRICT)


@dataclass
class Models:
    """Who decodes: the target, the bidirectional teacher, the students by name; the shipped one is "student"."""
    target: object
    teacher: object
    students: dict
    mask_id: int

    def decoder(self, name, batch, **settings):
        """An engine or decoder: "ar", "teacher", "dual" (the teacher with stale keys) or a student's name."""
        if name == "ar":
            return methods.make_engine("ar", self.target, methods.settings(), batch)
        kind = name if name in ("teacher", "dual") else "student"
        return cdlm.Decoder(self.students[name] if kind == "student" else self.teacher, self.mask_id, kind, batch_size=batch, **settings)


def load(args, target, tokenizer, dtype=None):
    """The shipped models, and the students in folders under --arms; all in another dtype than the target's, if one is given."""
    target = target if dtype is None else checkpoints.load(args.model, target.device, dtype)
    models = {name: checkpoints.load(folder, target.device, target.dtype) for name, (_, folder) in cdlm.METHODS.items()}
    students = {"student": models["cdlm"], **{f"arm {arm}": checkpoints.load(os.path.join(args.arms, arm), target.device, target.dtype) for arm in arms_of(args)}}
    return Models(target, models["dlm"], students, cdlm.mask_id_of(tokenizer, cdlm.METHODS["cdlm"][1]))


def arms_of(args):
    """Names of the students under --arms: whole models, no drafters, and not the teacher that train_cdlm.py keeps beside them."""
    if args.arms and not os.path.isdir(args.arms):
        raise ValueError(f"no folder of students {args.arms}")
    return [arm for arm in sorted(os.listdir(args.arms)) if arm != "teacher" and os.path.exists(os.path.join(args.arms, arm, "tokenizer.json"))] if args.arms else []


def held_out(tokenizer, n):
    """n problems a family that fit: [(problem, prompt ids)]."""
    return [cdlm.fitting(tokenizer, f, FIRST + i, "heldout")[:2] for i in range(n) for f in tasks.FAMILIES]


def requests_of(problems, model, gen_length=cdlm.GEN_LENGTH):
    return [Request(ids, gen_length, stop_ids=[model.config.eos_id]) for _, ids in problems]


def solved(problems, generations, tokenizer):
    """[True or False] for each."""
    return [verdict(p, g, tokenizer) for (p, _), g in zip(problems, generations)]


def answer(decoder, problems, tokenizer, reference=None, gen_length=cdlm.GEN_LENGTH):
    """Decode and judge: {"solved", "by_family", "steps", "tokens", "same": share of answers equal to `reference`}, and the answers."""
    got = decoder.generate(requests_of(problems, decoder.model, gen_length))
    right = solved(problems, got, tokenizer)
    families = {f: [r for r, (p, _) in zip(right, problems) if p.family == f] for f in tasks.FAMILIES}
    answers = [g.token_ids for g in got]
    return {"problems": len(problems), "solved": statistics.mean(right), "by_family": {f: statistics.mean(some) for f, some in families.items()},
            "steps": statistics.mean(len(g.steps) for g in got), "tokens": statistics.mean(map(len, answers)),
            "same": statistics.mean(a == b for a, b in zip(answers, reference)) if reference else None}, answers


def cdlm_accuracy(args, model, tokenizer, each):
    """Held-out problems solved by the target, the teacher at a token a step, and the student at the default threshold, a stricter one and the
    paper's: 200 a family; of these the first 40 also as the papers decode, surest slot first. each(cells, measure) -> [measure(*cell)]."""
    models, problems = load(args, model, tokenizer, BF16), held_out(tokenizer, 4 if args.quick else 200)
    few = problems[:(2 if args.quick else 40) * len(tasks.FAMILIES)]

    def measure(name, settings):
        row, answers = answer(models.decoder(name, 16, **settings), few if "order" in settings else problems, tokenizer)
        return {"decoder": name, **settings, **row}, answers

    measured = each([("ar", {}), ("teacher", {}), *(("student", {"threshold": t}) for t in (cdlm.THRESHOLD, STRICT, 0.9)),
                     ("teacher", {"order": "surest"}), ("student", {"threshold": cdlm.THRESHOLD, "order": "surest"})], measure)
    (target, _), (teacher, reference), *others = measured
    return {"rows": [target, teacher, *({**row, "same": statistics.mean(a == b for a, b in zip(answers, reference))} for row, answers in others)]}


def cdlm_curves(args, model, tokenizer):
    """Accuracy against steps: the teacher cut to fewer steps a block, the teacher and its dual cache with a threshold, every student
    with a threshold."""
    models, problems = load(args, model, tokenizer, BF16), held_out(tokenizer, 2 if args.quick else 10)
    cells = [("teacher", {"steps": s, "order": "surest"}) for s in (32, 16, 8, 6, 4, 3)] + [(name, {"threshold": t}) for name in ("teacher", "dual") for t in THRESHOLDS]
    cells += [("student", {"threshold": t, "order": "surest"}) for t in THRESHOLDS] + [(name, {"threshold": t}) for name in models.students for t in (*THRESHOLDS, 1.0)]
    rows, reference = [], None
    for name, settings in tqdm(cells[::4] if args.quick else cells, desc="curves"):
        row, answers = answer(models.decoder(name, 16, **settings), problems, tokenizer, reference)
        reference = reference or answers                 # the teacher's at a token a step
        rows.append({"decoder": name, "steps_a_block": settings.get("steps"), "threshold": settings.get("threshold"), "order": settings.get("order"), **row})
    return {"rows": rows}


def cdlm_blocks(args, model, tokenizer):
    """The shipped student decoded in blocks of other sizes than it was trained with; and a gap inside a block filled in: the last
    tokens of the block are given, or not."""
    models, problems = load(args, model, tokenizer, BF16), held_out(tokenizer, 2 if args.quick else 20)
    sizes = [{"block_size": b, **answer(models.decoder("student", 16, block_size=b, threshold=cdlm.THRESHOLD), problems, tokenizer)[0]} for b in (8, 16, 32, 64)]
    return {"sizes": sizes, "infill": infill(models.decoder("student", 16), tokenizer, 4 if args.quick else 40)}


def infill(decoder, tokenizer, n):
    """A block of a reference answer of which `gap` slots in the middle are open: share of gaps that are filled as they were, with
    the rest of the block given, and with nothing behind the gap, which is all that a causal model could use."""
    rows, eos, b = [], decoder.model.config.eos_id, cdlm.BLOCK_SIZE
    for gap in (4, 8, 16):
        same, requests, given, wanted = {}, [], [], []
        for f in tasks.FAMILIES:
            for i in range(n // len(tasks.FAMILIES) or 1):
                _, ids, slots = cdlm.fitting(tokenizer, f, FIRST + i, "heldout")
                if eos not in slots[:2 * b]:
                    start = b + (b - gap) // 2           # in the second block, the first one stands in front of it
                    requests.append(ids + slots[:b])
                    given.append({j - b: slots[j] for j in range(b, 2 * b) if not start <= j < start + gap})
                    wanted.append(slots[start:start + gap])
        at = (b - gap) // 2
        for name, behind in (("given", True), ("open", False)):
            fixed = [{j: t for j, t in g.items() if behind or j < at} for g in given]
            got = [Request(ids, b, stop_ids=[eos]) for ids in requests]
            decoder.generate(got, fixed)
            same[name] = statistics.mean(r.state.tokens[r.state.prompt + at:r.state.prompt + at + gap] == w for r, w in zip(got, wanted))
        rows.append({"gap": gap, "answers": len(requests), **same})
    return rows


def intensity(config, n_params, rows, context, batch, width=4):
    """Floating-point operations a byte read, of one forward with so many rows a request: weights are read once, keys and values of the
    context once a request."""
    kv = 2 * config.n_layer * config.n_kv_head * config.head_dim
    attention = 4 * context * config.n_head * config.head_dim * config.n_layer
    return batch * rows * (2 * n_params + attention) / (width * (n_params + batch * context * kv))


def cdlm_speed(args, model, tokenizer):
    """Seconds a problem and tokens a second by batch, in one process, in turn, against the naive teacher of the same batch. That one takes
    minutes, so it needs no warm-up and has fewer runs the larger the batch; later runs of the others are held against its last."""
    models, rows = load(args, model, tokenizer), []
    student = {"threshold": cdlm.THRESHOLD}
    for batch in (1, 4) if args.quick else (1, 8, 32):
        problems, naive_runs = held_out(tokenizer, 7)[:5 if batch == 1 and not args.quick else batch], {1: 3, 8: 2}.get(batch, 1)       # full batches
        cells = {"ar": ("ar", {}), "teacher": ("teacher", {}), "teacher, threshold": ("teacher", student), "teacher, dual cache": ("dual", student), "student": ("student", student),
                 f"student, threshold {STRICT}": ("student", {"threshold": STRICT}), "student, separate commit": ("student", {**student, "commit": "separate"})}
        timed = {name: [] for name in cells}
        for repeat in tqdm(range(2 if args.quick else 4), desc=f"batch {batch}"):
            for name, (who, settings) in cells.items():
                if who == "teacher" and not settings and not 1 <= repeat <= naive_runs:
                    continue
                decoder = models.decoder(who, batch, **settings)
                got = decoder.generate(requests_of(problems, decoder.model))
                if repeat:
                    timed[name].append((sum(decoder.seconds.values()), got, decoder))
        for name, some in timed.items():
            _, got, decoder = some[-1]
            tokens, seconds = sum(len(g.token_ids) for g in got), [s for s, _, _ in some]
            naive = [s for s, _, _ in timed["teacher"]]
            pairs = list(zip(seconds, naive + naive[-1:] * len(seconds)))
            width = 256 + statistics.mean(len(ids) for _, ids in problems)
            n_rows = {"ar": 1, "teacher": width, "teacher, threshold": width}.get(name, cdlm.BLOCK_SIZE)
            rows.append({"decoder": name, "batch": batch, "problems": len(problems), "solved": statistics.mean(solved(problems, got, tokenizer)),
                         "seconds_a_problem": statistics.median(seconds) / len(problems),
                         "tokens_per_second": tokens / statistics.median(seconds), "steps": statistics.mean(len(g.steps) for g in got), "tokens": tokens / len(got),
                         "fed": getattr(decoder, "counts", {}).get("tokens_fed"), "intensity": intensity(model.config, model.n_params(), n_rows, width, batch),
                         "faster_than_teacher": statistics.median(t / s for s, t in pairs), "range": [min(t / s for s, t in pairs), max(t / s for s, t in pairs)]})
    return {"rows": rows}


def cdlm_losses(args, model, tokenizer):
    """Students of --arms, a folder each, trained with other losses at equal compute: solved and steps at the default threshold. Folders
    NAME-s1, NAME-s2, .. are seeds of one arm."""
    models, problems, runs = load(args, model, tokenizer, BF16), held_out(tokenizer, 2 if args.quick else 20), {}
    for name in tqdm([s for s in models.students if s != "student"], desc="arms"):
        arm = name.removeprefix("arm ")
        row, _ = answer(models.decoder(name, 16, threshold=cdlm.THRESHOLD), problems, tokenizer)
        record = checkpoints.last_record(os.path.join(args.arms, arm))
        runs.setdefault(checkpoints.arm_of(arm)[0], []).append(
            {**{key: row[key] for key in ("solved", "steps", "tokens")}, "trained": record["step"], "seconds": record["seconds"], "heldout": statistics.mean(record["heldout"].values())})
    if not runs:
        raise ValueError(f"this study compares students: --arms must be a folder with one folder each (train_cdlm.py --name), got {args.arms}")
    return {"problems": len(problems), "arms": {arm: {**{key: statistics.mean(x[key] for x in seeds) for key in seeds[0]}, "seeds": [x["solved"] for x in seeds]}
                                                for arm, seeds in runs.items()}}


def cdlm_teachers(args, model, tokenizer):
    """Held-out masked loss, mean of the families, at the checkpoints of runs of train_cdlm.py, and what was solved when they ended: --arms
    holds a folder (--out) each."""
    found = args.arms and os.path.isdir(args.arms) and [arm for arm in sorted(os.listdir(args.arms)) if os.path.exists(os.path.join(args.arms, arm, "teacher", "log.jsonl"))]
    if not found:
        raise ValueError(f"this study compares teachers: --arms must be a folder with one folder each (train_cdlm.py --out), got {args.arms}")
    logs = {arm: checkpoints.records(os.path.join(args.arms, arm, "teacher")) for arm in found}
    return {"arms": {arm: {"heldout": {str(r["step"]): statistics.mean(r["heldout"].values()) for r in log}, "decoded": log[-1].get("decoded")} for arm, log in logs.items()}}
