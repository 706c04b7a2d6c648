"""Whether a number is a mean over a replica's rows, told from the graph that makes it.

The mean over all rows is the replicas' means, weighed by their rows. Of no other number
it is: of a root, a quotient of two sums, a maximum, replicas only have their own.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.tracing.batch_rows import REDUCTIONS, reduced_axes
from tfdp.tracing.loss_shares import ancestors, key_of
from tfdp.tracing.replica_invariance import is_exchanged, outermost
from tfdp.tracing.run import ReplicaRun

__all__ = ["is_no_mean_over_rows", "is_of_values", "suspect_number"]

# What passes a number on, or terms of one: each may be a mean.
TERMS = {
    *("AddN", "AddV2", "Add", "Cast", "EnsureShape", "ExpandDims", "Identity", "Neg"),
    *("Pack", "Reshape", "Squeeze", "StopGradient", "Sub"),
}
SHAPES = {"Shape", "ShapeN", "Size"}
QUOTIENTS = {"RealDiv", "DivNoNan", "Div"}
SELECTS = {"Select", "SelectV2"}
# What is made within them is not looked for.
FUNCTIONS = {
    *("If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase"),
    *("PartitionedCall", "StatefulPartitionedCall"),
}


def suspect_number(
    run: ReplicaRun, metric: Any, number: tf.Tensor, rows: set[Any], *, near: bool
) -> None:
    """Notes a number that `metric` counts, where it is no mean over rows.

    Args:
      rows, near: see `is_no_mean_over_rows`.
    """
    if run.group_size == 1 or isinstance(number, tf.__internal__.EagerTensor):
        return
    if is_no_mean_over_rows(number, rows, rows_are_near=near):
        run.state_suspicions.add(
            f"the metric {metric.name!r} counts one number for all rows which is no "
            "mean over them, such as a root, a quotient of sums, a sum or a maximum. "
            "Each replica has that of its own rows, their mean is reported, and one "
            "device reports another number. Give it a number for each row; or keep "
            "sums over rows in a metric, and make the rest of them in its result()"
        )


def is_no_mean_over_rows(
    number: tf.Tensor, rows: set[Any], *, rows_are_near: bool = False
) -> bool:
    """Whether `number` is made of rows, and surely not as a mean over them.

    Args:
      number: a scalar of the graph being built.
      rows: the keys (`key_of`) of the tensors of rows that it may be made of.
      rows_are_near: whether nothing lies between them and `number` but what a metric
        does, so that each row has to count for itself. A model may have layers whose
        rows depend on each other.
    """
    todo = [(number, False)]
    while todo:
        tensor, is_divided = todo.pop()
        found = outermost(tensor, lambda one: key_of(one) in rows)
        if found is None or not is_of_values(found, rows):
            continue
        op, inputs = found.op, list(found.op.inputs)
        if op.type in TERMS:
            todo += [(one, is_divided) for one in inputs]
        elif op.type in SELECTS:
            todo += [(one, is_divided) for one in inputs[1:]]
        elif op.type == "Mul":
            factors = [one for one in inputs if is_of_values(one, rows)]
            if len(factors) > 1:
                return True
            todo += [(one, is_divided) for one in factors]
        elif op.type in QUOTIENTS:
            if is_of_values(inputs[1], rows):
                return True
            todo.append((inputs[0], True))
        elif op.type in ("Mean", "Sum"):
            axes = reduced_axes(inputs)
            if axes is None or 0 not in axes:
                todo.append((inputs[0], is_divided))
            elif op.type == "Sum" and not is_divided:
                return True
            elif rows_are_near and _mixes_rows(inputs[0], rows):
                return True
        elif op.type not in FUNCTIONS and key_of(found) not in rows:
            return True
    return False


def is_of_values(tensor: tf.Tensor, rows: set[Any]) -> bool:
    """Whether values of rows go into `tensor`, and not their number alone."""

    def is_row(one: tf.Tensor) -> bool:
        return key_of(one) in rows

    return any(map(is_row, ancestors(tensor, is_found=is_row, is_behind=_is_behind)))


def _mixes_rows(tensor: tf.Tensor, rows: set[Any]) -> bool:
    """Whether what `tensor` holds of a row depends on other rows."""

    def is_row(one: tf.Tensor) -> bool:
        return key_of(one) in rows

    near = ancestors(
        tensor, is_found=is_row, is_behind=lambda one: is_row(one) or _is_behind(one)
    )
    return any(
        0 in (reduced_axes(list(one.op.inputs)) or ()) and is_of_values(one, rows)
        for one in near
        if one.op.type in REDUCTIONS
    )


def _is_behind(tensor: tf.Tensor) -> bool:
    return is_exchanged(tensor) or tensor.op.type in SHAPES
