"""Times short epochs of Keras' `fit`, with all that `fit` does once per epoch.

Where an epoch has few steps, most of it is input that is set up and taken down again.
The images come as arrays, shuffled, as in a first script.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdp.bench.one_process.training import TrainingArm, build_network
from tfdp.bench.subjects.images import LOCAL_BATCH, make_images
from tfdp.bench.subjects.models import BenchmarkModel

__all__ = ["make_epoch_arm"]

EPOCHS = 4
STEPS = 10


def make_epoch_arm(
    strategy: tf.distribute.Strategy, model: BenchmarkModel, open_batch: bool = False
) -> TrainingArm:
    """Calls of `fit` of 4 epochs of 10 steps each.

    Args:
      strategy: what trains the model.
      model: what is trained.
      open_batch: as in `make_training_arm`; arrays always are.
    """
    global_batch = LOCAL_BATCH * strategy.num_replicas_in_sync
    network = build_network(strategy, model)
    images, labels = make_images(model, global_batch)
    samples = STEPS * global_batch
    images = np.resize(images, (samples, *images.shape[1:]))
    labels = np.resize(labels, (samples,))

    def train() -> tf.Tensor:
        history = network.fit(
            images, labels, batch_size=global_batch, epochs=EPOCHS, verbose=0
        )
        return tf.constant(history.history["loss"][-1])

    return TrainingArm(
        step=train, global_batch=EPOCHS * samples, network=network, warmup_steps=1
    )
