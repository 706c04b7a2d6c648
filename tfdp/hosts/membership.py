"""Who is there: heartbeats between the workers, and the first failure told to all.

Every worker holds one connection to worker 0, the coordinator, on which a thread sends
a beat with the number of its current exchange. The kernel closes the connection of a
process that dies, which is noticed at once; one that is stopped, or whose machine is
gone, falls silent. Either way the coordinator tells everybody, and every waiting
exchange ends with the same message. A worker that gives up an exchange for another
reason says so in the same way, so that nobody waits for it.

A worker that did not run itself for a while (stopped, or its machine slept) has heard
of nobody, and accuses nobody of that: it says that it stood still.

The same connections carry notes: a few words under a key, which everybody gets to see
once all have left one. Unlike exchanges they need no common order, so input pipelines,
which run ahead as they like, can agree by them.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from tfdp.hosts.crash_report import words_of_now
from tfdp.hosts.host_link import CHANNELS
from tfdp.hosts.messages import checked_integer, checked_text, parse_object

BEAT_SECONDS = 0.5
# Beats and notes are short; a table of what many workers have noted is longer.
LONGEST_LINE_BYTES = 1 << 20
MOST_EXCHANGES = 1 << 63
# The thread looks several times in a second; on a busy machine it may come late.
USUAL_LOOK_SECONDS = 2 * BEAT_SECONDS
NoteListener = Callable[[dict[int, str]], None]


class Membership:
    """Watches the other workers from a thread of its own.

    Args:
      rank: this worker.
      workers: how many there are.
      connections: to each other worker by rank (on worker 0), else to worker 0 only.
      silence_seconds: how long a worker may be silent before it counts as lost.
      on_failure: called once, when a worker is lost or has given up; from the thread,
        or from that of `give_up`.
      on_look: called several times in a second, from the thread, with the seconds that
        this process did not run before, while nobody is lost.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        connections: dict[int, socket.socket],
        silence_seconds: float,
        on_failure: Callable[[], None],
        on_look: Callable[[float], None] = lambda missed_seconds: None,
    ):
        self.rank = rank
        self.failure: str | None = None
        self._workers = workers
        #: By channel and rank: the exchange that it was last heard to be in.
        self.positions: dict[str, dict[int, int]] = {
            channel: dict.fromkeys((rank, *connections), 0) for channel in CHANNELS
        }
        self._connections = connections
        self._silence_seconds = silence_seconds
        self._on_failure = on_failure
        self._on_look = on_look
        self._standstill = Standstill(USUAL_LOOK_SECONDS)
        self._heard = dict.fromkeys(connections, boot_seconds())
        self._partial = dict.fromkeys(connections, b"")
        self._left = Goodbyes()
        self._closing = False
        self._notes: dict[str, dict[int, str]] = {}
        self._note_listeners: dict[str, NoteListener] = {}
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        for connection in connections.values():
            connection.settimeout(BEAT_SECONDS)
        self._thread = threading.Thread(
            target=self._run, name="tfdp-membership", daemon=True
        )
        self._thread.start()

    def arrive(self, exchange: int, channel: str) -> None:
        """Notes that this worker has come to exchange number `exchange`."""
        self.positions[channel][self.rank] = exchange

    def late(self, exchange: int, channel: str) -> list[int]:
        """The workers that were not heard to have come to `exchange`."""
        positions = self.positions[channel].copy()
        return sorted(r for r, at in positions.items() if at < exchange)

    def without_note(self, key: str) -> list[int]:
        """The workers that have left no note under `key`."""
        with self._changed:
            notes = self._notes.get(key, {}).keys()
            return sorted(set(range(self._workers)) - notes)

    def notes_under(self, key: str) -> dict[int, str]:
        """The notes that have come under `key`, by rank."""
        with self._changed:
            return dict(self._notes.get(key, {}))

    def left_before(self, exchange: int, channel: str) -> list[int]:
        """Those that have left and will never come to `exchange`."""
        positions = self.positions[channel]
        return [rank for rank in self._left if positions[rank] < exchange]

    def give_up(self, reason: str) -> None:
        """Ends the exchanges of all workers, as the loss of a worker does."""
        reason = self.with_standstill(reason, self._silence_seconds)
        if self.rank != 0 and self.failure is None:
            self._tell({"failure": reason})
        self._fail(reason)

    def with_standstill(self, reason: str, recent_seconds: float) -> str:
        """`reason`, and that this worker itself stood still, if it did lately."""
        seconds = self._standstill.seconds_within(recent_seconds)
        itself = f"worker {self.rank} itself did not run"
        if seconds < self._silence_seconds / 2 or reason.startswith(itself):
            return reason
        return (
            f"{itself} for {seconds:.1f} seconds (its process was stopped, or its "
            "machine slept), so that the others may have given it up; on waking it "
            f"found: {reason}"
        )

    def wait_for_news(self, seconds: float) -> str | None:
        """Why an exchange broke, which may be heard a moment after it is felt."""
        deadline = time.monotonic() + seconds
        while not (self.failure or self._left) and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.failure is None and self._left:
            return self.with_standstill(self._left.reason(), self._silence_seconds)
        return self.failure

    def share_note(self, key: str, note: str, seconds: float | None) -> dict[int, str]:
        """Everybody's note under `key`, by rank, once all have left one.

        Args:
          key: the same on all workers, and used once.
          note: a few words.
          seconds: how long to wait for the others; None: as long as they live.

        Raises:
          TimeoutError: when not all have left one by then; it names who has not.
          ConnectionError: when a worker was lost meanwhile.
        """
        self.leave_note(key, note)
        notes = self.wait_for_notes(
            key, lambda notes: len(notes) == self._workers, seconds
        )
        self.forget_notes(key)
        return notes

    def leave_note(self, key: str, note: str) -> None:
        """Lets all workers read `note`, in the place of an earlier one; no waiting."""
        if self.rank == 0:
            self._keep_note(0, key, note)
        else:
            self._tell({"note": [key, note]})

    def wait_for_notes(
        self, key: str, enough: Callable[[dict[int, str]], bool], seconds: float | None
    ) -> dict[int, str]:
        """The notes under `key`, by rank, once they are `enough`.

        Raises:
          As `share_note`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self.failure
                    or self._closing
                    or enough(self._notes.get(key, {}))
                    or self._lacks_departure_reports(key)
                ),
                seconds,
            )
            is_in_vain = self._lacks_departure_reports(key)
            notes = dict(self._notes.get(key, {}))
        if enough(notes):
            return notes
        if self.failure or self._closing:
            raise ConnectionError(self.failure or "closed here")
        if is_in_vain:
            raise ConnectionError(self._left.reason())
        missing = sorted(set(range(self._workers)) - notes.keys()) or "others"
        reason = f"no word of {key} from workers {missing}"
        raise TimeoutError(self.with_standstill(reason, seconds or 0.0))

    def _lacks_departure_reports(self, key: str) -> bool:
        # Notes come before the goodbye, on the same connection.
        return self._left.lack_word(self._notes.get(key, {}))

    def on_note(self, key: str, listener: NoteListener) -> None:
        """Calls `listener` with the notes under `key` now and whenever one comes.

        Until all workers have left one, which then are forgotten.
        """
        with self._changed:
            self._note_listeners[key] = listener
        self._notify_listener(key)

    def _notify_listener(self, key: str) -> None:
        with self._changed:
            listener = self._note_listeners.get(key)
            notes = dict(self._notes.get(key, {}))
            if listener is not None and len(notes) == self._workers:
                del self._note_listeners[key], self._notes[key]
        if listener is not None and notes:
            listener(notes)

    def forget_notes(self, key: str) -> None:
        """Drops the notes under a key that nobody will use again."""
        with self._changed:
            self._notes.pop(key, None)

    def _keep_note(self, rank: int, key: str, note: str) -> None:
        """On worker 0: collects, and tells everybody."""
        with self._changed:
            self._notes.setdefault(key, {})[rank] = note
            # Told before anybody here can read it: whoever has all that it waited for
            # may leave, and the others would wait for a note that was never passed on.
            self._tell({"notes": [key, dict(self._notes[key])]})
            self._changed.notify_all()
        self._notify_listener(key)

    def leave(self) -> None:
        """Says goodbye, so that the end of this process is no failure.

        And why, when an error ends it.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        words = words_of_now()
        goodbye = (words.error, words.is_consequence) if words else (None, False)
        # Those who left before come first: perhaps this one leaves because of them.
        # And how far everybody was: who waits in a call of MPI must know who will come.
        at = self._known_positions()
        self._tell({"at": at, "left": self._left.as_reported(), "goodbye": goodbye})
        self._thread.join(2 * BEAT_SECONDS)
        for connection in self._connections.values():
            connection.close()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        for peer, connection in self._connections.items():
            selector.register(connection, selectors.EVENT_READ, peer)
        next_beat = 0.0
        while not self._closing and self.failure is None:
            if time.monotonic() >= next_beat:
                self._tell(
                    {"at": self._known_positions(), "left": self._left.as_reported()}
                )
                next_beat = time.monotonic() + BEAT_SECONDS
            ready = selector.select(BEAT_SECONDS / 2)
            missed_seconds = self._look()
            for key, _ in ready:
                if not self._read(key.data):
                    selector.unregister(key.fileobj)
            missed_seconds += self._look()
            self._check_silence()
            self._on_look(missed_seconds)
        selector.close()

    def _look(self) -> float:
        """Notes how long this thread did not run; nobody is silent meanwhile."""
        missed_seconds = self._standstill.look()
        if missed_seconds:
            for peer in self._heard:
                self._heard[peer] += missed_seconds
        return missed_seconds

    def _known_positions(self) -> dict[str, dict[int, int]]:
        # The coordinator passes on what it has heard; the others know themselves only.
        if self.rank == 0:
            return {name: at.copy() for name, at in self.positions.items()}
        return {name: {self.rank: at[self.rank]} for name, at in self.positions.items()}

    def _read(self, peer: int) -> bool:
        """Handles what `peer` sent; false when its connection is at its end."""
        try:
            data = self._connections[peer].recv(1 << 16)
        except TimeoutError:
            return True
        except OSError:
            data = b""
        if not data:
            if peer not in self._left:
                self._fail(f"worker {peer} has ended (its connection was closed)")
            return False
        self._heard[peer] = boot_seconds()
        *lines, rest = (self._partial[peer] + data).split(b"\n")
        self._partial[peer] = rest
        try:
            if len(rest) > LONGEST_LINE_BYTES:
                raise ValueError("a line without an end")
            for line in lines:
                self._handle(peer, parse_object(line))
        except (ValueError, TypeError, AttributeError) as error:
            self._fail(f"worker {peer} sent what no worker sends ({error})")
            return False
        return True

    def _handle(self, peer: int, message: dict[str, Any]) -> None:
        """Does what a message says.

        Raises:
          ValueError, TypeError, AttributeError: when it is not one of a worker.
        """
        for text, goodbye in message.get("left", {}).items():
            rank = self._checked_rank(int(text))
            if rank != self.rank:
                self._left.note(rank, goodbye)
        if "goodbye" in message:
            self._left.note(peer, message["goodbye"])
        if message.get("left") or "goodbye" in message:
            with self._changed:
                self._changed.notify_all()
        if "failure" in message:
            reason = checked_text(message["failure"], LONGEST_LINE_BYTES)
            if not reason:
                # It would end this thread, and be taken for no failure by who waits.
                raise ValueError("a failure without a word")
            self._fail(reason)
        if "note" in message:
            key, note = message["note"]
            self._keep_note(peer, *map(self._checked_note, (key, note)))
        if "notes" in message:
            key, notes = message["notes"]
            checked = {
                self._checked_rank(int(rank)): self._checked_note(note)
                for rank, note in notes.items()
            }
            with self._changed:
                self._notes[self._checked_note(key)] = checked
                self._changed.notify_all()
            self._notify_listener(key)
        for channel, positions in message.get("at", {}).items():
            self._take_positions(channel, positions)

    def _take_positions(self, channel: str, positions: dict[str, Any]) -> None:
        if channel not in CHANNELS:
            raise ValueError("a channel that there is not")
        for text, position in positions.items():
            rank = self._checked_rank(int(text))
            position = checked_integer(position, 0, MOST_EXCHANGES)
            if rank != self.rank:
                self.positions[channel][rank] = position

    def _checked_rank(self, rank: object) -> int:
        return checked_integer(rank, 0, self._workers - 1)

    def _checked_note(self, text: object) -> str:
        return checked_text(text, LONGEST_LINE_BYTES)

    def _check_silence(self) -> None:
        now = boot_seconds()
        for peer, heard in self._heard.items():
            if peer not in self._left and now - heard > self._silence_seconds:
                self._fail(
                    f"worker {peer} was silent for {self._silence_seconds:g} seconds "
                    "(its process is stopped, or its machine sleeps or cannot be "
                    "reached)"
                )

    def _fail(self, reason: str) -> None:
        with self._changed:
            if self.failure is not None or self._closing:
                return
            reason = self.with_standstill(reason, self._silence_seconds)
            self.failure = reason
            self._changed.notify_all()
        if self.rank == 0:
            self._tell({"failure": reason})
        self._on_failure()

    def _tell(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._writing:
            for peer, connection in self._connections.items():
                if peer not in self._left:
                    with contextlib.suppress(OSError):
                        connection.sendall(line)


# Who left, in which order, and why.


LONGEST_REASON_CHARACTERS = 1 << 20
END_OF_SCRIPT = "has come to the end of its script"
# The error that a worker left with, if any, and whether another worker caused it.
Goodbye = tuple[str | None, bool]


class Goodbyes:
    """The goodbyes that this worker has heard, or heard of, by rank."""

    def __init__(self) -> None:
        self._left: dict[int, Goodbye] = {}  # in the order in which they left

    def note(self, rank: int, goodbye: Any) -> None:
        """Notes that `rank` left; the first goodbye of a worker counts.

        Raises:
          ValueError, TypeError: when `goodbye` is not one that a worker sends.
        """
        error, is_consequence = goodbye
        if error is not None:
            checked_text(error, LONGEST_REASON_CHARACTERS)
        self._left.setdefault(rank, (error, bool(is_consequence)))

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._left))

    def __bool__(self) -> bool:
        return bool(self._left)

    def as_reported(self) -> dict[int, Goodbye]:
        """For a message to the others."""
        return dict(self._left)

    def reason(self) -> str:
        """The goodbye that matters: others may have left because that one did."""
        left = list(self._left.items())
        rank, (error, _) = next((entry for entry in left if not entry[1][1]), left[0])
        if error is None:
            return f"worker {rank} {END_OF_SCRIPT}"
        return f"worker {rank} has raised {error}"

    def lack_word(self, heard_from: Collection[int]) -> bool:
        """Whether one of them left without its word, or with an error."""
        return any(
            error is not None or rank not in heard_from
            for rank, (error, _) in list(self._left.items())
        )


# Notices that this process did not run for a while.
#
# A process that was stopped (SIGSTOP, a debugger) or whose machine slept finds, on
# waking, that it has heard of nobody for long. That says nothing about the others.


class Standstill:
    """A thread that looks at it again and again learns when it could not.

    Args:
      usual_seconds: the longest time between two looks of a thread that runs.
      clock: seconds, also of a machine that sleeps.
    """

    def __init__(self, usual_seconds: float, clock: Callable[[], float] | None = None):
        self._usual_seconds = usual_seconds
        self._clock = clock or boot_seconds
        self._last_look = self._clock()
        self._seconds = 0.0
        self._end = float("-inf")

    def look(self) -> float:
        """How much longer than usual the last look is ago, in seconds; 0 as a rule."""
        now = self._clock()
        missed = max(now - self._last_look - self._usual_seconds, 0.0)
        if missed:
            self._seconds, self._end = now - self._last_look, now
        self._last_look = now
        return missed

    def seconds_within(self, recent_seconds: float) -> float:
        """How long the last standstill was, if it ended within so many seconds; or 0.

        One that lasts to this moment, unseen by the thread, counts.
        """
        now = self._clock()
        if now - self._last_look > 2 * self._usual_seconds:
            return now - self._last_look
        return self._seconds if now - self._end <= recent_seconds else 0.0


def boot_seconds() -> float:
    """Seconds of a clock that runs on while the machine sleeps.

    `time.monotonic` stands still then, on Linux as on macOS.
    """
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):
        if hasattr(time, name):
            return time.clock_gettime(getattr(time, name))
    return time.monotonic()
