"""Buffer synchronization: buffers that replicas update become means over all samples.

Buffers (moving statistics) are normally summed with the gradients (`chain.buffers`).
Those stored after the last update of a step, or in a step without one, get an exchange
at its end if they depend on the replica's rows; others, such as averages, are
replicated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.functions import library_code
from tfdp._private.keras_models import layers_within
from tfdp._private.names import current_rank
from tfdp._private.step_ops import operations_within
from tfdp.errors import ConfigurationError
from tfdp.lint.findings import is_no_mean
from tfdp.lint.op_kinds import is_extreme, writes_summary
from tfdp.lint.terms import outermost
from tfdp.lint.values import Term
from tfdp.seams.replace import replace_for_good
from tfdp.step.own_branches import own_source_of
from tfdp.tracing.state_checks import is_added, own_handle, stored_from_shares
from tfdp.tracing.step import Step, current_step
from tfdp.tracing.stored_state import LocalState, StoredState


def with_synchronized_buffers(fn: Callable, step: Step) -> Callable:
    """Wraps `step` to all-reduce, at its end, the buffers that are still local."""
    if step.is_local:
        return fn
    if step.replicas == 1 and not step.of(StoredState).refuses_late:
        return fn
    stored = step.of(StoredState)
    stored.synchronizes_at_end = step.replicas > 1
    ids_of_rows: set[int] | None = None  # as the first replica found them

    @library_code
    @functools.wraps(fn)
    def step_with_synchronized_buffers(*args: Any, **kwargs: Any) -> Any:
        nonlocal ids_of_rows
        result = fn(*args, **kwargs)
        rank = current_rank()
        if not isinstance(rank, int):
            return result
        late = step.trace(rank).of(LocalState).take()
        if late and stored.refuses_late:
            raise ConfigurationError(stored.refuses_late.format(name=late[0].name))
        if ids_of_rows is None:
            # Decided once for all replicas: if they decided differently, they'd hang.
            ids = {id(variable) for variable in late} - stored.own_sums
            ids_of_rows = _of_rows(step, rank, ids) if ids else set()
        of_rows = [one for one in late if id(one) in ids_of_rows]
        all_reduce_buffers(of_rows, step, rank)
        return result

    return step_with_synchronized_buffers


def _of_rows(step: Step, rank: int, ids: set[int]) -> set[int]:
    found = set()
    for stored_by, variable, value in step.of(StoredState).values:
        is_one = stored_by == rank and id(variable) in ids
        stored = step.analysis(rank).value(value) if is_one else None
        if stored is not None and stored.is_of_own_rows:
            # Without an update, accumulated values may be gradients for one in a later
            # step: parts of a sum.
            if step.has_updated or not is_added(stored, variable, rank):
                found.add(id(variable))
    return found


def synchronize_layer_state(step: Step, rank: Any) -> None:
    """Synchronizes buffers before gradients are accumulated: with the gradients they
    would be summed once per accumulation, weighted by the rows of the last batch."""
    if step.replicas > 1 and not step.is_local:
        all_reduce_buffers(step.trace(rank).of(LocalState).take(), step, rank)


def all_reduce_buffers(state: Sequence[Any], step: Step, rank: Any) -> None:
    """Replaces every replica's copies by the mean over all samples."""
    if not state:
        return
    from tfdp.chain.buffers import store_state, weighted_state

    shares = weighted_state(state, step, rank)
    reducer = tf.distribute.get_strategy().extended.reducer
    means = reducer.all_reduce(shares, rank, mean=False)
    store_state(state, means, step, rank)


# The most variables that a warning names.
MOST_NAMES = 3
SUM_FIRST = "Sum that over all replicas first: tfdp.losses.all_sum(x)"


def _without_row_state(call: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrent layer's `call`, which refuses `stateful=True` on several replicas."""

    @functools.wraps(call)
    def checked_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = current_step() if self.stateful else None
        if found is not None and not found[0].is_of_one:
            raise ConfigurationError(
                f"The layer {self.name!r} has stateful=True: it stores a state for "
                "each row of a batch, and each replica has other rows. Return the "
                "states (return_state=True) and pass them on as initial_state with "
                "the batches; or train, evaluate and predict on one device, with a "
                "model that is made outside of the scope (model.set_weights copies "
                "the weights)."
            )
        return call(self, *args, **kwargs)

    return checked_call


replace_for_good("keras.layers:RNN", "call", _without_row_state)


def warn_about_stored(step: Step, model: Any) -> None:
    """Warns of stored values that averaging over replicas makes wrong."""
    if step.replicas == 1:
        return
    of_shares, sums = stored_from_shares(step)
    if of_shares:
        step.state_suspicions.add(
            f"what is stored in {_names_of(of_shares)} is averaged over the replicas' "
            "rows, and it depends on the loss or on gradients, and each replica has "
            f"a part of their sum. {SUM_FIRST}"
        )
    # Accumulated gradients are treated as parts of a sum.
    skipped = step.of(StoredState).own_sums | {
        id(variable) for variable in (*of_shares, *sums)
    }
    found: dict[str, dict[int, Any]] = {}
    for rank, variable, value in step.of(StoredState).values:
        what = None
        if id(variable) not in skipped:
            what = _problem_of(step, rank, variable, value)
        if what is None:
            continue
        layer = _normalization_of(model, variable)
        if layer is None:
            found.setdefault(what, {})[id(variable)] = variable
        elif layer.synchronized:  # else of a replica's own rows, as documented
            step.state_suspicions.add(
                f"the layer {layer.name!r} has synchronized=True and gets a mask (of "
                "words, or of padding rows), with which Keras' BatchNormalization "
                "takes the statistics of each replica's own rows. Use "
                "tfdp.layers.SyncBatchNormalization"
            )
    for what, variables in found.items():
        step.state_suspicions.add(
            f"what is stored in {_names_of(variables.values())} is averaged over the "
            f"replicas' rows, and it looks like {what}"
        )


def _names_of(variables: Iterable[Any]) -> str:
    """The first names, and how many more."""
    names = [repr(variable.name.split(":")[0]) for variable in variables]
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _normalization_of(
    model: Any, variable: Any
) -> keras.layers.BatchNormalization | None:
    for layer in layers_within(model) if isinstance(model, keras.Model) else ():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built:
            if any(weight.value is variable for weight in layer.non_trainable_weights):
                return layer
    return None


def _problem_of(step: Step, rank: int, variable: Any, value: tf.Tensor) -> str | None:
    stored = step.analysis(rank).value(value)
    if not stored.is_of_own_rows or Term.UNKNOWN in stored.terms:
        return None
    if stored.target is not None and is_added(stored, variable, rank):
        return None  # gradients for a later step, which adds them over the replicas
    if stored.terms & {Term.SUM, Term.COUNT}:
        if is_added(stored, variable, rank):
            return "a running sum over rows. Make it with aggregation='sum'"
        return f"computed from a sum over rows, as an average of sums is. {SUM_FIRST}"
    own = own_handle(variable, rank)
    is_own = any(own == handle for handle, _ in stored.reads)
    if is_own and is_extreme(value.op):
        return (
            "a running maximum or minimum. Take that over all replicas first: "
            "tf.reduce_max(tfdp.losses.all_rows(x))"
        )
    if is_no_mean(stored):
        return (
            "rows themselves (a queue of them), or a function of rows that is no mean "
            "(a quotient, a root, a threshold). Put the layer that stores them into "
            "tfdp.layers.AllRows(layer), which sees the rows of all replicas; or "
            "gather them first, tfdp.losses.all_rows(rows), and store the same on all "
            "of them"
        )
    return None


def warn_about_written(step: Step, operations: Iterable[tf.Operation]) -> None:
    """Warns of `tf.summary` numbers of the first replica that look like global ones."""
    if step.replicas == 1:
        return
    found: dict[str, str] = {}
    for op in operations_within(operations):
        if not writes_summary(op):
            continue
        _, _, value, tag, _ = op.inputs
        # Images, sounds and texts are strings: examples from any replica are fine.
        why = None if value.dtype == tf.string else own_source_of(step, 0, value)
        if why is not None:
            name = tf.get_static_value(outermost(tag))
            found[op.name if name is None else tf.compat.as_text(name.item())] = why
    if found:
        names = ", ".join(map(repr, found))
        step.state_suspicions.add(
            f"tf.summary writes {names} of the first replica only, which computes it "
            f"{next(iter(found.values()))}; a loss is its share. Write the global "
            "value, tfdp.losses.all_sum(loss); or "
            "return it from the step: fit reports that of all rows, and "
            "keras.callbacks.TensorBoard writes it"
        )
