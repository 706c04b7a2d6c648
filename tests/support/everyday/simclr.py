"""Contrastive learning of two augmented views, each row against the batch's others."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

TEMPERATURE = 0.1


def augmenter():
    return keras.Sequential(
        [
            keras.Input((24, 24, 3)),
            layers.RandomFlip("horizontal"),
            layers.RandomTranslation(0.2, 0.2),
            layers.RandomZoom(0.2),
            layers.GaussianNoise(0.1),
        ]
    )


class ContrastiveModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.augment = augmenter()
        self.encoder = keras.Sequential(
            [
                keras.Input((24, 24, 3)),
                layers.Conv2D(16, 3, strides=2, activation="relu"),
                layers.Conv2D(16, 3, strides=2, activation="relu"),
                layers.Flatten(),
                layers.Dense(32, activation="relu"),
            ]
        )
        self.projection = keras.Sequential(
            [keras.Input((32,)), layers.Dense(32, activation="relu"), layers.Dense(16)]
        )
        self.loss_tracker = keras.metrics.Mean(name="c_loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")

    @property
    def metrics(self):
        return [self.loss_tracker, self.accuracy]

    def contrastive_loss(self, first, second):
        first, second = ops.normalize(first, axis=1), ops.normalize(second, axis=1)
        similarities = ops.matmul(first, ops.transpose(second)) / TEMPERATURE
        labels = ops.arange(ops.shape(first)[0])
        self.accuracy.update_state(labels, similarities)
        loss_1_2 = keras.losses.sparse_categorical_crossentropy(
            labels, similarities, from_logits=True
        )
        loss_2_1 = keras.losses.sparse_categorical_crossentropy(
            labels, ops.transpose(similarities), from_logits=True
        )
        return ops.mean(loss_1_2 + loss_2_1) / 2

    def train_step(self, images):
        first, second = self.augment(images), self.augment(images)
        with tf.GradientTape() as tape:
            first = self.projection(self.encoder(first, training=True))
            second = self.projection(self.encoder(second, training=True))
            loss = self.contrastive_loss(first, second)
        weights = self.encoder.trainable_weights + self.projection.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {m.name: m.result() for m in self.metrics}


images = np.random.default_rng(0).uniform(size=(128, 24, 24, 3)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices(images).batch(32).prefetch(1)
model = ContrastiveModel()
model.compile(optimizer=keras.optimizers.Adam())
model.fit(dataset, epochs=2)
