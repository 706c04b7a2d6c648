"""What layers give `add_loss`, kept apart by replica.

Keras keeps the losses of a layer in one list, which a model clears when it is called.
In eager mode replicas take turns wherever they sum something, such as the statistics of
synchronised batch normalization: one would clear the losses that another has added, or
count them as its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableSequence
from typing import Any

import keras

from tfdp._private.instance_attributes import instance_attributes
from tfdp._private.keras_models import LOSSES, layers_within
from tfdp._private.names import current_rank
from tfdp.tracing.run import trace_of

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
def own_losses(model: Any) -> Iterator[None]:
    """While this lasts, each replica has its own losses of the layers of `model`."""
    with contextlib.ExitStack() as stack:
        if isinstance(model, keras.Model):
            for layer in layers_within(model):
                stack.enter_context(instance_attributes(layer, {LOSSES: OwnLosses()}))
        yield
