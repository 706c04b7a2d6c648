"""Says once of each wait for other workers that it lasts, and for whom."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from absl import logging

from tfdp.hosts.worker_names import name_workers

__all__ = ["NOTICE_SECONDS", "Waits", "say_waiting", "says_that_it_waits_to_meet"]

NOTICE_SECONDS = 5.0


def say_waiting(rank: int, seconds: float, what: str, missing: Sequence[int]) -> None:
    """Logs that worker `rank` waits in `what` for the workers `missing`."""
    logging.warning(
        "tfdp: Worker %d has waited %.0f seconds in %s for %s.",
        rank,
        seconds,
        what,
        name_workers(missing) if missing else "the others",
    )


@contextlib.contextmanager
def says_that_it_waits_to_meet(
    rank: int, workers: int, coordinator: str
) -> Iterator[set[int]]:
    """While the workers meet: a set for those that have come, as worker 0 knows."""
    present = {rank}

    def say() -> None:
        missing = sorted(set(range(workers)) - present)
        # The others hear of nobody before all have come.
        known = missing if rank == 0 else []
        say_waiting(rank, NOTICE_SECONDS, f"the meeting at {coordinator}", known)

    timer = threading.Timer(NOTICE_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield present
    finally:
        timer.cancel()


class Waits:
    """What this worker waits in.

    Args:
      rank: this worker.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, tuple[float, str, Callable[[], Sequence[int]]]] = {}

    @contextlib.contextmanager
    def waiting(
        self, what: str, missing: Callable[[], Sequence[int]]
    ) -> Iterator[None]:
        """While the block runs this worker waits.

        Args:
          what: "exchange 12 (number of samples)".
          missing: the workers that it waits for, as far as they are known.
        """
        with self._lock:
            number = next(self._numbers)
            self._open[number] = (time.monotonic(), what, missing)
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(number, None)

    def look(self) -> None:
        """Says what has lasted; called now and then, from a thread that never waits."""
        now = time.monotonic()
        with self._lock:
            lasting = [
                (number, now - start, what, missing)
                for number, (start, what, missing) in self._open.items()
                if now - start >= NOTICE_SECONDS
            ]
            for number, *_ in lasting:
                del self._open[number]
        for _, seconds, what, missing in lasting:
            say_waiting(self._rank, seconds, what, missing())
