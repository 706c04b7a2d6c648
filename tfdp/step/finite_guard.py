"""`FiniteGuard`: leaves a step out in which the loss or a gradient is not finite.

In each replica, while a `callbacks.NaNGuard` watches a model:

    the step begins     what it may store besides weights (moving statistics, sums of
                        metrics) is remembered
    the loss is taken   is it finite here?
    an optimizer gets   are they, and the loss, on all replicas? One sum of a number
    gradients           tells all of them alike; else nothing is updated
    the step ends       where nothing was updated, what it stored is put back, and the
                        batch is kept, to look for the cause

A loss scaler finds gradients that are not finite by itself, and means them: they count
only where the scale is down to 1 and cannot be their cause.
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
from tfdp.exchange.compressed import are_finite
from tfdp.exchange.reducer import Reducer
from tfdp.step.guard_notes import NONE, GuardNotes, scale_when_summed
from tfdp.step.observers import detach, observers_of
from tfdp.tracing.padded_batch import find_padded
from tfdp.tracing.run import ReplicaRun, current_run
from tfdp.variables.mirrored import is_seed_state


class LeftOut(NamedTuple):
    """What was left out since the guard was last asked.

    Args:
      steps: how many.
      most_in_a_row: how many of them came one after the other, with those before.
      first: which one was the first, counted from 1 since the guard was made.
    """

    steps: int
    most_in_a_row: int
    first: int


class FiniteGuard:
    """Leaves out the updates of steps that are not finite, while it is in use.

    It is in the graphs that are built while it is attached (`tfdp.step.observers`).

    Args:
      model: whose `train_step` is watched.
      reducer: of its strategy.
      replicas: of this process.
      stops: whether every step after one that was left out is left out as well, until
        somebody asks (`read`).
    """

    def __init__(
        self, model: keras.Model, reducer: Reducer, replicas: int, *, stops: bool
    ):
        self.model, self._reducer, self._stops = model, reducer, stops
        self._notes = [GuardNotes() for _ in range(replicas)]
        self._read = 0
        #: The nested batch of each replica that was kept; None: it cannot be kept.
        self._structure: Any = None

    def arm(self, steps: int) -> None:
        """Lets graphs act for so many steps; those of an interrupted `fit` are still
        there in the next one, and nobody would hear of what they left out."""
        for notes in self._notes:
            notes.armed_steps.assign(steps)

    def is_about(self, variables: Sequence[Any]) -> bool:
        """Whether these are variables of the model that it watches."""
        own = set(map(id, self.model.trainable_variables))
        return any(id(variable) in own for variable in variables)

    def around(self, step: Callable) -> Callable:
        """`step`, for the replicas of a run: what it stored is put back in the end."""

        @library_code
        @functools.wraps(step)
        def guarded_step(*args: Any, **kwargs: Any) -> Any:
            rank = current_rank()
            notes = self._notes[rank]
            notes.begin()
            stored = [_own(v, rank) for v in _stored_by_steps(self.model)]
            notes.before = [(c, c.read_value()) for c in stored if c is not None]
            parts = self._parts_of((args, kwargs))
            try:
                result = step(*args, **kwargs)
                notes.end(parts, stops=self._stops)
            finally:
                # Tensors of this graph.
                notes.before, notes.of_sums, notes.updated = [], {}, []
                notes.graph = None
            return result

        return guarded_step

    def loss_noting(self, compute: Callable) -> Callable:
        """`compute_loss` of the model, whose loss is looked at."""

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = compute(*args, **kwargs)
            # What XLA compiles cannot note; there the step does, see `jit`.
            if loss is not None and not in_compiled_function():
                self.note_loss(loss)
            return loss

        return compute_loss

    def note_loss(self, loss: Any) -> None:
        """Notes whether the calling replica's loss is finite."""
        rank = current_rank()
        is_bad = tf.logical_not(are_finite([tf.convert_to_tensor(loss)]))
        found = current_run()
        if found is not None:
            is_bad = found[0].own_part(rank, is_bad)
        notes = self._notes[rank]
        with tf.device("CPU:0"):
            notes.bad_loss.assign(notes.bad_loss.read_value() | is_bad)

    def may_update(
        self, optimizer: Any, gradients: Sequence[Any], run: ReplicaRun, rank: int
    ) -> tf.Tensor:
        """Whether all is finite on all replicas that step together; alike on them."""
        notes = self._notes[rank]
        is_bad = tf.logical_not(are_finite(gradients))
        scaler = getattr(optimizer, "dynamic_loss_scale", True)
        if hasattr(optimizer, "inner_optimizer") and scaler:
            scale = tf.convert_to_tensor(scale_when_summed(optimizer), tf.float32)
            is_bad = is_bad & (scale <= 1.0)
        mine = tf.cast(is_bad | notes.bad_loss.read_value(), tf.float32)
        if run.is_local:
            alone = run.group_size == 1
            total = mine if alone else self._reducer.sum_within(mine, rank)
        else:
            (total,) = self._reducer.all_reduce([mine], rank, mean=False)
        with tf.device("CPU:0"):
            is_left_out = (notes.armed_steps.read_value() > 0) & (
                (total > 0) | notes.is_stopped.read_value()
            )
            notes.is_left_out.assign(notes.is_left_out.read_value() | is_left_out)
        return tf.logical_not(is_left_out)

    def remember(
        self, optimizer: Any, rank: int, copies: Sequence[tuple[tf.Variable, tf.Tensor]]
    ) -> None:
        """Has `copies` put back where the update of `optimizer` is left out."""
        self._notes[rank].of_sums.setdefault(id(optimizer), []).extend(copies)

    def remembered(
        self, optimizer: Any, rank: int
    ) -> list[tuple[tf.Variable, tf.Tensor]]:
        """What was given to `remember` since the optimizer's last update.

        Not what is added up in a branch, as in an update of an accumulation: nothing is
        where that is left out.
        """
        given = self._notes[rank].of_sums.pop(id(optimizer), [])
        graph = tf.compat.v1.get_default_graph()
        return [(copy, value) for copy, value in given if value.graph is graph]

    def remember_stored(self, rank: int, copies: Iterable[tf.Variable]) -> None:
        """Before a step stores in `copies`: they are put back where it is left out.

        Not within a branch or a loop of the step, whose values end with it.
        """
        notes = self._notes[rank]
        if notes.is_of_graph():
            known = notes.known()
            # Of what an update has changed just now, what it was before that.
            updated = {id(copy): value for copy, value in notes.updated}
            for copy in copies:
                if id(copy) not in known:
                    value = updated.get(id(copy))
                    value = copy.read_value() if value is None else value
                    notes.before.append((copy, value))

    def values_before(
        self, optimizer: Any, rank: int
    ) -> list[tuple[tf.Variable, tf.Tensor]]:
        """What `optimizer` is about to update; see `GuardNotes.updated`."""
        if not self._notes[rank].is_of_graph():
            return []
        updated = [*variables_built_with(optimizer), *optimizer.variables]
        copies = {id(c): c for c in (_own(v, rank) for v in updated) if c is not None}
        return [(copy, copy.read_value()) for copy in copies.values()]

    def begin_update(self, rank: int) -> None:
        """What the update before has changed is put back by who finds something now."""
        self._notes[rank].take_updated()

    def end_update(
        self, rank: int, before: Sequence[tuple[tf.Variable, tf.Tensor]]
    ) -> None:
        """Notes what an update has changed, and what that was before."""
        if self._notes[rank].is_of_graph():
            self._notes[rank].updated = list(before)

    def put_back(self, rank: int) -> tf.Tensor:
        """Within a step: makes what it stored so far what it was; gives False."""
        return self._notes[rank].put_back()

    def read(self) -> LeftOut | None:
        """What was left out since the last time; None: nothing."""
        counts = [notes.counts.numpy() for notes in self._notes]
        # Where replicas train apart, some leave steps out and others do not.
        count = max(counts, key=lambda c: c[1])
        if count[1] == self._read:
            return None
        left_out = LeftOut(int(count[1]) - self._read, int(count[3]), int(count[4]))
        self._read = int(count[1])
        return left_out

    def go_on(self) -> None:
        """After what was left out was read, and its cause looked for."""
        for notes in self._notes:
            counts = notes.counts.numpy()
            notes.is_stopped.assign(False)
            notes.counts.assign([*counts[:3], counts[2], NONE])

    def kept_batches(self) -> list[Any] | None:
        """The batch of each replica in the first step that was left out; None where it
        cannot be kept: it was filled up.

        Of a replica that has left out none, where replicas train apart, it is None.
        """
        if self._structure is None:
            return None
        return [
            tf.nest.pack_sequence_as(
                self._structure,
                [part.read_value() for part in notes.batch],
                expand_composites=True,
            )
            if int(notes.counts.numpy()[4]) != NONE
            else None
            for notes in self._notes
        ]

    def _parts_of(self, arguments: Any) -> list[tf.Tensor]:
        if find_padded(arguments) is not None:
            return []
        self._structure = arguments
        parts = tf.nest.flatten(arguments, expand_composites=True)
        if not all(map(tf.is_tensor, parts)):
            self._structure = None
            return []
        return parts


def update_if_finite(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    update: Callable[[], Any],
) -> None:
    """Calls `update`, in the graph, unless a guard finds something not finite.

    Args:
      optimizer: that is about to update.
      gradients: of `variables`; None for those that have none. Reduced ones, or the
        replica's own where that comes later.
      update: what it does.
    """
    found = current_run()
    guard = None if found is None else found[0].guard
    if found is None or guard is None or not guard.is_about(variables):
        update()
        return
    run, rank = found

    def updated() -> tf.Tensor:
        update()
        return tf.constant(True)

    guard.begin_update(rank)
    remembered = guard.remembered(optimizer, rank)

    def left_out() -> tf.Tensor:
        for copy, value in remembered:
            copy.assign(value)
        return guard.put_back(rank)

    before = guard.values_before(optimizer, rank)
    is_good = guard.may_update(optimizer, gradients, run, rank)
    # Put back now and in the end: groups that train apart may meet in this step, and
    # bring together what layers store; metrics are updated after the weights.
    tf.cond(is_good, updated, left_out)
    guard.end_update(rank, [*before, *remembered])


def note_loss(model: Any, loss: tf.Tensor) -> None:
    """Lets the guard of `model`, where there is one, look at a loss."""
    found = current_run()
    guard = None if found is None else found[0].guard
    if guard is not None and guard.model is model:
        guard.note_loss(loss)


def forget_failed_fit(model: keras.Model) -> None:
    """Detaches what the callbacks of a `fit` that failed have left."""
    for observer in observers_of(model, object):
        if isinstance(observer, FiniteGuard):
            observer.arm(0)  # graphs of that `fit` are still there
        detach(model, observer)


def _stored_by_steps(model: keras.Model) -> list[keras.Variable]:
    """What a step assigns to besides what its optimizers update; not the seeds."""
    return [*model.non_trainable_variables, *model.metrics_variables]


def _own(variable: keras.Variable, rank: int) -> tf.Variable | None:
    value = variable.value
    if not isinstance(value, DistributedVariable) or is_seed_state(value):
        return None
    return own_copy(value, rank)
