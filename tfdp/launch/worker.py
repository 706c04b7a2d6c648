"""One running worker: its process, its process group, its output."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO, cast

from tfdp.cluster import crash_report, progress
from tfdp.cluster.crash_report import CrashReport, parse_crash_report, read_crash_report
from tfdp.cluster.progress import START_AGAIN, Progress, parse_progress, read_progress
from tfdp.launch.guard import group_exists, signal_group
from tfdp.launch.output import CRASH_MARK, PROGRESS_MARK, LineReceiver, LineRelay, Tail
from tfdp.launch.signals import signal_name

READ_BYTES = 1 << 16
SSH_ERROR = 255  # ssh's exit code if it cannot connect, or loses the connection


@dataclasses.dataclass(frozen=True)
class WorkerCommand:
    """How to start one worker.

    `keeps_stdin`: it is a `tfdp.launch.remote`. Its standard input is a pipe, closed to
    stop it or if the launcher dies (otherwise the input is empty); `first_input` is
    sent through it. Its reports are lines of its standard error.
    """

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]
    keeps_stdin: bool = False
    first_input: bytes = dataclasses.field(default=b"", repr=False)


class Worker:
    """A started worker, in a session and a process group of its own.

    `folder` is for crash reports and progress of local workers; it may be absent.
    """

    def __init__(self, start: WorkerCommand, folder: str):
        self.rank = start.rank
        self._folder = folder
        #: Whether a `tfdp.launch.remote` runs it on another machine.
        self.is_remote = start.keeps_stdin
        self._crash: CrashReport | None = None
        self._progress: Progress | None = None
        #: When the launcher stopped it, by the clock of crash reports.
        self._stop_seconds: float | None = None
        self.tail = Tail()
        self._relays: list[LineRelay] = []
        self.stopped_by: int | None = None  # the last signal that the launcher sent
        self.left_early = ""  # why its end with 0 is a failure; see `tfdp.launch.cause`
        #: Whether it replaces one that ended, while others went on.
        self.is_replacement = False
        #: Whether it has ended and another is to take its place: no failure of the job.
        self.is_replaced = False
        self.started_seconds = time.monotonic()
        environment = dict(start.environment)
        if not self.is_remote:
            # Identifies strays. Not for ssh, which may start the master of shared
            # connections.
            environment[crash_report.FOLDER_VARIABLE] = folder
            environment[progress.FOLDER_VARIABLE] = folder
        self.process = subprocess.Popen(
            list(start.command),
            env=environment,
            stdin=subprocess.PIPE if start.keeps_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        if not self.is_remote:
            progress.begin_notes(folder, self.process.pid)
        self.ended_seconds: float | None = None
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended; see `check`
                self.process.stdin.write(start.first_input)
                self.process.stdin.flush()

    @property
    def group(self) -> int:
        """The process group: the worker's own id, as it started a session."""
        return self.process.pid

    @property
    def crash(self) -> CrashReport | None:
        """The worker's crash report, if written before the launcher stopped it."""
        crash = self._crash
        if crash is None and not self.is_remote:
            crash = self._crash = read_crash_report(self._folder, self.process.pid)
        if crash is None or self._stop_seconds is None:
            return crash
        if self.is_remote:  # with another clock
            return None if self.stopped_by is not None else crash
        return None if crash.time_seconds > self._stop_seconds else crash

    @property
    def progress(self) -> Progress | None:
        if self.is_remote:
            return self._progress
        return read_progress(self._folder, self.process.pid)

    @property
    def strategies(self) -> int | None:
        """How many strategies over all workers it started to create; None: unknown.

        For a remote worker that has ended, only once all its lines have arrived.
        """
        has_arrived = not self.is_remote or all(r.is_closed for r in self._relays)
        noted = self.progress if self.is_running or has_arrived else None
        return None if noted is None else noted.strategies

    def _read_crash_report(self, text: bytes) -> None:
        self._crash = parse_crash_report(text)

    def _read_progress(self, text: bytes) -> None:
        self._progress = parse_progress(text) or self._progress

    @property
    def has_failed(self) -> bool:
        """Whether it failed, or reported a crash, before the launcher stopped it."""
        if self.crash is not None or self.left_early:
            return True
        return self._has_left and self.exit_code not in (0, START_AGAIN)

    @property
    def has_ended_well(self) -> bool:
        """Whether it ended by itself with 0, and no other worker needed it."""
        return self._has_left and not self.has_failed and self.exit_code == 0

    @property
    def requests_restart(self) -> bool:
        """Whether it ended by itself with START_AGAIN."""
        return self._has_left and self.exit_code == START_AGAIN and self.crash is None

    @property
    def _has_left(self) -> bool:
        return not self.is_running and self.stopped_by is None

    @property
    def was_ended_from_outside(self) -> bool:
        """Whether a signal ended it, or its machine or connection was lost."""
        if self.crash is not None:
            return False
        if self.is_remote:  # a remote shell reports signal s as 128 + s
            return 128 < self.exit_code <= SSH_ERROR
        return self.was_killed

    @property
    def failed_seconds(self) -> float:
        """The time at which it failed, by the launcher's monotonic clock."""
        crash = self.crash
        if crash is None or self.is_remote:
            return self.ended_seconds or time.monotonic()
        return time.monotonic() - (time.time() - crash.time_seconds)

    @property
    def is_running(self) -> bool:
        """Whether the process itself (not its whole group) was running at `check`."""
        return self.ended_seconds is None

    @property
    def exit_code(self) -> int:
        """Exit code as in a shell: 128 + the signal's number for a killed process."""
        code = self.process.returncode or 0
        if self.left_early:
            return 1  # 0 would mean success
        if self.stopped_by is not None and self.crash is not None:
            return 1  # it was crashing; Python's own code for an error
        return 128 - code if code < 0 else code

    @property
    def was_killed(self) -> bool:
        return (self.process.returncode or 0) < 0

    def check(self) -> bool:
        """Polls the process; whether it has ended since the last call."""
        if not self.is_running or self.process.poll() is None:
            return False
        self.ended_seconds = time.monotonic()
        return True

    def describe_end(self) -> str:
        code = self.process.returncode
        if self.left_early:
            return f"exit code {code} {self.left_early}"
        if code == START_AGAIN:
            return f"exit code {code}: saved, start me again"
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by {signal_name(-code)}"
        # A remote shell reports signal s as 128 + s.
        if code == -signal.SIGKILL or (self.is_remote and code == 128 + signal.SIGKILL):
            where = " there" if self.is_remote else ""
            if self.stopped_by != signal.SIGKILL:
                how += f" (often out of memory; see dmesg{where})"
        return how

    @property
    def group_is_left(self) -> bool:
        """Whether a process of the group runs, the worker or its children."""
        return self.is_running or group_exists(self.group)

    def send(self, number: int) -> None:
        """Sends a signal to the whole group, and resumes it if it was suspended.

        A remote worker's input is closed instead, so that its watcher stops it; the
        connection stays open for the watcher's report.
        """
        if self.is_running:
            self.stopped_by = number
            self._stop_seconds = self._stop_seconds or time.time()
        if self.is_remote and self.is_running and number != signal.SIGKILL:
            self.close_input()
            return
        signal_group(self.group, number)
        signal_group(self.group, signal.SIGCONT)

    def close_input(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def relay(
        self,
        selector: selectors.BaseSelector,
        stdout: LineReceiver,
        stderr: LineReceiver,
        prefix: bytes,
        log: LineReceiver | None = None,
    ) -> None:
        """Registers both streams with `selector`; see `read` and `LineRelay`."""
        marks = {
            CRASH_MARK: self._read_crash_report,
            PROGRESS_MARK: self._read_progress,
        }
        listeners = marks if self.is_remote else None
        bars = self.rank == 0
        self._relays = [
            LineRelay(stdout, prefix, self.tail, log=log, shows_bars=bars),
            LineRelay(stderr, prefix, self.tail, listeners, log=log, shows_bars=bars),
        ]
        streams = (
            cast(BinaryIO, self.process.stdout),
            cast(BinaryIO, self.process.stderr),
        )
        for stream, relay in zip(streams, self._relays, strict=True):
            selector.register(stream, selectors.EVENT_READ, relay)


def read(selector: selectors.BaseSelector, timeout_seconds: float) -> bool:
    """Relays available output of all workers; whether there was any."""
    ready = selector.select(timeout_seconds)
    for key, _ in ready:
        relay = key.data
        stream = cast(BinaryIO, key.fileobj)
        data = os.read(stream.fileno(), READ_BYTES)
        if data:
            relay.feed(data)
        else:
            relay.close()
            selector.unregister(stream)
            stream.close()
    return bool(ready)
