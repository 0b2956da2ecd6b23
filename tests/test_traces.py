"""The file formats of traces.py and costs.py: prices between and beyond measured points; bad files are named with
file, line and field."""

import itertools
import json
import random

import numpy as np
import pytest
from conftest import table
from test_bounds import grid, linear, random_trace

from minispec import traces
from minispec.costs import CostTable, expected_tokens, read_costs
from minispec.traces import read_traces, write_traces

FIELDS = "accept", "censored", "offered"


# -- prices ----------------------------------------------------------------------------------------


def test_a_grid_is_linear_between_and_beyond_its_points():
    rows, tokens, kv = [1, 4, 16], [1, 2, 9], [0, 100, 1000]
    exact = lambda b, n, c: 1 + 0.2 * b + 0.1 * n + 0.01 * c + 0.003 * b * n + 1e-4 * b * c
    values = [[[exact(b, n, c) for c in kv] for n in tokens] for b in rows]
    cost = CostTable({"verify": grid(rows, tokens, kv, values)})
    for b, n, c in itertools.product((1, 2, 4, 30), (1, 1.5, 9, 50), (0, 37, 1000, 3000)):
        assert cost.verify(b * c, b * n, b) == pytest.approx(exact(b, n, c), rel=1e-12)
    kinked = CostTable({"verify": grid([1], [1, 2, 4, 8], [0], [[[1], [3], [4], [9]]])})
    asked = np.array([1, 1.5, 2, 3, 4, 5, 8, 16])
    assert kinked.verify(0, asked).tolist() == [1, 2, 3, 3.5, 4, 5.25, 9, 19]
    # One point is constant, and nothing is extrapolated below the least one.
    flat = CostTable({"verify": grid([1], [1, 2], [5], [[[2.0], [1.0]]])})
    assert (flat.verify(500, 1), flat.verify(0, 9)) == (2, 1)


@pytest.mark.parametrize("rows", [[1], [1, 4]])
@pytest.mark.parametrize("tokens", [[3], [1, 9]])
@pytest.mark.parametrize("kv", [[512], [0, 100]])
def test_a_price_has_the_shape_of_the_question(rows, tokens, kv):
    half = grid(rows, tokens, kv, np.full((len(rows), len(tokens), len(kv)), 0.5).tolist())
    cost = CostTable({"verify": half, "draft": {"a": half}})
    many = np.arange(5.0)
    for price in (cost.verify(100 * many, 1), cost.verify(7, many + 1), cost.draft("a", 100 * many, 3)):
        assert price.tolist() == [0.5] * 5
    assert cost.draft("a", many[:, None], many[:3]).shape == (5, 3)
    assert cost.verify(7, 1).shape == ()


def test_a_round_without_drafts_asks_nobody():
    draft = {"a": linear(base=5, step=1, kv_step=2)}
    cost = CostTable({"verify": linear(token=1, kv=2, row=3), "draft": draft})
    drafts = np.arange(3)
    assert cost.round(None, 9, drafts, 2).tolist() == [18 + 6 + 2, 18 + 6 + 4, 18 + 6 + 6]
    assert cost.round("a", 9, drafts).tolist() == [18 + 3 + 1, 18 + 3 + 2 + 6 + 18, 18 + 3 + 3 + 7 + 36]


def test_expected_tokens_of_a_round():
    assert expected_tokens(0.5, 3).tolist() == [1, 1.5, 1.75, 1.875]


# -- files -----------------------------------------------------------------------------------------

GOOD = {
    "id": "x",
    "prompt_len": 9,
    "n_out": 4,
    "accept": {"a": [0, 2, 1, 1]},
    "censored": {"a": [None, False, False, True]},
}


def test_files_are_read_as_they_were_written(tmp_path):
    rng = random.Random(19)
    path = tmp_path / "t.jsonl"
    some = [random_trace(rng, n) for n in (2, 6, 30)]
    for i, t in enumerate(some):
        t.id = f"\u2028{i}"  # a line separator of Unicode, not of JSON lines
        t.censored["a"] = t.accept["a"] > 4
        t.offered["b"] = t.accept["b"] + 2
    write_traces(path, some)
    columns = lambda t: {f: {m: c[1:].tolist() for m, c in getattr(t, f).items()} for f in FIELDS}
    for a, b in zip(read_traces(path), some, strict=True):
        assert (a.id, a.prompt_len, a.n_out, columns(a)) == (b.id, b.prompt_len, b.n_out, columns(b))
    # Some editors begin a file with a byte-order mark.
    path.write_text(json.dumps(GOOD), encoding="utf-8-sig")
    assert read_traces(path)[0].id == "x"


def test_the_documented_example_is_valid(tmp_path):
    text = traces.__doc__
    example = text[text.index('    {"id"') : text.index("\n\nid: the part")]
    (tmp_path / "t.jsonl").write_text(" ".join(example.split()) + "\n\n")
    assert read_traces(tmp_path / "t.jsonl")[0].accept["ngram"].tolist() == [0, 3, 1, 1]


def refused(read, path, text):
    """The error of a bad file: one line that begins with the file."""
    path.write_text(text)
    with pytest.raises(ValueError) as e:
        read(path)
    message = str(e.value)
    assert message.startswith(str(path)) and "\n" not in message and len(message) < 500
    return message


# A line or changed fields of GOOD, "gone" for one that is missing; part of the message.
BAD = r"""
{"id": | not JSON
[1] | a row must be a JSON object, got list
{"n_out": "gone"} | 'n_out'
{"acept": {}} | 'acept'
{"id": "first"} | id 'first' is in the file already
{"prompt_len": -1} | prompt_len an integer from 0, n_out an integer from 1, got ["x", -1, 4]
{"prompt_len": 1000000000000000000000000000000} | prompt_len an integer from 0
{"accept": {"b": [1, 1, 1, 1]}, "censored": {}} | the drafters of the first line, a, got b
{"accept": {"a": [1, 1, 1]}} | accept.a must be a list of n_out = 4 values of type int, got [1, 1, 1]
{"accept": {"a": [1, 0, 1, 1]}} | accept.a[1] must be from 1 to 3
{"accept": {"a": [1, NaN, 1, 1]}} | accept.a must be a list of n_out = 4 values of type int
{"accept": {"a": null}} | damaged: TypeError
{"censored": {"a": [0, 0, 0, 0]}} | censored.a must be a list of n_out = 4 values of type bool
{"censored": {"b": []}} | censored.b: accept has no such drafter
{"offered": {"a": [0, 0, 0, 0]}} | accept.a[1] must be from 1 to 1
"""


@pytest.mark.parametrize("line, message", table(BAD))
def test_a_bad_trace_is_refused_with_file_line_and_field(line, message, tmp_path):
    if line.endswith("}"):
        line = json.dumps({name: x for name, x in (GOOD | json.loads(line)).items() if x != "gone"})
    good = json.dumps(GOOD | {"id": "first"})
    found = refused(read_traces, tmp_path / "t.jsonl", f"{good}\n\n{line}\n")
    assert "t.jsonl:3" in found and message in found


def test_unreadable_files_are_named(tmp_path):
    path = tmp_path / "t.jsonl"
    for read in (read_traces, read_costs):
        with pytest.raises(ValueError, match=f"cannot read {path}: No such file"):
            read(path)
    path.write_bytes(b"\n\xff\n")
    with pytest.raises(ValueError, match=f"cannot read {path}: .utf-8"):
        read_traces(path)
    assert "no trace in this file" in refused(read_traces, path, "\n")




# A file, or fields next to "verify"; part of the message. GRID is a part of such a table.
COSTS = r"""
{"verify": | not JSON (Expecting value: line 1
[] | damaged
{} | 'verify'
+ "verfy": 1 | verfy: unknown field; known are about, verify
{"verify": {"kind": "linear"}} | verify: a forward that takes no time
+ "accept": {"a": 1.5} | accept.a must be from 0 to 1, got 1.5
+ "draft": {"b": {"kind": "cubic"}} | 'cubic'
+ "draft": {"b": 3} | draft.b is damaged
+ "draft": {"b": {"kind": "linear", "kv": -1}} | in lists 0 deep, got -1
+ "draft": {"b": {"kind": "linear", "kv": "1"}} | draft.b.kv must be numbers from 0 to 1e+09 in
+ "draft": {"b": {"kind": "linear", "steps": 1}} | draft.b.steps: unknown field; known are base, row, token
+ "draft": {"b": {"kind": "grid"}} | 'rows'
+ "draft": {"b": {GRID, "rows": [2, 1]}} | draft.b: rows, tokens, kv must increase
+ "draft": {"b": {GRID, "kv": []}} | draft.b.kv must be numbers from 0 to 1e+09 in lists 1 deep, got []
+ "draft": {"b": {GRID, "seconds": [[[1.0]]]}} | draft.b.seconds must have the shape (2, 1, 1)
"""
SQUARE = '"kind": "grid", "rows": [1, 2], "tokens": [1], "kv": [0], "seconds": [[[1.0]], [[2.0]]]'


@pytest.mark.parametrize("text, message", table(COSTS))
def test_a_bad_cost_table_is_refused_with_file_and_field(text, message, tmp_path):
    if text.startswith("+"):
        text = f'{{"verify": {{"kind": "linear", "base": 1}}, {text[1:]}}}'.replace("GRID", SQUARE)
    assert message in refused(read_costs, tmp_path / "c.json", text)
