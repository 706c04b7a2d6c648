"""Metrics that a model's own step updates, without the rows of filling.

What `compile` was given is led in `step.padding`. A metric that the model has of its
own may be given anything: what has as many rows as the filled-up batch gets a weight of
0 for those of filling; a single number is of the real rows already.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import loss_trackers, mask_of, metrics_as_compiled
from tfdp.errors import ConfigurationError
from tfdp.tracing.padded_batch import Padding

__all__ = ["own_metrics", "weigh_rows", "without_filling"]


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
