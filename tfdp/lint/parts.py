"""Rules of ops that take a part of a tensor: which rows it has, and in which order."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.lint.axes import of_pairs
from tfdp.lint.node import Node
from tfdp.lint.values import (
    CHOSEN,
    FIXED,
    LOCAL_TERMS,
    NUMBERED,
    OTHERWISE,
    REPLICATED,
    SELECTED,
    SHARES,
    Term,
    Value,
    applied,
    dependencies,
    reads_of,
    unknown,
)


def _length_of(node: Node, places: Any) -> Value:
    """Entries of the shape of a tensor with rows."""
    value, rank = node.values[0], node.rank(0)
    length = node.shape(0)[0] if rank == 1 else None
    if places is None or length is None or node.out.rank not in (0, 1):
        return value.but(order=None, power=None)
    found = np.arange(length)[places].ravel().tolist()
    if value.order[1] not in found:  # type: ignore[index]
        return REPLICATED
    place = found.index(value.order[1])  # type: ignore[index]
    return value.but(order=("shape", place) if node.out.rank else None)


def sliced(node: Node) -> Value:
    """StridedSlice: a part of the rows, or of a shape."""
    value, rank = node.values[0], node.rank(0)
    if not value.axes and not value.is_shape:
        return value
    if rank is None:
        return unknown(node.values[:1])
    begin, end, strides = (node.static(place) for place in (1, 2, 3))
    masks = {
        name: node.attribute(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    if value.is_shape:
        return _length_of(node, _places(begin, end, strides, masks))
    specs = node.shape(1)[0]
    if specs is None or strides is None:
        return unknown(node.values[:1])
    source = target = 0
    axes: list[int] = []
    taken = sum(
        not (masks["new_axis"] | masks["ellipsis"]) >> i & 1 for i in range(specs)
    )
    for i in range(specs):
        bit = 1 << i
        if masks["ellipsis"] & bit:
            width = rank - taken
            axes += [target + a - source for a in value.axes if 0 <= a - source < width]
            source, target = source + width, target + width
        elif masks["new_axis"] & bit:
            target += 1
        elif masks["shrink_axis"] & bit:
            if source in value.axes:
                if begin is None:
                    return unknown(node.values[:1])
                found = Term.OTHER if len(value.axes) == 1 else Term.ROWS
                one = value.but(axes=(), terms=frozenset({found}), order=None)
                return one.crossed(CHOSEN, node.op.name)
            source += 1
        else:
            if source in value.axes:
                whole = _is_whole(masks, bit, begin, strides, i)
                part = None if whole else _part_of(node, i)
                if part is not None:
                    value, whole = value.but(order=value.order[part + 1]), True  # type: ignore[index]
                is_reversed = masks["begin"] & masks["end"] & bit and strides[i] == -1
                if is_reversed:
                    value = value.but(order=("reversed", value.order))
                    whole = True
                if not whole and (begin is None or end is None):
                    return unknown(node.values[:1])
                if not whole:
                    cut: tuple[int, ...] = (int(begin[i]), int(end[i]), int(strides[i]))
                    cut += (masks["begin"] & bit, masks["end"] & bit)
                    order = ("slice", *cut, value.order)
                    value = value.but(order=order, each=SELECTED)
                axes.append(target)
            source, target = source + 1, target + 1
    axes += [a - source + target for a in value.axes if a >= source]
    return value.but(axes=tuple(sorted(axes)))


def cut(node: Node) -> Value:
    """Slice: a part of the rows, or of a shape."""
    value = node.values[0]
    begin, size = node.static(1), node.static(2)
    if value.is_shape:
        if begin is None or size is None:
            return _length_of(node, None)
        end = None if size[0] == -1 else int(begin[0] + size[0])
        return _length_of(node, slice(int(begin[0]), end))
    for axis in value.axes:
        has_all = node.values[2].is_shape and node.values[2].order[1] == axis  # type: ignore[index]
        if begin is not None and not begin[axis]:
            if has_all or (
                size is not None and size[axis] in (-1, node.shape(0)[axis])
            ):
                continue
        if begin is None or size is None:
            return unknown([value])
        order = ("slice", int(begin[axis]), int(size[axis]), value.order)
        value = value.but(order=order, each=SELECTED)
    return value


def _places(begin: Any, end: Any, strides: Any, masks: Any) -> Any:
    """The entries of a vector that StridedSlice takes; None: unknown."""
    is_known = None not in (begin, end, strides)
    if not is_known or masks["ellipsis"] or masks["new_axis"]:
        return None
    if masks["shrink_axis"]:
        return int(begin[0])
    first = None if masks["begin"] else int(begin[0])
    last = None if masks["end"] else int(end[0])
    return slice(first, last, int(strides[0]))


def _part_of(node: Node, i: int) -> int | None:
    """Which of tensors with rows, joined along axis `i`, a slice is."""
    value = node.values[0]
    is_joined = isinstance(value.order, tuple) and value.order[:1] == ("joined",)
    if i or not is_joined or value.each != FIXED or value.axes != (0,):
        return None
    count, length = len(value.order) - 1, node.shape(0)[0]  # type: ignore[arg-type]
    begin, end, strides = (node.static(place) for place in (1, 2, 3))
    if strides[0] != 1:
        return None
    from_start = node.attribute("begin_mask") & 1 or (
        begin is not None and not begin[0]
    )
    to_end = node.attribute("end_mask") & 1
    if length is None and count == 2:  # z[:n] or z[n:]
        if from_start and node.values[2].is_shape:
            return 0
        return 1 if to_end and node.values[1].is_shape else None
    if length is None or begin is None or end is None or length % count:
        return None
    unit = length // count
    place, rest = divmod(0 if from_start else int(begin[0]) % length, unit)
    stop = length if to_end else int(end[0]) % (length + 1)
    return place if not rest and stop == (place + 1) * unit else None


def _is_whole(masks: Any, bit: int, begin: Any, strides: Any, i: int) -> bool:
    starts = masks["begin"] & bit or (begin is not None and begin[i] == 0)
    return bool(starts and masks["end"] & bit and strides[i] == 1)


def gathered(node: Node) -> Value:
    """GatherV2: rows of a table, or of a tensor with rows."""
    params, indices = node.values[0], node.values[1]
    if params.is_shape:
        return _length_of(node, node.static(1))
    if params.is_of_own_rows and Term.UNKNOWN in params.terms:
        return unknown(node.values)
    axis, rank, width = node.static(2), node.rank(0), node.rank(1)
    if not params.axes and not indices.axes:
        if params.terms & LOCAL_TERMS and indices.terms & LOCAL_TERMS:
            return unknown(node.values)
        return params.but(**dependencies(node.values))
    if axis is None or rank is None or width is None:
        return unknown(node.values)
    axis, batch = int(axis) % rank, node.attribute("batch_dims")
    if params.axes == (axis,) and not batch:
        if indices.each == SELECTED and indices.order == ("selected",):
            if params.order is not None:
                return unknown(node.values)
            if params.terms & (LOCAL_TERMS - {Term.ROWS}):  # the same for each row
                return applied([params.but(order=indices.order), indices], node.op.name)
            return indices.but(power=params.power, **dependencies(node.values))
        return _taken(node, axis)
    if axis in params.axes:
        return unknown(node.values)
    moved = params.but(
        axes=tuple(a + (width - batch - 1) * (a > axis) for a in params.axes)
    )
    placed = indices.but(
        axes=tuple(a + (axis - batch) * (a >= batch) for a in indices.axes)
    )
    if not params.terms & LOCAL_TERMS:
        result = applied([placed], node.op.name)
        return result.but(reads=reads_of(node.values, OTHERWISE))
    return applied([moved, placed], node.op.name)


def _taken(node: Node, axis: int) -> Value:
    """Rows of a tensor, by their places in it."""
    params, indices = node.values[0], node.values[1]
    found = params.but(**dependencies(node.values))
    if indices.order == NUMBERED and _is_own_place(node.op.inputs[1]):
        return found
    if node.rank(1) == 0 and node.static(1) is None:
        return unknown(node.values)
    if node.rank(1) == 0:
        found = found.but(axes=(), terms=of_pairs(params), order=None)
        return found.crossed(CHOSEN, node.op.name)
    if not indices.axes and node.shape(1).num_elements() != node.shape(0)[axis]:
        order = ("slice", node.op.inputs[1].name)
        return found.but(order=order, each=SELECTED)
    if Term.ROWS in indices.terms and not indices.cross:
        return unknown(node.values)  # places within each row, or of other rows
    return found.but(order=("taken", node.op.inputs[1].name))


def _is_own_place(indices: tf.Tensor) -> bool:
    """Whether numbers of rows are those of `tf.range`, or number * width + label."""
    op = _op_behind(indices)
    if op.type in ("Add", "AddV2"):
        return any(_op_behind(part).type == "Mul" for part in op.inputs)
    return bool(op.type == "Range")


def _op_behind(tensor: tf.Tensor) -> tf.Operation:
    """The op whose result casts pass on, or a loop over rows if there are any."""
    places = {"Cast": 0, "Identity": 0, "SelectV2": 1}
    while tensor.op.type in places:
        tensor = tensor.op.inputs[places[tensor.op.type]]
    return tensor.op


def is_by_own_place(indices: tf.Tensor) -> bool:
    """Whether indices are (i, place within row i), for all rows i."""
    pack = indices.op
    if pack.type not in ("Pack", "ConcatV2"):
        return False
    first = pack.inputs[0]
    while first.op.type in ("ExpandDims", "Reshape"):
        first = first.op.inputs[0]
    return _op_behind(first).type == "Range"


def gathered_places(node: Node) -> Value:
    """GatherNd: (i, label of row i) picks an entry of each row."""
    params, indices = node.values[0], node.values[1]
    if params.axes != (0,):
        return unknown(node.values)
    pack = node.op.inputs[1].op
    if pack.type not in ("Pack", "ConcatV2") or indices.axes != (0,):
        return unknown(node.values)
    return params.but(**dependencies(node.values))


def looked_up(node: Node) -> Value:
    """ResourceGather: rows of a variable."""
    handle, indices = node.values[0], node.values[1]
    result = applied([indices], node.op.name)
    is_plain = not indices.terms & (LOCAL_TERMS | SHARES | {Term.UNKNOWN})
    terms = REPLICATED.terms if is_plain else result.terms
    return result.but(terms=terms, reads=reads_of([handle, indices], OTHERWISE))
