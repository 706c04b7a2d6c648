"""How many bytes each replica sends in one step, counted while its graph is built.

The shapes are known then, so the count costs the step nothing. An exchange inside a
conditional counts whether or not a step takes that branch; what the steps that ran have
sent is for a `TrafficMeter` to say, where one is in use.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp._private import names


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


# What replicas have sent in the steps that ran: each graph counts how often it runs.
#
# A size is known while a graph is built, whether a step takes a conditional's branch is
# not: an optimizer that accumulates sends in one step of several. So each graph that
# holds an exchange, a branch too, gets one small op that counts its runs. Bytes that
# are known to a running step only (slices) get an op that adds them.


@dataclasses.dataclass
class _GraphCount:
    """What one replica sends in one graph, and how often that has run.

    Args:
      graph: kept, so that its id stays its own.
      runs: a variable.
    """

    graph: tf.Graph
    runs: tf.Variable
    bytes_of_run: int = 0
    is_known: bool = True

    @functools.cached_property
    def more_bytes(self) -> tf.Variable:
        """What running steps have added; made when it is first needed."""
        return names.make_counter()


class TrafficMeter:
    """Counts the bytes that replicas of this process send, while it is in use.

    It sees graphs that are built while it is there; see `TrafficCount.meters`.

    Cost: an op of a few microseconds for each run, and each conditional of a replica
    with an exchange in it.
    """

    def __init__(self) -> None:
        # By graph and replica: conditionals of two replicas must share no resource, or
        # they would be chained and wait for each other.
        self._counts: dict[tuple[int, int], _GraphCount] = {}
        self._steps: dict[int, _GraphCount] = {}

    def begin(self) -> None:
        """The replicas of one `strategy.run` are about to be traced in this graph."""
        graph = tf.compat.v1.get_default_graph()
        if id(graph) not in self._steps:
            self._steps[id(graph)] = _count_in(graph)

    def add(
        self,
        rank: int,
        size_bytes: int | None,
        in_step: Callable[[], tf.Tensor | None],
    ) -> None:
        """Notes that `rank` sends as much in each run of the graph that is being built.

        Args:
          rank: the replica.
          size_bytes: None when only a running step knows.
          in_step: builds that size then, a scalar int64; None: nobody knows it.
        """
        graph = tf.compat.v1.get_default_graph()
        key = rank, id(graph)
        if key not in self._counts:
            self._counts[key] = _count_in(graph)
        count = self._counts[key]
        if size_bytes is not None:
            count.bytes_of_run += size_bytes
            return
        size = in_step()
        if size is None:
            count.is_known = False
        else:
            names.count_in_graph(count.more_bytes, size)

    @property
    def steps(self) -> int:
        """How many runs of the strategy there were, of steps and of evaluations."""
        return sum(int(count.runs.numpy()) for count in self._steps.values())

    @property
    def sent_bytes(self) -> int | None:
        """What replicas have sent to others in all of them; None: nobody knows."""
        total = 0
        for count in self._counts.values():
            runs = int(count.runs.numpy())
            if runs and not count.is_known:
                return None
            total += runs * count.bytes_of_run
            if "more_bytes" in vars(count):
                total += int(count.more_bytes.numpy())
        return total


def _count_in(graph: tf.Graph) -> _GraphCount:
    count = _GraphCount(graph, names.make_counter())
    names.count_in_graph(count.runs, tf.constant(1, tf.int64))
    return count
