"""Whether a value is the same on every replica, told from the graph that makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Below a name scope that begins so, and by operations with such a name, exchanges are
# built.
EXCHANGE_SCOPE = "tfdp_"
# The names of the operations by which a replica has the rows of all, and takes its own
# of them. Where replicas hand rows over, those of one are in its graph as they are.
GATHERED_ROWS, OWN_ROWS = "gathered_rows_of_all", "own_rows_of_all"
# Counters are a handful of ops away from their variable; give up beyond that.
MOST_OPS = 64


def is_same_on_every_replica(value: tf.Tensor, own_variable: Any) -> bool:
    """Whether `value` is made of constants and `own_variable` only.

    `own_variable` is the calling replica's component of a variable that is kept the
    same everywhere, so whatever stateless ops make of it is the same as well. Keras
    writes `counter.assign(counter + 1)`; without this each step would broadcast it.

    Args:
      value: a tensor of the graph being built.
      own_variable: the component of this replica.

    Returns:
      False also when it cannot be told.
    """
    seen: set[int] = set()
    todo = [value]
    own_handle = outermost(own_variable.handle)
    while todo:
        tensor = outermost(todo.pop())
        if tensor is None:
            return False
        if tensor is own_handle or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if len(seen) > MOST_OPS or isinstance(tensor, tf.__internal__.EagerTensor):
            return False
        op = tensor.op
        if op.type == "ReadVariableOp" or not op.op_def.is_stateful:
            todo.extend(op.inputs)
            if op.type == "Placeholder":
                return False
        else:
            return False
    return True


def is_exchanged(tensor: tf.Tensor) -> bool:
    """Whether `tensor` is made within an exchange.

    Where replicas hand tensors over, one of them adds: only in its graph the sum is
    seen to be made of that replica's own tensor.
    """
    scopes = tensor.op.name.split("/")
    return any(scope.startswith(EXCHANGE_SCOPE) for scope in scopes)


def is_named(tensor: tf.Tensor, name: str) -> bool:
    """Whether `tensor` is made by an operation of that name, whatever its number."""
    return bool(tensor.op.name.split("/")[-1].startswith(name))


def outermost(
    tensor: tf.Tensor, is_found: Callable[[tf.Tensor], bool] = lambda tensor: False
) -> tf.Tensor | None:
    """The tensor that an inner graph captured, followed outwards; None: an argument.

    Args:
      tensor: where to begin.
      is_found: ends the way at an argument that is looked for.
    """
    while not isinstance(tensor, tf.__internal__.EagerTensor):
        if tensor.op.type != "Placeholder" or is_found(tensor):
            return tensor
        captures = getattr(tensor.graph, "captures", ())
        outer = next((o for o, inner in captures if inner is tensor), None)
        if outer is None:
            return None
        tensor = outer
    return tensor
