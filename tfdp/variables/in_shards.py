"""Which variables are in shards, and what optimizers do differently with these.

`tfdp.sharding` is loaded where there are some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.optimizer_hooks import CLIP, by_keras, strategy_of
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


def held_by_host(variable: Any) -> tuple[Callable, tuple[int, ...]] | None:
    """A reader of what this host holds of a variable that is stored in shards, and the
    number of elements that each host holds; None: every replica has the whole."""
    if not is_stored_in_shards(variable):
        return None
    extended = variable.distribute_strategy.extended
    hosts = variable.layout.of_hosts(len(extended.worker_devices))
    lengths = tuple(map(hosts.length, range(hosts.parts)))
    return lambda: np.asarray(extended.shards.own_range(variable)), lengths


def parts_on_each_host(variable: Any) -> tuple[int, ...] | None:
    """The parts that each copy of this process is, and of every other host; empty if
    hosts have different ones; None: the copies are whole."""
    if not is_stored_in_shards(variable):
        return None
    strategy = variable.distribute_strategy
    layout, shards = variable.layout, strategy.extended.shards
    is_on_each = strategy.shard_group == "host" or layout.groups is not None
    ranks = range(len(variable.values) if is_on_each else 0)
    return tuple(shards.part_of(rank, layout) for rank in ranks)


class PlainUpdates:
    """How optimizers update without shards: all replicas have whole sums.

    `ShardedUpdates` of `tfdp/sharding/optimizers.py` is how they do with shards.
    """

    #: Whether gradients are summed in every batch, before they are accumulated.
    sums_every_batch = False
    #: Whether all replicas get the whole sums, so that their tests of these agree.
    has_whole_sums = True

    def overrides(self, optimizer: Any) -> dict[str, Any]:
        """The methods of `optimizer` that are replaced in a step, by name."""
        return {}

    def check(self, optimizer: Any, leaves: Sequence[Any]) -> None:
        """Refuses an optimizer, of innermost ones `leaves`, that cannot update so."""

    def check_build(self, optimizer: Any, leaves: Any, variables: Any) -> None:
        """Refuses `variables` for which a build within the step is too late."""

    def check_overwritten(self, variable: Any) -> None:
        """Refuses a variable that no replica can overwrite with its whole gradient."""

    def clip(self, optimizer: Any, gradients: Sequence[Any], variables: Any) -> Any:
        """Keras' clipping of `gradients`."""
        return by_keras(optimizer, CLIP)(gradients)


def updates_of(optimizer: Any) -> PlainUpdates:
    """How `optimizer` updates, by the strategy of the scope in which it was created."""
    return getattr(strategy_of(optimizer).extended, "updates", PlainUpdates())
