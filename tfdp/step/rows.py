"""Keeps what a replica computes from dummy and padding rows out of every result.

`tfdp/tracing/rows.py` says where such rows come from. A replica without rows of its own
adds 0 to a sum over replicas; here Keras' steps become such sums:

    loss           of a dummy row it is 0, and with it its gradients; padding rows have
                   weight 0, and `step.losses` corrects the divisors
    gradients      of a step that computes its loss by itself, or that has synthetic
                   rows: set to 0 when the optimizer gets them
    metrics        padding rows have weight 0 (of dummy rows the variables add 0)
    all_gather     leaves dummy rows out, and refuses padding

State of layers has weight n_r / n = 0 in the mean that is summed with the gradients.
Unlike padding, dummy rows support `add_loss`; static shapes need no extra ops for them.
The overrides look up the calling replica's rows at each call, as eager replicas take
turns within a step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_layers import stored_value
from tfdp._private.keras_models import (
    layers_within,
    loss_trackers,
    losses_added_in,
    mask_of,
    metrics_as_compiled,
)
from tfdp._private.names import current_rank
from tfdp._private.optimizer_hooks import variables_built_with
from tfdp.errors import ConfigurationError
from tfdp.exchange.sparse import with_values
from tfdp.lint.registry import register_exchanged
from tfdp.seams.replace import Override, around, instance_attributes
from tfdp.tracing.keras_steps import (
    as_tensors,
    is_predict_step,
    is_stock_step,
    name_of_step,
)
from tfdp.tracing.rows import (
    DummyRows,
    OwnParts,
    PaddedLoss,
    Rows,
    find_padded,
    without_padding,
)
from tfdp.tracing.state_checks import (
    handles_of,
    has_same_rows,
    is_of_all_replicas,
    linear_sources,
)
from tfdp.tracing.step import Step
from tfdp.tracing.stored_state import LocalState
from tfdp.variables.in_shards import is_shard_of_sum


def dummy_row_overrides(
    fn: Any, optimizers: Sequence[Any], step: Step
) -> Iterator[Override]:
    """Overrides that let a model learn nothing from dummy rows: Keras' own `train_step`
    differentiates the result of `compute_loss`, which is set to 0; for other steps the
    gradients are set to 0 when the optimizer gets them."""
    if not step.has_dummy_rows or not name_of_step(fn):
        return
    for optimizer in optimizers:
        yield Override(optimizer, "apply", around(_apply, optimizer, step))
    step.of(DummyRows).loss_is_own = is_stock_step(fn)
    if is_stock_step(fn):
        yield Override(fn.__self__, "compute_loss", around(_own_loss, step))


def _own_loss(compute: Callable, step: Step, /, *args: Any, **kwargs: Any) -> Any:
    loss = compute(*args, **kwargs)
    return loss if loss is None else step.here.rows.part(loss)


def _apply(
    apply: Callable,
    optimizer: Any,
    step: Step,
    gradients: Sequence[Any],
    trainable_variables: Any = None,
) -> Any:
    if step.is_updating:  # called by another optimizer, with reduced gradients
        return apply(gradients, trainable_variables)
    rank = current_rank()
    of_group = step.trace(rank).of(OwnParts).of_group
    stored = handles_of(step.trace(rank).of(LocalState).variables.values(), rank)
    own = as_tensors(gradients)
    built_with = trainable_variables or variables_built_with(optimizer)
    variables = list(built_with or [None] * len(own))
    for place, (gradient, variable) in enumerate(zip(own, variables, strict=True)):
        if gradient is None or step.is_own_gradient(rank, gradient):
            continue
        if isinstance(variable, keras.Variable):
            if id(stored_value(variable)) in of_group:
                continue
        # Shards of sums were reduced already, without dummy rows.
        if variable is not None and is_shard_of_sum(variable, rank, gradient):
            continue
        # Accumulators of the step hold gradients of earlier, real rows; and what it has
        # summed over replicas itself depends on the rows of all.
        is_of_others = linear_sources(step, rank, [gradient], stored)
        if is_of_others or is_of_all_replicas(step, rank, gradient):
            continue
        part = functools.partial(step.own_gradient, rank)
        is_added_by_place = has_same_rows(gradient, step, rank)
        own[place] = (
            with_values(gradient, part) if is_added_by_place else part(gradient)
        )
    with step.summing_own_parts(rank):
        return apply(own, trainable_variables)


@contextlib.contextmanager
def gathering_real_rows(step: Step) -> Iterator[None]:
    """Makes `all_gather` of a replica, along the first axis, leave dummy rows out
    within the context."""
    context = tf.distribute.get_replica_context()
    gather = functools.partial(_gather, context, step)
    with instance_attributes(context, {"all_gather": gather}):
        yield


def _gather(
    context: Any, step: Step, value: Any, axis: int, options: Any = None
) -> Any:
    original = type(context).all_gather.__get__(context)
    if axis == 0:
        rows = step.here.rows
        _refuse_padding(rows, value)
        value = tf.nest.map_structure(lambda part: _real_rows(rows, part), value)
    gathered = original(value, axis, options)
    return register_exchanged(tf.nest.map_structure(_of_dense_gradient, gathered))


def _of_dense_gradient(gathered: tf.Tensor) -> tf.Tensor:
    """`gathered`; `tf.gather` from it has slices as gradient, which TensorFlow's
    `all_gather` refuses, and those of a reshape are dense."""
    same = tf.reshape(gathered, tf.shape(gathered))
    same.set_shape(gathered.shape)
    return same


def _refuse_padding(rows: Rows, value: Any) -> None:
    for part in tf.nest.flatten(value):
        if rows.is_padded and tf.TensorShape(part.shape)[:1] == [rows.size]:
            raise ConfigurationError(
                "all_gather was called on a tensor with a row for each row of a batch "
                "that was padded to a fixed size (pad_batches): the padding would be "
                "in it. Leave out pad_batches, or give batches of one size "
                "(drop_remainder=True), which are not padded."
            )


def _real_rows(rows: Rows, value: Any) -> Any:
    """`value` without dummy rows, if its length is dynamic, as that of rows is then."""
    has_axis = isinstance(value, tf.Tensor) and value.shape.rank != 0
    if not has_axis or value.shape[0] is not None:
        return value
    return rows.real_rows(value)


def padding_overrides(
    model: Any, step: Step, made_metrics: Sequence[keras.metrics.Metric]
) -> Iterator[Override]:
    """Overrides that exclude padding rows from the loss and metrics of `model`."""
    if not isinstance(model, keras.Model):
        return

    overrides: list[tuple[Any, str, Callable]] = [
        (model, "compute_loss", functools.partial(_compute_loss, step)),
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
        (metric, "update_state", _update_metric)
        for metric in own_metrics(model, made_metrics)
    ]
    for target, name, override in overrides:
        make = functools.partial(_on_padded_batch, override, target, step)
        yield Override(target, name, make)


def _on_padded_batch(
    override: Callable, target: Any, step: Step, plain: Callable
) -> Callable:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        rows = step.here.rows
        if not rows.is_padded:
            return plain(*args, **kwargs)
        return override(plain, rows, target, *args, **kwargs)

    return call


def step_on_padded_batch(
    fn: Callable, replica_fn: Callable, model: Any, step: Step
) -> Callable:
    """Wraps `replica_fn`, which runs instead of `fn`, for a padded batch."""
    if not isinstance(model, keras.Model) and not is_predict_step(fn):
        raise ConfigurationError(
            "This batch was padded to a fixed size, and the step is not a method of "
            "a Keras model, so nothing would exclude the padding. Give batches of one "
            "size (drop_remainder=True) that the replicas divide: they are not padded."
        )

    @tf.autograph.experimental.do_not_convert
    def step_on_rows(*args: Any, **kwargs: Any) -> Any:
        batch = find_padded((args, kwargs))
        step.here.rows = Rows.of_padded(batch.rows)  # type: ignore[union-attr]
        result = replica_fn(*without_padding(args), **without_padding(kwargs))
        is_own = name_of_step(fn) and not is_stock_step(fn)
        if is_own and not step.here.of(PaddedLoss).loss_is_weighted:
            raise ConfigurationError(
                f"{name_of_step(fn)} of {type(model).__name__} takes its loss without "
                "self.compute_loss(x=x, y=y, y_pred=y_pred), so padding rows of a "
                "short batch would count. Call it, or give batches of one size "
                "(drop_remainder=True), which are not padded."
            )
        return result

    return step_on_rows


def _compute_loss(
    step: Step,
    compute: Callable,
    rows: Rows,
    model: Any,
    /,
    x: Any = None,
    y: Any = None,
    y_pred: Any = None,
    sample_weight: Any = None,
    **options: Any,
) -> Any:
    own = step.here.of(PaddedLoss)
    own.has_user_weights = sample_weight is not None
    own.loss_is_weighted = True
    _refuse_added_losses(model)
    if sample_weight is None:
        weights = keras.tree.map_structure(
            lambda leaf: rows.weights(_rank_of_values(leaf)), y_pred
        )
    else:
        weights = _times_rows(sample_weight, rows)
    loss = compute(x=x, y=y, y_pred=y_pred, sample_weight=weights, **options)
    if loss is None or not _has_rows(loss, rows):
        return loss
    # With reduction="none" Keras adds other outputs' means to the loss of each row.
    return loss * rows.weights(loss.shape.rank, loss.dtype)


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


def _times_rows(sample_weight: Any, rows: Rows) -> Any:
    def product(weight: Any) -> Any:
        if weight is None:
            return rows.weights(1)
        weight = tf.convert_to_tensor(weight)
        if not weight.dtype.is_floating:
            weight = tf.cast(weight, tf.float32)
        return weight * rows.weights(weight.shape.rank, weight.dtype)

    return keras.tree.map_structure(product, sample_weight)


def _compute_metrics(
    compute: Callable,
    rows: Rows,
    model: Any,
    x: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any = None,
) -> dict[str, Any]:
    if sample_weight is not None:
        sample_weight = _times_rows(sample_weight, rows)
    return compute(x, y, y_pred, sample_weight)


def _update_loss_tracker(
    update: Callable, rows: Rows, metric: Any, value: Any, sample_weight: Any = 0
) -> Any:
    """Otherwise Keras weights a reported loss by all rows of the replica."""
    if len(value.shape):
        # With reduction="none" the mean over all rows, padded ones too, is next.
        size = tf.cast(rows.size, value.dtype)
        count = tf.cast(rows.count, value.dtype)
        value = value * tf.math.divide_no_nan(size, count)
    return update(value, sample_weight=rows.count)


def _update_output_tracker(
    update: Callable, rows: Rows, metric: Any, value: Any, sample_weight: Any = 0
) -> Any:
    # Keras weights the loss of one of several outputs equally in each batch. (By the
    # size of the batch if that is static; then no batch is short.)
    is_of_rows = len(value.shape)  # reduction="none": equal weights
    weights = rows.weights(1) if is_of_rows else rows.count / rows.total
    return update(value, sample_weight=weights)


def _call_normalization(
    call: Callable,
    rows: Rows,
    layer: Any,
    /,
    inputs: Any,
    *args: Any,
    mask: Any = None,
    **options: Any,
) -> Any:
    """Excludes padding from the statistics of a batch."""
    if inputs.shape[0] == rows.size:
        real = rows.weights(len(inputs.shape) - 1) > 0
        mask = real if mask is None else tf.logical_and(mask, real)
        mask = tf.broadcast_to(mask, inputs.shape[:-1])
    return call(inputs, *args, mask=mask, **options)


def _update_compiled_metrics(
    update: Callable,
    rows: Rows,
    metrics: Any,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any = None,
) -> Any:
    if not metrics.built:
        metrics.build(y_true, y_pred)
    with contextlib.ExitStack() as stack:
        for metric in metrics.metrics:
            own = functools.partial(_update_metric, metric.update_state, rows, metric)
            stack.enter_context(instance_attributes(metric, {"update_state": own}))
        return update(y_true, y_pred, sample_weight)


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


def _update_metric(
    update: Callable, rows: Rows, metric: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Gives padding rows weight 0; single numbers are of real rows already."""
    signature = inspect.signature(type(metric).update_state)
    bound = signature.bind(metric, *args, **kwargs)
    given = bound.arguments
    of_rows = [
        value
        for name, value in given.items()
        if name != "sample_weight" and _has_rows(value, rows)
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
        weight = weigh_rows(metric, of_rows[-1], rows)
    else:
        weight = tf.cast(weight, metric.dtype)
        weight = weight * rows.weights(max(1, weight.shape.rank), weight.dtype)
    given["sample_weight"] = weight
    return update(*bound.args[1:], **bound.kwargs)


def weigh_rows(metric: Any, values: Any, rows: Rows) -> tf.Tensor:
    """Weights for `values` in `metric`: 1, and 0 for padding rows."""
    mask = mask_of(values)
    if mask is not None:
        return tf.ones_like(mask, tf.float32) * rows.weights(len(mask.shape))
    # Means take a weight per row. Others (AUC, Recall) count every entry, and Keras
    # broadcasts a weight per row along the wrong axis for rank 3 and above.
    axes = len(values.shape)
    by_row = isinstance(metric, keras.metrics.Mean) or axes <= 2
    return rows.weights(1 if by_row else axes)


def _has_rows(value: Any, rows: Rows) -> bool:
    shape: Any = getattr(value, "shape", ())
    return len(shape) > 0 and shape[0] == rows.size
