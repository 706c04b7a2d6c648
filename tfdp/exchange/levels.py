"""Two levels: the replicas of a host by one transport, the hosts by another.

Within a host its first replica adds the others' tensors, exchanges a whole bucket with
the first replicas of other hosts, and shares the results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdp.exchange.in_process import InProcess
from tfdp.exchange.late_exchange import AsyncExchange
from tfdp.exchange.over_link import OverLink
from tfdp.exchange.packing import Tensors, whole_specs, wholes_from_parts
from tfdp.exchange.sparse import RowSum
from tfdp.exchange.transport import Transport
from tfdp.plan.shards import Layouts, ShardLayout
from tfdp.plan.topology import Groups, Topology

FIRST = 0


class Levels(Transport):
    """Moves tensors over the replicas of several hosts.

    `inner` is of this host's replicas; `outer` is of the hosts, and only the first
    replica of each calls it. With `shards_over_hosts` all replicas of all hosts share
    the shards of a tensor; without, those of each host do, so that each has all shards.

    Cost per host: that of both. For n bytes of gradients on H hosts 2 n (H - 1) / H
    bytes cross, however many replicas a host has; with shards over the hosts half of
    that for gradients, and the same half to gather n bytes of weights.
    """

    def __init__(
        self, inner: InProcess, outer: OverLink, *, shards_over_hosts: bool = False
    ):
        super().__init__(inner.devices, Topology(outer.replicas, inner.replicas))
        self.inner, self.outer = inner, outer
        self.name, self.hint, self.wire_dtype = (
            outer.name,
            outer.hint,
            outer.wire_dtype,
        )
        self.traffic, self.order = inner.traffic, inner.order
        self.replicas = outer.replicas * inner.replicas
        # Calls between hosts have no names: hosts pair them by their order.
        inner.orders_runs = True
        self.late: AsyncExchange = AsyncExchange(inner, outer)
        self._shards_over_hosts = shards_over_hosts
        first = outer.part_of(FIRST) * inner.replicas
        self._first_part = first if shards_over_hosts else 0
        if shards_over_hosts:
            from tfdp.exchange.rows_to_each import RowsToEach

            self.to_each = RowsToEach(inner, outer)

    def among(self, groups: Groups) -> Transport:
        """See `Transport`. Groups that cross hosts exchange sums only, and each must
        have the same places on all hosts."""
        here = self.topology.within_hosts[self.outer.part_of(FIRST)]
        inside = groups.inside(here)
        if inside is not None:
            return self.inner.among(inside)
        places = self.topology.places_on_each_host(groups)
        if places is None or groups == self.groups:
            return super().among(groups)
        from tfdp.exchange.sums_over_hosts import SumsOverHosts

        levels = self.inner, self.outer, self.sum_of_hosts
        return SumsOverHosts(*levels, groups, places)

    @property
    def between_hosts(self) -> OverLink:
        return self.outer

    @property
    def parts(self) -> int:
        return self.replicas if self._shards_over_hosts else self.inner.replicas

    def part_of(self, rank: int) -> int:
        return self._first_part + rank

    @property
    def bytes_between_hosts(self) -> int | None:
        return self.outer.bytes_between_hosts

    @property
    def seconds_between_hosts(self) -> float | None:
        return self.outer.seconds_between_hosts

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        with self.inner.run(), self.outer.run():
            yield

    def close(self) -> None:
        """Waits for exchanges in flight; call before the link is closed."""
        self.late.close()
        self.outer.close()

    def all_reduce(
        self, tensors: Tensors, rank: int, label: str, wire_dtype: str | None = None
    ) -> list[tf.Tensor]:
        sums = self.inner.reduce(tensors, rank)
        if rank == FIRST:
            sums = self.sum_of_hosts(sums, label, wire_dtype)
        return self.inner.broadcast(sums, rank)

    def sum_of_hosts(
        self, tensors: Tensors, label: str, wire_dtype: str | None
    ) -> list[tf.Tensor]:
        """The sums of what the first replica of each host passes."""
        return self.outer.all_reduce(tensors, FIRST, label, wire_dtype)

    def combine(self, tensors: Tensors, rank: int, how: RowSum) -> list[tf.Tensor]:
        """See `Transport`. One list per host crosses."""
        own = self.inner.combine_at_first(tensors, rank, how)
        if rank == FIRST:
            own = self.outer.combine(own, FIRST, how)
        return self.inner.broadcast_lists(own, rank)

    def reduce_scatter(
        self, tensors: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        sums = self.inner.reduce(tensors, rank)
        if rank == FIRST and self._shards_over_hosts:
            of_hosts = self._of_hosts(layouts)
            sums = self.outer.reduce_scatter(sums, of_hosts, FIRST, label)
        elif rank == FIRST:
            # Every host has all shards, so every host needs the whole sum; only its
            # distribution within the host is cheaper.
            sums = self.sum_of_hosts(sums, label, self.wire_dtype)
        pairs = zip(sums, layouts, strict=True)
        return [self._hand_out(total, layout, rank) for total, layout in pairs]

    def _hand_out(self, total: tf.Tensor, layout: ShardLayout, rank: int) -> tf.Tensor:
        """Each replica's part of what the first replica has: all of this host's."""
        ranges, sent, likes = self._ranges(layout), {}, {}
        with tf.device(self.devices[rank]):
            if rank == FIRST:
                flat = tf.reshape(total, [-1])
                sent = {place: flat[slice(*own)] for place, own in ranges.items()}
            if rank in ranges:
                start, stop = ranges[rank]
                likes = {FIRST: tf.TensorSpec([stop - start], total.dtype)}
            got = self.inner.swap(sent, likes, rank)
            return got[0] if got else tf.zeros([0], total.dtype)

    def all_gather(
        self, parts: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        if not self._shards_over_hosts:
            return self.inner.all_gather(parts, layouts, rank, label)
        pairs = zip(parts, layouts, strict=True)
        ranges = [self._range_at_first(*pair, rank) for pair in pairs]
        wholes: Sequence[tf.Tensor | tf.TensorSpec] = whole_specs(parts, layouts)
        if rank == FIRST:
            of_hosts = self._of_hosts(layouts)
            wholes = self.outer.all_gather(ranges, of_hosts, FIRST, label)
        return self.inner.broadcast(wholes, rank)

    def _range_at_first(
        self, own: tf.Tensor, layout: ShardLayout, rank: int
    ) -> tf.Tensor:
        """This host's parts at its first replica; elsewhere the replica's own."""
        ranges = self._ranges(layout)
        with tf.device(self.devices[rank]):
            likes = {
                place: tf.TensorSpec([stop - start], own.dtype)
                for place, (start, stop) in ranges.items()
                if rank == FIRST
            }
            sent = {FIRST: own} if rank in ranges else {}
            parts = self.inner.swap(sent, likes, rank)
            return tf.concat(parts, axis=0) if parts else own

    def join(self, parts: Tensors, layout: ShardLayout, label: str) -> tf.Tensor:
        """The whole tensor, in cross-replica context, from this process's parts."""
        if not self._shards_over_hosts:
            return wholes_from_parts([parts], [layout])[0]
        with tf.device(self.devices[FIRST]):
            ours = tf.concat(parts, axis=0)
        [whole] = self.outer.all_gather([ours], self._of_hosts([layout]), FIRST, label)
        return whole

    def _of_hosts(self, layouts: Layouts) -> list[ShardLayout]:
        return [layout.of_hosts(self.inner.replicas) for layout in layouts]

    def _ranges(self, layout: ShardLayout) -> dict[int, tuple[int, int]]:
        """The begin and end of non-empty parts among this host's, by replica."""
        begin, _ = layout.bounds(self._first_part)
        bounds = [layout.bounds(self.part_of(r)) for r in range(self.inner.replicas)]
        return {
            rank: (start - begin, stop - begin)
            for rank, (start, stop) in enumerate(bounds)
            if start < stop
        }

    def gather(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        local = self.inner.gather(tensor, rank)
        like = tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)
        whole = self.outer.gather(local, FIRST) if rank == FIRST else like
        return self.inner.broadcast([whole], rank)[0]

    def broadcast(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        if rank == FIRST:
            tensors = self.outer.broadcast(tensors, FIRST)
        return self.inner.broadcast(tensors, rank)
