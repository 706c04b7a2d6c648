"""One start of all workers, to its end: the first failure stops all.

start all -> pass their lines on -> one fails, or a signal comes
          -> the signal (or SIGTERM) to every process group
          -> after the grace time SIGKILL -> the same for strays -> nothing is left

Strays are what workers have started in sessions of their own (see `guard`).
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

# For whoever watches a worker on another machine to say how that ended.
REMOTE_SECONDS = 5.0


class _Input:
    """Standard input, of which only the end counts."""

    def __init__(self) -> None:
        self.has_ended = False

    def feed(self, data: bytes) -> None:
        """Ignores what comes."""

    def close(self) -> None:
        self.has_ended = True


class Group:
    """Workers that were started together and end together.

    Args:
      guard: stops them when the launcher is killed.
      console: where their lines go.
      folder: where workers on this machine leave their last words and progress.
      grace_seconds: between asking a worker to end and killing it.
      received: signals to the launcher, a list that grows.
      show_ranks: `[rank] ` in front of every line.
      logs: where every worker's lines are kept; None: nowhere.
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
        self._guard = guard
        self._console = console
        self._folder = folder
        self._grace_seconds = grace_seconds
        self._received = received
        self._show_ranks = show_ranks
        self._logs = logs
        self._selector = selectors.DefaultSelector()
        self._control = selectors.DefaultSelector()
        self.workers: list[Worker] = []
        self._stop_seconds: float | None = None  # when the workers were asked to end
        self._kill_seconds: float | None = None  # when they were killed
        self._strays_seconds: float | None = None  # when strays were asked to end
        self._signals_seen = 0
        self._one_by_one: OneByOne | None = None
        #: Whether a worker is about to start in the place of one that has ended.
        self._waits = False
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

        Args:
          commands: one per worker.
          end_of_stdin_stops: stop the workers when the launcher's own input ends.
          each_turn: called some twenty times a second.
          one_by_one: which workers start again while the others go on; None: none.
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
            # Also when the launcher itself fails.
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
        """The workers in whose place no other one is about to start.

        One whose time has come is started.
        """
        again = self._one_by_one
        if again is None or self._stop_seconds is not None or self._received:
            return self.workers
        staying = []
        for place, worker in enumerate(self.workers):
            if not again.comes_again(worker, self.workers):
                staying.append(worker)
            elif again.is_due(worker):
                if worker.group_is_left:
                    worker.send(signal.SIGKILL)  # what it has left behind
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
        asks = restart_requests(staying)
        if asks is not None and asks.ended_seconds is not None:
            # The others are saving, too, or on their way out.
            if now_seconds - asks.ended_seconds >= self._grace_seconds:
                self._stop(signal.SIGTERM)
        elif cause_is_known(staying) or self._stdin.has_ended:
            self._stop(signal.SIGTERM)
        if self._console.reader_left:
            self._stop(signal.SIGTERM)
        if not self._waits and not any(worker.is_running for worker in self.workers):
            self._stop(signal.SIGTERM)  # what the workers have left behind
        if self._stop_seconds is not None and self._kill_seconds is None:
            if now_seconds - self._stop_seconds >= self._patience_seconds:
                self._kill()

    @property
    def _patience_seconds(self) -> float:
        far = any(worker.is_remote and worker.is_running for worker in self.workers)
        return self._grace_seconds + (REMOTE_SECONDS if far else 0.0)

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
        """Asks strays to end, once; they have the grace time, if there is any left."""
        asked, now_seconds = self._strays_seconds, time.monotonic()
        found = signal_strays(self._folder, 0 if asked else signal.SIGTERM)
        if not found:
            return True
        if asked is None:
            self._strays_seconds = now_seconds
            what = "process" if found == 1 else "processes"
            self._console.say(
                [f"stops {found} {what} that workers left in sessions of their own"]
            )
            return False
        is_late = now_seconds - asked >= self._grace_seconds
        return is_late or self._kill_seconds is not None

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
        """Leaves no process and no open stream; passes on the last lines."""
        for worker in self.workers:
            if worker.group_is_left:
                worker.send(signal.SIGKILL)
            if worker.is_running:
                try:
                    worker.process.wait(LAST_WAIT_SECONDS)
                except subprocess.TimeoutExpired:
                    continue  # the guard stays with it
                worker.check()
            self._guard.release(worker.group)
            worker.close_input()
        signal_strays(self._folder, signal.SIGKILL)
        deadline = time.monotonic() + LAST_WAIT_SECONDS
        while self._selector.get_map() and time.monotonic() < deadline:
            if not read(self._selector, POLL_SECONDS):
                break
        note_early_exits(self.workers)  # by the last lines of other machines
        self._selector.close()
        self._control.close()

    def exit_code(self) -> int:
        """Of the launcher, were this the last start.

        0 when all workers ended with 0; that of the first failure, where a worker
        killed by signal s counts as 128 + s, and one that ended with 0 while another
        needed it as 1; START_AGAIN when nobody failed, and a
        worker ended with it by itself, or some did when they were asked to end and all
        others with 0; else 128 + s when the launcher was stopped by a signal s.
        """
        failed = first_failure(self.workers)
        if failed is not None:
            return failed.exit_code
        if restart_requests(self.workers) is not None:
            return START_AGAIN
        codes = {worker.exit_code for worker in self.workers}
        if START_AGAIN in codes and codes <= {0, START_AGAIN}:
            if not any(worker.is_running for worker in self.workers):
                return START_AGAIN
        if self._received:
            return 128 + self._received[0]
        return max(codes, default=0)
