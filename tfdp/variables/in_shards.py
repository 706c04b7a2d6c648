"""Which variables are in shards; `tfdp.sharding` is loaded where there are some."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.plan.shards import OwnedLayout, ShardLayout


class InShards:
    """Base of variables in shards; an optimizer may give one a single owner."""

    #: Whether replicas store shards; else each updates its shard of a whole copy.
    is_stored_in_shards = False
    shape: Any
    layout: Any
    #: The part whose replica updates it; None: each replica updates its shard.
    owner: int | None = None

    @property
    def update_layout(self) -> ShardLayout:
        """The shards of its gradient and of its optimizer's state."""
        if self.owner is None:
            return self.layout
        return OwnedLayout(self.layout.shape, self.layout.parts, self.owner)


def is_in_shards(variable: Any) -> bool:
    """Whether replicas store, or update, shards of `variable`."""
    return isinstance(distributed_of(variable), InShards)


def is_stored_in_shards(variable: Any) -> bool:
    """Whether each replica stores a shard of `variable` only."""
    value = distributed_of(variable)
    return isinstance(value, InShards) and value.is_stored_in_shards


def distributed_of(variable: Any) -> Any:
    """The distributed variable of a Keras variable; of others the variable itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def is_shard_of_sum(variable: Any, rank: Any, gradient: Any) -> bool:
    """Whether a gradient is the replica's shard of the sum already, as a tape's is of a
    weight that is stored in shards; one computed by hand is a part of the whole sum."""
    if not is_stored_in_shards(variable):
        return False
    if gradient.shape != variable.shape:
        return True
    own = tf.distribute.get_strategy().extended.shards.own_shape(variable, rank)
    if own == (0,):
        raise ConfigurationError(
            f"The gradient of {variable.name!r} was computed by hand, and one replica "
            'updates that weight, which is stored in shards (shard="parameters"). Let '
            'a tape compute it; or train with shard="gradients".'
        )
    return bool(gradient.shape == own)
