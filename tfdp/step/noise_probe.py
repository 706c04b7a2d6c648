"""`NoiseProbe`: squared norms of the gradients of one step, before and after their sum.

With the gradient g_r of each replica (its share of the global mean), n_r of the n rows
on it and m replicas that have any, a replica's own mean gradient is g_r n / n_r, and
the mean of its square over the rows of the batch

    sum_r (n_r / n) |g_r n / n_r|^2 = sum_r (n / n_r) |g_r|^2

which is one number of each replica. It travels with the gradients, in their buckets,
beside a 1 from each replica that has rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp._private.names import make_note
from tfdp.errors import ConfigurationError
from tfdp.step.loss_scale import scale_when_summed
from tfdp.tracing.run import ReplicaRun

__all__ = ["NoiseProbe", "NormsOfStep"]


class NormsOfStep(NamedTuple):
    """What `tfdp.plan.noise_scale.split_norms` takes."""

    small: float
    big: float
    parts: float
    rows: float


class NoiseProbe:
    """Notes the norms of the gradients of each step, while it is in use.

    It is of the graphs that are built while a strategy's extended has it as
    `noise_probe`.

    Args:
      optimizer: the model's own; tells by what the loss was scaled.
      variables: of the model. The gradients of others are not looked at.
      replicas: of this process.
      steps: that run between two readings, at most.

    Cost: two passes over the gradients of a replica, two more numbers in a bucket.
    """

    def __init__(
        self, optimizer: Any, variables: Sequence[Any], replicas: int, steps: int
    ):
        self._optimizer = optimizer
        self._variables = list(variables)
        # All replicas note alike, and one is read: with other graphs TensorFlow might
        # order their products otherwise, and their weights would drift apart.
        self._notes = [
            make_note(tf.zeros([steps, 4]), tf.float32) for _ in range(replicas)
        ]
        self._counts = [make_note(0, tf.int64) for _ in range(replicas)]
        self._read = 0
        self._last: tuple[ReplicaRun, set[int]] | None = None

    def is_about(self, variables: Sequence[Any]) -> bool:
        """Whether these gradients are the model's: an interrupted `fit` leaves the
        probe where it is, and another model may train next."""
        own = set(map(id, self._variables))
        return any(id(variable) in own for variable in variables)

    def before(
        self, gradients: Sequence[Any], run: ReplicaRun, rank: int
    ) -> list[tf.Tensor]:
        """What to sum over the replicas with the gradients.

        Raises:
          ConfigurationError: at the second sum of gradients in one step, or without a
            batch.
        """
        self._refuse_second(run, rank)
        total = run.total_of(rank)
        if total is None:
            raise ConfigurationError(
                "GradientNoiseScale needs the number of rows of each replica, and this "
                "step was given no batch."
            )
        own = tf.cast(run.count_of(rank), tf.float32)
        norm = squared_norm(gradients, self._inverse_scale())
        share = norm * tf.math.divide_no_nan(tf.cast(total, tf.float32), own)
        # A replica without rows may have computed on a borrowed one.
        share = tf.where(own > 0, share, 0.0)
        return [tf.stack([share, tf.cast(own > 0, tf.float32)])]

    def after(
        self, gradients: Sequence[Any], sums: tf.Tensor, run: ReplicaRun, rank: int
    ) -> None:
        """Notes the norm of the summed gradients beside the sums of `before`."""
        big = squared_norm(gradients, self._inverse_scale())
        rows = tf.cast(run.total_of(rank), tf.float32)
        note, count = self._notes[rank], self._counts[rank]
        with tf.device("CPU:0"):
            place = tf.convert_to_tensor(count) % note.shape[0]
            row = tf.stack([sums[0], big, sums[1], rows])
            note.scatter_nd_update(place[None, None], row[None])
            count.assign_add(1)

    def notes_of(self, rank: int) -> list[tf.Variable]:
        """What `after` changes."""
        return [self._notes[rank], self._counts[rank]]

    def read(self) -> list[NormsOfStep]:
        """The norms of each step that ran since they were last read."""
        count, note = int(self._counts[0].numpy()), self._notes[0].numpy()
        places = range(self._read, count)
        self._read = count
        return [NormsOfStep(*note[place % len(note)].tolist()) for place in places]

    def _inverse_scale(self) -> tf.Tensor | None:
        scale = scale_when_summed(self._optimizer)
        return None if scale is None else 1.0 / tf.cast(scale, tf.float32)

    def _refuse_second(self, run: ReplicaRun, rank: int) -> None:
        if self._last is None or self._last[0] is not run:
            self._last = run, set()
        if rank in self._last[1]:
            raise ConfigurationError(
                "GradientNoiseScale found two sums of gradients in one step (two "
                "optimizers, or an optimizer that is applied twice) and cannot tell "
                "which gradient is meant. Leave the callback out."
            )
        self._last[1].add(rank)


def probe_of(variables: Sequence[Any]) -> NoiseProbe | None:
    """What looks at the gradients of `variables`; None in most trainings: nobody."""
    probe = getattr(tf.distribute.get_strategy().extended, "noise_probe", None)
    return probe if probe is not None and probe.is_about(variables) else None


def squared_norm(gradients: Sequence[Any], factor: tf.Tensor | None) -> tf.Tensor:
    """The squared norm of all gradients together, each times `factor`."""
    total = tf.zeros([])
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            # The gradient of a row is the sum of its slices.
            rows, places = tf.unique(gradient.indices)
            gradient = tf.math.unsorted_segment_sum(
                gradient.values, places, tf.size(rows)
            )
        value = tf.cast(gradient, tf.float32)
        if factor is not None:
            value = value * factor  # before it is squared, or it might overflow
        total += tf.reduce_sum(tf.square(value))
    return total
