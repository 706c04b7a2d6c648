"""The places of a tensor's largest numbers, exactly, without ordering all of it."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["largest_places"]

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
