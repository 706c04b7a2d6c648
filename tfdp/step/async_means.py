"""`AsyncMeans`: means over the groups that one step starts and a later step takes.

Between hosts they travel meanwhile (`tfdp.hosts.async_exchanges`). Within a process
memory is the wire, there is nothing to wait for, and they are only kept. Either way a
checkpoint holds them: one that is written before they are there waits for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.exchange.late_exchange import AsyncExchange
from tfdp.hosts.async_exchanges import AsyncSums
from tfdp.variables.own_values import OfRanks

Means = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]

_tickets = itertools.count()


class AsyncMeans(tf.Module):
    """The means of one list of values, such as a fragment's outer gradients.

    Args:
      late: what lets them travel while steps go on; None: nothing does.
      devices: of the replicas of this process.
      replicas: on all hosts.
      label: names the exchange in errors.

    Cost: where they travel late one copy of the values in this process while they do,
    and one on its first device; else one on each device.
    """

    def __init__(
        self,
        late: AsyncExchange | None,
        devices: Sequence[str],
        replicas: int,
        label: str,
    ):
        super().__init__()
        self._replicas, self._label = replicas, label
        self._ticket = next(_tickets)
        self._late = late
        self._devices = tuple(devices if late is None else devices[:1])
        self.kept: list[OfRanks] = []

    def grow(self, shape: Sequence[int], dtype: tf.DType) -> None:
        """Makes room for one more value."""
        if self._late is None:
            self.kept.append(OfRanks(shape, self._devices, dtype, is_alike=True))
            return
        place, late, ticket = len(self.kept), self._late, self._ticket
        sums = late.sums
        self.kept.append(_Late(shape, self._devices, dtype, sums, ticket, place))

    def begin(self, values: Sequence[tf.Tensor], rank: int, mean: Means) -> tf.Tensor:
        """Starts with the values of this replica.

        Args:
          values: as many as there is room for.
          rank: the calling replica.
          mean: how their mean is taken where it cannot travel late.

        Returns:
          What is there when that is done.
        """
        if self._late is not None:
            return self._late.begin(values, rank, self._ticket, self._label)
        done = [
            kept.copies[rank].assign(value)
            for kept, value in zip(self.kept, mean(values), strict=True)
        ]
        with tf.control_dependencies(done):
            return tf.constant(True)

    def arrived(self, rank: int) -> list[tf.Tensor]:
        """The means, on every replica; waits for them where they are late."""
        if self._late is None:
            return [kept.copies[rank].read_value() for kept in self.kept]
        # What a checkpoint brought is in the first replica's; others give their shapes.
        stored = [kept.copies[0] for kept in self.kept]
        if rank:
            own = [tf.zeros(kept.shape, kept.dtype) for kept in stored]
        else:
            own = [kept.read_value() for kept in stored]
        sums = self._late.take(own, rank, self._ticket)
        return [total / self._replicas for total in sums]


class _Late(OfRanks):
    """A sum that may still be on its way when a checkpoint asks for it."""

    def __init__(
        self,
        shape: Sequence[int],
        devices: Sequence[str],
        dtype: tf.DType,
        late: AsyncSums,
        ticket: int,
        place: int,
    ):
        super().__init__(shape, devices, dtype, is_alike=True)
        self._late, self._ticket, self._place = late, ticket, place

    def rows(self) -> tf.Tensor:
        """See `OfRanks.rows`; waits for what is on its way."""
        sums = self._late.look(self._ticket)
        if sums is None:
            return super().rows()
        return tf.constant(np.stack([sums[self._place]]))

    def assign_rows(self, rows: Any) -> None:
        """See `OfRanks.assign_rows`; what was on its way is forgotten."""
        self._late.forget(self._ticket)
        super().assign_rows(rows)

    def _restore_from_tensors(
        self, restored_tensors: dict[str, tf.Tensor]
    ) -> tf.Operation:
        # What was on its way belongs to the training that is left here.
        self._late.forget(self._ticket)
        return super()._restore_from_tensors(restored_tensors)
