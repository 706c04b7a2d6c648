"""A U-Net whose loss adds cross-entropy and the Dice coefficient of the batch."""

import keras
import numpy as np
from keras import layers, ops

SIZE = 32


def make_images(count, seed=0):
    rng = np.random.default_rng(seed)
    ys, xs = np.mgrid[:SIZE, :SIZE]
    center = rng.uniform(8, 24, (count, 2, 1, 1))
    radius = rng.uniform(2, 10, (count, 1, 1))
    far = np.hypot(ys - center[:, 0], xs - center[:, 1])
    masks = (far < radius).astype("float32")[..., None]
    images = masks + rng.normal(0, 0.5, masks.shape)
    return images.astype("float32"), masks


def dice_loss(y_true, y_pred, smooth=1.0):
    y_true, y_pred = ops.reshape(y_true, (-1,)), ops.reshape(y_pred, (-1,))
    overlap = ops.sum(y_true * y_pred)
    total = ops.sum(y_true) + ops.sum(y_pred)
    return 1 - (2.0 * overlap + smooth) / (total + smooth)


def bce_dice_loss(y_true, y_pred):
    return keras.losses.binary_crossentropy(y_true, y_pred) + dice_loss(y_true, y_pred)


def block(x, filters):
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return x


def build_u_net():
    inputs = keras.Input((SIZE, SIZE, 1))
    skips, x = [], inputs
    for filters in (8, 16):
        x = block(x, filters)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = block(x, 32)
    for filters, skip in zip((16, 8), reversed(skips), strict=True):
        x = layers.Conv2DTranspose(filters, 2, strides=2, padding="same")(x)
        x = block(layers.Concatenate()([x, skip]), filters)
    return keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))


model = build_u_net()
model.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss=bce_dice_loss,
    metrics=[keras.metrics.BinaryIoU(target_class_ids=[1])],
)
images, masks = make_images(80)
model.fit(images, masks, batch_size=16, epochs=2, validation_split=0.2)
