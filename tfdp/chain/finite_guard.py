"""`FiniteGuard`: skips steps with a loss or gradients that are not finite.

In each replica, while a `callbacks.NaNGuard` watches a model:

    step begin         records what it may store besides weights
    loss               checks whether it is finite here
    optimizer update   one all-reduced number: is all finite on all replicas? If not,
                       nothing is updated
    step end           if it was skipped, restores what it stored, and keeps the batch

A loss scaler handles gradients that are not finite itself: they count only if its scale
is down to 1 and cannot be their cause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp._private.functions import library_code
from tfdp._private.names import (
    DistributedVariable,
    current_rank,
    in_compiled_function,
    own_copy,
)
from tfdp._private.optimizer_hooks import variables_built_with
from tfdp.chain.guard_notes import NONE, GuardNotes, Saved
from tfdp.chain.reduction import Reduction, Stage, scale_when_summed
from tfdp.exchange.compressed import are_finite
from tfdp.exchange.reducer import Reducer
from tfdp.tracing.rows import find_padded
from tfdp.tracing.step import Step, current_step
from tfdp.variables.mirrored import is_seed_state


class LeftOut(NamedTuple):
    """The steps skipped since the last `read`; `first` is counted from 1, since the
    guard was created, and `most_in_a_row` includes earlier steps."""

    steps: int
    most_in_a_row: int
    first: int


class FiniteGuard(Stage):
    """Skips updates that are not finite; with `stops` also all later steps, until
    `go_on`. Applies to graphs traced while it is attached (`step.observers`)."""

    is_guard = True

    def __init__(
        self, model: keras.Model, reducer: Reducer, replicas: int, *, stops: bool
    ):
        self.model, self._reducer, self._stops = model, reducer, stops
        self.notes = [GuardNotes() for _ in range(replicas)]
        self._read = 0
        #: The structure of a replica's kept batch; None: it cannot be kept.
        self._structure: Any = None

    def arm(self, steps: int) -> None:
        """Enables graphs for that many steps: no callback would report what graphs of
        an interrupted `fit` skip."""
        for notes in self.notes:
            notes.armed_steps.assign(steps)

    def forget_fit(self) -> None:
        self.arm(0)  # graphs of that `fit` still exist

    def is_about(self, variables: Sequence[Any]) -> bool:
        own = set(map(id, self.model.trainable_variables))
        return any(id(variable) in own for variable in variables)

    def around_step(self, step: Callable) -> Callable:
        """Wraps `step` to restore what it stored if it is skipped."""

        @library_code
        @functools.wraps(step)
        def guarded_step(*args: Any, **kwargs: Any) -> Any:
            rank = current_rank()
            notes = self.notes[rank]
            notes.begin()
            model = self.model
            variables = [*model.non_trainable_variables, *model.metrics_variables]
            stored = [_own(v, rank) for v in variables]
            notes.before = [(c, c.read_value()) for c in stored if c is not None]
            parts = self._parts_of((args, kwargs))
            try:
                result = step(*args, **kwargs)
                notes.end(parts, stops=self._stops)
            finally:
                # They hold tensors of this graph.
                notes.before, notes.residuals, notes.updated = [], {}, []
                notes.graph = None
            return result

        return guarded_step

    def checks_loss(self, compute: Callable) -> Callable:
        """Wraps `compute_loss` of the model to check the loss."""

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = compute(*args, **kwargs)
            # XLA-compiled code cannot record; there the step does, see `jit`.
            if loss is not None and not in_compiled_function():
                self.note_loss(loss)
            return loss

        return compute_loss

    def note_loss(self, loss: Any) -> None:
        rank = current_rank()
        is_bad = tf.logical_not(are_finite([tf.convert_to_tensor(loss)]))
        found = current_step()
        if found is not None:
            is_bad = found[0].own_part(rank, is_bad)
        notes = self.notes[rank]
        with tf.device("CPU:0"):
            notes.bad_loss.assign(notes.bad_loss.read_value() | is_bad)

    def may_update(
        self, optimizer: Any, gradients: Sequence[Any], step: Step, rank: int
    ) -> tf.Tensor:
        """Whether all is finite on all replicas that step together; equal on them."""
        notes = self.notes[rank]
        is_bad = tf.logical_not(are_finite(gradients))
        scaler = getattr(optimizer, "dynamic_loss_scale", True)
        if hasattr(optimizer, "inner_optimizer") and scaler:
            scale = tf.convert_to_tensor(scale_when_summed(optimizer), tf.float32)
            is_bad = is_bad & (scale <= 1.0)
        mine = tf.cast(is_bad | notes.bad_loss.read_value(), tf.float32)
        total = mine
        if not step.is_local or step.group_size > 1:
            reducer = self._reducer.within_hosts if step.is_local else self._reducer
            (total,) = reducer.all_reduce([mine], rank, mean=False)
        with tf.device("CPU:0"):
            is_armed = notes.armed_steps.read_value() > 0
            is_left_out = is_armed & ((total > 0) | notes.is_stopped.read_value())
            notes.is_left_out.assign(notes.is_left_out.read_value() | is_left_out)
        return tf.logical_not(is_left_out)

    def around(self, reduction: Reduction, update: Callable[[], Any]) -> None:
        """Updates unless something is not finite in the reduced gradients, or in the
        replica's own if they are reduced later."""
        optimizer, step, rank = reduction.optimizer, reduction.step, reduction.rank
        notes = self.notes[rank]
        # If this update is skipped, the previous one is undone, too.
        notes.take_updated()
        remembered = self.remembered(optimizer, rank)

        def updated() -> tf.Tensor:
            update()
            return tf.constant(True)

        def left_out() -> tf.Tensor:
            for copy, value in remembered:
                copy.assign(value)
            return notes.put_back()

        before = self.values_before(optimizer, rank)
        is_good = self.may_update(optimizer, reduction.gradients, step, rank)
        # Restored now and at the end: an outer step may synchronize buffers in this
        # step, and metrics are updated after the weights.
        tf.cond(is_good, updated, left_out)
        if notes.is_of_graph():
            notes.updated = [*before, *remembered]

    def remember(self, optimizer: Any, rank: int, copies: Saved) -> None:
        """Restores `copies` if the update of `optimizer` is skipped."""
        self.notes[rank].residuals.setdefault(id(optimizer), []).extend(copies)

    def remembered(self, optimizer: Any, rank: int) -> Saved:
        """The copies given to `remember` since the last update, except in a branch (the
        update of an accumulation), where they are unchanged if it is skipped."""
        given = self.notes[rank].residuals.pop(id(optimizer), [])
        graph = tf.compat.v1.get_default_graph()
        return [(copy, value) for copy, value in given if value.graph is graph]

    def remember_stored(self, rank: int, copies: Iterable[tf.Variable]) -> None:
        """Records `copies` before a step (not a branch or loop of it) stores into
        them."""
        notes = self.notes[rank]
        if notes.is_of_graph():
            known = notes.known()
            # For variables that an update has just changed: the value before it.
            updated = {id(copy): value for copy, value in notes.updated}
            for copy in copies:
                if id(copy) not in known:
                    value = updated.get(id(copy))
                    value = copy.read_value() if value is None else value
                    notes.before.append((copy, value))

    def values_before(self, optimizer: Any, rank: int) -> Saved:
        """The values that `optimizer` is about to update; see `GuardNotes.updated`."""
        if not self.notes[rank].is_of_graph():
            return []
        updated = [*variables_built_with(optimizer), *optimizer.variables]
        copies = {id(c): c for c in (_own(v, rank) for v in updated) if c is not None}
        return [(copy, copy.read_value()) for copy in copies.values()]

    def read(self) -> LeftOut | None:
        """The steps skipped since the last call, or None."""
        counts = [notes.counts.numpy() for notes in self.notes]
        # In local training some replicas skip steps and others do not.
        count = max(counts, key=lambda c: c[1])
        if count[1] == self._read:
            return None
        left_out = LeftOut(int(count[1]) - self._read, int(count[3]), int(count[4]))
        self._read = int(count[1])
        return left_out

    def go_on(self) -> None:
        for notes in self.notes:
            counts = notes.counts.numpy()
            notes.is_stopped.assign(False)
            notes.counts.assign([*counts[:3], counts[2], NONE])

    def kept_batches(self) -> list[Any] | None:
        """The batch of each replica in its first skipped step, None if it skipped none;
        None if batches cannot be kept, because they were padded."""
        structure = self._structure
        if structure is None:
            return None

        def batch(notes: GuardNotes) -> Any:
            if int(notes.counts.numpy()[4]) == NONE:
                return None
            parts = [part.read_value() for part in notes.batch]
            return tf.nest.pack_sequence_as(structure, parts, expand_composites=True)

        return list(map(batch, self.notes))

    def _parts_of(self, arguments: Any) -> list[tf.Tensor]:
        if find_padded(arguments) is not None:
            return []
        parts = tf.nest.flatten(arguments, expand_composites=True)
        is_kept = all(map(tf.is_tensor, parts))
        self._structure = arguments if is_kept else None
        return parts if is_kept else []


def _own(variable: keras.Variable, rank: int) -> tf.Variable | None:
    # Random seeds are not restored.
    value = variable.value
    if not isinstance(value, DistributedVariable) or is_seed_state(value):
        return None
    own = own_copy(value, rank)
    return getattr(own, "flat", own)  # that of many packed ones is restored at once
