"""Whole gradients at shard="gradients" are computed in turn: few are there at once."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import classification_data, make_strategy, train
from tfdp._private.step_ops import delay

LAYERS = 5


def deep_model():
    keras.utils.set_random_seed(3)
    hidden = [keras.layers.Dense(33, "relu", use_bias=False) for _ in range(LAYERS)]
    return keras.Sequential([keras.Input((33,)), *hidden])


def data():
    x, y = classification_data(features=33, classes=33)
    return x, y


def made_late(stage, engine):
    """How many products of a step wait for something besides their factors."""
    strategy = make_strategy(2, stage, bucket_bytes=1, engine=engine)
    with strategy.scope():
        model = deep_model()
        model.compile(
            "adam", keras.losses.SparseCategoricalCrossentropy(True), jit_compile=False
        )
        model.optimizer.build(model.trainable_variables)
    batch = tf.data.Dataset.from_tensor_slices(data()).batch(24, drop_remainder=True)
    (batch,) = strategy.experimental_distribute_dataset(batch.take(1))

    @tf.function(autograph=False)
    def step(batch):
        strategy.run(model.train_step, args=(batch,))

    graph = step.get_concrete_function(batch).graph
    return sum(
        op.type == "MatMul" and bool(op.control_inputs) for op in graph.get_operations()
    )


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
def test_gradients_wait_for_the_sums_of_earlier_ones(engine):
    # Of each replica all but those of the first two buckets, a layer each.
    assert made_late("gradients", engine) == 2 * (LAYERS - 2)
    assert made_late("optimizer", engine) == 0


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
@pytest.mark.parametrize("clipnorm", [None, 0.5])
def test_turns_change_no_bit(engine, clipnorm):
    trained = []
    for stage in ("none", "optimizer", "gradients"):
        strategy = make_strategy(2, stage, bucket_bytes=1, engine=engine)
        model, _ = train(
            strategy,
            build=deep_model,
            optimizer=lambda: keras.optimizers.Adam(0.01, clipnorm=clipnorm),
            data=data(),
        )
        trained.append(model.get_weights())
    whole, optimizer, gradients = trained
    for a, b in zip(optimizer, gradients, strict=True):
        np.testing.assert_array_equal(a, b)
    # Each of two replicas adds two terms; a norm over shards has another order.
    for a, b in zip(whole, gradients, strict=True):
        assert clipnorm or np.array_equal(a, b)


def test_the_product_behind_a_cast_and_a_weight_is_delayed():
    with tf.Graph().as_default():
        x = tf.ones([3, 3])
        product = x @ x
        other = tf.sqrt(x)
        assert delay(tf.cast(product * 2.0, tf.float16), [other])
        assert product.op.control_inputs == [other.op]


def test_what_is_used_already_is_not_delayed():
    with tf.Graph().as_default():
        x = tf.ones([3, 3])
        product, waited_for = x @ x, x @ x
        tf.sqrt(product)
        with tf.control_dependencies([waited_for]):
            tf.sqrt(x)
        for tensor in (product, waited_for):
            assert not delay(tensor, [tf.exp(x)])
            assert not tensor.op.control_inputs


def test_what_is_no_product_is_not_delayed():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [3, 3])
        assert not delay(x, [tf.sqrt(x)])
        assert not delay(tf.sqrt(x), [tf.exp(x)])
