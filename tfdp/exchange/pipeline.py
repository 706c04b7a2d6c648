"""The way of the gradients through one step. Read `GradientPipeline.all_reduce`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from tfdp._private.step_ops import delay
from tfdp.compression.method import Method
from tfdp.exchange.compressed import CompressedSums
from tfdp.exchange.engine import Engine
from tfdp.exchange.late_exchange import AsyncExchange
from tfdp.exchange.packing import of_known_shape
from tfdp.exchange.peer_groups import peer_group
from tfdp.exchange.sparse import merge_rows, travels_dense
from tfdp.plan.buckets import (
    Bucket,
    TensorInfo,
    joined_if_few,
    plan_buckets,
    predecessors,
)
from tfdp.plan.communication import Communication
from tfdp.plan.compression import Compression
from tfdp.plan.shards import ShardLayout

Value: TypeAlias = tf.Tensor | tf.IndexedSlices


class GradientPipeline:
    """Sums lists of tensors over the replicas, bucket by bucket.

    Args:
      engine: what carries the buckets.
      communication: the bucket sizes, and how gradients are compressed.
    """

    def __init__(self, engine: Engine, communication: Communication):
        self.engine = engine
        self.communication = communication
        #: See `Reducer`.
        self.compressed: CompressedSums | None = None
        method = communication.compression
        # Rounding is what links between hosts can do themselves.
        if method is not None and engine.wire_dtype is None:
            self.compressed = self.compressed_by(
                method, communication.compression_across
            )

    def compressed_by(self, method: Compression, across: str) -> CompressedSums:
        """Sums of what `method` makes small; see `Reducer`."""
        if not isinstance(method, Method):
            raise TypeError(f"not a method of tfdp.compression: {method!r}")
        group = peer_group(self.engine, across)
        return CompressedSums(method, group, self.engine.devices, self.communication)

    def begin_run(self) -> None:
        """Called before the replicas of one `strategy.run` are traced."""
        self.engine.begin_run()

    def end_run(self) -> None:
        """Called when they are traced."""
        self.engine.end_run()

    def broadcast(self, value: tf.Tensor, rank: int) -> tf.Tensor:
        """Replica 0's `value` on every replica, in replica context."""
        if self.engine.replicas == 1:
            return value
        return self.engine.broadcast(value, rank)

    def sum_gradients(
        self,
        gradients: Sequence[Value],
        state: Sequence[tf.Tensor],
        rank: int,
        *,
        sum_rows: bool = False,
        at_once: bool = False,
    ) -> tuple[list[Value], list[tf.Tensor]]:
        """The sums of gradients, and of other small values; see `all_reduce`.

        Both ride in the same buckets, unless gradients are rounded on the way
        (`Communication.wire_dtype`). With `sum_rows`, or where `Communication` asks
        for it, rows with the same index of a `tf.IndexedSlices` are added before they
        travel, and what comes back has each index once, or is dense. With `at_once`
        they may travel together: none of them is there before the others.
        """
        is_asked = self.communication.repeated_rows == "sum"
        if self.engine.replicas == 1:  # nothing travels, but Adam is to do the same
            own = [_merged(g) if is_asked else g for g in gradients]
            return own, list(state)
        sum_rows = sum_rows or is_asked
        gradients = [_as_sent(g, sum_rows) for g in gradients]
        if self.engine.wire_dtype is None:
            # Only where it is asked: benchmarks put others in the place of this.
            asked = {"sum_rows": True} if sum_rows else {}
            asked |= {"at_once": True} if at_once else {}
            sums = self.all_reduce([*gradients, *state], rank, **asked)
            return sums[: len(gradients)], sums[len(gradients) :]
        rounded = self._by_buckets(
            gradients,
            rank,
            self.engine.all_reduce_gradients,
            self.engine.wire_dtype,
            sum_rows,
        )
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

        Called once per replica, in replica context, while a graph is built. A
        bucket's exchange depends on the bucket's own tensors only, so it starts as
        soon as backprop has made them.

        Args:
          values: tensors and `tf.IndexedSlices`, alike on all replicas but for the
            number of slices.
          rank: the calling replica.
          mean: divide by the number of replicas.
          sum_rows: see `sum_gradients`.
          at_once: see `sum_gradients`.

        Returns:
          The reduced values, in the order in which they came.

        Cost: per replica about 2 n (N - 1) / N bytes on the wire for n bytes of
        dense gradients. Slices cost (N - 1) times their own size; between hosts (H - 1)
        times those of a host, each index once with `sum_rows`, and then at most twice
        what the whole table costs: see `tfdp.hosts.row_sums`.
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

    @property
    def host_groups(self) -> tuple[tuple[int, ...], ...] | None:
        """The replicas of this process, host by host; see `Engine`."""
        return self.engine.host_groups

    def sum_within(self, value: tf.Tensor, rank: int) -> tf.Tensor:
        """The sum of `value` over the replicas of this host, which sends nothing."""
        return self.engine.all_reduce_within(tf.convert_to_tensor(value), rank)

    @property
    def late(self) -> AsyncExchange | None:
        """What makes sums while steps go on; see `Reducer`."""
        return self.engine.late

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
        reduced: dict[int, Value] = {}
        dense = [i for i, v in enumerate(values) if isinstance(v, tf.Tensor)]
        buckets = self.plan([values[i] for i in dense])
        if at_once and self.engine.reduces_buckets:
            buckets = joined_if_few(buckets, self.communication.bucket_bytes)
        for number, bucket in enumerate(buckets, start=1):
            places = [dense[i] for i in bucket.indices]
            tensors = [values[place] for place in places]
            label = f"bucket {number} of {len(buckets)}"
            with tf.name_scope("tfdp_all_reduce"):
                results = exchange(tensors, rank, label)
            reduced.update(zip(places, results, strict=True))
        sparse = [i for i, v in enumerate(values) if isinstance(v, tf.IndexedSlices)]
        for number, place in enumerate(sparse, start=1):
            with tf.name_scope("tfdp_all_reduce_rows"):
                reduced[place] = self.engine.all_reduce_rows(
                    values[place],
                    rank,
                    f"table {number} of {len(sparse)}",
                    summed=sum_rows,
                    wire_dtype=wire_dtype,
                )
        # Empty tensors are in no bucket: there is nothing to add.
        return [reduced.get(place, value) for place, value in enumerate(values)]

    def reduce_scatter(
        self,
        gradients: Sequence[Value],
        layouts: Sequence[ShardLayout],
        rank: int,
        *,
        in_turn: bool = False,
        label: str = "",
    ) -> list[tf.Tensor]:
        """This replica's shard of the sum of each gradient, bucket by bucket.

        Args:
          gradients: alike on all replicas; `tf.IndexedSlices` become dense.
          layouts: how each gradient is cut.
          rank: the calling replica.
          in_turn: gradients are computed only when those of earlier buckets are sums,
            but for `Communication.bucket_bytes` of them, or little more: few whole ones
            are there at once, however far one replica is ahead of the others.
          label: of what, in words that are alike on all hosts, which compare them.

        Cost: per replica n (N - 1) / N bytes on the wire for n bytes of gradients.
        """
        return self._cut_by_bucket(
            self.engine.reduce_scatter_bucket,
            of_known_shape(gradients, layouts),
            layouts,
            rank,
            "reduce_scatter",
            in_turn,
            label,
        )

    def all_gather(
        self, shards: Sequence[tf.Tensor], layouts: Sequence[ShardLayout], rank: int
    ) -> list[tf.Tensor]:
        """The whole tensors, on every replica, from everybody's shards.

        Args:
          shards: this replica's, flat and padded.
          layouts: how each tensor is cut.
          rank: the calling replica.

        Cost: per replica n (N - 1) / N bytes on the wire for n bytes of tensors.
        """
        # The first layers' weights are wanted first, and plans begin at the last.
        gathered = self._cut_by_bucket(
            self.engine.all_gather_bucket,
            shards[::-1],
            layouts[::-1],
            rank,
            "all_gather",
        )
        return gathered[::-1]

    @property
    def shard_parts(self) -> int:
        """Over how many replicas a tensor is sharded."""
        return self.engine.shard_parts

    @property
    def first_part(self) -> int:
        """The shard of this process's first replica."""
        return self.engine.first_part

    @property
    def holds_first_copy(self) -> bool:
        """Whether the shards of this process are the first of several copies."""
        return self.engine.holds_first_copy

    def join_shards(
        self, shards: Sequence[tf.Tensor], layout: ShardLayout, label: str
    ) -> tf.Tensor:
        """The whole tensor from the shards of this process; see `Engine`."""
        return self.engine.join_shards(shards, layout, label)

    @property
    def run_graph(self) -> tf.Graph | None:
        """The graph of the replica function that is being built."""
        return self.engine.run_graph

    @property
    def branches(self) -> Sequence[tuple[int, tf.Graph]]:
        """The conditionals that were noted; see `Reducer`."""
        return self.engine.branches

    def note_branches(self, rank: int) -> None:
        """Notes the conditionals that are being built; see `Reducer`."""
        self.engine.note_branches(rank)

    def sum_of_shards(self, value: tf.Tensor, rank: int) -> tf.Tensor:
        """The sum over the shards of what each replica found on its own.

        Args:
          value: small; alike in shape on all replicas.
          rank: the calling replica.
        """
        if not self.holds_first_copy:
            value = tf.zeros_like(value)  # other hosts count the same shards
        return self.engine.all_reduce(value, rank)

    def _cut_by_bucket(
        self,
        exchange: Callable[..., list[tf.Tensor]],
        tensors: Sequence[tf.Tensor],
        layouts: Sequence[ShardLayout],
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
            results.update(zip(bucket.indices, exchanged, strict=True))
        return [results[place] for place in range(len(tensors))]

    def plan(self, tensors: Sequence[tf.Tensor]) -> tuple[Bucket, ...]:
        """The buckets in which `tensors` travel with this engine."""
        infos = [describe(tensor) for tensor in tensors]
        if self.engine.reduces_buckets:
            return plan_buckets(
                infos,
                bucket_bytes=self.communication.bucket_bytes,
                first_bucket_bytes=self.communication.first_bucket_bytes,
            )
        # Packing would cost two copies and buy nothing: a bucket for each tensor.
        return plan_buckets(infos, bucket_bytes=1, first_bucket_bytes=1)

    def _mean(self, value: Value) -> Value:
        replicas = self.engine.replicas
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(
                value.values / replicas, value.indices, value.dense_shape
            )
        return value / replicas


def _as_sent(gradient: Value, sum_rows: bool) -> Value:
    """A small table's gradient as a whole, which goes into a bucket."""
    if isinstance(gradient, tf.IndexedSlices) and sum_rows and travels_dense(gradient):
        return tf.convert_to_tensor(gradient)
    return gradient


def _merged(gradient: Value) -> Value:
    return merge_rows(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def describe(tensor: tf.Tensor) -> TensorInfo:
    """What the bucket plan needs to know of `tensor`."""
    elements = tensor.shape.num_elements()
    # Types without a size of their own (strings) must not pass for empty tensors.
    element_bytes = tensor.dtype.size or 1
    size_bytes = None if elements is None else elements * element_bytes
    return TensorInfo(size_bytes, tensor.dtype.name)
