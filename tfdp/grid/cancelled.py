"""Which exchanges cancel: a column's outputs that only rows read may stay in parts.

A column sends its features to the owners of rows, and a row layer takes them back. The
two cancel if everything between treats the features entry by entry. That is proved on
the ops of a trace of the model with whole weights, which never runs
(`tfdp.lint.entrywise`). An unknown op, another reader, a model's output: nothing
cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_layers import projections_of
from tfdp.grid.kinds import InParts
from tfdp.grid.parts import product
from tfdp.lint.entrywise import Entrywise, Features
from tfdp.seams.replace import Override, around, overridden


def rows_behind(
    model: keras.Model, found: Sequence[InParts], inputs: Any, training: bool
) -> dict[int, tuple[Any, ...]]:
    """The row layers that read a column's parts, by the id of each that cancels.

    `inputs`: the specs of the model's inputs, for any number of rows: what a model
    computes from that number must not look like a constant.
    """
    # Within an attention by heads the exchanges have cancelled.
    heads = [one.layer for one in found if one.kind == "heads"]
    within = {id(layer) for one in heads for layer in projections_of(one)}
    columns, rows = (
        {id(o.layer): o for o in found if o.kind == kind and id(o.layer) not in within}
        for kind in ("column", "row")
    )
    made, taken = _Noted(), _Noted()
    overrides = [
        *(_noting(_noting_column, one, made) for one in columns.values()),
        *(_noting(_noting_row, one, taken) for one in rows.values()),
    ]
    # Outside of replicas and their graph: it is traced, and thrown away.
    with tf.init_scope(), overridden(overrides):
        traced = tf.function(lambda x: model(x, training=training), autograph=False)
        graph = traced.get_concrete_function(inputs).graph
    sources = {
        tensor.name: Features(columns[key].feature_axis, frozenset([key]))
        for key, tensor in made.once(graph).items()
    }
    ends = {tensor.name: key for key, tensor in taken.once(graph).items()}
    walk = Entrywise(graph, sources, ends)
    reached = {ends[name]: features for name, features in walk.reached.items()}
    for key, features in reached.items():
        alongs = {columns[column].along for column in features.sources}
        is_axis = features.axis == rows[key].feature_axis
        if features.is_shape or not is_axis or alongs != {rows[key].along}:
            walk.lost |= features.sources
    _lose_together(walk.lost, [one.sources for one in reached.values()])
    behind: dict[int, tuple[Any, ...]] = {}
    for key, features in reached.items():
        for column in features.sources - walk.lost:
            behind[column] = (*behind.get(column, ()), rows[key].layer)
    return behind


def _lose_together(lost: set[int], groups: Sequence[frozenset[int]]) -> None:
    """Adds to `lost` all columns that one row layer reads together with a lost one."""
    for _ in groups:
        for group in groups:
            if group & lost:
                lost |= group


class _Noted(dict[int, list[tf.Tensor]]):
    """The tensors that layers made, or took, by the layer's id."""

    def note(self, layer: Any, tensor: tf.Tensor) -> tf.Tensor:
        marked = tf.identity(tensor)
        self.setdefault(id(layer), []).append(marked)
        return marked

    def once(self, graph: Any) -> dict[int, tf.Tensor]:
        """The tensors of layers that `graph` itself calls once."""
        return {
            key: tensors[0]
            for key, tensors in self.items()
            if len(tensors) == 1 and tensors[0].graph is graph
        }


def _noting(call: Callable, one: InParts, noted: _Noted) -> Override:
    return Override(one.layer, "call", around(call, one, noted))


def _noting_column(
    original: Callable, one: InParts, noted: _Noted, inputs: Any, **kwargs: Any
) -> Any:
    layer = one.layer
    outputs = product(layer, inputs)
    if layer.bias is not None:
        outputs = keras.ops.add(outputs, layer.bias)
    # The activation belongs to what is proved.
    outputs = noted.note(layer, outputs)
    return outputs if layer.activation is None else layer.activation(outputs)


def _noting_row(
    original: Callable, one: InParts, noted: _Noted, inputs: Any, **kwargs: Any
) -> Any:
    return original(noted.note(one.layer, inputs), **kwargs)
