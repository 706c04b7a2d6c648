"""TensorFlow's own collectives: NCCL on GPUs, its ring on CPUs.

One level: one all-reduce per buffer. Two levels, for a buffer of n bytes on g devices
per host: reduce-scatter within the host (each device then holds the host's sum of n/g
bytes), all-reduce of that part across hosts, all-gather within. So the slow link
carries n/g bytes per device instead of n.

The keys of an exchange are fixed while the graph is built, so that it can run inside
conditionals and loops. Each launch carries a resource of its device (the ordering
token) so that conditionals of two replicas are not chained, and is marked independent,
so that several buffers are in flight: a buffer waits for nothing but its own tensors.
Within one process NCCL launches are put in one order by TensorFlow's NcclManager.

On CPUs TensorFlow has no reduce-scatter; an all-to-all and a local sum stand in for it,
with the same bytes on the wire. The NCCL path was not run on a GPU.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdp._tf import names
from tfdp.collectives.engine import Engine, next_group_key
from tfdp.collectives.wire_types import to_gather_wire, to_sum_wire
from tfdp.topology import Topology

__all__ = ["TensorFlowEngine"]


@dataclasses.dataclass(frozen=True)
class _Group:
    """The ranks of one collective and the key that names them to TensorFlow."""

    ranks: tuple[int, ...]
    key: int


class TensorFlowEngine(Engine):
    """Packed all-reduces by TensorFlow's collective ops, over one or two levels.

    Args:
      devices: one device per replica, in rank order.
      topology: one level is a flat all-reduce; two are reduce-scatter within the
        host, all-reduce across hosts, all-gather within.
      timeout_seconds: how long a collective may wait for the other replicas.
      hint: the implementation asked of TensorFlow: "nccl", "ring" or "auto".

    Cost per replica and buffer of n bytes: one launch and 2 n (N - 1) / N bytes on
    one level; three launches, 2 n (g - 1) / g bytes within the host and
    2 (n / g) (H - 1) / H across on two (g devices on each of H hosts).
    """

    name = "tensorflow"
    packs = True

    def __init__(
        self,
        devices: Sequence[str],
        topology: Topology,
        *,
        timeout_seconds: float,
        hint: str,
    ):
        super().__init__(devices, topology)
        self._timeout_seconds = timeout_seconds
        self._hint = hint
        self._has_reduce_scatter = hint == "nccl"
        self._everyone = _Group(topology.all_ranks, next_group_key())
        self._within = [
            _Group(g, next_group_key()) for g in topology.within_host_groups
        ]
        self._across = [
            _Group(g, next_group_key()) for g in topology.across_host_groups
        ]
        # Instance keys: the n-th launch of a rank in a group meets the n-th of its
        # peers.
        self._launches: collections.Counter[tuple[int, int]] = collections.Counter()
        self._tokens = [names.make_token(device) for device in self.devices]

    def begin_run(self) -> None:
        super().begin_run()
        # See Engine.begin_run: a failed trace must not leave ranks out of step.
        most = max(self._launches.values(), default=0)
        for group in (self._everyone, *self._within, *self._across):
            for rank in group.ranks:
                self._launches[group.key, rank] = most

    def all_reduce(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        self.next_call_number(rank)
        wire, restore = to_sum_wire(tensor)
        if self.topology.is_two_level:
            return restore(self._two_level_sum(wire, rank))
        return restore(self._sum(wire, self._everyone, rank))

    def all_gather(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        self.next_call_number(rank)
        wire, restore = to_gather_wire(tensor)
        with tf.device(self.devices[rank]):
            lengths = self._gather(tf.shape(wire)[:1], self._everyone, rank)
            # The collective wants equal lengths: pad to the longest, cut after.
            longest = tf.reduce_max(lengths)
            missing = longest - tf.shape(wire)[0]
            paddings = [[0, missing]] + [[0, 0]] * (wire.shape.rank - 1)
            padded = tf.pad(wire, paddings)
            gathered = self._gather(padded, self._everyone, rank)
            parts = [
                gathered[i * longest : i * longest + lengths[i]]
                for i in range(len(self.devices))
            ]
            result = tf.concat(parts, axis=0)
        result.set_shape(tf.TensorShape([None]).concatenate(wire.shape[1:]))
        return restore(result)

    def broadcast(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        # A sum in which only replica 0 brings anything: exact for every finite or
        # infinite value, and the all-reduce is the one op that every backend has.
        with tf.device(self.devices[rank]):
            mine = tensor if rank == 0 else tf.zeros_like(tensor)
        if tensor.dtype == tf.bool:
            return tf.cast(self.all_reduce(tf.cast(mine, tf.int32), rank), tf.bool)
        return self.all_reduce(mine, rank)

    def _two_level_sum(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        within = self._within[self.topology.host_of(rank)]
        across = self._across[self.topology.local_rank_of(rank)]
        devices_per_host = self.topology.devices_per_host
        with tf.device(self.devices[rank]):
            flat = tf.reshape(tensor, [-1])
            elements = tf.size(flat)
            padding = -elements % devices_per_host
            padded = tf.pad(flat, [[0, padding]])
            part = self._reduce_scatter(padded, within, rank)
            part = self._sum(part, across, rank)
            whole = self._gather_same_type(part, within, rank)[:elements]
            result = tf.reshape(whole, tf.shape(tensor))
        result.set_shape(tensor.shape)
        return result

    def _sum(self, tensor: tf.Tensor, group: _Group, rank: int) -> tf.Tensor:
        with tf.device(self.devices[rank]):
            result = tf.raw_ops.CollectiveReduceV2(
                input=tensor,
                merge_op="Add",
                final_op="Id",
                **self._launch(group, rank),
            )
        names.run_independently(result.op)
        return result

    def _gather(self, tensor: tf.Tensor, group: _Group, rank: int) -> tf.Tensor:
        with tf.device(self.devices[rank]):
            result = tf.raw_ops.CollectiveGatherV2(
                input=tensor, **self._launch(group, rank)
            )
        names.run_independently(result.op)
        return result

    def _gather_same_type(
        self, tensor: tf.Tensor, group: _Group, rank: int
    ) -> tf.Tensor:
        """As `_gather`, for a type that sums but may not gather (bfloat16)."""
        wire, restore = to_gather_wire(tensor)
        return restore(self._gather(wire, group, rank))

    def _reduce_scatter(self, tensor: tf.Tensor, group: _Group, rank: int) -> tf.Tensor:
        """This rank's part of the group's sum; the length must divide evenly."""
        size = len(group.ranks)
        with tf.device(self.devices[rank]):
            if self._has_reduce_scatter:
                result = tf.raw_ops.CollectiveReduceScatterV2(
                    input=tensor,
                    merge_op="Add",
                    final_op="Id",
                    **self._launch(group, rank),
                )
                names.run_independently(result.op)
                return result
            parts = tf.raw_ops.CollectiveAllToAllV2(
                input=tf.reshape(tensor, [size, -1]), **self._launch(group, rank)
            )
            names.run_independently(parts.op)
            return tf.reduce_sum(parts, axis=0)

    def _launch(self, group: _Group, rank: int) -> dict[str, object]:
        """The arguments that every collective op takes, with a fresh instance key."""
        instance = self._launches[group.key, rank]
        self._launches[group.key, rank] += 1
        return {
            "group_size": len(group.ranks),
            "group_key": group.key,
            "instance_key": instance,
            "ordering_token": [self._tokens[rank].handle],
            "communication_hint": self._hint,
            "timeout_seconds": self._timeout_seconds,
        }
