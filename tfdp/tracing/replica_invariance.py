"""Is a value equal on every replica? Answered from the graph that computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

# The prefix of the name scopes, and op names, of exchanges.
EXCHANGE_SCOPE = "tfdp_"
# The names of the ops that gather all replicas' rows, and that take the own rows of
# those. With point-to-point exchanges the sender's rows are in its own graph.
GATHERED_ROWS, OWN_ROWS = "gathered_rows_of_all", "own_rows_of_all"
# Counters are a few ops away from their variable; give up beyond that.
MOST_OPS = 64


def is_same_on_every_replica(value: tf.Tensor, own_variable: Any) -> bool:
    """Whether `value` certainly depends on constants and `own_variable` only, this
    replica's component of a replicated variable: Keras writes
    `counter.assign(counter + 1)`, which each step would broadcast otherwise."""
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


def key_of(tensor: tf.Tensor) -> Any:
    """Identifies a tensor among all of the trace."""
    is_eager = isinstance(tensor, tf.__internal__.EagerTensor)
    return id(tensor) if is_eager else (id(tensor.graph), tensor.name)


def graph_tensors(
    todo: list[tf.Tensor], is_found: Callable[[tf.Tensor], bool] = lambda tensor: False
) -> Iterator[tf.Tensor]:
    """Pops `todo`, to which the caller may add; yields each tensor of a graph once."""
    seen = set()
    while todo:
        tensor = outermost(todo.pop(), is_found)
        if tensor is None or isinstance(tensor, tf.__internal__.EagerTensor):
            continue
        if key_of(tensor) not in seen:
            seen.add(key_of(tensor))
            yield tensor


def is_exchanged(tensor: tf.Tensor) -> bool:
    """Whether `tensor` is computed within an exchange. (In a point-to-point exchange
    the other replicas' graphs do not show their addends.)"""
    scopes = tensor.op.name.split("/")
    return any(scope.startswith(EXCHANGE_SCOPE) for scope in scopes)


def is_named(tensor: tf.Tensor, name: str) -> bool:
    """Whether the op of `tensor` has that name, with any numeric suffix."""
    return bool(tensor.op.name.split("/")[-1].startswith(name))


def outermost(
    tensor: tf.Tensor, is_found: Callable[[tf.Tensor], bool] = lambda tensor: False
) -> tf.Tensor | None:
    """Follows captures outwards to the captured tensor, or to an argument that
    `is_found`; None: it is another argument."""
    while not isinstance(tensor, tf.__internal__.EagerTensor):
        if tensor.op.type != "Placeholder" or is_found(tensor):
            return tensor
        captures = getattr(tensor.graph, "captures", ())
        outer = next((o for o, inner in captures if inner is tensor), None)
        if outer is None:
            return None
        tensor = outer
    return tensor
