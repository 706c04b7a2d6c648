"""Checks values that a step stores, and values equal on all replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfdp._private.names import own_copy, whole_of
from tfdp.lint.registry import is_of_graph
from tfdp.lint.terms import handle_of
from tfdp.lint.values import SAME, SCALED, Term, Value
from tfdp.tracing.step import Step
from tfdp.tracing.stored_state import StoredState


def is_of_own_rows(step: Step, rank: Any, value: tf.Tensor) -> bool:
    """Whether `value` depends on the replica's rows, and no exchange is between."""
    return step.analysis(rank).value(value).is_of_own_rows


def is_same_on_every_replica(step: Step, rank: Any, value: Any, own: Any) -> bool:
    """Whether `value` certainly depends on constants and the variable `own` only, this
    replica's component of a replicated variable: Keras writes
    `counter.assign(counter + 1)`, which each step would broadcast otherwise."""
    if not is_of_graph(value):
        return False
    found = step.analysis(rank).value(value)
    own_reason = getattr(type(whole_of(own)), "differs_by_replica", None)
    if Term.UNKNOWN in found.terms or found.of_all or found.of_share:
        return False
    if found.local - {own_reason}:
        return False
    return {handle for handle, _ in found.reads} <= {handle_of(own.handle)}


def note_first_only(step: Step, rank: Any, variable: Any, value: tf.Tensor) -> None:
    """Warns of a step that sets what all replicas share, such as a learning rate, from
    the first replica's rows."""
    found = step.analysis(rank).value(value)
    if (found.is_of_own_rows or found.of_share) and not step.is_updating:
        step.state_suspicions.add(
            f"{variable.name.split(':')[0]!r} takes the first replica's value, which "
            "depends on its own rows, loss or gradients, where one device takes those "
            "of the whole batch. Sum the loss or the gradients first, "
            "tfdp.losses.all_sum(x), or gather the "
            "rows, tfdp.losses.all_rows(x)"
        )


def handles_of(variables: Iterable[Any], rank: int) -> dict[int, int]:
    """The ids of distributed `variables`, by those of their handles on `rank`."""
    return {own_handle(variable, rank): id(variable) for variable in variables}


def own_handle(variable: Any, rank: int) -> Any:
    """Identifies the copy of a distributed variable on `rank` in `Value.reads`."""
    return handle_of(own_copy(variable, rank).handle)


def linear_sources(
    step: Step, rank: Any, values: Iterable[Any], handles: Mapping[int, int]
) -> set[int]:
    """The ids of the variables (of `handles`) that `values`, such as gradients that a
    step has accumulated itself, are linear in."""
    if not handles:
        return set()
    found = set()
    for value in tf.nest.flatten(list(values), expand_composites=True):
        if isinstance(value, tf.Tensor):
            reads = step.analysis(rank).value(value).reads
            found |= {handles.get(handle) for handle, how in reads if how <= SCALED}
    return {one for one in found if one is not None}


def is_of_all_replicas(step: Step, rank: Any, value: Any) -> bool:
    """Whether `value`, of a graph, depends on rows only through exchanges."""
    parts = tf.nest.flatten(value, expand_composites=True)
    found = [step.analysis(rank).value(part) for part in parts]
    return any(v.of_all for v in found) and not any(v.is_of_replica for v in found)


def is_added(value: Value, variable: Any, rank: int) -> bool:
    """Whether a stored `value` is the variable itself plus something."""
    return (own_handle(variable, rank), SAME) in value.reads


def stored_from_shares(step: Step) -> tuple[list[Any], list[Any]]:
    """Variables in which a replica stored values that depend on its loss share: those
    that are averaged over replicas; and those that only accumulate values that do not
    depend on them, which remain parts of a sum.

    A share and its gradients are parts of a sum, not means over rows.
    """
    first = next((rank for rank, _, _ in step.of(StoredState).values), 0)
    if not step.trace(first).shares:
        return [], []
    averaged: list[Any] = []
    sums: list[Any] = []
    for rank, variable, stored in step.of(StoredState).values:
        if rank != first or id(variable) in step.of(StoredState).own_sums:
            continue
        value = step.analysis(rank).value(stored)
        if value.of_share:
            (sums if is_added(value, variable, rank) else averaged).append(variable)
    return averaged, sums


def has_same_rows(gradient: Any, step: Step, rank: Any) -> bool:
    """Whether the rows of `gradient` have equal indices on all replicas."""
    is_rows = isinstance(gradient, tf.IndexedSlices)
    if not is_rows or not is_of_graph(gradient.indices):
        return False
    # Replicas exchange values of one shape.
    if not gradient.values.shape.is_fully_defined():
        return False
    return is_given_to_all(gradient.indices, step, rank)


def is_given_to_all(indices: tf.Tensor, step: Step, rank: Any) -> bool:
    """Whether all replicas have the same indices, and not from their rows."""
    if not indices.shape.is_fully_defined():
        return False
    value = step.analysis(rank).value(indices)
    return not value.local and value.terms <= {Term.CONSTANT, Term.REPLICATED}
