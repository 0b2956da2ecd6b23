"""The exercises grade right: the empty stub, the project's own function, and one with a small mistake."""
import importlib
import inspect
import re
import sys
import textwrap
from pkgutil import resolve_name

import beside
import pytest
from conftest import outcome, python, table

from exercises import __main__ as exercises

# A function, a part of it, what a student may write there, and so: takes the most probable last draft; takes
# the longest path; takes p, not the residual; forgets that a chain may have no q; leaves no room for the
# bonus; selects without the corrected token; forgets the scores; reads only the first positions of a window;
# sees the answer it is to predict; reads the newest own key; lets no gradient through; draws a tensor; has no
# state where all is read; leaves padding without a key; reads the first text alone.
MISTAKES = table("""
    best_path | score[parent] + reach[-1] | reach[-1]
    best_path | score[parent] + reach[-1] | score[parent] + 1
    rejection | (left - of_q) | left
    rejection | if q is not None | if True
    rung_seconds | trace.n_out - position - 1 | trace.n_out - position
    selection | accepted + 2 | accepted + 1
    selection | recent, scores) | recent)
    selection | recent = max(recent, b - N_SINKS) | recent = max(recent, b // 2)
    two_copies | key < row | key <= row
    unrolled_attend | *own = steps[layer] | *own = steps[layer][:1] + steps[layer][1:][-1:]
    unrolled_attend | append((k.transpose | append((k.detach().transpose
    rejection | draw(left, coins[-1]).item() | draw(left, coins[-1])
    selection | return SpecGenState() | return None
    two_copies | bidirectional(blocks) & | (blocks >= 0)[:, None, None, :] &
    unrolled_attend | q = q.transpose(1, 2) | q = q[:1].transpose(1, 2)
""")


def ours(name):
    """The function of the project."""
    return resolve_name(importlib.import_module(f"exercises.{name}").PLACE)


def mistaken(name, right, wrong):
    source = textwrap.dedent(inspect.getsource(ours(name)))
    assert right in source
    scope = dict(vars(sys.modules[ours(name).__module__]))
    exec(source.replace(right, wrong), scope)
    return scope[ours(name).__name__]


@pytest.fixture
def said(monkeypatch):
    """said(name, function): code and text of `python -m exercises NAME` with this function in the stub. It
    runs in this process, because importing torch takes seconds."""
    monkeypatch.setattr(beside, "CHILD", None)           # the second process has no part in these tests
    monkeypatch.setitem(sys.modules, "conftest", sys.modules["conftest"])        # pytest imports it again

    def say(name, function=None):
        stub = importlib.import_module(f"exercises.{name}")
        if function:
            monkeypatch.setattr(stub, function.__name__, function)
        function = getattr(stub, ours(name).__name__)
        # Tests that were imported before have the project's function by name.
        for test in stub.TESTS:
            module = importlib.import_module(test.partition(".py")[0])
            for key, value in vars(module).items():
                if value is ours(name):
                    monkeypatch.setattr(module, key, function)
        p = outcome(exercises, name)
        return p.returncode, p.stdout + p.stderr
    return say


@pytest.mark.parametrize("name", exercises.NAMES)
def test_an_empty_stub_is_not_filled_in(name, said):
    assert said(name) == (1, f"{name}: not filled in; write the function in exercises/{name}.py\n")


def test_an_operator_that_torch_lacks_is_a_mistake(said):
    def best_path(draft, parents, p):
        raise NotImplementedError("baddbmm not implemented for 'Bool'")
    assert said("best_path", best_path)[1].startswith("best_path: wrong, ")


@pytest.mark.parametrize("name", exercises.NAMES)
def test_the_projects_function_is_right(name, said):
    assert said(name, ours(name)) == (0, f"{name}: right, its tests pass\n")


@pytest.mark.parametrize("name, right, wrong", MISTAKES)
def test_a_small_mistake_is_wrong(name, right, wrong, said):
    """In the first line, the test; in a few more, its failure."""
    code, text = said(name, mistaken(name, right, wrong))
    assert code == 1 and re.match(rf"{name}: wrong, tests/test_\w+\.py::\S+ fails:\n", text)
    assert "\nE  " in text and text.count("\n") < 15


def test_a_stub_has_the_signature_of_the_projects_function():
    for name in exercises.NAMES:
        stub = importlib.import_module(f"exercises.{name}")
        function = getattr(stub, ours(name).__name__)
        assert inspect.signature(function) == inspect.signature(ours(name))
        assert function.__doc__ and "Paper: " in stub.__doc__


def test_the_lesson_of_a_stub_links_it():
    for file in exercises.FILES:
        lesson, = re.findall(r"docs/[\w-]+\.md", file.read_text("utf-8"))
        page = (file.parents[1] / lesson).read_text("utf-8")
        for link in (r"\(../exercises/(\w+).py\)", r"`python -m exercises (\w+)`"):
            assert re.findall(link, page) == [file.stem]


def test_names():
    p = python("-m", "exercises", "two")
    assert p.returncode == 2 and p.stderr.count("\n") == 1
    assert all(name in p.stderr for name in exercises.NAMES)
    shown = outcome(exercises).stdout
    assert [line.split()[0] for line in shown.splitlines()[:-1]] == exercises.NAMES


def test_a_file_without_the_function_is_wrong(monkeypatch):
    monkeypatch.delattr("exercises.best_path.best_path")
    p = outcome(exercises, "best_path")
    assert p.returncode == 1
    assert p.stdout.startswith("best_path: wrong, exercises/best_path.py cannot be read: Attr")
