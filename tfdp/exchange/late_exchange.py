"""`AsyncExchange`: sums over hosts that one step starts and a later step takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from tfdp.hosts.async_exchanges import AsyncSums
from tfdp.hosts.host_link import HostLink


class _AcrossHosts(Protocol):
    """What is asked of `AcrossHostsEngine`, which holds a `AsyncExchange`."""

    link: HostLink

    def next_call_number(self, rank: int) -> int: ...

    def sums_at_leader(
        self, tensors: Sequence[tf.Tensor], rank: int, call: int
    ) -> list[tf.Tensor]: ...

    def at_leader(
        self,
        exchange: Callable[..., list[np.ndarray]],
        tensors: Sequence[tf.Tensor],
        like: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]: ...

    def from_leader(
        self, tensors: Sequence[tf.Tensor], rank: int
    ) -> list[tf.Tensor]: ...


class AsyncExchange:
    """Replicas of a host add up at once, the hosts' sums travel while steps go on.

    Args:
      engine: of several processes. Replica 0 of each speaks for it.

    Cost: as a sum of the engine; within the step that begins it a copy of what travels,
    and the sum over the host.
    """

    def __init__(self, engine: _AcrossHosts):
        self._engine = engine
        self.sums = AsyncSums(engine.link)

    def begin(
        self, tensors: Sequence[tf.Tensor], rank: int, ticket: int, label: str
    ) -> tf.Tensor:
        """Begins the sums over all replicas. Called by each, in a graph.

        Args:
          tensors: alike in shape on all replicas.
          rank: the calling replica.
          ticket: by which `take` finds them.
          label: names the exchange in errors.

        Returns:
          What is there when they have begun.
        """
        call = self._engine.next_call_number(rank)
        sums = self._engine.sums_at_leader(tensors, rank, call)
        if rank:
            return tf.constant(True)

        def begin(*arrays: np.ndarray) -> list[np.ndarray]:
            self.sums.begin(ticket, arrays, label)
            return [np.array(True)]

        return self._engine.at_leader(begin, sums, [tf.constant(True)])[0]

    def take(
        self, otherwise: Sequence[tf.Tensor], rank: int, ticket: int
    ) -> list[tf.Tensor]:
        """The sums, once they are there, on every replica of this host.

        Args:
          otherwise: taken where nothing was begun, as after a restart.
          rank: the calling replica.
          ticket: see `begin`.
        """

        def take(*arrays: np.ndarray) -> list[np.ndarray]:
            found = self.sums.take(ticket)
            return list(arrays) if found is None else found

        sums = list(otherwise)
        if not rank:
            sums = self._engine.at_leader(take, sums, sums)
        return self._engine.from_leader(sums, rank)

    def close(self) -> None:
        """Waits for what others wait for, too."""
        self.sums.close()
