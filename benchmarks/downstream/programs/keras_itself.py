"""Keras' own: applications, preprocessing, wrappers for scikit-learn, distillation."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.downstream.cases import (
    BATCH,
    EPOCHS,
    ROWS,
    Numbers,
    draw,
    fit,
    integers,
)

CLASSES, WORDS, SIZE = 3, 50, 32
IMAGES, LABELS = draw(ROWS, SIZE, SIZE, 3), integers(CLASSES, ROWS)


def _application(name: str, **options: Any) -> Numbers:
    """A network of `keras.applications` with random weights, from its frozen base.

    Its BatchNormalization would see each replica's own rows in training, which tfdp
    says in docs/exactness.md; frozen, it uses the stored statistics.
    """
    shape = (SIZE, SIZE, 3)
    make = getattr(keras.applications, name)
    base = make(weights=None, include_top=False, input_shape=shape, **options)
    base.trainable = False
    pooled = keras.layers.GlobalAveragePooling2D()(base.output)
    model = keras.Model(base.input, keras.layers.Dense(CLASSES)(pooled))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-2), loss)
    return fit(model, IMAGES, LABELS)


def mobilenet_v3_transfer() -> Numbers:
    return _application("MobileNetV3Small")


def densenet_transfer() -> Numbers:
    return _application("DenseNet121")


def convnext_tiny_whole() -> Numbers:
    """Without BatchNormalization; all of it is trained."""
    model = keras.applications.ConvNeXtTiny(
        weights=None, input_shape=(SIZE, SIZE, 3), classes=CLASSES
    )
    for layer in model._flatten_layers():
        if "StochasticDepth" in type(layer).__name__:
            layer.drop_path_rate = 0.0
    model.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
    return fit(model, IMAGES, LABELS, epochs=1)


def feature_space() -> Numbers:
    space = keras.utils.FeatureSpace(
        {
            "age": "float_normalized",
            "city": "string_categorical",
            "kind": "integer_categorical",
            "income": keras.utils.FeatureSpace.float_discretized(num_bins=4),
        },
        crosses=[("city", "kind")],
        crossing_dim=8,
        output_mode="concat",
    )
    rows = {
        "age": draw(ROWS),
        "city": tf.constant([("Basel", "Lima", "Oslo")[at % 3] for at in range(ROWS)]),
        "kind": integers(4, ROWS),
        "income": draw(ROWS) ** 2,
    }
    batches = tf.data.Dataset.from_tensor_slices(rows).batch(BATCH)
    space.adapt(batches)
    entry = space.get_encoded_features()
    model = keras.Model(space.get_inputs(), keras.layers.Dense(1)(entry))
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    targets = tf.data.Dataset.from_tensor_slices(draw(ROWS, 1)).batch(BATCH)
    history = model.fit(tf.data.Dataset.zip(batches, targets), epochs=EPOCHS, verbose=0)
    return dict(history.history)


def normalization_and_text() -> Numbers:
    words = keras.layers.TextVectorization(max_tokens=WORDS, output_sequence_length=6)
    texts = np.array([f"w{a} w{b} w{a + b}" for a, b in integers(9, ROWS, 2)])
    words.adapt(texts)
    tokens = words(texts)
    entry = keras.Input((6,), dtype="int64")
    x = keras.layers.Embedding(WORDS, 8, mask_zero=True)(entry)
    x = keras.layers.LSTM(8)(x)
    model = keras.Model(entry, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.RMSprop(1e-3), "mse")
    return fit(model, np.asarray(tokens), draw(ROWS, 1))


def distillation() -> Numbers:
    teacher = keras.Sequential([keras.Input((8,)), keras.layers.Dense(CLASSES)])
    student = keras.Sequential([keras.Input((8,)), keras.layers.Dense(CLASSES)])
    model = keras.distillation.Distiller(
        teacher=teacher,
        student=student,
        distillation_losses=keras.distillation.LogitsDistillation(temperature=2.0),
        distillation_loss_weights=1.0,
        student_loss_weight=0.5,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss)
    return fit(model, draw(ROWS, 8), LABELS)


def _compiled(X: Any, y: Any, loss: str) -> keras.Model:
    layers = [keras.Input(X.shape[1:]), keras.layers.Dense(8, "tanh")]
    last = keras.layers.Dense(1 if y.ndim < 2 else y.shape[1])
    model = keras.Sequential([*layers, last])
    model.compile(keras.optimizers.SGD(1e-2), loss)
    return model


OPTIONS = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}


def sklearn_regressor_in_a_pipeline() -> Numbers:
    wrapped = keras.wrappers.SKLearnRegressor(
        _compiled, model_kwargs={"loss": "mse"}, fit_kwargs=OPTIONS
    )
    pipeline = make_pipeline(StandardScaler(), wrapped)
    x, y = draw(ROWS, 4), draw(ROWS)
    return {"predictions": pipeline.fit(x, y).predict(x)}


def sklearn_classifier_by_cross_validation() -> Numbers:
    wrapped = keras.wrappers.SKLearnClassifier(
        _compiled, model_kwargs={"loss": "categorical_crossentropy"}, fit_kwargs=OPTIONS
    )
    return {"scores": cross_val_score(wrapped, draw(ROWS, 4), LABELS, cv=3)}


CASES = {
    function.__name__: function
    for function in (
        mobilenet_v3_transfer,
        densenet_transfer,
        convnext_tiny_whole,
        feature_space,
        normalization_and_text,
        distillation,
        sklearn_regressor_in_a_pipeline,
        sklearn_classifier_by_cross_validation,
    )
}
