"""Gradient sizes and FLOPs of a Keras model, as plain data for the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras


def profile_of(
    network: keras.Model, inputs: Sequence[Any] = (), *, adds_rows: bool | None = None
) -> dict[str, Any]:
    """Each gradient's bytes and the FLOPs of its layer, in the order of the variables.

    A kernel counts twice its elements per output position (all axes but batch and
    channels), other variables nothing: exact for dense and convolution layers, too
    little for recurrent layers and for attention scores.

    Args:
      inputs: a replica's batch, one array per model input: counts the rows that tables
        send. Without them tables count as sent whole.
      adds_rows: whether equal rows are summed before they are sent; None: as the
        model's optimizer requires.
    """
    import keras

    from tfdp.chain.table_rows import sums_repeated_rows, tables_of

    work = _work_by_kernel(network)
    rows: dict[int, list[Any]] = {}
    if len(inputs):
        if adds_rows is None:
            adds_rows = sums_repeated_rows(network.optimizer)
        rows = {
            id(table.variable): [
                table.sent_bytes_of(inputs, adds_rows),
                bool(adds_rows),
                table.sent_bytes_of(inputs, adds_rows=False),
            ]
            for table in tables_of(network)
        }
    gradients: list[list[Any]] = []
    for variable in network.trainable_variables:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        size_bytes = math.prod(variable.shape) * _bytes_of(dtype)
        gradients.append([size_bytes, work.get(id(variable), 0.0), dtype])
        if id(variable) in rows:
            gradients[-1] += rows[id(variable)]
    return {
        "gradients": gradients,
        "forward_flops_per_sample": sum(each[1] for each in gradients),
    }


def inputs_of(network: keras.Model, batch: Any) -> list[Any]:
    """The arrays of a `fit` batch that are the model's inputs; [] if undetermined."""
    import keras

    found = keras.tree.flatten(batch[0] if isinstance(batch, tuple) else batch)
    return found if len(found) == len(getattr(network, "inputs", None) or ()) else []


def _work_by_kernel(network: keras.Model) -> dict[int, float]:
    """FLOPs of a sample for each kernel, by `id`."""
    from tfdp._private.keras_models import layers_within

    # Inner layers of a composite layer have no output shape: use the outer one's.
    places_around: dict[int, int] = {}
    work: dict[int, float] = {}
    for layer in layers_within(network):
        places = _places_of(layer)
        if places is not None and layer is not network:
            for inner in layers_within(layer):
                places_around[id(inner)] = places
        kernel = getattr(layer, "kernel", None)
        if kernel is None or id(kernel) in work:
            continue
        places = places_around.get(id(layer), 1) if places is None else places
        work[id(kernel)] = 2.0 * math.prod(kernel.shape) * places
    return work


def _places_of(layer: keras.layers.Layer) -> int | None:
    """How often a kernel is applied per sample; None: not called alone."""
    try:
        shape = layer.output.shape[1:]
    except AttributeError:  # called several times, or from another layer
        return None
    equation = getattr(layer, "equation", None)
    if equation and "." not in equation:
        # Einsum: the dimensions of the result that the kernel lacks.
        operands, result = equation.split("->")
        kernel = operands.split(",")[1]
        labels = zip(result[1:], shape, strict=True)
        return math.prod(size or 1 for label, size in labels if label not in kernel)
    return math.prod(size or 1 for size in shape[:-1])


def _bytes_of(dtype: str) -> int:
    digits = "".join(sign for sign in dtype if sign.isdigit())
    return max(int(digits or 32) // 8, 1)
