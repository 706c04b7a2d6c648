"""Serializes tracing: one thread of a process at a time builds graphs of replicas.

Tracing state lives in the strategy, models and optimizers, where the replicas' threads
find it. The steps that threads built run concurrently.
"""

from __future__ import annotations

import contextlib
import threading

import tensorflow as tf

from tfdp.errors import CollectiveError

LONGEST_WAIT_SECONDS = 600.0


class _Turn:
    """A reentrant lock with a timeout that names both threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = ""

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=LONGEST_WAIT_SECONDS):
            here = threading.current_thread().name
            raise CollectiveError(
                f"Thread {here!r} waited {LONGEST_WAIT_SECONDS:g} seconds to build the "
                f"step of a model while thread {self._owner!r} builds one. If "
                f"{self._owner!r} waits for {here!r} in its step, as by join(), both "
                "hang: let it wait outside of the step."
            )
        self._owner = threading.current_thread().name

    def __exit__(self, *_: object) -> None:
        self._lock.release()


# Per process: models, optimizers and TensorFlow's graphs belong to no strategy.
_turn = _Turn()


def one_trace() -> contextlib.AbstractContextManager[None]:
    """Holds the process's tracing lock; CollectiveError on entry, if another thread
    holds it for ten minutes."""
    is_replica = (
        tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    )
    # The thread that traces this replica holds the lock and waits for the replica.
    return contextlib.nullcontext() if is_replica else _turn
