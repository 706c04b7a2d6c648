"""Measures which optimizer reaches which accuracy at which batch, with its best rate.

Two small networks on one device, since on several replicas tfdp trains with the same
numbers: a convolutional one on MNIST (`--data mnist.npz`), and a transformer on the
characters of a text (`--data some.txt`). Each optimizer has equally many tries at each
batch, peak rates by factors of two with two warm-ups, and more as long as its best rate
is the lowest or the highest one. The best try is chosen on held-out rows, trained again
with other seeds, and tested.
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

FACTORS: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
MOST_FACTORS = 9
WARM_UP_EPOCHS: tuple[float, ...] = (1.0, 2.5)
SEEDS: tuple[int, ...] = (1, 2, 3)
CONTEXT, WIDTH = 32, 32  # characters that the transformer sees, numbers for each


@dataclasses.dataclass(frozen=True)
class Task:
    """A network, its data, and the rates that the tries of each optimizer surround."""

    make: Callable[[], keras.Model]
    train: tuple[np.ndarray, np.ndarray]
    held_out: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    batches: tuple[int, ...]
    epochs: int
    #: The batch of ``rates``; at another one they follow the square root.
    base_batch: int
    rates: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Tried:
    """A training, and the accuracies it reached."""

    optimizer: str
    batch: int
    rate: float
    warm_up_epochs: float
    seed: int
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


def _convolutional() -> keras.Model:
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


def _transformer(characters: int) -> keras.Model:
    """Two blocks, normalized before each part."""
    from keras import Input, Model, layers, ops

    entry = Input((CONTEXT,), dtype="int32")
    x = layers.Embedding(characters, WIDTH)(entry)
    x += layers.Embedding(CONTEXT, WIDTH)(ops.arange(CONTEXT))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(4, WIDTH // 4)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x += layers.Dense(WIDTH)(layers.Dense(2 * WIDTH, activation="gelu")(y))
    return Model(entry, layers.Dense(characters)(layers.LayerNormalization()(x)))


def _images(path: str) -> Task:
    with np.load(path) as arrays:
        images, tested = (
            (arrays[f"x_{part}"][..., None] / np.float32(255) - 0.1307) / 0.3081
            for part in ("train", "test")
        )
        labels, tested_labels = arrays["y_train"], arrays["y_test"]
    return Task(
        _convolutional,
        (images[:50_000], labels[:50_000]),
        (images[50_000:], labels[50_000:]),
        (tested, tested_labels),
        batches=(1024, 8192, 128),
        epochs=5,
        base_batch=1024,
        rates={"nesterov": 0.2, "lars": 0.0125, "adamw": 0.016, "lamb": 0.02},
    )


def _text(path: str) -> Task:
    with open(path, encoding="utf-8") as file:
        characters = np.array(list(file.read()))
    known, numbers = np.unique(characters, return_inverse=True)
    count = (len(numbers) - 1) // CONTEXT
    rows = np.stack([numbers[: count * CONTEXT], numbers[1 : count * CONTEXT + 1]])
    x, y = rows.astype("int32").reshape(2, count, CONTEXT)
    ends = round(0.8 * count), round(0.9 * count)
    train, held_out, test = (
        (x[part], y[part])
        for part in (slice(ends[0]), slice(*ends), slice(ends[1], None))
    )
    return Task(
        lambda: _transformer(len(known)),
        train,
        held_out,
        test,
        batches=(512, 4096),
        epochs=5,
        base_batch=512,
        rates={"nesterov": 0.2, "lars": 0.0125, "adamw": 0.004, "lamb": 0.02},
    )


def _train(
    task: Task,
    name: str,
    batch: int,
    rate: float,
    warm_up_epochs: float,
    seed: int,
) -> Tried:
    """Trains once, with a linear warm-up and a linear decay to 0."""
    import keras

    import tfdp

    x, y = task.train
    keras.utils.set_random_seed(seed)
    steps = -(-len(x) // batch)
    schedule = tfdp.schedules.PolynomialDecay(
        rate,
        total_steps=task.epochs * steps,
        warmup_steps=int(min(warm_up_epochs, task.epochs / 2) * steps),
        end_learning_rate=0.0,
        power=1.0,
    )
    model = task.make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(_optimizer(name, schedule), loss, metrics=["accuracy"])
    order = np.random.default_rng(seed)
    for _ in range(task.epochs):
        drawn = order.permutation(len(x))
        model.fit(x[drawn], y[drawn], batch, shuffle=False, verbose=0)
    found = [
        model.evaluate(*part, batch_size=2000, verbose=0, return_dict=True)["accuracy"]
        for part in (task.held_out, task.test)
    ]
    keras.utils.clear_session()
    return Tried(name, batch, rate, warm_up_epochs, seed, *found)


def _tries(
    task: Task,
    name: str,
    batch: int,
    factors: tuple[float, ...],
    warm_ups: tuple[float, ...],
) -> list[Tried]:
    """Trains with each rate and warm-up, and further while the best is at an end."""
    middle = task.rates[name] * (batch / task.base_batch) ** 0.5
    tried: list[Tried] = []
    wanted = list(factors)
    while wanted:
        tried += [
            _train(task, name, batch, middle * factor, epochs, SEEDS[0])
            for factor, epochs in itertools.product(wanted, warm_ups)
        ]
        rates = sorted({one.rate for one in tried})
        best = max(tried, key=lambda one: one.validation).rate
        wanted = []
        if 1 < len(rates) < MOST_FACTORS and best in (rates[0], rates[-1]):
            wanted = [best / middle * (0.5 if best == rates[0] else 2.0)]
    return tried


def run(options: argparse.Namespace) -> int:
    """Tries everything, and prints the best of each optimizer at each batch."""
    task = (_text if options.data.endswith(".txt") else _images)(options.data)
    batches, factors, warm_ups, seeds = task.batches, FACTORS, WARM_UP_EPOCHS, SEEDS
    if options.quick:
        task = dataclasses.replace(task, epochs=1)
        batches, factors, warm_ups, seeds = batches[1:2], (1.0,), (1.0,), SEEDS[:1]
    tried: list[Tried] = []
    print("batch  optimizer  rate    warm-up  test accuracy (rates by validation)")
    for batch, name in itertools.product(batches, task.rates):
        own = _tries(task, name, batch, factors, warm_ups)
        best = max(own, key=lambda one: one.validation)
        again = [
            _train(task, name, batch, best.rate, best.warm_up_epochs, seed)
            for seed in seeds[1:]
        ]
        tried += own + again
        tests = [100 * one.test for one in (best, *again)]
        by_rate = {
            rate: max(one.validation for one in own if one.rate == rate)
            for rate in sorted({one.rate for one in own})
        }
        rates = ", ".join(f"{r:.3g}: {100 * v:.1f}" for r, v in by_rate.items())
        print(
            f"{batch:5}  {name:9}  {best.rate:<6.3g}  {best.warm_up_epochs:<7}  "
            f"{np.mean(tests):.2f}% ({min(tests):.2f} to {max(tests):.2f}; {rates})",
            flush=True,
        )
    rows = [dataclasses.asdict(one) for one in tried]
    write_report(options.json, "choices", rows=rows)
    return 0


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=1)
    parser.add_argument("--data", required=True, help="mnist.npz of Keras, or a text")
    run_script(parser, run)
