"""Gradients that each replica accumulates for itself, which outside are their sum.

Who reads them between two updates (a file, a callback) means the gradient of the whole
batches, which is the sum over replicas. What is assigned outside, such as what a file
holds, becomes the sum: the first replica gets all of it, and the others zeros, so that
it is read again to the last bit, and no sum of theirs is rounded.

    in a replica           its own sum
    anywhere else          the sum over the replicas of this process

On several hosts that is a part only, and whoever saves on one of them cannot ask the
others: a warning says so.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import (
    MirroredVariable,
    PerReplica,
    ResourceVariable,
    in_save_context,
)
from tfdp.errors import CheckpointWarning
from tfdp.variables.mirrored import ReplicaMirroredVariable


class OwnSums(MirroredVariable):
    """An accumulator with a sum of its own on each replica; see the top. A mixin."""

    #: Whose sums add up: those of "all" replicas, of this "host", of each "replica".
    adds_up_over = "all"

    def note_own(self) -> None:
        """Nothing: what replicas have of their own adds up, and has no mean."""

    def _get(self) -> Any:
        context = tf.distribute.get_replica_context()
        # Outside all scopes TensorFlow has a replica context, too: another strategy's.
        if context is None or context.strategy is self.distribute_strategy:
            return super()._get()
        return super()._get() if in_save_context() else self._get_cross_replica()

    def _get_cross_replica(self) -> tf.Tensor:
        if self.adds_up_over == "replica":
            return super()._get_cross_replica()
        with tf.device(self.values[0].device):
            total = self.values[0].read_value()
            for copy in self.values[1:]:
                total += copy.read_value()
        self._warn_of_other_hosts(total)
        return total

    def value(self) -> tf.Tensor:
        """The own sum, or all of it; see the top."""
        # TensorFlow's takes the copy of the device at hand.
        return tf.convert_to_tensor(self)

    def _update_cross_replica(
        self, update_fn: Callable, value: Any, **kwargs: Any
    ) -> Any:
        is_each = isinstance(value, PerReplica)
        if self.adds_up_over == "replica" or is_each:
            return super()._update_cross_replica(update_fn, value, **kwargs)
        self._deal(update_fn, value, **kwargs)
        return self

    def _deal(self, update_fn: Callable, value: Any, **kwargs: Any) -> None:
        first = self.distribute_strategy.extended.first_rank
        has_first = self.adds_up_over == "host" or first == 0
        for place, copy in enumerate(self.values):
            with tf.device(copy.device):
                own = tf.cast(value, self.dtype)
                if place or not has_first:
                    own = tf.zeros_like(own)
                update_fn(copy, own, **kwargs)

    def _warn_of_other_hosts(self, total: tf.Tensor) -> None:
        hosts = self.distribute_strategy.hosts
        if hosts == 1 or self.adds_up_over != "all" or not tf.executing_eagerly():
            return
        if bool(tf.reduce_any(total != 0)):
            warnings.warn(
                "Accumulated gradients are read, or written to a file, between two "
                f"updates of an accumulation: this is what one of {hosts} hosts has, "
                "and training that goes on from such a file leaves the others' out of "
                "its next update. tfdp.callbacks.Checkpoint keeps those of all hosts; "
                "or save after an update (steps that gradient_accumulation_steps "
                "divides).",
                CheckpointWarning,
                stacklevel=2,
            )

    # Files hold the sum, so any number of replicas, and none, can read them.
    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        with self.distribute_strategy.scope():
            return {"VARIABLE_VALUE": self._get_cross_replica()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return self.assign(restored_tensors["VARIABLE_VALUE"])


class OwnSumVariable(OwnSums, ReplicaMirroredVariable):
    """An accumulator of mirrored replicas."""


# `OfRanks`: a number for each replica of this process, in checkpoints too.
#
# What replicas keep apart, such as what each has left to send, is no weight of the
# model: it is not among its variables and not in `model.save`. `tf.train.Checkpoint`
# finds it as an attribute of the optimizer.


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
