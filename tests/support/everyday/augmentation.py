"""Images with augmentation, and gradients accumulated for a larger batch."""

import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(0)
labels = rng.integers(0, 5, 200)
ys, xs = np.mgrid[:24, :24]
waves = np.sin(xs * (labels[:, None, None] + 1) / 4) + np.cos(ys / 3)
images = waves[..., None] + rng.normal(0, 0.5, (200, 24, 24, 3))
images = (255 * (images - images.min()) / np.ptp(images)).astype("uint8")
targets = keras.utils.to_categorical(labels, 5)

augmentation = keras.Sequential(
    [
        layers.RandomFlip("horizontal"),
        layers.RandomRotation(0.05),
        layers.RandomZoom(0.1),
        layers.RandomContrast(0.2),
    ],
    name="augmentation",
)


def residual_block(x, filters):
    y = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    y = layers.Conv2D(filters, 3, padding="same")(y)
    shortcut = layers.Conv2D(filters, 1)(x)
    return layers.ReLU()(layers.Add()([y, shortcut]))


inputs = keras.Input((24, 24, 3))
x = augmentation(inputs)
x = layers.Rescaling(1 / 255)(x)
x = residual_block(x, 8)
x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
x = residual_block(x, 16)
x = layers.GlobalAveragePooling2D()(x)
x = layers.Dropout(0.25)(x)
model = keras.Model(inputs, layers.Dense(5, activation="softmax")(x))
model.compile(
    optimizer=keras.optimizers.Adam(1e-3, gradient_accumulation_steps=8),
    loss=keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
    metrics=["accuracy", keras.metrics.TopKCategoricalAccuracy(2)],
)
model.fit(
    images,
    targets,
    batch_size=16,
    epochs=4,
    validation_split=0.1,
    callbacks=[keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)],
)
