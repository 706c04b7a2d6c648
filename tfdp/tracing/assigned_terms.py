"""Recognizes assignments of the form `variable += term` in a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import own_copy
from tfdp.tracing.replica_invariance import graph_tensors, outermost

VARIABLES = (keras.Variable, tf.Variable)
SAME_VALUE = {"Cast", "Identity"}
# Ops that pass a variable's value on, scaled or added to others.
LINEAR = {
    *("AddN", "AddV2", "Cast", "Identity", "IdentityN", "Mul", "Neg", "RealDiv"),
    *("Reshape", "SelectV2", "Sub"),
}


def as_tensors(given: Iterable[Any]) -> list[Any]:
    """`given`, with the values of variables; other elements are unchanged."""
    return [
        tf.convert_to_tensor(one) if isinstance(one, VARIABLES) else one
        for one in given
    ]


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


def is_read_among(handle: tf.Tensor, values: Iterable[Any]) -> bool:
    """Whether one of the values is a read of the variable of `handle`."""
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


def handles_of(variables: Iterable[Any], rank: int) -> dict[int, int]:
    """The ids of distributed `variables`, by the ids of their handles on `rank`."""
    return {id(outermost(own_copy(v, rank).handle)): id(v) for v in variables}


def linear_sources(values: Iterable[Any], handles: Mapping[int, int]) -> set[int]:
    """The ids of the variables (of `handles`, see `handles_of`) that `values`, such as
    gradients that a step has accumulated itself, are linear in."""
    if not handles:
        return set()
    found: set[Any] = set()
    todo = tf.nest.flatten(list(values), expand_composites=True)
    for tensor in graph_tensors(todo):
        if tensor.op.type == "ReadVariableOp":
            found.add(handles.get(id(outermost(tensor.op.inputs[0]))))
        elif tensor.op.type in LINEAR:
            todo += tensor.op.inputs
    return found - {None}
