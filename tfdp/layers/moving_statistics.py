"""What a batch-normalisation layer remembers of its batches, for inference."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from tfdp.layers.moments import Moments, at_least_one
from tfdp.tracing.current_run import current_run

__all__ = ["mean_over_groups", "renormalized", "update_moving_statistics"]


def mean_over_groups(by_group: Moments) -> Moments:
    """The moments that all replicas remember when they normalise in groups.

    With n_g samples in group g and n in all:

        mean = sum n_g mean_g / n,   variance = sum n_g variance_g / n

    It is what one device would remember, were the groups its batches: the variance is
    the one that training divides by, so how far the groups' means lie apart is not in.

    Args:
      by_group: count [G, 1] or [G, C], the others [G, C].
    """
    count = tf.reduce_sum(by_group.count, axis=0)
    weights = by_group.count / at_least_one(count)
    return Moments(
        count,
        tf.reduce_sum(weights * by_group.mean, axis=0),
        tf.reduce_sum(by_group.squared_deviations, axis=0),
    )


def update_moving_statistics(layer: Any, moments: Moments) -> None:
    """Moves the layer's moving mean and variance towards `moments`.

        moving = momentum moving + (1 - momentum) batch

    Without samples (an empty batch, or all of it masked) they stay as they are.
    With batch renormalisation the moving deviation is averaged, and its square less
    epsilon is the moving variance, as in Keras.
    """
    run = current_run()
    # The strategy sends what replicas assign on their own along with the gradients,
    # to make it agree. This agrees already.
    with run[0].updating() if run else contextlib.nullcontext():
        _move_all(layer, moments)


def _move_all(layer: Any, moments: Moments) -> None:
    def move(variable: Any, batch: tf.Tensor, momentum: float) -> tf.Tensor:
        one = tf.ones_like(moments.count)
        keep = tf.where(moments.count > 0, momentum * one, one)
        moved = keep * tf.cast(variable, batch.dtype) + (1.0 - keep) * batch
        variable.assign(moved)
        return moved

    move(layer.moving_mean, moments.mean, layer.momentum)
    if not layer.renorm:
        move(layer.moving_variance, moments.variance, layer.momentum)
        return
    deviation = tf.sqrt(moments.variance + layer.epsilon)
    move(layer.renorm_mean, moments.mean, layer.renorm_momentum)
    move(layer.renorm_stddev, deviation, layer.renorm_momentum)
    moved = move(layer.moving_stddev, deviation, layer.momentum)
    layer.moving_variance.assign(tf.nn.relu(tf.square(moved) - layer.epsilon))


def renormalized(
    layer: Any, moments: Moments, scale: tf.Tensor, offset: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Scale and offset that make batch normalisation renormalise.

        r = clip(deviation / renorm deviation),   d = clip((mean - renorm mean)
        / renorm deviation),   y = scale (r xhat + d) + offset

    r and d count as constants in the gradient.

    Source: S. Ioffe, "Batch Renormalization", 2017, arXiv 1702.03275, algorithm 1.
    """
    dtype = moments.mean.dtype
    clipping = layer.renorm_clipping
    # As in Keras: the remembered deviation may start at 0.
    reference = tf.maximum(tf.cast(layer.renorm_stddev, dtype), layer.epsilon**0.5)
    r = tf.sqrt(moments.variance + layer.epsilon) / reference
    d = (moments.mean - tf.cast(layer.renorm_mean, dtype)) / reference
    if clipping.get("rmin") is not None:
        r = tf.maximum(r, clipping["rmin"])
    if clipping.get("rmax") is not None:
        r = tf.minimum(r, clipping["rmax"])
    if clipping.get("dmax") is not None:
        d = tf.clip_by_value(d, -clipping["dmax"], clipping["dmax"])
    r, d = tf.stop_gradient(r), tf.stop_gradient(d)
    return scale * r, scale * d + offset
