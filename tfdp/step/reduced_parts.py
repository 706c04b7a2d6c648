"""What `strategy.reduce` is given, in shapes that can be added."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp._private.names import PerReplica
from tfdp.errors import ConfigurationError

__all__ = ["parts_of_one_shape"]


def parts_of_one_shape(value: Any, replicas: int) -> Any:
    """`value` with a zero where a Keras loss had no rows to take the mean of.

    Keras gives back the losses of no rows as they are, of shape (0,), in the place of
    their mean, a scalar.

    Args:
      value: a structure of per-replica values, to be reduced over the replicas only.
      replicas: how many there are, on all hosts.

    Raises:
      ConfigurationError: when parts surely have shapes that cannot be added.
    """

    def with_zeros(whole: Any) -> Any:
        is_dense = isinstance(whole, PerReplica) and all(
            isinstance(part, tf.Tensor) for part in whole.values
        )
        if not is_dense:
            return whole
        shapes = {tuple(part.shape) if part.shape.rank else () for part in whole.values}
        others_may_be_scalars = len(whole.values) < replicas
        if shapes == {(), (0,)} or (shapes == {(0,)} and others_may_be_scalars):
            return PerReplica(tuple(map(_or_zero, whole.values)))
        first, *others = [part.shape for part in whole.values]
        if not all(first.is_compatible_with(other) for other in others):
            raise ConfigurationError(
                "strategy.reduce adds the replicas' values, and these have the shapes "
                f"{', '.join(str(part.shape) for part in whole.values)}. For values "
                "by row pass axis=0; to join them use strategy.gather."
            )
        return whole

    return tf.nest.map_structure(with_zeros, value)


def _or_zero(part: tf.Tensor) -> tf.Tensor:
    return tf.zeros([], part.dtype) if part.shape.rank else part
