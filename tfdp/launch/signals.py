"""Signals that the launcher passes on to the workers instead of ending by them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def received_signals() -> Iterator[list[int]]:
    """A list to which every such signal is appended while the block runs.

    The handlers only append: the launcher's loop acts when its state is consistent.
    """
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)

    # Ignored signals, as SIGHUP under nohup, stay ignored.
    before = {
        number: signal.signal(number, note)
        for number in PASSED_ON
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_name(number: int) -> str:
    """`SIGTERM` for 15; `signal 99` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
