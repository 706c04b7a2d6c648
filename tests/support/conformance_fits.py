"""Losses that only `fit` brings about: weights by class, several outputs, penalties.

15 rows in batches of 7: two replicas get 4 and 3 each time, and 1 and 0 in the end.
"""

import functools

import keras
import numpy as np

from tests.support.parity import classification_data, dense_model

ROWS_OF_FIT = 15
BATCH_SIZE = 7


def sequence_model(mask=True):
    keras.utils.set_random_seed(0)
    tokens = keras.Input((6,), dtype="int32")
    embedded = keras.layers.Embedding(9, 5, mask_zero=mask)(tokens)
    return keras.Model(tokens, keras.layers.Dense(4)(embedded))


def sequences():
    """Rows of 1 to 6 tokens, the rest padding; the last rows are only padding."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 9, (ROWS_OF_FIT, 6))
    lengths = rng.integers(1, 7, ROWS_OF_FIT)
    lengths[-2:] = 0
    tokens[np.arange(6)[None] >= lengths[:, None]] = 0
    return tokens, rng.integers(0, 4, tokens.shape)


class LocalMeanPenalty(keras.layers.Layer):
    """Adds the mean square of its inputs to the loss, over the replica's rows."""

    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def penalised_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(
                6,
                "tanh",
                kernel_regularizer="l2",
                bias_regularizer="l1",
                activity_regularizer=keras.regularizers.L2(0.05),
            ),
            LocalMeanPenalty(),
            keras.layers.Dense(5),
        ]
    )


def two_outputs(mask=False):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((12,))
    hidden = keras.layers.Dense(6, "tanh")(inputs)
    steps = keras.layers.Reshape((3, 2))(hidden)
    if mask:
        steps = keras.layers.Masking(0.0)(keras.layers.ReLU(threshold=0.3)(steps))
    a = keras.layers.Dense(5, name="a")(hidden)
    b = keras.layers.Dense(2, name="b")(steps)
    return keras.Model(inputs, {"a": a, "b": b})


def rows(count=ROWS_OF_FIT, **more):
    x, y = classification_data(samples=count)
    return {"x": x, "y": y, **more}


def rows_for_two(**more):
    x, y = classification_data(samples=ROWS_OF_FIT)
    targets = np.random.default_rng(3).normal(size=(ROWS_OF_FIT, 3, 2))
    return {"x": x, "y": {"a": y, "b": targets.astype("float32")}, **more}


def random_weights(*shape):
    weights = np.random.default_rng(4).uniform(0.0, 2.0, (ROWS_OF_FIT, *shape))
    return weights.astype("float32")


def per_row(y_true, y_pred):
    labels = keras.ops.one_hot(keras.ops.reshape(y_true, (-1,)), 5)
    return keras.ops.sum(keras.ops.abs(labels - y_pred), axis=-1)


class PerRow(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return per_row(y_true, y_pred)


def crossentropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


TWO_LOSSES = {"a": crossentropy(), "b": "mae"}

FITS = {
    "class_weight": (
        dense_model,
        crossentropy(),
        rows(class_weight={0: 0.1, 1: 2.0, 2: 1.0, 3: 0.0, 4: 5.0}),
        {},
    ),
    "sample_weight": (
        dense_model,
        crossentropy(),
        rows(sample_weight=random_weights()),
        {},
    ),
    "mean_with_sample_weight": (
        dense_model,
        crossentropy(reduction="mean_with_sample_weight"),
        rows(sample_weight=random_weights()),
        {},
    ),
    "ignore_class": (dense_model, crossentropy(ignore_class=2), rows(), {}),
    "masked": (
        sequence_model,
        crossentropy(),
        dict(zip("xy", sequences(), strict=True)),
        {},
    ),
    # Keras' CTC gives one number per row, which no mask of time steps fits; and it does
    # not compute on no rows at all, so no replica stays empty.
    "ctc": (
        functools.partial(sequence_model, mask=False),
        keras.losses.CTC(),
        {"x": sequences()[0][:13], "y": 1 + sequences()[1][:13, :2] % 3},
        {},
    ),
    "function": (dense_model, per_row, rows(), {}),
    "class": (dense_model, PerRow(), rows(), {}),
    # 13 rows: no replica stays empty.
    "regularizers-add_loss": (penalised_model, crossentropy(), rows(13), {}),
    "two-outputs": (
        two_outputs,
        TWO_LOSSES,
        rows_for_two(sample_weight={"a": random_weights(), "b": random_weights(3)}),
        {"loss_weights": {"a": 0.3, "b": 2.0}},
    ),
    "two-outputs-masked": (
        functools.partial(two_outputs, mask=True),
        TWO_LOSSES,
        rows_for_two(),
        {},
    ),
}
