"""`RandomK`: some of the numbers, chosen anew for each step and alike by all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfdp.checks import is_number, is_whole
from tfdp.compression.method import Exchanged, Method, Peers, Slots

__all__ = ["RandomK"]


@dataclasses.dataclass(frozen=True)
class RandomK(Method):
    """A random `ratio` of each gradient's numbers; all send those of the same places.

    With error feedback the numbers are sent as they are, and what is left is sent
    later. Without it they are sent n / k times as large, k of n, so that the sum is
    right on average.

    Args:
      ratio: the share of numbers that is sent, above 0 to 1; at least one number of
        every variable.
      seed: of the choice, an integer of 0 to 2^31 - 1; alike on all workers.
      error_feedback, min_bytes, exclude, one_dimensional: see
        `tfdp.plan.compression.Compression`.

    Raises:
      ConfigurationError: when an argument is not as above.

    Cost: `ratio` of the bytes of an all-reduce, however many peers there are: places
    are not sent, and numbers are added on their way. One launch.

    Source: Stich et al. 2018, "Sparsified SGD with Memory", with rand_k and memory.
    Differs from the paper: the places are the same for all.

    ```python
    import tfdp

    communication = tfdp.Communication(
        compression=tfdp.compression.RandomK(0.1), compression_across="replicas"
    )
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

    def encode(
        self, values: Sequence[tf.Tensor], slots: Sequence[Slots], step: tf.Tensor
    ) -> tf.Tensor:
        """See `Method.encode`: the chosen numbers."""
        return tf.bitcast(self._chosen(values, step), tf.int32)

    def decode(
        self, message: tf.Tensor, like: Sequence[tf.Tensor], step: tf.Tensor
    ) -> list[tf.Tensor]:
        """See `Method.decode`."""
        return self._spread(tf.bitcast(message, tf.float32), like, step)

    def sent_bytes(self, shapes: Sequence[Sequence[int]], peers: int) -> float:
        """See `Method.sent_bytes`; numbers are added on the way."""
        return 2 * self.message_bytes(shapes) * (peers - 1) / peers

    def exchange(
        self,
        values: Sequence[tf.Tensor],
        slots: Sequence[Slots],
        peers: Peers,
        step: tf.Tensor,
    ) -> Exchanged:
        """See `Method.exchange`: the chosen numbers are added on the way."""
        (total,) = peers.sum([self._chosen(values, step)])
        sums = self._spread(total, values, step)
        left = []
        for number, value in enumerate(values):
            places = self._places(value, number, step)
            nothing = tf.zeros([places.shape[0]])
            flat = tf.tensor_scatter_nd_update(
                tf.reshape(value, [-1]), places[:, None], nothing
            )
            left.append(tf.reshape(flat, value.shape))
        return Exchanged(sums, left, list(slots))

    def _chosen(self, values: Sequence[tf.Tensor], step: tf.Tensor) -> tf.Tensor:
        return tf.concat(
            [
                tf.gather(tf.reshape(value, [-1]), self._places(value, number, step))
                for number, value in enumerate(values)
            ],
            0,
        )

    def _spread(
        self, numbers: tf.Tensor, like: Sequence[tf.Tensor], step: tf.Tensor
    ) -> list[tf.Tensor]:
        parts = tf.split(numbers, [self._count(value) for value in like])
        spread = []
        for number, (part, value) in enumerate(zip(parts, like, strict=True)):
            places = self._places(value, number, step)
            elements = value.shape.num_elements()
            if not self.error_feedback:
                part = part * (elements / self._count(value))
            flat = tf.scatter_nd(places[:, None], part, [elements])
            spread.append(tf.reshape(flat, value.shape))
        return spread

    def _count(self, value: tf.Tensor) -> int:
        elements = value.shape.num_elements()
        return min(elements, max(1, math.ceil(self.ratio * elements)))

    def _places(self, value: tf.Tensor, number: int, step: tf.Tensor) -> tf.Tensor:
        """The chosen places: no two alike, without a list of all of them."""
        elements = value.shape.num_elements()
        own_seed = (self.seed + 1_000_003 * number) % 2**31
        seed = tf.stack([tf.cast(step, tf.int32), own_seed])
        places = tf.random.experimental.index_shuffle(
            tf.range(self._count(value)), seed, elements - 1
        )
        # Some places come thrice as often as chance allows in that. Turned by a random
        # distance every place is as likely as any other.
        turn = tf.random.stateless_uniform([], seed, 0, elements, tf.int32)
        return tf.math.floormod(places + turn, elements)
