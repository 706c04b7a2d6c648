"""Optimizers, metrics and seeds that were made outside of the scope, before any use.

`model.compile("sgd")` outside of `strategy.scope()` makes an optimizer, and metrics,
with plain variables. Until an optimizer is built these are a counter and a rate: they
are made anew under the strategy, within the same objects, so that what a program holds
on to stays what trains. So are the states of layers' random generators, all that a
`Dropout` holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import (
    given_metrics,
    layers_within,
    seed_generators_of,
    start_anew,
)
from tfdp._private.names import DistributedVariable, is_default_strategy
from tfdp._private.optimizer_hooks import put_under, strategy_of

__all__ = ["adopt_state"]


def adopt_state(
    model: Any,
    optimizers: Sequence[keras.optimizers.Optimizer],
    strategy: tf.distribute.Strategy,
) -> None:
    """Takes under `strategy` what `model` is to train with and no strategy has."""
    if not isinstance(model, keras.Model):
        return
    for optimizer in optimizers:
        parts = list(_parts(optimizer))
        if any(part.built or not _is_nobodys(part) for part in parts):
            continue
        for part in parts:
            put_under(part, strategy)
            _make_anew(_of_no_strategy(part.variables), strategy)
            strategy.extended.made_optimizers.note(part)
    for metric in _metrics(model):
        _make_anew(_of_no_strategy(metric.variables), strategy)
    for layer in layers_within(model):
        for generator in seed_generators_of(layer):
            # A layer without weights may be in models of several strategies.
            if not _is_of(generator.state, strategy):
                _make_anew([generator.state], strategy)


def _is_nobodys(optimizer: keras.optimizers.Optimizer) -> bool:
    return is_default_strategy(strategy_of(optimizer))


def _parts(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[keras.optimizers.Optimizer]:
    """`optimizer`, and those that it holds."""
    yield optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    for part in [inner] if inner is not None else getattr(optimizer, "optimizers", []):
        yield from _parts(part)


def _metrics(model: keras.Model) -> Iterator[keras.metrics.Metric]:
    """Those that `model` reports, and those that compile is yet to build."""
    if not model.compiled:
        return  # a program's own `metrics` may name what its compile makes
    yield from model.metrics
    yield from given_metrics(model)


def _is_of(variable: keras.Variable, strategy: tf.distribute.Strategy) -> bool:
    return getattr(variable.value, "distribute_strategy", None) is strategy


def _of_no_strategy(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    return [v for v in variables if not isinstance(v.value, DistributedVariable)]


def _make_anew(
    variables: Iterable[keras.Variable], strategy: tf.distribute.Strategy
) -> None:
    for variable in variables:
        with tf.init_scope():
            value = variable.numpy()
            with strategy.scope():
                start_anew(variable, value)
