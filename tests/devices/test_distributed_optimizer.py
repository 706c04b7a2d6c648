"""DistributedOptimizer: K micro-steps on N replicas are one step on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.holding import Holding
from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    make_strategy,
    rounding_bound,
    stock_strategy,
    train,
)
from tfdp.errors import ConfigurationError, ScopeError

INNER_OPTIONS = {
    "plain": {},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipnorm": {"clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "ema": {"use_ema": True, "ema_overwrite_frequency": 3},
    "decay": {"weight_decay": 0.1},
    "loss_scale_factor": {"loss_scale_factor": 8.0},
}


def sgd(**options):
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def distributed(steps, **options):
    return lambda: tfdp.DistributedOptimizer(sgd(**options), accumulate_steps=steps)


@pytest.mark.worth_seconds(7)
@pytest.mark.parametrize("options", INNER_OPTIONS.values(), ids=INNER_OPTIONS)
@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_equals_the_inner_optimizer_on_the_whole_batch(options, steps):
    one, _ = train(None, optimizer=lambda: sgd(**options), batch_size=24)
    several, _ = train(
        make_strategy(4, engine="tensorflow", hierarchy=(2, 2)),
        optimizer=distributed(steps, **options),
        batch_size=24 // steps,
        steps_per_execution=3,
    )
    bound = rounding_bound(
        one, steps=8, batch_size=24, gradient_bound=3.0, learning_rate=0.5
    )
    assert largest_difference(one, several) <= bound
    assert int(several.optimizer.iterations.numpy()) == 8  # updates, not micro-steps


@pytest.mark.parametrize("replicas", [1, 3])
def test_short_micro_batches_weigh_by_their_samples(replicas):
    """Batches of 16 and 5 samples: Keras' own accumulation takes the mean of means."""
    x, y = classification_data(samples=21)
    one, _ = train(None, optimizer=sgd, data=(x, y), batch_size=21, epochs=1)
    several, _ = train(
        make_strategy(replicas),
        optimizer=distributed(2),
        data=(x, y),
        batch_size=16,
        epochs=1,
    )
    mean_of_means, _ = train(
        make_strategy(3),
        optimizer=lambda: sgd(gradient_accumulation_steps=2),
        data=(x, y),
        batch_size=16,
        epochs=1,
    )
    # One step of at most 0.05 * 3, summed over 21 rows and 33 units: 108 u of that.
    assert largest_difference(one, several) < 1e-6
    assert largest_difference(one, mean_of_means) > 1e-3


@pytest.mark.parametrize("replicas", [1, 2])
def test_masked_micro_batches_weigh_by_their_tokens(replicas):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 9, (12, 6))
    lengths = np.array([6, 1, 5, 2, 6, 1, 1, 1, 2, 1, 1, 3])
    tokens[np.arange(6)[None] >= lengths[:, None]] = 0
    targets = rng.integers(0, 4, (12, 6))

    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(9, 8, mask_zero=True),
                keras.layers.Dense(4),
            ]
        )

    options = {"data": (tokens, targets), "epochs": 1}
    one, _ = train(None, build, sgd, batch_size=12, **options)
    several, _ = train(
        make_strategy(replicas), build, distributed(3), batch_size=4, **options
    )
    stock, _ = train(
        make_strategy(2),
        build,
        lambda: sgd(gradient_accumulation_steps=3),
        batch_size=4,
        **options,
    )
    # One step of 0.05 on gradients below 1 over 29 tokens: 100 u of 0.05.
    assert largest_difference(one, several) < 1e-6
    assert largest_difference(one, stock) > 1e-4


@pytest.mark.parametrize("replicas", [1, 2])
def test_micro_batches_weigh_by_the_weights_that_divide(replicas):
    x, y = classification_data(samples=8)
    weights = np.array([1, 1, 1, 1, 1, 2, 2, 1], "float32")
    data = tf.data.Dataset.from_tensor_slices((x, y, weights))
    models = []
    for strategy, optimizer, rows in (
        (None, sgd, 8),
        (make_strategy(replicas), distributed(2), 4),
    ):
        with (strategy or tf.distribute.get_strategy()).scope():
            model = dense_model()
            loss = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            )
            model.compile(optimizer(), loss, jit_compile=False)
        model.fit(data.batch(rows), verbose=0)
        models.append(model)
    # One step as above; weighed by rows it is off by 1e-3 and more.
    assert largest_difference(*models) < 1e-6


@pytest.mark.parametrize("bad_row", [0, 13, 20])
@pytest.mark.parametrize("steps", [1, 2])
def test_float16_skips_everywhere_when_one_replica_overflows(bad_row, steps):
    keras.config.set_dtype_policy("mixed_float16")
    x, y = classification_data()
    x[bad_row] = np.inf
    options = {"data": (x, y), "batch_size": 24 // steps, "epochs": 1}
    one, _ = train(None, optimizer=distributed(steps), **options)
    several, _ = train(make_strategy(4), optimizer=distributed(steps), **options)
    assert type(several.optimizer) is tfdp.DistributedOptimizer  # not wrapped again
    assert several.optimizer.dynamic_loss_scale
    assert several.optimizer.dynamic_scale.numpy() == 2.0**14
    assert int(several.optimizer.iterations.numpy()) == 3
    # Activations are rounded to float16: 3 updates of 0.5 * 3, u = 2^-11.
    assert largest_difference(one, several) < 3 * 0.5 * 3.0 * 2**-11


def test_saves_and_loads_inside_a_keras_file(tmp_path):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 50)

    def optimizer():
        inner = keras.optimizers.AdamW(schedule, weight_decay=0.01, clipnorm=1.0)
        return tfdp.DistributedOptimizer(inner, accumulate_steps=3)

    model, _ = train(make_strategy(2), optimizer=optimizer, batch_size=8)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.accumulate_steps == 3
    assert loaded.optimizer.inner_optimizer.clipnorm == 1.0
    for a, b in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    rate = float(loaded.optimizer.learning_rate)
    assert rate == pytest.approx(float(schedule(8)))  # 24 micro-steps, 8 updates


def test_frozen_variables_stay():
    def build():
        model = dense_model()
        model.layers[0].trainable = False
        return model

    one, _ = train(None, build, sgd)
    several, _ = train(make_strategy(2), build, distributed(2), batch_size=12)
    assert largest_difference(one, several) < 1e-6
    np.testing.assert_array_equal(
        several.layers[0].kernel.numpy(), dense_model().layers[0].kernel.numpy()
    )


def custom_loop(strategy, optimizer, x, y):
    """A hand-written loop: no model.fit."""
    with (strategy or tf.distribute.get_strategy()).scope():
        model = dense_model()
        wrapped = optimizer()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        wrapped.build(model.trainable_variables)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            value = wrapped.scale_loss(loss(y, model(x, training=True)))
        gradients = tape.gradient(value, model.trainable_variables)
        wrapped.apply(gradients, model.trainable_variables)

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(24)
    if strategy is None:
        for batch in dataset:
            replica_step(*batch)
        return model

    @tf.function
    def step(x, y):
        strategy.run(replica_step, args=(x, y))

    for batch in strategy.experimental_distribute_dataset(dataset):
        step(*batch)
    return model


def test_custom_loops_clip_the_reduced_gradient_and_weigh_by_samples():
    x, y = classification_data(samples=53)
    one = custom_loop(None, lambda: sgd(global_clipnorm=0.1), x, y)
    several = custom_loop(make_strategy(3), distributed(1, global_clipnorm=0.1), x, y)
    assert largest_difference(one, several) < 1e-6


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("sgd",), "Received: 'sgd'"),
        ((lambda: None,), "wraps a keras.optimizers.Optimizer"),
    ],
)
def test_nonsense_is_refused(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        tfdp.DistributedOptimizer(*arguments)


def test_nonsensical_options_are_refused():
    with pytest.raises(ConfigurationError, match="accumulate_steps.*Received: 0"):
        tfdp.DistributedOptimizer(sgd(), accumulate_steps=0)
    with pytest.raises(ConfigurationError, match="set twice"):
        tfdp.DistributedOptimizer(sgd(gradient_accumulation_steps=2))
    with pytest.raises(ConfigurationError, match="inner_optimizer"):
        tfdp.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd()))
    with pytest.raises(ConfigurationError, match="initial_scale"):
        tfdp.DistributedOptimizer(sgd(), initial_scale=-1)
    with pytest.raises(ConfigurationError, match="initial_scale.*Received: inf"):
        tfdp.DistributedOptimizer(sgd(), initial_scale=float("inf"))
    with pytest.raises(ConfigurationError, match="initial_scale=8.0 has no effect"):
        tfdp.DistributedOptimizer(sgd(), dynamic_loss_scale=False, initial_scale=8.0)
    with pytest.raises(ConfigurationError, match="dynamic_growth_steps.*Received: 0"):
        tfdp.DistributedOptimizer(sgd(), dynamic_growth_steps=0)
    with pytest.raises(ConfigurationError, match=r"call it: DiLoCo\(\)"):
        tfdp.DistributedOptimizer(sgd(), sync=tfdp.sync.DiLoCo)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("holder", [Holding, keras.optimizers.LossScaleOptimizer])
def test_one_that_another_holds_is_refused(holder, steps):
    """It would add up once more what its holder's gradients are: twice too much."""
    with pytest.raises(ConfigurationError, match="is held by another|Cond.call"):
        train(make_strategy(2), optimizer=lambda: holder(distributed(steps)()))


@pytest.mark.parametrize("holder", [Holding, keras.optimizers.LossScaleOptimizer])
def test_one_that_holds_a_plain_one_is_that_of_one_device(holder):
    one, _ = train(None, optimizer=lambda: holder(sgd()), epochs=1)
    several, _ = train(make_strategy(2), optimizer=lambda: holder(sgd()), epochs=1)
    assert largest_difference(one, several) < 1e-6


def test_a_stock_strategy_is_refused():
    with pytest.raises(ScopeError, match="MirroredStrategy.*DataParallelStrategy"):
        train(
            stock_strategy(),
            optimizer=distributed(2),
        )


@pytest.mark.parametrize("inner", [keras.optimizers.Nadam, keras.optimizers.Adafactor])
def test_variables_besides_the_slots_are_noted(inner):
    """Keras' own loss scaler loses them: they would be in no file."""
    plain, wrapped = inner(), tfdp.DistributedOptimizer(inner())
    variables = dense_model().trainable_variables
    plain.build(variables)
    wrapped.build(variables)
    assert len(wrapped.inner_optimizer.variables) == len(plain.variables)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
@pytest.mark.parametrize("batch_size", [6, 8])  # 6 + 6 and 8 + 4 rows
def test_accumulation_with_and_without_a_strategy(batch_size, reduction):
    """What the docstring says: under a strategy the gradient on all rows together;
    without one the mean of the batches' gradients, as Keras accumulates.

    Rounding: one step of SGD at rate 0.01 with gradients below 100, of 12 rows in
    float32: 0.01 x 100 x 12 x 6e-8 = 7e-7; both rules differ by 0.01 and more where
    they differ.
    """
    x = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")

    def trained(strategy, batch_size, optimizer):
        with strategy.scope():
            kernel = keras.initializers.Constant(0.5)
            layer = keras.layers.Dense(1, kernel_initializer=kernel)
            model = keras.Sequential([keras.Input((4,)), layer])
            loss = keras.losses.MeanSquaredError(reduction=reduction)
            model.compile(optimizer, loss, jit_compile=False)
        y = x[:, :1] * 8
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
        assert int(model.optimizer.iterations) == 1
        return model.get_weights()

    plain = tf.distribute.get_strategy()
    whole = trained(plain, 12, sgd_of(None))
    of_keras = trained(plain, batch_size, sgd_of(2))
    alone = trained(plain, batch_size, tfdp.DistributedOptimizer(sgd_of(None), **TWO))
    for replicas in (1, 2):
        strategy = make_strategy(replicas)
        with strategy.scope():
            optimizer = tfdp.DistributedOptimizer(sgd_of(None), **TWO)
        under = trained(strategy, batch_size, optimizer)
        np.testing.assert_allclose(under[0], whole[0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(alone[0], of_keras[0], rtol=0, atol=2e-6)
    is_same = batch_size == 6 and reduction != "sum"
    assert np.allclose(alone[0], whole[0], rtol=0, atol=2e-6) == is_same


TWO = {"accumulate_steps": 2}


def sgd_of(accumulated):
    return keras.optimizers.SGD(0.01, gradient_accumulation_steps=accumulated)
