"""`AsyncMeans`: means over the groups that one step starts and a later step takes.

Between hosts they are in flight meanwhile (`tfdp.hosts.async_exchanges`); within a
process they are computed at once and stored. Checkpoints include, and wait for, them.
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
    """The means of one list of values, such as a fragment's outer gradients; `late`
    runs exchanges asynchronously, None computes the means at once.

    Cost: a copy of the values on each device; with `late` one in this process while
    they are in flight, and one on its first device.
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
        given = shape, self._devices, dtype
        if self._late is None:
            self.kept.append(OfRanks(*given, is_identical=True))
        else:
            place = len(self.kept)
            self.kept.append(_Late(self._late.sums, self._ticket, place, *given))

    def begin(self, values: Sequence[tf.Tensor], rank: int, mean: Means) -> tf.Tensor:
        """Starts the mean of this replica's values; returns a tensor that is computed
        when the start is done. `mean` computes it where it is not asynchronous."""
        if self._late is not None:
            return self._late.begin(values, rank, self._ticket, self._label)
        done = [
            kept.copies[rank].assign(value)
            for kept, value in zip(self.kept, mean(values), strict=True)
        ]
        with tf.control_dependencies(done):
            return tf.constant(True)

    def arrived(self, rank: int) -> list[tf.Tensor]:
        """The means, on every replica; waits for those in flight."""
        if self._late is None:
            return [kept.copies[rank].read_value() for kept in self.kept]
        # The first replica has what a checkpoint restored; others give their shapes.
        own = [
            tf.zeros(kept.shape, kept.dtype) if rank else kept.read_value()
            for kept in (each.copies[0] for each in self.kept)
        ]
        sums = self._late.take(own, rank, self._ticket)
        return [total / self._replicas for total in sums]


class _Late(OfRanks):
    """A sum that may be in flight when a checkpoint reads it."""

    def __init__(
        self,
        late: AsyncSums,
        ticket: int,
        place: int,
        shape: Any,
        devices: Any,
        of: Any,
    ):
        super().__init__(shape, devices, of, is_identical=True)
        self._late, self._ticket, self._place = late, ticket, place

    def rows(self) -> tf.Tensor:
        """Waits for a sum in flight."""
        sums = self._late.look(self._ticket)
        if sums is None:
            return super().rows()
        return tf.constant(np.stack([sums[self._place]]))

    def assign_rows(self, rows: Any) -> None:
        """Discards a sum in flight."""
        self._late.forget(self._ticket)
        super().assign_rows(rows)

    def _restore_from_tensors(
        self, restored_tensors: dict[str, tf.Tensor]
    ) -> tf.Operation:
        # A sum in flight belongs to the training before the restore.
        self._late.forget(self._ticket)
        return super()._restore_from_tensors(restored_tensors)
