"""What is done once for all replicas, while one of them is being traced."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf

__all__ = ["do_before_the_step"]


def do_before_the_step(function: Callable[[], None]) -> None:
    """Calls it now, eagerly and in the scope of the strategy, outside of replicas.

    `tf.init_scope` leaves the graph, not the replica, and `merge_call` needs all
    replicas, and no function or conditional around it. Another thread is in neither.
    """
    strategy = tf.distribute.get_strategy()

    def in_scope() -> None:
        with strategy.scope():
            function()

    with ThreadPoolExecutor(1) as outside:
        outside.submit(in_scope).result()
