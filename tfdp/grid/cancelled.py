"""Which exchanges cancel: a column's outputs that only rows read may stay in parts.

A column sends its features to the owners of rows, and a row layer takes them back. The
two cancel if everything between treats the features entry by entry. That is proved on
the ops of a trace of the model with whole weights, which never runs
(`tfdp.lint.entrywise`). An unknown op, another reader, a model's output: nothing
cancels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_layers import projections_of
from tfdp._private.keras_models import layers_within
from tfdp.grid.kinds import InParts
from tfdp.grid.parts import product
from tfdp.lint.entrywise import Entrywise, Features, origin_of
from tfdp.seams.replace import Override, around, overridden

#: Methods of a model that a step of Keras' calls beside the model itself.
READ = ("compute_loss", "_compute_loss", "compute_metrics")


def rows_behind(
    model: keras.Model,
    found: Sequence[InParts],
    inputs: Any,
    training: bool,
    may_draw: bool = True,
) -> dict[int, tuple[Any, ...]]:
    """The row layers that read a column's parts, by the id of each that cancels.

    `inputs`: the specs of the model's inputs, for any number of rows: what a model
    computes from that number must not look like a constant; nor may the number of a
    column's features, of which a member has a part. `may_draw`: see `Entrywise`.
    """
    kind = type(model)
    if any(getattr(kind, name) is not getattr(keras.Model, name) for name in READ):
        return {}  # it may read features, or call layers, where no trace sees it
    trace = functools.partial(
        _traced, model, inputs=inputs, training=training, may_draw=may_draw
    )
    try:
        return trace(found)
    except Exception:
        # Some layers, such as LayerNormalization, need to know how many features they
        # get. None of them treats entries one by one.
        likely = trace(found, hides=False)
    try:
        return trace([o for o in found if o.kind != "column" or id(o.layer) in likely])
    except Exception:
        return {}  # a program computes with the number of features


def _traced(
    model: keras.Model,
    found: Sequence[InParts],
    inputs: Any,
    training: bool,
    may_draw: bool,
    hides: bool = True,
) -> dict[int, tuple[Any, ...]]:
    """`rows_behind` by one trace; `hides`: the number of features is unknown in it."""
    # Within an attention by heads the exchanges have cancelled.
    heads = [one.layer for one in found if one.kind == "heads"]
    within = {id(layer) for one in heads for layer in projections_of(one)}
    columns, rows = (
        {id(o.layer): o for o in found if o.kind == kind and id(o.layer) not in within}
        for kind in ("column", "row")
    )
    given, made, taken = _Noted(), _Noted(), _Noted()
    overrides = [
        *(_noting(_noting_column, o, made, given, hides) for o in columns.values()),
        *(_noting(_noting_row, one, taken) for one in rows.values()),
    ]
    # Outside of replicas and their graph: it is traced, and thrown away.
    with tf.init_scope(), overridden(overrides):
        traced = tf.function(lambda x: model(x, training=training), autograph=False)
        graph = traced.get_concrete_function(inputs).graph
    rows_of = {key: origin_of(tensor) for key, tensor in given.once(graph).items()}
    sources = {
        tensor.name: Features(columns[key].feature_axis, frozenset([key]))
        for key, tensor in made.once(graph).items()
        if rows_of[key].shape[0] is None  # else it is no batch of rows
    }
    ends = {tensor.name: key for key, tensor in taken.once(graph).items()}
    walk = Entrywise(graph, sources, ends, may_draw)
    reached = {ends[name]: features for name, features in walk.reached.items()}
    for key, features in reached.items():
        alongs = {columns[column].along for column in features.sources}
        is_axis = features.axis == rows[key].feature_axis
        # Columns of other tensors may have other rows.
        origins = {rows_of[column].name for column in features.sources}
        is_wrong = features.is_shape or not is_axis or len(origins) > 1
        if is_wrong or alongs != {rows[key].along}:
            walk.lost |= features.sources
    walk.lost |= walk.sources_of(_kept(model, graph))
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


def _kept(model: keras.Model, graph: Any) -> Iterator[str]:
    """The names of tensors that layers have kept, for a loss or a callback to read."""
    for layer in layers_within(model):
        for value in _leaves([*vars(layer).values()]):
            if isinstance(value, tf.Tensor) and getattr(value, "graph", None) is graph:
                yield value.name


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


class _Noted(dict[int, list[tf.Tensor]]):
    """The tensors that layers made, or took, by the layer's id."""

    def note(self, layer: Any, tensor: tf.Tensor) -> tf.Tensor:
        self.setdefault(id(layer), []).append(tensor)
        return tensor

    def once(self, graph: Any) -> dict[int, tf.Tensor]:
        """The tensors of layers that `graph` itself calls once."""
        return {
            key: tensors[0]
            for key, tensors in self.items()
            if len(tensors) == 1 and tensors[0].graph is graph
        }


def _noting(call: Callable, one: InParts, *how: Any) -> Override:
    return Override(one.layer, "call", around(call, one, *how))


def _noting_column(
    original: Callable,
    one: InParts,
    noted: _Noted,
    given: _Noted,
    hides: bool,
    inputs: Any,
    **kwargs: Any,
) -> Any:
    layer = one.layer
    outputs = product(layer, given.note(layer, inputs))
    if layer.bias is not None:
        outputs = keras.ops.add(outputs, layer.bias)
    # The activation belongs to what is proved.
    shape = outputs.shape.as_list()
    if hides:
        shape[one.feature_axis] = None
    outputs = tf.raw_ops.PlaceholderWithDefault(input=outputs, shape=shape)
    noted.note(layer, outputs)
    return outputs if layer.activation is None else layer.activation(outputs)


def _noting_row(
    original: Callable, one: InParts, noted: _Noted, inputs: Any, **kwargs: Any
) -> Any:
    return original(noted.note(one.layer, tf.identity(inputs)), **kwargs)
