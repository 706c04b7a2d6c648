"""On several hosts only worker 0 writes: what the callbacks of a `fit` do elsewhere.

The callbacks themselves stay in their list. On the other workers those that write files
get methods of their own instance that do nothing; a `BackupAndRestore` there takes the
weights and the epoch over from worker 0 instead of reading its files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

__all__ = ["let_only_the_chief_write", "share_state"]

WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.BackupAndRestore,
)
# Called in the order of the callbacks; a model is set before training begins.
EVENTS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]

ShareState = Callable[[Any], None]


def let_only_the_chief_write(callbacks: Any, is_chief: bool, share: ShareState) -> None:
    """Leads the callbacks of a `fit`, once each.

    Args:
      callbacks: as `fit` was given them: None, one, or nested lists.
      is_chief: whether this is worker 0.
      share: brings a model's variables and first epoch to those of worker 0;
        called on every worker at the same time.
    """
    for callback in tf.nest.flatten(callbacks):
        if not isinstance(callback, WRITERS) or "_tfdp_led" in vars(callback):
            continue
        own = vars(callback)
        own["_tfdp_led"] = True
        if not is_chief:
            own.update(dict.fromkeys(EVENTS, _do_nothing))
            if isinstance(callback, keras.callbacks.TensorBoard):
                own["set_model"] = callback.set_model = _do_nothing
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            own["on_train_begin"] = _Restore(callback, is_chief, share)


def share_state(
    model: keras.Model, first_host_value: Callable[[np.ndarray, str], np.ndarray]
) -> None:
    """Brings a model's first epoch and variables to those of worker 0.

    Args:
      model: compiled, alike on all workers.
      first_host_value: hands worker 0's array to every worker.
    """
    epoch = np.array(model._initial_epoch or 0, np.int64)
    model._initial_epoch = int(first_host_value(epoch, "first epoch"))
    if model._initial_epoch and not model.optimizer.built:
        # Worker 0 has built it, to restore its slots.
        model.optimizer.build(model.trainable_variables)
    for variable in [*model.weights, *model.optimizer.variables]:
        variable.assign(first_host_value(variable.numpy(), variable.path))


def _do_nothing(*_: Any, **__: Any) -> None:
    """In the place of a method that writes."""


class _Restore:
    """`on_train_begin` of a `BackupAndRestore`: worker 0 reads, all others follow."""

    def __init__(self, callback: Any, is_chief: bool, share: ShareState):
        self._callback = callback
        self._is_chief = is_chief
        self._share = share

    def __call__(self, logs: Any = None) -> None:
        if self._is_chief:
            type(self._callback).on_train_begin(self._callback, logs)
        self._share(self._callback.model)
