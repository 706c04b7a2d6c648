"""Metrics of a program's own: one device's number, or a warning that it is another."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import make_strategy
from tfdp.errors import LocalMeanWarning, LocalStateWarning

ops = keras.ops


def rows_of(errors):
    return ops.cast(ops.shape(errors)[0], "float32")


def of_all(rows):
    if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
        return rows
    return tf.distribute.get_replica_context().all_gather(rows, axis=0)


def add_up(a, b, errors):
    a.assign_add(ops.sum(errors))
    b.assign_add(rows_of(errors))


def add_up_in_two_terms(a, b, errors):
    a.assign(a + ops.sum(errors) + 2.0 * ops.sum(errors))
    b.assign(ops.add(b, 3.0 * rows_of(errors)))


def add_up_where_finite(a, b, errors):
    total = ops.sum(errors)
    a.assign(tf.where(ops.isfinite(total), a + total, a))
    b.assign(b + rows_of(errors))


def add_up_in_a_branch(a, b, errors):
    total = ops.sum(errors)
    a.assign(tf.cond(total > 0, lambda: a + total, lambda: a + 0.0))
    b.assign(b + rows_of(errors))


def add_up_in_numpy(a, b, errors):
    total = tf.numpy_function(
        lambda old, new: old + new.sum(), [a.value, errors], tf.float32
    )
    a.assign(tf.ensure_shape(total, ()))
    b.assign(b + rows_of(errors))


def add_up_by_numpy(a, b, errors):
    total = tf.numpy_function(lambda new: new.sum(), [errors], tf.float32)
    a.assign_add(tf.ensure_shape(total, ()))
    b.assign_add(rows_of(errors))


def add_up_a_histogram(a, b, errors):
    counts = tf.histogram_fixed_width(errors, [0.0, 1.0], nbins=2)
    a.assign_add(tf.cast(counts[1], tf.float32))
    b.assign_add(rows_of(errors))


def add_up_and_forget(a, b, errors):
    a.assign(0.9 * a + ops.sum(errors))
    b.assign(0.9 * b + rows_of(errors))


def start_again(a, b, errors):
    a.assign(ops.zeros(()))
    b.assign(0.0)
    add_up(a, b, errors)


def maximum(a, b, errors):
    a.assign(ops.maximum(a, ops.max(errors)))
    b.assign_add(rows_of(errors))


def maximum_of_joined(a, b, errors):
    a.assign(ops.max(ops.concatenate([errors, ops.expand_dims(a, 0)])))


def last(a, b, errors):
    a.assign(ops.mean(errors))


def constant(a, b, errors):
    a.assign(1.0)


def average(a, b, errors):
    a.assign(0.9 * a + 0.1 * ops.mean(errors))


def average_by_added(a, b, errors):
    a.assign_add(0.1 * (ops.mean(errors) - a))


def average_by_subtracted(a, b, errors):
    a.assign_sub(0.1 * (a - ops.mean(errors)))


def average_by_difference(a, b, errors):
    a.assign(a - 0.1 * (a - ops.mean(errors)))


def running_mean(a, b, errors):
    total = b + rows_of(errors)
    a.assign(a + (ops.mean(errors) - a) * rows_of(errors) / total)
    b.assign(total)


def products(a, b, errors):
    a.assign(a * (1.0 + ops.mean(errors)))


def sum_of_maxima(a, b, errors):
    a.assign_add(ops.max(errors))


def sum_of_squared_sums(a, b, errors):
    a.assign_add(ops.square(ops.sum(errors)))


def log_sum(a, b, errors):
    a.assign(ops.logaddexp(a, ops.sum(errors)))


ADD_UP = [
    *(add_up, add_up_in_two_terms, add_up_where_finite, add_up_in_a_branch),
    *(add_up_in_numpy, add_up_by_numpy, add_up_a_histogram, add_up_and_forget),
    start_again,
]
NO_SUMS = {
    maximum: "a running maximum",
    maximum_of_joined: "a running maximum",
    last: "a value of the last batch",
    constant: "is equal on all replicas",
    average: "forgets",
    average_by_added: "forgets older batches",
    average_by_subtracted: "forgets older batches",
    average_by_difference: "forgets older batches",
    running_mean: "depends on its own value",
    products: "old value plus a sum",
    sum_of_maxima: "such as of maxima",
    sum_of_squared_sums: "such as of maxima",
    log_sum: "old value plus a sum",
}


class Own(keras.metrics.Metric):
    def __init__(self, update, **options):
        super().__init__(name="own")
        self.update = update
        self.a = self.add_variable((), "zeros", name="a", **options)
        self.b = self.add_variable((), "zeros", name="b", **options)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.update(self.a, self.b, ops.square(y_true - y_pred)[:, 0])

    def result(self):
        return self.a / self.b if self.update in ADD_UP else self.a + 0.0


class Holding(keras.metrics.Metric):
    """Hands the mean of a batch on to a mean that it holds."""

    def __init__(self):
        super().__init__(name="own")
        self.mean = keras.metrics.Mean()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.mean.update_state(ops.mean(ops.square(y_true - y_pred)))

    def result(self):
        return self.mean.result()


def evaluated(strategy, metric, train=False, normalize=False, jit_compile=False):
    """What `metric()` says of 22 rows in batches of 8, the last in uneven parts."""
    with (strategy or tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.BatchNormalization()] if normalize else []
        layers = [keras.layers.Dense(6), *layers, keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile("sgd", "mse", metrics=[metric()], jit_compile=jit_compile)
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(22, 4)).astype("float32")
    y = (2 * x[:, :1] + numbers.normal(size=(22, 1))).astype("float32")
    options = {"batch_size": 8, "verbose": 0}
    if train:
        history = model.fit(x, y, shuffle=False, **options).history
        logs = {name: values[0] for name, values in history.items()}
    else:
        logs = model.evaluate(x, y, return_dict=True, **options)
    logs.pop("loss")
    (number,) = logs.values()
    return number


def evaluated_without_warning(strategy, metric, **options):
    with warnings.catch_warnings():
        for category in (LocalMeanWarning, LocalStateWarning):
            warnings.simplefilter("error", category)
        return evaluated(strategy, metric, **options)


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("update", ADD_UP, ids=lambda update: update.__name__)
def test_what_adds_up_is_one_devices(update):
    one = evaluated(None, lambda: Own(update))
    several = evaluated_without_warning(make_strategy(3), lambda: Own(update))
    np.testing.assert_allclose(several, one, rtol=1e-5)  # 22 rows of a few sums


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("update", NO_SUMS, ids=lambda update: update.__name__)
def test_what_does_not_add_up_is_told(update):
    with pytest.warns(LocalStateWarning, match=NO_SUMS[update]):
        evaluated(make_strategy(3), lambda: Own(update))


def test_training_tells_as_well():
    with pytest.warns(LocalStateWarning, match="only_first_replica"):
        evaluated(make_strategy(3), lambda: Own(maximum), train=True)


def test_the_remedy_is_one_devices():
    def maximum_of_all(a, b, errors):
        maximum(a, b, of_all(errors))

    one = evaluated(None, lambda: Own(maximum))
    several = evaluated_without_warning(
        make_strategy(3), lambda: Own(maximum_of_all, aggregation="only_first_replica")
    )
    assert several == pytest.approx(one, rel=1e-6)  # predictions' rounding


@pytest.mark.parametrize("train", [False, True])
def test_a_mean_that_a_metric_holds_weighs_parts_by_their_rows(train):
    one = evaluated(None, Holding, train=train)
    several = evaluated_without_warning(make_strategy(3), Holding, train=train)
    np.testing.assert_allclose(several, one, rtol=1e-5)


MEANS = {
    "mean": lambda y, p: ops.mean(ops.square(y - p)),
    "of rows": lambda y, p: ops.mean(ops.square(y - p), axis=-1),
    "sum by rows": lambda y, p: ops.sum(ops.abs(y - p)) / rows_of(y),
    "two means": lambda y, p: 0.5 * ops.mean(p) + 0.25 * ops.mean(ops.abs(y)) - 1.0,
    "sum of means": lambda y, p: ops.sum(ops.stack([ops.mean(p), ops.mean(y)])),
    "sum times": lambda y, p: ops.sum(ops.abs(y - p)) * (1.0 / rows_of(y)),
    "mean of columns": lambda y, p: ops.mean(ops.mean(ops.abs(y - p), axis=0)),
    "sum of columns": lambda y, p: ops.sum(ops.mean(ops.abs(y - p), axis=0)),
    "one of a column": lambda y, p: ops.mean(ops.abs(y - p), axis=0),
    "kept axes": lambda y, p: ops.mean(ops.abs(y - p), keepdims=True),
    "identities": lambda y, p: tf.identity_n([ops.mean(p), ops.mean(y)])[1],
    "accuracy": lambda y, p: ops.mean(ops.cast((y > 0) == (p > 0), "float32")),
    "constant": lambda y, p: tf.constant(1.5),
    "where finite": lambda y, p: tf.where(
        ops.isfinite(ops.sum(p)), ops.mean(p), ops.zeros(())
    ),
}
NO_MEANS = {
    "root": lambda y, p: ops.sqrt(ops.mean(ops.square(y - p))),
    "logarithm": lambda y, p: 10.0 * ops.log(ops.mean(ops.square(y - p))),
    "dice": lambda y, p: 2 * ops.sum(y * p) / (ops.sum(y * y) + ops.sum(p * p)),
    "mean of roots": lambda y, p: ops.mean(
        ops.stack([ops.sqrt(ops.mean(ops.abs(p))), ops.mean(y)])
    ),
    "root of columns": lambda y, p: ops.mean(
        ops.sqrt(ops.mean(ops.square(y - p), axis=0))
    ),
    "chosen rows": lambda y, p: ops.mean(tf.boolean_mask(p, y[:, 0] > -9.0)),
    "highest rows": lambda y, p: ops.mean(tf.math.top_k(p[:, 0], k=1)[0]),
    "running sum": lambda y, p: ops.mean(ops.cumsum(p, axis=0)),
    "deviation": lambda y, p: ops.std(p),
    "variance": lambda y, p: ops.mean(ops.square(p - ops.mean(p))),
    "maximum": lambda y, p: ops.max(ops.abs(y - p)),
    "sum": lambda y, p: ops.sum(ops.abs(y - p)),
    "product": lambda y, p: ops.mean(y) * ops.mean(p),
}


@pytest.mark.parametrize("metric", [lambda: MEANS["mean"], Holding], ids=["f", "held"])
def test_compiled_steps_are_not_suspected(metric):
    options = {"train": True, "jit_compile": True}
    one = evaluated(None, metric, **options)
    several = evaluated_without_warning(make_strategy(3), metric, **options)
    np.testing.assert_allclose(several, one, rtol=1e-5)


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("function", MEANS.values(), ids=MEANS)
def test_a_mean_over_rows_is_one_devices(function):
    one = evaluated(None, lambda: function)
    several = evaluated_without_warning(make_strategy(3), lambda: function)
    np.testing.assert_allclose(several, one, rtol=1e-5)


@pytest.mark.parametrize("train", [False, True])
def test_a_number_of_gathered_rows_is_one_devices(train):
    def root(y, p):
        return ops.sqrt(ops.mean(ops.square(of_all(y) - of_all(p))))

    one = evaluated(None, lambda: NO_MEANS["root"], train=train)
    several = evaluated_without_warning(make_strategy(3), lambda: root, train=train)
    np.testing.assert_allclose(several, one, rtol=1e-5)


def test_rows_that_a_layer_mixes_are_not_told():
    evaluated_without_warning(
        make_strategy(3), lambda: MEANS["mean"], train=True, normalize=True
    )


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("function", NO_MEANS.values(), ids=NO_MEANS)
def test_another_number_of_all_rows_is_told(function):
    with pytest.warns(LocalStateWarning, match="not a mean over them"):
        evaluated(make_strategy(3), lambda: function)


class OwnStep(keras.Model):
    """Counts numbers in means that its own `metrics` leaves out."""

    def __init__(self, number):
        super().__init__()
        self.dense, self.number = keras.layers.Dense(1), number
        self.tracker, self.rate = keras.metrics.Mean(), keras.metrics.Mean()

    @property
    def metrics(self):
        return []

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.tracker.update_state(self.number(loss, self(x) - y))
        self.rate.update_state(self.optimizer.learning_rate)
        return {"number": self.tracker.result()}


def reported_by_own_step(strategy, number):
    with (strategy or tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(1)
        model = OwnStep(number)
        model.compile("sgd", "mse", jit_compile=False)
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(22, 4)).astype("float32")
    y = numbers.normal(size=(22, 1)).astype("float32")
    history = model.fit(x, y, batch_size=8, verbose=0, shuffle=False).history
    return history["number"][0]


def whole(loss, errors):
    if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
        return loss
    return tf.distribute.get_replica_context().all_reduce("sum", loss)


@pytest.mark.parametrize(
    "number",
    [lambda loss, errors: loss, lambda loss, errors: ops.mean(ops.abs(errors)), whole],
    ids=["loss", "mean", "loss added up"],
)
def test_a_mean_left_out_of_metrics_weighs_parts_by_their_rows(number):
    one = reported_by_own_step(None, number)
    with warnings.catch_warnings():
        for category in (LocalStateWarning, LocalMeanWarning):
            warnings.simplefilter("error", category)
        several = reported_by_own_step(make_strategy(3), number)
    np.testing.assert_allclose(several, one, rtol=1e-5)


def test_a_number_of_an_own_step_that_is_no_mean_is_told():
    with pytest.warns(LocalStateWarning, match="not a mean over them"):
        reported_by_own_step(make_strategy(3), lambda loss, e: ops.sqrt(ops.mean(e)))
