"""A stream of the launcher's own that is written only while it takes something.

A write to a pipe that nobody reads, or to a terminal that was stopped, waits for ever,
and the launcher could obey no signal meanwhile. So lines are kept here, and written in
pieces that a stream takes whole once it says that it takes any.
"""

from __future__ import annotations

import os
import select

__all__ = ["MOST_PENDING_BYTES", "Outlet"]

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
