"""`jit_compile=True`: XLA compiles what each replica computes; exchanges stay outside.

Keras compiles the step of all replicas as one program, which XLA refuses: a program may
not reach into another device's variables. Here each replica's forward and backward pass
is one compiled function on its own device; the reduction of its gradients, the update
and the metrics follow outside.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import compute_loss, loss_trackers, takes_training
from tfdp._private.names import unscale_loss_for_distribution
from tfdp.step.finite_guard import note_loss

__all__ = ["is_stock_train_step", "jitted_train_step", "take_over_jit"]


def take_over_jit(model: keras.Model) -> bool:
    """Tells Keras not to compile the whole step; True if it was about to."""
    if not model.jit_compile:
        return False
    model.jit_compile = False
    return True


def is_stock_train_step(step: Any) -> bool:
    """Whether `step` is `keras.Model.train_step`, bound to a model."""
    return getattr(step, "__func__", None) is keras.Model.train_step


def jitted_train_step(model: keras.Model, data: Any) -> dict[str, Any]:
    """`keras.Model.train_step`, with its compute in one XLA function.

    Args:
      model: a compiled model with a stock `train_step`.
      data: this replica's batch.

    Returns:
      The metrics, as `train_step` does.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    variables = model.trainable_weights

    @tf.function(jit_compile=True, autograph=False)
    def compute(x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        with tf.GradientTape() as tape:
            training = {"training": True} if takes_training(model) else {}
            y_pred = model(x, **training)
            loss = compute_loss(
                model,
                x=x,
                y=y,
                y_pred=y_pred,
                sample_weight=sample_weight,
                training=True,
            )
            scaled = model.optimizer.scale_loss(loss)
        return loss, y_pred, tape.gradient(scaled, variables)

    loss, y_pred, gradients = compute(x, y, sample_weight)
    note_loss(model, loss)
    first = next(part for part in tf.nest.flatten(x) if part is not None)
    loss_trackers(model)[0].update_state(
        unscale_loss_for_distribution(loss), sample_weight=tf.shape(first)[0]
    )
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
