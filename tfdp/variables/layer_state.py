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
from tfdp.tracing.loss_shares import key_of
from tfdp.tracing.loss_suspicions import is_sum_over_rows
from tfdp.tracing.replica_invariance import outermost
from tfdp.tracing.run import ReplicaRun, trace_of

__all__ = ["check_no_row_state", "suspect_own_state", "term_added_to"]

SAME_VALUE = {"Cast", "Identity"}


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


def suspect_own_state(run: ReplicaRun, rank: Any, variable: Any, value: Any) -> None:
    """Notes a stored value whose mean over the replicas is not one device's value."""
    if run.replicas == 1 or not isinstance(value, tf.Tensor):
        return
    if isinstance(value, tf.__internal__.EagerTensor):
        return
    own = _handle_of(variable, rank)
    if own is None:
        return
    keys = {key_of(tensor) for tensor in run.batches.get(trace_of(rank), [])}
    added = term_added_to(own, value)
    if added is not None and keys and is_sum_over_rows(added, keys):
        what = "a running sum over rows. Make it with aggregation='sum'"
    elif value.op.type in ("Maximum", "Minimum") and _reads(own, value.op.inputs):
        what = (
            "a running maximum or minimum. Take it over all replicas, or in a metric, "
            "or on one device"
        )
    else:
        return
    name = variable.name.split(":")[0]
    run.state_suspicions.add(
        f"what a layer stores in {name!r} is brought together as a mean over the "
        f"replicas' rows, and it looks like {what}"
    )


def term_added_to(handle: tf.Tensor, value: tf.Tensor) -> tf.Tensor | None:
    """d, where `value` is what the variable of `handle` holds, plus d; else None."""
    if value.op.type not in ("AddV2", "Add"):
        return None
    first, second = value.op.inputs
    if _is_read_of(handle, first):
        return second
    return first if _is_read_of(handle, second) else None


def _reads(handle: tf.Tensor, values: Any) -> bool:
    return any(_is_read_of(handle, value) for value in values)


def _is_read_of(handle: tf.Tensor, value: tf.Tensor) -> bool:
    tensor = outermost(value)
    while tensor is not None and not isinstance(tensor, tf.__internal__.EagerTensor):
        if tensor.op.type == "ReadVariableOp":
            return outermost(tensor.op.inputs[0]) is handle
        if tensor.op.type not in SAME_VALUE:
            return False
        tensor = outermost(tensor.op.inputs[0])
    return False


def _handle_of(variable: Any, rank: Any) -> tf.Tensor | None:
    """What names the calling replica's own copy; None: one graph serves all."""
    return outermost(own_copy(variable, rank).handle) if isinstance(rank, int) else None
