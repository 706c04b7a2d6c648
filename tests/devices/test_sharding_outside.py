"""A step that is taken outside of the replicas of a strategy that shards."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.errors import ConfigurationError


def fitted(shard, **options):
    """A model whose optimizer a fit has built, and a batch."""
    x = np.random.default_rng(1).normal(size=(8, 6)).astype("float32")
    strategy = tfdp.DataParallelStrategy(
        ["CPU:0", "CPU:1"], shard=shard, shard_min_bytes=0
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        model.compile(keras.optimizers.Adam(0.1, **options), "mse")
    model.fit(x, x[:, :4], batch_size=8, shuffle=False, verbose=0)
    return model, x


def step(model, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - x[:, :4]))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply(gradients, model.trainable_variables)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(
    "shard, told",
    [
        ("optimizer", "called outside of the strategy's replicas"),
        ("gradients", "called outside of the strategy's replicas"),
        ("parameters", "A gradient with respect to it"),
    ],
)
def test_it_is_refused_and_changes_nothing(shard, told, in_graph):
    model, x = fitted(shard)
    before = model.get_weights()
    taken = tf.function(step) if in_graph else step
    with pytest.raises(ConfigurationError, match=told):
        taken(model, x)
    for weight, same in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, same)
    model.fit(x, x[:, :4], batch_size=8, verbose=0)


def test_it_is_refused_where_gradients_are_accumulated():
    model, x = fitted("gradients", gradient_accumulation_steps=2)
    with pytest.raises(ConfigurationError, match="outside of the strategy's replicas"):
        for _ in range(2):
            step(model, x)


def test_what_reads_only_gives_the_whole():
    model, x = fitted("parameters")
    images = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(images)
        total = tf.reduce_sum(model(images))
    expected = np.tile(model.get_weights()[0].sum(1), (8, 1))
    # Sums of four numbers below 2.
    np.testing.assert_allclose(tape.gradient(total, images), expected, atol=1e-6)


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_averages_become_the_weights_at_the_end(shard):
    """Keras hands the whole average to an update of each variable."""

    def trained(scope, optimizer):
        with scope:
            keras.utils.set_random_seed(3)
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
            model.compile(optimizer(), "mse")
        model.fit(x, x[:, :4], batch_size=8, epochs=3, shuffle=False, verbose=0)
        return model.get_weights()

    def inner():
        return keras.optimizers.Adam(0.1, epsilon=1e-3, use_ema=True)

    x = np.random.default_rng(1).normal(size=(24, 6)).astype("float32")
    strategy = tfdp.DataParallelStrategy(
        ["CPU:0", "CPU:1"], shard=shard, shard_min_bytes=0
    )
    several = trained(strategy.scope(), lambda: tfdp.DistributedOptimizer(inner()))
    one = trained(contextlib.nullcontext(), inner)
    for weight, expected in zip(several, one, strict=True):
        # 9 updates of 0.1 on gradients that are rounded at 1e-7, over epsilon.
        np.testing.assert_allclose(weight, expected, atol=1e-4)
