"""`ExchangeWatch`: a deadline for exchanges that do not go through a link.

TensorFlow's collectives have a deadline of their own, which keeps a sleeping thread for
every launch until it has passed: hundreds of thousands in an hour. One thread looks at
all exchanges here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from tfdp.errors import CollectiveError, WorkerLostError
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.membership import Standstill, boot_seconds
from tfdp.hosts.waits import NOTICE_SECONDS, late_words, say_lost, say_waiting
from tfdp.hosts.worker_names import name_workers

LOOK_SECONDS = 0.2
# A busy machine may let the thread look later.
USUAL_LOOK_SECONDS = 1.0
WORD_SECONDS = 1.0
NEWS_SECONDS = 3.0
NOTE_KEY = "exchanges begun"


class ExchangeWatch:
    """Gives up when an exchange has been open for too long, and says who is missing.

    Args:
      link: tells the workers how far the others are, and when one is lost.
      give_up: ends all exchanges with a message; called from another thread.

    All workers begin the same exchanges, so a worker that has begun fewer than this
    one is one that it waits for.
    """

    def __init__(self, link: HostLink, give_up: Callable[[str], None]):
        self._link = link
        self._give_up = give_up
        self._open: dict[int, tuple[float, str]] = {}
        self._begun = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._look, name="tfdp-exchange-watch", daemon=True
        )
        self._is_closed = False
        self._is_over = threading.Event()
        self._has_told = threading.Event()
        link.on_failure(self._end)

    def begin(self, label: str) -> int:
        """Notes that an exchange has begun; returns its number on this worker.

        Raises:
          CollectiveError: when the watch was closed.
        """
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
        """Notes that it has ended."""
        with self._lock:
            self._open.pop(number, None)

    def close(self) -> None:
        """Before this worker leaves: hears why an exchange of its own failed.

        TensorFlow feels that a connection is gone before the link says whose. Leaving
        at once would make this worker the first that the others miss.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            has_failed = bool(self._open)
        if has_failed:
            self._has_told.wait(NEWS_SECONDS)
        self._is_over.set()

    def _look(self) -> None:
        told, next_word, said_of = 0, 0.0, 0
        standstill = Standstill(USUAL_LOOK_SECONDS)
        while not self._is_over.wait(LOOK_SECONDS):
            now, missed_seconds = boot_seconds(), standstill.look()
            with self._lock:
                if missed_seconds:  # nobody was late while this process did not run
                    self._open = {
                        number: (start + missed_seconds, label)
                        for number, (start, label) in self._open.items()
                    }
                begun = self._begun
                # Numbers grow, and dictionaries keep their order.
                oldest, (since, label) = next(iter(self._open.items()), (0, (now, "")))
            with contextlib.suppress(WorkerLostError, OSError):
                if begun != told and now > next_word:
                    self._link.leave_note(NOTE_KEY, str(begun))
                    told, next_word = begun, now + WORD_SECONDS
                if now - since > NOTICE_SECONDS and oldest != said_of:
                    said_of, what = oldest, f"an exchange ({label})"
                    say_waiting(self._link.rank, now - since, what, self._late(begun))
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
            return late_words(name_workers(late), self._link.timeout_seconds)
        return (
            "all workers are there, but nothing came within "
            f"{self._link.timeout_seconds:g} seconds: the network"
        )

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._is_over.is_set():
                return
            self._is_over.set()
            waiting = min(self._open.values(), default=None)
        if waiting is None:
            # Nobody waits here; whoever begins another exchange hears it at once.
            message = f"Worker {self._link.rank} cannot go on: {reason}."
        else:
            start, label = waiting
            waited = boot_seconds() - start
            message = say_lost(
                self._link.rank, waited, f"an exchange ({label})", reason
            )
        self._give_up(message)
        self._has_told.set()
