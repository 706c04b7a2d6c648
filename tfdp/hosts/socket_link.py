"""`SocketLink`: what an engine needs of the network, over sockets.

Each channel has connections and an order of its own: exchange n of one worker meets
exchange n of all others. A header before each, which goes round the ring of a channel,
tells whether they are about the same thing.

An exchange that fails, for whatever reason, ends its channel: what is under way in it
would be taken for the next one. The worker tells the others why, and those that wait
for it fail as well, instead of waiting.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tfdp.errors import WorkerLostError
from tfdp.hosts.buffers import BufferPool, put_own, views_of, wholes_of
from tfdp.hosts.channel import Channel, see_off
from tfdp.hosts.checked_wire import DamagedBlockError, crc32c
from tfdp.hosts.collective_fingerprint import CollectiveMismatch, fingerprint_of
from tfdp.hosts.crash_report import lost_another
from tfdp.hosts.host_link import (
    CHANNELS,
    MOST_GATHERED_BYTES,
    NOTHING_TO_COMPARE,
    Compared,
    HostLink,
    Packed,
    Ranges,
)
from tfdp.hosts.link_speed import agreed_speed
from tfdp.hosts.membership import Membership
from tfdp.hosts.recursive_doubling import SmallSum, gather_blobs, swap_rows
from tfdp.hosts.rendezvous import meet
from tfdp.hosts.ring import by_worker, ring_all_gather, ring_reduce_scatter, ring_sum
from tfdp.hosts.step_loops import StepLoops
from tfdp.hosts.waits import (
    Waits,
    closed,
    damaged,
    out_of_step,
    reports_wait_for_barrier,
    say_lost,
    why_it_broke,
)
from tfdp.plan.sum_ways import LinkSpeed, SumWays

# What workers tell each other beside exchanges: notes, by way of worker 0.


class LinkWithNotes(HostLink):
    """The notes of a `HostLink`, over its membership."""

    _membership: Membership
    _waits: Waits
    _is_closed: bool

    def share_note(
        self, key: str, note: str, has_deadline: bool = True
    ) -> dict[int, str]:
        """See `HostLink.share_note`."""
        missing = functools.partial(self.without_note, key)
        seconds = self.timeout_seconds if has_deadline else None
        with (
            self._waiting_for_word(key),
            self._waits.waiting(f"a comparison ({key})", missing),
        ):
            return self._membership.share_note(key, note, seconds)

    def without_note(self, key: str) -> list[int]:
        """See `HostLink.without_note`."""
        return self._membership.without_note(key)

    def leave_note(self, key: str, note: str) -> None:
        """See `HostLink.leave_note`."""
        self._membership.leave_note(key, note)

    def wait_for_notes(
        self, key: str, enough: Callable[[dict[int, str]], bool]
    ) -> dict[int, str]:
        """See `HostLink.wait_for_notes`."""
        with self._waiting_for_word(key):
            return self._membership.wait_for_notes(key, enough, self.timeout_seconds)

    def on_note(self, key: str, listener: Callable[[dict[int, str]], None]) -> None:
        """See `HostLink.on_note`."""
        self._membership.on_note(key, listener)

    def give_up(self, reason: str) -> None:
        """See `HostLink.give_up`."""
        self._membership.give_up(reason)

    @contextlib.contextmanager
    def _waiting_for_word(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._is_closed:
                raise closed(self.rank, f"it waited for a word on {key!r}") from error
            lost_another()
            raise WorkerLostError(
                f"Worker {self.rank} waited for a word of the others on {key!r}: "
                f"{error}. Look at their output for the first error."
            ) from error


class SocketLink(LinkWithNotes):
    """A `HostLink` over TCP.

    Args:
      rank, workers, timeout_seconds: see `HostLink`.
      coordinator: "host:port" where worker 0 listens.
      silence_seconds: how long a worker may send no heartbeat.
      secret: what all workers of the job know; see `job_secret`.
      checksum: whether blocks that cross a network have checksums, alike on all.
    """

    name = "sockets"
    step_channels: tuple[str, ...] = ("step", "ahead")

    def __init__(
        self,
        rank: int,
        workers: int,
        coordinator: str,
        timeout_seconds: float,
        silence_seconds: float = 15.0,
        secret: bytes = b"",
        checksum: bool = False,
    ):
        super().__init__(rank, workers, timeout_seconds)
        if checksum:
            crc32c()  # refuses before the others are met
        with reports_wait_for_barrier(rank, workers, coordinator) as present:
            meeting = meet(
                rank,
                workers,
                coordinator,
                len(CHANNELS),
                timeout_seconds,
                secret,
                present,
                checksum,
            )
        # Its own each: a step that waits must not hold up what the host itself asks.
        ends = zip(CHANNELS, meeting.neighbours, meeting.shared, strict=True)
        self._channels = {
            name: Channel.over(pairs, timeout_seconds, shared, checksum)
            for name, pairs, shared in ends
        }
        self.hosts = meeting.hosts
        self._failure_listeners: list[Callable[[str], None]] = []
        self._is_closed = False
        # `close` runs twice at the end of a script: by the program, and at exit.
        self._closing = threading.Lock()
        self._waits = Waits(rank)
        self._pool = BufferPool()
        self._membership = Membership(
            rank,
            workers,
            meeting.control,
            silence_seconds,
            self._fail,
            self.look_around,
        )
        self._loops = StepLoops(self._membership, self.share_note)
        try:
            self._ways = SumWays(workers, self._measured_speed())
        except BaseException:
            self.close()
            raise

    def _measured_speed(self) -> LinkSpeed:
        """Of the link, by all workers together; the same on all of them."""
        host = self._channels["host"]
        host.count = -1  # users count exchanges from 1
        with self._exchange("gather", (), "speed of the link", "host", limit=0):
            speed = agreed_speed(host.neighbours, self.rank, self.workers)
            host.flush()
        self._sent_before_exchanges = host.sent_bytes
        return speed

    def sum(
        self,
        arrays: Sequence[np.ndarray],
        label: str,
        channel: str = "step",
        wire_dtype: str | None = None,
        packed: Packed = (),
    ) -> list[np.ndarray]:
        """See `HostLink.sum`."""
        # The ring cuts flat memory; a transposed array has none.
        arrays = [np.asarray(array, order="C") for array in arrays]
        # From a pool: TensorFlow lets go of results late, and fresh pages cost as much
        # as the sum.
        outputs = views_of(self._pool, arrays)
        flat_inputs = [array.reshape(-1) for array in arrays]
        flat_outputs = [output.reshape(-1) for output in outputs]
        places = (self.rank, self.workers)
        # A ring rounds the sums that it passes on, as no other way would.
        size_bytes = sum(array.nbytes for array in arrays)
        way = "ring" if wire_dtype else self._ways.choose(size_bytes)
        small = None if way == "ring" else SmallSum(way, flat_inputs, *places)
        terms = ("sum", arrays, label, channel, wire_dtype, packed)
        first = None if small is None else small.first
        with self._exchange(*terms, first=first) as ring:
            if small is not None:
                small.run(flat_outputs, ring.neighbours)
            else:
                ring_sum(flat_inputs, flat_outputs, *places, ring.ends(wire_dtype))
            # What was queued are the caller's arrays, which live until here only.
            ring.flush()
        return outputs

    def way_of_sum(self, size_bytes: int) -> str:
        """Which way a sum of so many bytes takes; see `tfdp.plan.sum_ways`."""
        return self._ways.choose(size_bytes)

    def take_way(self, way: str | None) -> None:
        """Lets every sum take this way, or the one that is chosen; alike on all."""
        self._ways.always = way

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
        terms = ("scatter", arrays, label, "step", wire_dtype, ranges)
        with self._exchange(*terms) as ring:
            ring_reduce_scatter(
                arrays, outputs, by_worker(ranges), self.rank, ring.ends(wire_dtype)
            )
            ring.sender.flush()
        # Views: what is beside them holds partial sums, and nobody reads it.
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
        pieces = [np.asarray(piece, order="C") for piece in pieces]
        wholes = wholes_of(self._pool, pieces, ranges)
        # What is one piece is on its way before the others are known here.
        first = pieces[0] if len(pieces) == 1 else None
        terms = ("shards", wholes, label, channel, None, ranges)
        with self._exchange(*terms, first=first) as ring:
            put_own(wholes, pieces, ranges, self.rank)
            ends, begun = ring.ends(None), first is not None
            ring_all_gather(wholes, by_worker(ranges), self.rank, ends, begun)
            ring.sender.flush()
        return wholes

    def all_to_all(self, rows: np.ndarray, label: str) -> np.ndarray:
        """See `HostLink.all_to_all`."""
        rows = np.asarray(rows, order="C")
        (output,) = views_of(self._pool, [rows])
        places = np.arange(self.workers)
        with self._exchange("all to all", [rows], label, "step") as ring:
            by_distance = rows[(self.rank + places) % self.workers]
            came = swap_rows(by_distance, ring.neighbours)
            output[...] = came[(self.rank - places) % self.workers]
            ring.flush()
        return output

    def gather(
        self,
        blob: bytes,
        label: str,
        channel: str = "host",
        most_bytes: int = MOST_GATHERED_BYTES,
    ) -> list[bytes]:
        """See `HostLink.gather`."""
        return list(map(bytes, self._gather(blob, label, channel, most_bytes)))

    def gather_memory(self, memory: np.ndarray, label: str) -> list[memoryview]:
        """See `HostLink.gather_memory`."""
        limit, room = MOST_GATHERED_BYTES, self._pool.take
        return self._gather(memory, label, "step", limit, room)

    def _gather(
        self,
        blob: bytes | np.ndarray,
        label: str,
        channel: str,
        most_bytes: int,
        *room: Callable[[int], np.ndarray],
    ) -> list[memoryview]:
        with self._exchange("gather", (), label, channel, limit=most_bytes) as ring:
            own = blob, self.rank, self.workers, most_bytes
            blobs = gather_blobs(*own, ring.neighbours, *room)
            ring.flush()
        return blobs

    def start(self, call: str, *, only_within_a_loop: bool = False) -> None:
        """See `HostLink.start`."""
        self._loops.start(call, only_within_a_loop=only_within_a_loop)

    def loop_of_steps(
        self,
        made: Callable[[], str],
        planned: Callable[[], str],
        name: str,
        compared: Compared = NOTHING_TO_COMPARE,
    ) -> contextlib.AbstractContextManager[None]:
        """See `HostLink.loop_of_steps`."""
        return self._loops.loop(made, planned, name, compared)

    def sent_bytes(self, channel: str | None = None) -> int:
        """See `HostLink.sent_bytes`."""
        channels = CHANNELS if channel is None else (channel,)
        sent = sum(self._channels[name].sent_bytes for name in channels)
        return sent - (self._sent_before_exchanges if "host" in channels else 0)

    def exchange_seconds(self, channel: str) -> float:
        """See `HostLink.exchange_seconds`."""
        return self._channels[channel].seconds

    def on_failure(self, listener: Callable[[str], None]) -> None:
        """See `HostLink.on_failure`."""
        self._failure_listeners.append(listener)

    def news(self) -> str | None:
        """See `HostLink.news`."""
        return self._membership.wait_for_news(0.0)

    def look_around(self, missed_seconds: float) -> None:
        """Several times in a second, from another thread, while nobody is lost."""
        self._waits.look()
        # This thread begins before there are loops.
        loops = vars(self).get("_loops")
        if loops is not None and (reason := loops.in_vain()) is not None:
            self._membership.give_up(reason)

    def _note_failure(self) -> None:
        """Once an exchange has failed, or a worker is lost, here or elsewhere."""

    def _fail(self) -> None:
        self._note_failure()
        self.close_channels()
        for listener in self._failure_listeners:
            listener(self._membership.failure or "a worker was lost")

    def close(self) -> None:
        """See `HostLink.close`."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        self._finish_exchange()
        # The goodbye goes before the rings: a ring that breaks without one is a crash.
        self._membership.leave()
        if self._membership.failure is None:
            see_off(self._channels.values())
        self.close_channels()

    def _finish_exchange(self) -> None:
        """Waits for what cannot be broken off; nothing, over sockets."""

    def close_channels(self) -> None:
        """Ends every channel; whoever waits in one gets an error."""
        for channel in self._channels.values():
            channel.close()

    @contextlib.contextmanager
    def _exchange(
        self,
        kind: str,
        arrays: Sequence[np.ndarray],
        label: str,
        channel: str,
        wire_dtype: str | None = None,
        parts: Packed | Ranges = (),
        limit: int | None = None,
        first: np.ndarray | None = None,
    ) -> Iterator[Channel]:
        """An exchange that all workers have come to; `first`: see `Channel.agree`."""
        ring = self._channels[channel]
        # Threads of one worker take turns; which comes first must be alike on all.
        with ring.lock:
            if self._is_closed:
                raise closed(self.rank, f"an exchange ({label}) was begun")
            # Half an exchange may still be under way: the next would read its rest.
            if ring.failure is not None:
                raise type(ring.failure)(
                    f"After an exchange that failed there is no other ({label}). It "
                    f"said: {ring.failure}"
                )
            # Counted before anything is sent: heartbeats tell how far this worker is,
            # and others accuse those who are behind.
            ring.count += 1
            ring.begin(
                fingerprint_of(
                    kind, ring.count, arrays, label, wire_dtype, parts, limit
                )
            )
            self._membership.arrive(ring.count, channel)
            late = functools.partial(self._membership.late, ring.count, channel)
            try:
                with self._waits.waiting(f"exchange {ring.count} ({label})", late):
                    ring.agree(first)
                    yield ring
            # Ctrl-C and SystemExit, too: the others must not wait for who is gone.
            except BaseException as error:
                failure = self._end_ring(ring, channel, error)
                if failure is error:
                    raise
                raise failure from error
            ring.end()

    def _end_ring(
        self, ring: Channel, channel: str, error: BaseException
    ) -> BaseException:
        """Ends a ring whose exchange failed; returns what that is to be raised as."""
        # First of all: who waits on the other end wakes up now, and not when the
        # reason has been found.
        ring.close()
        self._note_failure()
        if self._is_closed:
            failure: BaseException = closed(self.rank, f"{ring.words} was under way")
            ring.fail_with(failure)
            return failure
        # The worker after may ask what this one was at.
        note_key = f"last exchange of {channel}"
        self._membership.leave_note(note_key, ring.terms.note)
        failure, reason = error, f"{type(error).__name__} {error}".rstrip()
        if isinstance(error, CollectiveMismatch):
            failure = out_of_step(self._membership, self.workers, error, note_key)
            reason = str(failure).rstrip(".")
        if isinstance(error, DamagedBlockError):
            failure = damaged(self.rank, self.workers, ring, error)
            reason = str(failure).rstrip(".")
        # Another error is this worker's own, raised in the middle of an exchange.
        if isinstance(error, OSError):
            reason = why_it_broke(
                self._membership, ring, channel, error, self.timeout_seconds
            )
            waited = time.monotonic() - ring.start
            failure = WorkerLostError(say_lost(self.rank, waited, ring.words, reason))
        else:
            reason = f"worker {self.rank} gave up {ring.words}: {reason}"
        ring.fail_with(failure)
        self._membership.give_up(reason)
        return failure
