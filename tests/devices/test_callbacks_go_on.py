"""tfdp's callbacks beside `Checkpoint`, and beside an earlier fit that failed."""

import keras
import numpy as np
import pytest

from tests.devices.test_nan_guard import (
    bad_data,
    check_equal,
    compiled,
    fit,
    good_data,
)
from tests.support.parity import make_strategy
from tfdp.callbacks import AdaScale, Checkpoint, NaNGuard
from tfdp.errors import CheckpointWarning, ConfigurationError

pytestmark = [
    pytest.mark.filterwarnings("ignore::tfdp.errors.NotFiniteWarning"),
    pytest.mark.worth_seconds(6),
]


class Dies(keras.callbacks.Callback):
    """Ends a fit after so many steps, as if it were killed."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def sgd(rate=0.05):
    return lambda: keras.optimizers.SGD(rate, momentum=0.9)


def died(folder, data, make_callbacks, steps, epochs=1):
    """The callbacks of a training that died after so many steps."""
    callbacks = make_callbacks()
    # It saves after all others, so not the step in which this dies.
    saves = Checkpoint(folder, every_steps=1)
    with pytest.raises(KeyboardInterrupt):
        model = compiled(make_strategy(2), sgd())
        fit(model, data, *callbacks, saves, Dies(steps + 1), epochs=epochs)
    return callbacks


@pytest.mark.parametrize("guard_comes_first", [True, False])
def test_a_rollback_after_a_restart_goes_to_what_was_restored(
    tmp_path, guard_comes_first
):
    # Its bad batch is the third: the first after the restart.
    died(tmp_path, bad_data(), lambda: [NaNGuard("skip")], 2)
    model, guard = compiled(make_strategy(2), sgd()), NaNGuard("rollback")
    callbacks = [guard, Checkpoint(tmp_path)]
    fit(model, bad_data(), *callbacks[:: 1 if guard_comes_first else -1])
    assert guard.rollbacks == 1
    expected = compiled(make_strategy(2), sgd())
    fit(expected, bad_data(), NaNGuard("skip"))
    check_equal(model, expected)


def test_a_rollback_leaves_the_rate_that_a_callback_has_set():
    rates = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    model = compiled(make_strategy(2), sgd())
    falls = keras.callbacks.LearningRateScheduler(lambda epoch: 10.0**-epoch)
    fit(model, bad_data(), NaNGuard("rollback"), falls, Notes(), epochs=2)
    steps = len(rates) // 2
    np.testing.assert_allclose(rates, [1.0] * steps + [0.1] * steps)


def test_data_that_fails_leaves_no_guard_in_the_next_fit():
    x, y = good_data()

    def batches(is_broken):
        for _ in range(2):
            yield x[:8], y[:8]
        if is_broken:
            raise RuntimeError("no more")
        yield x[:8], y[:8]

    model = compiled(make_strategy(2), sgd())
    with pytest.raises(Exception, match="no more"):
        model.fit(batches(True), verbose=0, callbacks=[NaNGuard("skip")])
    x[:] = np.nan
    model.fit(x[:8], y[:8], batch_size=8, verbose=0)
    assert np.isnan(model.get_weights()[0]).any()


def test_a_fit_within_a_fit_leaves_the_guard_of_the_outer_one():
    x, y = bad_data()
    model = compiled(make_strategy(2), sgd())
    with model.distribute_strategy.scope():
        other = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1)])
        other.compile("sgd", "mse")

    class FitsAnother(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            other.fit(good_data()[0][:8], y[:8, None], batch_size=8, verbose=0)

    guard = NaNGuard("skip")
    fit(model, (x, y), guard, FitsAnother())
    assert guard.skipped_steps == 1
    assert np.isfinite(model.get_weights()[0]).all()


class OfAnotherVersion(keras.callbacks.Callback):
    def __init__(self, takes):
        super().__init__()
        self.takes = takes

    def state_to_keep(self):
        return {"number": 1}

    def take_back(self, state):
        if not self.takes:
            raise LookupError("another version")


def test_one_that_cannot_take_back_does_not_keep_the_others_from_it(tmp_path):
    died(tmp_path, good_data(), lambda: [OfAnotherVersion(True), NaNGuard("skip")], 3)
    guard = NaNGuard("skip")
    guard.skipped_steps = 7
    with pytest.warns(CheckpointWarning, match="^OfAnotherVersion start"):
        callbacks = [OfAnotherVersion(False), guard, Checkpoint(tmp_path)]
        fit(compiled(make_strategy(2), sgd()), good_data(), *callbacks)
    assert guard.skipped_steps == 0


def test_steps_that_were_left_out_before_a_restart_count(tmp_path):
    x, y = bad_data()
    whole = fit(compiled(make_strategy(2), sgd()), (x, y), NaNGuard("skip"))
    (guard,) = died(tmp_path, (x, y), lambda: [NaNGuard("skip")], 5)
    assert guard.skipped_steps == 1
    again = NaNGuard("skip")
    saves = Checkpoint(tmp_path)
    history = fit(compiled(make_strategy(2), sgd()), (x, y), saves, again)
    assert again.skipped_steps == 1
    assert history["skipped_steps"] == whole["skipped_steps"] == [1]


@pytest.mark.parametrize("scale_comes_first", [True, False])
def test_ada_scale_goes_on_from_a_checkpoint(tmp_path, scale_comes_first):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([9], [0.05, 0.02])
    data, whole = good_data(), AdaScale(schedule)
    expected = compiled(make_strategy(2), sgd())
    history = fit(expected, data, whole, epochs=2)
    died(tmp_path, data, lambda: [AdaScale(schedule)], 6, epochs=2)
    model, again = compiled(make_strategy(2), sgd()), AdaScale(schedule)
    callbacks = [again, Checkpoint(tmp_path)]
    found = fit(model, data, *callbacks[:: 1 if scale_comes_first else -1], epochs=2)
    assert (again.progress, again.gain) == (whole.progress, whole.gain)
    assert again.summary() == whole.summary()
    check_equal(model, expected)
    assert found["ada_scale_progress"] == history["ada_scale_progress"]


def test_a_callback_that_was_not_there_begins_anew_and_the_others_go_on(tmp_path):
    data = good_data()
    died(tmp_path, data, lambda: [], 3)
    saves = Checkpoint(tmp_path)
    with pytest.warns(CheckpointWarning, match="^NaNGuard start"):
        fit(compiled(make_strategy(2), sgd()), data, saves, NaNGuard("skip"))


@pytest.mark.parametrize(
    "other",
    [
        lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        lambda: keras.callbacks.ReduceLROnPlateau(),
    ],
)
def test_ada_scale_refuses_who_sets_the_rate_as_well(other):
    with pytest.raises(ConfigurationError, match="would set the learning rate"):
        fit(compiled(make_strategy(2), sgd()), good_data(), AdaScale(0.1), other())
