"""The moving averages of weights that meet now and then: of the outer ones."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdp._private.names import own_copy
from tfdp.variables.local_view import LocalView

__all__ = ["OuterAverages"]


class OuterAverages:
    """Moves averages towards the outer weights at each meeting.

    Args:
      weights: all that an optimizer updates.
      averages: that of each; None, or nothing at all, for none.
      momentum: how much of an average stays.
      first_meeting: the update after which every weight has met for the first time.
    """

    def __init__(
        self,
        weights: Sequence[LocalView],
        averages: Sequence[LocalView | None],
        momentum: float | None,
        first_meeting: int,
    ):
        self._pairs = dict(enumerate(zip(weights, averages, strict=False)))
        self._momentum = momentum
        self._first_meeting = first_meeting

    def begin(self, count: tf.Tensor, rank: int) -> None:
        """With the first update of all, `count` 1, they are the weights of the start.

        Until a meeting they would be zeros, and who takes them then, such as
        `keras.callbacks.SwapEMAWeights`, would evaluate a model of zeros.
        """
        if self._pairs:
            places = list(self._pairs)
            tf.cond(
                tf.equal(count, 1),
                lambda: self.move(count, rank, places),
                lambda: tf.constant(True),
            )

    def move(self, count: tf.Tensor, rank: int, places: Sequence[int]) -> tf.Tensor:
        """Moves those of some weights; until all have met, onto the weights."""
        for place in places if self._pairs else ():
            weight, average = self._pairs[place]
            if average is not None:
                own = own_copy(average, rank)
                kept = tf.where(count <= self._first_meeting, 0.0, self._momentum)
                kept = tf.cast(kept, own.dtype)
                value = weight.outer_copy(rank).read_value()
                own.assign(kept * own.read_value() + (1 - kept) * value)
        return tf.constant(True)
