"""Lists of tensors over a transport, bucket by bucket. Read `Reducer._by_buckets`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import tensorflow as tf

from tfdp.exchange.packing import Tensors
from tfdp.exchange.sparse import (
    RowSum,
    rows_once,
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
from tfdp.plan.communication import Communication
from tfdp.plan.compression import Compression

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
        *,
        sum_rows: bool = False,
        at_once: bool = False,
    ) -> tuple[list[Value], list[tf.Tensor]]:
        """The sums of gradients, and of other small values; see `all_reduce`.

        Both share buckets, unless gradients are rounded (`Communication.wire_dtype`).
        `sum_rows`: rows of equal index may be added before they travel; then the result
        has each index once, or is dense (as with `Communication(repeated_rows="sum")`).
        `at_once`: all buckets may travel as one where they fit, because their values
        become ready together.
        """
        adds_repeated = self.communication.repeated_rows == "sum"
        # A compiler has no dynamic lengths.
        sum_rows = (sum_rows or adds_repeated) and not self.transport.is_compiled
        if self.transport.replicas == 1:  # nothing travels, but Adam must do the same
            own = map(rows_once, gradients) if adds_repeated else gradients
            return list(own), list(state)
        gradients = [_as_sent(g, sum_rows) for g in gradients]
        if self.transport.wire_dtype is None:
            sums = self.all_reduce(
                [*gradients, *state], rank, sum_rows=sum_rows, at_once=at_once
            )
            return sums[: len(gradients)], sums[len(gradients) :]
        rounded = self._by_buckets(
            gradients, rank, sum_rows=sum_rows, wire_dtype=self.transport.wire_dtype
        )
        return rounded, self.all_reduce(state, rank)

    def all_reduce(
        self,
        values: Sequence[Value],
        rank: Any,
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
        sums = self._by_buckets(values, rank, sum_rows=sum_rows, at_once=at_once)
        replicas = self.transport.replicas
        if not mean or replicas == 1:
            return sums
        return [with_values(each, lambda part: part / replicas) for each in sums]

    def _by_buckets(
        self,
        values: Sequence[Value],
        rank: Any,
        *,
        sum_rows: bool,
        at_once: bool = False,
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
        if at_once and self.transport.reduces_buckets:
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
                table = RowSum(label, sum_rows, wire_dtype)
                rows = sum_slices(self.transport, values[place], rank, table)
                reduced[place] = register_exchanged(rows)
        return [reduced[place] for place in range(len(values))]

    def plan(self, tensors: Sequence[tf.Tensor | tf.TensorSpec]) -> tuple[Bucket, ...]:
        infos = [describe(tensor) for tensor in tensors]
        most, first = 1, 1  # packing would only add two copies: one bucket per tensor
        if self.transport.reduces_buckets:
            most = self.communication.bucket_bytes
            first = self.communication.first_bucket_bytes
        return plan_buckets(infos, bucket_bytes=most, first_bucket_bytes=first)

    def predecessors(self, buckets: Sequence[Bucket]) -> Sequence[int | None]:
        """The bucket that each waits for, in turn; a compiler orders by itself."""
        if self.transport.is_compiled:
            return [None] * len(buckets)
        return predecessors(buckets, between_bytes=self.communication.bucket_bytes)

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
        within = transport.among(topology.within_hosts)
        between = transport.between_hosts
        return CompressedSums(method, between, within, self.communication)


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


def describe(tensor: tf.Tensor | tf.TensorSpec) -> TensorInfo:
    """The bucket plan's description of `tensor`."""
    elements = tensor.shape.num_elements()
    # Types without a size (strings) must not count as empty tensors.
    element_bytes = tensor.dtype.size or 1
    size_bytes = None if elements is None else elements * element_bytes
    return TensorInfo(size_bytes, tensor.dtype.name)
