"""What `tfdp tune` was tried on: a dense, a convolutional and an attention model.

tfdp tune tests.support.tuning_subjects:attention --batch 32 --workers 2
"""

import keras
import numpy as np


def compiled(model):
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    return model


def dense():
    """4.0 million weights in 10 tensors."""

    def build():
        layers = [keras.layers.Dense(1024, "relu") for _ in range(4)]
        return compiled(
            keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
        )

    rng = np.random.default_rng(0)
    return build, (
        rng.normal(size=(64, 784)).astype("float32"),
        rng.integers(0, 10, 64),
    )


def convolutional():
    """1.2 million weights in 8 tensors, nearly all of them in one."""

    def build():
        return compiled(
            keras.Sequential(
                [
                    keras.Input((28, 28, 1)),
                    keras.layers.Conv2D(32, 3, activation="relu"),
                    keras.layers.Conv2D(64, 3, activation="relu"),
                    keras.layers.MaxPooling2D(),
                    keras.layers.Flatten(),
                    keras.layers.Dense(128, "relu"),
                    keras.layers.Dense(10),
                ]
            )
        )

    rng = np.random.default_rng(0)
    images = rng.normal(size=(64, 28, 28, 1)).astype("float32")
    return build, (images, rng.integers(0, 10, 64))


def attention():
    """3.7 million weights in 68 tensors: 4 blocks of width 256, 32 words."""

    def build():
        words = keras.Input((32,), dtype="int32")
        # Not an embedding, whose gradients are in no bucket.
        one_hot = keras.layers.CategoryEncoding(1000, output_mode="one_hot")(words)
        x = keras.layers.Dense(256)(one_hot)
        for _ in range(4):
            y = keras.layers.LayerNormalization()(x)
            x = x + keras.layers.MultiHeadAttention(4, 64)(y, y)
            y = keras.layers.LayerNormalization()(x)
            y = keras.layers.Dense(1024, "gelu")(y)
            x = x + keras.layers.Dense(256)(y)
        return compiled(keras.Model(words, keras.layers.Dense(1000)(x)))

    rng = np.random.default_rng(0)
    words = rng.integers(0, 1000, (32, 33))
    return build, (words[:, :-1], words[:, 1:])
