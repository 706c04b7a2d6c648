"""`ReportCallback`: metrics and the model of a `fit`, for Ray Train."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import keras

from tfdp.checks import is_whole
from tfdp.cluster.scratch import scratch_folder
from tfdp.errors import ConfigurationError

MODEL_NAME = "model.keras"


class ReportCallback(keras.callbacks.Callback):
    """Reports each epoch to Ray Train: its metrics, and the model as a file.

    `ray.train.report` gets what Keras has in the logs of an epoch, and `epoch`, counted
    from 0. After every `every_epochs` epochs and after the last one it also gets
    `model.keras`, written by worker 0 (by all workers where hosts share the shards of a
    model). `result.checkpoint` of Ray's trainer then holds that file, for
    `keras.saving.load_model`. What Ray is to keep of them is for
    `ray.train.CheckpointConfig` to say.

    It reports and does not restore: a training that Ray starts again goes on where it
    was with `tfdp.callbacks.Checkpoint` beside it, in a directory that all nodes see.

    Outside of Ray Train it does nothing, so that a script stays the same. Place it
    last: other callbacks may add to the logs.

    Args:
      every_epochs: epochs between two files, at least 1; 0: metrics only.

    Raises:
      ConfigurationError: when `every_epochs` is none of these.

    Cost: in each epoch a barrier of all workers, which is Ray's, and the file.

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
        if not is_whole(every_epochs, least=0):
            raise ConfigurationError(
                "ReportCallback.every_epochs must be an int of at least 0 (0: no "
                f"files). Received: {every_epochs!r}."
            )
        self._every_epochs = every_epochs
        self._train: Any = None

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Looks whether this is a worker of Ray Train."""
        self._train = _ray_train()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Reports the epoch."""
        if self._train is None:
            return
        metrics: dict[str, Any] = {"epoch": epoch}
        # As Keras has them they may be arrays, which Ray would have to pickle.
        metrics |= {name: float(value) for name, value in (logs or {}).items()}
        with contextlib.ExitStack() as until_it_is_sent:
            checkpoint = None
            if self._is_due(epoch):
                folder = until_it_is_sent.enter_context(scratch_folder())
                checkpoint = self._write(folder)
            # A barrier: all workers come here, with a file or without.
            self._train.report(metrics, checkpoint=checkpoint)

    def _is_due(self, epoch: int) -> bool:
        if not self._every_epochs:
            return False
        is_last = epoch + 1 == self.params.get("epochs") or self.model.stop_training
        return is_last or (epoch + 1) % self._every_epochs == 0

    def _write(self, folder: str) -> Any:
        """The file as Ray's checkpoint; None where another worker has it."""
        strategy = self.model.distribute_strategy
        is_chief = getattr(strategy, "is_chief", True)
        # Nobody can read the model alone whose shards lie on all hosts.
        if is_chief or getattr(strategy, "shards_over_hosts", False):
            self.model.save(os.path.join(folder, MODEL_NAME))
        return self._train.Checkpoint.from_directory(folder) if is_chief else None


def _ray_train() -> Any:
    """`ray.train`; None where this process is no worker of it."""
    if "ray" not in sys.modules:
        return None  # without Ray's seconds of imports: its workers have it
    try:
        import ray.train as train

        train.get_context()
    except ImportError:
        return None
    except RuntimeError:
        # What Ray says outside of a training function.
        return None
    return train
