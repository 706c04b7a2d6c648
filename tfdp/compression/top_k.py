"""`TopK`: only the largest numbers, each with its place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.checks import is_number, is_whole
from tfdp.compression.blocks import ALL_BUT_SIGN
from tfdp.compression.method import Exchanged, Method, Peers, Slots, Tensors

FIRST_RATIO = 0.25
# A number and its place take 8 bytes, an uncompressed number 4.
MOST_RATIO = 0.5


@dataclasses.dataclass(frozen=True)
class TopK(Method):
    """The `ratio` of a gradient's numbers that are largest, with their places.

    With momentum correction m, u becomes m u + g and v becomes v + u; the largest
    numbers of v are sent, and u and v are reset to 0 there (factor masking). Without it
    v becomes v + g.

    Args:
      ratio: the share of numbers to send, above 0 to 0.5; at least one number of every
        variable. Each is sent with its place, in twice its bytes.
      momentum_correction: m, from 0 to below 1; None or 0 for none. The optimizer must
        then have no momentum of its own: `keras.optimizers.SGD(lr)`.
      warmup_steps: the steps over which the share falls from 1/4 (`ratio`, if larger)
        to `ratio`, by the same factor in each.
      error_feedback: whether the next step adds what this one did not send.
      min_bytes: smaller gradients are sent uncompressed; at least 0.
      exclude: regular expressions of Keras paths to send uncompressed.
      one_dimensional: whether biases and scales are compressed, too.

    Raises:
      ConfigurationError: when an argument is not as above.

    Cost: 8 bytes for each number that is sent, to each other peer: (p - 1) 2 ratio of
    the gradient's bytes among p peers, one launch. It pays while that is below the
    2 (p - 1) / p of an all-reduce, up to 1 / ratio peers.

    Source: Lin et al. 2018, "Deep Gradient Compression", algorithms 1 and 4. Differs
    from the paper: the largest are found exactly, where a sampled threshold only
    preselects; the share falls with each step, not with each of four epochs; variables
    that are not compressed get no momentum here; local gradients are not clipped.

    ```python
    import tfdp

    communication = tfdp.Communication(compression=tfdp.compression.TopK(0.01))
    ```
    """

    ratio: float = 0.01
    momentum_correction: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        is_ratio = is_number(self.ratio) and 0 < self.ratio <= MOST_RATIO
        self.require(
            is_ratio,
            "ratio",
            f"a number above 0, to {MOST_RATIO}: places are sent as well, so that more "
            "than half of the numbers are more bytes than the whole gradient",
        )
        momentum = self.momentum_correction
        self.require(
            momentum is None or (is_number(momentum) and 0 <= momentum < 1),
            "momentum_correction",
            "None or a number from 0 to below 1",
        )
        self.require(
            not momentum or self.error_feedback,
            "momentum_correction",
            "None without error_feedback, which keeps what it corrects",
        )
        is_steps = is_whole(self.warmup_steps, least=0)
        self.require(is_steps, "warmup_steps", "an integer of at least 0")

    def slots(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        return {"momentum": tuple(shape)} if self.momentum_correction else {}

    def values(
        self, gradients: Tensors, slots: Sequence[Slots]
    ) -> tuple[list[tf.Tensor], list[Slots]]:
        """The gradients, or their momentum."""
        if not self.momentum_correction:
            return list(gradients), list(slots)
        momenta = [
            self.momentum_correction * slot["momentum"] + gradient
            for slot, gradient in zip(slots, gradients, strict=True)
        ]
        return momenta, [{"momentum": momentum} for momentum in momenta]

    def exchange(
        self, values: Tensors, slots: Sequence[Slots], peers: Peers, step: tf.Tensor
    ) -> Exchanged:
        flat = [tf.reshape(value, [-1]) for value in values]
        places = [self._places(numbers, step) for numbers in flat]
        counts = [_length(of_value) for of_value in places]
        numbers = [tf.gather(f, p) for f, p in zip(flat, places, strict=True)]
        words = [tf.bitcast(of_value, tf.int32) for of_value in numbers]
        gathered = peers.gather(tf.concat([*places, *words], 0))
        sent_words = tf.split(gathered, 2, axis=1)[1]  # places come first
        # Variable by variable: joining and splitting would copy all numbers twice.
        sent = [_split_message(gathered[n], counts) for n in range(peers.size)]
        sums = [
            _sum_of([of_peer[n] for of_peer in sent], f.shape)
            for n, f in enumerate(flat)
        ]
        kept = list(slots)
        if self.momentum_correction:
            kept = [
                {"momentum": _zeroed(slot["momentum"], at)}
                for slot, at in zip(slots, places, strict=True)
            ]
        return Exchanged(
            [tf.reshape(s, v.shape) for s, v in zip(sums, values, strict=True)],
            [_zeroed(v, at) for v, at in zip(values, places, strict=True)],
            kept,
            # Non-finite numbers are larger than all finite ones, and so are sent.
            telling=[tf.bitcast(sent_words, tf.float32) * float(peers.size)],
        )

    def message_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """Bytes of a message after the warm-up."""
        return sum(8 * count_of(self.ratio, math.prod(shape)) for shape in shapes)

    def _places(self, numbers: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        elements = numbers.shape[0]
        least = count_of(self.ratio, elements)
        return largest_places(numbers, self._count(elements, step), least)

    def _count(self, elements: int, step: tf.Tensor) -> int | tf.Tensor:
        least = count_of(self.ratio, elements)
        first = max(FIRST_RATIO, self.ratio)
        if not self.warmup_steps or first == self.ratio:
            return least
        done = tf.minimum(tf.cast(step, tf.float32) / self.warmup_steps, 1.0)
        ratio = first * tf.pow(self.ratio / first, done)
        count = tf.cast(tf.math.ceil(ratio * elements), tf.int32)
        return tf.clip_by_value(count, least, elements)


def count_of(ratio: float, elements: int) -> int:
    """How many of `elements` numbers are sent, one at least."""
    return min(elements, max(1, math.ceil(ratio * elements)))


def _length(places: tf.Tensor) -> int | tf.Tensor:
    """The number of places; unknown before the step during warm-up."""
    return tf.size(places) if places.shape[0] is None else places.shape[0]


def _split_message(
    message: tf.Tensor, counts: Sequence[int | tf.Tensor]
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """The places and numbers (as words) of a message, by value."""
    parts = tf.split(message, [*counts, *counts])
    return list(zip(parts[: len(counts)], parts[len(counts) :], strict=True))


def _sum_of(sent: Sequence[tuple[tf.Tensor, tf.Tensor]], shape: Any) -> tf.Tensor:
    """The sum of all peers' places and numbers (as words) of a value."""
    # The first two at once, since a + b = b + a; the others one peer after the other.
    # No place repeats in a message, so that sums are the same on every device.
    places, words = zip(*sent[:2], strict=True)
    numbers = tf.bitcast(tf.concat(words, 0), tf.float32)
    total = tf.scatter_nd(tf.concat(places, 0)[:, None], numbers, shape)
    for at, of_peer in sent[2:]:
        numbers = tf.bitcast(of_peer, tf.float32)
        total = tf.tensor_scatter_nd_add(total, at[:, None], numbers)
    return total


def _zeroed(value: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    nothing = tf.zeros_like(places, value.dtype)
    flat = tf.reshape(value, [-1])
    flat = tf.tensor_scatter_nd_update(flat, places[:, None], nothing)
    return tf.reshape(flat, value.shape)


# The target count of largest numbers in the sample. It has a standard deviation of its
# root: with six of them more the guess is too high once in some million times.
EXPECTED_IN_SAMPLE = 128
DEVIATIONS = 6
# A sample of more than a fourth of all numbers saves little.
LEAST_STRIDE = 4


def largest_places(numbers: tf.Tensor, count: int | tf.Tensor, least: int) -> tf.Tensor:
    """The places of the `count` numbers of largest size, exactly, without sorting all.

    Of equal sizes the first ones, in any order. An infinity is larger than every
    number, and a NaN larger than an infinity. A sample estimates a size that slightly
    more than `count` numbers reach; one pass finds them, and only these few are sorted.

    Args:
      numbers: float32 [n], n static.
      count: from `least` (at least 1) to n; an int, or int32 [].

    Cost: a sample of 128 n / `least` numbers, two passes over all n, and sorting 1.5
    times `count`. All n are sorted where `least` is below 512, where so many are equal
    that the sample is useless, or where its guess was too high.
    """
    elements = numbers.shape[0]
    if isinstance(count, int) and count == elements:
        return tf.range(elements)
    stride = least // EXPECTED_IN_SAMPLE
    if stride < LEAST_STRIDE:
        return tf.math.top_k(_sizes(numbers), count, sorted=False).indices
    # Odd, to reach every place of an axis, whose length often is a power of two.
    sample = _sizes(numbers[:: stride | 1])
    expected = tf.cast(count, tf.float32) * (sample.shape[0] / elements)
    more = tf.math.ceil(expected + DEVIATIONS * tf.sqrt(expected))
    more = tf.minimum(tf.cast(more, tf.int32), sample.shape[0])
    guess = tf.reduce_min(tf.math.top_k(sample, more, sorted=False).values)
    guess = tf.bitcast(guess, tf.float32)
    # "Not below" includes NaN. Some threads flush numbers below 1e-38 to zero, which
    # then are not less than each other.
    is_below = tf.logical_and(numbers < guess, numbers > -guess)
    reaching = tf.reshape(tf.where(tf.logical_not(is_below)), [-1])
    candidates = tf.cond(
        tf.size(reaching) >= count,
        lambda: reaching,
        lambda: tf.range(elements, dtype=reaching.dtype),
    )
    # In the order of their places, so that the first of equal ones are taken.
    sizes = _sizes(tf.gather(numbers, candidates))
    chosen = tf.math.top_k(sizes, count, sorted=False).indices
    return tf.cast(tf.gather(candidates, chosen), tf.int32)


def _sizes(numbers: tf.Tensor) -> tf.Tensor:
    """Integers in the order of the numbers' absolute values."""
    return tf.bitwise.bitwise_and(tf.bitcast(numbers, tf.int32), ALL_BUT_SIGN)
