"""What metrics count in: whether the replicas' own values of it add up.

Each replica counts for itself, and who reads a metric gets the sums over the replicas.
A sum over rows is the whole batches' then; a maximum, a mean that moves by what it
holds, and the value of the last batch are not.
"""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from tfdp._private.names import own_copy
from tfdp._private.step_ops import MAY_CALL
from tfdp.tracing.assigned_terms import is_read_among, term_added_to
from tfdp.tracing.loss_shares import ancestors
from tfdp.tracing.own_rows import batch_keys
from tfdp.tracing.replica_invariance import is_exchanged, outermost
from tfdp.tracing.row_means import is_of_values, is_sum_over_rows
from tfdp.tracing.run import ReplicaRun, trace_of

__all__ = ["suspect_counted"]

REMEDY = (
    "Keep sums over rows, and make the rest of them in result(); or make the variable "
    "by add_variable(..., aggregation='only_first_replica'), and give it what is the "
    "same on all replicas, made of tfdp.losses.all_rows(rows)"
)
# A metric is so many operations at most; what it counts is made of a whole model.
MOST_NEAR = 300
SELECTS = {"Select", "SelectV2"}
SAME_VALUE = {"Cast", "EnsureShape", "Identity", "Reshape"}
EXTREMES = {"Maximum", "Minimum", "Max", "Min"}


def suspect_counted(run: ReplicaRun) -> None:
    """Notes values of metrics whose sum over the replicas is not one device's value."""
    if run.replicas == 1:
        return
    handles: dict[int, set[int]] = {}
    for rank, variable, _, _ in run.counted:
        handles.setdefault(rank, set()).add(id(_handle(variable, rank)))
    for rank, variable, value, is_added in run.counted:
        keys = batch_keys(run.batches, trace_of(rank))
        if is_added:
            what = _of_a_term(value, handles[rank])
        else:
            what = _of_a_value(_handle(variable, rank), value, handles[rank], keys)
        if what is not None:
            name = variable.name.split(":")[0]
            run.state_suspicions.add(
                f"what a metric counts in {name!r} is added up over the replicas, and "
                f"it looks like {what}. {REMEDY}"
            )


def _handle(variable: object, rank: int) -> tf.Tensor | None:
    return outermost(own_copy(variable, rank).handle)


def _of_a_term(term: tf.Tensor, handles: set[int]) -> str | None:
    """What the sum of `term` over the steps looks like; None: a sum over rows."""
    if _reads(term, handles):
        return "something that moves by what it holds, such as a running mean"
    return None


def _of_a_value(
    handle: tf.Tensor | None, value: tf.Tensor, handles: set[int], rows: set[Any]
) -> str | None:
    """What a variable of `handle` that is given `value` looks like; None: a sum."""
    todo = [value]
    while todo:
        one = outermost(todo.pop())
        if one is None or isinstance(one, tf.__internal__.EagerTensor):
            continue
        inputs = list(one.op.inputs)
        if is_read_among(handle, [one]) or _is_zero(one):
            continue
        term = term_added_to(handle, one)
        if one.op.type == "Sub" and is_read_among(handle, inputs[:1]):
            term = inputs[1]
        if term is not None:
            what = _of_a_term(term, handles)
            if what is not None:
                return what
        elif one.op.type in SAME_VALUE:
            todo += inputs[:1]
        elif one.op.type in SELECTS:  # as where a step is left out
            todo += inputs[1:]
        elif one.op.type in MAY_CALL:  # what they make of it is not looked for
            continue
        elif one.op.type in EXTREMES and _reads(one, {id(handle)}):
            return "a running maximum or minimum"
        elif not _reads(one, {id(handle)}):
            return "a value of the last batch, or one that all replicas have alike"
        elif _forgets(one, {id(handle)}, rows):
            return "an average that forgets what is long ago"
    return None


def _forgets(value: tf.Tensor, handle: set[int], rows: set[Any]) -> bool:
    """Whether `value` is a multiple of what the variable holds, plus no sum over rows.

    A sum that forgets adds up over the replicas as well.
    """
    if value.op.type not in ("Add", "AddV2", "Sub"):
        return False
    held = [one for one in value.op.inputs if _reads(one, handle)]
    if len(held) != 1 or held[0].op.type != "Mul":
        return False
    added = (one for one in value.op.inputs if one is not held[0])
    return any(
        is_of_values(one, rows) and not is_sum_over_rows(one, rows) for one in added
    )


def _is_zero(value: tf.Tensor) -> bool:
    constant = tf.get_static_value(value)
    return constant is not None and not constant.any()


def _reads(value: tf.Tensor, handles: set[int]) -> bool:
    """Whether `value` is made of what a variable of `handles` holds, not far away."""
    near = itertools.islice(ancestors(value, is_behind=is_exchanged), MOST_NEAR)
    return any(
        one.op.type == "ReadVariableOp" and id(outermost(one.op.inputs[0])) in handles
        for one in near
    )
