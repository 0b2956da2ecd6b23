"""Exercises that grade themselves:

    python -m exercises            list them
    python -m exercises NAME       is exercises/NAME.py right or wrong?

Fill in the function there. It takes the place of the project's own function (PLACE), and some of the tests of
that function decide (TESTS). The solution is the project's own function.
"""
import contextlib
import importlib
import io
import sys
from pathlib import Path
from unittest import mock

import pytest
from minispec import ROOT
from minispec.tools.script import Parser, run_main

FILES = sorted(Path(f"{ROOT}exercises").glob("[!_]*.py"))
NAMES = [file.stem for file in FILES]
# Neither a cache on disk, nor the search for forgotten errors, which takes longer than most tests.
OPTIONS = ["-x", "--tb=short", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]


class FirstFailure:
    """A plugin of pytest that keeps the first failure: the error, and the report on it."""
    error = report = None

    def pytest_exception_interact(self, call, report):
        self.error, self.report = call.excinfo.value, report


def grade(name):
    """The verdict on exercises/NAME.py, a text that begins with "right", "not filled in" or "wrong"."""
    first, shown = FirstFailure(), io.StringIO()
    try:
        stub = importlib.import_module(f"exercises.{name}")
        function = getattr(stub, stub.PLACE.rpartition(".")[2])
    except Exception as e:                                # whatever a student's file may raise
        return f"wrong, exercises/{name}.py cannot be read: {type(e).__name__}: {e}"
    with mock.patch(stub.PLACE, function), contextlib.redirect_stdout(shown):
        tests = [f"{ROOT}tests/{test}" for test in stub.TESTS]
        code = pytest.main([*OPTIONS, *tests], [first])
    if isinstance(first.error, NotImplementedError) and not first.error.args:         # torch's have a text
        return f"not filled in; write the function in exercises/{name}.py"
    if first.report:
        lines = [line for line in first.report.longreprtext.splitlines() if line.strip(" ^")]
        error = next((i for i, line in enumerate(lines) if line.startswith("E ")), 0)
        lines = lines[:min(error, 6)] + lines[error:error + 6]             # the test, and what went wrong
        return f"wrong, {first.report.nodeid} fails:\n" + "\n".join(lines)
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise ValueError(f"the tests did not run: {shown.getvalue()[-300:]}")
    return "right, its tests pass"


def main():
    p = Parser(__doc__)
    p.prog = "python -m exercises"
    p.add_argument("name", nargs="?", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    name = p.parse_args().name
    if name:
        verdict = grade(name)
        print(f"{name}: {verdict}")
        sys.exit(not verdict.startswith("right"))
    for file in FILES:
        task = file.read_text("utf-8").splitlines()[0].strip('"')
        print(f"{file.stem:16} {task}")
    print("python -m exercises NAME: is exercises/NAME.py right or wrong?")


if __name__ == "__main__":
    run_main(main)
