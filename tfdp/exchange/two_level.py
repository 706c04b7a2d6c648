"""Two levels: the replicas of a host hand over tensors, hosts exchange sums.

Within a host the first replica (the leader) adds the others' tensors. It passes a whole
bucket to the link in one Python callback and shares the results. Only leaders exchange,
one call after the other in the order of their trace, which is the same on every host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.exchange.engine import Engine, next_group_key
from tfdp.exchange.host_calls import LinkCalls
from tfdp.exchange.in_process import InProcessEngine
from tfdp.exchange.late_exchange import AsyncExchange
from tfdp.exchange.packing import Layouts, PackedSmall, Tensors, cut, pad_shard
from tfdp.exchange.send_receive import SendReceive
from tfdp.exchange.sparse import table_shape
from tfdp.exchange.wire_types import check_summable, fitting_wire_dtype
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.row_sums import RowExchange
from tfdp.plan.shards import ShardLayout
from tfdp.plan.topology import Topology

LEADER = 0


class AcrossHostsEngine(Engine):
    """Sums over the replicas of several processes, which exchange arrays over `link`.

    Cost per process: that of `InProcessEngine` within it; 2 n (H - 1) / H bytes on the
    wire for n bytes of gradients on H hosts, however many replicas a host has.
    Adjacent small tensors of a bucket travel as one (`PackedSmall`).
    """

    packs = False
    #: One call of the link carries the tensors of a whole bucket.
    reduces_buckets = True

    def __init__(
        self, devices: Sequence[str], link: HostLink, wire_dtype: str | None = None
    ):
        super().__init__(devices, Topology(link.workers, len(devices)))
        self.link = link
        self.name = link.name
        self.wire_dtype = wire_dtype
        #: The replicas of this host, among which shards are distributed.
        self.within = InProcessEngine(devices, Topology(1, len(devices)))
        self.traffic = self.within.traffic
        self._here = self.within.topology.all_ranks
        self._hand = SendReceive(devices, next_group_key(), self.traffic)
        self._calls = LinkCalls()
        self.late: AsyncExchange = AsyncExchange(self)

    def begin_run(self) -> None:
        super().begin_run()
        self.within.begin_run()
        self._hand.begin_run(tf.compat.v1.get_default_graph())

    def end_run(self) -> None:
        self._calls.end_run()
        self.within.end_run()
        # Calls of the link have no names: hosts pair them by order.
        self._hand.end_run(always=True)

    def sent_between_hosts(self) -> int | None:
        return self.link.sent_bytes()

    def seconds_between_hosts(self) -> float | None:
        return self.link.exchange_seconds("step")

    def close(self) -> None:
        """Called before the link is closed."""
        self.late.close()
        self._calls.close()

    @property
    def replicas(self) -> int:
        """The number of replicas on all hosts."""
        return len(self.devices) * self.link.workers

    @property
    def holds_first_copy(self) -> bool:
        """Every host has all shards; those of host 0 are the first copy."""
        return self.link.rank == 0

    @property
    def host_groups(self) -> tuple[tuple[int, ...], ...] | None:
        """All replicas of this host, in one group."""
        return (tuple(self._here),)

    def all_reduce_within(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        return self.within.all_reduce(tensor, rank)

    def all_reduce(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        return self.all_reduce_bucket([tensor], rank, "sum")[0]

    def all_reduce_bucket(
        self, tensors: Tensors, rank: int, label: str
    ) -> list[tf.Tensor]:
        return self.sum_everywhere(tensors, rank, label, None)

    def all_reduce_gradients(
        self, tensors: Tensors, rank: int, label: str
    ) -> list[tf.Tensor]:
        return self.sum_everywhere(tensors, rank, label, self.wire_dtype)

    def sum_everywhere(
        self, tensors: Tensors, rank: int, label: str, wire_dtype: str | None
    ) -> list[tf.Tensor]:
        call = self.next_call_number(rank, "sum", tensors)
        totals = self.totals_at_leader(tensors, rank, call, label, wire_dtype)
        return self._shared(totals, rank, call)

    def from_leader(self, tensors: Tensors, rank: int) -> list[tf.Tensor]:
        """The leader's tensors on this host's replicas, which pass equal shapes."""
        call = self.next_call_number(rank)
        self._hand.pin_to_replica(rank)
        return self._shared(tensors, rank, call)

    def _shared(self, tensors: Tensors, rank: int, call: int) -> list[tf.Tensor]:
        return [
            self._hand.share_from(tensor, rank, LEADER, self._here, f"{call}/{n}/down")
            for n, tensor in enumerate(tensors)
        ]

    def reduce_scatter_bucket(
        self, tensors: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        # The replicas of each host hold all shards, so every host needs the whole sum;
        # only its distribution within the host is cheaper.
        call = self.next_call_number(rank, "reduce-scatter", tensors)
        totals = self.totals_at_leader(tensors, rank, call, label, self.wire_dtype)
        return [
            self._hand_out(total, layout, rank, f"{call}/{place}/down")
            for place, (total, layout) in enumerate(zip(totals, layouts, strict=True))
        ]

    def totals_at_leader(
        self, tensors: Tensors, rank: int, call: int, label: str, wire_dtype: str | None
    ) -> list[tf.Tensor]:
        """The sums over all hosts at the leader; elsewhere unspecified tensors."""
        totals = self.sums_at_leader(tensors, rank, call)
        if rank != LEADER:
            return totals
        return self.sum_of_hosts(totals, label, fitting_wire_dtype(totals, wire_dtype))

    def sum_of_hosts(
        self, tensors: Tensors, label: str, wire_dtype: str | None = None
    ) -> list[tf.Tensor]:
        """The sums of the leaders' tensors over the hosts, small tensors packed."""
        with tf.device(self.devices[LEADER]):
            small = PackedSmall(tensors)
            shapes = small.shapes

            def exchange(*arrays: np.ndarray) -> list[np.ndarray]:
                return self.link.sum(
                    arrays, label, wire_dtype=wire_dtype, packed=shapes
                )

            sums = self.at_leader(exchange, small.packed, small.packed)
            return small.unpack(sums)

    def sums_at_leader(self, tensors: Tensors, rank: int, call: int) -> list[tf.Tensor]:
        """The sums over this host at the leader; elsewhere unspecified tensors."""
        for tensor in tensors:
            check_summable(tensor.dtype)
        self._hand.pin_to_replica(rank)
        return [
            self._hand.sum_at(tensor, rank, LEADER, self._here, f"{call}/{n}/within")
            for n, tensor in enumerate(tensors)
        ]

    def _hand_out(
        self, total: tf.Tensor, layout: ShardLayout, rank: int, key: str
    ) -> tf.Tensor:
        """Each replica's shard of the leader's tensor."""
        with tf.device(self.devices[rank]):
            flat = tf.reshape(total, [-1])
            own = cut(flat, layout, rank)
        if rank != LEADER and layout.length(rank):
            own = self._hand.receive(own, LEADER, rank, key)
        if rank == LEADER:
            for peer in self._here:
                with tf.device(self.devices[rank]):
                    piece = cut(flat, layout, peer)
                if peer != LEADER and layout.length(peer):
                    self._hand.send(piece, LEADER, peer, key)
        with tf.device(self.devices[rank]):
            return pad_shard(own, layout, rank)

    def all_gather_bucket(
        self, shards: Tensors, layouts: Layouts, rank: int, label: str
    ) -> list[tf.Tensor]:
        return self.within.all_gather_bucket(shards, layouts, rank, label)

    def all_gather(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        local = self.within.all_gather(tensor, rank)
        call = self.next_call_number(rank)
        if rank == LEADER:
            local = self.gather_rows(local)
        here, key = self._here, f"{call}/all"
        like = tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)
        return self._hand.share_from(local, rank, LEADER, here, key, like)

    def all_reduce_rows(
        self,
        slices: tf.IndexedSlices,
        rank: int,
        label: str,
        *,
        summed: bool = False,
        wire_dtype: str | None = None,
    ) -> tf.IndexedSlices:
        """See `Engine`. One set of rows per host crosses, in one exchange, or the whole
        table where that is smaller: see `RowExchange`."""
        call = self.next_call_number(rank)
        self._hand.pin_to_replica(rank)
        rows = self._hand.rows_at(
            slices, rank, LEADER, self._here, f"{call}/within", summed=summed
        )
        if rank == LEADER:
            exchange = RowExchange(
                table_shape(slices) if summed else None,
                label,
                fitting_wire_dtype([rows.values], wire_dtype),
                summed,
            )
            values, indices = self.at_leader(
                lambda values, indices: list(exchange(self.link, values, indices)),
                [rows.values, rows.indices],
                [
                    tf.TensorSpec([None, *rows.values.shape[1:]], rows.values.dtype),
                    tf.TensorSpec([None], rows.indices.dtype),
                ],
            )
            rows = tf.IndexedSlices(values, indices, rows.dense_shape)
        return self._hand.share_rows(rows, rank, LEADER, self._here, f"{call}/down")

    def broadcast(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        call = self.next_call_number(rank)
        self._hand.pin_to_replica(rank)
        if rank == LEADER:
            tensor = self._broadcast_across(tensor)
        key = f"{call}/broadcast"
        return self._hand.share_from(tensor, rank, LEADER, self._here, key, tensor)

    def gather_rows(self, rows: tf.Tensor, channel: str = "step") -> tf.Tensor:
        """The rows of all hosts in host order; their number may differ."""
        with tf.device(self.devices[LEADER]):
            blob = tf.io.serialize_tensor(rows)
            (blobs,) = self._calls.call(
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

    def _broadcast_across(self, tensor: tf.Tensor) -> tf.Tensor:
        # Serialized: every bit pattern and all types survive.
        with tf.device(self.devices[LEADER]):
            blob = tf.io.serialize_tensor(tensor)

            def first(mine: Any) -> list[bytes]:
                sent = mine if self.link.rank == 0 else b""
                return [self.link.gather(sent, "broadcast", "step")[0]]

            (value,) = self._calls.call(first, [blob], [tf.TensorSpec([], tf.string)])
            result = tf.io.parse_tensor(value, tensor.dtype)
            # Not `set_shape`, which would not check what another host sent.
            return tf.ensure_shape(result, tensor.shape)

    def at_leader(
        self, exchange: Callable[..., list[np.ndarray]], tensors: Tensors, like: Tensors
    ) -> list[tf.Tensor]:
        """`exchange` of the arrays, in calls of one order on all hosts."""
        with tf.device(self.devices[LEADER]):
            return self._calls.call(exchange, tensors, _specs_of(like))

    def at_leader_ahead(
        self, exchange: Callable[..., list[np.ndarray]], tensors: Tensors, like: Tensors
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """`at_leader`, with several in flight: `exchange` gets a channel as well.

        Returns: the results, and a tensor that exists once the exchange has begun.
        """
        channels = self.link.step_channels
        with tf.device(self.devices[LEADER]):
            return self._calls.call_ahead(exchange, tensors, _specs_of(like), channels)


def _specs_of(like: Tensors) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in like]
