"""jit_compile=True: XLA compiles each replica's compute, exchanges stay outside."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import (
    classification_data,
    dense_model,
    make_strategy,
)
from tfdp.errors import CollectiveError


def train(strategy, build=dense_model, jit_compile=True, samples=53, loss=None):
    x, y = classification_data(samples=samples)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = build()
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5),
            loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=jit_compile,
        )
    history = model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0)
    return model, history.history


@pytest.mark.parametrize("replicas, options", [(2, {}), (4, {"hierarchy": (2, 2)})])
def test_compiled_replicas_equal_one_device(replicas, options):
    one, history_one = train(None, jit_compile=False)
    several, history = train(make_strategy(replicas, **options))
    for a, b in zip(one.weights, several.weights, strict=True):
        # XLA fuses and so rounds elsewhere: 6 updates of 0.5 * 0.5 (clipped), with
        # sums of up to 33 terms in each: 6 * 0.25 * 66 u.
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(history["loss"], history_one["loss"], rtol=1e-5)
    assert history["accuracy"] == pytest.approx(history_one["accuracy"])


@pytest.mark.worth_seconds(8)
def test_each_replica_has_a_compiled_function_and_no_exchange_in_it():
    strategy = make_strategy(2, engine="tensorflow")
    model, _ = train(strategy)
    x, y = classification_data(samples=24)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(24)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))

    @tf.function
    def step(data):
        return strategy.run(model.train_step, args=(data,))

    graph = step.get_concrete_function(batch).graph
    calls = [
        op
        for op in graph.get_operations()
        if op.type in ("PartitionedCall", "StatefulPartitionedCall")
        and op.get_attr("_XlaMustCompile")
    ]
    assert sorted(op.device[-5:] for op in calls) == ["CPU:0", "CPU:1"]
    for op in calls:
        body = op.graph._get_function(op.get_attr("f").name).cached_definition
        kinds = {node.op for node in body.node_def}
        assert "MatMul" in kinds
        assert not any(kind.startswith("Collective") for kind in kinds)


def test_dropout_and_batch_normalization_compile():
    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [
                keras.Input((12,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(5),
            ]
        )

    model, history = train(make_strategy(2), build)
    assert np.isfinite(history["loss"]).all()
    for variable in model.non_trainable_variables:
        copies = [component.numpy() for component in variable.value.values]
        np.testing.assert_array_equal(copies[0], copies[1])


def test_an_exchange_inside_is_refused():
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    x, y = classification_data(samples=24)
    with make_strategy(2).scope():
        model = dense_model()
        model.compile("sgd", loss, jit_compile=True)
    with pytest.raises(CollectiveError, match="jit_compile=False"):
        model.fit(x, y, sample_weight=np.ones(24), batch_size=24, verbose=0)


def test_activation_checkpointing_composes():
    def build():
        keras.utils.set_random_seed(3)
        with keras.RematScope(mode="activations"):
            return keras.Sequential(
                [
                    keras.Input((12,)),
                    keras.layers.Dense(33, activation="tanh"),
                    keras.layers.Dense(5),
                ]
            )

    one, _ = train(None, build, jit_compile=False)
    for jit_compile in (False, True):
        several, _ = train(make_strategy(2), build, jit_compile=jit_compile)
        for a, b in zip(one.weights, several.weights, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("call", ["predict", "predict_on_batch"])
def test_an_unbuilt_model_may_predict_first(call):
    """On one device TensorFlow makes its variables before XLA compiles the call."""
    x, _ = classification_data(samples=7)

    def predicted(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(2)])
            model.compile("sgd", "mse", jit_compile=True)
        return getattr(model, call)(x)

    # Two layers with inputs of at most 12 and 4 terms: 2 x 16 u of values below 20.
    expected = predicted(tf.distribute.get_strategy())
    np.testing.assert_allclose(predicted(make_strategy(2)), expected, atol=1e-4)


def test_copies_of_a_variable_that_compiled_code_makes_start_as_one_draw():
    strategy = make_strategy(3)
    made = []

    @tf.function(jit_compile=True)
    def compiled(x):
        if not made:
            made.append(tf.Variable(lambda: tf.random.normal([2, 3])))
        return x * tf.reduce_sum(made[0])

    @tf.function
    def step():
        return strategy.run(lambda: compiled(tf.constant(2.0)))

    results = strategy.experimental_local_results(step())
    copies = [copy.numpy() for copy in made[0].values]
    assert len(copies) == 3 and np.ptp(copies[0]) > 0
    for copy, result in zip(copies, results, strict=True):
        np.testing.assert_array_equal(copy, copies[0])
        # The sum of six values, of which none is above 6: 36 u, twice.
        np.testing.assert_allclose(result, 2 * copy.sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
def test_a_gradient_may_lose_its_shape_on_one_replica(engine):
    """As some that XLA compiles do; buckets must be cut alike on all of them."""
    strategy = make_strategy(3, engine=engine)
    with strategy.scope():
        weights = [keras.Variable(tf.zeros(size)) for size in (3, 5)]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(weights)

    def in_replica():
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        gradients = [tf.fill(w.shape, 1.0 + tf.cast(rank, tf.float32)) for w in weights]
        if tf.get_static_value(rank) == 2:
            gradients[0] = tf.raw_ops.PlaceholderWithDefault(
                input=gradients[0], shape=None
            )
            assert gradients[0].shape.rank is None
        optimizer.apply(gradients, weights)

    tf.function(lambda: strategy.run(in_replica))()
    for weight in weights:
        for copy in weight.value.values:
            np.testing.assert_array_equal(copy.numpy(), -6.0)
