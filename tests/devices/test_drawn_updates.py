"""Optimizers that draw random numbers: each copy of a weight gets the same ones."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import (
    copies,
    dense_model,
    largest_difference,
    make_strategy,
    train,
)
from tfdp.errors import LocalStateWarning


class Langevin(keras.optimizers.SGD):
    """Gradients with noise, by what `draw` makes of a shape."""

    is_elementwise = True  # for shards

    def build(self, variables):
        super().build(variables)
        self.noise = keras.random.SeedGenerator(3)

    def draw(self, shape):
        return keras.random.normal(shape, seed=self.noise)

    def update_step(self, gradient, variable, learning_rate):
        noise = 0.1 * self.draw(gradient.shape)
        super().update_step(gradient + noise, variable, learning_rate)


class ByTensorFlow(Langevin):
    def draw(self, shape):
        return tf.random.normal(shape)


def assert_copies_are_alike(model):
    for weight in model.weights:
        first, *others = copies(weight)
        for other in others:
            np.testing.assert_array_equal(other, first)


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=["", "eager"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_draw_as_one_device(replicas, options):
    def of(strategy):
        return train(strategy, optimizer=lambda: Langevin(0.05, 0.9), **options)[0]

    one = of(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalStateWarning)
        several = of(make_strategy(replicas))
    # 8 updates of 0.05 times gradients below 1, with momentum.
    assert largest_difference(one, several) < 1e-5
    assert_copies_are_alike(several)
    plain, _ = train(None, optimizer=lambda: keras.optimizers.SGD(0.05, 0.9))
    assert largest_difference(one, plain) > 1e-2  # the noise is there


def test_a_draw_without_a_generator_is_alike():
    class Global(Langevin):
        def draw(self, shape):
            return keras.random.normal(shape)

    model, _ = train(make_strategy(3), optimizer=lambda: Global(0.05))
    assert_copies_are_alike(model)


class InFunction(Langevin):
    @tf.function
    def draw(self, shape):
        return tf.random.normal(shape)


class RandomRate(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.05 * tf.random.uniform([])


@pytest.mark.parametrize(
    "make",
    [
        lambda: ByTensorFlow(0.05),
        lambda: InFunction(0.05),
        lambda: keras.optimizers.SGD(RandomRate()),
    ],
    ids=["step", "function", "rate"],
)
def test_a_draw_by_tensorflow_is_told_of(make):
    match = f"{type(make()).__name__} draws.*SeedGenerator"
    with pytest.warns(LocalStateWarning, match=match):
        train(make_strategy(2), optimizer=make, epochs=1)


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_shards_are_given_draws_of_their_own(shard):
    """Of one weight in shards; what is whole everywhere stays alike."""

    def build():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(64, name="wide"), keras.layers.Dense(5)]
        return keras.Sequential([keras.Input((12,)), *layers])

    class NoiseAlone(Langevin):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(0.0 * gradient, variable, learning_rate)

    strategy = make_strategy(2, shard=shard)
    before = [w.numpy() for w in build().weights]
    model, _ = train(strategy, build, optimizer=lambda: NoiseAlone(1.0), epochs=1)
    kernel = (model.get_weights()[0] - before[0]).reshape(-1)
    halves = np.split(kernel, 2)
    assert np.abs(kernel).min() > 0
    assert not np.allclose(*halves)
    if shard == "optimizer":
        assert_copies_are_alike(model)


def test_layers_still_draw_apart():
    strategy = make_strategy(2)
    with strategy.scope():
        noise = keras.random.SeedGenerator(3)
        model = dense_model()
    first, second = strategy.run(lambda: keras.random.normal((4,), seed=noise)).values
    assert not np.allclose(first, second) and model.built
