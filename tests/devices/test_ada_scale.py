"""`callbacks.AdaScale`: its gain, its learning rates, and the limits of both."""

import keras
import numpy as np
import pytest

import tfdp
from tests.devices.test_gradient_noise_scale import compiled, strategy_of
from tests.devices.test_nan_guard_compression import infinite_for_class_5
from tests.support.parity import classification_data
from tfdp.callbacks import AdaScale, NaNGuard
from tfdp.errors import ConfigurationError
from tfdp.plan.noise_scale import split_norms

REPLICAS = 4


class Rates(keras.callbacks.Callback):
    """The learning rate of each step; placed after AdaScale, it sees the next one's."""

    def __init__(self):
        super().__init__()
        self.rates, self.gains = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))

    def on_train_batch_end(self, batch, logs=None):
        self.gains.append(logs["ada_scale_gain"])


class NotesNorms(AdaScale):
    """Keeps what each step gave."""

    norms = ()

    def add_step(self, norms):
        self.norms = (*self.norms, norms)
        super().add_step(norms)


def fitted(callback, data, optimizer=None, batch_size=24, epochs=2, **options):
    model = compiled(
        strategy_of(REPLICAS), optimizer or (lambda: keras.optimizers.SGD(9.0))
    )
    rates = Rates()
    model.fit(
        *data,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[callback, rates],
        **options,
    )
    return model, rates


def test_rates_follow_the_schedule_by_progress():
    """The equations once more, from the norms of each step: 8 steps of 24 rows."""
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
        [3, 6], [0.1, 0.05, 0.0]
    )
    callback = NotesNorms(schedule, decay=1.0, scale=2)
    _, rates = fitted(callback, classification_data())
    progress, gain, parts, expected = 0.0, 1.0, [], []
    for norms in callback.norms:
        expected.append(gain * float(schedule(int(progress))))
        progress += gain
        parts.append(split_norms(*norms))
        if len(parts) >= 3:
            square, trace = np.maximum(np.mean(parts, axis=0), 0.0)
            noise = trace / 12
            gain = (noise + square) / (noise / 2 + square)
    # Averages of a few numbers in float64, and a rate that is kept in float32.
    np.testing.assert_allclose(rates.rates, expected, rtol=1e-6)
    assert callback.progress == pytest.approx(progress, rel=1e-9)
    assert 1.05 < max(rates.gains) < 2
    assert len({rate > 0 for rate in rates.rates}) == 2  # p goes past 6


def test_without_noise_a_batch_is_worth_one_step():
    """All rows alike: the gain is 1, and training is that of the schedule itself."""
    x, y = classification_data(1)
    data = np.repeat(x, 96, axis=0), np.repeat(y, 96)
    model, rates = fitted(AdaScale(0.05), data)
    plain = compiled(strategy_of(REPLICAS), lambda: keras.optimizers.SGD(0.05))
    plain.fit(*data, batch_size=24, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(rates.gains, 1.0, rtol=1e-4)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        # Eight updates by rates that differ by 1e-4 of themselves.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)


def test_where_all_is_noise_a_batch_is_worth_all_its_parts():
    """Targets drawn anew for every row of the same input, at the best weights."""
    generator = np.random.default_rng(4)
    x = np.ones((1920, 1), "float32")
    y = generator.normal(size=(1920, 1)).astype("float32")
    y -= y.mean()
    with strategy_of(REPLICAS).scope():
        zeros = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), zeros])
        model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    callback = AdaScale(0.0, decay=1.0)
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[callback])
    # 120 steps: |G|^2 is known to about tr(S) / B / sqrt(120 / 2), an eighth of what a
    # batch's noise is, and so is the gain's distance from 4.
    assert 2.5 < callback.gain <= REPLICAS
    assert callback.progress > 2 * 120


@pytest.mark.filterwarnings("ignore::tfdp.errors.NotFiniteWarning")
def test_a_step_that_a_guard_leaves_out_is_worth_nothing():
    """Its loss is infinite and its gradients are finite."""
    x, y = classification_data(64)
    bad = y.copy()
    bad[24] = 5
    rows = np.arange(64) // 16 != 1
    found = []
    for given in ((x, bad), (x[rows], y[rows])):
        with strategy_of(REPLICAS).scope():
            keras.utils.set_random_seed(3)
            model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])
            sgd = keras.optimizers.SGD(0.0)
            model.compile(sgd, infinite_for_class_5, jit_compile=False)
        callback, guard = AdaScale(0.05), NaNGuard("skip")
        options = {"batch_size": 16, "shuffle": False, "verbose": 0}
        model.fit(*given, callbacks=[callback, guard], **options)
        found.append((callback.progress, callback.gain))
    assert guard.skipped_steps == 0
    assert found[0] == found[1]


def test_it_ends_where_the_small_batch_would_have():
    callback = AdaScale(0.05, total_steps=5)
    model, rates = fitted(callback, classification_data(), epochs=9)
    assert 5 <= callback.progress < 5 + REPLICAS
    assert len(rates.rates) <= 5
    again = AdaScale(0.05, total_steps=5, initial_progress=callback.progress)
    _, rates = fitted(again, classification_data(), epochs=9)
    assert len(rates.rates) == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"schedule": -0.1}, "AdaScale.schedule"),
        ({"schedule": "cosine"}, "Received: 'cosine'"),
        ({"schedule": 0.1, "scale": 1}, "above 1"),
        ({"schedule": 0.1, "scale": float("nan")}, "Received: nan"),
        ({"schedule": 0.1, "total_steps": 0}, "AdaScale.total_steps"),
        ({"schedule": 0.1, "initial_progress": -1}, "AdaScale.initial_progress"),
        ({"schedule": 0.1, "decay": 0}, "decay must be"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        AdaScale(**arguments)


def test_a_schedule_of_the_optimizers_own_is_refused():
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    with pytest.raises(ConfigurationError, match="has a schedule"):
        fitted(
            AdaScale(0.1), classification_data(), lambda: keras.optimizers.SGD(decay)
        )


def test_one_replica_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="AdaScale compares"):
        model = compiled(strategy_of(1))
        model.fit(*classification_data(), verbose=0, callbacks=[AdaScale(0.1)])


def test_a_loss_scaler_within_gets_the_rate():
    def made():
        return tfdp.DistributedOptimizer(
            keras.optimizers.SGD(9.0), dynamic_loss_scale=True, initial_scale=8.0
        )

    x, y = classification_data()
    x[30, 0] = np.inf  # in the second step, which does not count
    callback = AdaScale(0.05, scale=2)
    _, rates = fitted(callback, (x, y), made, epochs=1)
    assert rates.rates[0] == pytest.approx(0.05)
    assert callback.skipped_steps == 1 and callback.progress == 3.0
