"""`FP8`: floating point of eight bits, with one scale for all peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import tensorflow as tf

from tfdp.checks import is_number
from tfdp.compression.blocks import MOST_THAT_GATHER, Blockwise
from tfdp.compression.method import Exchanged, Peers, Slots, Tensors


@dataclasses.dataclass(frozen=True)
class _Format:
    """Sign, exponent and mantissa of a byte.

    Numbers below `smallest_normal` have fewer digits. Times `float16_scale` a number
    has the same exponent bits in float16. `overflow` is the code of numbers that are
    too large.
    """

    mantissa_bits: int
    largest: float
    smallest_normal: float
    float16_scale: float
    overflow: int


LOG_2 = 0.6931471805599453
FORMATS = {
    "e4m3": _Format(3, 448.0, 2.0**-6, 2.0**-8, 0x7F),  # no infinity: NaN
    "e5m2": _Format(2, 57344.0, 2.0**-14, 1.0, 0x7C),
}


@dataclasses.dataclass(frozen=True)
class FP8(Blockwise):
    """Eight bits for a number, four or five of them for its exponent.

    s = 2^floor(log2(M / a)), with a = max |x| over all numbers of a variable on all
    peers, and M the largest number of the format; s x is rounded to the nearest number
    of the format, sums are computed in float32 and divided by s. So nothing overflows.
    Among p > 2 peers, which round the sum again, the ratio is M / (2 p a).

    Args:
      format: "e4m3" has four binary digits and spans 2^17, "e5m2" three and 2^31.
      scale: None for the above, which adapts to every step; a number above 0 is s for
        every variable and step. Overflows become NaN on all replicas, as a loss scaler
        expects; underflows are 0.
      error_feedback: whether the next step adds what this one did not send.
      min_bytes: smaller gradients are sent uncompressed; at least 0.
      exclude: regular expressions of Keras paths to send uncompressed.
      one_dimensional: whether biases and scales are compressed, too.

    Raises:
      ConfigurationError: when an argument is not as above.

    Cost: 1 of 4 bytes for each number; else as `Int8`, and one more launch, of 4 bytes
    for each variable, for the scale.

    Source: the formats, Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; one
    scale for all, Peng et al. 2023, "FP8-LM". Differs from FP8-LM, which adapts its
    scale to the overflows of earlier steps, and adds in eight bits.

    ```python
    import tfdp

    communication = tfdp.Communication(compression=tfdp.compression.FP8("e4m3"))
    ```
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    scale: float | None = None

    elements_of_block = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.format in FORMATS, "format", "'e4m3' or 'e5m2'")
        is_scale = is_number(self.scale) and 0 < self.scale < float("inf")
        self.require(
            self.scale is None or is_scale, "scale", "None or a finite number above 0"
        )

    def exchange(
        self, values: Tensors, slots: Sequence[Slots], peers: Peers, step: tf.Tensor
    ) -> Exchanged:
        """See `Method.exchange`; the peers agree on the scales first."""
        scales = self._scales(values, peers)
        scaled = [v * s for v, s in zip(values, scales, strict=True)]
        exchanged = super().exchange(scaled, slots, peers, step)
        # Powers of two: neither product rounds.
        sums = [v / s for v, s in zip(exchanged.sums, scales, strict=True)]
        left = [v / s for v, s in zip(exchanged.left, scales, strict=True)]
        return Exchanged(sums, left, exchanged.slots, begun=exchanged.begun)

    def sent_bytes(self, shapes: Sequence[Sequence[int]], peers: int) -> float:
        scales = 0 if self.scale is not None else 4 * len(shapes) * (peers - 1)
        return super().sent_bytes(shapes, peers) + scales

    def _scales(self, values: Tensors, peers: Peers) -> list[tf.Tensor]:
        if self.scale is not None:
            return [tf.constant(float(self.scale))] * len(values)
        own = tf.stack([tf.reduce_max(tf.abs(value)) for value in values])
        gathered = peers.gather(tf.bitcast(own, tf.int32))
        largest = tf.reduce_max(tf.bitcast(gathered, tf.float32), axis=0)
        # A sum that is rounded again has terms that may have been rounded up before.
        added = 2 * peers.size if peers.size > MOST_THAT_GATHER else 1
        ratio = FORMATS[self.format].largest / (added * largest)
        # The scale of zeros, or of non-finite numbers, does not matter.
        is_usable = tf.logical_and(largest > 0, tf.math.is_finite(ratio))
        exponent = tf.floor(tf.math.log(tf.where(is_usable, ratio, 1.0)) / LOG_2)
        scales = tf.pow(2.0, tf.clip_by_value(exponent, -126.0, 126.0))
        return tf.unstack(scales, len(values))

    def encode_rows(self, rows: tf.Tensor) -> tf.Tensor:
        form = FORMATS[self.format]
        rounded = _rounded(rows, form)
        half = tf.bitcast(tf.cast(rounded * form.float16_scale, tf.float16), tf.uint16)
        sign = tf.bitwise.right_shift(half, tf.constant(15, tf.uint16))
        sign = tf.bitwise.left_shift(sign, tf.constant(7, tf.uint16))
        shift = tf.constant(10 - form.mantissa_bits, tf.uint16)
        code = tf.bitwise.right_shift(half, shift)
        code = tf.bitwise.bitwise_and(code, tf.constant(127, tf.uint16))
        is_large = tf.abs(rounded) > form.largest
        code = tf.where(is_large, tf.constant(form.overflow, tf.uint16), code)
        is_nan = tf.math.is_nan(rounded)
        code = tf.where(is_nan, tf.constant(0x7F, tf.uint16), code)
        code = tf.cast(tf.bitwise.bitwise_or(code, sign), tf.uint8)
        return tf.bitcast(tf.reshape(code, [rows.shape[0], -1, 4]), tf.int32)

    def decode_rows(self, words: tf.Tensor) -> tf.Tensor:
        form = FORMATS[self.format]
        shape = [*words.shape[:-1], self.elements_of_block]
        code = tf.reshape(tf.cast(tf.bitcast(words, tf.uint8), tf.uint16), shape)
        magnitude = tf.bitwise.bitwise_and(code, tf.constant(127, tf.uint16))
        shift = tf.constant(10 - form.mantissa_bits, tf.uint16)
        half = tf.bitcast(tf.bitwise.left_shift(magnitude, shift), tf.float16)
        number = tf.cast(half, tf.float32) / form.float16_scale
        if form.overflow == 0x7F:
            number = tf.where(magnitude == 0x7F, float("nan"), number)
        return tf.where(code > 127, -number, number)


def _rounded(rows: tf.Tensor, form: _Format) -> tf.Tensor:
    """Rounds to the nearest number of the format, ties to even; allows larger ones."""
    cut = 23 - form.mantissa_bits
    bits = tf.bitcast(rows, tf.int32)
    odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, cut), 1)
    bits = bits + (2 ** (cut - 1) - 1) + odd
    normal = tf.bitcast(tf.bitwise.bitwise_and(bits, -(2**cut)), tf.float32)
    # Below the smallest normal number the spacing stays the same.
    distance = form.smallest_normal * 2.0**-form.mantissa_bits
    small = tf.round(rows / distance) * distance
    rounded = tf.where(tf.abs(rows) < form.smallest_normal, small, normal)
    # Rounding the bits of an infinity or a NaN gives arbitrary numbers.
    return tf.where(tf.math.is_finite(rows), rounded, rows)
