"""`AsyncExchanges`: exchanges that are begun before those ahead of them are over."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from tfdp.errors import CollectiveError
from tfdp.hosts.host_link import HostLink

Exchange = Callable[[], Sequence[np.ndarray]]


class AsyncExchanges:
    """A thread for each channel makes them, in the order in which they are begun.

    So the next one begins when the one before it in its channel is over, and not when
    TensorFlow has found a thread for it: on a single core that is after some operation
    that computes, and the network does nothing meanwhile. Once one has failed, those
    that are begun before its error is taken, in any channel, are not made.
    """

    def __init__(self) -> None:
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._failure: BaseException | None = None
        #: The first ticket after the failure was told; None: nobody knows of it yet.
        self._first_since: int | None = None
        self._begun: dict[int, Future[Sequence[np.ndarray]]] = {}

    def begin(self, channel: str, exchange: Exchange) -> int:
        """Queues an exchange; returns the ticket by which `take` finds it.

        Args:
          channel: whose turn it waits for.
          exchange: called in the thread. What it sends must stay as it is until then.
        """
        with self._lock:
            if channel not in self._threads:
                name = f"tfdp-exchanges-{channel}"
                self._threads[channel] = ThreadPoolExecutor(1, name)
            ticket = next(self._tickets)
            made = self._threads[channel].submit(self._made, ticket, exchange)
            self._begun[ticket] = made
        return ticket

    def take(self, ticket: int) -> Sequence[np.ndarray]:
        """What the exchange has made, once it is over, or the error that it raised.

        Raises:
          CollectiveError: when one before it has failed.
          KeyError: when it was taken already.
        """
        with self._lock:
            begun = self._begun.pop(ticket)
        try:
            return begun.result()
        except BaseException as error:
            with self._lock:
                if error is self._failure and self._first_since is None:
                    self._first_since = next(self._tickets)
            raise

    def _made(self, ticket: int, exchange: Exchange) -> Sequence[np.ndarray]:
        """What it makes, unless one before it has failed.

        Whatever failed, others do not get this worker's part of it, and would take the
        next one for it.
        """
        with self._lock:
            failure, first = self._failure, self._first_since
        if failure is not None and (first is None or ticket < first):
            raise CollectiveError(
                "After an exchange that failed those begun behind it are not made. It "
                f"said: {type(failure).__name__}: {failure}"
            ) from failure
        try:
            return exchange()
        except BaseException as error:
            with self._lock:
                self._failure, self._first_since = error, None
            raise

    def close(self) -> None:
        """Waits for those that were begun: each has its deadline."""
        with self._lock:
            threads, self._threads = self._threads, {}
        for thread in threads.values():
            thread.shutdown(wait=True)


# `AsyncSums`: sums over the hosts that travel while training goes on.


class AsyncSums:
    """Begins sums in one step, and has them ready in a later one.

    One thread makes them, in the order in which they were begun, which is the same on
    all hosts, over a channel of its own: what steps exchange meanwhile goes past them.
    Each has the deadline of the link.

    Args:
      link: to the other hosts.
    """

    def __init__(self, link: HostLink):
        self._link = link
        self._thread = ThreadPoolExecutor(1, "tfdp-late-sums")
        self._lock = threading.Lock()
        self._sums: dict[int, Future[list[np.ndarray]]] = {}

    def begin(self, ticket: int, arrays: Sequence[np.ndarray], label: str) -> None:
        """Starts a sum, without waiting for anybody.

        Args:
          ticket: names it in this process; an earlier one of this name is let go.
          arrays: of number types, alike on all hosts; copied here.
          label: names it in errors, alike on all hosts.
        """
        # The caller's memory may be TensorFlow's, which is free when the step ends.
        own = [np.array(array, order="C") for array in arrays]
        with self._lock:
            self._sums[ticket] = self._thread.submit(self._sum, own, label)

    def _sum(self, arrays: list[np.ndarray], label: str) -> list[np.ndarray]:
        sums = list(arrays)
        # A link sums arrays of one type. In the order of the arrays, alike everywhere.
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            places = [i for i, array in enumerate(arrays) if array.dtype == dtype]
            own = [arrays[place] for place in places]
            for place, total in zip(
                places, self._link.sum(own, label, "late"), strict=True
            ):
                sums[place] = total
        return sums

    def take(self, ticket: int) -> list[np.ndarray] | None:
        """The sums, once they are there; None: nothing was begun.

        Raises:
          WorkerLostError: as `HostLink.sum`.
        """
        with self._lock:
            begun = self._sums.pop(ticket, None)
        return None if begun is None else begun.result()

    def look(self, ticket: int) -> list[np.ndarray] | None:
        """As `take`, and they can still be taken."""
        with self._lock:
            begun = self._sums.get(ticket)
        return None if begun is None else begun.result()

    def forget(self, ticket: int) -> None:
        """Nobody wants them any more; the others still get this host's part."""
        with self._lock:
            self._sums.pop(ticket, None)

    def close(self) -> None:
        """Waits for what others wait for, too: each exchange has its deadline."""
        self._thread.shutdown(wait=True)
