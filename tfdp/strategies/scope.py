"""Checks of `strategy.scope()`, and objects created outside or within it.

Keras ties a model to the strategy of the scope that created it, and its optimizer to
that of `compile`. If they differ it fails much later, with a bare assertion.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import keras
import tensorflow as tf

from tfdp._private import keras_models, names
from tfdp._private.frames import is_called_by_keras_2
from tfdp._private.keras_calls import makers_of_variable
from tfdp._private.optimizer_hooks import put_under, strategy_of
from tfdp.errors import ConfigurationError, ScopeError

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
    """Refuses a model, or an optimizer, that was created in another scope."""
    if not isinstance(model, keras.Model):
        return
    for optimizer in optimizers:
        if strategy_of(optimizer) is not strategy:
            raise ScopeError(
                f"The optimizer {optimizer.name!r} of model {model.name!r} was made "
                f"under {_name(strategy_of(optimizer), strategy)}, but the model "
                f"trains under {_name(strategy)}: compile was called in another scope, "
                f"or the optimizer is built already, for other variables. {ADVICE}"
            )
    for variable in model.trainable_variables:
        value = variable.value
        if (
            not isinstance(value, names.DistributedVariable)
            or value.distribute_strategy is not strategy
        ):
            raise ScopeError(
                f"The variable {variable.path!r} of model {model.name!r} was made "
                f"outside the scope of {_name(strategy)}, so its replicas have no "
                f"copies of it. {ADVICE}"
            )


def check_component(variable: Any, strategy: tf.distribute.Strategy) -> None:
    """Refuses a variable of another strategy."""
    owner = getattr(variable, "distribute_strategy", None)
    whole = names.whole_of(variable)
    if owner is None and whole is not None:
        owner = whole.distribute_strategy
    if owner is not strategy:
        name = getattr(variable, "name", variable)
        raise ScopeError(
            f"The variable {name!r} was made outside the scope of {_name(strategy)}, "
            f"under which the optimizer was made. {ADVICE}"
        )


def check_not_keras_2(strategy: tf.distribute.Strategy) -> None:
    """Refuses calls by a model, layer or optimizer of Keras 2."""
    if is_called_by_keras_2():
        raise ConfigurationError(
            f"Keras 2 (tf_keras) makes or trains variables under {_name(strategy)}, "
            "and tfdp makes Keras 3 exact: tf_keras would train with other numbers "
            "than on one device. Write the model, its optimizer and metrics in Keras 3 "
            "(import keras, without TF_USE_LEGACY_KERAS=1 in the environment), or "
            "train without a strategy. A tf_keras model that is "
            "only called, such as a teacher, may be made outside of the scope."
        )


def check_dataset(dataset: Any) -> None:
    """Refuses what is no dataset, or is distributed already."""
    if not hasattr(dataset, "element_spec"):
        raise ConfigurationError(
            "A strategy distributes a tf.data.Dataset of global batches, such as "
            "tf.data.Dataset.from_tensor_slices(x).batch(64). Received: "
            f"{type(dataset).__name__}."
        )
    if isinstance(dataset, tf.distribute.DistributedDataset):
        raise ScopeError(
            "This dataset is distributed already: each replica would get a part of a "
            "part. Pass the plain tf.data.Dataset of global batches (model.fit "
            "distributes it), or distribute it once and use the result."
        )


def check_not_nested(strategy: tf.distribute.Strategy) -> None:
    """Refuses a scope within another strategy's, or within a replica's step."""
    if not tf.distribute.has_strategy():
        return
    current = tf.distribute.get_strategy()
    if not tf.distribute.in_cross_replica_context():
        raise ScopeError(
            "strategy.scope(), fit, evaluate and predict run all replicas, and here "
            "one replica calls them, within strategy.run. Call them outside of it; "
            "strategy.run takes one step on one replica's rows."
        )
    if current is not strategy:
        raise ScopeError(
            f"{_name(strategy)} is entered, or a model made under it is used, within "
            f"the scope of {_name(current, strategy)}. A model belongs to one "
            "strategy: leave the other scope first, and call fit outside any scope."
        )


def _name(strategy: Any, other: Any = None) -> str:
    """A strategy's name in errors that also name `other`."""
    is_strategy = isinstance(strategy, tf.distribute.Strategy)
    if not is_strategy or names.is_default_strategy(strategy):
        return "no strategy"
    is_equal = other is not strategy and repr(other) == repr(strategy)
    return f"another {strategy!r}" if is_equal else repr(strategy)


# `model.compile("sgd")` outside the scope creates an optimizer, and metrics, with plain
# variables. Until an optimizer is built these are only a counter and a rate: they are
# recreated under the strategy, within the same objects, which a program may hold. The
# same applies to the states of layers' random generators, all that a `Dropout` holds.


def adopt_state(
    model: Any,
    optimizers: Sequence[keras.optimizers.Optimizer],
    strategy: tf.distribute.Strategy,
) -> None:
    """Moves unused optimizers, metrics and seeds of `model` under `strategy`."""
    if not isinstance(model, keras.Model):
        return
    for optimizer in optimizers:
        parts = list(_with_inner(optimizer))
        if any(p.built or not names.is_default_strategy(strategy_of(p)) for p in parts):
            continue
        for part in parts:
            put_under(part, strategy)
            _recreate(part.variables, strategy)
            strategy.extended.note_optimizer(part)
    for metric in _metrics(model):
        _recreate(metric.variables, strategy)
    for layer in keras_models.layers_within(model):
        for generator in keras_models.seed_generators_of(layer):
            # A layer without weights may be in models of several strategies.
            owner = getattr(generator.state.value, "distribute_strategy", None)
            if owner is not strategy:
                _recreate([generator.state], strategy, any_owner=True)


def _with_inner(optimizer: Any) -> Iterator[Any]:
    yield optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    for part in [inner] if inner is not None else getattr(optimizer, "optimizers", []):
        yield from _with_inner(part)


def _metrics(model: keras.Model) -> Iterator[keras.metrics.Metric]:
    """The metrics of `model`, including those that compile has not built yet."""
    if not model.compiled:
        return  # a user-defined `metrics` may name what compile creates
    yield from model.metrics
    yield from keras_models.given_metrics(model)


def _recreate(
    variables: Iterable[keras.Variable],
    strategy: tf.distribute.Strategy,
    *,
    any_owner: bool = False,
) -> None:
    """Recreates variables without a strategy, or all, under `strategy`."""
    for variable in list(variables):
        if isinstance(variable.value, names.DistributedVariable) and not any_owner:
            continue
        with tf.init_scope():
            value = variable.numpy()
            with strategy.scope():
                keras_models.recreate_variable(variable, value)


# A model may hold its optimizers in a dictionary, or a step a metric in a closure, so a
# walk over attributes misses some. But each creates a variable, through the strategy of
# the open scope.


T = TypeVar("T")
# One thread may create a model while another one trains. Global: a strategy with a lock
# could not be copied.
_lock = threading.Lock()


class MadeInScope(Generic[T]):
    """Weakly tracks objects of the class `kind` that were created in a scope."""

    def __init__(self, kind: type[T]):
        self._kind = kind
        self._tracked: weakref.WeakSet[T] = weakref.WeakSet()

    def note_maker(self) -> T | None:
        """Tracks, and returns, the object that is creating a variable, if any."""
        maker = next(reversed(makers_of_variable()), None)
        if not isinstance(maker, self._kind):
            return None
        self.note(maker)
        return maker

    def note(self, made: T) -> None:
        with _lock:
            self._tracked.add(made)

    def together_with(self, others: Iterable[T]) -> list[T]:
        """All tracked objects and `others`, each once."""
        with _lock:
            tracked = list(self._tracked)
        return list({id(one): one for one in [*tracked, *others]}.values())
