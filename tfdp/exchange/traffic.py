"""How many bytes each replica sends in one step, counted while its graph is built.

Static shapes make the count free for the step. An exchange in a conditional counts
whether or not a step takes that branch; `TrafficMeter` counts what steps really sent.
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
    """The bytes that each of `replicas` replicas of a process sends to others."""

    def __init__(self, replicas: int):
        self._sent: list[int | None] = [0] * replicas
        #: They receive everything that is added. Weak: a meter is dropped with its
        #: owner, also after a training that failed.
        self.meters: weakref.WeakSet[TrafficMeter] = weakref.WeakSet()

    def begin(self) -> None:
        """Restarts the count: another step is about to be traced."""
        self._sent = [0] * len(self._sent)
        for meter in self.meters:
            meter.begin()

    def add(self, rank: int, tensor: tf.Tensor, times: int = 1) -> None:
        """Counts that `rank` sends the whole of `tensor`, `times` times."""
        size = tensor_bytes(tensor)
        self._add_bytes(
            rank,
            None if size is None else times * size,
            lambda: _bytes_at_run_time(tensor, lambda elements: times * elements),
        )

    def add_ring(
        self, rank: int, tensor: tf.Tensor, place: int, parts: int, rounds: int
    ) -> None:
        """Counts that `rank` takes part in `rounds` rounds of a ring; `ring_bytes`."""
        once = ring_bytes(tensor, place, parts)
        self._add_bytes(
            rank,
            None if once is None else rounds * once,
            lambda: _bytes_at_run_time(
                tensor, lambda n: rounds * (n - _own_chunk(n, place, parts))
            ),
        )

    def _add_bytes(
        self, rank: int, size_bytes: int | None, in_step: Callable[[], tf.Tensor | None]
    ) -> None:
        for meter in self.meters:
            meter.add(rank, size_bytes, in_step)
        before = self._sent[rank]
        if before is None or size_bytes is None:
            self._sent[rank] = None
        else:
            self._sent[rank] = before + size_bytes

    def of(self, rank: int) -> int | None:
        """The bytes that `rank` sends; None when a size is unknown before the step runs
        (strings, and slices of varying number)."""
        return self._sent[rank]


def tensor_bytes(tensor: tf.Tensor) -> int | None:
    """The size of `tensor` in bytes; None where its shape or type leaves it open."""
    elements = tensor.shape.num_elements()
    if elements is None or not tensor.dtype.size:
        return None
    return elements * tensor.dtype.size


def ring_bytes(tensor: tf.Tensor, place: int, parts: int) -> int | None:
    """The bytes that the replica at `place` sends to scatter the sum of `tensor`.

    The ring cuts the flat tensor into `parts` chunks, and every replica forwards all
    except the one that it ends with: over all replicas n (parts - 1) bytes for n bytes.
    An all-reduce sends the same a second time.
    """
    size_bytes = tensor_bytes(tensor)
    if size_bytes is None:
        return None
    elements = size_bytes // tensor.dtype.size
    return size_bytes - _own_chunk(elements, place, parts) * tensor.dtype.size


def _own_chunk(elements: Any, place: int, parts: int) -> Any:
    """Elements of the chunk that `place` ends with; a tensor if `elements` is one."""
    chunk = -(-elements // parts)
    low = tf.minimum if tf.is_tensor(elements) else min
    return low((place + 1) * chunk, elements) - low(place * chunk, elements)


def _bytes_at_run_time(
    tensor: tf.Tensor, share: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor | None:
    """The bytes of a share of `tensor`'s elements, at run time; None: strings."""
    if not tensor.dtype.size:
        return None
    with tf.device(tensor.device):  # where it is stored: reading its size must not copy
        return share(tf.size(tensor, tf.int64)) * tensor.dtype.size


# Sizes are known at trace time, whether a step takes a branch is not: an optimizer that
# accumulates sends in one step of several. So each graph with an exchange, branches
# too, gets one small op that counts its runs, and unknown sizes an op that adds them.
@dataclasses.dataclass
class _GraphCount:
    """Bytes that one replica sends in one graph, and how often that graph has run."""

    graph: tf.Graph  # kept alive, so that its id stays unique
    runs: tf.Variable
    bytes_of_run: int = 0
    is_known: bool = True

    @functools.cached_property
    def more_bytes(self) -> tf.Variable:
        """The bytes that running steps have added; made on first use."""
        return names.make_counter()


class TrafficMeter:
    """Counts the bytes that replicas of this process send while it is in use.

    It counts in graphs built during its lifetime; see `TrafficCount.meters`. Cost: an
    op of a few microseconds per run and per conditional with an exchange.
    """

    def __init__(self) -> None:
        # By graph and replica: conditionals of two replicas must share no resource, or
        # they would be chained and wait for each other.
        self._counts: dict[tuple[int, int], _GraphCount] = {}
        self._steps: dict[int, _GraphCount] = {}

    def begin(self) -> None:
        """Prepares to count in this graph, in which replicas are traced next."""
        graph = tf.compat.v1.get_default_graph()
        if id(graph) not in self._steps:
            self._steps[id(graph)] = _count_in(graph)

    def add(
        self, rank: int, size_bytes: int | None, in_step: Callable[[], tf.Tensor | None]
    ) -> None:
        """Counts that `rank` sends `size_bytes` in each run of the current graph.

        If they are None, `in_step` builds the size, a scalar int64; None: unknown.
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
        """How many runs of the strategy occurred, of steps and of evaluations."""
        return sum(int(count.runs.numpy()) for count in self._steps.values())

    @property
    def sent_bytes(self) -> int | None:
        """The bytes that replicas have sent to others in all runs; None: unknown."""
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
