"""Runs this Python with a deadline, and ends it with every process it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

OUTPUT_LINES_KEPT = 15
GRACE_SECONDS = 15.0


class ProcessFailed(Exception):
    """`how` the process ended, and the last lines of its output."""

    def __init__(self, how: str, last_lines: Sequence[str], took_too_long: bool):
        super().__init__("\n".join([how, *last_lines]))
        self.how = how
        self.last_lines = tuple(last_lines)
        self.took_too_long = took_too_long

    @property
    def in_a_line(self) -> str:
        return ": ".join([self.how, *self.last_lines[-1:]])


def run_python(words: Sequence[str], timeout_seconds: float, **more: str) -> list[str]:
    """Runs this Python with the arguments `words`; returns its last output lines.

    `more` are environment variables. Raises ProcessFailed if it fails or takes longer
    than the timeout; then its process group is ended.
    """
    process = None
    with ended_together():
        try:
            with _signals_held():
                process = subprocess.Popen(
                    [sys.executable, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    env={**os.environ, **more},
                    start_new_session=True,
                )
            output, _ = process.communicate(timeout=timeout_seconds)
        except BaseException as error:
            lines = [] if process is None else _last_lines(_end(process))
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            how = f"no result within {timeout_seconds:g} s; it was stopped"
            raise ProcessFailed(how, lines, took_too_long=True) from None
    code = process.returncode
    if code:
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        raise ProcessFailed(how, _last_lines(output), took_too_long=False)
    return _last_lines(output)


@contextlib.contextmanager
def ended_together() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP end the running child process before this one.

    The child is in a session of its own, which a terminal does not signal. Signal
    handlers run in the main thread only: in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    # Keep ignored signals (SIGHUP under nohup) and other code's handlers.
    before = {
        number: signal.signal(number, leave)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Defers signals until the end of the block.

    While Popen runs there is no process object yet (for long on busy cores): an
    exception raised by a handler would leave the child behind. Blocking the signals
    instead would be inherited by the child.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = {
        each: signal.signal(each, lambda number, _: received.append(number))
        for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
        if callable(signal.getsignal(each))
    }
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in received:
            signal.raise_signal(number)


def _end(process: subprocess.Popen) -> str:
    """Terminates a process, which a launcher forwards, and kills what is left."""
    process.terminate()
    try:
        # Not until its output ends: surviving grandchildren may hold the pipe open.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    finally:  # also when a second signal ends the wait
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    return str(process.communicate()[0])


def _last_lines(output: str) -> list[str]:
    return output.strip().splitlines()[-OUTPUT_LINES_KEPT:]
