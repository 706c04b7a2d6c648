"""The update of the weights, which is the same on every replica: one graph for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.known_code import runs_known_code
from tfdp._private.names import current_rank
from tfdp.step.shared_functions import SharedFunctions
from tfdp.tracing.run import ReplicaRun
from tfdp.variables.local_view import LocalView

__all__ = ["LEAST_VARIABLES", "may_share_graphs", "update_by_one_graph"]

# A call takes some 0.1 ms of a step; what is saved, once, grows with the variables.
LEAST_VARIABLES = 32


def update_by_one_graph(
    optimizer: keras.optimizers.Optimizer,
    run: ReplicaRun,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    update: Callable[[list[Any]], Any],
) -> None:
    """Calls `update(gradients)`, or a function with that graph which replicas share.

    An update of Adam's is some 50 operations for each variable, more than half of a
    training step's. It begins when all gradients have come, as the updates of other
    frameworks do. TensorFlow's optimizer sees it apart from what is around it: last
    bits may be others than without it.

    On CPUs only: it was not run on a GPU.

    Args:
      optimizer: whose update it is.
      run: in which the replicas are traced.
      gradients: the sums over the replicas; None for what has none.
      variables: that may be updated.
      update: builds the update.
    """
    rank = current_rank()
    if not _can_be_shared(run, rank, variables):
        update(list(gradients))
        return

    def update_with(flat: list[tf.Tensor]) -> None:
        update(
            tf.nest.pack_sequence_as(
                gradients, _with_nones(parts, flat), expand_composites=True
            )
        )

    parts = tf.nest.flatten(list(gradients), expand_composites=True)
    given = [part for part in parts if part is not None]
    SharedFunctions.of(run).call(
        id(optimizer),
        rank,
        update_with,
        given,
        _device_of(rank),
        is_known=lambda: runs_known_code([optimizer, *variables], (ReplicaRun,)),
    )


def may_share_graphs(extended: Any) -> bool:
    """Whether the replicas of a strategy may share graphs.

    On CPUs alone: elsewhere it was never run, and a first step that fails is worse than
    a slow one. And not where a step is planned that GPUs are to run.
    """
    specs = map(tf.DeviceSpec.from_string, extended.worker_devices)
    return extended.shares_graphs and all(spec.device_type == "CPU" for spec in specs)


def _device_of(rank: int) -> str:
    return str(tf.distribute.get_strategy().extended.worker_devices[rank])


def _with_nones(parts: list[Any], values: list[tf.Tensor]) -> list[Any]:
    following = iter(values)
    return [None if part is None else next(following) for part in parts]


def _can_be_shared(run: ReplicaRun, rank: Any, variables: Sequence[Any]) -> bool:
    if tf.executing_eagerly() or run.replicas == 1 or not isinstance(rank, int):
        return False
    if run.is_local or len(variables) < LEAST_VARIABLES:
        return False
    if not may_share_graphs(tf.distribute.get_strategy().extended):
        return False
    # Who watches a variable is told by each replica as it is traced.
    stored = [getattr(variable, "value", variable) for variable in variables]
    return not any(isinstance(v, LocalView) and v.has_local for v in stored)
