"""Rules of ops that compute: sums, products, functions, reductions."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.lint.node import COUNTS, Node, static_axes
from tfdp.lint.parts import is_by_own_place
from tfdp.lint.values import (
    CHOSEN,
    FACTORS,
    JOINED,
    LOCAL_TERMS,
    NORMALIZED,
    NUMBERED,
    OTHERWISE,
    PAIRED,
    PLAIN,
    REPLICATED,
    SELECTED,
    SHARDS,
    SHARES,
    UNKNOWN,
    Term,
    Value,
    added,
    aligned,
    applied,
    dependencies,
    joined,
    reads_of,
    scaled_by_count,
    times,
    unknown,
)


def same(node: Node) -> Value:
    """Rule for ops that pass their first input on."""
    return node.values[0]


def same_each(node: Node) -> list[Value]:
    """Rule for ops that pass each input on as an output."""
    return list(node.values[: len(node.op.outputs)])


def plus(node: Node) -> Value:
    """Rule for sums."""
    values = node.spread()
    return unknown(node.values) if values is None else added(values, node.op.name)


def _of_entries(rule: Callable[[Node], Value]) -> Callable[[Node], Value]:
    """A rule, but for a part of a summed gradient that is changed by entries of another
    tensor, which is not cut as it is, such as a mask of rows."""

    @functools.wraps(rule)
    def value_of(node: Node) -> Value:
        is_part = any(Term.SHARD in value.terms for value in node.values)
        if not is_part or not any(
            not value.terms & SHARDS and node.shape(place).num_elements() != 1
            for place, value in enumerate(node.values)
        ):
            return rule(node)
        return Value(
            terms=frozenset({Term.SHARD_NUMBER}),
            reads=reads_of(node.values, OTHERWISE),
            **dependencies(node.values),
        )

    return value_of


@_of_entries
def product(node: Node) -> Value:
    """Rule for products of two values."""
    values = node.spread()
    if values is None:
        return unknown(node.values)
    for place, value in enumerate(values):
        rest = values[1 - place]
        count = _times_count(node, rest, place)
        if count is not None and value.terms <= PLAIN and not value.axes:
            return count
    one, other = (_as_count(node, value, place) for place, value in enumerate(values))
    return _noting_hand(node, times(one, other, node.op.name))


@_of_entries
def quotient(node: Node) -> Value:
    """Rule for quotients of two values."""
    values = node.spread()
    if values is None:
        return unknown(node.values)
    one, other = values
    divisor = _number(node, 1)
    if divisor is not None and one.terms & {Term.SUM}:
        if divisor in (node.rows, one.entries):
            return scaled_by_count(one.but(power=-1)).but(entries=None)
    other = _as_count(node, other, 1)
    return _noting_hand(node, times(one, other, node.op.name, divided=True))


#: Fewer rows than these are also the value of other constants, such as 2.
LEAST_ROWS = 4


def _as_count(node: Node, value: Value, place: int) -> Value:
    """`value`, or the count of rows where a program wrote it as a static number: an
    integer that was cast, or a divisor of what is no row itself."""
    number = _number(node, place)
    if number is None or number != node.rows:
        return value
    rest, source = node.values[1 - place], node.op.inputs[place].op
    is_cast = source.type == "Cast" and source.inputs[0].dtype.is_integer
    is_divisor = place == 1 and "Div" in node.op.type
    is_count = number >= LEAST_ROWS and (is_cast or is_divisor)
    if not is_count or Term.ROWS in rest.terms:
        return value
    count = frozenset({Term.COUNT})
    return value.but(terms=count, power=1, local=value.local | COUNTS)


def _number(node: Node, place: int) -> Any:
    """An input that is one constant number; else None, without a look at what it is
    made of: that would follow a sum of sums again at each of them."""
    is_one = node.values[place].terms == {Term.CONSTANT} and node.rank(place) == 0
    return node.static(place) if is_one else None


def _noting_hand(node: Node, value: Value) -> Value:
    """`value`, with `by_hand` if a factor is a multiple of the number of replicas, or
    1 divided by one."""
    factors = [_number(node, place) for place in range(2)] if node.replicas > 1 else []
    for factor in filter(None, factors):
        times_replicas = max(abs(factor), 1 / abs(factor)) / node.replicas
        if abs(times_replicas - np.round(times_replicas)) < 1e-6 * times_replicas:
            return value.but(by_hand=True)
    return value


def _times_count(node: Node, value: Value, place: int) -> Value | None:
    """`value` times a constant that is 1 over the number of what it adds up."""
    factor = _number(node, place)
    if factor is None or not value.terms & {Term.SUM, Term.MEAN}:
        return None
    for number in (node.rows, value.entries):
        if not number or number == 1:
            continue
        if Term.SUM in value.terms and np.isclose(float(factor) * number, 1, 1e-6):
            return scaled_by_count(value.but(power=-1))
    return None


def function(node: Node) -> Value:
    """An elementwise function that is not linear."""
    values = node.spread()
    is_least = node.op.type in ("Maximum", "Minimum")
    if is_least and node.op.inputs[0] is node.op.inputs[1]:
        return node.values[0]
    return unknown(node.values) if values is None else applied(values, node.op.name)


def sign(node: Node) -> Value:
    """The sign of a row's number is the same for any positive multiple of it."""
    [value] = node.values
    if value.target is not None and value.axes:
        value = value.but(terms=frozenset({Term.ROWS}), of_share=False, target=None)
    return applied([value.but(power=0)], node.op.name)


def check(node: Node) -> Value:
    """A test for numbers that are not finite: what depends on it is no crossing."""
    [value] = node.values
    return value.but(
        terms=REPLICATED.terms, of_share=False, cross=frozenset(), power=0, target=None
    )


@_of_entries
def select(node: Node) -> Value:
    """One of two, entry by entry."""
    values = node.spread()
    if values is None:
        return unknown(node.values)
    if node.op.type == "Select" and node.rank(0) == 1:  # of the first axis
        values[0] = node.values[0]
    condition, *both = values
    if condition.terms <= PLAIN | {Term.COUNT} and not condition.of_share:
        # Such as rows, or a constant where a mask of no rows hides them.
        is_one = not condition.axes and len({v.axes for v in both if v.terms}) == 1
        either = joined(both) if is_one else added(both, node.op.name)
        return either.but(**dependencies(values))
    if any(v.terms & (SHARES | FACTORS) for v in values):
        # Such as 0 where a replica has no words: the sum of the shares stays exact.
        kept = joined(both).but(**dependencies(values))
        return kept.but(terms=frozenset({Term.MIXED})) if condition.of_share else kept
    return applied(values, node.op.name)


def reduction(node: Node, *, kind: str) -> Value:
    """A reduction over static axes."""
    value, rank = node.values[0], node.rank(0)
    axes = static_axes(node, 1, rank)
    if axes is None or rank is None:
        return unknown(node.values[:1])
    keeps = kind != "arg" and node.attribute("keep_dims")
    return reduced(value, axes, kind, node.op.name, node.shape(0), keeps=keeps)


def reduced(
    value: Value,
    axes: set[int],
    kind: str,
    op: str,
    shape: tf.TensorShape,
    *,
    keeps: bool = False,
) -> Value:
    """`value` reduced over `axes`: by "sum", "mean", or another function."""
    if Term.SHARD in value.terms and axes:
        return value.but(terms=frozenset({Term.SHARD_NUMBER}), axes=())
    over = [axis for axis in value.axes if axis in axes]
    left = [axis for axis in value.axes if axis not in axes]
    if not keeps:
        left = [axis - sum(each < axis for each in axes) for axis in left]
    result = value.but(axes=tuple(left), order=value.order if left else None)
    if value.is_shape:
        result = result.but(power=None)
    sizes = [shape[axis] for axis in axes]
    if kind == "sum":
        count = None if None in sizes else math.prod(sizes)  # type: ignore[arg-type]
        before = 1 if value.entries is None else value.entries
        result = result.but(entries=None if count is None else before * count)
    if not over:
        if kind in ("sum", "mean"):
            return result
        return applied([result], op)
    if kind not in ("sum", "mean"):
        if not value.terms & LOCAL_TERMS:
            return applied([result], op)
        found = Term.ROWS if left else Term.OTHER
        crossing = PAIRED if len(value.axes) > 1 else NORMALIZED
        return applied([result], op).but(terms=frozenset({found})).crossed(crossing, op)
    if len(over) < len(value.axes):
        return result.crossed(PAIRED, op)
    if value.order == NUMBERED and not value.terms & LOCAL_TERMS:  # 0 to n - 1
        return result.but(terms=frozenset({Term.COUNT}), power=None)
    if value.order == NUMBERED:
        result = result.crossed(JOINED, op)
    total = {Term.ROWS: Term.MEAN}
    if kind == "sum":
        total = {Term.ROWS: Term.SUM, Term.MEAN: Term.SUM, Term.SUM: Term.OTHER}
    terms = frozenset(total.get(term, term) for term in value.terms)
    result = result.but(terms=terms, each=0)
    if kind == "sum" and terms and terms <= PLAIN | {Term.COUNT}:
        result = _counted(result, value.each)
    elif value.power != 0:
        result = scaled_by_count(result)
    if len(over) > 1:
        return result.crossed(PAIRED, op)
    if isinstance(value.order, tuple) and value.order[:1] == ("slice",):
        return result.crossed(CHOSEN, op)
    if kind == "mean" and value.each == SELECTED and Term.MEAN in terms:
        return result.crossed(NORMALIZED, op)
    return result


def _counted(value: Value, each: int) -> Value:
    """The sum of a number over rows, which have `each` of them."""
    local = value.local | COUNTS
    if each == SELECTED:
        local, terms = local | {"rows"}, frozenset({Term.SUM})
        return value.but(terms=terms, power=0, local=local)
    power = None if value.power is None else value.power + 1
    if power and Term.REPLICATED not in value.terms:
        value = value.but(terms=frozenset({Term.COUNT}))
    return value.but(power=power, local=local)


def other_reduction(node: Node) -> Value:
    """Max, Min and the like; Prod may be that of a shape."""
    value = node.values[0]
    if node.op.type == "Prod" and value.is_shape:
        return value.but(order=None)
    if node.op.type in ("Max", "Min") and not value.axes:
        if value.terms == {Term.COUNT} and value.power == 1 and not value.is_shape:
            return value  # the largest of equal counts
    return reduction(node, kind="other")


def squares(node: Node) -> Value:
    """L2Loss: half the sum of all squares."""
    value, rank = node.values[0], node.rank(0)
    if rank is None:
        return unknown(node.values)
    square = applied([value], node.op.name)
    return reduced(square, set(range(rank)), "sum", node.op.name, node.shape(0))


def along(node: Node, axis: int | None, kind: str) -> Value:
    """An op that combines the entries along one axis, and keeps the shape."""
    value, rank = node.values[0], node.rank(0)
    if value.axes and (axis is None or rank is None):
        return unknown(node.values[:1])
    result = applied([value], node.op.name)
    if value.axes and axis % rank in value.axes:  # type: ignore[operator]
        kind = PAIRED if len(value.axes) > 1 else kind
        return result.crossed(kind, node.op.name)
    return result


def along_last(node: Node, count: int) -> list[Value]:
    """An op that combines all entries along the last `count` axes, such as `svd`."""
    outputs, name = len(node.op.outputs), node.op.name
    is_inner = any(
        node.rank(place) is None or axis >= node.rank(place) - count  # type: ignore[operator]
        for place, value in enumerate(node.values)
        for axis in value.axes
    )
    if is_inner:
        result = applied([v.but(axes=(), order=None) for v in node.values], name)
        if Term.UNKNOWN not in result.terms:
            result = result.but(terms=frozenset({Term.OTHER})).crossed(JOINED, name)
        return [result] * outputs
    if any(v.axes not in ((), (0,)) for v in node.values):
        return [unknown(node.values)] * outputs
    return [applied(node.values, name)] * outputs  # the axes before stay


def softmax(node: Node) -> Value:
    """A softmax along the last axis."""
    return along(node, -1, NORMALIZED)


def cumulated(node: Node) -> Value:
    """A cumulated sum or product."""
    axes = node.static(1)
    axis = None if axes is None or np.size(axes) != 1 else int(np.reshape(axes, -1)[0])
    if node.op.type == "Cumsum" and not (node.values[0].axes and axis is None):
        value, rank = node.values[0], node.rank(0)
        if not value.axes or axis % (rank or 1) not in value.axes:  # type: ignore[operator]
            return value
    if node.values[0].axes and node.op.inputs[0].dtype.is_integer:
        # Places, as of ragged rows: what they choose is unknown, and no crossing.
        return node.values[0].but(terms=UNKNOWN.terms, axes=(), order=None)
    return along(node, axis, NORMALIZED)


def contracted(node: Node, labels: Sequence[str], made: str) -> Value:
    """A product of two tensors, summed over the axes that `made` has not."""
    everything = made + "".join(
        dict.fromkeys(label for label in "".join(labels) if label not in made)
    )
    values = []
    for value, own in zip(node.values, labels, strict=True):
        if any(axis >= len(own) for axis in value.axes):
            return unknown(node.values)
        axes = {everything.index(own[axis]) for axis in value.axes}
        values.append(value.but(axes=tuple(sorted(axes))))
    result = values[0]
    for other in values[1:]:
        result = times(result, other, node.op.name)
    gone = set(range(len(made), len(everything)))
    sizes: dict[str, Any] = {}
    for place, own in enumerate(labels):
        sizes.update(zip(own, node.shape(place), strict=False))
    shape = tf.TensorShape([sizes.get(label) for label in everything])
    return reduced(result, gone, "sum", node.op.name, shape).but(entries=None)


def matrix_product(node: Node) -> Value:
    """MatMul: a product summed over the inner axes."""
    first = "ki" if node.attribute("transpose_a") else "ik"
    second = "jk" if node.attribute("transpose_b") else "kj"
    return contracted(node, [first, second], "ij")


def batch_matrix_product(node: Node) -> Value:
    """BatchMatMul and its versions."""
    ranks = node.rank(0), node.rank(1)
    if None in ranks:
        return unknown(node.values)
    letters = "abcdefgh"[: max(ranks) - 2]  # type: ignore[type-var, operator]
    own = [letters[len(letters) - (rank - 2) :] for rank in ranks]  # type: ignore[operator]
    first = own[0] + ("ki" if node.attribute("adj_x") else "ik")
    second = own[1] + ("jk" if node.attribute("adj_y") else "kj")
    return contracted(node, [first, second], letters + "ij")


def einsum(node: Node) -> Value:
    """Einsum of at most two tensors."""
    given, made = node.attribute("equation").decode().split("->")
    if "..." in given and None not in (node.rank(i) for i in range(len(node.values))):
        given, made = _without_dots(node, given, made)
    labels = given.split(",")
    if "." in given or len(labels) > 2:
        return unknown(node.values)
    return contracted(node, labels, made)


def _without_dots(node: Node, given: str, made: str) -> tuple[str, str]:
    """An equation with letters for the axes that its dots stand for."""
    labels, most = given.split(","), 0
    free = "".join(c for c in string.ascii_letters if c not in given + made)
    for place, own in enumerate(labels):
        if "..." in own:
            count = node.rank(place) - len(own) + 3  # type: ignore[operator]
            most = max(most, count)
            labels[place] = own.replace("...", free[26 - count : 26])
    return ",".join(labels), made.replace("...", free[26 - most : 26])


def by_rows(node: Node, *, linear: bool, place: int = 0) -> Value | list[Value]:
    """A layer's op on images or sequences: rows are the first axis."""
    if any(v.axes not in ((), (0,)) for v in node.values):
        return unknown(node.values)
    value = node.values[place]
    # The first input of a transposed convolution is a shape.
    others = [v for i, v in enumerate(node.values) if i != place and (i or not place)]
    weights = [v for v in others if v.terms]
    if not linear or any(v.terms & (LOCAL_TERMS | SHARES) for v in weights):
        result = applied([value, *(v.but(axes=()) for v in weights)], node.op.name)
    else:
        result = value.but(**dependencies(node.values))
    return result


def batch_norm(node: Node) -> list[Value]:
    """FusedBatchNormV3: a replica's own statistics, as documented, are no crossing."""
    value = node.values[0]
    rest = unknown(node.values)
    outputs = len(node.op.outputs)
    return [value.but(**dependencies(node.values)), *[rest] * (outputs - 1)]


def cross_entropy(node: Node) -> list[Value]:
    """Softmax cross-entropy of logits and labels, row by row."""
    logits, labels = node.values[0], node.values[1]
    result = applied([logits, labels], node.op.name)
    if 1 in result.axes:  # the softmax is taken over pairs
        result = result.but(axes=(0,)).crossed(PAIRED, node.op.name)
    return [result, result]


def summed_in_place(node: Node, places: slice) -> Value:
    """Ops that add rows up by an index: segments, histograms."""
    of_rows = node.values[places]
    if not any(v.axes for v in node.values):
        return unknown(node.values)
    if any(v.each == SELECTED for v in node.values):  # put back where they were
        return unknown(node.values).but(terms=UNKNOWN.terms)
    if not any(Term.ROWS in v.terms for v in of_rows):  # a constant for each row
        of_rows = node.values
    result = applied(
        [v.but(axes=(0,) if v.axes else ()) for v in of_rows], node.op.name
    )
    _, order, crossing = aligned(node.values)
    # By their own numbers rows stay rows.
    is_of_rows = Term.ROWS in result.terms and result.power == 0 and order != NUMBERED
    terms = frozenset({Term.SUM}) if is_of_rows else UNKNOWN.terms
    result = result.but(terms=terms, axes=(), order=None)
    return result.crossed(crossing, node.op.name) if crossing else result


def dense_counts(node: Node) -> Value:
    """DenseBincount: of a matrix a histogram of each row."""
    if node.rank(0) == 2 and node.values[0].axes == (0,):
        return applied([node.values[0]], node.op.name)
    return summed_in_place(node, slice(1))


def changed_in_place(node: Node) -> Value:
    """TensorScatter...: a tensor with some entries changed by an index."""
    before, places, change = node.values
    if before.axes == places.axes == (0,) and is_by_own_place(node.op.inputs[1]):
        return applied([before, change.but(axes=(0,))], node.op.name)
    if node.op.type == "TensorScatterUpdate":
        is_moved = bool(before.reads & change.reads)
        if places.axes or change.axes:  # which row's change stays is not known
            terms = change.terms | places.terms
            change = change.but(terms=terms - {Term.ROWS} | {Term.OTHER})
        change = change.but(axes=(), **dependencies([change, places]))
        result = applied([before, change], node.op.name)
        return result.but(reads=before.reads if is_moved else result.reads)
    if not (places.axes or change.axes):
        return added([before, change], node.op.name)
    of_rows = applied([v.but(axes=(0,)) for v in (places, change)], node.op.name)
    is_of_rows = Term.ROWS in of_rows.terms or change.terms <= PLAIN
    terms = frozenset({Term.SUM}) if is_of_rows else UNKNOWN.terms
    return added([before, of_rows.but(terms=terms, axes=(), order=None)], node.op.name)
