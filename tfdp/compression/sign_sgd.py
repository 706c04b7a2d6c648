"""`SignSGD`: signs, and the mean size of the numbers of a block."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdp.compression.blocks import Blockwise, is_block


@dataclasses.dataclass(frozen=True)
class SignSGD(Blockwise):
    """One bit for a number: a thirty-first of the bytes.

    Of each block of d numbers x the scaled signs are sent, (|x|_1 / d) sign(x), with
    sign(0) = 1.

    Args:
      block_size: numbers that share a scale, a multiple of 32.
      error_feedback: see `Int8`. Without it this does not converge on simple problems
        (Karimireddy et al. 2019, section 3).
      min_bytes: smaller gradients are sent uncompressed; at least 0.
      exclude: regular expressions of Keras paths to send uncompressed.
      one_dimensional: whether biases and scales are compressed, too.

    Raises:
      ConfigurationError: when an argument is not as above.

    Cost: 1/8 + 4 / `block_size` of 4 bytes for each number; else as `Int8`.

    Source: EF-SignSGD, Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and
    other Gradient Compression Schemes", algorithm 1; blocks and the second rounding of
    the sum as in Zheng et al. 2019, "Communication-Efficient Distributed Blockwise
    Momentum SGD with Error-Feedback". Differs from the papers: the residual is stored
    without the learning rate, so that a step with another rate applies its own.

    ```python
    import tfdp

    communication = tfdp.Communication(compression=tfdp.compression.SignSGD())
    ```
    """

    block_size: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        is_size = is_block(self.block_size, 32)
        self.require(is_size, "block_size", "a multiple of 32")

    @property
    def elements_of_block(self) -> int:
        return self.block_size

    def encode_rows(self, rows: tf.Tensor) -> tf.Tensor:
        scale = tf.reduce_mean(tf.abs(rows), axis=1, keepdims=True)
        bits = tf.cast(tf.reshape(rows >= 0, [rows.shape[0], -1, 8]), tf.uint8)
        weights = tf.constant([1, 2, 4, 8, 16, 32, 64, 128], tf.uint8)
        octets = tf.reshape(tf.reduce_sum(bits * weights, -1), [rows.shape[0], -1, 4])
        word = tf.bitcast(octets, tf.int32)
        return tf.concat([tf.bitcast(scale, tf.int32), word], axis=1)

    def largest_in(self, words: tf.Tensor) -> tf.Tensor:
        """See `Blockwise`; all numbers of a block have one size."""
        return tf.bitcast(words[..., :1], tf.float32)

    def decode_rows(self, words: tf.Tensor) -> tf.Tensor:
        scale = tf.bitcast(words[..., :1], tf.float32)
        places = tf.range(32, dtype=tf.int32)
        bits = tf.bitwise.right_shift(words[..., 1:, None], places)
        bits = tf.bitwise.bitwise_and(bits, 1)
        signs = tf.cast(2 * bits - 1, tf.float32)
        shape = [*words.shape[:-1], self.block_size]
        return tf.reshape(signs, shape) * scale
