"""Of hosts that train together, one thread of each runs what they do in common."""

from __future__ import annotations

import threading

from tfdp.errors import CollectiveError

__all__ = ["OneThread"]


class OneThread:
    """Refuses a second thread while the first one lives.

    Each host would let its threads take turns by chance, and come to the exchanges of
    two trainings in an order of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: threading.Thread | None = None

    def check(self, hosts: int) -> None:
        """Notes the calling thread.

        Args:
          hosts: how many train together; one alone needs no order.

        Raises:
          CollectiveError: another thread was noted, and has not ended.
        """
        if hosts == 1:
            return
        here = threading.current_thread()
        with self._lock:
            first = self._first
            if first is None or not first.is_alive():
                first = self._first = here
        if first is not here:
            raise CollectiveError(
                f"Thread {here.name!r} begins a step, or a fit, evaluate or predict, "
                f"under a strategy of {hosts} hosts that thread {first.name!r} uses. "
                "With two threads each host would come to the exchanges of the two in "
                "another order. Call fit, evaluate and predict one after the other in "
                f"one thread; another thread can begin when {first.name!r} has ended. "
                "On one host threads can train side by side."
            )
