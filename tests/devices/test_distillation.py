"""Keras' Distiller takes its own means: exact under a strategy, without a word."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.distillation import Distiller, FeatureDistillation, LogitsDistillation

from tests.support.parity import make_strategy

X = np.random.default_rng(0).normal(size=(13, 4)).astype("float32")


def net(seed):
    def dense(units, offset, **name):
        start = keras.initializers.GlorotUniform(seed=seed + offset)
        return keras.layers.Dense(units, kernel_initializer=start, **name)

    inputs = keras.Input((4,))
    return keras.Model(inputs, dense(1, 1)(dense(3, 0, name="hidden")(inputs)))


def trained(strategy, loss, weight):
    """Weights and history after two epochs of batches of 8 and 5 rows."""
    layers = {"teacher_layer_name": "hidden", "student_layer_name": "hidden"}
    with strategy.scope():
        student = net(1)
        parts = [LogitsDistillation(loss=loss()), FeatureDistillation(loss(), **layers)]
        distiller = Distiller(
            teacher=net(5),
            student=student,
            distillation_losses=parts,
            student_loss_weight=weight,
        )
        distiller.compile(keras.optimizers.SGD(0.05), loss(), jit_compile=False)
    y = X.sum(axis=1, keepdims=True)
    history = distiller.fit(X, y, 8, epochs=2, shuffle=False, verbose=0).history
    return student.get_weights(), history


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("loss", [lambda: "mse", keras.losses.MeanSquaredError])
def test_distiller(loss, replicas, weight):
    """Rounding: four steps at rate 0.05 with gradients below 10, of 8 rows in float32:
    4 x 0.05 x 10 x 8 x 6e-8 = 1e-6. Twice the update moves a weight by 0.01 and more.
    """
    weights, history = trained(tf.distribute.get_strategy(), loss, weight)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, message="In a step")
        others, reports = trained(make_strategy(replicas), loss, weight)
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=2e-6)
    for name, values in history.items():
        np.testing.assert_allclose(reports[name], values, rtol=2e-5, err_msg=name)
