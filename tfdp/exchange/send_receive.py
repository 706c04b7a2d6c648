"""Tensors from one replica of this process to another, without a copy.

`Send` and `Recv` over the step's own rendezvous hand a tensor over within a graph, and
without leaving the replica context.

Where the danger is: every `Send` must be free of TensorFlow's automatic order (see
`names.run_independently`; `Recv` is free of it anyway), and a conditional that holds
them must own a resource of this replica, or the conditionals of two replicas would be
chained and wait for each other; `touch_token` gives it one.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdp._private import names
from tfdp.exchange.sparse import join_rows
from tfdp.exchange.traffic import TrafficCount


class SendReceive:
    """Sums and shares tensors among replicas of one process, over keys.

    A key names a hand-over; both ends of it use the same one, and each once in a trace.

    Args:
      devices: one per replica, as full names.
      group_key: no other one of this process has it.
      traffic: counts what is handed over.
    """

    def __init__(self, devices: Sequence[str], group_key: int, traffic: TrafficCount):
        self.devices = tuple(devices)
        # Strategies of one process share TensorFlow's rendezvous: each has its names.
        self._key = group_key
        self._traffic = traffic
        self._tokens = [names.make_token(device) for device in self.devices]
        self._touched: dict[tuple[int, int], tf.Graph] = {}
        self._run_graph: tf.Graph | None = None
        self._run_token = names.make_token(self.devices[0])
        self._received: list[tf.Operation] = []

    def begin_run(self, run_graph: tf.Graph) -> None:
        """Before the replicas of one `strategy.run` are traced, within `run_graph`."""
        self._run_graph = run_graph
        self._touched, self._received = {}, []

    def end_run(self, *, is_apart: bool = True) -> None:
        """When the replicas are traced: functions with this run come after each other.

        One that is called twice in a step has each name of a hand-over twice, and what
        one call sends would reach the other. A resource that the function writes to,
        when all is received, lets TensorFlow order the calls.

        Args:
          is_apart: whether a run in which nothing is received needs no order.
        """
        if (is_apart and not self._received) or names.in_compiled_function():
            return
        with tf.device(self.devices[0]), tf.control_dependencies(self._received):
            tf.raw_ops.AssignVariableOp(resource=self._run_token.handle, value=0.0)

    def sum_at(
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
            self.send(tensor, rank, root, key)
            return tensor
        # By rank, and not as they come: float addition depends on the order.
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

    def rows_at(
        self,
        slices: tf.IndexedSlices,
        rank: int,
        root: int,
        group: Sequence[int],
        key: str,
        *,
        summed: bool,
    ) -> tf.IndexedSlices:
        """The rows of `group` at its `root`, by `join_rows`; elsewhere the own ones."""
        if rank != root:
            self.send(slices.values, rank, root, f"{key}/values")
            self.send(slices.indices, rank, root, f"{key}/indices")
            return slices
        parts = [
            slices
            if peer == rank
            else tf.IndexedSlices(
                self.receive(slices.values, peer, rank, f"{key}/values", partly=True),
                self.receive(slices.indices, peer, rank, f"{key}/indices", partly=True),
                slices.dense_shape,
            )
            for peer in group
        ]
        with tf.device(self.devices[rank]):
            return join_rows(parts, summed=summed)

    def share_rows(
        self,
        slices: tf.IndexedSlices,
        rank: int,
        root: int,
        group: Sequence[int],
        key: str,
    ) -> tf.IndexedSlices:
        """The root's rows, on every member of `group`; their number may be another."""
        values, indices = (
            self._share_part(part, rank, root, group, f"{key}/{name}")
            for name, part in [("values", slices.values), ("indices", slices.indices)]
        )
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def _share_part(
        self, part: tf.Tensor, rank: int, root: int, group: Sequence[int], key: str
    ) -> tf.Tensor:
        like = tf.TensorSpec([None, *part.shape[1:]], part.dtype)
        shared = self.share_from(part, rank, root, group, key, like)
        if rank != root or len(group) == 1:
            return shared
        # The root takes its own over as well, or TensorFlow's optimizer would know more
        # of the shape there than elsewhere, and multiply in another order.
        self._send(part, rank, rank, key)
        return self.receive(like, rank, rank, key)

    def all_gather(self, tensor: tf.Tensor, rank: int, key: str) -> tf.Tensor:
        """All replicas' tensors, joined along the first axis in rank order."""
        ranks = range(len(self.devices))
        # All sends before the first receive: none of them waits for another.
        for peer in ranks:
            if peer != rank:
                self.send(tensor, rank, peer, key)
        parts = [
            tensor
            if peer == rank
            else self.receive(tensor, peer, rank, key, partly=True)
            for peer in ranks
        ]
        with tf.device(self.devices[rank]):
            return tf.concat(parts, axis=0)

    def all_to_all(
        self, outgoing: Sequence[tf.Tensor], rank: int, group: Sequence[int], key: str
    ) -> tf.Tensor:
        """What every member of `group` has for this one, stacked by sender.

        Args:
          outgoing: for each member, alike in shape but for lengths not known.
          rank: the calling replica, one of them.
          group: the replicas.
          key: see the class.
        """
        pairs = list(zip(group, outgoing, strict=True))
        for peer, tensor in pairs:
            if peer != rank:
                self.send(tensor, rank, peer, key)
        parts = [
            tensor if peer == rank else self.receive(tensor, peer, rank, key)
            for peer, tensor in pairs
        ]
        with tf.device(self.devices[rank]):
            return tf.stack(parts)

    def send(self, tensor: tf.Tensor, source: int, target: int, key: str) -> None:
        """Hands `tensor` of the replica `source` to `target`, who receives it."""
        self._traffic.add(source, tensor)
        self._send(tensor, source, target, key)

    def _send(self, tensor: tf.Tensor, source: int, target: int, key: str) -> None:
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

    def receive(
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
            if tf.compat.v1.get_default_graph() is self._run_graph:
                self._received.append(tensor.op)
            else:
                self._end_call_behind(tensor.op, target)
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

    def _end_call_behind(self, received: tf.Operation, rank: int) -> None:
        """Has a function not end before it has `received`; then it may be called again.

        Both calls have the same names, and what is received waits for nothing: the
        second call would take what is the first one's. A replica's calls come one after
        the other by its token.
        """
        with tf.control_dependencies([received]):
            tf.raw_ops.VarIsInitializedOp(resource=self._tokens[rank].handle)

    def _rendezvous_name(self, key: str, source: int, target: int) -> str:
        return f"tfdp/{self._key}/{key}/{source}-{target}"

    def touch_token(self, rank: int) -> None:
        """Gives an inner graph a resource of this replica (see the top), once."""
        graph = tf.compat.v1.get_default_graph()
        if graph is self._run_graph or (rank, id(graph)) in self._touched:
            return
        self._touched[rank, id(graph)] = graph  # kept, so that its id stays its own
        with tf.device(self.devices[rank]):
            tf.raw_ops.VarIsInitializedOp(resource=self._tokens[rank].handle)


def sum_in_order(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """((p0 + p1) + p2) + ... with the same bits in every run.

    Not by AddN, which would look at each part once: it adds into whichever part nobody
    else holds at that moment, so that the order, and the last bit, changes from run to
    run. And where TensorFlow's memory optimizer knows the shape, it replaces an AddN of
    three or more by a variable that starts as zeros, to which each part is added; the
    zeros, as large as all gradients together, stay in memory as long as the graph.

    The graph optimizer would make an AddN of this chain, too; it leaves alone what
    waits for something that is not its input.

    Of sizes that only the running step knows AddN adds two, which has one order: it
    refuses unlike ones, where an addition would repeat the one row of a replica.
    """
    total = parts[0]
    add = tf.add if total.shape.is_fully_defined() else _add_in_rank_order
    for place, part in enumerate(parts[1:], start=1):
        with tf.control_dependencies(parts[place + 1 : place + 2]):
            total = add(total, part)
    return total


def _add_in_rank_order(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.AddN(inputs=[first, second])
