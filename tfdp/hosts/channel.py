"""`Channel`: connections to a worker's neighbours, with an order of their own.

The neighbours of a worker are those 1, 2, 4 ... places after it, to whom it sends, and
as many places before it, from whom it receives. Those next to it make the ring.
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
    PLACE_BYTES,
    SharedMemory,
    SharedReceiver,
    SharedSender,
)
from tfdp.hosts.wire import LARGEST_DIRECT_BYTES, Receiver, Sender, as_bytes

# How long who ends waits for another worker to take in what it has sent to it: less
# than others may be silent.
SEEN_OFF_SECONDS = 10.0


class Neighbours:
    """The two connections at one distance; an `End` of `tfdp.hosts.recursive_doubling`.

    Args:
      sender: to the worker so far after.
      receiver: from the worker so far before.
    """

    def __init__(self, sender: Sender, receiver: Receiver):
        self.sender = sender
        self.receiver = receiver

    def send(self, data: np.ndarray | bytes | memoryview) -> None:
        """See `Sender.send`."""
        self.sender.send(data)

    def fill(self, array: np.ndarray) -> None:
        """See `Receiver.fill`."""
        self.receiver.fill(array)

    def take(self, size_bytes: int) -> bytearray:
        """See `Receiver.take`."""
        return self.receiver.take(size_bytes)


class Channel:
    """The connections of a channel, and the exchange that is under way on them.

    Args:
      neighbours: by distance, 1, 2, 4 ...
    """

    def __init__(self, neighbours: Sequence[Neighbours]):
        self.neighbours = neighbours
        self.lock = threading.Lock()
        self.count = 0
        #: What the exchange under way, or the last one, is about.
        self.terms = Fingerprint("gather", 0, 0, "none yet")
        #: When it began (`time.monotonic`).
        self.start = 0.0
        #: How long exchanges have lasted so far.
        self.seconds = 0.0
        #: Why there will be no other exchange.
        self.failure: TfdpError | None = None

    @classmethod
    def over(
        cls,
        connections: Sequence[tuple[socket.socket, socket.socket]],
        timeout_seconds: float,
        shared: SharedMemory = NOTHING_SHARED,
        checksum: bool = False,
    ) -> Channel:
        """A channel over connections to and from the neighbours, by distance.

        Args:
          connections, timeout_seconds: see `Sender`.
          shared: the memory that there is between this worker and those next to it.
          checksum: whether what goes through connections alone has checksums.
        """
        nearest, *farther = connections
        ends = [_neighbours(nearest, timeout_seconds, shared, checksum)]
        ends += [
            _neighbours(each, timeout_seconds, checksum=checksum) for each in farther
        ]
        return cls(ends)

    def begin(self, terms: Fingerprint) -> None:
        """Notes what this worker brings."""
        self.terms, self.start = terms, time.monotonic()

    def end(self) -> None:
        """Notes that the exchange under way is over."""
        self.seconds += time.monotonic() - self.start

    @property
    def sender(self) -> Sender:
        """To the next worker of the ring."""
        return self.neighbours[0].sender

    @property
    def receiver(self) -> Receiver:
        """From the worker before."""
        return self.neighbours[0].receiver

    @property
    def sent_bytes(self) -> int:
        """What this worker has sent to all of them."""
        return sum(each.sender.sent_bytes for each in self.neighbours)

    def agree(self, first: np.ndarray | None = None) -> None:
        """Compares what this worker brings with what the worker before does.

        Args:
          first: what the exchange sends to the next worker whatever comes; it goes at
            once, so that nobody waits for the comparison and then for numbers.

        Raises:
          CollectiveMismatch: when it differs.
          OSError: as `Receiver.fill`.
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
            # The header by itself: of what is long nobody may take the end.
            self.sender.flush()
            self.sender.send(rest)
        theirs = bytes(self.receiver.take(HEADER.size))
        if theirs != mine:
            if rest is None:
                self.sender.flush()  # the worker after has to see it as well
            raise CollectiveMismatch(self.terms, theirs)

    @property
    def words(self) -> str:
        """Names the exchange in errors."""
        return f"exchange {self.count} ({self.terms.label})"

    def ends(self, wire_dtype: str | None) -> Ends:
        """What the ring exchanges blocks of arrays by."""
        send, receive = self.sender.send, self.receiver.fill
        if wire_dtype is None:
            # A network is kept busy by smaller ones: a block has to come whole.
            shares = isinstance(self.sender, SharedSender) and self.receiver.add
            block_bytes = PLACE_BYTES if shares else None
            return Ends(send, receive, add=self.receiver.add, block_bytes=block_bytes)
        wire = RoundedWire(wire_type(wire_dtype), send, receive)
        return Ends(wire.send, wire.receive, wire.pass_on)

    def fail_with(self, error: BaseException) -> None:
        """Notes why there is no other exchange; only those of tfdp keep their type."""
        self.failure = (
            error
            if isinstance(error, TfdpError)
            else CollectiveError(f"{type(error).__name__}: {error}")
        )

    def flush(self) -> None:
        """Waits until all that was sent is with the kernel; see `Sender.flush`."""
        for each in self.neighbours:
            each.sender.flush()

    def close(self) -> None:
        """Ends all connections; whoever waits in one gets an error."""
        for each in self.neighbours:
            each.sender.close()
            each.receiver.close()


def see_off(channels: Iterable[Channel]) -> None:
    """Before they are closed, all exchanges done: see `Sender.see_off`."""
    until = time.monotonic() + SEEN_OFF_SECONDS
    for channel in channels:
        for each in channel.neighbours:
            each.sender.see_off(until)


def _neighbours(
    connections: tuple[socket.socket, socket.socket],
    timeout_seconds: float,
    shared: SharedMemory = NOTHING_SHARED,
    checksum: bool = False,
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
