"""Recognizes assignments of the form `variable += term` in a graph."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.lint.registry import is_of_graph, key_of

SAME_VALUE = {"Cast", "Identity"}


def outermost(tensor: tf.Tensor) -> tf.Tensor | None:
    """Follows captures outwards to the captured tensor; None: it is an argument."""
    while is_of_graph(tensor) and tensor.op.type == "Placeholder":
        captures = getattr(tensor.graph, "captures", ())
        outer = next((o for o, inner in captures if inner is tensor), None)
        if outer is None:
            return None
        tensor = outer
    return tensor


def handle_of(handle: tf.Tensor) -> Any:
    """Identifies a variable in `Value.reads` by its handle, in any graph."""
    found = outermost(handle)
    return key_of(handle if found is None else found)


def term_added_to(handle: tf.Tensor, value: tf.Tensor) -> tf.Tensor | None:
    """d if `value` is the variable of `handle` plus d, else None."""
    if value.op.type not in ("AddV2", "Add"):
        return None
    first, second = value.op.inputs
    if _is_read_of(handle, first):
        return second
    return first if _is_read_of(handle, second) else None


def change_of(handle: tf.Tensor, value: tf.Tensor) -> tf.Tensor | None:
    """d, in its dtype, if `value` is the variable of `handle` plus or minus (-d) it."""
    tensor = value
    while tensor.op.type in SAME_VALUE:
        (tensor,) = tensor.op.inputs
    change = term_added_to(handle, tensor)
    if change is None and tensor.op.type == "Sub":
        before, taken = tensor.op.inputs
        if _is_read_of(handle, before):
            change = tf.zeros_like(taken) - taken  # works for unsigned types
    return None if change is None else tf.cast(change, value.dtype)


def _is_read_of(handle: tf.Tensor, value: tf.Tensor) -> bool:
    tensor: Any = outermost(value)
    while is_of_graph(tensor):
        if tensor.op.type == "ReadVariableOp":
            return outermost(tensor.op.inputs[0]) is handle
        if tensor.op.type not in SAME_VALUE:
            return False
        tensor = outermost(tensor.op.inputs[0])
    return False
