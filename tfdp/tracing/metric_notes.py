"""Notes that a step makes of its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdp.lint.registry import is_of_graph
from tfdp.tracing.step import Step


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
