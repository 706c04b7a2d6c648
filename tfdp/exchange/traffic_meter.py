"""What replicas have sent in the steps that ran: each graph counts how often it runs.

A size is known while a graph is built, whether a step takes a conditional's branch is
not: an optimizer that accumulates sends in one step of several. So each graph that
holds an exchange, a branch too, gets one small op that counts its runs. Bytes that are
known to a running step only (slices) get an op that adds them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf

from tfdp._private import names

__all__ = ["TrafficMeter"]


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
