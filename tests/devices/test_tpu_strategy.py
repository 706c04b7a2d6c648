"""`TPUDataParallelStrategy` over a stand-in for the TPU (`tests/support/tpu_stand_in`).

One traced function serves all replicas, the rank a tensor in it; batches have fixed
shapes; the replicas never leave their context.
"""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support import tpu_stand_in
from tests.support.parity import (
    UNIT_ROUND_OFF,
    classification_data,
    dense_model,
    largest_difference,
    make_strategy,
    normalizing_model,
    rounding_bound,
    train,
)
from tests.support.tpu_stand_in import StandInStrategy
from tfdp.errors import CollectiveError, ConfigurationError, ScopeError
from tfdp.exchange.reducer import Reducer
from tfdp.exchange.tpu import CrossReplica
from tfdp.strategies.tpu import TPUDataParallelExtended


def test_keras_sees_a_tpu_strategy():
    from keras.src.backend.tensorflow import trainer

    strategy = StandInStrategy(2)
    assert isinstance(strategy, tf.distribute.TPUStrategy)
    assert trainer._is_tpu_strategy(strategy)
    assert not trainer._is_tpu_multi_host(strategy)
    per_replica = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(float(context.replica_id_in_sync_group))
    )
    logs = trainer.reduce_per_replica({"loss": per_replica}, strategy, "auto")
    assert logs["loss"].numpy() == 0.0  # the first replica's


@pytest.mark.quick
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("samples", [96, 53, 25], ids=lambda n: f"{n} samples")
def test_training_equals_one_device(replicas, samples):
    data = classification_data(samples=samples)

    def optimizer():
        return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)

    one, history_one = train(None, optimizer=optimizer, data=data, metrics=["accuracy"])
    several, history = train(
        StandInStrategy(replicas), optimizer=optimizer, data=data, metrics=["accuracy"]
    )
    # Clipping holds each gradient below 0.5; a momentum of 0.9 adds up to ten of them.
    # The effect of a short batch taken for a whole one is a share of an update: 1e-2.
    steps = 2 * -(-samples // 24)
    bound = rounding_bound(one, steps, 24, gradient_bound=0.5, learning_rate=0.5)
    assert largest_difference(one, several) <= bound < 1e-3
    assert history.keys() == history_one.keys()
    for key, values in history_one.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5)


def test_evaluate_and_predict_equal_one_device():
    data = classification_data(samples=53)
    one, _ = train(None, data=data, metrics=["accuracy"], epochs=1)
    several, _ = train(StandInStrategy(4), data=data, metrics=["accuracy"], epochs=1)
    several.set_weights(one.get_weights())
    x, y = data
    expected = one.evaluate(x, y, batch_size=24, verbose=0, return_dict=True)
    report = several.evaluate(x, y, batch_size=24, verbose=0, return_dict=True)
    for key, value in expected.items():
        np.testing.assert_allclose(report[key], value, rtol=1e-5)
    rows = several.predict(x, batch_size=24, verbose=0)
    assert rows.shape == (53, 5)
    # Two matrix products with sums of 12 and 33 terms, inputs to 10, weights below 1.
    np.testing.assert_allclose(
        rows, one.predict(x, batch_size=24, verbose=0), atol=450 * UNIT_ROUND_OFF
    )


def test_a_short_batch_is_traced_by_nobody():
    traces = []

    class Counting(keras.layers.Layer):
        def call(self, inputs):
            traces.append(tuple(inputs.shape))
            return inputs

    def build():
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((12,)), Counting(), keras.layers.Dense(5)])

    def use(samples):
        x, y = classification_data(samples=samples)
        model.fit(x, y, batch_size=24, epochs=2, verbose=0)
        model.evaluate(x, y, batch_size=24, verbose=0)
        model.predict(x, batch_size=24, verbose=0)

    model, _ = train(StandInStrategy(4), build, data=classification_data(samples=29))
    use(29)
    # Four replicas' parts of 24 rows, and the rows that Keras does not know when it
    # builds a model.
    assert set(traces) == {(6, 12), (None, 12)}
    before = len(traces)
    use(77)  # three whole batches, and the same short one
    use(49)  # two, and another
    assert traces[before:] == []


@pytest.mark.parametrize("steps_per_execution", [2, 3])
def test_several_steps_in_one_call(steps_per_execution):
    data = classification_data(samples=125)  # 6 batches, the last of 5 rows
    one, _ = train(None, data=data)
    several, _ = train(
        StandInStrategy(2), data=data, steps_per_execution=steps_per_execution
    )
    # 12 updates with a momentum of 0.9 (up to ten gradients, each below 3) of 0.05.
    bound = rounding_bound(one, 12, 24, gradient_bound=3, learning_rate=0.5)
    assert largest_difference(one, several) <= bound < 1e-2


@pytest.mark.parametrize("wrapped", [False, True])
def test_accumulation_equals_larger_batches(wrapped):
    def accumulating():
        if not wrapped:
            return keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        return tfdp.DistributedOptimizer(
            keras.optimizers.Adam(0.01), accumulate_steps=2
        )

    one, _ = train(None, optimizer=lambda: keras.optimizers.Adam(0.01))
    several, _ = train(StandInStrategy(2), optimizer=accumulating, batch_size=12)
    # Adam divides by the root of the second moment: 8 updates of 0.01, whose relative
    # rounding is that of sums of 24 + 66 terms, taken twice: 8 * 0.01 * 180 u, and
    # ten times that where a gradient is a tenth of its terms.
    assert largest_difference(one, several) <= 8 * 0.01 * 1800 * UNIT_ROUND_OFF


@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("reads_on_a_tpu", [False, True])
def test_files_hold_what_all_cores_have_accumulated(shard, reads_on_a_tpu, tmp_path):
    x, y = classification_data(samples=72)

    def compiled(on_a_tpu):
        strategy = StandInStrategy(2, shard=shard) if on_a_tpu else None
        with (strategy or tf.distribute.get_strategy()).scope():
            return normalizing_model(
                keras.optimizers.SGD(0.05, gradient_accumulation_steps=3)
            )

    model, other = compiled(True), compiled(reads_on_a_tpu)
    model.fit(x[:24], y[:24], batch_size=12, shuffle=False, verbose=0)
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    state = [*model.optimizer.variables, *model.non_trainable_variables]
    again = [*other.optimizer.variables, *other.non_trainable_variables]
    for mine, theirs in zip(state, again, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
        copies = [copy.numpy() for copy in getattr(mine.value, "values", [mine])]
        if "gradient_accumulator" in mine.path:
            assert np.abs(copies[0] - copies[1]).max() > 1e-3
            np.testing.assert_allclose(mine.numpy(), sum(copies), rtol=1e-6)
        elif "moving" in mine.path:
            np.testing.assert_array_equal(copies[0], copies[1])
    if not reads_on_a_tpu:
        return
    for trained in (model, other):
        trained.fit(x[24:36], y[24:36], batch_size=12, shuffle=False, verbose=0)
    # One update, of a sum that was rounded once more.
    assert largest_difference(model, other) < 1e-6


def test_each_replica_draws_what_a_mirrored_one_would():
    def draws(strategy):
        with strategy.scope():
            seed = keras.random.SeedGenerator(7)

        @tf.function
        def step():
            return strategy.run(lambda: keras.random.uniform((3,), seed=seed))

        first, second = step(), step()
        local = strategy.experimental_local_results
        return np.stack([*local(first), *local(second)]), seed.state.value

    mirrored, mirrored_state = draws(make_strategy(4))
    on_tpu, tpu_state = draws(StandInStrategy(4))
    np.testing.assert_array_equal(on_tpu, mirrored)
    assert len(np.unique(on_tpu)) == on_tpu.size
    # Stored alike on every replica.
    for copy in tpu_state.values:
        np.testing.assert_array_equal(copy, mirrored_state.values[0])


def test_identical_draws_on_request():
    strategy = StandInStrategy(2, draws_per_replica=False)
    with strategy.scope():
        seed = keras.random.SeedGenerator(7)

    @tf.function
    def step():
        return strategy.run(lambda: keras.random.uniform((3,), seed=seed))

    first, second = strategy.experimental_local_results(step())
    np.testing.assert_array_equal(first, second)


def test_moving_statistics_are_those_of_all_samples():
    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [
                keras.Input((12,)),
                tfdp.layers.SyncBatchNormalization(momentum=0.5),
                keras.layers.Dense(5),
            ]
        )

    data = classification_data(samples=53)
    one, _ = train(None, build, data=data, epochs=1)
    several, _ = train(StandInStrategy(4), build, data=data, epochs=1)
    for a, b in zip(one.weights, several.weights, strict=True):
        # Three updates of 0.05 (momentum 0.9: up to ten gradients below 5), each with
        # sums of 24 + 24 rows apart: 3 * 0.5 * 5 * 96 u = 4e-5.
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=720 * UNIT_ROUND_OFF)
        copies = {copy.numpy().tobytes() for copy in b.value.values}
        assert len(copies) == 1


def test_moving_statistics_of_each_replica_are_brought_together():
    """Plain batch normalization: each replica has statistics of its own rows."""

    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [
                keras.Input((12,)),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Dense(5),
            ]
        )

    data = classification_data(samples=48)  # whole batches: the same rows on both
    mirrored, _ = train(make_strategy(2), build, data=data, epochs=1)
    on_tpu, _ = train(StandInStrategy(2), build, data=data, epochs=1)
    for a, b in zip(mirrored.weights, on_tpu.weights, strict=True):
        # The same numbers, added by another engine: two terms for each sum.
        np.testing.assert_allclose(b.numpy(), a.numpy(), atol=40 * UNIT_ROUND_OFF)
        assert len({copy.numpy().tobytes() for copy in b.value.values}) == 1


def test_gradients_travel_in_bfloat16_on_request():
    exact, _ = train(StandInStrategy(2), epochs=1)
    rounded, _ = train(StandInStrategy(2, wire_dtype="bfloat16"), epochs=1)
    difference = largest_difference(exact, rounded)
    # Four updates of 0.05 with momentum (1 + 1.9 + 2.71 + 3.44 gradients), each below
    # 3 and rounded to 8 bits, twice (each replica's part, and their sum).
    assert 1e-6 < difference <= 0.05 * 9.05 * 3 * 2 * 2.0**-8
    assert {weight.dtype for weight in rounded.weights} == {"float32"}


def test_float16_loss_scaling_agrees_over_replicas():
    x, y = classification_data(samples=24)
    x[-1, 0] = np.inf  # the last replica's
    with StandInStrategy(2).scope():
        keras.config.set_dtype_policy("mixed_float16")
        model = dense_model()
        model.compile(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    before = model.get_weights()
    model.fit(x, y, batch_size=24, verbose=0)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert model.optimizer.dynamic_scale.numpy() == 2.0**14


class TensorFlowsOwn(StandInStrategy):
    """Nothing stands in but the CPUs: `tpu.replicate` itself makes the graph."""

    def _make_extended(self, tpu):
        extended = TPUDataParallelExtended(
            self,
            tpu_stand_in.Resolver(2),
            functools.partial(CrossReplica, wire_dtype=self.given["wire_dtype"]),
            device_assignment=tpu_stand_in.Assignment(2),
        )
        extended._device_assignment = None
        return extended

    def _run(self, *given):
        return tfdp.TPUDataParallelStrategy._run(self, *given)


@pytest.mark.parametrize("packed", [False, True])
def test_tensorflow_builds_the_program_for_all_cores(packed):
    """It cannot run here, but everything that a TPU would be handed is built."""
    strategy = TensorFlowsOwn(2, wire_dtype="bfloat16")
    strategy._enable_packed_variable_in_eager_mode = packed
    with strategy.scope():
        model = dense_model()
        model.compile(
            keras.optimizers.SGD(global_clipnorm=1.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model.optimizer.build(model.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices(classification_data(samples=11))
    batch = next(iter(strategy.experimental_distribute_dataset(dataset.batch(8))))

    @tf.function(autograph=False)
    def step(data):
        return strategy.run(model.train_step, args=(data,))

    graph = step.get_concrete_function(batch).graph
    kinds = collections.Counter(op.type for op in graph.get_operations())
    assert kinds["TPUReplicateMetadata"] == 1
    sums = [op for op in graph.get_operations() if op.type == "CrossReplicaSum"]
    # One for each of four gradients, in half of the bytes, and nothing else.
    assert sorted(tuple(op.inputs[0].shape) for op in sums) == sorted(
        tuple(weight.shape) for weight in model.trainable_weights
    )
    assert {op.inputs[0].dtype for op in sums} == {tf.bfloat16}


def test_an_eager_step_is_refused():
    strategy = StandInStrategy(2)
    x, y = classification_data(samples=24)
    with strategy.scope():
        model = dense_model()
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    with pytest.raises(ConfigurationError, match="run_eagerly=False"):
        model.fit(x, y, verbose=0)


def test_what_cores_cannot_add_is_refused():
    reducer = Reducer(CrossReplica(2))
    with pytest.raises(CollectiveError, match="int64"):
        reducer.all_reduce([tf.constant([1], tf.int64)], 0)


def test_the_first_replicas_value_reaches_all():
    strategy = StandInStrategy(4)
    values = {
        "int64": tf.constant([-(2**40), 5], tf.int64),
        "bool": tf.constant([True, False]),
        "float32": tf.constant([np.nan, -2.5]),
    }

    @tf.function
    def step():
        def replica():
            context = tf.distribute.get_replica_context()
            rank = context.replica_id_in_sync_group
            reducer = strategy.extended.reducer
            others = {"int64": 7, "bool": True, "float32": np.inf}
            return {
                name: reducer.broadcast(
                    tf.where(rank == 0, value, tf.cast(others[name], value.dtype)), rank
                )
                for name, value in values.items()
            }

        return strategy.run(replica)

    for name, result in step().items():
        for copy in strategy.experimental_local_results(result):
            np.testing.assert_array_equal(copy, values[name])


def test_a_model_of_another_strategy_is_refused():
    x, y = classification_data(samples=24)
    strategy = StandInStrategy(2)
    with strategy.scope():
        model = dense_model()
    model.compile("sgd", "mse")
    with pytest.raises((ScopeError, ValueError)):
        model.fit(x, y, verbose=0)


def test_saved_and_loaded_weights_are_the_same(tmp_path):
    model, _ = train(StandInStrategy(2), epochs=1)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    for a, b in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    for a, b in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
