"""Variables that Keras overwrites by their gradients, alike on all replicas.

A layer of float8 (`quantize("float8")`) keeps the largest values that it has seen, and
hands the new ones on as gradients. Over the replicas the largest one counts, as Keras
has it over the micro-steps of an accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.sharding.variables import shard_kind

__all__ = ["is_overwritten", "overwritten_alike", "refuse_overwritten"]

# Of such a history the first value is new, the others are alike on all replicas.
HISTORY = "amax_history"


def is_overwritten(variable: Any) -> bool:
    """Whether a gradient is what Keras stores in `variable` next."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def overwritten_alike(
    gradients: list[Any],
    variables: Sequence[Any],
    largest: Callable[[list[tf.Tensor]], list[tf.Tensor]],
) -> list[Any]:
    """`gradients`, of which those to store are the largest of all replicas.

    Args:
      gradients: of the calling replica, one for each of `variables`.
      largest: of vectors, element by element the largest that a replica has.

    Cost: one exchange of a number for each such variable, from each replica; nothing
    where there is none.

    Raises:
      ConfigurationError: where such a variable is in shards.
    """
    places = [
        place
        for place, variable in enumerate(variables)
        if is_overwritten(variable) and gradients[place] is not None
    ]
    if not places:
        return gradients
    for place in places:
        if shard_kind(variables[place]) is not None:
            raise ConfigurationError(
                f"The variable {variables[place].path!r}, which Keras overwrites by "
                "its gradient, is in shards, and no replica has the whole of it. Give "
                "the strategy a shard_min_bytes above its size, such as the default."
            )
    new = [_new_part(gradients[place], variables[place]) for place in places]
    results = list(gradients)
    for place, part in zip(places, largest(new), strict=True):
        flat = tf.reshape(gradients[place], [-1])
        whole = tf.concat([part, flat[part.shape[0] :]], axis=0)
        results[place] = tf.reshape(whole, gradients[place].shape)
    return results


def _new_part(gradient: tf.Tensor, variable: Any) -> tf.Tensor:
    flat = tf.reshape(gradient, [-1])
    return flat[:1] if variable.name.endswith(HISTORY) else flat


def refuse_overwritten(variables: Sequence[Any], wrapper: str) -> None:
    """Refuses an optimizer that would add up what is to be stored.

    Raises:
      ConfigurationError: one of `variables` is overwritten by its gradient.
    """
    for variable in variables:
        if is_overwritten(variable):
            raise ConfigurationError(
                f"{wrapper} adds gradients up, and that of {variable.path!r} is a "
                "value to store (a layer of float8). Use the Keras optimizer itself."
            )
