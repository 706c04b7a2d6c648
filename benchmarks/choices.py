"""Measures which optimizer reaches which accuracy at which batch, with its best rate.

A small convolutional network on MNIST, without batch normalization, on one device: on
several replicas tfdp trains with the same numbers. Each optimizer has equally many
tries at each batch: peak rates by factors of two, and warm-ups. The best one is chosen
on the last 10,000 training images, and then tested.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.shared import make_parser, run_script, write_report

if TYPE_CHECKING:
    import keras

BATCHES = (1024, 8192, 128)
#: Peak rates at a batch of 1,024, of which those at others are tried around.
RATES = {"nesterov": 0.1, "lars": 0.05, "adamw": 4e-3, "lamb": 2e-2}
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
WARM_UP_EPOCHS = (1.0, 2.5)
EPOCHS, HELD_OUT = 5, 10_000


@dataclasses.dataclass(frozen=True)
class Tried:
    """A training, and what came of it."""

    optimizer: str
    batch: int
    rate: float
    warm_up_epochs: float
    validation: float
    test: float


def _optimizer(name: str, schedule: Any) -> keras.optimizers.Optimizer:
    import keras

    import tfdp

    made: dict[str, Callable[[], Any]] = {
        "nesterov": lambda: keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True),
        "lars": lambda: tfdp.optimizers.LARS(schedule, trust_coefficient=1.2),
        "adamw": lambda: keras.optimizers.AdamW(schedule, weight_decay=0.01),
        "lamb": lambda: tfdp.optimizers.LAMB(schedule, weight_decay=0.01),
    }
    return made[name]()


def _model() -> keras.Model:
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((28, 28, 1)),
            layers.Conv2D(16, 5, strides=2, activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def train(
    name: str, batch: int, rate: float, warm_up_epochs: float, data: Any, epochs: int
) -> Tried:
    """Trains once, with a linear warm-up and a linear decay to 0."""
    import keras

    import tfdp

    images, labels, test_images, test_labels = data
    keras.utils.set_random_seed(1)
    held = len(images) - HELD_OUT
    steps = -(-held // batch)
    schedule = tfdp.schedules.PolynomialDecay(
        rate,
        total_steps=epochs * steps,
        warmup_steps=int(min(warm_up_epochs, epochs / 2) * steps),
        end_learning_rate=0.0,
        power=1.0,
    )
    model = _model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(_optimizer(name, schedule), loss, metrics=["accuracy"])
    order = np.random.default_rng(1)
    for _ in range(epochs):
        drawn = order.permutation(held)
        model.fit(images[drawn], labels[drawn], batch, shuffle=False, verbose=0)
    found = [
        model.evaluate(x, y, batch_size=2000, verbose=0, return_dict=True)["accuracy"]
        for x, y in ((images[held:], labels[held:]), (test_images, test_labels))
    ]
    keras.utils.clear_session()
    return Tried(name, batch, rate, warm_up_epochs, *found)


def run(options: argparse.Namespace) -> int:
    """Tries everything, and prints the best of each optimizer at each batch."""
    with np.load(options.data) as arrays:
        images, tested = (
            (arrays[f"x_{part}"][..., None] / np.float32(255) - 0.1307) / 0.3081
            for part in ("train", "test")
        )
        data = images, arrays["y_train"], tested, arrays["y_test"]
    batches = BATCHES[1:2] if options.quick else BATCHES
    epochs = 1 if options.quick else EPOCHS
    factors = FACTORS[2:3] if options.quick else FACTORS
    warm_ups = WARM_UP_EPOCHS[:1] if options.quick else WARM_UP_EPOCHS
    tried: list[Tried] = []
    print("batch  optimizer  rate    warm-up  test accuracy (rates by validation)")
    for batch, (name, rate) in itertools.product(batches, RATES.items()):
        # As the square root: the best of each try is then rarely at an end.
        middle = rate * (batch / 1024) ** 0.5
        own = [
            train(name, batch, middle * factor, epochs_of, data, epochs)
            for factor, epochs_of in itertools.product(factors, warm_ups)
        ]
        tried += own
        best = max(own, key=lambda one: one.validation)
        by_rate = {
            one.rate: max(o.validation for o in own if o.rate == one.rate)
            for one in own
        }
        rates = ", ".join(f"{r:.3g}: {100 * v:.1f}" for r, v in by_rate.items())
        print(
            f"{batch:5}  {name:9}  {best.rate:<6.3g}  {best.warm_up_epochs:<7}  "
            f"{100 * best.test:.2f}% ({rates})",
            flush=True,
        )
    rows = [dataclasses.asdict(one) for one in tried]
    write_report(options.json, "choices", rows=rows)
    return 0


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=1)
    parser.add_argument("--data", required=True, help="mnist.npz of Keras")
    run_script(parser, run)
