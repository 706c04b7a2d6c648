"""`ReportCallback`: reports metrics and the model of `fit` to Ray Train."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import keras

from tfdp.checks import check_whole
from tfdp.cluster.scratch import scratch_folder

MODEL_NAME = "model.keras"


class ReportCallback(keras.callbacks.Callback):
    """Reports each epoch to Ray Train: its metrics, and the model as a file.

    `ray.train.report` gets Keras' logs of an epoch, and `epoch`, counted from 0. After
    every `every_epochs` epochs and after the last one it also gets `model.keras`,
    written by worker 0 (by all workers if hosts share the shards of a model), as
    `result.checkpoint` of Ray's trainer, for `keras.saving.load_model`.
    `ray.train.CheckpointConfig` decides which ones Ray keeps.

    It does not restore: for a training that Ray restarts, add
    `tfdp.callbacks.Checkpoint` in a directory that all nodes see. Outside of Ray Train
    it does nothing. Place it last, as other callbacks may add to the logs.

    Args:
      every_epochs: epochs between two files, at least 1; 0: metrics only.

    Raises:
      ConfigurationError: `every_epochs` is invalid.

    Cost: each epoch a barrier of all workers, which is Ray's, and the file.

    ```python
    import keras
    import numpy as np
    import tfdp

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((8, 4), "float32")
    model.fit(x, x[:, :1], verbose=0, callbacks=[tfdp.ray.ReportCallback()])
    ```
    """

    def __init__(self, *, every_epochs: int = 1) -> None:
        super().__init__()
        name, why = "ReportCallback.every_epochs", " (0: no files)"
        check_whole(name, every_epochs, least=0, why=why)
        self._every_epochs = every_epochs
        self._train: Any = None

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._train = _ray_train()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._train is None:
            return
        metrics: dict[str, Any] = {"epoch": epoch}
        # Keras' values may be arrays, which Ray would have to pickle.
        metrics |= {name: float(value) for name, value in (logs or {}).items()}
        with contextlib.ExitStack() as stack:
            checkpoint = None
            if self._is_due(epoch):
                folder = stack.enter_context(scratch_folder())
                checkpoint = self._write(folder)
            # A barrier: all workers call it, with a file or without.
            self._train.report(metrics, checkpoint=checkpoint)

    def _is_due(self, epoch: int) -> bool:
        if not self._every_epochs:
            return False
        is_last = epoch + 1 == self.params.get("epochs") or self.model.stop_training
        return is_last or (epoch + 1) % self._every_epochs == 0

    def _write(self, folder: str) -> Any:
        """The file as Ray's checkpoint; None if another worker has it."""
        strategy = self.model.distribute_strategy
        is_chief = getattr(strategy, "is_chief", True)
        # With shards on all hosts, reading the model is a collective.
        if is_chief or getattr(strategy, "shards_over_hosts", False):
            self.model.save(os.path.join(folder, MODEL_NAME))
        return self._train.Checkpoint.from_directory(folder) if is_chief else None


def _ray_train() -> Any:
    """`ray.train`; None if this process is not one of its workers."""
    if "ray" not in sys.modules:
        return None  # avoids seconds of imports; Ray's workers have imported it
    try:
        import ray.train as train

        train.get_context()
    except (ImportError, RuntimeError):  # the latter outside of a training function
        return None
    return train
