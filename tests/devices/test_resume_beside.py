"""`tfdp.callbacks.Checkpoint` beside other callbacks, optimizers, phases and faults.

Without a strategy, as what is tested does not depend on one; the reference is the same
program, undisturbed and without the callback, and every bit must be the same.
"""

import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.devices.test_resume import Broken
from tests.support.parity import make_strategy
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError
from tfdp.step.find_optimizers import optimizers_of

SAMPLES, ROWS, EPOCHS = 20, 4, 3
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(SAMPLES, 6)).astype("float32")
Y = RANDOM.normal(size=(SAMPLES, 1)).astype("float32")
END = keras.callbacks.Callback.on_train_batch_end.__name__


class Fault(keras.callbacks.Callback):
    """Raises, or sends a signal, at the `number`-th call of one of its methods."""

    def __init__(self, number, how=None, where=END):
        super().__init__()
        self.number, self.how = number, how
        setattr(self, where, self.strike)

    def strike(self, *_, **__):
        self.number -= 1
        if not self.number:
            if self.how is None:
                raise Broken
            signal.raise_signal(self.how)


def make(optimizer=None, *, at_once=1, frozen=None):
    layers = [keras.layers.Dense(6, activation="tanh") for _ in range(2)]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
    if frozen is not None:
        model.layers[frozen].trainable = False
    optimizer = optimizer or keras.optimizers.Adam(0.05)
    model.compile(optimizer, "mse", steps_per_execution=at_once)
    return model


def shuffled():
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return data.shuffle(SAMPLES, seed=4).batch(ROWS)


def train(model, callbacks, data=None, **options):
    data = shuffled() if data is None else data
    options = {"epochs": EPOCHS, "validation_data": (X[:5], Y[:5]), **options}
    return model, model.fit(data, callbacks=callbacks, verbose=0, **options)


def numbers_of(model):
    optimizers = [v for o in optimizers_of(model) for v in o.variables]
    return [v.numpy() for v in [*model.variables, *optimizers]]


def assert_goes_on(folder, program, *faults, has_history=True, **options):
    """The end of `program(callback, fault)`, broken off by the faults one by one."""
    options = options or {"every_steps": 2}

    def start(*fault):
        keras.backend.clear_session()
        keras.utils.set_random_seed(7)
        return program(
            lambda name="": tfdp.callbacks.Checkpoint(folder / f"of{name}", **options),
            list(fault),
        )

    for fault in faults:
        with pytest.raises((Broken, SystemExit)):
            start(fault)
    found = start()
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    expected = program(lambda name="": keras.callbacks.Callback(), [])
    for mine, theirs in zip(numbers_of(expected[0]), numbers_of(found[0]), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    if has_history:
        assert found[1].epoch == expected[1].epoch
        assert found[1].history == expected[1].history


def test_stopped_after_the_last_batch_of_an_epoch(tmp_path):
    def program(callback, fault):
        return train(make(), [callback(), *fault])

    assert_goes_on(tmp_path, program, Fault(5, signal.SIGTERM))


@pytest.mark.parametrize("at", [5, 7], ids=["last batch", "within"])
def test_epochs_of_unknown_length_are_printed_after_a_resume(tmp_path, capfd, at):
    def start(*fault):
        keras.utils.set_random_seed(7)
        data = shuffled().filter(lambda x, y: True)
        checkpoint = tfdp.callbacks.Checkpoint(tmp_path, every_steps=2)
        make().fit(data, epochs=EPOCHS, verbose=2, callbacks=[checkpoint, *fault])

    with pytest.raises(SystemExit):
        start(Fault(at, signal.SIGTERM))
    capfd.readouterr()
    start()
    lines = capfd.readouterr().out.splitlines()
    first = 1 if at == 5 else 2
    begun = [f"Epoch {number}/{EPOCHS}" for number in range(first, EPOCHS + 1)]
    assert [line for line in lines if line.startswith("Epoch")] == begun
    ended = [line for line in lines if line.startswith("5/5 - ")]
    assert len(ended) == len(begun) and all("loss: " in line for line in ended)


@pytest.mark.slow
def test_stopped_after_the_last_execution_of_an_epoch(tmp_path):
    def program(callback, fault):
        return train(make(at_once=3), [callback(), *fault])

    assert_goes_on(tmp_path, program, Fault(2, signal.SIGTERM))


def test_a_schedule_that_multiplies_does_so_once(tmp_path):
    def program(callback, fault):
        schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        return train(make(), [schedule, callback(), *fault])

    assert_goes_on(tmp_path, program, Fault(8))


def test_early_stopping_gives_back_the_best_weights(tmp_path):
    def program(callback, fault):
        # The first epoch is the best, and the fourth is the last.
        score = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: logs.update(score=-epoch)
        )
        stopping = keras.callbacks.EarlyStopping(
            "score", mode="max", patience=3, restore_best_weights=True
        )
        return train(make(), [score, stopping, callback(), *fault], epochs=6)

    assert_goes_on(tmp_path, program, Fault(18))


@pytest.mark.slow
def test_swapped_averages_are_swapped_back(tmp_path):
    def program(callback, fault):
        model = make(keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8))
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        return train(model, [swap, callback(), *fault])

    assert_goes_on(tmp_path, program, Fault(8), every_epochs=1)


class Reordered(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.order, self.random = np.arange(5), np.random.default_rng(3)

    def __len__(self):
        return 5

    def __getitem__(self, index):
        rows = slice(self.order[index] * ROWS, (self.order[index] + 1) * ROWS)
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self.random.shuffle(self.order)


@pytest.mark.slow
def test_an_initial_epoch_is_none_of_the_passes(tmp_path):
    def program(callback, fault):
        options = {"initial_epoch": 2, "epochs": 5}
        return train(make(), [callback(), *fault], Reordered(), **options)

    assert_goes_on(tmp_path, program, Fault(8))


@pytest.mark.filterwarnings("ignore:There is nothing to train")
@pytest.mark.parametrize(
    "directory", ["two", pytest.param("one", marks=pytest.mark.slow)]
)
def test_two_phases_read_one_dataset(tmp_path, directory):
    def program(callback, fault):
        data, model = shuffled(), make()
        names = ("a", "b") if directory == "two" else ("", "")
        train(model, [callback(names[0])], data, epochs=2)
        np.random.rand()
        return train(
            model,
            [callback(names[1]), *fault],
            data,
            epochs=4,
            initial_epoch=2 if directory == "one" else 0,
        )

    # In one directory the second phase goes on with the first one's history.
    assert_goes_on(
        tmp_path, program, Fault(4), Fault(5), has_history=directory == "two"
    )


class Adversaries(keras.Model):
    """Two optimizers, built in the first step, each with variables of its own."""

    def __init__(self):
        super().__init__()
        self.first = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])
        self.second = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        average = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
        self.for_first = keras.optimizers.Adam(0.05, **average)
        self.compile(self.for_first)
        self.for_second = keras.optimizers.Adam(0.02, **average)
        self.build((None, 6))

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, _ = data
        x += 0.1 * keras.random.normal(tf.shape(x))  # of the global generator
        for part, optimizer, sign in (
            (self.first, self.for_first, 1.0),
            (self.second, self.for_second, -1.0),
        ):
            with tf.GradientTape() as tape:
                loss = sign * tf.reduce_mean(tf.tanh(self(x)))
            variables = part.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_optimizers_of_a_step_of_ones_own(tmp_path):
    def program(callback, fault):
        return train(Adversaries(), [callback(), *fault], validation_data=None)

    assert_goes_on(tmp_path, program, Fault(8))


class Noisy(keras.Model):
    def train_step(self, data):
        x, y = data
        x += keras.random.normal((tf.shape(x)[0], 6))  # of the global generator
        return super().train_step((x, y))


def test_draws_of_replicas_go_on(tmp_path):
    def program(callback, fault):
        with make_strategy(2).scope():
            x = keras.Input((6,))
            model = Noisy(x, keras.layers.Dense(1)(x))
            model.compile(keras.optimizers.SGD(0.05), "mse")
        return train(model, [callback(), *fault], validation_data=None)

    assert_goes_on(tmp_path, program, Fault(8))


@pytest.mark.parametrize("step", [1, 3])
def test_a_signal_in_a_validation_still_ends_the_program(tmp_path, step, heard):
    fault = Fault(step, signal.SIGTERM, "on_test_begin")
    with pytest.raises(SystemExit) as ended:
        train(make(), [fault, tfdp.callbacks.Checkpoint(tmp_path)])
    assert ended.value.code == 75
    assert tfdp.checkpoint.Checkpoint(tmp_path).steps()[0] == 5 * step


def test_an_error_leaves_nothing_behind(tmp_path, heard):
    train(make(), [tfdp.callbacks.Checkpoint(tmp_path)], epochs=1)
    model = make()
    with pytest.raises(Broken):
        train(model, [tfdp.callbacks.Checkpoint(tmp_path), Fault(2)])
    # It begins at its first epoch, and a signal is not kept for who is gone.
    with pytest.raises(KeyboardInterrupt):
        train(model, [Fault(1, signal.SIGINT)])
    assert train(model, [])[1].epoch == [0, 1, 2]


def test_what_would_be_wrong_is_refused(tmp_path):
    folder = tmp_path / "of"

    def goes_on(error, match, model, data=None, **options):
        with pytest.raises(error, match=match):
            train(model, [tfdp.callbacks.Checkpoint(folder)], data, **options)

    data = shuffled()
    momentum = keras.optimizers.SGD(0.1, momentum=0.9)
    with pytest.raises(Broken):
        train(
            make(momentum, frozen=0),
            [Fault(8), tfdp.callbacks.Checkpoint(folder, every_steps=2)],
            data,
        )
    lion = keras.optimizers.Lion(0.1)
    goes_on(ConfigurationError, "another optimizer", make(lion, frozen=0))
    momentum = keras.optimizers.SGD(0.1, momentum=0.9)
    goes_on(ConfigurationError, "Freeze the same", make(momentum, frozen=1))
    goes_on(
        ConfigurationError,
        "read the dataset further",
        make(keras.optimizers.SGD(0.1, momentum=0.9), frozen=0),
        data,
    )
    fewer = shuffled().unbatch().batch(5)
    fewer = fewer.apply(tf.data.experimental.assert_cardinality(4))
    goes_on(
        DataError,
        "An epoch has 4 batches",
        make(keras.optimizers.SGD(0.1, momentum=0.9), frozen=0),
        fewer,
    )
    keras.config.set_dtype_policy("bfloat16")
    try:
        rounded = make(keras.optimizers.SGD(0.1, momentum=0.9), frozen=0)
    finally:
        keras.config.set_dtype_policy("float32")
    goes_on(ConfigurationError, "is of bfloat16", rounded)


def test_two_that_restore_are_refused(tmp_path):
    for other in (
        keras.callbacks.BackupAndRestore(tmp_path / "backup"),
        tfdp.callbacks.Checkpoint(tmp_path / "other"),
    ):
        with pytest.raises(ConfigurationError, match="Two callbacks"):
            train(make(), [tfdp.callbacks.Checkpoint(tmp_path / "of"), other])


def test_what_keras_does_not_know_is_warned_of(tmp_path):
    model = make()
    vars(model.layers[0])["counter"] = tf.Variable(0)
    base = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(SAMPLES, seed=4)
    data, held_out = base.skip(8).batch(ROWS), base.take(8).batch(ROWS)
    with (
        pytest.warns(CheckpointWarning, match="counter of"),
        pytest.warns(CheckpointWarning, match="validation_data reads the same"),
    ):
        train(
            model,
            [tfdp.callbacks.Checkpoint(tmp_path)],
            data,
            epochs=1,
            validation_data=held_out,
        )


class Nested(keras.Model):
    """Trains a part by the optimizer that the part was compiled with."""

    def __init__(self):
        super().__init__()
        self.part = make()
        self.build((None, 6))

    def call(self, x):
        return self.part(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        variables = self.part.trainable_variables
        self.part.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_an_optimizer_of_a_part_is_warned_of(tmp_path):
    model = Nested()
    model.compile()
    with pytest.warns(CheckpointWarning, match="the optimizer of"):
        train(model, [tfdp.callbacks.Checkpoint(tmp_path)], validation_data=None)
