"""A variational autoencoder with a `train_step` that takes means over the batch."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

LATENT = 2


class Sampling(layers.Layer):
    """Draws a latent vector by the reparametrization trick."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


def build_encoder():
    inputs = keras.Input((16, 16, 1))
    x = layers.Conv2D(8, 3, activation="relu", strides=2, padding="same")(inputs)
    x = layers.Conv2D(16, 3, activation="relu", strides=2, padding="same")(x)
    x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
    mean = layers.Dense(LATENT, name="mean")(x)
    log_variance = layers.Dense(LATENT, name="log_variance")(x)
    drawn = Sampling()([mean, log_variance])
    return keras.Model(inputs, [mean, log_variance, drawn], name="encoder")


def build_decoder():
    inputs = keras.Input((LATENT,))
    x = layers.Dense(4 * 4 * 16, activation="relu")(inputs)
    x = layers.Reshape((4, 4, 16))(x)
    for filters in (16, 8):
        x = layers.Conv2DTranspose(
            filters, 3, activation="relu", strides=2, padding="same"
        )(x)
    outputs = layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")(x)
    return keras.Model(inputs, outputs, name="decoder")


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.kl_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.loss_tracker, self.kl_tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance, drawn = self.encoder(data)
            reconstruction = self.decoder(drawn)
            errors = keras.losses.binary_crossentropy(data, reconstruction)
            reconstruction_loss = ops.mean(ops.sum(errors, axis=(1, 2)))
            kl_loss = -0.5 * (
                1 + log_variance - ops.square(mean) - ops.exp(log_variance)
            )
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        gradients = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_weights, strict=True)
        )
        self.loss_tracker.update_state(total_loss)
        self.kl_tracker.update_state(kl_loss)
        return {"loss": self.loss_tracker.result(), "kl": self.kl_tracker.result()}


rng = np.random.default_rng(0)
centers = rng.uniform(4, 12, (256, 2, 1, 1))
ys, xs = np.mgrid[:16, :16]
digits = np.exp(-((ys - centers[:, 0]) ** 2 + (xs - centers[:, 1]) ** 2) / 8)
digits = digits[..., None].astype("float32")

vae = VAE(build_encoder(), build_decoder())
vae.compile(optimizer=keras.optimizers.Adam())
vae.fit(digits, epochs=3, batch_size=32)
