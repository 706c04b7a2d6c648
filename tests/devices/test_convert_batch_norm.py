"""`convert_batch_normalization`: which layers become synchronous, and which cannot."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import make_strategy
from tests.support.replica_steps import samples
from tfdp.errors import ConfigurationError
from tfdp.layers import SyncBatchNormalization, convert_batch_normalization

BN = keras.layers.BatchNormalization


def fill(model):
    rng = np.random.default_rng(0)
    model.set_weights([rng.uniform(0.5, 2.0, w.shape) for w in model.weights])
    return model


def normalizations(model):
    return [
        layer
        for layer in tf.train.TrackableView(model).descendants()
        if isinstance(layer, BN)
    ]


HAS_RENORM = "renorm" in inspect.signature(BN).parameters  # Keras 3.12 has none
RENORM = {"renorm": True, "renorm_clipping": {"rmax": 3.0}} if HAS_RENORM else {}


def sequential_model():
    return keras.Sequential(
        [
            keras.Input((4, 6)),
            BN(**RENORM, name="first"),
            keras.layers.TimeDistributed(BN(momentum=0.5)),
            keras.layers.TimeDistributed(keras.Sequential([BN(axis=1)])),
            keras.layers.Lambda(lambda x: x + 1.0),
            keras.Sequential([BN(synchronized=True), keras.layers.Dense(3)]),
            SyncBatchNormalization(group_size=4),
        ]
    )


def functional_model():
    inputs = {"a": keras.Input((5, 3), name="a"), "b": keras.Input((5, 3), name="b")}
    shared = BN(axis=1, trainable=False)
    x = shared(inputs["a"]) + 2.0 * shared(inputs["b"])
    inner_input = keras.Input((5, 3))
    inner = keras.Model(inner_input, BN(scale=False)(inner_input))
    outputs = keras.layers.Concatenate()([inner(x), keras.ops.relu(x)])
    return keras.Model(inputs, [outputs, keras.layers.Dense(2)(outputs)])


def inputs_of(model):
    sequential = isinstance(model, keras.Sequential)
    return tf.nest.map_structure(
        lambda tensor: samples((7, *tensor.shape[1:])).astype("float32"),
        model.inputs[0] if sequential else model.input,
    )


@pytest.mark.parametrize("build", [sequential_model, functional_model])
def test_every_layer_is_converted(build):
    model = fill(build())
    before = normalizations(model)
    copy = convert_batch_normalization(model, group_size=2)
    after = normalizations(copy)
    assert type(copy) is type(model) and copy is not model
    assert len(after) == len(before) >= 2
    for old, new in zip(before, after, strict=True):
        assert type(new) is SyncBatchNormalization
        expected = {**old.get_config(), "group_size": 2, "synchronized": True}
        assert new.get_config() == expected
    for old, new in zip(model.weights, copy.weights, strict=True):
        np.testing.assert_array_equal(old, new)
        assert (old.name, old.trainable) == (new.name, new.trainable)
    x = inputs_of(model)
    for old, new in zip(
        tf.nest.flatten(model(x)), tf.nest.flatten(copy(x)), strict=True
    ):
        np.testing.assert_array_equal(old, new)


def test_a_shared_layer_stays_shared():
    copy = convert_batch_normalization(functional_model())
    assert len([w for w in copy.weights if w.name == "moving_mean"]) == 2


def test_the_copy_is_compiled_as_the_model_is():
    model = functional_model()
    assert not convert_batch_normalization(model).compiled
    model.compile(keras.optimizers.SGD(0.25), "mse")
    with make_strategy(2).scope():
        copy = convert_batch_normalization(model)
    assert copy.compiled and copy.optimizer is not model.optimizer
    assert float(copy.optimizer.learning_rate.numpy()) == 0.25
    x = inputs_of(model)
    copy.fit(x, [np.ones((7, 5, 6)), np.ones((7, 5, 2))], batch_size=7, verbose=0)


def test_a_model_without_weights_yet():
    copy = convert_batch_normalization(keras.Sequential([BN(), keras.layers.Dense(1)]))
    assert not copy.built
    assert type(copy.layers[0]) is SyncBatchNormalization
    assert copy(np.ones((2, 3), "float32")).shape == (2, 1)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalization = BN()

    def call(self, x):
        return self.normalization(x)


class OwnFunctional(keras.Model):
    def __init__(self):
        inputs = keras.Input((3,))
        super().__init__(inputs, BN()(inputs))


class Hides(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.hidden = BN(name="hidden")

    def call(self, x):
        return self.hidden(x)


class Derived(BN):
    pass


WHAT_TO_WRITE = "tfdp.layers.SyncBatchNormalization"


@pytest.mark.parametrize(
    "make, message",
    [
        (Subclassed, "Sequential or functional.*Received: Subclassed"),
        (OwnFunctional, "copies the OwnFunctional.*as a Functional"),
        (lambda: keras.Sequential([Subclassed()]), "Received: Subclassed"),
        (lambda: keras.Sequential([keras.Input((3,)), Hides()]), "'hidden'"),
        (lambda: keras.Sequential([keras.Input((3,)), Derived()]), "Derived"),
        (BN, "Received: BatchNormalization"),
        (lambda: None, "Received: NoneType"),
    ],
)
def test_what_cannot_be_converted_is_refused(make, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        convert_batch_normalization(make())
    assert WHAT_TO_WRITE in str(caught.value)


def test_a_bad_group_size_is_refused():
    with pytest.raises(ConfigurationError, match="group_size"):
        convert_batch_normalization(sequential_model(), group_size=0)


def test_a_nested_model_that_would_lose_its_methods_is_refused():
    # Keras copies the inner one as a Functional: `Doubled.call` would be gone.
    class Doubled(keras.Model):
        def __init__(self):
            inputs = keras.Input((3,))
            super().__init__(inputs, BN()(inputs))

        def call(self, x):
            return 2.0 * super().call(x)

    outer = keras.Sequential([keras.Input((3,)), Doubled()])
    with pytest.raises(ConfigurationError, match="copies the Doubled"):
        convert_batch_normalization(outer)
