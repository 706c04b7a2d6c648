"""Compares ways to compress gradients on digits: test accuracy and bytes that are sent.

    python examples/compressed_gradients.py
    python examples/compressed_gradients.py --data mnist.npz --arm top-k --seeds 3

The file holds the arrays x_train, y_train, x_test and y_test, as the one that
`keras.datasets.mnist.load_data()` fetches. Without it the pictures are scikit-learn's
1,797 digits of 8 x 8 pixels. The CPU is split into `--replicas` devices,
and what each of them sends is compressed, as if each were a host.

All arms share the model (a multilayer perceptron), plain SGD, its learning rate, the
batches and their order. `dense` sends every gradient as it is. The names that end in
`-alone` are without error feedback. `fp8-scale-1` has one scale, 1, for every number.
`adam` and `one-bit-adam` have Adam in the place of SGD, `lamb` and `one-bit-lamb` LAMB;
after a fifth of the updates those with `one-bit` send signs of their momentum.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import tfdp

tfdp.quiet()  # before Keras: TensorFlow's start-up notes would bury the lines below

import keras
import numpy as np
import sklearn.datasets
import sklearn.model_selection
import tensorflow as tf

from tfdp.compression import FP8, Int4, Int8, PowerSGD, RandomK, SignSGD, TopK

ARMS = {
    "dense": None,
    "int8": Int8(),
    "int4": Int4(),
    "fp8": FP8("e4m3"),
    "fp8-scale-1": FP8("e4m3", scale=1.0, error_feedback=False),
    "sign": SignSGD(),
    "sign-alone": SignSGD(error_feedback=False),
    "top-k": TopK(0.01),
    "top-k-alone": TopK(0.01, error_feedback=False),
    "random-k": RandomK(0.01),
    "power-sgd": PowerSGD(2),
    "adam": None,
    "one-bit-adam": SignSGD(block_size=256),
    "lamb": None,
    "one-bit-lamb": SignSGD(block_size=256),
}
LEARNING_RATE, ADAM_LEARNING_RATE, LAMB_LEARNING_RATE = 0.1, 0.001, 0.01
WARMUP_SHARE = 0.2
SEED = 7  # of the split of the small digits


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="mnist.npz (default: small digits)")
    parser.add_argument("--arm", choices=ARMS, nargs="+", default=list(ARMS))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256, help="over all replicas")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each arm")
    parser.add_argument("--replicas", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.data is not None and not arguments.data.is_file():
        parser.error(
            f"--data {arguments.data} is not a file; it is the mnist.npz of Keras"
        )
    return arguments


def make_strategy(arm: str, replicas: int) -> tf.distribute.Strategy:
    method = ARMS[arm]
    communication = None
    if method is not None and not arm.startswith("one-bit"):
        communication = tfdp.Communication(
            compression=method, compression_across="replicas"
        )
    return tfdp.auto_strategy(cpu_devices=replicas, communication=communication)


def load_pictures(path: Path | None) -> dict[str, np.ndarray]:
    """Rows of pixels from 0 to 1, and labels: of a file, or of scikit-learn."""
    if path is None:
        images, labels = sklearn.datasets.load_digits(return_X_y=True)
        parts = sklearn.model_selection.train_test_split(
            images / 16, labels, test_size=0.2, stratify=labels, random_state=SEED
        )
        return dict(zip(("x_train", "x_test", "y_train", "y_test"), parts, strict=True))
    with np.load(path) as arrays:
        data = {name: arrays[name] for name in arrays.files}
    for name in ("x_train", "x_test"):
        data[name] = data[name].reshape(len(data[name]), -1).astype("float32") / 255.0
    return data


def build_model(pixels: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((pixels,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def make_optimizer(arm: str, updates: int) -> keras.optimizers.Optimizer:
    if arm == "adam":
        return keras.optimizers.Adam(ADAM_LEARNING_RATE)
    if arm == "lamb":
        return tfdp.optimizers.LAMB(LAMB_LEARNING_RATE)
    if arm.startswith("one-bit"):
        make, rate = tfdp.optimizers.OneBitAdam, ADAM_LEARNING_RATE
        if arm == "one-bit-lamb":
            make, rate = tfdp.optimizers.OneBitLAMB, LAMB_LEARNING_RATE
        return make(
            rate,
            warmup_steps=round(WARMUP_SHARE * updates),
            compression=ARMS[arm],
            across="replicas",
        )
    return keras.optimizers.SGD(LEARNING_RATE)


def train(arm: str, seed: int, data: dict, arguments: argparse.Namespace) -> float:
    """The test accuracy, in percent."""
    keras.utils.set_random_seed(seed)
    strategy = make_strategy(arm, arguments.replicas)
    updates = arguments.epochs * -(-len(data["x_train"]) // arguments.batch)
    with strategy.scope():
        model = build_model(data["x_train"].shape[1])
        model.compile(
            optimizer=make_optimizer(arm, updates),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(
        data["x_train"],
        data["y_train"],
        batch_size=arguments.batch,
        epochs=arguments.epochs,
        verbose=0,
    )
    results = model.evaluate(
        data["x_test"], data["y_test"], batch_size=2000, verbose=0, return_dict=True
    )
    return 100.0 * results["accuracy"]


def sent_bytes(arm: str, pixels: int, replicas: int) -> float:
    """What a replica sends of the gradients that are compressed, as in a ring; where
    the momentum is, after the first updates."""
    method = ARMS[arm]
    shapes = [(pixels, 256), (256, 128), (128, 10)]
    dense = 4 * sum(rows * columns for rows, columns in shapes)
    if method is None:
        return 2 * dense * (replicas - 1) / replicas
    return method.sent_bytes(shapes, replicas)


def main() -> None:
    arguments = parse_arguments()
    data = load_pictures(arguments.data)
    pixels = data["x_train"].shape[1]
    dense = sent_bytes("dense", pixels, arguments.replicas)
    print(
        f"{arguments.replicas} replicas, batch {arguments.batch}, "
        f"{arguments.epochs} epochs, {arguments.seeds} seeds\n"
        "arm           accuracy %: mean (least to most)   KB sent per step    of dense",
        flush=True,
    )
    for arm in arguments.arm:
        start = time.perf_counter()
        found = [train(arm, seed, data, arguments) for seed in range(arguments.seeds)]
        sent = sent_bytes(arm, pixels, arguments.replicas)
        print(
            f"{arm:13s} {statistics.mean(found):6.2f} ({min(found):.2f} to "
            f"{max(found):.2f}) {sent / 1024:21.1f} {'1/' if sent else ''}"
            f"{dense / sent:.1f}   {time.perf_counter() - start:4.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
