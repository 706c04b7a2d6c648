"""The gradients that cases sum: those of `tfdp measure`, and of two models."""

from __future__ import annotations

import math
from typing import Any

from tfdp.tools.measuring import gradient_sets
from tfdp.tools.measuring.gradient_sets import FLOAT32_BYTES, Shapes


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


def _small_cnn() -> Shapes:
    """The model "cnn-1m": 8 tensors, 1,199,882 numbers."""
    convolutions: Shapes = [(3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,)]
    return [*convolutions, (9216, 128), (128,), (128, 10), (10,)]


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


GRADIENT_SETS = {
    **gradient_sets.GRADIENT_SETS,
    "cnn-1m": _small_cnn,
    "bert-base": _bert_base,
}
