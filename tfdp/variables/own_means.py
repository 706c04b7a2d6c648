"""What replicas have stored each for itself, which outside is their mean.

Moving statistics are brought together with the gradients, or before these are
accumulated, and what a step stores behind its update at its end. What eager replicas
and TPU cores store behind it is not. Who reads it (a file, a callback) gets the mean,
in the place of the first replica's.

On several hosts that is the mean of one of them, and a warning says so.
"""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from tfdp._private.checkpoint_hooks import checkpoint_unless_hooked
from tfdp._private.names import MirroredVariable, in_save_context
from tfdp.errors import CheckpointWarning

__all__ = ["OwnMeans"]


class OwnMeans(MirroredVariable):
    """A mirrored variable of which replicas may have values of their own; a mixin."""

    #: Whether replicas assign floats of their own.
    _is_mean_of_own = False

    def note_own(self) -> None:
        """From now on what is read outside of replicas is the mean of the copies."""
        if not self._is_mean_of_own:
            self._is_mean_of_own = True
            checkpoint_unless_hooked(self, self._mean, self.assign)

    def _get(self) -> Any:
        # Outside all scopes TensorFlow has a replica context, too: another strategy's.
        context = tf.distribute.get_replica_context()
        is_own = context is not None and context.strategy is self.distribute_strategy
        return super()._get() if is_own or not self._is_read_as_mean() else self._mean()

    def _get_cross_replica(self) -> tf.Tensor:
        return self._mean() if self._is_read_as_mean() else super()._get_cross_replica()

    def _is_read_as_mean(self) -> bool:
        # Graphs are built of one copy, as they may be compiled for one device.
        is_in_graph = in_save_context() or not tf.executing_eagerly()
        return self._is_mean_of_own and not is_in_graph

    def _mean(self) -> tf.Tensor:
        own = [copy.read_value() for copy in self.values]
        first = own[0].numpy().tobytes()
        if all(value.numpy().tobytes() == first for value in own[1:]):
            return own[0]  # the mean of what is alike may be rounded
        self._warn_of_a_part()
        with tf.device(self.values[0].device):
            total = tf.add_n([tf.cast(value, tf.float64) for value in own])
            return tf.cast(total / len(own), self.dtype)

    def _warn_of_a_part(self) -> None:
        hosts = self.distribute_strategy.hosts
        if hosts > 1:
            warnings.warn(
                f"{self.name.split(':')[0]!r} is read, or written to a file, while "
                "each replica has a value of its own, stored behind the step's update: "
                f"this is the mean of those of one of {hosts} hosts. Store it before "
                "the update, or run the step in a graph (run_eagerly=False).",
                CheckpointWarning,
                stacklevel=2,
            )
