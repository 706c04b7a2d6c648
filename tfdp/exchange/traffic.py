"""How many bytes each replica sends in one step, counted while its graph is built.

The shapes are known then, so the count costs the step nothing. An exchange inside a
conditional counts whether or not a step takes that branch.
"""

from __future__ import annotations

import tensorflow as tf

__all__ = ["TrafficCount", "ring_bytes", "tensor_bytes"]


class TrafficCount:
    """The bytes that each replica of a process sends to others.

    Args:
      replicas: how many there are.
    """

    def __init__(self, replicas: int):
        self._sent: list[int | None] = [0] * replicas

    def begin(self) -> None:
        """Counts from nothing again: another step is about to be traced."""
        self._sent = [0] * len(self._sent)

    def add(self, rank: int, tensor: tf.Tensor) -> None:
        """Notes that `rank` sends the whole of `tensor` to one other replica."""
        self.add_bytes(rank, tensor_bytes(tensor))

    def add_bytes(self, rank: int, size_bytes: int | None) -> None:
        """Notes bytes that `rank` sends; None: nobody knows before the step runs."""
        before = self._sent[rank]
        if before is None or size_bytes is None:
            self._sent[rank] = None
        else:
            self._sent[rank] = before + size_bytes

    def of(self, rank: int) -> int | None:
        """The bytes that `rank` sends; None when a size is known to a running step
        only (strings, and slices of which each replica has another number)."""
        return self._sent[rank]


def tensor_bytes(tensor: tf.Tensor) -> int | None:
    """The size of `tensor` in bytes; None where its shape or type does not tell."""
    elements = tensor.shape.num_elements()
    if elements is None or not tensor.dtype.size:
        return None
    return elements * tensor.dtype.size


def ring_bytes(tensor: tf.Tensor, place: int, parts: int) -> int | None:
    """What a ring makes one replica send to scatter the sum of `tensor`.

    The tensor is cut into `parts` chunks and every replica passes on all of them but
    the one that it ends with: over all replicas n (parts - 1) bytes for n bytes. An
    all-reduce sends as much a second time.

    Args:
      tensor: of any shape, which counts as flat.
      place: of the replica in its group, 0 to `parts` - 1.
      parts: replicas in the group.
    """
    size_bytes = tensor_bytes(tensor)
    if size_bytes is None:
        return None
    elements = size_bytes // tensor.dtype.size
    chunk = -(-elements // parts)
    kept = min((place + 1) * chunk, elements) - min(place * chunk, elements)
    return size_bytes - kept * tensor.dtype.size
