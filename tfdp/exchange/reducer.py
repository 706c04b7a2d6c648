"""Lists of tensors over a transport, bucket by bucket. Read `Reducer._by_buckets`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import tensorflow as tf

from tfdp._private.step_ops import delay
from tfdp.exchange.in_process import InProcess
from tfdp.exchange.packing import (
    Layouts,
    Tensors,
    shard_of,
    whole_from_shards,
    with_static_shape,
)
from tfdp.exchange.sparse import (
    RowSum,
    merge_rows,
    sum_slices,
    travels_dense,
    with_values,
)
from tfdp.exchange.transport import Transport
from tfdp.lint.registry import register_exchanged
from tfdp.plan.buckets import (
    Bucket,
    TensorInfo,
    merge_if_fits,
    plan_buckets,
    predecessors,
)
from tfdp.plan.communication import APART, Communication, Sending
from tfdp.plan.compression import Compression
from tfdp.plan.shards import ShardLayout

if TYPE_CHECKING:
    from tfdp.exchange.compressed import CompressedSums

Value: TypeAlias = tf.Tensor | tf.IndexedSlices


class Reducer:
    """Moves lists of tensors over a transport: in buckets, then tables, then in turn.

    Every replica makes each call once, in replica context, while a graph is built.
    """

    def __init__(
        self, transport: Transport, communication: Communication | None = None
    ):
        self.transport = transport
        self.communication = communication or Communication()
        #: Sums of compressed gradients; None: gradients are not compressed.
        self.compressed: CompressedSums | None = None
        method = self.communication.compression
        # Links between hosts round by themselves.
        if method is not None and transport.wire_dtype is None:
            across = self.communication.compression_across
            self.compressed = self.compressed_by(method, across)

    @property
    def within_hosts(self) -> Reducer:
        """This reducer for sums over the replicas of each host, uncompressed."""
        part = copy.copy(self)
        part.transport = self.transport.among(self.transport.topology.within_hosts)
        part.compressed = None
        return part

    def broadcast(self, value: Any, rank: Any) -> tf.Tensor:
        """The value of replica 0, on all replicas."""
        if self.transport.replicas == 1:
            return value
        own = [tf.convert_to_tensor(value)]
        return register_exchanged(self.transport.broadcast(own, rank)[0])

    def sum_gradients(
        self,
        gradients: Sequence[Value],
        state: Tensors,
        rank: Any,
        how: Sending = APART,
    ) -> tuple[list[Value], list[tf.Tensor]]:
        """The sums of gradients, and of other small values; see `all_reduce`.

        Both share buckets, unless gradients are rounded (`Communication.wire_dtype`).
        `Communication(repeated_rows="sum")` is as `Sending.sum_rows`.
        """
        adds_repeated = self.communication.repeated_rows == "sum"
        # A compiler has no dynamic lengths.
        sum_rows = (how.sum_rows or adds_repeated) and not self.transport.is_compiled
        if self.transport.replicas == 1:  # nothing travels, but Adam must do the same
            own = [
                merge_rows(g)
                if adds_repeated and isinstance(g, tf.IndexedSlices)
                else g
                for g in gradients
            ]
            return own, list(state)
        gradients = [_as_sent(g, sum_rows) for g in gradients]
        if self.transport.wire_dtype is None:
            how = Sending(sum_rows, how.at_once)
            sums = self.all_reduce([*gradients, *state], rank, how=how)
            return sums[: len(gradients)], sums[len(gradients) :]
        how = Sending(sum_rows)
        rounded = self._by_buckets(gradients, rank, how, self.transport.wire_dtype)
        return rounded, self.all_reduce(state, rank)

    def all_reduce(
        self,
        values: Sequence[Value],
        rank: Any,
        *,
        mean: bool = False,
        how: Sending = APART,
    ) -> list[Value]:
        """The sum (or mean) of each value over all replicas, on each of them.

        Every replica calls it once, in replica context, while a graph is built, with
        values of equal shapes except for the number of slices. A bucket's exchange
        depends on the bucket's own tensors only, so it starts as soon as backprop has
        computed them.

        Cost: per replica about 2 n (N - 1) / N bytes on the wire for n bytes of
        dense gradients. Slices cost (N - 1) times their own size; between hosts (H - 1)
        times those of a host, each index once with `sum_rows`, and then at most twice
        the cost of the whole table: see `tfdp.hosts.row_sums`.
        """
        sums = self._by_buckets(values, rank, how)
        is_mean = mean and self.transport.replicas > 1
        if not is_mean:
            return sums
        return [with_values(v, lambda x: x / self.transport.replicas) for v in sums]

    def _by_buckets(
        self,
        values: Sequence[Value],
        rank: Any,
        how: Sending,
        wire_dtype: str | None = None,
    ) -> list[Value]:
        """The sums: dense values bucket by bucket, then slices."""
        values = [
            v if isinstance(v, tf.IndexedSlices) else tf.convert_to_tensor(v)
            for v in values
        ]
        if self.transport.replicas == 1:
            return list(values)
        # Empty tensors are in no bucket; a KeyError names any other that is in none.
        reduced: dict[int, Value] = {
            i: v
            for i, v in enumerate(values)
            if isinstance(v, tf.Tensor) and v.shape.num_elements() == 0
        }
        dense = [i for i, v in enumerate(values) if isinstance(v, tf.Tensor)]
        buckets = self.plan([values[i] for i in dense])
        if how.at_once and self.transport.reduces_buckets:
            buckets = merge_if_fits(buckets, self.communication.bucket_bytes)
        for number, bucket in enumerate(buckets, start=1):
            places = [dense[i] for i in bucket.indices]
            tensors = [values[place] for place in places]
            label = f"bucket {number} of {len(buckets)}"
            with tf.name_scope("tfdp_all_reduce"):
                results = self.transport.all_reduce(tensors, rank, label, wire_dtype)
            reduced.update(zip(places, register_exchanged(results), strict=True))
        sparse = [i for i, v in enumerate(values) if isinstance(v, tf.IndexedSlices)]
        for number, place in enumerate(sparse, start=1):
            with tf.name_scope("tfdp_all_reduce_rows"):
                label = f"table {number} of {len(sparse)}"
                rows = sum_slices(
                    self.transport,
                    values[place],
                    rank,
                    RowSum(label, how.sum_rows, wire_dtype),
                )
                reduced[place] = register_exchanged(rows)
        return [reduced[place] for place in range(len(values))]

    def reduce_scatter(
        self,
        gradients: Sequence[Value],
        layouts: Layouts,
        rank: Any,
        *,
        in_turn: bool = False,
        label: str = "",
    ) -> list[tf.Tensor]:
        """This replica's shard of the sum of each gradient, bucket by bucket.

        With `in_turn` gradients wait until earlier buckets are summed, except for
        `Communication.bucket_bytes` of them, or little more: so few whole gradients are
        in memory, however far ahead one replica is. Hosts compare `label`.

        Cost: per replica n (N - 1) / N bytes on the wire for n bytes of gradients.
        """
        return self._exchange_by_bucket(
            self.transport.reduce_scatter,
            with_static_shape(gradients, layouts),
            layouts,
            rank,
            "reduce_scatter",
            in_turn,
            label,
        )

    def all_gather(
        self, shards: Tensors, layouts: Layouts, rank: Any
    ) -> list[tf.Tensor]:
        """The whole tensors, in the order of `shards`, on every replica.

        Cost: per replica n (N - 1) / N bytes on the wire for n bytes of tensors.
        """
        # Planned in reverse, because plans begin at the last tensor and the first
        # layers' weights are needed first.
        gathered = self._exchange_by_bucket(
            self.transport.all_gather,
            shards[::-1],
            layouts[::-1],
            rank,
            "all_gather",
            planned=_mean_shards(shards, layouts)[::-1],
        )
        return gathered[::-1]

    def join_shards(
        self, shards: Tensors, layout: ShardLayout, label: str
    ) -> tf.Tensor:
        """The whole tensor from this process's shards, in cross-replica context."""
        if self.transport.join_shards is None:
            return whole_from_shards(shards, layout)
        whole: tf.Tensor = self.transport.join_shards(shards, layout, label)
        return whole

    def _exchange_by_bucket(
        self,
        exchange: Callable[..., list[tf.Tensor]],
        tensors: Tensors,
        layouts: Sequence[Any],
        rank: Any,
        kind: str,
        in_turn: bool = False,
        label: str = "",
        planned: Sequence[tf.TensorSpec] | None = None,
    ) -> list[tf.Tensor]:
        """`planned`: tensors of the sizes by which buckets are planned; the default is
        those that travel, of equal sizes on all replicas."""
        results: dict[int, tf.Tensor] = {}
        buckets = self.plan(tensors if planned is None else planned)
        of = f" {label}" if label else ""
        waits_for = predecessors(buckets, between_bytes=self.communication.bucket_bytes)
        for number, bucket in enumerate(buckets, start=1):
            earlier = waits_for[number - 1]
            # A compiler orders what it compiles.
            if in_turn and earlier is not None and not self.transport.is_compiled:
                until = [results[i] for i in buckets[earlier].indices]
                for place in bucket.indices:
                    delay(tensors[place], until)
            with tf.name_scope(f"tfdp_{kind}"):
                exchanged = exchange(
                    [tensors[i] for i in bucket.indices],
                    [layouts[i] for i in bucket.indices],
                    rank,
                    f"{kind}{of} of bucket {number} of {len(buckets)}",
                )
            register_exchanged(exchanged)
            results.update(zip(bucket.indices, exchanged, strict=True))
        return [results[place] for place in range(len(tensors))]

    def plan(self, tensors: Sequence[tf.Tensor | tf.TensorSpec]) -> tuple[Bucket, ...]:
        infos = [describe(tensor) for tensor in tensors]
        most, first = 1, 1  # packing would only add two copies: one bucket per tensor
        if self.transport.reduces_buckets:
            most = self.communication.bucket_bytes
            first = self.communication.first_bucket_bytes
        return plan_buckets(infos, bucket_bytes=most, first_bucket_bytes=first)

    def reshard(
        self, shards: Tensors, before: Layouts, after: Layouts, rank: Any
    ) -> list[tf.Tensor]:
        """This replica's shards by the layouts `after`, from all shards by `before`.

        Cost: that of `all_gather`; in one process, only what another replica has of a
        shard is sent.
        """
        transport = self.transport

        def exchange(
            shards: Tensors, pairs: Sequence[Any], rank: Any, label: str
        ) -> list[tf.Tensor]:
            old, new = zip(*pairs, strict=True)
            if isinstance(transport, InProcess):
                return transport.reshard(shards, old, new, rank, label)
            wholes = transport.all_gather(shards, old, rank, label)
            part = transport.part_of(rank)
            with tf.device(transport.devices[rank]):
                return [shard_of(*one, part) for one in zip(wholes, new, strict=True)]

        pairs = list(zip(before, after, strict=True))
        planned = _mean_shards(shards, before)
        return self._exchange_by_bucket(
            exchange, shards, pairs, rank, "reshard", planned=planned
        )

    def compressed_by(self, method: Compression, across: str) -> CompressedSums:
        """Sums of values that `method`, of `tfdp.compression`, compresses.

        `across`: "hosts" or "replicas"; see `Communication.compression_across`.
        """
        from tfdp.compression.method import Method
        from tfdp.exchange.compressed import CompressedSums

        if not isinstance(method, Method):
            raise TypeError(f"not a method of tfdp.compression: {method!r}")
        transport, topology = self.transport, self.transport.topology
        is_one_process = transport.replicas == len(transport.devices)
        if across == "replicas" and is_one_process:
            return CompressedSums(method, transport, None, self.communication)
        among = transport.among(topology.across_hosts)
        within = transport.among(topology.within_hosts)
        return CompressedSums(method, among, within, self.communication)

    def sum_of_shards(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        """The sum over the shards of each replica's small value, of equal shapes."""
        if self.transport.shard_parts < self.transport.replicas:
            # The first host's on all: "the same arithmetic on all" in docs/house.md.
            sums = self.within_hosts.all_reduce([value], rank)
            [total] = self.transport.broadcast(sums, rank)
        else:
            [total] = self.transport.all_reduce([value], rank, "sum of shards")
        return register_exchanged(total)


def reducer_of(strategy: Any) -> Reducer | None:
    """The reducer of tfdp on CPUs and GPUs; None: a stock strategy, or a TPU's."""
    reducer = getattr(strategy.extended, "reducer", None)
    is_here = isinstance(reducer, Reducer) and not reducer.transport.is_compiled
    return reducer if is_here else None


def _as_sent(gradient: Value, sum_rows: bool) -> Value:
    """Makes a small table's gradient dense, so that it goes into a bucket."""
    if isinstance(gradient, tf.IndexedSlices) and sum_rows and travels_dense(gradient):
        return tf.convert_to_tensor(gradient)
    return gradient


def _mean_shards(shards: Tensors, layouts: Layouts) -> list[tf.TensorSpec]:
    """A shard of the mean size of each tensor: the same on all replicas."""
    return [
        tf.TensorSpec([layout.shard_elements], shard.dtype)
        for shard, layout in zip(shards, layouts, strict=True)
    ]


def describe(tensor: tf.Tensor | tf.TensorSpec) -> TensorInfo:
    """The bucket plan's description of `tensor`."""
    elements = tensor.shape.num_elements()
    # Types without a size (strings) must not count as empty tensors.
    element_bytes = tensor.dtype.size or 1
    size_bytes = None if elements is None else elements * element_bytes
    return TensorInfo(size_bytes, tensor.dtype.name)
