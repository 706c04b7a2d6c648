"""`HostLink`: the transport that a strategy's backend needs between hosts."""

from __future__ import annotations

import abc
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from tfdp.hosts.messages import read_as

# For training steps; for host-side calls; for sums in flight across steps; and a second
# one for steps that run two exchanges at a time.
CHANNELS = ("step", "host", "late", "ahead")

# The limit of TensorFlow's serialized tensors.
MOST_GATHERED_BYTES = 2**31 - 1

Arrays: TypeAlias = Sequence[np.ndarray]
# By array and worker: first element, end.
Ranges: TypeAlias = Sequence[Sequence[tuple[int, int]]]
# By array: the shapes of the tensors packed into it; () for a single tensor.
Packed: TypeAlias = Sequence[Sequence[Sequence[int]]]


class Compared:
    """State that all workers must share at the start and end of a loop: here none."""

    #: Whether all must make the same number of steps.
    counts_steps: bool = True

    def digest(self, *, is_end: bool) -> str:
        """A checksum of it; "" for nothing."""
        return ""

    def explain(self, *, is_end: bool) -> None:
        """Raises a TfdpError; runs on all workers when digests differ."""


NOTHING_TO_COMPARE = Compared()


class Exchange(NamedTuple):
    """A finished exchange."""

    number: int  # in the order of their ends
    label: str
    start: float  # by `time.monotonic`
    end: float


class TransferSeconds(NamedTuple):
    """How long data was under way in the exchanges of steps, in total so far."""

    #: That sends were blocked: by the link, or by a peer that did not read.
    sending: float
    #: From the first bytes of a block to its last, by distance to the sender: from the
    #: worker 1, 2, 4 ... ranks before this one.
    receiving: Sequence[float]


class HostLink(abc.ABC):
    """Exchanges between workers. All workers make the same calls in the same order.

    An exchange raises WorkerLostError, which names the worker, if one has ended, is
    silent or comes later than `timeout_seconds`; CollectiveError if the workers are at
    different exchanges. `label` names it in errors, `channel` is one of CHANNELS.
    """

    name: str = ""  # as in `Communication(engine=...)` and `tfdp info`
    step_channels: tuple[str, ...] = ("step",)  # channels that steps may use at a time
    hosts: list[str]  # by rank: name or address at which this worker reaches the host
    #: The last exchanges of steps; None: a link that does not record them.
    exchanges_of_steps: deque[Exchange] | None = None

    def __init__(self, rank: int, workers: int, timeout_seconds: float):
        self.rank, self.workers = rank, workers
        self.timeout_seconds = timeout_seconds

    @abc.abstractmethod
    def sum(
        self,
        arrays: Arrays,
        label: str,
        channel: str = "step",
        wire_dtype: str | None = None,
        packed: Packed = (),
    ) -> list[np.ndarray]:
        """The sum of each array over all workers; the arrays are not changed.

        Args:
          arrays: of one number type, the same shapes on all workers.
          wire_dtype: a smaller float type for the network; additions use the own type,
            and all workers get the same bits.
          packed: see `Packed`; compared between workers.

        Cost: 2 n (H - 1) / H bytes sent per worker for n bytes on H workers, in
        2 (H - 1) rounds. Sockets sum small arrays in at most 2 ceil(log2 H) rounds
        with more bytes; see `tfdp.plan.sum_ways`.
        """

    @abc.abstractmethod
    def reduce_scatter(
        self, arrays: Arrays, ranges: Ranges, label: str, wire_dtype: str | None = None
    ) -> list[np.ndarray]:
        """This worker's range of the sum of each flat array, all of one number type.

        Cost: n (H - 1) / H bytes sent per worker for n bytes in equal ranges.
        """

    @abc.abstractmethod
    def all_gather(
        self, pieces: Arrays, ranges: Ranges, label: str, channel: str = "step"
    ) -> list[np.ndarray]:
        """The whole arrays, from each worker's flat range of them, all of one type.

        Cost: n (H - 1) / H bytes sent per worker for n bytes in equal ranges.
        """

    @abc.abstractmethod
    def all_to_all(self, rows: np.ndarray, label: str) -> np.ndarray:
        """Sends row i of [workers, ...] to worker i; returns the rows received.

        Cost: n (H - 1) / H bytes sent per worker for n bytes over MPI. Over sockets
        n s / H in ceil(log2 H) rounds, s the number of one-bits in 1 to H - 1 (n / 2 on
        2 workers, n on 4, 3 n / 2 on 8): other workers forward rows.
        """

    @abc.abstractmethod
    def gather(
        self,
        blob: bytes,
        label: str,
        channel: str = "host",
        most_bytes: int = MOST_GATHERED_BYTES,
    ) -> list[bytes]:
        """All workers' bytes, by rank; their lengths may differ.

        Raises CollectiveError on all workers if one exceeds `most_bytes`, which must be
        the same on all. Memory is allocated as bytes arrive, whatever is announced.

        Cost: H - 1 times a worker's bytes sent per worker, in ceil(log2 H) rounds.
        """

    def gather_texts(self, text: str, label: str) -> list[str]:
        """All workers' texts, by rank."""
        blobs = self.gather(text.encode(), label)
        return [
            read_as(lambda data: bytes(data).decode(), blob, rank, "text")
            for rank, blob in enumerate(blobs)
        ]

    @abc.abstractmethod
    def gather_memory(self, memory: np.ndarray, label: str) -> list[memoryview]:
        """Gathers uint8 arrays in a step; reuses memory that nothing refers to."""

    @abc.abstractmethod
    def sent_bytes(self, channel: str | None = None) -> int:
        """Bytes sent in exchanges of a channel (None: all), with headers, no notes."""

    @abc.abstractmethod
    def exchange_seconds(self, channel: str) -> float:
        """Total duration of a channel's finished exchanges, waiting included."""

    def transfer_seconds(self) -> TransferSeconds:
        """Zeros where it is unknown, as in shared memory, which is no link."""
        return TransferSeconds(0.0, ())

    @abc.abstractmethod
    def share_note(
        self, key: str, note: str, has_deadline: bool = True
    ) -> dict[int, str]:
        """All workers' notes under `key`, by rank; in any order, from any thread.

        `key` must be the same on all workers, and used once. Without a deadline it
        waits as long as all workers are alive. Raises WorkerLostError.
        """

    @abc.abstractmethod
    def without_note(self, key: str) -> list[int]:
        """The ranks of workers whose note under `key` has not arrived."""

    @abc.abstractmethod
    def leave_note(self, key: str, note: str) -> None:
        """Publishes `note`, replacing an earlier one of this worker; does not wait."""

    @abc.abstractmethod
    def wait_for_notes(
        self, key: str, enough: Callable[[dict[int, str]], bool]
    ) -> dict[int, str]:
        """The notes under `key` by rank, once they are `enough`; or WorkerLostError."""

    @abc.abstractmethod
    def start(self, call: str, *, only_within_a_loop: bool = False) -> None:
        """Barrier at the start of `call`, such as "evaluate (dataset 1)".

        With `only_within_a_loop` it does nothing outside. Errors as `loop_of_steps`.
        """

    @abc.abstractmethod
    def loop_of_steps(
        self,
        made: Callable[[], str],
        planned: Callable[[], str],
        name: str,
        compared: Compared = NOTHING_TO_COMPARE,
    ) -> contextlib.AbstractContextManager[None]:
        """A loop with the same number of steps on all workers; barriers at both ends.

        `made` and `planned` return how many steps this worker has made, or will make if
        known: "3", "2 times 4". `name` is the same on all workers: "epoch 2 of fit".

        Raises CollectiveError or WorkerLostError on all workers at once, when one has
        started or ended another loop, has finished its script, or has ended its loop
        after a different number of exchanges or steps.
        """

    @abc.abstractmethod
    def announce(self, exchanges: int, channel: str) -> None:
        """Notes that the program begins so many exchanges of `channel`, which another
        thread runs: `loop_of_steps` then finds a worker that begins fewer."""

    @abc.abstractmethod
    def on_note(self, key: str, listener: Callable[[dict[int, str]], None]) -> None:
        """Calls `listener` with the notes now and at each new one, until all are there.

        From a thread that must not wait.
        """

    @abc.abstractmethod
    def give_up(self, reason: str) -> None:
        """Fails all workers' exchanges and waits, with this reason."""

    @abc.abstractmethod
    def on_failure(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` once, from a thread that must not wait, with the reason."""

    @abc.abstractmethod
    def news(self) -> str | None:
        """Why exchanges cannot continue (a worker was lost or has left), or None."""

    @abc.abstractmethod
    def close(self) -> None:
        """Announces the departure and closes every connection."""
