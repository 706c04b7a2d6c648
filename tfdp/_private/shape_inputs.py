"""Operations that ask of a tensor its shape alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

__all__ = ["ask_shapes_of"]

ASK_SHAPES = frozenset("Rank Shape ShapeN Size".split())


def ask_shapes_of(
    originals: Sequence[tf.Tensor],
    copies: Sequence[tf.Tensor],
    operations: Iterable[tf.Operation],
) -> None:
    """Has `operations` that want a copy's shape ask the original, which is there first.

    A copy that waits keeps the memory of its original until it is made.

    Args:
      originals: tensors of a graph.
      copies: of each of them one, made in the same graph.
      operations: those that may be changed; the others keep their inputs.
    """
    original_of = {id(c): o for c, o in zip(copies, originals, strict=True)}
    for operation in operations:
        if operation.type not in ASK_SHAPES:
            continue
        for place, tensor in enumerate(operation.inputs):
            original = original_of.get(id(tensor))
            if original is not None and original.graph is operation.graph:
                operation._update_input(place, original)
