"""Optimizers that draw random numbers: copies of a weight must get the same ones.

`keras.random` draws alike on all replicas there (`tfdp.variables.mirrored`).
TensorFlow's own random operations are seeded by their place in the graph, which is
another one for each replica, or by nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import current_rank
from tfdp._private.op_types import DRAWS
from tfdp._private.step_ops import operations_within
from tfdp.tracing.run import ReplicaRun

__all__ = ["watch_draws"]


def watch_draws(
    optimizers: Iterable[keras.optimizers.Optimizer],
    run: ReplicaRun,
    update: Callable[..., Any],
) -> Callable[..., Any]:
    """`update`, which notes for a warning where replicas draw apart in it.

    Args:
      optimizers: those that update.
      run: in which the replicas are traced.
      update: builds the update of one replica.
    """
    if run.replicas == 1 or run.is_local or tf.executing_eagerly():
        return update
    if tf.distribute.in_cross_replica_context():
        return update  # as a program's own merge_call does: one draws for all copies
    rank = current_rank()
    if isinstance(rank, int) and rank != 0:
        return update  # what one of them draws by all do

    @functools.wraps(update)
    def watched(*args: Any, **kwargs: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        result = update(*args, **kwargs)
        made = operations_within(graph.get_operations()[before:])
        if any(op.type in DRAWS for op in made):
            names = ", ".join(sorted({type(each).__name__ for each in optimizers}))
            run.state_suspicions.add(
                f"the optimizer {names} draws random numbers by TensorFlow, which are "
                "others on each replica, so that the copies of the weights become "
                "unlike. Draw with keras.random and a keras.random.SeedGenerator that "
                "the optimizer holds: in an update all replicas draw alike by it"
            )
        return result

    return watched
