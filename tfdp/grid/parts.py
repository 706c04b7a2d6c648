"""Layers that compute with their member's part of a weight, while replicas are traced.

Each is complete: own rows come in, and own rows with all features go out, whatever
stands between two of them. What Keras' own `call` does beside the product, such as the
activation, is done with own rows and all features.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_layers import INPUT_SPEC, projections_of, stored_value
from tfdp._private.keras_models import mask_of, put_mask, take_mask
from tfdp.errors import SeamError
from tfdp.grid.kinds import InParts
from tfdp.grid.moved_rows import RowMover, RowsOfGroup
from tfdp.seams.replace import Override, around, instead
from tfdp.seams.table import checked_versions
from tfdp.tracing.rows import OwnParts

ops = keras.ops


#: The arguments of an attention with an entry for each row.
MASKS = ("query_mask", "value_mask", "key_mask", "attention_mask")


@dataclasses.dataclass
class PartsInUse:
    """The weights of which a replica reads its part now.

    Args:
      along: by the ids of variables: the axis of the mesh.
      read: the ids of those that were read.
    """

    along: dict[int, str] = dataclasses.field(default_factory=dict)
    read: set[int] = dataclasses.field(default_factory=set)


@contextlib.contextmanager
def reading_parts(made: InParts, mover: RowMover) -> Iterator[None]:
    """Makes the calling replica read its parts of a layer's weights."""
    in_use = mover.trace.of(PartsInUse)
    before, in_use.read = in_use.along, set()
    ids = {id(stored_value(weight)) for weight in made.weights}
    in_use.along = before | dict.fromkeys(ids, made.along)
    try:
        yield
    finally:
        in_use.along = before
    if in_use.read != ids:  # else it would compute with the whole
        raise SeamError(
            f"{made.layer.name!r} computes with parts of its weights (layout=), and "
            f"Keras read others. {checked_versions()}"
        )


@dataclasses.dataclass
class OpenRegions:
    """Layers between which rows stay with the group, by id: the rows they compute on.

    A column in a region gets the rows of all, and leaves its part there; a row gets
    parts. A region is for the calls that were proved: a later one is complete again.

    Args:
      rows: those of each layer.
      behind: by the id of a column that begins a region: the row layers that end it.
    """

    rows: dict[int, RowsOfGroup] = dataclasses.field(default_factory=dict)
    behind: dict[int, Sequence[Any]] = dataclasses.field(default_factory=dict)


def part_overrides(
    found: Sequence[InParts],
    behind: Mapping[int, Sequence[Any]],
    mover_of: Callable[[str], RowMover | None],
) -> Iterator[Override]:
    """Overrides of the `call` of layers; `mover_of` an axis: None: they gather.

    `behind`: see `OpenRegions`.
    """
    for made in found:
        yield Override(made.layer, "call", around(_in_parts, made, mover_of))
    for rows in behind.values():
        for layer in rows:
            # Keras would check the number of features, and they are a part.
            yield Override(layer, INPUT_SPEC, instead(None))


def _in_parts(
    original: Callable,
    made: InParts,
    mover_of: Callable[[str], RowMover | None],
    *args: Any,
    **kwargs: Any,
) -> Any:
    mover = mover_of(made.along)
    is_untied = kwargs.get("reverse") and not made.layer.tie_weights
    has_scores = kwargs.get("return_attention_scores")
    if mover is None or is_untied or has_scores or not _has_rows(*args):
        return original(*args, **kwargs)
    return CALLS[made.kind](original, made, mover, *args, **kwargs)


def _has_rows(*inputs: Any) -> bool:
    """Whether the inputs are dense, and have an axis of rows."""
    return all(
        tf.is_tensor(one)
        and not isinstance(one, (tf.SparseTensor, tf.RaggedTensor))
        and bool(one.shape.rank)
        for one in inputs
        if one is not None
    )


def _column(
    original: Callable, made: InParts, mover: RowMover, inputs: Any, **kwargs: Any
) -> Any:
    layer = made.layer
    regions = mover.trace.of(OpenRegions)
    is_open = id(layer) in regions.rows
    rows = None if is_open else mover.gather(inputs)
    with reading_parts(made, mover):
        part = product(layer, inputs if rows is None else rows.tensor)
        if made.has_own_bias:
            part = ops.add(part, layer.bias)
    ending = regions.behind.pop(id(layer), None)
    if rows is not None and ending is not None:
        regions.rows.update((id(row), rows) for row in ending)
        is_open = True
    if rows is None or is_open:
        if layer.bias is not None and not made.has_own_bias:
            part = ops.add(part, _part_of(layer.bias, made.bias_axis, mover))
        return part if layer.activation is None else layer.activation(part)
    outputs = mover.to_rows(part, rows, made.feature_axis)
    return _finished(layer, outputs, has_bias=made.has_own_bias)


def _part_of(bias: Any, axis: int | None, mover: RowMover) -> Any:
    """The member's part of a whole bias, as a tensor: others' elements get gradient 0,
    and the plain sum over all replicas is right."""
    # Each member's gradient is for the rows of all: also that of one without rows.
    mover.trace.of(OwnParts).of_group.add(id(stored_value(bias)))
    whole = ops.convert_to_tensor(bias)
    if axis is None:
        return whole
    begin, size = [0] * whole.shape.rank, list(whole.shape)
    size[axis] = whole.shape[axis] // mover.members
    begin[axis] = mover.place * size[axis]
    return tf.slice(whole, begin, size)


def _row(
    original: Callable, made: InParts, mover: RowMover, inputs: Any, **kwargs: Any
) -> Any:
    layer = made.layer
    rows = mover.trace.of(OpenRegions).rows.pop(id(layer), None)
    if rows is None:
        rows = mover.to_features(inputs, made.feature_axis)
        inputs = rows.tensor
    with reading_parts(made, mover):
        partial = product(layer, inputs)
    return _finished(layer, mover.sum_to_owners(partial, rows))


def _heads(
    original: Callable,
    made: InParts,
    mover: RowMover,
    query: Any,
    value: Any,
    key: Any = None,
    *more: Any,
    **kwargs: Any,
) -> Any:
    """Keras' own call, with the rows of all members and the heads of one."""
    masks = {name: kwargs[name] for name in MASKS if kwargs.get(name) is not None}
    if more or not _are_of_rows(masks, query):
        return original(query, value, key, *more, **kwargs)
    # A MultiHeadAttention takes the masks off its inputs, and hands one on.
    takes_masks = isinstance(made.layer, keras.layers.MultiHeadAttention)
    own_mask = mask_of(query) if takes_masks else None
    rows, others = mover.gather(query), [mover.gather(value).tensor]
    if key is not None:
        others.append(mover.gather(key).tensor)
    for one in (query, value, key) if takes_masks else ():
        if one is not None:
            take_mask(one)
    if own_mask is not None:
        put_mask(rows.tensor, mover.gather(own_mask).tensor)
    of_all = {name: mover.gather(mask).tensor for name, mask in masks.items()}
    open_rows = mover.trace.of(OpenRegions).rows
    ids = [id(layer) for layer in projections_of(made.layer)]
    open_rows.update(dict.fromkeys(ids, rows))
    try:
        outputs = original(rows.tensor, *others, **kwargs | of_all)
    finally:
        for each in ids:
            open_rows.pop(each, None)
    if own_mask is not None:
        put_mask(outputs, own_mask)  # instead of that of the group's rows
    return outputs


def _are_of_rows(masks: Mapping[str, Any], query: Any) -> bool:
    """Whether each mask has an entry for each row of `query`, and none for heads.

    Keras also broadcasts masks for all rows ([T, S] or [1, T, S]) or for each head
    ([B, N, T, S]): then each projection computes alone.
    """
    ranks = dict.fromkeys(MASKS, 2) | {"attention_mask": 3}
    return not masks or all(
        _has_rows(mask)
        and query.shape.rank == 3
        and mask.shape.rank == ranks[name]
        and (mask.shape[0] != 1 or query.shape[0] == 1)
        for name, mask in masks.items()
    )


def product(layer: Any, inputs: tf.Tensor) -> Any:
    """The product of inputs and a layer's kernel, or the part of it that is read."""
    if isinstance(layer, keras.layers.EinsumDense):
        return ops.einsum(layer.equation, inputs, layer.kernel)
    return ops.matmul(inputs, layer.kernel)


def _finished(layer: Any, outputs: Any, *, has_bias: bool = False) -> Any:
    if layer.bias is not None and not has_bias:
        outputs = ops.add(outputs, layer.bias)
    return outputs if layer.activation is None else layer.activation(outputs)


def _lookup(
    original: Callable,
    made: InParts,
    mover: RowMover,
    inputs: Any,
    reverse: bool = False,
) -> Any:
    layer = made.layer
    if reverse:
        return _logits(made, mover, inputs)
    rows = mover.gather(_whole_numbers(inputs))
    with reading_parts(made, mover):
        part = tf.convert_to_tensor(layer.embeddings.value)  # reads it here
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
    logits = mover.to_rows(part, rows, -1)
    cap = layer.logit_soft_cap
    return logits if cap is None else ops.tanh(logits / cap) * cap


CALLS: dict[str, Callable] = {
    "column": _column,
    "row": _row,
    "lookup": _lookup,
    "heads": _heads,
}
