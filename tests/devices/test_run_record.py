"""`callbacks.RunRecord` in a fit, beside what Keras and `Traffic` say of the same."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import stock_strategy
from tfdp.callbacks import RunRecord, StepTimeline, Traffic
from tfdp.errors import ConfigurationError, RunRecordWarning
from tfdp.step.observers import observers_of
from tfdp.tools.commands.cli import main
from tfdp.tools.runs.facts import facts_of
from tfdp.tools.runs.read import read_run
from tfdp.tools.runs.run_file import RunFile

ROWS, BATCH = 45, 8
GRADIENT_BYTES = 20


def data(rows=ROWS):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 4)).astype("float32"), rng.normal(size=(rows, 1))


def make(strategy=None, **compile_options):
    strategy = strategy or tfdp.DataParallelStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        options = {"jit_compile": False, **compile_options}
        model.compile(keras.optimizers.SGD(0.01), "mse", **options)
    return model


def fit(folder, model, epochs=2, callbacks=(), **arguments):
    """What Keras reports, and the one start in the directory."""
    record = RunRecord(folder)
    history = model.fit(
        *data(),
        batch_size=BATCH,
        epochs=epochs,
        verbose=0,
        callbacks=[record, *callbacks],
        **arguments,
    ).history
    assert str(record.path) == str(folder / "worker-0.jsonl")
    (session,) = read_run(folder).sessions
    return history, session.first


@pytest.mark.quick
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_the_record_agrees_with_keras_and_with_traffic(tmp_path, steps_per_execution):
    """Six batches, the last one of 5 rows; the last execution has two steps of four."""
    model = make(steps_per_execution=steps_per_execution)
    before = time.time()
    history, run = fit(tmp_path, model, callbacks=[Traffic()], validation_data=data(20))
    assert [line.steps for line in run.steps] == (
        [1] * 12 if steps_per_execution == 1 else [4, 2] * 2
    )
    assert sum(line.samples for line in run.steps) == 2 * ROWS
    assert [run.steps[-1].epoch, run.steps[-1].batch, run.end.step] == [1, 6, 12]
    sent = [line.within_bytes for line in run.steps]
    assert sum(sent) == 12 * 2 * GRADIENT_BYTES
    assert sum(sent) == sum(6 * each for each in history["bytes_within_hosts"])
    assert {line.between_bytes for line in run.steps} == {0}
    for epoch, logs in enumerate(entry.logs for entry in run.epochs):
        for name in ("loss", "val_loss"):
            assert logs[name] == history[name][epoch]
    # Keras reports the mean over the epoch so far.
    losses = [line.loss for line in run.steps if line.batch == 6]
    assert losses == history["loss"]
    assert before <= run.start.began_seconds <= time.time()
    assert run.start.replicas == 2 and run.start.workers == 1
    assert "2 replicas: CPU:0, CPU:1" in run.start.settings["strategy"]
    assert run.start.settings["batch"] == str(BATCH)
    assert "5 weights, 5 of them trained" in run.start.settings["model"]
    asked = [line for line in run.steps if line.peak_bytes is not None]
    assert asked and all(line.resident_bytes <= line.peak_bytes for line in asked)
    for line in run.steps:
        if steps_per_execution == 1:
            assert 0 <= line.input_seconds <= line.step_seconds
        else:
            assert line.input_seconds is None


def test_the_times_are_the_whole_of_the_training(tmp_path):
    _, run = fit(tmp_path, make(), epochs=3, validation_data=data())
    seconds = sum(line.seconds for line in run.steps)
    # Clocks are read once for each; sums of dozens of floats.
    assert seconds == pytest.approx(run.steps[-1].at_seconds, rel=1e-9)
    assert run.steps[-1].at_seconds < run.epochs[-1].at_seconds < run.end.at_seconds
    # The validation of an epoch is in the first step of the next one.
    validated = [line.validation_seconds for line in run.steps if line.batch == 1]
    told = [epoch.validation_seconds for epoch in run.epochs]
    assert validated == [0.0, *told[:2]] and min(told) > 0


class Sleeps(keras.callbacks.Callback):
    """Between two steps, at the end of one or before the other."""

    def __init__(self, event):
        super().__init__()
        setattr(self, f"on_train_batch_{event}", self.sleep)
        self.batch = {"begin": 4, "end": 3}[event]

    def sleep(self, batch, logs=None):
        if batch == self.batch:
            time.sleep(0.5)


@pytest.mark.parametrize("event", ["begin", "end"])
def test_what_other_callbacks_do_is_between_steps(tmp_path, event):
    _, run = fit(tmp_path, make(), epochs=1, callbacks=[Sleeps(event)])
    slept = [line.seconds - line.step_seconds >= 0.5 for line in run.steps]
    assert slept == [False, False, False, False, True, False]
    assert run.steps[4].longest_seconds >= 0.5


def test_slow_input_is_seen(tmp_path):
    def wait(x):
        time.sleep(0.2)
        return x

    x, y = data(32)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    slow = batches.map(
        lambda x, y: (
            tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), (8, 4)),
            y,
        )
    )
    make().fit(slow, epochs=2, verbose=0, callbacks=[RunRecord(tmp_path)])
    lines = read_run(tmp_path).sessions[0].first.steps
    waited = sum(line.input_seconds for line in lines[1:])
    # A batch takes 0.2 s to make, and nothing else of a step takes a fraction of that;
    # some are made while others are trained on.
    assert waited > 0.5 * sum(line.step_seconds for line in lines[1:])


def test_an_epoch_of_unknown_length_and_padding(tmp_path):
    x, y = data(21)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    batches = batches.apply(tf.data.experimental.assert_cardinality(3))
    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], pad_batches=True)
    endless = batches.filter(lambda x, y: True)
    make(strategy).fit(endless, epochs=2, verbose=0, callbacks=[RunRecord(tmp_path)])
    run = read_run(tmp_path).sessions[0].first
    # Filling is no sample.
    assert [line.samples for line in run.steps] == [8, 8, 5] * 2


@pytest.mark.parametrize("kind", ["none", "stock", "eager"])
def test_what_is_not_known_is_left_out(tmp_path, kind):
    strategy = {
        "none": tf.distribute.get_strategy(),
        "stock": stock_strategy(),
    }.get(kind)
    history, run = fit(tmp_path, make(strategy, run_eagerly=kind == "eager"), epochs=1)
    assert len(run.steps) == 6
    assert [entry.logs["loss"] for entry in run.epochs] == history["loss"]
    samples = {line.samples for line in run.steps}
    assert samples == ({8, 5} if kind == "eager" else {None})
    within = {line.within_bytes for line in run.steps}
    assert within == ({0} if kind == "none" else {None})


def test_weights_are_what_they_are_without(tmp_path):
    models = [make(), make()]
    fit(tmp_path, models[0])
    models[1].fit(*data(), batch_size=BATCH, epochs=2, verbose=0)
    for mine, theirs in zip(*(m.get_weights() for m in models), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_next_training_is_recorded_behind_the_first(tmp_path):
    model = make()
    fit(tmp_path, model, epochs=1)
    extended = model.distribute_strategy.extended
    assert observers_of(model, object) == []
    assert not extended.reducer.transport.traffic.meters
    model.fit(*data(), batch_size=BATCH, verbose=0)  # without it: nothing is added
    model.fit(
        *data(),
        batch_size=BATCH,
        initial_epoch=1,
        epochs=2,
        verbose=0,
        callbacks=[RunRecord(tmp_path)],
    )
    first, second = facts_of(read_run(tmp_path)).starts
    assert (first.first_step, first.steps) == (0, 6)
    assert (second.first_step, second.steps) == (6, 6)
    assert first.lost_steps == 0


class Fails(keras.callbacks.Callback):
    """In the middle of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            raise KeyboardInterrupt


def test_a_training_that_fails_leaves_what_it_did(tmp_path, capsys):
    model = make()
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, model, callbacks=[Fails()])
    (start,) = facts_of(read_run(tmp_path)).starts
    assert (start.steps, start.has_ended) == (4, False)
    assert main(["report", str(tmp_path)]) == 0
    assert "no end was written" in capsys.readouterr().out
    model.fit(*data(), batch_size=BATCH, verbose=0, callbacks=[RunRecord(tmp_path)])
    assert facts_of(read_run(tmp_path)).starts[1].has_ended


def test_a_full_disk_ends_the_record_and_not_the_training(tmp_path, monkeypatch):
    def full(self, entry):
        if self.path.stat().st_size > 3000:
            raise OSError(28, "No space left on device")
        add(self, entry)

    add = RunFile.add
    monkeypatch.setattr(RunFile, "add", full)
    with pytest.warns(RunRecordWarning, match="No space left") as warned:
        history, run = fit(tmp_path, make())
    assert len(warned) == 1 and len(history["loss"]) == 2
    assert 0 < len(run.steps) < 12


def test_where_nothing_can_be_written_training_does_not_begin(tmp_path):
    tmp_path.joinpath("file").write_text("", "utf-8")
    with pytest.raises(ConfigurationError, match="cannot be recorded"):
        fit(tmp_path / "file", make())


@pytest.mark.parametrize("directory", [None, 3, "", b""])
def test_what_is_no_directory_is_refused(directory):
    with pytest.raises(ConfigurationError, match="directory"):
        RunRecord(directory)


@pytest.mark.worth_seconds(8)
def test_a_trace_in_the_same_directory_shows_overlap(tmp_path, capsys):
    """The layers are large enough for TensorFlow's profiler to see their exchange."""
    with tfdp.DataParallelStrategy(["CPU:0", "CPU:1"]).scope():
        layers = [keras.layers.Dense(512) for _ in range(3)]
        model = keras.Sequential([keras.Input((512,)), *layers])
        model.compile("sgd", "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(320, 512)).astype("float32")
    callbacks = [
        RunRecord(tmp_path),
        StepTimeline(tmp_path / "step.trace.json", step=5),
    ]
    model.fit(x, x, batch_size=64, epochs=2, verbose=0, callbacks=callbacks)
    assert main(["report", str(tmp_path)]) == 0
    assert "of exchanges behind computing" in capsys.readouterr().out
    (trace,) = facts_of(read_run(tmp_path)).traces
    assert [replica.rank for replica in trace.replicas] == [0, 1]
    assert 0 <= trace.replicas[1].hidden_share <= 1
    page = (tmp_path / "report.html").read_text("utf-8")
    assert 'href="./step.trace.json"' in page and "replica 1" in page
