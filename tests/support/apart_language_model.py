"""DiLoCo beside synchronous training, on characters of a text. Run by hand; minutes.

    python -m tests.support.apart_language_model TEXT [--seeds 1 2 3] [--arms ...] ...

Trains a small transformer on four replicas of one process, once for each arm and seed,
on the same batches:

    synchronous  a sum of gradients in every update
    rounds       500 synchronous updates, then `tfdp.sync.DiLoCo`
    streaming    the same, but five fragments of the weights meet in turn
                 (streaming DiLoCo), their outer gradients in 8 bits

Prints for each the validation losses, the bytes that the replicas sent after those 500
updates, and the most of one update, both as `tfdp.callbacks.Traffic` counts them. With
--scratch the rounds begin at the first update.
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


def language_model(characters, seed):
    keras.utils.set_random_seed(seed)
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


class SentInUpdates(keras.callbacks.Callback):
    """What the replicas have sent in each update; stands behind a `Traffic`."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def on_train_batch_end(self, batch, logs=None):
        self.counts.append(logs["bytes_within_hosts"])


def trained(arguments, sync, text, seed):
    """The validation losses on every 100 updates, and the bytes of each update."""
    codes, characters = text
    train, held_out = codes[: -len(codes) // 10], codes[-len(codes) // 10 :]
    strategy = tfdp.DataParallelStrategy([f"CPU:{i}" for i in range(REPLICAS)])
    with strategy.scope():
        model = language_model(characters, seed)
        optimizer = tfdp.DistributedOptimizer(
            keras.optimizers.AdamW(arguments.rate, weight_decay=0.1), sync=sync
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
    pieces = arguments.updates // 100
    drawn = [windows(train, 100 * BATCH, 1000 * seed + n) for n in range(pieces)]
    rows = tuple(np.concatenate(part) for part in zip(*drawn, strict=True))
    sent = SentInUpdates()
    history = model.fit(
        tf.data.Dataset.from_tensor_slices(rows).batch(BATCH, drop_remainder=True),
        epochs=pieces,
        steps_per_epoch=100,
        validation_data=windows(held_out, 512, 7),
        validation_batch_size=128,
        verbose=0,
        callbacks=[tfdp.callbacks.Traffic(), sent],
    ).history
    return history["val_loss"], sent.counts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--first", type=int, default=500)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--outer-rate", type=float, default=0.7)
    parser.add_argument("--streaming-outer-rate", type=float, default=0.4)
    parser.add_argument("--fragments", type=int, default=5)
    parser.add_argument("--overlap", type=int, default=0, help="updates")
    parser.add_argument("--scratch", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    arms = ("synchronous", "rounds", "streaming")
    parser.add_argument("--arms", choices=arms, nargs="+", default=arms)
    arguments = parser.parse_args()
    tfdp.use_virtual_devices(REPLICAS)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    letters, codes = np.unique(list(arguments.text.read_text()), return_inverse=True)
    text = codes, len(letters)
    start = 0 if arguments.scratch else arguments.first
    shared = {"every": arguments.every, "start_step": start, "across": "replicas"}
    syncs = {
        "synchronous": None,
        "rounds": tfdp.sync.DiLoCo(outer_learning_rate=arguments.outer_rate, **shared),
        "streaming": tfdp.sync.DiLoCo(
            outer_learning_rate=arguments.streaming_outer_rate,
            fragments=arguments.fragments,
            overlap_steps=arguments.overlap,
            compression=tfdp.compression.Int8(),
            **shared,
        ),
    }
    for seed in arguments.seeds:
        for arm in arguments.arms:
            began = time.monotonic()
            losses, counts = trained(arguments, syncs[arm], text, seed)
            result = {
                "arm": arm,
                "seed": seed,
                "validation_losses": [round(loss, 4) for loss in losses],
                "bytes_after_start": int(sum(counts[start:])),
                "most_bytes_of_an_update": int(max(counts[start:])),
                "seconds": round(time.monotonic() - began),
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
