"""Rules of ops that move entries: which axis the rows are, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.lint.node import COUNTS, Node, static_axes
from tfdp.lint.values import (
    CHOSEN,
    CONSTANT,
    FIXED,
    JOINED,
    NUMBERED,
    PAIRED,
    PLAIN,
    REPLICATED,
    SELECTED,
    UNLIKE,
    VARIABLE,
    Term,
    Value,
    added,
    applied,
    dependencies,
    reads_of,
    unknown,
)


def shape_of(node: Node) -> Value:
    """Shape: the number of rows is the entry that `order` names."""
    value = node.values[0]
    if Term.UNKNOWN in value.terms or len(value.axes) > 1:
        return Value(terms=frozenset({Term.COUNT}), power=None, local=COUNTS)
    if not value.axes:
        return REPLICATED
    order = ("shape", value.axes[0])
    if value.each == SELECTED:  # how many were selected is a sum over rows
        local = frozenset({"rows", "counts"})
        return Value(terms=frozenset({Term.SUM}), order=order, local=local)
    power = 1 if value.each == FIXED else None
    count = Value(frozenset({Term.COUNT}), order=order, power=power, local=COUNTS)
    return count.but(per_row=value.per_row)


def shapes_of(node: Node) -> list[Value]:
    """ShapeN: the shape of each input."""
    return [shape_of(Node(node.op, [value], node.rows)) for value in node.values]


def size_of(node: Node) -> Value:
    """Size: the number of entries."""
    return shape_of(node).but(order=None)


def reordered(node: Node) -> Value:
    """Reversed, rolled or shuffled along axes."""
    value, rank = node.values[0], node.rank(0)
    if not value.axes:
        return value
    if node.op.type == "RandomShuffle":
        axes: set[int] | None = {0}
    else:
        place = {"ReverseV2": 1, "Roll": 2}[node.op.type]
        axes = static_axes(node, place, rank)
    if axes is None:
        return unknown(node.values[:1])
    if not axes & set(value.axes):
        return value
    return value.but(order=("in another order", node.op.name))


def best(node: Node) -> list[Value]:
    """TopKV2, along the last axis."""
    value, rank = node.values[0], node.rank(0)
    if value.axes and rank is None:
        return [unknown(node.values[:1])] * 2
    result = applied([value], node.op.name)
    if value.axes and rank is not None and rank - 1 in value.axes:
        order = ("sorted", node.op.name)
        result = result.but(each=SELECTED, order=order).crossed(CHOSEN, node.op.name)
    return [result, result]


def unique(node: Node) -> list[Value]:
    """Unique: which rows are equal depends on all of them."""
    value = node.values[0]
    result = applied([value], node.op.name)
    if value.axes:
        result = result.but(each=SELECTED, order=("unique",))
        result = result.crossed(CHOSEN, node.op.name)
    return [result] * len(node.op.outputs)


def rearranged(node: Node) -> Value:
    """Transpose: the axes of rows move along."""
    value, order = node.values[0], node.static(1)
    if not value.axes:
        return value
    if order is None:
        return unknown(node.values[:1])
    places = [int(each) for each in order]
    return value.but(axes=tuple(sorted(places.index(axis) for axis in value.axes)))


def with_axis(node: Node) -> Value:
    """ExpandDims: later axes of rows move back by one."""
    value, axis, rank = node.values[0], node.static(1), node.rank(0)
    if not value.axes:
        return value
    if axis is None or rank is None:
        return unknown(node.values[:1])
    place = int(np.reshape(axis, -1)[0]) % (rank + 1)
    return value.but(axes=tuple(a + (a >= place) for a in value.axes))


def without_axes(node: Node) -> Value:
    """Squeeze: later axes of rows move forward."""
    value, shape = node.values[0], node.shape(0)
    if not value.axes:
        return value
    if shape.rank is None:
        return unknown(node.values[:1])
    given = {axis % shape.rank for axis in node.attribute("squeeze_dims")}
    gone = given or {axis for axis, size in enumerate(shape) if size == 1}
    if gone & set(value.axes):
        return unknown(node.values[:1])
    return value.but(axes=tuple(a - sum(g < a for g in gone) for a in value.axes))


def reshaped(node: Node) -> Value:
    """Reshape: rows stay the first axis, or only axes of length 1 change."""
    value, before, after = node.values[0], node.shape(0), node.out
    if not value.axes:
        return value
    if len(value.axes) > 1:  # pairs, flattened
        flat = value.but(axes=(), order=None, terms=of_pairs(value))
        return flat.crossed(PAIRED, node.op.name)
    if before.rank is None or after.rank is None:
        return unknown(node.values[:1])
    [axis] = value.axes
    if axis == 0 and node.values[1].is_shape:
        start = node.values[1].order[1]  # type: ignore[index]
        is_moved = start and before.rank == 1  # such as [n] to [1, n]
        if start and not is_moved:
            return unknown([value])
        return value.but(axes=(start,), per_row=node.values[1].per_row)
    place = _place_after(list(before), list(after), axis, node.rows)
    if place is None and axis == 0 and _begins_with_rows(node):
        return value
    if place is None:
        return unknown(node.values[:1])
    if place == axis == 0:
        entries, others = before[1:].num_elements(), after[1:].num_elements()
        is_known = entries is not None and others is not None
        is_static = before[0] is not None and after[0] is not None
        if is_static:
            per_row = after[0] // node.rows if node.rows else None
            return value.but(per_row=per_row)
        if is_known:
            return _with_entries(value, entries, others)  # type: ignore[arg-type]
        if not _begins_with_rows(node):
            return value.but(each=max(value.each, VARIABLE), per_row=None)
    return value.but(axes=(place,))


def _with_entries(value: Value, before: int, after: int) -> Value:
    """Rows whose entries of `before` numbers become those of `after` numbers."""
    if before % after == 0:
        per_row = value.per_row and value.per_row * (before // after)
        return value.but(per_row=per_row)
    joined_entries, rest = divmod(after, before)
    if rest or not value.per_row or value.per_row % joined_entries:
        return unknown([value])
    return value.but(per_row=value.per_row // joined_entries)


def of_pairs(value: Value) -> frozenset[Term]:
    """The terms of a tensor of which one entry depends on several rows."""
    return frozenset(Term.OTHER if t is Term.ROWS else t for t in value.terms)


def _place_after(
    before: list[Any], after: list[Any], axis: int, rows: int | None
) -> int | None:
    """The axis of the rows after a reshape; None: unknown."""
    # Only axes of length 1 come or go.
    kept = [size for size in before if size != 1]
    if kept == [size for size in after if size != 1] and kept.count(None) <= 1:
        if before[axis] == 1:
            return 0 if axis == 0 and after and after[0] == 1 else None
        index = [place for place, size in enumerate(before) if size != 1].index(axis)
        return [place for place, size in enumerate(after) if size != 1][index]
    if axis or not after:
        return None
    if before[0] is None or after[0] is None:
        return 0 if before[0] == after[0] else None
    if not before[0] or not after[0]:
        return None
    unit = rows if rows and before[0] % rows == 0 else before[0]
    return 0 if after[0] % unit == 0 else None


def _begins_with_rows(node: Node) -> bool:
    """Whether a reshape's target shape begins with the length of its input's rows."""
    shape = node.op.inputs[1]
    if shape.op.type == "Pack":
        shape = shape.op.inputs[0]
        if shape.op.type != "StridedSlice" or shape.shape.rank != 0:
            return False
        place = tf.get_static_value(shape.op.inputs[1])
        if place is None or place.tolist() != [0]:
            return False
        shape = shape.op.inputs[0]
    return bool(shape.op.type == "Shape")


def packed(node: Node) -> Value:
    """Pack: values side by side along a new axis."""
    place, rank = node.attribute("axis"), node.out.rank
    if rank is None:
        return unknown(node.values)
    place %= rank
    values = [v.but(axes=tuple(a + (a >= place) for a in v.axes)) for v in node.values]
    counts = [
        i for i, v in enumerate(values) if v.terms == {Term.COUNT} and v.power == 1
    ]
    if rank == 1 and len(counts) == 1:  # a shape that has the number of rows
        return values[counts[0]].but(order=("shape", counts[0]))
    return stacked(values, node.op.name)


def stacked(values: Sequence[Value], op: str) -> Value:
    """Values side by side in one tensor."""
    return added(values, op).but(reads=reads_of(values, 0))


def unpacked(node: Node) -> list[Value]:
    """Unpack, the inverse of `packed`."""
    value, rank = node.values[0], node.rank(0)
    count = len(node.op.outputs)
    if not value.axes:
        return [value] * count
    if rank is None or node.attribute("axis") % rank in value.axes:
        return [unknown(node.values)] * count
    place = node.attribute("axis") % rank
    return [value.but(axes=tuple(a - (a > place) for a in value.axes))] * count


def concatenated(node: Node) -> Value:
    """ConcatV2: values joined along an existing axis."""
    *values, _ = node.values
    axis, rank = node.static(len(values)), node.out.rank
    if not any(v.axes for v in values):
        return _joined_shapes(node, values) or stacked(values, node.op.name)
    if axis is None or rank is None:
        return unknown(values)
    axes = {v.axes for v in values if v.axes}
    if (int(axis) % rank,) not in axes:
        return stacked(values, node.op.name)
    if len(axes) > 1:
        return unknown(values)
    if not all(v.axes for v in values):  # such as a queue of rows
        even = [v.but(axes=(), order=None) for v in values]
        queue = stacked(even, node.op.name)
        return queue.but(terms=queue.terms - {Term.ROWS} | {Term.OTHER})
    order = ("joined", *(v.order for v in values))
    even = [v.but(order=None) for v in values]
    counts = [v.per_row for v in values]
    per_row = None if None in counts else sum(counts)  # type: ignore[arg-type]
    return stacked(even, node.op.name).but(order=order, per_row=per_row)


def _joined_shapes(node: Node, values: Sequence[Value]) -> Value | None:
    """A shape from parts, of which one has the number of rows."""
    places = [place for place, value in enumerate(values) if value.local]
    if len(places) != 1 or not values[places[0]].is_shape:
        return None
    shape = values[places[0]]
    before = [node.shape(place)[0] for place in range(places[0])]
    if None in before:
        return None
    return shape.but(order=("shape", sum(before) + shape.order[1]))  # type: ignore[arg-type, index]


def split(node: Node, place: int, axis_place: int) -> list[Value]:
    """Split, SplitV: of rows joined from as many tensors, these."""
    value, count = node.values[place], len(node.op.outputs)
    axis, rank = node.static(axis_place), node.rank(place)
    if not value.axes:
        return [value] * count
    if axis is None or rank is None:
        return [unknown([value])] * count
    if int(axis) % rank not in value.axes:
        return [value] * count
    if len(value.axes) > 1 or (node.op.type == "SplitV" and node.static(1) is None):
        return [unknown([value])] * count
    parts = value.order if isinstance(value.order, tuple) else ()
    if parts[:1] == ("joined",) and len(parts) == count + 1:
        return [value.but(order=order) for order in parts[1:]]
    return [
        value.but(order=("part", number, count, value.order), each=SELECTED)
        for number in range(count)
    ]


def like_rows(node: Node) -> Value:
    """OnesLike, ZerosLike: a constant for each entry."""
    value = node.values[0]
    if node.op.type == "OnesLike" and Term.UNKNOWN in value.terms:
        return unknown([value])
    terms = frozenset() if node.op.type == "ZerosLike" else CONSTANT.terms
    shape = Value(terms, axes=value.axes, order=value.order, each=value.each)
    return shape.but(local=COUNTS if value.axes else frozenset())


def filled(node: Node) -> Value:
    """Fill: a number in a shape, which may begin with the number of rows."""
    shape, value = node.values[0], node.values[1]
    if shape.is_shape:
        return value.but(axes=(shape.order[1],), local=value.local | COUNTS)  # type: ignore[index]
    if shape.terms <= PLAIN or not value.terms:
        return value
    return unknown([shape, value])


def numbered(node: Node) -> Value:
    """Range: its length may be the number of rows, or that of the longest row."""
    limit = node.values[1]
    if limit.terms == {Term.COUNT} and limit.power == 1:
        return Value(CONSTANT.terms, axes=(0,), order=NUMBERED, local=COUNTS)
    return CONSTANT.but(local=limit.local & COUNTS)


def positions(node: Node) -> Value:
    """Rule for `Where` applied to a mask: indices of the selected rows."""
    value = node.values[0]
    if not value.axes:
        return unknown(node.values)
    return Value(
        terms=frozenset({Term.ROWS}),
        axes=(0,),
        order=("selected",),
        each=SELECTED,
        **dependencies(node.values),
    )


def one_hot(node: Node) -> Value:
    """OneHot: each entry becomes a vector along a new axis."""
    value, rank = node.values[0], node.rank(0)
    result = applied([value], node.op.name)
    axis = node.attribute("axis")
    if not value.axes or axis == -1 or rank is None:
        return result
    return result.but(axes=tuple(a + (a >= axis) for a in value.axes))


def tiled(node: Node) -> Value:
    """Tile: rows come again, in a tiled order."""
    value, multiples = node.values[0], node.static(1)
    if not value.axes:
        return value
    if multiples is None:
        return unknown(node.values[:1])
    if all(multiples[axis] == 1 for axis in value.axes):
        return value
    times = int(multiples[value.axes[0]])
    per_row = value.per_row and value.per_row * times
    return value.but(order=("tiled", times, value.order), per_row=per_row)


def to_blocks(node: Node) -> Value:
    """SpaceToBatchND: the blocks of each row, side by side with other rows' blocks."""
    value = node.values[0]
    if value.axes not in ((), (0,)):
        return unknown(node.values[:1])
    return value.but(order=("blocks", value.order)) if value.axes else value


def from_blocks(node: Node) -> Value:
    """BatchToSpaceND, the inverse of `to_blocks`."""
    value = node.values[0]
    is_inverse = isinstance(value.order, tuple) and value.order[:1] == ("blocks",)
    if value.axes and not is_inverse:
        return unknown(node.values[:1])
    return value.but(order=value.order[1]) if is_inverse else value  # type: ignore[index]


def broadcast(node: Node) -> Value:
    """BroadcastTo: new axes come before those of the rows."""
    value, rank = node.values[0], node.rank(0)
    if not value.axes:
        return value
    if rank is None or node.out.rank is None:
        return unknown(node.values[:1])
    return value.but(axes=tuple(axis + node.out.rank - rank for axis in value.axes))


def padded(node: Node) -> Value:
    """Pad, PadV2, MirrorPad: unknown if rows are added."""
    value, paddings = node.values[0], node.static(1)
    if not value.axes:
        return value
    if paddings is None or any(paddings[axis].any() for axis in value.axes):
        return unknown(node.values[:1])
    return value


def diagonal_matrix(node: Node) -> Value:
    """MatrixDiag: a vector along the diagonal."""
    value, rank = node.values[0], node.rank(0)
    if rank is None:
        return unknown(node.values)
    return value.but(axes=value.axes + ((rank,) if rank - 1 in value.axes else ()))


def diagonal(node: Node) -> Value:
    """Rule for the diagonal of pairs of rows: each row with itself."""
    value, rank = node.values[0], node.rank(0)
    if rank is None or (node.op.type == "DiagPart" and rank != 2):
        return unknown([value]) if value.axes else value
    pair = {rank - 2, rank - 1} & set(value.axes)
    if len(pair) == 2 and value.order == UNLIKE:
        value = value.but(order=None).crossed(JOINED, node.op.name)
    return unknown([value]) if len(pair) == 1 else value.but(axes=value.axes[:1])
