"""Relays a worker's output in whole lines, prefixed with the worker's rank."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, Protocol

from tfdp.errors import ConfigurationError

TAIL_LINES = 10
MOST_BYTES = 1 << 16  # an unfinished line is passed on at this length
# Prefixes of a remote worker's reports to the launcher, on its standard error.
CRASH_MARK = b"\x1etfdp last words "
PROGRESS_MARK = b"\x1etfdp progress "
# A line that ends with a carriage return is a redrawn progress bar.
LINE_END = re.compile(rb"\r\n|\n|\r")
REDRAW_SECONDS = 10.0  # a redrawn bar becomes a line at most this often
# Keras' completed bar, and the line above it.
KERAS_BAR = re.compile(
    rb"(?:\x1b\[1m)? *\d+/(?:\d+|Unknown)(?:\x1b\[0m)? .*step|Epoch \d+/\d+$"
)


class LineReceiver(Protocol):
    """Receives lines."""

    def write(self, data: bytes, /) -> object:
        """Takes whole lines."""

    def flush(self) -> None:
        """Writes them without blocking."""


# Python's warnings, and the log lines of TensorFlow and of libraries below errors.
WARNING = re.compile(
    rb"\S+:\d+: (?:\w+\.)*\w*Warning: |[IW]\d{4} \d\d:\d\d|(?:WARNING|INFO):|"
    rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IW] "
)


class Tail:
    """The last lines of a worker, of both streams, in order of arrival, without
    warnings if there are others: the cause of an end is none of them."""

    def __init__(self, lines: int = TAIL_LINES):
        self._lines: deque[bytes] = deque(maxlen=lines)
        self._warnings: deque[bytes] = deque(maxlen=lines)
        self._is_after_warning = False

    def add(self, line: bytes) -> None:
        if not line.strip():
            return
        # Python shows the line of source that warned below, indented.
        is_source = self._is_after_warning and line.startswith(b"  ")
        self._is_after_warning = WARNING.match(line) is not None
        is_warning = self._is_after_warning or is_source
        (self._warnings if is_warning else self._lines).append(line)

    def text_lines(self) -> list[str]:
        found = self._lines or self._warnings
        return [line.decode("utf-8", "replace") for line in found]


class LineRelay:
    """Relays one stream of a worker, line by line.

    Lines of several workers never mix: each is written in one call, and only by the
    launcher. A progress bar becomes a line every ten seconds and at its end.
    `listeners` receive the lines that begin with their mark, exclusively; `log`
    receives all lines without prefix. Progress bars are the same on all workers.
    """

    def __init__(
        self,
        target: LineReceiver,
        prefix: bytes,
        tail: Tail,
        listeners: Mapping[bytes, Callable[[bytes], None]] | None = None,
        *,
        log: LineReceiver | None = None,
        shows_bars: bool = True,
    ):
        self._target, self._prefix, self._tail = target, prefix, tail
        self._listeners, self._log = listeners or {}, log
        self._shows_bars, self._drawn_seconds = shows_bars, time.monotonic()
        self._pending = b""
        self.is_closed = False

    def feed(self, data: bytes) -> None:
        text = self._pending + data
        # A carriage return at the end may be the first half of "\r\n".
        held = b"\r" if text.endswith(b"\r") else b""
        body = text[: len(text) - len(held)]
        lines, start = [], 0
        for end in LINE_END.finditer(body):
            line, start = body[start : end.start()].rstrip(b"\b"), end.end()
            if end.group() != b"\r" or self._is_due(line):
                lines.append(line)
        self._pending = body[start:] + held
        if len(self._pending) > MOST_BYTES:
            lines.append(self._pending)
            self._pending = b""
        self._write(lines)

    def _is_due(self, redrawn: bytes) -> bool:
        """Whether a bar that will be redrawn should be a line now."""
        now_seconds = time.monotonic()
        is_early = now_seconds - self._drawn_seconds < REDRAW_SECONDS
        if is_early or not redrawn.strip() or not self._shows_bars:
            return False
        self._drawn_seconds = now_seconds
        return True

    def close(self) -> None:
        self.is_closed = True
        rest, self._pending = self._pending.rstrip(b"\r"), b""
        if rest:
            self._write([rest])

    def _write(self, lines: list[bytes]) -> None:
        for mark, listen in self._listeners.items():
            for line in lines:
                if line.startswith(mark):
                    listen(line.removeprefix(mark))
            lines = [line for line in lines if not line.startswith(mark)]
        if not lines:
            return
        if self._log is not None:
            self._log.write(b"".join(line + b"\n" for line in lines))
            self._log.flush()
        for line in lines:
            self._tail.add(line)
        if not self._shows_bars:
            lines = [line for line in lines if not KERAS_BAR.match(line)]
        self._target.write(b"".join(self._prefix + line + b"\n" for line in lines))
        self._target.flush()


class WorkerLogs:
    """Files `worker-RANK.log` in `folder` (`--log-dir`); restarts append to them."""

    def __init__(self, folder: str):
        self._folder = pathlib.Path(folder)
        self._files: dict[int, LogFile] = {}
        #: Prints lines for people.
        self.say: Callable[[Sequence[str]], None] = lambda lines: None
        self._start = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self._folder, os.W_OK):
                raise OSError("it cannot be written to")
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"--log-dir {folder!r} cannot be used: {error}. Name another folder."
            ) from error

    def begin(self) -> None:
        self._start += 1

    def of(self, rank: int) -> LogFile:
        """The file of a worker, with a header line for this start."""
        if rank not in self._files:
            path = self._folder / f"worker-{rank}.log"
            self._files[rank] = LogFile(path, lambda lines: self.say(lines))
        file = self._files[rank]
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        file.write(f"--- start {self._start}, {now}\n".encode())
        return file

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class LogFile:
    """A file of appended lines; `say` prints a warning if it cannot be written."""

    def __init__(self, path: pathlib.Path, say: Callable[[Sequence[str]], None]):
        self._path, self._say = path, say
        self._file: BinaryIO | None = None
        self._has_warned = False

    def write(self, data: bytes) -> None:
        """Appends lines; warns once on failure, as no disk must end a training."""
        try:
            if self._file is None:
                self._file = open(self._path, "ab", buffering=0)
            self._file.write(data)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                why = error.strerror or str(error)
                lost = f"{self._path} cannot be written ({why}): lines are lost there"
                self._say([f"{lost} until it can; the workers go on"])

    def flush(self) -> None:
        """Nothing: lines are written at once."""

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
