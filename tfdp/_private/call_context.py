"""What Keras knows while it calls layers: whether it trains, and what a caller said.

A layer that is not told whether it trains asks for it here. Keras keeps one context for
each thread and each call from outside; layers within write into it as they are called.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from tfdp._private.names import keras_state

__all__ = ["call_context", "calling_as"]

# What Keras calls it.
ATTRIBUTE = "current_call_ctx"


def call_context() -> Any:
    """The context as it is now, for `calling_as`; None: no layer is being called."""
    return copy.copy(keras_state.get_global_attribute(ATTRIBUTE))


@contextlib.contextmanager
def calling_as(context: Any) -> Iterator[None]:
    """While this lasts layers are called as where `call_context` gave `context`."""
    outside = keras_state.get_global_attribute(ATTRIBUTE)
    keras_state.set_global_attribute(ATTRIBUTE, copy.copy(context))
    try:
        yield
    finally:
        keras_state.set_global_attribute(ATTRIBUTE, outside)
