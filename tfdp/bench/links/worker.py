"""One of the processes that `tfdp bench links` times: a link, and no TensorFlow."""

from __future__ import annotations

import dataclasses
import os
import stat
import threading
import time
from multiprocessing.connection import Connection

import numpy as np

from tfdp.hosts.socket_link import SocketLink

__all__ = ["ARMS", "LinkRequest", "measure_links"]

# A ring for every sum, as before there was a choice; what the rule chooses.
ARMS = ("ring", "chosen")
TIMEOUT_SECONDS = 300.0
Seconds = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class LinkRequest:
    """What the processes of one job do.

    Args:
      workers: how many they are.
      coordinator: "host:port" where they meet.
      secret: of the job.
      elements: float32 numbers of each sum that is timed.
      repeats, calls: figures for each arm, and sums in each figure.
    """

    workers: int
    coordinator: str
    secret: bytes
    elements: tuple[int, ...]
    repeats: int
    calls: int


def measure_links(rank: int, request: LinkRequest, answer: Connection) -> None:
    """Sends what this worker measured: a dictionary, or the text of its error."""
    try:
        answer.send(_figures(rank, request))
    except Exception as error:
        answer.send(f"worker {rank}: {type(error).__name__}: {error}")


def _figures(rank: int, request: LinkRequest) -> dict[str, object]:
    start = time.perf_counter()
    link = SocketLink(
        rank,
        request.workers,
        request.coordinator,
        TIMEOUT_SECONDS,
        secret=request.secret,
    )
    meeting_seconds = time.perf_counter() - start
    try:
        ways = {
            str(elements): link.way_of_sum(4 * elements)
            for elements in request.elements
        }
        taken = {
            str(elements): _times_in_turn(link, request, elements)
            for elements in request.elements
        }
        barrier = []
        for _ in range(request.repeats):
            start = time.perf_counter()
            for _ in range(request.calls):
                link.gather(b"", "barrier", most_bytes=0)
            barrier.append((time.perf_counter() - start) / request.calls)
        return {
            "meeting_seconds": meeting_seconds,
            "barrier_seconds": barrier,
            "sum_seconds": {size: of[0] for size, of in taken.items()},
            "processor_seconds": {size: of[1] for size, of in taken.items()},
            "ways": ways,
            "threads": threading.active_count(),
            "connections": _connections(),
        }
    finally:
        link.close()


def _times_in_turn(
    link: SocketLink, request: LinkRequest, elements: int
) -> tuple[Seconds, Seconds]:
    """By arm the seconds of a sum, and those of a processor; each sum is checked."""
    array = np.full(elements, link.rank + 1.0, np.float32)
    total = request.workers * (request.workers + 1) / 2
    passed: Seconds = {arm: [] for arm in ARMS}
    busy: Seconds = {arm: [] for arm in ARMS}
    for repeat in range(1 + request.repeats):  # the first one does not count
        for arm in ARMS if repeat % 2 else ARMS[::-1]:
            link.take_way("ring" if arm == "ring" else None)
            link.gather(b"", "next turn", most_bytes=0)
            start, busy_before = time.perf_counter(), time.process_time()
            for _ in range(request.calls):
                (found_total,) = link.sum([array], "timing")
            seconds = time.perf_counter() - start
            busy_seconds = time.process_time() - busy_before
            if not (found_total == total).all():
                raise ArithmeticError(f"a wrong sum by the arm {arm}")
            if repeat:
                passed[arm].append(seconds / request.calls)
                busy[arm].append(busy_seconds / request.calls)
    link.take_way(None)
    return passed, busy


def _connections() -> int:
    """Sockets of this process; -1 where the system does not tell."""
    try:
        numbers = list(map(int, os.listdir("/proc/self/fd")))
    except OSError:
        return -1
    return sum(map(_is_socket, numbers))


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:  # the one by which the folder was read
        return False
