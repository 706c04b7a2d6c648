"""Checks that the replicas' values of a metric's variables add up.

Reading a metric returns the sum over the replicas. That is exact for sums over rows; it
is not for a maximum, a running mean, or the value of the last batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.names import own_copy
from tfdp._private.step_ops import MAY_CALL, PYTHON
from tfdp.tracing.assigned_terms import change_of, is_read_among, term_added_to
from tfdp.tracing.dependencies import DependsOn, is_of_own_rows
from tfdp.tracing.loss_shares import Standing, ancestors
from tfdp.tracing.replica_invariance import graph_tensors, is_exchanged, outermost
from tfdp.tracing.row_means import (
    SELECTS,
    is_no_mean_over_rows,
    is_sum_over_rows,
    rows_of,
)
from tfdp.tracing.run import ReplicaRun, trace_of

MOVES_BY_ITSELF = "something that depends on its own value, such as a running mean"
NO_SUM = "a sum of what is none over rows, such as of maxima or of roots"
REMEDY = (
    "Keep sums over rows, and compute the rest in result(); or make the variable by "
    "add_variable(..., aggregation='only_first_replica'), and give it what is the same "
    "on all replicas, such as a value of tfdp.losses.all_rows(rows)"
)
# The most ops of a metric that are searched: behind them is the whole model.
MOST_NEAR = 300
# Their bodies are not searched.
NOT_LOOKED_INTO = MAY_CALL | PYTHON
TERMS_OF_SUMS = {"Add", "AddN", "AddV2", "Sub"}
SUMS_IN_PLACE = {"TensorScatterAdd", "TensorScatterSub", "XlaDynamicUpdateSlice"}
SAME_VALUE = {"Cast", "EnsureShape", "Identity", "Reshape"}
EXTREMES = set("Max Maximum Min Minimum TensorScatterMax TensorScatterMin".split())


def warn_if_rows_counted(run: ReplicaRun) -> None:
    """Warns of metric values that adding over replicas makes wrong."""
    if run.replicas == 1:
        return
    handles: dict[int, set[int]] = {}
    for rank, variable, _, _ in run.counted:
        handles.setdefault(rank, set()).add(id(_handle(variable, rank)))
    of_rank = functools.cache(functools.partial(rows_of, run))
    for rank, variable, value, is_added in run.counted:
        rows = of_rank(rank)
        if id(variable) in run.checked_numbers:
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
    """Warns of sums of losses that are divided by steps: each replica adds its share of
    a loss, but one whole step."""
    if run.replicas == 1:
        return
    owners = {id(v.value): metric for metric in metrics for v in metric.variables}
    adds_shares, counts_steps = set(), set()
    for rank, variable, value, is_added in run.counted:
        metric = owners.get(id(variable))
        if metric is None or id(variable) in run.checked_numbers:
            continue
        term = value if is_added else change_of(_handle(variable, rank), value)
        if term is None:
            continue
        step = tf.get_static_value(term)
        if step is not None and np.size(step) == 1 and abs(step) == 1:
            counts_steps.add(metric.name)
        elif run.shares[trace_of(rank)].standing_of(term) is Standing.SHARE:
            adds_shares.add(metric.name)
    for name in adds_shares & counts_steps:
        run.state_suspicions.add(
            f"the metric {name!r} adds up a loss, and each of {run.replicas} "
            "replicas adds its share; and counts steps, and each adds one: its "
            f"quotient is 1/{run.replicas} of the loss. Give the loss to a "
            "keras.metrics.Mean, or make the metric's class one of its subclasses, "
            "which passes the loss to super().update_state"
        )


def _handle(variable: object, rank: int) -> tf.Tensor | None:
    return outermost(own_copy(variable, rank).handle)


def _of_a_term(term: tf.Tensor, handles: set[int], rows: DependsOn) -> str | None:
    """What the sum of `term` over steps looks like; None: a sum over rows."""
    if _reads(term, handles):
        return MOVES_BY_ITSELF
    return NO_SUM if is_no_mean_over_rows(term, rows, may_be_sum=True) else None


def _of_a_value(
    handle: tf.Tensor | None, value: tf.Tensor, handles: set[int], rows: DependsOn
) -> str | None:
    """What a variable looks like that is assigned `value`; None: a sum over rows."""
    todo = [value]
    for one in graph_tensors(todo):
        inputs = list(one.op.inputs)
        constant = tf.get_static_value(one)
        is_zero = constant is not None and not constant.any()
        if is_read_among(handle, [one]) or is_zero:
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
        elif one.op.type in SELECTS:  # such as where a step is skipped
            todo += inputs[1:]
        elif one.op.type in NOT_LOOKED_INTO:
            continue
        elif one.op.type in EXTREMES and _reads(one, {id(handle)}):
            return "a running maximum or minimum"
        elif not _reads(one, {id(handle)}):
            return "a value of the last batch, or one that is equal on all replicas"
        elif one.op.type == "TensorScatterUpdate":
            if not _reads(inputs[2], {id(handle)}):
                return "values of the last batch"
        elif one.op.type in TERMS_OF_SUMS:
            held = [each for each in inputs if _reads(each, {id(handle)})]
            if len(held) > 1:
                return MOVES_BY_ITSELF
            if held[0].op.type == "Mul":
                # A decaying sum over rows adds up over the replicas, too.
                others = [one for one in inputs if one is not held[0] and one in rows]
                if not all(is_sum_over_rows(each, rows) for each in others):
                    return "an average that forgets older batches"
                continue
            todo += held
            for each in inputs:
                what = None if each is held[0] else _of_a_term(each, handles, rows)
                if what is not None:
                    return what
        elif one.op.type in SUMS_IN_PLACE:
            continue
        else:
            return "something other than its old value plus a sum over rows"
    return None


def _reads(value: tf.Tensor, handles: set[int]) -> bool:
    """Whether `value` depends on a variable of `handles`, within `MOST_NEAR` ops."""
    near = itertools.islice(ancestors(value, is_behind=is_exchanged), MOST_NEAR)
    return any(
        one.op.type == "ReadVariableOp" and id(outermost(one.op.inputs[0])) in handles
        for one in near
    )
