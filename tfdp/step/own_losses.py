"""What layers give `add_loss`, kept apart by replica.

Keras keeps the losses of a layer in one list, which a model clears when it is called.
In eager mode replicas take turns wherever they sum something, such as the statistics of
synchronised batch normalization: one would clear the losses that another has added, or
count them as its own.

A layer may give a value for each row. Keras' trainer adds these up, so that each
replica has a part of their sum, which is its share of the loss already.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, MutableSequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.instance_attributes import instance_attributes
from tfdp._private.keras_models import ADD_UP, LOSSES, layers_within
from tfdp._private.names import current_rank
from tfdp.tracing.loss_shares import Standing
from tfdp.tracing.loss_suspicions import are_values_of_rows, suspect_added_sum
from tfdp.tracing.run import ReplicaRun, trace_of

__all__ = ["own_losses"]


class OwnLosses(MutableSequence):
    """A list for each trace of a run, used as the calling replica's own."""

    def __init__(self) -> None:
        self._by_trace: dict[int, list[Any]] = {}

    @property
    def _own(self) -> list[Any]:
        return self._by_trace.setdefault(trace_of(current_rank()), [])

    def __getitem__(self, place: Any) -> Any:
        return self._own[place]

    def __setitem__(self, place: Any, loss: Any) -> None:
        self._own[place] = loss

    def __delitem__(self, place: Any) -> None:
        del self._own[place]

    def __len__(self) -> int:
        return len(self._own)

    def insert(self, place: int, loss: Any) -> None:
        """As `list.insert`, and with it `append` and `extend`."""
        self._own.insert(place, loss)


@contextlib.contextmanager
def own_losses(model: Any, run: ReplicaRun) -> Iterator[None]:
    """While this lasts, each replica has its own losses of the layers of `model`."""
    with contextlib.ExitStack() as stack:
        if isinstance(model, keras.Model) and run.replicas > 1:
            for layer in layers_within(model):
                led: dict[str, Any] = {LOSSES: OwnLosses()}
                if isinstance(layer, keras.Model):
                    led[ADD_UP] = functools.partial(_add_up, layer, run)
                stack.enter_context(instance_attributes(layer, led))
        yield


def _add_up(model: keras.Model, run: ReplicaRun, loss: Any) -> Any:
    """The number that `model` makes of what a layer gave `add_loss`."""
    rank, given = current_rank(), tf.convert_to_tensor(loss)
    shares = run.shares[trace_of(rank)]
    if shares.standing_of(given) is Standing.LOCAL:
        shapes = {tuple(weight.shape) for weight in model.trainable_weights}
        if given.shape.rank != 0 and are_values_of_rows(run, rank, given, shapes):
            if not given.dtype.is_floating:
                given = tf.cast(given, keras.config.floatx())
            loss = tf.reduce_sum(given) * shares.factor(1.0, given.dtype)
        else:
            suspect_added_sum(run, rank, given)
    return getattr(type(model), ADD_UP)(model, loss)
