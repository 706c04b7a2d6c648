"""Hands over tensors between replicas of this process, without a copy.

`Send` and `Recv` over the step's own rendezvous work in a graph, in replica context.

Every `Send` opts out of automatic control dependencies (`Recv` has none), and `tokens`
order the conditionals and functions that contain them.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdp.exchange.ordering import ReplicaTokens, run_independently
from tfdp.exchange.packing import Tensors
from tfdp.exchange.sparse import RowSum
from tfdp.exchange.traffic import TrafficCount


class SendReceive:
    """Sums and shares tensors among replicas of one process.

    A key identifies a hand-over: both ends use it, once per trace. `group_key` is
    unique in this process; `traffic` counts what is sent.
    """

    def __init__(self, devices: Sequence[str], group_key: int, traffic: TrafficCount):
        self.devices = tuple(devices)
        # Strategies of one process share TensorFlow's rendezvous: names must differ.
        self._key = group_key
        self._traffic = traffic
        self.tokens = ReplicaTokens(self.devices)

    def sum_at(
        self, tensor: tf.Tensor, rank: int, root: int, group: Sequence[int], key: str
    ) -> tf.Tensor:
        """The sum over `group` at its `root`; elsewhere the sent tensor."""
        if len(group) == 1:
            return tensor
        if rank != root:
            self.send(tensor, rank, root, key)
            return tensor
        # In rank order, not in order of arrival: float addition depends on the order.
        parts = [
            tensor if peer == rank else self.receive(tensor, peer, rank, key)
            for peer in group
        ]
        with tf.device(self.devices[rank]):
            return sum_in_order(parts)

    def share_from(
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
            return self.receive(tensor if like is None else like, root, rank, key)
        for peer in group:
            if peer != rank:
                self.send(tensor, rank, peer, key)
        return tensor

    def combine_at(
        self,
        tensors: Tensors,
        rank: int,
        root: int,
        group: Sequence[int],
        key: str,
        how: RowSum,
    ) -> list[tf.Tensor]:
        """The lists of `group`, combined at `root`; elsewhere the sent one."""
        places = list(enumerate(tensors))
        if rank != root:
            for place, tensor in places:
                self.send(tensor, rank, root, f"{key}/{place}")
            return list(tensors)
        parts = [
            tensors
            if peer == rank
            else [
                self.receive(tensor, peer, rank, f"{key}/{place}", partly=True)
                for place, tensor in places
            ]
            for peer in group
        ]
        with tf.device(self.devices[rank]):
            return how.combine(parts)

    def share_lists(
        self, tensors: Tensors, rank: int, root: int, group: Sequence[int], key: str
    ) -> list[tf.Tensor]:
        """The root's tensors, on every member of `group`; their lengths may differ."""
        return [
            self._share_part(tensor, rank, root, group, f"{key}/{place}")
            for place, tensor in enumerate(tensors)
        ]

    def _share_part(
        self, part: tf.Tensor, rank: int, root: int, group: Sequence[int], key: str
    ) -> tf.Tensor:
        like = tf.TensorSpec([None, *part.shape[1:]], part.dtype)
        shared = self.share_from(part, rank, root, group, key, like)
        if rank != root or len(group) == 1:
            return shared
        # The root sends to itself, too. Otherwise TensorFlow's optimizer would have
        # more static shape there than elsewhere, and multiply in another order.
        self._send(part, rank, rank, key)
        return self.receive(like, rank, rank, key)

    def all_gather(
        self, tensor: tf.Tensor, rank: int, group: Sequence[int], key: str
    ) -> tf.Tensor:
        """All members' tensors, joined along the first axis in rank order."""
        parts = self._swap([tensor] * len(group), rank, group, key, partly=True)
        with tf.device(self.devices[rank]):
            return tf.concat(parts, axis=0)

    def all_to_all(
        self, outgoing: Tensors, rank: int, group: Sequence[int], key: str
    ) -> tf.Tensor:
        """The tensors of all members of `group` for this one, stacked by sender.

        `outgoing`: one tensor per member, of equal shapes except for unknown lengths.
        """
        parts = self._swap(outgoing, rank, group, key)
        with tf.device(self.devices[rank]):
            return tf.stack(parts)

    def _swap(
        self, outgoing: Tensors, rank: int, group: Sequence[int], key: str, **how: bool
    ) -> list[tf.Tensor]:
        pairs = list(zip(group, outgoing, strict=True))
        # All sends before the first receive: none of them waits for another.
        for peer, tensor in pairs:
            if peer != rank:
                self.send(tensor, rank, peer, key)
        return [
            tensor if peer == rank else self.receive(tensor, peer, rank, key, **how)
            for peer, tensor in pairs
        ]

    def send(self, tensor: tf.Tensor, source: int, target: int, key: str) -> None:
        """Sends `tensor` of the replica `source` to `target`, which receives it."""
        if source != target:  # else it stays where it is
            self._traffic.add(source, tensor)
        self._send(tensor, source, target, key)

    def _send(self, tensor: tf.Tensor, source: int, target: int, key: str) -> None:
        with tf.device(self.devices[source]):
            op = tf.raw_ops.Send(
                tensor=tensor,
                tensor_name=self._rendezvous_name(key, source, target),
                send_device=self.devices[source],
                # Both ends are in this process: any equal number will do.
                send_device_incarnation=1,
                recv_device=self.devices[target],
                client_terminated=False,
            )
        run_independently(op)

    def receive(
        self, like: tf.Tensor, source: int, target: int, key: str, partly: bool = False
    ) -> tf.Tensor:
        """Receives a tensor of the type and shape of `like`; with `partly`, its first
        dimension may differ."""
        with tf.device(self.devices[target]):
            tensor = tf.raw_ops.Recv(
                tensor_type=like.dtype,
                tensor_name=self._rendezvous_name(key, source, target),
                send_device=self.devices[source],
                send_device_incarnation=1,
                recv_device=self.devices[target],
                client_terminated=False,
            )
            self.tokens.end_behind(tensor.op, target)
            shape = like.shape
            if partly and shape.rank is not None:
                shape = tf.TensorShape([None]).concatenate(shape[1:])
            if shape.is_fully_defined():
                # An op of the graph, not `set_shape`: TensorFlow's optimizer reorders
                # products where it has a static shape, and must do so on all replicas
                # or none, or their weights drift by the last bit. No copy.
                return tf.ensure_shape(tensor, shape)
        tensor.set_shape(shape)
        return tensor

    def _rendezvous_name(self, key: str, source: int, target: int) -> str:
        return f"tfdp/{self._key}/{key}/{source}-{target}"


def sum_in_order(parts: Tensors) -> tf.Tensor:
    """((p0 + p1) + p2) + ... with the same bits in every run.

    Not by AddN, which would read each part once: it adds into any part that is unshared
    at that moment, so that the order, and the last bit, changes from run to run. And
    where TensorFlow's memory optimizer has a static shape, it replaces an AddN of three
    or more by a variable of zeros, as large as all gradients together, which stays in
    memory as long as the graph. The graph optimizer would turn this chain into an AddN,
    too; it leaves ops with control inputs alone.

    For sizes unknown before the step, AddN adds two at a time, in one order: it refuses
    unequal shapes, where `tf.add` would broadcast a replica's single row.
    """
    total = parts[0]
    is_static = total.shape.is_fully_defined()
    for place, part in enumerate(parts[1:], start=1):
        with tf.control_dependencies(parts[place + 1 : place + 2]):
            two = [total, part]
            total = tf.add(*two) if is_static else tf.raw_ops.AddN(inputs=two)
    return total
