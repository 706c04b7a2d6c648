"""Shards over the replicas of all hosts: each host stores its own replicas' shards.

Within a host its first replica (the leader) collects the tensors. It scatters and
gathers one range of each tensor per host, for all of the host's replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdp.exchange.packing import Layouts, Tensors, pad_shard
from tfdp.exchange.two_level import LEADER, AcrossHostsEngine
from tfdp.exchange.wire_types import fitting_wire_dtype
from tfdp.plan.shards import ShardLayout


class ShardsAcrossHostsEngine(AcrossHostsEngine):
    """`AcrossHostsEngine` with shards over all replicas of all hosts.

    Cost per host on the wire: n (H - 1) / H bytes to scatter the sums of n bytes of
    gradients, and the same to gather n bytes of weights.
    """

    #: There is one copy of each shard.
    holds_first_copy = True

    @property
    def shard_parts(self) -> int:
        """The number of replicas."""
        return self.replicas

    @property
    def first_part(self) -> int:
        """The shard of this host's first replica."""
        return self.link.rank * len(self.devices)

    def reduce_scatter_bucket(
        self, tensors: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        call = self.next_call_number(rank, "reduce-scatter", tensors)
        sums = self.sums_at_leader(tensors, rank, call)
        own: Sequence[tf.Tensor | None] = [None] * len(sums)
        if rank == LEADER:
            own = self._scatter_sums(sums, layouts, label)
        return [
            self._give_shard(ours, tensor.dtype, layout, rank, f"{call}/{place}/down")
            for place, (ours, tensor, layout) in enumerate(
                zip(own, tensors, layouts, strict=True)
            )
        ]

    def _scatter_sums(
        self, sums: Tensors, layouts: Layouts, label: str
    ) -> list[tf.Tensor]:
        """This host's range of the sum of each tensor over all hosts."""
        ranges = [self._ranges_of_hosts(layout) for layout in layouts]
        own = [of_hosts[self.link.rank] for of_hosts in ranges]
        wire_dtype = fitting_wire_dtype(sums, self.wire_dtype)
        with tf.device(self.devices[LEADER]):
            flat = [tf.reshape(total, [-1]) for total in sums]
            like = [
                tf.TensorSpec([stop - start], total.dtype)
                for total, (start, stop) in zip(sums, own, strict=True)
            ]
            return self._calls.call(
                lambda *arrays: self.link.reduce_scatter(
                    arrays, ranges, label, wire_dtype
                ),
                flat,
                like,
            )

    def _give_shard(
        self,
        ours: tf.Tensor | None,
        dtype: tf.DType,
        layout: ShardLayout,
        rank: int,
        key: str,
    ) -> tf.Tensor:
        """Each replica's shard of this host's range, which the leader sends."""
        part = self.first_part + rank
        if ours is not None:
            begin, _ = layout.bounds(self.first_part)
            for peer in self._here[::-1]:
                start, stop = layout.bounds(self.first_part + peer)
                with tf.device(self.devices[rank]):
                    own = ours[start - begin : stop - begin]
                if peer != LEADER and start < stop:
                    self._hand.send(own, LEADER, peer, key)
        elif layout.length(part):
            like = tf.TensorSpec([layout.length(part)], dtype)
            own = self._hand.receive(like, LEADER, rank, key)
        else:
            with tf.device(self.devices[rank]):
                own = tf.zeros([0], dtype)
        with tf.device(self.devices[rank]):
            return pad_shard(own, layout, part)

    def all_gather_bucket(
        self, shards: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        call = self.next_call_number(rank)
        self._hand.pin_to_replica(rank)
        ranges_at_leader = [
            self._range_at_leader(shard, layout, rank, f"{call}/{place}/up")
            for place, (shard, layout) in enumerate(zip(shards, layouts, strict=True))
        ]
        like = [
            tf.TensorSpec(layout.shape, shard.dtype)
            for shard, layout in zip(shards, layouts, strict=True)
        ]
        wholes: Sequence[tf.Tensor | tf.TensorSpec] = like
        if rank == LEADER:
            wholes = self._gather_ranges(ranges_at_leader, layouts, label)
        everyone = self._here
        return [
            self._hand.share_from(whole, rank, LEADER, everyone, f"{call}/{place}/down")
            for place, whole in enumerate(wholes)
        ]

    def join_shards(
        self, shards: Tensors, layout: ShardLayout, label: str
    ) -> tf.Tensor:
        lengths = [layout.length(self.first_part + rank) for rank in self._here]
        with tf.device(self.devices[LEADER]):
            own = [shard[:n] for shard, n in zip(shards, lengths, strict=True)]
            ours = tf.concat(own, axis=0)
        channel = "host" if tf.executing_eagerly() else "step"
        return self._gather_ranges([ours], [layout], label, channel)[0]

    def _gather_ranges(
        self,
        ranges_of_host: Tensors,
        layouts: Layouts,
        label: str,
        channel: str = "step",
    ) -> list[tf.Tensor]:
        """The whole tensors, from each host's flat ranges."""
        ranges = [self._ranges_of_hosts(layout) for layout in layouts]

        def gather(*arrays: np.ndarray) -> list[np.ndarray]:
            wholes = self.link.all_gather(arrays, ranges, label, channel)
            return [
                whole.reshape(layout.shape)
                for whole, layout in zip(wholes, layouts, strict=True)
            ]

        with tf.device(self.devices[LEADER]):
            like = [
                tf.TensorSpec(layout.shape, tensor.dtype)
                for tensor, layout in zip(ranges_of_host, layouts, strict=True)
            ]
            return self._calls.call(gather, list(ranges_of_host), like)

    def _range_at_leader(
        self, shard: tf.Tensor, layout: ShardLayout, rank: int, key: str
    ) -> tf.Tensor:
        """This host's range at the leader; elsewhere this replica's part of it."""
        length = layout.length(self.first_part + rank)
        with tf.device(self.devices[rank]):
            own = shard[:length]
        if rank != LEADER:
            if length:
                self._hand.send(own, rank, LEADER, key)
            return own
        parts = [own]
        for peer in self._here[1:]:
            length = layout.length(self.first_part + peer)
            if length:
                like = tf.TensorSpec([length], shard.dtype)
                parts.append(self._hand.receive(like, peer, LEADER, key))
        with tf.device(self.devices[rank]):
            return tf.concat(parts, axis=0) if len(parts) > 1 else own

    def _ranges_of_hosts(self, layout: ShardLayout) -> list[tuple[int, int]]:
        """The begin and end of each host's shards."""
        local = len(self.devices)
        return [
            (layout.bounds(host * local)[0], layout.bounds((host + 1) * local - 1)[1])
            for host in range(self.link.workers)
        ]
