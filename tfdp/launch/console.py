"""The launcher's two streams, as long as it lives: over all starts of the workers."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Sequence
from typing import TextIO

POLL_SECONDS = 0.05
# How long a launcher that was told to stop waits for whoever reads its output.
LAST_WAIT_SECONDS = 1.0


class Console:
    """Standard output and standard error, written while somebody takes it."""

    def __init__(self) -> None:
        self.stdout = Outlet(_descriptor_of(sys.stdout))
        self.stderr = Outlet(_descriptor_of(sys.stderr))
        self._has_told = False

    @property
    def _outlets(self) -> tuple[Outlet, Outlet]:
        return self.stdout, self.stderr

    @property
    def reader_left(self) -> bool:
        """Whether nobody will read one of the two any more."""
        return any(outlet.reader_left for outlet in self._outlets)

    def flush(self) -> None:
        """Writes what the streams take now; says once on stderr if one takes nothing:
        a disk that is full does not end a training."""
        for outlet in self._outlets:
            outlet.flush()
        self._report_loss()

    def _report_loss(self) -> None:
        failure = self.stdout.failure
        if failure and not self.reader_left and not self._has_told:
            self._has_told = True
            lost = f"standard output cannot be written ({failure}): lines are lost"
            self.say([f"{lost} until it can; the workers go on"])

    def wait_for_room(self, seconds: float) -> bool:
        """Waits at most so long for a stream that is full; False: none is, or drops."""
        full = next((outlet for outlet in self._outlets if outlet.is_full), None)
        if full is None or full.drops:
            return False
        full.wait(seconds)
        return True

    def drop(self, drops: bool) -> None:
        """Whether lines that find no room are thrown away from now on.

        A worker that waits to be read would not come to its end.
        """
        for outlet in self._outlets:
            outlet.drops = drops

    def say(self, lines: Sequence[str]) -> None:
        """The launcher's own lines, on stderr; they are never thrown away."""
        self.stderr.drops = False
        self.stderr.write("".join(f"tfdp launch: {line}\n" for line in lines).encode())
        self.stderr.flush()

    def write_the_rest(self, received: Sequence[int]) -> None:
        """Waits for whoever reads the output; after a signal, not for long.

        Args:
          received: signals, a list that grows while this waits.
        """
        asked_seconds: float | None = None
        while any(outlet.has_pending for outlet in self._outlets):
            for outlet in self._outlets:
                outlet.wait(POLL_SECONDS)
            if received:
                asked_seconds = asked_seconds or time.monotonic()
                if time.monotonic() - asked_seconds > LAST_WAIT_SECONDS:
                    break
        self._report_loss()


def _descriptor_of(stream: TextIO | None) -> int:
    """Where a stream of Python's writes to; nowhere, where it was closed before."""
    if stream is None:
        return os.open(os.devnull, os.O_WRONLY)
    stream.flush()
    return stream.fileno()


# A stream of the launcher's own that is written only while it takes something.
#
# A write to a pipe that nobody reads, or to a terminal that was stopped, waits for
# ever, and the launcher could obey no signal meanwhile. So lines are kept here, and
# written in pieces that a stream takes whole once it says that it takes any.


# Beyond this the workers are read no more, and wait until somebody reads the lines.
MOST_PENDING_BYTES = 1 << 20
# A pipe that takes anything takes as much as this without waiting.
PIECE_BYTES = min(select.PIPE_BUF, 4096)


class Outlet:
    """Takes bytes at once and writes them when the stream does.

    Args:
      descriptor: of the stream, open for writing.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._pending = bytearray()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        #: Whether lines that find no room are thrown away.
        self.drops = False
        #: Why something could not be written (a disk is full), and is lost; None.
        self.failure: str | None = None
        #: Whether nobody will read the stream any more.
        self.reader_left = False

    @property
    def has_pending(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether it should be given no more."""
        return len(self._pending) > MOST_PENDING_BYTES

    def write(self, data: bytes) -> None:
        """Keeps `data` until the stream takes it."""
        if not self.reader_left and not (self.drops and self.is_full):
            self._pending += data

    def flush(self) -> None:
        """Writes what the stream takes now."""
        self.wait(0.0)

    def wait(self, seconds: float) -> None:
        """Writes what the stream takes, and waits at most `seconds` for it to begin.

        What cannot be written is thrown away: see `failure` and `reader_left`.
        """
        milliseconds = 1000 * seconds
        while self._pending and self._poll.poll(milliseconds):
            milliseconds = 0
            try:
                written = os.write(self._descriptor, self._pending[:PIECE_BYTES])
            except BlockingIOError:
                return  # somebody else writes to it, and was faster
            except OSError as error:
                self.reader_left = isinstance(error, BrokenPipeError)
                self.failure = error.strerror or str(error)
                self._pending.clear()
                return
            del self._pending[:written]
