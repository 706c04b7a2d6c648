"""`TopK`: the largest numbers only, each with its place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.checks import is_number, is_whole
from tfdp.compression.method import Exchanged, Method, Peers, Slots

FIRST_RATIO = 0.25
# A number and its place take 8 bytes, a number of the whole gradient 4.
MOST_RATIO = 0.5


@dataclasses.dataclass(frozen=True)
class TopK(Method):
    """The `ratio` of a gradient's numbers that are largest, with their places.

    With momentum correction m, u gets m u + g and v gets v + u; of v the largest are
    sent, and both u and v are 0 there afterwards (factor masking). Without it v gets
    v + g.

    Args:
      ratio: the share of numbers that is sent, above 0 to 0.5; at least one number of
        every variable. Each is sent with its place, in twice its bytes.
      momentum_correction: m, from 0 to below 1; None or 0 for none. The optimizer must
        then have no momentum of its own: `keras.optimizers.SGD(lr)`.
      warmup_steps: the share falls from 1/4 (or `ratio`, where that is more) to
        `ratio` over so many steps, by the same factor in each.
      error_feedback: whether what a step does not send is added to what the next one
        sends; one float32 copy of the compressed gradients on each one that sends.
      min_bytes: gradients below this size are sent as they are; at least 0.
      exclude: regular expressions; gradients of variables in whose Keras path one is
        found are sent as they are.
      one_dimensional: whether gradients of biases and scales are compressed, too.

    Raises:
      ConfigurationError: when an argument is not as above.

    Cost: 8 bytes for each number that is sent, to each of the others: (p - 1) 2 ratio
    of the gradient's bytes among p peers, one launch. It pays while that is below the
    2 (p - 1) / p of an all-reduce, up to 1 / ratio peers.

    Source: Lin et al. 2018, "Deep Gradient Compression", algorithms 1 and 4. Differs
    from the paper: the largest are exactly found, where a sampled threshold only says
    among which numbers; the share falls with each step, not with each of four epochs;
    variables that are not compressed get no momentum here; local gradients are not
    clipped.

    ```python
    import tfdp

    communication = tfdp.Communication(
        compression=tfdp.compression.TopK(0.01), compression_across="replicas"
    )
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
        """See `Method.slots`."""
        return {"momentum": tuple(shape)} if self.momentum_correction else {}

    def values(
        self, gradients: Sequence[tf.Tensor], slots: Sequence[Slots]
    ) -> tuple[list[tf.Tensor], list[Slots]]:
        """See `Method.values`: gradients, or their momentum."""
        if not self.momentum_correction:
            return list(gradients), list(slots)
        momenta = [
            self.momentum_correction * slot["momentum"] + gradient
            for slot, gradient in zip(slots, gradients, strict=True)
        ]
        return momenta, [{"momentum": momentum} for momentum in momenta]

    def exchange(
        self,
        values: Sequence[tf.Tensor],
        slots: Sequence[Slots],
        peers: Peers,
        step: tf.Tensor,
    ) -> Exchanged:
        """See `Method.exchange`."""
        flat = [tf.reshape(value, [-1]) for value in values]
        places = [self._places(numbers, step) for numbers in flat]
        counts = [_length(of_value) for of_value in places]
        numbers = [tf.gather(f, p) for f, p in zip(flat, places, strict=True)]
        words = [tf.bitcast(of_value, tf.int32) for of_value in numbers]
        everybody = peers.gather(tf.concat([*places, *words], 0))
        # Variable by variable: joined and parted all numbers would be copied twice.
        sent = [_parted(everybody[n], counts) for n in range(peers.size)]
        sums = [
            _sum_of([of_peer[n] for of_peer in sent], f.shape)
            for n, f in enumerate(flat)
        ]
        kept = list(slots)
        if self.momentum_correction:
            kept = [
                {"momentum": _without(slot["momentum"], at)}
                for slot, at in zip(slots, places, strict=True)
            ]
        return Exchanged(
            [tf.reshape(s, v.shape) for s, v in zip(sums, values, strict=True)],
            [_without(v, at) for v, at in zip(values, places, strict=True)],
            kept,
            # What is not finite is larger than all that is, and so is sent.
            telling=[_numbers_in(everybody) * float(peers.size)],
        )

    def message_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """See `Method.message_bytes`; after the warm-up."""
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
    """How many of so many numbers are sent, one at least."""
    return min(elements, max(1, math.ceil(ratio * elements)))


def _length(places: tf.Tensor) -> int | tf.Tensor:
    """How many there are; in the warm-up only the step knows."""
    return tf.size(places) if places.shape[0] is None else places.shape[0]


def _numbers_in(messages: tf.Tensor) -> tf.Tensor:
    """Of messages side by side; places come first."""
    return tf.bitcast(tf.split(messages, 2, axis=1)[1], tf.float32)


def _parted(
    message: tf.Tensor, counts: Sequence[int | tf.Tensor]
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """By value, the places of a message and its numbers, as words."""
    parts = tf.split(message, [*counts, *counts])
    return list(zip(parts[: len(counts)], parts[len(counts) :], strict=True))


def _sum_of(sent: Sequence[tuple[tf.Tensor, tf.Tensor]], shape: Any) -> tf.Tensor:
    """The sum of what all peers have sent of a value: places, and numbers as words."""
    # Of two at once, a + b and b + a being the same; with the others one peer after the
    # other. No place is twice in a message, so that sums are alike on every device.
    places, words = zip(*sent[:2], strict=True)
    numbers = tf.bitcast(tf.concat(words, 0), tf.float32)
    total = tf.scatter_nd(tf.concat(places, 0)[:, None], numbers, shape)
    for at, of_peer in sent[2:]:
        numbers = tf.bitcast(of_peer, tf.float32)
        total = tf.tensor_scatter_nd_add(total, at[:, None], numbers)
    return total


def _without(value: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """`value` with zeros at these places."""
    nothing = tf.zeros_like(places, value.dtype)
    flat = tf.reshape(value, [-1])
    flat = tf.tensor_scatter_nd_update(flat, places[:, None], nothing)
    return tf.reshape(flat, value.shape)


# The places of a tensor's largest numbers, exactly, without ordering all of it.


# So many of the sample should be among the largest. How many are has a deviation of its
# root: with six of them more the guess is too high once in some million times.
EXPECTED_IN_SAMPLE = 128
DEVIATIONS = 6
# A sample of more than a fourth of all numbers saves little.
LEAST_STRIDE = 4
# Without its sign a float32 is ordered as its bits are, read as an integer.
ALL_BUT_SIGN = 0x7FFFFFFF


def largest_places(numbers: tf.Tensor, count: int | tf.Tensor, least: int) -> tf.Tensor:
    """Where the `count` numbers of largest size stand.

    Of numbers of equal size the first ones. An infinity is larger than every number,
    and what is no number larger than an infinity.

    A sample tells a size that a few more than `count` numbers reach. Where those stand
    is found by one look at all numbers, and only these few are ordered.

    Args:
      numbers: float32 [n], n known.
      count: how many, from `least` to n; known, or int32 [].
      least: the least that `count` may be, at least 1.

    Returns:
      int32 [count], all different, in any order.

    Cost: a sample of 128 n / `least` numbers, two looks at all n, and ordering 1.5
    times `count`. n are ordered where `least` is below 512, where so many are equal
    that the sample tells nothing, or where it guessed too high.
    """
    elements = numbers.shape[0]
    if isinstance(count, int) and count == elements:
        return tf.range(elements)
    stride = least // EXPECTED_IN_SAMPLE
    if stride < LEAST_STRIDE:
        return tf.math.top_k(_sizes(numbers), count, sorted=False).indices
    # Odd: every place of an axis comes, whose length often is a power of two.
    sample = _sizes(numbers[:: stride | 1])
    expected = tf.cast(count, tf.float32) * (sample.shape[0] / elements)
    more = tf.math.ceil(expected + DEVIATIONS * tf.sqrt(expected))
    more = tf.minimum(tf.cast(more, tf.int32), sample.shape[0])
    guess = tf.reduce_min(tf.math.top_k(sample, more, sorted=False).values)
    guess = tf.bitcast(guess, tf.float32)
    # All that is not below, so that what is no number is among them. Of numbers below
    # 1e-38 some threads take all for zeros, and so none for less than another one.
    is_below = tf.logical_and(numbers < guess, numbers > -guess)
    reaching = tf.reshape(tf.where(tf.logical_not(is_below)), [-1])
    candidates = tf.cond(
        tf.size(reaching) >= count,
        lambda: reaching,
        lambda: tf.range(elements, dtype=reaching.dtype),
    )
    # In the order of their places, so that of equal ones the first are taken.
    sizes = _sizes(tf.gather(numbers, candidates))
    chosen = tf.math.top_k(sizes, count, sorted=False).indices
    return tf.cast(tf.gather(candidates, chosen), tf.int32)


def _sizes(numbers: tf.Tensor) -> tf.Tensor:
    """Integers that are ordered as the numbers' sizes are."""
    return tf.bitwise.bitwise_and(tf.bitcast(numbers, tf.int32), ALL_BUT_SIGN)
