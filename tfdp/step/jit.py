"""`jit_compile=True`: XLA compiles each replica's computation, without exchanges.

Keras compiles the step of all replicas as one program, which XLA refuses, because it
uses variables of several devices. Here each replica's forward and backward pass is one
compiled function on its device; reduction, update and metrics follow outside.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import (
    compute_loss,
    loss_trackers,
    mask_of,
    put_mask,
    takes_training,
)
from tfdp._private.names import keras_losses
from tfdp.tracing.step import current_step


def jitted_train_step(model: keras.Model, data: Any) -> dict[str, Any]:
    """`keras.Model.train_step`, with its computation in one XLA function."""

    @tf.function(jit_compile=True, autograph=False)
    def compute(x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, list, list]:
        """Updates only buffers of layers, and metrics of single outputs' losses."""
        with tf.GradientTape() as tape:
            training = {"training": True} if takes_training(model) else {}
            y_pred = model(x, **training)
            weighted = {"y_pred": y_pred, "sample_weight": sample_weight}
            loss = compute_loss(model, x=x, y=y, **weighted, training=True)
            scaled = model.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_weights)
        masks = [mask_of(part) for part in tf.nest.flatten(y_pred)]
        return loss, y_pred, masks, gradients

    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    loss, y_pred, masks, gradients = compute(x, y, sample_weight)
    for part, mask in zip(tf.nest.flatten(y_pred), masks, strict=True):
        if mask is not None:
            put_mask(part, mask)
    found = current_step()
    guard = None if found is None else found[0].guard
    if guard is not None and guard.model is model:
        guard.note_loss(loss)
    first = next(part for part in tf.nest.flatten(x) if part is not None)
    loss_trackers(model)[0].update_state(
        keras_losses.unscale_loss_for_distribution(loss),
        sample_weight=tf.shape(first)[0],
    )
    model.optimizer.apply_gradients(
        zip(gradients, model.trainable_weights, strict=True)
    )
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
