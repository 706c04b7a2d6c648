"""The path of gradients through one step. Read `GradientPipeline.all_reduce`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from tfdp._private.step_ops import delay
from tfdp.compression.method import Method
from tfdp.exchange.compressed import CompressedSums
from tfdp.exchange.engine import Engine
from tfdp.exchange.packing import Layouts, Tensors, with_static_shape
from tfdp.exchange.peer_groups import peer_group
from tfdp.exchange.sparse import merge_rows, travels_dense
from tfdp.lint.registry import register_exchanged
from tfdp.plan.buckets import (
    Bucket,
    TensorInfo,
    merge_if_fits,
    plan_buckets,
    predecessors,
)
from tfdp.plan.communication import Communication
from tfdp.plan.compression import Compression
from tfdp.plan.shards import ShardLayout

Value: TypeAlias = tf.Tensor | tf.IndexedSlices


class GradientPipeline:
    """A `Reducer` that sums lists of tensors over the replicas, bucket by bucket."""

    def __init__(self, engine: Engine, communication: Communication):
        self.engine = engine
        self.communication = communication
        self.compressed: CompressedSums | None = None
        method = communication.compression
        # Links between hosts round by themselves.
        if method is not None and engine.wire_dtype is None:
            self.compressed = self.compressed_by(
                method, communication.compression_across
            )

    def compressed_by(self, method: Compression, across: str) -> CompressedSums:
        """Sums of values that `method` compresses; see `Reducer`."""
        if not isinstance(method, Method):
            raise TypeError(f"not a method of tfdp.compression: {method!r}")
        group = peer_group(self.engine, across)
        return CompressedSums(method, group, self.engine.devices, self.communication)

    host_groups = property(operator.attrgetter("engine.host_groups"))
    late = property(operator.attrgetter("engine.late"))
    shard_parts = property(operator.attrgetter("engine.shard_parts"))
    first_part = property(operator.attrgetter("engine.first_part"))
    holds_first_copy = property(operator.attrgetter("engine.holds_first_copy"))
    run_graph = property(operator.attrgetter("engine.run_graph"))
    branches = property(operator.attrgetter("engine.branches"))

    def begin_run(self) -> None:
        self.engine.begin_run()

    def end_run(self) -> None:
        self.engine.end_run()

    def broadcast(self, value: tf.Tensor, rank: int) -> tf.Tensor:
        if self.engine.replicas == 1:
            return value
        return register_exchanged(self.engine.broadcast(value, rank))

    def sum_gradients(
        self,
        gradients: Sequence[Value],
        state: Tensors,
        rank: int,
        *,
        sum_rows: bool = False,
        at_once: bool = False,
    ) -> tuple[list[Value], list[tf.Tensor]]:
        """The sums of gradients, and of other small values; see `all_reduce`.

        Both share buckets, unless gradients are rounded (`Communication.wire_dtype`).
        With `sum_rows`, or `Communication(repeated_rows="sum")`, rows of equal index of
        a `tf.IndexedSlices` are added before they travel, and the result has each index
        once, or is dense. `at_once` packs all buckets into one where they fit: for
        values that become ready together.
        """
        adds_repeated = self.communication.repeated_rows == "sum"
        if self.engine.replicas == 1:  # nothing travels, but Adam must do the same
            own = [
                merge_rows(g)
                if adds_repeated and isinstance(g, tf.IndexedSlices)
                else g
                for g in gradients
            ]
            return own, list(state)
        sum_rows = sum_rows or adds_repeated
        gradients = [_as_sent(g, sum_rows) for g in gradients]
        if self.engine.wire_dtype is None:
            # Only non-default arguments: benchmarks replace this method.
            options = {"sum_rows": True} if sum_rows else {}
            options |= {"at_once": True} if at_once else {}
            sums = self.all_reduce([*gradients, *state], rank, **options)
            return sums[: len(gradients)], sums[len(gradients) :]
        exchange, wire_dtype = self.engine.all_reduce_gradients, self.engine.wire_dtype
        rounded = self._by_buckets(gradients, rank, exchange, wire_dtype, sum_rows)
        return rounded, self.all_reduce(state, rank)

    def all_reduce(
        self,
        values: Sequence[Value],
        rank: int,
        *,
        mean: bool = False,
        sum_rows: bool = False,
        at_once: bool = False,
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
        sums = self._by_buckets(
            values,
            rank,
            self.engine.all_reduce_bucket,
            sum_rows=sum_rows,
            at_once=at_once,
        )
        is_mean = mean and self.engine.replicas > 1
        return [self._mean(value) for value in sums] if is_mean else sums

    def sum_within(self, value: tf.Tensor, rank: int) -> tf.Tensor:
        value = self.engine.all_reduce_within(tf.convert_to_tensor(value), rank)
        return register_exchanged(value)

    def _by_buckets(
        self,
        values: Sequence[Value],
        rank: int,
        exchange: Callable[..., list[tf.Tensor]],
        wire_dtype: str | None = None,
        sum_rows: bool = False,
        at_once: bool = False,
    ) -> list[Value]:
        """The sums: dense values bucket by bucket through `exchange`, then slices."""
        values = [
            v if isinstance(v, tf.IndexedSlices) else tf.convert_to_tensor(v)
            for v in values
        ]
        if self.engine.replicas == 1:
            return list(values)
        # Empty tensors are in no bucket; a KeyError names any other that is in none.
        reduced: dict[int, Value] = {
            i: v
            for i, v in enumerate(values)
            if isinstance(v, tf.Tensor) and v.shape.num_elements() == 0
        }
        dense = [i for i, v in enumerate(values) if isinstance(v, tf.Tensor)]
        buckets = self.plan([values[i] for i in dense])
        if at_once and self.engine.reduces_buckets:
            buckets = merge_if_fits(buckets, self.communication.bucket_bytes)
        for number, bucket in enumerate(buckets, start=1):
            places = [dense[i] for i in bucket.indices]
            tensors = [values[place] for place in places]
            label = f"bucket {number} of {len(buckets)}"
            with tf.name_scope("tfdp_all_reduce"):
                results = exchange(tensors, rank, label)
            reduced.update(zip(places, register_exchanged(results), strict=True))
        sparse = [i for i, v in enumerate(values) if isinstance(v, tf.IndexedSlices)]
        for number, place in enumerate(sparse, start=1):
            with tf.name_scope("tfdp_all_reduce_rows"):
                rows = self.engine.all_reduce_rows(
                    values[place],
                    rank,
                    f"table {number} of {len(sparse)}",
                    summed=sum_rows,
                    wire_dtype=wire_dtype,
                )
                reduced[place] = register_exchanged(rows)
        return [reduced[place] for place in range(len(values))]

    def reduce_scatter(
        self,
        gradients: Sequence[Value],
        layouts: Layouts,
        rank: int,
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
        return self._cut_by_bucket(
            self.engine.reduce_scatter_bucket,
            with_static_shape(gradients, layouts),
            layouts,
            rank,
            "reduce_scatter",
            in_turn,
            label,
        )

    def all_gather(
        self, shards: Tensors, layouts: Layouts, rank: int
    ) -> list[tf.Tensor]:
        """The whole tensors, on every replica, from all replicas' shards.

        Cost: per replica n (N - 1) / N bytes on the wire for n bytes of tensors.
        """
        # The first layers' weights are needed first, and plans begin at the last.
        gathered = self._cut_by_bucket(
            self.engine.all_gather_bucket,
            shards[::-1],
            layouts[::-1],
            rank,
            "all_gather",
        )
        return gathered[::-1]

    def join_shards(
        self, shards: Tensors, layout: ShardLayout, label: str
    ) -> tf.Tensor:
        return self.engine.join_shards(shards, layout, label)

    def note_branches(self, rank: int) -> None:
        self.engine.note_branches(rank)

    def sum_of_shards(self, value: tf.Tensor, rank: int) -> tf.Tensor:
        """The sum over the shards of each replica's small value, of equal shapes."""
        if not self.holds_first_copy:
            value = tf.zeros_like(value)  # other hosts count the same shards
        return register_exchanged(self.engine.all_reduce(value, rank))

    def _cut_by_bucket(
        self,
        exchange: Callable[..., list[tf.Tensor]],
        tensors: Tensors,
        layouts: Layouts,
        rank: int,
        kind: str,
        in_turn: bool = False,
        label: str = "",
    ) -> list[tf.Tensor]:
        results: dict[int, tf.Tensor] = {}
        buckets = self.plan(tensors)
        of = f" {label}" if label else ""
        waits_for = predecessors(buckets, between_bytes=self.communication.bucket_bytes)
        for number, bucket in enumerate(buckets, start=1):
            earlier = waits_for[number - 1]
            if in_turn and earlier is not None:
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

    def plan(self, tensors: Tensors) -> tuple[Bucket, ...]:
        infos = [describe(tensor) for tensor in tensors]
        most, first = 1, 1  # packing would only add two copies: one bucket per tensor
        if self.engine.reduces_buckets:
            most = self.communication.bucket_bytes
            first = self.communication.first_bucket_bytes
        return plan_buckets(infos, bucket_bytes=most, first_bucket_bytes=first)

    def _mean(self, value: Value) -> Value:
        replicas = self.engine.replicas
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(
                value.values / replicas, value.indices, value.dense_shape
            )
        return value / replicas


def _as_sent(gradient: Value, sum_rows: bool) -> Value:
    """Makes a small table's gradient dense, so that it goes into a bucket."""
    if isinstance(gradient, tf.IndexedSlices) and sum_rows and travels_dense(gradient):
        return tf.convert_to_tensor(gradient)
    return gradient


def describe(tensor: tf.Tensor) -> TensorInfo:
    """The bucket plan's description of `tensor`."""
    elements = tensor.shape.num_elements()
    # Types without a size (strings) must not count as empty tensors.
    element_bytes = tensor.dtype.size or 1
    size_bytes = None if elements is None else elements * element_bytes
    return TensorInfo(size_bytes, tensor.dtype.name)
