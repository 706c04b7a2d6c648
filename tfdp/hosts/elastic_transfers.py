"""Transfers between hosts that may die: short waits, and a look at the other in each.

A host is alive when it answers at its door. So who waits for another asks there, again
and again, and nobody has to send heartbeats between meetings.
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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from tfdp._version import __version__
from tfdp.hosts.connect import dial
from tfdp.hosts.elastic_view import MOST_COUNT
from tfdp.hosts.messages import checked_integer, checked_text, parse_object
from tfdp.hosts.wire import LONGEST_LINE_BYTES, as_bytes, read_line, write_line

PURPOSE = "living"
KINDS = ("start", "lives", "ask", "drop", "come", "join")
LOOK_SECONDS = 1.0
# Until a refused connection is tried once more.
REFUSED_SECONDS = 0.1
# What one try to ask may count for at most: a host that was stopped itself has missed
# nothing of the others.
MOST_SECONDS_OF_A_TRY = 3.0
ANSWER_SECONDS = 2.0
MOST_WORKERS = 1 << 20
CHECKSUM = struct.Struct("<I")


class FoundOutError(ConnectionError):
    """A look at another host has shown that to wait for it makes no sense."""


class PeerLostError(FoundOutError):
    """Another host is dead, silent or late: `rank`, and the reason in words."""

    def __init__(self, rank: int, reason: str):
        super().__init__(reason)
        self.rank, self.reason = rank, reason


@dataclasses.dataclass(frozen=True)
class ElasticHello:
    """What a host says of itself when it knocks.

    Args:
      kind: one of KINDS.
      rank, workers, version: which host this is, of how many, of which tfdp.
      port: of its own door; 1 where it is not to be dialed.
      session, epoch: of its group, as far as it knows.
      update: of the meeting that it comes to.
      terms: of what it brings, or waits for; see `fingerprint_of_arrays`.
    """

    kind: str
    rank: int
    workers: int
    port: int
    version: str = __version__
    session: str = ""
    epoch: int = 0
    update: int = 0
    terms: str = ""


def parse_hello(words: dict[str, Any]) -> ElasticHello:
    """A hello, checked; a ValueError when it is none."""
    if words.get("kind") not in KINDS:
        raise ValueError("no kind of hello")
    workers = checked_integer(words.get("workers"), 2, MOST_WORKERS)
    return ElasticHello(
        kind=words["kind"],
        rank=checked_integer(words.get("rank"), 0, workers - 1),
        workers=workers,
        port=checked_integer(words.get("port"), 1, 65535),
        version=checked_text(words.get("version"), 255),
        session=checked_text(words.get("session"), 255),
        epoch=checked_integer(words.get("epoch"), 0, MOST_COUNT),
        update=checked_integer(words.get("update"), 0, MOST_COUNT),
        terms=checked_text(words.get("terms"), 64),
    )


def fingerprint_of_arrays(arrays: Sequence[np.ndarray]) -> str:
    """A text that is the same for arrays of the same shapes and types."""
    like = [[array.dtype.name, list(array.shape)] for array in arrays]
    return hashlib.sha256(json.dumps(like).encode()).hexdigest()


def knock(
    address: tuple[str, int], secret: bytes, hello: ElasticHello
) -> socket.socket:
    """One try to be let in at a door, of a second or two.

    Raises:
      OSError: nobody answered; a ConnectionRefusedError: nobody listens.
    """
    words = dataclasses.asdict(hello)
    # Who dies in the middle of it, or is stopped, is no stranger.
    now = time.monotonic()
    return dial(address, secret, PURPOSE, lambda _: words, now, warns=False)


def ask(address: tuple[str, int], secret: bytes, hello: ElasticHello) -> dict[str, Any]:
    """The line with which a door answers.

    Raises:
      OSError, ValueError: it does not; see `knock`.
    """
    with knock(address, secret, hello) as connection:
        return read_line(connection, time.monotonic() + ANSWER_SECONDS)


class FailureDetector:
    """How long a host may give no answer.

    Args:
      rank: of that host.
      silence_seconds: so long, added up over tries in a row.
      look: asks it; returns whether it answered. A ConnectionRefusedError says that no
        process is there.
    """

    def __init__(self, rank: int, silence_seconds: float, look: Callable[[], bool]):
        self._rank, self._silence_seconds, self._look = rank, silence_seconds, look
        self._silent_seconds = 0.0
        #: When the last try failed; None: it did not.
        self._failed_at: float | None = None

    def check(self) -> None:
        """Asks once.

        Raises:
          PeerLostError: it has died, or was silent for too long.
        """
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


class Watched:
    """A connection on which each second without progress the other is looked at.

    Args:
      connection: closed by `close`.
      check: raises when it makes no sense to wait any longer.
    """

    def __init__(self, connection: socket.socket, check: Callable[[], None]):
        self._connection = connection
        self.check = check
        connection.settimeout(LOOK_SECONDS)

    def send(self, *arrays: np.ndarray) -> None:
        """Sends all of them, each with a checksum.

        Raises:
          OSError: the connection broke.
          Whatever `check` raises.
        """
        for array in arrays:
            self._send(as_bytes(array))
            self._send(memoryview(_checksum_of(array)))

    def tell(self, message: dict[str, Any]) -> None:
        """Sends a line."""
        self._send(memoryview(json.dumps(message).encode() + b"\n"))

    def _send(self, view: memoryview) -> None:
        while view.nbytes:
            try:
                view = view[self._connection.send(view) :]
            except TimeoutError:
                self.check()

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        """Fills arrays with what comes; errors as `send`.

        Raises:
          ConnectionError: also when one is not as it was sent.
        """
        for array in arrays:
            checksum = bytearray(CHECKSUM.size)
            self._fill(as_bytes(array))
            self._fill(memoryview(checksum))
            if checksum != _checksum_of(array):
                logging.warning(
                    "tfdp: Weights from another host came with another checksum than "
                    "they were sent with, and were thrown away: the network between "
                    "the hosts or the memory of one of them damages data."
                )
                raise ConnectionError("what came is not what was sent")

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

    def hear(self) -> dict[str, Any]:
        """The next line; errors as `send`, and ValueError when it is none."""
        line = bytearray()
        while not line.endswith(b"\n"):
            try:
                part = self._connection.recv(1)
            except TimeoutError:
                self.check()
                continue
            if not part:
                raise ConnectionError("closed")
            line += part
            if len(line) > LONGEST_LINE_BYTES:
                raise ValueError("line too long")
        return parse_object(line)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def _checksum_of(array: np.ndarray) -> bytes:
    # Once in many steps: the standard library is fast enough.
    return CHECKSUM.pack(zlib.crc32(as_bytes(array)))


def send_and_close(connection: socket.socket, message: dict[str, Any]) -> None:
    """Says a line to somebody who may have gone."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(ANSWER_SECONDS)
        write_line(connection, message)
