"""Diffusion models: accuracy, steps and seconds of their decoders, and students of other trainings.

All decoders answer the same held-out problems, whose answers fit into the slots. A step of a request is a
forward in which it took part, at any batch size; of `ar` and `prism`, the forwards after the prompt's."""
import re
import statistics
from pathlib import Path

import numpy as np

from minispec import cdlm
from minispec.data import tasks
from minispec.studies import results
from minispec.studies.results import LeftOut, each_kept, engine_of, time_interleaved
from minispec.tools import checkpoints, methods
from minispec.tools.answers import requests_of, verdict
from minispec.tools.files import read_json
from minispec.tools.intervals import with_range
from minispec.tools.markdown import table
from minispec.tools.training import fast_dtype

FIRST = 3000                    # seed of the first held-out problem used here
POINTS = (0.9, cdlm.THRESHOLD, 0.998)    # thresholds: the paper's, the default, and one for accuracy
BATCHES = {1: 5, 4: 8, 16: 16}  # of the timed runs, and their problems
REPEATS = 3
CUT = ("teacher", {"steps_a_block": 8, "order": "surest"})       # several slots a step
SETTINGS = {
    "decoder": "{decoder}",
    "steps a block": "{steps_a_block}",
    "block": "{block_size}",
    "threshold": "{threshold:g}",
    "slot first": "{order}",
}
ACCURACY = {
    "solved (95 %)": "{solved:.1%} ({solved_range[0]:.0%} to {solved_range[1]:.0%})",
    "steps an answer": "{steps:.1f}",
    "tokens a step": "{tau:.1f}",
}
BY_FAMILY = {family: f"{{by_family[{family}]:.0%}}" for family in tasks.FAMILIES}


# -- accuracy and steps ----------------------------------------------------------------------------

def cdlm_accuracy(args, model, tokenizer):
    """100 problems of each family, solved by the teacher at a token a step, by the target, and by the
    student, also in the order of the papers, most confident slot first."""
    cells = [("teacher", {}), ("ar", {})]
    cells += [("student", {"threshold": t}) for t in POINTS]
    cells += [("student", {"threshold": cdlm.THRESHOLD, "order": "surest"})]
    return compare("cdlm_accuracy", args, model, tokenizer, cells, 4 if args.quick else 100)


def cdlm_curves(args, model, tokenizer):
    """Accuracy against steps, 20 problems of each family: student, dual cache and teacher with thresholds;
    the student in blocks for which it was not trained; the teacher cut to fewer steps a block."""
    cells = [(name, {"threshold": t}) for name in ("student", "dual") for t in POINTS]
    cells += [("student", {"threshold": cdlm.THRESHOLD, "block_size": n}) for n in (4, 8, 16)]
    cells += [("teacher", {"threshold": t}) for t in POINTS[:2]]
    cells += [CUT]
    return compare("cdlm_curves", args, model, tokenizer, cells, 4 if args.quick else 20)


def compare(study, args, model, tokenizer, cells, n):
    """The study of the `cells` (decoder, settings), on n problems of each family."""
    models = models_of(args, model)
    problems = held_out(tokenizer, n)

    def measure(name, settings):
        runs = solve(decoder_of(name, settings, models, args, tokenizer, 16), problems, tokenizer)
        by_family = {family: statistics.mean(r for r, p in zip(runs[0], problems) if p.family == family)
                     for family in tasks.FAMILIES}
        return {"decoder": name, **settings, "problems": len(problems), "by_family": by_family,
                **figures([runs])}

    rows = each_kept(study, args, model, cells, measure)
    return {"rows": rows, "about": dtype_of(args), "table": table(rows, {**SETTINGS, **BY_FAMILY, **ACCURACY})}


def dtype_of(args):
    """The dtype of the models, for the footer of a table."""
    return {"dtype": str(fast_dtype(args.device)).removeprefix("torch.")}


def models_of(args, model):
    """The target ("ar"), the teacher and the student, in the device's fast dtype. "dual" is the teacher with
    stale keys."""
    folders = {kind: methods.folder_of(name, args) for name, kind in cdlm.METHODS.items()}
    if missing := [folder for folder in folders.values() if not Path(folder).exists()]:
        raise LeftOut(f"there is no diffusion model in {missing[0]}")
    folders["ar"] = args.model
    dtype = fast_dtype(args.device)
    models = {name: checkpoints.load(folder, model.device, dtype) for name, folder in folders.items()}
    return {**models, "dual": models["teacher"]}


def decoder_of(name, settings, models, args, tokenizer, batch):
    """The decoder of a diffusion model, or the engine of another method."""
    if name in methods.METHODS:
        return engine_of(name, models["ar"], args, batch)
    return cdlm.Decoder(models[name], tokenizer.mask_id, name, batch_size=batch, **settings)


def held_out(tokenizer, n):
    """n problems of each family whose answers fit into the slots. LeftOut for a real model."""
    if not tokenizer.is_puzzle_model:
        raise LeftOut("diffusion models are compared on puzzles, whose answers are checked; this model is "
                         "no puzzle model")
    return [tasks.fitting(tokenizer, family, FIRST + i, "heldout", cdlm.GEN_LENGTH)[0]
            for i in range(n) for family in tasks.FAMILIES]


def solve(decoder, problems, tokenizer):
    """Of a decoder's answers, for each problem: whether it is solved, its steps, its tokens."""
    generations = decoder.generate(requests_of(problems, tokenizer, decoder.model, cdlm.GEN_LENGTH))
    right = [verdict(p, g, tokenizer) for p, g in zip(problems, generations)]
    return right, [len(g.rounds) for g in generations], [len(g.token_ids) for g in generations]


def figures(runs):
    """Figures of the runs (seeds, 3, problems) of `solve`; the interval is over problems."""
    right, rounds, lengths = np.array(runs).swapaxes(0, 1)
    steps, tokens = rounds.mean().item(), lengths.mean().item()
    return {**with_range("solved", lambda x: x.mean(-1), right.mean(0)),
            "steps": steps, "tokens": tokens, "tau": tokens / steps}


# -- speed -----------------------------------------------------------------------------------------

def cdlm_speed(args, model, tokenizer):
    """Seconds an answer by batch size: plain decoding without and with a drafter, the teacher, the student.
    Solved problems are those of the other studies, if they have results."""
    cells = [("teacher", {}), ("ar", {}), ("prism", {}), CUT]
    cells += [(name, {"threshold": cdlm.THRESHOLD}) for name in ("teacher", "dual")]
    cells += [("student", {"threshold": t}) for t in POINTS]
    models = models_of(args, model)
    files = [Path(results.path(f"{study}.json")) for study in ("cdlm_accuracy", "cdlm_curves")]
    known = [row for file in files if file.exists() for row in read_json(file)["result"]["rows"]]

    def measure(batch, n):
        problems = held_out(tokenizer, -(-n // len(tasks.FAMILIES)))[:n]

        def build(i):
            asked = requests_of(problems, tokenizer, models["ar"], cdlm.GEN_LENGTH)
            return decoder_of(*cells[i], models, args, tokenizer, batch), asked

        timed = time_interleaved(range(len(cells)), build, REPEATS, f"batch {batch}", args.device != "cpu")
        return [{"batch": batch, **speed_of(*cell, timed[i], timed[0])} for i, cell in enumerate(cells)]

    batches = {1: 1, 4: 4} if args.quick else BATCHES
    rows = sum(each_kept("cdlm_speed", args, model, list(batches.items()), measure), [])
    rows = [{**row, "solved": solved_by(row, known)} for row in rows]
    alone = [row for row in rows if row["batch"] == 1 and "steps_a_block" not in row]
    return {"rows": rows, "about": dtype_of(args), "table": table(rows, SPEED), "short": table(alone, SPEED)}


SPEED = {
    "batch": "{batch}",
    "decoder": "{decoder}",
    "steps a block": "{steps_a_block}",
    "threshold": "{threshold:g}",
    "seconds an answer": "{latency:.3f}",
    "naive / this": "{ratio:.1f} ({ratio_range[0]:.1f} to {ratio_range[1]:.1f})",
    "tokens/s": "{tokens_per_second:.0f}",
    "steps an answer": "{steps:.1f}",
    "solved": "{solved:.1%}",
}


def speed_of(name, settings, runs, naive):
    """The result row of repeated runs, next to the naive decoder's."""
    mine, theirs = (np.array([latency(run) for run in some]) for some in (runs, naive))
    rounds = [len(g.rounds) for g in runs[0].generations]
    ratios = theirs / mine
    return {"decoder": name, **settings, "latency": float(np.median(mine)),
            "ratio": float(np.median(ratios)),
            "ratio_range": [float(ratios.min()), float(ratios.max())],
            "tokens_per_second": statistics.median(run.tokens / run.seconds for run in runs),
            "steps": statistics.mean(rounds)}


CELL = {"decoder", "steps_a_block", "block_size", "threshold", "order"}


def solved_by(row, known):
    """The share of solved problems in the `known` rows of other studies; None if they do not have it. Drafts
    change no answer, so with a drafter the target solves as much as alone."""
    cell = row | ({"decoder": "ar"} if row["decoder"] in methods.METHODS else {})
    solved = [other["solved"] for other in known
              if all(other.get(key) == cell.get(key) for key in CELL)]
    return solved[0] if solved else None


def latency(run):
    """Mean seconds of an answer, from its entry into the batch."""
    return statistics.mean(len(g.token_ids) / rate for g, rate in zip(run.generations, run.rates))


# -- students of other trainings -------------------------------------------------------------------

def cdlm_ablations(args, model, tokenizer):
    """The students in the folders --drafter/GROUP/NAME, at two thresholds: 100 problems of each family, and
    how many more they solve than the first student of their group. NAME-2 is another seed of NAME."""
    arms = {}
    for log in sorted(Path(args.drafter).glob("*/*/log.jsonl")) if args.drafter else []:
        folder = log.parent
        arms.setdefault((folder.parent.name, re.sub(r"-\d+$", "", folder.name)), []).append(folder)
    if not arms:
        raise ValueError("cdlm_ablations needs --drafter DIR, a folder of groups of students that "
                         "train_cdlm.py wrote: DIR/GROUP/NAME")
    problems = held_out(tokenizer, 4 if args.quick else 100)

    def measure(group, name, threshold):
        runs = []
        for folder in arms[group, name]:
            student = checkpoints.load(folder, model.device, fast_dtype(args.device))
            decoder = cdlm.Decoder(student, tokenizer.mask_id, threshold=threshold, batch_size=16)
            runs.append(solve(decoder, problems, tokenizer))
        row = {"group": group, "training": name.replace("_", " "), "seeds": len(runs),
               "threshold": threshold, **figures(runs)}
        return row, np.array(runs)[:, 0].mean(0).tolist()

    cells = [(*arm, threshold) for arm in arms for threshold in POINTS[:2]]
    measured = each_kept("cdlm_ablations", args, model, cells, measure)
    first = {}                                           # (group, threshold): of the first student
    for row, right in measured:
        more = np.subtract(right, first.setdefault((row["group"], row["threshold"]), right))
        row |= with_range("more", lambda x: x.mean(-1), more)
    rows = [row for row, _ in measured]
    # Of trainings with the same name, the lesson has the one of the first group.
    usual = {}
    for row in rows:
        if row["threshold"] == cdlm.THRESHOLD:
            usual.setdefault(row["training"], row)
    return {"rows": rows, "about": dtype_of(args), "table": table(rows, ABLATIONS),
            "short": table(usual.values(), ABLATIONS)}


ABLATIONS = {
    "group": "{group}",
    "training": "{training}",
    "seeds": "{seeds}",
    "threshold": "{threshold:g}",
    **ACCURACY,
    "more than the first": "{more:+.1%} ({more_range[0]:+.0%} to {more_range[1]:+.0%})",
}
