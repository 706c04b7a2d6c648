"""Starts this Python in child processes, collects their answers, and ends them all.

A child has a TensorFlow of its own, which may crash or hang. Its request is JSON in the
first argument of its module, its answer JSON in the file that the second one names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfdp.files.checked_json import parse_json, write_json

OUTPUT_LINES_KEPT = 15
GRACE_SECONDS = 15.0
POLL_SECONDS = 0.05


class ProcessFailed(Exception):
    """`how` a child ended, and the last lines of its output."""

    def __init__(self, how: str, last_lines: Sequence[str], took_too_long: bool):
        super().__init__("\n".join([how, *last_lines]))
        self.how = how
        self.last_lines = tuple(last_lines)
        self.took_too_long = took_too_long


@dataclasses.dataclass(frozen=True)
class Child:
    """How to start a child.

    Args:
      environment: all its variables; None: those of this process.
      starter: a command that starts another one, such as `ip netns exec NAME`.
      launcher: arguments of Python before the module, such as `-m tfdp launch`.
    """

    environment: Mapping[str, str] | None = None
    starter: Sequence[str] = ()
    launcher: Sequence[str] = ()

    def command(self, *words: str) -> list[str]:
        """The command that starts this Python with the arguments `words`."""
        return [*self.starter, sys.executable, *self.launcher, *words]


def ask_child(
    module: str,
    request: Mapping[str, Any],
    timeout_seconds: float,
    launcher: Sequence[str] = (),
    **more: str,
) -> Any:
    """The answer of one child, as `ask_children`; `more`: variables added to its own.

    With a launcher one of its workers answers.
    """
    child = Child({**os.environ, **more}, launcher=launcher)
    return ask_children(module, request, timeout_seconds, [child])[0]


def ask_children(
    module: str,
    request: Mapping[str, Any],
    timeout_seconds: float,
    children: Sequence[Child],
) -> list[Any]:
    """Runs `module`, which calls `answer`, in each child; returns their answers.

    Raises ProcessFailed if a child fails, does not answer, or takes longer than the
    timeout; then every process that was started is ended.
    """
    with tempfile.TemporaryDirectory(prefix="tfdp-") as folder:
        paths = [pathlib.Path(folder, f"answer-{n}") for n in range(len(children))]
        with ended_together(), Children(folder) as processes:
            for child, path in zip(children, paths, strict=True):
                command = child.command("-m", module, json.dumps(request), str(path))
                processes.start(command, child.environment)
            processes.wait(timeout_seconds)
        for number, path in enumerate(paths):
            if not path.exists():
                raise processes.failure([number], "ended without a result")
        return [parse_json(path.read_text("utf-8")) for path in paths]


def answer(arguments: list[str], find: Callable[[dict[str, Any]], Any]) -> None:
    """The child's side: writes what `find` returns for the request to the file.

    None: another worker of the same launcher answers.
    """
    # TensorFlow's start-up log would bury a child's own error.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    request, answer_path = arguments
    found = find(json.loads(request))
    if found is not None:
        write_json(answer_path, found)


class Children:
    """Processes in sessions of their own, with their output in `folder`.

    As a context manager it ends them all if an exception leaves the block.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self.processes: list[subprocess.Popen] = []

    def __enter__(self) -> Children:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.end()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None
    ) -> None:
        """Starts one more process."""
        output_path = self._output_path(len(self.processes))
        with output_path.open("wb") as output, _signals_held():
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    @property
    def running(self) -> list[int]:
        """Numbers of the children that have not ended."""
        return [n for n, child in enumerate(self.processes) if child.poll() is None]

    def check(self) -> None:
        """Raises ProcessFailed if a child has failed."""
        for number, process in enumerate(self.processes):
            code = process.poll()
            if code:
                how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                raise self.failure([number], how)

    def wait(self, timeout_seconds: float) -> None:
        """Waits until all have ended well; else raises ProcessFailed."""
        deadline = time.monotonic() + timeout_seconds
        while running := self.running:
            self.check()
            left = deadline - time.monotonic()
            if left <= 0:
                self.end()
                how = f"no result within {timeout_seconds:g} s; it was stopped"
                raise self.failure(running, how, took_too_long=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[running[0]].wait(min(left, POLL_SECONDS))
        self.check()

    def end(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Terminates all, which a launcher forwards, and kills what is left."""
        try:
            for number in self.running:
                self.processes[number].terminate()
            deadline = time.monotonic() + grace_seconds
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0))
        finally:  # also when a second signal ends the wait
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def failure(
        self, numbers: Sequence[int], how: str, took_too_long: bool = False
    ) -> ProcessFailed:
        """The error that names children, if there are others, with its last lines."""
        if len(self.processes) > 1:
            named = ", ".join(map(str, numbers))
            how = f"process {named} of {len(self.processes)}: {how}"
        output = self._output_path(numbers[0]).read_text("utf-8", "replace")
        lines = output.strip().splitlines()[-OUTPUT_LINES_KEPT:]
        return ProcessFailed(how, lines, took_too_long)

    def _output_path(self, number: int) -> pathlib.Path:
        return pathlib.Path(self._folder, f"output-{number}")


@contextlib.contextmanager
def ended_together() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP end the running children before this process.

    A child is in a session of its own, which a terminal does not signal. Signal
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
