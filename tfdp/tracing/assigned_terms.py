"""What is assigned to a variable, read from the graph: its own value plus a term?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdp.tracing.replica_invariance import outermost

__all__ = ["is_read_among", "term_added_to"]

SAME_VALUE = {"Cast", "Identity"}


def term_added_to(handle: tf.Tensor, value: tf.Tensor) -> tf.Tensor | None:
    """d, where `value` is what the variable of `handle` holds, plus d; else None."""
    if value.op.type not in ("AddV2", "Add"):
        return None
    first, second = value.op.inputs
    if _is_read_of(handle, first):
        return second
    return first if _is_read_of(handle, second) else None


def is_read_among(handle: tf.Tensor, values: Iterable[Any]) -> bool:
    """Whether one of the values is what the variable of `handle` holds."""
    return any(_is_read_of(handle, value) for value in values)


def _is_read_of(handle: tf.Tensor, value: tf.Tensor) -> bool:
    tensor = outermost(value)
    while tensor is not None and not isinstance(tensor, tf.__internal__.EagerTensor):
        if tensor.op.type == "ReadVariableOp":
            return outermost(tensor.op.inputs[0]) is handle
        if tensor.op.type not in SAME_VALUE:
            return False
        tensor = outermost(tensor.op.inputs[0])
    return False
