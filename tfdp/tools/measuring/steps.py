"""Makes Keras training steps on synthetic data in memory, to be timed.

The step is Keras' `train_function`, as `fit` calls it, without `fit`'s work per epoch.
Every replica gets its own part of each global batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.tools.measuring.models import (
    BATCHES_IN_MEMORY,
    LOCAL_BATCH,
    SEED,
    BenchmarkModel,
    make_images,
)

WARM_UP_CALLS = 3


@dataclasses.dataclass
class TimedStep:
    """A model that trains under one strategy, and its data.

    `step` trains one execution and returns the loss so far; `global_batch`: its images,
    over all replicas.
    """

    step: Callable[[], tf.Tensor]
    global_batch: int
    network: keras.Model

    def warm_up(self, calls: int = WARM_UP_CALLS) -> float:
        """Trains some untimed steps; returns the loss."""
        # Once through the data, so that the cache is full before the clock starts.
        for _ in range(max(calls, BATCHES_IN_MEMORY)):
            loss = self.step()
        return float(loss)


def make_step(
    strategy: tf.distribute.Strategy, model: BenchmarkModel, open_batch: bool = False
) -> TimedStep:
    """The model under `strategy`, with weights and data equal for every arm.

    `open_batch`: whether the compiled step takes batches of any length.
    """
    global_batch = LOCAL_BATCH * strategy.num_replicas_in_sync
    network = build_network(strategy, model)
    network.make_train_function()
    images = tf.data.Dataset.from_tensor_slices(make_images(model, global_batch))
    dataset = images.batch(global_batch, drop_remainder=not open_batch)
    dataset = dataset.cache().repeat().prefetch(2)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    return TimedStep(
        step=lambda: network.train_function(batches)["loss"],
        global_batch=global_batch * model.steps_per_execution,
        network=network,
    )


def build_network(
    strategy: tf.distribute.Strategy, model: BenchmarkModel
) -> keras.Model:
    """The compiled network with its optimizer's slots, equal for every arm."""
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        network = model.build(model.input_shape, model.classes)
        network.compile(
            optimizer=keras.optimizers.SGD(0.01, momentum=model.momentum),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=model.steps_per_execution,
        )
        # As `fit` does: a stock strategy cannot create the slots inside the step.
        network.optimizer.build(network.trainable_variables)
    return network


@contextlib.contextmanager
def without_sums(strategy: Any) -> Iterator[None]:
    """Makes replicas keep their own gradients, in the steps traced in this block."""

    def keep(values: Sequence[Any], rank: int, **options: Any) -> list[Any]:
        return list(values)

    reducer = strategy.extended.reducer
    reducer.all_reduce = keep
    try:
        yield
    finally:
        del reducer.all_reduce
