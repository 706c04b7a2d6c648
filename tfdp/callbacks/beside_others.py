"""What the callbacks beside a `Checkpoint` may be, and who is asked before them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras

from tfdp.errors import ConfigurationError

__all__ = ["BeforeOthers", "refuse_other_keepers"]


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


def refuse_other_keepers(
    others: Iterable[keras.callbacks.Callback], kind: type[keras.callbacks.Callback]
) -> None:
    """Refuses a second callback that would give the same training back.

    Raises:
      ConfigurationError: there is one.
    """
    for other in others:
        if isinstance(other, keras.callbacks.BackupAndRestore | kind):
            raise ConfigurationError(
                f"Two callbacks of this fit would restore the training, and overwrite "
                f"each other: tfdp.callbacks.Checkpoint and {type(other).__name__}. "
                "Leave one of them out."
            )
