"""A script of Keras' JAX backend, of which KERAS_BACKEND decides where it runs.

It writes its losses, and what evaluate and predict return, to its first argument; the
second names what it distributes: "model", "data" or "nothing". With a third one
its inputs are words, some of which repeat in each batch.
"""

import json
import sys

import keras
import numpy as np
from keras.distribution import list_devices, set_distribution

path, kind = sys.argv[1:3]
if kind == "model":
    mesh = keras.distribution.DeviceMesh((2, 2), ["data", "model"], list_devices())
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*up/kernel"] = (None, "model")
    layout[".*up/bias"] = ("model",)
    layout[".*down/kernel"] = ("model", None)
    layout[".*up/output"] = ("data", "model")
    set_distribution(
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="data")
    )
elif kind == "data":
    set_distribution(keras.distribution.DataParallel(devices=list_devices()))

inputs = x = keras.Input((12,))
if len(sys.argv) > 3:
    x = keras.layers.Flatten()(keras.layers.Embedding(7, 2, name="words")(inputs))
x = keras.layers.Dense(16, "gelu", name="up")(x)
x = keras.layers.LayerNormalization(name="norm")(x)
x = keras.layers.Dense(12, name="down")(x)
model = keras.Model(inputs, keras.layers.Dense(5, name="head")(x))
drawn = np.random.default_rng(3)
model.set_weights([drawn.normal(size=w.shape) * 0.3 for w in model.weights])
# With clipping the rows of repeated words are added in any case.
clipping = {} if len(sys.argv) > 3 else {"global_clipnorm": 1.0}
model.compile(
    keras.optimizers.Adam(0.01, epsilon=1e-3, **clipping),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
x, y = drawn.normal(size=(80, 12)).astype("float32"), drawn.integers(0, 5, 80)
if len(sys.argv) > 3:
    x = drawn.integers(0, 7, (80, 12))
losses = []


class Losses(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        losses.append(float(logs["loss"]))


model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[Losses()])
found = {
    "losses": losses,
    "evaluated": model.evaluate(x, y, batch_size=16, verbose=0),
    "predicted": model.predict(x[:6], verbose=0).tolist(),
    "devices": list_devices(),
}
with open(path, "w", encoding="utf-8") as file:
    json.dump(found, file)
