"""DiLoCo beside synchronous training, on characters of a text. Run by hand; minutes.

    python -m tests.support.apart_language_model TEXT [--scratch] [--every 50] ...

Trains a small transformer on four replicas of one process: first synchronously, then,
from the same weights and optimizer state, once more synchronously and once in rounds
(`tfdp.sync.DiLoCo`), on the same batches. Prints the validation losses and how often
each one exchanged. With --scratch the rounds begin at the first update.
"""

import argparse
import json
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf

import tfdp

REPLICAS, CONTEXT, BATCH, WIDTH, BLOCKS, HEADS = 4, 64, 16, 64, 2, 4


class Positions(keras.layers.Layer):
    """Adds a learned vector for each place."""

    def build(self, shape):
        self.vectors = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, x):
        return x + self.vectors


def language_model(characters):
    keras.utils.set_random_seed(1)
    codes = keras.Input((CONTEXT,), dtype="int32")
    x = Positions()(keras.layers.Embedding(characters, WIDTH)(codes))
    for _ in range(BLOCKS):
        normal = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        x = x + attention(normal, normal, use_causal_mask=True)
        hidden = keras.layers.LayerNormalization()(x)
        hidden = keras.layers.Dense(4 * WIDTH, activation="gelu")(hidden)
        x = x + keras.layers.Dense(WIDTH)(hidden)
    return keras.Model(
        codes, keras.layers.Dense(characters)(keras.layers.LayerNormalization()(x))
    )


def windows(codes, count, seed):
    starts = np.random.default_rng(seed).integers(0, len(codes) - CONTEXT - 1, count)
    rows = np.stack([codes[start : start + CONTEXT + 1] for start in starts])
    return rows[:, :-1].astype("int32"), rows[:, 1:].astype("int32")


def trained(arguments, sync, text):
    """The validation losses, from the first one on every 100 updates."""
    codes, characters = text
    train, held_out = codes[: -len(codes) // 10], codes[-len(codes) // 10 :]
    strategy = tfdp.DataParallelStrategy([f"CPU:{i}" for i in range(REPLICAS)])
    with strategy.scope():
        model = language_model(characters)
        optimizer = tfdp.DistributedOptimizer(
            keras.optimizers.AdamW(arguments.rate, weight_decay=0.1), sync=sync
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
    held_out = windows(held_out, 512, 7)
    losses, started = [], time.monotonic()
    for piece in range(arguments.updates // 100):
        x, y = windows(train, 100 * BATCH, 100 + piece)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        losses.append(model.evaluate(*held_out, batch_size=128, verbose=0))
        told = type(sync).__name__, 100 * (piece + 1), round(losses[-1], 4)
        print(*told, round(time.monotonic() - started), flush=True)
    weight_bytes = sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)
    return losses, weight_bytes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--first", type=int, default=500)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--outer-rate", type=float, default=0.7)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--int8", action="store_true", help="outer gradients")
    parser.add_argument("--scratch", action="store_true")
    parser.add_argument("--only", choices=("both", "rounds"), default="both")
    arguments = parser.parse_args()
    tfdp.use_virtual_devices(REPLICAS)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    letters, codes = np.unique(list(arguments.text.read_text()), return_inverse=True)
    text = codes, len(letters)
    start = 0 if arguments.scratch else arguments.first
    sync = tfdp.sync.DiLoCo(
        every=arguments.every,
        outer_learning_rate=arguments.outer_rate,
        start_step=start,
        fragments=arguments.fragments,
        compression=tfdp.compression.Int8() if arguments.int8 else None,
        across="replicas",
    )
    syncs = {"rounds": sync}
    if arguments.only == "both":
        syncs = {"synchronous": None, **syncs}
    result = {}
    for name, each in syncs.items():
        losses, weight_bytes = trained(arguments, each, text)
        apart = arguments.updates - start
        meetings = apart if each is None else apart // each.every
        # An exchange of n bytes costs each of N replicas 2 n (N - 1) / N.
        sent = meetings * 2 * weight_bytes * (REPLICAS - 1) / REPLICAS
        result[name] = {"losses": losses, "bytes_after_start": sent}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
