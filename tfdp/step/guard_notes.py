"""What a `FiniteGuard` notes in the graphs of one replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import make_note
from tfdp.tracing.run import current_run

NONE = -1


class GuardNotes:
    """Each replica its own, and none waits."""

    def __init__(self) -> None:
        self.armed_steps = make_note(0, tf.int64)
        self.bad_loss = make_note(False, tf.bool)
        self.is_left_out = make_note(False, tf.bool)
        self.is_stopped = make_note(False, tf.bool)
        # Steps, left out, in a row, most in a row, the first one left out.
        self.counts = make_note([0, 0, 0, 0, NONE], tf.int64)
        self.batch: list[tf.Variable] = []
        # While a step is traced: what it may store, and what that was.
        self.before: list[tuple[tf.Variable, tf.Tensor]] = []
        self.graph: tf.Graph | None = None
        # Then, by optimizer: the same of what its sums keep from step to step.
        self.of_sums: dict[int, list[tuple[tf.Variable, tf.Tensor]]] = {}
        # The same of the last update. Nobody reads it, and it takes no memory, unless
        # another one follows, which may find something.
        self.updated: list[tuple[tf.Variable, tf.Tensor]] = []

    def is_of_graph(self) -> bool:
        """Whether the step's own graph is being built; values of a branch, a loop or a
        function end with it."""
        return tf.compat.v1.get_default_graph() is self.graph

    def known(self) -> set[int]:
        """The ids of what is put back already: the first value of each counts."""
        return {id(copy) for copy, _ in self.before}

    def take_updated(self) -> None:
        """Another update follows."""
        known = self.known()
        for copy, value in self.updated:
            if id(copy) not in known:
                known.add(id(copy))
                self.before.append((copy, value))
        self.updated = []

    def begin(self) -> None:
        """A step begins."""
        self.graph = tf.compat.v1.get_default_graph()
        self.bad_loss.assign(False)
        self.is_left_out.assign(False)

    def put_back(self) -> tf.Tensor:
        """Makes what a step stored what it was before."""
        for copy, value in self.before:
            copy.assign(value)
        return tf.constant(False)

    def end(self, parts: Sequence[tf.Tensor], *, stops: bool) -> None:
        """A step ends; where nothing was updated, what it stored is put back."""
        if [part.dtype for part in parts] != [note.dtype for note in self.batch]:
            self.batch = [_make_note_of_any_shape(part.dtype) for part in parts]
        is_left_out = self.is_left_out.read_value()
        steps, left_out, in_a_row, most, first = tf.unstack(self.counts.read_value())
        steps += 1
        in_a_row = tf.where(is_left_out, in_a_row + 1, 0)
        is_first = is_left_out & (first == NONE)

        def keep_batch() -> tf.Tensor:
            for note, part in zip(self.batch, parts, strict=True):
                note.assign(part)
            return tf.constant(True)

        def leave_out() -> tf.Tensor:
            self.put_back()
            return tf.cond(is_first, keep_batch, lambda: tf.constant(False))

        tf.cond(is_left_out, leave_out, lambda: tf.constant(False))
        self.counts.assign(
            [
                steps,
                left_out + tf.cast(is_left_out, tf.int64),
                in_a_row,
                tf.maximum(most, in_a_row),
                tf.where(is_first, steps, first),
            ]
        )
        self.armed_steps.assign(tf.maximum(self.armed_steps.read_value() - 1, 0))
        if stops:
            self.is_stopped.assign(self.is_stopped.read_value() | is_left_out)


def remember(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[Any],
    copies: Sequence[tf.Variable],
) -> None:
    """Before sums change what they keep from step to step, for who leaves steps out.

    Args:
      optimizer: whose gradients are added up.
      variables: what they are of.
      copies: what the calling replica keeps.
    """
    found = current_run()
    guard = None if found is None else found[0].guard
    if found is not None and guard is not None and guard.is_about(variables):
        guard.remember(optimizer, found[1], [(c, c.read_value()) for c in copies])


def _make_note_of_any_shape(dtype: tf.DType) -> tf.Variable:
    """A variable of this process for tensors whose shapes are not known yet."""
    with tf.init_scope():
        return make_note(tf.zeros([0], dtype), dtype, any_shape=True)


# By what an optimizer's gradients are multiplied when they are summed.


def scale_when_summed(optimizer: Any) -> Any:
    """What the gradients of `optimizer` are multiplied by then; None for nothing."""
    if not hasattr(optimizer, "inner_optimizer"):
        return optimizer.loss_scale_factor
    # A DistributedOptimizer undoes the fixed scale before it sums.
    if not getattr(optimizer, "dynamic_loss_scale", True):
        return None
    return optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
