"""Mirrored variables that have a local value on each replica during a training step.

In local training (`tfdp.sync`) a model's variables store the outer values, those of the
last synchronization, identical on all replicas: `evaluate`, `predict`, `save` and
callbacks read them. Only a training step reads and assigns the local values instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdp._private import variable_hooks as hooks
from tfdp._private.names import MirroredVariable, current_rank
from tfdp.errors import ConfigurationError

NoteChange: TypeAlias = Callable[[int | None], None]


def in_replica_of(strategy: tf.distribute.Strategy) -> bool:
    """Whether the caller is in a replica of `strategy`."""
    # Outside all scopes there is the replica context of the default strategy.
    context = tf.distribute.get_replica_context()
    return context is not None and context.strategy is strategy


class LocalView(MirroredVariable):
    """A mirrored variable that may have a local value on each replica."""

    #: The local variables, by replica, or None.
    _local: list[tf.Variable] | None = None
    _listeners: tuple[NoteChange, ...] = ()
    #: Called before an assignment outside of replicas.
    before_change: Callable[[], None] | None = None
    #: Whether each group of replicas in local training has its own value.
    is_of_group = False
    #: The number of replicas of such a group.
    group_size = 1
    #: Whether each replica assigns its own value, without synchronization.
    is_of_replica = False

    # All of TensorFlow's accesses to a component within a replica (reads, assignments,
    # updates, gradients) use `_get_replica` or `handle`.
    def _get_replica(self, replica_id: int) -> tf.Variable:
        if self._local is not None and self._is_in_local_step():
            return self._local[replica_id]
        return super()._get_replica(replica_id)

    @property
    def handle(self) -> tf.Tensor:
        if self._local is not None and self._is_in_local_step():
            return self._local[current_rank()].handle
        return super().handle

    def _is_in_local_step(self) -> bool:
        strategy = self.distribute_strategy
        return in_replica_of(strategy) and bool(strategy.extended.current_step.is_local)

    def make_local(self, note_change: NoteChange) -> list[tf.Variable]:
        """Creates a local variable for each replica, with the outer value.

        `note_change`: called, with the replica or None for all, after an assignment to
        the outer value outside of local steps, or after a checkpoint is restored.
        """
        if self._local is None:
            self._local = [hooks.local_copy_of(stored, self) for stored in self.values]
        else:
            # Another optimizer created them: both share them, and are notified.
            with tf.init_scope():
                self._notify()
                note_change(None)
        local = self._local
        self._listeners = (*self._listeners, note_change)
        hooks.note_restored(self, self.values, self._notify)
        return local

    @property
    def has_local(self) -> bool:
        return self._local is not None

    def outer_copy(self, rank: int) -> tf.Variable:
        return self.values[rank]

    def local_copy(self, rank: int) -> tf.Variable:
        if self._local is None:
            raise RuntimeError(f"The variable {self.name!r} has no local values.")
        return self._local[rank]

    def _update_cross_replica(
        self, update_fn: Callable, value: Any, **kwargs: Any
    ) -> Any:
        if self.before_change is not None and tf.executing_eagerly():
            self.before_change()
        result = super()._update_cross_replica(update_fn, value, **kwargs)
        self._notify()
        return result

    def note_update(self) -> None:
        """Notifies listeners after a replica's update, unless it was a local step."""
        if self._listeners and not self._is_in_local_step():
            self._notify(current_rank())

    def _notify(self, rank: int | None = None) -> None:
        for note_change in self._listeners:
            note_change(rank)


def copies_of(value: Any) -> tuple[Sequence[tf.Variable], Sequence[tf.Variable]]:
    """The stored and the local variables of this process in a distributed variable."""
    # By class: TensorFlow would search a metric's sum over all hosts, some maybe in a
    # step, for an attribute that the variable lacks.
    local = isinstance(value, LocalView) and value.has_local
    copies = (
        [value.local_copy(rank) for rank in range(len(value.values))] if local else ()
    )
    return getattr(value, "values", ()), copies


def keep_all_copies(variable: LocalView) -> None:
    """Makes checkpoints hold the copies of all replicas of this process, stacked.

    A checkpoint with one value gives it to all.
    """
    copies = [variable.outer_copy(rank) for rank in range(len(variable.values))]

    def write() -> tf.Tensor:
        return tf.stack([copy.read_value() for copy in copies])

    def read(value: tf.Tensor) -> None:
        if value.shape == variable.shape:
            hooks.assign_each(copies, [value] * len(copies))
            return
        if value.shape[0] != len(copies):
            raise ConfigurationError(
                f"The checkpoint holds {variable.name!r} of {value.shape[0]} replicas "
                f"that trained locally, and this process has {len(copies)}. Restore "
                "with the same number, or read only the weights "
                "(tf.train.Checkpoint(model=model))."
            )
        hooks.assign_each(copies, tf.unstack(value))

    hooks.checkpoint_as(variable, write, read)
