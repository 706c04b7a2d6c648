"""Trains a small convolutional net on scikit-learn's handwritten digits.

    python examples/digits.py
    tfdp launch --workers 2 examples/digits.py

The job of a large-batch run in small: TFRecords, one strategy line, LARS with
warm-up, the learning rate in the progress bar, a learning curve. Runs unchanged on
a host with GPUs, on a TPU and under every launcher; on a laptop the CPU is split into
`--replicas` devices.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path

import tfdp

tfdp.quiet()  # before Keras: TensorFlow's start-up notes would bury the lines below

import keras
import sklearn.datasets
import sklearn.model_selection

from tfdp.tools.report import write_learning_curve

SEED = 7
NUM_SHARDS = 4
# At the peak each layer moves by 0.2 * 0.1 = 2% of its norm in a step. Biases have no
# trust ratio and take the learning rate as it is, hence not a larger one.
PEAK_LEARNING_RATE = 0.2
TRUST_COEFFICIENT = 0.1
WARMUP_EPOCHS = 3


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=128, help="global batch size")
    parser.add_argument(
        "--replicas", type=int, default=2, help="devices to split the CPU into"
    )
    parser.add_argument("--out", type=Path, default=Path("out/digits"))
    return parser.parse_args()


def write_records(directory: Path) -> None:
    """1,797 pictures of 8 x 8 pixels, a fifth of them held back for the test."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("uint8")
    parts = sklearn.model_selection.train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=SEED
    )
    train_images, test_images, train_labels, test_labels = parts
    for name, examples in {
        "train": {"image": train_images, "label": train_labels},
        "test": {"image": test_images, "label": test_labels},
    }.items():
        index = tfdp.data.write_tfrecords(
            examples, directory, num_shards=NUM_SHARDS, name=name
        )
        print(f"wrote {index.examples} examples to {directory}/{name}-*.tfrecord")


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Rescaling(1 / 16),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


class TrainingClock(keras.callbacks.Callback):
    """Keeps how long the training part of each epoch took."""

    def on_train_begin(self, logs=None):
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch, logs=None):
        self.begin = time.perf_counter()

    def on_test_begin(self, logs=None):
        self.seconds.append(time.perf_counter() - self.begin)


def main() -> None:
    arguments = parse_arguments()
    keras.utils.set_random_seed(SEED)
    strategy = tfdp.auto_strategy(cpu_devices=arguments.replicas)
    records = arguments.out / "records"
    if strategy.is_chief and not (records / "test.index.json").exists():
        write_records(records)
    strategy.barrier("records are written")
    index = tfdp.data.RecordIndex.load(records / "train.index.json")
    steps_per_epoch = math.ceil(index.examples / arguments.batch)
    features = ("image", "label")
    # Repeated, it is set up once: with so small a set, that is half of an epoch.
    train = tfdp.data.read_tfrecords(
        index, arguments.batch, repeat=True, as_supervised=features
    )
    test = tfdp.data.read_tfrecords(
        records / "test", arguments.batch, shuffle=False, as_supervised=features
    )
    print(
        f"{strategy.num_replicas_in_sync} replicas, global batch {arguments.batch}, "
        f"{steps_per_epoch} steps per epoch"
    )

    schedule = tfdp.schedules.PolynomialDecay(
        PEAK_LEARNING_RATE,
        total_steps=arguments.epochs * steps_per_epoch,
        warmup_steps=min(WARMUP_EPOCHS, arguments.epochs - 1) * steps_per_epoch,
    )
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=tfdp.optimizers.LARS(
                schedule, trust_coefficient=TRUST_COEFFICIENT, weight_decay=1e-4
            ),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    clock = TrainingClock()
    history = model.fit(
        train,
        epochs=arguments.epochs,
        steps_per_epoch=steps_per_epoch,
        shuffle=False,  # the dataset does it
        validation_data=test,
        callbacks=[tfdp.callbacks.LearningRateLogger(), clock],
    )
    if strategy.is_chief:
        picture = write_learning_curve(
            history,
            arguments.out / "learning_curve.png",
            title=f"digits, LARS, batch {arguments.batch}",
        )
        print(f"learning curve: {picture}")
    # The median leaves out the first epoch, in which the graph is built.
    print(f"{index.examples / statistics.median(clock.seconds):,.0f} samples/s")
    accuracy = model.evaluate(test, verbose=0, return_dict=True)["accuracy"]
    print(f"test accuracy: {accuracy:.4f}")


if __name__ == "__main__":
    main()
