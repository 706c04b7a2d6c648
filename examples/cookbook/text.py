"""Fine-tunes a text model on all GPUs of a host; without GPUs on two logical CPUs.

    python examples/cookbook/text.py
    tfdp launch --workers 2 examples/cookbook/text.py

The body learns to predict the next word first, and its weights go into a file. Put the
weights that you have in its place. The task: whose documentation is a sentence of?
"""

import inspect
import pathlib

import tfdp

tfdp.quiet()

import keras
import numpy as np
import tensorflow as tf

PRETRAINED = pathlib.Path("body.weights.h5")
WORDS, LENGTH, WIDTH, BATCH = 2000, 24, 64, 64
keras.utils.set_random_seed(1)
strategy = tfdp.auto_strategy(cpu_devices=2)  # before the first tensor
if tf.config.list_physical_devices("GPU"):
    keras.mixed_precision.set_global_policy("mixed_bfloat16")


def sentences(module: object) -> list[str]:
    documents = sorted({inspect.getdoc(each) or "" for each in vars(module).values()})
    parts = [part for document in documents for part in document.split(". ")]
    return [part for part in parts if len(part.split()) > 5]


sources = [sentences(np), sentences(keras.layers), sentences(tf.math)]
texts = np.array(sum(sources, []))
labels = np.repeat(np.arange(len(sources)), [len(each) for each in sources])
order = np.random.default_rng(1).permutation(len(texts))
to_numbers = keras.layers.TextVectorization(WORDS, output_sequence_length=LENGTH + 1)
to_numbers.adapt(texts)
numbers, labels = to_numbers(texts[order]).numpy(), labels[order]
end = len(order) * 4 // 5

with strategy.scope():
    ids = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH, mask_zero=True)(ids)
    attention = keras.layers.MultiHeadAttention(4, WIDTH // 4)
    x = keras.layers.LayerNormalization()(x + attention(x, x, use_causal_mask=True))
    hidden = keras.layers.Dense(4 * WIDTH, "gelu")(x)
    x = keras.layers.LayerNormalization()(x + keras.layers.Dense(WIDTH)(hidden))
    body = keras.Model(ids, x)

    next_words = keras.layers.Dense(WORDS, dtype="float32")(body.output)
    language_model = keras.Model(ids, next_words)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    language_model.compile(keras.optimizers.Adam(3e-3), loss)

    pooled = keras.layers.GlobalAveragePooling1D()(body.output)
    logits = keras.layers.Dense(len(sources), dtype="float32")(pooled)
    model = keras.Model(ids, logits)
    rate = tfdp.schedules.LinearWarmup(1e-3, warmup_steps=10)
    model.compile(keras.optimizers.AdamW(rate), loss, metrics=["accuracy"])

if PRETRAINED.exists():
    body.load_weights(PRETRAINED)  # on every worker
else:
    language_model.fit(numbers[:, :-1], numbers[:, 1:], BATCH, epochs=2, verbose=2)
    if strategy.is_chief:
        body.save_weights(PRETRAINED)

numbers = numbers[:, :-1]
model.fit(numbers[:end], labels[:end], BATCH, epochs=2, verbose=2)
loss, accuracy = model.evaluate(numbers[end:], labels[end:], BATCH, verbose=0)
most_frequent = np.bincount(labels[end:]).max() / len(labels[end:])
if strategy.is_chief:
    print(f"test accuracy {accuracy:.1%}; the most frequent class {most_frequent:.1%}")
