"""`LateSums`: sums over the hosts that travel while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from tfdp.hosts.host_link import HostLink

__all__ = ["LateSums"]


class LateSums:
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
