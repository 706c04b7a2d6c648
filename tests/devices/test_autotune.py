"""`callbacks.Autotune` in one process: the training is the same, and the fastest stays.

Of two replicas two numbers are added, and a + b is b + a: with them every bit of the
training is compared with one that tunes nothing. Of three the order counts.
"""

import itertools

import keras
import numpy as np
import pytest

import tfdp
from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    make_strategy,
    rounding_bound,
)
from tfdp.callbacks import Autotune
from tfdp.errors import ConfigurationError
from tfdp.exchange.reducer import Reducer
from tfdp.tools.callbacks import autotune as module

# Gradients of 1,584 + 132 + 660 + 20 bytes: one bucket, four of these, three of those.
SIZES = [(64, 64), (700, 700)]
# 3 settings of 5 steps, and 2 rounds of 3 settings: 45 steps, and some after them.
STEPS = 60
BATCH = 22  # of 3 replicas 8, 7 and 7 rows


def fitted(
    callback, replicas=2, steps=STEPS, shard="none", engine="tensorflow", **more
):
    with make_strategy(replicas, shard=shard, engine=engine).scope():
        model = dense_model()
        model.compile(
            more.pop("optimizer", lambda: keras.optimizers.Adam(0.01))(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **{"jit_compile": False, **more},
        )
    x, y = classification_data(BATCH * 12 - 5)
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=steps // 12,
        shuffle=False,
        verbose=0,
        callbacks=callback
        if isinstance(callback, list)
        else [callback] * bool(callback),
    )
    return model, history.history


def tuned(**more):
    return Autotune(**{"steps": 3, "rounds": 2, "sizes": SIZES, **more})


def own_sizes():
    return tfdp.Communication(engine="tensorflow")


@pytest.fixture
def clock(monkeypatch):
    """Makes a step take as long as `seconds_of` says of the size of its buckets."""

    class Clock:
        seconds_of = staticmethod(lambda bucket_bytes: 1.0)
        model_of = staticmethod(lambda: None)
        now = 0.0

        def perf_counter(self):
            self.now += self.seconds_of(self.callback.bucket_bytes_now)
            return self.now

    class Watched(Autotune):
        @property
        def bucket_bytes_now(self):
            return self._reducer.communication.bucket_bytes

    found = Clock()

    def make(seconds_of, **more):
        found.seconds_of = seconds_of
        found.callback = Watched(**{"steps": 3, "rounds": 2, "sizes": SIZES, **more})
        return found.callback

    monkeypatch.setattr(module, "time", found)
    return make


@pytest.mark.worth_seconds(6)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"steps_per_execution": 4, "steps": 192},
        {
            "optimizer": lambda: keras.optimizers.SGD(
                0.05, momentum=0.9, global_clipnorm=1.0, gradient_accumulation_steps=3
            )
        },
        {"shard": "optimizer"},
        pytest.param({"jit_compile": True}, marks=pytest.mark.slow),
    ],
    ids=["plain", "executions", "accumulation", "shard", "jit"],
)
def test_a_training_that_tunes_is_the_same_bit_for_bit(more):
    callback = tuned()
    (mine, my_history), (theirs, history) = (
        fitted(callback, **more),
        fitted(None, **more),
    )
    assert callback.chosen is not None and len(callback.lines) > 8
    assert my_history == history
    pairs = zip(
        [*mine.weights, *mine.optimizer.variables],
        [*theirs.weights, *theirs.optimizer.variables],
        strict=True,
    )
    for a, b in pairs:
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert int(mine.optimizer.iterations) == int(theirs.optimizer.iterations) > 0


class Broken(Exception):
    """What breaks a fit off."""


@pytest.mark.worth_seconds(7)
@pytest.mark.parametrize("broken_at", [7, 50])
def test_a_training_that_goes_on_from_a_checkpoint(tmp_path, broken_at):
    """Broken off while it tunes, or after that: it tunes anew, and the bits are those
    of a training that neither was broken off nor tuned."""
    steps = itertools.count(1)

    def break_off(batch, logs):
        if next(steps) == broken_at:
            raise Broken

    def callbacks():
        keep = tfdp.callbacks.Checkpoint(tmp_path, every_steps=1, on_signal=False)
        return [keep, tuned()]

    with pytest.raises(Broken):
        fitted(
            [*callbacks(), keras.callbacks.LambdaCallback(on_train_batch_end=break_off)]
        )
    mine, _ = fitted(callbacks())
    theirs, _ = fitted(None)
    assert int(mine.optimizer.iterations) == STEPS
    assert largest_difference(mine, theirs) == 0.0


def test_of_three_replicas_only_rounding_differs():
    options = {"replicas": 3, "optimizer": lambda: keras.optimizers.SGD(0.05)}
    mine, _ = fitted(tuned(), **options)
    theirs, _ = fitted(None, **options)
    # A row's gradient is at most |x| <= 3 x 4.5 in an entry, the softmax's at most 1.
    bound = rounding_bound(mine, STEPS, BATCH, gradient_bound=14.0, learning_rate=0.05)
    assert largest_difference(mine, theirs) <= bound


@pytest.mark.quick
def test_the_fastest_stays(clock):
    callback = clock(lambda size: {64: 1.0, 700: 3.0}.get(size, 2.0))
    model, _ = fitted(callback)
    assert callback.chosen == tfdp.Communication(
        engine="tensorflow", bucket_bytes=64, first_bucket_bytes=64
    )
    strategy = model.distribute_strategy
    assert strategy.communication == callback.chosen
    gradients = [weight.value for weight in model.trainable_variables]
    assert len(strategy.plan(gradients)) == 4
    assert callback.lines[-1] == (
        "communication=tfdp.Communication(bucket_bytes=64, first_bucket_bytes=64, "
        "engine='tensorflow')"
    )
    slower = next(line for line in callback.lines if "slower" in line)
    assert "33.3% slower, with 2 launches more a step (3, not 1)" in slower


def test_each_setting_is_traced_once_and_the_last_trace_is_the_winner_s(
    clock, monkeypatch
):
    """The first replica's buckets, in each trace of a step of 22 rows or of 17."""
    plan, counts = Reducer.plan, []

    def noted(self, tensors):
        buckets = plan(self, tensors)
        counts.append(len(buckets))
        return buckets

    monkeypatch.setattr(Reducer, "plan", noted)
    fitted(clock(lambda size: {64: 1.0}.get(size, 2.0)))
    # The state that rides along is in the buckets, too.
    kinds = sorted(set(counts))
    assert len(kinds) == 3, counts
    assert len(counts) <= 2 * 2 * len(kinds)


def test_what_is_as_fast_changes_nothing(clock):
    callback = clock(lambda size: 1.0)
    model, _ = fitted(callback)
    assert callback.chosen == own_sizes() == model.distribute_strategy.communication
    assert "Chosen: the program's own sizes" in callback.lines[-2]


def test_a_training_that_ends_before_keeps_its_sizes(clock, capsys):
    callback = clock(lambda size: {64: 1.0}.get(size, 2.0))
    model, _ = fitted(callback, steps=12)
    assert callback.chosen == own_sizes() == model.distribute_strategy.communication
    assert "the training ended after 3 settings" in callback.lines[-1]
    assert f"tfdp: {callback.lines[-1]}" in capsys.readouterr().out
    # And another training begins anew, and goes to its end.
    x, y = classification_data(BATCH * 48)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[callback])
    assert callback.chosen.bucket_bytes == 64


def test_after_an_error_it_begins_with_the_program_s_own_sizes():
    """The seventh step is one of the second setting's."""
    steps, callback = itertools.count(1), tuned()

    def break_off(batch, logs):
        if next(steps) == 7:
            raise Broken

    breaks = keras.callbacks.LambdaCallback(on_train_batch_end=break_off)
    model, _ = fitted(None, steps=12)
    x, y = classification_data(BATCH * 12)
    data = {"x": x, "y": y, "batch_size": BATCH, "verbose": 0}
    with pytest.raises(Broken):
        model.fit(**data, callbacks=[callback, breaks])
    assert model.distribute_strategy.communication != own_sizes()
    model.fit(**data, callbacks=[callback])
    assert model.distribute_strategy.communication == own_sizes() == callback.chosen


def test_the_simulator_chooses_sizes_that_differ():
    callback = Autotune(steps=3, rounds=2, settings=1)
    with make_strategy(2, engine="tensorflow").scope():
        model = keras.Sequential(
            [keras.Input((64,)), *[keras.layers.Dense(64) for _ in range(12)]]
        )
        model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((240, 64), "float32")
    model.fit(x, x, batch_size=8, epochs=1, verbose=0, callbacks=[callback])
    # 199,680 bytes, in two buckets of half of them; of 64 KiB there would be more.
    assert callback.lines[1].startswith("trial 1: ")
    assert "launch" in callback.lines[1]


@pytest.mark.parametrize(
    "replicas,engine,message",
    [(1, "auto", "one replica sends nothing"), (2, "auto", "no buckets")],
)
def test_where_nothing_acts_it_says_so(replicas, engine, message, capsys):
    callback = tuned()
    model, _ = fitted(callback, replicas=replicas, engine=engine, steps=12)
    assert message in callback.lines[0] and message in capsys.readouterr().out
    assert callback.chosen == model.distribute_strategy.communication


def synchronized():
    sync = tfdp.sync.LocalSGD(every=4, across="replicas")
    return tfdp.DistributedOptimizer(keras.optimizers.SGD(0.1), sync=sync)


@pytest.mark.parametrize(
    "more,message",
    [
        ({"run_eagerly": True}, "run_eagerly=True"),
        ({"shard": "gradients"}, "bounds what is in memory"),
        ({"shard": "parameters"}, "bounds what is in memory"),
        (
            {"optimizer": synchronized, "engine": "in_process"},
            "most steps send nothing",
        ),
    ],
)
def test_where_it_must_not_act_it_is_refused(more, message):
    with pytest.raises(ConfigurationError, match=message):
        fitted(tuned(), **more)


def test_a_sync_that_has_no_effect_on_one_host_is_not_counted():
    sync = tfdp.sync.LocalSGD(every=4)
    with tfdp.auto_strategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = tfdp.DistributedOptimizer(keras.optimizers.SGD(0.1), sync=sync)
        model.compile(optimizer, "mse", jit_compile=False)
    assert module.why_refused(model) is None


def test_with_compression_it_is_refused():
    strategy = tfdp.DataParallelStrategy(
        ["CPU:0", "CPU:1"],
        communication=tfdp.Communication(
            compression=tfdp.compression.Int8(), compression_across="replicas"
        ),
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(ConfigurationError, match="--allow-lossy"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[tuned()])


def test_without_a_strategy_it_is_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(ConfigurationError, match="Autotune inspects replicas"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[tuned()])


@pytest.mark.parametrize(
    "arguments",
    [
        {"steps": 2},
        {"steps": 3.0},
        {"settings": 0},
        {"rounds": 1},
        {"sizes": []},
        {"sizes": [5]},
        {"sizes": [(0, 5)]},
        {"sizes": [(5, True)]},
    ],
)
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ConfigurationError, match="Received"):
        Autotune(**arguments)
