"""One start of all workers, to its end: the first failure stops all.

start all -> relay their lines -> one fails, or a signal arrives
          -> the signal (or SIGTERM) to every process group
          -> after the grace time SIGKILL -> the same for strays -> none is left

Strays are processes that workers started in sessions of their own (see `guard`).
"""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from tfdp.cluster.progress import START_AGAIN
from tfdp.launch.cause import (
    cause_is_known,
    first_failure,
    note_early_exits,
    restart_requests,
)
from tfdp.launch.console import LAST_WAIT_SECONDS, POLL_SECONDS, Console
from tfdp.launch.guard import OrphanGuard, signal_strays
from tfdp.launch.one_by_one import OneByOne
from tfdp.launch.output import WorkerLogs
from tfdp.launch.worker import Worker, WorkerCommand, read

REMOTE_SECONDS = 5.0  # extra time for a remote watcher to report a worker's end


class _Input:
    def __init__(self) -> None:
        self.has_ended = False

    def feed(self, data: bytes) -> None:
        """Ignores the data: only the end of standard input matters."""

    def close(self) -> None:
        self.has_ended = True


class Group:
    """Workers that start together and end together.

    `folder` is for crash reports and progress of local workers; `received` is the
    growing list of signals to the launcher.
    """

    def __init__(
        self,
        guard: OrphanGuard,
        console: Console,
        folder: str,
        grace_seconds: float,
        received: Sequence[int],
        *,
        show_ranks: bool = True,
        logs: WorkerLogs | None = None,
    ):
        self._guard, self._console, self._folder = guard, console, folder
        self._grace_seconds, self._received = grace_seconds, received
        self._show_ranks, self._logs = show_ranks, logs
        self._selector = selectors.DefaultSelector()
        self._control = selectors.DefaultSelector()
        self.workers: list[Worker] = []
        self._stop_seconds: float | None = None  # when the workers were stopped
        self._kill_seconds: float | None = None  # when they were killed
        self._strays_seconds: float | None = None  # when strays were stopped
        self._signals_seen = 0
        self._one_by_one: OneByOne | None = None
        self._waits = False  # whether a replacement of a worker is about to start
        self._stdin = _Input()
        self.started_seconds = time.monotonic()

    def run(
        self,
        commands: Sequence[WorkerCommand],
        *,
        end_of_stdin_stops: bool = False,
        each_turn: Callable[[], None] = lambda: None,
        one_by_one: OneByOne | None = None,
    ) -> None:
        """Starts the workers and waits for all of them; leaves no process.

        With `end_of_stdin_stops` the end of the launcher's input stops them.
        `each_turn` is called some twenty times a second. `one_by_one` restarts single
        workers.
        """
        self._console.drop(False)
        self._one_by_one = one_by_one
        try:
            for command in commands:
                self.workers.append(self._started(command))
            if end_of_stdin_stops:
                stdin = sys.stdin.buffer
                self._control.register(stdin, selectors.EVENT_READ, self._stdin)
            while not self._is_over():
                self._turn()
                each_turn()
        finally:
            self._clean_up()

    def _started(self, command: WorkerCommand) -> Worker:
        worker = Worker(command, self._folder)
        self._guard.watch(worker.group)
        prefix = f"[{worker.rank}] ".encode() if self._show_ranks else b""
        log = None if self._logs is None else self._logs.of(worker.rank)
        worker.relay(
            self._selector, self._console.stdout, self._console.stderr, prefix, log
        )
        return worker

    def _staying(self) -> list[Worker]:
        """The workers that will not be replaced; starts replacements that are due."""
        again = self._one_by_one
        if again is None or self._stop_seconds is not None or self._received:
            return self.workers
        staying = []
        for place, worker in enumerate(self.workers):
            worker.is_replaced = again.comes_again(worker, self.workers)
            if not worker.is_replaced:
                staying.append(worker)
            elif again.is_due(worker):
                if worker.group_is_left:
                    worker.send(signal.SIGKILL)  # its remaining children
                self._guard.release(worker.group)
                worker.close_input()
                self.workers[place] = self._started(again.command(worker))
                self.workers[place].is_replacement = True
                staying.append(self.workers[place])
        return staying

    def _turn(self) -> None:
        self._pass_lines_on()
        for worker in self.workers:
            worker.check()
        note_early_exits(self.workers)
        self._obey_signals()
        staying = self._staying()
        self._waits = len(staying) < len(self.workers)
        now_seconds = time.monotonic()
        leaver = restart_requests(staying)
        if leaver is not None and leaver.ended_seconds is not None:
            # The others may be saving, too.
            if now_seconds - leaver.ended_seconds >= self._grace_seconds:
                self._stop(signal.SIGTERM)
        elif cause_is_known(staying) or self._stdin.has_ended:
            self._stop(signal.SIGTERM)
        # Without running workers their child processes may remain.
        has_ended = not self._waits and not any(w.is_running for w in self.workers)
        if self._console.reader_left or has_ended:
            self._stop(signal.SIGTERM)
        if self._stop_seconds is not None and self._kill_seconds is None:
            far = any(w.is_remote and w.is_running for w in self.workers)
            grace_seconds = self._grace_seconds + (REMOTE_SECONDS if far else 0.0)
            if now_seconds - self._stop_seconds >= grace_seconds:
                self._kill()

    def _pass_lines_on(self) -> None:
        if self._control.get_map():
            read(self._control, 0.0)
        self._console.flush()
        if not self._console.wait_for_room(POLL_SECONDS):
            read(self._selector, POLL_SECONDS)

    def _is_over(self) -> bool:
        if not any(worker.group_is_left for worker in self.workers):
            return not self._waits and self._no_stray_is_left()
        killed = self._kill_seconds
        return killed is not None and time.monotonic() - killed > LAST_WAIT_SECONDS

    def _no_stray_is_left(self) -> bool:
        """Stops strays once; they get the grace time, if there is any left."""
        stopped, now_seconds = self._strays_seconds, time.monotonic()
        found = signal_strays(self._folder, 0 if stopped else signal.SIGTERM)
        if not found:
            return True
        if stopped is None:
            self._strays_seconds = now_seconds
            what = "process" if found == 1 else "processes"
            self._console.say(
                [f"stops {found} {what} that workers left in sessions of their own"]
            )
            return False
        is_late = now_seconds - stopped >= self._grace_seconds
        return is_late or self._kill_seconds is not None

    def _obey_signals(self) -> None:
        seen, self._signals_seen = self._signals_seen, len(self._received)
        if len(self._received) == seen:
            return
        if self._stop_seconds is None:
            self._stop(self._received[0])
        elif self._kill_seconds is None:
            self._kill()  # a second signal: no more grace time

    def _stop(self, number: int) -> None:
        if self._stop_seconds is None:
            self._stop_seconds = time.monotonic()
            self._console.drop(True)
            self._send(number)

    def _kill(self) -> None:
        self._kill_seconds = time.monotonic()
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for worker in self.workers:
            if worker.group_is_left:
                worker.send(number)

    def _clean_up(self) -> None:
        """Kills all processes, relays the last lines, closes the streams."""
        for worker in self.workers:
            if worker.group_is_left:
                worker.send(signal.SIGKILL)
            if worker.is_running:
                try:
                    worker.process.wait(LAST_WAIT_SECONDS)
                except subprocess.TimeoutExpired:
                    continue  # the guard keeps it
                worker.check()
            self._guard.release(worker.group)
            worker.close_input()
        signal_strays(self._folder, signal.SIGKILL)
        deadline = time.monotonic() + LAST_WAIT_SECONDS
        while self._selector.get_map() and time.monotonic() < deadline:
            if not read(self._selector, POLL_SECONDS):
                break
        note_early_exits(self.workers)  # from the last lines of remote workers
        self._selector.close()
        self._control.close()

    def seconds_of_training(self) -> float | None:
        """The time since the start, if a worker made a strategy over all workers."""
        if not any(worker.strategies for worker in self.workers):
            return None
        return time.monotonic() - self.started_seconds

    def exit_code(self) -> int:
        """Exit code of the launcher if this is the last start.

        0 if all workers ended with 0; else the first failure's. Without a failure:
        START_AGAIN if a worker ended with it by itself, or some did when stopped and
        all others with 0; else 128 + s if signal s stopped the launcher.
        """
        failed = first_failure(self.workers)
        if failed is not None:
            return failed.exit_code
        if restart_requests(self.workers) is not None:
            return START_AGAIN
        codes = {w.exit_code for w in self.workers if not w.is_replaced}
        if START_AGAIN in codes and codes <= {0, START_AGAIN}:
            if not any(worker.is_running for worker in self.workers):
                return START_AGAIN
        if self._received:
            return 128 + self._received[0]
        return max(codes, default=0)
