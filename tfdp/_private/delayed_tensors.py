"""Tensors that are computed later than they could be: memory is free by then."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

__all__ = ["delay"]

# Gradients of layers whose weights are large beside their activations are one of these.
# Before a convolution's the activations would have to wait, which are larger; and its
# last bit was found to change when it waits: the graph optimizer then fuses less.
DELAYED = frozenset("BatchMatMulV2 MatMul UnsortedSegmentSum".split())

# What makes of a tensor another one of its size.
SAME_SIZE = frozenset("Cast EnsureShape Identity Mul RealDiv Reshape".split())


def delay(tensor: tf.Tensor, until: Sequence[tf.Tensor]) -> bool:
    """Has `tensor` computed only when all of `until` are there.

    Nothing may use `tensor` yet, so nothing waits with it, and no two can wait for each
    other. The operation that takes the memory is delayed: not one that casts or scales
    its result.

    Args:
      tensor: of the graph that is being built.
      until: of the same graph; they must not be made from `tensor`.

    Returns:
      Whether it was done: only for a product of matrices, or the sum of an embedding's
      rows, that is not used yet.
    """
    operation = tensor.op
    if _uses(operation):
        return False
    while operation.type in SAME_SIZE:
        largest = max(operation.inputs, key=lambda t: t.shape.num_elements() or 0)
        if _uses(largest.op) != 1:
            break
        operation = largest.op
    if operation.type not in DELAYED:
        return False
    operation._add_control_inputs([other.op for other in until])
    return True


def _uses(operation: tf.Operation) -> int:
    consumers = sum(len(output.consumers()) for output in operation.outputs)
    return consumers + len(operation._control_outputs)
