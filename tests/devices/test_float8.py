"""Layers of float8, whose scales Keras overwrites by their gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import (
    classification_data,
    make_strategy,
    train,
    unequal_copies,
)
from tfdp.errors import ConfigurationError


def float8_model():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(5),
        ]
    )
    model.quantize("float8")
    return model


def steps_of(strategy, steps, optimizer=lambda: keras.optimizers.SGD(0.1)):
    x, y = classification_data(12 * steps)
    x[7] *= 9  # not a row of the first replica
    model, _ = train(strategy, float8_model, optimizer, (x, y), 12, epochs=1)
    return model


def overwritten(model):
    return [w for w in model.weights if getattr(w, "overwrite_with_gradient", False)]


MADE = {
    "2": lambda: make_strategy(2),
    "3-tensorflow": lambda: make_strategy(3, engine="tensorflow"),
    "2x2": lambda: make_strategy(4, hierarchy=(2, 2)),
    # `make_strategy` shards the smallest variables as well.
    "3-shards": lambda: tfdp.DataParallelStrategy(
        [f"CPU:{i}" for i in range(3)], shard="optimizer"
    ),
}


@pytest.fixture(scope="module")
def one():
    return steps_of(None, 1)


@pytest.mark.parametrize("made", MADE)
def test_histories_are_those_of_the_whole_batch(made, one):
    several = steps_of(MADE[made](), 1)
    assert len(overwritten(several)) == 12
    for theirs, mine in zip(overwritten(one), overwritten(several), strict=True):
        # Gradients come in bfloat16: 8 bits, half of the last one off, twice.
        np.testing.assert_allclose(mine, theirs, rtol=2**-8, err_msg=mine.path)
    inputs = one.layers[0].inputs_amax_history.numpy()
    assert several.layers[0].inputs_amax_history.numpy().tolist() == inputs.tolist()


@pytest.mark.parametrize("accumulation", [None, 2])
def test_replicas_keep_one_scale(accumulation):
    """After four steps all copies have the same bits."""

    def optimizer():
        return keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulation)

    model = steps_of(make_strategy(3), 4, optimizer)
    assert unequal_copies(model.weights) == []
    largest = float(np.max(np.abs(classification_data(48)[0][7] * 9)))
    history = model.layers[0].inputs_amax_history.numpy()
    assert history.max() == pytest.approx(largest, rel=2**-8)


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_a_history_in_shards_is_refused(shard):
    with pytest.raises(ConfigurationError, match="shard_min_bytes"):
        steps_of(make_strategy(2, shard=shard), 1)


def test_an_optimizer_that_adds_up_is_refused():
    def optimizer():
        return tfdp.DistributedOptimizer(keras.optimizers.SGD(0.1))

    with pytest.raises(ConfigurationError, match="a value to store"):
        steps_of(make_strategy(2), 1, optimizer)
    with pytest.raises(ConfigurationError, match="a value to store"):
        steps_of(tf.distribute.get_strategy(), 1, optimizer)
