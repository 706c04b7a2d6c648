"""Runs workers to their end: the first failure stops all, and is named first.

start all -> pass their lines on -> one fails, or a signal comes
          -> the signal (or SIGTERM) to every process group
          -> after the grace time SIGKILL -> nothing is left -> report
"""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from tfdp.launch.cause import (
    cause_is_known,
    describe_others,
    first_failure,
    report_of,
)
from tfdp.launch.guard import OrphanGuard
from tfdp.launch.outlet import Outlet
from tfdp.launch.output import LAST_WORDS_MARK
from tfdp.launch.signals import received_signals, signal_name
from tfdp.launch.worker import Worker, WorkerCommand, read

__all__ = ["supervise"]

POLL_SECONDS = 0.05
# For a process that even SIGKILL does not end at once (in a system call of a dead
# file server), and for output that a process outside the group still holds open.
LAST_WAIT_SECONDS = 1.0


def supervise(
    commands: Sequence[WorkerCommand],
    *,
    grace_seconds: float,
    show_ranks: bool = True,
    end_of_stdin_stops: bool = False,
) -> int:
    """Starts the workers and waits for all of them.

    Args:
      commands: one per worker.
      grace_seconds: between asking a worker to end and killing it, at least 0.
      show_ranks: `[rank] ` in front of every line, and a report at the end.
      end_of_stdin_stops: stop the workers when the launcher's own standard input
        ends, as when the connection of a remote launcher breaks.

    Returns:
      0 when all workers ended with 0; otherwise the exit code of the first failure,
      where a worker killed by signal s counts as 128 + s; 128 + s, too, when the
      launcher was stopped by a signal s.
    """
    with (
        received_signals() as received,
        tempfile.TemporaryDirectory(prefix="tfdp-launch-") as folder,
        OrphanGuard(grace_seconds, folder) as guard,
    ):
        run = _Run(guard, folder, grace_seconds, received, show_ranks)
        try:
            for command in commands:
                run.start(command)
            if end_of_stdin_stops:
                run.watch_stdin()
            run.until_all_have_ended()
        finally:
            # Also when the launcher itself fails, say because its reader has left.
            run.clean_up()
        if show_ranks:
            run.report()
        else:
            run.tell_last_words()
        run.write_the_rest()
        return run.exit_code()


class _Input:
    """Standard input, of which only the end counts."""

    def __init__(self) -> None:
        self.has_ended = False

    def feed(self, data: bytes) -> None:
        """Ignores what comes."""

    def close(self) -> None:
        self.has_ended = True


class _Run:
    """The state of one supervised run; `supervise` is its story."""

    def __init__(
        self,
        guard: OrphanGuard,
        folder: str,
        grace_seconds: float,
        received: list[int],
        show_ranks: bool,
    ):
        self._guard = guard
        self._folder = folder
        self._grace_seconds = grace_seconds
        self._received = received
        self._show_ranks = show_ranks
        self._selector = selectors.DefaultSelector()
        self._control = selectors.DefaultSelector()
        sys.stdout.flush()
        sys.stderr.flush()
        self._stdout = Outlet(sys.stdout.fileno())
        self._stderr = Outlet(sys.stderr.fileno())
        self._workers: list[Worker] = []
        self._stop_seconds: float | None = None  # when the workers were asked to end
        self._kill_seconds: float | None = None  # when they were killed
        self._signals_seen = 0
        self._stdin = _Input()

    def start(self, command: WorkerCommand) -> None:
        worker = Worker(command, self._folder)
        self._guard.watch(worker.group)
        self._workers.append(worker)
        prefix = f"[{worker.rank}] ".encode() if self._show_ranks else b""
        worker.relay(self._selector, self._stdout, self._stderr, prefix)

    def watch_stdin(self) -> None:
        self._control.register(sys.stdin.buffer, selectors.EVENT_READ, self._stdin)

    def until_all_have_ended(self) -> None:
        while not self._is_over():
            self._pass_lines_on()
            for worker in self._workers:
                worker.check()
            self._obey_signals()
            if cause_is_known(self._workers) or self._stdin.has_ended:
                self._stop(signal.SIGTERM)
            if not any(worker.is_running for worker in self._workers):
                self._stop(signal.SIGTERM)  # what the workers have left behind
            if self._stop_seconds is not None and self._kill_seconds is None:
                if time.monotonic() - self._stop_seconds >= self._grace_seconds:
                    self._kill()

    @property
    def _outlets(self) -> tuple[Outlet, Outlet]:
        return self._stdout, self._stderr

    def _pass_lines_on(self) -> None:
        if self._control.get_map():
            read(self._control, 0.0)
        for outlet in self._outlets:
            outlet.flush()
        full = next((outlet for outlet in self._outlets if outlet.is_full), None)
        if full is None or full.drops:
            read(self._selector, POLL_SECONDS)
        else:
            full.wait(POLL_SECONDS)

    def _is_over(self) -> bool:
        if not any(worker.group_is_left for worker in self._workers):
            return True
        killed = self._kill_seconds
        return killed is not None and time.monotonic() - killed > LAST_WAIT_SECONDS

    def _obey_signals(self) -> None:
        seen, self._signals_seen = self._signals_seen, len(self._received)
        if len(self._received) == seen:
            return
        if self._stop_seconds is None:
            self._stop(self._received[0])
        elif self._kill_seconds is None:
            self._kill()  # asked while they are being stopped: no more patience

    def _stop(self, number: int) -> None:
        if self._stop_seconds is None:
            self._stop_seconds = time.monotonic()
            for outlet in self._outlets:
                # A worker that waits to be read would not come to its end.
                outlet.drops = True
            self._send(number)

    def _kill(self) -> None:
        self._kill_seconds = time.monotonic()
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for worker in self._workers:
            if worker.group_is_left:
                worker.send(number)

    def clean_up(self) -> None:
        """Leaves no process and no open stream; passes on the last lines."""
        for worker in self._workers:
            if worker.group_is_left:
                worker.send(signal.SIGKILL)
            if worker.is_running:
                try:
                    worker.process.wait(LAST_WAIT_SECONDS)
                except subprocess.TimeoutExpired:
                    continue  # the guard stays with it
                worker.check()
            self._guard.release(worker.group)
            if worker.process.stdin is not None:
                worker.process.stdin.close()
        deadline = time.monotonic() + LAST_WAIT_SECONDS
        while self._selector.get_map() and time.monotonic() < deadline:
            if not read(self._selector, POLL_SECONDS):
                break
        self._selector.close()
        self._control.close()

    def write_the_rest(self) -> None:
        """Waits for whoever reads the output; after a signal, not for long."""
        asked_seconds: float | None = None
        while any(outlet.has_pending for outlet in self._outlets):
            for outlet in self._outlets:
                outlet.wait(POLL_SECONDS)
            if self._received:
                asked_seconds = asked_seconds or time.monotonic()
                if time.monotonic() - asked_seconds > LAST_WAIT_SECONDS:
                    break

    def exit_code(self) -> int:
        failed = first_failure(self._workers)
        if failed is not None:
            return failed.exit_code
        if self._received:
            return 128 + self._received[0]
        return max((worker.exit_code for worker in self._workers), default=0)

    def report(self) -> None:
        """Says on stderr how it ended, when it did not end well."""
        failed = first_failure(self._workers)
        lines: list[str] = []
        if failed is not None:
            lines += report_of(failed)
        elif self._received:
            lines.append(f"tfdp launch: stopped by {signal_name(self._received[0])}")
        else:
            return
        for worker in self._workers:
            if worker is not failed:
                end = describe_others(worker, self._grace_seconds)
                lines.append(f"tfdp launch: worker {worker.rank} {end}")
        self._stderr.drops = False
        self._stderr.write("".join(f"{line}\n" for line in lines).encode())

    def tell_last_words(self) -> None:
        """Passes on what the worker died of, to the launcher on another machine."""
        for worker in self._workers:
            if worker.last_words is not None:
                text = worker.last_words.to_json().encode()
                self._stderr.write(b"\n" + LAST_WORDS_MARK + text + b"\n")
