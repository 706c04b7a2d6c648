"""`RandomK`: a random subset of the numbers, drawn anew in each step, equal on all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfdp.checks import is_number, is_whole
from tfdp.compression.method import (
    Exchanged,
    Method,
    Peers,
    Slots,
    Tensors,
    all_reduce_bytes,
)
from tfdp.compression.top_k import count_of


@dataclasses.dataclass(frozen=True)
class RandomK(Method):
    """A random `ratio` of each gradient's numbers; all peers send the same places.

    With error feedback the numbers are sent unscaled, and the rest later. Without it,
    for k of n, they are multiplied by n / k, so that the sum is right on average.

    Args:
      ratio: the share of numbers to send, above 0 to 1; at least one number of every
        variable.
      seed: of the choice, an integer of 0 to 2^31 - 1; the same on all workers.
      error_feedback: whether the next step adds what this one did not send.
      min_bytes: smaller gradients are sent uncompressed; at least 0.
      exclude: regular expressions of Keras paths to send uncompressed.
      one_dimensional: whether biases and scales are compressed, too.

    Raises:
      ConfigurationError: when an argument is not as above.

    Cost: `ratio` of the bytes of an all-reduce for any number of peers: places are not
    sent, and numbers are added in flight. One launch.

    Source: Stich et al. 2018, "Sparsified SGD with Memory", with rand_k and memory.
    Differs from the paper: the places are the same on all peers.

    ```python
    import tfdp

    communication = tfdp.Communication(compression=tfdp.compression.RandomK(0.1))
    ```
    """

    ratio: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        is_ratio = is_number(self.ratio) and 0 < self.ratio <= 1
        self.require(is_ratio, "ratio", "a number above 0, to 1")
        is_seed = is_whole(self.seed, least=0, most=2**31 - 1)
        self.require(is_seed, "seed", "an integer from 0 to 2**31 - 1")

    def sent_bytes(self, shapes: Sequence[Sequence[int]], peers: int) -> float:
        return all_reduce_bytes(self.message_bytes(shapes), peers)

    def message_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        return sum(4 * count_of(self.ratio, math.prod(shape)) for shape in shapes)

    def exchange(
        self, values: Tensors, slots: Sequence[Slots], peers: Peers, step: tf.Tensor
    ) -> Exchanged:
        places = [self._places(v, n, step)[:, None] for n, v in enumerate(values)]
        flat = [tf.reshape(value, [-1]) for value in values]
        chosen = [tf.gather_nd(f, p) for f, p in zip(flat, places, strict=True)]
        (total,) = peers.sum([tf.concat(chosen, 0)])
        totals = tf.split(total, [part.shape[0] for part in chosen])
        sums, left = [], []
        for value, own, at, summed in zip(values, flat, places, totals, strict=True):
            if not self.error_feedback:
                summed = summed * (own.shape[0] / at.shape[0])
            spread = tf.scatter_nd(at, summed, own.shape)
            rest = tf.tensor_scatter_nd_update(own, at, tf.zeros([at.shape[0]]))
            sums.append(tf.reshape(spread, value.shape))
            left.append(tf.reshape(rest, value.shape))
        return Exchanged(sums, left, list(slots))

    def _places(self, value: tf.Tensor, number: int, step: tf.Tensor) -> tf.Tensor:
        """The chosen places, all different, without a list of all places."""
        elements = value.shape.num_elements()
        own_seed = (self.seed + 1_000_003 * number) % 2**31
        seed = tf.stack([tf.cast(step, tf.int32), own_seed])
        places = tf.random.experimental.index_shuffle(
            tf.range(count_of(self.ratio, elements)), seed, elements - 1
        )
        # The shuffle returns some places thrice as often as others. A random rotation
        # makes all places equally likely.
        turn = tf.random.stateless_uniform([], seed, 0, elements, tf.int32)
        return tf.math.floormod(places + turn, elements)
