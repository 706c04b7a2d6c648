"""Stages of a check, for commands that show what is running."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

FIRST_SECONDS, EACH_SECONDS = 5.0, 15.0
_listeners: list[Callable[[str], None]] = []


def begin_stage(what: str) -> None:
    """Notes what the check does from now on."""
    for listener in _listeners:
        listener(what)


@contextlib.contextmanager
def printed_stages(command: str) -> Iterator[None]:
    """Prints the current stage on standard error, while the block runs: after 5 s, and
    every 15 s."""
    start_seconds, current, ended = time.monotonic(), ["builds"], threading.Event()

    def print_lines() -> None:
        wait_seconds = FIRST_SECONDS
        while not ended.wait(wait_seconds):
            seconds, wait_seconds = time.monotonic() - start_seconds, EACH_SECONDS
            line = f"{command}: {seconds:.0f} s: {current[-1]}"
            print(line, file=sys.stderr, flush=True)

    thread = threading.Thread(target=print_lines, daemon=True)
    _listeners.append(current.append)
    thread.start()
    try:
        yield
    finally:
        _listeners.remove(current.append)
        ended.set()
        thread.join()
