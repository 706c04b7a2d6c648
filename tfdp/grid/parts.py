"""Layers that compute with their member's part of a weight, while replicas are traced.

Each is complete: own rows come in, and own rows with all features go out, whatever
stands between two of them. What Keras' own `call` does beside the product, such as the
activation, is done with own rows and all features.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import put_mask
from tfdp.grid.kinds import InParts
from tfdp.grid.moved_rows import RowMover
from tfdp.seams.replace import Override, around

ops = keras.ops


@dataclasses.dataclass
class PartsInUse:
    """The weights of which a replica reads its part now, by id: along which axis."""

    along: dict[int, str] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def reading_parts(made: InParts, mover: RowMover) -> Iterator[None]:
    """Makes the calling replica read its parts of a layer's weights."""
    in_use = mover.trace.of(PartsInUse)
    before = in_use.along
    ids = (id(weight.value) for weight in made.weights)
    in_use.along = before | dict.fromkeys(ids, made.along)
    try:
        yield
    finally:
        in_use.along = before


def part_overrides(
    found: Sequence[InParts], mover_of: Callable[[str], RowMover | None]
) -> Iterator[Override]:
    """Overrides of the `call` of layers; `mover_of` an axis: None: they gather."""
    for made in found:
        call = CALLS[made.kind]
        yield Override(made.layer, "call", around(_in_parts, call, made, mover_of))


def _in_parts(
    original: Callable,
    call: Callable,
    made: InParts,
    mover_of: Callable[[str], RowMover | None],
    *args: Any,
    **kwargs: Any,
) -> Any:
    mover = mover_of(made.along)
    is_untied = kwargs.get("reverse") and not made.layer.tie_weights
    if mover is None or is_untied or not _has_rows(*args, **kwargs):
        return original(*args, **kwargs)
    return call(made, mover, *args, **kwargs)


def _has_rows(inputs: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the input is dense, and has an axis of rows."""
    is_ragged = isinstance(inputs, (tf.SparseTensor, tf.RaggedTensor))
    return not is_ragged and bool(tf.TensorShape(inputs.shape).rank)


def _column(made: InParts, mover: RowMover, inputs: Any, **kwargs: Any) -> Any:
    layer = made.layer
    rows = mover.gather(tf.convert_to_tensor(inputs))
    with reading_parts(made, mover):
        part = _product(layer, rows.tensor)
        if made.has_own_bias:
            part = ops.add(part, layer.bias)
    axis = made.feature_axis % part.shape.rank
    outputs = mover.to_rows(part, rows, axis)
    return _finished(layer, outputs, has_bias=made.has_own_bias)


def _row(made: InParts, mover: RowMover, inputs: Any, **kwargs: Any) -> Any:
    layer, inputs = made.layer, tf.convert_to_tensor(inputs)
    rows = mover.to_features(inputs, made.feature_axis % inputs.shape.rank)
    with reading_parts(made, mover):
        partial = _product(layer, rows.tensor)
    return _finished(layer, mover.sum_to_owners(partial, rows))


def _product(layer: Any, inputs: tf.Tensor) -> Any:
    if isinstance(layer, keras.layers.EinsumDense):
        return ops.einsum(layer.equation, inputs, layer.kernel)
    return ops.matmul(inputs, layer.kernel)


def _finished(layer: Any, outputs: Any, *, has_bias: bool = False) -> Any:
    if layer.bias is not None and not has_bias:
        outputs = ops.add(outputs, layer.bias)
    return outputs if layer.activation is None else layer.activation(outputs)


def _lookup(made: InParts, mover: RowMover, inputs: Any, reverse: bool = False) -> Any:
    layer = made.layer
    if reverse:
        return _logits(made, mover, tf.convert_to_tensor(inputs))
    rows = mover.gather(_whole_numbers(inputs))
    with reading_parts(made, mover):
        part = ops.convert_to_tensor(layer.embeddings)
    own, vocabulary = part.shape[0], layer.embeddings.shape[0]
    # As Keras' take counts negative ones.
    ids = tf.where(rows.tensor < 0, rows.tensor + vocabulary, rows.tensor)
    here = ids - mover.place * own
    is_here = (here >= 0) & (here < own)
    is_elsewhere = ~is_here & (ids >= 0) & (ids < vocabulary)
    # What is no word at all stays so, for TensorFlow's error.
    found = tf.gather(part, tf.where(is_elsewhere, 0, here))
    found = tf.where(is_here[..., None], found, tf.zeros_like(found))
    outputs = ops.cast(mover.sum_to_owners(found, rows), dtype=layer.compute_dtype)
    if isinstance(layer, keras.layers.ReversibleEmbedding):
        mask = keras.layers.Embedding.compute_mask(layer, inputs)
        if mask is not None:
            put_mask(outputs, mask)
    return outputs


def _whole_numbers(inputs: Any) -> tf.Tensor:
    ids = ops.convert_to_tensor(inputs)
    return ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)


def _logits(made: InParts, mover: RowMover, inputs: tf.Tensor) -> Any:
    """The products with all words: a column by vocabulary."""
    layer = made.layer
    rows = mover.gather(inputs)
    with reading_parts(made, mover):
        kernel = ops.transpose(layer.embeddings)
    features = rows.tensor
    if layer.reverse_dtype is not None:
        features = ops.cast(features, layer.reverse_dtype)
        kernel = ops.cast(kernel, layer.reverse_dtype)
    part = ops.matmul(features, kernel)
    logits = mover.to_rows(part, rows, part.shape.rank - 1)
    cap = layer.logit_soft_cap
    return logits if cap is None else ops.tanh(logits / cap) * cap


CALLS: dict[str, Callable] = {"column": _column, "row": _row, "lookup": _lookup}
