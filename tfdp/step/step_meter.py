"""`StepMeter`: the samples of training steps, and when their batches were there."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp._private.names import (
    count_in_graph,
    make_counter,
    make_note,
    note_in_graph,
    time_in_graph,
)
from tfdp.step.batch_first import tensors_of_this_graph

__all__ = ["StepMeter"]


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
