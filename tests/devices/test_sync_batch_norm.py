"""SyncBatchNormalization on several replicas against Keras' layer on one device.

Comparisons are in float64 wherever nothing but the order of summation differs. A sum of
n terms is then off by at most n u sum|t| (Higham 2002, eq. 4.4; u = 1.1e-16); here n is
below 1000, terms are below 100, and at most ten such sums follow each other: 1e-10 for
all. What a missing exchange does is 1e-2 and more.
"""

import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import largest_distance, make_strategy, stock_strategy
from tests.support.replica_steps import (
    STRATEGIES,
    assert_replicas_agree,
    replica_function,
    samples,
)
from tfdp.errors import ConfigurationError
from tfdp.layers import SyncBatchNormalization

FLOAT64_BOUND = 1e-10
# Where the samples of the global batch are cut: uneven, and one replica has none.
CUTS = {1: [], 2: [5], 4: [2, 7, 7]}
BN = keras.layers.BatchNormalization


every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def fill_weights(layer, seed=5):
    rng = np.random.default_rng(seed)
    layer.set_weights([rng.uniform(0.5, 2.0, w.shape) for w in layer.get_weights()])


def forward_and_backward(layer, x, target, mask=None):
    """y, and the gradients of sum(target sin y) for x and the trained weights."""
    weights = [w.value for w in layer.trainable_weights]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True, mask=mask)
        loss = tf.reduce_sum(tf.sin(y) * tf.cast(target, y.dtype))
    return [y, *tape.gradient(loss, [x, *weights])]


def compare(strategy, options, x, mask=None, eager=False, reference=BN):
    """Largest difference between the layer on all replicas and Keras' on one device."""
    target = np.random.default_rng(1).normal(size=x.shape)
    arrays = [x, target] if mask is None else [x, target, mask]
    one = reference(dtype="float64", **options)
    one.build((None, *x.shape[1:]))
    fill_weights(one)
    expected = forward_and_backward(one, *map(tf.constant, arrays))
    with strategy.scope():
        layer = SyncBatchNormalization(dtype="float64", **options)
        layer.build((None, *x.shape[1:]))
        fill_weights(layer)
    cuts = CUTS[strategy.num_replicas_in_sync]
    run = replica_function(
        strategy, lambda *values: forward_and_backward(layer, *values), eager
    )
    results = run(*(np.split(array, cuts) for array in arrays))
    by_value = list(zip(*results, strict=True))
    actual = [np.concatenate(v) for v in by_value[:2]] + [sum(v) for v in by_value[2:]]
    actual += layer.get_weights()
    expected = [*expected, *one.get_weights()]
    assert_replicas_agree(layer)
    return largest_distance(actual, expected)


@every_strategy
def test_equals_one_device(name):
    assert compare(STRATEGIES[name](), {}, samples()) < FLOAT64_BOUND


@pytest.mark.parametrize("make", [make_strategy, stock_strategy])
def test_equals_one_device_in_eager_mode(make):
    assert compare(make(2), {}, samples(), eager=True) < FLOAT64_BOUND


# Keras 3.12 has none.
RENORM = pytest.mark.skipif(
    "renorm" not in inspect.signature(BN).parameters, reason="Keras has no renorm"
)


@pytest.mark.quick
@pytest.mark.parametrize(
    "options, shape",
    [
        ({"axis": 1, "momentum": 0.7, "epsilon": 1e-2}, (12, 5, 4, 3)),
        ({"axis": -2}, (12, 4, 5, 3)),
        ({"center": False}, (12, 5)),
        ({"scale": False}, (12, 5)),
        ({"center": False, "scale": False}, (12, 2, 2, 2, 1)),
        pytest.param(
            {"renorm": True, "renorm_momentum": 0.8}, (12, 3, 5), marks=RENORM
        ),
        pytest.param(
            {
                "renorm": True,
                "renorm_clipping": {"rmin": 0.9, "rmax": 1.1, "dmax": 0.1},
            },
            (12, 3, 5),
            marks=RENORM,
        ),
    ],
    ids=str,
)
def test_every_option_equals_one_device(options, shape):
    assert compare(make_strategy(4), options, samples(shape)) < FLOAT64_BOUND


class KerasWithExactCount(BN):
    """Keras' layer, whose masked mean adds 1e-7 to the count: as small as can be."""

    def call(self, inputs, training=None, mask=None):
        before = keras.config.epsilon()
        keras.config.set_epsilon(1e-300)
        try:
            return super().call(inputs, training=training, mask=mask)
        finally:
            keras.config.set_epsilon(before)


@pytest.mark.parametrize("axis", [-1, 1])
def test_masked_equals_one_device(axis):
    x = samples((12, 4, 5))
    mask = np.random.default_rng(2).uniform(size=(12, 4)) < 0.6
    mask[:2] = False  # the first replica has samples, and none that counts
    difference = compare(
        make_strategy(4), {"axis": axis}, x, mask, reference=KerasWithExactCount
    )
    assert difference < FLOAT64_BOUND


def test_sequence_mask_arrives_through_the_model():
    tokens = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [1, 2, 3, 1], [2, 2, 0, 0]])
    table = np.random.default_rng(3).normal(size=(4, 6))
    with make_strategy(2).scope():
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(4, 6, mask_zero=True),
                SyncBatchNormalization(momentum=0.0),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
        model.layers[0].set_weights([table])
    model.fit(tokens, np.zeros((4, 1)), batch_size=4, verbose=0)
    kept = table[tokens[tokens > 0]]
    # Sums of 9 terms below 10 in float32: 9 * 6e-8 * 10, squared terms as much again.
    np.testing.assert_allclose(model.layers[1].moving_mean, kept.mean(0), atol=1e-5)
    np.testing.assert_allclose(model.layers[1].moving_variance, kept.var(0), atol=1e-5)


@pytest.mark.parametrize("empty", ["no rows", "all masked"])
def test_nothing_to_normalize_changes_nothing(empty):
    layer = SyncBatchNormalization(dtype="float64")
    layer.build((None, 3, 5))
    fill_weights(layer)
    before = layer.get_weights()
    x = tf.constant(samples()[: 0 if empty == "no rows" else None])
    mask = tf.zeros((x.shape[0], 3), tf.bool)
    for value in forward_and_backward(layer, x, tf.ones_like(x), mask):
        assert np.isfinite(value).all()
    for old, new in zip(before, layer.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


LEARNING_RATE, STEPS = 0.1, 4


def two_layer_model(normalization):
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy("float64")
    return keras.Sequential(
        [
            keras.Input((5, 5, 2), dtype="float64"),
            keras.layers.Conv2D(4, 3),
            normalization(momentum=0.8),
            keras.layers.Activation("tanh"),
            keras.layers.Conv2D(3, 2),
            normalization(momentum=0.8),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )


def train(strategy, normalization):
    """A few SGD steps on uneven parts; each loss is a sum over the global batch."""
    with strategy.scope():
        model = two_layer_model(normalization)
        optimizer = keras.optimizers.SGD(LEARNING_RATE)
    x = samples((12 * STEPS, 5, 5, 2))
    y = np.random.default_rng(4).normal(size=(12 * STEPS, 2))
    variables = model.trainable_variables

    def step(x, y):
        with tf.GradientTape() as tape:
            error = model(x, training=True) - y
            loss = tf.reduce_sum(tf.square(error)) / 12
        gradients = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply(gradients, variables)
        return loss

    cuts = CUTS[strategy.num_replicas_in_sync]
    run = replica_function(strategy, step)
    for batch in range(STEPS):
        rows = slice(12 * batch, 12 * batch + 12)
        run(np.split(x[rows], cuts), np.split(y[rows], cuts))
    return model


@functools.cache
def weights_of_one_device():
    return train(tf.distribute.OneDeviceStrategy("CPU:0"), BN).get_weights()


def difference_from_one_device(model):
    return largest_distance(weights_of_one_device(), model.get_weights())


@every_strategy
def test_several_steps_equal_one_device(name):
    several = train(STRATEGIES[name](), SyncBatchNormalization)
    assert difference_from_one_device(several) < FLOAT64_BOUND
    for layer in several.layers:
        assert_replicas_agree(layer)


def test_plain_layers_do_not_equal_one_device():
    """The comparison above sees a layer that does not exchange."""
    assert difference_from_one_device(train(make_strategy(2), BN)) > 1e-2


def test_second_derivatives():
    """Keras' layer stops a gradient in the variance and gets these wrong."""
    layer = SyncBatchNormalization(dtype="float64")
    layer.build((None, 3, 5))
    fill_weights(layer)
    x, target = samples(), np.random.default_rng(1).normal(size=(12, 3, 5))

    def penalty(x):
        x = tf.convert_to_tensor(x)
        gradient = forward_and_backward(layer, x, target)[1]
        return tf.reduce_sum(tf.square(gradient) * target)

    along = np.random.default_rng(6).normal(size=x.shape)
    with tf.GradientTape() as tape:
        point = tf.constant(x)
        tape.watch(point)
        value = penalty(point)
    exact = float(tf.reduce_sum(tape.gradient(value, point) * along))
    step = 1e-5
    up, down = penalty(x + step * along), penalty(x - step * along)
    # Central differences are off by step^2 times a third derivative (below 1e4), and
    # by rounding: 1e-13 / step.
    assert abs(exact - float(up - down) / (2 * step)) < 1e-5 * max(1.0, abs(exact))
    assert abs(exact) > 1e-2


def test_bad_arguments_are_refused():
    for value in (0, -1, 1.5, "2", True):
        with pytest.raises(ConfigurationError, match="group_size must be an integer"):
            SyncBatchNormalization(group_size=value)
    with pytest.raises(ConfigurationError, match="group_size=1"):
        SyncBatchNormalization(synchronized=False)
    layer = SyncBatchNormalization()
    with pytest.raises(ConfigurationError, match=r"mask of shape \(2,\).*\(2, 3, 4\)"):
        layer(np.ones((2, 3, 4)), mask=np.ones((2,)))
