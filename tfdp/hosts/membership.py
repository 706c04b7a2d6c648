"""Membership: heartbeats, broadcast of the first failure, and notes.

Each worker has one connection to worker 0, the coordinator. A thread sends a heartbeat
with the number of the current exchange. The kernel closes the connection of a dead
process at once; a stopped process or unreachable machine falls silent. The coordinator
then tells all workers, and every waiting exchange ends with the same message. A worker
that gives up an exchange for another reason reports it in the same way.

A worker that was suspended itself reports that instead of blaming its silent peers.

Notes are short texts under a key, sent to all workers. Unlike exchanges they need no
common order, so input pipelines, which run ahead, can use them.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from tfdp.cluster.crash_report import current_report
from tfdp.hosts.host_link import CHANNELS
from tfdp.hosts.messages import checked_integer, checked_text, parse_object

BEAT_SECONDS = 0.5
# Heartbeats and notes are short; the table of many workers' notes is longer.
LONGEST_LINE_BYTES = 1 << 20
MOST_EXCHANGES = 1 << 63
# The thread looks several times per second; a busy machine may delay it.
USUAL_LOOK_SECONDS = 2 * BEAT_SECONDS
NoteListener = Callable[[dict[int, str]], None]


class Membership:
    """Watches the other workers from a thread.

    Args:
      connections: on worker 0 to every other worker, by rank; else to worker 0.
      silence_seconds: how long a worker may be silent before it counts as lost.
      on_failure: called once, when a worker is lost or has given up; from any thread.
      on_look: called several times per second from the thread, while no worker is lost,
        with the seconds for which this process was suspended before.
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
        self.rank, self._workers = rank, workers
        self.failure: str | None = None
        #: By channel and rank: the last exchange reported.
        self.positions: dict[str, dict[int, int]] = {
            channel: dict.fromkeys((rank, *connections), 0) for channel in CHANNELS
        }
        self._connections = connections
        self._silence_seconds = silence_seconds
        self._on_failure, self._on_look = on_failure, on_look
        self._suspension = SuspendDetector(USUAL_LOOK_SECONDS)
        self._heard = dict.fromkeys(connections, boot_seconds())
        self._partial = dict.fromkeys(connections, b"")
        self._left = Departures()
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
        self.positions[channel][self.rank] = exchange

    def late(self, exchange: int, channel: str) -> list[int]:
        """The ranks that have not reported reaching `exchange`."""
        positions = self.positions[channel].copy()
        return sorted(r for r, at in positions.items() if at < exchange)

    def without_note(self, key: str) -> list[int]:
        return sorted(set(range(self._workers)) - self.notes_under(key).keys())

    def notes_under(self, key: str) -> dict[int, str]:
        with self._changed:
            return dict(self._notes.get(key, {}))

    def left_before(self, exchange: int, channel: str) -> list[int]:
        """The ranks that have left and will never reach `exchange`."""
        positions = self.positions[channel]
        return [rank for rank in list(self._left) if positions[rank] < exchange]

    def give_up(self, reason: str) -> None:
        """Ends the exchanges of all workers, as a lost worker does."""
        reason = self.with_suspension(reason, self._silence_seconds)
        if self.rank != 0 and self.failure is None:
            self._tell({"failure": reason})
        self._fail(reason)

    def with_suspension(self, reason: str, recent_seconds: float) -> str:
        """`reason`, preceded by this worker's own suspension if that was recent."""
        seconds = self._suspension.seconds_within(recent_seconds)
        itself = f"worker {self.rank} itself did not run"
        if seconds < self._silence_seconds / 2 or reason.startswith(itself):
            return reason
        return (
            f"{itself} for {seconds:.1f} seconds (its process was stopped, or its "
            "machine slept), so that the others may have given it up; on waking it "
            f"found: {reason}"
        )

    def wait_for_news(self, seconds: float) -> str | None:
        """Why an exchange broke; the reason may arrive a moment after the break."""
        deadline = time.monotonic() + seconds
        while not (self.failure or self._left) and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.failure is None and self._left:
            return self.with_suspension(self._left.reason(), self._silence_seconds)
        return self.failure

    def share_note(self, key: str, note: str, seconds: float | None) -> dict[int, str]:
        """All workers' notes under `key`, by rank, once all have left one.

        Waits for `seconds`, or with None as long as all workers are alive. Raises
        TimeoutError, which names missing workers, or ConnectionError if one was lost.
        """
        self.leave_note(key, note)
        notes = self.wait_for_notes(
            key, lambda notes: len(notes) == self._workers, seconds
        )
        with self._changed:
            self._notes.pop(key, None)
        return notes

    def leave_note(self, key: str, note: str) -> None:
        if self.rank == 0:
            self._keep_note(0, key, note)
        else:
            self._tell({"note": [key, note]})

    def wait_for_notes(
        self, key: str, enough: Callable[[dict[int, str]], bool], seconds: float | None
    ) -> dict[int, str]:
        """Waits until the notes under `key` are `enough`; errors as `share_note`."""
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
            is_hopeless = self._lacks_departure_reports(key)
            notes = dict(self._notes.get(key, {}))
        if enough(notes):
            return notes
        if self.failure or self._closing:
            raise ConnectionError(self.failure or "closed here")
        if is_hopeless:
            raise ConnectionError(self._left.reason())
        missing = sorted(set(range(self._workers)) - notes.keys()) or "others"
        reason = f"no note of {key} from workers {missing}"
        raise TimeoutError(self.with_suspension(reason, seconds or 0.0))

    def _lacks_departure_reports(self, key: str) -> bool:
        # Notes arrive before the goodbye, on the same connection.
        return self._left.lack_note(self._notes.get(key, {}))

    def on_note(self, key: str, listener: NoteListener) -> None:
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

    def _keep_note(self, rank: int, key: str, note: str) -> None:
        """Stores a note on worker 0 and broadcasts all notes under its key."""
        with self._changed:
            self._notes.setdefault(key, {})[rank] = note
            # Sent before threads here can read it: one that has all its notes may
            # leave, and the others would wait for a note that was never passed on.
            self._tell({"notes": [key, dict(self._notes[key])]})
            self._changed.notify_all()
        self._notify_listener(key)

    def leave(self) -> None:
        """Announces the departure and its error, if any, so that it is no failure."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        report = current_report()
        goodbye = (report.error, report.is_consequence) if report else (None, False)
        # With earlier departures, which may be the cause of this one, and with all
        # positions: a worker in an MPI call depends on which workers will come.
        at = self._known_positions()
        self._tell({"at": at, "left": dict(self._left), "goodbye": goodbye})
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
                self._tell({"at": self._known_positions(), "left": dict(self._left)})
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
        """Returns for how long this thread was suspended; no peer was silent then."""
        missed_seconds = self._suspension.look()
        if missed_seconds:
            for peer in self._heard:
                self._heard[peer] += missed_seconds
        return missed_seconds

    def _known_positions(self) -> dict[str, dict[int, int]]:
        # The coordinator forwards what it has heard; others report only themselves.
        if self.rank == 0:
            return {name: at.copy() for name, at in self.positions.items()}
        return {name: {self.rank: at[self.rank]} for name, at in self.positions.items()}

    def _read(self, peer: int) -> bool:
        """Handles data from `peer`; false at the end of its connection."""
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
                # "" would end this thread and count as no failure.
                raise ValueError("a failure without a reason")
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
            raise ValueError("an unknown channel")
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
            reason = self.with_suspension(reason, self._silence_seconds)
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


LONGEST_REASON_CHARACTERS = 1 << 20
END_OF_SCRIPT = "has come to the end of its script"
# The error that a worker left with, if any, and whether another worker caused it.
Goodbye = tuple[str | None, bool]


class Departures(dict[int, Goodbye]):
    """The goodbyes that this worker has received, by rank, in order of departure."""

    def note(self, rank: int, goodbye: Any) -> None:
        """Records the first goodbye of `rank`; ValueError, TypeError if invalid."""
        error, is_consequence = goodbye
        if error is not None:
            checked_text(error, LONGEST_REASON_CHARACTERS)
        self.setdefault(rank, (error, bool(is_consequence)))

    def reason(self) -> str:
        """The goodbye of the first worker that left for a reason of its own."""
        left = list(self.items())
        rank, (error, _) = next((entry for entry in left if not entry[1][1]), left[0])
        if error is None:
            return f"worker {rank} {END_OF_SCRIPT}"
        return f"worker {rank} has raised {error}"

    def lack_note(self, have_note: Collection[int]) -> bool:
        """Whether a worker left without its note, or with an error."""
        return any(
            error is not None or rank not in have_note
            for rank, (error, _) in list(self.items())
        )


class SuspendDetector:
    """Detects that this process was suspended (SIGSTOP, a debugger, machine sleep).

    Such a process has heard from no peer for long, which says nothing about the peers.
    `usual_seconds` is the longest usual time between two calls of `look`.
    """

    def __init__(self, usual_seconds: float, clock: Callable[[], float] | None = None):
        self._usual_seconds = usual_seconds
        self._clock = clock or boot_seconds
        self._last_look = self._clock()
        self._seconds = 0.0
        self._end = float("-inf")

    def look(self) -> float:
        """Seconds since the last call beyond the usual ones; normally 0."""
        now = self._clock()
        missed = max(now - self._last_look - self._usual_seconds, 0.0)
        if missed:
            self._seconds, self._end = now - self._last_look, now
        self._last_look = now
        return missed

    def seconds_within(self, recent_seconds: float) -> float:
        """The last suspension, if it ended within so many seconds or lasts; or 0."""
        now = self._clock()
        if now - self._last_look > 2 * self._usual_seconds:
            return now - self._last_look
        return self._seconds if now - self._end <= recent_seconds else 0.0


def boot_seconds() -> float:
    """A clock that advances while the machine sleeps, unlike `time.monotonic`."""
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):
        if hasattr(time, name):
            return time.clock_gettime(getattr(time, name))
    return time.monotonic()
