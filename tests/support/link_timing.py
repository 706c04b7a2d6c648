"""One worker that sums arrays over a socket link and prints how long that took.

    python -m tests.support.link_timing RANK WORKERS COORDINATOR MEGABYTES REPEATS

With several devices per host the local sum is part of the time: DEVICES=2. WIRE_DTYPE
is the type in which the numbers travel, CHECKSUM=1 sends blocks with checksums.
"""

import os
import sys
import time

import numpy as np

from tfdp.hosts.socket_link import SocketLink


def main(rank, workers, coordinator, megabytes, repeats):
    devices = int(os.environ.get("DEVICES", "1"))
    checksum = os.environ.get("CHECKSUM") == "1"
    link = SocketLink(rank, workers, coordinator, 120.0, checksum=checksum)
    elements = int(megabytes * 250_000)
    local = [
        np.full(elements, rank * devices + d + 1, np.float32) for d in range(devices)
    ]
    replicas = workers * devices
    wire_dtype = os.environ.get("WIRE_DTYPE") or None
    for _ in range(repeats):
        link.gather(b"", "start")
        start = time.perf_counter()
        own = local[0] if devices == 1 else local[0] + local[1]
        (total,) = link.sum([own], "timing", wire_dtype=wire_dtype)
        seconds = time.perf_counter() - start
        # Whole numbers: every order of summation gives this.
        if not (total == replicas * (replicas + 1) / 2).all():
            raise SystemExit("the sum is wrong")
        print(f"seconds {seconds}", flush=True)
    link.close()


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        float(sys.argv[4]),
        int(sys.argv[5]),
    )
