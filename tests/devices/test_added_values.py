"""What layers give `add_loss` as values of rows: Keras adds them up, over all replicas.

The reference is one device on the whole batch.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, make_strategy
from tfdp.errors import LocalMeanWarning

# Batches of 8, 8 and 5: on 4 replicas 2 each, then 2, 1, 1, 1; of 17 the last has a
# row on one replica alone, and the others compute on a borrowed one.
FEATURES = 12


class Adds(keras.layers.Layer):
    def __init__(self, take):
        super().__init__()
        self.take = take

    def call(self, inputs):
        self.add_loss(self.take(inputs))
        return inputs


def ctc(inputs):
    """As keras.io's readers of handwriting do, one column: nothing shows the rows."""
    rows = tf.shape(inputs)[0]
    logits = tf.reshape(inputs, [rows, 3, 4])
    loss = tf.nn.ctc_loss(
        tf.ones([rows, 1], tf.int32),
        logits,
        tf.ones([rows], tf.int32),
        tf.fill([rows], 3),
        logits_time_major=False,
        blank_index=0,
    )
    return 0.01 * loss[:, None]


VALUES = {
    "rows": lambda x: 0.01 * tf.reduce_sum(tf.square(x), axis=-1),
    "column": lambda x: 0.01 * tf.reduce_sum(tf.abs(x), axis=-1, keepdims=True),
    "whole numbers": lambda x: tf.cast(x[:, 0] > 0, tf.int32),
    # These are numbers of all rows: means over them, and a penalty of no row.
    "number": lambda x: tf.reduce_mean(tf.square(x)),
    "one": lambda x: tf.reshape(tf.reduce_mean(tf.square(x)), [1]),
    "penalty": lambda x: tf.fill([7], 0.1),
}
# Where no graph shows it, these may be either.
GRAPH = {
    "tokens": lambda x: tf.reshape(0.01 * tf.square(x), [-1, 3]),  # 4 of each row
    "columns": lambda x: 0.1 * tf.reduce_mean(tf.square(x), axis=0),
}


def trained(strategy, takes, rows, batch, *, is_nested=False, loss=True, **options):
    count = options.pop("accumulate", None)
    with strategy.scope():
        keras.utils.set_random_seed(3)
        inner = [keras.layers.Dense(12), *map(Adds, takes)]
        layers = [keras.Sequential(inner)] if is_nested else inner
        model = keras.Sequential(
            [keras.Input((FEATURES,)), *layers, keras.layers.Dense(5)]
        )
        model.compile(
            keras.optimizers.SGD(0.01, gradient_accumulation_steps=count),
            keras.losses.SparseCategoricalCrossentropy(True) if loss else None,
            **{"jit_compile": False, **options},
        )
    data = tf.data.Dataset.from_tensor_slices(classification_data(rows))
    data = data.batch(batch, drop_remainder=rows % batch == 0)
    history = model.fit(data, epochs=2, verbose=0).history["loss"]
    return [*model.get_weights(), np.array(history), model.evaluate(data, verbose=0)]


def check(found, expected):
    for one, other in zip(found, expected, strict=True):
        # Updates of some 0.01 and losses of some 5, off by float32 sums of a few
        # hundred terms, 2e-5 of them; a mean in the place of a sum moves a weight by
        # half or twice of its updates, and a loss by 0.1.
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.worth_seconds(30)
@pytest.mark.parametrize(
    "replicas, rows, batch, options",
    [
        (4, 21, 8, {}),
        (2, 16, 8, {}),  # batches of known size, 4 rows a replica
        (4, 17, 8, {"is_nested": True}),
        (2, 21, 8, {"run_eagerly": True}),
        (2, 21, 8, {"jit_compile": True}),
        (2, 16, 8, {"jit_compile": True}),
        (2, 21, 8, {"shard": "parameters"}),
        (2, 24, 4, {"accumulate": 2}),
    ],
    ids=str,
)
def test_values_of_rows_are_added_up_and_numbers_are_means(
    replicas, rows, batch, options
):
    options = dict(options)
    shard = options.pop("shard", "none")
    is_seen = not options.get("jit_compile")
    takes = [*VALUES.values(), *(GRAPH.values() if is_seen else ())]
    one = trained(tf.distribute.get_strategy(), takes, rows, batch, **options)
    devices = [f"CPU:{rank}" for rank in range(replicas)]
    strategy = tfdp.DataParallelStrategy(devices, shard=shard)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        check(trained(strategy, takes, rows, batch, **options), one)


def test_a_loss_of_which_nothing_shows_the_rows_is_added_up():
    one = trained(tf.distribute.get_strategy(), [ctc], 21, 8, loss=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        check(trained(make_strategy(4), [ctc], 21, 8, loss=False), one)


class PenalizesItsWeights(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(4,), initializer="ones")

    def call(self, inputs):
        self.add_loss(0.1 * self.scale**2)
        return inputs


def test_a_penalty_as_long_as_the_rows_is_told_of_where_no_graph_tells():
    x, y = classification_data(8)
    with make_strategy(2).scope():
        model = keras.Sequential(
            [keras.Input((12,)), PenalizesItsWeights(), keras.layers.Dense(5)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=True)
    with pytest.warns(LocalMeanWarning, match="both that of a weight and as long as"):
        model.fit(x, y, batch_size=8, verbose=0)
