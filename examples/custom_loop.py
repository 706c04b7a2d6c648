"""Trains without `fit`: a loop of one's own, on all devices and hosts.

    python examples/custom_loop.py
    tfdp launch --workers 2 examples/custom_loop.py

What differs from a loop on one device is marked with (1) to (5). The gradients are
summed by the optimizer's `apply`, as everywhere; nothing here calls an all-reduce. Runs
unchanged on a host with GPUs and under every launcher; on a laptop the CPU is split
into `--replicas` devices.
"""

from __future__ import annotations

import argparse

import tfdp

tfdp.quiet()  # before Keras: TensorFlow's start-up notes would bury the lines below

import keras
import sklearn.datasets
import sklearn.model_selection
import tensorflow as tf

SEED = 7


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=128, help="global batch size")
    parser.add_argument(
        "--replicas", type=int, default=2, help="devices to split the CPU into"
    )
    return parser.parse_args()


def make_batches(batch: int) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Global batches of the training and of the test digits."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    x, x_test, y, y_test = sklearn.model_selection.train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=SEED
    )
    train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=SEED)
    test = tf.data.Dataset.from_tensor_slices((x_test, y_test))
    return train.batch(batch), test.batch(batch)


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    arguments = parse_arguments()
    keras.utils.set_random_seed(SEED)
    strategy = tfdp.auto_strategy(cpu_devices=arguments.replicas)
    train, test = make_batches(arguments.batch)

    # (1) Whatever has variables is made under the strategy's scope.
    with strategy.scope():
        model = build_model()
        optimizer = keras.optimizers.Adam(3e-3)
        optimizer.build(model.trainable_variables)
        loss_of_batch = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # Of all rows: the loss in a replica is its share of the global batch's mean.
        mean_loss = keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    # (2) Each replica gets its part of every global batch.
    train = strategy.experimental_distribute_dataset(train)
    test = strategy.experimental_distribute_dataset(test)

    # (3) What a replica does: its part of the batch, and the usual lines.
    def train_replica(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = loss_of_batch(labels, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        mean_loss.update_state(labels, logits)
        accuracy.update_state(labels, logits)

    def test_replica(images: tf.Tensor, labels: tf.Tensor) -> None:
        accuracy.update_state(labels, model(images, training=False))

    # (4) `run` calls it on every replica; the whole step is one graph.
    @tf.function
    def train_step(batch: tuple) -> None:
        strategy.run(train_replica, args=batch)

    @tf.function
    def test_step(batch: tuple) -> None:
        strategy.run(test_replica, args=batch)

    for epoch in range(arguments.epochs):
        for batch in train:
            train_step(batch)
        # (5) Metrics hold what all replicas have seen; they are read outside of `run`,
        # on all hosts where there are several: their sum is an exchange.
        told = f"loss {float(mean_loss.result()):.4f}"
        for metric in (mean_loss, accuracy):
            metric.reset_state()
        for batch in test:
            test_step(batch)
        last = float(accuracy.result())
        accuracy.reset_state()
        if strategy.is_chief:
            print(f"epoch {epoch + 1}: {told}, test {last:.4f}")
    print(f"test accuracy: {last:.4f}")


if __name__ == "__main__":
    main()
