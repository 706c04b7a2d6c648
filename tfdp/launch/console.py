"""The launcher's output streams, written without blocking, over all starts."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Sequence
from typing import TextIO

POLL_SECONDS = 0.05
# How long a stopped launcher waits for the reader of its output.
LAST_WAIT_SECONDS = 1.0


class Console:
    """Standard output and standard error, written while they accept data."""

    def __init__(self) -> None:
        self.stdout = Outlet(_descriptor_of(sys.stdout))
        self.stderr = Outlet(_descriptor_of(sys.stderr))
        self._outlets = (self.stdout, self.stderr)
        self._has_warned = False

    @property
    def reader_left(self) -> bool:
        return any(outlet.reader_left for outlet in self._outlets)

    def flush(self) -> None:
        """Writes what the streams accept; warns once if a full disk loses lines."""
        for outlet in self._outlets:
            outlet.flush()
        self._report_loss()

    def _report_loss(self) -> None:
        failure = self.stdout.failure
        if failure and not self.reader_left and not self._has_warned:
            self._has_warned = True
            lost = f"standard output cannot be written ({failure}): lines are lost"
            self.say([f"{lost} until it can; the workers go on"])

    def wait_for_room(self, seconds: float) -> bool:
        """Waits for a full stream; False: none is full, or lines are dropped."""
        full = next((outlet for outlet in self._outlets if outlet.is_full), None)
        if full is None or full.drops:
            return False
        full.wait(seconds)
        return True

    def drop(self, drops: bool) -> None:
        """Sets whether to drop lines, as a worker blocked on output would not end."""
        for outlet in self._outlets:
            outlet.drops = drops

    def say(self, lines: Sequence[str]) -> None:
        """The launcher's own lines, on stderr; never dropped."""
        self.stderr.drops = False
        self.stderr.write("".join(f"tfdp launch: {line}\n" for line in lines).encode())
        self.stderr.flush()

    def write_the_rest(self, received: Sequence[int]) -> None:
        """Waits until the output is read; only briefly once a signal is `received`."""
        signal_seconds: float | None = None
        while any(outlet.has_pending for outlet in self._outlets):
            for outlet in self._outlets:
                outlet.wait(POLL_SECONDS)
            if received:
                signal_seconds = signal_seconds or time.monotonic()
                if time.monotonic() - signal_seconds > LAST_WAIT_SECONDS:
                    break
        self._report_loss()


def _descriptor_of(stream: TextIO | None) -> int:
    if stream is None:  # closed before the launcher started
        return os.open(os.devnull, os.O_WRONLY)
    stream.flush()
    return stream.fileno()


# Beyond this the workers' output is no longer read, so they block on it.
MOST_PENDING_BYTES = 1 << 20
# A pipe that accepts any data accepts this much without blocking.
PIECE_BYTES = min(select.PIPE_BUF, 4096)


class Outlet:
    """Buffers output and writes only what the stream accepts.

    A write to a pipe without a reader, or to a stopped terminal, blocks forever, and
    the launcher could not react to signals.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._pending = bytearray()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self.drops = False  # whether lines without room are dropped
        #: Why data could not be written (a full disk) and is lost; None: it was not.
        self.failure: str | None = None
        self.reader_left = False  # whether the stream's reader is gone

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    @property
    def is_full(self) -> bool:
        return len(self._pending) > MOST_PENDING_BYTES

    def write(self, data: bytes) -> None:
        if not self.reader_left and not (self.drops and self.is_full):
            self._pending += data

    def flush(self) -> None:
        self.wait(0.0)

    def wait(self, seconds: float) -> None:
        """Writes what the stream accepts, waiting at most `seconds` for the first.

        What cannot be written is dropped: see `failure` and `reader_left`.
        """
        milliseconds = 1000 * seconds
        while self._pending and self._poll.poll(milliseconds):
            milliseconds = 0
            try:
                written = os.write(self._descriptor, self._pending[:PIECE_BYTES])
            except BlockingIOError:
                return  # another process wrote to it first
            except OSError as error:
                self.reader_left = isinstance(error, BrokenPipeError)
                self.failure = error.strerror or str(error)
                self._pending.clear()
                return
            del self._pending[:written]
