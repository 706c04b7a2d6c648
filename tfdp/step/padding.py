"""Excludes padding rows from Keras' losses and metrics.

While a step of a padded batch is built, methods of the model are overridden: padding
rows have weight 0, and `step.losses` corrects the divisors. The overrides look up the
calling replica's padding at each call, as eager replicas take turns within a step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import (
    layers_within,
    loss_trackers,
    losses_added_in,
    mask_of,
    metrics_as_compiled,
)
from tfdp._private.names import current_rank
from tfdp.errors import ConfigurationError
from tfdp.seams.replace import Override, instance_attributes
from tfdp.tracing.keras_steps import is_predict_step, is_stock_step, name_of_step
from tfdp.tracing.padded_batch import Padding, find_padded, without_padding
from tfdp.tracing.run import Step


def padding_overrides(
    model: Any, run: Step, made_metrics: Sequence[keras.metrics.Metric]
) -> Iterator[Override]:
    """With these, the loss and metrics of `model` exclude padding rows."""
    if not isinstance(model, keras.Model):
        return

    overrides: list[tuple[Any, str, Callable]] = [
        (model, "compute_loss", _compute_loss),
        (model, "compute_metrics", _compute_metrics),
    ]
    of_whole_loss, of_outputs = loss_trackers(model)
    if of_whole_loss is not None:
        overrides.append((of_whole_loss, "update_state", _update_loss_tracker))
    for tracker in of_outputs:
        overrides.append((tracker, "update_state", _update_output_tracker))
    overrides += [
        (layer, "call", _call_normalization)
        for layer in layers_within(model)
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    metrics = metrics_as_compiled(model)
    if metrics is not None:
        overrides.append((metrics, "update_state", _update_compiled_metrics))
    overrides += [
        (metric, "update_state", _update_own_metric)
        for metric in own_metrics(model, made_metrics)
    ]
    for target, name, override in overrides:
        make = functools.partial(_on_padded_batch, override, target, run)
        yield Override(target, name, make)


def _on_padded_batch(
    override: Callable, target: Any, run: Step, plain: Callable
) -> Callable:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        padding = run.padding_of(current_rank())
        if padding is None:
            return plain(*args, **kwargs)
        return override(plain, padding, target, *args, **kwargs)

    return call


def step_on_padded_batch(
    fn: Callable, step: Callable, model: Any, run: Step
) -> Callable:
    """Wraps `step`, which runs instead of `fn`, for a padded batch."""
    if not isinstance(model, keras.Model) and not is_predict_step(fn):
        raise ConfigurationError(
            "This batch was padded to a fixed size, and the step is not a method of "
            "a Keras model, so nothing would exclude the padding. Give batches of one "
            "size (drop_remainder=True) that the replicas divide: they are not padded."
        )

    @tf.autograph.experimental.do_not_convert
    def step_on_rows(*args: Any, **kwargs: Any) -> Any:
        batch = find_padded((args, kwargs))
        padding = Padding.of(batch.rows)  # type: ignore[union-attr]
        run.here.padding = padding
        result = step(*without_padding(args), **without_padding(kwargs))
        _check_step_weighs(fn, padding)
        return result

    return step_on_rows


def _check_step_weighs(step: Any, padding: Padding) -> None:
    name = name_of_step(step)
    if not name or is_stock_step(step):
        return
    if not padding.loss_is_weighted:
        raise ConfigurationError(
            f"{name} of {type(step.__self__).__name__} takes its loss without "
            "self.compute_loss(x=x, y=y, y_pred=y_pred), so padding rows of a short "
            "batch would count. Call it, or give batches of one size "
            "(drop_remainder=True), which are not padded."
        )


def _compute_loss(
    compute: Callable,
    padding: Padding,
    model: Any,
    /,
    x: Any = None,
    y: Any = None,
    y_pred: Any = None,
    sample_weight: Any = None,
    **options: Any,
) -> Any:
    padding.has_user_weights = sample_weight is not None
    padding.loss_is_weighted = True
    _refuse_added_losses(model)
    if sample_weight is None:
        weights = keras.tree.map_structure(
            lambda leaf: padding.weights(_rank_of_values(leaf)), y_pred
        )
    else:
        weights = _times_rows(sample_weight, padding)
    loss = compute(x=x, y=y, y_pred=y_pred, sample_weight=weights, **options)
    if loss is None or not _has_rows(loss, padding):
        return loss
    # With reduction="none" Keras adds other outputs' means to the loss of each row.
    return loss * padding.weights(loss.shape.rank, loss.dtype)


def _refuse_added_losses(model: Any) -> None:
    adding = [layer.name for layer in layers_within(model) if losses_added_in(layer)]
    if adding:
        raise ConfigurationError(
            f"The layer {adding[0]!r} adds a loss of its own (add_loss or an activity "
            "regularizer), in which padding rows of a short batch would count. Give "
            "batches of one size (drop_remainder=True), which are not padded."
        )


def _rank_of_values(y_pred: Any) -> int:
    # Most losses have the rank of the mask, or one axis less than `y_pred`.
    mask = mask_of(y_pred)
    return len(mask.shape) if mask is not None else max(1, len(y_pred.shape) - 1)


def _times_rows(sample_weight: Any, padding: Padding) -> Any:
    def product(weight: Any) -> Any:
        if weight is None:
            return padding.weights(1)
        weight = tf.convert_to_tensor(weight)
        if not weight.dtype.is_floating:
            weight = tf.cast(weight, tf.float32)
        return weight * padding.weights(weight.shape.rank, weight.dtype)

    return keras.tree.map_structure(product, sample_weight)


def _compute_metrics(
    compute: Callable,
    padding: Padding,
    model: Any,
    x: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any = None,
) -> dict[str, Any]:
    if sample_weight is not None:
        sample_weight = _times_rows(sample_weight, padding)
    return compute(x, y, y_pred, sample_weight)


def _update_loss_tracker(
    update: Callable, padding: Padding, metric: Any, value: Any, sample_weight: Any = 0
) -> Any:
    """Otherwise Keras weights a reported loss by all rows of the replica."""
    if len(value.shape):
        # With reduction="none" the mean over all rows, padded ones too, is next.
        rows = tf.cast(padding.rows, value.dtype)
        count = tf.cast(padding.count, value.dtype)
        value = value * tf.math.divide_no_nan(rows, count)
    return update(value, sample_weight=padding.count)


def _update_output_tracker(
    update: Callable, padding: Padding, metric: Any, value: Any, sample_weight: Any = 0
) -> Any:
    # Keras weights the loss of one of several outputs equally in each batch. (By the
    # size of the batch if that is static; then no batch is short.)
    is_of_rows = len(value.shape)  # reduction="none": equal weights
    weights = padding.weights(1) if is_of_rows else padding.count / padding.total
    return update(value, sample_weight=weights)


def _call_normalization(
    call: Callable,
    padding: Padding,
    layer: Any,
    /,
    inputs: Any,
    *args: Any,
    mask: Any = None,
    **options: Any,
) -> Any:
    """Excludes padding from the statistics of a batch."""
    if inputs.shape[0] == padding.rows:
        real = padding.weights(len(inputs.shape) - 1) > 0
        mask = real if mask is None else tf.logical_and(mask, real)
        mask = tf.broadcast_to(mask, inputs.shape[:-1])
    return call(inputs, *args, mask=mask, **options)


def _update_compiled_metrics(
    update: Callable,
    padding: Padding,
    metrics: Any,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any = None,
) -> Any:
    if not metrics.built:
        metrics.build(y_true, y_pred)
    with contextlib.ExitStack() as stack:
        for metric in metrics.metrics:
            weighted = functools.partial(
                _update_compiled_metric, metric.update_state, padding, metric
            )
            stack.enter_context(instance_attributes(metric, {"update_state": weighted}))
        return update(y_true, y_pred, sample_weight)


def _update_compiled_metric(
    update: Callable,
    padding: Padding,
    metric: Any,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any = None,
) -> Any:
    if sample_weight is None:
        sample_weight = weigh_rows(metric, y_pred, padding)
    return update(y_true, y_pred, sample_weight=sample_weight)


def own_metrics(
    model: keras.Model, made_metrics: Sequence[keras.metrics.Metric]
) -> Iterator[keras.metrics.Metric]:
    """The metrics that a step of `model` may update itself, each once: not those of its
    losses and those given to `compile`."""
    if not getattr(model, "compiled", False):
        return  # the list of metrics may fail before
    of_whole_loss, of_outputs = loss_trackers(model)
    compiled = metrics_as_compiled(model)
    others = [of_whole_loss, *of_outputs, compiled, *getattr(compiled, "metrics", ())]
    own = {id(metric): metric for metric in [*model.metrics, *made_metrics]}
    yield from (own[key] for key in own.keys() - set(map(id, others)))


def _update_own_metric(
    update: Callable, padding: Padding, metric: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Gives padding rows weight 0 in a metric that the step updates itself; single
    numbers are computed from valid rows already."""
    signature = inspect.signature(type(metric).update_state)
    bound = signature.bind(metric, *args, **kwargs)
    given = bound.arguments
    of_rows = [
        value
        for name, value in given.items()
        if name != "sample_weight" and _has_rows(value, padding)
    ]
    if not of_rows:
        return update(*args, **kwargs)
    if "sample_weight" not in signature.parameters:
        raise ConfigurationError(
            f"The metric {metric.name!r} is given rows of a batch that was padded "
            "to a fixed size, and takes no sample_weight to exclude the padding. "
            "Let its update_state take one, give it a number for the batch, or give "
            "batches of one size (drop_remainder=True), which are not padded."
        )
    weight = given.get("sample_weight")
    if weight is None:
        weight = weigh_rows(metric, of_rows[-1], padding)
    else:
        weight = tf.convert_to_tensor(weight, dtype=metric.dtype)
        weight = weight * padding.weights(max(1, weight.shape.rank), weight.dtype)
    given["sample_weight"] = weight
    return update(*bound.args[1:], **bound.kwargs)


def weigh_rows(metric: Any, values: Any, padding: Padding) -> tf.Tensor:
    """Weights for `values` in `metric`: 1, and 0 for padding rows."""
    mask = mask_of(values)
    if mask is not None:
        return tf.ones_like(mask, tf.float32) * padding.weights(len(mask.shape))
    # Means take a weight per row. Others (AUC, Recall) count every entry, and Keras
    # broadcasts a weight per row along the wrong axis for rank 3 and above.
    axes = len(values.shape)
    by_row = isinstance(metric, keras.metrics.Mean) or axes <= 2
    return padding.weights(1 if by_row else axes)


def _has_rows(value: Any, padding: Padding) -> bool:
    shape: Any = getattr(value, "shape", ())
    return len(shape) > 0 and shape[0] == padding.rows
