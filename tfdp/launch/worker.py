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

from tfdp.cluster import progress
from tfdp.cluster.progress import START_AGAIN, Progress, parse_progress, read_progress
from tfdp.hosts import crash_report
from tfdp.hosts.crash_report import CrashReport, parse_crash_report, read_crash_report
from tfdp.launch.guard import group_exists, signal_group
from tfdp.launch.output import (
    LAST_WORDS_MARK,
    PROGRESS_MARK,
    LineRelay,
    Tail,
    Target,
)
from tfdp.launch.signals import signal_name

READ_BYTES = 1 << 16
# What ssh ends with when it could not connect, or lost the connection.
SSH_ERROR = 255


@dataclasses.dataclass(frozen=True)
class WorkerCommand:
    """How to start one worker.

    Args:
      rank: of the worker, for messages and in front of its lines.
      command: program and arguments.
      environment: all variables of the process.
      keeps_stdin: it runs behind a `tfdp.launch.remote`: hold a pipe to its standard
        input open for as long as the launcher lives (otherwise the input is empty),
        and take what it has to say from lines of its standard error. To ask it to
        end is to close that pipe.
      first_input: what goes into that pipe first, some bytes.
    """

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]
    keeps_stdin: bool = False
    first_input: bytes = dataclasses.field(default=b"", repr=False)


class Worker:
    """A worker that was started, in a session and a process group of its own.

    Args:
      start: how.
      folder: where workers on this machine leave their last words and progress; it
        need not be there.
    """

    def __init__(self, start: WorkerCommand, folder: str):
        self.rank = start.rank
        self._folder = folder
        #: Whether it runs on another machine, where a `tfdp.launch.remote` watches it.
        self.is_remote = start.keeps_stdin
        self._last_words: CrashReport | None = None
        self._progress: Progress | None = None
        #: By the clock of last words, when the launcher asked it to end.
        self._asked_seconds: float | None = None
        self.tail = Tail()
        self._relays: list[LineRelay] = []
        self.stopped_by: int | None = None  # the last signal that the launcher sent
        #: How it ended with 0 while others needed it; see `tfdp.launch.cause`.
        self.left_early = ""
        #: Whether it was started in the place of one that ended, while others went on.
        self.is_replacement = False
        self.started_seconds = time.monotonic()
        environment = dict(start.environment)
        if not self.is_remote:
            # By it strays are known. What ssh starts may be of use to others: the
            # master of shared connections.
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
        """The process group: the worker's own id, as it leads its session."""
        return self.process.pid

    @property
    def last_words(self) -> CrashReport | None:
        """What it died of, if it said so before it was asked to end."""
        words = self._last_words
        if words is None and not self.is_remote:
            words = self._last_words = read_crash_report(self._folder, self.process.pid)
        if words is None or self._asked_seconds is None:
            return words
        # The clock of another machine is not this one's.
        was_asked_before = (
            self.stopped_by is not None
            if self.is_remote
            else words.time_seconds > self._asked_seconds
        )
        return None if was_asked_before else words

    @property
    def progress(self) -> Progress | None:
        """How far it is, as far as it has said."""
        if self.is_remote:
            return self._progress
        return read_progress(self._folder, self.process.pid)

    @property
    def strategies(self) -> int | None:
        """How many strategies of all workers it has begun to make; None: unknown.

        Of a worker on another machine that has ended, once all its lines have come.
        """
        is_heard = not self.is_remote or all(relay.is_closed for relay in self._relays)
        noted = self.progress if self.is_running or is_heard else None
        return None if noted is None else noted.strategies

    def _hear_last_words(self, text: bytes) -> None:
        self._last_words = parse_crash_report(text)

    def _hear_progress(self, text: bytes) -> None:
        self._progress = parse_progress(text) or self._progress

    @property
    def has_failed(self) -> bool:
        """Whether it came to a bad end, or is about to, before it was asked to."""
        if self.last_words is not None or self.left_early:
            return True
        if self.is_running or self.stopped_by is not None:
            return False
        return self.exit_code not in (0, START_AGAIN)

    @property
    def has_ended_well(self) -> bool:
        """Whether it ended by itself, with 0, while no other worker needed it."""
        if self.is_running or self.stopped_by is not None or self.has_failed:
            return False
        return self.exit_code == 0

    @property
    def requests_restart(self) -> bool:
        """Whether it ended by itself, and says: saved, start me again."""
        if self.is_running or self.stopped_by is not None:
            return False
        return self.exit_code == START_AGAIN and self.last_words is None

    @property
    def has_saved(self) -> bool:
        """Whether it ended with the code for that, asked to end or not."""
        return not self.is_running and self.process.returncode == START_AGAIN

    @property
    def was_ended_from_outside(self) -> bool:
        """Whether a signal ended it, or its machine or the way there was lost."""
        if self.last_words is not None:
            return False
        if self.is_remote:  # where a shell's 128 + s tells of a signal
            return 128 < self.exit_code <= SSH_ERROR
        return self.was_killed

    @property
    def failed_seconds(self) -> float:
        """When it failed, by the launcher's monotonic clock."""
        words = self.last_words
        if words is None or self.is_remote:
            return self.ended_seconds or time.monotonic()
        return time.monotonic() - (time.time() - words.time_seconds)

    @property
    def is_running(self) -> bool:
        """Whether the process (not all of its group) was seen to run."""
        return self.ended_seconds is None

    @property
    def exit_code(self) -> int:
        """As a shell gives it: 128 + the signal's number for a killed process."""
        code = self.process.returncode or 0
        if self.left_early:
            return 1  # 0 would say that all went well
        if self.stopped_by is not None and self.last_words is not None:
            return 1  # it was on its way; Python's own code for an error
        return 128 - code if code < 0 else code

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it."""
        return (self.process.returncode or 0) < 0

    def check(self) -> bool:
        """Asks for the process; returns True when it has ended since the last time."""
        if not self.is_running or self.process.poll() is None:
            return False
        self.ended_seconds = time.monotonic()
        return True

    def describe_end(self) -> str:
        """`exit code 3`, or `killed by SIGTERM`."""
        code = self.process.returncode
        if self.left_early:
            return f"exit code {code} {self.left_early}"
        if code == START_AGAIN:
            return f"exit code {code}: saved, start me again"
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by {signal_name(-code)}"
        # Another machine's shell has 128 + s for the signal.
        if code == -signal.SIGKILL or (self.is_remote and code == 128 + signal.SIGKILL):
            where = " there" if self.is_remote else ""
            if self.stopped_by != signal.SIGKILL:
                how += f" (often out of memory; see dmesg{where})"
        return how

    @property
    def group_is_left(self) -> bool:
        """Whether a process of the group runs, the worker or what it has started."""
        return self.is_running or group_exists(self.group)

    def send(self, number: int) -> None:
        """Sends a signal to the whole group, and wakes it if it was stopped.

        On another machine: ends the input of whoever watches the worker there, who
        then does that. The connection stays until the worker's end is told.
        """
        if self.is_running:
            self.stopped_by = number
            self._asked_seconds = self._asked_seconds or time.time()
        if self.is_remote and self.is_running and number != signal.SIGKILL:
            self.close_input()
            return
        signal_group(self.group, number)
        signal_group(self.group, signal.SIGCONT)

    def close_input(self) -> None:
        """Ends the worker's standard input, where that is a pipe."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def relay(
        self,
        selector: selectors.BaseSelector,
        stdout: Target,
        stderr: Target,
        prefix: bytes,
        log: Target | None = None,
    ) -> None:
        """Registers both streams; see `read`.

        Args:
          selector: to register with.
          stdout: where its lines go.
          stderr: the same, of its standard error.
          prefix: in front of each line.
          log: takes the lines of both; None: nobody.
        """
        listeners = {
            LAST_WORDS_MARK: self._hear_last_words,
            PROGRESS_MARK: self._hear_progress,
        }
        heard = listeners if self.is_remote else None
        for stream, target, listens in (
            (self.process.stdout, stdout, None),
            (self.process.stderr, stderr, heard),
        ):
            if stream is not None:
                relay = LineRelay(
                    target,
                    prefix,
                    self.tail,
                    listens,
                    log=log,
                    shows_bars=self.rank == 0,
                )
                self._relays.append(relay)
                selector.register(stream, selectors.EVENT_READ, relay)


def read(selector: selectors.BaseSelector, timeout_seconds: float) -> bool:
    """Passes on what has come from all workers; returns whether anything had."""
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
