"""A worker's output: whole lines, each with the worker's rank in front."""

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
# A line without an end is passed on when it gets this long.
MOST_BYTES = 1 << 16
# In front of what a worker on another machine has to say to the launcher, on its
# standard error: its last words, and how far it is.
LAST_WORDS_MARK = b"\x1etfdp last words "
PROGRESS_MARK = b"\x1etfdp progress "
# What ends with a carriage return is drawn again: a progress bar.
LINE_END = re.compile(rb"\r\n|\n|\r")
# So often at most a bar that is drawn again and again becomes a line.
REDRAW_SECONDS = 10.0
# Keras' bar when it is complete, and the line above it.
KERAS_BAR = re.compile(
    rb"(?:\x1b\[1m)? *\d+/(?:\d+|Unknown)(?:\x1b\[0m)? .*step|Epoch \d+/\d+$"
)


class Target(Protocol):
    """Where lines go."""

    def write(self, data: bytes, /) -> object:
        """Takes whole lines."""

    def flush(self) -> None:
        """Writes them, if that needs no waiting."""


class Tail:
    """The last lines of a worker, of both its streams in the order they came."""

    def __init__(self, lines: int = TAIL_LINES):
        self._lines: deque[bytes] = deque(maxlen=lines)

    def add(self, line: bytes) -> None:
        """Keeps a line; blank ones say nothing."""
        if line.strip():
            self._lines.append(line)

    def text_lines(self) -> list[str]:
        """The lines, oldest first; bytes that are not UTF-8 are replaced."""
        return [line.decode("utf-8", "replace") for line in self._lines]


class LineRelay:
    """Passes one stream of a worker on, line by line.

    Lines of several workers never mix: each is written in one call, and only the
    launcher writes. Of a progress bar its last state is a line, and one every ten
    seconds before.

    Args:
      target: where they go.
      prefix: in front of each.
      tail: keeps the last ones.
      listeners: by the mark with which their lines begin; nobody else gets these.
      log: takes every line, without prefix; None: nobody does.
      shows_bars: whether progress bars are passed on; all workers have the same.

    >>> import io
    >>> target, tail = io.BytesIO(), Tail()
    >>> relay = LineRelay(target, b"[1] ", tail)
    >>> relay.feed(b"one\\ntw"); relay.feed(b"o\\nthree"); relay.close()
    >>> target.getvalue()
    b'[1] one\\n[1] two\\n[1] three\\n'
    """

    def __init__(
        self,
        target: Target,
        prefix: bytes,
        tail: Tail,
        listeners: Mapping[bytes, Callable[[bytes], None]] | None = None,
        *,
        log: Target | None = None,
        shows_bars: bool = True,
    ):
        self._listeners = listeners or {}
        self._log = log
        self._shows_bars = shows_bars
        self._drawn_seconds = time.monotonic()
        self._target = target
        self._prefix = prefix
        self._tail = tail
        self._pending = b""
        #: Whether the stream has come to its end.
        self.is_closed = False

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream and writes the lines they complete."""
        text = self._pending + data
        # A carriage return at the very end may be the half of a "\r\n".
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
        """Whether a bar that will be drawn again should be a line now."""
        now_seconds = time.monotonic()
        is_early = now_seconds - self._drawn_seconds < REDRAW_SECONDS
        if is_early or not redrawn.strip() or not self._shows_bars:
            return False
        self._drawn_seconds = now_seconds
        return True

    def close(self) -> None:
        """Writes what is left, as a line."""
        self.is_closed = True
        rest, self._pending = self._pending.rstrip(b"\r"), b""
        if rest:
            self._write([rest])

    def _write(self, lines: list[bytes]) -> None:
        for mark, hear in self._listeners.items():
            for line in lines:
                if line.startswith(mark):
                    hear(line.removeprefix(mark))
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


# What workers write, kept in a file for each: `tfdp launch --log-dir`.


class WorkerLogs:
    """Files `worker-RANK.log` in a folder; later starts are added at their ends.

    Args:
      folder: where; it is made.

    Raises:
      ConfigurationError: when nothing can be written there.
    """

    def __init__(self, folder: str):
        self._folder = pathlib.Path(folder)
        self._files: dict[int, LogFile] = {}
        #: Takes lines for people.
        self.say: Callable[[Sequence[str]], None] = lambda lines: None
        self._start = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            is_writable = os.access(self._folder, os.W_OK)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"--log-dir {folder!r} cannot be made: {error}. Name another folder."
            ) from error
        if not is_writable:
            raise ConfigurationError(
                f"--log-dir {folder!r} cannot be written to. Name another folder."
            )

    def begin(self) -> None:
        """Another start of all workers."""
        self._start += 1

    def of(self, rank: int) -> LogFile:
        """The file of a worker, with a line that says which start this is."""
        if rank not in self._files:
            path = self._folder / f"worker-{rank}.log"
            self._files[rank] = LogFile(path, lambda lines: self.say(lines))
        file = self._files[rank]
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        file.write(f"--- start {self._start}, {now}\n".encode())
        return file

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            file.close()


class LogFile:
    """A file to which whole lines are added, as long as there is room for them.

    Args:
      path: of the file.
      say: takes lines for people.
    """

    def __init__(self, path: pathlib.Path, say: Callable[[Sequence[str]], None]):
        self._path, self._say = path, say
        self._file: BinaryIO | None = None
        self._has_told = False

    def write(self, data: bytes) -> None:
        """Adds lines; says once when that fails, for no disk ends a training."""
        try:
            if self._file is None:
                self._file = open(self._path, "ab", buffering=0)
            self._file.write(data)
        except OSError as error:
            if not self._has_told:
                self._has_told = True
                why = error.strerror or str(error)
                lost = f"{self._path} cannot be written ({why}): lines are lost there"
                self._say([f"{lost} until it can; the workers go on"])

    def flush(self) -> None:
        """Nothing: a line is written at once."""

    def close(self) -> None:
        """Writes nothing any more."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
