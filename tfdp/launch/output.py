"""A worker's output: whole lines, each with the worker's rank in front."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

__all__ = [
    "LAST_WORDS_MARK",
    "PROGRESS_MARK",
    "TAIL_LINES",
    "LineRelay",
    "Tail",
    "Target",
]

TAIL_LINES = 10
# A line without an end is passed on when it gets this long.
MOST_BYTES = 1 << 16
# In front of what a worker on another machine has to say to the launcher, on its
# standard error: its last words, and how far it is.
LAST_WORDS_MARK = b"\x1etfdp last words "
PROGRESS_MARK = b"\x1etfdp progress "
# Progress bars end their lines with a carriage return.
LINE_END = re.compile(rb"\r\n|\n|\r")


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
    launcher writes.

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
    ):
        # By the mark with which their lines begin; nobody else gets these.
        self._listeners = listeners or {}
        self._target = target
        self._prefix = prefix
        self._tail = tail
        self._pending = b""

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream and writes the lines they complete."""
        text = self._pending + data
        # A carriage return at the very end may be the half of a "\r\n".
        held = b"\r" if text.endswith(b"\r") else b""
        *lines, rest = LINE_END.split(text[: len(text) - len(held)])
        self._pending = rest + held
        if len(self._pending) > MOST_BYTES:
            lines.append(self._pending)
            self._pending = b""
        self._write(lines)

    def close(self) -> None:
        """Writes what is left, as a line."""
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
        for line in lines:
            self._tail.add(line)
        self._target.write(b"".join(self._prefix + line + b"\n" for line in lines))
        self._target.flush()
