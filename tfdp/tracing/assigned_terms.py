"""What is assigned to a variable, read from the graph: its own value plus a term?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import own_copy
from tfdp.tracing.replica_invariance import outermost

VARIABLES = (keras.Variable, tf.Variable)
SAME_VALUE = {"Cast", "Identity"}
# What passes a variable's value on, times a factor or beside others.
LINEAR = {
    *("AddN", "AddV2", "Cast", "Identity", "IdentityN", "Mul", "Neg", "RealDiv"),
    *("Reshape", "SelectV2", "Sub"),
}


def as_tensors(given: Iterable[Any]) -> list[Any]:
    """Gradients, or numbers; of a variable, which may be one, what it holds."""
    return [
        tf.convert_to_tensor(one) if isinstance(one, VARIABLES) else one
        for one in given
    ]


def term_added_to(handle: tf.Tensor, value: tf.Tensor) -> tf.Tensor | None:
    """d, where `value` is what the variable of `handle` holds, plus d; else None."""
    if value.op.type not in ("AddV2", "Add"):
        return None
    first, second = value.op.inputs
    if _is_read_of(handle, first):
        return second
    return first if _is_read_of(handle, second) else None


def change_of(handle: tf.Tensor, value: tf.Tensor) -> tf.Tensor | None:
    """d, where `value` is what the variable of `handle` holds, plus d or less -d.

    In the type of `value`, to which Keras casts such a sum of another one.
    """
    tensor = value
    while tensor.op.type in SAME_VALUE:
        (tensor,) = tensor.op.inputs
    change = term_added_to(handle, tensor)
    if change is None and tensor.op.type == "Sub":
        before, taken = tensor.op.inputs
        if _is_read_of(handle, before):
            change = tf.zeros_like(taken) - taken  # also of types without a sign
    return None if change is None else tf.cast(change, value.dtype)


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


def handles_of(variables: Iterable[Any], rank: int) -> dict[int, int]:
    """By the ids of their handles, the ids of distributed `variables`.

    Args:
      variables: what is looked for by `passed_on`.
      rank: the replica that reads them.
    """
    return {id(outermost(own_copy(v, rank).handle)): id(v) for v in variables}


def passed_on(values: Iterable[Any], handles: Mapping[int, int]) -> set[int]:
    """The ids of the variables that hold what `values` are, but for a factor.

    Args:
      values: of a graph, such as gradients that a step has accumulated itself.
      handles: of the variables that may; see `handles_of`.
    """
    if not handles:
        return set()
    found, seen = set(), set()
    todo = tf.nest.flatten(list(values), expand_composites=True)
    while todo:
        tensor = outermost(todo.pop())
        if tensor is None or isinstance(tensor, tf.__internal__.EagerTensor):
            continue
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if tensor.op.type == "ReadVariableOp":
            found.add(handles.get(id(outermost(tensor.op.inputs[0]))))
        elif tensor.op.type in LINEAR:
            todo += tensor.op.inputs
    return {one for one in found if one is not None}
