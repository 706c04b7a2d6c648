"""What Keras keeps for each thread under names of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tfdp._private.names import keras_state

__all__ = ["keras_attribute"]


@contextlib.contextmanager
def keras_attribute(name: str, value: Any) -> Iterator[None]:
    """While this lasts Keras finds `value` under `name` in this thread."""
    outside = keras_state.get_global_attribute(name)
    keras_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        keras_state.set_global_attribute(name, outside)
