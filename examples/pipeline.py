"""A small transformer in two stages of a pipeline, on two devices of this machine.

Each device stores half of the blocks, with their optimizer's state, and computes them
for the rows of both replicas: only activations travel between the devices.

    python examples/pipeline.py
"""

import argparse

import tfdp

tfdp.quiet()  # hides TensorFlow's start-up messages

import keras
import numpy as np

WORDS, VOCABULARY, WIDTH, HEADS = 32, 64, 64, 4


def build_model(blocks):
    words = keras.Input((WORDS,), dtype="int32")
    hidden = keras.layers.Embedding(VOCABULARY, WIDTH)(words)
    for _ in range(blocks):
        normal = keras.layers.LayerNormalization()(hidden)
        attend = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        attended = attend(normal, normal, use_causal_mask=True)
        hidden = keras.layers.Add()([hidden, attended])
        normal = keras.layers.LayerNormalization()(hidden)
        wide = keras.layers.Dense(4 * WIDTH, "gelu")(normal)
        hidden = keras.layers.Add()([hidden, keras.layers.Dense(WIDTH)(wide)])
    return keras.Model(words, keras.layers.Dense(VOCABULARY)(hidden))


def sentences(rows):
    """Each word follows from the one before it."""
    drawn = np.random.default_rng(0)
    words = np.empty((rows, WORDS + 1), "int32")
    words[:, 0] = drawn.integers(0, VOCABULARY, rows)
    for place in range(WORDS):
        words[:, place + 1] = (5 * words[:, place] + 3) % VOCABULARY
    return words[:, :-1], words[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    strategy = tfdp.auto_strategy(cpu_devices=options.stages)
    with strategy.scope():
        model = tfdp.pipeline(build_model(options.blocks), options.stages)
        model.compile(
            keras.optimizers.AdamW(3e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    words, following = sentences(512)
    model.fit(words, following, batch_size=64, epochs=options.epochs, verbose=2)

    stored = [weight.value.values for weight in model.trainable_variables]
    for rank in range(strategy.num_replicas_in_sync):
        size_bytes = sum(own[rank].numpy().nbytes for own in stored)
        print(f"device {rank} stores {size_bytes / 1e3:.0f} kB of weights")


if __name__ == "__main__":
    main()
