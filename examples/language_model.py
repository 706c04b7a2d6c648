"""Trains a character-level transformer, its memory sharded over the replicas.

    python examples/language_model.py
    python examples/language_model.py --shard parameters --text my_book.txt
    python examples/language_model.py --width 512 --replicas 4 --memory-limit-mb 85

The text is any file; without one, the sources of Python's standard library. The last
command says that 12.8 million weights with Adam's state do not fit into 85 MB and which
`--shard` does; add it, and the same model trains. Runs unchanged on a host with GPUs;
without any, the CPU is split into `--replicas` devices.
"""

from __future__ import annotations

import argparse
import resource
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import tfdp

tfdp.quiet()  # before Keras: TensorFlow's start-up notes would bury the lines below

import keras
import numpy as np
import tensorflow as tf

from tfdp.plan.options import SHARD_STAGES
from tfdp.plan.shards import ShardLayout
from tfdp.tools.report import write_learning_curve

SEED = 7
HEADS = 4
# Points of the learning curve.
MOST_EPOCHS = 5
HELD_BACK = 0.1
VALIDATION_BATCHES = 2
# Variables below this size are not worth cutting; the strategy's own default.
SHARD_MIN_BYTES = 32 * 1024
# Exit status of a run whose model does not fit.
DOES_NOT_FIT = 2
BYTES_OF_FLOAT = 4
MEGABYTE = 1e6


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="default: Python's own sources")
    parser.add_argument("--shard", choices=SHARD_STAGES, default="none")
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--batch", type=positive, default=16, help="of all replicas")
    parser.add_argument("--context", type=positive, default=64, help="characters read")
    parser.add_argument("--width", type=positive, default=128)
    parser.add_argument("--blocks", type=positive, default=4)
    parser.add_argument(
        "--replicas", type=positive, default=2, help="devices to split the CPU into"
    )
    parser.add_argument(
        "--memory-limit-mb",
        type=float,
        help="refuse to train when a replica's weights, gradients and optimizer state "
        "are more",
    )
    parser.add_argument(
        "--characters", type=int, default=80, help="of the text that it writes; 0: none"
    )
    parser.add_argument("--out", type=Path, default=Path("out/language_model"))
    arguments = parser.parse_args()
    if arguments.width % HEADS:
        parser.error(f"--width must be divisible by the {HEADS} attention heads")
    return arguments


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, received {number}")
    return number


def read_text(path: Path | None) -> str:
    """The text of a file, or of all modules at the top of the standard library."""
    if path is not None:
        return path.read_text("utf-8", errors="replace")
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "".join(module.read_text("utf-8", errors="replace") for module in modules)


def windows(codes: np.ndarray, context: int, batch: int) -> tf.data.Dataset:
    """Batches of (characters, the same shifted by one) from places drawn at random."""
    codes = tf.constant(codes)
    places = len(codes) - context

    def window(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        start = number % places
        characters = tf.ensure_shape(codes[start : start + context + 1], [context + 1])
        return characters[:-1], characters[1:]

    numbers = tf.data.Dataset.random(seed=SEED, rerandomize_each_iteration=False)
    return numbers.map(window).batch(batch, drop_remainder=True).prefetch(2)


class Characters(keras.layers.Layer):
    """A vector for each character plus one for its place."""

    def __init__(self, vocabulary: int, context: int, width: int):
        super().__init__()
        self.of_character = keras.layers.Embedding(vocabulary, width)
        self.of_place = keras.layers.Embedding(context, width)

    def call(self, codes):
        places = keras.ops.arange(codes.shape[1])
        return self.of_character(codes) + self.of_place(places)


class Block(keras.layers.Layer):
    """Attention to what came before, then two dense layers; each adds to its input."""

    def __init__(self, width: int):
        super().__init__()
        self.attention_norm = keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(HEADS, width // HEADS)
        self.dense_norm = keras.layers.LayerNormalization()
        self.widen = keras.layers.Dense(4 * width, activation="gelu")
        self.narrow = keras.layers.Dense(width)

    def build(self, shape):
        self.attention_norm.build(shape)
        self.attention.build(shape, shape)
        self.dense_norm.build(shape)
        self.widen.build(shape)
        self.narrow.build((*shape[:-1], self.widen.units))
        self.built = True

    def call(self, x):
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, use_causal_mask=True)
        return x + self.narrow(self.widen(self.dense_norm(x)))


def build_model(vocabulary: int, context: int, width: int, blocks: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((context,), dtype="int32"),
            Characters(vocabulary, context, width),
            *(Block(width) for _ in range(blocks)),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(vocabulary),
        ]
    )


def write_text(model: keras.Model, first: np.ndarray, length: int) -> list[int]:
    """Codes that go on from the first ones, each drawn by what the model expects.

    On several hosts all call it, and all draw the same ones.
    """
    rng = np.random.default_rng(SEED)
    codes = list(first)
    for _ in range(length):
        window = np.array([codes[-len(first) :]], dtype="int32")
        logits = model.predict(window, verbose=0)[0, -1].astype("float64")
        chances = np.exp(logits - logits.max())
        codes.append(int(rng.choice(len(chances), p=chances / chances.sum())))
    return codes[len(first) :]


def stored_bytes(variables: Iterable[keras.Variable]) -> int:
    """What the first replica holds of `variables`, measured on its own tensors."""
    total = 0
    for variable in variables:
        own = getattr(variable.value, "values", [variable.value])[0]
        total += own.shape.num_elements() * own.dtype.size
    return total


def predicted_bytes(model: keras.Model, shard: str, replicas: int) -> int:
    """What a replica would hold of weights, gradients and Adam's two slots, in bytes.

    With `shard="parameters"` also the weights of the largest block and of the next one,
    which is gathered ahead.
    """
    stage = SHARD_STAGES.index(shard)
    # Of the weight, its gradient and its two slots, so many are whole.
    wholes = {0: 4, 1: 2, 2: 1, 3: 0}[stage]
    total = 0
    for weight in model.trainable_variables:
        layout = ShardLayout(tuple(weight.shape), replicas)
        whole = part = layout.elements * BYTES_OF_FLOAT
        if whole >= SHARD_MIN_BYTES:
            part = layout.shard_elements * BYTES_OF_FLOAT
        total += wholes * whole + (4 - wholes) * part
    if stage == 3:
        blocks = [layer.count_params() * BYTES_OF_FLOAT for layer in model.layers]
        total += 2 * max(blocks)
    return total


def report_memory(model: keras.Model, shard: str, replicas: int) -> int:
    """Prints what a replica holds, measured; returns all of a step, predicted."""
    weights = stored_bytes(model.trainable_variables)
    slots = stored_bytes(model.optimizer.variables)
    total = predicted_bytes(model, shard, replicas)
    print(
        f"each replica holds {weights / MEGABYTE:,.2f} MB of weights, "
        f"{slots / MEGABYTE:,.2f} MB of optimizer state; in a step "
        f"{total / MEGABYTE:,.2f} MB with gradients"
    )
    return total


def refuse(
    model: keras.Model, needed_bytes: int, limit_bytes: float, replicas: int
) -> None:
    """Ends the program: the model does not fit. Says what would."""
    fitting = [
        shard
        for shard in SHARD_STAGES
        if predicted_bytes(model, shard, replicas) <= limit_bytes
    ]
    advice = (
        f"It fits with --shard {fitting[0]}."
        if fitting
        else "No --shard makes it fit: take more --replicas or a smaller --width."
    )
    print(
        f"does not fit: {needed_bytes / MEGABYTE:,.2f} MB for each replica is more "
        f"than the limit of {limit_bytes / MEGABYTE:,.2f} MB. {advice}",
        file=sys.stderr,
    )
    sys.exit(DOES_NOT_FIT)


def peak_memory_bytes() -> int:
    """The most memory that this process, all replicas together, has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    arguments = parse_arguments()
    text = read_text(arguments.text)
    characters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    vocabulary, codes = np.unique(characters, return_inverse=True)
    split = int(len(codes) * (1 - HELD_BACK))
    if len(codes) - split < arguments.context + 2:
        sys.exit(f"the text is too short: {len(codes)} characters")
    keras.utils.set_random_seed(SEED)
    strategy = tfdp.auto_strategy(
        cpu_devices=arguments.replicas,
        shard=arguments.shard,
        shard_min_bytes=SHARD_MIN_BYTES,
    )
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        model = build_model(
            len(vocabulary), arguments.context, arguments.width, arguments.blocks
        )
        if arguments.shard == "parameters":
            # Else every weight, once gathered, stays until backprop has used it.
            tfdp.remat(model)
        model.compile(
            optimizer=keras.optimizers.Adam(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        # Now rather than in the first step: what it holds is printed before that.
        model.optimizer.build(model.trainable_variables)
    print(
        f"{replicas} replicas, shard={arguments.shard}, {model.count_params():,} "
        f"weights, {len(codes):,} characters of {len(vocabulary)} kinds"
    )
    needed_bytes = report_memory(model, arguments.shard, replicas)
    if arguments.memory_limit_mb is not None:
        limit_bytes = arguments.memory_limit_mb * MEGABYTE
        if needed_bytes > limit_bytes:
            refuse(model, needed_bytes, limit_bytes, replicas)
        print(f"fits into the limit of {limit_bytes / MEGABYTE:,.2f} MB")

    train = windows(codes[:split], arguments.context, arguments.batch)
    test = windows(codes[split:], arguments.context, arguments.batch)
    epochs = min(MOST_EPOCHS, arguments.steps)
    history = model.fit(
        train,
        epochs=epochs,
        steps_per_epoch=arguments.steps // epochs,
        shuffle=False,  # the dataset does it
        validation_data=test.take(VALIDATION_BATCHES),
        verbose=2,
    )
    if strategy.is_chief:
        picture = write_learning_curve(
            history,
            arguments.out / "learning_curve.png",
            title=f"characters, width {arguments.width}, shard={arguments.shard}",
        )
        print(f"learning curve: {picture}")
    if arguments.characters > 0:
        first = codes[split : split + arguments.context]
        written = write_text(model, first, arguments.characters)
        print(f"it writes: {''.join(chr(vocabulary[code]) for code in written)!r}")
    print(f"peak memory of the process: {peak_memory_bytes() / MEGABYTE:,.0f} MB")
    losses = history.history
    print(f"loss: {losses['loss'][-1]:.4f}, held back: {losses['val_loss'][-1]:.4f}")


if __name__ == "__main__":
    main()
