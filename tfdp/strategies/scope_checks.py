"""Mistakes with `strategy.scope()`, found early and named.

Keras ties a model to the strategy of the scope in which it was made, and its optimizer
to that of `compile`. When the two differ it fails much later, with a bare assertion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import DistributedVariable, is_default_strategy, whole_of
from tfdp._private.optimizer_hooks import strategy_of
from tfdp.errors import ScopeError

__all__ = ["check_component", "check_dataset", "check_model", "check_not_nested"]

ADVICE = (
    "Make the model and compile it in one `with strategy.scope():` block of the "
    "strategy that trains it:\n"
    "    with strategy.scope():\n"
    "        model = build()\n"
    "        model.compile(...)\n"
    "    model.fit(...)"
)


def check_model(
    model: Any,
    optimizers: Sequence[keras.optimizers.Optimizer],
    strategy: tf.distribute.Strategy,
) -> None:
    """Refuses a model, or an optimizer, that was made elsewhere.

    Raises:
      ScopeError: naming what was made where.
    """
    if not isinstance(model, keras.Model):
        return
    for optimizer in optimizers:
        if strategy_of(optimizer) is not strategy:
            raise ScopeError(
                f"The optimizer {optimizer.name!r} of model {model.name!r} was made "
                f"under {_name(strategy_of(optimizer), strategy)}, but the model "
                "trains under "
                f"{_name(strategy)}: compile was called in another scope, or the "
                f"optimizer is built already, for other variables. {ADVICE}"
            )
    for variable in model.trainable_variables:
        value = variable.value
        if (
            not isinstance(value, DistributedVariable)
            or value.distribute_strategy is not strategy
        ):
            raise ScopeError(
                f"The variable {variable.path!r} of model {model.name!r} was made "
                f"outside the scope of {_name(strategy)}, so its replicas have no "
                f"copies of it. {ADVICE}"
            )


def check_component(variable: Any, strategy: tf.distribute.Strategy) -> None:
    """Refuses a variable that is not one of `strategy`'s.

    Raises:
      ScopeError: naming the variable.
    """
    owner = getattr(variable, "distribute_strategy", None)
    whole = whole_of(variable)
    if owner is None and whole is not None:
        owner = whole.distribute_strategy
    if owner is not strategy:
        name = getattr(variable, "name", variable)
        raise ScopeError(
            f"The variable {name!r} was made outside the scope of {_name(strategy)}, "
            f"under which the optimizer was made. {ADVICE}"
        )


def check_dataset(dataset: Any) -> None:
    """Refuses a dataset that is distributed already.

    Raises:
      ScopeError: always for a distributed dataset.
    """
    if isinstance(dataset, tf.distribute.DistributedDataset):
        raise ScopeError(
            "This dataset is distributed already: each replica would get a part of a "
            "part. Pass the plain tf.data.Dataset of global batches (model.fit "
            "distributes it), or distribute it once and use the result."
        )


def check_not_nested(strategy: tf.distribute.Strategy) -> None:
    """Refuses to enter a scope within another strategy's.

    Raises:
      ScopeError: naming both.
    """
    if not tf.distribute.has_strategy():
        return
    current = tf.distribute.get_strategy()
    if current is not strategy:
        raise ScopeError(
            f"{_name(strategy)} is entered, or a model made under it is used, within "
            f"the scope of {_name(current, strategy)}. A model belongs to one "
            "strategy: leave the other scope first, and call fit outside any scope."
        )


def _name(strategy: Any, beside: Any = None) -> str:
    """What a strategy is called in errors that name `beside` too."""
    if not isinstance(strategy, tf.distribute.Strategy) or is_default_strategy(
        strategy
    ):
        return "no strategy"
    another = beside is not strategy and repr(beside) == repr(strategy)
    return f"another {strategy!r}" if another else repr(strategy)
