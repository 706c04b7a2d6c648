"""The Keras schedules against the plain formulas, their savings and refusals."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.plan.schedule_formulas import scale_learning_rate as pure_scale_learning_rate
from tfdp.schedules import LinearWarmup, PolynomialDecay, scale_learning_rate

# A rate is a handful of float32 operations, each with relative error 2**-24, and the
# power of a number doubles or so what it is given: 16 of them are plenty.
FLOAT32_TOLERANCE = 16 * 2.0**-24

STEP_KINDS = {
    "int": int,
    "float": float,
    "numpy": np.int64,
    "int32": lambda step: tf.constant(step, tf.int32),
    "int64": lambda step: tf.constant(step, tf.int64),
    "float32": lambda step: tf.constant(step, tf.float32),
    "variable": lambda step: keras.Variable(step, dtype="int64"),
}


def linear_warmup(step, after, warmup_steps, initial):
    if step >= warmup_steps:
        return after(step)
    return initial + (after(warmup_steps) - initial) * step / warmup_steps


def polynomial_decay(step, peak, total_steps, warmup_steps, end=1e-4, power=2.0):
    """The published equation, in float64."""
    if step <= warmup_steps and warmup_steps:
        return peak * step / warmup_steps
    decay_steps = total_steps - warmup_steps + 1
    progress = min((step - warmup_steps) / decay_steps, 1.0)
    return (peak - end) * (1 - progress) ** power + end


def piecewise():
    return keras.optimizers.schedules.PiecewiseConstantDecay([6, 9], [0.4, 0.04, 0.004])


@pytest.mark.parametrize("kind", STEP_KINDS)
@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
def test_polynomial_decay_equals_its_formula(kind, warmup_steps):
    schedule = PolynomialDecay(31.2, 30, warmup_steps, end_learning_rate=1e-3)
    for step in (0, 1, 6, 7, 8, 20, 29, 30, 31, 32, 1000):
        expected = polynomial_decay(step, 31.2, 30, warmup_steps, 1e-3)
        rate = schedule(STEP_KINDS[kind](step))
        assert rate.dtype == tf.float32 and rate.shape == ()
        assert float(rate) == pytest.approx(expected, rel=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("power", [0.5, 1, 2])
def test_polynomial_decay_equals_keras_after_the_warmup(power):
    ours = PolynomialDecay(10.0, 100, 20, end_learning_rate=0.01, power=power)
    keras_decay = keras.optimizers.schedules.PolynomialDecay(
        10.0, decay_steps=81, end_learning_rate=0.01, power=power
    )
    for step in (20, 21, 50, 99, 100, 101, 150):
        # Keras writes 1 - p / D, whose error of 2**-24 is up to D times larger in
        # the little that is left near the end: its square root, for power 0.5.
        tolerance = 10.0 * (2.0**-24 * 4) ** min(power, 1.0)
        expected = float(keras_decay(step - 20))
        assert float(ours(step)) == pytest.approx(expected, abs=tolerance)


def test_polynomial_decay_boundaries_are_exact_in_float32():
    schedule = PolynomialDecay(31.2, 2_512, 1_000)
    assert float(schedule(0)) == 0.0
    assert float(schedule(1_000)) == np.float32(31.2)
    assert float(schedule(2_513)) == np.float32(1e-4)
    assert float(schedule(10**6)) == np.float32(1e-4)


@pytest.mark.parametrize("kind", STEP_KINDS)
@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_linear_warmup_equals_its_formula_over_a_schedule(kind, warmup_steps):
    def plain(step):
        return 0.4 if step <= 6 else 0.04 if step <= 9 else 0.004

    schedule = LinearWarmup(piecewise(), warmup_steps, initial=0.1)
    for step in range(12):
        expected = linear_warmup(step, plain, warmup_steps, 0.1)
        rate = schedule(STEP_KINDS[kind](step))
        assert rate.dtype == tf.float32 and rate.shape == ()
        assert float(rate) == pytest.approx(expected, rel=FLOAT32_TOLERANCE)


def test_linear_warmup_over_a_number():
    schedule = LinearWarmup(1, warmup_steps=4)
    assert [float(schedule(step)) for step in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]


def test_linear_warmup_aims_at_where_the_schedule_is_when_it_ends():
    cosine = keras.optimizers.schedules.CosineDecay(1.0, decay_steps=100)
    schedule = LinearWarmup(cosine, warmup_steps=50)
    # Half of the cosine is over at step 50: the line ends at 0.5, not at 1.
    assert float(schedule(25)) == pytest.approx(0.25, rel=1e-6)
    assert float(schedule(50)) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(
    "schedule",
    [
        PolynomialDecay(10.0, 40, 5, end_learning_rate=0.1, power=0.5),
        LinearWarmup(0.5, 10, initial=0.1),
        LinearWarmup(piecewise(), 4),
        LinearWarmup(PolynomialDecay(10.0, 40), 4),
    ],
    ids=["polynomial", "warmup-number", "warmup-keras", "warmup-tfdp"],
)
def test_schedules_survive_serialisation(schedule):
    config = keras.optimizers.schedules.serialize(schedule)
    restored = keras.optimizers.schedules.deserialize(config)
    assert type(restored) is type(schedule)
    assert keras.optimizers.schedules.serialize(restored) == config
    for step in (0, 3, 7, 50):
        assert float(restored(step)) == float(schedule(step))


def test_a_saved_model_keeps_its_schedule(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(LinearWarmup(piecewise(), 4)), loss="mse")
    model.fit(np.ones((6, 2)), np.ones((6, 1)), batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.iterations) == 3
    # The fourth step has index 3: three quarters of 0.4.
    assert float(loaded.optimizer.learning_rate) == pytest.approx(0.3, rel=1e-6)


def test_the_schedule_drives_fit():
    """With gradient 1 in every step the weight falls by the sum of the rates."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(
        keras.optimizers.SGD(PolynomialDecay(1.0, total_steps=6, warmup_steps=2)),
        loss=lambda y_true, y_pred: y_pred,
    )
    before = float(model.get_weights()[0][0, 0])
    model.fit(np.ones((6, 1)), np.ones((6, 1)), batch_size=1, verbose=0)
    rates = [polynomial_decay(step, 1.0, 6, 2) for step in range(6)]
    moved = before - float(model.get_weights()[0][0, 0])
    # Six subtractions from a number of size 3 at most: 6 * 3 * 2**-24 = 1.1e-6.
    assert moved == pytest.approx(sum(rates), abs=1.1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LinearWarmup("0.1", 4),
        lambda: LinearWarmup(None, 4),
        lambda: LinearWarmup(-0.1, 4),
        lambda: LinearWarmup(float("nan"), 4),
        lambda: LinearWarmup(lambda step: 0.1, 4),
        lambda: LinearWarmup(0.1, -1),
        lambda: LinearWarmup(0.1, 4.5),
        lambda: LinearWarmup(0.1, True),
        lambda: LinearWarmup(0.1, 4, initial=-1),
        lambda: PolynomialDecay(-1.0, 10),
        lambda: PolynomialDecay("1.0", 10),
        lambda: PolynomialDecay(1.0, 0),
        lambda: PolynomialDecay(1.0, 10.0),
        lambda: PolynomialDecay(1.0, 10, -1),
        lambda: PolynomialDecay(1.0, 10, 10),
        lambda: PolynomialDecay(1.0, 10, power=0),
        lambda: PolynomialDecay(1.0, 10, end_learning_rate=float("inf")),
        lambda: PolynomialDecay(1.0, 10, end_learning_rate=2.0),
        lambda: PolynomialDecay(1e-5, 10),
    ],
)
def test_nonsense_is_refused_when_the_schedule_is_made(make):
    with pytest.raises(ConfigurationError, match="Received"):
        make()


def test_scale_learning_rate_is_exported():
    assert scale_learning_rate is pure_scale_learning_rate
