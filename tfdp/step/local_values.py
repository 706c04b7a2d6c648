"""The local values of one optimizer's weights, and their checkpoints.

If outer values change between two steps (`set_weights`, a checkpoint of the model
alone), the local values must restart from them; but not after a checkpoint restored
both. Each assignment to outer values sets a flag (`note_change`), which `settle`
checks before the next step. A checkpoint has a mark, a hash of the outer values that
its local values belong to: if it matches the current ones, the local values stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdp._private.names import ResourceVariable
from tfdp._private.variable_hooks import checkpoint_as
from tfdp.variables.local_view import LocalView

#: No mark; others are not negative.
NO_MARK = -1
# A prime near 2^20: adjacent elements have different weights, so permutations differ.
PLACES = 1_048_573


class LocalValues:
    """Local values of mirrored variables, on each replica of this process."""

    def __init__(self, devices: Sequence[str]):
        self.variables: list[LocalView] = []
        #: The content of checkpoints.
        self.stored = tf.Module()
        self.stored.local = []
        self.stored.mark = _on_devices(devices[:1], NO_MARK, tf.int64)[0]
        self._changed = _on_devices(devices, False, tf.bool)
        checkpoint_as(self.stored.mark, self.write_mark, self.read_mark)

    def make(self, variable: LocalView) -> None:
        self.variables.append(variable)
        self.stored.local.append(variable.make_local(self.note_change))

    def settle(self) -> None:
        """Restarts if outer values changed, before a step and outside of replicas."""
        expected = self.stored.mark.read_value()
        for rank, changed in enumerate(self._changed):

            def start_again(rank: int = rank) -> tf.Tensor:
                is_other = tf.not_equal(self._mark_of_outer(rank), expected)
                return tf.cond(is_other, lambda: self._restart(rank), lambda: False)

            with tf.device(changed.device):
                tf.cond(changed, start_again, lambda: False)
                changed.assign(False)
        with tf.device(self.stored.mark.device):
            self.stored.mark.assign(tf.constant(NO_MARK, tf.int64))

    def _restart(self, rank: int) -> tf.Tensor:
        for variable in self.variables:
            variable.local_copy(rank).assign(variable.outer_copy(rank).read_value())
        return tf.constant(True)

    def note_change(self, rank: int | None = None) -> None:
        # A replica sets its own flag: shared ones would order the replicas.
        changes = self._changed if rank is None else [self._changed[rank]]
        for changed in changes:
            with tf.device(changed.device):
                changed.assign(True)

    def _mark_of_outer(self, rank: int) -> tf.Tensor:
        mark = tf.constant(0, tf.int64)
        for place, variable in enumerate(self.variables, start=1):
            value = variable.outer_copy(rank).read_value()
            bits = tf.cast(tf.bitcast(tf.cast(value, tf.float32), tf.int32), tf.int64)
            weights = tf.range(1, tf.size(bits, tf.int64) + 1) % PLACES + 1
            mark += place * tf.reduce_sum(tf.reshape(bits, [-1]) * weights)
        return mark & tf.constant(2**62 - 1, tf.int64)

    def write_mark(self) -> tf.Tensor:
        mark = self._mark_of_outer(0)
        # Values assigned since the last step have no local values yet.
        is_known = ~self._changed[0].read_value() | (mark == self.stored.mark)
        return tf.where(is_known, mark, tf.constant(NO_MARK, tf.int64))

    def read_mark(self, mark: tf.Tensor | None) -> None:
        """Keeps the local values if `mark` matches the outer ones."""
        self.stored.mark.assign(
            tf.constant(NO_MARK, tf.int64) if mark is None else mark
        )
        self.note_change()


def _on_devices(devices: Sequence[str], value: object, dtype: tf.DType) -> list:
    variables = []
    for device in devices:
        with tf.init_scope(), tf.device(device):
            start = tf.constant(value, dtype)
            variables.append(ResourceVariable(start, trainable=False))
    return variables
