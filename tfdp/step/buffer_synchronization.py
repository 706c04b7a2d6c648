"""What a step stores behind its last update, brought together at its end.

What layers store travels with the gradients (`step.sums`). A step may store more when
these have left: a centre of the predictions, the probability of an augmentation, the
moving statistics of a second forward pass; or it makes no update at all. Such values
get an exchange of their own where they are made of the replica's rows. Others, such as
an average of weights, are alike on all replicas already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.functions import library_code
from tfdp._private.keras_models import layers_within
from tfdp._private.names import current_rank, own_copy
from tfdp._private.step_ops import operations_within
from tfdp.errors import ConfigurationError
from tfdp.step.own_branches import what_is_own
from tfdp.tracing.assigned_terms import is_read_among, term_added_to
from tfdp.tracing.dependencies import DependsOn, is_of_own_rows, made_of_shares
from tfdp.tracing.replica_invariance import outermost
from tfdp.tracing.row_means import is_no_mean_over_rows, is_sum_over_rows, rows_of
from tfdp.tracing.run import ReplicaRun, trace_of
from tfdp.tracing.trace_order import sum_in_words


def with_late_state(step: Callable, run: ReplicaRun) -> Callable:
    """`step`, which leaves what it stores of its rows alike on all replicas.

    Args:
      step: what every replica runs.
      run: in which it is traced.

    Cost: one exchange of what is stored late; nothing where there is none.
    """
    if tf.executing_eagerly() or run.replicas == 1 or run.is_local:
        return step
    run.ends_with_late_state = True

    @library_code
    @functools.wraps(step)
    def step_with_late_state(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        rank = current_rank()
        if isinstance(rank, int):
            _bring_together(run, rank)
        return result

    return step_with_late_state


def _bring_together(run: ReplicaRun, rank: int) -> None:
    late = run.take_local_state(rank)
    if run.late_buffers is None:
        # Once for all replicas: one that found something else would wait in an
        # exchange for the others.
        ids = {id(variable) for variable in late} - run.own_sums
        run.late_buffers = _of_rows(run, rank, ids) if ids else set()
    bring_together([one for one in late if id(one) in run.late_buffers], run, rank)


def _of_rows(run: ReplicaRun, rank: int, ids: set[int]) -> set[int]:
    """Those of `ids` whose variables' values may be means over rows."""
    found = set()
    for stored_by, variable, value in run.stored:
        if stored_by != rank or id(variable) not in ids:
            continue
        if not is_of_own_rows(run.batches, trace_of(rank), value):
            continue
        handle = outermost(own_copy(variable, rank).handle)
        # Without an update what is added up may be gradients for one in a later step:
        # parts of a sum.
        if run.updates or term_added_to(handle, value) is None:
            found.add(id(variable))
    return found


# Moving statistics that each replica updated on its own: their mean over all samples.
#
# Each replica adds its share, and stores the sum.


def bring_layers_together(run: ReplicaRun, rank: Any) -> None:
    """Before gradients are accumulated: what layers store of this batch is theirs now.

    It would travel with the gradients, once for all batches of an accumulation, and
    each replica would weigh as its rows of the last one; and what is evaluated before
    would be by each replica's own.

    Cost: one exchange of what layers have stored.
    """
    if run.replicas > 1 and not run.is_local:
        bring_together(run.take_local_state(rank), run, rank)


def bring_together(state: Sequence[Any], run: ReplicaRun, rank: Any) -> None:
    """Leaves the mean over all samples in every replica's copy, by an exchange."""
    if not state:
        return
    shares = weighted_state(state, run, rank)
    if tf.executing_eagerly():
        run.eager_order.meet(rank, sum_in_words(shares))
        context = tf.distribute.get_replica_context()
        means = context.all_reduce(tf.distribute.ReduceOp.SUM, shares)
    else:
        reducer = tf.distribute.get_strategy().extended.reducer
        means = reducer.all_reduce(shares, rank, mean=False)
    store_state(state, means, run, rank)


def weighted_state(state: Sequence[Any], run: ReplicaRun, rank: Any) -> list[tf.Tensor]:
    """This replica's shares of means over samples; nothing when it has no sample.

    Args:
      state: variables that it updated on its own.
      run: in which it is traced.
      rank: the calling replica.
    """
    return [_weighted(variable, run, rank) for variable in state]


def store_state(
    state: Sequence[Any], means: Sequence[tf.Tensor], run: ReplicaRun, rank: Any
) -> None:
    """Stores the means in the calling replica's copies.

    In this replica, and not by `assign`, which would reduce once more.
    """

    for variable, value in zip(state, means, strict=True):
        extended = variable.distribute_strategy.extended
        extended.update_own_copy(variable, lambda own, v: own.assign(v), value)


def _weighted(variable: Any, run: ReplicaRun, rank: Any) -> tf.Tensor:
    share = tf.cast(run.share_of(rank), variable.dtype)
    value = own_copy(variable, rank).read_value()
    # Statistics of no sample are not a number, and 0 times that is not 0.
    return tf.where(share > 0, value * share, tf.zeros_like(value))


# What layers store: how the replicas' own values of it are brought together.
#
# A replica updates what a layer stores (moving statistics) with its own rows. A mean
# over rows can be brought together afterwards, as the mean weighted by rows; a sum, a
# maximum and the state of single rows cannot.


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
    run: ReplicaRun, rank: int, variable: Any, value: tf.Tensor, rows: DependsOn
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


# What `tf.summary` writes in a step: TensorFlow has the first replica write it.


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
