"""Loss functions and weightings, with predictions and targets that suit them."""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

FEATURES, TIMES, CLASSES = 4, 3, 3
ROWS = 12

L = keras.losses


@dataclasses.dataclass(frozen=True)
class Row:
    """A loss, and what its predictions and targets look like.

    Args:
      make: the loss, given `reduction`.
      predictions: "real", "positive", "sign", "probability", "distribution" or
        "logits".
      targets: "real", "positive", "sign", "binary", "one_hot" or "sparse".
    """

    make: Callable[..., keras.losses.Loss]
    predictions: str
    targets: str


LOSSES = {
    "MeanSquaredError": Row(L.MeanSquaredError, "real", "real"),
    "MeanAbsoluteError": Row(L.MeanAbsoluteError, "real", "real"),
    "MeanAbsolutePercentageError": Row(
        L.MeanAbsolutePercentageError, "real", "positive"
    ),
    "MeanSquaredLogarithmicError": Row(
        L.MeanSquaredLogarithmicError, "positive", "positive"
    ),
    "Huber": Row(L.Huber, "real", "real"),
    "LogCosh": Row(L.LogCosh, "real", "real"),
    "CosineSimilarity": Row(L.CosineSimilarity, "real", "real"),
    "Poisson": Row(L.Poisson, "positive", "positive"),
    "KLDivergence": Row(L.KLDivergence, "distribution", "one_hot"),
    "Hinge": Row(L.Hinge, "sign", "sign"),
    "SquaredHinge": Row(L.SquaredHinge, "sign", "sign"),
    "CategoricalHinge": Row(L.CategoricalHinge, "real", "one_hot"),
    "BinaryCrossentropy": Row(L.BinaryCrossentropy, "probability", "binary"),
    "BinaryFocalCrossentropy": Row(
        lambda **k: L.BinaryFocalCrossentropy(apply_class_balancing=True, **k),
        "probability",
        "binary",
    ),
    "CategoricalCrossentropy": Row(
        lambda **k: L.CategoricalCrossentropy(label_smoothing=0.1, **k),
        "distribution",
        "one_hot",
    ),
    "CategoricalFocalCrossentropy": Row(
        L.CategoricalFocalCrossentropy, "distribution", "one_hot"
    ),
    "CategoricalGeneralizedCrossEntropy": Row(
        L.CategoricalGeneralizedCrossEntropy, "distribution", "sparse"
    ),
    "SparseCategoricalCrossentropy": Row(
        lambda **k: L.SparseCategoricalCrossentropy(from_logits=True, **k),
        "logits",
        "sparse",
    ),
    # With axes given they are one number per sample; without, see `EXEMPT`.
    "Dice": Row(lambda **k: L.Dice(axis=(1, 2), **k), "probability", "one_hot"),
    "Tversky": Row(lambda **k: L.Tversky(axis=(1, 2), **k), "probability", "one_hot"),
}
# Losses that are no mean over samples; nothing to share out. docs/exceptions.md.
EXEMPT = {
    "Circle": "pairs every sample with every other one of the batch it sees",
    "CTC": "held by its own test: its targets have another length",
}
# What gives one number per sample, where the others give one per time step.
PER_SAMPLE = ("Dice", "Tversky")

WEIGHTINGS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "sample_weight": {"weights": True},
    "masked": {"mask": True},
    "masked-sample_weight": {"weights": True, "mask": True},
    "mean_with_sample_weight": {
        "reduction": "mean_with_sample_weight",
        "weights": True,
    },
    "mean_with_sample_weight-masked": {
        "reduction": "mean_with_sample_weight",
        "weights": True,
        "mask": True,
    },
}

PREDICTIONS = {
    "real": lambda z: z,
    "sign": tf.tanh,
    "positive": lambda z: tf.nn.softplus(z) + 0.1,
    "probability": tf.sigmoid,
    "distribution": tf.nn.softmax,
    "logits": lambda z: z,
}


def targets_of(kind, seed=2):
    rng = np.random.default_rng(seed)
    real = rng.normal(size=(ROWS, TIMES, CLASSES)).astype("float32")
    sparse = rng.integers(0, CLASSES, size=(ROWS, TIMES))
    return {
        "real": real + 1.0,
        "positive": np.abs(real) + 0.5,
        "sign": np.where(real > 0, 1.0, -1.0).astype("float32"),
        "binary": (real > 0).astype("float32"),
        "one_hot": np.eye(CLASSES, dtype="float32")[sparse],
        "sparse": sparse.astype("int32"),
    }[kind]


def inputs():
    """Features, weights and masks, all of very different size from row to row."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(ROWS, TIMES, FEATURES))
    x *= np.geomspace(0.2, 2.0, ROWS)[rng.permutation(ROWS), None, None]
    weights = rng.uniform(0.1, 2.0, size=(ROWS, TIMES))
    lengths = rng.integers(1, TIMES + 1, ROWS)
    mask = np.arange(TIMES)[None] < lengths[:, None]
    # One replica of two, and two of four, see nothing but padding in the last rows.
    mask[-3:] = False
    return x.astype("float32"), weights.astype("float32"), mask


def kernel():
    rng = np.random.default_rng(8)
    return tf.constant(rng.normal(size=(FEATURES, CLASSES)) * 0.5, tf.float32)
