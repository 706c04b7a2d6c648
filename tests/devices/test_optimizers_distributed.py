"""LARS and LAMB on two replicas, each with other data, against one device with all."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import stock_strategy
from tests.support.slow_rows import covering
from tfdp.optimizers import LAMB, LARS
from tfdp.schedules import LinearWarmup

# One form of each; the others differ by numbers that no replica sees.
COVERING = ("lars-classic", "lamb-nvlamb")

FORMS = {
    "lars-classic": lambda rate, **kw: LARS(rate, 0.9, 0.1, weight_decay=0.1, **kw),
    "lars-unscaled": lambda rate, **kw: LARS(
        rate, 0.9, 0.1, form="unscaled", weight_decay=0.1, **kw
    ),
    "lars-mlperf": lambda rate, **kw: LARS(
        rate, 0.9, 0.1, form="mlperf", weight_decay=0.1, **kw
    ),
    "lamb-paper": lambda rate, **kw: LAMB(rate, weight_decay=0.1, **kw),
    "lamb-nvlamb": lambda rate, **kw: LAMB(
        # Stock strategies clip before the sum; a bound that is not met shows the rest.
        rate,
        form="nvlamb",
        weight_decay=0.1,
        global_clipnorm=100.0,
        **kw,
    ),
    "lamb-keras": lambda rate, **kw: LAMB(rate, form="keras", weight_decay=0.1, **kw),
}

# The two sums add the same numbers in another order: a few roundings of 2**-24 per
# gradient. Adam divides by the root of a square of the same size, so an update is off
# by as many roundings, unless the gradient nearly cancels; epsilon 1e-3 bounds that to
# 2**-24 / 1e-3 = 6e-5 of a step of 0.1. Six steps: 4e-5, where a replica that missed
# the other's data would be off by the size of a step, 2e-3 and more.
TOLERANCE = 4e-5


def train(strategy, make_optimizer, epochs=2):
    generator = np.random.default_rng(11)
    words = generator.integers(0, 12, (24, 3))
    targets = generator.normal(size=(24, 2)).astype("float32")
    keras.utils.clear_session()
    keras.utils.set_random_seed(12)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(12, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(6, activation="tanh"),
                keras.layers.LayerNormalization(),
                keras.layers.Dense(2),
            ]
        )
        model.compile(make_optimizer(), loss="mse", jit_compile=False)
    before = model.get_weights()
    data = tf.data.Dataset.from_tensor_slices((words, targets)).batch(8)
    model.fit(data, epochs=epochs, shuffle=False, verbose=0)
    return before, model.get_weights()


@pytest.fixture(scope="module")
def two_replicas():
    """Without TensorFlow's collectives, which several strategies of a process share.

    How the gradients are summed does not matter to an optimizer.
    """
    return stock_strategy()


def arguments_of(form):
    return {"epsilon": 1e-3} if form.startswith("lamb") else {}


def assert_equal_to_one_device(two_replicas, make_optimizer, epochs=1):
    """Trains both ways; gives the weights that two replicas ended with."""
    before, one = train(tf.distribute.get_strategy(), make_optimizer, epochs)
    _, two = train(two_replicas, make_optimizer, epochs)
    for start, a, b in zip(before, one, two, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)
        assert np.abs(a - start).max() > 50 * TOLERANCE
    return two


@pytest.mark.worth_seconds(18)
@pytest.mark.parametrize("form", covering(FORMS, COVERING))
def test_two_replicas_equal_one_device(form, two_replicas):
    def make_optimizer():
        rate = LinearWarmup(0.1, warmup_steps=3, initial=0.05)
        return FORMS[form](rate, **arguments_of(form))

    assert_equal_to_one_device(two_replicas, make_optimizer, epochs=2)


@pytest.mark.parametrize(
    "form", covering(["lars-classic", "lamb-keras"], ["lars-classic"])
)
def test_moving_average_on_two_replicas(form, two_replicas):
    def make_optimizer():
        ema = {"use_ema": True, "ema_momentum": 0.5}
        return FORMS[form](0.1, **ema, **arguments_of(form))

    assert_equal_to_one_device(two_replicas, make_optimizer, epochs=2)


@pytest.mark.parametrize(
    "form", covering(["lars-classic", "lamb-keras"], ["lamb-keras"])
)
def test_exclusions_reach_the_replicas(form, two_replicas):
    """An update sees a replica's variable, which has no path to look up."""
    results = []
    for patterns in (["kernel", "embeddings"], []):

        def make_optimizer(patterns=patterns):
            return FORMS[form](
                0.1, exclude_from_weight_decay=patterns, **arguments_of(form)
            )

        results.append(assert_equal_to_one_device(two_replicas, make_optimizer))
    # The kernel of the last layer decays in one of the runs only.
    assert np.abs(results[0][-2] - results[1][-2]).max() > 10 * TOLERANCE


def test_loss_scaling_on_two_replicas(two_replicas):
    def make_optimizer():
        return keras.optimizers.LossScaleOptimizer(
            FORMS["lars-mlperf"](0.1), initial_scale=1024.0
        )

    assert_equal_to_one_device(two_replicas, make_optimizer, epochs=2)
