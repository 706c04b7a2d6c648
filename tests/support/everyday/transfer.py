"""Transfer learning: a head on a frozen base, then some layers of the base."""

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(0)
labels = rng.integers(0, 4, 160)
images = rng.normal(size=(160, 32, 32, 3)) * 30 + labels[:, None, None, None] * 40
images = np.clip(images, 0, 255).astype("float32")


def build_base():
    """Stands for a network with weights of another training."""
    inputs = keras.Input((32, 32, 3))
    x = inputs
    for filters in (8, 16, 32):
        x = layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        x = layers.ReLU()(x)
    return keras.Model(inputs, x, name="base")


base = build_base()
base.trainable = False

inputs = keras.Input((32, 32, 3))
x = layers.RandomFlip("horizontal")(inputs)
x = layers.RandomRotation(0.1)(x)
x = layers.Rescaling(1 / 127.5, offset=-1)(x)
x = base(x, training=False)
x = layers.GlobalAveragePooling2D()(x)
x = layers.Dropout(0.2)(x)
outputs = layers.Dense(4)(x)
model = keras.Model(inputs, outputs)

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(1e-3), loss=loss, metrics=["accuracy"])
model.fit(images, labels, batch_size=32, epochs=1, validation_split=0.2)

base.trainable = True
for layer in base.layers[:-3]:
    layer.trainable = False
model.compile(keras.optimizers.Adam(1e-5), loss=loss, metrics=["accuracy"])
model.fit(images, labels, batch_size=32, epochs=1, validation_split=0.2)
