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

from tfdp.step.keras_pass import PassResults, finish_train_step, forward_and_backward

__all__ = ["jitted_train_step", "take_over_jit"]


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
        return tuple(forward_and_backward(model, x, y, sample_weight))

    return finish_train_step(model, data, PassResults(*compute(*batch)))
