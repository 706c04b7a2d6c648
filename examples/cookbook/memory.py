"""A transformer on cards of 8 GB: sharded, rematerialized, in micro-batches.

    cd examples/cookbook
    tfdp plan memory.py:plain --batch 128 --replicas 2 --memory 8GB --quick
    tfdp plan memory.py:saving --batch 64 --replicas 2 --shard 3 --memory 8GB --quick
    python memory.py

The plans are of the large model. Without a GPU `python memory.py` trains a small one.
"""

import functools

import tfdp

tfdp.quiet()

import keras
import numpy as np
import tensorflow as tf

WORDS, BATCH, MICRO_BATCHES = 8000, 128, 2
LARGE = {"width": 512, "blocks": 4, "context": 512}
SMALL = {"width": 64, "blocks": 2, "context": 16}


def build(width: int, blocks: int, context: int, saves_memory: bool) -> keras.Model:
    words = keras.Input((context,), dtype="int32")
    x = keras.layers.Embedding(WORDS, width)(words)
    for _ in range(blocks):
        attention = keras.layers.MultiHeadAttention(8, width // 8)
        normal = keras.layers.LayerNormalization()(x)
        x = x + attention(normal, normal, use_causal_mask=True)
        normal = keras.layers.LayerNormalization()(x)
        hidden = keras.layers.Dense(4 * width, "gelu")(normal)
        x = x + keras.layers.Dense(width)(hidden)
    model = keras.Model(words, keras.layers.Dense(WORDS)(x))
    optimizer = keras.optimizers.AdamW(1e-3)
    if saves_memory:
        tfdp.remat(model, "segments")
        optimizer = tfdp.DistributedOptimizer(optimizer, accumulate_steps=MICRO_BATCHES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    return model


def data(context: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    text = np.random.default_rng(1).geometric(0.05, (rows, context + 1)) % WORDS
    return text[:, :-1].astype("int32"), text[:, 1:].astype("int32")


def plain():
    """For `tfdp plan`: the large model on whole batches."""
    return functools.partial(build, **LARGE, saves_memory=False), data(
        LARGE["context"], BATCH
    )


def saving():
    """For `tfdp plan`: the same, rematerialized, on micro-batches."""
    build_model = functools.partial(build, **LARGE, saves_memory=True)
    return build_model, data(LARGE["context"], BATCH // MICRO_BATCHES)


if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    size = LARGE if tf.config.list_physical_devices("GPU") else SMALL
    strategy = tfdp.auto_strategy(cpu_devices=2, shard="parameters")
    with strategy.scope():
        model = build(**size, saves_memory=True)
    x, y = data(size["context"], 4 * BATCH)
    # Each batch of Keras is a micro-batch: two of them make one update.
    model.fit(x, y, batch_size=BATCH // MICRO_BATCHES, epochs=2, verbose=2)
