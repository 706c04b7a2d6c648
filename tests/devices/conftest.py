"""Four logical CPUs for every test of this folder."""

import signal

import pytest
import tensorflow as tf

_CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    _CPU, [tf.config.LogicalDeviceConfiguration()] * 4
)


@pytest.fixture(autouse=True)
def _clean_session():
    import keras

    keras.config.set_dtype_policy("float32")
    # Not the garbage: TensorFlow keeps so much that looking for it takes a second.
    keras.utils.clear_session(free_memory=False)
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def heard():
    """Ctrl-C is heard, though the shell that runs the tests may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
