"""`AsyncExchange`: sums over hosts that one step starts and a later step waits for."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.exchange.packing import Tensors
from tfdp.hosts.async_exchanges import AsyncSums


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
        sums = self._inner.reduce(tensors, rank)
        if rank:
            return tf.constant(True)

        def begin(*arrays: np.ndarray) -> list[np.ndarray]:
            self.sums.begin(ticket, arrays, label)
            return [np.array(True)]

        return self._outer.call(begin, sums, [tf.constant(True)])[0]

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
        """Waits for exchanges that other hosts wait for, too."""
        self.sums.close()
