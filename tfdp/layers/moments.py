"""Means and variances of samples in parts: computed, packed and merged.

No variance is computed as E[x^2] - E[x]^2: with a mean of 1000 and a standard deviation
of 0.1 both terms are 1e6, the variance is 0.01, and float32 keeps 7 digits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class Moments(NamedTuple):
    """The moments of a set of samples, for each of C channels.

    Args:
      count: number of samples, shape [..., 1], or [..., C] where channels differ.
      mean: shape [..., C]; 0 where there are no samples.
      squared_deviations: the sum of (x - mean)^2, shape [..., C].
    """

    count: tf.Tensor
    mean: tf.Tensor
    squared_deviations: tf.Tensor

    @property
    def variance(self) -> tf.Tensor:
        """The mean of (x - mean)^2, as in Keras; 0 where there are no samples."""
        return self.squared_deviations / at_least_one(self.count)

    def pack(self) -> tf.Tensor:
        """All three in one tensor, shape [..., 2 C + 1] (or [..., 3 C])."""
        return tf.concat(self, axis=-1)


def unpack(packed: tf.Tensor, channels: int) -> Moments:
    """The inverse of `Moments.pack` for C = `channels`."""
    return Moments(*tf.split(packed, [-1, channels, channels], axis=-1))


def at_least_one(count: tf.Tensor) -> tf.Tensor:
    """`count` as a divisor: 1 for no samples (their sums are 0)."""
    return tf.maximum(count, tf.ones_like(count))


def other_axes(x: tf.Tensor, axis: int) -> list[int]:
    """All axes of `x` but `axis`."""
    return [i for i in range(x.shape.rank) if i != axis]


def channel_sums(x: tf.Tensor, axis: int, channels: int) -> tf.Tensor:
    """The sums over all axes but `axis`, shape [channels].

    Axis by axis, because TensorFlow adds the rows of a column sequentially: 1024 + 1024
    additions lose less than 1024 x 1024, and take less time.
    """
    for other in other_axes(x, axis):
        x = tf.reduce_sum(x, other, keepdims=True)
    return tf.reshape(x, [channels])


def broadcast_channels(vector: tf.Tensor, x: tf.Tensor, axis: int) -> tf.Tensor:
    """A vector of channels, reshaped to broadcast against `x` along `axis`."""
    shape = [1] * x.shape.rank
    shape[axis] = -1
    return tf.reshape(vector, shape)


def local_moments(x: tf.Tensor, axis: int, channels: int, mask: Any) -> Moments:
    """The moments of this replica's samples, in two passes and a correction:

        m = sum x / n,   d = x - m,   mean = m + sum d / n
        squared_deviations = sum d^2 - (sum d)^2 / n

    The first mean need only be close: sum d holds its error. `mask`: booleans of the
    shape of `x`, True for samples that count; None: all.

    Source: T. Chan, G. Golub, R. LeVeque, "Algorithms for computing the sample
    variance: analysis and recommendations", The American Statistician 37, 1983,
    eq. 1.7.
    """
    if mask is None:
        count = tf.reshape(tf.size(x, out_type=tf.int64) // channels, [1])
    else:
        x = tf.where(mask, x, tf.zeros_like(x))
        count = tf.math.count_nonzero(mask, axis=other_axes(x, axis))
        if axis == x.shape.rank - 1:
            count = count[:1]  # the mask is the same along the last axis
    count = tf.cast(count, x.dtype)
    divisor = at_least_one(count)

    near_mean = channel_sums(x, axis, channels) / divisor
    deviations = x - broadcast_channels(near_mean, x, axis)
    if mask is not None:
        deviations = tf.where(mask, deviations, tf.zeros_like(x))
    missed = channel_sums(deviations, axis, channels)
    squares = channel_sums(tf.square(deviations), axis, channels)
    # Below zero by rounding only: (sum d)^2 <= n sum d^2.
    squares = tf.nn.relu(squares - tf.square(missed) / divisor)
    return Moments(count, near_mean + missed / divisor, squares)


def merge(parts: Moments, axis: int) -> Moments:
    """The moments of all parts together, which lie along `axis` (removed).

        n = sum n_r
        mean = sum n_r mean_r / n
        squared_deviations = sum squared_deviations_r + sum n_r (mean_r - mean)^2

    Every replica adds in the same order, so that all get the same bits.

    Source: T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm
    for computing sample variances", Stanford STAN-CS-79-773, 1979. Differs from the
    paper: merges all parts at once, and corrects the mean as in `local_moments`.
    """
    count = tf.reduce_sum(parts.count, axis, keepdims=True)
    divisor = at_least_one(count)
    near_mean = tf.reduce_sum(parts.count * parts.mean, axis, keepdims=True) / divisor
    missed = parts.count * (parts.mean - near_mean)
    mean = near_mean + tf.reduce_sum(missed, axis, keepdims=True) / divisor
    # Multiply by the count first: 0 samples must give 0 even if the square overflows.
    shift = parts.mean - mean
    between = tf.reduce_sum(parts.count * shift * shift, axis)
    within = tf.reduce_sum(parts.squared_deviations, axis)
    return Moments(tf.squeeze(count, axis), tf.squeeze(mean, axis), within + between)
