"""`PowerSGD`: gradients of matrices as products of two narrow ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from tfdp.checks import is_number, is_whole
from tfdp.compression.method import (
    Exchanged,
    Method,
    Peers,
    Slots,
    Tensors,
    all_reduce_bytes,
)


@dataclasses.dataclass(frozen=True)
class PowerSGD(Method):
    """Each gradient as P Q', with matrices of `rank` columns.

    With M_i the gradient of peer i (and the residual of earlier ones) as a matrix of
    [all other axes, output], and Q that of the step before:

        P = orthogonal basis of sum_i M_i Q;   Q_i = M_i' P;   Q = sum_i Q_i

    The sum is P Q', and peer i keeps M_i - P Q_i'.

    Args:
      rank: columns, at least 1. 1 to 4 for images; up to 32 for language models.
      start_step: steps that send gradients uncompressed, at least 0: the first ones
        change direction too fast. PyTorch's default is 1,000, its advice a tenth of all
        steps.
      min_compression_rate: matrices that would shrink by less than this factor are sent
        uncompressed; above 0.
      error_feedback: whether the next step adds what this one did not send.
      min_bytes: smaller gradients are sent uncompressed; at least 0.
      exclude: regular expressions of Keras paths to send uncompressed.
      one_dimensional: whether biases and scales are compressed, too.

    Raises:
      ConfigurationError: when an argument is not as above.

    Cost: rank (m + n) numbers for a matrix of m n, added in flight as in any
    all-reduce; two launches. Each peer computes 6 m n rank operations and a QR
    decomposition of [m, rank].

    Source: Vogels et al. 2019, "PowerSGD", algorithms 1 and 2, with warm start.
    Differs from PyTorch's hook, which computes a peer's residual from the mean of all:
    here each peer keeps what was not sent of its own gradient.

    ```python
    import tfdp

    communication = tfdp.Communication(compression=tfdp.compression.PowerSGD(2))
    ```
    """

    replicated_slots: ClassVar[frozenset[str]] = frozenset({"q"})

    rank: int = 1
    start_step: int = 10
    min_compression_rate: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(is_whole(self.rank, least=1), "rank", "an integer of at least 1")
        is_step = is_whole(self.start_step, least=0)
        self.require(is_step, "start_step", "an integer of at least 0")
        rate = self.min_compression_rate
        self.require(
            is_number(rate) and 0 < rate < math.inf,
            "min_compression_rate",
            "a finite number above 0",
        )

    @property
    def plain_steps(self) -> int:
        return self.start_step

    def takes(self, path: str, shape: Sequence[int | None], dtype: str) -> bool:
        """See `Compression.takes`; requires `min_compression_rate` as well."""
        if len(shape) < 2 or not super().takes(path, shape, dtype):
            return False
        rows, columns, rank = self._sizes(shape)
        return rows * columns >= self.min_compression_rate * rank * (rows + columns)

    def slots(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        _, columns, rank = self._sizes(shape)
        return {"q": (columns, rank)}

    def sent_bytes(self, shapes: Sequence[Sequence[int]], peers: int) -> float:
        return all_reduce_bytes(self.message_bytes(shapes), peers)

    def message_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """Bytes of P and Q of each matrix."""
        sizes = map(self._sizes, shapes)
        return sum(4 * rank * (rows + columns) for rows, columns, rank in sizes)

    def exchange(
        self, values: Tensors, slots: Sequence[Slots], peers: Peers, step: tf.Tensor
    ) -> Exchanged:
        """See `Method.exchange`: sums P, then Q."""
        # Keras' kernels have their outputs last.
        matrices = [tf.reshape(v, self._sizes(v.shape)[:2]) for v in values]
        bases = [_basis(p) for p in peers.sum(self._first_half(matrices, slots))]
        own = [
            tf.matmul(matrix, basis, transpose_a=True)
            for matrix, basis in zip(matrices, bases, strict=True)
        ]
        summed = peers.sum(own)
        sums, left, kept = [], [], []
        for value, basis, mine, q in zip(values, bases, own, summed, strict=True):
            sums.append(_product(basis, q, value))
            left.append(value - _product(basis, mine, value))
            # Only directions are used again: lengths are quadratic in the gradients'.
            largest = tf.reduce_max(tf.abs(q))
            kept.append({"q": tf.math.divide_no_nan(q, largest)})
        return Exchanged(sums, left, kept)

    def _sizes(self, shape: Sequence[int | None]) -> tuple[int, int, int]:
        """Rows, columns and rank of a variable's matrix."""
        columns = int(shape[-1] or 1)
        rows = math.prod(int(length or 1) for length in shape[:-1])
        return rows, columns, min(self.rank, rows, columns)

    def _first_half(self, matrices: Tensors, slots: Sequence[Slots]) -> list[tf.Tensor]:
        products = []
        for number, (matrix, slot) in enumerate(zip(matrices, slots, strict=True)):
            q = slot["q"]
            # All peers draw the same start, by the same seed.
            start = tf.random.stateless_normal(q.shape, [number, 20190531])
            is_first = tf.reduce_all(tf.equal(q, 0.0))
            products.append(matrix @ tf.where(is_first, start, q))
        return products


def _basis(products: tf.Tensor) -> tf.Tensor:
    """An orthonormal basis of the columns; for zeros any one, which has no effect."""
    # Divided by the largest, which leaves the basis the same: squares would overflow.
    largest = tf.reduce_max(tf.abs(products))
    return tf.linalg.qr(tf.math.divide_no_nan(products, largest)).q


def _product(basis: tf.Tensor, q: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.matmul(basis, q, transpose_b=True), like.shape)
