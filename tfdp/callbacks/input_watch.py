"""Warns when training waits for its input."""

from __future__ import annotations

import time
import warnings
from typing import Any

import keras
import tensorflow as tf

from tfdp.checks import check_whole
from tfdp.errors import ConfigurationError, SlowInputWarning

# Of the time of a training step.
MOST_SHARE = 0.8


class InputWatch(keras.callbacks.Callback):
    """Measures whether `dataset` makes batches as fast as training consumes them.

    After the second epoch (the first one compiles and fills caches) it reads a few
    batches without training:

        share = seconds to make a batch / seconds of a training step

    It warns once if the share is 0.8 or more: devices wait for data. It measures
    nothing if `fit` has no number of steps (a generator without `steps_per_epoch`).

    Args:
      dataset: the `tf.data.Dataset` given to `fit`.
      batches: how many to read, at least 2, after one that is not counted.

    Raises:
      ConfigurationError: an argument is not as above.

    Cost: reads `batches` + 1 batches once.

    ```python
    import keras
    import tensorflow as tf
    import tfdp

    dataset = tf.data.Dataset.from_tensor_slices((tf.ones([64, 4]), tf.ones([64, 1])))
    dataset = dataset.batch(8)
    with tfdp.auto_strategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    watch = tfdp.callbacks.InputWatch(dataset)
    model.fit(dataset, epochs=2, callbacks=[watch], verbose=0)
    print(watch.share)
    ```
    """

    def __init__(self, dataset: tf.data.Dataset, batches: int = 20):
        super().__init__()
        if not isinstance(dataset, tf.data.Dataset):
            raise ConfigurationError(
                "InputWatch needs the tf.data.Dataset that is given to fit. "
                f"Received: {type(dataset).__name__}."
            )
        check_whole("batches", batches, least=2)
        self.dataset = dataset
        self.batches = batches
        #: Seconds to make a batch over seconds of a step; None before it is measured.
        self.share: float | None = None
        self._epochs = 0
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        seconds = time.perf_counter() - self._began
        self._epochs += 1
        # Not counted per batch: Keras would then wait for each of them.
        steps = self.params.get("steps")
        if self._epochs != 2 or not steps:
            return
        step_seconds = seconds / steps
        batch_seconds = self._seconds_of_a_batch()
        self.share = batch_seconds / step_seconds
        if self.share >= MOST_SHARE:
            warnings.warn(
                f"The input makes a batch in {batch_seconds * 1e3:.1f} ms, a training "
                f"step takes {step_seconds * 1e3:.1f} ms: the devices wait for data. "
                "Map with num_parallel_calls=tf.data.AUTOTUNE, cache() what fits into "
                "memory, prefetch(), and interleave() files.",
                SlowInputWarning,
                stacklevel=2,
            )

    def _seconds_of_a_batch(self) -> float:
        iterator = iter(self.dataset.take(self.batches + 1))
        next(iterator, None)
        began = time.perf_counter()
        count = sum(1 for _ in iterator)
        return (time.perf_counter() - began) / max(count, 1)
