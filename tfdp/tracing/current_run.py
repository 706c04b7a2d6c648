"""The `ReplicaRun` that the calling code is part of, if any."""

from __future__ import annotations

import tensorflow as tf

from tfdp._private.names import current_rank
from tfdp.tracing.run import ReplicaRun

__all__ = ["current_run"]


def current_run() -> tuple[ReplicaRun, int] | None:
    """The run and this replica's rank; None outside a tfdp strategy's replicas."""
    if tf.distribute.in_cross_replica_context():
        return None
    run = getattr(tf.distribute.get_strategy().extended, "current_run", None)
    return None if run is None else (run, current_rank())
