"""Diffusion models: accuracy against steps. The study `run` times these models next to plain decoding.

All decoders answer the same held-out problems, whose answers fit into the slots. A step of a request is a
forward in which it took part, at any batch size."""
import statistics

import torch

from minispec import cdlm
from minispec.data import tasks
from minispec.studies.results import each_kept, engine_of
from minispec.tools import checkpoints, methods
from minispec.tools.answers import requests_of, verdict
from minispec.tools.markdown import table

FIRST = 3000                    # seed of the first held-out problem used here
BF16 = torch.bfloat16           # takes half the time of fp32
STRICT = 0.999                  # at this threshold the student solves nearly as much as its teacher
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99, STRICT)
DECODERS = {
    "decoder": "{decoder}",
    "steps a block": "{steps_a_block}",
    "threshold": "{threshold:g}",
    "slot first": "{order}",
    "problems": "{problems}",
    "solved": "{solved:.1%}",
    **{family: f"{{by_family[{family}]:.0%}}" for family in tasks.FAMILIES},
    "steps an answer": "{steps:.1f}",
    "tokens an answer": "{tokens:.0f}",
    "same answer as the teacher": "{same:.0%}",
}


def cdlm_accuracy(args, model, tokenizer):
    """Held-out problems, 200 per family, solved by the target, by the teacher at one token per step, and by
    the student at three thresholds: the default, a stricter one and the paper's. Then the order of the
    papers: most confident slot first."""
    cells = [("ar", {}), ("teacher", {})]
    cells += [("student", {"threshold": t}) for t in (cdlm.THRESHOLD, STRICT, 0.9)]
    cells += [("teacher", {"order": "surest"}), ("student", {"threshold": cdlm.THRESHOLD, "order": "surest"})]
    found = compare("cdlm_accuracy", args, model, tokenizer, cells, 4 if args.quick else 200)
    short = {head: form for head, form in DECODERS.items() if head not in ("steps a block", *tasks.FAMILIES)}
    return {**found, "short": table(found["rows"], short)}


def cdlm_curves(args, model, tokenizer):
    """Accuracy against steps, 10 problems per family: the teacher cut to fewer steps per block, then the
    teacher, its dual cache and the student with thresholds."""
    cells = [("teacher", {"steps_a_block": s, "order": "surest"}) for s in (32, 16, 8, 6, 4, 3)]
    cells += [(name, {"threshold": t}) for name in ("teacher", "dual", "student") for t in THRESHOLDS]
    cells += [("student", {"threshold": t, "order": "surest"}) for t in THRESHOLDS]
    if args.quick:
        cells = cells[::4]
    return compare("cdlm_curves", args, model, tokenizer, cells, 2 if args.quick else 10)


def compare(study, args, model, tokenizer, cells, n):
    """A result row for each of `cells` (decoder, settings), on n problems per family. "ar" is the target,
    "teacher" and "student" are the shipped models, "dual" is the teacher with stale keys. "same" is the share
    of answers that equal those of the first cell with the teacher."""
    folders = {kind: methods.folder_of(name, args) for name, kind in cdlm.METHODS.items()}
    folders["ar"] = args.model
    models = {name: checkpoints.load(folder, model.device, BF16) for name, folder in folders.items()}
    models["dual"] = models["teacher"]
    problems = held_out(tokenizer, n)

    def measure(name, settings):
        if name == "ar":
            decoder = engine_of("ar", models["ar"], args, 16)
        else:
            decoder = cdlm.Decoder(models[name], tokenizer.mask_id, name, batch_size=16, **settings)
        row, answers = answer(decoder, problems, tokenizer)
        return {"decoder": name, **settings, **row}, answers

    measured = each_kept(study, args, model, cells, measure)
    reference = next(answers for row, answers in measured if row["decoder"] == "teacher")
    for row, answers in measured:
        if answers is not reference and row["decoder"] != "ar":
            row["same"] = statistics.mean(a == b for a, b in zip(answers, reference))
    rows = [row for row, _ in measured]
    return {"rows": rows, "table": table(rows, DECODERS)}


def held_out(tokenizer, n):
    """n problems of each family whose answers fit into the slots."""
    cells = [(family, FIRST + i) for i in range(n) for family in tasks.FAMILIES]
    return [tasks.fitting(tokenizer, *cell, "heldout", cdlm.GEN_LENGTH)[0] for cell in cells]


def answer(decoder, problems, tokenizer):
    """Decode and check answers. Returns (result row with "problems", "solved", "by_family", "steps" and
    "tokens"; the answers' token ids)."""
    generations = decoder.generate(requests_of(problems, tokenizer, decoder.model, cdlm.GEN_LENGTH))
    right = [verdict(p, g, tokenizer) for p, g in zip(problems, generations)]
    answers = [g.token_ids for g in generations]
    by_family = {family: statistics.mean(r for r, p in zip(right, problems) if p.family == family)
                 for family in tasks.FAMILIES}
    return {"problems": len(problems), "solved": statistics.mean(right), "by_family": by_family,
            "steps": statistics.mean(len(g.rounds) for g in generations),
            "tokens": statistics.mean(map(len, answers))}, answers
