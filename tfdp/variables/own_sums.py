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

import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp._private.names import MirroredVariable, PerReplica, in_save_context
from tfdp.errors import CheckpointWarning
from tfdp.variables.mirrored import ReplicaMirroredVariable

__all__ = ["OwnSumVariable", "OwnSums"]


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
