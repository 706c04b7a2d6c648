"""Exchanges between TPU cores: ops of XLA's, within the program that all cores run."""

from __future__ import annotations

import tensorflow as tf

from tfdp._private.tpu_names import xla_reduce_scatter

__all__ = ["CrossReplicaOps"]

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
