"""FixMatch on batches of labelled and unlabelled rows, of which there are more."""

import sys

import keras
import numpy as np
import tensorflow as tf

import tfdp

RNG = np.random.default_rng(5)
LABELLED, UNLABELLED, STEPS, WIDTH = 12, 36, 3, 6
X = RNG.normal(size=(LABELLED * STEPS, WIDTH)).astype("float32")
Y = RNG.integers(0, 3, LABELLED * STEPS)
U = RNG.normal(size=(UNLABELLED * STEPS, WIDTH)).astype("float32") + 1.0


class FixMatch(keras.Model):
    """Sohn et al. 2020: sure predictions are labels of the same rows, blurred."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential(
            [
                keras.layers.Dense(8, "tanh"),
                tfdp.layers.SyncBatchNormalization(),
                keras.layers.Dense(3),
            ]
        )
        self.loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x, training=False):
        return self.network(x, training=training)

    def train_step(self, data):
        (x, y), u, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            logits = self.network(x, training=False)
            sure = tf.nn.softmax(self.network(u, training=False))
            blurred = self.network(0.9 * u, training=True)
            labels = tf.stop_gradient(tf.argmax(sure, axis=-1))
            is_sure = tf.cast(tf.reduce_max(sure, axis=-1) > 0.4, tf.float32)
            loss = self.loss_of(y, logits)
            loss += 0.5 * self.loss_of(labels, blurred, sample_weight=is_sure)
        trained = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, trained), trained)
        self.seen.update_state(is_sure)
        return {"total": loss, "seen": self.seen.result()}


def rows_of(values, rows, has_shapes):
    return tf.data.Dataset.from_tensor_slices(values).batch(
        rows, drop_remainder=has_shapes
    )


def trained(scope, has_shapes=True):
    with scope:
        keras.utils.set_random_seed(1)
        model = FixMatch()
        model.network.build((None, WIDTH))
        model.built = True
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), jit_compile=False)
    parts = rows_of((X, Y), LABELLED, has_shapes), rows_of(U, UNLABELLED, has_shapes)
    data = tf.data.Dataset.zip(parts)
    history = model.fit(data, epochs=2, verbose=0).history
    return history, model.get_weights()


if __name__ == "__main__":
    strategy = tfdp.auto_strategy()
    _, weights = trained(strategy.scope())
    np.savez(f"{sys.argv[1]}.{strategy.cluster.rank}.npz", *weights)
