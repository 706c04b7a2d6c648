"""Lists of gradient shapes to reduce: of known models, and synthetic ones."""

from __future__ import annotations

from collections.abc import Callable

FLOAT32_BYTES = 4
Shapes = list[tuple[int, ...]]


def _tiny() -> Shapes:
    # One large, one odd and several small tensors, and a scalar.
    return [(64, 64), (7, 13, 3), (64,), (64,), (5,), ()]


def _resnet50() -> Shapes:
    """The trainable weights of Keras' ResNet-50: 214 tensors, 25,583,592 numbers."""
    import keras

    model = keras.applications.ResNet50(weights=None)
    return [tuple(weight.shape) for weight in model.trainable_weights]


def _equal(tensors: int, numbers: int) -> Callable[[], Shapes]:
    return lambda: [(numbers,)] * tensors


def _widening() -> Shapes:
    """222 tensors, 25,405,440 numbers, of all sizes: transformer blocks in 5 widths."""
    found: Shapes = []
    for width, blocks in ((64, 16), (128, 8), (256, 8), (512, 4), (1024, 1)):
        square, wide, narrow = (width, width), (width, 4 * width), (4 * width, width)
        block: Shapes = [square, (width,), wide, (4 * width,), narrow, (width,)]
        found += block * blocks
    return found


# Name -> a function that returns the shapes; ResNet-50's needs Keras.
GRADIENT_SETS: dict[str, Callable[[], Shapes]] = {
    "resnet50": _resnet50,
    "tiny": _tiny,
    # For the latency and the rate of a link.
    "equal-1x1m": _equal(1, 1 << 20),
    "equal-64x16k": _equal(64, 1 << 14),
    "equal-4x256k": _equal(4, 1 << 18),
    "equal-256x4k": _equal(256, 1 << 12),
    "widening": _widening,
}
