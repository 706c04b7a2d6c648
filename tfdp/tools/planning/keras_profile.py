"""What the simulator needs to know of a Keras model, as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras


def profile_of(
    network: keras.Model, inputs: Sequence[Any] = (), *, adds_rows: bool | None = None
) -> dict[str, Any]:
    """Each gradient's bytes and the FLOPs behind it, in the order of the variables.

    A kernel counts twice its numbers for each place of the layer's output (all axes but
    the batch and the channels), other variables nothing: exact for dense layers and
    convolutions, too little for recurrent layers, and for attention without its scores.

    Args:
      network: a built model.
      inputs: of a replica's batch, one array for each of the model's inputs: what rows
        of tables it has. Without them tables count as sent whole.
      adds_rows: whether rows of one word are added before they are sent; None: as the
        model's optimizer says.
    """
    import keras

    from tfdp.step.table_rows import sums_repeated_rows, tables_of

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
    """The arrays of a batch that are the model's inputs; none where that is not known.

    Args:
      network: a built model.
      batch: what `fit` is given: inputs, or a tuple that begins with them.
    """
    import keras

    found = keras.tree.flatten(batch[0] if isinstance(batch, tuple) else batch)
    return found if len(found) == len(getattr(network, "inputs", None) or ()) else []


def _work_by_kernel(network: keras.Model) -> dict[int, float]:
    """FLOPs of a sample behind each kernel, by its `id`."""
    from tfdp._private.keras_models import layers_within

    # A layer within another one does not say what it makes: as many places as that.
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
    """How often a kernel acts in a sample; None: it was not called by itself."""
    try:
        shape = layer.output.shape[1:]
    except AttributeError:  # a layer that was called several times, or by hand
        return None
    equation = getattr(layer, "equation", None)
    if equation and "." not in equation:
        # Of an Einsum: the dimensions of the result that the kernel does not have.
        operands, result = equation.split("->")
        kernel = operands.split(",")[1]
        labels = zip(result[1:], shape, strict=True)
        return math.prod(size or 1 for label, size in labels if label not in kernel)
    return math.prod(size or 1 for size in shape[:-1])


def _bytes_of(dtype: str) -> int:
    digits = "".join(sign for sign in dtype if sign.isdigit())
    return max(int(digits or 32) // 8, 1)
