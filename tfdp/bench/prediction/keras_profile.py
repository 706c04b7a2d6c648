"""What the simulator needs to know of a Keras model, as plain data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

__all__ = ["profile_of"]


def profile_of(network: keras.Model) -> dict[str, Any]:
    """Bytes of each gradient with the FLOPs behind it, in the order of the variables.

    A kernel counts twice its numbers for each place of the layer's output (all axes but
    the batch and the channels), other variables nothing: exact for dense layers and
    convolutions, too little for attention and recurrent layers.

    Args:
      network: a built model.
    """
    import keras

    from tfdp._private.keras_models import layers_within

    work: dict[int, float] = {}
    for layer in layers_within(network):
        kernel = getattr(layer, "kernel", None)
        if kernel is None or id(kernel) in work:
            continue
        try:
            places = math.prod(size or 1 for size in layer.output.shape[1:-1])
        except AttributeError:  # a layer that was called several times, or by hand
            places = 1
        work[id(kernel)] = 2.0 * math.prod(kernel.shape) * places
    gradients = []
    for variable in network.trainable_variables:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        size_bytes = math.prod(variable.shape) * _bytes_of(dtype)
        gradients.append([size_bytes, work.get(id(variable), 0.0), dtype])
    return {
        "gradients": gradients,
        "forward_flops_per_sample": sum(each[1] for each in gradients),
    }


def _bytes_of(dtype: str) -> int:
    digits = "".join(sign for sign in dtype if sign.isdigit())
    return max(int(digits or 32) // 8, 1)
