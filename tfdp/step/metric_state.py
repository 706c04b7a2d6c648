"""Checks that the replicas' values of a metric's variables add up.

Reading a metric returns the sum over the replicas. That is exact for sums over rows; it
is not for a maximum, a running mean, or the value of the last batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.names import own_copy
from tfdp.lint.op_kinds import is_extreme
from tfdp.lint.terms import change_of, outermost
from tfdp.lint.values import SAME, SCALED, Term, Value
from tfdp.tracing.loss_shares import Standing
from tfdp.tracing.state_checks import own_handle
from tfdp.tracing.step import Step
from tfdp.tracing.stored_state import MetricNotes

MOVES_BY_ITSELF = "something that depends on its own value, such as a running mean"
NO_SUM = "a sum of what is none over rows, such as of maxima or of roots"
REMEDY = (
    "Keep sums over rows, and compute the rest in result(); or make the variable by "
    "add_variable(..., aggregation='only_first_replica'), and give it what is the same "
    "on all replicas, such as a value of tfdp.losses.all_rows(rows)"
)


def warn_if_rows_counted(step: Step) -> None:
    """Warns of metric values that adding over replicas makes wrong."""
    if step.replicas == 1:
        return
    notes = step.of(MetricNotes)
    handles = {own_handle(variable, rank) for rank, variable, _, _ in notes.counted}
    for rank, variable, tensor, is_added in notes.counted:
        if id(variable) in notes.checked:
            continue
        value = step.analysis(rank).value(tensor)
        own, is_running = own_handle(variable, rank), is_extreme(tensor.op)
        what = _what_is_counted(value, own, handles, is_added, is_running)
        if what is not None:
            name = variable.name.split(":")[0]
            step.state_suspicions.add(
                f"what a metric counts in {name!r} is added up over the replicas, and "
                f"it looks like {what}. {REMEDY}"
            )


def warn_if_steps_counted(step: Step, metrics: Iterable[keras.metrics.Metric]) -> None:
    """Warns of sums of losses that are divided by steps: each replica adds its share of
    a loss, but one whole step."""
    if step.replicas == 1:
        return
    owners = {id(v.value): metric for metric in metrics for v in metric.variables}
    adds_shares, counts_steps = set(), set()
    for rank, variable, value, is_added in step.of(MetricNotes).counted:
        metric = owners.get(id(variable))
        if metric is None or id(variable) in step.of(MetricNotes).checked:
            continue
        handle = outermost(own_copy(variable, rank).handle)
        term = value if is_added else change_of(handle, value)
        if term is None:
            continue
        change = tf.get_static_value(term)
        if change is not None and np.size(change) == 1 and abs(change) == 1:
            counts_steps.add(metric.name)
        elif step.trace(rank).shares.standing_of(term) is Standing.SHARE:
            adds_shares.add(metric.name)
    for name in adds_shares & counts_steps:
        step.state_suspicions.add(
            f"the metric {name!r} adds up a loss, and each of {step.replicas} "
            "replicas adds its share; and counts steps, and each adds one: its "
            f"quotient is 1/{step.replicas} of the loss. Sum the loss first, "
            "tfdp.losses.all_sum(loss); or, in a "
            "model's train_step, give it to a keras.metrics.Mean, or to "
            "super().update_state of a subclass of it"
        )


def _what_is_counted(
    value: Value, own: Any, handles: set[Any], is_added: bool, is_running: bool
) -> str | None:
    """Describes a variable that is no sum over rows; None: it is one, or unknown."""
    reads = dict(value.reads)
    if is_running and own in reads:
        return "a running maximum or minimum"
    if Term.UNKNOWN in value.terms or not value.terms:
        return None
    how = reads.pop(own, None)
    if reads.keys() & handles or (is_added and how is not None):
        return MOVES_BY_ITSELF
    is_no_sum = value.is_of_replica and value.terms & {Term.ROWS, Term.OTHER}
    if is_added or how == SAME:
        return NO_SUM if is_no_sum else None
    if how is None:
        return "a value of the last batch, or one that is equal on all replicas"
    if how == SCALED:
        # A decaying sum over rows adds up over the replicas, too.
        others = value.terms - {Term.REPLICATED}
        if others and others <= {Term.SUM, Term.COUNT}:
            return None
    return (
        "something other than its old value plus a sum over rows, such as an average "
        "that forgets older batches"
    )
