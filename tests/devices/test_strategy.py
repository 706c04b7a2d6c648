"""The strategy through Keras: each feature against one device on the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    make_strategy,
    rounding_bound,
    stock_strategy,
    train,
)
from tfdp.errors import ConfigurationError, DeviceError

STRATEGIES = [
    pytest.param(2, {}, id="2"),
    pytest.param(4, {}, id="4"),
    pytest.param(4, {"hierarchy": (2, 2)}, id="2x2"),
    pytest.param(2, {"engine": "tensorflow"}, id="2-tensorflow"),
    pytest.param(
        4,
        {
            "engine": "tensorflow",
            "hierarchy": (2, 2),
            "bucket_bytes": 1000,
            "first_bucket_bytes": 100,
        },
        id="2x2-tensorflow",
    ),
]


def sgd(**options):
    return lambda: keras.optimizers.SGD(0.05, momentum=0.9, **options)


# 96 rows in batches of 24 (12 when two are accumulated): 4 updates of 24 an epoch.
FEATURES = {
    "plain": {},
    "steps_per_execution": {"steps_per_execution": 3},
    "accumulation": {
        "optimizer": sgd(gradient_accumulation_steps=2),
        "batch_size": 12,
    },
    "accumulation-in-executions": {
        "optimizer": sgd(gradient_accumulation_steps=2),
        "batch_size": 12,
        "steps_per_execution": 4,
    },
    "ema": {"optimizer": sgd(use_ema=True, ema_momentum=0.9)},
    "ema-overwrite": {
        "optimizer": sgd(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)
    },
    "run_eagerly": {"run_eagerly": True},
    "adam": {"optimizer": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3)},
    "lars": {"optimizer": lambda: tfdp.optimizers.LARS(0.5)},
    "lamb": {"optimizer": lambda: tfdp.optimizers.LAMB(0.01)},
}


# Every feature on the plainest and the most involved strategy; a few in between.
IN_BETWEEN = ("plain", "accumulation")
MOST_INVOLVED = ("accumulation-in-executions", "ema-overwrite", "lamb", "plain")
CASES = [
    pytest.param(
        *strategy.values,
        feature,
        id=f"{strategy.id}-{feature}",
        marks=()
        if strategy.id != "2x2-tensorflow" or feature in MOST_INVOLVED
        else pytest.mark.slow,
    )
    for strategy in STRATEGIES
    for feature in FEATURES
    if strategy.id in ("2", "2x2-tensorflow") or feature in IN_BETWEEN
]


@pytest.mark.quick
@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("replicas, options, feature", CASES)
def test_weights_equal_one_device_on_the_whole_batch(replicas, options, feature):
    if feature == "run_eagerly" and replicas > 2:
        pytest.skip("eager replicas reduce on one device, whatever the engine")
    one, history_one = train(None, **FEATURES[feature])
    several, history = train(make_strategy(replicas, **options), **FEATURES[feature])
    # Gradients stay below 3 (features up to about 9, errors up to 1, mean over a
    # batch); momentum 0.9 multiplies the rate by 10. Adam and LAMB divide by
    # sqrt(v) + 1e-3 or so, bounded alike by their rate of 0.01.
    bound = rounding_bound(
        one, steps=8, batch_size=24, gradient_bound=3.0, learning_rate=0.5
    )
    assert bound < 5e-4
    assert largest_difference(one, several) <= bound
    np.testing.assert_allclose(history["loss"], history_one["loss"], rtol=1e-5)
    # The effect that the bound must not hide: one step of training.
    start = dense_model()
    assert largest_difference(start, one) > 10 * bound


@pytest.mark.parametrize("replicas, options", STRATEGIES)
def test_the_replicas_copies_stay_equal_bit_for_bit(replicas, options):
    """A difference of one bit would never be mended: no copy is ever sent."""
    model, _ = train(
        make_strategy(replicas, **options), optimizer=sgd(global_clipnorm=0.1)
    )
    for variable in model.weights:
        first, *others = [part.numpy() for part in variable.value.values]
        for other in others:
            np.testing.assert_array_equal(first, other)


@pytest.mark.worth_seconds(10)
def test_evaluate_and_predict_give_every_row_in_order():
    x, y = classification_data(samples=37)
    one, _ = train(None, data=(x, y), metrics=["accuracy"])
    several, _ = train(make_strategy(4), data=(x, y), metrics=["accuracy"])
    several.set_weights(one.get_weights())
    for batch_size in (8, 16, 37):
        np.testing.assert_allclose(
            several.evaluate(x, y, batch_size=batch_size, verbose=0),
            one.evaluate(x, y, batch_size=batch_size, verbose=0),
            rtol=1e-5,
        )
        # One dot product of 33 terms each way: 2 * 33 u of numbers below 10.
        np.testing.assert_allclose(
            several.predict(x, batch_size=batch_size, verbose=0),
            one.predict(x, batch_size=batch_size, verbose=0),
            atol=4e-5,
        )


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_one_batch_at_a_time_equals_one_device(run_eagerly):
    x, y = classification_data(samples=37)
    models = []
    for strategy in (None, make_strategy(3)):
        model, _ = train(strategy, data=(x, y), epochs=1, run_eagerly=run_eagerly)
        model.train_on_batch(x[:10], y[:10])
        models.append(model)
    one, several = models
    # Three updates of at most 0.05 with gradients below 10, about 60 terms each:
    # 3 * 0.05 * 10 * 60 u = 5e-6.
    assert largest_difference(one, several) < 5e-6
    expected = one.predict_on_batch(x)
    np.testing.assert_allclose(several.predict_on_batch(x), expected, atol=4e-5)
    assert abs(one.test_on_batch(x, y) - several.test_on_batch(x, y)) < 1e-5


def test_save_and_load_between_one_device_and_several(tmp_path):
    several, _ = train(make_strategy(2))
    several.save(tmp_path / "model.keras")
    one = keras.models.load_model(tmp_path / "model.keras")
    assert largest_difference(one, several) == 0.0
    with make_strategy(4).scope():
        four = keras.models.load_model(tmp_path / "model.keras")
    assert largest_difference(four, several) == 0.0
    for a, b in zip(several.optimizer.variables, four.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_is_a_mirrored_strategy():
    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:1"])
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    assert strategy.num_replicas_in_sync == 2
    assert tfdp.DataParallelStrategy().num_replicas_in_sync == 4
    assert tfdp.auto_strategy().engine_name == "in_process"


def test_one_host_is_worker_0_of_1():
    strategy = make_strategy(2)
    assert (strategy.cluster.rank, strategy.cluster.workers) == (0, 1)
    assert strategy.is_chief


def test_strategies_alike_and_unlike_live_in_one_process():
    """Stock strategies share collective keys; the second one poisons the process."""
    reference, _ = train(None)
    for engine in ("tensorflow", "in_process"):
        for replicas in (2, 4, 2):
            strategy = make_strategy(replicas, engine=engine)
            model, _ = train(strategy)
            assert largest_difference(reference, model) < 1e-5
    stock, _ = train(stock_strategy())
    assert largest_difference(reference, stock) < 1e-5
    model, _ = train(make_strategy(2, engine="tensorflow"))
    assert largest_difference(reference, model) < 1e-5


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
@pytest.mark.parametrize("other", ["float64", "float16"])
def test_two_types_in_one_model(engine, other):
    def mixed():
        keras.utils.set_random_seed(5)
        inputs = keras.Input((12,))
        a = keras.layers.Dense(8, dtype=other, activation="tanh")(inputs)
        b = keras.layers.Dense(8, dtype="float32", activation="tanh")(inputs)
        joined = keras.layers.Concatenate(dtype="float32")([a, b])
        return keras.Model(inputs, keras.layers.Dense(5)(joined))

    one, _ = train(None, mixed)
    several, _ = train(make_strategy(2, engine=engine), mixed)
    # The narrower type rounds activations, and with them every gradient: 8 updates
    # of at most 0.05 * 10 * 3, each off by a few of its unit round-offs.
    narrow = np.finfo(other if other == "float16" else "float32").eps
    assert largest_difference(one, several) < 8 * 0.5 * 3.0 * narrow


def test_optimizer_with_float16_policy_runs_in_replica_context():
    """float16 loss scaling counts inside a conditional, where merge_call fails."""
    keras.config.set_dtype_policy("mixed_float16")
    one, _ = train(None)
    several, _ = train(make_strategy(2))
    # Activations and gradients are rounded to float16 (u = 5e-4); 8 updates.
    assert largest_difference(one, several) < 8 * 0.5 * 3.0 * 2**-11
    assert int(several.optimizer.iterations.numpy()) == 8


@pytest.mark.parametrize(
    "devices, error, words",
    [
        (["CPU:9"], DeviceError, "no device 'CPU:9'.*Present.*CPU:0"),
        (["GPU:0"], DeviceError, "no device 'GPU:0'"),
        (["CPU:0", "/device:CPU:0"], DeviceError, "is repeated in devices="),
        ([], ConfigurationError, "non-empty list"),
        ("CPU:0", ConfigurationError, "non-empty list"),
        ([0, 1], ConfigurationError, "non-empty list"),
        (["banana:x"], DeviceError, "not a device name"),
    ],
)
def test_bad_devices_are_refused(devices, error, words):
    with pytest.raises(error, match=words):
        tfdp.DataParallelStrategy(devices)


def test_numpy_makes_arrays_of_variables_inside_the_scope():
    with make_strategy(2).scope():
        model = dense_model()
        model.compile(keras.optimizers.SGD(0.5))
        for variable in [*model.variables, *model.optimizer.variables]:
            array = np.asarray(variable.value)
            assert array.shape == variable.shape and array.dtype == variable.dtype
            np.testing.assert_array_equal(array, variable.numpy())
        rate = model.optimizer.learning_rate.value
        assert np.array(rate, "float64", copy=True) == 0.5
        assert np.asarray(rate) == 0.5


def test_bad_options_are_refused():
    with pytest.raises(ConfigurationError, match="shard must be one of"):
        tfdp.DataParallelStrategy(shard="everything")
    with pytest.raises(ConfigurationError, match=r"tfdp\.Communication"):
        tfdp.DataParallelStrategy(communication="fast")
    with pytest.raises(ConfigurationError, match="there are 2"):
        make_strategy(2, hierarchy=(2, 2))


def test_virtual_devices_after_the_start():
    assert tfdp.use_virtual_devices(4) == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    with pytest.raises(DeviceError, match=r"came too late.*4 logical CPU"):
        tfdp.use_virtual_devices(2)
    with pytest.raises(ConfigurationError, match="Received: 0"):
        tfdp.use_virtual_devices(0)
    with pytest.raises(ConfigurationError, match="from 1 to 1024"):
        tfdp.use_virtual_devices(100_000)
