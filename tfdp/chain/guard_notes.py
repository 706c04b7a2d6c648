"""State of a `FiniteGuard` in the graphs of one replica."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdp._private.names import make_note

NONE = -1
#: Variables with the values to restore.
Saved = list[tuple[tf.Variable, tf.Tensor]]


class GuardNotes:
    """One per replica; no replica waits for another's."""

    def __init__(self) -> None:
        self.armed_steps = make_note(0, tf.int64)
        self.bad_loss = make_note(False, tf.bool)
        self.is_left_out = make_note(False, tf.bool)
        self.is_stopped = make_note(False, tf.bool)
        # Steps, skipped, in a row, most in a row, the first one skipped.
        self.counts = make_note([0, 0, 0, 0, NONE], tf.int64)
        self.batch: list[tf.Variable] = []
        # While a step is traced: what it may store, with the values before.
        self.before: Saved = []
        self.graph: tf.Graph | None = None
        # The same for the residuals that sums of gradients keep, by optimizer.
        self.residuals: dict[int, Saved] = {}
        # The same of the last update. Unused, so without memory, unless another update
        # follows, which may be skipped.
        self.updated: Saved = []

    def is_of_graph(self) -> bool:
        """Whether the step's own graph is being built: no branch, loop or function."""
        return tf.compat.v1.get_default_graph() is self.graph

    def known(self) -> set[int]:
        return {id(copy) for copy, _ in self.before}

    def take_updated(self) -> None:
        """Makes a skipped update also undo the previous one; call before an update."""
        known = self.known()
        for copy, value in self.updated:
            if id(copy) not in known:
                known.add(id(copy))
                self.before.append((copy, value))
        self.updated = []

    def begin(self) -> None:
        self.graph = tf.compat.v1.get_default_graph()
        self.bad_loss.assign(False)
        self.is_left_out.assign(False)

    def put_back(self) -> tf.Tensor:
        for copy, value in self.before:
            copy.assign(value)
        return tf.constant(False)

    def end(self, parts: Sequence[tf.Tensor], *, stops: bool) -> None:
        if [part.dtype for part in parts] != [note.dtype for note in self.batch]:
            with tf.init_scope():
                self.batch = [
                    make_note(tf.zeros([0], part.dtype), part.dtype, any_shape=True)
                    for part in parts
                ]
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
