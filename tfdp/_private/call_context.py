"""What Keras knows while it calls layers: whether it trains, and what a caller said.

A layer that is not told whether it trains asks for it here. Keras keeps one context for
each thread and each call from outside; layers within write into it as they are called.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from tfdp._private.keras_attributes import keras_attribute
from tfdp._private.names import keras_state

__all__ = ["call_context", "calling_as"]

# What Keras calls it.
ATTRIBUTE = "current_call_ctx"


def call_context() -> Any:
    """The context as it is now, for `calling_as`; None: no layer is being called."""
    return copy.copy(keras_state.get_global_attribute(ATTRIBUTE))


def calling_as(context: Any) -> contextlib.AbstractContextManager[None]:
    """While this lasts layers are called as where `call_context` gave `context`."""
    return keras_attribute(ATTRIBUTE, copy.copy(context))
