"""The `ReplicaRun` that the calling code is part of, if any."""

from __future__ import annotations

import tensorflow as tf

from tfdp._private.names import current_rank
from tfdp.exchange.exchange_names import name_of_exchanges
from tfdp.tracing.run import ReplicaRun

__all__ = ["current_run", "name_of_gradient"]


def current_run() -> tuple[ReplicaRun, int] | None:
    """The run and this replica's rank; None outside a tfdp strategy's replicas."""
    if tf.distribute.in_cross_replica_context():
        return None
    run = getattr(tf.distribute.get_strategy().extended, "current_run", None)
    return None if run is None else (run, current_rank())


def name_of_gradient() -> str:
    """Asked in a forward pass: the name of the exchanges that its gradient will take.

    For `exchanges_of`, in the backward pass. What is computed again in a backward pass
    has names that begin with that of what is.

    Returns:
      A name that all replicas and hosts find alike; "" where nobody meets under one.
    """
    found = current_run()
    if found is None:
        return ""
    run, rank = found
    within = name_of_exchanges() or ""
    return f"{within}{run.next_exchange_due(rank, within)}."
