"""How many bytes each replica sends in one step, counted while its graph is built.

The shapes are known then, so the count costs the step nothing. An exchange inside a
conditional counts whether or not a step takes that branch; what the steps that ran have
sent is for a `TrafficMeter` to say, where one is in use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.exchange.traffic_meter import TrafficMeter

__all__ = ["TrafficCount", "ring_bytes", "tensor_bytes"]


class TrafficCount:
    """The bytes that each replica of a process sends to others.

    Args:
      replicas: how many there are.
    """

    def __init__(self, replicas: int):
        self._sent: list[int | None] = [0] * replicas
        #: Are told of everything that is added; none: nobody asks what steps have sent.
        #: One goes with who made it: a training that failed leaves none behind.
        self.meters: weakref.WeakSet[TrafficMeter] = weakref.WeakSet()

    def begin(self) -> None:
        """Counts from nothing again: another step is about to be traced."""
        self._sent = [0] * len(self._sent)
        for meter in self.meters:
            meter.begin()

    def add(self, rank: int, tensor: tf.Tensor, times: int = 1) -> None:
        """Notes that `rank` sends the whole of `tensor`, to so many others."""
        size = tensor_bytes(tensor)
        self._add_bytes(
            rank,
            None if size is None else times * size,
            lambda: _running_bytes(tensor, lambda elements: times * elements),
        )

    def add_ring(
        self, rank: int, tensor: tf.Tensor, place: int, parts: int, rounds: int
    ) -> None:
        """Notes that `rank` takes part in so many rounds of a ring; `ring_bytes`."""
        once = ring_bytes(tensor, place, parts)
        self._add_bytes(
            rank,
            None if once is None else rounds * once,
            lambda: _running_bytes(
                tensor, lambda n: rounds * (n - _kept_of_ring(n, place, parts))
            ),
        )

    def _add_bytes(
        self,
        rank: int,
        size_bytes: int | None,
        in_step: Callable[[], tf.Tensor | None],
    ) -> None:
        for meter in self.meters:
            meter.add(rank, size_bytes, in_step)
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
    return size_bytes - _kept_of_ring(elements, place, parts) * tensor.dtype.size


def _kept_of_ring(elements: Any, place: int, parts: int) -> Any:
    """The elements of the chunk that `place` ends with; a tensor where they are one."""
    chunk = -(-elements // parts)
    low = tf.minimum if tf.is_tensor(elements) else min
    return low((place + 1) * chunk, elements) - low(place * chunk, elements)


def _running_bytes(
    tensor: tf.Tensor, share: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor | None:
    """The bytes of a share of `tensor`'s elements, in a running step; None: strings."""
    if not tensor.dtype.size:
        return None
    with tf.device(tensor.device):  # where it lies: asking must not move it
        return share(tf.size(tensor, tf.int64)) * tensor.dtype.size
