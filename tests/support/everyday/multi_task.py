"""Two tasks on one trunk: weights of losses, and of rows whose label is missing."""

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(0)
COUNT = 200
x = rng.normal(size=(COUNT, 20)).astype("float32")
price = (x[:, :3].sum(axis=1) + rng.normal(0, 0.1, COUNT)).astype("float32")
kind = np.argmax(x[:, 3:7], axis=1)
# A third of the rows have no price, and rare kinds count more.
has_price = (rng.uniform(size=COUNT) > 0.33).astype("float32")
rarity = np.array([1.0, 1.0, 2.0, 4.0], "float32")[kind]

inputs = keras.Input((20,), name="features")
trunk = layers.Dense(32, activation="relu")(inputs)
trunk = layers.LayerNormalization()(trunk)
trunk = layers.Dense(32, activation="relu")(trunk)
outputs = {
    "price": layers.Dense(1, name="price")(trunk),
    "kind": layers.Dense(4, activation="softmax", name="kind")(trunk),
}
model = keras.Model(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.Adam(1e-2, global_clipnorm=1.0),
    loss={"price": "mse", "kind": "sparse_categorical_crossentropy"},
    loss_weights={"price": 1.0, "kind": 0.5},
    metrics={"kind": ["accuracy"]},
    weighted_metrics={"price": ["mae"], "kind": ["accuracy"]},
)
model.fit(
    x,
    {"price": price, "kind": kind},
    sample_weight={"price": has_price, "kind": rarity},
    batch_size=32,
    epochs=4,
)
