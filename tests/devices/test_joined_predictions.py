"""Outputs of `predict` that are not one value for each row; beside one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import make_strategy
from tfdp.errors import ConfigurationError

ROWS = np.arange(36, dtype="float32").reshape(9, 4) / 10


class Outputs(keras.Model):
    """Returns `take(model, x)`."""

    def __init__(self, take):
        super().__init__()
        self.take = take
        self.temperature = self.add_weight(shape=(1,), initializer="ones")

    def call(self, x):
        return self.take(self, x)


def several(model, x):
    return {
        "logits": 2.0 * x,
        "temperature": 3.0 * model.temperature,
        "number": tf.reduce_sum(model.temperature),
        "not a number": tf.math.log(-model.temperature),
        "table": tf.ones([5, 2]) * model.temperature,
        "width": tf.shape(x)[1],
        "tokens": tf.reshape(x, [-1, 2]),  # two of each row
        # Rows by their number alone; no value of the batch is in them.
        "ones": tf.ones([tf.shape(x)[0], 1]),
    }


def predicted(strategy, take, batch, rows=ROWS, **options):
    with strategy.scope():
        model = Outputs(take)
        model.compile(**{"jit_compile": False, **options})
    data = tf.data.Dataset.from_tensor_slices(rows)
    data = data.batch(batch, drop_remainder=len(rows) % batch == 0)
    return model.predict(data, verbose=0)


@pytest.mark.parametrize(
    "replicas, rows, batch, options",
    [
        (2, 9, 4, {}),  # the last batch has one row, and one replica none
        (4, 8, 8, {}),  # of known size: two rows a replica
        (2, 9, 9, {}),
        (2, 8, 4, {"run_eagerly": True}),
        (2, 8, 4, {"steps_per_execution": 2}),
    ],
    ids=str,
)
def test_what_all_replicas_have_alike_is_returned_once(replicas, rows, batch, options):
    one = predicted(
        tf.distribute.get_strategy(), several, batch, ROWS[:rows], **options
    )
    mine = predicted(make_strategy(replicas), several, batch, ROWS[:rows], **options)
    for name, value in one.items():
        np.testing.assert_array_equal(mine[name], value, err_msg=name)


@pytest.mark.parametrize(
    "take",
    [lambda model, x: {"mine": tf.transpose(x)[:3]}, lambda m, x: [tf.reduce_mean(x)]],
    ids=["transposed", "mean"],
)
def test_what_depends_on_the_rows_and_has_none_is_refused(take):
    words = "the output (mine|0) .*not one value for each row"
    with pytest.raises(ConfigurationError, match=words):
        predicted(make_strategy(2), take, 4)


def test_rows_of_another_size_on_each_replica_are_refused():
    def take(model, x):
        lengths = tf.cast(x[:, 0] * 10, tf.int32) // 4 + 1
        return tf.sequence_mask(lengths)  # as wide as the longest

    with pytest.raises(ConfigurationError, match=r"the output .*to_tensor\(shape="):
        predicted(make_strategy(2), take, 4)


def test_what_each_row_draws_is_joined():
    def take(model, x):
        return tf.random.uniform([tf.shape(x)[0], 3])

    assert predicted(make_strategy(2), take, 4, ROWS[:8]).shape == (8, 3)


def test_one_batch_is_predicted_once():
    with make_strategy(2).scope():
        model = Outputs(several)
    found = model.predict_on_batch(ROWS)
    assert found["logits"].shape == (9, 4)
    assert found["temperature"].tolist() == [3.0] and found["number"].shape == ()
