"""`Int8` and `Int4`: blocks of small integers with one scale."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import tensorflow as tf

from tfdp.compression.blocks import ALL_BUT_SIGN, Blockwise, is_block

# Rows of so few numbers are not worth another halving.
LEAST_HALVED = 32


@dataclasses.dataclass(frozen=True)
class _Integers(Blockwise):
    bits: ClassVar[int]

    block_size: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 32 // self.bits
        is_size = is_block(self.block_size, least)
        self.require(is_size, "block_size", f"a multiple of {least}")

    @property
    def elements_of_block(self) -> int:
        return self.block_size

    def encode_rows(self, rows: tf.Tensor) -> tf.Tensor:
        most = float(2 ** (self.bits - 1) - 1)
        largest = _largest_of_rows(rows)
        scale = largest / most
        # A product instead of a division per number. Numbers below 1e-38 times `most`
        # have no inverse, and are sent as 0. In a block with an infinity the codes do
        # not matter: its scale is infinite.
        codes = tf.round(rows * tf.math.divide_no_nan(1.0, scale))
        words = _packed(tf.cast(codes, tf.int8), self.bits)
        return tf.concat([tf.bitcast(scale, tf.int32), words], axis=1)

    def largest_in(self, words: tf.Tensor) -> tf.Tensor:
        """See `Blockwise`; the scale of an infinity is infinite."""
        # One step more than any number, so that roundings do not matter.
        return tf.bitcast(words[..., :1], tf.float32) * float(2 ** (self.bits - 1))

    def decode_rows(self, words: tf.Tensor) -> tf.Tensor:
        scale = tf.bitcast(words[..., :1], tf.float32)
        codes = _unpacked(words[..., 1:], self.bits)
        return tf.cast(codes, tf.float32) * scale


def _largest_of_rows(rows: tf.Tensor) -> tf.Tensor:
    """max |x| of each row, [blocks, 1]; NaN where a number is NaN.

    By halves first: XLA vectorizes these in one loop, where for a reduction it stores
    |x| and reads it again, which takes twice as long.
    """
    # As integers, which have the same order: XLA's float maximum drops a NaN.
    sizes = tf.bitwise.bitwise_and(tf.bitcast(rows, tf.int32), ALL_BUT_SIGN)
    size = sizes.shape[1]
    while size > LEAST_HALVED and size % 2 == 0:
        size //= 2
        sizes = tf.maximum(sizes[:, :size], sizes[:, size:])
    return tf.bitcast(tf.reduce_max(sizes, axis=1, keepdims=True), tf.float32)


def _packed(codes: tf.Tensor, bits: int) -> tf.Tensor:
    """Small integers, int8 [blocks, n], packed into int32 words."""
    if bits == 4:
        pairs = tf.reshape(codes, [codes.shape[0], -1, 2])
        low = tf.bitwise.bitwise_and(pairs[..., 0], tf.constant(15, tf.int8))
        high = tf.bitwise.left_shift(pairs[..., 1], tf.constant(4, tf.int8))
        codes = tf.bitwise.bitwise_or(low, high)
    return tf.bitcast(tf.reshape(codes, [codes.shape[0], -1, 4]), tf.int32)


def _unpacked(words: tf.Tensor, bits: int) -> tf.Tensor:
    """The inverse of `_packed`; leading axes stay."""
    codes = tf.bitcast(words, tf.int8)
    if bits == 4:
        four = tf.constant(4, tf.int8)
        # Up and down again: the right shift extends the sign.
        low = tf.bitwise.right_shift(tf.bitwise.left_shift(codes, four), four)
        codes = tf.stack([low, tf.bitwise.right_shift(codes, four)], axis=-1)
    return tf.reshape(codes, [*words.shape[:-1], words.shape[-1] * (32 // bits)])


@dataclasses.dataclass(frozen=True)
class Int8(_Integers):
    """Eight bits for a number: a quarter of the bytes, one part in 254 of error.

    In each block of `block_size` numbers, with a = max |x|, q = round(127 x / a) is
    sent, and a / 127; x becomes q a / 127. Rounding is to the nearest, and the error is
    sent later (`error_feedback`).

    Args:
      block_size: numbers that share a scale, a multiple of 4.
      error_feedback: add what a step does not send to what the next one sends, for one
        float32 copy of the compressed gradients on each peer.
      min_bytes: smaller gradients are sent uncompressed; at least 0.
      exclude: regular expressions; gradients of variables with a match anywhere in the
        Keras path are sent uncompressed.
      one_dimensional: compress gradients of biases and scales, too.

    Raises:
      ConfigurationError: when an argument is not as above.

    Cost: 1 + 4 / `block_size` of 4 bytes for each number, twice (p - 1) / p of them
    among p peers; one launch per bucket for two peers, two launches for more.

    Differs from QSGD (Alistarh et al. 2017), which rounds at random, by the length of
    the whole vector: with error feedback the nearest number loses less.

    ```python
    import tfdp

    communication = tfdp.Communication(
        compression=tfdp.compression.Int8(), compression_across="replicas"
    )
    strategy = tfdp.DataParallelStrategy(communication=communication)
    ```
    """

    bits: ClassVar[int] = 8


@dataclasses.dataclass(frozen=True)
class Int4(_Integers):
    """Four bits for a number: an eighth of the bytes, one part in 14 of error.

    As `Int8`, with 7 instead of 127 and smaller blocks.

    Args:
      block_size: numbers that share a scale, a multiple of 8.
      error_feedback: whether the next step adds what this one did not send.
      min_bytes: smaller gradients are sent uncompressed; at least 0.
      exclude: regular expressions of Keras paths to send uncompressed.
      one_dimensional: whether biases and scales are compressed, too.

    Raises:
      ConfigurationError: when an argument is not as above.

    Cost: 1/2 + 4 / `block_size` of 4 bytes for each number; else as `Int8`.

    ```python
    import tfdp

    communication = tfdp.Communication(compression=tfdp.compression.Int4())
    ```
    """

    block_size: int = 64

    bits: ClassVar[int] = 4
