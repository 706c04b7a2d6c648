"""Logs each long wait for other workers once, and words the errors of failed ones."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from absl import logging

from tfdp.cluster.crash_report import note_lost_worker
from tfdp.cluster.worker_names import name_workers
from tfdp.errors import CollectiveError
from tfdp.hosts.channel import Channel
from tfdp.hosts.checked_wire import DamagedBlockError
from tfdp.hosts.collective_fingerprint import CollectiveMismatch, difference
from tfdp.hosts.membership import END_OF_SCRIPT, Membership

NOTICE_SECONDS = 5.0
SAME_CALLS = (
    "every worker must make the same calls, also where only one of them needs the "
    "result (docs/how-hosts-work.md#what-every-worker-must-call)"
)
FIRST_ERROR = "look at that worker's output for the first error"


def log_waiting(rank: int, seconds: float, what: str, missing: Sequence[int]) -> None:
    """Logs that worker `rank` waits in `what` for the workers `missing`."""
    others = name_workers(missing) if missing else "the others"
    logging.warning(
        f"tfdp: Worker {rank} has waited {seconds:.0f} seconds in {what} for {others}."
    )


@contextlib.contextmanager
def reports_wait_for_barrier(
    rank: int, workers: int, coordinator: str
) -> Iterator[set[int]]:
    """Logs a long rendezvous; yields a set for ranks that have arrived at worker 0."""
    present = {rank}

    def log() -> None:
        missing = sorted(set(range(workers)) - present)
        # Other workers learn the ranks only when all have arrived.
        known = missing if rank == 0 else []
        log_waiting(rank, NOTICE_SECONDS, f"the rendezvous at {coordinator}", known)

    timer = threading.Timer(NOTICE_SECONDS, log)
    timer.daemon = True
    timer.start()
    try:
        yield present
    finally:
        timer.cancel()


class Waits:
    """The waits that this worker is in."""

    def __init__(self, rank: int):
        self._rank = rank
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, tuple[float, str, Callable[[], Sequence[int]]]] = {}

    @contextlib.contextmanager
    def waiting(
        self, what: str, missing: Callable[[], Sequence[int]]
    ) -> Iterator[None]:
        """Registers a wait during the block; `missing` returns the ranks if known."""
        with self._lock:
            number = next(self._numbers)
            self._open[number] = (time.monotonic(), what, missing)
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(number, None)

    def look(self) -> None:
        """Logs long waits; called regularly from a thread that never waits."""
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
            log_waiting(self._rank, seconds, what, missing())


def late_reason(workers: str, timeout_seconds: float) -> str:
    """The reason when `workers` ("worker 1") are late."""
    return f"{workers} did not arrive within {timeout_seconds:g} seconds"


def log_lost(rank: int, waited_seconds: float, exchange: str, reason: str) -> str:
    """Logs and returns the message of a wait that failed.

    TensorFlow buries the error of a Python call, or of a collective, in its own.
    """
    note_lost_worker()
    advice = SAME_CALLS if END_OF_SCRIPT in reason else FIRST_ERROR
    message = (
        f"Worker {rank} waited {waited_seconds:.1f} seconds in {exchange} for the "
        f"others: {reason}. Training cannot go on without it; {advice}."
    )
    logging.error("tfdp: %s", message)
    return message


# How long the reason may arrive after a connection has broken: more than 3 s with 256
# workers on two busy cores.
NEWS_SECONDS = 10.0


def closed(rank: int, what: str) -> CollectiveError:
    """The error of a call that uses, or waits on, this worker's closed link."""
    return CollectiveError(
        f"The connections of worker {rank} were closed (by `close()` of the strategy, "
        f"or at the end of the script) when {what}. Close a strategy after its last "
        "exchange, and make a new one to go on."
    )


def out_of_step(
    membership: Membership, workers: int, found: CollectiveMismatch, note_key: str
) -> CollectiveError:
    """The error of a fingerprint mismatch; workers exchange notes under `note_key`."""
    other = (membership.rank - 1) % workers
    notes: dict[int, str] = {}
    # The header holds only a digest; the other worker's note has the details. Without
    # the note the error says less.
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
    """The error of a block that was changed in transit; names both ends."""
    distance = 1
    for each in ring.neighbours:
        if each.receiver is found.receiver:
            break
        distance *= 2
    return CollectiveError(
        f"What worker {rank} received from worker {(rank - distance) % workers} in "
        f"{ring.description} is not what was sent: {found}. The network between them "
        "or the memory of one of the two damages data. Nothing of the block was used; "
        "go on from the last checkpoint, without the machine or link at fault."
    )


def why_it_broke(
    membership: Membership,
    ring: Channel,
    channel: str,
    error: OSError,
    timeout_seconds: float,
) -> str:
    """Why a connection of `ring` broke, or why no data came."""
    is_timeout = isinstance(error, (TimeoutError, BlockingIOError))
    # A broken connection shows at once, the lost worker's rank a moment later. After a
    # timeout there is nothing to wait for: a late worker has not failed.
    reason = membership.wait_for_news(0.0 if is_timeout else NEWS_SECONDS)
    if reason is None and is_timeout:
        late = membership.late(ring.count, channel)
        who = name_workers(late) if late else "a worker"
        reason = late_reason(who, timeout_seconds)
        return membership.with_suspension(reason, timeout_seconds)
    return reason or f"a connection of worker {membership.rank} broke ({error})"
