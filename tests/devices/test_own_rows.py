"""`tfdp.losses.own_rows`: of values of all rows a replica counts those of its own."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import classification_data, largest_difference, make_strategy
from tests.support.replica_steps import replica_function
from tfdp import losses
from tfdp.errors import ConfigurationError, LocalMeanWarning
from tfdp.losses import all_rows, local_mean, own_rows

ops = keras.ops


def of_each_row(y, p):
    """Cross entropy of each row's likeness to all others of its class."""
    y, p = ops.reshape(all_rows(y), (-1, 1)), all_rows(p)
    z = p / ops.norm(p, axis=1, keepdims=True)
    alike = ops.matmul(z, ops.transpose(z)) / 0.2
    same = ops.cast(ops.equal(y, ops.transpose(y)), p.dtype)
    log = alike - ops.logsumexp(alike, axis=1, keepdims=True)
    return -ops.sum(same * log, axis=1) / ops.sum(same, axis=1)


def contrastive(y, p):
    return own_rows(of_each_row(y, p), p)


def rank_of_row(y, p):
    """How many of all rows lie nearer to the first number of all than this one."""
    first = all_rows(p)[:, 0]
    nearer = ops.cast(first[None] > first[:, None], "float32")
    return own_rows(ops.sum(nearer, axis=1), p)


def rank_in_batch(y, p):
    first = p[:, 0]
    return ops.sum(ops.cast(first[None] > first[:, None], "float32"), axis=1)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class OfFunction(keras.losses.Loss):
    def __init__(self, function, reduction):
        super().__init__("of_function", reduction)
        self.call = function


def trained(strategy, loss, samples, weighted=False, reduction=None, **options):
    x, y = classification_data(samples=samples)
    weights = np.linspace(0.5, 1.5, samples, dtype="float32") if weighted else None
    with (strategy or tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(3)
        layers = [keras.Input((12,)), keras.layers.Dense(7, "tanh")]
        model = keras.Sequential([*layers, keras.layers.Dense(5)])
        if reduction:
            loss = OfFunction(loss, reduction)
        rank = rank_in_batch if strategy is None else rank_of_row
        metrics = [
            keras.metrics.MeanMetricWrapper(rank, name="rank"),
            keras.metrics.MeanMetricWrapper(contrastive, name="loss_again"),
        ]
        options = {"jit_compile": False, **options}
        # A sum of 12 rows moves weights by 12 times as much as their mean.
        rate = 0.1 if reduction is None else 0.01
        weighted_metrics = metrics if weighted else None
        model.compile(
            keras.optimizers.SGD(rate),
            loss,
            metrics=None if weighted else metrics,
            weighted_metrics=weighted_metrics,
            **options,
        )
    fit_options = {"batch_size": 12, "shuffle": False, "verbose": 0}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rows")
        return model, model.fit(x, y, sample_weight=weights, **fit_options).history


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("reduction", [None, "sum"])
@pytest.mark.parametrize("samples", [48, 41, 37], ids=lambda n: f"{n} rows")
@pytest.mark.parametrize(
    "replicas, options",
    [
        (2, {}),
        (3, {}),
        (3, {"engine": "tensorflow"}),
        (3, {"shard": "parameters"}),
    ],
    ids=["2", "3", "3-tensorflow", "3-parameters"],
)
def test_a_loss_of_each_row_is_one_devices(
    replicas, options, samples, reduction, weighted
):
    """Of 37 rows in batches of 12 one is left: replicas have none."""
    given = (contrastive, samples, weighted, reduction)
    one, expected = trained(None, *given)
    several, found = trained(make_strategy(replicas, **options), *given)
    # 4 updates of 0.1 times gradients of a few units, whose terms are up to 1 / 0.2.
    assert largest_difference(one, several) < 2e-6
    assert set(found) == {"loss", "rank", "loss_again"}
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "model_class, reduction",
    [(keras.Sequential, "sum"), (keras.Sequential, None), (OwnStep, "sum")],
)
def test_a_sum_over_all_rows_is_told_of(model_class, reduction):
    """It counts once for each replica."""

    def trained(loss):
        with make_strategy(2).scope():
            model = model_class([keras.Input((12,)), keras.layers.Dense(5)])
            model.compile("sgd", OfFunction(loss, reduction), jit_compile=False)
        model.fit(*classification_data(samples=24), batch_size=12, verbose=0)

    with pytest.warns(LocalMeanWarning, match="once for each replica.*own_rows"):
        trained(of_each_row)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        trained(contrastive)
        trained(keras.losses.sparse_categorical_crossentropy)


@pytest.mark.parametrize(
    "options", [{"steps_per_execution": 2}, {"run_eagerly": True}], ids=str
)
def test_however_keras_runs_the_step(options):
    one, expected = trained(None, contrastive, 48, **options)
    several, found = trained(make_strategy(3), contrastive, 48, **options)
    assert largest_difference(one, several) < 2e-6
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("parts", [(5, 6), (4, 8)], ids=["5, 1, 5", "4, 4, 4"])
def test_each_replica_gets_its_own_back(parts, eager):
    x = np.arange(24, dtype="float32").reshape(12, 2)[: parts[1] + 4]

    def step(rows):
        joined = all_rows({"x": rows, "number": tf.cast(rows[:, 0], tf.int64)})
        found = own_rows(joined, rows)
        return found["x"], found["number"]

    split = np.split(x, parts)
    results = replica_function(make_strategy(3), step, eager)(split)
    for (rows, numbers), expected in zip(results, split, strict=True):
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(numbers, expected[:, 0])


def test_outside_of_replicas_they_are_those_there_are():
    x = tf.constant([[1.0], [2.0]])
    assert own_rows(x, x) is x
    with make_strategy(2).scope():
        assert own_rows(x, x) is x
    with make_strategy(1).scope():
        assert own_rows(x, x) is x


@pytest.mark.parametrize("values, like", [(2, 3), (3, 2)])
def test_other_numbers_of_rows_are_refused(values, like):
    with pytest.raises(ConfigurationError, match=f"{like}. Received: {values}"):
        own_rows(tf.zeros(values), tf.zeros(like))


@pytest.mark.parametrize("rows", [11, 13])
def test_other_numbers_of_rows_end_a_step(rows):
    run = replica_function(
        make_strategy(3), lambda part: own_rows(tf.zeros(rows) + part[0], part), False
    )
    # Behind the cut values are missing, or left.
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="split"):
        run([np.zeros(size, "float32") for size in (5, 1, 6)])


@pytest.mark.parametrize(
    "values, like",
    [
        (tf.constant(1.0), tf.zeros(2)),
        (tf.zeros(2), tf.constant(1.0)),
        (tf.zeros(2), None),
        (tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.zeros(2)),
    ],
    ids=["number", "like a number", "like nothing", "ragged"],
)
def test_what_has_no_rows_is_refused(values, like):
    with pytest.raises(ConfigurationError, match="a row for each sample"):
        own_rows(values, like)


@pytest.mark.parametrize("takes_own", [False, True], ids=["all", "own"])
def test_a_step_of_ones_own_may_take_its_mean(takes_own):
    """Gradients that come back from a gather are those of a share."""

    class ByHand(OwnStep):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                p = self(x, training=True)
                losses = contrastive(y, p) if takes_own else of_each_row(y, p)
                loss = local_mean(tf.reduce_mean(losses))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    def of(strategy):
        with (strategy or tf.distribute.get_strategy()).scope():
            keras.utils.set_random_seed(3)
            model = ByHand([keras.Input((12,)), keras.layers.Dense(5)])
            model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
        x, y = classification_data(samples=41)
        with warnings.catch_warnings():
            warnings.simplefilter("error", LocalMeanWarning)
            model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
        return model

    assert largest_difference(of(None), of(make_strategy(3))) < 2e-6


@pytest.mark.parametrize("takes_own", [False, True], ids=["all", "own"])
def test_a_mean_that_compute_loss_takes_of_them_is_asked_about(takes_own):
    class Own(keras.Sequential):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            losses = of_each_row(y, y_pred)
            return tf.reduce_mean(own_rows(losses, y_pred) if takes_own else losses)

    with make_strategy(2).scope():
        model = Own([keras.Input((12,)), keras.layers.Dense(5)])
        model.compile("sgd", jit_compile=False)
    words = "a mean over the replica's rows|from the rows of all replicas"
    with pytest.warns(LocalMeanWarning, match=words):
        model.fit(*classification_data(samples=24), batch_size=12, verbose=0)


def test_an_eager_replica_without_rows_takes_the_borrowed_one():
    """Eager replicas gather it as well, as docs/exceptions.md says."""
    trained(make_strategy(3), contrastive, 37, run_eagerly=True)


def test_on_a_tpu_the_part_is_one_that_xla_compiles():
    """Not run on a TPU."""
    compiled = tf.function(losses._static_rows, jit_compile=True)
    x = tf.reshape(tf.range(24.0), (12, 2))
    np.testing.assert_array_equal(compiled(x, tf.constant(8), 4), x[8:])
    np.testing.assert_array_equal(compiled(x[:, 0], tf.constant(4), 4), x[4:8, 0])


def test_a_compiled_replica_refuses_it():
    def of_all(y, p):
        return own_rows(p[:, 0], p)

    with pytest.raises(ConfigurationError, match="jit_compile=False"):
        trained(make_strategy(2), of_all, 24, jit_compile=True)


@pytest.mark.parametrize("takes_own", [False, True], ids=["counted here", "own"])
def test_labels_that_number_a_replicas_rows_are_told(takes_own):
    """They begin at 0 on each replica, and the gathered rows at that of the first."""

    class Pairs(keras.Sequential):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            whole = all_rows(y_pred)
            labels = tf.range(tf.shape(y_pred)[0])
            if takes_own:
                labels = own_rows(tf.range(tf.shape(whole)[0]), y_pred)
            logits = tf.matmul(y_pred, whole, transpose_b=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            return local_mean(tf.reduce_mean(losses))

    with make_strategy(2).scope():
        model = Pairs([keras.Input((12,)), keras.layers.Dense(5)])
        model.compile("sgd", jit_compile=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", LocalMeanWarning)
        model.fit(*classification_data(samples=24), batch_size=12, verbose=0)
    messages = [str(one.message) for one in told if one.category is LocalMeanWarning]
    assert len(messages) == (0 if takes_own else 1), messages
    for name in () if takes_own else ("all_rows", "own_rows", "on_all_rows(model)"):
        assert name in messages[0]
