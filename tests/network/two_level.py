"""Two-level against flat sums, 2 hosts x 2 replicas, over a limited link (root).

    python -m tests.network.two_level [REPEATS]

Flat is one ring of four workers, in the order of the hosts; two-level sums within each
host first. The arms take turns.
"""

import os
import statistics
import subprocess
import sys

from tests.support.two_hosts import ADDRESSES, two_hosts, why_not
from tests.support.workers import free_port

# Rate of the link -> megabytes to sum.
CASES = {"100mbit": 1.0, "1gbit": 25.0}


def timed(hosts, arm, megabytes, repeats):
    """Seconds of each sum, as worker 0 saw them."""
    flat = arm == "flat"
    workers, devices = (4, 1) if flat else (2, 2)
    coordinator = f"{ADDRESSES[0]}:{free_port()}"
    processes = [
        subprocess.Popen(
            hosts.command(
                *(rank * 2 // workers, sys.executable),
                *("-m", "tests.support.link_timing", str(rank), str(workers)),
                *(coordinator, str(megabytes), str(repeats)),
            ),
            env={**os.environ, "DEVICES": str(devices)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(workers)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{arm} failed")
    lines = [line for line in outputs[0].splitlines() if line.startswith("seconds")]
    return [float(line.split()[1]) for line in lines[1:]]  # the first one warms up


def main(repeats):
    reason = why_not()
    if reason:
        raise SystemExit(reason)
    for rate, megabytes in CASES.items():
        with two_hosts(rate) as hosts:
            seconds = {"flat": [], "two-level": []}
            for _ in range(3):
                for arm in seconds:
                    seconds[arm] += timed(hosts, arm, megabytes, repeats)
        flat, two = (statistics.median(seconds[arm]) for arm in seconds)
        spread = {arm: f"{min(s):.3f}..{max(s):.3f}" for arm, s in seconds.items()}
        print(
            f"{rate}, {megabytes:g} MB: flat {flat:.3f} s ({spread['flat']}), "
            f"two-level {two:.3f} s ({spread['two-level']}): {flat / two:.2f} times"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 6)
