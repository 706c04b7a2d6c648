"""A network of sets: unequal numbers of points, padded, and a masked mean of each."""

import keras
import numpy as np
from keras import layers, ops

rng = np.random.default_rng(0)
counts = rng.integers(2, 12, 200)
sets = [rng.normal(size=(count, 3)).astype("float32") for count in counts]
volumes = np.array([s.std(axis=0).prod() for s in sets], "float32")[:, None]
points = keras.utils.pad_sequences(sets, padding="post", dtype="float32")


class MaskedMean(layers.Layer):
    """The mean over the points that are no padding."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, points, mask=None):
        mask = ops.cast(mask, points.dtype)[..., None]
        total = ops.sum(points * mask, axis=1)
        return total / ops.maximum(ops.sum(mask, axis=1), 1.0)

    def compute_mask(self, points, mask=None):
        return None


inputs = keras.Input((None, 3))
x = layers.Masking()(inputs)
x = layers.TimeDistributed(layers.Dense(32, activation="relu"))(x)
x = layers.TimeDistributed(layers.Dense(32, activation="relu"))(x)
x = MaskedMean()(x)
x = layers.Dense(32, activation="relu")(x)
model = keras.Model(inputs, layers.Dense(1)(x))
model.compile(
    keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2),
    loss="mae",
    metrics=[keras.metrics.RootMeanSquaredError()],
)
model.fit(points, volumes, batch_size=30, epochs=3)
