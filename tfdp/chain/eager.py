"""The sums of eager replicas, which run one after the other."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.chain.table_rows import as_requested
from tfdp.exchange.packing import Tensors
from tfdp.tracing.step import Step
from tfdp.tracing.trace_order import describe_sum


class EagerReducer:
    """Sums by TensorFlow's own means: each replica stops until all have come."""

    def __init__(self, step: Step):
        self._order = step.eager_order

    def sum_gradients(
        self, gradients: Tensors, riders: Tensors, rank: Any, **options: bool
    ) -> tuple[list[Any], list[tf.Tensor]]:
        values = [*gradients, *riders]
        self._order.meet(rank, describe_sum(values))
        context = tf.distribute.get_replica_context()
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, values)
        return as_requested(sums[: len(gradients)]), sums[len(gradients) :]
