"""Finds the optimizers of a model, nested ones included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

if TYPE_CHECKING:
    from tfdp.sync.policy import Policy


def optimizers_of(model: Any) -> list[Optimizer]:
    """The compiled optimizer of `model`, and those in attributes, lists and dicts."""
    if not isinstance(model, keras.Model):
        return []
    # By identity: a GAN may hold two optimizers that compare equal.
    unique: dict[int, Optimizer] = {}
    values = [getattr(model, "optimizer", None), *vars(model).values()]
    seen: set[int] = set()
    while values:
        value = values.pop(0)
        if isinstance(value, Optimizer):
            unique.setdefault(id(value), value)
        elif isinstance(value, (list, tuple, Mapping)) and id(value) not in seen:
            seen.add(id(value))  # a list may hold itself
            values += value.values() if isinstance(value, Mapping) else value
    return list(unique.values())


def has_no_effect(sync: Policy, strategy: tf.distribute.Strategy) -> bool:
    """Whether `sync` is across hosts and `auto_strategy` has found one host, which the
    first `fit` then reports."""
    idle_options = getattr(strategy, "idle_options", None)
    if sync.across != "hosts" or idle_options is None:
        return False
    if strategy.extended.reducer.transport.topology.hosts > 1:
        return False  # `hierarchy=(2, 2)` simulates hosts
    idle_options["sync"] = "there are no other hosts to train apart from"
    return True


def optimizers_with_sync(
    optimizers: Sequence[Optimizer], strategy: tf.distribute.Strategy
) -> list[Any]:
    """The optimizers whose option `sync=` takes effect under `strategy`."""
    return [
        optimizer
        for optimizer in optimizers
        if _is_policy(getattr(optimizer, "sync", None))
        and not has_no_effect(optimizer.sync, strategy)
    ]


def _is_policy(sync: Any) -> bool:
    """Whether it is a value of `tfdp.sync`, which is loaded by programs that use it."""
    return hasattr(type(sync), "trains_locally")


def innermost_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that reduce and update, inside a loss scaler or a group."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "optimizers", None) or [inner])
