"""One thread of a program at a time builds the graphs of replicas.

What a trace knows and does lies where its replicas, which are threads of their own,
find it: in the strategy, its exchanges, in models and optimizers. Threads that train
several models therefore trace in turn. The steps that they have built run side by side.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import tensorflow as tf

from tfdp.errors import CollectiveError, ConfigurationError

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


# In which order eager replicas come together: all alike, or an error that says why.
#
# Eager replicas run one after the other, each until it meets the others in TensorFlow's
# `merge_call`. TensorFlow puts their n-th calls together whatever they are about: two
# that differ end in a bare AssertionError, or in the sum of unlike tensors.


class EagerOrder:
    """What the replicas of one eager `strategy.run` have met for so far."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._met: dict[int, int] = {}

    def meet(self, rank: int, what: str) -> None:
        """Notes that `rank` is about to meet the others.

        Args:
          rank: the calling replica.
          what: for what, in words that are alike on all replicas.

        Raises:
          ConfigurationError: when another replica came for something else.
        """
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


def sum_in_words(value: Any) -> str:
    """What is summed, alike on all replicas."""
    told = [_part_in_words(part) for part in tf.nest.flatten(value)]
    more = f" and {len(told) - 3} more" if len(told) > 3 else ""
    return f"a sum of {', '.join(told[:3])}{more}"


def _part_in_words(part: Any) -> str:
    if isinstance(part, tf.IndexedSlices):  # of as many rows as the replica has read
        return f"{part.dtype.name} slices"
    tensor = tf.convert_to_tensor(part)
    return f"{tensor.dtype.name} {tensor.shape}"
