"""Squared norms of gradients, before and after their sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import make_note
from tfdp.chain.reduction import Reduction, Stage, scale_when_summed
from tfdp.errors import ConfigurationError
from tfdp.exchange.sparse import values_once
from tfdp.plan.noise_scale import NormsOfStep
from tfdp.tracing.step import Step


class NoiseProbe(Stage):
    """Records squared norms of gradients of each step, before and after their sum.

    With the gradient g_r of each replica (its share of the global mean) and n_r of the
    n rows on it, a replica's own mean gradient is g_r n / n_r, and the mean of its
    square over the rows of the batch is

        sum_r (n_r / n) |g_r n / n_r|^2 = sum_r (n / n_r) |g_r|^2

    Each replica adds its term, and a 1 if it has rows, to the buckets of the gradients.
    Applies to graphs traced while it is attached; the callbacks of one training share
    it, each with a `NormsReader`. `steps` is the most steps between two readings.

    Cost: two passes over the gradients of a replica, two more numbers in a bucket.
    """

    def __init__(
        self, optimizer: Any, variables: Sequence[Any], replicas: int, steps: int
    ):
        self._optimizer = optimizer
        self._variables = list(variables)
        # All replicas record the same, and one is read: with different graphs
        # TensorFlow might order products differently, and weights would diverge.
        self._notes = [
            make_note(tf.zeros([steps, 4]), tf.float32) for _ in range(replicas)
        ]
        self._counts = [make_note(0, tf.int64) for _ in range(replicas)]
        #: The number of readers.
        self.readers = 0
        self._last: tuple[Step, set[int]] | None = None

    def is_about(self, variables: Sequence[Any]) -> bool:
        own = set(map(id, self._variables))
        return any(id(variable) in own for variable in variables)

    def before(self, reduction: Reduction) -> None:
        step, rank = reduction.step, reduction.rank
        self._refuse_second(step, rank)
        total = step.total_of(rank)
        if total is None:
            raise ConfigurationError(
                "GradientNoiseScale needs the number of rows of each replica, and this "
                "step was given no batch."
            )
        own = tf.cast(step.count_of(rank), tf.float32)
        norm = squared_norm(reduction.gradients, self._inverse_scale())
        share = norm * tf.math.divide_no_nan(tf.cast(total, tf.float32), own)
        # A replica without rows may have computed on a dummy row.
        share = tf.where(own > 0, share, 0.0)
        reduction.riders.append(tf.stack([share, tf.cast(own > 0, tf.float32)]))

    def after(self, reduction: Reduction) -> None:
        step, rank = reduction.step, reduction.rank
        [sums] = reduction.take_riders(1)
        reduction.will_store([self._notes[rank], self._counts[rank]])
        big = squared_norm(reduction.gradients, self._inverse_scale())
        rows = tf.cast(step.total_of(rank), tf.float32)
        note, count = self._notes[rank], self._counts[rank]
        with tf.device("CPU:0"):
            place = tf.convert_to_tensor(count) % note.shape[0]
            row = tf.stack([sums[0], big, sums[1], rows])
            note.scatter_nd_update(place[None, None], row[None])
            count.assign_add(1)

    @property
    def steps(self) -> int:
        return int(self._counts[0].numpy())

    def norms(self, steps: Iterable[int]) -> list[NormsOfStep]:
        """The norms of recent steps, numbered from 0."""
        note = self._notes[0].numpy()
        return [NormsOfStep(*note[step % len(note)].tolist()) for step in steps]

    def _inverse_scale(self) -> tf.Tensor | None:
        scale = scale_when_summed(self._optimizer)
        return None if scale is None else 1.0 / tf.cast(scale, tf.float32)

    def _refuse_second(self, step: Step, rank: int) -> None:
        if self._last is None or self._last[0] is not step:
            self._last = step, set()
        if rank in self._last[1]:
            raise ConfigurationError(
                "GradientNoiseScale found two sums of gradients in one step (two "
                "optimizers, or an optimizer that is applied twice), so that "
                "the gradient is ambiguous. Leave the callback out."
            )
        self._last[1].add(rank)


def squared_norm(gradients: Sequence[Any], factor: tf.Tensor | None) -> tf.Tensor:
    """The squared norm of all gradients together, each times `factor`."""
    total = tf.zeros([])
    for gradient in gradients:
        if gradient is None:
            continue
        # The gradient of a row is the sum of its slices.
        value = tf.cast(values_once(gradient), tf.float32)
        if factor is not None:
            value = value * factor  # before squaring, which might overflow
        total += tf.reduce_sum(tf.square(value))
    return total
