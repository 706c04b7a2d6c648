"""Gradients that each replica accumulates independently.

Outside replicas (in files and callbacks) they read as the sum over the replicas of this
process. A value assigned outside goes to the first replica, and zeros to the others, so
that it reads back exactly. On several hosts the sum is one host's, with a warning.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private import names
from tfdp.errors import CheckpointWarning
from tfdp.variables.mirrored import ReplicaMirroredVariable


class OwnSums(names.MirroredVariable):
    """An accumulator with an independent sum on each replica; a mixin."""

    #: The sums that are added: of "all" replicas, of this "host", or of each "replica".
    adds_up_over = "all"

    def note_own(self) -> None:
        """Nothing: independent sums have no mean."""

    def _get(self) -> Any:
        context = tf.distribute.get_replica_context()
        # Outside all scopes there is the replica context of the default strategy.
        if context is None or context.strategy is self.distribute_strategy:
            return super()._get()
        return super()._get() if names.in_save_context() else self._get_cross_replica()

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
        """This replica's sum, or outside replicas the total."""
        # TensorFlow returns the current device's copy.
        return tf.convert_to_tensor(self)

    def _update_cross_replica(
        self, update_fn: Callable, value: Any, **kwargs: Any
    ) -> Any:
        if self.adds_up_over == "replica" or isinstance(value, names.PerReplica):
            return super()._update_cross_replica(update_fn, value, **kwargs)
        first = self.distribute_strategy.extended.first_rank
        has_first = self.adds_up_over == "host" or first == 0
        for place, copy in enumerate(self.values):
            with tf.device(copy.device):
                own = tf.cast(value, self.dtype)
                if place or not has_first:
                    own = tf.zeros_like(own)
                update_fn(copy, own, **kwargs)
        return self

    def _warn_of_other_hosts(self, total: tf.Tensor) -> None:
        hosts = self.distribute_strategy.hosts
        if hosts == 1 or self.adds_up_over != "all" or not tf.executing_eagerly():
            return
        if bool(tf.reduce_any(total != 0)):
            warnings.warn(
                "Accumulated gradients are read, or written to a file, between two "
                f"updates: this is the part of one of {hosts} hosts, and training "
                "continued from such a file omits the others' in its next update. "
                "tfdp.callbacks.Checkpoint keeps those of all hosts; or save after an "
                "update (steps that gradient_accumulation_steps divides).",
                CheckpointWarning,
                stacklevel=2,
            )

    # Files hold the sum, so that any number of replicas can read them.
    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        with self.distribute_strategy.scope():
            return {"VARIABLE_VALUE": self._get_cross_replica()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return self.assign(restored_tensors["VARIABLE_VALUE"])


class OwnSumVariable(OwnSums, ReplicaMirroredVariable):
    """An accumulator of mirrored replicas."""


# Values of replicas, such as residuals, are no weights: neither the model's variables
# nor `model.save` contain them. `tf.train.Checkpoint` finds them as attributes of the
# optimizer.


@dataclasses.dataclass
class _Copies:
    """Hides the copies from checkpoints, which hold them stacked."""

    variables: list[tf.Variable]


class OfRanks(tf.Module):
    """One variable per replica of this process, on its device.

    A checkpoint holds one tensor, [replicas, ...]. Read by another number of replicas,
    each gets an equal part of the sum, or with `is_identical` the first one's value.
    """

    def __init__(
        self,
        shape: Sequence[int],
        devices: Sequence[str],
        dtype: tf.DType = tf.float32,
        is_identical: bool = False,
    ):
        # Not the class' name, which might be invalid as a name scope.
        super().__init__(name="of_ranks")
        self.is_identical = is_identical
        self._copies = _Copies([])
        # Outside the graph being built, and outside any strategy.
        with tf.init_scope():
            for device in devices:
                with tf.device(device):
                    start = tf.zeros(shape, dtype)
                    self.copies.append(names.ResourceVariable(start, trainable=False))

    @property
    def copies(self) -> list[tf.Variable]:
        return self._copies.variables

    def rows(self) -> tf.Tensor:
        return tf.stack([copy.read_value() for copy in self.copies])

    def assign_rows(self, rows: Any) -> None:
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
        if self.is_identical:
            dealt = tf.broadcast_to(stored[:1], shape)
        else:
            # The total is still to be sent, by any replica.
            part = tf.reduce_sum(stored, axis=0, keepdims=True) / ranks
            same = tf.equal(tf.shape(stored)[0], ranks)
            dealt = tf.cond(same, lambda: stored, lambda: tf.broadcast_to(part, shape))
            dealt = tf.ensure_shape(dealt, shape)
        return tf.group(*(copy.assign(dealt[i]) for i, copy in enumerate(self.copies)))
