"""Sums over TPU cores: XLA ops in the program that all cores run.

XLA combines adjacent sums into one exchange and starts each as soon as its inputs
exist, so nothing is packed here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdp._private.tpu_names import xla_reduce_scatter
from tfdp.errors import CollectiveError
from tfdp.exchange.packing import Tensors
from tfdp.exchange.shards import join_rows, to_rows
from tfdp.exchange.sparse import RowSum
from tfdp.exchange.transport import Transport
from tfdp.exchange.wire_types import is_wider_float
from tfdp.plan.shards import Layouts
from tfdp.plan.topology import Topology

# What XLA's sum takes (tpu_strategy.py, _DTYPES_SUPPORTED_BY_CROSS_REPLICA_SUM).
SUMMABLE = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.uint32)


class CrossReplica(Transport):
    """Moves tensors between the N replicas of one program.

    Gradients travel, and are added, in `wire_dtype`; None: their own. `ops` are
    replaced where there is no TPU.

    Cost: 2 n (N - 1) / N bytes per replica for n bytes, on the links between cores.
    """

    name = "cross_replica_sum"
    #: XLA orders exchanges, and has no dynamic lengths.
    is_compiled = pads_parts = True

    def __init__(
        self,
        replicas: int,
        ops: CrossReplicaOps | None = None,
        wire_dtype: str | None = None,
    ):
        super().__init__([""] * replicas, Topology(1, replicas))
        self.wire_dtype = wire_dtype
        self._ops = CrossReplicaOps(replicas) if ops is None else ops

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Does nothing: replicas exchange in any graph under construction."""
        yield

    def part_of(self, rank: Any) -> Any:
        return rank

    def all_reduce(
        self, tensors: Tensors, rank: Any, label: str, wire_dtype: str | None = None
    ) -> list[tf.Tensor]:
        sent = [_cast(tensor, wire_dtype) for tensor in tensors]
        return _as_given([self._sum(tensor) for tensor in sent], tensors)

    def broadcast(self, tensors: Tensors, rank: Any) -> list[tf.Tensor]:
        return [self._broadcast(tensor, rank) for tensor in tensors]

    def _broadcast(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        # Not value * (rank == 0): another replica's value may be NaN.
        mine = tf.where(tf.equal(rank, 0), value, tf.zeros_like(value))
        if value.dtype in (tf.int64, tf.uint64):
            # As two halves: the other replicas' are zero, so no sum carries.
            return tf.bitcast(self._sum(tf.bitcast(mine, tf.int32)), mine.dtype)
        if value.dtype == tf.bool:
            return self._sum(tf.cast(mine, tf.int32)) > 0
        return self._sum(mine)

    def reduce_scatter(
        self, tensors: Tensors, layouts: Layouts, rank: Any, label: str
    ) -> list[tf.Tensor]:
        """See `Transport`. Cost: n (N - 1) / N bytes per replica for n bytes."""
        sent = [_cast(tensor, self.wire_dtype) for tensor in tensors]
        # One exchange each: XLA starts it as soon as the gradient exists.
        rows_to_send = to_rows(sent, layouts)
        parts = [self._ops.scatter_sum(rows, rank) for rows in rows_to_send]
        return _as_given(parts, tensors)

    def all_gather(
        self, parts: Tensors, layouts: Layouts, rank: Any, label: str
    ) -> list[tf.Tensor]:
        """See `Transport`. Cost: n (N - 1) / N bytes per replica for n bytes."""
        return join_rows(self._ops.gather(tf.concat(parts, axis=0)), layouts)

    def combine(self, tensors: Tensors, rank: Any, how: RowSum) -> list[tf.Tensor]:
        """See `Transport`. Lists cost N times their own size: XLA has no other gather,
        and no dynamic lengths, so none are combined first."""
        gathered = [self.gather(tensor, rank) for tensor in how.narrow(tensors)]
        return _as_given(gathered, tensors)

    def gather(self, tensor: tf.Tensor, rank: Any) -> tf.Tensor:
        """All replicas' rows, of one number, in rank order: a sum of one-hot parts."""
        slot = tf.one_hot(rank, self.replicas, on_value=True, off_value=False)
        slot = tf.reshape(slot, [self.replicas] + [1] * tensor.shape.rank)
        parts = tf.where(slot, tensor[tf.newaxis], tf.zeros([], tensor.dtype))
        return tf.reshape(self._sum(parts), [-1, *tensor.shape[1:]])

    def _sum(self, value: tf.Tensor) -> tf.Tensor:
        if value.dtype not in SUMMABLE:
            raise CollectiveError(
                f"TPU replicas cannot add tensors of type {value.dtype.name}; they add "
                f"{', '.join(dtype.name for dtype in SUMMABLE)}. Cast before the "
                "reduction."
            )
        return self._ops.sum(value)


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


def _cast(tensor: tf.Tensor, wire_dtype: str | None) -> tf.Tensor:
    """Wider floats only; a scalar costs nothing and may be a count."""
    is_wider = is_wider_float(tensor.dtype, wire_dtype)
    return tf.cast(tensor, wire_dtype) if is_wider and tensor.shape.rank else tensor


def _as_given(sums: Tensors, given: Tensors) -> list[tf.Tensor]:
    return [tf.cast(s, own.dtype) for s, own in zip(sums, given, strict=True)]
