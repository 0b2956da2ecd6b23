"""The tests on two cores: this pytest runs them from the first on, a second one, its child, from the last on,
until they meet. What the child reports, the parent reports.

Before each test a process takes one byte from a pipe that holds as many bytes as there are tests."""
import multiprocessing
import os
import queue
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import Connection

import pytest

CHILD = os.environ.get("MINISPEC_TESTS_BESIDE")          # in the child: its ends of two pipes, "3 4"


def pytest_sessionstart(session):
    config = session.config
    if CHILD:
        config.pluginmanager.register(Child(config, *map(int, CHILD.split())))
    elif (any(os.path.isdir(arg) for arg in config.args) and (os.cpu_count() or 1) > 1
          and not config.option.collectonly and not config.option.usepdb):
        config.pluginmanager.register(Parent(config))


def run(session, items, tokens, after=lambda: None):
    """pytest's own loop, over as many of `items` as there are bytes in the pipe."""
    for item, following in zip(items, [*items[1:], None]):
        if not os.read(tokens, 1):
            return
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        after()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


class Child:
    def __init__(self, config, tokens, reports):
        self.config, self.tokens, self.reports = config, tokens, Connection(reports, readable=False)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        run(session, session.items[::-1], self.tokens)
        return True

    def pytest_runtest_logreport(self, report):
        self.reports.send(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))


class Parent:
    """Starts the child before the tests are collected, so that both collect at once."""

    def __init__(self, config):
        self.config, self.reports, self.output = config, queue.SimpleQueue(), tempfile.TemporaryFile("w+")
        self.ended = set()                               # tests of both that are reported
        self.tokens, self.supply = os.pipe()
        receiver, sender = multiprocessing.Pipe(duplex=False)
        ends = self.tokens, sender.fileno()
        self.child = subprocess.Popen(
            [sys.executable, "-m", "pytest", *config.invocation_params.args], pass_fds=ends,
            stdout=self.output, stderr=self.output,
            env={**os.environ, "MINISPEC_TESTS_BESIDE": "%d %d" % ends})
        sender.close()
        # A thread reads, so that the child never waits for its parent.
        self.listener = threading.Thread(target=self.listen, args=[receiver], daemon=True)
        self.listener.start()
        config.add_cleanup(self.child.kill)

    def listen(self, receiver):
        try:
            while True:
                self.reports.put(receiver.recv())
        except EOFError:                                 # the child has ended
            pass

    def report(self):
        hook = self.config.hook
        while not self.reports.empty():
            data = self.reports.get()
            report = hook.pytest_report_from_serializable(config=self.config, data=data)
            hook.pytest_runtest_logreport(report=report)

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self.ended.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if session.testsfailed:                          # in collection: pytest's own loop says so
            return None
        os.write(self.supply, b"." * len(session.items))
        os.close(self.supply)
        run(session, session.items, self.tokens, self.report)
        code = self.child.wait(1800)
        self.listener.join()
        self.report()
        # Neither all passed nor some failed; or pytest's own time limit has ended it, with code 1 too.
        if code not in (0, 1) or len(self.ended) < len(session.items):
            self.output.seek(0)
            said = self.output.read()[-20_000:]
            pytest.exit(f"the tests beside these ended with {code}:\n{said}", returncode=1)
        return True
