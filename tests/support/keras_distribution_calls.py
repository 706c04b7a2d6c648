"""What programs do with `keras.distribution` that tfdp obeys; asserts inside."""

# ruff: noqa: E402

import contextlib
import os
import sys

import tfdp

tfdp.obey_keras_distribution()
tfdp.obey_keras_distribution()

import keras
import numpy as np
import tensorflow as tf
from keras.distribution import (
    DataParallel,
    DeviceMesh,
    LayoutMap,
    ModelParallel,
    get_device_count,
    list_devices,
    set_distribution,
)

# What follows must not have started TensorFlow's runtime.
assert list_devices() == ["cpu:0"] and list_devices("gpu") == []
tfdp.use_virtual_devices(4)
assert list_devices("cpu") == [f"cpu:{i}" for i in range(4)]
assert get_device_count() == 4
x = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")


def parallel(devices=None, **options):
    layout = LayoutMap(DeviceMesh((2, 2), ["data", "model"], devices))
    layout[".*up/kernel"] = (None, "model")
    return ModelParallel(layout_map=layout, **options)


def build():
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, name="up"), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    return model


def block_of(model):
    return model.get_layer("up").kernel.value.values[0].shape


def strategy():
    return tf.distribute.get_strategy()


@contextlib.contextmanager
def refused(kind, words):
    before = strategy(), keras.distribution.distribution()
    try:
        yield
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was refused: {words}")
    assert (strategy(), keras.distribution.distribution()) == before


def scopes():
    """A distribution keeps its strategy, and inner scopes end as they began."""
    outer, inner = parallel(), DataParallel()
    with outer.scope():
        whole, model = strategy(), build()
        with contextlib.suppress(KeyError), inner.scope():
            assert strategy() is not whole and strategy().num_replicas_in_sync == 4
            assert "parts" not in repr(strategy())
            raise KeyError
        assert strategy() is whole and block_of(model) == (6, 4)
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
    assert not tf.distribute.has_strategy()
    model.fit(x, x[:, :1], batch_size=8, verbose=0)


def files_and_none():
    """What trained in parts is saved whole, and read without a distribution."""
    set_distribution(parallel())
    model = build()
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    model.save(sys.argv[1])
    predicted = model.predict(x, verbose=0)
    assert model.evaluate(x, x[:, :1], verbose=0) > 0
    assert block_of(keras.models.load_model(sys.argv[1])) == (6, 4)
    set_distribution(None)
    assert not tf.distribute.has_strategy()
    read = keras.models.load_model(sys.argv[1])
    np.testing.assert_allclose(read.predict(x, verbose=0), predicted, rtol=1e-5)
    read.fit(x, x[:, :1], batch_size=8, verbose=0)


def batches():
    """16 rows in batches of 4 on 2 x 2 devices: 4 steps, which count each row once."""
    set_distribution(parallel())
    model, steps = build(), []
    seen = keras.metrics.MeanMetricWrapper(lambda target, output: target, name="seen")
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[seen])
    noted = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    # The sum of 16 powers of 2 has another value if one counts twice, or not.
    targets = 2.0 ** np.arange(16)
    fitted = model.fit(x[:16], targets, batch_size=4, verbose=0, callbacks=[noted])
    assert steps == [0, 1, 2, 3]
    assert fitted.history["seen"] == [(2.0**16 - 1) / 16]
    set_distribution(None)


def some_devices():
    set_distribution(DataParallel(devices=["cpu:1", "cpu:2"]))
    assert strategy().num_replicas_in_sync == 2
    set_distribution(None)


def refusals():
    with refused(tfdp.errors.DeviceError, "There is no device 'gpu:0'"):
        set_distribution(parallel([f"gpu:{i}" for i in range(4)]))
    with refused(tfdp.errors.ConfigurationError, "distribute_datasets_from_function"):
        set_distribution(parallel(auto_shard_dataset=False))
    keras.distribution.initialize("10.0.0.1:1234", 1, 0)
    with refused(tfdp.errors.ConfigurationError, "tfdp launch --workers 2"):
        keras.distribution.initialize("10.0.0.1:1234", 2, 0)
    os.environ["KERAS_DISTRIBUTION_NUM_PROCESSES"] = "3"
    with refused(tfdp.errors.ConfigurationError, "tfdp launch --workers 3"):
        keras.distribution.initialize()


for check in (refusals, scopes, files_and_none, batches, some_devices):
    check()
print("all done")
