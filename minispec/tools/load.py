"""A warning if other programs used the CPU during a measurement.

A forward on a CPU waits for its slowest thread, so one busy program can make it many times slower than the
loss of one core explains.
"""
import os
import time

SHARE = 0.15                # share of one core that other programs may use


class Load:
    """CPU seconds of other programs since the creation of the object."""

    def __init__(self):
        self.others, self.wall = others(), time.perf_counter()

    def warning(self, threads):
        """A line if other programs used more than SHARE of a core that this program's `threads` need, else
        "". Also "" if the system does not count their time."""
        wall = time.perf_counter() - self.wall
        if self.others is None or wall < 1:
            return ""
        cores = (others() - self.others) / wall
        if cores <= SHARE or os.cpu_count() - cores >= threads - SHARE:
            return ""
        return (f"other programs used {cores:.1f} of {os.cpu_count()} cores, and every forward waited for "
                f"them: stop them, or leave them a core (OMP_NUM_THREADS={max(os.cpu_count() - 1, 1)})")


def others():
    """CPU seconds of all other programs since the machine started; None without /proc/stat."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return None
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
