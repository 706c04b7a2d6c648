"""A small convolutional network in mixed precision, with loss scaling."""

import keras
import numpy as np
from keras import layers

keras.mixed_precision.set_global_policy("mixed_float16")

rng = np.random.default_rng(0)
labels = rng.integers(0, 10, 256)
images = rng.normal(size=(256, 24, 24, 3)) + labels[:, None, None, None] / 5
images = images.astype("float32")

model = keras.Sequential(
    [
        keras.Input((24, 24, 3)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dropout(0.2),
        layers.Dense(64, activation="relu"),
        layers.Dense(10),
        layers.Activation("softmax", dtype="float32"),
    ]
)
model.compile(
    optimizer="adam",
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(images, labels, batch_size=64, epochs=2, validation_split=0.1)
