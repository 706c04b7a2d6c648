"""Runs an eager step of Keras as one device does: on the whole batch, once.

The replicas of a step compute what one device computes on the whole batch, so it is the
same step. What it assigns to a variable, the variable stores on every replica. Nothing
is exchanged, and a debugger stops once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import PerReplica, as_one_device
from tfdp._private.optimizer_hooks import momentum_compression_of, variables_built_with
from tfdp.data.keras_input import with_none
from tfdp.errors import ConfigurationError
from tfdp.exchange.sparse import rows_once
from tfdp.seams.replace import Override, around, overridden
from tfdp.step.find_optimizers import optimizers_of, optimizers_with_sync
from tfdp.step.observers import StepMeter, observers_of
from tfdp.tracing.keras_steps import name_of_step
from tfdp.tracing.rows import of_real_rows
from tfdp.variables.in_shards import is_in_shards


def runs_as_one_device(model: keras.Model) -> bool:
    """Whether steps of `model` run outside of graphs."""
    return bool(model.run_eagerly or tf.config.functions_run_eagerly())


def run_as_one_device(
    fn: Callable, args: Any, kwargs: Any, strategy: tf.distribute.Strategy
) -> Any:
    """Calls `fn`, a step of a Keras loop, with the whole batch.

    Raises:
      ConfigurationError: for a strategy, or an optimizer, whose options act between
        replicas only.
    """
    model = getattr(fn, "__self__", None)
    _refuse_what_needs_replicas(strategy, optimizers_of(model))
    given = with_none(args), with_none(kwargs or {})
    given = of_real_rows(given)
    args, kwargs = tf.nest.map_structure(_whole, given, expand_composites=False)
    if name_of_step(fn) == "train_step":
        for meter in observers_of(model, StepMeter):
            meter.note(_rows_of((args, kwargs)), ())
    with as_one_device(strategy), overridden(_sums_of_rows(strategy, model)):
        return fn(*args, **kwargs)


def _sums_of_rows(strategy: Any, model: Any) -> Iterator[Override]:
    """Overrides that add the rows of a word that occurs twice before an update, where
    the sum over replicas does: behind shards, and if the strategy says so."""
    of_all = strategy.given.has("Communication.repeated_rows")
    if not of_all and strategy.extended.shards is None:
        return
    # Those of this model only: another one may be in a step in another thread.
    for optimizer in optimizers_of(model):
        yield Override(optimizer, "apply", around(_apply_sums, optimizer, of_all))


def _apply_sums(
    apply: Callable[..., Any],
    optimizer: Any,
    of_all: bool,
    gradients: Iterable[Any],
    trainable_variables: Any = None,
) -> Any:
    own = list(gradients)
    targets = trainable_variables and list(trainable_variables)
    built_with = targets or variables_built_with(optimizer) or [None] * len(own)
    # Keras refuses lists of unlike lengths.
    for place, (gradient, variable) in enumerate(zip(own, built_with, strict=False)):
        if of_all:
            own[place] = rows_once(gradient)
        if gradient is not None and is_in_shards(variable):
            own[place] = tf.convert_to_tensor(gradient)
    return apply(own, targets)


def _refuse_what_needs_replicas(
    strategy: tf.distribute.Strategy, optimizers: Sequence[Any]
) -> None:
    options = {
        f"a strategy of {strategy.hosts} hosts": strategy.hosts > 1,
        "sync=...": optimizers_with_sync(optimizers, strategy),
        "Communication(compression=...)": strategy.extended.reducer.compressed,
        "an optimizer that sends its momentum": any(
            momentum_compression_of(one) is not None for one in optimizers
        ),
    }
    for option, acts in options.items():
        if acts:
            raise refusal(option)


def refusal(option: str) -> ConfigurationError:
    """The error for an option that an eager step cannot obey."""
    return ConfigurationError(
        "A step with run_eagerly=True computes the whole batch on one device, and "
        f"{option} acts between replicas, in graphs. Compile the model with "
        "run_eagerly=False (and tf.config.run_functions_eagerly(False)). Or debug on "
        "one host without that option: all other numbers are the same."
    )


def _whole(value: Any) -> Any:
    return _joined(value.values) if isinstance(value, PerReplica) else value


def _joined(parts: Sequence[Any]) -> Any:
    if not all(tf.is_tensor(part) for part in parts):
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts)
    if isinstance(parts[0], tf.RaggedTensor) or parts[0].shape.rank:
        return tf.concat(parts, 0)
    return parts[0]


def _rows_of(given: Any) -> int | None:
    for part in tf.nest.flatten(given):
        if isinstance(part, tf.RaggedTensor):
            return int(part.nrows())
        if tf.is_tensor(part) and part.shape.rank:
            return int(part.shape[0])
    return None
