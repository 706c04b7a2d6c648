"""Keras' losses and metrics without the rows of filling.

While a step of a padded batch is built, the model is led by instance attributes, as the
optimizers are (`step.optimizers`): the rows of filling get the weight 0 in its loss
and metrics. What a mean is divided by is put right in `step.losses`.

The attributes are set once for all replicas, and ask at each call whose rows these are:
in eager mode replicas take turns wherever they sum something, in the middle of a step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.instance_attributes import instance_attributes
from tfdp._private.keras_models import (
    layers_within,
    loss_trackers,
    losses_added_in,
    mask_of,
    metrics_as_compiled,
)
from tfdp._private.names import current_rank
from tfdp.errors import ConfigurationError
from tfdp.tracing.keras_steps import is_predict_step, is_stock_step, name_of_step
from tfdp.tracing.padded_batch import Padding, find_padded, without_padding
from tfdp.tracing.run import ReplicaRun, trace_of

#: What is known of the rows of the calling replica; None: nothing fills them up.
Find = Callable[[], Padding | None]


@contextlib.contextmanager
def leaves_filling_out(
    model: Any, run: ReplicaRun, made_metrics: Sequence[keras.metrics.Metric]
) -> Iterator[None]:
    """While this lasts, `model` leaves the filling out of its loss and metrics.

    Args:
      model: whose step the replicas of `run` take, on batches that were filled up.
      run: knows by replica which rows are real, once its step has begun.
    """
    if not isinstance(model, keras.Model):
        yield
        return

    def find() -> Padding | None:
        return run.padding_of(current_rank())

    leads: list[tuple[Any, str, Callable]] = [
        (model, "compute_loss", _weighted_loss),
        (model, "compute_metrics", _weighted_metrics),
    ]
    of_whole_loss, of_outputs = loss_trackers(model)
    if of_whole_loss is not None:
        leads.append((of_whole_loss, "update_state", _count_real_rows))
    for tracker in of_outputs:
        leads.append((tracker, "update_state", _count_batches))
    leads += [
        (layer, "call", _leave_filling_out)
        for layer in layers_within(model)
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    metrics = metrics_as_compiled(model)
    if metrics is not None:
        leads.append((metrics, "update_state", _weigh_each_metric))
    leads += [
        (metric, "update_state", without_filling)
        for metric in own_metrics(model, made_metrics)
    ]
    with contextlib.ExitStack() as stack:
        for target, name, lead in leads:
            plain = getattr(target, name)
            led = _where_filled(plain, lead, target, find)
            stack.enter_context(instance_attributes(target, {name: led}))
        yield


def _where_filled(plain: Callable, lead: Callable, target: Any, find: Find) -> Callable:
    """`plain`, led by the calling replica's own padding, if it has one."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        padding = find()
        led = plain if padding is None else lead(plain, padding, target)
        return led(*args, **kwargs)

    return call


def step_without_filling(
    fn: Callable, step: Callable, model: Any, run: ReplicaRun
) -> Callable:
    """`step` for a batch that was filled up, which it gets without its marks.

    Args:
      fn: the user's or Keras' step.
      step: what runs in its place.
      model: whose method it is; None: nobody's.
      run: to note in which rows are real.

    Raises:
      ConfigurationError: when nothing would leave the filling out.
    """
    if not isinstance(model, keras.Model) and not is_predict_step(fn):
        raise ConfigurationError(
            "This batch was filled up to a fixed size, and the step is not a method of "
            "a Keras model, so nothing would leave the filling out. Give batches of "
            "one size (drop_remainder=True) that the replicas divide, which are not "
            "filled up."
        )

    @tf.autograph.experimental.do_not_convert
    def step_on_rows(*args: Any, **kwargs: Any) -> Any:
        batch = find_padded((args, kwargs))
        padding = Padding.of(batch.rows)  # type: ignore[union-attr]
        run.padding[trace_of(current_rank())] = padding
        result = step(*without_padding(args), **without_padding(kwargs))
        _check_step_weighs(fn, padding)
        return result

    return step_on_rows


def _check_step_weighs(step: Any, padding: Padding) -> None:
    """Refuses a model's own step whose loss would count the filling.

    Raises:
      ConfigurationError: when it never called `compute_loss`.
    """
    name = name_of_step(step)
    if not name or is_stock_step(step):
        return
    if not padding.loss_is_weighted:
        raise ConfigurationError(
            f"{name} of {type(step.__self__).__name__} takes its loss without "
            "self.compute_loss(x=x, y=y, y_pred=y_pred), so the rows that fill a short "
            "batch up would count. Call it, or give batches of one size "
            "(drop_remainder=True), which are not filled up."
        )


def _weighted_loss(compute: Callable, padding: Padding, model: Any) -> Callable:
    def compute_loss(
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
        return compute(x=x, y=y, y_pred=y_pred, sample_weight=weights, **options)

    return compute_loss


def _rank_of_values(y_pred: Any) -> int:
    """The rank of the losses that are computed from `y_pred`, as most losses do."""
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


def _weighted_metrics(compute: Callable, padding: Padding, model: Any) -> Callable:
    def compute_metrics(
        x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Any]:
        if sample_weight is not None:
            sample_weight = _times_rows(sample_weight, padding)
        return compute(x, y, y_pred, sample_weight)

    return compute_metrics


def _count_real_rows(update: Callable, padding: Padding, metric: Any) -> Callable:
    """Keras gives a reported loss the weight of all rows of the replica."""

    def update_state(value: Any, sample_weight: Any = None) -> Any:
        if len(value.shape):
            # With reduction="none" the mean is taken here, of rows of filling as well.
            rows = tf.cast(padding.rows, value.dtype)
            count = tf.cast(padding.count, value.dtype)
            value = value * tf.math.divide_no_nan(rows, count)
        return update(value, sample_weight=padding.count)

    return update_state


def _count_batches(update: Callable, padding: Padding, metric: Any) -> Callable:
    """Keras gives the loss of one of several outputs the same weight in each batch.

    It gives it the size of the batch where that is fixed; then batches are not short.
    The losses of single rows (reduction="none") have the same weight each.
    """

    def update_state(value: Any, sample_weight: Any = None) -> Any:
        if len(value.shape):
            return update(value, sample_weight=padding.weights(1))
        return update(value, sample_weight=padding.count / padding.total)

    return update_state


def _leave_filling_out(call: Callable, padding: Padding, layer: Any) -> Callable:
    """Statistics of a batch are those of its real rows."""

    def masked_call(inputs: Any, *args: Any, mask: Any = None, **options: Any) -> Any:
        if inputs.shape[0] == padding.rows:
            real = padding.weights(len(inputs.shape) - 1) > 0
            mask = real if mask is None else tf.logical_and(mask, real)
            mask = tf.broadcast_to(mask, inputs.shape[:-1])
        return call(inputs, *args, mask=mask, **options)

    return masked_call


def _refuse_added_losses(model: Any) -> None:
    """Refuses losses that layers took of their inputs: they count the filling."""
    adding = [layer.name for layer in layers_within(model) if losses_added_in(layer)]
    if adding:
        raise ConfigurationError(
            f"The layer {adding[0]!r} adds a loss of its own (add_loss or an activity "
            "regularizer), in which the rows that fill a short batch up would count. "
            "Give batches of one size (drop_remainder=True), which are not filled up."
        )


def _weigh_each_metric(update: Callable, padding: Padding, metrics: Any) -> Callable:
    def update_state(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if not metrics.built:
            metrics.build(y_true, y_pred)
        with contextlib.ExitStack() as stack:
            for metric in metrics.metrics:
                led = _weigh_rows_of_metric(metric.update_state, padding, metric)
                stack.enter_context(instance_attributes(metric, {"update_state": led}))
            return update(y_true, y_pred, sample_weight)

    return update_state


def _weigh_rows_of_metric(update: Callable, padding: Padding, metric: Any) -> Callable:
    def update_state(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None:
            sample_weight = weigh_rows(metric, y_pred, padding)
        return update(y_true, y_pred, sample_weight=sample_weight)

    return update_state


# Metrics that a model's own step updates, without the rows of filling.
#
# What `compile` was given is led in `step.padding`. A metric that the model has of its
# own may be given anything: what has as many rows as the filled-up batch gets a weight
# of 0 for those of filling; a single number is of the real rows already.


def own_metrics(
    model: keras.Model, made_metrics: Sequence[keras.metrics.Metric]
) -> Iterator[keras.metrics.Metric]:
    """The metrics that a step of `model` may update itself: each once.

    Args:
      model: its own, but for those of its losses and those given to `compile`.
      made_metrics: it may use them without listing them.
    """
    if not getattr(model, "compiled", False):
        return  # before, the list of metrics may fail
    of_whole_loss, of_outputs = loss_trackers(model)
    compiled = metrics_as_compiled(model)
    led = [of_whole_loss, *of_outputs, compiled, *getattr(compiled, "metrics", ())]
    own = {id(metric): metric for metric in [*model.metrics, *made_metrics]}
    yield from (own[key] for key in own.keys() - set(map(id, led)))


def without_filling(update: Callable, padding: Padding, metric: Any) -> Callable:
    """`update`, the `update_state` of an own metric, of real rows only."""
    signature = inspect.signature(type(metric).update_state)

    def update_state(*args: Any, **kwargs: Any) -> Any:
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
                f"The metric {metric.name!r} is given rows of a batch that was filled "
                "up to a fixed size, and takes no sample_weight that would leave the "
                "filling out. Let its update_state take one, give it a number for the "
                "batch, or give batches of one size (drop_remainder=True), which are "
                "not filled up."
            )
        weight = given.get("sample_weight")
        if weight is None:
            weight = weigh_rows(metric, of_rows[-1], padding)
        else:
            weight = tf.convert_to_tensor(weight, dtype=metric.dtype)
            weight = weight * padding.weights(max(1, weight.shape.rank), weight.dtype)
        given["sample_weight"] = weight
        return update(*bound.args[1:], **bound.kwargs)

    return update_state


def weigh_rows(metric: Any, values: Any, padding: Padding) -> tf.Tensor:
    """The weights of what `metric` counts of `values`: 1, and 0 where rows fill up."""
    mask = mask_of(values)
    if mask is not None:
        return tf.ones_like(mask, tf.float32) * padding.weights(len(mask.shape))
    # Means take a weight per row. Others (AUC, Recall) count every entry, and Keras
    # spreads a weight per row along the wrong axis of more than two.
    axes = len(values.shape)
    by_row = isinstance(metric, keras.metrics.Mean) or axes <= 2
    return padding.weights(1 if by_row else axes)


def _has_rows(value: Any, padding: Padding) -> bool:
    shape: Any = getattr(value, "shape", ())
    return len(shape) > 0 and shape[0] == padding.rows
