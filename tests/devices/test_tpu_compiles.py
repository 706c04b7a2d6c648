"""Everything that runs on a TPU replica compiles with XLA, here on the CPU.

One replica: the compiled step gives one device's numbers. Two: the code that only
several replicas have (their ranks, draws, sums) compiles; the sum itself, which the
CPU's XLA does not have, changes nothing there, so numbers are not looked at.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.conformance_table import OPTIMIZERS, UNSHARDABLE, WITH_OWNERS
from tests.support.slow_rows import covering
from tests.support.tpu_stand_in import StandInStrategy
from tfdp.exchange.tpu import CrossReplicaOps

ROWS, BATCH_SIZE, CLASSES = 13, 5, 4  # the last batch has 3 rows
# An optimizer, and options of which each adds a graph of its own; the rest is slow.
COVERING = ("AdamW", "accumulation-global_clipnorm")


def data(seed=2):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 8, 8, 1)) * rng.uniform(0.3, 2, size=(ROWS, 1, 1, 1))
    return x.astype("float32"), rng.integers(0, CLASSES, ROWS)


def image_model(dropout=0.0):
    """What the examples are made of: convolutions, normalisation, dropout."""
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Rescaling(0.5),
            keras.layers.Conv2D(4, 3, strides=2, use_bias=False),
            tfdp.layers.SyncBatchNormalization(momentum=0.5, epsilon=0.1),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(dropout, seed=3),
            keras.layers.Dense(6, "tanh"),
            keras.layers.Dense(CLASSES),
        ]
    )


def small_model():
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def fit(strategy, optimizer, build=image_model, epochs=2, **options):
    x, y = data()
    with (strategy or tf.distribute.get_strategy()).scope():
        model = build()
        model.compile(
            optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=False,
            **options,
        )
        # Built in a step, as on one device, ScheduleFreeAdamW copies weights too late.
        model.optimizer.build(model.trainable_variables)
    history = model.fit(
        x, y, batch_size=BATCH_SIZE, epochs=epochs, shuffle=False, verbose=0
    )
    return model, history.history


def sharded():
    return StandInStrategy(2, compiled=True, shard="optimizer", shard_min_bytes=0)


def assert_compiled_equals_one_device(optimizer, strategy=None):
    one, history_one = fit(strategy, optimizer)
    model, history = fit(StandInStrategy(1, compiled=True), optimizer)
    for a, b in zip(one.trainable_weights, model.trainable_weights, strict=True):
        # XLA fuses and so rounds elsewhere. Six updates of at most 0.1 each, from
        # gradients off by sums of some 9 * 13 + 64 terms: 6 * 0.1 * 2 * 181 u = 1.3e-5;
        # optimizers that divide by a gradient's size may enlarge it tenfold. The
        # updates themselves are above 1e-2.
        np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=0, atol=1.3e-4)
    np.testing.assert_allclose(history["loss"], history_one["loss"], rtol=1e-4)
    assert history["accuracy"] == pytest.approx(history_one["accuracy"])


@pytest.mark.worth_seconds(9)
@pytest.mark.parametrize("name", covering(OPTIMIZERS, COVERING))
def test_the_step_of_each_optimizer(name):
    assert_compiled_equals_one_device(OPTIMIZERS[name])
    fit(StandInStrategy(2, compiled=True), OPTIMIZERS[name], epochs=1)
    if name not in (*UNSHARDABLE, *WITH_OWNERS):
        fit(sharded(), OPTIMIZERS[name], small_model, epochs=1)


OPTIONS = {
    "clipnorm": {"clipnorm": 0.2},
    "global_clipnorm": {"global_clipnorm": 0.5},
    "clipvalue": {"clipvalue": 0.1},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation-global_clipnorm": {
        "gradient_accumulation_steps": 2,
        "global_clipnorm": 0.5,
    },
    "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "decay": {"weight_decay": 0.1},
}


@pytest.mark.parametrize("name", covering(OPTIONS, COVERING))
def test_the_step_of_each_option(name):
    def optimizer():
        return keras.optimizers.SGD(0.1, momentum=0.5, **OPTIONS[name])

    if "accumulation" not in name:
        assert_compiled_equals_one_device(optimizer)
    # Keras' accumulation weighs a short batch as a whole one, another one filled up.
    fit(StandInStrategy(2, compiled=True), optimizer, epochs=1)
    fit(sharded(), optimizer, small_model, epochs=1)


def test_distributed_optimizer_with_a_schedule_and_a_loss_scale():
    def optimizer():
        schedule = tfdp.schedules.PolynomialDecay(0.1, total_steps=6, warmup_steps=2)
        inner = keras.optimizers.SGD(schedule, momentum=0.5, clipnorm=0.2)
        return tfdp.DistributedOptimizer(inner, accumulate_steps=2)

    # Without a strategy it would not know how many rows a batch has.
    assert_compiled_equals_one_device(optimizer, tfdp.DataParallelStrategy(["CPU:0"]))
    fit(StandInStrategy(2, compiled=True), optimizer, epochs=1)
    fit(sharded(), optimizer, small_model, epochs=1)


def test_float16_with_a_dynamic_loss_scale():
    keras.config.set_dtype_policy("mixed_float16")
    model, history = fit(
        StandInStrategy(2, compiled=True),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
        build=image_model,
    )
    assert np.isfinite(history["loss"]).all()


@pytest.mark.parametrize(
    "steps_per_execution", [pytest.param(1, marks=pytest.mark.slow), 2]
)
def test_dropout_and_several_steps_in_one_call(steps_per_execution):
    model, history = fit(
        StandInStrategy(2, compiled=True),
        lambda: keras.optimizers.Adam(0.01),
        build=lambda: image_model(dropout=0.5),
        steps_per_execution=steps_per_execution,
    )
    assert np.isfinite(history["loss"]).all()
    x, y = data()
    model.evaluate(x, y, batch_size=BATCH_SIZE, verbose=0)
    assert model.predict(x, batch_size=BATCH_SIZE, verbose=0).shape == (ROWS, CLASSES)


@pytest.mark.parametrize("optimizer", covering(["sgd", "adam", "adagrad"], ["adam"]))
def test_a_recurrent_and_an_embedding_layer_compile(optimizer):
    """Sparse gradients: updates by slices, in each way that optimizers have."""

    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Embedding(9, 5, mask_zero=True),
                keras.layers.LSTM(4),
                keras.layers.LayerNormalization(),
                keras.layers.Dense(CLASSES),
            ]
        )

    tokens = np.random.default_rng(0).integers(1, 9, (ROWS, 6))
    with StandInStrategy(2, compiled=True).scope():
        model = build()
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    history = model.fit(tokens, data()[1], batch_size=BATCH_SIZE, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


def test_the_scattered_sum_is_known_to_xla():
    """Translated only: a CPU could not run it for two replicas."""
    ops = CrossReplicaOps(2)

    @tf.function(jit_compile=True, autograph=False)
    def scatter(rows):
        return ops.scatter_sum(rows, tf.constant(0))

    program = scatter.experimental_get_compiler_ir(tf.ones((2, 3)))(stage="hlo")
    assert "f32[1,3]{1,0} reduce-scatter(" in program
    assert "replica_groups={{0,1}}" in program


class SortsByText(keras.layers.Layer):
    """Uses an op that XLA does not have."""

    def call(self, inputs):
        text = tf.strings.as_string(inputs[:, 0, 0, 0])
        size = tf.cast(tf.strings.length(text), inputs.dtype)
        return inputs + 0.0 * size[:, None, None, None]


def test_an_op_without_xla_is_seen():
    def build():
        return keras.Sequential([keras.Input((8, 8, 1)), SortsByText(), image_model()])

    with pytest.raises(tf.errors.InvalidArgumentError, match="(?i)unsupported|compil"):
        fit(
            StandInStrategy(2, compiled=True),
            lambda: keras.optimizers.SGD(0.1),
            build,
            epochs=1,
        )
