"""Says once of each wait for other workers that it lasts, and for whom."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from absl import logging

from tfdp.errors import CollectiveError
from tfdp.hosts.channel import Channel
from tfdp.hosts.checked_wire import DamagedBlockError
from tfdp.hosts.collective_fingerprint import CollectiveMismatch, difference
from tfdp.hosts.crash_report import lost_another
from tfdp.hosts.membership import Membership
from tfdp.hosts.worker_names import name_workers

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
def reports_wait_for_barrier(
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


# What a worker says when it waited for others in vain.


def late_words(workers: str, timeout_seconds: float) -> str:
    """That `workers` ("worker 1") did not come in time."""
    return f"{workers} did not arrive within {timeout_seconds:g} seconds"


def say_lost(rank: int, waited_seconds: float, exchange: str, reason: str) -> str:
    """The message of a wait that ended without the others; logged, too.

    TensorFlow buries the error of a Python call, or of a collective, in its own.
    """
    lost_another()
    message = (
        f"Worker {rank} waited {waited_seconds:.1f} seconds in {exchange} for the "
        f"others: {reason}. Training cannot go on without it; look at that worker's "
        "output for the first error."
    )
    logging.error("tfdp: %s", message)
    return message


# Why an exchange broke, in words: who was late or lost, who closed, who differs.


# How long a failure may take to be heard after a connection has broken: more than 3 s
# by 256 workers on two busy cores. Who hears it sooner waits no longer.
NEWS_SECONDS = 10.0


def closed(rank: int, what: str) -> CollectiveError:
    """For who exchanges, or waits, when this worker's link is closed."""
    return CollectiveError(
        f"The connections of worker {rank} were closed (by `close()` of the strategy, "
        f"or at the end of the script) when {what}. Close a strategy after its last "
        "exchange, and make a new one to go on."
    )


def out_of_step(
    membership: Membership, workers: int, found: CollectiveMismatch, note_key: str
) -> CollectiveError:
    """For a header that is not of this worker's exchange; it tells of both.

    Args:
      membership: of this worker.
      workers: how many there are.
      found: the two headers.
      note_key: under which each worker leaves what its last exchange was about.
    """
    other = (membership.rank - 1) % workers
    notes: dict[int, str] = {}
    # The header holds a digest of what the other is at; in words it comes as a note.
    # Without one the error is less telling, and no less an error.
    with contextlib.suppress(OSError):
        notes = membership.wait_for_notes(
            note_key, lambda notes: other in notes, NEWS_SECONDS
        )
    both = difference(membership.rank, other, found, notes.get(other))
    return CollectiveError(
        f"Workers are out of step: {both}. Every worker must run the same steps on the "
        "same model: look for code that only some workers run."
    )


def damaged(
    rank: int, workers: int, ring: Channel, found: DamagedBlockError
) -> CollectiveError:
    """For a block that is not as it was sent: it names both ends, and what to do."""
    distance = 1
    for each in ring.neighbours:
        if each.receiver is found.receiver:
            break
        distance *= 2
    return CollectiveError(
        f"What worker {rank} received of worker {(rank - distance) % workers} in "
        f"{ring.words} is not what was sent: {found}. The network between them or the "
        "memory of one of the two damages data. Nothing of the block was used; go on "
        "from the last checkpoint, without the machine or the link that is at fault."
    )


def why_it_broke(
    membership: Membership,
    ring: Channel,
    channel: str,
    error: OSError,
    timeout_seconds: float,
) -> str:
    """Why a connection of the ring broke, or nothing came."""
    is_timeout = isinstance(error, (TimeoutError, BlockingIOError))
    # A broken connection is felt at once, and who died is heard a moment later. After
    # a timeout there is nothing to wait for: who is late has not failed.
    reason = membership.wait_for_news(0.0 if is_timeout else NEWS_SECONDS)
    if reason is None and is_timeout:
        late = membership.late(ring.count, channel)
        who = name_workers(late) if late else "a worker"
        reason = late_words(who, timeout_seconds)
        return membership.with_standstill(reason, timeout_seconds)
    return reason or f"a connection of worker {membership.rank} broke ({error})"
