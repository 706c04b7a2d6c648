"""Finds the optimizers of a model, nested ones included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
from keras.optimizers import Optimizer


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


def innermost_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that reduce and update, inside a loss scaler or a group."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "optimizers", None) or [inner])


def names_of_updates(model: Any) -> list[str]:
    """The name scopes in which the optimizers of `model` update its weights."""
    return [
        leaf.name
        for owner in optimizers_of(model)
        for leaf in innermost_optimizers(owner)
    ]


def make_equal(optimizer: Any) -> None:
    """Called on all hosts before the state of `optimizer` and its weights is read: late
    updates (`tfdp.sync.BoundedStaleness`) are made."""
    of_optimizer = getattr(optimizer, "make_equal", None)
    if of_optimizer is not None:
        of_optimizer()
