"""On several hosts only worker 0 writes: what the callbacks of a `fit` do elsewhere.

The callbacks themselves stay in their list. On the other workers those that write files
get methods of their own instance that do nothing; a `BackupAndRestore` there takes the
weights and the epoch over from worker 0 instead of reading its files.

Where the hosts share the shards of a model, nobody can read it alone. Then all workers
run all callbacks, and the others write into a folder that is thrown away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.keras_models import initial_epoch, set_initial_epoch
from tfdp.cluster.scratch import scratch_folder
from tfdp.sharding.variables import ShardedVariable, noted_assignments

__all__ = ["let_only_the_chief_write", "share_state"]

# Callbacks that write, and their attributes that are paths: the first is the one that
# was given, the others lie in it.
WRITERS = {
    keras.callbacks.CSVLogger: ("filename",),
    keras.callbacks.ModelCheckpoint: ("filepath",),
    keras.callbacks.TensorBoard: ("log_dir",),
    keras.callbacks.BackupAndRestore: (
        "backup_dir",
        "_weights_path",
        "_training_metadata_path",
        "_prev_weights_path",
        "_prev_training_metadata_path",
    ),
}
# Called in the order of the callbacks; a model is set before training begins.
EVENTS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]

# What worker 0 restored, by id of the variable's value.
Restored = Mapping[int, np.ndarray]
ShareState = Callable[[Any, Restored], None]


def let_only_the_chief_write(
    callbacks: Any, is_chief: bool, share: ShareState, *, all_must_read: bool
) -> None:
    """Leads the callbacks of a `fit`, once each.

    Args:
      callbacks: as `fit` was given them: None, one, or nested lists.
      is_chief: whether this is worker 0.
      share: brings a model's variables and first epoch to those of worker 0;
        called on every worker at the same time.
      all_must_read: whether no worker can read the model's variables alone.
    """
    for callback in tf.nest.flatten(callbacks):
        kind = next((k for k in WRITERS if isinstance(callback, k)), None)
        if kind is None or "_tfdp_led" in vars(callback):
            continue
        own = vars(callback)
        own["_tfdp_led"] = True
        if not is_chief and all_must_read:
            _write_elsewhere(callback, WRITERS[kind])
        elif not is_chief:
            own.update(dict.fromkeys(EVENTS, _do_nothing))
            if isinstance(callback, keras.callbacks.TensorBoard):
                own["set_model"] = callback.set_model = _do_nothing
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            own["on_train_begin"] = _Restore(callback, is_chief, share)


def _write_elsewhere(callback: Any, attributes: tuple[str, ...]) -> None:
    # The folder goes when the callback does.
    callback.tfdp_folder = folder = scratch_folder()
    given, *inside = attributes
    root = os.path.join(folder.name, os.path.basename(getattr(callback, given)))
    for attribute in inside:
        name = os.path.basename(getattr(callback, attribute))
        setattr(callback, attribute, os.path.join(root, name))
    setattr(callback, given, root)


def share_state(
    model: keras.Model,
    restored: Restored,
    is_chief: bool,
    first_host_value: Callable[[np.ndarray, str], np.ndarray],
) -> None:
    """Brings a model's first epoch and variables to those of worker 0.

    Args:
      model: compiled, alike on all workers.
      restored: what worker 0 assigned to variables of which it stores a part.
      is_chief: whether this is worker 0.
      first_host_value: hands worker 0's array to every worker.
    """
    epoch = np.array(initial_epoch(model), np.int64)
    set_initial_epoch(model, int(first_host_value(epoch, "first epoch")))
    if initial_epoch(model) and not model.optimizer.built:
        # Worker 0 has built it, to restore its slots.
        model.optimizer.build(model.trainable_variables)
    for variable in [*model.weights, *model.optimizer.variables]:
        if not isinstance(variable.value, ShardedVariable):
            mine = variable.numpy()
        elif not _was_restored(variable, restored, first_host_value):
            continue
        elif is_chief:
            mine = restored[id(variable.value)]
        else:
            mine = np.zeros(variable.shape, variable.value.dtype.as_numpy_dtype)
        variable.assign(first_host_value(mine, variable.path))


def _was_restored(
    variable: keras.Variable,
    restored: Restored,
    first_host_value: Callable[[np.ndarray, str], np.ndarray],
) -> bool:
    mine = np.array(id(variable.value) in restored)
    return bool(first_host_value(mine, f"whether {variable.path} was restored"))


def _do_nothing(*_: Any, **__: Any) -> None:
    """In the place of a method that writes."""


class _Restore:
    """`on_train_begin` of a `BackupAndRestore`: worker 0 reads, all others follow."""

    def __init__(self, callback: Any, is_chief: bool, share: ShareState):
        self._callback = callback
        self._is_chief = is_chief
        self._share = share

    def __call__(self, logs: Any = None) -> None:
        with noted_assignments() as restored:
            if self._is_chief:
                type(self._callback).on_train_begin(self._callback, logs)
        self._share(self._callback.model, restored)
