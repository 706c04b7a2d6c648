"""How many tests this machine runs at a time: prints it, for `make`.

python tests/support/jobs.py             tests that share their process with others
python tests/support/jobs.py --alone     tests that start processes of their own

Any Python will do: it is asked before anything is installed.
"""

import os
import pathlib
import sys

#: As many as were tried.
MOST = 4
#: Two share one core, where there is but one.
LEAST = 2
#: What one takes, and some for the rest of the machine.
JOB_BYTES = 4 * 2**30
#: Tests with processes of their own have as many cores to themselves.
CORES_ALONE = 2
CPU_QUOTA = pathlib.Path("/sys/fs/cgroup/cpu.max")


def jobs(cores: float, memory_bytes: int) -> int:
    """Tests at a time, of a process each."""
    return max(LEAST, min(MOST, int(cores), memory_bytes // JOB_BYTES))


def jobs_alone(cores: float, memory_bytes: int) -> int:
    """Tests at a time that start processes of their own, which have deadlines."""
    return max(1, jobs(cores, memory_bytes) // CORES_ALONE)


def usable_cores(quota: pathlib.Path = CPU_QUOTA) -> float:
    """Those that this process may run on, or what a container gives it of them."""
    try:
        cores = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # macOS
        cores = float(os.cpu_count() or 1)
    try:
        allowed, period = quota.read_text("ascii").split()
        return min(cores, int(allowed) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return cores  # no such file, or "max": as many as there are


def memory_bytes() -> int:
    """What the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    count = jobs_alone if "--alone" in sys.argv[1:] else jobs
    print(count(usable_cores(), memory_bytes()))
