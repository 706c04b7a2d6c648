"""Refuses conditionals that replicas would take by their own data.

Replicas that take a branch with an exchange would wait forever for those that do not.
So conditions must not visibly depend on a replica's rows, random numbers or part of a
metric, without an exchange in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.step_ops import names_called
from tfdp.errors import CollectiveError
from tfdp.lint.op_kinds import is_conditional
from tfdp.tracing.step import Step

# The number of rows is mostly equal on all replicas, and so are decisions by it.
REASONS = {
    "metric": "by its own part of a metric",
    "drawn": "by a number that it draws itself",
    "rows": "by its own rows",
    "rank": "by its rank",
}


def refuse_own_branches(step: Step, branches: Sequence[tuple[int, tf.Graph]]) -> None:
    """Refuses branches with exchanges on which a replica's own data decides."""
    if step.replicas == 1:
        return
    decided_by: dict[int, list[Any]] = {}
    for rank, branch in dict.fromkeys(branches):
        condition = _condition_of(branch)
        if condition is None:
            continue
        why = own_source_of(step, rank, condition)
        if why is not None:
            raise CollectiveError(_message(why))
        decided_by.setdefault(rank, []).append(_drawn(step, rank, condition))
    if len(set(map(tuple, decided_by.values()))) > 1:
        raise CollectiveError(_message("by its rank, or by a number that it draws"))


def _message(why: str) -> str:
    return (
        "An update of weights, or another exchange between replicas (all_reduce, "
        "synchronized batch normalization), was built in a conditional that a replica "
        f"takes {why}: those that take the branch would wait forever for those that "
        "do not, or update their shards alone. Decide over all replicas first: "
        "tfdp.losses.all_sum(tf.cast(condition, "
        "tf.int32)) is the number of replicas with True. To skip batches with a loss "
        "that is not finite, use tfdp.callbacks.NaNGuard."
    )


def _condition_of(branch: tf.Graph) -> tf.Tensor | None:
    """The condition of `branch`; None: it belongs to no conditional."""
    for op in branch.outer_graph.get_operations():
        if is_conditional(op) and branch.name in names_called(op):
            return op.inputs[0]
    return None


def own_source_of(step: Step, rank: int, value: tf.Tensor) -> str | None:
    """Which data of its own a replica computes a value from; None: no such data."""
    local = step.analysis(rank).value(value).local
    return next((words for reason, words in REASONS.items() if reason in local), None)


def _drawn(step: Step, rank: int, value: tf.Tensor) -> frozenset[str]:
    """Reasons to differ by replica, except rows: its rank, seeds of random numbers."""
    local = step.analysis(rank).value(value).local
    return frozenset(one for one in local if one not in ("rows", "counts"))
