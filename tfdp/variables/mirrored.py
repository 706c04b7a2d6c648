"""Mirrored variables that are updated, and drawn from, within each replica."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._private import names
from tfdp._private.keras_calls import is_counted_by_keras
from tfdp._private.variable_hooks import checkpoint_unless_hooked
from tfdp.errors import CheckpointWarning, ConfigurationError
from tfdp.lint.registry import is_of_graph, note_stored
from tfdp.lint.terms import change_of, outermost, term_added_to
from tfdp.tracing import state_checks
from tfdp.tracing.rows import RowsInSight
from tfdp.tracing.stored_state import note_counted, note_local_state
from tfdp.variables.local_view import LocalView, in_replica_of

# Outside replicas, state that replicas store independently reads as its mean (in files
# and callbacks), instead of the first replica's value. A step synchronizes moving
# statistics with the gradients, or before these are accumulated, and values stored
# after the update at its end; TPU cores do not do the latter.
# On several hosts the mean is one host's, with a warning.


class OwnMeans(names.MirroredVariable):
    """A mirrored variable that may differ between replicas; a mixin."""

    #: Whether replicas assign floats independently.
    _is_mean_of_own = False

    def note_own(self) -> None:
        """Marks the variable as per-replica: reads outside replicas return the mean."""
        if not self._is_mean_of_own:
            self._is_mean_of_own = True
            checkpoint_unless_hooked(self, self._mean, self.assign)

    def _get(self) -> Any:
        is_own = in_replica_of(self.distribute_strategy)
        return super()._get() if is_own or not self._is_read_as_mean() else self._mean()

    def _get_cross_replica(self) -> tf.Tensor:
        return self._mean() if self._is_read_as_mean() else super()._get_cross_replica()

    def _is_read_as_mean(self) -> bool:
        # Graphs use one copy, since they may be compiled for one device.
        is_in_graph = names.in_save_context() or not tf.executing_eagerly()
        return self._is_mean_of_own and not is_in_graph

    def _mean(self) -> tf.Tensor:
        own = [copy.read_value() for copy in self.values]
        first = own[0].numpy().tobytes()
        if all(value.numpy().tobytes() == first for value in own[1:]):
            return own[0]  # the mean of identical values may be rounded
        self._warn_of_a_part()
        with tf.device(self.values[0].device):
            total = tf.add_n([tf.cast(value, tf.float64) for value in own])
            return tf.cast(total / len(own), self.dtype)

    def _warn_of_a_part(self) -> None:
        hosts = self.distribute_strategy.hosts
        if hosts > 1:
            warnings.warn(
                f"{self.name.split(':')[0]!r} is read, or written to a file, while "
                "each replica has its own value, stored after the step's update: this "
                f"is the mean over one of {hosts} hosts only. Store it before the "
                "update, or run the step in a graph (run_eagerly=False).",
                CheckpointWarning,
                stacklevel=2,
            )


# 2^32 divided by the golden ratio: its multiples are spread evenly modulo 2^32.
SEED_STRIDE = 0x9E3779B9
SEED_TYPES = (tf.int64, tf.uint32)


class PythonValue:
    """Conversion to NumPy and Python numbers, as of a plain variable; a mixin."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = np.asarray(self.numpy(), dtype)  # type: ignore[attr-defined]
        return value.copy() if copy else value

    def __int__(self) -> int:
        return int(self.numpy())  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.numpy())  # type: ignore[attr-defined]


class HandleOfReplica:
    """A variable with a handle only within replicas; a mixin."""

    @property
    def handle(self) -> tf.Tensor:
        try:
            return super().handle  # type: ignore[misc]
        except ValueError as error:
            raise ConfigurationError(
                f"The variable {self.name!r} has a copy on each replica, and within "  # type: ignore[attr-defined]
                "strategy.scope() but outside of strategy.run none is selected. Put "
                "the step (model's call under a GradientTape, optimizer.apply) in a "
                "function and run it by strategy.run(step, args=(batch,)); model.fit "
                "does that itself."
            ) from error


def before_storing(variable: Any, own: tf.Variable) -> None:
    """Saves a component for the guard before a step, no optimizer, assigns to it."""
    guard = variable.distribute_strategy.extended.current_step.guard
    if guard is not None:
        guard.remember_stored(names.current_rank(), [own])


class ReplicaMirroredVariable(PythonValue, HandleOfReplica, OwnMeans, LocalView):
    """A mirrored variable that needs no `merge_call` for updates by one replica.

    Stock TensorFlow distributes replica 0's value of a counter in the cross-replica
    context, which fails inside conditionals (float16 loss scaling, accumulation). Here
    it is broadcast in replica context, or, if it depends only on the counter and
    constants, used directly. Float variables that a replica assigns independently
    (moving statistics) are recorded, and synchronized along with the gradients.
    """

    def _update_replica(self, update_fn: Callable, value: Any, **kwargs: Any) -> Any:
        """Assigns in a replica, by the variable's aggregation:

        NONE, in an optimizer's update   its own copy: all replicas assign the same
        NONE, elsewhere                  its own copy, synchronized with the gradients
        ONLY_FIRST_REPLICA               the first replica's value, sent unless equal
        MEAN, SUM                        the all-reduced value
        """
        extended = self.distribute_strategy.extended
        step, rank = extended.current_step, names.current_rank()
        step.refuse_if_alone(self.name)
        is_aggregated = self.aggregation != tf.VariableAggregation.NONE
        if not is_aggregated and step.is_updating:
            return super()._update_replica(update_fn, value, **kwargs)
        if not is_aggregated:
            if self.dtype.is_floating:
                note_local_state(step, rank, self, value)
                value = self._added_of_own_rows(step, rank, value)
                value = self._of_rows_of_group(step, rank, value)
                value = note_stored(self._get_replica(rank), value)
                self.note_own()
                before_storing(self, self._get_replica(rank))
            elif not _is_replicated(value, self, rank):
                self.is_of_replica = True
        if tf.is_tensor(value) and isinstance(rank, int):
            is_mean = self.aggregation == tf.VariableAggregation.MEAN
            if is_mean and value.dtype.is_floating:
                value = self._weighted_by_rows(value)
            elif self.aggregation == tf.VariableAggregation.SUM:
                update_fn, value = self._of_what_is_added(update_fn, value)
        first_only = tf.VariableAggregation.ONLY_FIRST_REPLICA
        if self.aggregation == first_only:
            component = self._get_replica(rank)
            is_same = (
                not tf.is_tensor(value)
                or is_counted_by_keras(self)
                or state_checks.is_same_on_every_replica(step, rank, value, component)
            )
            if not is_same:
                value = self._of_first_replica(value, rank)
            return update_fn(component, value, **kwargs)
        with step.summing_own_parts(rank):
            return super()._update_replica(update_fn, value, **kwargs)

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds; independent additions of replicas become `v + d` in the graph."""
        if self._is_of_replica_in_graph():
            delta = tf.convert_to_tensor(delta, self.dtype)
            return self.assign(self.read_value() + delta, *args, **kwargs)
        return super().assign_add(delta, *args, **kwargs)

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_of_replica_in_graph():
            delta = tf.convert_to_tensor(delta, self.dtype)
            return self.assign_add(-delta, *args, **kwargs)
        return super().assign_sub(delta, *args, **kwargs)

    def _is_of_replica_in_graph(self) -> bool:
        """Whether a replica assigns, in a graph, a float that is not aggregated."""
        if not in_replica_of(self.distribute_strategy):
            return False
        step = self.distribute_strategy.extended.current_step
        is_own = (
            self.aggregation == tf.VariableAggregation.NONE and not step.is_updating
        )
        return is_own and self.dtype.is_floating

    def _added_of_own_rows(self, step: Any, rank: Any, value: Any) -> Any:
        """`value` without what a dummy row added to it, if it is a sum."""
        is_known = isinstance(rank, int) and is_of_graph(value)
        if not step.has_dummy_rows or not is_known:
            return value
        component = self._get_replica(rank)
        added = term_added_to(outermost(component.handle), value)
        if added is None or not state_checks.is_of_own_rows(step, rank, added):
            return value
        return component.read_value() + step.own_part(rank, added)

    def _of_rows_of_group(self, step: Any, rank: Any, value: Any) -> Any:
        """`value`; in local training, the old value if the group has no rows."""
        if not step.is_local or not isinstance(rank, int):
            return value
        own = [step.trace(peer).rows.present for peer in step.group_of(rank)]
        if any(has_rows is True for has_rows in own):
            return value
        before = self._get_replica(rank).read_value()
        return tf.where(tf.reduce_any(tf.stack(own)), value, before)

    def _of_first_replica(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        extended = self.distribute_strategy.extended
        step = extended.current_step
        if not step.is_local:
            state_checks.note_first_only(step, rank, self, value)
            return extended.reducer.broadcast(value, rank)
        if step.is_updating:
            return value  # optimizer state, of which each group has its own
        raise ConfigurationError(
            f"A step stores into {self.name!r}, which takes the value of the first "
            "replica, and with sync=... replicas do not wait for each other within a "
            "step. Set a learning rate by a schedule, or by a callback between steps; "
            "create another variable with aggregation='none'. Or leave out sync."
        )

    def _weighted_by_rows(self, value: tf.Tensor) -> tf.Tensor:
        """R n_r / N times the value: the mean of these is the mean over all rows."""
        step = self.distribute_strategy.extended.current_step
        share = tf.cast(step.share_of(names.current_rank()), value.dtype)
        # The mean of no rows is nan, and 0 * nan is not 0.
        return tf.where(share > 0, step.replicas * share * value, tf.zeros_like(value))

    def _of_what_is_added(
        self, update_fn: Callable, value: tf.Tensor
    ) -> tuple[Callable, tf.Tensor]:
        """Turns an update by the sum of v + d into one by the sum of d.

        Keras writes `assign_add(d)` as `assign(v + d)`: the sum contains v R times.
        Dummy rows add nothing.
        """
        step, rank = (
            self.distribute_strategy.extended.current_step,
            names.current_rank(),
        )
        component = self._get_replica(rank)
        added = change_of(outermost(component.handle), value)
        if step.trace(rank).sees_all_rows:  # the same from all: one adds it
            first = step.trace(rank).counts
            value = tf.where(first, value, self._get_replica(rank).read_value())
            added = added if added is None else tf.where(first, added, 0)
        if added is None:
            return update_fn, step.own_part(rank, value)
        added, before = step.own_part(rank, added), component.read_value()
        if self.dtype.is_floating:
            return update_fn, added + before / step.replicas
        value, too_many = before + added, (step.replicas - 1) * before

        def update_by_sum(own: Any, total: tf.Tensor, **kwargs: Any) -> Any:
            return update_fn(own, total - too_many, **kwargs)

        return update_by_sum, value


def _is_replicated(value: Any, variable: ReplicaMirroredVariable, rank: Any) -> bool:
    """Whether all replicas surely assign the same integers."""
    if not tf.is_tensor(value) or not isinstance(rank, int):
        return not tf.is_tensor(value)
    step = variable.distribute_strategy.extended.current_step
    return state_checks.is_same_on_every_replica(
        step, rank, value, names.own_copy(variable, rank)
    )


class ReplicaOnReadVariable(PythonValue, HandleOfReplica, names.SyncOnReadVariable):
    """The sums of a metric; a dummy row adds nothing to them."""

    #: What `tfdp.lint` says of a replica's value.
    differs_by_replica = "metric"

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return super().assign(self._own_or(self._get, value), *args, **kwargs)

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = self._own_or(self._zero, value, is_added=True)
        return super().assign_add(value, *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = self._own_or(self._zero, value, is_added=True)
        return super().assign_sub(value, *args, **kwargs)

    def _zero(self) -> tf.Tensor:
        return tf.zeros(self.shape, self.dtype)

    def _own_or(
        self, otherwise: Callable[[], Any], value: Any, *, is_added: bool = False
    ) -> Any:
        if not in_replica_of(self.distribute_strategy):
            return value
        step, rank = (
            self.distribute_strategy.extended.current_step,
            names.current_rank(),
        )
        trace = step.trace(rank)
        if trace.sees_all_rows:
            trace.of(RowsInSight).written.append((self, value))
        elif self.aggregation == tf.VariableAggregation.SUM:
            note_counted(step, rank, self, value, is_added)
        own = trace.counts
        if own is True:
            return value
        value = tf.convert_to_tensor(value, self.dtype)
        return tf.where(own, value, tf.convert_to_tensor(otherwise()))


class SeedVariable(ReplicaMirroredVariable):
    """The state of a random generator: stored identically, read differently.

    Replica r reads `stored + r * SEED_STRIDE` in the first word and subtracts that from
    what it writes, so every replica draws different numbers while the stored state is
    identical everywhere, and in files the same as one device's. Replica 0 draws what
    one device would. So do all replicas where an optimizer draws (Langevin dynamics),
    since their updates of one weight must be equal, and where they compute on the rows
    of all.
    """

    differs_by_replica = "drawn"

    def own_offset(self) -> tf.Tensor | None:
        """The number that this replica adds to the stored state, or None."""
        if not in_replica_of(self.distribute_strategy):
            return None
        extended, rank = self.distribute_strategy.extended, names.current_rank()
        step = extended.current_step
        if step.updates_replicated or step.here.sees_all_rows:
            return None
        return seed_offset(extended.first_draw + rank, self.dtype)

    def _get(self) -> Any:
        offset = self.own_offset()
        stored = super()._get()
        return stored if offset is None else stored.read_value() + offset

    def value(self) -> tf.Tensor:
        return tf.identity(self._get())

    read_value = value

    def _dense_var_to_tensor(
        self, dtype: Any = None, name: Any = None, as_ref: bool = False
    ) -> tf.Tensor:
        return tf.convert_to_tensor(self._get(), dtype=dtype, name=name)

    def _update_replica(self, update_fn: Callable, value: Any, **kwargs: Any) -> Any:
        offset = self.own_offset()
        if offset is not None:
            value = tf.cast(value, self.dtype) - offset
        return super()._update_replica(update_fn, value, **kwargs)


def seed_offset(rank: Any, dtype: tf.DType) -> tf.Tensor | None:
    """The offset of a seed on replica `rank`, an int or int32 scalar, or None."""
    if isinstance(rank, int):
        word = rank * SEED_STRIDE % 2**32
        return tf.constant([word, 0], dtype) if word else None
    # The low 32 bits of the product.
    words = tf.cast(rank, tf.uint32) * tf.constant(SEED_STRIDE, tf.uint32)
    return tf.stack([tf.cast(words, dtype), tf.zeros([], dtype)])


def is_seed_state(variable: names.MirroredVariable) -> bool:
    """Whether `variable` is the state of a `keras.random.SeedGenerator`."""
    return (
        variable.dtype in SEED_TYPES
        and variable.shape == (2,)
        and "seed_generator_state" in variable.name
    )
