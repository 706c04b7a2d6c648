"""Transfers between hosts that may die: short waits, with a liveness check in each.

A host is alive if its listener answers. A host that waits for another queries it, so no
heartbeats are needed between all-reduces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import socket
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import logging

from tfdp._version import __version__
from tfdp.hosts.connect import dial
from tfdp.hosts.elastic_view import MOST_COUNT
from tfdp.hosts.host_link import Arrays
from tfdp.hosts.messages import (
    MOST_CHARACTERS,
    MOST_PORT,
    MOST_WORKERS,
    checked_integer,
    checked_text,
    parse_object,
)
from tfdp.hosts.wire import LONGEST_LINE_BYTES, as_bytes, read_line, write_line

PURPOSE = "living"
KINDS = ("start", "lives", "ask", "drop", "come", "join")
LOOK_SECONDS = 1.0
# Delay before a refused connection is retried.
REFUSED_SECONDS = 0.1
# The most silence that one try may count for: a host that was suspended itself has
# missed nothing of the others.
MOST_SECONDS_OF_A_TRY = 3.0
ANSWER_SECONDS = 2.0
CHECKSUM = struct.Struct("<I")


class FoundOutError(ConnectionError):
    """A check of another host has shown that waiting for it is useless."""


class PeerLostError(FoundOutError):
    """Host `rank` is dead, silent or late, for `reason`."""

    def __init__(self, rank: int, reason: str):
        super().__init__(reason)
        self.rank, self.reason = rank, reason


@dataclasses.dataclass(frozen=True)
class ElasticHello:
    """The message that a host sends when it connects."""

    kind: str  # one of KINDS
    rank: int
    workers: int
    port: int  # where it listens; 1 if others must not connect to it
    version: str = __version__
    session: str = ""
    epoch: int = 0
    update: int = 0  # of the all-reduce that it comes to
    terms: str = ""  # fingerprint of the arrays that it brings or expects


def parse_hello(message: dict[str, Any]) -> ElasticHello:
    """Parses a hello; raises ValueError if it is invalid."""
    if message.get("kind") not in KINDS:
        raise ValueError("not a kind of hello")
    workers = checked_integer(message.get("workers"), 2, MOST_WORKERS)
    return ElasticHello(
        kind=message["kind"],
        rank=checked_integer(message.get("rank"), 0, workers - 1),
        workers=workers,
        port=checked_integer(message.get("port"), 1, MOST_PORT),
        version=checked_text(message.get("version"), MOST_CHARACTERS),
        session=checked_text(message.get("session"), MOST_CHARACTERS),
        epoch=checked_integer(message.get("epoch"), 0, MOST_COUNT),
        update=checked_integer(message.get("update"), 0, MOST_COUNT),
        terms=checked_text(message.get("terms"), 64),
    )


def fingerprint_of_arrays(arrays: Arrays) -> str:
    """The same text for arrays of the same shapes and types."""
    like = [[array.dtype.name, list(array.shape)] for array in arrays]
    return hashlib.sha256(json.dumps(like).encode()).hexdigest()


def try_dial(
    address: tuple[str, int], secret: bytes, hello: ElasticHello
) -> socket.socket:
    """Connects with one try, of a second or two; OSError without an answer."""
    message = dataclasses.asdict(hello)
    # No warning: a host that dies or is suspended meanwhile is not a stranger.
    now = time.monotonic()
    return dial(address, secret, PURPOSE, lambda _: message, now, warns=False)


def query(
    address: tuple[str, int], secret: bytes, hello: ElasticHello
) -> dict[str, Any]:
    """A listener's reply to `hello`; raises OSError or ValueError without one."""
    with try_dial(address, secret, hello) as connection:
        return read_line(connection, time.monotonic() + ANSWER_SECONDS)


class FailureDetector:
    """Declares host `rank` lost after so many seconds of silence in consecutive tries.

    `look` queries it; returns whether it answered, and raises ConnectionRefusedError if
    its process is gone.
    """

    def __init__(self, rank: int, silence_seconds: float, look: Callable[[], bool]):
        self._rank, self._silence_seconds, self._look = rank, silence_seconds, look
        self._silent_seconds = 0.0
        self._failed_at: float | None = None  # the last try, if it failed

    def check(self) -> None:
        """Queries once; raises PeerLostError if the host is dead or silent too long."""
        start = time.monotonic()
        since = start if self._failed_at is None else self._failed_at
        if self._answers():
            self._silent_seconds, self._failed_at = 0.0, None
            return
        if time.monotonic() - start < LOOK_SECONDS / 4:
            time.sleep(LOOK_SECONDS / 4)
        self._failed_at = time.monotonic()
        self._silent_seconds += min(self._failed_at - since, MOST_SECONDS_OF_A_TRY)
        if self._silent_seconds >= self._silence_seconds:
            raise PeerLostError(
                self._rank,
                f"it was silent for {self._silence_seconds:g} seconds (its process is "
                "stopped, or its machine cannot be reached)",
            )

    def _answers(self) -> bool:
        for is_last in (False, True):
            try:
                return self._look()
            except ConnectionRefusedError:
                if is_last:
                    raise PeerLostError(self._rank, "its process has ended") from None
                time.sleep(REFUSED_SECONDS)
        return False


class DamagedArrayError(ConnectionError):
    """An array came with another checksum than it was sent with."""


class Watched:
    """A connection that calls `check`, which may raise, in each second of waiting."""

    def __init__(self, connection: socket.socket, check: Callable[[], None]):
        self._connection = connection
        self.check = check
        connection.settimeout(LOOK_SECONDS)

    def send(self, *arrays: np.ndarray) -> None:
        """Sends arrays with checksums; raises OSError, or what `check` raises."""
        for array in arrays:
            self._send(as_bytes(array))
            self._send(memoryview(_checksum_of(array)))

    def send_line(self, message: dict[str, Any]) -> None:
        self._send(memoryview(json.dumps(message).encode() + b"\n"))

    def _send(self, view: memoryview) -> None:
        while view.nbytes:
            try:
                view = view[self._connection.send(view) :]
            except TimeoutError:
                self.check()

    def fill(self, arrays: Arrays) -> None:
        """Fills arrays; errors as `send`, or ConnectionError for a wrong checksum."""
        for array in arrays:
            checksum = bytearray(CHECKSUM.size)
            self._fill(as_bytes(array))
            self._fill(memoryview(checksum))
            if checksum != _checksum_of(array):
                logging.warning(
                    "tfdp: Numbers from another host came with another checksum than "
                    "they were sent with, and were thrown away: the network between "
                    "the hosts or the memory of one of them damages data."
                )
                raise DamagedArrayError("received data is damaged")

    def _fill(self, view: memoryview) -> None:
        while view.nbytes:
            try:
                got = self._connection.recv_into(view)
            except TimeoutError:
                self.check()
                continue
            if not got:
                raise ConnectionError("closed")
            view = view[got:]

    def receive_line(self) -> dict[str, Any]:
        """The next line; errors as `send`, or ValueError for an invalid one."""
        line, part = bytearray(), bytearray(1)
        while not line.endswith(b"\n"):
            self._fill(memoryview(part))
            line += part
            if len(line) > LONGEST_LINE_BYTES:
                raise ValueError("line too long")
        return parse_object(line)

    def close(self) -> None:
        self._connection.close()


def _checksum_of(array: np.ndarray) -> bytes:
    # Rare enough for the standard library's CRC.
    return CHECKSUM.pack(zlib.crc32(as_bytes(array)))


def send_and_close(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends a line to a peer that may have left, and closes the connection."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(ANSWER_SECONDS)
        write_line(connection, message)
