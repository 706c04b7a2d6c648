"""Ordering and compatibility of callbacks in one `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import keras

from tfdp._private.keras_fit import callbacks_around
from tfdp.errors import ConfigurationError

Logs: TypeAlias = dict[str, Any] | None


class BeforeOthers(keras.callbacks.Callback):
    """The first of all callbacks: calls `function` at the beginning of each epoch."""

    def __init__(self, function: Callable[[], None]):
        super().__init__()
        self._function = function

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._function()


def refuse_others(
    callback: keras.callbacks.Callback,
    kinds: tuple[type[keras.callbacks.Callback], ...],
    what: str,
    *,
    of_strategy: bool = False,
) -> None:
    """Raises a `ConfigurationError` if another callback acts on the same thing.

    Args:
      callback: of a `fit` that begins.
      kinds: of the others, in this `fit` and in those of the model in which it runs.
      what: both would do, for the message.
      of_strategy: search the fits of all models under the same strategy.
    """
    strategy = callback.model.distribute_strategy
    for other in callbacks_around(None if of_strategy else callback.model):
        if other is callback or not isinstance(other, kinds):
            continue
        if other.model.distribute_strategy is strategy:
            raise ConfigurationError(
                f"Two callbacks of this fit would {what}, and overwrite each other: "
                f"{type(callback).__name__} and {type(other).__name__}. Remove one."
            )
