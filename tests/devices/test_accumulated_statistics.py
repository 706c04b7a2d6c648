"""Moving statistics in an accumulation: as on one device, and on all replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy

EVERY = 4
OPTIMIZERS = {
    "keras": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=EVERY),
    "distributed": lambda: tfdp.DistributedOptimizer(
        keras.optimizers.SGD(0.05), accumulate_steps=EVERY
    ),
}


def normalization_after(strategy, optimizer, rows, **options):
    """A layer that has seen `rows` in batches of 8, on the raw inputs."""
    rng = np.random.default_rng(0)
    # Rows grow: replicas that weigh them wrongly are far off.
    x = (rng.normal(size=(rows, 3)) + 1) * np.arange(1, rows + 1)[:, None] / rows
    with strategy.scope():
        keras.utils.set_random_seed(5)
        layer = keras.layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(2)])
        model.compile(OPTIMIZERS[optimizer](), "mse", **options)
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(8)
    model.fit(dataset, verbose=0)
    return layer


@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("rows", [24, 29], ids=["half-way", "uneven"])
def test_the_moving_mean_is_that_of_one_device(rows, run_eagerly, optimizer, shard):
    strategy = make_strategy(3, shard=shard)
    found = normalization_after(strategy, optimizer, rows, run_eagerly=run_eagerly)
    one = normalization_after(tf.distribute.get_strategy(), optimizer, rows)
    # Four means of at most 8 numbers below 4.
    np.testing.assert_allclose(found.moving_mean, one.moving_mean, rtol=0, atol=1e-6)
    for variable in (found.moving_mean, found.moving_variance):
        first, *others = (copy.numpy() for copy in variable.value.values)
        for other in others:
            np.testing.assert_array_equal(first, other)
