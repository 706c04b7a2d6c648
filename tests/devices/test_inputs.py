"""Inputs that stock Keras cannot even start on under a strategy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    make_strategy,
    train,
)


@pytest.mark.parametrize("samples", [1, 3, 5, 7])
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_first_batch_that_does_not_divide(samples, replicas):
    x, y = classification_data(samples=samples)
    one, _ = train(None, data=(x, y), batch_size=8)
    several, _ = train(make_strategy(replicas), data=(x, y), batch_size=8)
    several.set_weights(one.get_weights())
    expected = one.evaluate(x, y, batch_size=8, verbose=0)
    assert several.evaluate(x, y, batch_size=8, verbose=0) == pytest.approx(
        expected, rel=1e-5
    )
    assert several.predict(x, batch_size=8, verbose=0).shape == (samples, 5)


def string_input():
    x = np.array(["ab", "cd", "ef", "ab", "gh", "cd", "ef"] * 3)
    vocabulary = ["ab", "cd", "ef", "gh"]

    def build():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((), dtype="string")
        lookup = keras.layers.StringLookup(vocabulary=vocabulary)
        embedded = keras.layers.Embedding(6, 4)(lookup(inputs))
        return keras.Model(inputs, keras.layers.Dense(3)(embedded))

    return x, build


def bool_input():
    x = np.random.default_rng(0).random((21, 5)) > 0.5

    def build():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((5,), dtype="bool")
        numbers = keras.ops.cast(inputs, "float32")
        return keras.Model(inputs, keras.layers.Dense(3)(numbers))

    return x, build


def sparse_input():
    dense = np.random.default_rng(0).random((21, 6)).astype("float32")
    dense[dense < 0.5] = 0
    x = tf.sparse.from_dense(dense)

    def build():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,), sparse=True)
        return keras.Model(inputs, keras.layers.Dense(3)(inputs))

    return x, build


class MeanOfRagged(keras.Model):
    """The mean over each row of a ragged batch, then a dense layer."""

    def __init__(self):
        super().__init__()
        self.head = keras.layers.Dense(3)

    def call(self, x):
        if isinstance(x, tf.RaggedTensor):
            x = tf.reduce_mean(x, axis=1, keepdims=True)
        return self.head(tf.ensure_shape(x, (None, 1)))


def ragged_input():
    rng = np.random.default_rng(0)
    rows = [rng.random(n).astype("float32") for n in rng.integers(1, 6, 21)]
    x = tf.ragged.constant([row.tolist() for row in rows])

    def build():
        keras.utils.set_random_seed(0)
        model = MeanOfRagged()
        model.build((None, 1))
        return model

    return x, build


@pytest.mark.parametrize("make", [string_input, bool_input, sparse_input, ragged_input])
def test_strings_bools_sparse_and_ragged_train_evaluate_predict(make):
    x, build = make()
    y = np.arange(21) % 3
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
    features = dataset.map(lambda x, y: x)

    def run(strategy):
        with (strategy or tf.distribute.get_strategy()).scope():
            model = build()
            model.compile(
                keras.optimizers.SGD(0.1),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
                jit_compile=False,
            )
        # 18 rows in three batches of 6: every replica has 3 of each.
        model.fit(dataset.take(3), epochs=2, shuffle=False, verbose=0)
        return (
            model,
            model.evaluate(dataset, verbose=0),
            model.predict(features, verbose=0),
        )

    one, evaluated_one, predicted_one = run(None)
    several, evaluated, predicted = run(make_strategy(2))
    # 6 steps at rate 0.1 with gradients below 1 over 6 rows: far below 1e-6 each.
    assert largest_difference(one, several) < 1e-6
    np.testing.assert_allclose(evaluated, evaluated_one, rtol=1e-5)
    np.testing.assert_allclose(predicted, predicted_one, atol=1e-5)


def test_a_users_own_mean_of_a_batch_is_still_a_mean():
    """Only Keras' build gets one replica's part; a reduction stays a reduction."""
    strategy = make_strategy(2)
    values = strategy.experimental_distribute_values_from_function(
        lambda c: tf.constant([1.0, 5.0]) * (c.replica_id_in_sync_group + 1.0)
    )
    np.testing.assert_array_equal(
        strategy.reduce("MEAN", values, axis=None), [1.5, 7.5]
    )
    np.testing.assert_array_equal(
        strategy.reduce("SUM", values, axis=None), [3.0, 15.0]
    )
    assert float(strategy.reduce("MEAN", values, axis=0)) == 4.5


def test_a_model_without_input_shape_is_built_from_the_first_batch():
    def build():
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.layers.Dense(9), keras.layers.Dense(5)])

    one, _ = train(None, build)
    several, _ = train(make_strategy(2), build)
    assert largest_difference(one, several) < 1e-5
    assert dense_model().count_params() != several.count_params()


def test_an_unbuilt_model_may_predict_sparse_batches_first():
    """It is built from the length of their rows, also where a replica gets none."""
    dense = np.random.default_rng(0).random((7, 6)).astype("float32")
    rows = tf.sparse.from_dense(np.where(dense < 0.5, 0, dense))
    batches = tf.data.Dataset.from_tensor_slices(rows).batch(3)

    def predicted(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(4)])
        return model.predict(batches, verbose=0)

    expected = predicted(tf.distribute.get_strategy())
    # Sums of six products below 1, rounded in another order: 12 u.
    np.testing.assert_allclose(predicted(make_strategy(2)), expected, atol=1e-6)
