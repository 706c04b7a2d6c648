"""The warning about input that does not keep up."""

import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy
from tfdp.callbacks import input_watch
from tfdp.errors import ConfigurationError, SlowInputWarning


def dataset(seconds):
    """Batches that take so long to make."""

    def wait(x):
        time.sleep(seconds)
        return x

    numbers = tf.data.Dataset.from_tensor_slices(np.ones((48, 4), "float32")).batch(4)
    if seconds:
        numbers = numbers.map(lambda x: tf.numpy_function(wait, [x], tf.float32))
        numbers = numbers.map(lambda x: tf.ensure_shape(x, (None, 4)))
    return numbers.map(lambda x: (x, x[:, :1]))


def fit(data, epochs=2, units=1):
    with make_strategy(2).scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", jit_compile=False)
    watch = tfdp.callbacks.InputWatch(data, batches=5)
    model.fit(data, epochs=epochs, callbacks=[watch], verbose=0)
    return watch


def test_slow_input_is_told(monkeypatch):
    # On a busy machine steps may take as long as input: what is told of is set lower.
    monkeypatch.setattr(input_watch, "MOST_SHARE", 0.2)
    with pytest.warns(SlowInputWarning, match="devices wait for data"):
        # 400 ms for a batch; 12 in an epoch.
        watch = fit(dataset(0.4))
    assert 0.2 <= watch.share <= 1.5


def test_fast_input_is_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowInputWarning)
        # 1 ms and less for a batch; a layer of 200,000 units takes several.
        watch = fit(dataset(0.0), units=200_000)
    assert watch.share < 0.8


def test_one_epoch_measures_nothing():
    assert fit(dataset(0.0), epochs=1).share is None


@pytest.mark.parametrize("arguments", [([1],), (dataset(0.0), 1), (dataset(0.0), True)])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ConfigurationError, match="Received"):
        tfdp.callbacks.InputWatch(*arguments)
