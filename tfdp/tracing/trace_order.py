"""Serializes tracing: one thread of a process at a time builds graphs of replicas.

Tracing state lives in the strategy, models and optimizers, where the replicas' threads
find it. The steps that threads built run concurrently.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import tensorflow as tf

from tfdp.errors import CollectiveError, ConfigurationError

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
                f"step of a model while thread {self._owner!r} builds one, or runs one "
                f"eagerly. If {self._owner!r} waits for {here!r} in its step, as by "
                "join(), both hang: let it wait outside of the step."
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


class EagerOrder:
    """Checks that eager replicas exchange in the same order. Each runs up to its next
    `merge_call`; TensorFlow pairs n-th calls whatever they are: two that differ end in
    a bare AssertionError, or in a sum of unrelated tensors."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._met: dict[int, int] = {}
        #: What hosts compare of the exchange that the replicas are at.
        self.label = ""

    def meet(self, rank: int, what: str, label: str = "") -> None:
        """Records that `rank` takes part in the exchange `what`, described equally on
        all replicas; ConfigurationError if another replica is at a different one.
        `label`: a description that is equal on all hosts as well."""
        self.label = label
        place = self._met.get(rank, 0)
        self._met[rank] = place + 1
        if place == len(self._first):
            self._first.append(what)
        elif self._first[place] != what:
            raise ConfigurationError(
                f"Replica {rank} has come to {what} where another one has come to "
                f"{self._first[place]}: the replicas of an eager step must do the same "
                "in the same order. Keras takes no mean of no losses, so a step that "
                "leaves out rows or tokens itself, all of them on one replica, does "
                "less there; and where a replica has one row, gradients of branches "
                "may come in another order. Compile with run_eagerly=False (call "
                "strategy.run within a tf.function), or give what is left out a "
                "sample_weight of 0."
            )


def describe_sum(value: Any) -> str:
    """Describes a sum, equally on all replicas."""
    parts = [_part_in_words(part) for part in tf.nest.flatten(value)]
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return f"a sum of {', '.join(parts[:3])}{more}"


def _part_in_words(part: Any) -> str:
    if isinstance(part, tf.IndexedSlices):  # their number of rows varies
        return f"{part.dtype.name} slices"
    tensor = tf.convert_to_tensor(part)
    return f"{tensor.dtype.name} {tensor.shape}"
