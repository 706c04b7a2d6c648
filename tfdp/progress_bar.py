"""A progress bar on standard error, for work that takes longer than two seconds.

If standard error is no terminal, a line is printed now and then instead, for logs.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

DELAY_SECONDS = 2.0
LINE_SECONDS = 30.0  # between two lines without a terminal


@contextlib.contextmanager
def progress_bar(label: str, total: float) -> Iterator[Callable[[float], None]]:
    """Shows progress of work of size `total` (0: unknown) while the block runs.

    Yields a function that adds an amount of completed work, from any thread.
    """
    bar = _Bar(label, total) if sys.stderr.isatty() else _Lines(label, total)
    try:
        yield bar.advance
    finally:
        bar.stop()


class _Bar:
    """Drawn by rich, a dependency of Keras; it appears after the delay."""

    def __init__(self, label: str, total: float):
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(label, total=total or None)
        self._timer = threading.Timer(DELAY_SECONDS, self._progress.start)
        self._timer.daemon = True
        self._timer.start()

    def advance(self, amount: float) -> None:
        self._progress.advance(self._task, amount)

    def stop(self) -> None:
        self._timer.cancel()
        self._timer.join()
        self._progress.stop()


class _Lines:
    """Progress lines for logs, the first one after LINE_SECONDS."""

    def __init__(self, label: str, total: float):
        self._label, self._total, self._done = label, total, 0.0
        self._last_seconds = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, amount: float) -> None:
        with self._lock:
            self._done += amount
            now_seconds = time.monotonic()
            if now_seconds - self._last_seconds < LINE_SECONDS:
                return
            self._last_seconds = now_seconds
            share = f"{self._done / self._total:.0%}" if self._total else "goes on"
        print(f"tfdp: {self._label}: {share}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Does nothing; each line is printed at once."""
