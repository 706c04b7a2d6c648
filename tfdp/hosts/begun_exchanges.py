"""`BegunExchanges`: exchanges that are begun before those ahead of them are over."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

__all__ = ["BegunExchanges"]

Exchange = Callable[[], Sequence[np.ndarray]]


class BegunExchanges:
    """A thread for each channel makes them, in the order in which they are begun.

    So the next one begins when the one before it in its channel is over, and not when
    TensorFlow has found a thread for it: on a single core that is after some operation
    that computes, and the network does nothing meanwhile.
    """

    def __init__(self) -> None:
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._tickets = itertools.count()
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
            self._begun[ticket] = self._threads[channel].submit(exchange)
        return ticket

    def take(self, ticket: int) -> Sequence[np.ndarray]:
        """What the exchange has made, once it is over, or the error that it raised.

        Raises:
          KeyError: when it was taken already.
        """
        with self._lock:
            begun = self._begun.pop(ticket)
        return begun.result()

    def close(self) -> None:
        """Waits for those that were begun: each has its deadline."""
        with self._lock:
            threads, self._threads = self._threads, {}
        for thread in threads.values():
            thread.shutdown(wait=True)
