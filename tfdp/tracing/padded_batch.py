"""Batches padded to a fixed size, for programs of fixed shapes (XLA).

A short batch is padded with copies of its own rows, and carries one number per row, +n
for a valid row of a global batch of n rows, -n for a padding row: so each replica has
the global count without an exchange.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp._private.names import PerReplica


class PaddedBatch(NamedTuple):
    """A batch of fixed size, and +n or -n for each of its rows (int32, () for all
    valid).

    `sized` is `{"<rows of one replica's part>": batch}`: TensorFlow forgets static
    sizes in loops and after retracing, but keeps the key, a part of the structure.
    """

    sized: dict[str, Any]
    rows: Any

    @classmethod
    def of(cls, batch: Any, rows: Any, size: int) -> PaddedBatch:
        """From a batch whose replicas' parts have `size` rows each."""
        return cls({str(size): batch}, rows)

    @property
    def batch(self) -> Any:
        (batch,) = self.sized.values()
        return batch

    def set_shapes(self) -> None:
        """Sets the static number of rows of every tensor, in cross-replica context."""
        (size,) = map(int, self.sized)
        for value in tf.nest.flatten(self):
            parts = value.values if isinstance(value, PerReplica) else (value,)
            for part in parts:
                part.set_shape([size, *part.shape[1:]])


@dataclasses.dataclass
class Padding:
    """One replica's part of a padded batch.

    Of its `rows`, `count` (n_r) are valid, as `mask` says, and `total` (N) on all
    replicas. `has_user_weights`: the current loss also has the user's sample weights;
    `loss_is_weighted`: a loss was computed that excludes the padding.
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
        """1 for valid rows, 0 for padding, of shape [rows, 1, ..., 1] of that rank."""
        return tf.reshape(tf.cast(self.mask, dtype), [self.rows] + [1] * (rank - 1))


def find_padded(arguments: Any) -> PaddedBatch | None:
    """The padded batch among nested `arguments`, or None."""
    if isinstance(arguments, PaddedBatch):
        return arguments
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    if isinstance(arguments, (tuple, list)):
        found = (find_padded(part) for part in arguments)
        return next((part for part in found if part is not None), None)
    return None


def without_padding(arguments: Any) -> Any:
    """`arguments` with plain batches instead of padded ones."""
    if isinstance(arguments, PaddedBatch):
        return arguments.batch
    if isinstance(arguments, dict):
        return {name: without_padding(part) for name, part in arguments.items()}
    if type(arguments) in (tuple, list):
        return type(arguments)(without_padding(part) for part in arguments)
    return arguments


def trim_rows(outputs: Any, rows: Any) -> Any:
    """The replicas' `outputs` without padding rows, in cross-replica context; `rows` of
    the `PaddedBatch` that they were computed from."""

    def trim(output: Any) -> Any:
        if not isinstance(output, PerReplica):
            return output[: _real(rows)]
        pairs = zip(output.values, rows.values, strict=True)
        return PerReplica([part[: _real(signed)] for part, signed in pairs])

    # On the host, because the length is dynamic.
    with tf.device("CPU:0"):
        return tf.nest.map_structure(trim, outputs)


def _real(rows: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(rows > 0, tf.int32))
