"""The outputs of a program by name: losses with suiting targets, and metrics."""

import keras
import numpy as np

from tests.generator.layers import TIMES
from tests.support.conformance_losses import CLASSES, LOSSES, PER_SAMPLE, PREDICTIONS

M = keras.metrics

# Losses of conformance_losses.py: what predictions and targets they want is there.
__all__ = ["LOSSES", "METRICS", "make_loss", "make_metric", "predictions", "targets"]


def make_loss(output):
    return LOSSES[output.loss].make(reduction=output.reduction)


def needs_time_steps(loss):
    return loss in PER_SAMPLE


def predictions(output):
    """The layers in front of the loss, for a vector or a sequence."""
    kind = LOSSES[output.loss].predictions
    dense = keras.layers.Dense(CLASSES)
    activation = keras.layers.Activation(ACTIVATIONS[kind])
    return lambda x: activation(dense(x))


ACTIVATIONS = {
    "real": "linear",
    "sign": "tanh",
    "positive": "softplus",
    "probability": "sigmoid",
    "distribution": "softmax",
    "logits": "linear",
}
if set(ACTIVATIONS) != set(PREDICTIONS):
    raise ValueError("a kind of predictions without an activation")


def targets(output, rng, rows):
    """Targets of the output, as an array."""
    lead = (rows, TIMES) if output.per_step else (rows,)
    real = rng.normal(size=(*lead, CLASSES)).astype("float32")
    sparse = rng.integers(0, CLASSES, size=lead)
    return {
        "real": real + 1.0,
        "positive": np.abs(real) + 0.5,
        "sign": np.where(real > 0, 1.0, -1.0).astype("float32"),
        "binary": (real > 0).astype("float32"),
        "one_hot": np.eye(CLASSES, dtype="float32")[sparse],
        "sparse": sparse.astype("int32"),
    }[LOSSES[output.loss].targets]


# By the kind of targets.
METRICS = {
    "real": {
        "mae": M.MeanAbsoluteError,
        "rmse": M.RootMeanSquaredError,
        "cosine": M.CosineSimilarity,
        "log-cosh": M.LogCoshError,
    },
    "positive": {
        "msle": M.MeanSquaredLogarithmicError,
        "mape": M.MeanAbsolutePercentageError,
    },
    "sign": {"hinge": M.Hinge, "mse": M.MeanSquaredError},
    "binary": {
        "auc": lambda: M.AUC(num_thresholds=20),
        "precision": M.Precision,
        "recall": M.Recall,
        "binary-accuracy": M.BinaryAccuracy,
    },
    "one_hot": {
        "accuracy": lambda: "accuracy",
        "top-2": lambda: M.TopKCategoricalAccuracy(2),
        "kl": M.KLDivergence,
    },
    "sparse": {
        "accuracy": lambda: "accuracy",
        "sparse-top-2": lambda: M.SparseTopKCategoricalAccuracy(2),
        "sparse-crossentropy": lambda: M.SparseCategoricalCrossentropy(
            from_logits=True
        ),
    },
}


def metric_names(loss):
    return tuple(METRICS[LOSSES[loss].targets])


def make_metric(output, name):
    return METRICS[LOSSES[output.loss].targets][name]()
