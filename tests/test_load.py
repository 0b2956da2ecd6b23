"""Whether other programs were at work while something was timed."""
import pytest
from conftest import python, values

from minispec.tools import load


@pytest.mark.parametrize("used, threads, cores, said", values("""
    0.0   | 2 |  2 | false
    0.2   | 2 |  2 | false
    4.0   | 2 |  2 | true
    10.0  | 2 |  2 | true
    10.0  | 1 |  2 | false
    12.0  | 1 |  2 | true
    20.0  | 2 | 16 | false
    140.0 | 4 | 16 | true
"""))
def test_a_busy_machine_is_named(used, threads, cores, said, monkeypatch):
    """CPU seconds of others in ten seconds; they matter if they take a core that a thread needs."""
    seconds = iter((5.0, 5.0 + used))
    clock = iter((100.0, 110.0))
    monkeypatch.setattr(load, "others", lambda: next(seconds))
    monkeypatch.setattr(load.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(load.os, "cpu_count", lambda: cores)
    line = load.Load().warning(threads)
    assert bool(line) == said
    assert not said or f"used {used / 10:.1f} of {cores} cores" in line and "OMP_NUM_THREADS=" in line


def test_nothing_is_said_where_the_system_does_not_tell(monkeypatch):
    clock = iter((0.0, 10.0))
    monkeypatch.setattr(load.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr("builtins.open", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    assert load.others() is None
    assert load.Load().warning(2) == ""


@pytest.mark.skipif(load.others() is None, reason="no /proc/stat here")
def test_the_work_of_another_program_is_seen_and_ones_own_is_not():
    before = load.others()
    sum(range(10 ** 7))                                            # own work
    between = load.others()
    python("-c", "import time\nwhile time.process_time() < 0.6: pass")
    assert load.others() - between > 0.4
    assert between - before > -0.1
