"""Two levels: replicas of this host hand tensors to each other, hosts exchange sums.

Within the host the sum is `InProcessEngine`'s. Its first replica then gives a whole
bucket to the link in one call of Python, and hands the results out. Only that replica
exchanges, one call after the other in the order of its own trace, which is the same on
every host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._private import names
from tfdp.exchange.in_process import InProcessEngine
from tfdp.exchange.shard_pieces import cut, pad_shard
from tfdp.exchange.wire_types import check_summable, fitting_wire_dtype
from tfdp.hosts.host_link import HostLink
from tfdp.plan.shards import ShardLayout
from tfdp.plan.topology import Topology

__all__ = ["AcrossHostsEngine"]

LEADER = 0

CONDITIONALS = ("If", "StatelessIf", "Case", "StatelessCase")


class AcrossHostsEngine(InProcessEngine):
    """Sums over the replicas of several processes.

    Args:
      devices: this process's devices, one replica each.
      link: carries arrays between the processes.
      wire_dtype: see `Communication`.

    Cost per process: what `InProcessEngine` costs within it; 2 n (H - 1) / H bytes on
    the wire for n bytes of gradients on H hosts, however many replicas a host has.
    """

    def __init__(
        self, devices: Sequence[str], link: HostLink, wire_dtype: str | None = None
    ):
        super().__init__(devices, Topology(1, len(devices)))
        self.link = link
        self.name = link.name
        self.wire_dtype = wire_dtype
        self._last_call: tf.Operation | None = None
        self._last_graph: Callable[[], tf.Graph | None] = lambda: None

    def close(self) -> None:
        """Before the link is closed."""

    @property
    def replicas(self) -> int:
        """On all hosts together."""
        return len(self.devices) * self.link.workers

    @property
    def holds_first_copy(self) -> bool:
        """Every host has all shards; those of host 0 are the first."""
        return self.link.rank == 0

    @property
    def reduces_buckets(self) -> bool:
        """One call of the link carries the tensors of a whole bucket."""
        return True

    def all_reduce(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        return self.all_reduce_bucket([tensor], rank, "sum")[0]

    def all_reduce_bucket(
        self, tensors: Sequence[tf.Tensor], rank: int, label: str
    ) -> list[tf.Tensor]:
        return self.sum_everywhere(tensors, rank, label, None)

    def all_reduce_gradients(
        self, tensors: Sequence[tf.Tensor], rank: int, label: str
    ) -> list[tf.Tensor]:
        return self.sum_everywhere(tensors, rank, label, self.wire_dtype)

    def sum_everywhere(
        self,
        tensors: Sequence[tf.Tensor],
        rank: int,
        label: str,
        wire_dtype: str | None,
    ) -> list[tf.Tensor]:
        call = self.next_call_number(rank)
        totals = self.totals_at_leader(tensors, rank, call, label, wire_dtype)
        everyone = self.topology.all_ranks
        return [
            self._share_from(
                total, rank, LEADER, everyone, f"{call}/{place}/down", tensor
            )
            for place, (total, tensor) in enumerate(zip(totals, tensors, strict=True))
        ]

    def reduce_scatter_bucket(
        self,
        tensors: Sequence[tf.Tensor],
        layouts: Sequence[ShardLayout],
        rank: int,
        label: str,
    ) -> list[tf.Tensor]:
        # Shards are those of the replicas of one host, so every host needs the whole
        # sum; only its way down within the host is shorter.
        call = self.next_call_number(rank)
        # What is scattered are gradients.
        totals = self.totals_at_leader(tensors, rank, call, label, self.wire_dtype)
        return [
            self._hand_out(total, layout, rank, f"{call}/{place}/down")
            for place, (total, layout) in enumerate(zip(totals, layouts, strict=True))
        ]

    def totals_at_leader(
        self,
        tensors: Sequence[tf.Tensor],
        rank: int,
        call: int,
        label: str,
        wire_dtype: str | None,
    ) -> list[tf.Tensor]:
        """The sums over all hosts at the leader; elsewhere whatever was there."""
        totals = self._sums_at_leader(tensors, rank, call)
        if rank != LEADER:
            return totals
        wire_dtype = fitting_wire_dtype(totals, wire_dtype)
        return self._across(
            lambda *arrays: self.link.sum(arrays, label, wire_dtype=wire_dtype),
            totals,
            totals,
        )

    def _sums_at_leader(
        self, tensors: Sequence[tf.Tensor], rank: int, call: int
    ) -> list[tf.Tensor]:
        """The sums over this host at the leader; elsewhere whatever was there."""
        for tensor in tensors:
            check_summable(tensor.dtype)
        self._touch_token(rank)
        everyone = self.topology.all_ranks
        return [
            self._sum_at(tensor, rank, LEADER, everyone, f"{call}/{place}/within")
            for place, tensor in enumerate(tensors)
        ]

    def _hand_out(
        self, total: tf.Tensor, layout: ShardLayout, rank: int, key: str
    ) -> tf.Tensor:
        """Each replica's shard of the leader's tensor."""
        with tf.device(self.devices[rank]):
            flat = tf.reshape(total, [-1])
            own = cut(flat, layout, rank)
        if rank != LEADER and layout.length(rank):
            own = self._receive(own, LEADER, rank, key)
        if rank == LEADER:
            for peer in self.topology.all_ranks:
                with tf.device(self.devices[rank]):
                    piece = cut(flat, layout, peer)
                if peer != LEADER and layout.length(peer):
                    self._send(piece, LEADER, peer, key)
        with tf.device(self.devices[rank]):
            return pad_shard(own, layout, rank)

    def all_gather(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        local = super().all_gather(tensor, rank)
        call = self.next_call_number(rank)
        if rank == LEADER:
            local = self.gather_rows(local)
        everyone = self.topology.all_ranks
        like = tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)
        return self._share_from(local, rank, LEADER, everyone, f"{call}/all", like)

    def broadcast(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        call = self.next_call_number(rank)
        self._touch_token(rank)
        if rank == LEADER:
            tensor = self._broadcast_across(tensor)
        everyone = self.topology.all_ranks
        return self._share_from(
            tensor, rank, LEADER, everyone, f"{call}/broadcast", tensor
        )

    def gather_rows(self, rows: tf.Tensor, channel: str = "step") -> tf.Tensor:
        """The rows of all hosts in the order of the hosts; their number may differ."""
        with tf.device(self.devices[LEADER]):
            blob = tf.io.serialize_tensor(rows)
            (blobs,) = self._call(
                lambda mine: [self.link.gather(mine, "rows", channel)],
                [blob],
                [tf.TensorSpec([self.link.workers], tf.string)],
            )
            parts = [
                tf.io.parse_tensor(blobs[host], rows.dtype)
                for host in range(self.link.workers)
            ]
            gathered = tf.concat(parts, axis=0)
        gathered.set_shape([None, *rows.shape[1:]])
        return gathered

    def sum_scalar_of_hosts(self, value: tf.Tensor, label: str) -> tf.Tensor:
        """The sum of each host's `value`, in cross-replica context."""
        with tf.device(self.devices[LEADER]):
            return self._across(
                lambda *arrays: self.link.sum(arrays, label), [value], [value]
            )[0]

    def _broadcast_across(self, tensor: tf.Tensor) -> tf.Tensor:
        # A sum to which only host 0 brings anything, in whole numbers: every bit
        # pattern survives, and booleans and all float types travel alike.
        with tf.device(self.devices[LEADER]):
            blob = tf.io.serialize_tensor(tensor)

            def first(mine: Any) -> list[bytes]:
                sent = mine if self.link.rank == 0 else b""
                return [self.link.gather(sent, "broadcast", "step")[0]]

            (value,) = self._call(first, [blob], [tf.TensorSpec([], tf.string)])
            result = tf.io.parse_tensor(value, tensor.dtype)
            # Not `set_shape`, which believes it of what another host has sent.
            return tf.ensure_shape(result, tensor.shape)

    def _across(
        self,
        exchange: Callable[..., list[np.ndarray]],
        tensors: Sequence[tf.Tensor],
        like: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        with tf.device(self.devices[LEADER]):
            specs = [tf.TensorSpec(t.shape, t.dtype) for t in like]
            return self._call(exchange, tensors, specs)

    def _call(
        self,
        function: Callable[..., list],
        tensors: Sequence[tf.Tensor],
        specs: Sequence[tf.TensorSpec],
    ) -> list[tf.Tensor]:
        if tf.executing_eagerly():
            return [tf.constant(r) for r in function(*(t.numpy() for t in tensors))]
        # Stateful: TensorFlow then neither drops a call nor merges two. But it would
        # also chain them with every other stateful op, the other replicas' included,
        # which wait for this call: so they get an order of their own.
        graph = tf.compat.v1.get_default_graph()
        # Asked of the graph, not of the op: an op outlives its graph and then points at
        # freed memory.
        is_same_graph = self._last_graph() is graph
        before = [self._last_call] if is_same_graph else _conditionals_in(graph)
        with tf.control_dependencies(before):
            results = tf.numpy_function(
                function, tensors, [spec.dtype for spec in specs], stateful=True
            )
        self._last_graph, self._last_call = weakref.ref(graph), results[0].op
        names.run_independently(results[0].op)
        return [
            # See InProcessEngine._receive: known shapes must be known to all replicas.
            tf.ensure_shape(result, spec.shape)
            for result, spec in zip(results, specs, strict=True)
        ]


def _conditionals_in(graph: tf.Graph) -> list[tf.Operation]:
    """What may hold the call before this one: an accumulating optimizer's reduction.

    Nothing else orders a call behind one within a conditional, and the hosts would make
    the two in different orders.
    """
    return [op for op in graph.get_operations() if op.type in CONDITIONALS]
