"""A run of this Python with a deadline, which is ended with all that it has started."""

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
    """It came to a bad end.

    Args:
      how: it ended, in words that go on a line.
      last_lines: of what it printed.
      took_too_long: whether it was stopped at its deadline.
    """

    def __init__(self, how: str, last_lines: Sequence[str], took_too_long: bool):
        super().__init__("\n".join([*last_lines, how]))
        self.how = how
        self.last_lines = tuple(last_lines)
        self.took_too_long = took_too_long


def run_python(words: Sequence[str], timeout_seconds: float, **more: str) -> list[str]:
    """Runs this Python with `words`, and ends it and all that it has started.

    Args:
      words: after the interpreter.
      timeout_seconds: the most that it may take.
      **more: variables of its environment.

    Returns:
      The last lines that it printed.

    Raises:
      ProcessFailed: it failed or took too long.
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
    """While this lasts, SIGTERM and SIGHUP end the process that runs, and then this.

    It is in a session of its own, where a terminal's signals do not come. Only the main
    thread hears signals: in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    # One that is ignored, as SIGHUP under nohup, stays so; one that somebody else hears
    # is theirs.
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
    """Signals that come while this lasts are heard at its end.

    A process that is being started runs, maybe for long on busy cores, before anybody
    here can name it: a signal that raised then would leave it behind. They are not
    blocked by the system, since the process would inherit that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {
        each: signal.signal(each, lambda number, _: came.append(number))
        for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
        if callable(signal.getsignal(each))
    }
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)


def _end(process: subprocess.Popen) -> str:
    """Asks a process to end, which a launcher hands on, and kills what is left."""
    process.terminate()
    try:
        # Not until its output ends: what it has started may hold that, and stay.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    finally:  # also when a second signal ends the wait
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    return str(process.communicate()[0])


def _last_lines(output: str) -> list[str]:
    return output.strip().splitlines()[-OUTPUT_LINES_KEPT:]
