"""The optimizers that a model holds, and those that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras


def optimizers_of(model: Any) -> list[keras.optimizers.Optimizer]:
    """The optimizers that `model` holds: the compiled one, and those of its attributes,
    also in lists and dictionaries."""
    if not isinstance(model, keras.Model):
        return []
    # By identity: a GAN may hold two optimizers that compare equal.
    unique: dict[int, keras.optimizers.Optimizer] = {}
    values = [getattr(model, "optimizer", None), *vars(model).values()]
    seen: set[int] = set()
    while values:
        value = values.pop(0)
        if isinstance(value, keras.optimizers.Optimizer):
            unique.setdefault(id(value), value)
        elif isinstance(value, (list, tuple, Mapping)) and id(value) not in seen:
            seen.add(id(value))  # a list may hold itself
            values += value.values() if isinstance(value, Mapping) else value
    return list(unique.values())


def innermost_optimizers(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """The optimizers that reduce and update, within a loss scaler or a group."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "optimizers", None) or [inner])


def names_of_updates(model: Any) -> list[str]:
    """The scopes in which the optimizers that `model` holds update its weights."""
    return [
        leaf.name
        for owner in optimizers_of(model)
        for leaf in innermost_optimizers(owner)
    ]
