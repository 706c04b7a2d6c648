"""Few sizes for tensors of any size: what TensorFlow's collectives are told beforehand.

TensorFlow remembers the shape that the key of a collective was first used with, and
refuses another one. So a tensor whose size is known only while the step runs is filled
up to the next round size, and each of these few sizes has a key.

Round sizes are the numbers of three bits, times a power of two: 1, 2, .. 8, 10, 12, 14,
16, 20, .. They are at most 5/4 of what they hold.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

__all__ = ["KEYS_OF_LAUNCH", "KNOWN_SIZE", "ROUND_SIZES", "round_size"]

# TensorFlow counts elements, and keys, in int32. The last one is not round.
MOST_ELEMENTS = 2**31 - 1
ROUND_SIZES = np.array(
    [
        1,
        2,
        3,
        *(quarters * 2**power for power in range(29) for quarters in (4, 5, 6, 7)),
        MOST_ELEMENTS,
    ],
    np.int32,
)
#: So many keys are one launch's: of its round sizes, by number, and one besides.
KEYS_OF_LAUNCH = 128
#: The place among them of a tensor whose size is known beforehand.
KNOWN_SIZE = KEYS_OF_LAUNCH - 1


def round_size(elements: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The least round size that holds so many elements.

    Args:
      elements: int32, from 0 on.

    Returns:
      Its number in `ROUND_SIZES` and the size, at least 1.
    """
    # Keys and shapes are read by the CPU, also those of what lies on a GPU.
    with tf.device("CPU:0"):
        number = tf.reduce_sum(tf.cast(ROUND_SIZES < elements, tf.int32))
        return number, tf.gather(ROUND_SIZES, number)
