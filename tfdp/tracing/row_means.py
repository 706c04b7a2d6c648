"""Classifies a tensor's graph: is it a mean or a sum over a replica's rows?

The global mean is the weighted mean of the replicas' means; a root, a quotient of sums
or a maximum of the replicas cannot be combined.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.step_ops import MAY_CALL, PYTHON, operations_within
from tfdp.tracing.batch_rows import REDUCTIONS, has_rows_of, reduced_axes
from tfdp.tracing.dependencies import SHAPES, DependsOn, batch_keys, is_of_own_rows
from tfdp.tracing.loss_shares import QUOTIENTS, ancestors
from tfdp.tracing.replica_invariance import (
    graph_tensors,
    is_exchanged,
    key_of,
    outermost,
)
from tfdp.tracing.run import ReplicaRun, trace_of

# Ops that pass a mean, or a term of one, on.
TERMS = {
    *("AddN", "AddV2", "Add", "BroadcastTo", "Cast", "ConcatV2", "EnsureShape"),
    *("ExpandDims", "GatherV2", "Identity", "Neg", "Pack", "Pad", "Reshape"),
    *("Split", "SplitV", "Squeeze", "StopGradient", "StridedSlice", "Sub", "Tile"),
    *("Cumsum", "DiagPart", "MatrixDiagPartV3", "ReverseV2", "Transpose", "Unpack"),
}
# Ops that reorder, select or compare rows.
MIXING = {"Roll", "UniqueV2", "UniqueWithCountsV2", "Where"}  # of a mask: chosen rows
MIXING_ON_FIRST_AXIS = {"Cumprod", "Cumsum", "CumulativeLogsumexp", "ReverseV2"}
PRODUCTS = {"BatchMatMulV2", "Einsum", "MatMul", "Mul"}
# Ops after a sum that do not divide by the number of rows.
PASSING = {
    *("AddN", "AddV2", "Cast", "ExpandDims", "Identity", "Mul", "Neg", "Pack"),
    *("Reshape", "Squeeze", "StridedSlice", "Sub", "Transpose"),
}
# Which inputs have the rows that these ops add up.
SUMS_OF_ROWS = {
    **dict.fromkeys(("L2Loss", "SegmentSum", "UnsortedSegmentSum"), slice(1)),
    **dict.fromkeys(("Bincount", "DenseBincount", "RaggedBincount"), slice(None)),
    "HistogramFixedWidth": slice(1),
    "ScatterNd": slice(2),
    "TensorScatterAdd": slice(1, 3),
}
# A number of rows is at most this many operations away.
MOST_NEAR = 20
SELECTS = {"Select", "SelectV2"}
NO_MEAN = (
    "which is not a mean over them, such as a root, a quotient of sums, a sum or a "
    "maximum. Each replica computes that of its own rows, their mean is reported, and "
    "one device reports another number. Give a metric one number for each row; or "
    "keep sums over rows in it and compute the rest in its result(); or gather the "
    "rows of all replicas first, tfdp.losses.all_rows(y)"
)
# Not looked into.
FUNCTIONS = MAY_CALL | {"FusedBatchNormV3"}
# Ops that compare or join one row with another along another axis.
BETWEEN = {
    *("AddV2", "Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd"),
    *("Maximum", "Minimum", "Mul", "NotEqual", "SquaredDifference", "Sub"),
}
DIAGONALS = {"DiagPart", "MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3"}
PASSED_ON = {"Cast", "EnsureShape", "Identity", "StopGradient"}


def of_values(keys: set[Any]) -> DependsOn:
    """What depends on the values, not only the number, of rows with these keys."""
    return DependsOn(keys, _is_behind)


def rows_of(run: ReplicaRun, rank: Any) -> DependsOn:
    """`of_values` of the rows that a replica was given."""
    return of_values(batch_keys(run.batches, trace_of(rank)))


def warn_about_number(
    run: ReplicaRun, rank: Any, metric: Any, number: Any, rows: DependsOn, *, near: bool
) -> None:
    """Warns of a number that `metric` counts and that is not a mean over rows."""
    if _is_no_mean_of_own(run, rank, number, rows, near=near):
        run.checked_numbers.update(id(variable.value) for variable in metric.variables)
        run.state_suspicions.add(
            f"the metric {metric.name!r} counts one number for all rows {NO_MEAN}"
        )


def warn_about_returned(run: ReplicaRun, rank: Any, number: tf.Tensor) -> None:
    """Warns of a number that a step returns and that is not a mean over rows."""
    if _is_no_mean_of_own(run, rank, number, rows_of(run, rank)):
        run.state_suspicions.add(f"a number is returned for all rows {NO_MEAN}")


def _is_no_mean_of_own(
    run: ReplicaRun, rank: Any, number: Any, rows: DependsOn, *, near: bool = False
) -> bool:
    if run.group_size == 1 or isinstance(number, tf.__internal__.EagerTensor):
        return False
    is_none = is_no_mean_over_rows(number, rows, rows_are_near=near)
    return is_none and is_of_own_rows(run.batches, trace_of(rank), number)


def warn_about_loss(run: ReplicaRun, rank: Any, loss: tf.Tensor) -> None:
    """Warns of a loss for `local_mean` that is not a mean over rows."""
    if _is_no_mean_of_own(run, rank, loss, rows_of(run, rank)):
        run.suspicions.add(
            "local_mean was given a number that is no mean over rows, such as a root, "
            "a quotient of sums (Dice) or a sum. Each replica computes that of its own "
            "rows, and their mean is not the loss of the whole batch. Gather the rows "
            "first, tfdp.losses.all_rows(x); for a sum take local_sum"
        )


def is_no_mean_over_rows(
    number: tf.Tensor,
    rows: DependsOn,
    *,
    rows_are_near: bool = False,
    may_be_sum: bool = False,
) -> bool:
    """Whether `number` depends on rows and certainly not as a mean over them.

    With `rows_are_near` only a metric's own ops lie between the rows and `number`, so
    each row counts independently; layers of a model may mix rows. With `may_be_sum` a
    sum over rows is allowed.
    """
    todo, seen = [(number, may_be_sum)], set()
    while todo:
        tensor, is_divided = todo.pop()
        found = outermost(tensor, lambda one: key_of(one) in rows.keys)
        if found is None or found not in rows:
            continue
        if (key_of(found), is_divided) in seen:
            continue
        seen.add((key_of(found), is_divided))
        op, inputs = found.op, list(found.op.inputs)
        if key_of(found) in rows.keys:
            if found.shape.rank:
                return True  # rows as they are
        elif op.type in TERMS:
            todo += [(one, is_divided) for one in inputs]
        elif op.type == "IdentityN":
            todo.append((inputs[found.value_index], is_divided))
        elif op.type in SELECTS:
            todo += [(one, is_divided) for one in inputs[1:]]
        elif op.type in PRODUCTS:
            factors = [one for one in inputs if one in rows]
            if any(one in rows for one in _added_along_rows(op)):
                if not is_divided:
                    return True
                continue
            if len(factors) > 1:
                return True
            # Multiplied by 1 / number of rows.
            is_divided |= any(_is_of_shapes(one, rows) for one in inputs)
            todo += [(one, is_divided) for one in factors]
        elif op.type in QUOTIENTS:
            if inputs[1] in rows:
                return True
            is_divided |= _is_number_of_rows(inputs[1], inputs[0])
            todo.append((inputs[0], is_divided))
        elif op.type in ("Mean", "Sum"):
            axes = reduced_axes(inputs)
            is_over_rows = axes is not None and 0 in axes
            is_sum = op.type == "Sum" and not is_divided
            if not is_over_rows or _is_of_terms(inputs[0]):
                todo.append((inputs[0], is_divided))
            elif is_sum or rows_are_near:
                # If rows were reduced before, the first axis is another one.
                if _mixes_rows(inputs[0], rows):
                    todo.append((inputs[0], is_divided))
                elif is_sum:
                    return True
        elif op.type in FUNCTIONS or (may_be_sum and op.type in PYTHON):
            continue
        elif not (is_divided and _added_along_rows(op)):
            return True
    return False


def is_plain_mean(mean: tf.Tensor, rows: DependsOn) -> bool:
    """Whether a Mean op averages rows, and not columns of sums."""
    inputs = list(mean.op.inputs)
    is_over_rows = 0 in (reduced_axes(inputs) or ()) and not _is_of_terms(inputs[0])
    is_reduced = inputs[0].op.type in REDUCTIONS and _is_over_rows(inputs[0].op)
    return is_over_rows and not is_reduced and mean in rows


def is_sum_over_rows(loss: tf.Tensor, rows: DependsOn) -> bool:
    """Whether a term of `loss` is a sum over `rows`, not divided by their number."""
    numbered = DependsOn(rows.keys)  # a sum of ones over rows counts, too
    todo = [loss]
    for tensor in graph_tensors(todo):
        if is_exchanged(tensor):
            continue
        op, inputs = tensor.op, list(tensor.op.inputs)
        if op.type in QUOTIENTS:
            is_of_all = _is_of_all(inputs[1], numbered)
            if is_of_all or not _is_number_of_rows(inputs[1], inputs[0]):
                todo.append(inputs[0])
        elif op.type == "Sum":
            is_over_rows = 0 in (reduced_axes(inputs) or ())
            if is_over_rows and not _is_of_terms(inputs[0]):
                if inputs[0] in numbered:
                    return True
            todo.append(inputs[0])
        elif op.type in PASSING:
            is_divided = op.type == "Mul" and any(
                _is_of_shapes(one, rows) for one in inputs
            )
            todo += [] if is_divided else inputs
        elif op.type in SELECTS:
            todo += inputs[1:]
        elif any(one in numbered for one in _added_along_rows(op)):
            return True
    return False


def _is_of_terms(tensor: tf.Tensor) -> bool:
    """Whether the first axis of `tensor` enumerates terms, not rows."""
    found = outermost(tensor)
    return getattr(getattr(found, "op", None), "type", None) == "Pack"


def _added_along_rows(op: tf.Operation) -> list[tf.Tensor]:
    """The inputs of an op other than Sum that it adds up along their rows."""
    inputs = list(op.inputs)
    if op.type == "MatMul":
        first, second = inputs
        # The contracted axis of each is its rows or its columns.
        return [first] * op.get_attr("transpose_a") + [second] * (
            not op.get_attr("transpose_b")
        )
    if op.type == "Einsum":
        given, made = op.get_attr("equation").decode().split("->")
        labels = zip(given.split(","), inputs, strict=True)
        return [one for label, one in labels if label[:1] not in ("", ".", *made)]
    return inputs[SUMS_OF_ROWS[op.type]] if op.type in SUMS_OF_ROWS else []


def _is_of_all(number: tf.Tensor, rows: DependsOn) -> bool:
    """Whether `number` depends on an exchange, such as the global number of rows; that
    of own rows does not, although weights may have been gathered for it."""

    def is_own(one: tf.Tensor) -> bool:
        return one.op.type in SHAPES and one.op.inputs[0] in rows

    near = itertools.islice(ancestors(number, is_behind=is_own), MOST_NEAR)
    return any(map(is_exchanged, near))


def _is_number_of_rows(divisor: tf.Tensor, total: tf.Tensor) -> bool:
    """Whether it comes from data, or from the shape of what was added up."""
    number = tf.get_static_value(divisor)
    if number is None:
        return True
    while total.op.type in PASSING:  # perhaps times a constant
        parts = [one for one in total.op.inputs if tf.get_static_value(one) is None]
        if len(parts) != 1:
            break
        (total,) = parts
    shape = total.op.inputs[0].shape if total.op.type == "Sum" else tf.TensorShape([])
    return bool(shape.rank) and number in (shape[0], shape.num_elements())


def _is_of_shapes(tensor: tf.Tensor, rows: DependsOn) -> bool:
    """Whether `tensor` depends only on the number of rows, such as 1 over it."""
    if tensor.shape.rank != 0 or isinstance(tensor, tf.__internal__.EagerTensor):
        return False
    near = itertools.islice(ancestors(tensor), MOST_NEAR)
    return any(one.op.type in SHAPES for one in near) and tensor not in rows


def _mixes_rows(tensor: tf.Tensor, rows: DependsOn) -> bool:
    def is_row(one: tf.Tensor) -> bool:
        return key_of(one) in rows.keys

    near = ancestors(
        tensor, is_found=is_row, is_behind=lambda one: is_row(one) or _is_behind(one)
    )
    return any(
        _is_over_rows(one.op) and any(each in rows for each in one.op.inputs)
        for one in near
    )


def _is_over_rows(op: tf.Operation) -> bool:
    inputs = list(op.inputs)
    if op.type in REDUCTIONS:
        return 0 in (reduced_axes(inputs) or ())
    if op.type in MIXING_ON_FIRST_AXIS:
        axes = tf.get_static_value(inputs[1])
        return axes is not None and 0 in axes.reshape(-1) % inputs[0].shape.rank
    if op.type == "TopKV2":
        return inputs[0].shape.rank == 1
    return op.type in MIXING


def _is_behind(tensor: tf.Tensor) -> bool:
    return is_exchanged(tensor) or tensor.op.type in SHAPES


def warn_about_pairs(run: ReplicaRun) -> None:
    """Warns of rows that are paired with the replica's rows only."""
    if run.group_size == 1 or not run.batches or tf.executing_eagerly():
        return
    # One replica is enough: the others do the same, or another check warns.
    trace = min(run.batches)
    batch = run.batches[trace]
    if any(tensor.shape.rank and tensor.shape[0] == 1 for tensor in batch):
        return  # with one row the axes of rows cannot be identified
    rows = of_values(batch_keys(run.batches, trace))
    graph = tf.compat.v1.get_default_graph()
    for op in operations_within(graph.get_operations()):
        pair = None if _is_of_each_alone(op) else _pair_of(op)
        if pair is None or not all(tensor in rows for tensor in pair):
            continue
        if all(has_rows_of(tensor, batch, deeply=True) for tensor in pair):
            run.suspicions.add(
                f"rows are paired with all rows of their batch (in {op.name!r}), as in "
                "contrastive losses, and a replica has its own rows only: each is "
                "paired with fewer others than on one device. Pair them with the rows "
                "of all replicas, tfdp.losses.all_rows(x), and scale the loss of all "
                "pairs to its share, tfdp.losses.local_mean(loss)"
            )
            return


def _is_of_each_alone(op: tf.Operation) -> bool:
    """Whether only the diagonal of a product of rows with rows is used."""
    if op.type not in ("Einsum", "MatMul"):
        return False
    used = {consumer.type for consumer in op.outputs[0].consumers()}
    return bool(used & DIAGONALS) and used <= DIAGONALS | {"Shape", "ZerosLike"}


def _pair_of(op: tf.Operation) -> Sequence[tf.Tensor] | None:
    """What would be paired if both had rows first; None: `op` pairs nothing."""
    if op.type == "MatMul":
        first, second = op.inputs
        if op.get_attr("transpose_a"):
            return None  # a sum over the rows of the first one
        if op.get_attr("transpose_b"):
            return first, second
        turned = _turned(second)
        return None if turned is None else (first, turned)
    if op.type == "Einsum" and len(op.inputs) == 2:
        given, made = op.get_attr("equation").decode().split("->")
        labels = [label[:1] for label in given.split(",")]
        is_pair = labels[0] != labels[1] and all(one in made for one in labels)
        return (
            tuple(op.inputs) if is_pair and all(labels) and "." not in labels else None
        )
    if op.type in BETWEEN:
        for one, other in (op.inputs, tuple(op.inputs)[::-1]):
            rank, other_rank = one.shape.rank, other.shape.rank
            if not rank or not other_rank or rank < 2 or one.shape[1] != 1:
                continue
            if other_rank == rank - 1:  # (n, 1, ...) with (n, ...)
                return one, other
            turned = _turned(other) if other.shape[0] == 1 else None
            if other_rank == rank and turned is not None:
                return one, turned
    return None


def _turned(tensor: tf.Tensor) -> tf.Tensor | None:
    """The tensor whose first axis became a later axis of `tensor`; None: unknown."""
    found = outermost(tensor)
    while found is not None and not isinstance(found, tf.__internal__.EagerTensor):
        op = found.op
        if op.type in PASSED_ON:
            found = outermost(op.inputs[0])
            continue
        if op.type == "Transpose":
            order = tf.get_static_value(op.inputs[1])
            return op.inputs[0] if order is not None and order[0] != 0 else None
        if op.type == "Reshape":  # (n,) to (1, n)
            is_turned = op.inputs[0].shape.rank == 1 and found.shape[0] == 1
            return op.inputs[0] if is_turned else None
        if op.type == "ExpandDims":
            axis = tf.get_static_value(op.inputs[1])
            rank = op.inputs[0].shape.rank
            is_first = axis is not None and rank and int(axis) % (rank + 1) == 0
            return op.inputs[0] if is_first else None
        if op.type == "StridedSlice":
            return op.inputs[0] if op.get_attr("new_axis_mask") & 1 else None
        return None
    return None
