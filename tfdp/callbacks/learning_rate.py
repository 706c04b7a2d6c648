"""`LearningRateLogger`: the learning rate in the progress bar and in TensorBoard."""

from __future__ import annotations

from typing import Any

import keras

from tfdp._private.optimizer_hooks import last_rate_of
from tfdp.callbacks.other_callbacks import Logs
from tfdp.errors import ConfigurationError


class LearningRateLogger(keras.callbacks.Callback):
    """Adds `learning_rate` to the logs of every batch and epoch of `fit`.

    `keras.callbacks.TensorBoard` then writes `epoch_learning_rate` and, if its
    `update_freq` is not `"epoch"`, `batch_learning_rate`.

    The value is the rate of the last step, not averaged. (At the end of an epoch Keras'
    TensorBoard callback itself writes the rate of the next step.) A
    `LossScaleOptimizer` is unwrapped; a `MultiOptimizer` gives one
    `learning_rate_<name>` per optimizer. If the compiled optimizer makes no update and
    the model has others (a GAN), each gives a `learning_rate_<attribute>`, as
    `learning_rate_generator_optimizer`.

    Place it before callbacks that read the value or change the rate. With
    `steps_per_execution=N` it comes every N steps. Keras waits for each batch before it
    starts the next.

    Raises:
      ConfigurationError: training starts and the model has no optimizer.

    ```python
    import keras
    import numpy as np
    import tfdp

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    rate = tfdp.schedules.LinearWarmup(0.1, warmup_steps=4)
    model.compile(keras.optimizers.SGD(rate), loss="mse")
    history = model.fit(
        np.ones((8, 4)), np.ones((8, 1)), batch_size=2, verbose=0,
        callbacks=[tfdp.callbacks.LearningRateLogger()],
    )
    print(history.history["learning_rate"])  # about [0.075]
    ```
    """

    def on_train_begin(self, logs: Logs = None) -> None:
        if getattr(self.model, "optimizer", None) is None:
            raise ConfigurationError(
                "LearningRateLogger needs a model with an optimizer. Call "
                "model.compile(optimizer=...) before fit."
            )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs.update(learning_rates_of(self.model))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs.update(learning_rates_of(self.model))


def learning_rates_of(model: keras.Model) -> dict[str, float]:
    """Log name -> learning rate of each optimizer that updates `model`."""
    if not _has_updated(model.optimizer):
        # Keras compiles and builds an RMSprop by default.
        others = {
            name: learning_rates(value, f"learning_rate_{name}")
            for name, value in vars(model).items()
            if isinstance(value, keras.optimizers.Optimizer) and _has_updated(value)
        }
        if others:
            return {
                key: rate for rates in others.values() for key, rate in rates.items()
            }
    return learning_rates(model.optimizer)


def learning_rates(optimizer: Any, name: str = "learning_rate") -> dict[str, float]:
    """Log name -> learning rate of `optimizer`, or of each optimizer in it."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    if hasattr(optimizer, "optimizers"):
        return {
            f"{name}_{inner.name}": last_rate_of(inner)
            for inner in optimizer.optimizers
        }
    return {name: last_rate_of(optimizer)}


def _has_updated(optimizer: keras.optimizers.Optimizer) -> bool:
    return optimizer.built and int(optimizer.iterations.numpy()) > 0
