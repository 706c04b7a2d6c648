"""`callbacks.GradientNoiseScale` beside norms taken replica by replica, and the truth.

The problem with a known answer: rows x ~ N(0, 1) of d features, targets e ~ N(0, s^2),
the loss (w x - e)^2. A row's gradient is 2 (w x - e) x, its mean G = 2 w, and

    E |g|^2 = 4 E[(w x)^2 |x|^2] + 4 s^2 E |x|^2 = 4 ((d + 2) |w|^2 + s^2 d)
    tr(S) / |G|^2 = E |g|^2 / |G|^2 - 1 = d + 1 + d s^2 / |w|^2

With a learning rate of 0 w stays where it is.
"""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, dense_model
from tfdp.callbacks import GradientNoiseScale
from tfdp.errors import ConfigurationError
from tfdp.step.observers import observers_of

FEATURES, SIGMA = 4, 2.0
TRUTH = FEATURES + 1 + FEATURES * SIGMA**2  # with |w| = 1
# Batches of 24, 24 and 5: on four replicas 6 each, then 2, 2, 1 and none.
ROWS, BATCH = 53, 24


class NotesNorms(GradientNoiseScale):
    """Keeps what each step gave."""

    def __init__(self, decay=1.0):
        super().__init__(decay)
        self.norms = []

    def add_step(self, norms):
        self.norms.append(norms)
        super().add_step(norms)


def strategy_of(replicas=4, **communication):
    return tfdp.DataParallelStrategy(
        [f"CPU:{rank}" for rank in range(replicas)],
        communication=tfdp.Communication(**communication),
    )


def compiled(strategy, optimizer=None, build=dense_model, **options):
    with strategy.scope():
        model = build()
        model.compile(
            optimizer() if optimizer else keras.optimizers.SGD(0.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            **{"jit_compile": False, **options},
        )
    return model


def fit(model, data, callback, epochs=1, **arguments):
    return model.fit(
        *data,
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[callback],
        **arguments,
    ).history


def norms_by_hand(model, strategy, data):
    """Of each step: from the gradient of every replica's rows by themselves."""
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(BATCH)
    found = []
    for batch in strategy.experimental_distribute_dataset(dataset):
        parts = zip(*map(strategy.experimental_local_results, batch), strict=True)
        parts = [(x.numpy(), y.numpy()) for x, y in parts if len(x)]
        rows = sum(len(x) for x, _ in parts)
        gradients = [gradient(model, x, y) for x, y in parts]
        shares = [len(x) / rows for x, _ in parts]
        small = sum(s * g @ g for s, g in zip(shares, gradients, strict=True))
        mean = sum(s * g for s, g in zip(shares, gradients, strict=True))
        found.append((small, mean @ mean, len(parts), rows))
    return found


def gradient(model, x, y):
    with tf.GradientTape() as tape:
        loss = model.loss(y, model(x))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    flat = [tf.reshape(tf.convert_to_tensor(g), [-1]) for g in gradients]
    return tf.concat(flat, 0).numpy().astype("float64")


def loss_scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), 2.0**10)


OPTIMIZERS = {
    "plain": lambda: keras.optimizers.SGD(0.0),
    "clipped": lambda: keras.optimizers.SGD(0.0, global_clipnorm=1e-3),
    "fixed-scale": lambda: keras.optimizers.SGD(0.0, loss_scale_factor=64.0),
    "scaled": loss_scaled,
    "distributed": lambda: tfdp.DistributedOptimizer(keras.optimizers.SGD(0.0)),
    "distributed-scaled": lambda: tfdp.DistributedOptimizer(
        keras.optimizers.SGD(0.0, loss_scale_factor=8.0),
        dynamic_loss_scale=True,
        initial_scale=2.0**9,
    ),
}


def check_norms(model, strategy, data, callback):
    assert len(callback.norms) == 3
    expected = norms_by_hand(model, strategy, data)
    # Sums of a few hundred squares in float32, each rounded by 6e-8.
    np.testing.assert_allclose(callback.norms, expected, rtol=1e-5)


@pytest.mark.worth_seconds(7)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_norms_are_those_of_the_replicas_means(optimizer):
    strategy, data, callback = strategy_of(), classification_data(ROWS), NotesNorms()
    model = compiled(strategy, OPTIMIZERS[optimizer])
    history = fit(model, data, callback)
    check_norms(model, strategy, data, callback)
    (reported,) = history["gradient_noise_scale"]
    assert reported == callback.estimate.noise_scale


@pytest.mark.quick
@pytest.mark.worth_seconds(7)
@pytest.mark.parametrize(
    "replicas, communication",
    [
        (2, {}),
        (4, {"hierarchy": (2, 2)}),
        (3, {"engine": "tensorflow"}),
        (4, {"engine": "tensorflow", "hierarchy": (2, 2)}),
    ],
)
def test_norms_over_every_engine(replicas, communication):
    strategy, data = strategy_of(replicas, **communication), classification_data(ROWS)
    model, callback = compiled(strategy, steps_per_execution=2), NotesNorms()
    fit(model, data, callback, validation_data=data)
    check_norms(model, strategy, data, callback)


def embedding_model():
    tokens = keras.Input((6,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(9, 5)(tokens))
    return keras.Model(tokens, keras.layers.Dense(4)(rows))


@pytest.mark.worth_seconds(6)
def test_slices_of_one_row_are_added_before_they_are_squared():
    rng = np.random.default_rng(0)
    data = rng.integers(0, 9, (ROWS, 6)), rng.integers(0, 4, ROWS)
    strategy, callback = strategy_of(), NotesNorms()
    model = compiled(strategy, build=embedding_model)
    fit(model, data, callback)
    check_norms(model, strategy, data, callback)


def linear_data(steps, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(steps * BATCH, FEATURES)).astype("float32")
    return x, rng.normal(size=(len(x), 1)) * SIGMA


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("seed", range(5))
def test_the_truth_is_in_the_interval(seed):
    """Of five draws all, which has a chance of 0.77 for any five; these are fixed."""
    with strategy_of().scope():
        layer = keras.layers.Dense(1, use_bias=False)
        model = keras.Sequential([keras.Input((FEATURES,)), layer])
        model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    layer.kernel.assign(np.full((FEATURES, 1), FEATURES**-0.5))
    callback = GradientNoiseScale(decay=1.0)
    fit(model, linear_data(150, seed), callback)
    estimate = callback.estimate
    assert estimate.low < TRUTH < estimate.high
    # And it says something: a mistake by the number of replicas would be seen.
    assert estimate.high < 2 * TRUTH < 4 * estimate.low
    words = callback.summary()
    assert f"{estimate.noise_scale:.4g} rows (95%" in words
    assert "150 steps" in words and "batches of 24 rows" in words


@pytest.mark.worth_seconds(10)
def test_steps_that_are_not_finite_are_left_out():
    x, y = classification_data(ROWS)
    x[30] = np.inf
    strategy, callback = strategy_of(), NotesNorms()
    model = compiled(strategy, loss_scaled)
    fit(model, (x, y), callback, epochs=3)
    assert callback.skipped_steps == 3
    assert math.isfinite(callback.estimate.trace)
    assert callback.estimate.steps == 6
    # The scale was halved three times meanwhile, which the norms do not show.
    np.testing.assert_allclose(callback.norms[0], callback.norms[-3], rtol=1e-5)


def test_a_step_with_rows_on_one_replica_is_left_out():
    callback = NotesNorms()
    fit(compiled(strategy_of()), classification_data(2 * BATCH + 1), callback, epochs=2)
    assert callback.skipped_steps == 2
    assert [norms.parts for norms in callback.norms] == [4, 4, 1] * 2


@pytest.mark.worth_seconds(12)
def test_training_is_what_it_is_without():
    data, weights = classification_data(ROWS), []
    for callbacks in ([], [GradientNoiseScale()]):
        model = compiled(strategy_of(), lambda: keras.optimizers.Adam(0.01))
        model.fit(*data, batch_size=BATCH, shuffle=False, verbose=0)
        model.fit(
            *data, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks
        )
        # Nothing is left of it.
        model.fit(*data, batch_size=BATCH, shuffle=False, verbose=0)
        assert observers_of(model, object) == []
        weights.append(model.get_weights())
        for variable in model.trainable_variables:
            copies = [copy.numpy() for copy in variable.value.values]
            np.testing.assert_array_equal(copies, [copies[0]] * 4)
    for without, with_it in zip(*weights, strict=True):
        np.testing.assert_array_equal(without, with_it)


class Interrupts(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


def test_a_model_after_an_interrupted_one_is_not_looked_at():
    strategy, callback = strategy_of(2), NotesNorms()
    data = classification_data(ROWS)
    first = compiled(strategy)
    with pytest.raises(KeyboardInterrupt):
        first.fit(*data, verbose=0, callbacks=[callback, Interrupts()])
    compiled(strategy).fit(*data, batch_size=BATCH, verbose=0)
    assert callback._reader.read() == []


class UpdatesTwice(keras.Sequential):
    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


def accumulating():
    return keras.optimizers.SGD(0.0, gradient_accumulation_steps=2)


def accumulating_by_tfdp():
    return tfdp.DistributedOptimizer(keras.optimizers.SGD(0.0), accumulate_steps=2)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: compiled(strategy_of(1)), "there is one replica"),
        (lambda: compiled(tf.distribute.get_strategy()), "DefaultDistribution"),
        (lambda: compiled(strategy_of(), accumulating), "accumulates"),
        (lambda: compiled(strategy_of(), accumulating_by_tfdp), "accumulates"),
        (lambda: compiled(strategy_of(), run_eagerly=True), "run_eagerly=False"),
        (
            lambda: compiled(
                tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], shard="optimizer")
            ),
            "shard='optimizer'",
        ),
        (
            lambda: compiled(
                strategy_of(), build=lambda: UpdatesTwice(dense_model().layers)
            ),
            "two sums of gradients in one step",
        ),
    ],
)
def test_what_cannot_tell_is_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        fit(make(), classification_data(ROWS), GradientNoiseScale())


@pytest.mark.parametrize("decay", [0.0, -0.5, 0.5, 1.01, "0.9", True, math.nan])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ConfigurationError, match="decay"):
        GradientNoiseScale(decay=decay)


def test_before_there_are_steps_the_summary_says_so():
    callback = GradientNoiseScale()
    assert callback.estimate is None
    assert "not available" in callback.summary()
