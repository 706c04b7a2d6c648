"""`Channel`: connections to the ring neighbors, with an exchange order of their own.

A worker sends to the workers 1, 2, 4 ... ranks after it, and receives from those 1, 2,
4 ... ranks before it. The connections at distance 1 form the ring.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from tfdp.errors import CollectiveError, TfdpError
from tfdp.hosts.checked_wire import CheckedReceiver, CheckedSender
from tfdp.hosts.collective_fingerprint import HEADER, CollectiveMismatch, Fingerprint
from tfdp.hosts.ring import Ends, RoundedWire, wire_type
from tfdp.hosts.shared_memory import (
    NOTHING_SHARED,
    SLOT_BYTES,
    SharedMemory,
    SharedReceiver,
    SharedSender,
)
from tfdp.hosts.wire import LARGEST_DIRECT_BYTES, Receiver, Sender, as_bytes

# How long `drain` waits for peers to take in sent data: less than the silence limit.
DRAIN_SECONDS = 10.0


class Neighbours:
    """The two connections at one distance; implements `recursive_doubling.End`."""

    def __init__(self, sender: Sender, receiver: Receiver):
        self.sender, self.receiver = sender, receiver

    def send(self, data: np.ndarray | bytes | memoryview) -> None:
        self.sender.send(data)

    def fill(self, array: np.ndarray) -> None:
        self.receiver.fill(array)

    def take(self, size_bytes: int) -> bytearray:
        return self.receiver.take(size_bytes)


class Channel:
    """The connections of one channel, by distance, and the exchange in flight."""

    def __init__(self, neighbours: Sequence[Neighbours]):
        self.neighbours = neighbours
        self.lock = threading.Lock()
        self.count = 0
        self.terms = Fingerprint("gather", 0, 0, "none yet")  # of the current exchange
        self.start = 0.0  # of the current exchange (`time.monotonic`)
        self.seconds = 0.0  # total duration of finished exchanges
        self.failure: TfdpError | None = None  # why there will be no further exchange

    @classmethod
    def over(
        cls,
        connections: Sequence[tuple[socket.socket, socket.socket]],
        timeout_seconds: float,
        shared: SharedMemory = NOTHING_SHARED,
        checksum: bool = False,
    ) -> Channel:
        """A channel over (to, from) connections by distance, `shared` at distance 1."""
        memory = [shared, *[NOTHING_SHARED] * (len(connections) - 1)]
        ends = zip(connections, memory, strict=True)
        return cls([_neighbours(*end, timeout_seconds, checksum) for end in ends])

    @property
    def sender(self) -> Sender:  # to the next worker of the ring
        return self.neighbours[0].sender

    @property
    def receiver(self) -> Receiver:  # from the previous one
        return self.neighbours[0].receiver

    @property
    def sent_bytes(self) -> int:
        return sum(each.sender.sent_bytes for each in self.neighbours)

    def agree(self, first: np.ndarray | None = None) -> None:
        """Compares this worker's fingerprint with that of the worker before it.

        `first` is data that the exchange sends to the next worker in any case: sent
        along with the header, which saves one latency. Raises CollectiveMismatch, or
        OSError as `Receiver.fill`.
        """
        mine = self.terms.header
        rest = None
        if first is not None and first.nbytes > LARGEST_DIRECT_BYTES:
            first, rest = None, first
        if first is None:
            self.sender.send(mine)
        else:
            self.sender.send(mine + as_bytes(first))  # one message, not two
        if rest is not None:
            # Header first and alone: a long message may not be consumed to its end.
            self.sender.flush()
            self.sender.send(rest)
        theirs = bytes(self.receiver.take(HEADER.size))
        if theirs != mine:
            if rest is None:
                self.sender.flush()  # the worker after must see the mismatch as well
            raise CollectiveMismatch(self.terms, theirs)

    @property
    def description(self) -> str:
        return f"exchange {self.count} ({self.terms.label})"

    def ends(self, wire_dtype: str | None) -> Ends:
        """The ring's send and receive functions, for `wire_dtype` or the own type."""
        send, receive = self.sender.send, self.receiver.fill
        if wire_dtype is None:
            # Sockets use smaller blocks: a block must arrive whole to be passed on.
            shares = isinstance(self.sender, SharedSender) and self.receiver.add
            block_bytes = SLOT_BYTES if shares else None
            return Ends(send, receive, add=self.receiver.add, block_bytes=block_bytes)
        wire = RoundedWire(wire_type(wire_dtype), send, receive)
        return Ends(wire.send, wire.receive, wire.pass_on)

    def fail_with(self, error: BaseException) -> None:
        """Keeps the reason for later exchanges; other errors become CollectiveError."""
        self.failure = (
            error
            if isinstance(error, TfdpError)
            else CollectiveError(f"{type(error).__name__}: {error}")
        )

    def flush(self) -> None:
        for each in self.neighbours:
            each.sender.flush()

    def close(self) -> None:
        for each in self.neighbours:
            each.sender.close()
            each.receiver.close()


def drain(channels: Iterable[Channel]) -> None:
    """Drains all senders before an orderly close; see `Sender.drain`."""
    until = time.monotonic() + DRAIN_SECONDS
    for channel in channels:
        for each in channel.neighbours:
            each.sender.drain(until)


def _neighbours(
    connections: tuple[socket.socket, socket.socket],
    shared: SharedMemory,
    timeout_seconds: float,
    checksum: bool,
) -> Neighbours:
    after, before = connections
    sender, receiver = (
        (CheckedSender, CheckedReceiver) if checksum else (Sender, Receiver)
    )
    return Neighbours(
        sender(after, timeout_seconds)
        if shared.after is None
        else SharedSender(after, timeout_seconds, shared.after),
        receiver(before, timeout_seconds)
        if shared.before is None
        else SharedReceiver(before, timeout_seconds, shared.before),
    )
