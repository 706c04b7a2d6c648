"""A Siamese network of triplets, whose `train_step` takes a loss for each row."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

rng = np.random.default_rng(0)
kinds = rng.normal(size=(10, 24, 24, 1))


def draw(which):
    noise = rng.normal(0, 0.7, (len(which), 24, 24, 1))
    return (kinds[which] + noise).astype("float32")


which = rng.integers(0, 10, 160)
others = (which + rng.integers(1, 10, 160)) % 10
dataset = tf.data.Dataset.from_tensor_slices((draw(which), draw(which), draw(others)))
dataset = dataset.shuffle(160, seed=3).batch(32, drop_remainder=False)

embedding = keras.Sequential(
    [
        keras.Input((24, 24, 1)),
        layers.Conv2D(16, 3, strides=2, activation="relu"),
        layers.Conv2D(16, 3, strides=2, activation="relu"),
        layers.Flatten(),
        layers.Dense(32, activation="relu"),
        layers.LayerNormalization(),
        layers.Dense(16),
    ],
    name="embedding",
)


class DistanceLayer(layers.Layer):
    def call(self, anchor, positive, negative):
        near = ops.sum(ops.square(anchor - positive), -1)
        far = ops.sum(ops.square(anchor - negative), -1)
        return near, far


inputs = [keras.Input((24, 24, 1), name=name) for name in ("a", "p", "n")]
distances = DistanceLayer()(*[embedding(each) for each in inputs])
siamese_network = keras.Model(inputs, distances)


class SiameseModel(keras.Model):
    def __init__(self, siamese_network, margin=0.5):
        super().__init__()
        self.siamese_network = siamese_network
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.siamese_network(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._compute_loss(data)
        weights = self.siamese_network.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data):
        near, far = self.siamese_network(data)
        return ops.maximum(near - far + self.margin, 0.0)

    @property
    def metrics(self):
        return [self.loss_tracker]


siamese_model = SiameseModel(siamese_network)
siamese_model.compile(optimizer=keras.optimizers.Adam(0.0001))
siamese_model.fit(dataset, epochs=2)
