"""Whether other programs were at work while something was timed.

A step on a CPU waits for its slowest thread. So one busy program beside it can make a step many times slower
than half of the machine would explain.
"""
import os
import time

SHARE = 0.15                # of one core that others may use


class Load:
    """CPU seconds of other programs since it was made."""

    def __init__(self):
        self.others, self.wall = others(), time.perf_counter()

    def warning(self, threads):
        """A line that says so where other programs used more than SHARE of a core, else "". `threads`: of this
        program. Where the system does not tell, nothing is said."""
        wall = time.perf_counter() - self.wall
        if self.others is None or wall < 1:
            return ""
        cores = (others() - self.others) / wall
        if cores <= SHARE or os.cpu_count() - cores >= threads - SHARE:
            return ""
        return (f"other programs used {cores:.1f} of {os.cpu_count()} cores, and every step waited for them: stop "
                f"them, or leave them a core (OMP_NUM_THREADS={max(os.cpu_count() - 1, 1)})")


def others():
    """CPU seconds that all other programs have used since the machine started; None where /proc/stat is not
    there."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return None
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
