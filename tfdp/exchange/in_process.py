"""Replicas of one process hand over tensors: no packing, no copies.

On logical CPUs all replicas share memory, so the cheapest exact sum is: one replica
(the root, chosen by size) reads all tensors in place, adds them, and shares the result;
each replica reads the same buffer. With two levels the sum is a tree: within each host
to its leader, between the leaders, and back. All replicas get the same bits in every
run: the root adds in rank order, two at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from tfdp.exchange.packing import Tensors, whole_specs, wholes_from_parts
from tfdp.exchange.send_receive import SendReceive, sum_in_order
from tfdp.exchange.sparse import RowSum
from tfdp.exchange.transport import Transport, next_group_key
from tfdp.exchange.wire_types import check_summable
from tfdp.plan.shards import Layouts
from tfdp.plan.topology import Topology

# By place in the group: tensors for members, and specs of those of members.
Sent: TypeAlias = Mapping[int, tf.Tensor]
Likes: TypeAlias = Mapping[int, tf.TensorSpec]


class InProcess(Transport):
    """Sums over replicas of one process, by handing over tensors.

    Cost per replica and tensor of n bytes: the root reads N x n and writes n bytes of
    memory; logical CPUs copy nothing. Between GPUs the hand-over is a device copy.
    """

    name = "in_process"
    reduces_buckets = False
    keeps_to_groups = True
    #: Whether runs of one function must end in order even if they receive nothing.
    orders_runs = False

    def __init__(self, devices: Sequence[str], topology: Topology):
        super().__init__(devices, topology)
        self._hand = SendReceive(self.devices, next_group_key(), self.traffic)
        # By group, the bytes that each member has to add; by call, who adds.
        self._root_bytes: dict[tuple[int, ...], list[int]] = {}
        self._root_of_call: dict[str, int] = {}

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        with super().run():
            self._hand.tokens.begin_run()
            # Each trace starts over, so that two traces choose the same roots.
            self._root_bytes.clear()
            self._root_of_call.clear()
            yield
            self._hand.tokens.end_run(always=self.orders_runs)

    def _begin(
        self, rank: int, what: str = "", tensors: Tensors = ()
    ) -> tuple[str, tuple[int, ...]]:
        """The key of an exchange that the replica begins to build, and its group."""
        group = self.groups.of(rank)
        call = self.order.next(rank, what, tensors, group)
        self._hand.tokens.pin_to_replica(rank)
        is_whole = self.groups == self.topology.everyone
        return f"{call}" if is_whole else f"{'-'.join(map(str, group))} {call}", group

    def all_reduce(
        self, tensors: Tensors, rank: int, label: str, wire_dtype: str | None = None
    ) -> list[tf.Tensor]:
        return [self._all_reduce(tensor, rank) for tensor in tensors]

    def _all_reduce(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        check_summable(tensor.dtype)
        key, group = self._begin(rank, "sum", [tensor])
        root = self._choose_root(key, tensor, group)
        within, leader, leaders = self._route(root, rank)
        total = self._sum_up(tensor, rank, root, key)
        if rank == leader and len(leaders) > 1:
            total = self._hand.share_from(total, rank, root, leaders, f"{key}/back")
        return self._hand.share_from(total, rank, leader, within, f"{key}/down", tensor)

    def reduce(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        for tensor in tensors:
            check_summable(tensor.dtype)
        key, group = self._begin(rank, "sum", tensors)
        return [
            self._hand.sum_at(tensor, rank, group[0], group, f"{key}/{place}/first")
            for place, tensor in enumerate(tensors)
        ]

    def broadcast(
        self, tensors: Sequence[tf.Tensor | tf.TensorSpec], rank: int
    ) -> list[tf.Tensor]:
        key, group = self._begin(rank)
        return [
            self._hand.share_from(tensor, rank, group[0], group, f"{key}/{place}/all")
            for place, tensor in enumerate(tensors)
        ]

    def reduce_scatter(
        self, tensors: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        key, group = self._begin(rank, "reduce-scatter", tensors)
        results = []
        for place, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
            with tf.device(self.devices[rank]):
                flat = tf.reshape(tensor, [-1])
            # Every replica is the root of its own part: all of them add at once.
            for number, root in enumerate(group):
                with tf.device(self.devices[rank]):
                    part = flat[slice(*layout.bounds(number))]  # a view if aligned
                # An empty part has no owner: no empty hand-over.
                if layout.length(number):
                    part = self._sum_up(part, rank, root, f"{key}/{place}/{root}")
                if root == rank:
                    results.append(part)
        return results

    def all_gather(
        self, parts: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        key, group = self._begin(rank, "gather", whole_specs(parts, layouts))
        of_all = []
        for place, (own, layout) in enumerate(zip(parts, layouts, strict=True)):
            shared = []
            for number, owner in enumerate(group):
                length = layout.length(number)
                part = own if owner == rank else tf.TensorSpec([length], own.dtype)
                if length:
                    name = f"{key}/{place}/{owner}"
                    part = self._hand.share_from(part, rank, owner, group, name)
                shared.append(part)
            of_all.append(shared)
        with tf.device(self.devices[rank]):
            return wholes_from_parts(of_all, layouts)

    def gather(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        key, group = self._begin(rank)
        return self._hand.all_gather(tensor, rank, group, f"{key}/gather")

    def combine(self, tensors: Tensors, rank: int, how: RowSum) -> list[tf.Tensor]:
        """See `Transport`. If sums are smaller, each host's leader combines its lists,
        and sends one to the root, which combines for all replicas."""
        if not how.summed:
            return super().combine(tensors, rank, how)
        key, group = self._begin(rank)
        root = self._choose_root(key, tensors[0], group)
        within, leader, leaders = self._route(root, rank)
        own = self._hand.combine_at(tensors, rank, leader, within, f"{key}/within", how)
        if rank == leader and len(leaders) > 1:
            own = self._hand.combine_at(own, rank, root, leaders, f"{key}/across", how)
            own = self._hand.share_lists(own, rank, root, leaders, f"{key}/back")
        return self._hand.share_lists(own, rank, leader, within, f"{key}/down")

    def all_to_all(self, rows: tf.Tensor, rank: int, label: str) -> tf.Tensor:
        key, group = self._begin(rank)
        with tf.device(self.devices[rank]):
            outgoing = tf.unstack(rows, len(group))
        return self._hand.all_to_all(outgoing, rank, group, f"{key}/swap")

    def _route(self, root: int, rank: int) -> tuple[Sequence[int], int, Sequence[int]]:
        """The members of the group on this host, their leader, and all leaders."""
        topology = self.topology
        if self.groups != topology.everyone:
            return self.groups.of(rank), root, [root]
        # The leader of each host has the root's place in its host.
        within = topology.within_hosts.of(rank)
        leader = within[topology.within_hosts.place_of(root)]
        return within, leader, topology.across_hosts.of(root)

    def _sum_up(self, tensor: tf.Tensor, rank: int, root: int, key: str) -> tf.Tensor:
        """The sum over all replicas at `root`; a partial sum, or none, elsewhere."""
        within, leader, leaders = self._route(root, rank)
        total = self._hand.sum_at(tensor, rank, leader, within, f"{key}/within")
        if rank == leader and len(leaders) > 1:
            total = self._hand.sum_at(total, rank, root, leaders, f"{key}/across")
        return total

    def _choose_root(self, key: str, tensor: tf.Tensor, group: tuple[int, ...]) -> int:
        """The member with the fewest bytes to add so far; the same for all of them.

        The first replica to reach a call decides: the order of calls, unlike that of
        replicas, is the same in every trace.
        """
        if key not in self._root_of_call:
            loads = self._root_bytes.setdefault(group, [0] * len(group))
            place = loads.index(min(loads))
            loads[place] += (tensor.shape.num_elements() or 1) * tensor.dtype.size
            self._root_of_call[key] = group[place]
        return self._root_of_call[key]

    def swap(
        self, sent: Sent, likes: Likes, rank: int, whole: Sequence[tf.TensorSpec] = ()
    ) -> list[tf.Tensor]:
        """Sends tensors to members of the group, by place; returns what comes from
        those of `likes`, in their order. `whole`: what they are parts of, if known."""
        key, group = self._begin(rank, "swap" if whole else "", whole)
        for place, tensor in sent.items():
            if group[place] != rank:
                self._hand.send(tensor, rank, group[place], key)
        return [
            sent[place]
            if group[place] == rank
            else self._hand.receive(like, group[place], rank, key)
            for place, like in likes.items()
        ]

    def lend(
        self, like: tf.Tensor | tf.TensorSpec, owner: int, at: int | None, rank: int
    ) -> tf.Tensor:
        """The tensor of the member `owner`, for `rank` to compute with on the device of
        the member `at` (None: its own). Where that is the owner's it is no copy."""
        key, group = self._begin(rank)
        source = group[owner]
        targets = {peer: peer if at is None else group[at] for peer in group}
        if rank != source:
            return self._hand.receive(like, source, targets[rank], f"{key}/{rank}")
        for peer in group:
            if peer != rank:
                self._hand.send(like, source, targets[peer], f"{key}/{peer}")
        with tf.device(self.devices[targets[rank]]):
            return tf.identity(like)

    def give_back(
        self, gradient: tf.Tensor, owner: int, at: int | None, rank: int
    ) -> tf.Tensor | None:
        """The sum of the gradients of what `lend` lent, at the owner; elsewhere None.
        Each is on the device where `rank` computed."""
        key, group = self._begin(rank, "sum", [gradient])
        target = group[owner]
        sources = {peer: peer if at is None else group[at] for peer in group}
        if rank != target:
            self._hand.send(gradient, sources[rank], target, f"{key}/{rank}")
            return None
        parts = [
            gradient
            if peer == rank
            else self._hand.receive(gradient, sources[peer], target, f"{key}/{peer}")
            for peer in group
        ]
        with tf.device(self.devices[target]):
            return sum_in_order(parts)

    def to_each(
        self, rows: tf.Tensor, numbers: tf.Tensor, rank: int, label: str
    ) -> tf.Tensor:
        """See `Transport`."""
        members = len(self.groups.of(rank))
        with tf.device(self.devices[rank]):
            like = tf.TensorSpec([None, *rows.shape[1:]], rows.dtype)
            pieces = tf.split(rows, numbers[self.part_of(rank)], num=members)
            sent = dict(enumerate(pieces))
            return tf.concat(self.swap(sent, dict.fromkeys(sent, like), rank), 0)

    def combine_at_first(
        self, tensors: Tensors, rank: int, how: RowSum
    ) -> list[tf.Tensor]:
        """`combine` at the first replica; elsewhere the own list."""
        key, group = self._begin(rank)
        key = f"{key}/first"
        return self._hand.combine_at(tensors, rank, group[0], group, key, how)

    def broadcast_lists(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        """The tensors of the first replica, on all; their lengths may differ."""
        key, group = self._begin(rank)
        return self._hand.share_lists(tensors, rank, group[0], group, f"{key}/all")
