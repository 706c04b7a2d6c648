"""Sums over TPU cores: XLA ops in the program that all cores run.

XLA combines adjacent sums into one exchange and starts each as soon as its inputs
exist, so nothing is packed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.tpu_names import xla_reduce_scatter
from tfdp.errors import CollectiveError
from tfdp.exchange.compressed import CompressedSums
from tfdp.exchange.packing import (
    Layouts,
    Tensors,
    join_rows,
    to_rows,
    whole_from_shards,
    with_static_shape,
)
from tfdp.exchange.wire_types import is_wider_float
from tfdp.lint.registry import register_exchanged
from tfdp.plan.compression import Compression
from tfdp.plan.shards import ShardLayout

# What XLA's sum takes (tpu_strategy.py, _DTYPES_SUPPORTED_BY_CROSS_REPLICA_SUM).
SUMMABLE = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.uint32)


class CrossReplicaReducer:
    """Implements `Reducer` over the N replicas of one program.

    Gradients travel, and are added, in `wire_dtype`; None: their own. `ops` are
    replaced where there is no TPU.

    Cost: 2 n (N - 1) / N bytes per replica for n bytes, on the links between cores.
    """

    #: Replicas exchange in any graph under construction.
    run_graph: tf.Graph | None = None
    #: XLA adds what it sends: it must not be compressed.
    compressed = None
    late = None
    #: XLA's compiler handles conditionals.
    branches = ()
    #: One program runs on all cores, which always step together.
    host_groups = None
    first_part = 0
    holds_first_copy = True

    def __init__(
        self,
        replicas: int,
        ops: CrossReplicaOps | None = None,
        wire_dtype: str | None = None,
    ):
        self.replicas = self.shard_parts = replicas
        self.wire_dtype = wire_dtype
        self._ops = CrossReplicaOps(replicas) if ops is None else ops

    def compressed_by(self, method: Compression, across: str) -> CompressedSums:
        """Not supported on TPUs; strategies reject compression earlier."""
        raise CollectiveError("TPU cores send nothing compressed.")

    def note_branches(self, rank: Any) -> None:
        """Does nothing; see `branches`."""

    def sum_within(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        """Not supported on TPUs; see `host_groups`."""
        raise CollectiveError("TPU cores have no sums within a host.")

    def join_shards(
        self, shards: Tensors, layout: ShardLayout, label: str
    ) -> tf.Tensor:
        return whole_from_shards(shards, layout)

    def begin_run(self) -> None:
        """Does nothing."""

    def end_run(self) -> None:
        """Does nothing."""

    def sum_gradients(
        self,
        gradients: Sequence[Any],
        state: Tensors,
        rank: Any,
        *,
        sum_rows: bool = False,
        at_once: bool = False,
    ) -> tuple[list[Any], list[tf.Tensor]]:
        """See `Reducer`. Rows are never added first: XLA has no dynamic lengths."""
        sent = to_wire(gradients, self.wire_dtype)
        sums = self.all_reduce([*sent, *state], rank)
        count = len(gradients)
        return from_wire(sums[:count], gradients), sums[count:]

    def all_reduce(
        self, values: Sequence[Any], rank: Any, *, mean: bool = False
    ) -> list[Any]:
        """The sum (or mean) of each value over the replicas.

        Sparse gradients (`tf.IndexedSlices`) stay sparse, with the slices of all
        replicas in rank order, because optimizers treat them unlike dense ones. They
        cost N times their own size; XLA has no other gather.
        """
        return [
            self._join_slices(value, rank, mean)
            if isinstance(value, tf.IndexedSlices)
            else self._reduce(tf.convert_to_tensor(value), mean)
            for value in values
        ]

    def broadcast(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        if self.replicas == 1:
            return value
        # Not value * (rank == 0): another replica's value may be NaN.
        mine = tf.where(tf.equal(rank, 0), value, tf.zeros_like(value))
        if value.dtype in (tf.int64, tf.uint64):
            # As two halves: the other replicas' are zero, so no sum carries.
            return tf.bitcast(self._sum(tf.bitcast(mine, tf.int32)), mine.dtype)
        if value.dtype == tf.bool:
            return self._sum(tf.cast(mine, tf.int32)) > 0
        return self._sum(mine)

    def reduce_scatter(
        self,
        gradients: Sequence[Any],
        layouts: Layouts,
        rank: Any,
        *,
        in_turn: bool = False,
        label: str = "",
    ) -> list[tf.Tensor]:
        """This replica's shard of the sum of each gradient.

        `in_turn` and `label` are ignored: XLA orders what it compiles, and all hosts
        run one program. Cost: n (N - 1) / N bytes per replica for n bytes of gradients.
        """
        dense = with_static_shape(gradients, layouts)
        sent = to_wire(dense, self.wire_dtype)
        # One exchange each: XLA starts it as soon as the gradient exists.
        rows_to_send = to_rows(sent, layouts)
        shards = [self._ops.scatter_sum(rows, rank) for rows in rows_to_send]
        register_exchanged(shards)
        return from_wire(shards, dense)

    def all_gather(
        self, shards: Tensors, layouts: Layouts, rank: Any
    ) -> list[tf.Tensor]:
        """The whole tensors from all replicas' shards: one exchange per type.

        Cost: n (N - 1) / N bytes per replica for n bytes of tensors.
        """
        wholes: dict[int, tf.Tensor] = {}
        for dtype in dict.fromkeys(shard.dtype for shard in shards):
            places = [i for i, shard in enumerate(shards) if shard.dtype == dtype]
            own = [layouts[i] for i in places]
            rows = self._ops.gather(tf.concat([shards[i] for i in places], axis=0))
            wholes.update(zip(places, join_rows(rows, own), strict=True))
        return [wholes[place] for place in range(len(shards))]

    def sum_of_shards(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        return self._sum(value)

    def _join_slices(
        self, slices: tf.IndexedSlices, rank: Any, mean: bool
    ) -> tf.IndexedSlices:
        if self.replicas == 1:
            return slices
        values = self._gather(slices.values, rank)
        # A row of a table: 32 bits are enough, and XLA does not add 64.
        indices = self._gather(tf.cast(slices.indices, tf.int32), rank)
        return tf.IndexedSlices(
            values / self.replicas if mean else values,
            tf.cast(indices, slices.indices.dtype),
            slices.dense_shape,
        )

    def _gather(self, rows: tf.Tensor, rank: Any) -> tf.Tensor:
        """All replicas' `rows` in rank order: a sum of one-hot parts."""
        slot = tf.one_hot(rank, self.replicas, on_value=True, off_value=False)
        slot = tf.reshape(slot, [self.replicas] + [1] * rows.shape.rank)
        parts = tf.where(slot, rows[tf.newaxis], tf.zeros([], rows.dtype))
        return tf.reshape(self._sum(parts), [-1, *rows.shape[1:]])

    def _reduce(self, value: tf.Tensor, mean: bool) -> tf.Tensor:
        if self.replicas == 1 or value.shape.num_elements() == 0:
            return value
        total = self._sum(value)
        return total / self.replicas if mean else total

    def _sum(self, value: tf.Tensor) -> tf.Tensor:
        if value.dtype not in SUMMABLE:
            raise CollectiveError(
                f"TPU replicas cannot add tensors of type {value.dtype.name}; they add "
                f"{', '.join(dtype.name for dtype in SUMMABLE)}. Cast before the "
                "reduction."
            )
        return register_exchanged(self._ops.sum(value))


SCATTERABLE = (tf.bfloat16, tf.float16, tf.float32, tf.int32, tf.uint32)


class CrossReplicaOps:
    """The exchanges of `replicas` = N replicas, for a whole tensor of n bytes."""

    def __init__(self, replicas: int):
        self.replicas = replicas
        self._group = [list(range(replicas))]

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of `tensor` over all replicas, on each: 2 n (N - 1) / N bytes."""
        return tf.raw_ops.CrossReplicaSum(input=tensor, group_assignment=self._group)

    def scatter_sum(self, rows: tf.Tensor, rank: tf.Tensor) -> tf.Tensor:
        """Row `rank` of the sum of `rows`, `[N, k]`: n (N - 1) / N bytes."""
        if rows.dtype not in SCATTERABLE:
            return tf.gather(self.sum(rows), rank)
        row = xla_reduce_scatter(
            input=rows,
            group_assignment=self._group,
            scatter_dimension=0,
            reduce_op="Add",
        )
        return tf.reshape(row, rows.shape[1:])

    def gather(self, row: tf.Tensor) -> tf.Tensor:
        """Every replica's `row`, `[k]`, as `[N, k]`: n (N - 1) / N bytes.

        TensorFlow has no all-gather for TPU programs. Each replica sends its row to
        every other one in an all-to-all, with the same bytes on the links.
        """
        copies = tf.tile(row[tf.newaxis], [self.replicas, 1])
        return tf.raw_ops.AllToAll(
            input=copies,
            group_assignment=self._group,
            concat_dimension=0,
            split_dimension=0,
            split_count=self.replicas,
        )


def to_wire(gradients: Sequence[Any], wire_dtype: str | None) -> list[Any]:
    """The gradients in the type in which they travel: `wire_dtype`, if any."""
    if wire_dtype is None:
        return list(gradients)
    return [_cast(gradient, wire_dtype) for gradient in gradients]


def from_wire(reduced: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """The reduced values, in the types of `gradients`."""
    pairs = zip(reduced, gradients, strict=True)
    return [tf.cast(value, gradient.dtype) for value, gradient in pairs]


def _cast(gradient: Any, wire_dtype: str) -> Any:
    """Wider floats only; a scalar costs nothing and may be a count."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            _cast(gradient.values, wire_dtype), gradient.indices, gradient.dense_shape
        )
    tensor = tf.convert_to_tensor(gradient)
    is_wider = is_wider_float(tensor.dtype, wire_dtype)
    return tf.cast(tensor, wire_dtype) if is_wider and tensor.shape.rank else tensor
