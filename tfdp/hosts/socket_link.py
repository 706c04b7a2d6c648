"""`SocketLink`: what an engine needs of the network, over sockets.

Each channel is a ring with an order of its own: exchange n of one worker meets exchange
n of all others. A header before each tells whether they are about the same thing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tfdp.errors import CollectiveError, WorkerLostError
from tfdp.hosts.buffers import BufferPool, views_of
from tfdp.hosts.host_link import CHANNELS, HostLink, Ranges
from tfdp.hosts.last_words import lost_another
from tfdp.hosts.lost_worker import late_words, say_lost
from tfdp.hosts.membership import Membership
from tfdp.hosts.rendezvous import meet, name_workers
from tfdp.hosts.ring import (
    Block,
    Receive,
    Send,
    ring_all_gather,
    ring_reduce_scatter,
    ring_sum,
)
from tfdp.hosts.rounded_wire import RoundedWire, wire_type
from tfdp.hosts.waits import NOTICE_SECONDS, Waits, say_waiting
from tfdp.hosts.wire import Receiver, Sender

__all__ = ["SocketLink"]

# How long a failure may take to be heard after a connection has broken.
NEWS_SECONDS = 3.0
HEADER = struct.Struct("<8sQQ")


class SocketLink(HostLink):
    """A `HostLink` over TCP, with nothing but the standard library and NumPy.

    Args:
      rank, workers, timeout_seconds: see `HostLink`.
      coordinator: "host:port" where worker 0 listens.
      silence_seconds: how long a worker may send no heartbeat.
    """

    name = "sockets"

    def __init__(
        self,
        rank: int,
        workers: int,
        coordinator: str,
        timeout_seconds: float,
        silence_seconds: float = 15.0,
    ):
        super().__init__(rank, workers, timeout_seconds)
        with _says_that_it_waits(rank, workers, coordinator) as present:
            meeting = meet(
                rank, workers, coordinator, len(CHANNELS), timeout_seconds, present
            )
        self._channels = {
            name: _Channel(
                Sender(to_next, timeout_seconds),
                Receiver(from_before, timeout_seconds),
            )
            for name, (to_next, from_before) in zip(
                CHANNELS, meeting.rings, strict=True
            )
        }
        self.hosts = meeting.hosts
        self._failure_listeners: list[Callable[[str], None]] = []
        self._is_closed = False
        self._waits = Waits(rank)
        self._pool = BufferPool()
        self._exchange_numbers = itertools.count(1)
        self._membership = Membership(
            rank,
            workers,
            meeting.control,
            silence_seconds,
            self._fail,
            self._waits.look,
        )

    def sum(
        self,
        arrays: Sequence[np.ndarray],
        label: str,
        channel: str = "step",
        wire_dtype: str | None = None,
    ) -> list[np.ndarray]:
        """See `HostLink.sum`."""
        arrays = [np.asarray(array, order="C") for array in arrays]
        outputs = views_of(self._pool, arrays)
        with self._exchange(label, channel) as ring:
            self._agree(ring, "sum", _wire_bytes(arrays, wire_dtype), label)
            ring_sum(
                [array.reshape(-1) for array in arrays],
                [output.reshape(-1) for output in outputs],
                self.rank,
                self.workers,
                *_ends(ring, wire_dtype),
            )
            # What was queued are the caller's arrays, which live until here only.
            ring.sender.flush()
        return outputs

    def reduce_scatter(
        self,
        arrays: Sequence[np.ndarray],
        ranges: Ranges,
        label: str,
        wire_dtype: str | None = None,
    ) -> list[np.ndarray]:
        """See `HostLink.reduce_scatter`."""
        arrays = [np.asarray(array, order="C") for array in arrays]
        # Whole arrays: what is outside of this worker's range passes through it.
        outputs = views_of(self._pool, arrays)
        with self._exchange(label, "step") as ring:
            self._agree(ring, "scatter", _wire_bytes(arrays, wire_dtype), label)
            ring_reduce_scatter(
                arrays,
                outputs,
                by_worker(ranges),
                self.rank,
                *_ends(ring, wire_dtype),
            )
            ring.sender.flush()
        return [
            output[slice(*of_array[self.rank])]
            for output, of_array in zip(outputs, ranges, strict=True)
        ]

    def all_gather(
        self,
        pieces: Sequence[np.ndarray],
        ranges: Ranges,
        label: str,
        channel: str = "step",
    ) -> list[np.ndarray]:
        """See `HostLink.all_gather`."""
        wholes = self._wholes_with_own(pieces, ranges)
        with self._exchange(label, channel) as ring:
            size_bytes = sum(whole.nbytes for whole in wholes)
            self._agree(ring, "shards", size_bytes, label)
            ring_all_gather(
                wholes,
                by_worker(ranges),
                self.rank,
                ring.sender.send,
                ring.receiver.fill,
            )
            ring.sender.flush()
        return wholes

    def _wholes_with_own(
        self, pieces: Sequence[np.ndarray], ranges: Ranges
    ) -> list[np.ndarray]:
        likes = [
            np.broadcast_to(np.zeros((), piece.dtype), (of_array[-1][1],))
            for piece, of_array in zip(pieces, ranges, strict=True)
        ]
        wholes = views_of(self._pool, likes)
        for whole, piece, of_array in zip(wholes, pieces, ranges, strict=True):
            whole[slice(*of_array[self.rank])] = piece
        return wholes

    def gather(self, blob: bytes, label: str, channel: str = "host") -> list[bytes]:
        """See `HostLink.gather`."""
        blobs = [b""] * self.workers
        blobs[self.rank] = blob
        with self._exchange(label, channel) as ring:
            self._agree(ring, "gather", 0, label)
            for step in range(self.workers - 1):
                mine = blobs[(self.rank - step) % self.workers]
                ring.sender.send(struct.pack("<Q", len(mine)) + mine)
                (size,) = struct.unpack("<Q", ring.receiver.take(8))
                source = (self.rank - step - 1) % self.workers
                blobs[source] = bytes(ring.receiver.take(size))
            ring.sender.flush()
        return blobs

    def share_note(self, key: str, note: str) -> dict[int, str]:
        """See `HostLink.share_note`."""
        missing = functools.partial(self._membership.without_note, key)
        with (
            self._waiting_for_word(key),
            self._waits.waiting(f"a comparison ({key})", missing),
        ):
            return self._membership.share_note(key, note, self.timeout_seconds)

    def leave_note(self, key: str, note: str) -> None:
        """See `HostLink.leave_note`."""
        self._membership.leave_note(key, note)

    def wait_for_notes(
        self, key: str, enough: Callable[[dict[int, str]], bool]
    ) -> dict[int, str]:
        """See `HostLink.wait_for_notes`."""
        with self._waiting_for_word(key):
            return self._membership.wait_for_notes(key, enough, self.timeout_seconds)

    @contextlib.contextmanager
    def _waiting_for_word(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            lost_another()
            raise WorkerLostError(
                f"Worker {self.rank} waited for a word of the others on {key!r}: "
                f"{error}. Look at their output for the first error."
            ) from error

    def sent_bytes(self, channel: str = "step") -> int:
        """What this worker has sent over its sockets so far, headers included.

        Args:
          channel: one of CHANNELS.
        """
        return self._channels[channel].sender.sent_bytes

    def on_note(self, key: str, listener: Callable[[dict[int, str]], None]) -> None:
        """See `HostLink.on_note`."""
        self._membership.on_note(key, listener)

    def give_up(self, reason: str) -> None:
        """See `HostLink.give_up`."""
        self._membership.give_up(reason)

    def on_failure(self, listener: Callable[[str], None]) -> None:
        """See `HostLink.on_failure`."""
        self._failure_listeners.append(listener)

    def news(self) -> str | None:
        """See `HostLink.news`."""
        return self._membership.wait_for_news(0.0)

    def _fail(self) -> None:
        self.close_channels()
        for listener in self._failure_listeners:
            listener(self._membership.failure or "a worker was lost")

    def close(self) -> None:
        """See `HostLink.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._membership.leave()
        self.close_channels()

    def close_channels(self) -> None:
        """Ends every ring; whoever waits in one gets an error."""
        for channel in self._channels.values():
            channel.sender.close()
            channel.receiver.close()

    @contextlib.contextmanager
    def _exchange(self, label: str, channel: str) -> Iterator[_Channel]:
        ring = self._channels[channel]
        with ring.lock:
            ring.count += 1
            self._membership.arrive(ring.count, channel)
            start = time.monotonic()
            late = functools.partial(self._membership.late, ring.count, channel)
            with self._waits.waiting(f"exchange {ring.count} ({label})", late):
                try:
                    yield ring
                except OSError as error:
                    raise self._lost(
                        label, ring.count, channel, start, error
                    ) from error

    def _agree(self, ring: _Channel, kind: str, size_bytes: int, label: str) -> None:
        mine = HEADER.pack(kind.encode(), ring.count, size_bytes)
        ring.sender.send(mine)
        theirs = bytes(ring.receiver.take(HEADER.size))
        if theirs == mine:
            return
        other_kind, other_count, other_bytes = HEADER.unpack(theirs)
        other = other_kind.rstrip(b"\0").decode(errors="replace")
        raise CollectiveError(
            f"Workers are out of step: worker {self.rank} is at exchange {ring.count}, "
            f"{kind} of {size_bytes} bytes ({label}); worker "
            f"{(self.rank - 1) % self.workers} at exchange {other_count}, {other} of "
            f"{other_bytes} bytes. Every worker must run the same steps on the same "
            "model: look for code that only some workers run."
        )

    def _lost(
        self, label: str, count: int, channel: str, start: float, error: OSError
    ) -> WorkerLostError:
        waited = time.monotonic() - start
        is_timeout = isinstance(error, (TimeoutError, BlockingIOError))
        reason = self._membership.wait_for_news(0.0 if is_timeout else NEWS_SECONDS)
        if reason is None and is_timeout:
            late = self._membership.late(count, channel)
            who = name_workers(late) if late else "a worker"
            reason = late_words(who, self.timeout_seconds)
        reason = reason or f"a connection broke ({error})"
        return WorkerLostError(
            say_lost(self.rank, waited, f"exchange {count} ({label})", reason)
        )


@contextlib.contextmanager
def _says_that_it_waits(
    rank: int, workers: int, coordinator: str
) -> Iterator[set[int]]:
    """While the workers meet: a set for those that have come, as worker 0 knows."""
    present = {rank}

    def say() -> None:
        missing = sorted(set(range(workers)) - present)
        # The others hear of nobody before all have come.
        known = missing if rank == 0 else []
        say_waiting(rank, NOTICE_SECONDS, f"the meeting at {coordinator}", known)

    timer = threading.Timer(NOTICE_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield present
    finally:
        timer.cancel()


def by_worker(ranges: Ranges) -> list[list[Block]]:
    """The same ranges, for each worker (array, first element, end)."""
    return [
        [(array, start, stop) for array, (start, stop) in enumerate(of_worker)]
        for of_worker in zip(*ranges, strict=True)
    ]


def _wire_bytes(arrays: Sequence[np.ndarray], wire_dtype: str | None) -> int:
    """The size of the arrays as they travel."""
    if wire_dtype is None:
        return sum(array.nbytes for array in arrays)
    return wire_type(wire_dtype).itemsize * sum(array.size for array in arrays)


def _ends(ring: _Channel, wire_dtype: str | None) -> tuple[Send, Receive, Send]:
    """What sends, receives and passes on the blocks of an exchange; see `ring_sum`."""
    send, receive = ring.sender.send, ring.receiver.fill
    if wire_dtype is None:
        return send, receive, send
    wire = RoundedWire(wire_type(wire_dtype), send, receive)
    return wire.send, wire.receive, wire.pass_on


class _Channel:
    """One ring: its two ends and how many exchanges it has had."""

    def __init__(self, sender: Sender, receiver: Receiver):
        self.sender = sender
        self.receiver = receiver
        self.lock = threading.Lock()
        self.count = 0
