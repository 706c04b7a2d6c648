"""What a loop keeps of its turns, for the backward pass and as its result."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["kept_per_turn", "turns_of"]

# Of these a list holds what is there anyway.
NOT_MADE = frozenset("Const Placeholder ReadVariableOp".split())
# Which input of them is the new item of a list.
NEW_ITEM = {"TensorListPushBack": 1, "TensorListSetItem": 2}


def turns_of(op: Any) -> int | None:
    """How often a `While` turns; None: that is not known before it runs.

    A recurrent layer turns once for each item of the list that its input is cut into.
    """
    most = tf.get_static_value(op.inputs[1]) if len(op.inputs) > 1 else None
    if most is not None and most.ndim == 0 and most > 0:
        return int(most)
    found = []
    for tensor in op.inputs:
        if tensor.op.type == "TensorListFromTensor":
            found.append(tensor.op.inputs[0].shape[0])
        elif tensor.op.type == "TensorListReserve":
            items = tf.get_static_value(tensor.op.inputs[1])
            found.append(None if items is None or items < 0 else int(items))
    known = [turns for turns in found if turns is not None]
    return max(known) if known else None


def kept_per_turn(body: Any, place: int) -> Any:
    """What each turn adds to output `place` of a loop; None: it is no list, or that is
    there anyway.

    Args:
      body: the graph of a turn.
      place: of the loop's output.
    """
    output = body.outputs[place]
    if output.dtype != tf.variant:
        return None
    op = output.op
    while op.type == "Identity":
        op = op.inputs[0].op
    if op.type not in NEW_ITEM:
        return None
    item = op.inputs[NEW_ITEM[op.type]]
    is_known = item.shape.is_fully_defined() and item.dtype.size is not None
    return item if is_known and item.op.type not in NOT_MADE else None
