"""An object detector: anchors, a focal loss of classes, a masked loss of boxes."""

import keras
import numpy as np
from keras import layers, ops

CELLS, SIZE, CLASSES = 4, 32, 3


def make_images(count, seed=0):
    """Draws images with bright squares, and encodes them for the anchors of a grid."""
    rng = np.random.default_rng(seed)
    images = rng.normal(0, 0.1, (count, SIZE, SIZE, 3)).astype("float32")
    classes = np.zeros((count, CELLS * CELLS, CLASSES), "float32")
    boxes = np.zeros((count, CELLS * CELLS, 5), "float32")  # the last: is an object
    step = SIZE // CELLS
    for i in range(count):
        for _ in range(rng.integers(1, 5)):
            kind, half = rng.integers(CLASSES), rng.uniform(2, 6)
            y, x = rng.uniform(half, SIZE - half, 2)
            cell = int(y // step) * CELLS + int(x // step)
            top, bottom, left, right = (
                int(v) for v in (y - half, y + half, x - half, x + half)
            )
            images[i, top:bottom, left:right, kind] += 1
            classes[i, cell] = np.eye(CLASSES)[kind]
            offsets = (y % step) / step, (x % step) / step
            boxes[i, cell] = [*offsets, np.log(half), np.log(half), 1]
    return images, {"classes": classes, "boxes": boxes}


class BoxLoss(keras.losses.Loss):
    """A smooth L1 loss of the anchors with an object, per image."""

    def call(self, y_true, y_pred):
        difference = ops.abs(y_true[..., :4] - y_pred)
        smooth = ops.where(difference < 1, 0.5 * difference**2, difference - 0.5)
        is_object = y_true[..., 4]
        loss = ops.sum(ops.mean(smooth, axis=-1) * is_object, axis=-1)
        return loss / ops.maximum(ops.sum(is_object, axis=-1), 1)


def build_detector():
    inputs = keras.Input((SIZE, SIZE, 3))
    x = inputs
    for filters in (8, 16, 32):
        x = layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu")(x)
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(x)
    classes = layers.Conv2D(CLASSES, 1, activation="sigmoid")(x)
    boxes = layers.Conv2D(4, 1)(x)
    outputs = {
        "classes": layers.Reshape((-1, CLASSES), name="classes")(classes),
        "boxes": layers.Reshape((-1, 4), name="boxes")(boxes),
    }
    return keras.Model(inputs, outputs)


model = build_detector()
model.compile(
    keras.optimizers.Adam(1e-3, clipnorm=10.0),
    loss={"classes": keras.losses.BinaryFocalCrossentropy(), "boxes": BoxLoss()},
    loss_weights={"classes": 10.0, "boxes": 1.0},
)
images, targets = make_images(128)
model.fit(images, targets, batch_size=16, epochs=3)
