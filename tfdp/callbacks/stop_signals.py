"""Signals that ask a program to end, noted until the training can save."""

from __future__ import annotations

import atexit
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["StopSignals"]

# A program that has been told to end, and goes on, hears SIGTERM again after this time.
ENDING_SECONDS = 60.0


class StopSignals:
    """Notes SIGTERM and SIGINT; a second SIGINT does what it did before.

    A second SIGTERM does nothing: launchers send one to all when the first worker has
    saved and ended, and whoever will not wait sends SIGKILL.

    Args:
      is_active: whether to; only the main thread can.
      is_within: whether a frame is of the training that looks at the notes.
    """

    def __init__(self, is_active: bool, is_within: Callable[[FrameType | None], bool]):
        self._is_within = is_within
        #: The first that came.
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        if is_active and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                before = signal.getsignal(number)
                # Whom nobody can put back, and what is ignored, stays.
                if before is not None and before != signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # After an error in `fit` nobody would ever look at a note.
        if self._is_within(frame):
            if self.received is None:
                self.received = number
                return
            if number == signal.SIGTERM:
                return
        self.close()
        signal.raise_signal(number)

    def end(self) -> None:
        """As `close`, and a SIGTERM that comes while the program ends does nothing.

        Slurm sends one to the workers that are left as soon as the first has ended; who
        died of it would not end with the code that asks to be started again.
        """
        before = self._before.get(signal.SIGTERM)
        self.close()
        if before is not None and signal.getsignal(signal.SIGTERM) == before:
            signal.signal(signal.SIGTERM, _Ending(before))
            # Python puts handlers of its own back before the process is gone.
            atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)

    def close(self) -> None:
        """Puts back what was there before."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)


class _Ending:
    """Takes SIGTERM for a while, and is then what was there before."""

    def __init__(self, before: Any):
        self._before = before
        self._until = time.monotonic() + ENDING_SECONDS

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() >= self._until:
            signal.signal(number, self._before)
            signal.raise_signal(number)
