"""Signals that ask a program to end, noted until the training can save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["StopSignals"]


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

    def close(self) -> None:
        """Puts back what was there before."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
