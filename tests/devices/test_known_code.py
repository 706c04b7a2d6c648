"""Whose code a model runs: what a person wrote is found wherever it is."""

import array
import collections
import functools
import itertools
import math
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp._private.known_code import runs_known_code
from tfdp.optimizers import LAMB

WORDS = 7


def own_function(values):
    return 2.0 * values


class OwnLayer(keras.layers.Dense):
    pass


class OwnModel(keras.Model):
    pass


class OwnLoss(keras.losses.MeanSquaredError):
    pass


class OwnPenalty(keras.regularizers.L2):
    pass


class OwnNumber(float):
    pass


class OwnSchedule(keras.optimizers.schedules.ExponentialDecay):
    pass


def residual():
    inputs = keras.Input((8, 8, 3))
    hidden = keras.layers.Conv2D(4, 3, padding="same", use_bias=False)(inputs)
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Activation("relu")(hidden)
    hidden = keras.layers.add([hidden, 2 * hidden])
    hidden = keras.layers.GlobalAveragePooling2D()(keras.ops.tanh(hidden))
    return keras.Model(inputs, keras.layers.Dense(3, kernel_regularizer="l2")(hidden))


def attending():
    words = keras.Input((5,), dtype="int32")
    hidden = keras.layers.Embedding(WORDS, 4, mask_zero=True)(words)
    hidden = keras.layers.MultiHeadAttention(2, 2, dropout=0.1)(hidden, hidden)
    hidden = keras.layers.LayerNormalization()(hidden)
    hidden = keras.layers.Bidirectional(keras.layers.GRU(3))(hidden)
    outputs = {n: keras.layers.Dense(2, "softmax", name=n)(hidden) for n in "ab"}
    return keras.Model(words, outputs)


def stacked(*layers):
    return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2)])


def compiled(model, optimizer="adam", loss="mse", **options):
    model.compile(optimizer, loss, **options)
    return model


def patched_layer():
    layer = keras.layers.Dense(2)
    vars(layer)["call"] = own_function
    return layer


def nested_in_wrapper():
    return keras.layers.TimeDistributed(keras.layers.Dense(2, activation=own_function))


KNOWN = {
    "residual": lambda: compiled(residual(), metrics=["accuracy"]),
    "attending": lambda: compiled(
        attending(),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW()),
        {"a": "categorical_crossentropy", "b": keras.losses.Huber()},
        loss_weights={"a": 1.0, "b": 2.0},
    ),
    "dropout": lambda: compiled(stacked(keras.layers.Dropout(0.2, seed=3))),
    "augmented": lambda: compiled(
        keras.Sequential([keras.Input((8, 8, 3)), keras.layers.RandomFlip()])
    ),
    "nested": lambda: compiled(stacked(stacked(keras.layers.Dense(2)))),
    "partial-of-keras": lambda: stacked(
        keras.layers.Dense(2, functools.partial(keras.activations.relu, max_value=2.0))
    ),
    "tensorflow-activation": lambda: stacked(keras.layers.Dense(2, tf.nn.relu)),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.1, 10)
    ),
    "lamb": lambda: LAMB(0.01, global_clipnorm=1.0),
    "muon": lambda: keras.optimizers.Muon(),
}

OWN = {
    "layer": lambda: stacked(OwnLayer(2)),
    "layer-in-wrapper": nested_in_wrapper,
    "layer-in-model": lambda: stacked(stacked(OwnLayer(2))),
    "model": lambda: compiled(OwnModel(*_ends(residual()))),
    "lambda-layer": lambda: stacked(keras.layers.Lambda(lambda x: x)),
    "activation": lambda: stacked(keras.layers.Dense(2, own_function)),
    "partial": lambda: stacked(
        keras.layers.Dense(2, functools.partial(keras.activations.relu, own_function))
    ),
    "function-of-tensorflow": lambda: stacked(
        keras.layers.Dense(2, tf.function(own_function))
    ),
    "bound-method": lambda: stacked(keras.layers.Dense(2, OwnNumber(1).__add__)),
    "function-of-c": lambda: stacked(keras.layers.Dense(2, itertools.count().__next__)),
    "penalty": lambda: stacked(keras.layers.Dense(2, kernel_regularizer=OwnPenalty())),
    "constraint": lambda: stacked(
        keras.layers.Dense(2, kernel_constraint=own_function)
    ),
    "method-of-an-object": lambda: stacked(patched_layer()),
    "loss": lambda: compiled(residual(), loss=OwnLoss()),
    "loss-function": lambda: compiled(residual(), loss=lambda y, p: 0.0 * p),
    "loss-in-dictionary": lambda: compiled(
        attending(), loss={"a": "mse", "b": own_function}
    ),
    "optimizer": lambda: type("Own", (keras.optimizers.SGD,), {})(),
    "learning-rate": lambda: keras.optimizers.SGD(lambda: 0.1),
    "learning-rate-of-c": lambda: keras.optimizers.SGD(itertools.count().__next__),
    "schedule": lambda: keras.optimizers.SGD(OwnSchedule(0.1, 2, 0.5)),
    "number": lambda: [OwnNumber(0.1)],
    "attribute": lambda: _with_attribute(),
    "default": lambda: types.FunctionType(
        keras.activations.relu.__code__, vars(keras.activations), None, (own_function,)
    ),
}


def _ends(model):
    return model.inputs, model.outputs


def _with_attribute():
    model = residual()
    model.teacher = own_function
    return model


@pytest.mark.parametrize("name", KNOWN)
def test_the_libraries_code_is_known(name):
    made = KNOWN[name]()
    assert runs_known_code([made])
    if isinstance(made, keras.Model):
        assert runs_known_code(made.variables)


@pytest.mark.parametrize("name", OWN)
def test_a_persons_code_is_found(name):
    assert not runs_known_code([OWN[name]()])


def test_a_patched_class_is_found(monkeypatch):
    model = stacked(keras.layers.Dense(2))
    assert runs_known_code([model])
    monkeypatch.setattr(keras.layers.Dense, "call", lambda self, inputs: inputs)
    assert not runs_known_code([model])


def test_a_patched_property_is_found(monkeypatch):
    optimizer = keras.optimizers.SGD(0.1)
    monkeypatch.setattr(
        keras.optimizers.SGD, "learning_rate", property(lambda self: 1.0)
    )
    assert not runs_known_code([optimizer])


def test_what_holds_itself_ends():
    held = [1, 2.0, "three", None, math.pi, np.float32(1), np.zeros(2), tf.zeros(2)]
    held.append(held)
    assert runs_known_code([collections.OrderedDict(a=held, b=(held,))])


def test_leaves_are_not_looked_into():
    class Kept:
        pass

    Kept.__module__ = "tfdp.kept"  # as if it were tfdp's
    kept = Kept()
    kept.function = own_function
    assert not runs_known_code([kept])
    assert runs_known_code([kept], (Kept,))


def helped(difference):
    return 2 * difference


def by_helper(y, p):
    return keras.ops.mean(helped(y - p), axis=-1)


SOME_LAYER = keras.layers.Dense(1)
KEPT_OUTPUTS = []


class OwnMean(keras.metrics.Mean):
    def update_state(self, y, p, sample_weight=None):
        return super().update_state(by_helper(y, p), sample_weight)


class OfSomeLayer(keras.metrics.Mean):
    def update_state(self, y, p, sample_weight=None):
        return super().update_state(SOME_LAYER.last)


class OfHeldLayer(OwnMean):
    def __init__(self):
        super().__init__()
        self.held = SOME_LAYER


class Holder:
    kept = None


HOLDER = Holder()


class OfForeign(OwnMean):
    def __init__(self):
        super().__init__()
        self.held = array.array("f")


class OwnRate(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self):
        self.steps = {"first": 10}

    def __call__(self, step):
        return 0.1 / (1 + step / self.steps["first"])


@pytest.mark.parametrize(
    "make, works_on_given",
    [
        (lambda: by_helper, True),
        (lambda: lambda y, p: by_helper(y, p), True),
        (OwnMean, True),
        (OwnRate, True),
        (lambda: keras.metrics.MeanMetricWrapper(by_helper), True),
        (lambda: lambda y, p: SOME_LAYER.last, False),
        (lambda: lambda y, p: KEPT_OUTPUTS[0], False),
        (lambda: lambda y, p: pytest.importorskip("numpy"), False),
        (OfSomeLayer, False),
        (OfHeldLayer, False),
        (OfForeign, False),
        (lambda: lambda y, p: HOLDER.kept, False),
        (lambda: lambda y, p: Holder.kept, False),
        (lambda: keras.metrics.MeanMetricWrapper(lambda y, p: SOME_LAYER.last), False),
    ],
)
def test_own_code_may_work_on_what_it_is_given_alone(make, works_on_given):
    made = make()
    assert not runs_known_code([made])
    assert runs_known_code([made], works_on_given=True) is works_on_given
