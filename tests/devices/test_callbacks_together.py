"""Callbacks that look at the same step: beside each other, and in a `fit` within one.

The reference is the same training with one of them alone: the same operations run on
the same numbers, so everything is equal to the last bit.
"""

import keras
import numpy as np
import pytest

from tests.devices.test_gradient_noise_scale import compiled, strategy_of
from tests.support.parity import classification_data
from tfdp.callbacks import (
    AdaScale,
    Autotune,
    GradientNoiseScale,
    NaNGuard,
    RunRecord,
    Traffic,
)
from tfdp.chain.norms import NoiseProbe
from tfdp.errors import ConfigurationError
from tfdp.step.observers import observers_of
from tfdp.tools.runs.read import read_run

ROWS, BATCH = 53, 12  # on 4 replicas the last batch has parts of 2, 2, 1 and no rows
SKIPS = pytest.mark.filterwarnings("ignore::tfdp.errors.NotFiniteWarning")


class Calls(keras.callbacks.Callback):
    """Calls a function with the model when an epoch begins."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_epoch_begin(self, epoch, logs=None):
        self.function(self.model)


def model_of(strategy, rate=0.05):
    return compiled(strategy, lambda: keras.optimizers.SGD(rate, momentum=0.9))


def fit(model, callbacks, data=None, epochs=2):
    model.fit(
        *(data or classification_data(ROWS)),
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return model.get_weights()


def samples_of(record):
    (session,) = read_run(record.directory).sessions
    return sum(line.samples for line in session.workers[0].steps)


def check_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_readers_of_gradients_share_one_probe_in_any_order():
    strategy = strategy_of()
    alone = AdaScale(0.05, scale=4)
    weights = fit(model_of(strategy), [alone])
    noise = GradientNoiseScale()
    fit(model_of(strategy), [noise])
    assert alone.progress > 6 and alone.gain > 1
    for place in (0, 2):
        scaled = AdaScale(0.05, scale=4)
        readers = [GradientNoiseScale(), GradientNoiseScale(1.0)]
        readers.insert(place, scaled)
        probes = []
        seen = Calls(
            lambda model, probes=probes: probes.append(
                len(observers_of(model, NoiseProbe))
            )
        )
        model = model_of(strategy)
        check_equal(fit(model, [*readers, seen]), weights)
        assert (scaled.progress, scaled.gain) == (alone.progress, alone.gain)
        assert set(probes) == {1}
        assert observers_of(model, object) == []
        # The rates of AdaScale make other weights, and their gradients other numbers.
        assert all(each.estimate.steps > 2 for each in readers)
        assert readers[0 if place else 1].estimate == scaled.estimate
    # At a rate of 0 all see the same gradients, alone or not.
    still, both = GradientNoiseScale(), [GradientNoiseScale(), GradientNoiseScale(1.0)]
    fit(model_of(strategy, 0.0), [still])
    fit(model_of(strategy, 0.0), both)
    assert both[0].estimate == still.estimate != both[1].estimate


@SKIPS
def test_a_fit_within_a_callback_leaves_the_others_of_its_kinds_on(tmp_path):
    """Before the outer step is traced, and after; with an error in the outer data."""
    x, y = classification_data(ROWS)
    x[BATCH + 7, 2] = np.nan
    strategy = strategy_of(2)
    found = []
    for is_nested in (False, True):
        scaled, guard = AdaScale(0.05, scale=4), NaNGuard("skip")
        record = RunRecord(tmp_path / f"outer {is_nested}")
        callbacks = [scaled, guard, Traffic(), record]

        def train_another(model, is_nested=is_nested):
            if is_nested:
                inner = RunRecord(tmp_path / "inner")
                others = [AdaScale(0.1), NaNGuard("skip"), Traffic(), inner]
                fit(model_of(strategy), others, epochs=1)

        model = model_of(strategy)
        callbacks.append(Calls(train_another))
        weights = fit(model, callbacks, (x, y))
        assert guard.skipped_steps == 2  # one in each epoch
        found.append((weights, (scaled.progress, scaled.gain, scaled.estimate)))
        found[-1] += (samples_of(record),)
        history = model.history.history
        found[-1] += (history["bytes_within_hosts"], history["skipped_steps"])
    (weights, *others), (nested_weights, *nested_others) = found
    check_equal(nested_weights, weights)
    assert nested_others == others
    assert others[1] == 2 * ROWS


def test_steps_that_another_fit_of_the_model_made_count_for_nothing():
    """The rate is 0, so that both trainings see the same gradients."""
    strategy = strategy_of(2)
    alone, beside = GradientNoiseScale(), GradientNoiseScale()
    fit(model_of(strategy, 0.0), [alone])
    inner = GradientNoiseScale()
    again = Calls(lambda model: fit(model, [inner], epochs=1))
    fit(model_of(strategy, 0.0), [beside, again])
    # The inner callback was in two trainings of one epoch each.
    assert beside.estimate == inner.estimate == alone.estimate


@pytest.mark.parametrize(
    "make, what",
    [
        (lambda: NaNGuard("skip"), "skip steps"),
        (lambda: AdaScale(0.1), "set the learning rate"),
        (lambda: Autotune(), "set sizes of buckets"),
    ],
)
def test_of_those_that_act_a_second_one_is_refused(make, what):
    tensorflow = strategy_of(2, engine="tensorflow")  # with buckets to tune
    with pytest.raises(ConfigurationError, match=f"Two callbacks.*{what}"):
        fit(model_of(tensorflow), [make(), make()])
    within = Calls(lambda model: fit(model, [make()]))
    with pytest.raises(ConfigurationError, match=f"Two callbacks.*{what}"):
        fit(model_of(tensorflow), [make(), within])
    # What the refused trainings have left is in nobody's way.
    fit(model_of(tensorflow), [make()], epochs=1)


def test_two_records_of_one_training_count_the_same(tmp_path):
    records = [RunRecord(tmp_path / "one"), RunRecord(tmp_path / "other")]
    fit(model_of(strategy_of(2)), records)
    for record in records:
        assert samples_of(record) == 2 * ROWS
