"""Defect D3: the stock strategy of several workers, an infinity on one of them.

    python -m tests.support.stock_hosts BAD_WORKER

Started with TF_CONFIG; prints "done" after two steps. BAD_WORKER -1 means none.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

from tests.support.parity import classification_data, dense_model

TIMEOUT_SECONDS = 10


def main(bad_worker):
    options = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=TIMEOUT_SECONDS
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    rank = strategy.cluster_resolver.task_id
    with strategy.scope():
        model = dense_model()
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05))
        optimizer.build(model.trainable_variables)
    x, y = classification_data(8)
    if rank == bad_worker:
        x[0] = np.inf

    @tf.function
    def step(features, labels):
        def replica_step(features, labels):
            with tf.GradientTape() as tape:
                loss = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    labels, model(features)
                )
                scaled = optimizer.scale_loss(tf.reduce_mean(loss))
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(scaled, variables), variables)

        strategy.run(replica_step, args=(features, labels))

    for _ in range(2):
        step(tf.constant(x), tf.constant(y))
    print("done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
