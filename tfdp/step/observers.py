"""Observers that callbacks attach to the training steps of a model.

They are stored with the model, so that a `fit` of another model, within a callback or
in another thread, has its own. A step uses its model's observers when it is traced.
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
from tfdp.seams.replace import note_on
from tfdp.step.batch_first import tensors_of_this_graph
from tfdp.step.guard_notes import scale_when_summed
from tfdp.tracing.run import ReplicaRun

OBSERVERS = "_tfdp_observers"

Kind = TypeVar("Kind")


def attach(model: keras.Model, observer: Any) -> None:
    """Adds `observer` to steps of `model` that are traced from now on."""
    note_on(model, OBSERVERS, [*observers_of(model, object), observer])


def detach(model: keras.Model, observer: Any) -> None:
    """Removes `observer` from steps of `model` that are traced from now on."""
    others = [one for one in observers_of(model, object) if one is not observer]
    note_on(model, OBSERVERS, others)


def observers_of(model: Any, kind: type[Kind]) -> list[Kind]:
    """The observers of one kind, in the order of attachment."""
    attached = getattr(model, "__dict__", {}).get(OBSERVERS, ())
    return [one for one in attached if isinstance(one, kind)]


class StepMeter:
    """Counts samples and steps of training, in graphs traced while it is attached and
    in eager steps, and records when batches arrived."""

    def __init__(self) -> None:
        self._samples, self._eager_samples = make_counter(), 0
        self._steps, self._eager_steps = make_counter(), 0
        self._arrived = make_note(0.0, tf.float64)
        self._is_known = True

    @property
    def samples(self) -> int | None:
        """Of all steps so far, in this process; None: unknown for a step."""
        if not self._is_known:
            return None
        return self._eager_samples + int(self._samples.numpy())

    @property
    def steps(self) -> int:
        return self._eager_steps + int(self._steps.numpy())

    @property
    def arrived_seconds(self) -> float | None:
        """When the last step's batch arrived, in seconds since 1970; None: unknown."""
        return float(self._arrived.numpy()) or None

    def note(self, rows: Any, given: Any) -> None:
        """Called when a step is traced, or made eagerly; `rows` may be unknown
        (None)."""
        self._is_known = self._is_known and rows is not None
        if tf.executing_eagerly():
            self._eager_steps += 1
            self._eager_samples += 0 if rows is None else int(rows)
            return
        count_in_graph(self._steps, tf.constant(1, tf.int64))
        if rows is not None:
            count_in_graph(self._samples, tf.cast(rows, tf.int64))
        batch = tensors_of_this_graph(given)
        if batch:
            note_in_graph(self._arrived, time_in_graph(batch))


class NormsOfStep(NamedTuple):
    """The arguments of `tfdp.plan.noise_scale.split_norms`."""

    small: float
    big: float
    parts: float
    rows: float


class NoiseProbe:
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
        self._last: tuple[ReplicaRun, set[int]] | None = None

    def is_about(self, variables: Sequence[Any]) -> bool:
        own = set(map(id, self._variables))
        return any(id(variable) in own for variable in variables)

    def before(
        self, gradients: Sequence[Any], run: ReplicaRun, rank: int
    ) -> list[tf.Tensor]:
        """The values to sum over the replicas with the gradients."""
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
        # A replica without rows may have computed on a dummy row.
        share = tf.where(own > 0, share, 0.0)
        return [tf.stack([share, tf.cast(own > 0, tf.float32)])]

    def after(
        self, gradients: Sequence[Any], sums: tf.Tensor, run: ReplicaRun, rank: int
    ) -> None:
        """Records the norm of the summed gradients and the sums of `before`."""
        big = squared_norm(gradients, self._inverse_scale())
        rows = tf.cast(run.total_of(rank), tf.float32)
        note, count = self._notes[rank], self._counts[rank]
        with tf.device("CPU:0"):
            place = tf.convert_to_tensor(count) % note.shape[0]
            row = tf.stack([sums[0], big, sums[1], rows])
            note.scatter_nd_update(place[None, None], row[None])
            count.assign_add(1)

    def notes_of(self, rank: int) -> list[tf.Variable]:
        return [self._notes[rank], self._counts[rank]]

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

    def _refuse_second(self, run: ReplicaRun, rank: int) -> None:
        if self._last is None or self._last[0] is not run:
            self._last = run, set()
        if rank in self._last[1]:
            raise ConfigurationError(
                "GradientNoiseScale found two sums of gradients in one step (two "
                "optimizers, or an optimizer that is applied twice), so that "
                "the gradient is ambiguous. Leave the callback out."
            )
        self._last[1].add(rank)


class NormsReader:
    """Reads the norms of the steps of one `fit`, from the model's (or a new) probe."""

    def __init__(self, model: keras.Model):
        self._model = model
        probes = observers_of(model, NoiseProbe)
        if not probes:
            replicas = len(model.distribute_strategy.extended.worker_devices)
            optimizer, steps = model.optimizer, model.steps_per_execution
            probes = [NoiseProbe(optimizer, model.trainable_variables, replicas, steps)]
            attach(model, probes[0])
        self._probe = probes[0]
        self._probe.readers += 1
        self.skip()

    def skip(self) -> None:
        """Skips the steps so far: those of another `fit` of the model."""
        self._read = self._probe.steps

    def read(self) -> list[NormsOfStep]:
        steps = range(self._read, self._probe.steps)
        self._read = steps.stop
        return self._probe.norms(steps)

    def close(self) -> None:
        """Stops reading; the last reader detaches the probe."""
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
            value = value * factor  # before squaring, which might overflow
        total += tf.reduce_sum(tf.square(value))
    return total
