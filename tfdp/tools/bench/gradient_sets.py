"""Lists of gradient shapes to reduce: of known models, and synthetic ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

FLOAT32_BYTES = 4
Shapes = list[tuple[int, ...]]


def count_parameters(shapes: Shapes) -> int:
    """Number of elements in all tensors together."""
    return sum(math.prod(shape) for shape in shapes)


def describe_set(name: str, shapes: Shapes) -> dict[str, Any]:
    """The subject of a reduction, for reports."""
    parameters = count_parameters(shapes)
    return {
        "name": name,
        "tensors": len(shapes),
        "parameters": parameters,
        "bytes_per_replica": parameters * FLOAT32_BYTES,
    }


def _tiny() -> Shapes:
    # One large, one odd and several small tensors, and a scalar.
    return [(64, 64), (7, 13, 3), (64,), (64,), (5,), ()]


def _resnet50() -> Shapes:
    """The trainable weights of Keras' ResNet-50: 214 tensors, 25,583,592 numbers."""
    import keras

    model = keras.applications.ResNet50(weights=None)
    return [tuple(weight.shape) for weight in model.trainable_weights]


def _small_cnn() -> Shapes:
    """The model "cnn-1m": 8 tensors, 1,199,882 numbers."""
    convolutions: Shapes = [(3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,)]
    return [*convolutions, (9216, 128), (128,), (128, 10), (10,)]


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


def _bert_base() -> Shapes:
    """BERT-base, uncased: 199 tensors, 109,482,240 numbers.

    Devlin et al. 2018: 30,522 word pieces, 512 positions and 2 segment types, with the
    pooler, without a task's head.
    """
    width, feed_forward, layers = 768, 3072, 12
    norm: Shapes = [(width,), (width,)]
    projection: Shapes = [(width, width), (width,)]
    layer = [
        *projection * 4,  # query, key, value, output
        *norm,
        (width, feed_forward),
        (feed_forward,),
        (feed_forward, width),
        (width,),
        *norm,
    ]
    embeddings: Shapes = [(30522, width), (512, width), (2, width), *norm]
    return [*embeddings, *layer * layers, *projection]


# Name -> a function that returns the shapes; ResNet-50's needs Keras.
GRADIENT_SETS: dict[str, Callable[[], Shapes]] = {
    "resnet50": _resnet50,
    "bert-base": _bert_base,
    "cnn-1m": _small_cnn,
    "tiny": _tiny,
    # The measurement of a link's latency and rate uses these (`tfdp measure`).
    "equal-1x1m": _equal(1, 1 << 20),
    "equal-64x16k": _equal(64, 1 << 14),
    "equal-4x256k": _equal(4, 1 << 18),
    "equal-256x4k": _equal(256, 1 << 12),
    "widening": _widening,
}
