"""`SocketLink`: a `HostLink` over TCP.

Each channel has its own connections and order: exchange n of one worker belongs to
exchange n of all others. A fingerprint, sent around the channel's ring before each
exchange, verifies that.

A failed exchange ends its channel: data in flight would be mistaken for the next
exchange. The worker reports why, and workers that wait for it fail instead of hanging.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from tfdp.cluster.crash_report import note_lost_worker
from tfdp.errors import WorkerLostError
from tfdp.hosts.buffers import BufferPool, put_own, views_of, wholes_of
from tfdp.hosts.channel import Channel, drain
from tfdp.hosts.checked_wire import DamagedBlockError, crc32c
from tfdp.hosts.collective_fingerprint import CollectiveMismatch, fingerprint_of
from tfdp.hosts.host_link import (
    CHANNELS,
    MOST_GATHERED_BYTES,
    NOTHING_TO_COMPARE,
    Arrays,
    Compared,
    Exchange,
    HostLink,
    Packed,
    Ranges,
    TransferSeconds,
)
from tfdp.hosts.link_speed import agreed_speed
from tfdp.hosts.membership import Membership
from tfdp.hosts.recursive_doubling import SmallSum, gather_blobs, swap_rows
from tfdp.hosts.rendezvous import connect_workers
from tfdp.hosts.ring import by_worker, ring_all_gather, ring_reduce_scatter, ring_sum
from tfdp.hosts.step_loops import StepLoops
from tfdp.hosts.waits import (
    Waits,
    closed,
    damaged,
    log_lost,
    out_of_step,
    reports_wait_for_barrier,
    why_it_broke,
)
from tfdp.plan.sum_ways import LinkSpeed, SumWays

# More than the exchanges of a step.
MOST_EXCHANGES = 1024


class SocketLink(HostLink):
    """A `HostLink` over TCP; worker 0 listens at `coordinator`.

    `silence_seconds` is how long a worker may send no heartbeat; for `secret` see
    `job_secret`; `checksum`, the same on all, adds checksums to data on the network.
    """

    name = "sockets"
    step_channels: tuple[str, ...] = ("step", "ahead")
    exchanges_of_steps: deque[Exchange]

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
            crc32c()  # fails before other workers are involved
        place = (rank, workers, coordinator)
        with reports_wait_for_barrier(*place) as present:
            connections = connect_workers(
                *place, len(CHANNELS), timeout_seconds, secret, present, checksum
            )
        # Separate connections: a step that waits must not delay host-side exchanges.
        ends = zip(CHANNELS, connections.neighbours, connections.shared, strict=True)
        self._channels = {
            name: Channel.over(pairs, timeout_seconds, shared, checksum)
            for name, pairs, shared in ends
        }
        self.hosts = connections.hosts
        self._failure_listeners: list[Callable[[str], None]] = []
        self._is_closed = False
        # `close` runs twice: by the program, and at exit.
        self._closing = threading.Lock()
        self._numbers = itertools.count(1)
        self.exchanges_of_steps = deque(maxlen=MOST_EXCHANGES)
        self._waits = Waits(rank)
        self._pool = BufferPool()
        of_membership = (rank, workers, connections.control, silence_seconds)
        self._membership = Membership(*of_membership, self._fail, self.look_around)
        self._loops = StepLoops(self._membership, self.share_note)
        try:
            self._ways = SumWays(workers, self._measured_speed())
        except BaseException:
            self.close()
            raise

    def _measured_speed(self) -> LinkSpeed:
        host = self._channels["host"]
        host.count = -1  # users count exchanges from 1
        with self._exchange("gather", (), "speed of the link", "host", limit=0):
            speed = agreed_speed(host.neighbours, self.rank, self.workers)
            host.flush()
        self._sent_before_exchanges = host.sent_bytes
        return speed

    def share_note(
        self, key: str, note: str, has_deadline: bool = True
    ) -> dict[int, str]:
        missing = functools.partial(self.without_note, key)
        seconds = self.timeout_seconds if has_deadline else None
        with (
            self._waiting_for_note(key),
            self._waits.waiting(f"a comparison ({key})", missing),
        ):
            return self._membership.share_note(key, note, seconds)

    def without_note(self, key: str) -> list[int]:
        return self._membership.without_note(key)

    def leave_note(self, key: str, note: str) -> None:
        self._membership.leave_note(key, note)

    def wait_for_notes(
        self, key: str, enough: Callable[[dict[int, str]], bool]
    ) -> dict[int, str]:
        with self._waiting_for_note(key):
            return self._membership.wait_for_notes(key, enough, self.timeout_seconds)

    def on_note(self, key: str, listener: Callable[[dict[int, str]], None]) -> None:
        self._membership.on_note(key, listener)

    def give_up(self, reason: str) -> None:
        self._membership.give_up(reason)

    @contextlib.contextmanager
    def _waiting_for_note(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._is_closed:
                raise closed(self.rank, f"it waited for a note on {key!r}") from error
            note_lost_worker()
            raise WorkerLostError(
                f"Worker {self.rank} waited for the others' notes on {key!r}: {error}. "
                "Look at their output for the first error."
            ) from error

    def sum(
        self,
        arrays: Arrays,
        label: str,
        channel: str = "step",
        wire_dtype: str | None = None,
        packed: Packed = (),
    ) -> list[np.ndarray]:
        # The ring cuts flat memory; a transposed array is not flat.
        arrays = [np.asarray(array, order="C") for array in arrays]
        # From a pool: TensorFlow keeps results for long, and fresh pages cost as much
        # as the sum.
        outputs = views_of(self._pool, arrays)
        flat_inputs = [array.reshape(-1) for array in arrays]
        flat_outputs = [output.reshape(-1) for output in outputs]
        places = (self.rank, self.workers)
        # Rounding applies to a ring's partial sums; other ways would round differently.
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
            # The queue holds the caller's arrays, which are valid until here only.
            ring.flush()
        return outputs

    def way_of_sum(self, size_bytes: int) -> str:
        """How a sum of so many bytes is made; see `tfdp.plan.sum_ways`."""
        return self._ways.choose(size_bytes)

    def take_way(self, way: str | None) -> None:
        """Fixes the way of all sums, or None to choose; the same on all workers."""
        self._ways.always = way

    def reduce_scatter(
        self, arrays: Arrays, ranges: Ranges, label: str, wire_dtype: str | None = None
    ) -> list[np.ndarray]:
        arrays = [np.asarray(array, order="C") for array in arrays]
        # Whole arrays: partial sums of other ranges pass through.
        outputs = views_of(self._pool, arrays)
        terms = ("scatter", arrays, label, "step", wire_dtype, ranges)
        with self._exchange(*terms) as ring:
            ring_reduce_scatter(
                arrays, outputs, by_worker(ranges), self.rank, ring.ends(wire_dtype)
            )
            ring.sender.flush()
        # Views: the rest holds partial sums.
        return [
            output[slice(*of_array[self.rank])]
            for output, of_array in zip(outputs, ranges, strict=True)
        ]

    def all_gather(
        self, pieces: Arrays, ranges: Ranges, label: str, channel: str = "step"
    ) -> list[np.ndarray]:
        pieces = [np.asarray(piece, order="C") for piece in pieces]
        wholes = wholes_of(self._pool, pieces, ranges)
        # A single piece is sent along with the fingerprint.
        first = pieces[0] if len(pieces) == 1 else None
        terms = ("shards", wholes, label, channel, None, ranges)
        with self._exchange(*terms, first=first) as ring:
            put_own(wholes, pieces, ranges, self.rank)
            ends, begun = ring.ends(None), first is not None
            ring_all_gather(wholes, by_worker(ranges), self.rank, ends, begun)
            ring.sender.flush()
        return wholes

    def all_to_all(self, rows: np.ndarray, label: str) -> np.ndarray:
        rows = np.asarray(rows, order="C")
        (output,) = views_of(self._pool, [rows])
        places = np.arange(self.workers)
        with self._exchange("all to all", [rows], label, "step") as ring:
            by_distance = rows[(self.rank + places) % self.workers]
            received = swap_rows(by_distance, ring.neighbours)
            output[...] = received[(self.rank - places) % self.workers]
            ring.flush()
        return output

    def gather(
        self,
        blob: bytes,
        label: str,
        channel: str = "host",
        most_bytes: int = MOST_GATHERED_BYTES,
    ) -> list[bytes]:
        return list(map(bytes, self._gather(blob, label, channel, most_bytes)))

    def gather_memory(self, memory: np.ndarray, label: str) -> list[memoryview]:
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
        own = blob, self.rank, self.workers, most_bytes
        with self._exchange("gather", (), label, channel, limit=most_bytes) as ring:
            blobs = gather_blobs(*own, ring.neighbours, *room)
            ring.flush()
        return blobs

    def start(self, call: str, *, only_within_a_loop: bool = False) -> None:
        self._loops.start(call, only_within_a_loop=only_within_a_loop)

    def loop_of_steps(
        self,
        made: Callable[[], str],
        planned: Callable[[], str],
        name: str,
        compared: Compared = NOTHING_TO_COMPARE,
    ) -> contextlib.AbstractContextManager[None]:
        return self._loops.loop(made, planned, name, compared)

    def announce(self, exchanges: int, channel: str) -> None:
        self._loops.announce(exchanges, channel)

    def sent_bytes(self, channel: str | None = None) -> int:
        channels = CHANNELS if channel is None else (channel,)
        sent = sum(self._channels[name].sent_bytes for name in channels)
        return sent - (self._sent_before_exchanges if "host" in channels else 0)

    def exchange_seconds(self, channel: str) -> float:
        return self._channels[channel].seconds

    def transfer_seconds(self) -> TransferSeconds:
        channels = [self._channels[name] for name in self.step_channels]
        ends = list(zip(*(channel.neighbours for channel in channels), strict=True))
        return TransferSeconds(
            sum(one.sender.blocked_seconds for pair in ends for one in pair),
            [sum(one.receiver.arriving_seconds for one in pair) for pair in ends],
        )

    def on_failure(self, listener: Callable[[str], None]) -> None:
        self._failure_listeners.append(listener)

    def news(self) -> str | None:
        return self._membership.wait_for_news(0.0)

    def look_around(self, missed_seconds: float) -> None:
        """Looks for waits in vain; the membership thread calls it again and again."""
        self._waits.look()
        # That thread starts before `_loops` is set.
        loops = vars(self).get("_loops")
        if loops is not None and (reason := loops.in_vain()) is not None:
            self._membership.give_up(reason)

    def _note_failure(self) -> None:
        """Handles a failed exchange or a lost worker; here nothing."""

    def _fail(self) -> None:
        self._note_failure()
        self.close_channels()
        for listener in self._failure_listeners:
            listener(self._membership.failure or "a worker was lost")

    def close(self) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        self._finish_exchange()
        # Goodbye first: a ring that breaks without one looks like a crash.
        self._membership.leave()
        if self._membership.failure is None:
            drain(self._channels.values())
        self.close_channels()

    def _finish_exchange(self) -> None:
        """Waits for an exchange that cannot be interrupted; none over sockets."""

    def close_channels(self) -> None:
        for channel in self._channels.values():
            channel.close()

    @contextlib.contextmanager
    def _exchange(
        self,
        kind: str,
        arrays: Arrays,
        label: str,
        channel: str,
        wire_dtype: str | None = None,
        parts: Packed | Ranges = (),
        limit: int | None = None,
        first: np.ndarray | None = None,
    ) -> Iterator[Channel]:
        """One exchange, once fingerprints match; `first`: see `Channel.agree`."""
        ring = self._channels[channel]
        # Threads of one worker take turns, in the same order on all workers.
        with ring.lock:
            if self._is_closed:
                raise closed(self.rank, f"an exchange ({label}) was begun")
            # Data of a failed exchange may be in flight: the next one would read it.
            if ring.failure is not None:
                raise type(ring.failure)(
                    f"After an exchange that failed there is no other ({label}). It "
                    f"said: {ring.failure}"
                )
            # Counted before anything is sent: heartbeats report this number, and
            # workers that are behind are blamed.
            ring.count += 1
            ring.start = time.monotonic()
            ring.terms = fingerprint_of(
                kind, ring.count, arrays, label, wire_dtype, parts, limit
            )
            self._membership.arrive(ring.count, channel)
            late = functools.partial(self._membership.late, ring.count, channel)
            try:
                with self._waits.waiting(f"exchange {ring.count} ({label})", late):
                    ring.agree(first)
                    yield ring
            # Also Ctrl-C and SystemExit: the others must not wait for this worker.
            except BaseException as error:
                failure = self._end_ring(ring, channel, error)
                if failure is error:
                    raise
                raise failure from error
            end = time.monotonic()
            ring.seconds += end - ring.start
            if channel in self.step_channels:
                number = next(self._numbers)
                self.exchanges_of_steps.append(Exchange(number, label, ring.start, end))

    def _end_ring(
        self, ring: Channel, channel: str, error: BaseException
    ) -> BaseException:
        """Closes a failed channel; returns the exception to raise."""
        # First wake peers that wait on these connections, then look for the reason.
        ring.close()
        self._note_failure()
        if self._is_closed:
            failure: BaseException = closed(
                self.rank, f"{ring.description} was under way"
            )
            ring.fail_with(failure)
            return failure
        # The worker after this one may need it for its error message.
        note_key = f"last exchange of {channel}"
        self._membership.leave_note(note_key, ring.terms.note)
        failure, reason = error, f"{type(error).__name__} {error}".rstrip()
        if isinstance(error, CollectiveMismatch):
            failure = out_of_step(self._membership, self.workers, error, note_key)
        elif isinstance(error, DamagedBlockError):
            failure = damaged(self.rank, self.workers, ring, error)
        if failure is not error:
            reason = str(failure).rstrip(".")
        # Any other error is this worker's own, raised during the exchange.
        if isinstance(error, OSError):
            reason = why_it_broke(
                self._membership, ring, channel, error, self.timeout_seconds
            )
            waited = time.monotonic() - ring.start
            failure = WorkerLostError(
                log_lost(self.rank, waited, ring.description, reason)
            )
        else:
            reason = f"worker {self.rank} gave up {ring.description}: {reason}"
        ring.fail_with(failure)
        self._membership.give_up(reason)
        return failure
