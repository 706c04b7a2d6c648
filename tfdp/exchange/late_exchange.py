"""`AsyncExchange`: sums over hosts that one step starts and a later step waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.exchange.link_calls import LinkCalls
from tfdp.exchange.packing import Tensors
from tfdp.exchange.sparse import sums_at_first
from tfdp.hosts.async_exchanges import AsyncSums
from tfdp.lint.registry import register_exchanged

DONE, NUMBER = tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.int32)
FIRST = 0
Give = Callable[..., None]
Decide = Callable[[], int]


class AsyncExchange:
    """Replicas of a host add up at once; sums over hosts are in flight during steps.

    `inner` and `outer` as those of `Levels`, which imports this file.

    Cost: that of the sum; in the step that begins it, a copy of what is sent and the
    sum over the host.
    """

    def __init__(self, inner: Any, outer: Any):
        self._inner, self._outer = inner, outer
        self.sums = AsyncSums(outer.link)

    def begin(self, tensors: Tensors, rank: int, ticket: int, label: str) -> tf.Tensor:
        """Begins the sums over all replicas; every replica calls it, in a graph.

        `take` finds them by `ticket`. Returns a tensor that exists after the start.
        """

        def begin(*arrays: np.ndarray) -> None:
            self.sums.begin(ticket, arrays, label)

        return self.hand_over(begin, tensors, rank)

    def hand_over(self, give: Give, tensors: Tensors, rank: int) -> tf.Tensor:
        """Gives this host's sums to `give`, which must not wait, in one order of calls
        on all hosts. Every replica calls it, in a graph; returns a tensor that exists
        after the call."""
        sums = self._inner.reduce(tensors, rank)
        if rank:
            return tf.constant(True)
        return self._outer.call(_noting(give), sums, [DONE])[0]

    def call_with(
        self,
        function: Callable[..., list[np.ndarray]],
        numbers: Tensors,
        gradients: Sequence[Any],
        clip: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]],
        specs: Sequence[tf.TensorSpec],
        rank: int,
    ) -> list[tf.Tensor]:
        """Calls `function` on this host's first replica; all of them get the results.

        `function` gets the first replica's `numbers`, and this host's sums of
        gradients, clipped: of slices the values, each index once, and the indices.
        Every replica calls it, in a graph; `specs` are of the results.
        """
        totals = sums_at_first(self._inner, gradients, rank)
        results: Any = specs
        if rank == FIRST:
            values = clip([value for value, *_ in totals])
            sent = list(numbers)
            for (_, *indices), value in zip(totals, values, strict=True):
                sent += [value, *indices]
            results = self._outer.call(function, sent, specs)
        return self._inner.broadcast(results, rank)

    def decide(self, number: Decide, after: tf.Tensor, rank: int) -> tf.Tensor:
        """Calls `number` on the first replica when `after` exists; returns its int32,
        equal on all replicas of this host."""
        decided = tf.zeros([], tf.int32)
        if not rank:
            decided = self._outer.call(_number(number), [after], [NUMBER])[0]
        return register_exchanged(self._inner.broadcast([decided], rank)[0])

    def take(self, otherwise: Tensors, rank: int, ticket: int) -> list[tf.Tensor]:
        """Waits for the sums of `ticket`; returns them on all replicas of this host.

        Returns `otherwise` where nothing was begun, as after a restart.
        """

        def take(*arrays: np.ndarray) -> list[np.ndarray]:
            found = self.sums.take(ticket)
            return list(arrays) if found is None else found

        sums = list(otherwise)
        if not rank:
            sums = self._outer.call(take, sums, sums)
        return self._inner.broadcast(sums, rank)

    def close(self) -> None:
        """Waits for exchanges still in flight, so that no other host hangs."""
        self.sums.close()


class SumsAtOnce:
    """An `AsyncExchange` of simulated hosts: sums are complete when they begin.

    `reducer` sums over all replicas of this process.
    """

    sums: AsyncSums | None = None

    def __init__(self, reducer: Any):
        self._reducer = reducer
        self._calls = LinkCalls()

    def hand_over(self, give: Give, tensors: Tensors, rank: int) -> tf.Tensor:
        sums = self._reducer.all_reduce(tensors, rank)
        if rank:
            return tf.constant(True)
        with tf.device("CPU:0"):
            return self._calls.call(_noting(give), sums, [DONE])[0]

    def decide(self, number: Decide, after: tf.Tensor, rank: int) -> tf.Tensor:
        decided = tf.zeros([], tf.int32)
        if not rank:
            with tf.device("CPU:0"):
                decided = self._calls.call(_number(number), [after], [NUMBER])[0]
        return tf.convert_to_tensor(self._reducer.broadcast(decided, rank))


def _noting(give: Give) -> Callable[..., list[np.ndarray]]:
    def call(*arrays: np.ndarray) -> list[np.ndarray]:
        give(*arrays)
        return [np.array(True)]

    return call


def _number(number: Decide) -> Callable[..., list[np.ndarray]]:
    return lambda after: [np.array(number(), np.int32)]
