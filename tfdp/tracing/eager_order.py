"""In which order eager replicas come together: all alike, or an error that says why.

Eager replicas run one after the other, each until it meets the others in TensorFlow's
`merge_call`. TensorFlow puts their n-th calls together whatever they are about: two
that differ end in a bare AssertionError, or in the sum of unlike tensors.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.errors import ConfigurationError

__all__ = ["EagerOrder", "sum_in_words"]


class EagerOrder:
    """What the replicas of one eager `strategy.run` have met for so far."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._met: dict[int, int] = {}

    def meet(self, rank: int, what: str) -> None:
        """Notes that `rank` is about to meet the others.

        Args:
          rank: the calling replica.
          what: for what, in words that are alike on all replicas.

        Raises:
          ConfigurationError: when another replica came for something else.
        """
        place = self._met.get(rank, 0)
        self._met[rank] = place + 1
        if place == len(self._first):
            self._first.append(what)
        elif self._first[place] != what:
            raise ConfigurationError(
                f"Replica {rank} has come to {what} where another one has come to "
                f"{self._first[place]}: the replicas of an eager step must do the same "
                "in the same order. Keras takes no mean of no losses, so a step that "
                "leaves out rows or tokens itself, all of them on one replica, does "
                "less there; and where a replica has one row, gradients of branches "
                "may come in another order. Compile with run_eagerly=False (call "
                "strategy.run within a tf.function), or give what is left out a "
                "sample_weight of 0."
            )


def sum_in_words(value: Any) -> str:
    """What is summed, alike on all replicas."""
    told = [_part_in_words(part) for part in tf.nest.flatten(value)]
    more = f" and {len(told) - 3} more" if len(told) > 3 else ""
    return f"a sum of {', '.join(told[:3])}{more}"


def _part_in_words(part: Any) -> str:
    if isinstance(part, tf.IndexedSlices):  # of as many rows as the replica has read
        return f"{part.dtype.name} slices"
    tensor = tf.convert_to_tensor(part)
    return f"{tensor.dtype.name} {tensor.shape}"
