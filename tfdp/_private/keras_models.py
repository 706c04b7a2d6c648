"""What Keras' models, layers and variables keep to themselves, under public names.

Checked against Keras 3.12 and 3.15.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

# Models whose outputs say what they are before anything is computed.
from keras.src.models.functional import Functional

from tfdp._private.names import keras_state

__all__ = [
    "ADD_UP",
    "BUILD",
    "LOSSES",
    "build_as_declared",
    "build_symbolically",
    "build_without_optimizer",
    "compute_loss",
    "given_losses",
    "given_metrics",
    "initial_epoch",
    "large_variables_left_empty",
    "layers_within",
    "loss_trackers",
    "losses_added_in",
    "mask_of",
    "metrics_as_compiled",
    "metrics_of_layers",
    "metrics_within",
    "own_values",
    "put_mask",
    "seed_generators_of",
    "set_initial_epoch",
    "stand_in_for_logs",
    "start_anew",
    "takes_training",
    "updates_all_variables",
    "variables_made_at_the_end",
]

#: The attribute of a layer that holds what its calls gave `add_loss`.
LOSSES = "_losses"
#: The method of a model that builds it from the first batch.
BUILD = "_symbolic_build"
# How a variable gets its first value.
INITIALIZE = "_initialize_with_initializer"
EPOCH_LOGS = "_get_metrics_result_or_logs"
#: The method of a model that makes a number of what a layer gave `add_loss`.
ADD_UP = "_aggregate_additional_loss"


def layers_within(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """`layer`, a model too, and every layer that it holds at any depth."""
    return list(layer._flatten_layers())


def losses_added_in(layer: keras.layers.Layer) -> list[Any]:
    """What the calls of this very layer gave `add_loss`."""
    return layer._losses


def seed_generators_of(layer: keras.layers.Layer) -> list[keras.random.SeedGenerator]:
    """Those that this very layer draws from."""
    return layer._seed_generators


def state_of(layer: keras.layers.Layer) -> list[keras.Variable]:
    """What this very layer stores besides weights that it was made to train."""
    stored = [*layer._non_trainable_variables]
    stored += [v for metric in layer._metrics for v in metric.variables]
    # Those of a recurrent layer that is stateful, which Keras does not count.
    stored += keras.tree.flatten(getattr(layer, "states", None) or [])
    return [
        v
        for v in stored
        if isinstance(v, keras.Variable) and v._value is not None and not v.trainable
    ]


def loss_trackers(model: keras.Model) -> tuple[Any, list[Any]]:
    """The metric of the whole loss, and those of each output; None before compile."""
    return (
        getattr(model, "_loss_tracker", None),
        getattr(getattr(model, "_compile_loss", None), "metrics", []),
    )


def metrics_as_compiled(model: keras.Model) -> Any:
    """What updates all metrics that `compile` was given; None: it was given none."""
    return getattr(model, "_compile_metrics", None)


def given_metrics(model: keras.Model) -> Iterator[keras.metrics.Metric]:
    """The metrics among what `compile` was given, built or not."""
    compiled = metrics_as_compiled(model)
    for name in ("_user_metrics", "_user_weighted_metrics"):
        for metric in tf.nest.flatten(getattr(compiled, name, None)):
            if isinstance(metric, keras.metrics.Metric):
                yield metric


def metrics_within(metric: keras.metrics.Metric) -> Iterator[keras.metrics.Metric]:
    """`metric`, and every metric that it holds as an attribute, at any depth."""
    yield metric
    for one in getattr(metric, "_metrics", ()):
        yield from metrics_within(one)


def metrics_of_layers(model: keras.Model) -> Iterator[keras.metrics.Metric]:
    """The metrics that `model` and its layers hold as attributes."""
    for layer in layers_within(model):
        yield from layer._metrics


def given_losses(model: keras.Model) -> list[Any]:
    """The losses that `compile` was given: objects, functions and names."""
    compiled = getattr(model, "_compile_loss", None)
    return tf.nest.flatten(getattr(compiled, "_user_loss", None))


def takes_training(model: keras.Model) -> bool:
    """Whether the model's `call` has the argument `training`."""
    return bool(model._call_has_training_arg)


def compute_loss(model: keras.Model, **arguments: Any) -> tf.Tensor:
    """`model.compute_loss`, whether or not it has the argument `training`."""
    return model._compute_loss(**arguments)


def build_symbolically(model: keras.Model, **arguments: Any) -> None:
    """Builds `model` from a batch, or an iterator's first; as Keras' loops do."""
    model._symbolic_build(**arguments)


def build_as_declared(model: keras.Model, data_batch: Any) -> None:
    """As `build_symbolically`, for a model that is traced and not trained.

    Keras runs the whole model in a graph of its own to know what its metrics and
    its loss are given. A functional model whose layers are built has said so.

    Args:
      model: compiled.
      data_batch: (x, y) or (x, y, sample_weight), arrays.
    """
    outputs = _declared_outputs(model, data_batch)
    if outputs is None:
        build_symbolically(model, data_batch=data_batch)
        return

    def call(*inputs: Any, **options: Any) -> Any:
        return tf.nest.map_structure(
            lambda output: tf.zeros(output.shape, output.dtype), outputs
        )

    # Not by setattr, which would track it as a part of the model.
    vars(model)["call"] = call
    try:
        build_symbolically(model, data_batch=data_batch)
    finally:
        del vars(model)["call"]


def _declared_outputs(model: keras.Model, data_batch: Any) -> Any:
    """What the model says that it makes of a batch; None: it does not say."""
    own = getattr(model, "_functional", None) or model  # of a Sequential model
    is_plain = type(model).call in (Functional.call, keras.Sequential.call)
    if not is_plain or not isinstance(own, Functional) or "call" in vars(model):
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
        return None  # the same for any number of rows: not for all models
    [count] = rows
    return tf.nest.map_structure(
        lambda each: keras.KerasTensor((count, *each.shape[1:]), each.dtype), own.output
    )


def updates_all_variables(model: keras.Model) -> bool:
    """Whether a step updates all trainable variables by the compiled optimizer."""
    is_own = "train_step" in vars(model)
    return not is_own and type(model).train_step is keras.Model.train_step


def build_without_optimizer(model: keras.Model, **arguments: Any) -> None:
    """As `build_symbolically`, but the compiled optimizer stays as it is."""
    optimizer = vars(model).get("optimizer")
    vars(model)["optimizer"] = None
    try:
        model._symbolic_build(**arguments)
    finally:
        vars(model)["optimizer"] = optimizer


@contextlib.contextmanager
def variables_made_at_the_end() -> Iterator[None]:
    """Keras variables that are made within take memory when it ends.

    None where it ends with an error: they are forgotten.
    """
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    except BaseException:
        keras_state.set_global_attribute("uninitialized_variables", [])
        raise
    # Keras makes them when it leaves the outermost scope.
    with keras.StatelessScope():
        pass


@contextlib.contextmanager
def large_variables_left_empty(least_bytes: int) -> Iterator[None]:
    """Keras variables that are made within have memory but no numbers, where large.

    Memory that nobody has written into takes none of the machine's. For models that are
    looked at and not run.

    Args:
      least_bytes: from which size on.
    """
    original = getattr(keras.Variable, INITIALIZE, None)
    if original is None:  # of another Keras: then they have numbers
        yield
        return

    def initialize(variable: Any, initializer: Any) -> None:
        dtype = tf.as_dtype(variable.dtype)
        if math.prod(variable.shape) * dtype.size < least_bytes:
            original(variable, initializer)
            return
        variable._initialize(
            lambda: tf.raw_ops.Empty(shape=variable.shape, dtype=dtype)
        )

    setattr(keras.Variable, INITIALIZE, initialize)
    try:
        yield
    finally:
        setattr(keras.Variable, INITIALIZE, original)


def initial_epoch(model: keras.Model) -> int:
    """The epoch at which `fit` begins when a callback has restored one; else 0."""
    return int(model._initial_epoch or 0)


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Lets `fit` begin at `epoch`."""
    model._initial_epoch = epoch


def stand_in_for_logs(model: keras.Model, logs: dict[str, Any]) -> None:
    """Lets an epoch of `fit` that finds no batch left end with `logs`.

    Keras asks for the metrics' results by the names in the last step's logs. An empty
    dictionary ends it.
    """
    if not logs:
        vars(model).pop(EPOCH_LOGS, None)
        return

    def with_logs(found: dict[str, Any]) -> dict[str, Any]:
        return getattr(type(model), EPOCH_LOGS)(model, found or logs)

    # Not by setattr, which would track it as a part of the model.
    vars(model)[EPOCH_LOGS] = with_logs


def mask_of(tensor: Any) -> Any:
    """The mask that the layer which made `tensor` left with it; None: no mask."""
    return getattr(tensor, "_keras_mask", None)


def put_mask(tensor: Any, mask: Any) -> None:
    """Leaves `mask` with `tensor`, as the layer did that made it."""
    tensor._keras_mask = mask


def start_anew(variable: keras.Variable, value: Any) -> None:
    """Gives `variable` a TensorFlow variable made here and now, of `value`."""
    variable._initialize(value)


def own_values(metric: keras.metrics.MeanMetricWrapper, *given: Any) -> Any:
    """What a metric's function, where it is not Keras' own, makes of a batch.

    Keras' functions give a number for each row, a program's own may give one for all.

    Args:
      metric: as Keras wraps a function that is given to `compile`.
      *given: the truth, and what was predicted.

    Returns:
      A tensor; None: the function is Keras', or a mask has a say in it.
    """
    module = getattr(metric._fn, "__module__", None) or type(metric._fn).__module__
    masks = [getattr(part, "_keras_mask", None) for part in given]
    if module.partition(".")[0] == "keras" or masks != [None, None]:
        return None
    return tf.convert_to_tensor(metric._fn(*given, **metric._fn_kwargs))
