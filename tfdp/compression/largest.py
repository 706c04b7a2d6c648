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
    # As integers: some threads take floats below 1e-38 for zeros.
    sizes = tf.bitwise.bitwise_and(tf.bitcast(numbers, tf.int32), ALL_BUT_SIGN)
    stride = least // EXPECTED_IN_SAMPLE
    if stride < LEAST_STRIDE:
        return tf.math.top_k(sizes, count, sorted=False).indices
    # Odd: every place of an axis comes, whose length often is a power of two.
    sample = sizes[:: stride | 1]
    expected = tf.cast(count, tf.float32) * (sample.shape[0] / elements)
    more = tf.math.ceil(expected + DEVIATIONS * tf.sqrt(expected))
    more = tf.minimum(tf.cast(more, tf.int32), sample.shape[0])
    guess = tf.reduce_min(tf.math.top_k(sample, more, sorted=False).values)
    reaching = tf.reshape(tf.where(sizes >= guess), [-1])
    candidates = tf.cond(
        tf.size(reaching) >= count,
        lambda: reaching,
        lambda: tf.range(elements, dtype=reaching.dtype),
    )
    # In the order of their places, so that of equal ones the first are taken.
    chosen = tf.math.top_k(tf.gather(sizes, candidates), count, sorted=False).indices
    return tf.cast(tf.gather(candidates, chosen), tf.int32)
