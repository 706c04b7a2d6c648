"""Normalisation by shared statistics, with its gradient written by hand.

TensorFlow's own gradient of the packed exchange would send back a gradient for every
replica's count, mean and deviations. By hand it is two sums per channel.
"""

from __future__ import annotations

import tensorflow as tf

from tfdp.exchange.exchange_names import exchanges_of
from tfdp.layers.moments import (
    Moments,
    at_least_one,
    broadcast_channels,
    channel_sums,
)
from tfdp.layers.replica_group import ReplicaGroup
from tfdp.tracing.current_run import name_of_gradient

__all__ = ["normalize"]


def normalize(
    x: tf.Tensor,
    scale: tf.Tensor,
    offset: tf.Tensor,
    *,
    moments: Moments,
    mask: tf.Tensor | None,
    axis: int,
    epsilon: float,
    group: ReplicaGroup,
) -> tf.Tensor:
    """Scales `x` to zero mean and unit variance, with the moments of its group.

        xhat = (x - mean) / sqrt(variance + epsilon)
        y = scale xhat + offset

    The moments are those of `x` on all replicas of the group, so an element of x acts
    on every y of the group. With dy the gradient of the sum of all replicas' losses,
    sums over all of the group's elements of a channel, and n how many count:

        dx = scale / sqrt(variance + epsilon) (dy - sum dy / n - xhat sum(dy xhat) / n)
        d scale = sum dy xhat,   d offset = sum dy     (this replica's elements only)

    Elements that the mask leaves out keep the first term only; they are in the sums,
    because the moments act on their y too. The gradient of scale and offset stays
    local because it is the optimizer that adds it over replicas.

    Args:
      x: floats, any shape.
      scale, offset: shape [C].
      moments: of the group, count of shape [1] or [C]. Must be made from `x` by
        differentiable steps: second derivatives go through them.
      mask: as in `moments.local_moments`.
      axis: that of the channels, from 0.
      epsilon: added to the variance.
      group: the replicas that share `moments`.

    Returns:
      y, shaped as x.

    Cost: backward one all-reduce of 2 C numbers for each group of replicas.

    Source: S. Ioffe, C. Szegedy, "Batch Normalization", 2015, arXiv 1502.03167,
    algorithm 1 and the equations of section 3 put together.
    """

    def spread(vector: tf.Tensor) -> tf.Tensor:
        return broadcast_channels(vector, x, axis)

    # Out here, where tapes see it: second derivatives go through it.
    inverse = tf.math.rsqrt(moments.variance + epsilon)

    name = name_of_gradient()

    @tf.custom_gradient
    def apply(x, scale, offset):
        # x - mean first: of nearly equal numbers it is exact, where x / deviation
        # minus mean / deviation would lose what they have in common.
        y = (x - spread(moments.mean)) * spread(scale * inverse) + spread(offset)

        def gradient(dy):
            # From x again, and not kept from the forward pass: one tensor less to
            # hold, and the way on which second derivatives reach x.
            xhat = (x - spread(moments.mean)) * spread(inverse)
            channels = scale.shape[0]
            sums = [channel_sums(part, axis, channels) for part in (dy, dy * xhat)]
            with exchanges_of(name):
                totals = group.sum_within(tf.concat(sums, axis=0))
            divisor = at_least_one(moments.count)
            mean_dy, mean_dy_xhat = (s / divisor for s in tf.split(totals, 2))
            through_moments = spread(mean_dy) + xhat * spread(mean_dy_xhat)
            if mask is not None:
                zeros = tf.zeros_like(through_moments)
                through_moments = tf.where(mask, through_moments, zeros)
            dx = spread(scale * inverse) * (dy - through_moments)
            return dx, sums[1], sums[0]

        return y, gradient

    return apply(x, scale, offset)
