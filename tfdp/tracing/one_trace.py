"""One thread of a program at a time builds the graphs of replicas.

What a trace knows and does lies where its replicas, which are threads of their own,
find it: in the strategy, its exchanges, in models and optimizers. Threads that train
several models therefore trace in turn. The steps that they have built run side by side.
"""

from __future__ import annotations

import contextlib
import threading

import tensorflow as tf

from tfdp.errors import CollectiveError

__all__ = ["one_trace"]

LONGEST_WAIT_SECONDS = 600.0


class _Turn:
    """A lock that its thread may take again, and that other threads wait for."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = ""

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=LONGEST_WAIT_SECONDS):
            here = threading.current_thread().name
            raise CollectiveError(
                f"Thread {here!r} waited {LONGEST_WAIT_SECONDS:g} seconds to build the "
                f"step of a model while thread {self._owner!r} builds one, or runs one "
                f"eagerly. If {self._owner!r} waits for {here!r} in its step, as by "
                "join(), neither goes on: let it wait outside of the step."
            )
        self._owner = threading.current_thread().name

    def __exit__(self, *_: object) -> None:
        self._lock.release()


# For the process: models, optimizers and TensorFlow's graphs belong to no strategy.
_turn = _Turn()


def one_trace() -> contextlib.AbstractContextManager[None]:
    """Waits until no other thread traces replicas; while this lasts, none does.

    Raises:
      CollectiveError: when entered, if another thread does for ten minutes.
    """
    is_replica = (
        tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    )
    # The thread that traces this replica has the turn, and waits for the replica.
    return contextlib.nullcontext() if is_replica else _turn
