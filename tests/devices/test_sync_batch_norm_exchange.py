"""What SyncBatchNormalization sends: how much, to whom, and with which rounding."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import UNIT_ROUND_OFF, make_strategy, stock_strategy
from tests.support.replica_steps import (
    assert_replicas_agree,
    distribute,
    replica_function,
    samples,
)
from tfdp.errors import ConfigurationError
from tfdp.layers import SyncBatchNormalization

BN = keras.layers.BatchNormalization
CHANNELS = 5


def built_under(strategy, layer_class=SyncBatchNormalization, **options):
    with strategy.scope():
        layer = layer_class(**options)
        layer.build((None, CHANNELS))
    return layer


def exchanges(strategy, step, *arrays):
    """The elements of each all-reduce that one replica takes part in, sorted."""
    replicas = strategy.num_replicas_in_sync

    @tf.function
    def run(*arguments):
        return strategy.run(step, args=arguments)

    arguments = [
        tf.nest.map_structure(lambda a: distribute(strategy, [a] * replicas), array)
        for array in arrays
    ]
    graph = run.get_concrete_function(*arguments).graph
    sizes = [
        op.inputs[0].shape.num_elements()
        for op in graph.get_operations()
        if op.type.startswith("Collective")
    ]
    assert len(sizes) % replicas == 0
    return sorted(sizes)[::replicas]


def forward(layer):
    return lambda x: layer(x, training=True)


def forward_and_backward(layer):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(tf.sin(y) * tf.cast(tf.range(CHANNELS), y.dtype))
        weights = [weight.value for weight in layer.trainable_weights]
        return y, tape.gradient(loss, [x, *weights])

    return step


C = CHANNELS


@pytest.mark.parametrize(
    "group_size, sent_forward, sent_backward",
    [
        (None, [4 * (2 * C + 1)], [2 * C]),
        (4, [4 * (2 * C + 1)], [2 * C]),
        (2, [4 * (2 * C + 1)], [2 * (2 * C)]),
        (1, [4 * (2 * C + 1)], []),
    ],
)
def test_one_packed_exchange_each_way(group_size, sent_forward, sent_backward):
    strategy = make_strategy(4, engine="tensorflow")
    layer = built_under(strategy, group_size=group_size)
    x = samples((6, C)).astype("float32")
    assert exchanges(strategy, forward(layer), x) == sent_forward
    both = exchanges(strategy, forward_and_backward(layer), x)
    assert both == sorted(sent_forward + sent_backward)


def test_keras_exchanges_more():
    strategy = make_strategy(4, engine="tensorflow")
    layer = built_under(strategy, BN, synchronized=True)
    x = samples((6, C)).astype("float32")
    assert exchanges(strategy, forward(layer), x) == [C, C, C]


@pytest.mark.parametrize(
    "make", [lambda: tf.distribute.OneDeviceStrategy("CPU:0"), lambda: make_strategy(1)]
)
def test_one_replica_exchanges_nothing(make):
    strategy = make()
    layer = built_under(strategy)
    x = samples((6, C)).astype("float32")
    assert exchanges(strategy, forward_and_backward(layer), x) == []


def test_inference_exchanges_nothing():
    strategy = make_strategy(2, engine="tensorflow")
    layer = built_under(strategy)
    x = samples((6, C)).astype("float32")
    assert exchanges(strategy, lambda x: layer(x, training=False), x) == []
    layer.trainable = False
    assert exchanges(strategy, lambda x: layer(x, training=True), x) == []


def test_moving_statistics_do_not_travel_with_the_gradients():
    """The strategy sends plain layers' along; these agree already."""
    strategy = make_strategy(2, engine="tensorflow")
    sent = {}
    for layer_class in (BN, SyncBatchNormalization):
        with strategy.scope():
            layers = [keras.Input((C,)), layer_class(), keras.layers.Dense(3)]
            model = keras.Sequential(layers)
            model.compile("sgd", "mse")
        batch = tf.zeros((4, C)), tf.zeros((4, 3))
        sent[layer_class] = exchanges(strategy, model.train_step, batch)
    gradients = 2 * C + 3 * C + 3
    assert gradients in sent[SyncBatchNormalization]
    assert gradients not in sent[BN]


# Statistics of a small spread around a large mean.
MEAN, DEVIATION, SAMPLES = 1000.0, 0.1, 64


def narrow_parts(replicas=2):
    """Parts whose means lie apart, so that the merge has something to add."""
    rng = np.random.default_rng(0)
    parts = [
        MEAN + 0.2 * rank + DEVIATION * rng.normal(size=(SAMPLES, C))
        for rank in range(replicas)
    ]
    return [part.astype("float32") for part in parts]


def moving_variance_error(layer_class, **options):
    parts = narrow_parts()
    strategy = stock_strategy(2)
    layer = built_under(strategy, layer_class, momentum=0.0, **options)
    replica_function(strategy, forward(layer))(parts)
    exact = np.concatenate(parts).astype("float64").var(axis=0)
    return np.abs(layer.moving_variance.numpy() / exact - 1).max()


def test_small_variance_of_large_numbers():
    """The bound on the relative error of the variance, about 0.02:

    The local deviations x - m are exact: m is within a factor of 2 of x (Sterbenz).
    Squares and their sum are off by (n + 1) u, n samples per replica. The means are
    rounded to float32, each by e = half a unit in the last place of 1000, so a shift
    between a replica's mean and the merged one (0.1 here) is off by 2 e, and its square
    by 2 shift 2 e + 4 e^2, in the unit of the variance.
    """
    e = np.spacing(np.float32(MEAN)) / 2
    shift = 0.1 + 3 * DEVIATION / np.sqrt(SAMPLES)
    variance = DEVIATION**2 / 2  # the smallest that such a sample has by chance
    bound = (SAMPLES + 4) * UNIT_ROUND_OFF + (4 * shift * e + 4 * e**2) / variance
    assert bound < 0.02
    assert moving_variance_error(SyncBatchNormalization) < bound


def test_keras_loses_a_small_variance_of_large_numbers():
    """To be seen when Keras mends it: then the docs must say so."""
    assert moving_variance_error(BN, synchronized=True) > 0.3


def test_a_million_samples_of_large_mean():
    """TensorFlow adds in one go, and its mean is off by 9.6 here: 96 deviations.

    Axis by axis 2048 additions follow each other, each off by u of the sum: w = 2048 u
    of it at most. The first mean is then off by s = 1000 w. The deviations from it, of
    mean size d = s + 0.1 at most, add up with an error of w d each, so that is what the
    corrected mean is off by (and half a unit in its last place). The squares have the
    mean 0.01 + s^2, off by 2 w of it, and the correction s^2 is off by 2 s w d.
    """
    rng = np.random.default_rng(0)
    x = MEAN + DEVIATION * rng.normal(size=(1024, 1024, 2))
    x = x.astype("float32")
    exact = x.astype("float64")
    layer = SyncBatchNormalization(momentum=0.0)
    layer(x, training=True)
    w = 2048 * UNIT_ROUND_OFF
    s = MEAN * w
    d = s + DEVIATION
    mean_bound = w * d + np.spacing(np.float32(MEAN)) / 2
    variance_bound = 2 * w * (DEVIATION**2 + s**2) + 2 * s * w * d
    assert mean_bound < DEVIATION / 1000 and variance_bound < DEVIATION**2 / 100
    error = np.abs(layer.moving_mean.numpy() - exact.mean((0, 1)))
    assert error.max() < mean_bound
    error = np.abs(layer.moving_variance.numpy() - exact.var((0, 1)))
    assert error.max() < variance_bound
    plain_mean = tf.nn.moments(tf.constant(x), [0, 1])[0].numpy()
    assert np.abs(plain_mean - exact.mean((0, 1))).max() > DEVIATION


def by_group(group_size, parts):
    """What one device makes of each group's samples: outputs and moving statistics."""
    outputs, statistics, counts = [], [], []
    for first in range(0, 4, group_size):
        part = np.concatenate(parts[first : first + group_size])
        layer = BN(dtype="float64", momentum=0.0)
        layer.build((None, C))
        results = forward_and_backward(layer)(tf.constant(part))
        outputs.append([v.numpy() for v in tf.nest.flatten(results)])
        statistics.append([v.numpy() for v in layer.non_trainable_weights])
        counts.append(len(part))
    return outputs, statistics, np.array(counts) / sum(counts)


@pytest.mark.parametrize("group_size", [1, 2, 4])
@pytest.mark.parametrize("make", [make_strategy, stock_strategy])
def test_groups_are_one_device_each(make, group_size):
    """In float64, so rounding (see test_sync_batch_norm.py) is far below 1e-10."""
    parts = np.split(samples((15, C)), [2, 7, 8])
    outputs, statistics, shares = by_group(group_size, parts)
    strategy = make(4)
    layer = built_under(strategy, group_size=group_size, dtype="float64", momentum=0.0)
    results = replica_function(strategy, forward_and_backward(layer))(parts)

    for place in (0, 1):  # outputs, and the gradient for x
        actual = np.concatenate([result[place] for result in results])
        expected = np.concatenate([output[place] for output in outputs])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)
    for place in (2, 3):  # gamma and beta, added over replicas by the optimizer
        actual = sum(result[place] for result in results)
        expected = sum(output[place] for output in outputs)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)
    for place, weight in enumerate(layer.non_trainable_weights):
        expected = sum(s * v[place] for s, v in zip(shares, statistics, strict=True))
        np.testing.assert_allclose(weight.numpy(), expected, rtol=0, atol=1e-10)
    assert_replicas_agree(layer)


def test_not_a_number_stays_in_its_group():
    parts = np.split(samples((16, C)), 4)
    parts[3][0, 0] = np.nan
    strategy = make_strategy(4)
    layer = built_under(strategy, group_size=2, dtype="float64")
    results = replica_function(strategy, forward_and_backward(layer))(parts)
    assert all(np.isfinite(v).all() for result in results[:2] for v in result)
    assert all(np.isnan(result[0][:, 0]).all() for result in results[2:])


def test_group_size_must_divide_the_number_of_replicas():
    strategy = make_strategy(4)
    layer = built_under(strategy, group_size=3)
    x = samples((4, C)).astype("float32")
    with pytest.raises(ConfigurationError, match=r"group_size=3.* 4 replica"):
        replica_function(strategy, forward(layer))([x] * 4)
    alone = SyncBatchNormalization(group_size=2)
    with pytest.raises(ConfigurationError, match=r"group_size=2.* 1 replica"):
        alone(x, training=True)
    alone(x)  # inference needs no group
