"""Replicas of one process hand over tensors: no packing, no copies.

On logical CPUs all replicas share memory, so the cheapest exact sum is: one replica
(the root, chosen by size) reads all tensors in place, adds them, and shares the result;
each replica reads the same buffer. With two levels the sum is a tree: within each host
to its leader, between the leaders, and back. All replicas get the same bits in every
run: the root adds in rank order, two at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdp.exchange.engine import Engine, next_group_key
from tfdp.exchange.packing import Layouts, Tensors, cut, pad_shard, whole_from_parts
from tfdp.exchange.send_receive import SendReceive
from tfdp.exchange.wire_types import check_summable
from tfdp.plan.topology import Topology


class InProcessEngine(Engine):
    """Sums over replicas of one process, by handing over tensors.

    Cost per replica and tensor of n bytes: the root reads N x n and writes n bytes of
    memory; logical CPUs copy nothing. Between GPUs the hand-over is a device copy.
    """

    name = "in_process"
    packs = False

    def __init__(self, devices: Sequence[str], topology: Topology):
        super().__init__(devices, topology)
        self._hand = SendReceive(self.devices, next_group_key(), self.traffic)
        self._root_bytes = dict.fromkeys(topology.all_ranks, 0)
        self._root_of_call: dict[int, int] = {}
        self._swap_numbers = [0] * len(self.devices)

    def begin_run(self) -> None:
        super().begin_run()
        self._hand.begin_run(tf.compat.v1.get_default_graph())
        self._root_bytes = dict.fromkeys(self.topology.all_ranks, 0)
        self._swap_numbers = [max(self._swap_numbers)] * len(self.devices)
        # Each trace starts over, so that two traces of one step choose the same roots.
        self._root_of_call = {}

    def end_run(self) -> None:
        self._hand.end_run()

    def all_reduce(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        check_summable(tensor.dtype)
        call = self.next_call_number(rank, "sum", [tensor])
        self._hand.pin_to_replica(rank)
        root = self._choose_root(call, tensor)
        within, leader, leaders = self._route(root, rank)
        total = self._sum_up(tensor, rank, root, f"{call}")
        if rank == leader and len(leaders) > 1:
            total = self._hand.share_from(total, rank, root, leaders, f"{call}/back")
        return self._hand.share_from(
            total, rank, leader, within, f"{call}/down", tensor
        )

    @property
    def host_groups(self) -> tuple[tuple[int, ...], ...] | None:
        """The simulated hosts."""
        groups = self.topology.within_host_groups
        return groups if len(groups) > 1 else None

    def all_reduce_within(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        check_summable(tensor.dtype)
        call = self.next_call_number(rank)
        self._hand.pin_to_replica(rank)
        group = self.topology.within_host_group_of(rank)
        root = group[call % len(group)]
        total = self._hand.sum_at(tensor, rank, root, group, f"{call}/within")
        return self._hand.share_from(total, rank, root, group, f"{call}/down", tensor)

    def reduce_scatter_bucket(
        self, tensors: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        call = self.next_call_number(rank, "reduce-scatter", tensors)
        self._hand.pin_to_replica(rank)
        results = []
        for place, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
            with tf.device(self.devices[rank]):
                flat = tf.reshape(tensor, [-1])
            own = None
            # Every replica is the root of its own shard: all of them add at once.
            for root in self.topology.all_ranks:
                with tf.device(self.devices[rank]):
                    piece = cut(flat, layout, root)
                # A shard that is all padding has no owner: no empty hand-over.
                if layout.length(root):
                    piece = self._sum_up(piece, rank, root, f"{call}/{place}/{root}")
                if root == rank:
                    own = piece
            with tf.device(self.devices[rank]):
                results.append(pad_shard(own, layout, rank))
        return results

    def all_gather_bucket(
        self, shards: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        call = self.next_call_number(rank, "gather", shards)
        self._hand.pin_to_replica(rank)
        ranks = self.topology.all_ranks
        wholes = []
        for place, (shard, layout) in enumerate(zip(shards, layouts, strict=True)):
            parts = []
            for owner in ranks:
                length = layout.length(owner)
                if owner == rank:
                    with tf.device(self.devices[rank]):
                        part = shard[:length]
                else:
                    part = tf.TensorSpec([length], shard.dtype)
                if length:
                    key = f"{call}/{place}/{owner}"
                    part = self._hand.share_from(part, rank, owner, ranks, key)
                parts.append(part)
            with tf.device(self.devices[rank]):
                wholes.append(whole_from_parts(parts, layout))
        return wholes

    def _route(self, root: int, rank: int) -> tuple[Sequence[int], int, Sequence[int]]:
        """The ranks of this host, their leader, and the leaders of all hosts."""
        within = self.topology.within_host_group_of(rank)
        # The leader of each host has the root's local rank.
        local = self.topology.local_rank_of(root)
        return within, within[local], self.topology.across_host_groups[local]

    def _sum_up(self, tensor: tf.Tensor, rank: int, root: int, key: str) -> tf.Tensor:
        """The sum over all replicas at `root`; a partial sum, or none, elsewhere."""
        within, leader, leaders = self._route(root, rank)
        total = self._hand.sum_at(tensor, rank, leader, within, f"{key}/within")
        if rank == leader and len(leaders) > 1:
            total = self._hand.sum_at(total, rank, root, leaders, f"{key}/across")
        return total

    def all_gather(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        call = self.next_call_number(rank)
        self._hand.pin_to_replica(rank)
        return self._hand.all_gather(tensor, rank, f"{call}/gather")

    def all_reduce_rows(
        self,
        slices: tf.IndexedSlices,
        rank: int,
        label: str,
        *,
        summed: bool = False,
        wire_dtype: str | None = None,
    ) -> tf.IndexedSlices:
        """See `Engine`. Each host's leader adds rows of equal index and sends one set
        of rows to the root, which adds for all replicas."""
        if not summed:
            return super().all_reduce_rows(slices, rank, label)
        call = self.next_call_number(rank)
        self._hand.pin_to_replica(rank)
        root = self._choose_root(call, slices.values)
        within, leader, leaders = self._route(root, rank)
        rows = self._hand.rows_at(
            slices, rank, leader, within, f"{call}/within", summed=True
        )
        if rank == leader and len(leaders) > 1:
            rows = self._hand.rows_at(
                rows, rank, root, leaders, f"{call}/across", summed=True
            )
            rows = self._hand.share_rows(rows, rank, root, leaders, f"{call}/back")
        return self._hand.share_rows(rows, rank, leader, within, f"{call}/down")

    def all_to_all(self, rows: tf.Tensor, rank: int) -> tf.Tensor:
        self.next_call_number(rank)
        with tf.device(self.devices[rank]):
            outgoing = tf.unstack(rows, self.replicas)
        return self.all_to_all_among(outgoing, rank, self.topology.all_ranks)

    def all_to_all_among(
        self, outgoing: Tensors, rank: int, group: Sequence[int]
    ) -> tf.Tensor:
        """All members' tensors for this one, stacked; every member of `group` calls."""
        # Numbered separately: replicas outside the group do not count.
        number = self._swap_numbers[rank]
        self._swap_numbers[rank] += 1
        self._hand.pin_to_replica(rank)
        return self._hand.all_to_all(outgoing, rank, group, f"swap {number}")

    def sum_at_first(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        """The sums over the replica's host, at its first replica; all replicas call."""
        call = self.next_call_number(rank)
        self._hand.pin_to_replica(rank)
        group = self.topology.within_host_group_of(rank)
        return [
            self._hand.sum_at(tensor, rank, group[0], group, f"{call}/{place}/first")
            for place, tensor in enumerate(tensors)
        ]

    def share_from_first(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        """The tensors of the host's first replica, on all its replicas, which pass
        tensors of equal shapes."""
        call = self.next_call_number(rank)
        self._hand.pin_to_replica(rank)
        group = self.topology.within_host_group_of(rank)
        return [
            self._hand.share_from(tensor, rank, group[0], group, f"{call}/{place}/all")
            for place, tensor in enumerate(tensors)
        ]

    def broadcast(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        call = self.next_call_number(rank)
        self._hand.pin_to_replica(rank)
        ranks, key = self.topology.all_ranks, f"{call}/broadcast"
        return self._hand.share_from(tensor, rank, 0, ranks, key, tensor)

    def _choose_root(self, call: int, tensor: tf.Tensor) -> int:
        """The replica with the fewest bytes to add so far; the same on all ranks.

        The first replica to reach a call decides: the order of calls, unlike that of
        replicas, is the same in every trace.
        """
        if call not in self._root_of_call:
            root = min(self._root_bytes, key=lambda r: (self._root_bytes[r], r))
            elements = tensor.shape.num_elements() or 1
            self._root_bytes[root] += elements * tensor.dtype.size
            self._root_of_call[call] = root
        return self._root_of_call[call]
