"""Whether something is a mean or a sum over a replica's rows, told from its graph.

The mean over all rows is the replicas' means, weighed by their rows. Of no other number
it is: of a root, a quotient of two sums, a maximum, replicas only have their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.step_ops import MAY_CALL, PYTHON, operations_within
from tfdp.tracing.batch_rows import REDUCTIONS, has_rows_of, reduced_axes
from tfdp.tracing.dependencies import SHAPES, DependsOn, batch_keys, is_of_own_rows
from tfdp.tracing.loss_shares import QUOTIENTS, ancestors, key_of
from tfdp.tracing.replica_invariance import is_exchanged, outermost
from tfdp.tracing.run import ReplicaRun, trace_of

# What passes a number on, or terms of one: each may be a mean.
TERMS = {
    *("AddN", "AddV2", "Add", "BroadcastTo", "Cast", "ConcatV2", "EnsureShape"),
    *("ExpandDims", "GatherV2", "Identity", "Neg", "Pack", "Pad", "Reshape"),
    *("Split", "SplitV", "Squeeze", "StopGradient", "StridedSlice", "Sub", "Tile"),
    *("Cumsum", "DiagPart", "MatrixDiagPartV3", "ReverseV2", "Transpose", "Unpack"),
}
# What reorders, chooses or compares rows.
MIXING = {"Roll", "UniqueV2", "UniqueWithCountsV2", "Where"}  # of a mask: chosen rows
MIXING_ON_FIRST_AXIS = {"Cumprod", "Cumsum", "CumulativeLogsumexp", "ReverseV2"}
PRODUCTS = {"BatchMatMulV2", "Einsum", "MatMul", "Mul"}
# What a sum is followed by: none of it divides by the rows.
PASSING = {
    *("AddN", "AddV2", "Cast", "ExpandDims", "Identity", "Mul", "Neg", "Pack"),
    *("Reshape", "Squeeze", "StridedSlice", "Sub", "Transpose"),
}
# Which of their inputs have the rows that they add up.
SUMS_OF_ROWS = {
    **dict.fromkeys(("L2Loss", "SegmentSum", "UnsortedSegmentSum"), slice(1)),
    **dict.fromkeys(("Bincount", "DenseBincount", "RaggedBincount"), slice(None)),
    "HistogramFixedWidth": slice(1),
    "ScatterNd": slice(2),
    "TensorScatterAdd": slice(1, 3),
}
# A number of rows is so many operations away at most.
MOST_NEAR = 20
SELECTS = {"Select", "SelectV2"}
NO_MEAN = (
    "which is no mean over them, such as a root, a quotient of sums, a sum or a "
    "maximum. Each replica has that of its own rows, their mean is reported, and one "
    "device reports another number. Give a metric a number for each row; or keep sums "
    "over rows in one, and make the rest of them in its result(); or gather the rows "
    "of all replicas first, tfdp.losses.all_rows(y)"
)
# What is made within them is not looked for.
FUNCTIONS = MAY_CALL | {"FusedBatchNormV3"}


def of_values(keys: set[Any]) -> DependsOn:
    """What values of rows go into, and not their number alone.

    Args:
      keys: the keys (`key_of`) of the tensors of rows.
    """
    return DependsOn(keys, _is_behind)


def rows_of(run: ReplicaRun, rank: Any) -> DependsOn:
    """`of_values` of the rows that a replica was given."""
    return of_values(batch_keys(run.batches, trace_of(rank)))


def suspect_number(
    run: ReplicaRun,
    rank: Any,
    metric: Any,
    number: tf.Tensor,
    rows: DependsOn,
    *,
    near: bool,
) -> None:
    """Notes a number that `metric` counts, where it is no mean over rows.

    Args:
      rows, near: see `is_no_mean_over_rows`.
    """
    if _is_no_mean_of_own(run, rank, number, rows, near=near):
        run.numbers_told.update(id(variable.value) for variable in metric.variables)
        run.state_suspicions.add(
            f"the metric {metric.name!r} counts one number for all rows {NO_MEAN}"
        )


def suspect_returned(run: ReplicaRun, rank: Any, number: tf.Tensor) -> None:
    """Notes a number that a step returns, where it is no mean over rows."""
    if _is_no_mean_of_own(run, rank, number, rows_of(run, rank)):
        run.state_suspicions.add(f"a number is returned for all rows {NO_MEAN}")


def _is_no_mean_of_own(
    run: ReplicaRun, rank: Any, number: Any, rows: DependsOn, *, near: bool = False
) -> bool:
    if run.group_size == 1 or isinstance(number, tf.__internal__.EagerTensor):
        return False
    is_none = is_no_mean_over_rows(number, rows, rows_are_near=near)
    return is_none and is_of_own_rows(run.batches, trace_of(rank), number)


def suspect_loss(run: ReplicaRun, rank: Any, loss: tf.Tensor) -> None:
    """Notes a loss, said to be a mean over rows, which is none."""
    if _is_no_mean_of_own(run, rank, loss, rows_of(run, rank)):
        run.suspicions.add(
            "local_mean was given a number that is no mean over rows, such as a root, "
            "a quotient of sums (Dice) or a sum. Each replica has that of its own "
            "rows, and the mean of these is another loss than that of the whole batch. "
            "Gather the rows first, tfdp.losses.all_rows(x); of a sum take local_sum"
        )


def is_no_mean_over_rows(
    number: tf.Tensor,
    rows: DependsOn,
    *,
    rows_are_near: bool = False,
    may_be_sum: bool = False,
) -> bool:
    """Whether `number` is made of rows, and surely not as a mean over them.

    Args:
      number: one of the graph being built, or an array that has nothing of single rows.
      rows: what it may be made of; see `of_values`.
      rows_are_near: whether nothing lies between them and `number` but what a metric
        does, so that each row has to count for itself. A model may have layers whose
        rows depend on each other.
      may_be_sum: whether a sum over rows will do.
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
            # By 1 over their number.
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
                # Where rows are reduced before, the first axis is another one.
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
    """Whether the result of a Mean is one over rows, and not over columns of sums."""
    inputs = list(mean.op.inputs)
    is_over_rows = 0 in (reduced_axes(inputs) or ()) and not _is_of_terms(inputs[0])
    is_reduced = inputs[0].op.type in REDUCTIONS and _is_over_rows(inputs[0].op)
    return is_over_rows and not is_reduced and mean in rows


def is_sum_over_rows(loss: tf.Tensor, rows: DependsOn) -> bool:
    """Whether a term of `loss` is a sum over rows that nothing divides by their number.

    Args:
      loss: a tensor of the graph being built.
      rows: those that the replica was given; see `of_values`.
    """
    numbered = DependsOn(rows.keys)  # a sum of ones over them is one as well
    todo, seen = [loss], set()
    while todo:
        tensor = outermost(todo.pop())
        if tensor is None or isinstance(tensor, tf.__internal__.EagerTensor):
            continue
        if key_of(tensor) in seen or is_exchanged(tensor):
            continue
        seen.add(key_of(tensor))
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
    """Whether the first axis of `tensor` is one of terms, and not of rows."""
    found = outermost(tensor)
    return getattr(getattr(found, "op", None), "type", None) == "Pack"


def _added_along_rows(op: tf.Operation) -> list[tf.Tensor]:
    """The inputs of an operation, other than Sum, that it adds up along their rows."""
    inputs = list(op.inputs)
    if op.type == "MatMul":
        first, second = inputs
        # Of each the axis that both have in common is its rows, or its columns.
        return [first] * op.get_attr("transpose_a") + [second] * (
            not op.get_attr("transpose_b")
        )
    if op.type == "Einsum":
        given, made = op.get_attr("equation").decode().split("->")
        labels = zip(given.split(","), inputs, strict=True)
        return [one for label, one in labels if label[:1] not in ("", ".", *made)]
    return inputs[SUMS_OF_ROWS[op.type]] if op.type in SUMS_OF_ROWS else []


def _is_of_all(number: tf.Tensor, rows: DependsOn) -> bool:
    """Whether it is made of an exchange, such as the number of all replicas' rows.

    The number of own ones is not, whatever was gathered to compute what they became:
    weights, where replicas share them.
    """

    def is_own(one: tf.Tensor) -> bool:
        return one.op.type in SHAPES and one.op.inputs[0] in rows

    near = itertools.islice(ancestors(number, is_behind=is_own), MOST_NEAR)
    return any(map(is_exchanged, near))


def _is_number_of_rows(divisor: tf.Tensor, total: tf.Tensor) -> bool:
    """Whether it is taken from data, or from the shape of what was added up."""
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
    """Whether `tensor` is a number made of that of rows alone, such as 1 over it."""
    if tensor.shape.rank != 0 or isinstance(tensor, tf.__internal__.EagerTensor):
        return False
    near = itertools.islice(ancestors(tensor), MOST_NEAR)
    return any(one.op.type in SHAPES for one in near) and tensor not in rows


def _mixes_rows(tensor: tf.Tensor, rows: DependsOn) -> bool:
    """Whether what `tensor` holds of a row depends on other rows."""

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
    """Whether an operation makes something of several rows of its first input."""
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


# Rows that are paired with rows of their batch, told from the graph.
#
# Contrastive losses multiply each row by all others, or compare their labels. A replica
# has its own rows only, so that each meets fewer others than on one device.


# What compares or joins one row with another where each stands along another axis.
BETWEEN = {
    *("AddV2", "Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd"),
    *("Maximum", "Minimum", "Mul", "NotEqual", "SquaredDifference", "Sub"),
}
DIAGONALS = {"DiagPart", "MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3"}
PASSED_ON = {"Cast", "EnsureShape", "Identity", "StopGradient"}


def suspect_pairs(run: ReplicaRun) -> None:
    """Notes that rows are paired with rows of the replica alone."""
    if run.group_size == 1 or not run.batches or tf.executing_eagerly():
        return
    # Of one replica: the others do the same, or are told of by something else.
    trace = min(run.batches)
    batch = run.batches[trace]
    if any(tensor.shape.rank and tensor.shape[0] == 1 for tensor in batch):
        return  # of one row nobody can tell along which axis it stands
    rows = of_values(batch_keys(run.batches, trace))
    graph = tf.compat.v1.get_default_graph()
    for op in operations_within(graph.get_operations()):
        pair = None if _is_of_each_alone(op) else _pair_of(op)
        if pair is None or not all(tensor in rows for tensor in pair):
            continue
        if all(has_rows_of(tensor, batch, deeply=True) for tensor in pair):
            run.suspicions.add(
                f"rows are paired with all rows of their batch (in {op.name!r}), as in "
                "contrastive losses, and a replica has its own rows only: each meets "
                "fewer others than on one device. Pair them with the rows of all "
                "replicas, tfdp.losses.all_rows(x), and bring the loss of all pairs "
                "to its share, tfdp.losses.local_mean(loss)"
            )
            return


def _is_of_each_alone(op: tf.Operation) -> bool:
    """Whether of a product of rows with rows only that of each with itself is used."""
    if op.type not in ("Einsum", "MatMul"):
        return False
    used = {consumer.type for consumer in op.outputs[0].consumers()}
    return bool(used & DIAGONALS) and used <= DIAGONALS | {"Shape", "ZerosLike"}


def _pair_of(op: tf.Operation) -> Sequence[tf.Tensor] | None:
    """What would be paired if both had rows in front; None: `op` pairs nothing."""
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
    """What has in front what `tensor` has along a later axis; None: nobody can tell."""
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
