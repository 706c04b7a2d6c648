"""What `tf.summary` writes in a step: TensorFlow has the first replica write it."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tfdp._private.step_ops import operations_within
from tfdp.step.own_branches import what_is_own
from tfdp.tracing.replica_invariance import outermost
from tfdp.tracing.run import ReplicaRun

__all__ = ["suspect_written"]


def suspect_written(run: ReplicaRun, operations: Iterable[tf.Operation]) -> None:
    """Notes numbers that are written of one replica and look like those of all.

    Args:
      run: whose replicas have been traced.
      operations: that they have built.
    """
    if run.replicas == 1:
        return
    found: dict[str, str] = {}
    for op in operations_within(operations):
        if op.type != "WriteSummary":
            continue
        _, _, value, tag, _ = op.inputs
        # Images, sounds and texts are strings: examples, of whichever rows.
        why = None if value.dtype == tf.string else what_is_own(run, 0, value)
        if why is not None:
            name = tf.get_static_value(outermost(tag))
            found[op.name if name is None else tf.compat.as_text(name.item())] = why
    if found:
        names = ", ".join(map(repr, found))
        run.state_suspicions.add(
            f"tf.summary writes {names} of the first replica alone, which makes it "
            f"{next(iter(found.values()))}; of a loss that is its share. Write what "
            "all replicas have together, which for a loss is "
            "tf.distribute.get_replica_context().all_reduce('sum', loss); or return "
            "it from the step: fit reports that of all rows, and "
            "keras.callbacks.TensorBoard writes it"
        )
