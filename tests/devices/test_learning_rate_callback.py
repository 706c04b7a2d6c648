"""The learning rate in the progress bar, in History and in TensorBoard's files."""

import contextlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import make_strategy, stock_strategy
from tfdp.callbacks import LearningRateLogger
from tfdp.errors import ConfigurationError
from tfdp.optimizers import LARS
from tfdp.schedules import LinearWarmup

STEPS, EPOCHS = 6, 2
# 0, 0.1, ... 1.1 and on: the mean over an epoch is far from its last value.
SCHEDULE_SLOPE = 0.1


def make_schedule():
    return LinearWarmup(100 * SCHEDULE_SLOPE, warmup_steps=100)


def make_model(optimizer=None, **arguments):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = optimizer or LARS(make_schedule(), trust_coefficient=1e-3)
    model.compile(optimizer, loss="mse", jit_compile=False, **arguments)
    return model


def fit(model, callbacks, verbose=0, **arguments):
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(STEPS * 4, 3)), generator.normal(size=(STEPS * 4, 1))
    return model.fit(
        x,
        y,
        batch_size=4,
        epochs=EPOCHS,
        verbose=verbose,
        callbacks=callbacks,
        **arguments,
    )


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches, self.epochs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(logs["learning_rate"])

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(logs["learning_rate"])


def test_batches_and_epochs_get_the_rate_of_their_last_step():
    recorder = Recorder()
    history = fit(make_model(), [LearningRateLogger(), recorder])
    steps = np.arange(STEPS * EPOCHS)
    # One product and one sum in float32.
    np.testing.assert_allclose(recorder.batches, SCHEDULE_SLOPE * steps, rtol=1e-6)
    np.testing.assert_allclose(recorder.epochs, [0.5, 1.1], rtol=1e-6)
    np.testing.assert_allclose(history.history["learning_rate"], [0.5, 1.1], rtol=1e-6)
    assert all(type(value) is float for value in recorder.batches + recorder.epochs)


def test_steps_per_execution_gives_the_rate_after_each_execution():
    recorder = Recorder()
    model = make_model(steps_per_execution=3)
    fit(model, [LearningRateLogger(), recorder])
    np.testing.assert_allclose(recorder.batches, [0.2, 0.5, 0.8, 1.1], rtol=1e-6)


def shown_rates(output):
    return [float(value) for value in re.findall(r"learning_rate: ([\d.e+-]+)", output)]


@pytest.mark.parametrize("validation_split", [0.0, 0.5])
def test_the_progress_bar_shows_the_rate_and_not_its_mean(capsys, validation_split):
    data = {"validation_split": validation_split} if validation_split else {}
    fit(make_model(), [LearningRateLogger()], verbose=1, **data)
    steps = STEPS if not validation_split else STEPS // 2
    rates = shown_rates(capsys.readouterr().out)
    # The bar redraws at most every 0.05 s, so which batches it shows depends on speed,
    # but what it shows is a rate of the schedule, and the last of an epoch is the last.
    schedule = SCHEDULE_SLOPE * np.arange(EPOCHS * steps)
    assert len(rates) >= EPOCHS
    for rate in rates:
        # Four decimals are shown.
        assert np.abs(schedule - rate).min() <= 0.5e-4
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(SCHEDULE_SLOPE * (EPOCHS * steps - 1), abs=0.5e-4)


def test_one_line_per_epoch_shows_the_rate_at_its_end(capsys):
    fit(make_model(), [LearningRateLogger()], verbose=2)
    rates = shown_rates(capsys.readouterr().out)
    assert rates == pytest.approx([0.5, 1.1], abs=0.5e-4)


def test_without_the_callback_nothing_is_shown(capsys):
    fit(make_model(), [], verbose=1)
    assert shown_rates(capsys.readouterr().out) == []


def read_scalars(directory, tag):
    """(step, value) of every scalar of this name in TensorBoard's event files."""
    found = []
    for path in sorted(directory.glob("**/events.out.tfevents.*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.tag == tag:
                    found.append((event.step, float(tf.make_ndarray(value.tensor))))
    return sorted(found)


def test_tensorboard_writes_the_rate_of_every_batch_and_epoch(tmp_path):
    # TensorFlow 2.21 no longer brings it, and its summaries need it.
    pytest.importorskip("tensorboard")
    tensorboard = keras.callbacks.TensorBoard(tmp_path, update_freq="batch")
    fit(make_model(), [LearningRateLogger(), tensorboard])
    batches = read_scalars(tmp_path / "train", "batch_learning_rate")
    steps = np.arange(STEPS * EPOCHS)
    assert [step for step, _ in batches] == list(steps + 1)
    np.testing.assert_allclose(
        [value for _, value in batches], SCHEDULE_SLOPE * steps, rtol=1e-6
    )
    epochs = read_scalars(tmp_path / "train", "epoch_learning_rate")
    # Keras' callback replaces the value of an epoch by the rate of the next step.
    np.testing.assert_allclose(epochs, [(0, 0.6), (1, 1.2)], rtol=1e-6)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_wrapped_optimizer_shows_the_rate_of_the_inner_one(wrapped):
    optimizer = keras.optimizers.SGD(0.01)
    if wrapped:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    history = fit(make_model(optimizer), [LearningRateLogger()])
    np.testing.assert_allclose(history.history["learning_rate"], 0.01, rtol=1e-6)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_multi_optimizer_gives_one_rate_each(wrapped):
    kernels = keras.optimizers.SGD(0.01, name="kernels")
    others = keras.optimizers.SGD(0.02, name="others")
    optimizer = keras.optimizers.MultiOptimizer(
        lambda variable: kernels if variable.path.endswith("kernel") else others
    )
    if wrapped:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    history = fit(make_model(optimizer), [LearningRateLogger()]).history
    np.testing.assert_allclose(history["learning_rate_kernels"], 0.01, rtol=1e-6)
    np.testing.assert_allclose(history["learning_rate_others"], 0.02, rtol=1e-6)


def test_with_accumulation_it_is_the_rate_of_the_micro_step():
    optimizer = keras.optimizers.SGD(make_schedule(), gradient_accumulation_steps=2)
    recorder = Recorder()
    fit(make_model(optimizer), [LearningRateLogger(), recorder])
    steps = np.arange(STEPS * EPOCHS)
    np.testing.assert_allclose(recorder.batches, SCHEDULE_SLOPE * steps, rtol=1e-6)


def test_a_changed_rate_is_seen_at_once():
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    recorder = Recorder()
    fit(make_model(keras.optimizers.SGD(0.4)), [halve, LearningRateLogger(), recorder])
    expected = [0.2] * STEPS + [0.1] * STEPS
    np.testing.assert_allclose(recorder.batches, expected, rtol=1e-6)


def test_under_a_strategy():
    with stock_strategy().scope():
        model = make_model()
    history = fit(model, [LearningRateLogger()])
    np.testing.assert_allclose(history.history["learning_rate"], [0.5, 1.1], rtol=1e-6)


def test_a_model_without_an_optimizer_is_refused():
    callback = LearningRateLogger()
    callback.set_model(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    with pytest.raises(ConfigurationError, match="compile"):
        callback.on_train_begin()


def test_a_loop_without_logs_is_left_alone():
    callback = LearningRateLogger()
    callback.set_model(make_model())
    callback.on_train_batch_end(0)
    callback.on_epoch_end(0)


class TwoOptimizers(keras.Model):
    """As a GAN: compiled with optimizers of its own, and none of Keras'."""

    def __init__(self):
        super().__init__()
        self.one, self.other = keras.layers.Dense(1), keras.layers.Dense(1)

    def compile(self, one_optimizer, other_optimizer):
        super().compile(jit_compile=False)
        self.one_optimizer, self.other_optimizer = one_optimizer, other_optimizer

    def call(self, x):
        return self.one(x) + self.other(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.losses.MeanSquaredError()(y, self(x))
        for layer, optimizer in (
            (self.one, self.one_optimizer),
            (self.other, self.other_optimizer),
        ):
            trained = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, trained), trained)
        return {"loss": loss}


@pytest.mark.parametrize("replicas", [0, 2])
def test_of_a_model_with_optimizers_of_its_own_each_has_a_rate(replicas):
    with make_strategy(replicas).scope() if replicas else contextlib.nullcontext():
        model = TwoOptimizers()
        model.build((None, 3))
        model.compile(keras.optimizers.SGD(0.01), LARS(make_schedule()))
    history = fit(model, [LearningRateLogger()]).history
    assert {name for name in history if "rate" in name} == {
        "learning_rate_one_optimizer",
        "learning_rate_other_optimizer",
    }
    np.testing.assert_allclose(history["learning_rate_one_optimizer"], [0.01] * EPOCHS)
    ends = SCHEDULE_SLOPE * (STEPS * np.arange(1, EPOCHS + 1) - 1)
    np.testing.assert_allclose(history["learning_rate_other_optimizer"], ends)
