"""What layers store: how the replicas' own values of it are brought together.

A replica updates what a layer stores (moving statistics) with its own rows. A mean over
rows can be brought together afterwards, as the mean weighted by rows; a sum, a maximum
and the state of single rows cannot.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import layers_within
from tfdp._private.names import own_copy
from tfdp.errors import ConfigurationError
from tfdp.tracing.assigned_terms import is_read_among, term_added_to
from tfdp.tracing.own_rows import MadeOf, is_of_own_rows
from tfdp.tracing.replica_invariance import outermost
from tfdp.tracing.row_means import is_no_mean_over_rows, is_sum_over_rows, rows_of
from tfdp.tracing.run import ReplicaRun, trace_of
from tfdp.tracing.share_made import made_of_shares

__all__ = ["check_no_row_state", "suspect_stored"]

# Of the variables that a warning is about.
MOST_NAMES = 3


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


def suspect_stored(run: ReplicaRun, model: Any) -> None:
    """Notes stored values whose mean over the replicas is not one device's value.

    Args:
      run: whose replicas have been traced.
      model: whose step it is, perhaps.
    """
    if run.replicas == 1:
        return
    of_shares, sums = made_of_shares(run)
    if of_shares:
        run.state_suspicions.add(_what_is_of_shares(of_shares))
    # What a step has accumulated itself is known to be a part of a sum.
    told = run.own_sums | {id(variable) for variable in (*of_shares, *sums)}
    of_rank = functools.cache(functools.partial(rows_of, run))
    for rank, variable, value in run.stored:
        if id(variable) in told:
            continue
        what = _what_it_looks_like(run, rank, variable, value, of_rank(rank))
        clause = None if what is None else _clause(model, variable, what)
        if clause is not None:
            run.state_suspicions.add(clause)


def _clause(model: Any, variable: Any, what: str) -> str | None:
    """What to say of a stored value that looks like `what`; None: nothing."""
    layer = _normalization_of(model, variable)
    if layer is None:
        name = variable.name.split(":")[0]
        return (
            f"what a layer stores in {name!r} is brought together as a mean over "
            f"the replicas' rows, and it looks like {what}"
        )
    if not layer.synchronized:
        return None  # of a replica's own rows, as its documentation says
    return (
        f"the layer {layer.name!r} has synchronized=True and gets a mask (of words, or "
        "of rows that fill up a batch), with which Keras' BatchNormalization takes the "
        "statistics of each replica's own rows. Take tfdp.layers.SyncBatchNormalization"
    )


def _normalization_of(
    model: Any, variable: Any
) -> keras.layers.BatchNormalization | None:
    """The layer of Keras' whose moving statistic it is."""
    if not isinstance(model, keras.Model):
        return None
    for layer in layers_within(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built:
            if any(weight.value is variable for weight in layer.non_trainable_weights):
                return layer
    return None


def _what_is_of_shares(variables: Sequence[Any]) -> str:
    names = [repr(variable.name.split(":")[0]) for variable in variables]
    more = len(names) - MOST_NAMES
    return (
        f"what is stored in {', '.join(names[:MOST_NAMES])}"
        f"{f' and {more} more' if more > 0 else ''} is brought together as a mean over "
        "the replicas' rows, and it is made of the loss or of gradients, of which each "
        "replica has a part of a sum. Take that over all replicas first: "
        "tf.distribute.get_replica_context().all_reduce('sum', x)"
    )


def _what_it_looks_like(
    run: ReplicaRun, rank: int, variable: Any, value: tf.Tensor, rows: MadeOf
) -> str | None:
    handle = outermost(own_copy(variable, rank).handle)
    added = term_added_to(handle, value)
    is_sum = rows.keys and is_sum_over_rows(value if added is None else added, rows)
    # Asked of sums only: it looks at all that the value is made of.
    if is_sum and is_of_own_rows(run.batches, trace_of(rank), value):
        if added is not None:
            return "a running sum over rows. Make it with aggregation='sum'"
        return (
            "made of a sum over rows, as an average of sums is. Take that over all "
            "replicas first: tf.distribute.get_replica_context().all_reduce('sum', x)"
        )
    is_extreme = value.op.type in ("Maximum", "Minimum")
    is_running = is_extreme and is_read_among(handle, value.op.inputs)
    if is_running and is_of_own_rows(run.batches, trace_of(rank), value):
        return (
            "a running maximum or minimum. Take that over all replicas first: "
            "tf.reduce_max(tfdp.losses.all_rows(x))"
        )
    is_own = rows.keys and is_no_mean_over_rows(value, rows)
    if is_own and is_of_own_rows(run.batches, trace_of(rank), value):
        return (
            "made of rows themselves (a queue of them), or in another way that is no "
            "mean over rows (a quotient, a root, a threshold). Gather the rows of all "
            "replicas first, tfdp.losses.all_rows(rows), and make all of them store "
            "the same"
        )
    return None
