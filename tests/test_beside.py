"""The two processes of the tests: what the second one sees is reported, also when it dies. On files made
here."""
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

GOOD = "import time\ndef test_good():\n    time.sleep(0.2)\n"
# However long the second process takes, the first one does not get to the last test before it: that begins
# with a file for which the one before it waits.
BEGIN = "import os\ndef test_d():\n    open('begun', 'w').close()\n"
WAIT = """import os, time
def test_waits():
    while not os.path.exists('begun'):
        time.sleep(0.01)
"""
FAILS = BEGIN + "    assert 'MINISPEC_TESTS_BESIDE' not in os.environ\n"
DIES = BEGIN + "    if 'MINISPEC_TESTS_BESIDE' in os.environ:\n        os._exit({code})\n"

pytestmark = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core runs one process")


def run(folder, files):
    shutil.copy(f"{ROOT}/tests/beside.py", folder)
    (folder / "conftest.py").write_text("from beside import pytest_sessionstart\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    own = "MINISPEC_TESTS_BESIDE", "PYTEST_ADDOPTS", "FORCE_COLOR", "PY_COLORS"
    env = {name: value for name, value in os.environ.items() if name not in own}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)


def test_failures_of_both_processes_are_reported(tmp_path):
    p = run(tmp_path, {"a": "def test_a(): assert 0\n", "b": GOOD, "c": WAIT, "d": FAILS})
    assert p.returncode == 1 and "2 failed, 2 passed" in p.stdout
    assert "test_a.py::test_a" in p.stdout and "test_d.py::test_d" in p.stdout


@pytest.mark.parametrize("code", [9, 1])
def test_a_second_process_that_dies_is_a_failure(code, tmp_path):
    p = run(tmp_path, {"a": GOOD, "b": GOOD, "c": WAIT, "d": DIES.format(code=code)})
    assert p.returncode == 1 and f"the tests beside these ended with {code}" in p.stdout + p.stderr
