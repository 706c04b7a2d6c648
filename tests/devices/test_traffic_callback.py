"""`callbacks.Traffic` in one process, beside counts by hand.

A dense layer of 4 x 1 weights and a bias has g = 5 x 4 = 20 bytes of gradients. To sum
them, every replica but the root sends them there and the root sends them back: over N
replicas 2 (N - 1) g bytes, and a ring cuts the same bytes otherwise.
"""

import glob

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import stock_strategy
from tfdp.callbacks import Traffic
from tfdp.errors import ConfigurationError

GRADIENT_BYTES = 20
ROWS, BATCH = 45, 9


class Batches(keras.callbacks.Callback):
    """What the logs of batches say."""

    def __init__(self):
        super().__init__()
        self.within = []

    def on_train_batch_end(self, batch, logs=None):
        self.within.append(logs["bytes_within_hosts"])


def dense():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def make(replicas=3, build=dense, optimizer=None, steps_per_execution=1, **options):
    strategy = tfdp.DataParallelStrategy(
        [f"CPU:{rank}" for rank in range(replicas)],
        communication=tfdp.Communication(**options.pop("communication", {})),
        **options,
    )
    return compiled(strategy, build, optimizer, steps_per_execution)


def compiled(strategy, build=dense, optimizer=None, steps_per_execution=1):
    with strategy.scope():
        model = build()
        model.compile(
            optimizer or keras.optimizers.SGD(0.01),
            "mse",
            steps_per_execution=steps_per_execution,
            jit_compile=False,
        )
    return model


def data(rows=ROWS):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 4)).astype("float32"), rng.normal(size=(rows, 1))


def fit(model, epochs=2, rows=ROWS, callbacks=(), **arguments):
    x, y = data(rows)
    return model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=epochs,
        verbose=0,
        callbacks=[Traffic(), *callbacks],
        **arguments,
    ).history


@pytest.mark.quick
@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_step_sends_its_gradients_there_and_back(
    replicas, engine, steps_per_execution
):
    """Five batches, the last of 5 rows: the last execution has two steps of three."""
    model = make(
        replicas,
        steps_per_execution=steps_per_execution,
        communication={"engine": engine},
    )
    batches = Batches()
    history = fit(model, rows=4 * BATCH + 5, callbacks=[batches])
    expected = 2 * (replicas - 1) * GRADIENT_BYTES
    assert history["bytes_within_hosts"] == [expected] * 2
    assert history["bytes_between_hosts"] == [0.0] * 2
    assert batches.within == [expected] * (2 * -(-5 // steps_per_execution))


def test_simulated_hosts_are_within_one():
    # Within each pair there and back, and between the pairs' first ones.
    history = fit(make(4, communication={"hierarchy": (2, 2)}), epochs=1)
    assert history["bytes_within_hosts"] == [3 * 2 * GRADIENT_BYTES]
    assert history["bytes_between_hosts"] == [0.0]


def test_accumulation_sends_in_the_last_of_its_steps_only():
    batches = Batches()
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
    history = fit(make(optimizer=optimizer), callbacks=[batches])
    update = 4 * GRADIENT_BYTES
    assert batches.within == [0.0, update] * 5
    # Two updates in the first epoch's five steps, three in the second's.
    assert history["bytes_within_hosts"] == [2 * update / 5, 3 * update / 5]


class Evaluates(keras.callbacks.Callback):
    """In the middle of an epoch, which has no callback that would tell."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.evaluate(*data(), batch_size=BATCH, verbose=0)


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_validation_is_left_out(steps_per_execution):
    """At stage 3 an evaluation gathers the weights, as a step does."""
    model = make(
        shard="parameters", shard_min_bytes=0, steps_per_execution=steps_per_execution
    )
    alone = fit(model, epochs=3)["bytes_within_hosts"]
    keras.utils.clear_session()
    model = make(
        shard="parameters", shard_min_bytes=0, steps_per_execution=steps_per_execution
    )
    batches = Batches()
    beside = fit(
        model,
        epochs=3,
        validation_data=data(),
        validation_freq=2,
        callbacks=[batches, Evaluates()],
    )
    assert beside["bytes_within_hosts"] == alone == [4 * GRADIENT_BYTES] * 3
    assert set(batches.within) == set(alone)


def embedded():
    tokens = keras.Input((4,), dtype="int32")
    rows = keras.layers.Embedding(50, 6)(tokens)
    return keras.Model(tokens, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
def test_slices_count_by_the_rows_that_a_step_has(engine):
    """Every replica sends its slices to both others, and each replica has 3 of 9 rows,
    in the last batch 2 of 5, 2 and 1: 4 slices for each row of 6 floats, an index."""
    # Adam's rows travel as they come.
    adam = keras.optimizers.Adam()
    model = make(build=embedded, optimizer=adam, communication={"engine": engine})
    batches = Batches()
    fit(model, epochs=1, rows=BATCH + 5, callbacks=[batches])
    dense_bytes = 4 * (4 * 6 + 1) * 4
    slice_bytes = 6 * 4 + 4
    if engine == "in_process":
        others = [0, 0]
        rows = [2 * 9, 2 * 5]
    else:
        # Their numbers travel first, of values and of indices; what is shorter is
        # filled up to the longest.
        others = [3 * 2 * 2 * 4] * 2
        rows = [2 * 9, 2 * 3 * 2]
    assert batches.within == [
        dense_bytes + 4 * n * slice_bytes + more
        for n, more in zip(rows, others, strict=True)
    ]


@pytest.mark.worth_seconds(5)
def test_the_next_training_counts_nothing():
    model = make()
    fit(model, epochs=1)
    engine = model.distribute_strategy.extended.reducer.transport
    assert not engine.traffic.meters
    history = model.fit(*data(), batch_size=BATCH, verbose=0).history
    assert set(history) == {"loss"}
    # One with it counts again, though there are graphs from the one before.
    assert fit(model, epochs=1)["bytes_within_hosts"] == [4 * GRADIENT_BYTES]


def test_weights_are_what_they_are_without():
    x, y = data()
    models = [make(), make()]
    models[1].set_weights(models[0].get_weights())
    for model, callbacks in zip(models, [[Traffic()], []], strict=True):
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    for mine, theirs in zip(*(m.get_weights() for m in models), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_tensorboard_and_the_progress_bar_show_it(tmp_path, capsys):
    model = make(2)
    x, y = data()
    model.fit(
        x,
        y,
        batch_size=BATCH,
        verbose=2,
        callbacks=[Traffic(), keras.callbacks.TensorBoard(tmp_path)],
    )
    assert "bytes_within_hosts: 40" in capsys.readouterr().out
    written = {
        value.tag
        for path in glob.glob(f"{tmp_path}/train/*")
        for event in tf.compat.v1.train.summary_iterator(path)
        for value in event.summary.value
    }
    assert {"epoch_bytes_within_hosts", "epoch_bytes_between_hosts"} <= written


def test_without_a_strategy_nothing_is_sent():
    history = fit(compiled(tf.distribute.get_strategy()), epochs=1)
    assert history["bytes_within_hosts"] == history["bytes_between_hosts"] == [0.0]


def test_a_stock_strategy_of_several_replicas_is_refused():
    model = compiled(stock_strategy())
    x, y = data(8)
    with pytest.raises(ConfigurationError, match="MirroredStrategy"):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[Traffic()])


def test_eager_steps_are_refused():
    model = make(2)
    model.run_eagerly = True
    with pytest.raises(ConfigurationError, match="run_eagerly"):
        fit(model)
