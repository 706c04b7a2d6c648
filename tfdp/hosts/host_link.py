"""`HostLink`: what an engine needs of the network."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

# Exchanges inside training steps, those that Python asks for, those that travel while
# steps go on, and every other one of those that steps make two at a time.
CHANNELS = ("step", "host", "late", "ahead")

# What TensorFlow's serialized tensors end at: more cannot be meant.
MOST_GATHERED_BYTES = 2**31 - 1

# For each array, by worker: first element, end.
Ranges: TypeAlias = Sequence[Sequence[tuple[int, int]]]
# By array, the shapes of the tensors that were packed into it; () where it is one.
Packed: TypeAlias = Sequence[Sequence[Sequence[int]]]


class Compared:
    """What all workers must have in common where they start and end a loop: nothing."""

    def digest(self, *, is_end: bool) -> str:
        """A checksum of it, at the end of the loop or at its start; "" for nothing."""
        return ""

    def explain(self, *, is_end: bool) -> None:
        """Called on all workers where their checksums differ.

        Raises:
          TfdpError: on all workers alike, when what can be compared differs.
        """


NOTHING_TO_COMPARE = Compared()


class HostLink(abc.ABC):
    """Exchanges between workers; every worker calls alike, in the same order.

    Args:
      rank: this worker.
      workers: how many there are, at least 2.
      timeout_seconds: how long an exchange may wait for the others.
    """

    #: The name that `Communication(engine=...)` and `tfdp info` use.
    name: str = ""
    #: Which channels steps may use at a time.
    step_channels: tuple[str, ...] = ("step",)
    #: Where this worker reaches each other one, by rank: names or addresses.
    hosts: list[str]

    def __init__(self, rank: int, workers: int, timeout_seconds: float):
        self.rank = rank
        self.workers = workers
        self.timeout_seconds = timeout_seconds

    @abc.abstractmethod
    def sum(
        self,
        arrays: Sequence[np.ndarray],
        label: str,
        channel: str = "step",
        wire_dtype: str | None = None,
        packed: Packed = (),
    ) -> list[np.ndarray]:
        """The sum of each array over all workers; the arrays are not changed.

        Args:
          arrays: of one number type, the same shapes on all workers.
          label: names the exchange in errors.
          channel: one of CHANNELS.
          wire_dtype: the smaller float type in which wider floats travel, all workers
            alike; None for their own. They are added in their own, and every worker
            gets the same bits.
          packed: what arrays were made of, which all workers must have alike; () where
            each is one tensor.

        Raises:
          WorkerLostError: when a worker has ended, is silent, or did not come in
            time; it says which.
          CollectiveError: when the workers are not at the same exchange.

        Cost: 2 n (H - 1) / H bytes sent per worker for n bytes on H workers (as they
        travel) in 2 (H - 1) rounds. Over sockets, small ones in at most
        2 ceil(log2 H) rounds of more bytes; see `tfdp.plan.sum_ways`.
        """

    @abc.abstractmethod
    def reduce_scatter(
        self,
        arrays: Sequence[np.ndarray],
        ranges: Ranges,
        label: str,
        wire_dtype: str | None = None,
    ) -> list[np.ndarray]:
        """This worker's range of the sum of each array over all workers.

        Args:
          arrays: flat, of one number type, the same sizes on all workers.
          ranges: for each array the range that each worker gets, by rank: one after
            the other, together the whole array.
          label: names the exchange in errors.
          wire_dtype: see `sum`.

        Raises:
          As `sum`.

        Cost: n (H - 1) / H bytes sent per worker for n bytes in equal ranges.
        """

    @abc.abstractmethod
    def all_gather(
        self,
        pieces: Sequence[np.ndarray],
        ranges: Ranges,
        label: str,
        channel: str = "step",
    ) -> list[np.ndarray]:
        """The whole arrays, of which each worker has a range.

        Args:
          pieces: this worker's, flat, of one type.
          ranges: see `reduce_scatter`.
          label: names the exchange in errors.
          channel: one of CHANNELS.

        Raises:
          As `sum`.

        Cost: n (H - 1) / H bytes sent per worker for n bytes in equal ranges.
        """

    @abc.abstractmethod
    def all_to_all(self, rows: np.ndarray, label: str) -> np.ndarray:
        """Row i of this worker's goes to worker i; what comes back is by sender.

        Args:
          rows: [workers, ...], of one shape and type on all workers.
          label: names the exchange in errors.

        Raises:
          As `sum`.

        Cost: n (H - 1) / H bytes sent per worker for n bytes over MPI. Over sockets
        n s / H in ceil(log2 H) rounds, with s the one-bits of 1 to H - 1 (n / 2 on 2
        workers, n on 4, 3 n / 2 on 8): others pass on what is not for them.
        """

    @abc.abstractmethod
    def gather(
        self,
        blob: bytes,
        label: str,
        channel: str = "host",
        most_bytes: int = MOST_GATHERED_BYTES,
    ) -> list[bytes]:
        """Everybody's bytes, by rank; their lengths may differ.

        Args:
          blob: this worker's.
          label: names the exchange in errors.
          channel: one of CHANNELS.
          most_bytes: what each worker may bring, the same on all workers. Memory is
            taken as bytes come, not as they are announced.

        Raises:
          CollectiveError: when a worker brings more; on all workers.
          As `sum`.

        Cost: H - 1 times one worker's bytes sent per worker, its own and others', in
        ceil(log2 H) rounds.
        """

    @abc.abstractmethod
    def gather_memory(self, memory: np.ndarray, label: str) -> list[memoryview]:
        """As `gather` within a step, without copies.

        Args:
          memory: of uint8, this worker's bytes.
          label: names the exchange in errors.

        Returns:
          Everybody's. What came lies in memory that the link uses again when nobody
          holds any of it; this worker's is `memory`.

        Raises:
          CollectiveError: as `gather`.
        """

    @abc.abstractmethod
    def sent_bytes(self, channel: str | None = None) -> int:
        """What this worker has sent in exchanges so far, their headers included.

        Without notes, heartbeats and what the network adds.

        Args:
          channel: one of CHANNELS; None: all.
        """

    @abc.abstractmethod
    def exchange_seconds(self, channel: str) -> float:
        """How long this worker was in exchanges so far, those that have ended.

        From the moment when it came to one: the waiting for others is in it.

        Args:
          channel: one of CHANNELS.
        """

    @abc.abstractmethod
    def share_note(
        self, key: str, note: str, has_deadline: bool = True
    ) -> dict[int, str]:
        """Everybody's note under `key`, by rank; in any order, from any thread.

        Args:
          key: the same on all workers, and used once.
          note: a few words.
          has_deadline: whether to wait for `timeout_seconds` at most, and not as long
            as all workers live.

        Raises:
          WorkerLostError: when not all have left one in time, or a worker was lost.
        """

    @abc.abstractmethod
    def without_note(self, key: str) -> list[int]:
        """The workers whose note under `key` has not come."""

    @abc.abstractmethod
    def leave_note(self, key: str, note: str) -> None:
        """Lets all workers read `note`, in the place of an earlier one; no waiting."""

    @abc.abstractmethod
    def wait_for_notes(
        self, key: str, enough: Callable[[dict[int, str]], bool]
    ) -> dict[int, str]:
        """The notes under `key`, by rank, once they are `enough`.

        Raises:
          WorkerLostError: when they are not in time.
        """

    @abc.abstractmethod
    def start(self, call: str, *, only_within_a_loop: bool = False) -> None:
        """Says to the others that this worker has started `call`, and waits for them.

        Args:
          call: the same on all workers, in the same order: "evaluate (dataset 1)".
          only_within_a_loop: whether nothing is said outside of a loop of steps.

        Raises:
          CollectiveError, WorkerLostError: as `loop_of_steps`.
        """

    @abc.abstractmethod
    def loop_of_steps(
        self,
        made: Callable[[], str],
        planned: Callable[[], str],
        name: str,
        compared: Compared = NOTHING_TO_COMPARE,
    ) -> contextlib.AbstractContextManager[None]:
        """A loop of as many steps on all workers, which wait for each other at its
        start and at its end.

        Args:
          made: how many this worker has made so far, in words: "3", "2 times 4".
          planned: how many it is to make, as far as that is known: "5".
          name: the same on all workers: "epoch 2 of fit (dataset 0)".
          compared: what they compare at the start and at the end.

        Raises:
          CollectiveError, WorkerLostError: when another worker has started or ended
            another loop, has come to the end of its script, or has ended its loop
            after another number of exchanges or steps; on all of them, at once.

        Cost: two words to the others.
        """

    @abc.abstractmethod
    def on_note(self, key: str, listener: Callable[[dict[int, str]], None]) -> None:
        """Calls `listener` with the notes under `key` whenever one is left, or was.

        From another thread, which must not wait; until all workers have left one.
        """

    @abc.abstractmethod
    def give_up(self, reason: str) -> None:
        """Ends what every worker waits for, on all of them, with this reason."""

    @abc.abstractmethod
    def on_failure(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` with the reason, once, when a worker is lost.

        From another thread, which must not wait.
        """

    @abc.abstractmethod
    def news(self) -> str | None:
        """Why exchanges cannot go on: who was lost, or has left; None while all can."""

    @abc.abstractmethod
    def close(self) -> None:
        """Says goodbye and closes every connection."""
