"""SyncBatchNormalization in models: fit, files and number types."""

import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import (
    largest_difference,
    make_strategy,
    rounding_bound,
    stock_strategy,
    train,
)
from tests.support.replica_steps import (
    assert_replicas_agree,
    replica_function,
    samples,
)
from tfdp.layers import SyncBatchNormalization, convert_batch_normalization

BN = keras.layers.BatchNormalization
IMAGE = (6, 6, 2)


def image_model(normalization=BN, kernel=3):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input(IMAGE),
            keras.layers.Conv2D(4, kernel, use_bias=False)
            if kernel > 1
            else keras.layers.Dense(4),
            normalization(momentum=0.8),
            keras.layers.Activation("tanh"),
            keras.Sequential([keras.layers.Dense(3), normalization(axis=3)]),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3),
        ]
    )


def fit(strategy, build, count, batch_size=16, **options):
    x = samples((count, *IMAGE)).astype("float32")
    y = np.random.default_rng(1).integers(0, 3, count)
    model, _ = train(
        strategy,
        build=build,
        data=(x, y),
        optimizer=lambda: keras.optimizers.SGD(0.05),
        batch_size=batch_size,
        epochs=2,
        **options,
    )
    return model


@functools.cache
def one_device(count, kernel):
    return fit(None, lambda: image_model(kernel=kernel), count)


@pytest.mark.parametrize(
    "make, replicas, count, kernel",
    [
        (make_strategy, 4, 48, 3),
        (stock_strategy, 2, 48, 3),
        (make_strategy, 2, 41, 3),  # the last batch: 5 and 4 samples
        # The last batch: 1, 1, 1 and 0. No convolution: on CPUs TensorFlow's gives
        # 0 samples of a wrong shape when it is given 0 samples.
        (make_strategy, 4, 35, 1),
    ],
)
def test_fit_equals_one_device(make, replicas, count, kernel):
    one = one_device(count, kernel)
    several = fit(
        make(replicas),
        lambda: convert_batch_normalization(image_model(kernel=kernel)),
        count,
    )
    # Gradients stay below 2 before they pass the layers, which divide by deviations
    # of 0.2 and more: 10. A batch is up to 16 images of 36 positions; 6 steps.
    bound = rounding_bound(
        one, steps=6, batch_size=16 * 36, gradient_bound=10.0, learning_rate=0.05
    )
    assert bound < 3e-4
    assert largest_difference(one, several) < bound
    for layer in several.layers:
        assert_replicas_agree(layer)


def test_plain_layers_do_not_equal_one_device():
    """The bound above does not hide a layer that normalises for itself."""
    plain = fit(make_strategy(2), image_model, 41)
    assert largest_difference(one_device(41, 3), plain) > 1e-2


@pytest.mark.parametrize("options", [{"steps_per_execution": 2}, {"run_eagerly": True}])
def test_fit_in_other_modes_equals_one_device(options):
    one = one_device(48, 3)
    several = fit(
        make_strategy(2), lambda: image_model(SyncBatchNormalization), 48, **options
    )
    bound = rounding_bound(
        one, steps=6, batch_size=16 * 36, gradient_bound=10.0, learning_rate=0.05
    )
    assert largest_difference(one, several) < bound


def test_compiled_by_xla_on_one_device():
    x, y = samples((9, 4)).astype("float32"), np.ones((9, 1), "float32")
    layers = [keras.Input((4,)), SyncBatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", jit_compile=True)
    model.fit(x, y, batch_size=5, verbose=0)
    assert np.isfinite(model.predict(x, verbose=0)).all()


def test_the_file_holds_what_every_replica_has(tmp_path):
    model = fit(
        make_strategy(4), lambda: image_model(SyncBatchNormalization), 16, metrics=[]
    )
    model.save(tmp_path / "model.keras")
    x = samples((8, *IMAGE), seed=9).astype("float32")
    expected = model.predict(x, batch_size=8, verbose=0)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.layers[1], SyncBatchNormalization)
    assert largest_difference(model, loaded) == 0.0
    np.testing.assert_allclose(
        loaded.predict(x, batch_size=8, verbose=0), expected, rtol=1e-5, atol=1e-6
    )
    # Whichever replica meets a sample: the order of the samples changes nothing.
    backwards = model.predict(x[::-1], batch_size=8, verbose=0)[::-1]
    np.testing.assert_allclose(backwards, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"center": False},
        {"scale": False, "axis": 1},
        pytest.param(
            {"renorm": True},
            marks=pytest.mark.skipif(
                "renorm" not in inspect.signature(BN).parameters,
                reason="Keras has no renorm",  # 3.12
            ),
        ),
    ],
)
def test_weights_and_inference_are_those_of_keras(options):
    x = samples((6, 3, 4)).astype("float32")
    plain, sync = BN(name="bn", **options), SyncBatchNormalization(name="bn", **options)
    plain(x), sync(x)
    for a, b in zip(plain.weights, sync.weights, strict=True):
        assert (a.path, a.shape, a.trainable) == (b.path, b.shape, b.trainable)
    rng = np.random.default_rng(0)
    sync.set_weights([rng.uniform(0.5, 2, w.shape) for w in plain.weights])
    plain.set_weights(sync.get_weights())
    np.testing.assert_array_equal(sync(x), plain(x))
    sync.trainable = False
    np.testing.assert_array_equal(sync(x, training=True), plain(x))
    np.testing.assert_array_equal(sync.get_weights()[-1], plain.get_weights()[-1])


def test_config_round_trip():
    layer = SyncBatchNormalization(
        1, 0.9, 1e-2, False, group_size=2, gamma_regularizer="l2", name="bn"
    )
    copy = SyncBatchNormalization.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    assert (copy.axis, copy.group_size, copy.center, copy.name) == (1, 2, False, "bn")
    assert isinstance(layer, BN)


@pytest.mark.parametrize(
    "policy, statistics", [("mixed_float16", "float32"), ("mixed_bfloat16", "float32")]
)
def test_half_precision_has_statistics_in_float32(policy, statistics):
    """Squares of 300 overflow float16, and bfloat16 has steps of 2 there."""
    parts = [300 + samples((16, 3), seed=rank) for rank in range(2)]
    half = tf.as_dtype(policy.removeprefix("mixed_"))
    parts = [tf.cast(part, half).numpy() for part in parts]
    strategy = make_strategy(2)
    with strategy.scope():
        layer = SyncBatchNormalization(dtype=policy, momentum=0.0)
        layer.build((None, 3))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 3)
        return y, tape.gradient(loss, x)

    for y, gradient in replica_function(strategy, step)(parts):
        assert y.dtype == gradient.dtype == half.as_numpy_dtype
        assert np.isfinite(y).all() and np.isfinite(gradient).all()
    assert {weight.dtype for weight in layer.weights} == {statistics}
    x = np.concatenate(parts).astype("float64")
    # Sums of 16 terms of 300 in float32, and shifts of 1 from means of 300:
    # 16 * 6e-8 * 300 = 3e-4.
    np.testing.assert_allclose(layer.moving_mean, x.mean(0), atol=3e-4)
    np.testing.assert_allclose(layer.moving_variance, x.var(0), atol=1e-3)


def test_a_call_in_the_scope_is_a_call_on_one_device():
    strategy = make_strategy(2)
    x = samples((8, 3)).astype("float32")
    with strategy.scope():
        layer = SyncBatchNormalization(momentum=0.0)
        y = layer(x, training=True).numpy()
    # Sums of 8 terms below 10 in float32: 8 * 6e-8 * 10.
    np.testing.assert_allclose(y.mean(axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(layer.moving_mean, x.mean(axis=0), atol=1e-5)
