"""Many light workers, forked from a process without TensorFlow, and what they say.

    python -m tests.support.many_workers WORKERS {work,absent,killed,stopped}

work     meet, sum numbers in every way, come to a barrier, and leave
absent   the last worker never comes to the meeting
killed   one worker is killed when the others are in their third sum
stopped  one worker is stopped there

Prints one line of JSON: by rank what each worker found, or its error.
"""

import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time

import numpy as np

from tests.support.workers import free_port
from tfdp.errors import CollectiveError
from tfdp.hosts.socket_link import SocketLink

#: Enough for 256 processes on two cores to meet.
TIMEOUT_SECONDS = 120.0
SILENCE_SECONDS = 10.0
ABSENT_SECONDS = 15.0
SIZES = (1, 5, 1000, 40_000)


def array_of(rank, size):
    """Whole numbers: every order of adding gives the same."""
    return np.arange(size, dtype=np.float64) * (rank + 1.0)


def work(link):
    factor = link.workers * (link.workers + 1) / 2
    for size in SIZES:
        (total,) = link.sum([array_of(link.rank, size)], "numbers")
        assert (total == np.arange(size) * factor).all()
    start = time.perf_counter()
    link.gather(b"", "barrier", most_bytes=0)
    barrier_seconds = time.perf_counter() - start
    ranks = link.gather(bytes([link.rank % 256]), "ranks")
    assert list(b"".join(ranks)) == [rank % 256 for rank in range(link.workers)]
    return {
        "threads": threading.active_count(),
        "connections": 2
        * sum(len(channel.neighbours) for channel in link._channels.values()),
        "control": len(link._membership._connections),
        "barrier_seconds": barrier_seconds,
        "ways": [link.way_of_sum(8 * size) for size in SIZES],
    }


def suffer(link, victim, number):
    for exchange in range(5):
        if link.rank == victim and exchange == 2:
            os.kill(os.getpid(), number)
        link.sum([array_of(link.rank, 3)], f"sum {exchange}")
    return "without an error"


def run(rank, workers, scenario, address, answers):
    is_absent = scenario == "absent"
    seconds = ABSENT_SECONDS if is_absent else TIMEOUT_SECONDS
    start = time.monotonic()
    try:
        link = SocketLink(rank, workers, address, seconds, SILENCE_SECONDS)
        met_seconds = time.monotonic() - start
        try:
            if scenario == "work":
                said = work(link) | {"met_seconds": met_seconds}
            else:
                kinds = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
                said = suffer(link, workers // 3, kinds[scenario])
        finally:
            link.close()
    except CollectiveError as error:
        said = f"{type(error).__name__}: {error}"
    answers.put((rank, said))


def main(workers, scenario):
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    address = f"127.0.0.1:{free_port()}"
    present = range(workers - (scenario == "absent"))
    silent = {workers // 3} if scenario in ("killed", "stopped") else set()
    processes = [
        fork.Process(target=run, args=(rank, workers, scenario, address, answers))
        for rank in present
    ]
    for process in processes:
        process.start()
    found = dict(answers.get() for _ in range(len(processes) - len(silent)))
    for process in processes:
        process.kill() if scenario == "stopped" else None
        process.join()
    print(json.dumps({str(rank): found[rank] for rank in sorted(found)}))
    rounds = math.ceil(math.log2(workers))
    if scenario == "work":
        slowest = {
            key: max(said[key] for said in found.values())
            for key in ("met_seconds", "barrier_seconds", "threads", "connections")
        }
        print(f"{workers} workers, {rounds} rounds: {slowest}", file=sys.stderr)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
