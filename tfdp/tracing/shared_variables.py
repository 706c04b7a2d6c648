"""Variables of which there is one for all replicas, and what these make of it.

Such a variable was made outside of the strategy's scope. Each replica's program runs on
it in turn, where one device would run it once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdp.tracing.loss_shares import ancestors
from tfdp.tracing.own_rows import is_of_own_rows
from tfdp.tracing.replica_invariance import is_exchanged, outermost
from tfdp.tracing.run import ReplicaRun

__all__ = ["suspect_shared"]

ADDITIONS = ("AssignAddVariableOp", "AssignSubVariableOp")
EXTREMES = ("Maximum", "Minimum")


def suspect_shared(
    run: ReplicaRun, shared: Mapping[Any, Sequence[tf.Operation]]
) -> None:
    """Notes variables that are not what one device would have made of them.

    Args:
      run: whose replicas are traced.
      shared: by the handle of a resource, as a reference, what several replicas do.
    """
    for handle, group in shared.items():
        found = [what for op in group if (what := _what_is_wrong(run, op))]
        if len(found) < 2:
            continue  # nothing, or one replica does it for all
        what = found[0]
        run.state_suspicions.add(
            f"the variable {_name_of(handle.deref())!r}, which was not made in "
            f"strategy.scope(), {what}. Make it in strategy.scope(): then each replica "
            "has its own, which are brought together"
        )


def _what_is_wrong(run: ReplicaRun, op: tf.Operation) -> str | None:
    if op.type in ADDITIONS:
        # What replicas add of their rows is that of all rows; a count of steps is not.
        step = tf.get_static_value(op.inputs[1])
        is_count = step is not None and step.shape == () and abs(step) == 1
        return f"is counted up by each of {run.replicas} replicas" if is_count else None
    if op.type != "AssignVariableOp":
        return None
    handle, value = op.inputs
    if value.op.type in EXTREMES:
        return None  # the same, however often
    if any(read is handle for read in _read_for(value)):
        return (
            f"is assigned to by each of {run.replicas} replicas, by what it was before"
        )
    if any(is_of_own_rows(run.batches, trace, value) for trace in run.batches):
        return "keeps what the last replica makes of its own rows"
    return None


def _read_for(value: tf.Tensor) -> Iterator[tf.Tensor]:
    """The handles of the variables that `value` is made of, but by no exchange."""
    for tensor in ancestors(value, is_behind=is_exchanged):
        if tensor.op.type == "ReadVariableOp":
            yield tensor.op.inputs[0]


def _name_of(handle: tf.Tensor) -> str:
    # A handle is all there is of the variable here, and only its words have the name.
    named = re.search(r'name="([^"]*?)(/\d+)?"', str(outermost(handle)))
    return named[1] if named else handle.name
