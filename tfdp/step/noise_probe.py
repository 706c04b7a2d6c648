"""`NoiseProbe`: squared norms of the gradients of one step, before and after their sum.

With the gradient g_r of each replica (its share of the global mean), n_r of the n rows
on it and m replicas that have any, a replica's own mean gradient is g_r n / n_r, and
the mean of its square over the rows of the batch

    sum_r (n_r / n) |g_r n / n_r|^2 = sum_r (n / n_r) |g_r|^2

which is one number of each replica. It travels with the gradients, in their buckets,
beside a 1 from each replica that has rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp._private.names import make_note
from tfdp.errors import ConfigurationError
from tfdp.step.loss_scale import scale_when_summed
from tfdp.step.observers import attach, detach, observers_of
from tfdp.tracing.run import ReplicaRun

__all__ = ["NoiseProbe", "NormsOfStep", "NormsReader"]


class NormsOfStep(NamedTuple):
    """What `tfdp.plan.noise_scale.split_norms` takes."""

    small: float
    big: float
    parts: float
    rows: float


class NoiseProbe:
    """Notes the norms of the gradients of each step, while it is in use.

    It is in the graphs that are built while it is attached (`tfdp.step.observers`).
    Callbacks of one training share it, and each reads it by a `NormsReader`.

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
        #: How many read it.
        self.readers = 0
        self._last: tuple[ReplicaRun, set[int]] | None = None

    def is_about(self, variables: Sequence[Any]) -> bool:
        """Whether these gradients are the model's: a step may have other variables."""
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

    @property
    def steps(self) -> int:
        """How many were noted."""
        return int(self._counts[0].numpy())

    def norms(self, steps: Iterable[int]) -> list[NormsOfStep]:
        """The norms of these, counted from 0, of the last ones."""
        note = self._notes[0].numpy()
        return [NormsOfStep(*note[step % len(note)].tolist()) for step in steps]

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


class NormsReader:
    """Reads the norms of the steps of one `fit`.

    Args:
      model: it gets a probe, or shares the one that it has.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        probes = observers_of(model, NoiseProbe)
        if not probes:
            probes = [
                NoiseProbe(
                    model.optimizer,
                    model.trainable_variables,
                    len(model.distribute_strategy.extended.worker_devices),
                    model.steps_per_execution,
                )
            ]
            attach(model, probes[0])
        self._probe = probes[0]
        self._probe.readers += 1
        self.skip()

    def skip(self) -> None:
        """Leaves out the steps that ran so far: of another `fit` of the model."""
        self._read = self._probe.steps

    def read(self) -> list[NormsOfStep]:
        """The norms of each step that ran since then."""
        steps = range(self._read, self._probe.steps)
        self._read = steps.stop
        return self._probe.norms(steps)

    def close(self) -> None:
        """Reads no more; steps that are built then note nothing for it."""
        self._probe.readers -= 1
        if not self._probe.readers:
            detach(self._model, self._probe)


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
