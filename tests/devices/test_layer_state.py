"""What layers store: one device's value where there is a rule, else a warning."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.conformance_fits import rows
from tests.support.parity import copies, make_strategy, train
from tfdp.errors import ConfigurationError, LocalStateWarning

ops = keras.ops
UPDATES = {
    "mean": lambda v, x: v.assign(0.9 * v + 0.1 * ops.mean(ops.square(x))),
    "sum": lambda v, x: v.assign_add(ops.sum(ops.square(x))),
    "rows": lambda v, x: v.assign_add(ops.cast(ops.sum(x[:, 0] > 0), v.dtype)),
    "rows less": lambda v, x: v.assign_sub(ops.cast(ops.sum(x[:, 0] > 0), v.dtype)),
    "rows twice": lambda v, x: (
        v.assign_add(ops.cast(ops.sum(x[:, 0] > 0), v.dtype)),
        v.assign_sub(2 * ops.cast(ops.sum(x[:, 1] > 0), v.dtype)),
    ),
    "rows wide": lambda v, x: v.assign_add(
        tf.reduce_sum(tf.cast(x[:, 0] > 0, wider(v.dtype)))
    ),
    "batches": lambda v, x: v.assign_add(1.0),
    "maximum": lambda v, x: v.assign(ops.maximum(v, ops.max(x))),
    "all's maximum": lambda v, x: v.assign(ops.maximum(v, maximum_of_all(x))),
    "average of sums": lambda v, x: v.assign(0.9 * v + 0.1 * ops.sum(x)),
    "average of products": lambda v, x: v.assign(
        0.9 * v + 0.1 * ops.matmul(ops.transpose(x[:, :1]), x[:, 1:2])[0, 0]
    ),
    "average of einsum": lambda v, x: v.assign(
        0.9 * v + 0.1 * ops.einsum("ri,rj->ij", x[:, :1], x[:, 1:2])[0, 0]
    ),
    "average of segments": lambda v, x: v.assign(
        0.9 * v + 0.1 * ops.segment_sum(x[:, 0], ops.cast(x[:, 1] > 0, "int32"), 2)[0]
    ),
    "average of squares": lambda v, x: v.assign(0.9 * v + 0.1 * tf.nn.l2_loss(x)),
    "average of counts": lambda v, x: v.assign(
        0.9 * v
        + ops.cast(
            ops.bincount(ops.cast(x[:, 1] > 0, "int32"), minlength=2)[0], v.dtype
        )
    ),
    "mean of products": lambda v, x: v.assign(
        0.9 * v + 0.1 * ops.mean(ops.matmul(x, ops.ones((12, 3))))
    ),
    "mean by products": lambda v, x: v.assign(
        0.9 * v + ops.matmul(ops.transpose(x), x)[0, 0] / number_of(x)
    ),
    "mean by einsum": lambda v, x: v.assign(
        0.9 * v + ops.einsum("bi,bj->i", x, x)[0] / number_of(x)
    ),
    "mean by times": lambda v, x: v.assign(
        0.9 * v + ops.sum(x[:, 0]) * (1.0 / number_of(x))
    ),
    "mean by ones": lambda v, x: v.assign(
        0.9 * v + ops.sum(x[:, 0]) / ops.sum(ops.ones_like(x[:, 0]))
    ),
    "mean by segments": lambda v, x: v.assign(
        0.9 * v
        + tf.math.unsorted_segment_sum(x[:, 0], tf.argmax(x, -1), 12)[0] / number_of(x)
    ),
    "queue": lambda v, x: v.assign(ops.concatenate([x[:, 0], v])[:5]),
    "queue of all": lambda v, x: v.assign(ops.concatenate([all_of(x)[:, 0], v])[:5]),
    "quotient": lambda v, x: v.assign(ops.mean(x[:, 0]) / ops.mean(ops.abs(x[:, 1]))),
    "threshold": lambda v, x: v.assign(v + 0.1 * ops.sign(ops.mean(x))),
    "projection": lambda v, x: v.assign(
        (ops.mean(x, axis=0, keepdims=True) @ ops.ones((12, 1)))[0, 0]
    ),
    "average of all's sums": lambda v, x: v.assign(0.9 * v + 0.1 * sum_of_all(x)),
}


def sum_of_all(x):
    total = ops.sum(x)
    if not tf.distribute.in_cross_replica_context() and tf.distribute.has_strategy():
        total = tf.distribute.get_replica_context().all_reduce("sum", total)
    return total


def number_of(x):
    return ops.cast(ops.shape(x)[0], x.dtype)


def all_of(x):
    if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
        return x
    return tf.distribute.get_replica_context().all_gather(x, axis=0)


def wider(dtype):
    return {"float32": "float64", "int32": "int64"}[dtype]


def maximum_of_all(x):
    return ops.max(all_of(x))


class Storing(keras.layers.Layer):
    def __init__(self, update, **options):
        super().__init__()
        self.update, self.options = UPDATES[update], options

    def build(self, shape):
        options = {"shape": (), "trainable": False, **self.options}
        self.stored = self.add_weight(initializer="zeros", **options)

    def call(self, inputs, training=False):
        if training:
            self.update(self.stored, inputs)
        return inputs


def stored(strategy, update, options, **compile_options):
    def build():
        layers = [keras.Input((12,)), Storing(update, **options)]
        return keras.Sequential([*layers, keras.layers.Dense(5)])

    data = rows()
    # Three batches; the last leaves one replica without a row.
    model, _ = train(
        strategy,
        build,
        data=(data["x"], data["y"]),
        batch_size=7,
        epochs=1,
        **compile_options,
    )
    return copies(model.layers[0].stored)


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize(
    "update, options",
    [
        ("mean", {}),
        ("mean", {"aggregation": "mean"}),
        ("sum", {"aggregation": "sum"}),
        ("rows", {"aggregation": "sum", "dtype": "int32"}),
        ("batches", {}),
        ("batches", {"aggregation": "only_first_replica"}),
        ("mean of products", {}),
        ("projection", {}),
        ("mean by products", {}),
        ("mean by einsum", {}),
        ("mean by times", {}),
        ("mean by ones", {}),
        ("mean by segments", {}),
        ("queue of all", {"shape": (5,)}),
    ],
    ids=[
        "mean-none",
        "mean-mean",
        "sum-sum",
        "rows-sum",
        "batches-none",
        "batches-first",
        "mean of products-none",
        "projection-none",
        "mean by products-none",
        "mean by einsum-none",
        "mean by times-none",
        "mean by ones-none",
        "mean by segments-none",
        "queue of all-none",
    ],
)
def test_has_one_devices_value(update, options):
    (one,) = stored(None, update, options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalStateWarning)
        copies = stored(make_strategy(2), update, options)
    np.testing.assert_array_equal(copies[0], copies[1])
    # 15 rows of 12 squares: 180 u.
    np.testing.assert_allclose(copies[0], one, rtol=2e-5)


@pytest.mark.parametrize("update", ["rows", "rows less", "rows twice", "rows wide"])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
def test_replicas_add_up_what_they_add(replicas, dtype, update, eager):
    """Keras hands over the sum; how it was taken tells what was added."""
    options = {"aggregation": "sum", "dtype": dtype}
    (one,) = stored(None, update, options)
    assert abs(one) > 3
    strategy = make_strategy(replicas)
    for copy in stored(strategy, update, options, run_eagerly=eager):
        # A third of a float thrice, after each of three batches: 9 u.
        np.testing.assert_allclose(copy, one, rtol=1e-6)


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize(
    "update, remedy",
    [
        ("sum", "aggregation='sum'"),
        ("maximum", "all_rows"),
        ("average of sums", "all_sum"),
        ("average of products", "all_sum"),
        ("average of einsum", "all_sum"),
        ("average of segments", "all_sum"),
        ("average of squares", "all_sum"),
        ("average of counts", "all_sum"),
        ("queue", "all_rows"),
        ("quotient", "all_rows"),
        ("threshold", "all_rows"),
    ],
)
def test_what_is_no_mean_over_rows_is_told(update, remedy):
    options = {"shape": (5,)} if update == "queue" else {}
    with pytest.warns(LocalStateWarning, match=remedy):
        stored(make_strategy(2), update, options)


class Maxima(keras.layers.Layer):
    def build(self, shape):
        options = {"shape": (), "trainable": False, "initializer": "zeros"}
        self.maxima = [self.add_weight(name=f"max_{i}", **options) for i in range(5)]

    def call(self, inputs, training=False):
        if training:
            for column, maximum in enumerate(self.maxima):
                maximum.assign(ops.maximum(maximum, ops.max(inputs[:, column])))
        return inputs


def test_variables_of_one_fault_share_a_sentence():
    def build():
        layers = [keras.Input((12,)), Maxima(), keras.layers.Dense(5)]
        return keras.Sequential(layers)

    data = rows()
    with pytest.warns(LocalStateWarning) as told:
        train(make_strategy(2), build, data=(data["x"], data["y"]), batch_size=8)
    [message] = [str(one.message) for one in told if one.category is LocalStateWarning]
    assert message.count("a running maximum") == 1
    assert "max_0" in message and "and 2 more" in message and "max_3" not in message


@pytest.mark.parametrize("update", ["average of all's sums", "all's maximum"])
def test_what_was_taken_over_all_is_not_told(update):
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalStateWarning)
        copies = stored(make_strategy(2), update, {})
    assert copies[0] == copies[1]


def mean_over_all(y):
    both = ops.concatenate(
        [ops.sum(y, axis=0), tf.cast(tf.shape(y)[:1], y.dtype)], axis=0
    )
    total = tf.distribute.get_replica_context().all_reduce("sum", both)
    return total[:-1] / total[-1]


def mean_of_gathered(y):
    return ops.mean(tf.distribute.get_replica_context().all_gather(y, 0), axis=0)


CENTERS = {
    "own": lambda y: ops.mean(y, axis=0),
    "summed": mean_over_all,
    "gathered": mean_of_gathered,
}


class StoresLate(keras.Model):
    """A centre of the targets, kept when the weights are updated already."""

    def __init__(self, updates=True, center="own"):
        super().__init__()
        self.dense, self.updates = keras.layers.Dense(5), updates
        self.center_of = CENTERS[center]
        self.center = self.add_weight(shape=(5,), initializer="zeros", trainable=False)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y - self.center, y_pred=self(x))
        if self.updates:
            variables = self.dense.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.center.assign(0.9 * self.center + 0.1 * self.center_of(y))
        return {"loss": loss}


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("updates", [True, False])
@pytest.mark.parametrize("center", CENTERS)
def test_what_is_stored_behind_the_update_is_one_devices(center, updates, replicas):
    def trained(strategy):
        with strategy.scope():
            keras.utils.set_random_seed(2)
            model = StoresLate(updates, center)
            model.compile("sgd", "mse", jit_compile=False)
        data = rows()
        y = np.random.default_rng(3).normal(size=(len(data["x"]), 5)).astype("float32")
        # The last batch leaves replicas without a row.
        with warnings.catch_warnings():
            warnings.simplefilter("error", LocalStateWarning)
            model.fit(data["x"], y, batch_size=7, epochs=2, shuffle=False, verbose=0)
        return model

    one, model = trained(tf.distribute.get_strategy()), trained(make_strategy(replicas))
    for mine, theirs in zip(model.weights, one.weights, strict=True):
        copies = {copy.numpy().tobytes() for copy in mine.value.values}
        assert len(copies) == 1
        # Centres differ by 0.1 and more where each replica keeps its own.
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=0, atol=2e-6)


def in_a_loop(model, x):
    strategy = model.distribute_strategy
    batches = tf.data.Dataset.from_tensor_slices(x).batch(8)
    call = tf.function(lambda batch: strategy.run(model, (batch,)))
    for batch in strategy.experimental_distribute_dataset(batches):
        call(batch)


WITH_ROW_STATE = {
    "layer": lambda: keras.layers.GRU(3, stateful=True),
    "wrapper": lambda: keras.layers.Bidirectional(keras.layers.LSTM(2, stateful=True)),
    "cells": lambda: keras.layers.RNN(
        [keras.layers.GRUCell(3), keras.layers.SimpleRNNCell(2)], stateful=True
    ),
    "nested": lambda: keras.Sequential([keras.layers.SimpleRNN(2, stateful=True)]),
}


@pytest.mark.parametrize("own_rows", [8, 4])  # of the batch, or of a replica
@pytest.mark.parametrize("kind", WITH_ROW_STATE)
def test_state_of_single_rows_is_refused(kind, own_rows):
    """By the layer's name; one device carries it from batch to batch."""
    x = rows(16)["x"].reshape((16, 1, 12))
    with make_strategy(2).scope():
        shape = keras.Input(batch_shape=(own_rows, 1, 12))
        layers = [shape, WITH_ROW_STATE[kind](), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse", jit_compile=False)
    y = np.zeros((16, 1))
    uses = [
        lambda: model.fit(x, y, batch_size=8, verbose=0),
        lambda: model.evaluate(x, y, batch_size=8, verbose=0),
        lambda: model.predict(x, batch_size=8, verbose=0),
        lambda: model.predict_on_batch(x[:own_rows]),
        lambda: in_a_loop(model, x),
    ]
    for use in uses:
        with pytest.raises(ConfigurationError, match=r"layer '\w+' has stateful=True"):
            use()


def test_state_of_single_rows_on_one_replica_is_carried():
    x = rows(16)["x"].reshape((16, 1, 12))

    def predicted(strategy):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            layers = [keras.Input(batch_shape=(8, 1, 12)), WITH_ROW_STATE["layer"]()]
            model = keras.Sequential(layers)
        return model.predict(x, batch_size=8, verbose=0)

    one = predicted(tf.distribute.get_strategy())
    np.testing.assert_array_equal(predicted(make_strategy(1)), one)


@pytest.mark.parametrize("synchronized", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_a_mask_ends_the_synchronization_of_keras_layer(masked, synchronized):
    """Which is told; of a layer that has none nothing is."""

    def build():
        layers = [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(9, 4, mask_zero=masked),
            keras.layers.BatchNormalization(synchronized=synchronized),
            keras.layers.GlobalAveragePooling1D(),
        ]
        return keras.Sequential([*layers, keras.layers.Dense(5)])

    rng = np.random.default_rng(1)
    data = rng.integers(1, 9, (14, 6)), rng.integers(0, 5, 14)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LocalStateWarning)
        train(make_strategy(2), build, data=data, batch_size=7, epochs=1)
    told = [str(one.message) for one in caught if one.category is LocalStateWarning]
    assert len(told) == (1 if masked and synchronized else 0)
    assert all("tfdp.layers.SyncBatchNormalization" in one for one in told)
