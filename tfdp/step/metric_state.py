"""What metrics count in: whether the replicas' own values of it add up.

Each replica counts for itself, and who reads a metric gets the sums over the replicas.
A sum over rows is the whole batches' then; a maximum, a mean that moves by what it
holds, and the value of the last batch are not.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.names import own_copy
from tfdp._private.step_ops import MAY_CALL, PYTHON
from tfdp.tracing.assigned_terms import change_of, is_read_among, term_added_to
from tfdp.tracing.dependencies import DependsOn, is_of_own_rows
from tfdp.tracing.loss_shares import Standing, ancestors, key_of
from tfdp.tracing.replica_invariance import is_exchanged, outermost
from tfdp.tracing.row_means import (
    SELECTS,
    is_no_mean_over_rows,
    is_sum_over_rows,
    rows_of,
)
from tfdp.tracing.run import ReplicaRun, trace_of

MOVES_BY_ITSELF = "something that moves by what it holds, such as a running mean"
NO_SUM = "a sum of what is none over rows, such as of maxima or of roots"
REMEDY = (
    "Keep sums over rows, and make the rest of them in result(); or make the variable "
    "by add_variable(..., aggregation='only_first_replica'), and give it what is the "
    "same on all replicas, made of tfdp.losses.all_rows(rows)"
)
# A metric is so many operations at most; what it counts is made of a whole model.
MOST_NEAR = 300
# What they make of it is not looked for.
NOT_LOOKED_INTO = MAY_CALL | PYTHON
TERMS_OF_SUMS = {"Add", "AddN", "AddV2", "Sub"}
SUMS_IN_PLACE = {"TensorScatterAdd", "TensorScatterSub", "XlaDynamicUpdateSlice"}
SAME_VALUE = {"Cast", "EnsureShape", "Identity", "Reshape"}
EXTREMES = {
    *("Max", "Maximum", "Min", "Minimum", "TensorScatterMax", "TensorScatterMin"),
}


def warn_if_rows_counted(run: ReplicaRun) -> None:
    """Notes values of metrics whose sum over the replicas is not one device's value."""
    if run.replicas == 1:
        return
    handles: dict[int, set[int]] = {}
    for rank, variable, _, _ in run.counted:
        handles.setdefault(rank, set()).add(id(_handle(variable, rank)))
    of_rank = functools.cache(functools.partial(rows_of, run))
    for rank, variable, value, is_added in run.counted:
        rows = of_rank(rank)
        if id(variable) in run.numbers_told:
            continue
        if is_added:
            what = _of_a_term(value, handles[rank], rows)
        else:
            what = _of_a_value(_handle(variable, rank), value, handles[rank], rows)
        is_whole = what == NO_SUM and not is_of_own_rows(
            run.batches, trace_of(rank), value
        )
        if what is not None and not is_whole:
            name = variable.name.split(":")[0]
            run.state_suspicions.add(
                f"what a metric counts in {name!r} is added up over the replicas, and "
                f"it looks like {what}. {REMEDY}"
            )


def warn_if_steps_counted(
    run: ReplicaRun, metrics: Iterable[keras.metrics.Metric]
) -> None:
    """Notes metrics that divide a sum of losses by steps that each replica counts.

    Of a loss each replica adds its share, so the sum is that of one device; of steps
    each adds one.
    """
    if run.replicas == 1:
        return
    owners = {id(v.value): metric for metric in metrics for v in metric.variables}
    adds_shares, counts_steps = set(), set()
    for rank, variable, value, is_added in run.counted:
        metric = owners.get(id(variable))
        if metric is None or id(variable) in run.numbers_told:
            continue
        term = value
        if not is_added:
            term = change_of(_handle(variable, rank), value)
        if term is None:
            continue
        step = tf.get_static_value(term)
        if step is not None and np.size(step) == 1 and abs(step) == 1:
            counts_steps.add(metric.name)
        elif run.shares[trace_of(rank)].standing_of(term) is Standing.SHARE:
            adds_shares.add(metric.name)
    for name in adds_shares & counts_steps:
        run.state_suspicions.add(
            f"the metric {name!r} adds up a loss, of which each of {run.replicas} "
            "replicas brings its share, and counts steps, of which each brings one: "
            f"its quotient is 1/{run.replicas} of the loss. Give the loss to a "
            "keras.metrics.Mean, or make the metric's class one of its subclasses, "
            "which hands the loss to super().update_state"
        )


def _handle(variable: object, rank: int) -> tf.Tensor | None:
    return outermost(own_copy(variable, rank).handle)


def _of_a_term(term: tf.Tensor, handles: set[int], rows: DependsOn) -> str | None:
    """What the sum of `term` over the steps looks like; None: a sum over rows."""
    if _reads(term, handles):
        return MOVES_BY_ITSELF
    if is_no_mean_over_rows(term, rows, may_be_sum=True):
        return NO_SUM
    return None


def _of_a_value(
    handle: tf.Tensor | None, value: tf.Tensor, handles: set[int], rows: DependsOn
) -> str | None:
    """What a variable of `handle` that is given `value` looks like; None: a sum."""
    todo, seen = [value], set()
    while todo:
        one = outermost(todo.pop())
        if one is None or isinstance(one, tf.__internal__.EagerTensor):
            continue
        if key_of(one) in seen:
            continue
        seen.add(key_of(one))
        inputs = list(one.op.inputs)
        if is_read_among(handle, [one]) or _is_zero(one):
            continue
        term = term_added_to(handle, one)
        if one.op.type == "Sub" and is_read_among(handle, inputs[:1]):
            term = inputs[1]
        if term is not None:
            what = _of_a_term(term, handles, rows)
            if what is not None:
                return what
        elif one.op.type in SAME_VALUE:
            todo += inputs[:1]
        elif one.op.type in SELECTS:  # as where a step is left out
            todo += inputs[1:]
        elif one.op.type in NOT_LOOKED_INTO:
            continue
        elif one.op.type in EXTREMES and _reads(one, {id(handle)}):
            return "a running maximum or minimum"
        elif not _reads(one, {id(handle)}):
            return "a value of the last batch, or one that all replicas have alike"
        elif one.op.type == "TensorScatterUpdate":
            if not _reads(inputs[2], {id(handle)}):
                return "values of the last batch"
        elif one.op.type in TERMS_OF_SUMS:
            held = [each for each in inputs if _reads(each, {id(handle)})]
            if len(held) > 1:
                return MOVES_BY_ITSELF
            if held[0].op.type == "Mul":
                if _forgets(held[0], inputs, rows):
                    return "an average that forgets what is long ago"
                continue
            todo += held
            for each in inputs:
                what = None if each is held[0] else _of_a_term(each, handles, rows)
                if what is not None:
                    return what
        elif one.op.type in SUMS_IN_PLACE:
            continue
        else:
            return "something else than a sum of what it held and of rows"
    return None


def _forgets(held: tf.Tensor, terms: Sequence[tf.Tensor], rows: DependsOn) -> bool:
    """Whether `held`, a multiple of what was there, gets no sum over rows added.

    A sum that forgets adds up over the replicas as well.
    """
    return any(
        one in rows and not is_sum_over_rows(one, rows)
        for one in terms
        if one is not held
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
