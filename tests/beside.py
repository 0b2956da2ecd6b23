"""The tests on two cores: one pytest runs their files from the first on, a second one, its child, from the last on, until they
meet. What the child reports, the parent reports."""
import itertools
import json
import os
import subprocess
import sys
import tempfile

import pytest

CHILD = os.environ.get("MINISPEC_TESTS_BESIDE")          # in the child, the folder through which it talks with its parent


def run_files(session, folder, files, after=lambda: None):
    """pytest's own loop, over those of `files` [(path, items)] that this process is the first to claim."""
    for path, items in files:
        try:
            os.close(os.open(os.path.join(folder, f"{path.name}.claimed"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        for item, following in zip(items, [*items[1:], None]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
        after()


def run_beside(session, folder, files):
    hook, reports, output = session.config.hook, open(os.path.join(folder, "reports"), "a+"), open(os.path.join(folder, "output"), "w+")
    reports.seek(0)

    def report():
        while True:
            position = reports.tell()
            line = reports.readline()
            if not line.endswith("\n"):                  # the child is still at it
                return reports.seek(position)
            hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=session.config, data=json.loads(line)))

    child = subprocess.Popen([sys.executable, "-m", "pytest", *session.config.invocation_params.args], env={**os.environ, "MINISPEC_TESTS_BESIDE": folder},
                             stdout=output, stderr=output)
    try:
        run_files(session, folder, files, report)
        code = child.wait()
        report()
    finally:
        child.kill()
    if code not in (0, 1):                               # neither all passed nor some failed
        output.seek(0)
        pytest.exit(f"the tests beside these ended with {code}:\n{output.read()[-3000:]}", returncode=1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    files = [(path, list(items)) for path, items in itertools.groupby(session.items, lambda item: item.path)]
    option = session.config.option
    if CHILD:
        run_files(session, CHILD, files[::-1])
    elif len(files) < 4 or session.testsfailed or option.collectonly or option.usepdb or (os.cpu_count() or 1) < 2:
        return None                                      # pytest's own loop
    else:
        with tempfile.TemporaryDirectory() as folder:
            run_beside(session, folder, files)
    return True


class Reports:
    def __init__(self, config):
        self.config, self.lines = config, []

    def pytest_runtest_logreport(self, report):
        self.lines.append(json.dumps(self.config.hook.pytest_report_to_serializable(config=self.config, report=report)) + "\n")
        if report.when == "teardown":                    # not before: a test may have made the disk look full
            with open(os.path.join(CHILD, "reports"), "a", encoding="utf-8") as f:
                f.writelines(self.lines)
            self.lines.clear()


def pytest_configure(config):
    if CHILD:
        config.pluginmanager.register(Reports(config))
