"""What callbacks attach to the training steps of a model.

Several callbacks may attach an observer each, also of one kind. They are kept with the
model, so that a `fit` of another model, within a callback or in another thread, has its
own. A step takes those of its model when it is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from tfdp._private.names import (
    count_in_graph,
    make_counter,
    make_note,
    note_in_graph,
    time_in_graph,
)
from tfdp.errors import ConfigurationError
from tfdp.step.batch_first import tensors_of_this_graph
from tfdp.step.guard_notes import scale_when_summed
from tfdp.tracing.run import ReplicaRun

OBSERVERS = "_tfdp_observers"

Kind = TypeVar("Kind")


def attach(model: keras.Model, observer: Any) -> None:
    """Steps of `model` that are built from now on have `observer`."""
    # Not by setattr, which would track it as a part of the model.
    vars(model).setdefault(OBSERVERS, []).append(observer)


def detach(model: keras.Model, observer: Any) -> None:
    """Steps of `model` that are built from now on do not have `observer`."""
    others = [one for one in observers_of(model, object) if one is not observer]
    vars(model)[OBSERVERS] = others


def observers_of(model: Any, kind: type[Kind]) -> list[Kind]:
    """Those of one kind that are attached to `model`, the first attached first."""
    attached = getattr(model, "__dict__", {}).get(OBSERVERS, ())
    return [one for one in attached if isinstance(one, kind)]


# `StepMeter`: the samples of training steps, and when their batches were there.


class StepMeter:
    """Looks at the training steps of a model, while it is in use.

    It sees the graphs that are built while it is attached (`tfdp.step.observers`), and
    eager steps.

    Cost: four small ops in a step.
    """

    def __init__(self) -> None:
        self._samples, self._eager_samples = make_counter(), 0
        self._steps, self._eager_steps = make_counter(), 0
        self._arrived = make_note(0.0, tf.float64)
        self._is_known = True

    @property
    def samples(self) -> int | None:
        """Of all steps so far, in this process; None: a step did not tell."""
        if not self._is_known:
            return None
        return self._eager_samples + int(self._samples.numpy())

    @property
    def steps(self) -> int:
        """That were made so far."""
        return self._eager_steps + int(self._steps.numpy())

    @property
    def arrived_seconds(self) -> float | None:
        """When the batch of the last step was there, since 1970; None: not known."""
        return float(self._arrived.numpy()) or None

    def note(self, rows: Any, given: Any) -> None:
        """A step is built, or made.

        Args:
          rows: of this process's replicas; None: not known.
          given: what the step is called with, nested.
        """
        if tf.executing_eagerly():
            self._eager_steps += 1
        else:
            count_in_graph(self._steps, tf.constant(1, tf.int64))
        if rows is None:
            self._is_known = False
        elif tf.executing_eagerly():
            self._eager_samples += int(rows)
        else:
            count_in_graph(self._samples, tf.cast(rows, tf.int64))
        batch = [] if tf.executing_eagerly() else tensors_of_this_graph(given)
        if batch:
            note_in_graph(self._arrived, time_in_graph(batch))


# `NoiseProbe`: squared norms of the gradients of one step, before and after their sum.
#
# With the gradient g_r of each replica (its share of the global mean), n_r of the n
# rows on it and m replicas that have any, a replica's own mean gradient is g_r n / n_r,
# and the mean of its square over the rows of the batch
#
#     sum_r (n_r / n) |g_r n / n_r|^2 = sum_r (n / n_r) |g_r|^2
#
# which is one number of each replica. It travels with the gradients, in their buckets,
# beside a 1 from each replica that has rows.


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
