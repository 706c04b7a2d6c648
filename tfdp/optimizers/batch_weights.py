"""What a batch of an accumulation weighs beside the others of it.

A strategy counts the rows of every global batch (or its tokens); without one nobody
does, and all batches weigh alike. What those of an accumulation weigh together is one
variable, and goes into files: its sign says in which of the two units.

    so far                      under a strategy      without one
    nothing                     its rows              1, kept as -1
    rows (above 0)              its rows              the mean of those before
    batches (below 0)           1, kept as -1         1, kept as -1

So who reads a file in the middle of an accumulation goes on in its unit.
"""

from __future__ import annotations

import tensorflow as tf

__all__ = ["weight_to_keep"]


def weight_to_keep(
    known: tf.Tensor | None, so_far: tf.Tensor, batches: tf.Tensor
) -> tf.Tensor:
    """What the next batch adds to `so_far`; without its sign that is its weight.

    Args:
      known: its rows, or tokens; None: nobody knows.
      so_far: a float scalar, the sum of what this has returned.
      batches: an integer scalar, of how many batches.

    >>> so_far, batches = tf.constant(-2.0), tf.constant(2)
    >>> float(weight_to_keep(tf.constant(12.0), so_far, batches))
    -1.0
    """
    mean = tf.math.divide_no_nan(so_far, tf.cast(batches, so_far.dtype))
    if known is None:
        return tf.where(so_far == 0, -tf.ones_like(so_far), mean)
    return tf.where(so_far < 0, mean, tf.cast(known, so_far.dtype))
