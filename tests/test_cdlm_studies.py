"""The studies of diffusion models on toy models: all run, all render, and what they say is what the decoders did."""
import json
import os

import pytest
import torch
from conftest import toy_model

import bench
from minispec import cdlm
from minispec.tools import checkpoints
from minispec.data import tasks
from minispec.studies import cdlm as cdlm_studies
from minispec.studies import results
from minispec.tools import methods
from minispec.data.tokenizer import Tokenizer
from test_shipped import TARGET


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """(settings of a quick study, random target, tokenizer): a teacher and a student, each of its own weights."""
    folder, tokenizer, patch = tmp_path_factory.mktemp("diffusion"), Tokenizer.load(TARGET), pytest.MonkeyPatch()
    make = lambda seed: toy_model(vocab=tokenizer.vocab_size, seed=seed, n_layer=1, gain=1.0, bos_id=tokenizer.special["<|bos|>"], eos_id=tokenizer.special["<|eos|>"])
    for seed, name in enumerate(("teacher", "student")):
        checkpoints.save(make(seed), folder / name, TARGET)
    patch.setattr(methods, "folder_of", lambda name, settings: str(folder / cdlm.METHODS[name]))
    patch.setattr(tasks, "FAMILIES", ("revise", "arith"))
    patch.setattr(cdlm_studies, "BF16", torch.float32)                             # a CPU may have no units for it
    patch.setattr(results, "tqdm", lambda items, **_: items)
    real = cdlm_studies.requests_of
    patch.setattr(cdlm_studies, "requests_of", lambda *args: real(*args[:-1], 40))        # random models never end
    checkpoints.save(make(3), folder / "target", TARGET)
    yield methods.settings(quick=True, data=None, model=str(folder / "target")), make(3), tokenizer
    patch.undo()


@pytest.fixture(scope="module")
def measured(toys):
    others = {name: getattr(cdlm_studies, name)(*toys) for name in ("cdlm_curves", "cdlm_accuracy")}
    return others


def test_all_run_and_render(measured):
    for name, result in measured.items():
        tables = [t for t in bench.render(name, json.loads(json.dumps(result))).split("\n\n")]
        assert all(len({line.count("|") for line in t.split("\n")}) == 1 and "nan" not in t for t in tables), name



def test_figures_are_what_the_decoders_did(measured, toys):
    table = measured["cdlm_accuracy"]["rows"]
    rows = {r["decoder"]: r for r in reversed(table)}    # the first of each: the way decode.py decodes
    assert [r.get("order") for r in table] == [None, None, None, None, None, "surest", "surest"] and all(r["steps"] >= r["tokens"] for r in (table[1], table[5]))
    assert [r["problems"] for r in table] == [8] * 7
    assert list(rows)[::-1] == ["ar", "teacher", "student"] and rows["teacher"]["problems"] == 8 and set(rows["teacher"]["by_family"]) == {"revise", "arith"}
    assert "same" not in rows["teacher"] and 0 <= rows["student"]["same"] <= 1 and rows["teacher"]["steps"] >= rows["teacher"]["tokens"]
    assert {r["decoder"] for r in measured["cdlm_curves"]["rows"]} >= {"teacher", "dual", "student"}
