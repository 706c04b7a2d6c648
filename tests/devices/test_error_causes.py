"""What TensorFlow's errors say, and what is kept of it as the reason of a failure."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp.cluster.crash_report import cause_of


class Gathers(keras.layers.Layer):
    """Reads a column that is not there."""

    def call(self, x):
        return tf.gather(x, [7], axis=1)


def rows():
    yield np.ones((2, 4), "float32"), np.ones((2, 1), "float32")
    raise ValueError("row 17 is broken")


@pytest.mark.parametrize(
    "where, cause",
    [
        ("layer", "indices[0] = 7 is not in [0, 4)"),
        ("input", "ValueError: row 17 is broken"),
    ],
)
def test_the_cause_is_not_the_stack(where, cause):
    layer = Gathers() if where == "layer" else keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile("sgd", "mse")
    specs = tf.TensorSpec((2, 4)), tf.TensorSpec((2, 1))
    data = tf.data.Dataset.from_generator(rows, output_signature=specs)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        model.fit(data, verbose=0)
    assert len(str(caught.value)) > 300
    assert cause_of(str(caught.value)) == cause
