"""`tfdp.losses.all_rows`: losses whose rows see each other are one device's."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, largest_difference, make_strategy
from tests.support.replica_steps import replica_function
from tfdp.errors import ConfigurationError
from tfdp.losses import all_rows, all_sum, local_mean

ops = keras.ops


def dice(y, p):
    y, p = ops.one_hot(ops.reshape(y, (-1,)), 5), ops.softmax(p)
    return 1 - 2 * ops.sum(y * p) / (ops.sum(y * y) + ops.sum(p * p))


def contrastive(y, p):
    """Cross entropy of each row's likeness to all others of its class."""
    z = p / ops.norm(p, axis=1, keepdims=True)
    alike = ops.matmul(z, ops.transpose(z)) / 0.2
    y = ops.reshape(y, (-1, 1))
    same = ops.cast(ops.equal(y, ops.transpose(y)), p.dtype)
    log = alike - ops.logsumexp(alike, axis=1, keepdims=True)
    return -ops.mean(ops.sum(same * log, axis=1) / ops.sum(same, axis=1))


LOSSES = {
    "dice": dice,
    "contrastive": contrastive,
    "root": lambda y, p: ops.sqrt(ops.mean(ops.square(p))),
}


def of_all(loss):
    return lambda y, p: local_mean(loss(all_rows(y), all_rows(p)))


def root(y, p):
    return ops.sqrt(ops.mean(ops.square(all_rows(p))))


def trained(strategy, loss, samples, **options):
    x, y = classification_data(samples=samples)
    with (strategy or tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(3)
        layers = [keras.Input((12,)), keras.layers.Dense(7, "tanh")]
        model = keras.Sequential([*layers, keras.layers.Dense(5)])
        options = {"jit_compile": False, **options}
        model.compile(
            keras.optimizers.SGD(0.1), of_all(loss), metrics=[root], **options
        )
    fit_options = {"batch_size": 12, "shuffle": False, "verbose": 0}
    return model, model.fit(x, y, **fit_options).history


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("samples", [48, 41, 37], ids=lambda n: f"{n} rows")
@pytest.mark.parametrize(
    "replicas, options",
    [
        (2, {}),
        (3, {}),
        (3, {"engine": "tensorflow"}),
        (3, {"shard": "optimizer"}),
        (3, {"shard": "parameters"}),
    ],
    ids=["2", "3", "3-tensorflow", "3-optimizer", "3-parameters"],
)
def test_a_loss_of_all_rows_is_one_devices(replicas, options, samples, loss):
    """Of 37 rows in batches of 12 one is left: replicas have none."""
    one, expected = trained(None, LOSSES[loss], samples)
    several, found = trained(make_strategy(replicas, **options), LOSSES[loss], samples)
    # 4 updates of 0.1 times gradients of a few units, whose terms are up to 1 / 0.2.
    assert largest_difference(one, several) < 2e-6
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)


@pytest.mark.parametrize(
    "options", [{"steps_per_execution": 2}, {"run_eagerly": True}], ids=str
)
def test_however_keras_runs_the_step(options):
    one, expected = trained(None, dice, 48, **options)
    several, found = trained(make_strategy(3), dice, 48, **options)
    assert largest_difference(one, several) < 2e-6
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.parametrize("eager", [False, True])
def test_rows_come_in_the_order_of_the_batch(eager):
    x = np.arange(22, dtype="float32").reshape(11, 2)

    def step(rows):
        joined = all_rows({"x": rows, "number": tf.cast(rows[:, 0], tf.int64)})
        return joined["x"], joined["number"]

    parts = np.split(x, [5, 6])  # 5, 1 and 5 rows
    for joined, numbers in replica_function(make_strategy(3), step, eager)(parts):
        np.testing.assert_array_equal(joined, x)
        np.testing.assert_array_equal(numbers, x[:, 0])


def test_outside_of_replicas_they_are_those_there_are():
    x = tf.constant([[1.0], [2.0]])
    assert all_rows(x) is x
    with make_strategy(2).scope():
        assert all_rows(x) is x
    with make_strategy(1).scope():
        assert all_rows(x) is x


@pytest.mark.parametrize(
    "x",
    [
        tf.constant(1.0),
        tf.ragged.constant([[1.0], [2.0, 3.0]]),
        tf.sparse.from_dense([[1.0]]),
        {"a": None},
        [1.0, 2.0],
    ],
    ids=["number", "ragged", "sparse", "nothing", "numbers"],
)
def test_what_has_no_rows_is_refused(x):
    with pytest.raises(ConfigurationError, match="a row for each sample"):
        all_rows(x)


def test_branches_refuse_it():
    def in_a_branch(y, p):
        return tf.cond(ops.sum(p) > 0, lambda: dice(all_rows(y), p), lambda: 0.0)

    with make_strategy(2).scope():
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])
        model.compile("sgd", in_a_branch, jit_compile=False)
    x, y = classification_data(samples=24)
    with pytest.raises(ConfigurationError, match="a branch or a loop"):
        model.fit(x, y, batch_size=12, verbose=0)


def test_replicas_that_train_apart_refuse_it():
    strategy = make_strategy(2)
    x, y = classification_data(samples=24)
    with strategy.scope():
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])
        apart = tfdp.sync.LocalSGD(2, across="replicas")
        optimizer = tfdp.DistributedOptimizer(keras.optimizers.SGD(0.1), sync=apart)
        model.compile(optimizer, of_all(dice), jit_compile=False)
    with pytest.raises(ConfigurationError, match="sync"):
        model.fit(x, y, batch_size=12, verbose=0)


def test_a_compiled_replica_refuses_it():
    with pytest.raises(ConfigurationError, match="jit_compile=False"):
        trained(make_strategy(2), dice, 24, jit_compile=True)


class Center(keras.layers.Layer):
    """Rows minus the mean of all rows, by sums and a count."""

    def call(self, x):
        rows = ops.cast(ops.shape(x)[0], x.dtype)
        total, count = all_sum([ops.sum(x, axis=0), rows])
        return x - total / count


class Attention(keras.layers.Layer):
    """Each row attends to all rows of the batch."""

    def call(self, x):
        others = all_rows(x)
        return ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(others))), others)


class CentreIfPositive(keras.layers.Layer):
    """Exchanges in a branch, which all replicas take together."""

    def call(self, x):
        total = all_sum(tf.reduce_sum(x, 0))
        return tf.cond(
            tf.reduce_sum(total) > -1e3,
            lambda: x - 0.01 * all_sum(tf.reduce_sum(tf.square(x), 0)),
            lambda: x,
        )


@pytest.mark.parametrize("layer", [Center, Attention, CentreIfPositive])
@pytest.mark.parametrize("is_eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("samples", [48, 37], ids=lambda n: f"{n} rows")
def test_a_layer_of_all_rows_is_one_devices(samples, is_eager, layer):
    """Keras calls the layer outside of replicas too, to infer its shapes. Of 37 rows in
    batches of 12 one is left: two of three replicas have none."""
    x, y = classification_data(samples=samples)
    models = []
    for strategy in (tf.distribute.get_strategy(), make_strategy(3)):
        with strategy.scope():
            keras.utils.set_random_seed(3)
            layers = [keras.layers.Dense(7, "tanh"), layer(), keras.layers.Dense(5)]
            models.append(keras.Sequential([keras.Input((12,)), *layers]))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            models[-1].compile("sgd", loss, jit_compile=False, run_eagerly=is_eager)
        models[-1].fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    # 8 updates by 0.01 of gradients of at most a few units, in float32.
    assert largest_difference(*models) < 1e-6


@pytest.mark.parametrize("replicas", [2, 3])
def test_rows_may_be_gathered_from_rows_of_all(replicas):
    # The gradient of tf.gather is slices, which TensorFlow's all_gather refuses.
    def hardest(y, p):
        p = all_rows(p)
        return local_mean(ops.mean(ops.square(ops.take(p, [0, 0, 2], axis=0))))

    x, y = classification_data(samples=9)

    def weights(strategy):
        with (strategy or tf.distribute.get_strategy()).scope():
            keras.utils.set_random_seed(3)
            model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])
            model.compile(keras.optimizers.SGD(0.1), hardest, jit_compile=False)
        model.train_on_batch(x, y)
        return model.get_weights()

    pairs = zip(weights(make_strategy(replicas)), weights(None), strict=True)
    assert max(np.max(np.abs(own - expected)) for own, expected in pairs) < 1e-6
