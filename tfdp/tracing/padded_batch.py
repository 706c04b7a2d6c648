"""Batches filled up to one size, and what a replica knows of its part of one.

A program of fixed shapes (XLA) needs batches of fixed size. A short batch is filled up
with copies of its own rows, and carries one number per row that says which are real:

    +n for a real row of a global batch of n rows,   -n for a row of filling

so that a replica knows the global count without asking the others.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp._private.names import PerReplica


class PaddedBatch(NamedTuple):
    """A batch of fixed size, and +n or -n for each of its rows.

    Args:
      sized: `{"<rows of one replica's part>": batch}`, the batch as Keras takes it.
        TensorFlow forgets the length of the first axes, where a loop takes several
        batches or a function has met two sizes; the key is part of the structure,
        which it keeps.
      rows: int32, one for each row; () when all are real.
    """

    sized: dict[str, Any]
    rows: Any

    @classmethod
    def of(cls, batch: Any, rows: Any, size: int) -> PaddedBatch:
        """From a batch whose replicas' parts have `size` rows each."""
        return cls({str(size): batch}, rows)

    @property
    def batch(self) -> Any:
        """The batch as Keras takes it."""
        (batch,) = self.sized.values()
        return batch

    def set_shapes(self) -> None:
        """Tells every tensor, in cross-replica context, how many rows it has."""
        (size,) = map(int, self.sized)
        for value in tf.nest.flatten(self):
            parts = value.values if isinstance(value, PerReplica) else (value,)
            for part in parts:
                part.set_shape([size, *part.shape[1:]])


@dataclasses.dataclass
class Padding:
    """One replica's part of a padded batch.

    Args:
      mask: booleans, shape [rows]: which rows are real.
      rows: how many there are with the filling.
      count: n_r, how many are real; float32 scalar.
      total: N, how many are real on all replicas; float32 scalar.
      has_user_weights: whether the loss being computed has sample weights besides.
      loss_is_weighted: whether a loss was taken with the filling left out.
    """

    mask: tf.Tensor
    rows: int
    count: tf.Tensor
    total: tf.Tensor
    has_user_weights: bool = False
    loss_is_weighted: bool = False

    @classmethod
    def of(cls, rows: tf.Tensor) -> Padding:
        """From the numbers of a `PaddedBatch`, in replica context."""
        mask = rows > 0
        return cls(
            mask=mask,
            rows=rows.shape[0],
            count=tf.reduce_sum(tf.cast(mask, tf.float32)),
            total=tf.cast(tf.abs(rows[0]), tf.float32),
        )

    def weights(self, rank: int, dtype: Any = tf.float32) -> tf.Tensor:
        """1 for real rows, 0 for filling, of shape [rows, 1, ..., 1] of `rank` axes."""
        return tf.reshape(tf.cast(self.mask, dtype), [self.rows] + [1] * (rank - 1))


def find_padded(arguments: Any) -> PaddedBatch | None:
    """The padded batch among nested `arguments`; None: there is none."""
    if isinstance(arguments, PaddedBatch):
        return arguments
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    if isinstance(arguments, (tuple, list)):
        found = (find_padded(part) for part in arguments)
        return next((part for part in found if part is not None), None)
    return None


def without_padding(arguments: Any) -> Any:
    """`arguments` with the plain batch in the place of a padded one."""
    if isinstance(arguments, PaddedBatch):
        return arguments.batch
    if isinstance(arguments, dict):
        return {name: without_padding(part) for name, part in arguments.items()}
    if type(arguments) in (tuple, list):
        return type(arguments)(without_padding(part) for part in arguments)
    return arguments


def trim_rows(outputs: Any, rows: Any) -> Any:
    """The replicas' `outputs` without the rows of filling, in cross-replica context.

    Args:
      outputs: nested per-replica tensors (plain ones for a single replica).
      rows: of the `PaddedBatch` that they were computed from.
    """

    def trim(output: Any) -> Any:
        if not isinstance(output, PerReplica):
            return output[: _real(rows)]
        pairs = zip(output.values, rows.values, strict=True)
        return PerReplica([part[: _real(signed)] for part, signed in pairs])

    # On the host: the length is known only while it runs.
    with tf.device("CPU:0"):
        return tf.nest.map_structure(trim, outputs)


def _real(rows: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(rows > 0, tf.int32))
