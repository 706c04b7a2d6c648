"""`OfRanks`: a number for each replica of this process, in checkpoints too.

What replicas keep apart, such as what each has left to send, is no weight of the model:
it is not among its variables and not in `model.save`. `tf.train.Checkpoint` finds it as
an attribute of the optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import ResourceVariable

__all__ = ["OfRanks"]


@dataclasses.dataclass
class _Copies:
    """Out of a checkpoint's sight: it would have each of them as well as all."""

    variables: list[tf.Variable]


class OfRanks(tf.Module):
    """One variable on each of several devices, which the replicas use by themselves.

    In a checkpoint it is one tensor, [replicas, ...]. Read by another number of
    replicas, each gets an equal part of the sum over those that wrote it, or for
    `is_alike` what the first one had.

    Args:
      shape: of each.
      devices: those of the replicas that have one.
      dtype: of the numbers.
      is_alike: whether all have the same value at all times.
    """

    def __init__(
        self,
        shape: Sequence[int],
        devices: Sequence[str],
        dtype: tf.DType = tf.float32,
        is_alike: bool = False,
    ):
        # Not the class' name, which may begin with what no name scope may.
        super().__init__(name="of_ranks")
        self.is_alike = is_alike
        self._copies = _Copies([])
        # Out of the graph that is being built, and of every strategy.
        with tf.init_scope():
            for device in devices:
                with tf.device(device):
                    start = tf.zeros(shape, dtype)
                    self.copies.append(ResourceVariable(start, trainable=False))

    @property
    def copies(self) -> list[tf.Variable]:
        """One for each device, in their order."""
        return self._copies.variables

    def rows(self) -> tf.Tensor:
        """The numbers of all replicas of this process, [replicas, ...]."""
        return tf.stack([copy.read_value() for copy in self.copies])

    def assign_rows(self, rows: Any) -> None:
        """Gives each replica its own."""
        for copy, row in zip(self.copies, rows, strict=True):
            with tf.device(copy.device):
                copy.assign(row)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"of_ranks": self.rows()}

    def _restore_from_tensors(
        self, restored_tensors: dict[str, tf.Tensor]
    ) -> tf.Operation:
        stored = restored_tensors["of_ranks"]
        ranks = len(self.copies)
        shape = [ranks, *self.copies[0].shape]
        stored = tf.ensure_shape(stored, [None, *shape[1:]])
        if self.is_alike:
            dealt = tf.broadcast_to(stored[:1], shape)
        else:
            # All of it is still to be sent, whoever sends it.
            part = tf.reduce_sum(stored, axis=0, keepdims=True) / ranks
            is_same = tf.equal(tf.shape(stored)[0], ranks)
            dealt = tf.cond(
                is_same, lambda: stored, lambda: tf.broadcast_to(part, shape)
            )
            dealt = tf.ensure_shape(dealt, shape)
        return tf.group(
            *(copy.assign(dealt[rank]) for rank, copy in enumerate(self.copies))
        )
