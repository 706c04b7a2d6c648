"""Signals that the launcher passes on instead of dying from them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def received_signals() -> Iterator[list[int]]:
    """A list that grows by every such signal while the block runs.

    The handlers only note the number: the launcher's loop acts on it, at a place
    where its state is in order. The handlers of before come back at the end.
    """
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)

    # One that is ignored, as SIGHUP under nohup, stays so.
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
    """`SIGTERM` for 15; `signal 99` for one without a name.

    >>> signal_name(9)
    'SIGKILL'
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
