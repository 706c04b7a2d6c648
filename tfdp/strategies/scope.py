"""Mistakes with `strategy.scope()`, found early and named.

Keras ties a model to the strategy of the scope in which it was made, and its optimizer
to that of `compile`. When the two differ it fails much later, with a bare assertion.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import keras
import tensorflow as tf

from tfdp._private.keras_models import (
    given_metrics,
    layers_within,
    seed_generators_of,
    start_anew,
)
from tfdp._private.names import (
    DistributedVariable,
    is_default_strategy,
    keras_state,
    whole_of,
)
from tfdp._private.optimizer_hooks import put_under, strategy_of
from tfdp.errors import ScopeError

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


# Optimizers, metrics and seeds that were made outside of the scope, before any use.
#
# `model.compile("sgd")` outside of `strategy.scope()` makes an optimizer, and metrics,
# with plain variables. Until an optimizer is built these are a counter and a rate: they
# are made anew under the strategy, within the same objects, so that what a program
# holds on to stays what trains. So are the states of layers' random generators, all
# that a `Dropout` holds.


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


# The optimizers and metrics that were made under a strategy, wherever a program keeps
# them.
#
# A model may keep its optimizers in a dictionary, a loop in a variable, a step a metric
# in a closure: no walk over attributes finds all. Each of them makes a variable when it
# is made, though, and the strategy whose scope is open makes that variable.


T = TypeVar("T")
# One thread may make a model while another one trains. For the process: a strategy with
# a lock of its own could not be copied.
_lock = threading.Lock()


class MadeInScope(Generic[T]):
    """Remembers objects for as long as anything else holds them.

    Args:
      kind: of which class they are.
    """

    def __init__(self, kind: type[T]):
        self._kind = kind
        self._known: weakref.WeakSet[T] = weakref.WeakSet()

    def note_maker(self) -> None:
        """Notes the object that is making a variable, if one is."""
        stack = keras_state.get_global_attribute("name_scope_stack") or []
        maker = getattr(stack[-1], "caller", None) if stack else None
        if isinstance(maker, self._kind):
            self.note(maker)

    def note(self, made: T) -> None:
        """Notes one."""
        with _lock:
            self._known.add(made)

    def together_with(self, others: Iterable[T]) -> list[T]:
        """All that are known, and `others`; each once."""
        with _lock:
            known = list(self._known)
        return list({id(one): one for one in [*known, *others]}.values())
