"""`BegunExchanges`: exchanges that are begun before those ahead of them are over."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from tfdp.errors import CollectiveError

__all__ = ["BegunExchanges"]

Exchange = Callable[[], Sequence[np.ndarray]]


class BegunExchanges:
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
