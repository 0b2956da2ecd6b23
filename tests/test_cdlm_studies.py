"""The studies of diffusion models on toy models: all run, all render, and what they say is what the decoders did."""
import json
import os

import pytest
from conftest import toy_model

import bench
from minispec import cdlm
from minispec.tools import checkpoints
from minispec.data import tasks
from minispec.studies import cdlm as cdlm_studies
from minispec.tools import methods
from minispec.data.tokenizer import Tokenizer
from test_shipped import TARGET


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """(settings of a quick study, random target, tokenizer): a teacher, a student and an arm, each of its own weights."""
    folder, tokenizer, patch = tmp_path_factory.mktemp("diffusion"), Tokenizer.load(TARGET), pytest.MonkeyPatch()
    with open(os.path.join(TARGET, "tokenizer.json"), encoding="utf-8") as f:
        text = json.load(f)
    make = lambda seed: toy_model(vocab=tokenizer.vocab_size, seed=seed, gain=1.0, bos_id=tokenizer.special["<|bos|>"], eos_id=tokenizer.special["<|eos|>"])
    for seed, name in enumerate(("teacher", "student", "plain-s1", "plain-s2")):
        checkpoints.save(make(seed), folder / "arms" / name, text)
        (folder / "arms" / name / "log.jsonl").write_text(json.dumps({"step": 9, "seconds": 60, "heldout": {"revise": float(seed)}}) + "\n")
    (folder / "arms" / "trajectories").mkdir()
    patch.setattr(cdlm, "METHODS", {"cdlm": ("student", str(folder / "arms" / "student")), "dlm": ("teacher", str(folder / "arms" / "teacher"))})
    patch.setattr(tasks, "FAMILIES", ("revise", "arith"))
    patch.setattr(cdlm_studies, "tqdm", lambda items, **_: items)
    patch.setattr(cdlm_studies, "requests_of", lambda problems, model, gen_length=0, real=cdlm_studies.requests_of: real(problems, model, 64))    # random models never end
    yield methods.settings(quick=True, arms=str(folder / "arms"), data=None), make(3), tokenizer
    patch.undo()


@pytest.fixture(scope="module")
def measured(toys):
    others = {name: getattr(cdlm_studies, name)(*toys) for name in ("cdlm_curves", "cdlm_blocks", "cdlm_speed", "cdlm_losses")}
    return {"cdlm_accuracy": bench.cdlm_accuracy(*toys), **others}


def test_all_run_and_render(measured):
    for name, result in measured.items():
        tables = [t for t in bench.render(name, json.loads(json.dumps(result))).split("\n\n")]
        assert all(len({line.count("|") for line in t.split("\n")}) == 1 and "nan" not in t for t in tables), name


def test_accuracy_interrupted_goes_on_to_the_same_table(measured, toys):
    """Its cells survive the file that bench.py keeps between two runs; half of them come from it."""
    def each(cells, measure):
        kept = json.loads(json.dumps([measure(*cell) for cell in cells[:4]]))
        return kept + [measure(*cell) for cell in cells[4:]]

    assert cdlm_studies.cdlm_accuracy(*toys, each) == measured["cdlm_accuracy"]


def test_figures_are_what_the_decoders_did(measured, toys):
    table = measured["cdlm_accuracy"]["rows"]
    rows = {r["decoder"]: r for r in reversed(table)}    # the first of each: the way decode.py decodes
    assert [r.get("order") for r in table] == [None, None, None, None, None, "surest", "surest"] and all(r["steps"] >= r["tokens"] for r in (table[1], table[5]))
    assert [r["problems"] for r in table] == [8, 8, 8, 8, 8, 4, 4]
    assert list(rows)[::-1] == ["ar", "teacher", "student"] and rows["teacher"]["problems"] == 8 and set(rows["teacher"]["by_family"]) == {"revise", "arith"}
    assert rows["teacher"]["same"] is None and 0 <= rows["student"]["same"] <= 1 and rows["teacher"]["steps"] >= rows["teacher"]["tokens"]
    assert {r["decoder"] for r in measured["cdlm_curves"]["rows"]} >= {"teacher", "dual", "student"}
    arms = measured["cdlm_losses"]["arms"]
    assert set(arms) == {"student", "plain"} and len(arms["student"]["seeds"]) == 1             # no teacher, and the shipped name is not taken
    assert len(arms["plain"]["seeds"]) == 2 and arms["plain"]["heldout"] == 2.5 and arms["plain"]["solved"] == sum(arms["plain"]["seeds"]) / 2
    assert "| plain | 2 | 9 |" in bench.render("cdlm_losses", measured["cdlm_losses"])
    speed = {(r["batch"], r["decoder"]): r for r in measured["cdlm_speed"]["rows"]}
    for batch in (1, 4):
        assert speed[batch, "teacher"]["faster_than_teacher"] == 1 and speed[batch, "student"]["fed"] < speed[batch, "teacher"]["fed"]
        assert speed[batch, "ar"]["intensity"] < speed[batch, "student"]["intensity"] < speed[batch, "teacher"]["intensity"]
        assert speed[batch, "student"]["problems"] == batch
    assert speed[4, "ar"]["intensity"] > speed[1, "ar"]["intensity"]


def test_gaps_are_filled_where_they_are(toys, monkeypatch):
    """A decoder that knows the reference fills every gap; the slots that it is given are those around the gap, or before it."""
    args, model, tokenizer = toys
    decoder = cdlm_studies.load(args, model, tokenizer).decoder("student", 4)
    seen = []

    def knows(requests, given):
        seen.append([sorted(g) for g in given])
        for r in requests:
            r.state = cdlm.Answer(r, decoder.mask_id, cdlm.BLOCK_SIZE)
            r.state.tokens[r.state.prompt:] = whole[tuple(r.tokens)]

    whole = {}
    for f in tasks.FAMILIES:
        _, ids, slots = cdlm.fitting(tokenizer, f, cdlm_studies.FIRST, "heldout")
        whole[tuple(ids + slots[:32])] = slots[32:64]
    monkeypatch.setattr(decoder, "generate", knows)
    rows = cdlm_studies.infill(decoder, tokenizer, 2)
    assert [(r["gap"], r["given"], r["open"]) for r in rows] == [(g, 1, 1) for g in (4, 8, 16)] and rows[0]["answers"] > 0
    assert seen[0][0] == [*range(14), *range(18, 32)] and seen[1][0] == list(range(14)) and seen[4][0] == [*range(8), *range(24, 32)]


def test_runs_of_teachers_are_compared_step_by_step(toys, tmp_path):
    args, model, tokenizer = toys
    for arm, losses in (("a", [3, 1]), ("b", [2])):
        (tmp_path / arm / "teacher").mkdir(parents=True)
        lines = [{"step": 50 * (i + 1), "heldout": {"arith": x, "story": x + 1}} for i, x in enumerate(losses)]
        lines[-1] |= {"decoded": {"solved": 0.5, "problems": 8, "steps": 12.0}} if arm == "a" else {}
        (tmp_path / arm / "teacher" / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "other").mkdir()
    result = json.loads(json.dumps(cdlm_studies.cdlm_teachers(methods.settings(**{**vars(args), "arms": str(tmp_path)}), model, tokenizer)))
    assert bench.render("cdlm_teachers", result).split("\n")[2:] == ["| a | 3.500 | 1.500 | 50 % of 8 | 12.0 |", "| b | 2.500 |  |  |  |"]
    with pytest.raises(ValueError, match="this study compares teachers"):
        cdlm_studies.cdlm_teachers(methods.settings(**{**vars(args), "arms": str(tmp_path / "a")}), model, tokenizer)


def test_what_cannot_be_compared_is_one_line(toys, tmp_path):
    args, model, tokenizer = toys
    for arms, message in (("/nowhere", "no folder of students /nowhere"), (str(tmp_path), "train_cdlm.py --name"), (None, "got None")):
        with pytest.raises(ValueError, match=message) as e:
            cdlm_studies.cdlm_losses(methods.settings(**{**vars(args), "arms": arms}), model, tokenizer)
        assert "\n" not in str(e.value)
