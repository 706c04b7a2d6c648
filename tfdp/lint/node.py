"""An op with the values of its inputs, as rules of `tfdp.lint` take it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.lint.values import Value

COUNTS = frozenset({"counts"})
FOLDS: dict[str, Callable[..., Any]] = {
    "AddV2": np.add,
    "Cast": np.array,
    "ExpandDims": lambda part, axis: np.expand_dims(part, int(axis)),
    "Fill": lambda shape, part: np.full(shape, part),
    "Mul": np.multiply,
    "ConcatV2": lambda *parts: np.concatenate(parts[:-1], int(parts[-1])),
    "FloorMod": np.mod,
    "Identity": np.array,
    "Pack": lambda *parts: np.stack(parts),
    "Range": np.arange,
    "Reshape": np.reshape,
    "Sub": np.subtract,
}


class Node:
    """An op with the values of its inputs.

    Args:
      rows: the static number of this replica's rows, or None.
      replicas: the number of replicas.
    """

    def __init__(
        self,
        op: tf.Operation,
        values: Sequence[Value],
        rows: int | None,
        replicas: int = 1,
    ):
        self.op, self.values, self.rows, self.replicas = op, values, rows, replicas

    def static(self, place: int) -> Any:
        return folded(self.op.inputs[place])

    def shape(self, place: int) -> tf.TensorShape:
        return self.op.inputs[place].shape

    def rank(self, place: int) -> int | None:
        return self.op.inputs[place].shape.rank

    @property
    def out(self) -> tf.TensorShape:
        return self.op.outputs[0].shape

    def attribute(self, name: str) -> Any:
        return self.op.get_attr(name)

    def spread(self) -> list[Value] | None:
        """The inputs with the axes of the broadcast result; None: an unknown rank."""
        found = []
        for place, value in enumerate(self.values):
            if value.axes:
                rank = self.rank(place)
                if rank is None or self.out.rank is None:
                    return None
                shift = self.out.rank - rank
                value = value.but(axes=tuple(axis + shift for axis in value.axes))
            found.append(value)
        return found


def folded(tensor: tf.Tensor) -> Any:
    """The value of a tensor that depends on constants only, or None."""
    return _folded(tensor, {})


def _folded(tensor: tf.Tensor, known: dict[str, Any]) -> Any:
    # Of sums of sums of the same number there are more ways down than tensors.
    if tensor.name not in known:
        known[tensor.name] = _folded_once(tensor, known)
    return known[tensor.name]


def _folded_once(tensor: tf.Tensor, known: dict[str, Any]) -> Any:
    found = tf.get_static_value(tensor)
    if found is not None:
        return found
    if tensor.op.type == "StridedSlice" and tensor.shape.rank == 0:  # of a shape
        entries, place = (_folded(part, known) for part in tensor.op.inputs[:2])
        is_known = entries is not None and place is not None and np.ndim(entries) == 1
        return entries[place[0]] if is_known else None
    if tensor.op.type not in FOLDS:
        return None
    parts = []
    for part in tensor.op.inputs:
        parts.append(_folded(part, known))
        if parts[-1] is None:
            return None
    return FOLDS[tensor.op.type](*parts)


def static_axes(node: Node, place: int, rank: int | None) -> set[int] | None:
    """The static axes that an input names; None: unknown."""
    axes = node.static(place)
    if axes is None or rank is None:
        return None
    return {int(axis) % rank for axis in np.reshape(axes, -1)} if rank else set()


Rule = Callable[[Node], "Value | list[Value]"]
