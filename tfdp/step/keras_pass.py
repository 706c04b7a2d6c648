"""`keras.Model.train_step` in two parts: what one graph can hold, and what follows."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp._private.keras_models import (
    compute_loss,
    loss_trackers,
    mask_of,
    put_mask,
    takes_training,
)
from tfdp._private.names import unscale_loss_for_distribution
from tfdp.step.finite_guard import note_loss

__all__ = ["PassResults", "finish_train_step", "forward_and_backward"]


class PassResults(NamedTuple):
    """What a forward and a backward pass have computed.

    Args:
      loss: of the replica's rows, a scalar.
      predictions: what the model returned.
      masks: those of the predictions, part by part; None where a part has none.
      gradients: one for each trainable weight; None where it has none.
    """

    loss: Any
    predictions: Any
    masks: list[Any]
    gradients: list[Any]


def forward_and_backward(
    model: keras.Model, x: Any, y: Any, sample_weight: Any
) -> PassResults:
    """The first part of `keras.Model.train_step`: it exchanges and updates nothing.

    But for what layers store, and for metrics of the losses of single outputs.
    """
    with tf.GradientTape() as tape:
        training = {"training": True} if takes_training(model) else {}
        y_pred = model(x, **training)
        loss = compute_loss(
            model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
        )
        scaled = model.optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, model.trainable_weights)
    masks = [mask_of(part) for part in tf.nest.flatten(y_pred)]
    return PassResults(loss, y_pred, masks, gradients)


def finish_train_step(model: keras.Model, data: Any, results: PassResults) -> Any:
    """The second part: gradients are reduced and applied, metrics follow.

    Args:
      model: whose step it is.
      data: this replica's batch.
      results: of its forward and backward pass.

    Returns:
      The metrics, as `train_step` does.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    predictions = tf.nest.flatten(results.predictions)
    for part, mask in zip(predictions, results.masks, strict=True):
        if mask is not None:
            put_mask(part, mask)
    note_loss(model, results.loss)
    first = next(part for part in tf.nest.flatten(x) if part is not None)
    loss_trackers(model)[0].update_state(
        unscale_loss_for_distribution(results.loss), sample_weight=tf.shape(first)[0]
    )
    pairs = zip(results.gradients, model.trainable_weights, strict=True)
    model.optimizer.apply_gradients(pairs)
    return model.compute_metrics(x, y, results.predictions, sample_weight=sample_weight)
