"""Variables in whose place a training step may see one of each replica's own.

Where replicas train apart (`tfdp.sync`), what is stored in a model's variable are the
outer values: those of the last meeting, alike on all replicas. `evaluate`, `predict`,
`save` and callbacks read them and need to know nothing. Only a training step reads and
assigns, in the same places, the local values.

    in a replica of a training step     the replica's local value
    anywhere else                       the outer value
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from tfdp._private.names import MirroredVariable, current_rank
from tfdp._private.variable_hooks import (
    assign_each,
    checkpoint_as,
    local_copy_of,
    note_restored,
)
from tfdp.errors import ConfigurationError

NoteChange: TypeAlias = Callable[[int | None], None]


class LocalView(MirroredVariable):
    """A mirrored variable that may have a local value on each replica, too."""

    #: The local variables, by replica; None: there are none.
    _local: list[tf.Variable] | None = None
    _listeners: tuple[NoteChange, ...] = ()
    #: Whether each group of replicas that trains apart has a value of its own.
    is_of_group = False
    #: How many replicas such a group has.
    group_size = 1
    #: Whether each replica assigns a value of its own, which nobody brings together.
    is_of_replica = False

    # All of TensorFlow's ways to a component within a replica (reads, assignments,
    # updates, gradients) go over these two, so that none of them sees the other value.
    def _get_replica(self, replica_id: int) -> tf.Variable:
        if self._local is not None and self._is_in_local_step():
            return self._local[replica_id]
        return super()._get_replica(replica_id)

    @property
    def handle(self) -> tf.Tensor:
        """The resource of the component that is meant here."""
        if self._local is not None and self._is_in_local_step():
            return self._local[current_rank()].handle
        return super().handle

    def _is_in_local_step(self) -> bool:
        context = tf.distribute.get_replica_context()
        if context is None or context.strategy is not self.distribute_strategy:
            return False
        return bool(context.strategy.extended.current_run.is_local)

    def make_local(
        self, note_change: Callable[[int | None], None]
    ) -> list[tf.Variable]:
        """Makes a variable for each replica, which starts as the outer value.

        Args:
          note_change: called when anybody has assigned to the outer value outside of
            these steps, or read a checkpoint into it; with the replica that has, or
            None for all.

        Returns:
          The variables, by replica of this process.
        """
        if self._local is None:
            self._local = [local_copy_of(stored, self) for stored in self.values]
        else:
            # Another optimizer has made them: both share them, and hear of changes.
            with tf.init_scope():
                self._tell()
                note_change(None)
        local = self._local
        self._listeners = (*self._listeners, note_change)
        note_restored(self, self.values, self._tell)
        return local

    @property
    def has_local(self) -> bool:
        """Whether a training step sees local values."""
        return self._local is not None

    def outer_copy(self, rank: int) -> tf.Variable:
        """The copy on a replica of this process that all replicas have alike."""
        return self.values[rank]

    def local_copy(self, rank: int) -> tf.Variable:
        """The variable of that replica's own."""
        if self._local is None:
            raise RuntimeError(f"The variable {self.name!r} has no local values.")
        return self._local[rank]

    def _update_cross_replica(
        self, update_fn: Callable, value: Any, **kwargs: Any
    ) -> Any:
        result = super()._update_cross_replica(update_fn, value, **kwargs)
        self._tell()
        return result

    def note_update(self) -> None:
        """After a replica has updated what it sees; nothing, in a step of its own."""
        if self._listeners and not self._is_in_local_step():
            self._tell(current_rank())

    def _tell(self, rank: int | None = None) -> None:
        for note_change in self._listeners:
            note_change(rank)


def keep_all_copies(variable: LocalView) -> None:
    """Makes checkpoints hold the copies of all replicas of this process, side by side.

    For what each replica has its own of: the state of an optimizer that trains apart.
    A checkpoint with one value gives it to all.
    """
    copies = [variable.outer_copy(rank) for rank in range(len(variable.values))]

    def write() -> tf.Tensor:
        return tf.stack([copy.read_value() for copy in copies])

    def read(value: tf.Tensor) -> None:
        if value.shape == variable.shape:
            assign_each(copies, [value] * len(copies))
            return
        if value.shape[0] != len(copies):
            raise ConfigurationError(
                f"The checkpoint holds {variable.name!r} as {value.shape[0]} replicas "
                f"had it that trained apart, and here are {len(copies)} in this "
                "process. Restore with as many, or read the weights alone "
                "(tf.train.Checkpoint(model=model))."
            )
        assign_each(copies, tf.unstack(value))

    checkpoint_as(variable, write, read)
