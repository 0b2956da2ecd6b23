"""The answers to exercises that decode with something changed, for docs/answers.md:

    python tests/measured_answers.py            # 2 minutes; writes results/answers.json
"""
from unittest import mock

import root  # noqa: F401  before torch
import torch

from minispec import cdlm
from minispec.data import tasks
from minispec.data.tokenizer import Tokenizer
from minispec.studies import cdlm as studies
from minispec.studies.results import path
from minispec.tools import answers, checkpoints, methods
from minispec.tools.files import write_json

FAMILIES = ("arith", "story", "search", "revise")


def modules(model, tokenizer):
    """PRISM 2: tau and acceptance by position, where one module serves all steps."""
    problems = [tasks.make(family, 5000 + i, "heldout") for family in FAMILIES for i in range(4)]
    out = {}
    for name in ("0 1 1", "1 1 1", "0 0 0"):
        engine = methods.make_engine("prism", model, methods.settings(), 8)
        engine.scheduler.drafter.step.config.step_map = tuple(map(int, name.split()))
        generations = engine.generate(answers.requests_of(problems, tokenizer, model, 128))
        figures = answers.summary(generations, engine)
        out[name] = {"tau": figures["tau"], "accepted": figures["acceptance_by_position"]}
    return out


class Stale(cdlm.Decoder):
    """CDLM 2: the keys of the last denoising pass are kept."""
    def spans(self, a):
        if a.n_cached >= a.n_prompt:
            a.n_cached = a.first
        return super().spans(a)


def margin(logits, *rows):
    """CDLM 3: by how much the best token is ahead of the second."""
    best = logits.softmax(-1).topk(2, -1).values
    return CHOOSE(logits, *rows)[0], (best[:, 0] - best[:, 1]).tolist()


def entropy(logits, *rows):
    """CDLM 3: exp(-entropy), 1 where one token has everything."""
    logs = logits.log_softmax(-1)
    return CHOOSE(logits, *rows)[0], (logs.exp() * logs).sum(-1).exp().tolist()


CHOOSE = cdlm.choose


def decoders(model, tokenizer):
    out = {}
    held_out = studies.held_out(tokenizer, 8)
    for name, changed in (("as it is", {"choose": CHOOSE}), ("stale", {"Decoder": Stale}),
                          ("margin", {"choose": margin}), ("entropy", {"choose": entropy})):
        with mock.patch.multiple(cdlm, **changed):
            decoder = methods.make_engine("cdlm", model, methods.settings(), 8)
            row = studies.figures([studies.solve(decoder, held_out, tokenizer)])
        out[name] = {"problems": len(held_out), **{key: row[key] for key in ("solved", "steps")}}
    return out


if __name__ == "__main__":
    loaded = checkpoints.load(methods.SHIPPED, dtype=torch.float32), Tokenizer.load(methods.SHIPPED)
    found = {"modules": modules(*loaded), "decoders": decoders(*loaded)}
    write_json(path("answers.json"), found)
    print(found)
