"""What bench.py measures of diffusion models: steps against accuracy. How fast they are, next to plain
decoding, is in the study `run`.

All decoders answer the same held-out problems, which fit the answer slots. A step is a forward in which a
request took part, whatever the batch; the decoder counts it. """
import statistics

import torch

from minispec import cdlm
from minispec.data import tasks
from minispec.studies import results
from minispec.studies.timing import engine_of
from minispec.tools import checkpoints, methods
from minispec.tools.answers import requests_of, verdict

FIRST = 3000                    # seed of the first held-out problem used here
BF16 = torch.bfloat16           # it takes half the time
STRICT = 0.999                  # at this threshold the shipped student is as good as its teacher
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99, STRICT)


# -- problems ------------------------------------------------------------------------------------------------

def held_out(tokenizer, n):
    """n problems a family that fit."""
    cells = [(family, FIRST + i) for i in range(n) for family in tasks.FAMILIES]
    return [tasks.fitting(tokenizer, *cell, "heldout", cdlm.GEN_LENGTH)[0] for cell in cells]


def answer(decoder, problems, tokenizer):
    """Decode and judge: {"problems", "solved", "by_family", "steps", "tokens"}, and the answers."""
    generations = decoder.generate(requests_of(problems, tokenizer, decoder.model, cdlm.GEN_LENGTH))
    right = [verdict(p, g, tokenizer) for p, g in zip(problems, generations)]
    answers = [g.token_ids for g in generations]
    by_family = {family: statistics.mean(r for r, p in zip(right, problems) if p.family == family)
                 for family in tasks.FAMILIES}
    return {"problems": len(problems), "solved": statistics.mean(right), "by_family": by_family,
            "steps": statistics.mean(len(g.steps) for g in generations),
            "tokens": statistics.mean(map(len, answers))}, answers


# -- studies -------------------------------------------------------------------------------------------------

def cdlm_accuracy(args, model, tokenizer):
    """Held-out problems solved by the target, the teacher at a token a step, and the student at the default
    threshold, a stricter one and the paper's: 200 a family. Then as the papers decode, most confident slot
    first."""
    cells = [("ar", {}), ("teacher", {})]
    cells += [("student", {"threshold": t}) for t in (cdlm.THRESHOLD, STRICT, 0.9)]
    cells += [("teacher", {"order": "surest"}), ("student", {"threshold": cdlm.THRESHOLD, "order": "surest"})]
    return compare("cdlm_accuracy", args, model, tokenizer, cells, 4 if args.quick else 200)


def cdlm_curves(args, model, tokenizer):
    """Accuracy against steps, 10 problems a family: the teacher cut to fewer steps a block, the teacher, its
    dual cache and the student with a threshold."""
    cells = [("teacher", {"steps_a_block": s, "order": "surest"}) for s in (32, 16, 8, 6, 4, 3)]
    cells += [(name, {"threshold": t}) for name in ("teacher", "dual") for t in THRESHOLDS]
    cells += [("student", {"threshold": t, "order": "surest"}) for t in THRESHOLDS]
    cells += [("student", {"threshold": t}) for t in (*THRESHOLDS, 1.0)]
    if args.quick:
        cells = cells[::4]
    return compare("cdlm_curves", args, model, tokenizer, cells, 2 if args.quick else 10)


def compare(study, args, model, tokenizer, cells, n):
    """A row for each of `cells` (decoder, settings), on n problems a family. "ar" is the target, "teacher"
    and "student" are what ships, "dual" is the teacher with stale keys. "same": the share of answers that
    are those of the first teacher."""
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

    measured = results.each_kept(study, args, model, cells, measure)
    reference = next(answers for row, answers in measured if row["decoder"] == "teacher")
    for row, answers in measured:
        if answers is not reference and row["decoder"] != "ar":
            row["same"] = statistics.mean(a == b for a, b in zip(answers, reference))
    return {"rows": [row for row, _ in measured]}
