"""`Cast`: numbers rounded to 16 bits."""

from __future__ import annotations

import dataclasses
from typing import Literal

import tensorflow as tf

from tfdp.compression.blocks import Blockwise
from tfdp.plan.compression import CAST_DTYPES


@dataclasses.dataclass(frozen=True)
class Cast(Blockwise):
    """Half of the bytes: numbers rounded to 8 (bfloat16) or 11 (float16) binary digits.

    `Communication(wire_dtype="bfloat16")` is short for
    `Communication(compression=Cast("bfloat16"))`. Between hosts, and without error
    feedback, the link itself rounds sums for every hop, and every gradient, whatever
    its size and shape, those of shards and slices of embeddings too: `min_bytes`,
    `exclude` and `one_dimensional` must be left out.

    Args:
      dtype: "bfloat16", or "float16", which cannot hold 65,520 or more (they become
        infinite) nor less than 3e-8 (zero): use it with loss scaling.
      error_feedback: see `Int8`; False by default: the error is one part in 256, or in
        2,048.
      min_bytes: smaller gradients are sent uncompressed; at least 0.
      exclude: regular expressions of Keras paths to send uncompressed.
      one_dimensional: whether biases and scales are compressed, too.

    Raises:
      ConfigurationError: when an argument is not as above.

    Cost: half of the bytes of float32.

    ```python
    import tfdp

    communication = tfdp.Communication(compression=tfdp.compression.Cast("bfloat16"))
    ```
    """

    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    error_feedback: bool = dataclasses.field(default=False, kw_only=True)

    elements_of_block = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.dtype in CAST_DTYPES, "dtype", "'bfloat16' or 'float16'")

    @property
    def wire_dtype(self) -> str | None:
        """The type in which a link itself can send the gradients, if it can."""
        return None if self.error_feedback else self.dtype

    def encode_rows(self, rows: tf.Tensor) -> tf.Tensor:
        small = tf.cast(rows, self.dtype)
        return tf.bitcast(tf.reshape(small, [rows.shape[0], -1, 2]), tf.int32)

    def decode_rows(self, words: tf.Tensor) -> tf.Tensor:
        small = tf.bitcast(words, tf.as_dtype(self.dtype))
        rows = tf.reshape(small, [*words.shape[:-1], self.elements_of_block])
        return tf.cast(rows, tf.float32)
