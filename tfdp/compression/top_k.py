"""`TopK`: the largest numbers only, each with its place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfdp.checks import is_number, is_whole
from tfdp.compression.method import Exchanged, Method, Peers, Slots

__all__ = ["TopK", "count_of"]

FIRST_RATIO = 0.25


@dataclasses.dataclass(frozen=True)
class TopK(Method):
    """The `ratio` of a gradient's numbers that are largest, with their places.

    With momentum correction m, u gets m u + g and v gets v + u; of v the largest are
    sent, and both u and v are 0 there afterwards (factor masking). Without it v gets
    v + g.

    Args:
      ratio: the share of numbers that is sent, above 0 to 1; at least one number of
        every variable.
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
    from the paper: the largest are exactly found, not by a sampled threshold; the
    share falls with each step, not with each of four epochs; variables that are not
    compressed get no momentum here; local gradients are not clipped.

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
        is_ratio = is_number(self.ratio) and 0 < self.ratio <= 1
        self.require(is_ratio, "ratio", "a number above 0, to 1")
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

    def _message(self, values: Sequence[tf.Tensor], step: tf.Tensor) -> tf.Tensor:
        """The largest numbers of all values: their places, then the numbers."""
        places, first = [], 0
        for value in values:
            flat = tf.reshape(value, [-1])
            # What is not finite has no order. It is told of otherwise.
            size = tf.where(tf.math.is_finite(flat), tf.abs(flat), 0.0)
            count = self._count(flat.shape[0], step)
            found = tf.math.top_k(size, count, sorted=False).indices
            places.append(found + first)
            first += flat.shape[0]
        indices = tf.concat(places, 0)
        numbers = tf.gather(_flat(values), indices)
        return tf.concat([indices, tf.bitcast(numbers, tf.int32)], 0)

    def exchange(
        self,
        values: Sequence[tf.Tensor],
        slots: Sequence[Slots],
        peers: Peers,
        step: tf.Tensor,
    ) -> Exchanged:
        """See `Method.exchange`."""
        message = self._message(values, step)
        everybody = peers.gather(message)
        total = self._spread(everybody[0], values)
        for place in range(1, peers.size):
            # One peer after the other: no place is twice in a message, so that the
            # sum has one order on every device.
            indices, numbers = _halves(everybody[place])
            total = tf.tensor_scatter_nd_add(total, indices, numbers)
        indices, numbers = _halves(message)
        nothing = tf.zeros_like(numbers)
        flat = tf.tensor_scatter_nd_update(_flat(values), indices, nothing)
        kept = list(slots)
        if self.momentum_correction:
            momenta = _flat([slot["momentum"] for slot in slots])
            momenta = tf.tensor_scatter_nd_update(momenta, indices, nothing)
            kept = [{"momentum": part} for part in _split(momenta, values)]
        return Exchanged(_split(total, values), _split(flat, values), kept)

    def message_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """See `Method.message_bytes`; after the warm-up."""
        return sum(8 * count_of(self.ratio, math.prod(shape)) for shape in shapes)

    def _count(self, elements: int, step: tf.Tensor) -> int | tf.Tensor:
        least = count_of(self.ratio, elements)
        first = max(FIRST_RATIO, self.ratio)
        if not self.warmup_steps or first == self.ratio:
            return least
        done = tf.minimum(tf.cast(step, tf.float32) / self.warmup_steps, 1.0)
        ratio = first * tf.pow(self.ratio / first, done)
        count = tf.cast(tf.math.ceil(ratio * elements), tf.int32)
        return tf.clip_by_value(count, least, elements)

    def _spread(self, message: tf.Tensor, like: Sequence[tf.Tensor]) -> tf.Tensor:
        indices, numbers = _halves(message)
        elements = sum(value.shape.num_elements() for value in like)
        return tf.scatter_nd(indices, numbers, [elements])


def count_of(ratio: float, elements: int) -> int:
    """How many of so many numbers are sent, one at least."""
    return min(elements, max(1, math.ceil(ratio * elements)))


def _halves(message: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    indices, words = tf.split(message, 2)
    return indices[:, None], tf.bitcast(words, tf.float32)


def _flat(values: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.reshape(value, [-1]) for value in values], 0)


def _split(flat: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    parts = tf.split(flat, [value.shape.num_elements() for value in like])
    return [tf.reshape(p, v.shape) for p, v in zip(parts, like, strict=True)]
