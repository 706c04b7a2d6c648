"""What the callbacks beside one another may be, and which of them comes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdp._private.keras_fit import callbacks_around
from tfdp.errors import ConfigurationError


class BeforeOthers(keras.callbacks.Callback):
    """The first of all callbacks.

    Args:
      function: called when an epoch begins, before the others hear of it.
    """

    def __init__(self, function: Callable[[], None]):
        super().__init__()
        self._function = function

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Calls it."""
        self._function()


def refuse_others(
    callback: keras.callbacks.Callback,
    kinds: tuple[type[keras.callbacks.Callback], ...],
    what: str,
    *,
    of_strategy: bool = False,
) -> None:
    """Refuses another callback that would act on the same thing.

    Args:
      callback: of a `fit` that begins.
      kinds: of the others, in this `fit` and in those of the model in which it runs.
      what: both would do, in words.
      of_strategy: also in those of other models under the same strategy.

    Raises:
      ConfigurationError: there is one.
    """
    strategy = callback.model.distribute_strategy
    for other in callbacks_around(None if of_strategy else callback.model):
        if other is callback or not isinstance(other, kinds):
            continue
        if other.model.distribute_strategy is strategy:
            raise ConfigurationError(
                f"Two callbacks of this fit would {what}, and overwrite each other: "
                f"{type(callback).__name__} and {type(other).__name__}. "
                "Leave one of them out."
            )
