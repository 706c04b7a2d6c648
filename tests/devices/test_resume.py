"""`tfdp.callbacks.Checkpoint`: a fit that was broken off ends as if it had not been.

The reference is the same program, undisturbed, without the callback. Kills, signals and
several hosts are in tests/processes/test_resume.py.
"""

import contextlib
import json
import random
import signal
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.devices.test_checkpoint import make_model
from tests.support.parity import classification_data, make_strategy
from tfdp._private import frames
from tfdp._private.keras_loops import wrap_loop
from tfdp.callbacks.training_state import put_back_random, random_now
from tfdp.checkpoint import writer
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError

SAMPLES, ROWS, EPOCHS = 130, 12, 2


class Broken(Exception):
    """What breaks a fit off."""


class BreakOff(keras.callbacks.Callback):
    def __init__(self, step, how=None):
        super().__init__()
        self.step, self.how, self.done = step, how, 0

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1
        if self.done == self.step:
            if self.how is None:
                raise Broken
            signal.raise_signal(self.how)


def test_draws_of_python_and_numpy_go_on():
    kept = json.loads(json.dumps(random_now()))
    expected = random.random(), np.random.normal()
    assert put_back_random(kept)
    assert (random.random(), np.random.normal()) == expected


class Shuffled(keras.utils.PyDataset):
    """Shuffled twice: by Keras with Python's generator, and by one of its own."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y
        self.order, self.random = np.arange(10), np.random.default_rng(3)

    def __len__(self):
        return 10

    def __getitem__(self, index):
        first = self.order[index] * 13
        return self.x[first : first + 13], self.y[first : first + 13]

    def on_epoch_end(self):
        self.random.shuffle(self.order)


def input_of(kind):
    x, y = classification_data(SAMPLES)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES, seed=5)
    dataset = dataset.batch(ROWS)

    def forever():
        while True:
            for first in range(0, SAMPLES, 13):
                yield x[first : first + 13], y[first : first + 13]

    return {
        "arrays": lambda: {"x": x, "y": y, "batch_size": ROWS},
        "dataset": lambda: {"x": dataset},
        "unknown-length": lambda: {"x": dataset.filter(lambda *_: True)},
        "repeated": lambda: {"x": dataset.repeat(), "steps_per_epoch": 7},
        "passes-across-epochs": lambda: {"x": dataset, "steps_per_epoch": 11},
        "generator": lambda: {"x": forever(), "steps_per_epoch": 7},
        "py-dataset": lambda: {"x": Shuffled(x, y)},
    }[kind]()


def run(replicas, kind, folder=None, *breaks, steps_per_execution=1, **options):
    model = make_model(replicas)
    keras.utils.set_random_seed(9)
    model.compile(
        model.optimizer,
        model.loss,
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    callbacks = [
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5, min_delta=0.3)
    ]
    if folder is not None:
        callbacks.insert(0, tfdp.callbacks.Checkpoint(folder, **options))
    history = model.fit(
        **(kind() if callable(kind) else input_of(kind)),
        epochs=EPOCHS,
        verbose=0,
        callbacks=[*callbacks, *breaks],
    )
    return model, history


def numbers_of(model):
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


def assert_ends_alike(expected, found):
    for mine, theirs in zip(numbers_of(expected[0]), numbers_of(found[0]), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert expected[1].epoch == found[1].epoch
    assert expected[1].history == found[1].history


KINDS = [
    *("arrays", "dataset", "unknown-length", "repeated", "passes-across-epochs"),
    *("generator", "py-dataset"),
]


@pytest.mark.parametrize(
    "replicas, kind, at",
    [
        *((0, kind, 14) for kind in KINDS),
        (2, "passes-across-epochs", 14),
        *(pytest.param(0, kind, 4, marks=pytest.mark.slow) for kind in KINDS),
        *(
            pytest.param(2, kind, at, marks=pytest.mark.slow)
            for kind in KINDS
            for at in (4, 14)
        ),
    ],
)
def test_broken_off_and_gone_on(tmp_path, replicas, kind, at):
    expected = run(replicas, kind)
    with pytest.raises(Broken):
        run(replicas, kind, tmp_path, BreakOff(at), every_steps=3)
    assert_ends_alike(expected, run(replicas, kind, tmp_path, every_steps=3))


@pytest.mark.parametrize("replicas", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_several_steps_in_one_execution(tmp_path, replicas):
    options = {"steps_per_execution": 4}
    expected = run(replicas, "dataset", **options)
    with pytest.raises(Broken):
        run(replicas, "dataset", tmp_path, BreakOff(5), every_steps=5, **options)
    found = run(replicas, "dataset", tmp_path, every_steps=5, **options)
    assert_ends_alike(expected, found)


class Counted(keras.callbacks.Callback):
    """Leads the loop over the steps, as several hosts do; what each epoch has made."""

    def on_train_begin(self, logs=None):
        self.made = []
        wrap_loop(next(frames.fits_around())["epoch_iterator"], self.around)

    @contextlib.contextmanager
    def around(self, made, planned, taken):
        yield
        self.made.append(made())


def test_who_leads_the_loop_already_still_does(tmp_path):
    with pytest.raises(Broken):
        run(0, "dataset", tmp_path, BreakOff(7), every_steps=3)
    model, counted = make_model(0), Counted()
    checkpoint = tfdp.callbacks.Checkpoint(tmp_path)
    callbacks = [counted, checkpoint, keras.callbacks.ReduceLROnPlateau("loss")]
    model.fit(**input_of("dataset"), epochs=2, verbose=0, callbacks=callbacks)
    assert counted.made == ["11", "11"]


def test_broken_off_again_and_again(tmp_path):
    expected = run(0, "dataset")
    for at in (5, 1, 7):
        with pytest.raises(Broken):
            run(0, "dataset", tmp_path, BreakOff(at), every_steps=2)
    assert_ends_alike(expected, run(0, "dataset", tmp_path, every_steps=2))


@pytest.mark.parametrize(
    "number, error", [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_saves_first(tmp_path, number, error, heard):
    expected = run(0, "dataset")
    before = signal.getsignal(number)
    with pytest.raises(error):
        run(0, "dataset", tmp_path, BreakOff(7, number), every_epochs=100)
    if error is KeyboardInterrupt:
        assert signal.getsignal(number) is before
    signal.signal(number, before)
    assert tfdp.checkpoint.Checkpoint(tmp_path).steps() == [7]
    assert_ends_alike(expected, run(0, "dataset", tmp_path))


def test_a_second_sigterm_does_not_change_how_the_program_ends(tmp_path):
    """Slurm sends one to those that are left, when the first has saved and ended."""
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with pytest.raises(SystemExit) as ended:
            run(0, "dataset", tmp_path, BreakOff(2, signal.SIGTERM), every_epochs=100)
        assert ended.value.code == 75
        signal.raise_signal(signal.SIGTERM)
        assert heard == []
        # A program that goes on all the same hears the next one, a minute later.
        signal.getsignal(signal.SIGTERM)._until = 0.0
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_time_passes(tmp_path):
    with pytest.raises(Broken):
        run(0, "dataset", tmp_path, BreakOff(3), every_seconds=1e-9)
    for thread in threading.enumerate():
        if thread.name == "tfdp-checkpoint":
            thread.join()
    # The third step breaks off before this callback, which is the last.
    assert tfdp.checkpoint.Checkpoint(tmp_path).steps() == [2, 1]


@pytest.mark.parametrize(
    "kind, options, steps",
    [
        ("dataset", {"every_steps": 11}, [11, 22]),
        ("dataset", {"every_steps": 8}, [8, 16, 22]),
        ("dataset", {"every_steps": 11, "every_epochs": 1}, [11, 22]),
        ("dataset", {"every_seconds": 1e-9}, [*range(1, 23)]),
        ("repeated", {"every_steps": 7, "steps_per_execution": 4}, [8, 16]),
        ("unknown-length", {"every_steps": 11}, [11, 22]),
    ],
)
def test_a_step_is_written_once(tmp_path, monkeypatch, kind, options, steps):
    """A save that is due after the last step of an epoch is that of its end."""
    saved, write = [], writer.write_manifest

    def noted(folder, manifest):
        saved.append(manifest.step)
        write(folder, manifest)

    monkeypatch.setattr(writer, "write_manifest", noted)
    expected = run(0, kind, tmp_path, **options)
    assert saved == steps
    with pytest.warns(CheckpointWarning, match="nothing to train"):
        found = run(0, kind, tmp_path, **options)
    assert found[1].history == expected[1].history


def test_a_training_that_is_over_says_so(tmp_path):
    expected = run(0, "dataset", tmp_path)
    with pytest.warns(CheckpointWarning, match="nothing to train"):
        found = run(0, "dataset", tmp_path)
    for mine, theirs in zip(numbers_of(expected[0]), numbers_of(found[0]), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    # And a later fit of the same model begins at its first epoch.
    again = found[0].fit(**input_of("dataset"), epochs=2, verbose=0)
    assert again.epoch == [0, 1]


NUMBERS = tf.data.Dataset.range(24)


def blocks(seed):
    return tf.data.Dataset.range(0, 24, 4).shuffle(6, seed=seed)


def block(first):
    return tf.data.Dataset.range(first, first + 4)


def shuffled_block(first):
    return block(first).shuffle(4, seed=9)


# Pipelines of numbers, and whether a resume reads ended passes again.
ORDERS = {
    "two": (lambda: NUMBERS.shuffle(24, seed=1).shuffle(9, seed=2), False),
    "three": (
        lambda: blocks(1).flat_map(block).shuffle(24, seed=2).shuffle(9, seed=3),
        False,
    ),
    "of the global seed": (lambda: NUMBERS.shuffle(24).shuffle(9).shuffle(5), False),
    "interleaved": (
        lambda: blocks(1).interleave(block, cycle_length=2).shuffle(9, seed=2),
        False,
    ),
    "in an interleave": (
        lambda: blocks(1).interleave(shuffled_block, cycle_length=2).shuffle(9, seed=2),
        False,
    ),
    "in parallel": (
        lambda: (
            blocks(1)
            .interleave(shuffled_block, cycle_length=2, num_parallel_calls=2)
            .prefetch(2)
            .shuffle(9, seed=2)
            .prefetch(2)
        ),
        False,
    ),
    "over one that stays": (
        lambda: (
            NUMBERS.shuffle(24, seed=1)
            .shuffle(9, seed=2, reshuffle_each_iteration=False)
            .repeat(1)
        ),
        False,
    ),
    "zipped": (
        lambda: (
            tf.data.Dataset.zip(blocks(1).flat_map(block), NUMBERS.shuffle(24, seed=3))
            .map(lambda a, b: a * 24 + b)
            .shuffle(9, seed=2)
        ),
        False,
    ),
    "of an outer one": (lambda: captured(NUMBERS.take(6).shuffle(6, seed=1)), True),
    "repeated": (lambda: NUMBERS.take(12).shuffle(12, seed=1).repeat(2), True),
    "joined": (
        lambda: (
            NUMBERS.take(8)
            .concatenate(NUMBERS.skip(8).shuffle(16, seed=1))
            .shuffle(9, seed=2)
        ),
        True,
    ),
    "cached": (
        lambda: blocks(1).flat_map(block).cache().shuffle(9, seed=2),
        False,
    ),
    "cached in order": (
        lambda: blocks(1).flat_map(block).cache().map(lambda n: n),
        True,
    ),
    "sampled": (
        lambda: tf.data.Dataset.sample_from_datasets(
            [NUMBERS.take(12).shuffle(12, seed=1), NUMBERS.skip(12).shuffle(3, seed=2)],
            seed=3,
            rerandomize_each_iteration=True,
        ).shuffle(9, seed=4),
        True,
    ),
}


def captured(numbers):
    return tf.data.Dataset.range(4).flat_map(lambda _: numbers).shuffle(9, seed=2)


class Weights(keras.callbacks.Callback):
    """The weight after each step: it depends on the order of all steps before."""

    def on_train_begin(self, logs=None):
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(self.model.weights[0].numpy()[0, 0]))


def weights_of_steps(numbers, folder=None, at=None, *, replicas=0, epochs=3, **options):
    """The weight after each step of this process; `at`: the step that breaks it off."""
    keras.utils.set_random_seed(5)
    data = numbers().batch(4).map(lambda n: (tf.cast(n, tf.float32)[:, None] / 24,) * 2)
    strategy = make_strategy(replicas) if replicas else tf.distribute.get_strategy()
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    seen = Weights()
    callbacks = [seen, *([] if at is None else [BreakOff(at)])]
    if folder is not None:
        callbacks.insert(0, tfdp.callbacks.Checkpoint(folder, every_steps=4))
    with contextlib.nullcontext() if at is None else pytest.raises(Broken):
        model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks, **options)
    return seen.seen


@pytest.mark.parametrize(
    "replicas, name",
    [*((0, name) for name in ORDERS), (2, "two"), (2, "of an outer one")],
)
def test_orders_of_later_epochs_go_on(tmp_path, capfd, replicas, name):
    """After the end of an epoch, and within the next."""
    numbers, reads_again = ORDERS[name]
    expected = weights_of_steps(numbers, replicas=replicas)
    assert len(expected) == 18
    begun = weights_of_steps(numbers, tmp_path, 15, replicas=replicas)
    assert begun == expected[:15]
    capfd.readouterr()
    at_end = weights_of_steps(numbers, tmp_path, 5, replicas=replicas)
    assert at_end == expected[12:17]
    assert ("2 whole passes" in capfd.readouterr().err) == reads_again
    within = weights_of_steps(numbers, tmp_path, replicas=replicas)
    assert within == expected[16:]


def test_an_order_without_a_seed_is_warned_of(tmp_path):
    model = make_model(0)
    tf.random.set_seed(None)
    x, y = classification_data(24)
    callback = tfdp.callbacks.Checkpoint(tmp_path)
    with pytest.warns(CheckpointWarning, match="shuffle=True without a seed"):
        model.fit(x, y, verbose=0, callbacks=[callback])
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    outer = dataset.shuffle(24)
    for unseeded in (
        dataset.shuffle(24),
        dataset.shuffle(24).shuffle(6, seed=1),
        dataset.batch(6).flat_map(
            lambda *parts: tf.data.Dataset.from_tensor_slices(parts).shuffle(6)
        ),
        dataset.take(2).flat_map(lambda *_: outer),
        dataset.map(lambda *row: row, num_parallel_calls=2, deterministic=False),
    ):
        with pytest.warns(CheckpointWarning, match="The order of the data changes"):
            model.fit(
                unseeded.batch(6),
                verbose=0,
                callbacks=[tfdp.callbacks.Checkpoint(tmp_path / str(id(unseeded)))],
            )


def test_other_data_is_refused(tmp_path):
    with pytest.raises(Broken):
        run(0, "dataset", tmp_path, BreakOff(10), every_steps=3)
    model = make_model(0)
    x, y = classification_data(24)
    callback = tfdp.callbacks.Checkpoint(tmp_path)
    with pytest.raises(DataError, match="An epoch has 2 batches"):
        model.fit(x, y, batch_size=12, epochs=3, verbose=0, callbacks=[callback])


def test_another_model_is_refused(tmp_path):
    run(0, "dataset", tmp_path)
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])
    model.compile("sgd", "mse")
    with pytest.raises(ConfigurationError, match="of another"):
        model.fit(
            np.ones((4, 12)),
            np.ones((4, 5)),
            verbose=0,
            callbacks=[tfdp.callbacks.Checkpoint(tmp_path)],
        )


def test_a_full_disk_does_not_end_the_training(tmp_path, monkeypatch):
    calls = []

    def full_at_first(*arguments):
        calls.append(1)
        if len(calls) < 2:
            raise OSError(28, "No space left on device")
        return write(*arguments)

    write = tfdp.checkpoint.writer.write_arrays
    monkeypatch.setattr("tfdp.checkpoint.writer.write_arrays", full_at_first)
    with pytest.warns(CheckpointWarning, match="No space left"):
        run(0, "dataset", tmp_path)
    assert tfdp.checkpoint.Checkpoint(tmp_path).steps() == [22]
