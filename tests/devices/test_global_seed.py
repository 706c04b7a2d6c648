"""`keras.random` without a seed inside a layer: Keras' global generator."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy
from tests.support.tpu_stand_in import StandInStrategy


class Noise(keras.layers.Layer):
    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x))


def predictions(strategy, rows=8):
    """Three passes of `predict`, whose replicas have four rows each."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Noise(), keras.layers.Dense(2)])
        model.compile("sgd", "mse", jit_compile=False)
    x = np.zeros((rows, 3), "float32")
    model.fit(x, np.zeros((rows, 2)), batch_size=8, epochs=2, verbose=0)
    return model, [model.predict(x, batch_size=8, verbose=0) for _ in range(3)]


def noises(strategy, calls=3):
    keras.utils.set_random_seed(5)

    @tf.function
    def step():
        return strategy.run(lambda: keras.random.normal((64,)))

    return [
        [part.numpy() for part in strategy.experimental_local_results(step())]
        for _ in range(calls)
    ]


def test_a_layer_that_draws_without_a_seed_trains_and_predicts():
    _, passes = predictions(make_strategy(2))
    rows = np.concatenate(passes)
    assert len(np.unique(rows, axis=0)) == len(rows) == 24


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_draw_apart_and_replica_0_as_one_device(replicas):
    several = noises(make_strategy(replicas))
    alone = noises(tf.distribute.get_strategy())
    for parts, (one,) in zip(several, alone, strict=True):
        np.testing.assert_array_equal(parts[0], one)
    drawn = np.concatenate(several)
    assert len(np.unique(drawn, axis=0)) == 3 * replicas
    np.testing.assert_array_equal(several, noises(make_strategy(replicas)))


def test_identical_draws_when_asked():
    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], draws_per_replica=False)
    for a, b in noises(strategy):
        np.testing.assert_array_equal(a, b)


def test_strategies_and_one_device_go_on_in_one_process():
    """The seeds of a later model are those that they would be without the strategy."""

    def kernels(first):
        keras.utils.set_random_seed(5)
        keras.random.normal((2,))  # made before, and of no strategy
        with first.scope():
            layer = keras.layers.Dense(3)
            layer.build((None, 2))
        noise = tf.function(lambda: first.run(lambda: keras.random.normal((4,))))()
        later = keras.layers.Dense(3)
        later.build((None, 2))
        mine = first.experimental_local_results(noise)[0]
        return [layer.kernel.numpy(), later.kernel.numpy(), mine.numpy()]

    alone = kernels(tf.distribute.get_strategy())
    for replicas in (2, 3):
        for a, b in zip(alone, kernels(make_strategy(replicas)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_on_tpu_the_draws_are_those_of_mirrored_replicas():
    np.testing.assert_array_equal(noises(StandInStrategy(2)), noises(make_strategy(2)))


@pytest.mark.parametrize("make", [make_strategy, StandInStrategy])
def test_stored_states_stay_equal(make):
    strategy = make(3)
    noises(strategy)
    generator = keras.src.random.seed_generator.global_seed_generator()
    with strategy.scope():
        copies = [copy.numpy().tolist() for copy in generator.state.value.values]
    assert copies == [copies[0]] * 3
