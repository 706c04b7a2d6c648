"""Replicas of one process hand over tensors: no packing, no copies.

On logical CPUs all replicas share memory, so the cheapest exact sum is: one replica
(the root, chosen by size) reads all tensors in place, adds them, and shares the result;
each replica reads the same buffer. With two levels the sum is a tree: within each host
to its leader, between the leaders, and back. All replicas get the same bits in every
run: the root adds in rank order, two at a time.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdp.exchange.ordering import ReplicaOrder
from tfdp.exchange.packing import (
    Layouts,
    Tensors,
    cut,
    elements_of,
    to_shard,
    whole_from_parts,
    whole_specs,
)
from tfdp.exchange.send_receive import SendReceive
from tfdp.exchange.sparse import RowSum
from tfdp.exchange.transport import Transport, next_group_key
from tfdp.exchange.wire_types import check_summable
from tfdp.plan.shards import overlap
from tfdp.plan.topology import Topology


class InProcess(Transport):
    """Sums over replicas of one process, by handing over tensors.

    Cost per replica and tensor of n bytes: the root reads N x n and writes n bytes of
    memory; logical CPUs copy nothing. Between GPUs the hand-over is a device copy.
    """

    name = "in_process"
    reduces_buckets = False
    #: Whether runs of one function must end in order even if they receive nothing.
    orders_runs = False

    def __init__(self, devices: Sequence[str], topology: Topology):
        super().__init__(devices, topology)
        self.hand = SendReceive(self.devices, next_group_key(), self.traffic)
        self.groups: tuple[tuple[int, ...], ...] = (topology.all_ranks,)
        self.prefix = ""
        self.begin_roots()
        within, across = topology.within_host_groups, topology.across_host_groups
        self.inner: InProcess = self
        if len(within) > 1:
            self.host_groups = within
            self.inner = self._among(within, "within ", self.order)
        #: The transport of replicas with one place in their (simulated) hosts. It has
        #: an order of its own, because replicas of other places do not call it.
        self.outer = self._among(across, "across ", ReplicaOrder(len(self.devices)))

    def _among(
        self, groups: tuple[tuple[int, ...], ...], prefix: str, order: ReplicaOrder
    ) -> InProcess:
        """A transport whose groups exchange among their own members only."""
        part = copy.copy(self)
        part.groups, part.prefix, part.order = groups, prefix, order
        part.replicas = part.shard_parts = len(groups[0])
        part.begin_roots()
        return part

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        with super().run():
            self.hand.tokens.begin_run()
            self.outer.order.begin_run()
            for each in (self, self.inner, self.outer):
                each.begin_roots()
            yield
            self.hand.tokens.end_run(always=self.orders_runs)

    def begin(self, rank: int, what: str = "", tensors: Tensors = ()) -> str:
        """The key of an exchange that the replica begins to build."""
        call = self.order.next(rank, what, tensors)
        self.hand.tokens.pin_to_replica(rank)
        return f"{self.prefix}{call}"

    def all_reduce(
        self, tensors: Tensors, rank: int, label: str, wire_dtype: str | None = None
    ) -> list[tf.Tensor]:
        return [self._all_reduce(tensor, rank) for tensor in tensors]

    def _all_reduce(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        check_summable(tensor.dtype)
        key = self.begin(rank, "sum", [tensor])
        root = self._choose_root(key, tensor, rank)
        within, leader, leaders = self._route(root, rank)
        total = self._sum_up(tensor, rank, root, key)
        if rank == leader and len(leaders) > 1:
            total = self.hand.share_from(total, rank, root, leaders, f"{key}/back")
        return self.hand.share_from(total, rank, leader, within, f"{key}/down", tensor)

    def reduce(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        """The sums at the first replica of the group; elsewhere unspecified tensors."""
        for tensor in tensors:
            check_summable(tensor.dtype)
        key, group = self.begin(rank, "sum", tensors), self._group(rank)
        return [
            self.hand.sum_at(tensor, rank, group[0], group, f"{key}/{place}/first")
            for place, tensor in enumerate(tensors)
        ]

    def broadcast(
        self, tensors: Sequence[tf.Tensor | tf.TensorSpec], rank: int
    ) -> list[tf.Tensor]:
        key, group = self.begin(rank), self._group(rank)
        return [
            self.hand.share_from(tensor, rank, group[0], group, f"{key}/{place}/all")
            for place, tensor in enumerate(tensors)
        ]

    def reduce_scatter(
        self, tensors: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        key = self.begin(rank, "reduce-scatter", tensors)
        results = []
        for place, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
            with tf.device(self.devices[rank]):
                flat = tf.reshape(tensor, [-1])
            own = None
            # Every replica is the root of its own shard: all of them add at once.
            for part, root in enumerate(self._group(rank)):
                with tf.device(self.devices[rank]):
                    piece = cut(flat, layout, part)
                # A shard that is all padding has no owner: no empty hand-over.
                if layout.length(part):
                    piece = self._sum_up(piece, rank, root, f"{key}/{place}/{root}")
                if root == rank:
                    with tf.device(self.devices[rank]):
                        own = to_shard(piece, layout, part)
            results.append(own)
        return results

    def all_gather(
        self, shards: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        key = self.begin(rank, "gather", whole_specs(shards, layouts))
        group = self._group(rank)
        wholes = []
        for place, (shard, layout) in enumerate(zip(shards, layouts, strict=True)):
            parts = []
            for number, owner in enumerate(group):
                length = layout.length(number)
                if owner == rank:
                    with tf.device(self.devices[rank]):
                        part = elements_of(shard, layout, number)
                else:
                    part = tf.TensorSpec([length], shard.dtype)
                if length:
                    name = f"{key}/{place}/{owner}"
                    part = self.hand.share_from(part, rank, owner, group, name)
                parts.append(part)
            with tf.device(self.devices[rank]):
                wholes.append(whole_from_parts(parts, layout))
        return wholes

    def gather(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        key, group = self.begin(rank), self._group(rank)
        return self.hand.all_gather(tensor, rank, group, f"{key}/gather")

    def all_reduce_rows(
        self, slices: tf.IndexedSlices, rank: int, how: RowSum
    ) -> tf.IndexedSlices:
        """See `Transport`. Each host's leader adds rows of equal index and sends one
        set of rows to the root, which adds for all replicas."""
        if not how.summed:
            return super().all_reduce_rows(slices, rank, how)
        key = self.begin(rank)
        root = self._choose_root(key, slices.values, rank)
        within, leader, leaders = self._route(root, rank)
        rows = self.hand.rows_at(
            slices, rank, leader, within, f"{key}/within", summed=True
        )
        if rank == leader and len(leaders) > 1:
            rows = self.hand.rows_at(
                rows, rank, root, leaders, f"{key}/across", summed=True
            )
            rows = self.hand.share_rows(rows, rank, root, leaders, f"{key}/back")
        return self.hand.share_rows(rows, rank, leader, within, f"{key}/down")

    def all_to_all(self, rows: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        key, group = self.begin(rank), self._group(rank)
        with tf.device(self.devices[rank]):
            outgoing = tf.unstack(rows, len(group))
        return self.hand.all_to_all(outgoing, rank, group, f"{key}/swap")

    def _group(self, rank: int) -> tuple[int, ...]:
        """The replicas that exchange with this one."""
        return next(group for group in self.groups if rank in group)

    def _route(self, root: int, rank: int) -> tuple[Sequence[int], int, Sequence[int]]:
        """The ranks of this host, their leader, and the leaders of all hosts."""
        if len(self.groups) > 1:
            return self._group(rank), root, [root]
        within = self.topology.within_host_group_of(rank)
        # The leader of each host has the root's local rank.
        local = self.topology.local_rank_of(root)
        return within, within[local], self.topology.across_host_groups[local]

    def _sum_up(self, tensor: tf.Tensor, rank: int, root: int, key: str) -> tf.Tensor:
        """The sum over all replicas at `root`; a partial sum, or none, elsewhere."""
        within, leader, leaders = self._route(root, rank)
        total = self.hand.sum_at(tensor, rank, leader, within, f"{key}/within")
        if rank == leader and len(leaders) > 1:
            total = self.hand.sum_at(total, rank, root, leaders, f"{key}/across")
        return total

    def begin_roots(self) -> None:
        """Starts over with each trace, so that two traces choose the same roots."""
        self._root_bytes = [0] * self.replicas
        self._root_of_call: dict[str, int] = {}

    def _choose_root(self, key: str, tensor: tf.Tensor, rank: int) -> int:
        """The replica with the fewest bytes to add so far; the same in a whole group.

        The first replica to reach a call decides: the order of calls, unlike that of
        replicas, is the same in every trace.
        """
        if key not in self._root_of_call:
            root = self._root_bytes.index(min(self._root_bytes))
            elements = tensor.shape.num_elements() or 1
            self._root_bytes[root] += elements * tensor.dtype.size
            self._root_of_call[key] = root
        return self._group(rank)[self._root_of_call[key]]

    def reshard(
        self, shards: Tensors, before: Layouts, after: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        """This replica's shards by the layouts `after`, from all shards by `before`."""
        key = self.begin(rank, "reshard", whole_specs(shards, before))
        group = self._group(rank)
        own_part, results = group.index(rank), []
        for place, (shard, old, new) in enumerate(
            zip(shards, before, after, strict=True)
        ):
            with tf.device(self.devices[rank]):
                own = elements_of(shard, old, own_part)
            start, _ = old.bounds(own_part)
            pieces = []
            for part, peer in enumerate(group):
                low, high = overlap(old.bounds(own_part), new.bounds(part))
                if low < high:
                    with tf.device(self.devices[rank]):
                        piece = own[low - start : high - start]
                    if peer == rank:
                        kept = piece
                    else:
                        self.hand.send(piece, rank, peer, f"{key}/{place}")
            for part, peer in enumerate(group):
                low, high = overlap(old.bounds(part), new.bounds(own_part))
                if low < high and peer == rank:
                    pieces.append(kept)
                elif low < high:
                    like = tf.TensorSpec([high - low], shard.dtype)
                    got = self.hand.receive(like, peer, rank, f"{key}/{place}")
                    pieces.append(got)
            with tf.device(self.devices[rank]):
                joined = tf.concat(pieces, axis=0) if pieces else own[:0]
                results.append(to_shard(joined, new, own_part))
        return results
