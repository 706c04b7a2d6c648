"""Replicas of one process hand tensors to each other: no packing, no copies.

On logical CPUs all replicas share the memory, so the cheapest exact sum is: one
replica (the root) reads everybody's tensor where it lies, adds, and hands the result
back; each reads the same buffer. `Send` and `Recv` over the step's own rendezvous do
that without a copy and without leaving the replica context. Roots are spread over the
replicas by size, so that all of them add.

With two levels the sum is a tree: within each host to the host's leader, between the
leaders, and back. All replicas get the same bits, the same in every run: additions run
in rank order, two at a time.

Where the danger is: every `Send` must be free of TensorFlow's automatic order (see
`names.run_independently`; `Recv` is free of it anyway), and a conditional that holds
them must own a resource of this replica, or the conditionals of two replicas would be
chained and wait for each other; `_touch_token` gives it one.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdp._private import names
from tfdp.exchange.engine import Engine, next_group_key
from tfdp.exchange.shard_pieces import cut, pad_shard, whole_from_parts
from tfdp.exchange.wire_types import check_summable
from tfdp.plan.shards import ShardLayout
from tfdp.plan.topology import Topology

__all__ = ["InProcessEngine"]


class InProcessEngine(Engine):
    """Sums over replicas that live in one process, by handing tensors over.

    Cost per replica and tensor of n bytes: the root reads N x n and writes n bytes of
    memory; nothing is copied and nothing crosses a link on logical CPUs. Between GPUs
    the hand-over is a device-to-device copy.
    """

    name = "in_process"
    packs = False

    def __init__(self, devices: Sequence[str], topology: Topology):
        super().__init__(devices, topology)
        # Strategies of one process share TensorFlow's rendezvous: each has its names.
        self._key = next_group_key()
        self._root_bytes = dict.fromkeys(topology.all_ranks, 0)
        self._root_of_call: dict[int, int] = {}
        self._touched: dict[tuple[int, int], tf.Graph] = {}
        self._tokens = [names.make_token(device) for device in self.devices]

    def begin_run(self) -> None:
        super().begin_run()
        self._root_bytes = dict.fromkeys(self.topology.all_ranks, 0)
        # Each trace begins anew, so that two traces of one step choose alike.
        self._root_of_call = {}
        self._touched = {}

    def all_reduce(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        check_summable(tensor.dtype)
        call = self.next_call_number(rank)
        self._touch_token(rank)
        root = self._choose_root(call, tensor)
        within, leader, leaders = self._way_to(root, rank)
        total = self._sum_up(tensor, rank, root, f"{call}")
        if rank == leader and len(leaders) > 1:
            total = self._share_from(total, rank, root, leaders, f"{call}/back")
        return self._share_from(total, rank, leader, within, f"{call}/down", tensor)

    def reduce_scatter_bucket(
        self,
        tensors: Sequence[tf.Tensor],
        layouts: Sequence[ShardLayout],
        rank: int,
        label: str,
    ) -> list[tf.Tensor]:
        call = self.next_call_number(rank)
        self._touch_token(rank)
        results = []
        for place, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
            with tf.device(self.devices[rank]):
                flat = tf.reshape(tensor, [-1])
            own = None
            # Every replica is the root of its own shard: all of them add at once.
            for root in self.topology.all_ranks:
                with tf.device(self.devices[rank]):
                    piece = cut(flat, layout, root)
                # A shard that is all padding is nobody's: no empty hand-over.
                if layout.length(root):
                    piece = self._sum_up(piece, rank, root, f"{call}/{place}/{root}")
                if root == rank:
                    own = piece
            with tf.device(self.devices[rank]):
                results.append(pad_shard(own, layout, rank))
        return results

    def all_gather_bucket(
        self,
        shards: Sequence[tf.Tensor],
        layouts: Sequence[ShardLayout],
        rank: int,
        label: str,
    ) -> list[tf.Tensor]:
        call = self.next_call_number(rank)
        self._touch_token(rank)
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
                    part = self._share_from(part, rank, owner, ranks, key)
                parts.append(part)
            with tf.device(self.devices[rank]):
                wholes.append(whole_from_parts(parts, layout))
        return wholes

    def _way_to(self, root: int, rank: int) -> tuple[Sequence[int], int, Sequence[int]]:
        """The ranks of this host, their leader, and the leaders of all hosts."""
        within = self.topology.within_host_group_of(rank)
        # The leader of each host sits at the root's place within its host.
        local = self.topology.local_rank_of(root)
        return within, within[local], self.topology.across_host_groups[local]

    def _sum_up(self, tensor: tf.Tensor, rank: int, root: int, key: str) -> tf.Tensor:
        """The sum over all replicas at `root`; a part of it, or none, elsewhere."""
        within, leader, leaders = self._way_to(root, rank)
        total = self._sum_at(tensor, rank, leader, within, f"{key}/within")
        if rank == leader and len(leaders) > 1:
            total = self._sum_at(total, rank, root, leaders, f"{key}/across")
        return total

    def all_gather(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        call = self.next_call_number(rank)
        self._touch_token(rank)
        ranks = self.topology.all_ranks
        # All sends before the first receive: none of them waits for another.
        for peer in ranks:
            if peer != rank:
                self._send(tensor, rank, peer, f"{call}/gather")
        parts = [
            tensor
            if peer == rank
            else self._receive(tensor, peer, rank, f"{call}/gather", partly=True)
            for peer in ranks
        ]
        with tf.device(self.devices[rank]):
            return tf.concat(parts, axis=0)

    def broadcast(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        call = self.next_call_number(rank)
        self._touch_token(rank)
        ranks = self.topology.all_ranks
        return self._share_from(tensor, rank, 0, ranks, f"{call}/broadcast", tensor)

    def _choose_root(self, call: int, tensor: tf.Tensor) -> int:
        """The replica with the fewest bytes to add so far; the same on all ranks.

        The first replica to reach a call decides, because only the order of calls,
        not the order of replicas, is the same in every trace.
        """
        if call not in self._root_of_call:
            root = min(self._root_bytes, key=lambda r: (self._root_bytes[r], r))
            elements = tensor.shape.num_elements() or 1
            self._root_bytes[root] += elements * tensor.dtype.size
            self._root_of_call[call] = root
        return self._root_of_call[call]

    def _sum_at(
        self,
        tensor: tf.Tensor,
        rank: int,
        root: int,
        group: Sequence[int],
        key: str,
    ) -> tf.Tensor:
        """The sum over `group` at its `root`; elsewhere the tensor, handed over."""
        if len(group) == 1:
            return tensor
        if rank != root:
            self._send(tensor, rank, root, key)
            return tensor
        # By rank, and not as they come: float addition depends on the order.
        parts = [
            tensor if peer == rank else self._receive(tensor, peer, rank, key)
            for peer in group
        ]
        with tf.device(self.devices[rank]):
            return _sum_in_order(parts)

    def _share_from(
        self,
        tensor: tf.Tensor,
        rank: int,
        root: int,
        group: Sequence[int],
        key: str,
        like: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """The root's tensor, on every member of `group`."""
        if len(group) == 1:
            return tensor
        if rank != root:
            return self._receive(tensor if like is None else like, root, rank, key)
        for peer in group:
            if peer != rank:
                self._send(tensor, rank, peer, key)
        return tensor

    def _send(self, tensor: tf.Tensor, source: int, target: int, key: str) -> None:
        self.traffic.add(source, tensor)
        with tf.device(self.devices[source]):
            op = tf.raw_ops.Send(
                tensor=tensor,
                tensor_name=self._rendezvous_name(key, source, target),
                send_device=self.devices[source],
                # Both ends are of this process: any number does that both have.
                send_device_incarnation=1,
                recv_device=self.devices[target],
                client_terminated=False,
            )
        names.run_independently(op)

    def _receive(
        self,
        like: tf.Tensor,
        source: int,
        target: int,
        key: str,
        partly: bool = False,
    ) -> tf.Tensor:
        """Takes over a tensor of the type and shape of `like` (but its first
        dimension, when `partly`)."""
        with tf.device(self.devices[target]):
            tensor = tf.raw_ops.Recv(
                tensor_type=like.dtype,
                tensor_name=self._rendezvous_name(key, source, target),
                send_device=self.devices[source],
                send_device_incarnation=1,
                recv_device=self.devices[target],
                client_terminated=False,
            )
            shape = like.shape
            if partly and shape.rank is not None:
                shape = tf.TensorShape([None]).concatenate(shape[1:])
            if shape.is_fully_defined():
                # An op of the graph, not `set_shape`: TensorFlow's optimizer reorders
                # products where it knows a shape, and must do so on every replica or
                # on none, or their weights drift apart by the last bit. No copy.
                return tf.ensure_shape(tensor, shape)
        tensor.set_shape(shape)
        return tensor

    def _rendezvous_name(self, key: str, source: int, target: int) -> str:
        return f"tfdp/{self._key}/{key}/{source}-{target}"

    def _touch_token(self, rank: int) -> None:
        """Gives an inner graph a resource of this replica (see the top), once."""
        graph = tf.compat.v1.get_default_graph()
        if graph is self.run_graph or (rank, id(graph)) in self._touched:
            return
        self._touched[rank, id(graph)] = graph  # kept, so that its id stays its own
        with tf.device(self.devices[rank]):
            tf.raw_ops.VarIsInitializedOp(resource=self._tokens[rank].handle)


def _sum_in_order(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """((p0 + p1) + p2) + ... with the same bits in every run.

    Not by AddN, which would look at each part once: it adds into whichever part nobody
    else holds at that moment, so that the order, and the last bit, changes from run to
    run. And where TensorFlow's memory optimizer knows the shape, it replaces an AddN of
    three or more by a variable that starts as zeros, to which each part is added; the
    zeros, as large as all gradients together, stay in memory as long as the graph.

    The graph optimizer would make an AddN of this chain, too; it leaves alone what
    waits for something that is not its input.
    """
    total = parts[0]
    for place, part in enumerate(parts[1:], start=1):
        with tf.control_dependencies(parts[place + 1 : place + 2]):
            total = tf.add(total, part)
    return total
