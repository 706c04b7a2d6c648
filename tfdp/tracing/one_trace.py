"""One thread of a program at a time builds the graphs of replicas.

What a trace knows and does lies where its replicas, which are threads of their own,
find it: in the strategy, its exchanges, in models and optimizers. Threads that train
several models therefore trace in turn. The steps that they have built run side by side.
"""

from __future__ import annotations

import contextlib
import threading

import tensorflow as tf

__all__ = ["one_trace"]

# For the process: models, optimizers and TensorFlow's graphs belong to no strategy.
_turn = threading.RLock()


def one_trace() -> contextlib.AbstractContextManager:
    """Waits until no other thread traces replicas; while this lasts, none does."""
    is_replica = (
        tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    )
    # The thread that traces this replica has the turn, and waits for the replica.
    return contextlib.nullcontext() if is_replica else _turn
