"""State and sums of metrics that the replicas of a step store in their own copies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdp.lint.registry import is_of_graph
from tfdp.tracing.step import Step


@dataclass
class StoredState:
    """State that all replicas of a step have stored so far."""

    #: What replicas assigned to their own copies: rank, variable, value.
    values: list[tuple[int, Any, tf.Tensor]] = field(default_factory=list)
    #: Ids of variables in which replicas accumulate their own sums of gradients.
    own_sums: set[int] = field(default_factory=set)
    #: Whether buffers that are still local are synchronized at the end of the step.
    synchronizes_at_end: bool = False
    #: Why state that is stored after the update is refused; "": it is allowed.
    refuses_late: str = ""

    def graphs(self, rank: Any) -> dict[int, Any]:
        """The graph in which a replica stored each variable last, by variable id."""
        return {id(v): value.graph for by, v, value in self.values if by == rank}


@dataclass
class LocalState:
    """Mirrored float variables that one replica assigned independently, by id."""

    variables: dict[int, Any] = field(default_factory=dict)

    def take(self) -> list[Any]:
        """Removes and returns the variables."""
        taken, self.variables = self.variables, {}
        return list(taken.values())

    def put_back(self, variables: Iterable[Any]) -> None:
        self.variables.update((id(variable), variable) for variable in variables)


def note_local_state(step: Step, rank: Any, variable: Any, value: Any = None) -> None:
    """Records that a replica assigned `value` to its own copy, unless in an update,
    which is the same on all replicas."""
    trace = step.trace(rank)
    if trace.updates:
        return
    trace.of(LocalState).variables[id(variable)] = variable
    if isinstance(rank, int) and is_of_graph(value):
        step.of(StoredState).values.append((rank, variable, value))


@dataclass
class MetricNotes:
    """The metrics of a step, by what is known of them."""

    #: What replicas assigned to sums of metrics: rank, variable, value, is it added.
    counted: list[tuple[int, Any, tf.Tensor, bool]] = field(default_factory=list)
    #: Ids of variables that are checked elsewhere, or warned about already.
    checked: set[int] = field(default_factory=set)
    #: Ids of metrics that count a number of all rows by the replica's rows.
    weighted_means: set[int] = field(default_factory=set)


def note_counted(
    step: Step, rank: Any, variable: Any, value: Any, is_added: bool
) -> None:
    """Records what a replica assigns, or adds, to a sum of a metric."""
    if isinstance(rank, int) and is_of_graph(value):
        step.of(MetricNotes).counted.append((rank, variable, value, is_added))
