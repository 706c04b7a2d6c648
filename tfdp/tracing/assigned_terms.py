"""Arguments of a step that may be variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

VARIABLES = (keras.Variable, tf.Variable)


def as_tensors(given: Iterable[Any]) -> list[Any]:
    """`given`, with the values of variables; other elements are unchanged."""
    return [
        tf.convert_to_tensor(one) if isinstance(one, VARIABLES) else one
        for one in given
    ]
