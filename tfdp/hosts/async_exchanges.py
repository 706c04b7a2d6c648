"""Asynchronous exchanges: one thread per channel, handles to wait on."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from tfdp.errors import CollectiveError
from tfdp.hosts.host_link import Arrays, HostLink

Exchange = Callable[[], Arrays]


class AsyncExchanges:
    """Runs exchanges in one thread per channel, in the order of `begin`.

    So an exchange starts when the previous one in its channel ends, without waiting for
    a TensorFlow thread, which may be busy computing. After a failure, exchanges begun
    before its error was taken are not run, in any channel.
    """

    def __init__(self) -> None:
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._failure: BaseException | None = None
        #: The first ticket after the failure was raised; None: not raised yet.
        self._first_since: int | None = None
        self._begun: dict[int, Future[Arrays]] = {}

    def begin(self, channel: str, exchange: Exchange) -> int:
        """Queues `exchange`, whose inputs must not change; returns a ticket."""
        with self._lock:
            if channel not in self._threads:
                name = f"tfdp-exchanges-{channel}"
                self._threads[channel] = ThreadPoolExecutor(1, name)
            ticket = next(self._tickets)
            made = self._threads[channel].submit(self._made, ticket, exchange)
            self._begun[ticket] = made
        return ticket

    def take(self, ticket: int) -> Arrays:
        """Waits for an exchange; returns its result or raises its error, once."""
        with self._lock:
            begun = self._begun.pop(ticket)
        try:
            return begun.result()
        except BaseException as error:
            with self._lock:
                if error is self._failure and self._first_since is None:
                    self._first_since = next(self._tickets)
            raise

    def _made(self, ticket: int, exchange: Exchange) -> Arrays:
        # After any failure the others lack this worker's data, and would mistake the
        # next exchange for it.
        with self._lock:
            failure, first = self._failure, self._first_since
        if failure is not None and (first is None or ticket < first):
            raise CollectiveError(
                "Exchanges begun before an earlier one failed are not run. Its error: "
                f"{type(failure).__name__}: {failure}"
            ) from failure
        try:
            return exchange()
        except BaseException as error:
            with self._lock:
                self._failure, self._first_since = error, None
            raise

    def close(self) -> None:
        """Waits for exchanges in flight: each has its deadline."""
        with self._lock:
            threads, self._threads = self._threads, {}
        for thread in threads.values():
            thread.shutdown(wait=True)


class AsyncSums:
    """Sums over hosts that run while training goes on.

    One thread runs them over the "late" channel, in the same order on all hosts; each
    has the link's deadline.
    """

    def __init__(self, link: HostLink):
        self._link = link
        self._thread = ThreadPoolExecutor(1, "tfdp-late-sums")
        self._lock = threading.Lock()
        self._sums: dict[Hashable, Future[list[np.ndarray]]] = {}

    def begin(self, ticket: Hashable, arrays: Arrays, label: str) -> None:
        """Copies arrays, starts a sum; replaces an earlier one of this ticket."""
        # TensorFlow may own the caller's memory, and frees it at the step's end.
        own = [np.array(array, order="C") for array in arrays]
        with self._lock:
            self._link.announce(len({array.dtype for array in own}), "late")
            self._sums[ticket] = self._thread.submit(self._sum, own, label)

    def _sum(self, arrays: list[np.ndarray], label: str) -> list[np.ndarray]:
        sums = list(arrays)
        # A link sums arrays of one type; the order of types is the same on all hosts.
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            places = [i for i, array in enumerate(arrays) if array.dtype == dtype]
            own = [arrays[place] for place in places]
            totals = self._link.sum(own, label, "late")
            for place, total in zip(places, totals, strict=True):
                sums[place] = total
        return sums

    def take(self, ticket: Hashable) -> list[np.ndarray] | None:
        """Waits for the sums and removes them; None if none was begun."""
        with self._lock:
            begun = self._sums.pop(ticket, None)
        return None if begun is None else begun.result()

    def look(self, ticket: Hashable) -> list[np.ndarray] | None:
        """Returns what `take` does, but leaves the sums in place."""
        with self._lock:
            begun = self._sums.get(ticket)
        return None if begun is None else begun.result()

    def is_complete(self, ticket: Hashable) -> bool:
        """Whether `take` would return, or raise, without waiting."""
        with self._lock:
            begun = self._sums.get(ticket)
        return begun is None or begun.done()

    def forget(self, ticket: Hashable) -> None:
        """Drops the result; the other hosts still get this host's part."""
        with self._lock:
            self._sums.pop(ticket, None)

    def close(self) -> None:
        """Waits for sums in flight: other hosts wait for them, too."""
        self._thread.shutdown(wait=True)
