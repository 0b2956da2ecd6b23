"""The two file formats of traces.py: cost tables between and beyond their points, and bad files named with file, line and field."""
import itertools
import json
import random

import numpy as np
import pytest
from test_bounds import PUBLISHED, random_trace

from minispec import traces
from minispec.traces import CostTable, Trace, read_costs, read_traces, write_traces


# -- cost tables -----------------------------------------------------------------------------------------------------------

def test_grid_is_linear_between_and_beyond_its_points():
    rows, tokens, kv = [1, 4, 16], [1, 2, 9], [0, 100, 1000]
    exact = lambda b, n, c: 1 + 0.2 * b + 0.1 * n + 0.01 * c + 0.003 * b * n + 1e-4 * b * c     # linear in each
    values = [[[exact(b, n, c) for c in kv] for n in tokens] for b in rows]
    grid = {"kind": "grid", "rows": rows, "tokens": tokens, "kv": kv, "seconds": values}
    cost = CostTable({"verify": grid})
    for b, n, c in itertools.product((1, 2, 4, 30), (1, 1.5, 9, 50), (0, 37, 1000, 3000)):
        assert cost.verify(b * c, b * n, b) == pytest.approx(exact(b, n, c), rel=1e-12)
    kinked = CostTable({"verify": grid | {"rows": [1], "tokens": [1, 2, 4, 8], "kv": [0], "seconds": [[[1], [3], [4], [9]]]}})
    assert kinked.verify(0, np.array([1, 1.5, 2, 3, 4, 5, 8, 16])).tolist() == [1, 2, 3, 3.5, 4, 5.25, 9, 19]
    many = cost.verify(4 * np.array([[50], [700]]), 4 * np.array([1, 2, 3]), 4)
    assert many.shape == (2, 3) and many[1, 2] == pytest.approx(exact(4, 3, 700))
    flat = CostTable({"verify": {"kind": "grid", "rows": [1], "tokens": [1, 2], "kv": [5], "seconds": [[[2.0], [1.0]]]}})
    assert flat.verify(500, 1) == 2 and flat.verify(0, 9) == 1                  # one point: constant; never below the least


def test_a_price_has_the_shape_of_what_was_asked():
    """Also where the table is constant in some axis, or in all of them."""
    for rows, tokens, kv in itertools.product(([1], [1, 4]), ([3], [1, 9]), ([512], [0, 100])):
        grid = {"kind": "grid", "rows": rows, "tokens": tokens, "kv": kv, "seconds": np.full((len(rows), len(tokens), len(kv)), 0.5).tolist()}
        cost = CostTable({"verify": grid, "draft": {"a": grid}})
        many = np.arange(5.0)
        assert cost.verify(100 * many, 1).tolist() == cost.verify(7, many + 1).tolist() == cost.draft("a", 100 * many, 3).tolist() == [0.5] * 5
        assert cost.draft("a", many[:, None], many[:3]).shape == (5, 3) and cost.verify(7, 1).shape == ()


# -- files -----------------------------------------------------------------------------------------------------------------

def test_files_are_read_as_they_were_written(tmp_path):
    rng, path = random.Random(19), tmp_path / "t.jsonl"
    some = [random_trace(rng, n) for n in (2, 1 + 5, 30)]
    for i, t in enumerate(some):
        t.id = f"\u2028{i}"                                                     # a line separator for Unicode, not for JSON lines
        t.censored["a"] = t.accept["a"] > 4
        t.offered["b"] = t.accept["b"] + 2
    write_traces(path, some)
    for a, b in zip(read_traces(path), some, strict=True):
        assert (a.id, a.prompt_len, a.n_out) == (b.id, b.prompt_len, b.n_out)
        for field in ("accept", "censored", "offered"):
            assert {m: v[1:].tolist() for m, v in getattr(a, field).items()} == {m: v[1:].tolist() for m, v in getattr(b, field).items()}
    path.write_text(json.dumps(GOOD | {"id": some[0].id}, ensure_ascii=False), encoding="utf-8")
    assert read_traces(path)[0].id == some[0].id
    (tmp_path / "c.json").write_text(json.dumps(PUBLISHED, indent=1))
    assert read_costs(tmp_path / "c.json") == PUBLISHED


def test_the_documented_example_is_valid(tmp_path):
    text = traces.__doc__
    example = text[text.index('    {"id"'):text.index("\n\nWhat is in front")]
    (tmp_path / "t.jsonl").write_text(" ".join(example.split()) + "\n\n")
    assert read_traces(tmp_path / "t.jsonl")[0].accept["ngram"].tolist() == [0, 3, 1, 1]


GOOD = {"id": "x", "prompt_len": 9, "n_out": 4, "accept": {"a": [0, 2, 1, 1]}, "censored": {"a": [None, False, False, True]}}
BAD_TRACES = {
    "not json": ('{"id": ', "not JSON"),
    "not an object": ("[1]", "a row must be a JSON object, got list"),
    "too deep": ("[" * 100_000, "not JSON"),
    "huge number": ('{"id": ' + "1" * 5000 + "}", "not JSON"),
    "field missing": ({k: v for k, v in GOOD.items() if k != "n_out"}, "n_out: missing"),
    "field unknown": (GOOD | {"acept": {}}, "acept: unknown field; known are id"),
    "id": (GOOD | {"id": 7}, "id: expected a string, got 7"),
    "twice": (GOOD | {"id": "first"}, "id: 'first' is in the file already"),
    "prompt_len": (GOOD | {"prompt_len": -1}, "prompt_len: expected an integer from 0, got -1"),
    "n_out": (GOOD | {"n_out": True}, "n_out: expected an integer from 1, got true"),
    "no drafter": (GOOD | {"accept": {}, "censored": {}}, "accept: no drafter"),
    "other drafters": (GOOD | {"accept": {"b": [1, 1, 1, 1]}, "censored": {}}, "accept: the drafters are b, but a above"),
    "length": (GOOD | {"accept": {"a": [1, 1, 1]}}, "accept.a: expected a list of n_out = 4 values, got [1, 1, 1]"),
    "zero": (GOOD | {"accept": {"a": [1, 0, 1, 1]}}, "accept.a[1]: expected an integer from 1 to 3, by what is missing and what was offered, got 0"),
    "past the end": (GOOD | {"accept": {"a": [1, 1, 1, 2]}}, "accept.a[3]: expected an integer from 1 to 1, by what is missing and what was offered, got 2"),
    "fraction": (GOOD | {"accept": {"a": [1, 1.0, 1, 1]}}, "accept.a: expected integers, got [1, 1.0, 1, 1]"),
    "nan": (GOOD | {"accept": {"a": [1, float("nan"), 1, 1]}}, "accept.a: expected integers, got [1, NaN, 1, 1]"),
    "null": (GOOD | {"accept": {"a": None}}, "accept.a: expected a list of n_out = 4 values, got null"),
    "censored": (GOOD | {"censored": {"a": [0, 0, 0, 0]}}, "censored.a: expected true or false, got [0, 0, 0, 0]"),
    "censored name": (GOOD | {"censored": {"b": []}}, "censored.b: unknown field; known are a"),
    "offered": (GOOD | {"offered": {"a": [0, 0, 0, 0]}}, "accept.a[1]: expected an integer from 1 to 1, by what is missing and what was offered, got 2"),
}


@pytest.mark.parametrize("name", BAD_TRACES)
def test_bad_trace_is_refused_with_file_line_and_field(name, tmp_path):
    line, message = BAD_TRACES[name]
    path, good = tmp_path / "t.jsonl", GOOD | {"id": "first"}
    path.write_text("\n".join([json.dumps(good), "", line if isinstance(line, str) else json.dumps(line)]) + "\n")
    with pytest.raises(ValueError) as e:
        read_traces(path)
    assert str(e.value).startswith(f"{path}:3: ") and message in str(e.value) and "\n" not in str(e.value) and len(str(e.value)) < 400
    path.write_text(json.dumps(good))
    assert len(read_traces(path)) == 1                                          # the good line is good


def test_a_byte_order_mark_is_no_error(tmp_path):
    """Editors of some systems begin every file with one."""
    (tmp_path / "t.jsonl").write_text(json.dumps(GOOD), encoding="utf-8-sig")
    (tmp_path / "c.json").write_text(json.dumps(PUBLISHED), encoding="utf-8-sig")
    assert read_traces(tmp_path / "t.jsonl")[0].id == "x" and read_costs(tmp_path / "c.json") == PUBLISHED


def test_a_trace_in_memory_is_checked_too():
    for column, message in (([1, 0, 1], r"accept.a\[1\]: expected an integer from 1 to 2, by what is missing and what was offered, got 0"), ([1, 1], "accept.a: expected a list of n_out = 3 values")):
        with pytest.raises(ValueError, match=message):
            Trace("t", 1, 3, {"a": np.array(column)})


def test_unreadable_files_are_named(tmp_path):
    path = tmp_path / "t.jsonl"
    for read in (read_traces, read_costs):
        with pytest.raises(ValueError, match=f"cannot read {path}: No such file"):
            read(path)
    path.write_bytes(b"\n\xff\n")
    with pytest.raises(ValueError, match=f"cannot read {path}: .utf-8"):
        read_traces(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match=f"{path}: no trace"):
        read_traces(path)


GRID = {"kind": "grid", "rows": [1, 2], "tokens": [1], "kv": [0], "seconds": [[[1.0]], [[2.0]]]}
BAD_COSTS = {                                # what replaces table["draft"]["b"], or the whole; message
    "not json": ('{\n "verify": {\n', "Expecting property name enclosed in double quotes: line 3"),
    "not an object": ("[]", "expected an object"),
    "no verify": ("{}", "verify: missing"),
    "unknown": ('{\n "verify": {"kind": "linear", "base": 1},\n "verfy": 1}', "verfy: unknown field"),
    "free verify": ('{\n "verify": {"kind": "linear"}}', "verify: a forward that takes no time"),
    "read": ('{\n "verify": {"kind": "linear", "base": 1},\n "read": {"a": {"kind": "share", "of_verify": 1}}}', "read.a: expected an object whose kind is linear or grid"),
    "accept": ('{\n "verify": {"kind": "linear", "base": 1},\n "accept": {\n  "a": 1.5}}', "accept.a: expected a number from 0 to 1, got 1.5"),
    "kind": ({"kind": "cubic"}, "draft.b: expected an object whose kind is linear or grid or share"),
    "no object": (3, "draft.b: expected an object whose kind is"),
    "negative": ({"kind": "linear", "kv": -1}, "draft.b.kv: expected a number from 0 to 1e+09, got -1"),
    "nan": ({"kind": "linear", "kv": float("nan")}, "draft.b.kv: expected a number from 0 to 1e+09, got NaN"),
    "text": ({"kind": "linear", "kv": "1"}, "draft.b.kv: expected a number from 0 to 1e+09, got"),
    "coefficient": ({"kind": "linear", "steps": 1}, "draft.b.steps: unknown field; known are kind, base, row, token"),
    "roofline": ({"kind": "roofline", "kv": 1}, "draft.b: expected an object whose kind is linear or grid or share"),
    "share": ({"kind": "share"}, "draft.b.of_verify: missing"),
    "grid axis": (GRID | {"rows": [2, 1]}, "draft.b.rows: expected increasing numbers"),
    "grid empty": (GRID | {"kv": []}, "draft.b.kv: expected numbers in lists 1 deep from 0 to 1e+09, got []"),
    "grid shape": (GRID | {"seconds": [[[1.0]]]}, "draft.b.seconds: expected a number for each of [2, 1, 1]"),
    "grid value": (GRID | {"seconds": [[[1.0]], [[None]]]}, "draft.b.seconds: expected numbers in lists 3 deep from 0"),
}


@pytest.mark.parametrize("name", BAD_COSTS)
def test_bad_cost_table_is_refused_with_file_and_field(name, tmp_path):
    entry, message = BAD_COSTS[name]
    path = tmp_path / "c.json"
    table = {"verify": {"kind": "linear", "base": 1.0}, "draft": {"a": {"kind": "linear", "kv": 0}, "b": entry}}
    path.write_text(entry if isinstance(entry, str) else json.dumps(table, indent=1))
    with pytest.raises(ValueError) as e:
        read_costs(path)
    assert str(e.value).startswith(str(path)) and message in str(e.value) and "\n" not in str(e.value)
