"""A small language model: causal attention, dropout, and a long warm-up."""

import keras
import numpy as np
from keras import layers, ops

WORDS, LENGTH, WIDTH, HEADS = 64, 24, 32, 2


@keras.saving.register_keras_serializable()
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """The schedule of "Attention is all you need"."""

    def __init__(self, width, warm_up_steps=10_000):
        self.width, self.warm_up_steps = width, warm_up_steps

    def __call__(self, step):
        step = ops.cast(step, "float32") + 1
        rate = ops.minimum(ops.rsqrt(step), step * self.warm_up_steps**-1.5)
        return self.width**-0.5 * rate

    def get_config(self):
        return {"width": self.width, "warm_up_steps": self.warm_up_steps}


class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=0.1)
        self.feed_forward = keras.Sequential(
            [layers.Dense(2 * WIDTH, activation="gelu"), layers.Dense(WIDTH)]
        )
        self.first, self.second = (
            layers.LayerNormalization(),
            layers.LayerNormalization(),
        )
        self.dropout = layers.Dropout(0.1)

    def call(self, x, training=None):
        y = self.first(x)
        y = self.attention(y, y, use_causal_mask=True, training=training)
        x = x + self.dropout(y, training=training)
        return x + self.feed_forward(self.second(x))


class Embeddings(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.words = layers.Embedding(WORDS, WIDTH)
        self.positions = layers.Embedding(LENGTH, WIDTH)

    def call(self, tokens):
        return self.words(tokens) + self.positions(ops.arange(ops.shape(tokens)[1]))


inputs = keras.Input((LENGTH,), dtype="int32")
x = Embeddings()(inputs)
for _ in range(2):
    x = Block()(x)
model = keras.Model(inputs, layers.Dense(WORDS)(layers.LayerNormalization()(x)))
model.compile(
    optimizer=keras.optimizers.Adam(
        WarmUp(WIDTH), beta_2=0.98, epsilon=1e-9, clipnorm=1.0
    ),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
rng = np.random.default_rng(0)
starts, steps = rng.integers(0, WORDS, (256, 1)), rng.integers(1, 5, (256, 1))
text = (starts + steps * np.arange(LENGTH + 1)) % WORDS
model.fit(text[:, :-1], text[:, 1:], batch_size=32, epochs=2)
