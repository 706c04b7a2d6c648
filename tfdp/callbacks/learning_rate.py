"""`LearningRateLogger`: the learning rate in the progress bar and in TensorBoard."""

from __future__ import annotations

from typing import Any

import keras

from tfdp.errors import ConfigurationError


class LearningRateLogger(keras.callbacks.Callback):
    """Adds `learning_rate` to the logs of every batch and epoch of `fit`.

    From there the progress bar shows it, `History` and `CSVLogger` keep it, and
    `keras.callbacks.TensorBoard` writes it: `epoch_learning_rate` always (that one
    Keras knows by itself) and `batch_learning_rate` when its `update_freq` is not
    `"epoch"`.

    The value is `optimizer.learning_rate` when the batch or epoch ends, which is the
    rate of the step to come: the one that Keras' own TensorBoard callback writes. It is
    not averaged over the epoch. A `LossScaleOptimizer` is looked through; a
    `MultiOptimizer` gives one `learning_rate_<name>` for each of its optimizers. Where
    the compiled one makes no update and the model has others of its own (a GAN), each
    of them gives a `learning_rate_<attribute>`, as `learning_rate_generator_optimizer`.

    Place it before the callbacks that shall see it: Keras hands the logs down the list.
    With `steps_per_execution=N` Keras ends a batch every N steps, so the value comes
    every N steps. Like every callback that acts on batches, it makes Keras wait for
    each batch before it starts the next.

    Raises:
      ConfigurationError: when training starts and the model has no optimizer.

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
    print(history.history["learning_rate"])  # about [0.1]
    ```
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses a model without an optimizer."""
        if getattr(self.model, "optimizer", None) is None:
            raise ConfigurationError(
                "LearningRateLogger needs a model with an optimizer. Call "
                "model.compile(optimizer=...) before fit."
            )

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Adds the learning rate to the logs of the batch."""
        if logs is not None:
            logs.update(learning_rates_of(self.model))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the learning rate to the logs of the epoch."""
        if logs is not None:
            logs.update(learning_rates_of(self.model))


def learning_rates_of(model: keras.Model) -> dict[str, float]:
    """The learning rates of whatever updates `model` now, by their names in logs."""
    if not _has_updated(model.optimizer):
        # Keras compiles, and builds, an RMSprop where nobody names an optimizer.
        own = {
            name: learning_rates(value, f"learning_rate_{name}")
            for name, value in vars(model).items()
            if isinstance(value, keras.optimizers.Optimizer) and _has_updated(value)
        }
        if own:
            return {key: rate for rates in own.values() for key, rate in rates.items()}
    return learning_rates(model.optimizer)


def learning_rates(optimizer: Any, name: str = "learning_rate") -> dict[str, float]:
    """The current learning rate of `optimizer`, or of each that it is made of."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    if hasattr(optimizer, "optimizers"):
        return {
            f"{name}_{inner.name}": _as_float(inner.learning_rate)
            for inner in optimizer.optimizers
        }
    return {name: _as_float(optimizer.learning_rate)}


def _has_updated(optimizer: keras.optimizers.Optimizer) -> bool:
    return optimizer.built and _as_float(optimizer.iterations) > 0


def _as_float(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
