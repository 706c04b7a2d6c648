"""Steps outside of graphs: Keras' compute the whole batch once, others get a graph."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import largest_difference, make_strategy
from tfdp.errors import ConfigurationError

OPTIMIZERS = keras.optimizers
# By name: an optimizer; each keeps its state in another way.
UPDATES = {
    "adam": lambda: OPTIMIZERS.Adam(0.01),
    "clipped-average": lambda: OPTIMIZERS.SGD(
        0.05,
        momentum=0.9,
        global_clipnorm=0.1,
        use_ema=True,
        ema_overwrite_frequency=3,
    ),
    "accumulation": lambda: OPTIMIZERS.Adam(0.01, gradient_accumulation_steps=2),
    "loss-scaling": lambda: OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.Adam(0.01)),
    "lamb": lambda: tfdp.optimizers.LAMB(0.01),
    "muon": lambda: OPTIMIZERS.Muon(0.01, weight_decay=0.1),
}
SHARDS = {
    "whole": {},
    "optimizer": {"shard": "optimizer", "shard_min_bytes": 0},
    "offloaded": {"shard": "optimizer", "shard_min_bytes": 0, "offload": "optimizer"},
    "gradients": {"shard": "gradients", "shard_min_bytes": 0},
}
X = np.random.default_rng(0).random((50, 6), np.float32)
Y = np.random.default_rng(1).integers(0, 3, 50)


def model_of(optimizer):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu", kernel_constraint="unit_norm"),
            layers.BatchNormalization(),
            layers.Dropout(0.3, seed=3),
            layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss, metrics=["accuracy"], run_eagerly=True)
    return model


def numbers_of(model):
    """What two epochs of 50 rows by 16 report; the last batch has 2 rows."""
    options = {"batch_size": 16, "verbose": 0}
    history = model.fit(X, Y, epochs=2, shuffle=False, **options).history
    return history, model.predict(X, **options), model.evaluate(X, Y, **options)


def copies_of(variable):
    return [copy.numpy() for copy in variable.value.values]


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("update", UPDATES)
def test_the_weights_are_one_devices_to_the_bit(update, shard):
    one = model_of(UPDATES[update])
    history, predicted, evaluated = numbers_of(one)
    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:1", "CPU:2"], **SHARDS[shard])
    with strategy.scope():
        several = model_of(UPDATES[update])
    history_3, predicted_3, evaluated_3 = numbers_of(several)
    assert largest_difference(one, several) == 0.0
    np.testing.assert_array_equal(predicted, predicted_3)
    # A metric's sum is kept as three thirds of it: 2 roundings a batch, 4 batches.
    np.testing.assert_allclose(evaluated, evaluated_3, rtol=1e-6)
    np.testing.assert_allclose(history["loss"], history_3["loss"], rtol=1e-6)
    for weight in several.weights:
        first, *others = copies_of(weight)
        for other in others:
            np.testing.assert_array_equal(first, other)


class ByHand(keras.Model):
    """Two optimizers that are built in the step; it divides by the replicas itself."""

    def __init__(self):
        super().__init__()
        self.words, self.hidden = keras.layers.Embedding(5, 4), keras.layers.Dense(4)
        self.head, self.second = keras.layers.Dense(1), OPTIMIZERS.Adam(0.02)

    def call(self, x):
        words = self.words(keras.ops.cast(x[:, :2] * 4, "int32"))
        return self.head(self.hidden(x) + keras.ops.sum(words, 1))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            error = self(x) - tf.cast(y, tf.float32)[:, None]
            mean = tf.reduce_mean(error**2)
            loss = mean / self.distribute_strategy.num_replicas_in_sync
        head = self.head.trainable_variables
        others = [*self.words.trainable_variables, *self.hidden.trainable_variables]
        gradients = tape.gradient(loss, [*head, *others])
        self.second.apply(gradients[: len(head)], head)
        self.optimizer.apply(gradients[len(head) :], others)
        return {"loss": loss}


def test_what_a_step_makes_every_replica_has():
    found = []
    for strategy in (None, make_strategy(3)):
        with strategy.scope() if strategy else contextlib.nullcontext():
            keras.utils.set_random_seed(2)
            model = ByHand()
            model.compile(OPTIMIZERS.Adam(0.01), run_eagerly=True)
        model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
        found.append(model)
    one, several = found
    assert largest_difference(one, several) == 0.0
    made = [*several.weights, *several.optimizer.variables, *several.second.variables]
    assert {len(copies_of(variable)) for variable in made} == {3}


def test_a_step_may_run_within_the_scope():
    strategy = make_strategy(2)
    with strategy.scope():
        model = model_of(UPDATES["adam"])
        numbers_of(model)
        model.train_on_batch(X[:7], Y[:7])
    assert largest_difference(model_of(UPDATES["adam"]), model) > 1e-3


ADDS_ROWS = {
    "shards": {"shard": "optimizer", "shard_min_bytes": 0},
    "sum": {"communication": tfdp.Communication(repeated_rows="sum")},
    "neither": {},
}
WORDS = np.random.default_rng(2).integers(0, 5, (32, 6))
LENGTHS = np.random.default_rng(3).normal(size=(32, 2)).astype("float32")


def table_after(options, *, run_eagerly):
    """A table of 5 words after 4 batches, each with every word several times."""
    keras.utils.set_random_seed(1)
    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], **options)
    with strategy.scope():
        table = keras.layers.Embedding(5, 3)
        layers = [table, keras.layers.Flatten(), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
        adam = OPTIMIZERS.Adam(0.01, clipvalue=1e-3)
        model.compile(adam, "mse", run_eagerly=run_eagerly)
    model.fit(WORDS, LENGTHS, batch_size=8, shuffle=False, verbose=0)
    return table.embeddings.numpy()


@pytest.mark.worth_seconds(3)
@pytest.mark.parametrize("row", ADDS_ROWS)
def test_repeated_rows_are_added_where_a_sum_over_replicas_adds_them(row):
    # Rates of 0.01 and 4 updates: rounding of a gradient moves Adam by 4e-2 x 1e-6; the
    # rows one by one, each clipped and squared, move it by more than 1e-3.
    eager = table_after(ADDS_ROWS[row], run_eagerly=True)
    in_graph = table_after(ADDS_ROWS[row], run_eagerly=False)
    np.testing.assert_allclose(eager, in_graph, rtol=0, atol=1e-6)
    other = table_after(ADDS_ROWS["neither"], run_eagerly=True)
    assert row == "neither" or np.max(np.abs(eager - other)) > 1e-4


class UsedRows(keras.optimizers.SGD):
    """Moves the momentum of the rows that a batch uses, as lazy optimizers do."""

    def update_step(self, gradient, variable, learning_rate):
        if not isinstance(gradient, tf.IndexedSlices):
            return super().update_step(gradient, variable, learning_rate)
        momentum = self.momentums[self._get_variable_index(variable)]
        before = tf.gather(tf.convert_to_tensor(momentum), gradient.indices)
        change = 0.9 * before - self.learning_rate * gradient.values - before
        step = tf.IndexedSlices(change, gradient.indices, gradient.dense_shape)
        self.assign_add(momentum, step)
        moved = tf.gather(tf.convert_to_tensor(momentum), gradient.indices)
        self.assign_add(
            variable, tf.IndexedSlices(moved, gradient.indices, gradient.dense_shape)
        )


@pytest.mark.worth_seconds(3)
def test_rows_stay_rows_for_an_optimizer_that_asks():
    found = []
    for eagerly in (False, True):
        keras.utils.set_random_seed(1)
        with tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], **ADDS_ROWS["sum"]).scope():
            table = keras.layers.Embedding(10_000, 8)
            layers = [table, keras.layers.Flatten(), keras.layers.Dense(2)]
            model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
            model.compile(UsedRows(0.1, momentum=0.9), "mse", run_eagerly=eagerly)
        model.fit(WORDS, LENGTHS, batch_size=8, shuffle=False, verbose=0)
        model.fit(WORDS + 50, LENGTHS, batch_size=8, shuffle=False, verbose=0)
        found.append(table.embeddings.numpy())
    # A few roundings of numbers below 1. (In a table below 16 KiB the sum is dense in a
    # graph, too.) Momentum of all rows would move words of the first
    # fit in the second one.
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-5)


REFUSED = {
    "parameters": (
        {"shard": "parameters", "shard_min_bytes": 0},
        "is stored in shards",
    ),
    "compression": (
        {
            "communication": tfdp.Communication(
                compression=tfdp.compression.TopK(0.1), compression_across="replicas"
            )
        },
        "compression",
    ),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_acts_between_replicas_is_refused(row):
    options, words = REFUSED[row]
    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], **options)
    with strategy.scope():
        model = model_of(lambda: OPTIMIZERS.SGD(0.1))
    with pytest.raises(ConfigurationError, match=rf"(?s){words}.*run_eagerly=False"):
        model.fit(X, Y, verbose=0)
    # As a graph it trains.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    assert model.fit(X, Y, verbose=0).history["loss"][0] > 0


def batches(strategy):
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(20)
    return list(strategy.experimental_distribute_dataset(dataset))


@pytest.mark.parametrize("functions_run_eagerly", [False, True])
def test_a_loop_outside_of_graphs_gets_a_graph_for_each_call(functions_run_eagerly):
    """What is Python in it, such as a rate, runs at each call."""
    strategy, rate = make_strategy(2), [0.0]

    def step(rows):
        total = tf.distribute.get_replica_context().all_reduce("SUM", rows[:5])
        if tf.reduce_sum(total) < 0:  # a tensor
            total = tf.zeros_like(total)
        return tf.reduce_sum(total) * rate[0], tf.random.normal([])

    tf.random.set_seed(3)
    sums, draws = [], []
    tf.config.run_functions_eagerly(functions_run_eagerly)
    try:
        for batch in batches(strategy):
            rate[0] += 1.0
            total, drawn = strategy.run(step, args=(batch,))
            sums.append(strategy.experimental_local_results(total)[0].numpy())
            draws += [float(one) for one in strategy.experimental_local_results(drawn)]
        assert tf.config.functions_run_eagerly() is functions_run_eagerly
    finally:
        tf.config.run_functions_eagerly(False)
    own = [np.concatenate([X[0:5], X[10:15]]), np.concatenate([X[20:25], X[30:35]])]
    expected = [own[0].sum(), 2 * own[1].sum(), 3 * X[40:50].sum()]
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    assert len(set(draws)) == len(draws)


def test_keras_trains_with_functions_that_run_eagerly():
    one = model_of(UPDATES["adam"])
    numbers_of(one)
    with make_strategy(3).scope():
        several = model_of(UPDATES["adam"])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        several.compile(UPDATES["adam"](), loss, metrics=["accuracy"])
    tf.config.run_functions_eagerly(True)
    try:
        numbers_of(several)
    finally:
        tf.config.run_functions_eagerly(False)
    assert largest_difference(one, several) == 0.0
