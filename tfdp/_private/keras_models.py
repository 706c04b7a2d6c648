"""Private state of Keras' models and layers. Checked against Keras 3.12 and 3.15."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

# Models that declare their outputs before they compute.
from keras.src.models.functional import Functional

from tfdp.seams.replace import (
    Override,
    class_attribute,
    instance_attributes,
    instead,
    is_replaced,
    overridden,
    replace,
    restore,
)
from tfdp.seams.table import VARIABLE

#: The layer attribute that holds what calls gave `add_loss`.
LOSSES = "_losses"
# The method that sets a variable's first value.
INITIALIZE = "_initialize_with_initializer"
EPOCH_LOGS = "_get_metrics_result_or_logs"
#: The model method that reduces what a layer gave `add_loss` to a number.
ADD_UP = "_aggregate_additional_loss"


def layers_within(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """`layer` (or model) and all nested layers."""
    return list(layer._flatten_layers())


def losses_added_in(layer: keras.layers.Layer) -> list[Any]:
    """The losses that calls of this layer itself gave `add_loss`."""
    return layer._losses


def seed_generators_of(layer: keras.layers.Layer) -> list[keras.random.SeedGenerator]:
    """The seed generators of this layer itself, not of its sublayers."""
    return layer._seed_generators


def state_of(layer: keras.layers.Layer) -> list[keras.Variable]:
    """This layer's own state besides trainable weights."""
    stored = [*layer._non_trainable_variables]
    stored += [v for metric in layer._metrics for v in metric.variables]
    # Keras does not list the states of stateful recurrent layers.
    stored += keras.tree.flatten(getattr(layer, "states", None) or [])
    built = [
        v for v in stored if isinstance(v, keras.Variable) and v._value is not None
    ]
    return [v for v in built if not v.trainable]


def loss_trackers(model: keras.Model) -> tuple[Any, list[Any]]:
    """The metric of the total loss, and those of each output; None before compile."""
    return (
        getattr(model, "_loss_tracker", None),
        getattr(getattr(model, "_compile_loss", None), "metrics", []),
    )


def metrics_as_compiled(model: keras.Model) -> Any:
    """The container of the metrics given to `compile`, or None."""
    return getattr(model, "_compile_metrics", None)


def given_metrics(model: keras.Model) -> Iterator[keras.metrics.Metric]:
    """The metric objects given to `compile`, built or not."""
    compiled = metrics_as_compiled(model)
    for name in ("_user_metrics", "_user_weighted_metrics"):
        for metric in tf.nest.flatten(getattr(compiled, name, None)):
            if isinstance(metric, keras.metrics.Metric):
                yield metric


def metrics_within(metric: keras.metrics.Metric) -> Iterator[keras.metrics.Metric]:
    """`metric`, and all metrics in its attributes, recursively."""
    yield metric
    for one in getattr(metric, "_metrics", ()):
        yield from metrics_within(one)


def metrics_of_layers(model: keras.Model) -> Iterator[keras.metrics.Metric]:
    """The metrics in attributes of `model` and its layers."""
    for layer in layers_within(model):
        yield from layer._metrics


def given_losses(model: keras.Model) -> list[Any]:
    """The losses given to `compile`: objects, functions and names."""
    compiled = getattr(model, "_compile_loss", None)
    return tf.nest.flatten(getattr(compiled, "_user_loss", None))


def takes_training(model: keras.Model) -> bool:
    """Whether `call` has the argument `training`."""
    return bool(model._call_has_training_arg)


def compute_loss(model: keras.Model, **arguments: Any) -> tf.Tensor:
    """`model.compute_loss`, whether or not it has the argument `training`."""
    return model._compute_loss(**arguments)


def build_symbolically(model: keras.Model, **arguments: Any) -> None:
    """Builds `model` from a batch, or an iterator's first, as Keras' loops do."""
    model._symbolic_build(**arguments)


def build_as_declared(model: keras.Model, data_batch: Any) -> None:
    """Variant of `build_symbolically` for a compiled model that is traced, not trained.

    Keras runs the whole model in a separate graph to learn the inputs of metrics and
    losses. A functional model with built layers declares them.
    """
    outputs = _declared_outputs(model, data_batch)
    if outputs is None:
        build_symbolically(model, data_batch=data_batch)
        return

    def call(*inputs: Any, **options: Any) -> Any:
        return tf.nest.map_structure(
            lambda output: tf.zeros(output.shape, output.dtype), outputs
        )

    with instance_attributes(model, {"call": call}):
        build_symbolically(model, data_batch=data_batch)


def _declared_outputs(model: keras.Model, data_batch: Any) -> Any:
    """The outputs that the model declares for a batch, or None."""
    own = getattr(model, "_functional", None) or model  # of a Sequential model
    is_plain = type(model).call in (Functional.call, keras.Sequential.call)
    if not is_plain or not isinstance(own, Functional) or is_replaced(model, "call"):
        return None
    if not all(layer.built for layer in model._flatten_layers()):
        return None
    given = tf.nest.flatten(keras.utils.unpack_x_y_sample_weight(data_batch)[0])
    declared = [tuple(each.shape) for each in tf.nest.flatten(own.input)]
    rows = {len(each) for each in given if each.ndim}
    of_any = [(None, *each.shape[1:]) for each in given]
    outputs = [tuple(each.shape) for each in tf.nest.flatten(own.output)]
    is_known = all(shape and None not in shape[1:] for shape in outputs)
    if len(rows) != 1 or of_any != declared or not is_known:
        return None
    if any(shape[0] is not None for shape in outputs):
        return None  # a fixed number of rows
    [count] = rows
    return tf.nest.map_structure(
        lambda each: keras.KerasTensor((count, *each.shape[1:]), each.dtype), own.output
    )


def updates_all_variables(model: keras.Model) -> bool:
    """Whether the model has Keras' train_step, with the compiled optimizer only."""
    is_own = is_replaced(model, "train_step")
    return not is_own and type(model).train_step is keras.Model.train_step


def build_without_optimizer(model: keras.Model, **arguments: Any) -> None:
    """Builds like `build_symbolically`, but without the compiled optimizer."""
    with instance_attributes(model, {"optimizer": None}):
        model._symbolic_build(**arguments)


@contextlib.contextmanager
def read_as(values: Iterable[tuple[keras.Variable, Any]]) -> Iterator[None]:
    """Makes Keras variables read as other values within the context."""
    with overridden(Override(v, "_value", instead(value)) for v, value in values):
        yield


@contextlib.contextmanager
def large_variables_left_empty(least_bytes: int) -> Iterator[None]:
    """Leaves Keras variables from `least_bytes` on uninitialized, for models not run.

    Memory that is never written to takes no physical memory.
    """

    def replacement(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def initialize(variable: Any, initializer: Any) -> None:
            dtype = tf.as_dtype(variable.dtype)
            if math.prod(variable.shape) * dtype.size < least_bytes:
                original(variable, initializer)
                return
            variable._initialize(
                lambda: tf.raw_ops.Empty(shape=variable.shape, dtype=dtype)
            )

        return initialize

    with class_attribute(VARIABLE, INITIALIZE, replacement):
        yield


def initial_epoch(model: keras.Model) -> int:
    """The epoch at which `fit` begins if a callback has restored one; else 0."""
    return int(model._initial_epoch or 0)


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Makes `fit` begin at `epoch`."""
    model._initial_epoch = epoch


def set_epoch_end_logs(model: keras.Model, logs: dict[str, Any]) -> None:
    """Makes an epoch of `fit` without remaining batches end with `logs`.

    Keras looks up metric results by the names in the last step's logs. {} ends it.
    """
    if not logs:
        restore(model, EPOCH_LOGS)
        return

    def with_logs(found: dict[str, Any]) -> dict[str, Any]:
        return getattr(type(model), EPOCH_LOGS)(model, found or logs)

    replace(model, EPOCH_LOGS, with_logs)


def mask_of(tensor: Any) -> Any:
    """The mask that a layer attached to `tensor`, or None."""
    return getattr(tensor, "_keras_mask", None)


def put_mask(tensor: Any, mask: Any) -> None:
    """Attaches `mask` to `tensor`, as layers do."""
    tensor._keras_mask = mask


def take_mask(tensor: Any) -> Any:
    """The mask of `tensor`, which it then lacks; None: it has none."""
    mask = mask_of(tensor)
    if mask is not None:
        del tensor._keras_mask
    return mask


def recreate_variable(variable: keras.Variable, value: Any) -> None:
    """Gives `variable` a new TensorFlow variable with `value`, created here."""
    variable._initialize(value)


def own_values(metric: keras.metrics.MeanMetricWrapper, *given: Any) -> Any:
    """The result of a user-defined metric function for a batch; else None.

    Keras' functions return a number per row, custom ones may return one for all. None
    if masked.
    """
    module = getattr(metric._fn, "__module__", None) or type(metric._fn).__module__
    masks = [getattr(part, "_keras_mask", None) for part in given]
    if module.partition(".")[0] == "keras" or masks != [None, None]:
        return None
    return tf.convert_to_tensor(metric._fn(*given, **metric._fn_kwargs))


def take_over_jit(model: keras.Model) -> bool:
    """Makes Keras not compile the whole step; True if it was about to."""
    if not model.jit_compile:
        return False
    model.jit_compile = False
    return True
