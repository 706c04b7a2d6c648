"""Sums over TPU cores: an op of XLA's, within the program that all cores run.

XLA packs neighbouring sums into one exchange (its all-reduce combiner) and starts each
as soon as its inputs are there, so nothing is packed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.tpu_names import xla_reduce_scatter
from tfdp.errors import CollectiveError
from tfdp.exchange.compressed import CompressedSums
from tfdp.exchange.packing import join_rows, of_known_shape, to_rows, whole_from_shards
from tfdp.exchange.wire_types import is_wider_float
from tfdp.plan.compression import Compression
from tfdp.plan.shards import ShardLayout

# What XLA's sum takes (tpu_strategy.py, _DTYPES_SUPPORTED_BY_CROSS_REPLICA_SUM).
SUMMABLE = (
    tf.bfloat16,
    tf.float16,
    tf.float32,
    tf.float64,
    tf.int32,
    tf.uint32,
)


class CrossReplicaReducer:
    """Sums values, and moves shards, over the replicas of one program.

    Args:
      replicas: N, how many run the program.
      ops: the exchanges of one tensor; others where there is no TPU.
      wire_dtype: the type in which gradients travel, and are added; None: their own.

    Cost: 2 n (N - 1) / N bytes per replica for n bytes, on the links between cores.
    """

    #: The graph in which replicas exchange: whichever is being built.
    run_graph: tf.Graph | None = None
    #: XLA sends what it adds.
    compressed = None
    late = None

    def compressed_by(self, method: Compression, across: str) -> CompressedSums:
        """There is none on TPUs; strategies refuse it before."""
        raise CollectiveError("TPU cores send nothing compressed.")

    def __init__(
        self,
        replicas: int,
        ops: CrossReplicaOps | None = None,
        wire_dtype: str | None = None,
    ):
        self.replicas = replicas
        self.wire_dtype = wire_dtype
        self._ops = CrossReplicaOps(replicas) if ops is None else ops

    @property
    def branches(self) -> Sequence[tuple[int, tf.Graph]]:
        """None are known: XLA's compiler sees to conditionals."""
        return ()

    def note_branches(self, rank: Any) -> None:
        """Nothing is noted; see `branches`."""

    @property
    def host_groups(self) -> tuple[tuple[int, ...], ...] | None:
        """One program runs on all cores, which cannot step apart."""
        return None

    def sum_within(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        """Not on TPUs; see `host_groups`."""
        raise CollectiveError("TPU cores have no sums within a host.")

    @property
    def shard_parts(self) -> int:
        """Over how many replicas a tensor is sharded."""
        return self.replicas

    @property
    def first_part(self) -> int:
        """The shard of the first replica."""
        return 0

    @property
    def holds_first_copy(self) -> bool:
        """There is one copy of each shard."""
        return True

    def join_shards(
        self, shards: Sequence[tf.Tensor], layout: ShardLayout, label: str
    ) -> tf.Tensor:
        """The whole tensor from all its shards, outside of replicas."""
        return whole_from_shards(shards, layout)

    def begin_run(self) -> None:
        """Called before the replicas of one `strategy.run` are traced: nothing."""

    def end_run(self) -> None:
        """Called when they are traced: nothing."""

    def sum_gradients(
        self,
        gradients: Sequence[Any],
        state: Sequence[tf.Tensor],
        rank: Any,
        *,
        sum_rows: bool = False,
        at_once: bool = False,
    ) -> tuple[list[Any], list[tf.Tensor]]:
        """The sums of gradients, and of other small values; see `all_reduce`.

        Rows are never added before: XLA has no lists of a length that is not known.
        """
        sent = to_wire(gradients, self.wire_dtype)
        sums = self.all_reduce([*sent, *state], rank)
        count = len(gradients)
        return from_wire(sums[:count], gradients), sums[count:]

    def all_reduce(
        self, values: Sequence[Any], rank: Any, *, mean: bool = False
    ) -> list[Any]:
        """The sum (or mean) of each value over the replicas.

        Sparse gradients (`tf.IndexedSlices`) stay sparse, with the slices of all
        replicas in rank order, because optimizers treat them otherwise than dense ones.

        Cost of slices: N times their own size; XLA has no other gather.
        """
        return [
            self._join_slices(value, rank, mean)
            if isinstance(value, tf.IndexedSlices)
            else self._reduce(tf.convert_to_tensor(value), mean)
            for value in values
        ]

    def broadcast(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        """Replica 0's `value` on every replica."""
        value = tf.convert_to_tensor(value)
        if self.replicas == 1:
            return value
        # Not value * (rank == 0): another replica's value may not be a number.
        mine = tf.where(tf.equal(rank, 0), value, tf.zeros_like(value))
        if value.dtype in (tf.int64, tf.uint64):
            return self._broadcast_long(mine)
        if value.dtype == tf.bool:
            return self._sum(tf.cast(mine, tf.int32)) > 0
        return self._sum(mine)

    def reduce_scatter(
        self,
        gradients: Sequence[Any],
        layouts: Sequence[ShardLayout],
        rank: Any,
        *,
        in_turn: bool = False,
        label: str = "",
    ) -> list[tf.Tensor]:
        """This replica's shard of the sum of each gradient.

        Args:
          gradients: alike on all replicas; `tf.IndexedSlices` become dense.
          layouts: how each gradient is cut.
          rank: the calling replica.
          in_turn, label: not looked at: XLA orders what it compiles, and hosts run one
            program.

        Cost: n (N - 1) / N bytes per replica for n bytes of gradients.
        """
        dense = of_known_shape(gradients, layouts)
        sent = to_wire(dense, self.wire_dtype)
        # One exchange each: XLA starts it as soon as the gradient is there.
        shards = [self._ops.scatter_sum(rows, rank) for rows in to_rows(sent, layouts)]
        return from_wire(shards, dense)

    def all_gather(
        self, shards: Sequence[tf.Tensor], layouts: Sequence[ShardLayout], rank: Any
    ) -> list[tf.Tensor]:
        """The whole tensors from everybody's shards: one exchange for each type.

        Args:
          shards: this replica's, flat and padded.
          layouts: how each tensor is cut.
          rank: the calling replica.

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
        """The sum over the shards of what each replica found on its own."""
        return self._sum(value)

    def _broadcast_long(self, mine: tf.Tensor) -> tf.Tensor:
        """64 bits in two halves: the others' are zero, so no sum carries."""
        halves = tf.bitcast(mine, tf.int32)
        return tf.bitcast(self._sum(halves), mine.dtype)

    def _join_slices(
        self, slices: tf.IndexedSlices, rank: Any, mean: bool
    ) -> tf.IndexedSlices:
        if self.replicas == 1:
            return slices
        values = self._gather(slices.values, rank)
        # A row of a table: 32 bits are enough, and 64 are not added.
        indices = self._gather(tf.cast(slices.indices, tf.int32), rank)
        return tf.IndexedSlices(
            values / self.replicas if mean else values,
            tf.cast(indices, slices.indices.dtype),
            slices.dense_shape,
        )

    def _gather(self, rows: tf.Tensor, rank: Any) -> tf.Tensor:
        """All replicas' `rows`, joined by rank: a sum of one part each and zeros."""
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
        return self._ops.sum(value)


# Exchanges between TPU cores: ops of XLA's, within the program that all cores run.


# What `XlaReduceScatter` takes (tf2xla/ops/xla_ops.cc).
SCATTERABLE = (tf.bfloat16, tf.float16, tf.float32, tf.int32, tf.uint32)


class CrossReplicaOps:
    """The exchanges of N replicas, with `n` bytes of a whole tensor.

    Args:
      replicas: N, how many run the program.
    """

    def __init__(self, replicas: int):
        self.replicas = replicas
        self._group = [list(range(replicas))]

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of `tensor` over all replicas, on each: 2 n (N - 1) / N bytes."""
        return tf.raw_ops.CrossReplicaSum(input=tensor, group_assignment=self._group)

    def scatter_sum(self, rows: tf.Tensor, rank: tf.Tensor) -> tf.Tensor:
        """Row `rank` of the sum of `rows` over all replicas: n (N - 1) / N bytes.

        Args:
          rows: `[N, k]` on every replica.
          rank: the calling replica.

        Returns:
          `[k]`.
        """
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
        """Every replica's `row`, in rank order, on each: n (N - 1) / N bytes.

        TensorFlow has no all-gather for TPU programs. Each replica hands its row to
        every other one in an all-to-all, which puts as many bytes on the links.

        Args:
          row: `[k]`.

        Returns:
          `[N, k]`.
        """
        copies = tf.tile(row[tf.newaxis], [self.replicas, 1])
        return tf.raw_ops.AllToAll(
            input=copies,
            group_assignment=self._group,
            concat_dimension=0,
            split_dimension=0,
            split_count=self.replicas,
        )


# Gradients in a smaller type on the way, and back.


def to_wire(gradients: Sequence[Any], wire_dtype: str | None) -> list[Any]:
    """The gradients as they travel: in `wire_dtype`, if any."""
    if wire_dtype is None:
        return list(gradients)
    return [_cast(gradient, wire_dtype) for gradient in gradients]


def from_wire(reduced: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """What came, in the types of the `gradients` that were sent."""
    pairs = zip(reduced, gradients, strict=True)
    return [
        value if value.dtype == gradient.dtype else _back(value, gradient.dtype)
        for value, gradient in pairs
    ]


def _cast(gradient: Any, wire_dtype: str) -> Any:
    """Wider floats only; a scalar costs nothing and may be a count."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            _cast(gradient.values, wire_dtype), gradient.indices, gradient.dense_shape
        )
    tensor = tf.convert_to_tensor(gradient)
    is_wider = is_wider_float(tensor.dtype, wire_dtype)
    return tf.cast(tensor, wire_dtype) if is_wider and tensor.shape.rank else tensor


def _back(value: Any, dtype: tf.DType) -> Any:
    if isinstance(value, tf.IndexedSlices):
        values = tf.cast(value.values, dtype)
        return tf.IndexedSlices(values, value.indices, value.dense_shape)
    return tf.cast(value, dtype)
