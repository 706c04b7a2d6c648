"""A denoising diffusion model with averaged weights, by its `train_step`."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

SIZE, EMA = 16, 0.99


@keras.saving.register_keras_serializable()
def waves_of(variances):
    frequencies = np.exp(np.linspace(0, np.log(100.0), 4)).astype("float32")
    angles = 2 * np.pi * frequencies * variances
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=3)


def build_network():
    noisy = keras.Input((SIZE, SIZE, 1))
    variances = keras.Input((1, 1, 1))
    e = layers.Lambda(waves_of)(variances)
    e = layers.UpSampling2D(size=SIZE, interpolation="nearest")(e)
    x = layers.Concatenate()([layers.Conv2D(8, 1)(noisy), e])
    for _ in range(2):
        residual = layers.Conv2D(16, 1)(x)
        x = layers.GroupNormalization(4)(residual)
        x = layers.Conv2D(16, 3, padding="same", activation="swish")(x)
        x = layers.Add()([x, residual])
    outputs = layers.Conv2D(1, 1, kernel_initializer="zeros")(x)
    return keras.Model([noisy, variances], outputs)


class DiffusionModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = build_network()
        self.ema_network = keras.models.clone_model(self.network)

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker]

    def diffusion_schedule(self, times):
        start, end = np.arccos(0.95), np.arccos(0.02)
        angles = start + times * (end - start)
        return ops.sin(angles), ops.cos(angles)

    def train_step(self, images):
        images = self.normalizer(images, training=True)
        count = ops.shape(images)[0]
        noises = keras.random.normal(shape=(count, SIZE, SIZE, 1))
        times = keras.random.uniform(shape=(count, 1, 1, 1))
        noise_rates, signal_rates = self.diffusion_schedule(times)
        noisy_images = signal_rates * images + noise_rates * noises
        with tf.GradientTape() as tape:
            pred = self.network([noisy_images, noise_rates**2], training=True)
            noise_loss = self.loss(noises, pred)
        weights = self.network.trainable_weights
        gradients = tape.gradient(noise_loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.noise_loss_tracker.update_state(noise_loss)
        for weight, ema in zip(
            self.network.weights, self.ema_network.weights, strict=True
        ):
            ema.assign(EMA * ema + (1 - EMA) * weight)
        return {m.name: m.result() for m in self.metrics}


rng = np.random.default_rng(0)
images = rng.normal(size=(128, SIZE, SIZE, 1)).cumsum(1).astype("float32")
model = DiffusionModel()
model.normalizer.adapt(images)
model.compile(
    optimizer=keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-4),
    loss=keras.losses.mean_absolute_error,
)
model.fit(images, epochs=2, batch_size=32)
