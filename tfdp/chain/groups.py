"""Local training: sums within the groups of replicas that step together, and over all.

A group's mean gradient, and the moving statistics of its rows, are summed by
`Exact`. In the steps before `start_step`, which all replicas take together,
gradients are weighted by what the groups' losses were divided by (rows, unmasked
entries or sample weights: `batch_weight`), and moving statistics by rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.chain.buffers import addend
from tfdp.chain.reduction import Reduction, Stage
from tfdp.exchange.packing import Tensors
from tfdp.exchange.reducer import Reducer
from tfdp.exchange.sparse import with_values
from tfdp.variables.local_view import LocalView


class Exact:
    """The sums within a group, and of outer values, which never travel rounded."""

    def __init__(self, reducer: Reducer):
        self._reducer = reducer

    def sum_gradients(
        self, gradients: Tensors, riders: Tensors, rank: Any, **options: bool
    ) -> tuple[list[Any], list[tf.Tensor]]:
        sums = self._reducer.all_reduce([*gradients, *riders], rank, mean=False)
        return sums[: len(gradients)], sums[len(gradients) :]


class GroupState(Stage):
    """Replaces the buffers `state` by their mean over the rows of the group."""

    def __init__(self, state: Sequence[LocalView]):
        self._state = state

    def before(self, reduction: Reduction) -> None:
        step, rank = reduction.step, reduction.rank
        # In a group without rows all replicas have kept the same old value.
        total, even = step.total_together(rank), 1.0 / step.group_size
        share = tf.where(total > 0, step.share_together(rank), even)
        reduction.riders += self._addends(share, rank)

    def _addends(self, share: tf.Tensor, rank: int) -> list[tf.Tensor]:
        own = [variable.local_copy(rank).read_value() for variable in self._state]
        return [addend(value, share) for value in own]

    def after(self, reduction: Reduction) -> None:
        means = reduction.take_riders(len(self._state))
        for variable, mean in zip(self._state, means, strict=True):
            variable.local_copy(reduction.rank).assign(mean)


class AllGroups(GroupState):
    """One device's gradient: the sum of W_g g_g over the groups, by the sum of W_g; and
    the mean of the buffers `state` over the rows of all groups.

    `weight` is W_g, that of the mean of the replica's group; None: gradients are sums,
    which are added as they are.
    """

    def __init__(
        self, state: Sequence[LocalView], weight: tf.Tensor | None, reducer: Reducer
    ):
        super().__init__(state)
        self._weight, self._reducer = weight, reducer

    def before(self, reduction: Reduction) -> None:
        step, rank = reduction.step, reduction.rank
        rows = tf.cast(step.count_of(rank), tf.float32)
        group_weight = tf.ones([]) if self._weight is None else self._weight
        # Each replica of a group adds the group's weight.
        counts = [group_weight / step.group_size, rows]
        all_weights, all_rows = self._reducer.all_reduce(counts, rank, mean=False)
        if self._weight is not None:
            # Scaled before the sum, so that a 16-bit wire format does not overflow.
            part = tf.math.divide_no_nan(group_weight, all_weights)

            def times(values: tf.Tensor) -> tf.Tensor:
                return values * tf.cast(part, values.dtype)

            own = reduction.gradients
            own[:] = [one if one is None else with_values(one, times) for one in own]
        share = tf.math.divide_no_nan(rows, all_rows)
        reduction.riders += self._addends(share, rank)
