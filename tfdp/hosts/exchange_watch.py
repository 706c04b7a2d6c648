"""`ExchangeWatch`: deadlines for TensorFlow's collectives.

Their own timeout keeps a sleeping thread per launch until it expires: hundreds of
thousands in an hour. Here one thread watches all exchanges.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from tfdp.cluster.worker_names import name_workers
from tfdp.errors import CollectiveError, WorkerLostError
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.membership import SuspendDetector, boot_seconds
from tfdp.hosts.waits import NOTICE_SECONDS, late_reason, log_lost, log_waiting

LOOK_SECONDS = 0.2
# A busy machine may delay the thread by this much.
USUAL_LOOK_SECONDS = 1.0
NOTE_SECONDS = 1.0
NEWS_SECONDS = 3.0
NOTE_KEY = "exchanges begun"


class ExchangeWatch:
    """Gives up when an exchange is open for too long, and names the missing workers.

    All workers begin the same exchanges, so this worker waits for those that have begun
    fewer. `give_up` is called with a message from another thread.
    """

    def __init__(self, link: HostLink, give_up: Callable[[str], None]):
        self._link = link
        self._give_up = give_up
        self._open: dict[int, tuple[float, str]] = {}
        self._begun = 0
        self._lock = threading.Lock()
        name = "tfdp-exchange-watch"
        self._thread = threading.Thread(target=self._look, name=name, daemon=True)
        self._is_closed = False
        self._is_over = threading.Event()
        self._has_told = threading.Event()
        link.on_failure(self._end)

    def begin(self, label: str) -> int:
        with self._lock:
            if self._is_closed:
                raise CollectiveError(
                    f"An exchange ({label}) was begun after `close()` of the strategy. "
                    "Close a strategy after its last exchange, and make a new one to "
                    "go on."
                )
            self._begun += 1
            number = self._begun
            self._open[number] = (boot_seconds(), label)
            if number == 1:
                self._thread.start()
        return number

    def end(self, number: int) -> None:
        with self._lock:
            self._open.pop(number, None)

    def close(self) -> None:
        # If an exchange has failed, waits for the cause: TensorFlow notices a broken
        # connection before the link does, and others would blame this worker.
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            has_failed = bool(self._open)
        if has_failed:
            self._has_told.wait(NEWS_SECONDS)
        self._is_over.set()

    def _look(self) -> None:
        shared, next_note, reported = 0, 0.0, 0
        suspension = SuspendDetector(USUAL_LOOK_SECONDS)
        while not self._is_over.wait(LOOK_SECONDS):
            now, missed_seconds = boot_seconds(), suspension.look()
            with self._lock:
                # No worker was late while this process was suspended.
                if missed_seconds:
                    self._open = {
                        number: (start + missed_seconds, label)
                        for number, (start, label) in self._open.items()
                    }
                begun = self._begun
                # Numbers increase and dicts keep their order: the first is the oldest.
                oldest, (since, label) = next(iter(self._open.items()), (0, (now, "")))
            with contextlib.suppress(WorkerLostError, OSError):
                if begun != shared and now > next_note:
                    self._link.leave_note(NOTE_KEY, str(begun))
                    shared, next_note = begun, now + NOTE_SECONDS
                if now - since > NOTICE_SECONDS and oldest != reported:
                    reported, what = oldest, f"an exchange ({label})"
                    log_waiting(self._link.rank, now - since, what, self._late(begun))
                if now - since > self._link.timeout_seconds:
                    self._end(self._missing_workers(begun))
                elif now - since > LOOK_SECONDS and (news := self._link.news()):
                    self._end(news)

    def _late(self, begun: int) -> list[int]:
        notes = self._link.wait_for_notes(NOTE_KEY, lambda notes: True)
        others = [r for r in range(self._link.workers) if r != self._link.rank]
        return [r for r in others if int(notes.get(r, 0)) < begun]

    def _missing_workers(self, begun: int) -> str:
        late = self._late(begun)
        if late:
            return late_reason(name_workers(late), self._link.timeout_seconds)
        return (
            "all workers are there, but no data came within "
            f"{self._link.timeout_seconds:g} seconds: the network"
        )

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._is_over.is_set():
                return
            self._is_over.set()
            waiting = min(self._open.values(), default=None)
        if waiting is None:
            # Nothing waits; a later exchange gets this message at once.
            message = f"Worker {self._link.rank} cannot go on: {reason}."
        else:
            start, label = waiting
            waited = boot_seconds() - start
            exchange = f"an exchange ({label})"
            message = log_lost(self._link.rank, waited, exchange, reason)
        self._give_up(message)
        self._has_told.set()
