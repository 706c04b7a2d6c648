"""Observers that callbacks attach to the training steps of a model.

They are stored with the model, so that a `fit` of another model, within a callback or
in another thread, has its own. A step uses its model's observers when it is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfdp._private.names import (
    count_in_graph,
    make_counter,
    make_note,
    note_in_graph,
    time_in_graph,
)
from tfdp.chain.reduction import Stage
from tfdp.seams.replace import note_on
from tfdp.step.batch_first import tensors_of_this_graph

OBSERVERS = "_tfdp_observers"

Kind = TypeVar("Kind")


def attach(model: keras.Model, observer: Any) -> Callable[[], None]:
    """Adds `observer` to steps of `model` that are traced from now on; the function
    that it returns removes it."""
    note_on(model, OBSERVERS, [*observers_of(model, object), observer])
    return functools.partial(detach, model, observer)


def detach(model: keras.Model, observer: Any) -> None:
    """Removes `observer` from steps of `model` that are traced from now on."""
    others = [one for one in observers_of(model, object) if one is not observer]
    note_on(model, OBSERVERS, others)


def observers_of(model: Any, kind: type[Kind]) -> list[Kind]:
    """The observers of one kind, in the order of attachment."""
    attached = getattr(model, "__dict__", {}).get(OBSERVERS, ())
    return [one for one in attached if isinstance(one, kind)]


def forget_failed_fit(model: keras.Model) -> None:
    """Detaches the observers that the callbacks of a failed `fit` left."""
    for observer in observers_of(model, object):
        if isinstance(observer, Stage):
            observer.forget_fit()
        detach(model, observer)


class StepMeter:
    """Counts samples and steps of training while it is attached, and records when
    batches arrived."""

    def __init__(self) -> None:
        self._samples, self._steps = make_counter(), make_counter()
        self._arrived = make_note(0.0, tf.float64)
        self._is_known = True

    @property
    def samples(self) -> int | None:
        """Samples of all steps so far, in this process; None: unknown for a step."""
        if not self._is_known:
            return None
        return int(self._samples.numpy())

    @property
    def steps(self) -> int:
        return int(self._steps.numpy())

    @property
    def arrived_seconds(self) -> float | None:
        """Arrival of the last step's batch, in seconds since 1970; None: unknown."""
        return float(self._arrived.numpy()) or None

    def note(self, rows: Any, given: Any) -> None:
        """Counts a step where it is traced, or made; `rows` may be unknown (None)."""
        self._is_known = self._is_known and rows is not None
        count_in_graph(self._steps, tf.constant(1, tf.int64))
        if rows is not None:
            count_in_graph(self._samples, tf.cast(rows, tf.int64))
        batch = tensors_of_this_graph(given)
        if batch:
            note_in_graph(self._arrived, time_in_graph(batch))
