"""Trains a GAN: two models and two optimizers in one `train_step`.

    python examples/gan.py
    tfdp launch --workers 2 examples/gan.py

A deep convolutional generative adversarial network on scikit-learn's digits, as a Keras
model with a `train_step` of its own; nothing in the class knows of replicas. Writes a
picture of 64 digits that it made, beside 64 that are real. Runs unchanged on a host
with GPUs and under every launcher; on a laptop the CPU is split into `--replicas`
devices.

Source: A. Radford et al., 2015, arXiv 1511.06434; the losses are I. Goodfellow et al.,
2014, arXiv 1406.2661, with the generator's non-saturating one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import tfdp

tfdp.quiet()  # before Keras: TensorFlow's start-up notes would bury the lines below

import keras
import numpy as np
import sklearn.datasets
import tensorflow as tf
from keras import layers

SEED = 7
NOISE = 32
GRID = 8


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=128, help="global batch size")
    parser.add_argument(
        "--replicas", type=int, default=2, help="devices to split the CPU into"
    )
    parser.add_argument("--out", type=Path, default=Path("out/gan"))
    return parser.parse_args()


def build_generator() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(2 * 2 * 64),
            layers.Reshape((2, 2, 64)),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2DTranspose(32, 4, strides=2, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh"),
        ],
        name="generator",
    )


def build_discriminator() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 4, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Conv2D(64, 4, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(1),
        ],
        name="discriminator",
    )


class GAN(keras.Model):
    """A generator and a discriminator that train against each other."""

    def __init__(self):
        super().__init__()
        self.generator = build_generator()
        self.discriminator = build_discriminator()
        self.noise = keras.random.SeedGenerator(SEED)
        self.generator_loss = keras.metrics.Mean(name="generator")
        self.discriminator_loss = keras.metrics.Mean(name="discriminator")
        self.told = keras.metrics.BinaryAccuracy(name="told_apart", threshold=0.0)

    def compile(self, generator_optimizer, discriminator_optimizer, loss):
        super().compile()
        self.generator_optimizer = generator_optimizer
        self.discriminator_optimizer = discriminator_optimizer
        self.loss_of = loss

    @property
    def metrics(self):
        return [self.generator_loss, self.discriminator_loss, self.told]

    def call(self, noise):
        return self.generator(noise, training=False)

    def train_step(self, real):
        rows = tf.shape(real)[0]
        labels = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], axis=0)
        noise = keras.random.normal((rows, NOISE), seed=self.noise)
        with tf.GradientTape() as tape:
            made = self.generator(noise, training=True)
            both = tf.concat([real, made], axis=0)
            logits = self.discriminator(both, training=True)
            loss = self.loss_of(labels, logits)
        weights = self.discriminator.trainable_variables
        self.discriminator_optimizer.apply(tape.gradient(loss, weights), weights)
        self.discriminator_loss.update_state(loss, sample_weight=rows)
        self.told.update_state(labels, logits)

        noise = keras.random.normal((rows, NOISE), seed=self.noise)
        with tf.GradientTape() as tape:
            made = self.generator(noise, training=True)
            logits = self.discriminator(made, training=True)
            # It does well where what it made is taken for real.
            loss = self.loss_of(tf.ones((rows, 1)), logits)
        weights = self.generator.trainable_variables
        self.generator_optimizer.apply(tape.gradient(loss, weights), weights)
        self.generator_loss.update_state(loss, sample_weight=rows)
        return {metric.name: metric.result() for metric in self.metrics}


def save_pictures(real: np.ndarray, made: np.ndarray, path: Path) -> None:
    """Two squares of digits side by side: real ones, and made ones."""
    squares = []
    for digits in (real, made):
        # A dark edge around each, and a bright one around all.
        digits = digits[: GRID * GRID, ..., 0]
        digits = np.pad(digits, ((0, 0), (1, 1), (1, 1)), constant_values=-1)
        rows = digits.reshape(GRID, GRID, 10, 10).swapaxes(1, 2)
        squares.append(np.pad(rows.reshape(GRID * 10, GRID * 10), 2, constant_values=1))
    pixels = np.uint8(np.clip((np.concatenate(squares, axis=1) + 1) * 127.5, 0, 255))
    path.parent.mkdir(parents=True, exist_ok=True)
    keras.utils.save_img(path, pixels.repeat(6, 0).repeat(6, 1)[..., None])


def main() -> None:
    arguments = parse_arguments()
    keras.utils.set_random_seed(SEED)
    strategy = tfdp.auto_strategy(cpu_devices=arguments.replicas)
    images, _ = sklearn.datasets.load_digits(return_X_y=True)
    images = (images / 8 - 1).reshape(-1, 8, 8, 1).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices(images)
    batches = batches.shuffle(len(images), seed=SEED).batch(arguments.batch)
    with strategy.scope():
        gan = GAN()
        gan.compile(
            keras.optimizers.Adam(2e-3, beta_1=0.5),
            keras.optimizers.Adam(1e-3, beta_1=0.5),
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
    history = gan.fit(batches, epochs=arguments.epochs, verbose=2)
    noise = np.random.default_rng(SEED).normal(size=(GRID * GRID, NOISE))
    made = gan.predict(noise.astype("float32"), verbose=0)
    if strategy.is_chief:
        path = arguments.out / "digits.png"
        save_pictures(images, made, path)
        print(f"real and made digits: {path}")
    # 1.0: every picture is told to be real or made; 0.5: no better than a coin.
    print(f"told apart: {history.history['told_apart'][-1]:.4f}")
    # How far what was made spreads, pixel by pixel: 1 is as far as what is real.
    spread = float(made.std(axis=0).mean() / images.std(axis=0).mean())
    print(f"spread beside the real ones': {spread:.2f}")


if __name__ == "__main__":
    main()
