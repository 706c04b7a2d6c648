"""`jit_compile=True`: XLA compiles what each replica computes; exchanges stay outside.

Keras compiles the step of all replicas as one program, which XLA refuses: a program may
not reach into another device's variables. Here each replica's forward and backward pass
is one compiled function on its own device; the reduction of its gradients, the update
and the metrics follow outside.
"""

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


def take_over_jit(model: keras.Model) -> bool:
    """Tells Keras not to compile the whole step; True if it was about to."""
    if not model.jit_compile:
        return False
    model.jit_compile = False
    return True


def jitted_train_step(model: keras.Model, data: Any) -> dict[str, Any]:
    """`keras.Model.train_step`, with its compute in one XLA function.

    Args:
      model: a compiled model with a stock `train_step`.
      data: this replica's batch.

    Returns:
      The metrics, as `train_step` does.
    """
    batch = keras.utils.unpack_x_y_sample_weight(data)

    @tf.function(jit_compile=True, autograph=False)
    def compute(x: Any, y: Any, sample_weight: Any) -> tuple[Any, ...]:
        return tuple(_forward_and_backward(model, x, y, sample_weight))

    return _finish_train_step(model, data, _PassResults(*compute(*batch)))


class _PassResults(NamedTuple):
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


def _forward_and_backward(
    model: keras.Model, x: Any, y: Any, sample_weight: Any
) -> _PassResults:
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
    return _PassResults(loss, y_pred, masks, gradients)


def _finish_train_step(model: keras.Model, data: Any, results: _PassResults) -> Any:
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
