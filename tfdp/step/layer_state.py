"""What layers store: how the replicas' own values of it are brought together.

A replica updates what a layer stores (moving statistics) with its own rows. A mean over
rows can be brought together afterwards, as the mean weighted by rows; a sum, a maximum
and the state of single rows cannot.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import layers_within
from tfdp._private.names import own_copy
from tfdp.errors import ConfigurationError
from tfdp.tracing.assigned_terms import is_read_among, term_added_to
from tfdp.tracing.loss_suspicions import is_sum_over_rows
from tfdp.tracing.own_rows import batch_keys, is_of_own_rows
from tfdp.tracing.replica_invariance import outermost
from tfdp.tracing.run import ReplicaRun, trace_of

__all__ = ["check_no_row_state", "suspect_stored"]


def check_no_row_state(model: Any) -> None:
    """Refuses layers that remember single rows from batch to batch.

    Raises:
      ConfigurationError: for a recurrent layer with `stateful=True`.
    """
    if not isinstance(model, keras.Model):
        return
    for layer in layers_within(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ConfigurationError(
                f"The layer {layer.name!r} has stateful=True: it stores a state for "
                "each row of a batch, and each replica has other rows. Return the "
                "states (return_state=True) and pass them on as initial_state with "
                "the batches, or train on one device."
            )


def suspect_stored(run: ReplicaRun) -> None:
    """Notes stored values whose mean over the replicas is not one device's value."""
    if run.replicas == 1:
        return
    for rank, variable, value in run.stored:
        what = _what_it_looks_like(run, rank, variable, value)
        if what is not None:
            name = variable.name.split(":")[0]
            run.state_suspicions.add(
                f"what a layer stores in {name!r} is brought together as a mean over "
                f"the replicas' rows, and it looks like {what}"
            )


def _what_it_looks_like(
    run: ReplicaRun, rank: int, variable: Any, value: tf.Tensor
) -> str | None:
    handle = outermost(own_copy(variable, rank).handle)
    keys = batch_keys(run.batches, trace_of(rank))
    added = term_added_to(handle, value)
    is_sum = keys and is_sum_over_rows(value if added is None else added, keys)
    # Asked of sums only: it looks at all that the value is made of.
    if is_sum and is_of_own_rows(run.batches, trace_of(rank), value):
        if added is not None:
            return "a running sum over rows. Make it with aggregation='sum'"
        return (
            "made of a sum over rows, as an average of sums is. Take that over all "
            "replicas first: tf.distribute.get_replica_context().all_reduce('sum', x)"
        )
    is_extreme = value.op.type in ("Maximum", "Minimum")
    if is_extreme and is_read_among(handle, value.op.inputs):
        return (
            "a running maximum or minimum. Take it over all replicas, or in a metric, "
            "or on one device"
        )
    return None
